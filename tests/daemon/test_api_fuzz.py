"""A few hundred of the bodies that `ops/scripts/fuzz-requests` sends by the ten thousand."""

from __future__ import annotations

import random
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

from tests.daemon.script_runner import open_door


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def script():
    path = Path(__file__).parents[2] / "ops" / "scripts" / "fuzz-requests"
    loader = SourceFileLoader("fuzz_requests", str(path))
    module = module_from_spec(spec_from_loader(loader.name, loader))
    sys.modules[loader.name] = module
    loader.exec_module(module)
    return module


async def test_damaged_bodies_are_all_answered_and_none_with_5xx(script, caplog):
    async with open_door() as door:
        result = await script.fuzz(door.url, random.Random(1), 400)
    assert result.bad == []
    assert result.statuses["200"] > 40
    assert result.statuses["400"] > 100
    assert sum(result.statuses.values()) == 401
    assert not [r for r in caplog.records if r.exc_info or "request.error" in r.getMessage()]
