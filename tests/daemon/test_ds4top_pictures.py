"""ds4top as it looks: the pictures of docs/ds4top are what the code draws today.

`DS4TOP_PICTURES=write pytest tests/daemon/test_ds4top_pictures.py` draws them anew; look at them
(`rsvg-convert FILE -o FILE.png`) before they are committed.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from ds4d import wire
from ds4d_tui.app import Ds4Top
from tests.daemon import ds4top_daemon as daemon
from tests.daemon.ds4top_screen import VERSION, Still, svg, words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FOLDER = Path(__file__).parents[2] / "docs/ds4top"


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The log shows local times."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def short_of_memory(t: float) -> wire.Update:
    """Degraded: two reasons, and figures that say why."""
    update = daemon.busy(t, 9)
    reasons = [
        wire.Reason(
            code="swap",
            text="12.0 MiB of this process are in swap, so answers can stall",
            remedy="stop what else needs memory on this host, or lower lanes.max",
        ),
        wire.Reason(
            code="prompt_texts",
            text="the release's prompt texts are missing: those of ds4-tiny are used",
            remedy="ds4d model install",
        ),
    ]
    memory = daemon.memory(swap=12 << 20, psi_some=14.2, free_to_promise=900 << 20)
    status = msgspec.structs.replace(
        update.status, state="degraded", reasons=reasons, memory=memory
    )
    return msgspec.structs.replace(update, status=status)


PICTURES: dict[str, tuple[tuple[int, int], Callable[[float], wire.Update], str, list[str]]] = {
    "load-80x24": ((80, 24), daemon.busy, "ds4-night", []),
    "idle-80x24": ((80, 24), daemon.quiet, "ds4-night", []),
    "drain-80x24": ((80, 24), daemon.busy, "ds4-night", ["d"]),
    "load-160x50": ((160, 50), daemon.busy, "ds4-night", []),
    "idle-160x50": ((160, 50), daemon.quiet, "ds4-night", []),
    "degraded-120x36": ((120, 36), short_of_memory, "ds4-day", []),
}


@pytest.mark.parametrize("name", PICTURES)
async def test_the_screen_looks_as_in_the_docs(name: str) -> None:
    size, scene, theme, keys = PICTURES[name]
    app = Ds4Top(Still(scene, 150.0), theme=theme)
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        await pilot.press(*keys)
        await pilot.pause()
        drawn = svg(app)
    path = FOLDER / f"{name}.svg"
    if os.environ.get("DS4TOP_PICTURES") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(drawn, "utf-8")
    expected = path.read_text("utf-8")
    assert words(drawn) == words(expected)
    if VERSION in expected:  # another Textual may mix colours otherwise
        assert drawn == expected
