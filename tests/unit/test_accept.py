"""The sampler's rule: order of the filters, noise, and that what is drawn has the law it should.

Statistical tests have fixed seeds, so they cannot flicker. Each compares N draws with exact
probabilities by chi-square at a threshold that a right sampler crosses once in 10,000 seeds. Over
8 ids, errors of the probabilities are caught with probability 0.99 when their weighted relative RMS
is 17 % (N = 2,000) or 12 % (N = 4,000); `test_a_law_that_is_slightly_off_is_noticed` tries it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING

import numpy as np
import pytest

from ds4d.engine import History, Sampling, VerifyWork
from ds4d.errors import LaneError
from ds4d.speculation.accept import Noise, Stream, accept, adjust, masked, philox, policy

if TYPE_CHECKING:
    from collections.abc import Sequence

LOGITS = np.array([2.0, 1.5, 1.5, 0.0, -1.0, 0.7, 1.1, -3.0], np.float32)
N_DRAWS = 4000


def work(draft: Sequence[int] = (), position: int = 0, epoch: int = 0, **settings) -> VerifyWork:
    history = settings.pop("history", None)
    mask = settings.pop("mask", None)
    return VerifyWork(
        lane=0,
        pending=0,
        draft=tuple(draft),
        sampling=Sampling(**settings),
        position=position,
        epoch=epoch,
        history=history,
        mask=mask,
    )


def bits(*allowed: int, n_vocab: int = 8) -> np.ndarray:
    row = np.zeros((1, -(-n_vocab // 32)), np.uint32)
    for i in allowed:
        row[0, i // 32] |= np.uint32(1 << i % 32)
    return row


def chi_square(counts: np.ndarray, p: np.ndarray) -> float:
    """Statistic over its threshold at 1e-4 (Wilson and Hilferty): above 1 means another law."""
    assert not counts[p == 0].any(), "drew an id of probability 0"
    expected = counts.sum() * p[p > 0]
    degrees = expected.size - 1
    if degrees == 0:
        return 0.0
    statistic = ((counts[p > 0] - expected) ** 2 / expected).sum()
    spread = 2 / (9 * degrees)
    return statistic / (degrees * (1 - spread + 3.719 * math.sqrt(spread)) ** 3)


def softmax(z: Sequence[float]) -> np.ndarray:
    w = np.exp(np.asarray(z, np.float64) - max(z))
    return w / w.sum()


# -- noise -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF,) * 4, 2**64 - 1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0A4093822,
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_known_answers_of_random123(counter, key, words):
    got = philox(np.array(counter, np.uint32), key)
    assert " ".join(f"{w:08x}" for w in got) == words


def test_noise_lies_where_the_documentation_says():
    noise = Noise(seed=0x1234567890ABCDEF, epoch=7)
    counter = np.array([1030 // 4, 99, Stream.DRAFT | 3 << 8, 7], np.uint32)
    word = philox(counter, 0x1234567890ABCDEF)[1030 % 4]
    got = noise.uniforms(Stream.DRAFT, 99, np.array([1030]), offset=3)
    assert got[0] == (int(word) + 0.5) / 2**32


def test_an_ids_noise_does_not_depend_on_which_other_ids_play():
    noise = Noise(seed=5, epoch=0)
    everybody = noise.uniforms(Stream.TARGET, 12, np.arange(100))
    some = np.array([3, 97, 40, 41])
    assert np.array_equal(noise.uniforms(Stream.TARGET, 12, some), everybody[some])


def test_every_part_of_the_key_changes_the_noise():
    ids = np.arange(64)
    rows = [
        Noise(seed, epoch).uniforms(stream, position, ids, offset)
        for seed in (0, 1, 1 << 32)
        for epoch in (0, 1)
        for stream in Stream
        for position in (0, 1)
        for offset in (0, 1)
    ]
    assert len(np.unique(np.concatenate(rows))) > 64 * len(rows) - 5  # 32-bit collisions are rare


def test_seeds_are_taken_modulo_2_to_the_64():
    ids = np.arange(8)
    a = Noise(-1, 0).uniforms(Stream.TARGET, 0, ids)
    assert np.array_equal(a, Noise(2**64 - 1, 0).uniforms(Stream.TARGET, 0, ids))


# -- order -----------------------------------------------------------------------------------------


def test_bias_acts_before_repetition_and_repetition_before_presence_and_frequency():
    history = History(ids=np.array([0, 1], np.int32), generated=np.array([2, 0], np.int32))
    s = Sampling(bias=((0, 2.0),), repetition=2.0, presence=0.25, frequency=0.5)
    z = adjust(np.array([2.0, -1.0, 3.0], np.float32), s, history, ())
    assert z.tolist() == [(2 + 2) / 2 - 0.25 - 2 * 0.5, -1 * 2, 3]


def test_accepted_drafts_and_unread_ids_count_as_generated():
    history = History(ids=np.array([4], np.int32), generated=np.array([0], np.int32))
    s = Sampling(presence=1.0, frequency=0.25)
    z = adjust(np.zeros(6, np.float32), s, history, (4, 5, 5))
    assert z.tolist() == [0, 0, 0, 0, -1.25, -1.5]


def test_penalties_see_each_accepted_draft_in_the_row_behind_it():
    rows = np.array([[3, 0, 0, 0], [3, 2.5, 0, 0], [3, 2.5, 2.4, 0]], np.float32)
    none = History(ids=np.zeros(0, np.int32), generated=np.zeros(0, np.int32))
    got = accept(rows, work((0, 1), temperature=0.0, presence=1.0, history=none))
    assert got.ids == (0, 1, 2)
    assert got.n_accepted == 2
    late = accept(rows[:1], work(temperature=0.0, presence=1.0, history=none), unread=(0, 0))
    assert late.ids == (0,)
    late = accept(rows[1:2], work(temperature=0.0, presence=1.0, history=none), unread=(0,))
    assert late.ids == (1,)


def test_exempt_ids_are_never_penalised():
    history = History(ids=np.array([1, 2], np.int32), generated=np.array([3, 3], np.int32))
    s = Sampling(repetition=1.5, presence=1.0, frequency=1.0, exempt=(1,))
    z = adjust(np.ones(3, np.float32), s, history, (1,))
    assert z[1] == 1
    assert z[2] < 0


def test_the_mask_wins_over_bias():
    got = accept(LOGITS[None], work(temperature=0.0, bias=((3, 100.0),), mask=bits(4, 7)))
    assert got.ids == (4,)


def test_bits_behind_the_vocabulary_mean_nothing():
    z = masked(LOGITS, np.array([0xFFFFFF02], np.uint32), 0)
    assert np.flatnonzero(z > -np.inf).tolist() == [1]
    with pytest.raises(LaneError, match="row 2: the mask allows no id"):
        masked(LOGITS, np.array([0xFFFFFF00], np.uint32), 2)


@pytest.mark.parametrize("temperature", [0.0, 9e-6])
def test_without_temperature_the_lowest_of_the_best_ids_is_taken(temperature):
    row = np.array([[0, 2, 5, 5, 5]], np.float32)
    assert accept(row, work(temperature=temperature)).ids == (2,)


def test_temperature_divides_the_logits():
    assert np.allclose(policy(LOGITS, Sampling(temperature=0.6)), softmax(LOGITS / 0.6))


def test_min_p_is_relative_to_the_best_id():
    p = policy(LOGITS, Sampling(min_p=0.6, temperature=1.0))
    assert np.flatnonzero(p).tolist() == [0, 1, 2]  # e^-0.5 = 0.607; e^-0.9 is not enough
    assert p.sum() == pytest.approx(1)


def test_top_k_breaks_ties_towards_the_lower_id():
    assert np.flatnonzero(policy(LOGITS, Sampling(top_k=2))).tolist() == [0, 1]


def test_top_p_is_the_smallest_set_that_reaches_its_mass():
    equal = np.zeros(8, np.float32)
    for top_p, n in ((0.0, 1), (0.125, 1), (0.126, 2), (0.5, 4), (0.99, 8), (1.0, 8)):
        p = policy(equal, Sampling(top_p=top_p))
        assert np.flatnonzero(p).tolist() == list(range(n)), top_p


def test_top_p_counts_the_mass_of_what_min_p_and_top_k_left():
    z = np.log(np.array([0.4, 0.3, 0.2, 0.1])).astype(np.float32)
    assert np.flatnonzero(policy(z, Sampling(top_p=0.57))).size == 2
    assert np.flatnonzero(policy(z, Sampling(top_p=0.57, top_k=2))).size == 1  # 0.4 of 0.7
    assert np.flatnonzero(policy(z, Sampling(top_p=0.57, min_p=0.7))).size == 1


# -- laws ------------------------------------------------------------------------------------------

SETTINGS = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"min_p": 0.3},
    {"top_k": 3},
    {"top_p": 0.8},
    {"top_p": 0.9, "top_k": 6, "min_p": 0.05, "temperature": 1.3},
    {"bias": ((7, 4.0), (0, -1.0))},
    {"mask": bits(1, 3, 4, 6, 7)},
    {
        "repetition": 1.3,
        "presence": 0.4,
        "frequency": 0.2,
        "history": History(ids=np.array([0, 5], np.int32), generated=np.array([2, 0], np.int32)),
    },
]


def exact(settings: dict) -> np.ndarray:
    w = work(**settings)
    z = adjust(LOGITS, w.sampling, w.history, ())
    return policy(z if w.mask is None else masked(z, w.mask[0], 0), w.sampling)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("vary", ["position", "seed"])
def test_draws_follow_p(settings, vary):
    w = work(**settings, seed=11, seeded=True)
    p = exact(settings)
    counts = np.zeros(8)
    for i in range(2000):
        if vary == "seed":
            trial = dataclasses.replace(w, sampling=dataclasses.replace(w.sampling, seed=i))
        else:
            trial = dataclasses.replace(w, position=i)
        counts[accept(LOGITS[None], trial).ids[0]] += 1
    assert chi_square(counts, p) < 1


def test_a_law_that_is_slightly_off_is_noticed():
    """Drawn at temperature 1; tested against 1, against 0.85, and against errors of 17 %."""
    counts = np.zeros(8)
    for position in range(2000):
        counts[accept(LOGITS[None], work(position=position, seed=3, seeded=True)).ids[0]] += 1
    p = softmax(LOGITS)
    assert chi_square(counts, p) < 1
    assert chi_square(counts, softmax(LOGITS / 0.85)) > 1
    uneven = p * np.where(np.arange(8) % 2, 1.17, 0.83)
    assert chi_square(counts, uneven / uneven.sum()) > 1


# -- drafts ----------------------------------------------------------------------------------------


def test_greedy_accepts_while_the_draft_is_the_argmax():
    rows = np.eye(4, 6, dtype=np.float32)
    for n in range(4):
        draft = [0, 1, 2][:n] + [5] * (3 - n)
        got = accept(rows, work(draft, temperature=0.0))
        assert got.ids == (0, 1, 2, 3)[: n + 1]
        assert got.n_accepted == n


def test_seeded_output_does_not_depend_on_drafts():
    """Whatever is drafted, the ids are a beginning of what single draws give."""
    rng = np.random.default_rng(8)
    for trial in range(60):
        rows = rng.standard_normal((4, 6)).astype(np.float32) * 2
        settings = {"seed": trial, "seeded": True, "top_p": 0.9}
        alone = [
            accept(rows[i : i + 1], work(position=40 + i, **settings)).ids[0] for i in range(4)
        ]
        draft = rng.integers(0, 6, 3)
        draft[: trial % 4] = alone[: trial % 4]
        got = accept(rows, work(draft.tolist(), position=40, **settings))
        assert list(got.ids) == alone[: len(got.ids)]
        assert got.n_accepted >= min(trial % 4, 3)
        assert accept(rows, work(draft.tolist(), position=40, epoch=9, **settings)) == got


def test_a_restore_gives_unseeded_requests_new_noise():
    draws = [
        [accept(LOGITS[None], work(position=i, epoch=epoch)).ids[0] for i in range(50)]
        for epoch in (0, 1)
    ]
    assert draws[0] != draws[1]


def test_a_drafter_that_shares_the_noise_proposes_what_the_target_draws():
    s = Sampling(seed=21, seeded=True)
    agreed = 0
    for position in range(200):
        near = LOGITS + np.float32(0.05) * np.cos(np.arange(8, dtype=np.float32) + position)
        draft = Noise(s.seed, 0).draw(policy(near, s), Stream.TARGET, position)
        w = work((draft,), position, seed=21, seeded=True)
        agreed += accept(np.stack((LOGITS, LOGITS)), w).n_accepted
    assert agreed > 180  # independent noise would agree in sum p^2 = 20 % of the cases


P, Q = np.array([0.7, 0.3]), np.array([0.2, 0.8])


def _reject(p: np.ndarray, q: np.ndarray | None, draft: int, position: int):
    rows = np.log(np.stack((p, np.ones_like(p)))).astype(np.float32)
    return accept(rows, work((draft,), position, seed=77), q=None if q is None else q[None])


def test_rejection_gives_p_and_accepts_the_overlap_of_p_and_q():
    rng = np.random.default_rng(1)
    accepted, counts = 0, np.zeros(2)
    for position in range(N_DRAWS):
        got = _reject(P, Q, int(rng.random() < Q[1]), 2 * position)
        accepted += got.n_accepted
        counts[got.ids[0]] += 1
    assert chi_square(counts, P) < 1
    overlap = np.minimum(P, Q).sum()
    assert (
        chi_square(np.array([accepted, N_DRAWS - accepted]), np.array([overlap, 1 - overlap])) < 1
    )


def test_equal_laws_always_accept():
    rng = np.random.default_rng(2)
    p = softmax(LOGITS)
    for position in range(300):
        draft = int(rng.choice(8, p=p))
        q = policy(np.log(p).astype(np.float32), Sampling())
        assert _reject(p, q, draft, 2 * position).n_accepted == 1


def test_a_draft_without_q_is_accepted_with_its_own_probability():
    """Half the tests reject, and id 0 plays in the residual draw: the accept test's noise, that of
    id 0 in its stream, would give itself away here."""
    p = np.array([0.2, 0.25, 0.05, 0.5])
    counts, accepted = np.zeros(4), 0
    for position in range(N_DRAWS // 2):
        got = _reject(p, None, 3, 2 * position)
        accepted += got.n_accepted
        counts[got.ids[0]] += 1
    assert chi_square(counts, p) < 1
    assert chi_square(np.array([accepted, N_DRAWS // 2 - accepted]), np.array([0.5, 0.5])) < 1


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_a_useless_q_is_answered_with_a_draw_from_p(bad):
    counts = np.zeros(8)
    q = np.full(8, bad)
    for position in range(N_DRAWS // 4):
        counts[_reject(softmax(LOGITS), q, 5, 2 * position).ids[0]] += 1
    assert chi_square(counts, softmax(LOGITS)) < 1


def test_a_draft_that_the_filters_dropped_is_never_said():
    for position in range(200):
        w = work((7,), position, top_k=3, seed=4)
        got = accept(np.stack((LOGITS, LOGITS)), w, q=np.full((1, 8), 0.125))
        assert got.n_accepted == 0
        assert got.ids[0] in (0, 1, 2)


TARGET = np.log(np.array([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6], [0.1, 0.8, 0.1]])).astype(np.float32)
DRAFTER = np.array([[0.3, 0.3, 0.4], [0.5, 0.3, 0.2], [0.3, 0.3, 0.4]])


def _emit(seed: int, peek: bool) -> tuple[int, ...]:
    """Three ids of a Markov chain, starting behind id 0, with up to two drafts a cycle."""
    ids: list[int] = []
    noise = Noise(seed, 0)
    while len(ids) < 3:
        pending, position = ids[-1] if ids else 0, len(ids)
        draft, q, last = [], [], pending
        for k in range(min(2, 2 - position)):
            q.append(DRAFTER[last])
            last = noise.draw(DRAFTER[last], Stream.DRAFT, position + k, offset=k + 1)
            draft.append(last)
        if peek and draft and draft[0] != 0:  # verifies only what it likes the look of
            draft, q = [], []
        rows = TARGET[[pending, *draft]]
        got = accept(rows, work(draft, position, seed=seed), q=np.array(q) if draft else None)
        ids.extend(got.ids)
    return tuple(ids[:3])


@pytest.mark.parametrize(("peek", "right"), [(False, True), (True, False)])
def test_three_ids_have_their_joint_law_unless_the_planner_peeks(peek, right):
    """The second case shows that the first could fail."""
    triples = list(itertools.product(range(3), repeat=3))
    chain = np.exp(TARGET.astype(np.float64))
    chain /= chain.sum(1, keepdims=True)
    p = np.array([chain[0, a] * chain[a, b] * chain[b, c] for a, b, c in triples])
    counts = np.zeros(27)
    for seed in range(N_DRAWS):
        counts[triples.index(_emit(seed, peek))] += 1
    assert bool(chi_square(counts, p) < 1) is right


# -- answers ---------------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_raw_logits_whatever_was_sampled():
    s = {"temperature": 0.0, "bias": ((3, 50.0),), "top_logprobs": 3}
    got = accept(np.stack((LOGITS, LOGITS)), work((3,), **s))
    p = np.log(softmax(LOGITS))
    assert got.ids == (3, 3)
    assert [x.chosen for x in got.logprobs] == pytest.approx([p[3], p[3]], abs=1e-6)
    assert [i for i, _ in got.logprobs[0].top] == [0, 1, 2]
    assert [x for _, x in got.logprobs[0].top] == pytest.approx(p[:3], abs=1e-6)
    assert accept(LOGITS[None], work(temperature=0.0)).logprobs == ()
    assert accept(LOGITS[None], work(temperature=0.0, top_logprobs=0)).logprobs[0].top == ()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_logit_that_is_no_number_fails_the_lane_and_is_named(bad, temperature):
    rows = np.stack((LOGITS, LOGITS))
    rows[1, 6] = bad
    failed = accept(rows, work((0,), temperature=temperature, bias=((0, 90.0),)))
    assert failed.failed == f"row 1: the logit of id 6 is {bad}, expected a number"
    assert failed.ids == ()
    assert failed.n_accepted == 0
    fine = accept(rows, work((1,), temperature=temperature, bias=((0, 90.0),)))
    assert fine.ids == (0,)  # the draft was wrong, so nobody asked row 1


def test_a_penalty_that_overflows_fails_the_lane():
    history = History(ids=np.array([0], np.int32), generated=np.array([1], np.int32))
    got = accept(LOGITS[None], work(repetition=1e-45, history=history))
    assert got.failed is not None
    assert "id 0 is inf" in got.failed
