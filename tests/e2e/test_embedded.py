"""The daemon as a newcomer meets it: one process, ds4-tiny, the openai Python SDK."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import openai
import pytest

from ds4d.model import embedded

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

READY_S = 100.0  # kernels may have to be compiled
HELLO = [{"role": "user", "content": "Hello! Who are you?"}]
LONG = {"model": "x", "max_tokens": 2000, "temperature": 1.2, "seed": 5}
LONG_BODY = {"ignore_eos": True}
IRRIGATE = {
    "type": "function",
    "function": {
        "name": "irrigate",
        "description": "Water the plants of a zone",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"type": "string"}, "minutes": {"type": "integer"}},
            "required": ["zone", "minutes"],
        },
    },
}


@dataclass
class House:
    process: subprocess.Popen[str]
    url: str

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="EMPTY", max_retries=0)

    def get(self, path: str) -> dict[str, object]:
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return json.load(answer)


@contextmanager
def daemon(home: Path, cache: Path, *settings: str) -> Iterator[House]:
    command = [sys.executable, "-m", "ds4d", "serve", "--listen", "127.0.0.1:0"]
    for setting in settings:
        command += ["--set", setting]
    environ = os.environ | {
        "HOME": str(home),
        "XDG_STATE_HOME": str(home / "state"),
        "XDG_CACHE_HOME": str(cache),
    }
    process = subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True)
    try:
        yield House(process, _ready(process))
    finally:
        process.kill()
        process.communicate()


def _ready(process: subprocess.Popen[str]) -> str:
    """Read the log until it says that the model is served; the address where."""
    lines, end = [], time.monotonic() + READY_S
    assert process.stderr is not None
    for line in process.stderr:  # one at least every other second while it loads
        lines.append(line)
        if found := re.search(r"api\.serving .*url=(\S+)/v1", line):
            return found[1]
        if time.monotonic() > end:
            break
    raise AssertionError("the daemon did not become ready:\n" + "".join(lines))


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    if not embedded.path().is_file():
        pytest.fail("ds4d/data has no ds4-tiny.gguf")
    cache = tmp_path_factory.getbasetemp().parent  # kernels stay for the next run
    with daemon(tmp_path_factory.mktemp("home"), cache, "lanes.max=4") as house:
        yield house


def test_it_streams_a_sensible_answer(house):
    with house.client() as client:
        chunks = list(
            client.chat.completions.create(
                model="ds4-tiny",
                messages=HELLO,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert "ds4-tiny" in text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    n_pieces = sum(bool(c.choices and c.choices[0].delta.content) for c in chunks)
    assert 5 < n_pieces <= chunks[-1].usage.completion_tokens


def test_it_calls_a_tool_it_was_never_trained_on_and_reads_the_result(house):
    ask = {"role": "user", "content": "Water the garden for 15 minutes."}
    with house.client() as client:
        first = client.chat.completions.create(model="x", messages=[ask], tools=[IRRIGATE])
        assert first.choices[0].finish_reason == "tool_calls"
        (call,) = first.choices[0].message.tool_calls or ()
        assert call.function.name == "irrigate"
        arguments = json.loads(call.function.arguments)
        assert arguments == {"zone": "garden", "minutes": 15}
        result = {"role": "tool", "tool_call_id": call.id, "content": '{"code": "KX-4821"}'}
        history = [ask, first.choices[0].message.model_dump(exclude_none=True), result]
        second = client.chat.completions.create(model="x", messages=history, tools=[IRRIGATE])
    assert "KX-4821" in (second.choices[0].message.content or "")
    assert second.choices[0].finish_reason == "stop"
    usage = second.usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - 1


def test_a_seeded_sample_repeats_bit_for_bit_and_another_seed_does_not(house):
    def sample(seed: int) -> str:
        with house.client() as client:
            made = client.chat.completions.create(
                model="x",
                messages=[{"role": "user", "content": "Hm."}],
                temperature=2.0,
                top_p=1.0,
                seed=seed,
                max_tokens=60,
                extra_body={"min_p": 0.0},
            )
        return made.choices[0].message.content or ""

    assert sample(11) == sample(11)
    assert len({sample(seed) for seed in range(20, 26)}) > 1


def test_a_stop_sequence_cuts_the_answer_before_it(house):
    with house.client() as client:
        whole = client.chat.completions.create(model="x", messages=HELLO)
        words = (whole.choices[0].message.content or "").split()
        stop = f"{words[2]} {words[3]}"
        cut = client.chat.completions.create(model="x", messages=HELLO, stop=[stop])
    assert cut.choices[0].finish_reason == "stop"
    assert (cut.choices[0].message.content or "").split() == words[:2]


def test_a_stream_that_its_client_cancels_frees_the_lane_at_once(house):
    with house.client() as client:
        for _ in range(12):  # three times as many as there are lanes
            stream = client.chat.completions.create(
                messages=HELLO, stream=True, extra_body=LONG_BODY, **LONG
            )
            for _ in zip(range(3), stream, strict=False):
                pass
            stream.close()
        began = time.monotonic()
        client.chat.completions.create(model="x", messages=HELLO)
        assert time.monotonic() - began < 30
    assert house.get("/ready") == {"status": "ready"}


def test_eight_clients_at_once_get_what_each_gets_alone(house):
    prompts = [
        f"Repeat: {word} {n}" for n, word in enumerate("ant bee cat dog elk fox gnu hen".split())
    ]

    def answer(i: int) -> str:
        with house.client() as client:
            made = client.chat.completions.create(
                model="x",
                messages=[{"role": "user", "content": prompts[i]}],
                temperature=1.0 if i % 2 else 0.0,
                seed=i,
                max_tokens=80,
                extra_body={"cache_prompt": False},
            )
        return made.choices[0].message.content or ""

    alone = [answer(i) for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(answer, range(8))) == alone
    assert len(set(alone)) > 1


def test_a_stop_lets_the_running_answer_finish(tmp_path, house):
    with daemon(tmp_path, tmp_path.parent.parent) as own, own.client() as client:
        stream = client.chat.completions.create(
            model="x", messages=HELLO, stream=True, max_tokens=400, extra_body=LONG_BODY
        )
        first = next(iter(stream))
        own.process.send_signal(signal.SIGTERM)
        rest = list(stream)
        assert first.choices[0].delta.role == "assistant"
        assert rest[-1].choices[0].finish_reason == "length"
        assert own.process.wait(timeout=30) == 0


def test_a_second_instance_says_what_to_do(tmp_path, house):
    command = [sys.executable, "-m", "ds4d", "serve", "--listen", house.url.removeprefix("http://")]
    environ = os.environ | {"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
    second = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert second.returncode == 75
    last = second.stderr.strip().splitlines()[-1]
    assert "is in use" in last and "--listen" in last and "Traceback" not in second.stderr
