"""Sampling and acceptance on the device say what `speculation/accept.py` says."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ds4d.engine import History, Sampling, VerifyWork
from ds4d.gpu.kernels import sample
from ds4d.speculation import accept as rule
from tests.gpu.machines import check_code

if TYPE_CHECKING:
    from collections.abc import Sequence

    Lane = tuple[np.ndarray, VerifyWork, tuple[int, ...]]  # logits [K+1, V], work, unread ids

PAD = 4  # columns behind the vocabulary, full of NaN


def _arrays(lanes: Sequence[Lane | int], n_rows: int, *, logprobs: bool) -> dict[str, Any]:
    """Everything the kernels are given, rubbish where they write. A number: so many idle rows."""
    works = [lane for lane in lanes if not isinstance(lane, int)]
    n_vocab = works[0][0].shape[1]
    bias = [pair for _, w, _ in works for pair in w.sampling.bias]
    n_seen = sum(0 if w.history is None else w.history.ids.size for _, w, _ in works)
    exempt = [i for _, w, _ in works for i in w.sampling.exempt]
    shapes = sample.shapes(
        n_rows, n_vocab, 1 + max(w.lane for _, w, _ in works), stride=n_vocab + PAD,
        logprobs=logprobs, n_bias=len(bias), n_seen=n_seen, n_exempt=len(exempt),
    )  # fmt: skip
    rng = np.random.default_rng(1)
    a = {
        name: np.frombuffer(rng.bytes(int(np.prod(shape)) * np.dtype(d).itemsize), d)
        .reshape(shape)
        .copy()
        for name, (shape, d) in shapes.items()
    }
    a["tally"][:] = 0
    a["lane"][:] = -1
    a["logits"][:] = np.nan
    for name in ("bias_ids", "seen_ids", "seen_counts", "exempt_ids"):
        a[name][:] = 0
    row = at_bias = at_seen = at_exempt = 0
    for each in lanes:
        if isinstance(each, int):
            row += each
            continue
        logits, work, unread = each
        s, history = work.sampling, work.history
        n = 0 if history is None else history.ids.size
        a["bias_ids"][at_bias : at_bias + len(s.bias)] = [i for i, _ in s.bias]
        a["bias_values"][at_bias : at_bias + len(s.bias)] = [v for _, v in s.bias]
        a["exempt_ids"][at_exempt : at_exempt + len(s.exempt)] = s.exempt
        if history is not None:
            a["seen_ids"][at_seen : at_seen + n] = history.ids
            a["seen_counts"][at_seen : at_seen + n] = history.generated
        lists = at_bias, len(s.bias), at_seen, n, at_exempt, len(s.exempt)
        at_bias, at_seen, at_exempt = at_bias + len(s.bias), at_seen + n, at_exempt + len(s.exempt)
        for i, token in enumerate((unread[0] if unread else work.pending, *work.draft)):
            a["lane"][row], a["token"][row] = work.lane, token
            a["logits"][row, :n_vocab] = logits[i]
            if work.mask is not None:
                a["mask"][row] = work.mask[i]
            sample.set_row(
                a["settings"][row], a["factors"][row], s, position=work.position + i,
                epoch=work.epoch, lists=lists, unread=bool(unread), masked=work.mask is not None,
                drafts=bool(work.draft),
            )  # fmt: skip
            row += 1
    assert row <= n_rows
    return a


def _run(
    machine: Any, lanes: Sequence[Lane | int], n_rows: int, *, seed: int = 0, times: int = 1
) -> dict[str, Any]:
    works = [lane for lane in lanes if not isinstance(lane, int)]
    logprobs = any(w.sampling.top_logprobs is not None for _, w, _ in works)
    sampled = any(not w.sampling.greedy for _, w, _ in works)
    n_vocab = works[0][0].shape[1]
    a = _arrays(lanes, n_rows, logprobs=logprobs)
    before = a["logits"].copy()
    numbers = {"n_rows": n_rows, "n_vocab": n_vocab, "stride": n_vocab + PAD}
    for _ in range(times):
        for kernel, grid, block in sample.launches(
            n_rows, n_vocab, sampled=sampled, logprobs=logprobs
        ):
            machine.run(kernel, grid, block, *sample.arguments(kernel, a, numbers), seed=seed)
        assert not a["tally"].any()
    np.testing.assert_array_equal(a["logits"], before)
    return a


def _check(a: dict[str, Any], lanes: Sequence[Lane | int], who: Any = "") -> list[rule.Accepted]:
    """What each lane was told is what the rule says."""
    row, out = 0, []
    for each in lanes:
        if isinstance(each, int):
            row += each
            continue
        logits, work, unread = each
        with np.errstate(divide="ignore"):
            expected = rule.accept(logits, work, unread=unread)
        out.append(expected)
        said = a["said"][work.lane]
        n = said[sample.N_IDS]
        where = (who, work)
        if expected.failed is not None:
            assert n == 0, where
            assert _words(said) == expected.failed
        else:
            assert tuple(said[sample.SAID_IDS :][:n]) == expected.ids, where
            assert said[sample.FAILED_ROW] == -1
            assert a["last"][work.lane] == expected.ids[-1]
        for i, told in enumerate(expected.logprobs):
            assert a["chosen"][row + i] == pytest.approx(told.chosen, abs=2e-8)
            m = len(told.top)
            assert a["top_ids"][row + i, :m].tolist() == [t for t, _ in told.top], where
            assert a["top_logprobs"][row + i, :m] == pytest.approx(
                [x for _, x in told.top], abs=2e-8
            )
        row += 1 + len(work.draft)
    return out


def _words(said: Any) -> str:
    """The failure as the rule tells it."""
    row, token = said[sample.FAILED_ROW], said[sample.FAILED_ID]
    if token == sample.NOTHING:
        return f"row {row}: the mask allows no id, expected at least one"
    bits = said[sample.FAILED_BITS : sample.FAILED_BITS + 1]
    return f"row {row}: the logit of id {token} is {bits.view('f4')[0]}, expected a number"


def _logits(rng: np.random.Generator, k: int, n_vocab: int) -> Any:
    """[k+1, n_vocab], with many ties every other time."""
    z = rng.standard_normal((k + 1, n_vocab)) * rng.choice([0.2, 2.0, 8.0])
    if rng.random() < 0.5:
        z = np.round(z * 2) / 2
    return z.astype(np.float32)


def _random_lane(
    rng: np.random.Generator, lane: int, n_vocab: int, *, logprobs: bool = False
) -> Lane:
    """Settings that meet in all combinations."""

    def either(*values: Any) -> Any:
        return values[int(rng.integers(len(values)))]

    k = int(rng.integers(0, 3))
    logits = _logits(rng, k, n_vocab)
    if rng.random() < 0.1:
        logits[0] *= -0.0  # zeros of both signs are equal
    seen = rng.choice(n_vocab, int(rng.integers(0, 40)), replace=False).astype(np.int32)
    allowed = rng.integers(0, 2**32, (k + 1, -(-n_vocab // 32)), dtype=np.uint32)
    best = logits.argmax(1)  # drafts that are often accepted, and allowed
    allowed[np.arange(k + 1), best // 32] |= np.uint32(1) << (best % 32).astype(np.uint32)
    draft = tuple(int(either(best[i], best[i], rng.integers(n_vocab))) for i in range(k))
    penalised = rng.random() < 0.5
    settings = Sampling(
        bias=either((), tuple((int(i), float(rng.normal() * 3)) for i in seen[:9])),
        repetition=either(1.0, 1.2) if penalised else 1.0,
        presence=either(0.0, 0.5, -0.5) if penalised else 0.0,
        frequency=either(0.0, 0.3) if penalised else 0.0,
        exempt=either((), (int(best[0]), *map(int, seen[:2]))),
        temperature=either(0.0, 0.3, 1.0, 1.0, 2.5),
        min_p=either(0.0, 0.05, 0.5, 1.0),
        top_k=either(0, 1, 3, 40, n_vocab, n_vocab + 7),
        top_p=either(1.0, 0.95, 0.5, 0.0),
        seed=int(rng.integers(2**63)) * 2 + int(rng.integers(2)),
        seeded=bool(rng.random() < 0.5),
        top_logprobs=either(None, 0, 5, 20) if logprobs else None,
    )
    work = VerifyWork(
        lane=lane, pending=int(best[0]), draft=draft, sampling=settings,
        epoch=int(rng.integers(3)), position=int(rng.integers(2**20)),
        history=History(ids=seen, generated=rng.integers(0, 3, seen.size).astype(np.int32)),
        mask=either(None, allowed),
    )  # fmt: skip
    return logits, work, either((), (int(either(best[0], *seen[:1])),))


def _n_rows(lane: Lane | int) -> int:
    return lane if isinstance(lane, int) else len(lane[0])


@pytest.mark.parametrize(("n_vocab", "n_trials"), [(300, 3), (2300, 1)])
def test_random_cohorts_are_told_what_the_rule_says(
    machine: Any, n_vocab: int, n_trials: int
) -> None:
    kinds = set()
    for trial in range(n_trials):
        rng = np.random.default_rng([n_vocab, trial])
        lanes: list[Lane | int] = []
        for lane in rng.permutation(4).tolist():
            each = _random_lane(rng, lane, n_vocab, logprobs=trial == 1)
            lanes += [int(rng.integers(0, 2)), each]
        n_rows = -(-sum(_n_rows(lane) for lane in lanes) // 8) * 8
        told = _check(_run(machine, lanes, n_rows, seed=trial), lanes, trial)
        works = [lane[1] for lane in lanes if not isinstance(lane, int)]
        for work, said in zip(works, told, strict=True):
            kinds.add((work.sampling.greedy, work.sampling.seeded, said.n_accepted > 0))
    assert len(kinds) >= (6 if n_trials > 1 else 2), kinds


FILTERS: list[dict[str, Any]] = [
    {},
    {"top_p": 0.9},
    {"top_k": 500, "top_p": 0.8, "min_p": 1e-4},
    {"top_p": 1 - 1e-12},
    {"temperature": 1e-4, "top_p": 0.9},
]


@pytest.mark.parametrize(("n_vocab", "some"), [(4096, FILTERS[:3]), (300, FILTERS[3:])])
def test_filters_draw_alike_from_small_and_large_vocabularies(
    machine: Any, n_vocab: int, some: list[dict[str, Any]]
) -> None:
    rng = np.random.default_rng(6)
    row = (rng.standard_normal((1, n_vocab)) * 3).astype(np.float32)
    lanes: list[Lane | int] = []
    for lane, settings in enumerate(some):
        sampling = Sampling(seed=2**64 - 9, **({"temperature": 1.5} | settings))
        lanes.append((row, VerifyWork(lane=lane, pending=0, sampling=sampling, position=lane), ()))
    _check(_run(machine, lanes, 8), lanes)


def test_rows_count_the_drafts_before_them(machine: Any) -> None:
    """Drafts that come twice, that the history knows, that are exempt; a first id it lacks."""
    rng = np.random.default_rng(4)
    sampling = Sampling(
        bias=((3, 1.5), (5, -2.0)), repetition=1.3, presence=0.7, frequency=0.4, exempt=(9, 2),
        temperature=0.0,
    )  # fmt: skip
    history = History(ids=np.array([3, 7, 9], np.int32), generated=np.array([0, 2, 1], np.int32))
    draft = (5, 7, 5, 9, 11, 2)
    logits = rng.standard_normal((7, 40)).astype(np.float32)
    for lane, unread in enumerate([(), (11,), (3,)]):
        for i in range(6):  # each draft is the best id of its row
            logits[i, draft[i]] = 40
        work = VerifyWork(
            lane=lane, pending=30, draft=draft, sampling=sampling, position=0, history=history
        )
        lanes: list[Lane | int] = [(logits, work, unread)]
        a = _run(machine, lanes, 8)
        assert _check(a, lanes)[0].n_accepted == 6
        for i in range(7):
            expected = rule.adjust(logits[i], sampling, history, (*unread, *draft[:i]))
            np.testing.assert_array_equal(a["edited"][i, :40], expected)


@pytest.mark.parametrize(("value", "n_vocab"), [(0.0, 300), (-7.25, 2100)])
def test_equal_logits_are_kept_from_the_lowest_id_on(
    machine: Any, value: float, n_vocab: int
) -> None:
    """Masses are whole multiples of few here, so the edge of top_p is met exactly."""
    row = np.full((1, n_vocab), value, np.float32)
    row[0, 100:110] += 1.0 if n_vocab > 300 else 0.0
    lanes: list[Lane | int] = []
    cases: list[dict[str, Any]] = [
        {"top_k": 15}, {"top_p": 0.5}, {"top_k": 10, "top_p": 0.9}, {"top_p": 1e-9},
    ]  # fmt: skip
    for lane, settings in enumerate(cases):
        sampling = Sampling(seed=lane, **settings)
        lanes.append((row, VerifyWork(lane=lane, pending=0, sampling=sampling, position=2), ()))
    _check(_run(machine, lanes, 8), lanes)


def test_a_row_alone_is_a_row_among_others(machine: Any) -> None:
    rng = np.random.default_rng(12)
    lanes = [_random_lane(rng, lane, 300) for lane in range(2)]
    among = _run(machine, [1, *lanes], 8, seed=1, times=2)  # nothing is left from the first time
    for each in lanes:
        work = each[1]
        alone = _run(machine, [each], 8, seed=2)
        n = alone["said"][work.lane, 0]
        of_ids = slice(0, sample.SAID_IDS + n)
        skip = [sample.FAILED_ID, sample.FAILED_BITS]
        np.testing.assert_array_equal(
            np.delete(alone["said"][work.lane, of_ids], skip),
            np.delete(among["said"][work.lane, of_ids], skip),
        )
    _check(among, [1, *lanes])


def test_idle_rows_and_lanes_are_left_alone(machine: Any) -> None:
    rng = np.random.default_rng(3)
    lanes: list[Lane | int] = [2, _random_lane(rng, 2, 300)]
    a = _run(machine, lanes, 8)
    fresh = _arrays(lanes, 8, logprobs=a["best"].size > 8)
    for lane in (0, 1):
        np.testing.assert_array_equal(a["said"][lane], fresh["said"][lane])
        np.testing.assert_array_equal(a["last"][lane], fresh["last"][lane])
    np.testing.assert_array_equal(a["drawn"][:2], fresh["drawn"][:2])
    _check(a, lanes)


def test_tested_drafts_pass_by_their_probability_or_are_left_out(machine: Any) -> None:
    """Unseeded, p of the draft 0.6, 0.7 or 1; each with its own noise."""
    logits = np.zeros((2, 40), np.float32)
    logits[:, 7] = 4.0
    settings: list[dict[str, Any]] = [{}, {"top_k": 25}] * 6
    settings += [{"top_k": 1}, {"temperature": 0.1}, {"temperature": 0.22}, {"min_p": 0.5}]
    lanes: list[Lane | int] = []
    for lane, each in enumerate(settings):
        sampling = Sampling(seed=77 + lane, **each)
        work = VerifyWork(
            lane=lane, pending=0, draft=(7,), sampling=sampling, position=0, epoch=1
        )  # fmt: skip
        lanes.append((logits, work, ()))
    told = _check(_run(machine, lanes, 32), lanes)
    for some in (told[0:12:2], told[1:12:2]):
        assert {said.n_accepted for said in some} == {0, 1}


def test_noise_depends_on_seed_position_and_epoch_of_the_unseeded(machine: Any) -> None:
    rng = np.random.default_rng(8)
    row = (rng.standard_normal((1, 300)) * 0.1).astype(np.float32)
    base = VerifyWork(lane=0, pending=0, sampling=Sampling(seed=5), position=9)
    seeded = replace(base.sampling, seeded=True)
    works = [
        base,
        replace(base, lane=1, epoch=1),
        replace(base, lane=2, position=10),
        replace(base, lane=3, sampling=Sampling(seed=5 + 2**32)),
        replace(base, lane=4, sampling=seeded),
        replace(base, lane=5, sampling=seeded, epoch=1),
    ]
    a = _run(machine, lanes := [(row, w, ()) for w in works], 8)
    _check(a, lanes)
    ids = a["said"][:, sample.SAID_IDS].tolist()
    assert len(set(ids[:4])) == 4
    assert ids[4] == ids[5] == ids[0]


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_lane_fails_alone_and_only_by_rows_that_it_needs(machine: Any, bad: float) -> None:
    logits = np.zeros((2, 2300), np.float32)
    logits[:, 3] = 90
    logits[1, [2200, 20]] = bad, -bad
    lanes: list[Lane | int] = []
    for lane, (draft, temperature) in enumerate([(3, 0.0), (4, 0.0), (3, 1.0)]):
        sampling = Sampling(temperature=temperature, seeded=True, top_p=0.9)
        work = VerifyWork(lane=lane, pending=0, draft=(draft,), sampling=sampling, position=0)
        lanes.append((logits, work, ()))
    told = _check(_run(machine, lanes, 8), lanes)
    assert [said.failed is None for said in told] == [False, True, False]


def test_failures_of_settings_are_told_in_the_rules_words(machine: Any) -> None:
    row = np.array([[0.5, 1.5, -1.0, 0.0] * 10], np.float32)
    history = History(ids=np.array([1], np.int32), generated=np.array([1], np.int32))
    vanishing = Sampling(repetition=1e-320, temperature=0.0)  # 0 as f32
    none = np.zeros((1, 2), np.uint32)
    lanes: list[Lane | int] = [
        (row, VerifyWork(lane=0, pending=0, sampling=vanishing, position=0, history=history), ()),
        (row, VerifyWork(lane=1, pending=0, sampling=Sampling(), position=0, mask=none), ()),
        (row, VerifyWork(lane=2, pending=0, sampling=Sampling(top_k=2), position=0), ()),
    ]
    told = _check(_run(machine, lanes, 8), lanes)
    assert [said.failed is None for said in told] == [False, False, True]


def test_its_code() -> None:
    check_code([sample.scan, sample.weigh, sample.collect], sample.BLOCK, doubles=True)
    check_code([sample.settle], sample.ROWS_MOST, doubles=True)
