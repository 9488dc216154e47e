"""ds4-tiny, the model that is served when none is configured: where its file lies."""

from __future__ import annotations

from pathlib import Path

from ds4d.errors import ModelFileError

_FILE = Path(__file__).parent.parent / "data" / "ds4-tiny.gguf"


def path() -> Path:
    """The embedded model's file. Raises ModelFileError where the package came without it."""
    if not _FILE.is_file():
        raise ModelFileError(
            f"{_FILE}: the embedded model is missing from this installation; install ds4d again, "
            "or name a model file with --model"
        )
    return _FILE
