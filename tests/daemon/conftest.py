"""Real loops and sockets: on asyncio, since aiohttp needs it; a call that blocks the loop fails."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from blockbuster import BlockBuster, blockbuster_ctx

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def blockbuster() -> Iterator[BlockBuster]:
    with blockbuster_ctx("ds4d") as guard:  # calls that our code makes, not the test's own
        for function in guard.functions.values():  # one small file, before the door opens
            function.can_block_in("ds4d/api/guard.py", "read_keys")
        yield guard
