"""What an operator's Prometheus and Grafana see of a live daemon: every panel has data, every alert
can be evaluated. The daemon is whole, its engine a fake; the Prometheus server is a real one."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import anyio
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ds4d import metrics
from tests.daemon.house import Waking, daemon_with, engine, free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.daemon.house import House

ROOT = Path(__file__).parents[2]
RULES = ROOT / "ops/prometheus/ds4d.rules.yml"
TESTS = ROOT / "ops/prometheus/ds4d.rules.test.yml"
DASHBOARD = json.loads((ROOT / "ops/grafana/ds4d.json").read_text("utf-8"))
PATIENCE_S = 25.0
ALL = {"instance": ".+", "model": ".+"}  # the dashboard's variables, as Grafana gives them
LONG = "Long ago. " * 400


def tool(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed (Debian: prometheus)")
    return path


def promtool(*arguments: str, stdin: bytes | None = None) -> None:
    command = [tool("promtool"), *arguments]
    done = subprocess.run(command, input=stdin, capture_output=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()


# Files


def test_promtool_accepts_the_rules_and_the_example_configuration() -> None:
    promtool("check", "rules", str(RULES))
    promtool("check", "config", str(ROOT / "ops/prometheus/prometheus.yml"))


def test_each_alert_fires_when_it_should_and_only_then() -> None:
    promtool("test", "rules", str(TESTS))


def alerts() -> dict[str, str]:
    """By name, the text of each alert. The files have one form, so that lines will do."""
    _, *found = re.split(r"^ +- alert: (\w+)$", RULES.read_text("utf-8"), flags=re.MULTILINE)
    return dict(zip(found[::2], found[1::2], strict=True))


@pytest.mark.parametrize("name", alerts())
def test_each_alert_has_a_test_and_says_what_to_do(name: str) -> None:
    assert name in TESTS.read_text("utf-8")
    text = alerts()[name]
    assert re.search(r"severity: (warning|critical)}", text)
    for part in ("summary", "description", "action"):
        assert re.search(rf"^ +{part}: .{{10}}", text, re.MULTILINE), part


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def queries() -> dict[str, str]:
    """By panel and letter, what the dashboard asks of Prometheus."""
    found = {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in panels()
        for target in panel["targets"]
    }
    return found | {
        f"annotation {one['name']}": one["expr"] for one in DASHBOARD["annotations"]["list"]
    }


def names(text: str) -> set[str]:
    return set(re.findall(r"\bds4d_\w+", text))


def test_dashboard_and_rules_ask_only_for_series_that_there_are() -> None:
    known = {
        series
        for family in text_string_to_metric_families(metrics.exposition(None).decode())
        for series in {family.name, *(sample.name for sample in family.samples)}
    } | {f"ds4d_{gauge.name}" for gauge in metrics.GAUGES}
    asked = set().union(*(names(query) for query in queries().values()))
    rules = re.sub(r"[\w]+:ds4d_\w+:\w+", "", RULES.read_text("utf-8"))  # those that they record
    assert asked <= known
    assert names(rules) <= known


def test_the_dashboard_shows_every_series_that_is_not_a_detail_of_another() -> None:
    shown = set().union(*(names(query) for query in queries().values()))
    hidden = {
        name for name in metrics.LABELS if not any(series.startswith(name) for series in shown)
    }
    assert hidden == {
        "ds4d_cohort_cycles",  # counted by ds4d_cohort_cycle_seconds too
        "ds4d_cohort_emitted_tokens",
        "ds4d_control_connections",
        "ds4d_queue_limit",
    }


def test_the_dashboard_is_one_that_grafana_imports() -> None:
    assert DASHBOARD["schemaVersion"] >= 36
    assert {one["name"] for one in DASHBOARD["templating"]["list"]} == {"datasource", *ALL}
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in panels():
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        for target in panel["targets"]:
            assert 'instance=~"$instance"' in target["expr"], target["expr"]


def test_no_two_panels_lie_upon_each_other() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, f"{panel['title']} on {taken[x, y]}"
                taken[x, y] = panel["title"]


# A live daemon


async def exposed(house: House) -> str:
    async with house.client.get(f"{house.url}/metrics") as response:
        assert response.status == 200
        assert response.headers["content-type"] == metrics.CONTENT_TYPE
        return await response.text()


async def load(house: House) -> None:
    """A bit of everything that is counted: known and unknown prompts, prompts that hold up those
    who decode, clients that go, and what the door refuses."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(leave, house, "Hi")
        for n in range(3):
            await house.chat(max_tokens=20)
            tasks.start_soon(ask, house, f"{n} {LONG}")
        tasks.start_soon(leave, house, f"Bye {LONG}")
    assert (await house.chat(max_tokens="many"))[0] == 400


async def ask(house: House, text: str) -> None:
    assert (await house.chat(messages=[{"role": "user", "content": text}], max_tokens=20))[0] == 200


async def leave(house: House, text: str) -> None:
    """Read a few events of an answer, then hang up."""
    body = {"messages": [{"role": "user", "content": text}], "stream": True, "max_tokens": 4000}
    async with house.client.post(f"{house.url}/v1/chat/completions", json=body) as response:
        n_lines = 0
        async for _ in response.content:
            n_lines += 1
            if n_lines == 40:
                break
        response.close()


async def test_what_a_live_daemon_counts_stays_within_the_closed_sets(tmp_path: Path) -> None:
    async with daemon_with(Waking(engine()), tmp_path) as house:
        await house.until_ready()
        await load(house)
        text = await exposed(house)
    n_series = 0
    for family in text_string_to_metric_families(text):
        closed = metrics.LABELS.get(family.name, {})
        for sample in family.samples:
            n_series += 1
            assert sample.labels.pop("model") == "fake"
            for label, value in sample.labels.items():
                if label != "le" and closed[label]:
                    assert value in closed[label], sample
    assert n_series < 1500
    promtool("check", "metrics", stdin=text.encode())


async def test_loading_can_be_watched_from_the_first_second(tmp_path: Path) -> None:
    waking = Waking(engine())
    waking.gate.clear()
    async with daemon_with(waking, tmp_path) as house:
        await house.until_loading()
        text = await exposed(house)
        waking.gate.set()
    assert 'ds4d_state{model="none",state="loading"} 1.0' in text
    assert 'ds4d_loading_ratio{model="none"} 0.4' in text


class Prometheus:
    def __init__(self, url: str, client: aiohttp.ClientSession) -> None:
        self._url = url
        self._client = client

    async def get(self, path: str, **parameters: str) -> Any:
        """The data of an answer. Raises AssertionError with what Prometheus has against it."""
        where = f"{self._url}/api/v1/{path}"
        async with self._client.get(where, params=parameters) as response:
            body = await response.json()
        assert body["status"] == "success", f"{body.get('error')}: {parameters}"
        return body["data"]

    async def has_data(self, query: str) -> bool:
        """Whether there is a series, and one at least whose value is a number."""
        found = (await self.get("query", query=query))["result"]
        return any(not math.isnan(float(series["value"][1])) for series in found)

    async def until_up(self, job: str, log: Path) -> None:
        """Wait until it is open and has read the job's target once."""
        with anyio.move_on_after(PATIENCE_S):
            while True:
                try:
                    if await self.has_data(f'up{{job="{job}"}} == 1'):
                        return
                except (aiohttp.ClientConnectionError, aiohttp.ContentTypeError):
                    pass  # not open yet, or not ready: the body is text then
                await anyio.sleep(0.1)
        pytest.fail(f"prometheus did not start:\n{log.read_text('utf-8')}")


@asynccontextmanager
async def prometheus(binary: str, target: str, directory: Path) -> AsyncIterator[Prometheus]:
    """A server that has read `target` once, and does so with our rules every second."""
    directory.mkdir()
    where = f"127.0.0.1:{free_port()}"
    settings = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [{"job_name": "ds4d", "static_configs": [{"targets": [target]}]}],
    }
    file, log = directory / "prometheus.yml", directory / "log"
    file.write_text(json.dumps(settings), "utf-8")  # JSON is YAML
    command = [
        binary,
        f"--config.file={file}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address={where}",
    ]
    with log.open("wb") as stream:
        async with await anyio.open_process(command, stdout=stream, stderr=stream) as process:
            try:
                async with aiohttp.ClientSession() as client:
                    server = Prometheus(f"http://{where}", client)
                    await server.until_up("ds4d", log)
                    yield server
            finally:
                process.kill()


def as_grafana_asks(query: str) -> str:
    for variable, value in ALL.items():
        query = query.replace(f"${variable}", value)
    return query.replace("$__rate_interval", "10s")


async def test_every_panel_finds_data_and_every_rule_is_evaluated(tmp_path: Path) -> None:
    binary = tool("prometheus")
    starts = "annotation Starts"  # has data when there was one
    async with daemon_with(Waking(engine()), tmp_path) as house:
        await house.until_ready()
        target = house.url.removeprefix("http://")
        async with prometheus(binary, target, tmp_path / "prometheus") as server:
            asked = {name: as_grafana_asks(query) for name, query in queries().items()}
            await server.get("query", query=asked.pop(starts))
            with anyio.move_on_after(PATIENCE_S):
                while asked:
                    await load(house)
                    asked = {n: q for n, q in asked.items() if not await server.has_data(q)}
            assert not asked
            for variable in DASHBOARD["templating"]["list"][1:]:
                await check_variable(server, variable["definition"])
            await check_rules(server)


async def check_variable(server: Prometheus, definition: str) -> None:
    found = re.fullmatch(r"label_values\((.+), (\w+)\)", definition)
    assert found is not None
    match, label = found.groups()
    assert await server.get(f"label/{label}/values", **{"match[]": as_grafana_asks(match)})


async def check_rules(server: Prometheus) -> None:
    rules = [rule for group in (await server.get("rules"))["groups"] for rule in group["rules"]]
    assert {rule["name"] for rule in rules if rule["type"] == "alerting"} == set(alerts())
    for rule in rules:
        assert (rule["health"], rule.get("lastError", "")) == ("ok", ""), rule["name"]
        await server.get("query", query=rule["query"])
