"""The sampler's fast form for the CPU engine: the ids of `speculation/accept.py`, sooner.

Owns no rule: what is accepted and why is written there, and a test holds the two together over
random logits. Here a greedy row costs two NumPy reductions, an unfiltered draw two passes over the
vocabulary, and top_k and top_p select instead of sorting.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ds4d.cpu import jit
from ds4d.cpu.kernels import sample
from ds4d.engine import Logprobs, Sampling, VerifyWork
from ds4d.errors import LaneError
from ds4d.speculation.accept import RESIDUAL_FLOOR, Accepted, Noise, Stream, check, min_p_cut

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy.typing as npt

    F32 = npt.NDArray[np.float32]
    F64 = npt.NDArray[np.float64]
    I32 = npt.NDArray[np.int32]


def accept_rows(
    logits: F32, work: VerifyWork, *, q: F32 | None = None, unread: Sequence[int] = ()
) -> Accepted:
    """Accept drafts from the left and draw one id behind them, as `speculation.accept.accept`.

    logits [K+1, V] f32, C order, not written; q [K, V] f32: see there, as for `unread`.
    """
    sampling = work.sampling
    noise = Noise.of(work)
    ids: list[int] = []
    try:
        for row, draft in enumerate((*work.draft, None)):
            z = _adjusted(logits[row], work, row, (*unread, *ids))
            token = int(z.argmax())
            if not sampling.greedy:
                kept, weights = _policy(z, float(z[token]), sampling)
                position = work.position + row
                if sampling.seeded or draft is None:
                    token = _race(kept, weights, noise, Stream.TARGET, position)
                else:
                    q_row = None if q is None else q[row]
                    token = _test(kept, weights, draft, q_row, noise, position)
            ids.append(token)
            if token != draft:
                break
    except LaneError as error:
        return Accepted(failed=str(error))
    wanted = sampling.top_logprobs
    chosen = (
        ()
        if wanted is None
        else tuple(_logprobs(logits[row], token, wanted) for row, token in enumerate(ids))
    )
    return Accepted(ids=tuple(ids), n_accepted=len(ids) - 1, logprobs=chosen)


def prepare(cache_dir: Path | None = None) -> None:
    """Compile every kernel so that no answer waits for it; with `cache_dir`, load it from there.

    The folder in it is that of `jit.prepare`; without one, nothing is written anywhere.
    """
    folder = jit.cache_folder(cache_dir)
    if folder is None:
        _run_every_kernel()
        return
    with jit.cache_in(folder):
        for kernel in sample.KERNELS:
            kernel.enable_caching()
    try:
        _run_every_kernel()
    except Exception:  # a damaged file raises whatever unpickling it happens to raise
        for kernel in sample.KERNELS:
            jit.forget(folder, kernel.__name__)
        for _ in sample.KERNELS:
            try:
                return _run_every_kernel()
            except OSError:  # the disk is full: what was compiled stays, unsaved
                continue
        _run_every_kernel()


def _run_every_kernel() -> None:
    """What compiles them, for the one signature that each is ever called with."""
    logits = np.zeros((2, 8), np.float32)
    allowed = np.full((2, 1), 0xFF, np.uint32)
    for top_k, q in ((0, None), (3, np.full((1, 8), 0.125, np.float32))):
        sampling = Sampling(top_k=top_k, top_p=0.9 if top_k else 1.0, frequency=0.1, top_logprobs=1)
        work = VerifyWork(
            lane=0, pending=0, draft=(1,), sampling=sampling, position=0, mask=allowed
        )
        accept_rows(logits, work, q=q)


def _adjusted(raw: F32, work: VerifyWork, row: int, drawn: Sequence[int]) -> F32:
    """`raw` itself if nothing applies, else a new row. Raises LaneError as the reference does."""
    sampling = work.sampling
    z = raw
    if sampling.bias:
        z = z.copy()
        for token, value in sampling.bias:
            z[token] += np.float32(value)
    if sampling.penalised:
        z = z.copy() if z is raw else z
        history = work.history
        none = np.zeros(0, np.int32)
        sample.penalise(
            z,
            none if history is None else history.ids,
            none if history is None else history.generated,
            np.array(drawn, np.int32),
            np.array(sampling.exempt, np.int32),
            float(sampling.repetition),  # a client's 1 is an int, which would compile anew
            float(sampling.presence),
            float(sampling.frequency),
        )
    if not (math.isfinite(z.max()) and math.isfinite(z.min())):  # both let a NaN through
        check(z, row)
    if work.mask is not None:
        z = z.copy() if z is raw else z
        if sample.mask(z, work.mask[row]) == 0:
            raise LaneError(f"row {row}: the mask allows no id, expected at least one")
    return z


def _policy(z: F32, best: float, sampling: Sampling) -> tuple[I32, F64]:
    """Ids [n] that the filters leave, in any order, and their weights [n], not normalised."""
    cut, temperature = min_p_cut(best, sampling), float(sampling.temperature)
    if 0 < sampling.top_k < z.size:
        ids = _best(z, sampling.top_k)
        ids = ids[z[ids] >= cut]
    else:
        ids = sample.above(z, cut)
    if sampling.top_p >= 1:
        return ids, sample.weigh(z, ids, best, temperature)
    ids, need = sample.likely(z, ids, best, temperature, float(sampling.top_p))
    ids = sample.ranked(z, ids)
    weights = sample.weigh(z, ids, best, temperature)
    n = int(weights.cumsum().searchsorted(need)) + 1
    return ids[:n], weights[:n]


def _best(z: F32, n: int) -> I32:
    """The `n` best ids of z [V], best first, the lower id first where equal; -inf never counts."""
    floor = np.partition(z, z.size - n)[z.size - n]
    ids: I32 = sample.ranked(z, sample.above(z, floor))
    return ids[:n]


def _test(kept: I32, weights: F64, draft: int, q: F32 | None, noise: Noise, position: int) -> int:
    """As `accept._test`, on the ids that have a weight."""
    p = weights / weights.sum()
    at_draft = 1.0 if q is None else float(q[draft])
    p_draft = float(p[kept == draft].sum())  # 0 if the filters dropped it
    usable = math.isfinite(at_draft) and at_draft > 0
    if usable and noise.uniform(Stream.ACCEPT, position) < p_draft / at_draft:
        return draft
    residual = np.maximum(p - ((kept == draft) if q is None else q[kept].astype(np.float64)), 0)
    if not usable or not residual.sum() > RESIDUAL_FLOOR:
        residual = p
    return _race(kept, residual, noise, Stream.RESIDUAL, position)


def _race(ids: I32, weights: F64, noise: Noise, stream: Stream, position: int) -> int:
    return int(
        sample.race(
            ids,
            weights,
            np.uint64(noise.seed & 0xFFFFFFFFFFFFFFFF),
            np.uint64(position),
            np.uint64(stream),
            np.uint64(noise.epoch),
        )
    )


def _logprobs(raw: F32, token: int, n_top: int) -> Logprobs:
    """As `accept.logprobs`."""
    best = float(raw.max())
    log_mass = float(sample.log_mass(raw, best))
    top = _best(raw, min(n_top, raw.size)) if n_top else ()
    return Logprobs(
        chosen=float(raw[token]) - best - log_mass,
        top=tuple((int(i), float(raw[i]) - best - log_mass) for i in top),
    )
