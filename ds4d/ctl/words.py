"""Numbers and foreign texts as a person reads them."""

from __future__ import annotations

import time

_SIZES = ("B", "KiB", "MiB", "GiB", "TiB")
_SPANS = ((86_400, "d"), (3600, "h"), (60, "min"))


def size(n_bytes: int) -> str:
    """`1.2 GiB`; three digits that count."""
    value, unit = float(abs(n_bytes)), 0
    while round(value, 1) >= 1000 and unit < len(_SIZES) - 1:
        value, unit = value / 1024, unit + 1
    digits = 0 if unit == 0 or round(value, 1) >= 100 else 1
    return f"{'-' if n_bytes < 0 else ''}{value:.{digits}f} {_SIZES[unit]}"


def span(seconds: float) -> str:
    """`3 h 12 min`; the two units that count, tenths below 10 s."""
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f} s"
    whole = round(seconds)
    for i, (length, unit) in enumerate(_SPANS):
        if whole >= length:
            many, rest = divmod(whole, length)
            less, name = _SPANS[i + 1] if i + 1 < len(_SPANS) else (1, "s")
            return f"{many} {unit} {rest // less} {name}" if rest // less else f"{many} {unit}"
    return f"{whole} s"


def many(n: int) -> str:
    """`12,345`; `1.25 M` from a million on."""
    return f"{n:,}" if n < 1_000_000 else f"{n / 1e6:,.2f} M"


def brief(n: int) -> str:
    """The same for a column: `8.35k`, `131k`, `1.05M`."""
    value, unit = float(n), ""
    for larger in ("k", "M"):
        if round(value) >= 1000:
            value, unit = value / 1000, larger
    if not unit:
        return str(n)
    return f"{value:.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f}{unit}"


def clock(at: float) -> str:
    """A time in seconds since 1970 as this machine's own."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def plain(text: str) -> str:
    """`text` without what could move the cursor or colour the terminal; lines stay lines."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text.expandtabs())
