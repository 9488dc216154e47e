"""Answers of the daemon as text for a person: what is, why, and what to do about it.

At most `WIDTH` columns, but for what one copies whole: paths, addresses, settings. A function here
takes a record of `ds4d.wire` and returns text, whose colours its printer may take out; none prints,
asks, or reads a clock.
"""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING

from ds4d import __version__, wire
from ds4d.ctl.words import brief, clock, many, plain, size, span

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from ds4d.sched.snapshot import Lanes, Pages, Queue, Session, Totals

WIDTH = 80

_LABEL = 9  # columns, the colon included
_STALE_S = 5.0  # a call of the engine that moves less often is worth a line
_LAG_S = 0.25  # so is an event loop that wakes later
_GREEN, _YELLOW, _RED, _RESET = "\033[1;32m", "\033[1;33m", "\033[1;31m", "\033[0m"
_COLOUR = {"ready": _GREEN, "failed": _RED}  # of a state; the others want a look: yellow
_UNIT = re.compile(r"(?<=\d) (?=(?:[KMGT]iB|B|s|min|h|d|M|%)\b|%)")  # not to be torn off
_NBSP = "\N{NO-BREAK SPACE}"


# -- status ----------------------------------------------------------------------------------------


def status(status: wire.Status) -> str:
    paint = _COLOUR.get(status.state, _YELLOW)
    head = f"{paint}●{_RESET} ds4d is {paint}{status.state}{_RESET}{_headline(status)}"
    return "\n".join([head, *_rows(_status_rows(status))])


def _headline(status: wire.Status) -> str:
    """What follows the state: how far, or for how long."""
    if status.loading is not None:
        what, percent = plain(status.loading.what), int(100 * status.loading.fraction)
        return f": {what}, {percent} % of all loading, for {span(status.loading.since_s)}"
    if status.drain is not None:
        return f", at most {span(status.drain.left_s)} more"
    return f", up {span(status.uptime_s)}"


def _status_rows(status: wire.Status) -> Iterator[tuple[str, Sequence[str]]]:
    for reason in status.reasons:
        if reason.code == "loading" and status.loading is not None:
            continue  # the headline says it
        yield "Why", [reason.text]
        if reason.remedy:
            yield "To do", [reason.remedy]
    if status.drain is not None and not status.reasons:
        yield (
            "Why",
            [f"{status.drain.n_running} running, {status.drain.n_queued} queued may finish"],
        )
    if status.model is not None:
        yield "Model", _model(status.model)
    if status.lanes is not None:
        yield "Lanes", [_lanes(status.lanes)]
    if status.queue is not None:
        yield "Queue", [_queue(status.queue)]
    if status.rates is not None:
        prefill, decode = status.rates.prefill_tokens_per_s, status.rates.decode_tokens_per_s
        yield "Rates", [f"prefill {prefill:,.0f}, decode {decode:,.1f} tokens/s (mean of 10 s)"]
    if status.pages is not None:
        yield "Pages", [_pages(status.pages)]
    if status.totals is not None:
        yield "Totals", [_totals(status.totals)]
    if status.memory is not None:
        yield "Memory", list(_memory(status.memory))
    if slow := list(_slowness(status)):
        yield "Slow", slow
    if status.urls:
        yield "API", status.urls
    yield "Config", _config(status)
    if status.reload is not None:
        how = "" if status.reload.ok else "refused: "
        lines = f"{clock(status.reload.at)} {how}{status.reload.text}".splitlines()
        yield "Reload", lines
    yield "Process", _process(status)


def _model(model: wire.Model) -> list[str]:
    embedded = " (embedded)" if model.embedded else ""
    return [
        f"{model.name}{embedded}, {size(model.bytes)}, context {model.context:,} tokens",
        model.file,
        f"prompt profile {model.prompt_profile}, prompt texts of {model.prompt_texts}",
        f"fingerprints: {model.system_fingerprint} in answers, {model.row_fingerprint} of KV rows",
    ]


def _lanes(lanes: Lanes) -> str:
    text = f"{lanes.n_busy} of {lanes.n_max} busy"
    if lanes.n_busy > lanes.n_max:
        text = f"{lanes.n_busy} busy, {lanes.n_max} may be used once requests have ended"
    if lanes.n_max < lanes.n:
        idle = lanes.n - lanes.n_max
        text += f"; {idle} more stay idle (lanes.max or `ds4ctl lanes set`)"
    return text


def _queue(queue: Queue) -> str:
    if not queue.n:
        return f"empty, room for {queue.n_max}"
    why = [f"{queue.n_lane} for a lane"] if queue.n_lane else []
    why += [f"{queue.n_memory} for memory"] if queue.n_memory else []
    reasons = f" ({', '.join(why)})" if why else ""
    return (
        f"{queue.n} of {queue.n_max} wait{reasons}, the oldest for {span(queue.oldest_s)}; one "
        f"more would wait about {span(queue.wait_s)}"
    )


def _pages(pages: Pages) -> str:
    return (
        f"{pages.n_free:,} of {pages.n:,} free ({pages.tokens} tokens each), {pages.n_promised:,} "
        f"promised to running requests; {pages.frontiers_free} of {pages.frontiers} frontiers free"
    )


def _totals(totals: Totals) -> str:
    cached = 100 * totals.cached / totals.prompt if totals.prompt else 0
    share = f", {cached:.0f} % of them cached" if totals.prompt else ""
    plural = "" if totals.requests == 1 else "s"
    return (
        f"{many(totals.requests)} request{plural}; {many(totals.prompt)} prompt tokens{share}; "
        f"{many(totals.generated)} generated"
    )


def _memory(memory: wire.Memory) -> Iterator[str]:
    parts = sorted(memory.parts.items(), key=lambda part: -part[1])
    listed = ", ".join(f"{name} {size(n)}" for name, n in parts)
    given = size(sum(memory.parts.values()))
    yield f"ds4d: {given} of a budget of {size(memory.budget)}" + (f": {listed}" if listed else "")
    yield (
        f"host: {size(memory.available)} available, {size(memory.uncommitted)} of it promised to "
        f"ds4d but untouched"
    )
    if memory.cgroup_headroom is not None:
        yield f"cgroup: {size(memory.cgroup_headroom)} below its limit"
    if memory.simulated is not None:
        yield f"simulated: {size(memory.simulated)} left of memory.simulate_total_gib"
    free = max(memory.free_to_promise, 0)
    yield (
        f"free to promise: {size(free)}, of which {size(memory.reserve)} stay for others "
        "(memory.reserve_mib)"
    )
    swapped = size(memory.swap) if memory.swap else "nothing"
    yield f"process: {size(memory.resident)} resident, {swapped} swapped"
    if memory.psi_some is not None:
        yield f"pressure: something waited for memory {memory.psi_some:.1f} % of the last 10 s"


def _slowness(status: wire.Status) -> Iterator[str]:
    if status.heartbeat_age_s is not None and status.heartbeat_age_s > _STALE_S:
        yield f"the engine has not moved for {span(status.heartbeat_age_s)}"
    if status.loop_lag_s > _LAG_S:
        yield f"the event loop woke {span(status.loop_lag_s)} late"


def _config(status: wire.Status) -> list[str]:
    files = status.config_files or ["no file, built-in values (`ds4d config init` writes one)"]
    return [*files, f"hash {status.config_hash}, profile {status.profile}"]


def _process(status: wire.Status) -> list[str]:
    lines = [f"{status.pid}, ds4d {status.version}, boot {status.boot}"]
    if status.loading is not None or status.drain is not None:
        lines[0] += f", up {span(status.uptime_s)}"
    if status.version != __version__:
        lines.append(f"ds4d {__version__} is installed: restart the daemon to run it")
    return lines


# -- other answers ---------------------------------------------------------------------------------


def pong(pong: wire.Pong) -> str:
    return f"ds4d answers, up {span(pong.uptime_s)}"


def done(done: wire.Done) -> str:
    return plain(done.text) or "done"


def begun(op: wire.Op) -> str:
    return f"{op.kind} has begun, `ds4ctl status` shows it"


def lanes(lanes: Lanes) -> str:
    text = f"{lanes.n_max} of {lanes.n} lanes may be used, {lanes.n_busy} are busy"
    if lanes.n_busy > lanes.n_max:
        text += ": the lower number holds once their requests have ended"
    return text


def log_level(level: wire.LogLevel) -> str:
    return f"{level.logger} logs from {level.level} on (was {level.previous})"


def sessions(sessions: wire.Sessions) -> str:
    if not sessions.sessions:
        return "no sessions"
    head = "ID PHASE LANE TOKENS PROMPT CACHED ANSWER TOK/S SINCE LEFT REQUEST".split()
    length = _enough({one.request for one in sessions.sessions})
    text = _table(head, [_session(one, length) for one in sessions.sessions], {1, 10}, gap=" ")
    if sessions.n_sessions > len(sessions.sessions):
        text += f"\n{len(sessions.sessions)} of {sessions.n_sessions}, those at work first"
    return text


def _enough(ids: Collection[str]) -> int:
    """How many characters tell requests apart, and are enough to cancel one."""
    length = wire.REQUEST_MIN
    while len({id[:length] for id in ids}) < len(ids):
        length += 1
    return length


def _session(one: Session, id_length: int) -> list[str]:
    busy = one.phase != "idle"
    phase = f"for {one.waits_for}" if one.waits_for else one.phase
    rate = one.tokens_per_s
    return [
        "-" if one.id is None else str(one.id),
        phase,
        "-" if one.lane is None else str(one.lane),
        brief(one.n_tokens),
        brief(one.n_prompt),
        brief(one.n_cached),
        brief(one.n_generated),
        "-" if rate is None else f"{rate:.0f}" if rate >= 99.95 else f"{rate:.1f}",
        _coarse(one.age_s if busy else one.idle_s),
        "-" if one.remaining_s is None else _coarse(one.remaining_s),
        plain(one.request[:id_length]),
    ]


def _coarse(seconds: float) -> str:
    """The larger unit alone, in one word."""
    return "".join(span(seconds).split()[:2])


def reloaded(answer: wire.Reloaded) -> str:
    if not answer.applied and not answer.restart_required:
        return "nothing has changed"
    now = [change for change in answer.applied if change.when == "now"]
    later = [change for change in answer.applied if change.when != "now"]
    if answer.dry_run:
        heads = "would apply at once", "would apply from the next request on", "needs a restart"
    else:
        heads = "applied", "applies from the next request on", "waits for a restart"
    lines: list[str] = []
    for head, changes in zip(heads, (now, later, answer.restart_required), strict=True):
        if changes:
            lines.append(f"{head}:")
            lines += (f"  {plain(f'{c.key}: {c.old} -> {c.new}')}" for c in changes)
    if answer.dry_run and answer.restart_required and answer.applied:
        lines.append("a reload applies all or nothing: --allow-partial leaves out the last ones")
    return "\n".join(lines)


def checked(checked: wire.Checked) -> str:
    return "\n".join(problem(p) for p in checked.problems) or "no problems"


def problem(problem: wire.Problem) -> str:
    return plain(": ".join(p for p in (problem.where, problem.key, problem.message) if p))


def bench(rows: Sequence[wire.BenchRow]) -> str:
    """A row a run; of several the median stands below."""
    import statistics  # late: slow to import, and only this wants it

    head = ["RUN", "LANES", "DEPTH", "PROMPT", "ANSWER", "PREFILL", "DECODE", "FIRST", "TOTAL"]
    unit = ["", "", "tokens", "tokens", "tokens", "tokens/s", "tokens/s", "ms", "s"]
    lines = [unit, *([*_bench_setting(str(r.run), r), *_bench_figures(r)] for r in rows)]
    if len(rows) > 1:
        middle = (
            f"{statistics.median(values):,.{digits}f}"
            for values, digits in zip(
                zip(*(_bench_values(r) for r in rows), strict=True), _BENCH_DIGITS, strict=True
            )
        )
        lines.append([*_bench_setting("median", rows[0]), *middle])
    return _table(head, lines)


_BENCH_DIGITS = (1, 1, 0, 2)


def _bench_setting(name: str, row: wire.BenchRow) -> list[str]:
    numbers = (row.concurrency, row.depth, row.prompt_tokens, row.answer_tokens)
    return [name, *(f"{n:,}" for n in numbers)]


def _bench_values(row: wire.BenchRow) -> tuple[float, ...]:
    return (row.prefill_tokens_per_s, row.decode_tokens_per_s, row.first_token_ms, row.total_s)


def _bench_figures(row: wire.BenchRow) -> list[str]:
    values = zip(_bench_values(row), _BENCH_DIGITS, strict=True)
    return [f"{value:,.{digits}f}" for value, digits in values]


# -- layout ----------------------------------------------------------------------------------------


def _rows(rows: Iterable[tuple[str, Sequence[str]]]) -> Iterator[str]:
    """Labels in a column, each paragraph wrapped beside it."""
    indent = " " * (_LABEL + 1)
    for label, paragraphs in rows:
        lead = f"{label}: ".rjust(_LABEL + 1)
        for paragraph in paragraphs:
            for line in textwrap.wrap(
                _UNIT.sub(_NBSP, plain(paragraph)),
                WIDTH,
                initial_indent=lead,
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            ):
                yield line.replace(_NBSP, " ")
            lead = indent


def _table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    left: Collection[int] = (),
    *,
    gap: str = "  ",
) -> str:
    """Columns as wide as needed, numbers to the right; those of `left` are words."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return "\n".join(
        gap.join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in (head, *rows)
    )
