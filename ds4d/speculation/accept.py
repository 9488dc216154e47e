"""The sampler's rule: what one pass of the target over `[pending, *draft]` lets a lane say.

Owns the order of spec/numerics.md 5 from raw logits to accepted ids, the noise behind every draw,
and the two accept rules. It is the normative reference, float64 and written to be read; the
engines' fast forms (`cpu/sampler.py`) give the same ids. It knows no device and no text.

    raw logits -> bias -> penalties -> mask -> temperature 0: argmax
                                            -> min_p -> top_k -> top_p -> p -> draw or accept test

*Filters in logits.* Dividing by T > 0 keeps the order, so top_k and top_p rank adjusted float32
logits, the lower id first where two are equal, and min_p is one float32 cut, max z + T ln(min_p).
Which ids remain therefore never hangs on how an engine rounds its exponentials, but for top_p's
mass at the very edge.

*Noise* is Philox 4x32-10, a function and not a stream, so that nothing depends on how many draws
came before:

    key      (seed & 0xffffffff, seed >> 32)
    counter  (candidate id // 4, position, stream | offset << 8, epoch)
    word     candidate id % 4

`position` is request-local, `stream` one of `Stream`. `epoch`, the restores of the request so far,
is 0 for seeded requests, which must repeat themselves. `offset` is 0 but in `Stream.DRAFT`: how
far behind the pending id a draft lies (1 for the first), so that a position drafted again in a
later cycle, or after a restore, never sees its noise twice.

*Draws* are Gumbel-max: argmax over the remaining ids of ln p + G with G = -ln(-ln(1 - v)) and
v = (word + 1/2) / 2^32. Each id has its own noise. So two engines whose logits differ a little
rarely draw differently, a GPU needs no prefix sum, and a drafter that adds the same G to its own
ln q (stream TARGET, matched sampling only) proposes what the target will draw whenever they agree.
The other way round, with p/q rejection, draft noise must be independent of every later choice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from ds4d.engine import Logprobs
from ds4d.errors import LaneError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from ds4d.engine import DraftWork, History, Sampling, VerifyWork

    F32 = npt.NDArray[np.float32]
    F64 = npt.NDArray[np.float64]
    Ids = npt.NDArray[np.int64]

RESIDUAL_FLOOR = 1e-8
"""Below this mass, p and q differ by rounding only and a rejected draft is redrawn from p."""


class Stream(IntEnum):
    """What a draw is for. Noise of one stream says nothing about that of another."""

    TARGET = 0
    ACCEPT = 1
    RESIDUAL = 2
    DRAFT = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """`ids`: `n_accepted` drafts, then the id drawn. Empty iff `failed`, which names the cause."""

    ids: tuple[int, ...] = ()
    n_accepted: int = 0
    logprobs: tuple[Logprobs, ...] = ()  # one per id, if wanted
    failed: str | None = None


def accept(
    logits: F32, work: VerifyWork, *, q: F64 | None = None, unread: Sequence[int] = ()
) -> Accepted:
    """Accept drafts from the left and draw one id behind them.

    logits   [K+1, V]  raw; row i is the target after the i-th draft
    q        [K, V]    what draft i was drawn from; None: q = 1 at each draft (lookup, forced or
                       argmax drafts)
    unread   ids that the lane has drawn but `work.history` cannot hold yet (LAST_DRAWN)

    Greedy and seeded requests use matched sampling: the token is drawn without looking at the
    draft, which is accepted iff it is that token. Others test u < p/q and on rejection draw from
    max(p - q, 0). Rows behind the last one needed are not looked at, so that a failure there,
    like everything else, does not depend on drafts.
    """
    noise = Noise.of(work)
    ids: list[int] = []
    try:
        for row, draft in enumerate((*work.draft, None)):
            z = adjust(logits[row], work.sampling, work.history, (*unread, *ids))
            check(z, row)
            if work.mask is not None:
                z = masked(z, work.mask[row], row)
            position = work.position + row
            if work.sampling.greedy:
                token = int(z.argmax())  # the first, so the lowest id
            elif work.sampling.seeded or draft is None:
                token = noise.draw(policy(z, work.sampling), Stream.TARGET, position)
            else:
                token = _test(policy(z, work.sampling), draft, q, row, noise, position)
            ids.append(token)
            if token != draft:
                break
    except LaneError as error:
        return Accepted(failed=str(error))
    wanted = work.sampling.top_logprobs
    return Accepted(
        ids=tuple(ids),
        n_accepted=len(ids) - 1,
        logprobs=()
        if wanted is None
        else tuple(logprobs(logits[row], token, wanted) for row, token in enumerate(ids)),
    )


def _test(p: F64, draft: int, q: F64 | None, row: int, noise: Noise, position: int) -> int:
    """`draft` if it passes, else a draw from the residual (Leviathan et al., 2023, algorithm 1).

    Both together have the law p, whatever q was, as long as the draft was drawn from q.
    """
    if q is None:
        q_row = np.zeros_like(p)
        q_row[draft] = 1.0
    else:
        q_row = q[row].astype(np.float64)
    at_draft = float(q_row[draft])
    usable = math.isfinite(at_draft) and at_draft > 0  # else q is not what it was drawn from
    if usable and noise.uniform(Stream.ACCEPT, position) < p[draft] / at_draft:
        return draft
    residual = np.where(p > 0, np.maximum(p - q_row, 0), 0)  # q may be NaN where p is 0
    if not usable or not residual.sum() > RESIDUAL_FLOOR:  # "not >" also refuses a NaN in q
        residual = p
    return noise.draw(residual, Stream.RESIDUAL, position)


# -- from raw logits to p --------------------------------------------------------------------------


def adjust(row: F32, sampling: Sampling, history: History | None, drawn: Sequence[int]) -> F32:
    """Bias, then penalties over `history` and the ids `drawn` since; a new float32 [V].

    Repetition divides positive and multiplies negative logits of every id seen, in the prompt too;
    presence (once) and frequency (per occurrence) are subtracted for ids that were generated.
    """
    z = row.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # `check` names what overflows
        for token, value in sampling.bias:
            z[token] += np.float32(value)
        if not sampling.penalised:
            return z
        seen = np.zeros(z.size, bool)
        generated = np.zeros(z.size, np.int64)
        if history is not None:
            seen[history.ids] = True
            generated[history.ids] = history.generated
        for token in drawn:
            seen[token] = True
            generated[token] += 1
        seen[list(sampling.exempt)] = False
        repetition = np.float32(sampling.repetition)
        repeated = np.where(z > 0, z / repetition, z * repetition)
        penalty = sampling.presence * (generated > 0) + sampling.frequency * generated
        return np.where(seen, repeated - penalty.astype(np.float32), z)


def check(z: F32, row: int) -> None:
    """Raises LaneError, naming row and id, if a logit is not finite."""
    bad = np.flatnonzero(~np.isfinite(z))
    if bad.size:
        raise LaneError(f"row {row}: the logit of id {bad[0]} is {z[bad[0]]}, expected a number")


def masked(z: F32, bits: npt.NDArray[np.uint32], row: int) -> F32:
    """-inf where the bit of an id is clear: id i is bit i % 32 of word i // 32.

    Raises LaneError if nothing is left.
    """
    allowed = (bits[:, None] >> np.arange(32, dtype=np.uint32) & 1).ravel()[: z.size] == 1
    if not allowed.any():
        raise LaneError(f"row {row}: the mask allows no id, expected at least one")
    return np.where(allowed, z, np.float32(-np.inf))


def policy(z: F32, sampling: Sampling) -> F64:
    """p [V]: temperature, min_p, top_k and top_p applied to adjusted logits, renormalised.

    At least one logit is finite and none is NaN or +inf; `sampling` is not greedy. -inf: masked.
    """
    order = np.argsort(-z, kind="stable")  # best first, the lower id first where equal
    order = order[z[order] > -np.inf]
    order = order[z[order] >= min_p_cut(float(z.max()), sampling)]
    if sampling.top_k > 0:
        order = order[: sampling.top_k]
    best = float(z[order[0]])
    weights = np.exp((z[order].astype(np.float64) - best) / sampling.temperature)
    if sampling.top_p < 1:
        mass = weights.cumsum()
        enough = mass >= sampling.top_p * mass[-1]
        n = int(enough.argmax()) + 1
        order, weights = order[:n], weights[:n]
    p = np.zeros(z.size)
    p[order] = weights / weights.sum()
    return p


def min_p_cut(best: float, sampling: Sampling) -> np.float32:
    """Logits below this have p < min_p x the largest p; -inf if min_p is off."""
    if sampling.min_p <= 0:
        return np.float32(-np.inf)
    return np.float32(best + sampling.temperature * math.log(min(sampling.min_p, 1.0)))


def logprobs(row: F32, token: int, n_top: int) -> Logprobs:
    """Of `token` and the `n_top` best ids under the raw logits `row` [V], whatever was sampled."""
    z = row.astype(np.float64)
    z -= z.max()
    z -= math.log(np.exp(z).sum())
    top = np.argsort(-row, kind="stable")[:n_top]
    return Logprobs(chosen=float(z[token]), top=tuple((int(i), float(z[i])) for i in top))


# -- noise -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Noise:
    """All the noise of one request between two restores."""

    seed: int  # taken modulo 2^64
    epoch: int

    @classmethod
    def of(cls, work: VerifyWork | DraftWork) -> Noise:
        return cls(work.sampling.seed, 0 if work.sampling.seeded else work.epoch)

    def uniforms(self, stream: Stream, position: int, ids: Ids, offset: int = 0) -> F64:
        """v in (0, 1), one for each of `ids` [n]; a multiple of 2^-33, so exact."""
        counter = np.empty((ids.size, 4), np.uint32)
        counter[:, 0] = ids // 4
        counter[:, 1:] = position, stream | offset << 8, self.epoch
        words = philox(counter, self.seed)[np.arange(ids.size), ids % 4]
        return (words.astype(np.float64) + 0.5) * 2.0**-32

    def uniform(self, stream: Stream, position: int) -> float:
        """The one number of a stream that has no candidates."""
        return float(self.uniforms(stream, position, np.zeros(1, np.int64))[0])

    def draw(self, p: F64, stream: Stream, position: int, offset: int = 0) -> int:
        """An id with the law p [V], which need not sum to 1 but has a positive entry."""
        ids = np.flatnonzero(p > 0)
        v = self.uniforms(stream, position, ids, offset)
        gumbel = -np.log(-np.log1p(-v))
        return int(ids[(np.log(p[ids]) + gumbel).argmax()])


def philox(counter: npt.NDArray[np.uint32], key: int) -> npt.NDArray[np.uint32]:
    """Philox 4x32-10 (Salmon et al., 2011) of counters [..., 4] under a 64-bit key; [..., 4]."""
    low = np.uint64(0xFFFFFFFF)
    k0, k1 = np.uint64(key & 0xFFFFFFFF), np.uint64(key >> 32 & 0xFFFFFFFF)
    c0, c1, c2, c3 = (counter[..., i].astype(np.uint64) for i in range(4))
    for _ in range(10):
        a, b = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)  # 32 x 32 bits fit 64
        c0, c1, c2, c3 = (
            b >> np.uint64(32) ^ c1 ^ k0,
            b & low,
            a >> np.uint64(32) ^ c3 ^ k1,
            a & low,
        )
        k0, k1 = k0 + np.uint64(0x9E3779B9) & low, k1 + np.uint64(0xBB67AE85) & low
    return np.stack((c0, c1, c2, c3), -1).astype(np.uint32)
