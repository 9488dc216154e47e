"""Who may import whom, read from the sources with `ast` (design.md, "Where things live").

Imports for type checkers and those inside functions count too: an arrow is an arrow.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import ds4d
import ds4d_tui

PACKAGES = (Path(ds4d.__file__).parent, Path(ds4d_tui.__file__).parent)
DEVICES = ("numba", "llvmlite", "cuda", "numba_cuda", "cupy", "ds4d.cpu", "ds4d.gpu")
LOOPS = ("anyio", "asyncio", "aiohttp", "threading", "queue")
PURE = (*DEVICES, *LOOPS, "socket", "time")
POLICY = ("ds4d.sched", "ds4d.kv", "ds4d.api", "ds4d.prompt", "ds4d.config")


@dataclass(frozen=True)
class Rule:
    who: str  # a module or package
    never: tuple[str, ...]
    but: tuple[str, ...] = ()  # modules of `who` that may
    except_for: tuple[str, ...] = ()  # targets that are allowed after all


RULES = (
    # The loop around the scheduler is the runner with its thread, and tickets are awaited.
    Rule("ds4d.sched", PURE, but=("ds4d.sched.runner", "ds4d.sched.thread", "ds4d.sched.ticket")),
    Rule("ds4d.sched", ("ds4d.api", "ds4d.prompt", "ds4d.model", "ds4d.config")),
    Rule("ds4d.kv", (*PURE, "ds4d.engine", "ds4d.sched"), but=("ds4d.kv.spill",)),
    Rule("ds4d.speculation", (*PURE, "ds4d.sched", "ds4d.kv", "ds4d.api", "ds4d.prompt")),
    Rule("ds4d.prompt", (*PURE, "ds4d.sched", "ds4d.kv", "ds4d.api", "ds4d.engine", "ds4d.model")),
    Rule("ds4d.model", (*LOOPS, *POLICY, "ds4d.gpu", "cuda")),
    Rule(
        "ds4d.api",
        ("ds4d.engine", "ds4d.kv", "ds4d.model", "ds4d.sched", *DEVICES),
        except_for=("ds4d.sched.runner", "ds4d.sched.ticket"),
    ),
    Rule("ds4d.cpu", (*POLICY, "anyio", "asyncio", "aiohttp", "ds4d.gpu")),
    Rule("ds4d.gpu", (*POLICY, "anyio", "asyncio", "aiohttp", "ds4d.cpu")),
    Rule("ds4d.cpu", ("ds4d.speculation",), except_for=("ds4d.speculation.accept",)),
    Rule("ds4d.gpu", ("ds4d.speculation",), except_for=("ds4d.speculation.accept",)),
    Rule("ds4d", ("ds4d.daemon",), but=("ds4d.cli",)),
    Rule("ds4d", ("textual", "torch", "transformers", "gguf", "ds4d_tui")),
    Rule("ds4d.config", ("ds4d",), except_for=("ds4d.config", "ds4d.errors")),
    # Clients of the control socket know its records and nothing of the daemon behind it.
    Rule("ds4d.wire", ("ds4d",), except_for=("ds4d.sched.snapshot",)),
    Rule("ds4d.sched.snapshot", ("ds4d", "numpy", "msgspec")),
    Rule(
        "ds4d.ctl",
        (*DEVICES, *LOOPS, "ds4d.sched", "ds4d.api", "ds4d.engine", "ds4d.service"),
        except_for=("ds4d.sched.snapshot",),
    ),
    Rule("ds4d_tui", ("ds4d",), except_for=("ds4d.wire",)),
    Rule(
        "ds4d.control",
        ("ds4d.engine", "ds4d.kv", "ds4d.model", "ds4d.prompt", "ds4d.api", "ds4d.sched", *DEVICES),
        except_for=("ds4d.sched.runner", "ds4d.sched.snapshot", "ds4d.sched.ticket"),
    ),
    Rule("ds4d.engine", ("ds4d",), except_for=("ds4d.model.geometry",)),
    Rule("ds4d.model.geometry", ("ds4d", "numpy")),
    Rule("ds4d.errors", ("ds4d",)),
    Rule("ds4d.events", ("ds4d",)),
)


def modules() -> dict[str, Path]:
    found = {}
    for package in PACKAGES:
        for path in sorted(package.rglob("*.py")):
            parts = path.relative_to(package.parent).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(source: str) -> set[str]:
    """Every module that `source` names: `from a.b import c` is a.b, and a.b.c if that is one."""
    named: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            named.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level or node.module is None:
                raise AssertionError("a relative import; ours are absolute")
            inner = {f"{node.module}.{alias.name}" for alias in node.names} & MODULES.keys()
            named |= inner or {node.module}
    return named


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def broken(rule: Rule, module: str, named: set[str]) -> set[str]:
    """What `module` imports against `rule`."""
    if not within(module, rule.who) or any(within(module, free) for free in rule.but):
        return set()
    return {
        target
        for target in named
        if any(within(target, package) for package in rule.never)
        and not any(within(target, fine) for fine in rule.except_for)
    }


@pytest.mark.parametrize("module", MODULES)
def test_no_module_knows_what_it_must_not(module: str) -> None:
    named = imports(MODULES[module].read_text("utf-8"))
    for rule in RULES:
        wrong = broken(rule, module, named)
        assert not wrong, f"{module} imports {', '.join(sorted(wrong))}; {rule}"


def test_only_the_configuration_reads_the_environment() -> None:
    readers = {
        module
        for module, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv")
    }
    # The dashboard, a client like any other, looks for the user's socket by itself.
    assert not [m for m in readers if not (within(m, "ds4d.config") or within(m, "ds4d_tui"))]


def test_no_task_is_without_a_parent() -> None:
    loose = {
        module
        for module, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in ("create_task", "ensure_future")
    }
    assert loose == set()


def test_every_rule_speaks_of_modules_that_can_exist() -> None:
    """A rule with a misspelt name would hold for ever."""
    planned = {"ds4d.gpu", "ds4d.kv.spill", "ds4d.daemon"}
    known = planned | MODULES.keys()
    outside = set(sys.stdlib_module_names) | {
        *("numba", "llvmlite", "cuda", "numba_cuda", "cupy", "anyio", "aiohttp", "numpy"),
        *("textual", "torch", "transformers", "gguf", "msgspec"),
    }
    for rule in RULES:
        names = {rule.who, *rule.but, *rule.except_for, *rule.never}
        assert names <= known | outside


@pytest.mark.parametrize(
    ("module", "source", "wrong"),
    [
        ("ds4d.sched.scheduler", "import time", {"time"}),
        ("ds4d.sched.runner", "import time, anyio", set()),
        ("ds4d.kv.pages", "def f():\n    from ds4d.engine import Engine", {"ds4d.engine"}),
        ("ds4d.api.chat", "from ds4d.sched import scheduler", {"ds4d.sched.scheduler"}),
        ("ds4d.api.chat", "from ds4d.sched.ticket import Claim", set()),
        ("ds4d.cpu.engine", "from ds4d.speculation import accept", set()),
        ("ds4d.prompt.render", "import numba.typed", {"numba.typed"}),
        ("ds4d.model.gguf", "import ds4d.daemon", {"ds4d.daemon"}),
    ],
)
def test_a_forbidden_arrow_is_found_wherever_it_hides(
    module: str, source: str, wrong: set[str]
) -> None:
    named = imports(source)
    assert set().union(*(broken(rule, module, named) for rule in RULES)) == wrong
