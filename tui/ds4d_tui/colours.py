"""What each colour means, and the themes. All are names of theme colours, so every theme has them.

Colour never says a thing alone: a mark, a word or a number says it too.
"""

from __future__ import annotations

from textual.theme import Theme

STATES = {
    "ready": "$success",
    "degraded": "$warning",
    "failed": "$error",
    "draining": "$secondary",
    "drained": "$secondary",
    "stopping": "$secondary",
    "reloading": "$accent",
    "loading": "$accent",
    "starting": "$accent",
}
PHASES = {
    "decode": "$success",
    "prefill": "$primary",
    "queued": "$warning",
    "paused": "$accent",
    "idle": "$foreground 65%",
}
LEVELS = {
    "debug": ("$foreground 45%", " "),
    "info": ("$foreground 65%", " "),
    "warning": ("$warning", "▲"),
    "error": ("$error", "✖"),
}
PARTS = ("$primary", "$accent", "$secondary", "$success", "$warning", "$primary-darken-2")

NIGHT = Theme(
    name="ds4-night",
    primary="#5aa5f0",
    secondary="#a48ef2",
    accent="#3fc3bb",
    success="#7dc76f",
    warning="#e6b455",
    error="#ef6b73",
    foreground="#cdd6e0",
    background="#10151c",
    surface="#151b24",
    panel="#27313d",
)
DAY = Theme(
    name="ds4-day",
    primary="#1769b5",
    secondary="#6b4cc2",
    accent="#0b7f7c",
    success="#2f7d32",
    warning="#9a6200",
    error="#b4232c",
    foreground="#22303d",
    background="#fafbfc",
    surface="#f0f3f6",
    panel="#d3dae1",
    dark=False,
)
THEMES = (
    "ds4-night",
    "ds4-day",
    "nord",
    "gruvbox",
    "tokyo-night",
    "catppuccin-mocha",
    "solarized-light",
    "ansi-dark",  # the terminal's own sixteen
)
