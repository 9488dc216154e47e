"""The fast sampler says what the rule says, and costs what it promises."""

from __future__ import annotations

import math
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

from ds4d.cpu import sampler
from ds4d.cpu.kernels import sample
from ds4d.engine import History, Sampling, VerifyWork
from ds4d.speculation import accept as rule


def _random_work(rng: np.random.Generator, n_vocab: int) -> tuple[np.ndarray, VerifyWork, object]:
    """Logits with many ties every other time, and settings that meet in all combinations."""
    k = int(rng.integers(0, 4))
    logits = rng.standard_normal((k + 1, n_vocab)) * rng.choice([0.2, 2.0, 8.0])
    if rng.random() < 0.5:
        logits = np.round(logits * 2) / 2
    logits = logits.astype(np.float32)
    if rng.random() < 0.1:
        logits[0] *= -0.0  # zeros of both signs are equal
    seen = rng.choice(n_vocab, int(rng.integers(0, 7)), replace=False).astype(np.int32)
    allowed = rng.integers(0, 2**32, (k + 1, -(-n_vocab // 32)), dtype=np.uint32)
    allowed[:, 0] |= 2

    def either(*values):
        return values[int(rng.integers(len(values)))]

    penalised = rng.random() < 0.5
    settings = Sampling(
        bias=either((), tuple((int(i), float(rng.normal() * 3)) for i in seen)),
        repetition=either(1.0, 1.2) if penalised else 1.0,
        presence=either(0.0, 0.5, -0.5) if penalised else 0.0,
        frequency=either(0.0, 0.3) if penalised else 0.0,
        exempt=either((), (1, int(rng.integers(n_vocab)))),
        temperature=either(0.0, 0.3, 1.0, 1.0, 2.5),
        min_p=either(0.0, 0.05, 0.5, 1.0),
        top_k=either(0, 1, 3, 40, n_vocab, n_vocab + 7),
        top_p=either(1.0, 0.95, 0.5, 0.0),
        seed=int(rng.integers(2**63)) * 2 + int(rng.integers(2)),
        seeded=bool(rng.random() < 0.5),
        top_logprobs=either(None, None, 0, 5, 20),
    )
    q = rng.random((k, n_vocab)).astype(np.float32) ** 4
    q /= q.sum(1, keepdims=True)
    law = q.astype(np.float64) / q.sum(1, keepdims=True, dtype=np.float64)
    if rng.random() < 0.1:
        q[:, :: int(rng.integers(1, 4))] = either(0.0, -1.0, math.nan, math.inf)
    best = logits.argmax(1)  # drafts that are often accepted, and allowed
    allowed[np.arange(k + 1), best // 32] |= np.uint32(1) << (best % 32).astype(np.uint32)
    draft = tuple(
        int(either(best[i], best[i], rng.integers(n_vocab), rng.choice(n_vocab, p=law[i])))
        for i in range(k)
    )
    work = VerifyWork(
        lane=0,
        pending=0,
        draft=draft,
        sampling=settings,
        epoch=int(rng.integers(3)),
        position=int(rng.integers(2**20)),
        history=History(ids=seen, generated=rng.integers(0, 3, seen.size).astype(np.int32)),
        mask=either(None, allowed),
    )
    return logits, work, either(None, q)


@pytest.mark.parametrize(("n_vocab", "n_trials"), [(7, 2000), (100, 2000), (4096, 600)])
def test_fast_form_and_rule_say_the_same(n_vocab, n_trials):
    rng = np.random.default_rng(n_vocab)
    lengths = set()
    for trial in range(n_trials):
        logits, work, q = _random_work(rng, n_vocab)
        before = logits.copy()
        unread = tuple(rng.integers(0, n_vocab, int(rng.integers(0, 3))).tolist())
        expected = rule.accept(logits, work, q=q, unread=unread)
        got = sampler.accept_rows(logits, work, q=q, unread=unread)
        assert (got.ids, got.n_accepted) == (expected.ids, expected.n_accepted), (trial, work)
        assert got.failed == expected.failed
        assert np.array_equal(logits, before)
        lengths.add((work.sampling.greedy, work.sampling.seeded, got.n_accepted))
        for a, b in zip(got.logprobs, expected.logprobs, strict=True):
            assert a.chosen == pytest.approx(b.chosen, abs=1e-9)
            assert [i for i, _ in a.top] == [i for i, _ in b.top]
            assert [x for _, x in a.top] == pytest.approx([x for _, x in b.top], abs=1e-9)
    assert len(lengths) == 16  # every accept rule met 0 to 3 accepted drafts


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.9}, {"top_k": 500, "min_p": 1e-4}])
def test_a_full_vocabulary_is_drawn_alike(settings):
    rng = np.random.default_rng(6)
    logits = (rng.standard_normal((1, 129280)) * 3).astype(np.float32)
    for position in range(4):
        work = VerifyWork(
            lane=0, pending=0, sampling=Sampling(seed=9, **settings), position=position
        )
        assert sampler.accept_rows(logits, work) == rule.accept(logits, work)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_failures_are_told_in_the_rules_words(bad, temperature):
    logits = np.zeros((2, 50), np.float32)
    logits[:, 3] = 90
    logits[1, 20] = bad
    for draft in (3, 4):
        work = VerifyWork(
            lane=0,
            pending=0,
            draft=(draft,),
            sampling=Sampling(temperature=temperature, seeded=True),
            position=0,
        )
        got = sampler.accept_rows(logits, work)
        assert got == rule.accept(logits, work)
        assert (got.failed is not None) is (draft == 3)


def test_a_penalty_that_vanishes_in_f32_fails_the_lane_and_not_the_engine():
    """1e-320 is above 0 as a Python float and 0 as float32: the division is by zero."""
    history = History(ids=np.array([1], np.int32), generated=np.array([1], np.int32))
    sampling = Sampling(repetition=1e-320, temperature=0.0)
    work = VerifyWork(lane=0, pending=0, sampling=sampling, position=0, history=history)
    accepted = sampler.accept_rows(np.array([[0.5, 1.5, -1.0]], np.float32), work)
    assert accepted.failed is not None and not accepted.ids


def test_a_mask_that_allows_nothing_fails_the_lane():
    work = VerifyWork(
        lane=0, pending=0, sampling=Sampling(), position=0, mask=np.zeros((1, 2), np.uint32)
    )
    got = sampler.accept_rows(np.zeros((1, 50), np.float32), work)
    assert got == rule.accept(np.zeros((1, 50), np.float32), work)
    assert got.failed == "row 0: the mask allows no id, expected at least one"


def test_philox_kernel_is_the_rules_philox():
    rng = np.random.default_rng(4)
    for _ in range(50):
        c = rng.integers(0, 2**32, 4, dtype=np.uint32)
        seed = np.uint64(rng.integers(2**64, dtype=np.uint64))
        assert list(sample.philox(*c.astype(np.uint64), seed)) == rule.philox(c, int(seed)).tolist()


def test_a_greedy_row_allocates_nothing_of_the_vocabularys_size():
    logits = np.random.default_rng(0).standard_normal((3, 129280)).astype(np.float32)
    draft = tuple(int(i) for i in logits.argmax(1)[:2])
    work = VerifyWork(
        lane=0, pending=0, draft=draft, sampling=Sampling(temperature=0.0), position=0
    )
    sampler.accept_rows(logits, work)
    tracemalloc.start()
    try:
        got = sampler.accept_rows(logits, work)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert got.n_accepted == 2
    assert peak < 50_000  # one float32 row alone would be 517,120


def test_prepare_compiles_every_kernel_once_and_for_all_and_loads_it_the_next_time(tmp_path):
    """In new processes, because the tests above have compiled them in this one."""
    code = (
        "import sys, pathlib; from ds4d.cpu import sampler; from ds4d.cpu.kernels import sample;"
        "sampler.prepare(pathlib.Path(sys.argv[1]));"
        "print([k.signatures for k in sample.KERNELS]);"
        "print([len(k.stats.cache_hits) for k in sample.KERNELS])"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    first, second = (
        subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        for _ in range(2)
    )
    here = [k.signatures for k in sample.KERNELS]
    assert [len(signatures) for signatures in here] == [1] * len(sample.KERNELS)
    assert first == [str(here), str([0] * len(sample.KERNELS))]
    assert second == [str(here), str([1] * len(sample.KERNELS))]


def test_a_damaged_cache_file_costs_a_compilation_and_nothing_else(tmp_path):
    code = (
        "import sys, pathlib; from ds4d.cpu import sampler;"
        "sampler.prepare(pathlib.Path(sys.argv[1])); print('prepared')"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    files = sorted(tmp_path.rglob("*.nb?"))
    assert files
    for path in files:
        path.write_bytes(b"not a kernel")
    again = subprocess.run(command, check=True, capture_output=True, text=True)
    assert again.stdout == "prepared\n"
    assert all(path.read_bytes() != b"not a kernel" for path in tmp_path.rglob("*.nbi"))


def test_a_full_disk_costs_the_cache_and_not_the_start(tmp_path):
    code = (
        "import errno, pathlib, sys, types; import numba.core.caching as caching\n"
        "def full(*_): raise OSError(errno.ENOSPC, 'No space left on device')\n"
        "caching.IndexDataCacheFile.save = full\n"
        "from ds4d.cpu import jit, sampler; from ds4d.cpu.kernels import norm\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "sampler.prepare(folder); jit.prepare([norm.rmsnorm], folder)\n"
        "print(norm.rmsnorm.address != 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
