"""ds4d: serves DeepSeek-V4-Flash from one GPU to coding agents."""

__version__ = "0.1.0"
