"""Sampling and acceptance on the device: the ids of `speculation/accept.py`, which is the rule and
the reference (spec/numerics.md 5, spec/api.md 3, spec/dspark.md 3.3).

    z = logits -> + bias -> penalties -> (each finite?) -> mask      rule GREEDY: argmax z, else
    w_i = exp((z_i - max z) / T)                                     over z_i >= max z + T ln(min_p)
    keep the top_k best, of these the fewest best with sum w >= top_p sum of all w
    race: argmin -ln(1 - v_i) / w_i, v_i the noise of id i           the id drawn
    rule TESTED: the draft if u < w_draft / sum w, else the race's winner among the other ids
    lane: the drafts that were drawn, from the left, then the first id that is no draft

Row i of a lane is used only if the drafts before it were accepted, so its penalties may count them
beforehand, and all rows are drawn at once. Drafts are lookup or forced ones, q = 1. With a real q
(a drafter's) the race of a TESTED row takes max(p - q, 0) for w and `decide` tests u < p / q.

Four kernels: `scan` edits, checks, finds argmax; `weigh` takes the weights, draws the rows without
top_k and top_p, and for the others finds how deep they can reach; `collect` lists the ids down to
there, and a row's last block selects among them and draws; `settle` accepts, one thread a lane.
Greedy rows are done after `scan`, one pass over their logits; a step of greedy rows alone is
`scan` and `settle`.

A row is cut into slices of SLICE ids, one block each. The kernels' y is a *job*: rows first, then,
where log-probabilities may be wanted, each row once more as it came (raw, T = 1, top_k = n_top).

What is summed is whole numbers: a weight counts as rint(w 2^44), of which V <= 2^18 fit 64 bits. So
no order matters, and sums are within V 2^-45 of the truth: 4e-9 of the best id's weight at most.
Weights and scores are f64 as on the CPU, so that the ids are the CPU's. Rows, other lanes, grid and
time have no influence. An f64 operation of a GB10 is 64 times slower than one of f32: at V =
129,280 that makes some 25 us (estimated) an unfiltered row; with min_p next to nothing, as only ids
above the cut are weighed.

Arrays, of R rows, L lanes, J jobs (R or 2R), S slices, V ids (a multiple of 4), stride a multiple
of 4. Idle rows hold -1 in `lane`; nothing is written for them.

    logits       f4 [R, stride]  raw, not written. `scan` and `weigh` read it once, `collect` too
    lane, token  i4 [R]  the row's lane; its input id. The row's draft is the next row's input, if
                         that is of the same lane, else it has none
    settings     i4 [R, SETTINGS]  u4 words as their bits:
      RULE 0                     GREEDY, MATCHED (seeded, or no drafts) or TESTED
      POSITION 1                 request-local position of the id to draw, first row's + i
      SEED_LOW 2, SEED_HIGH 3, EPOCH 4    key and counter of the noise; epoch 0 if seeded
      TOP_K 5                    0 or at least V: off
      N_TOP 6                    log-probabilities wanted beside the id's, to TOP_MOST; -1: none
      BIAS_AT 7, N_BIAS 8, SEEN_AT 9, N_SEEN 10, EXEMPT_AT 11, N_EXEMPT 12    parts of lists below
      PENALISED 13, UNREAD 14, MASKED 15  flags; UNREAD: the lane's first input is drawn, but the
                                          history lacks it (LAST_DRAWN)
    factors      f8 [R, FACTORS]
      TEMPERATURE 0, DROP 1 (T ln(min_p), -inf: off), TOP_P 2, REPETITION 3, PRESENCE 4, FREQUENCY 5
    bias_ids i4, bias_values f4; seen_ids, seen_counts i4; exempt_ids i4: lists, ids of a part
                         distinct. Counts are of generated ids, 0 of those in the prompt alone
    mask         u4 [R, ceil(V / 32)]  id i is bit i % 32 of word i // 32; set: allowed
    said         i4 [L, SAID]  result: number of ids (0: failed), failing row of the lane or -1,
                         failing id (NOTHING: the mask allows none), bits of its logit, the ids
    last         i4 [L]  the last of the ids; not written if the lane failed
    chosen       f8 [R]  log-softmax of raw logits at the row's id, of rows that said one
    top_ids i4, top_logprobs f8 [R, TOP_MOST]  the n_top best, best first, ties to the lower id
    between kernels: edited f4 [R, stride]; best i8, mass i8, deep i4 [J]; bins u4 [J, BINS];
                         drawn, failed i4, draft_mass i8, draft_score, log_mass f8 [R]; ids i4
                         [J, S SLICE]; slice_best i8, slice_winner, slice_n i4,
                         slice_score f8 [J, S]; tally u4 [J], zero before the first launch

scan, weigh, collect: grid (S, J), block 256, shared 8.6, 1.3 and 3.4 KB. settle: grid 1, block 32.
"""

import math

import numpy as np
from numba import cuda
from numba.cuda.types import float32, float64, int32, int64, uint32, uint64

from ds4d.gpu.jit import device, kernel
from ds4d.gpu.kernels import ptx, warp

BLOCK = 256
WARPS = BLOCK // 32
HELD = 2 * WARPS
SLICE = 2048  # ids a block: 64 blocks a row of 129,280
SLICES_MOST = 128
STARTS = SLICES_MOST + 1
ROWS_MOST = 32

GREEDY, MATCHED, TESTED = 0, 1, 2
TARGET, ACCEPT, RESIDUAL = 0, 1, 2  # streams of noise, as `accept.Stream`
RULE, POSITION, SEED_LOW, SEED_HIGH, EPOCH, TOP_K, N_TOP = 0, 1, 2, 3, 4, 5, 6
BIAS_AT, N_BIAS, SEEN_AT, N_SEEN, EXEMPT_AT, N_EXEMPT = 7, 8, 9, 10, 11, 12
PENALISED, UNREAD, MASKED, SETTINGS = 13, 14, 15, 16
TEMPERATURE, DROP, TOP_P, REPETITION, PRESENCE, FREQUENCY, FACTORS = 0, 1, 2, 3, 4, 5, 8
N_IDS, FAILED_ROW, FAILED_ID, FAILED_BITS, SAID_IDS, SAID = 0, 1, 2, 3, 4, 4 + ROWS_MOST
TOP_MOST = 20

FINE, NOTHING = -1, -2  # of `failed`; else an id
NO_ID = 0x3FFFFFFF  # ids have 30 bits
BAD = 1 << 32  # ranks above every number
LOW = 0xFFFFFFFF
SIGN = 0x80000000
NUMBERS = 0x7F800000  # bits of f32 infinity: at and above it, the sign aside, there are no numbers
BINS = 256  # of depth (max z - z) / T, in steps of 1 / STEPS
STEPS = 8.0
UNIT = 2.0**44  # of mass: sums of 2^18 weights stay below 2^63
ULP = 2.0**-32
RESIDUAL_FLOOR = 1e-8  # as in accept.py
SLACK = 1e-6  # of a mass that is only estimated; beyond the rounding of any sum here
M0, M1, W0, W1 = 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85
INF = math.inf


def n_slices(n_vocab):
    return -(-n_vocab // SLICE)


def shapes(n_rows, n_vocab, n_lanes, *, stride, logprobs, n_bias, n_seen, n_exempt):
    """Name -> (shape, dtype) of every array. `n_bias` and so on: capacity of the lists."""
    assert n_vocab % 4 == 0 and stride % 4 == 0, "rows are read 16 bytes at a time"
    assert n_vocab <= SLICES_MOST * SLICE and n_rows <= ROWS_MOST
    rows, lanes, jobs, slices = n_rows, n_lanes, n_rows * (1 + logprobs), n_slices(n_vocab)
    per_row = {"lane": "i4", "token": "i4", "drawn": "i4", "failed": "i4", "draft_mass": "i8",
               "draft_score": "f8", "log_mass": "f8", "chosen": "f8"}  # fmt: skip
    per_job = {"best": "i8", "mass": "i8", "deep": "i4", "tally": "u4"}
    per_slice = {"slice_best": "i8", "slice_winner": "i4", "slice_n": "i4",
                 "slice_score": "f8"}  # fmt: skip
    return {
        "logits": ((rows, stride), "f4"),
        "edited": ((rows, stride), "f4"),
        "settings": ((rows, SETTINGS), "i4"),
        "factors": ((rows, FACTORS), "f8"),
        "mask": ((rows, -(-n_vocab // 32)), "u4"),
        "bias_ids": ((max(n_bias, 1),), "i4"),
        "bias_values": ((max(n_bias, 1),), "f4"),
        "seen_ids": ((max(n_seen, 1),), "i4"),
        "seen_counts": ((max(n_seen, 1),), "i4"),
        "exempt_ids": ((max(n_exempt, 1),), "i4"),
        "said": ((lanes, SAID), "i4"),
        "last": ((lanes,), "i4"),
        "top_ids": ((rows, TOP_MOST), "i4"),
        "top_logprobs": ((rows, TOP_MOST), "f8"),
        "bins": ((jobs, BINS), "u4"),
        "ids": ((jobs, slices * SLICE), "i4"),
        **{name: ((rows,), dtype) for name, dtype in per_row.items()},
        **{name: ((jobs,), dtype) for name, dtype in per_job.items()},
        **{name: ((jobs, slices), dtype) for name, dtype in per_slice.items()},
    }


def set_row(settings, factors, sampling, *, position, epoch, lists, unread, masked, drafts):
    """Fill a row of `settings` [SETTINGS] and `factors` [FACTORS]. `sampling` as in engine.py,
    `lists` the six numbers BIAS_AT .. N_EXEMPT, `drafts`: whether its lane has any."""
    if sampling.greedy:
        rule = GREEDY
    else:
        rule = MATCHED if sampling.seeded or not drafts else TESTED
    words = settings.view(np.uint32)
    words[SEED_LOW] = sampling.seed & LOW
    words[SEED_HIGH] = sampling.seed >> 32 & LOW
    words[EPOCH] = 0 if sampling.seeded else epoch & LOW
    words[POSITION] = position & LOW
    settings[RULE] = rule
    settings[TOP_K] = min(sampling.top_k, NO_ID)
    settings[N_TOP] = -1 if sampling.top_logprobs is None else min(sampling.top_logprobs, TOP_MOST)
    settings[BIAS_AT : N_EXEMPT + 1] = lists
    settings[PENALISED : MASKED + 1] = sampling.penalised, unread, masked
    factors[TEMPERATURE] = sampling.temperature
    drop = -INF
    if sampling.min_p > 0:  # in the words of accept.min_p_cut, which adds the best logit
        drop = sampling.temperature * math.log(min(sampling.min_p, 1.0))
    factors[DROP : FREQUENCY + 1] = (
        drop, sampling.top_p, sampling.repetition, sampling.presence, sampling.frequency,
    )  # fmt: skip


# -- a block together: 256 threads, `held` i8 [HELD] of shared memory -------------------------


@device
def block_greatest(x, held):
    """In every thread."""
    x = warp.greatest(x)
    cuda.syncthreads()  # `held` is free
    if cuda.threadIdx.x % 32 == 0:
        held[cuda.threadIdx.x // 32] = x
    cuda.syncthreads()
    for i in range(WARPS):
        x = held[i] if held[i] > x else x
    return x


@device
def block_count(x, held):
    """Running sum up to this thread, its own number included, and the sum of all; int64."""
    tid = cuda.threadIdx.x
    for i in range(5):
        other = cuda.shfl_up_sync(warp.ALL, x, 1 << i)
        x += other if tid % 32 >= 1 << i else int64(0)
    cuda.syncthreads()  # `held` is free
    if tid % 32 == 31:
        held[tid // 32] = x
    cuda.syncthreads()
    whole = int64(0)
    for i in range(WARPS):
        if i == tid // 32:
            x += whole
        whole += held[i]
    return x, whole


@device
def block_rank(flag, held):
    """How many threads up to this one have the flag, itself included, and how many in all."""
    tid = cuda.threadIdx.x
    votes = int64(cuda.ballot_sync(warp.ALL, flag)) & LOW
    if tid % 32 == 0:
        held[WARPS + tid // 32] = int64(cuda.popc(votes))
    cuda.syncthreads()
    rank = int64(cuda.popc(votes & ((2 << tid % 32) - 1)))
    whole = int64(0)
    for i in range(WARPS):
        if i == tid // 32:
            rank += whole
        whole += held[WARPS + i]
    cuda.syncthreads()  # its half of `held` is free again
    return rank, whole


@device
def block_first(score, winner, scores, winners):
    """The lowest score and its id, the lower id of equals; in every thread."""
    for i in range(5):
        s = cuda.shfl_xor_sync(warp.ALL, score, 16 >> i)
        w = cuda.shfl_xor_sync(warp.ALL, winner, 16 >> i)
        if s < score or (s == score and w < winner):
            score, winner = s, w
    cuda.syncthreads()  # `scores` and `winners` are free
    if cuda.threadIdx.x % 32 == 0:
        scores[cuda.threadIdx.x // 32] = score
        winners[cuda.threadIdx.x // 32] = winner
    cuda.syncthreads()
    for i in range(WARPS):
        if scores[i] < score or (scores[i] == score and winners[i] < winner):
            score, winner = scores[i], winners[i]
    return score, winner


@device
def last_of(tally, job, n, held):
    """Whether all other blocks of the job are through; what they wrote is seen then."""
    cuda.syncthreads()  # this block's results are written
    if cuda.threadIdx.x == 0:
        held[0] = int64(ptx.arrive(tally, job))
    cuda.syncthreads()
    last = held[0] == n - 1
    if last and cuda.threadIdx.x == 0:
        tally[job] = uint32(0)
    return last


# -- numbers -----------------------------------------------------------------------------------


@device
def rising(z):
    """An int64 below 2^32 that orders as z does; zeros of both signs are equal."""
    bits = int64(ptx.as_u4(z + float32(0)))
    return LOW - bits if bits >= SIGN else bits + SIGN


@device
def value(key):
    """The z of `rising`, f64."""
    bits = key - SIGN if key >= SIGN else LOW - key
    return float64(ptx.as_f4(uint32(bits)))


@device
def depth_bin(depth):
    return int64(min(depth * STEPS, BINS - 1.0))


@device
def counted(w):
    return int64(w * UNIT + 0.5)


@device
def philox(block, stream, settings, row):
    """Four words of noise, of the ids 4 block .. 4 block + 3: Philox 4x32-10 (accept.py)."""
    at = row * SETTINGS
    low = uint64(LOW)
    k0 = uint64(int64(settings[at + SEED_LOW]) & LOW)
    k1 = uint64(int64(settings[at + SEED_HIGH]) & LOW)
    c0, c1 = uint64(block), uint64(int64(settings[at + POSITION]) & LOW)
    c2, c3 = uint64(stream), uint64(int64(settings[at + EPOCH]) & LOW)
    for _ in range(10):
        a, b = c0 * uint64(M0), c2 * uint64(M1)
        c0 = (b >> uint64(32)) ^ c1 ^ k0
        c1 = b & low
        c2 = (a >> uint64(32)) ^ c3 ^ k1
        c3 = a & low
        k0 = (k0 + uint64(W0)) & low
        k1 = (k1 + uint64(W1)) & low
    return c0, c1, c2, c3


@device
def uniform(word):
    """In (0, 1), exact."""
    return (float64(word) + 0.5) * ULP


@device
def race(word, w, most):
    """-ln(1 - v) / w, or infinity where it is above `most`: -ln(1 - v) >= v, so a logarithm is
    taken by few."""
    v = uniform(word)
    if v > most * w:
        return float64(INF)
    return -math.log1p(-v) / w


# -- rows --------------------------------------------------------------------------------------


@device
def draft_of(row, lane, token, n_rows):
    """The id that the row tests, or -1."""
    if row + 1 < n_rows and lane[row + 1] == lane[row]:
        return int64(token[row + 1])
    return int64(-1)


@device
def is_edited(row, settings):
    at = row * SETTINGS
    return settings[at + N_BIAS] > 0 or settings[at + PENALISED] > 0 or settings[at + MASKED] > 0


@device
def stream_of(row, draft, settings):
    return RESIDUAL if draft >= 0 and settings[row * SETTINGS + RULE] == TESTED else TARGET


@device
def is_narrow(row, raw, n_vocab, settings, factors):
    """Whether a number or a mass of best ids is to be found."""
    at = row * SETTINGS
    if raw:
        return settings[at + N_TOP] > 0
    few = settings[at + TOP_K] > 0 and settings[at + TOP_K] < n_vocab
    return few or factors[row * FACTORS + TOP_P] < 1.0


@device
def is_wanted(row, raw, lane, settings, failed):
    """Whether `weigh` and `collect` have to do with the job."""
    if lane[row] < 0:
        return False
    if failed[row] != FINE:
        return False
    if raw:
        return settings[row * SETTINGS + N_TOP] >= 0
    return settings[row * SETTINGS + RULE] != GREEDY


@device
def is_exempt(token, at, exempt_ids, settings):
    free = False
    for i in range(settings[at + N_EXEMPT]):
        free = free or exempt_ids[settings[at + EXEMPT_AT] + i] == token
    return free


@device
def penalised(z, n, row, factors):
    at = row * FACTORS
    r = float32(factors[at + REPETITION])
    x = z / r if z > float32(0) else z * r
    once = factors[at + PRESENCE] if n > 0 else 0.0
    return x - float32(once + factors[at + FREQUENCY] * float64(n))


@device
def decide(row, winner, score, whole, draft, stream, drawn, draft_mass, draft_score, settings):
    """The row's id; by one thread."""
    if stream == RESIDUAL:
        odds = float64(draft_mass[row]) / float64(whole)
        word = philox(0, ACCEPT, settings, row)[0]
        rest = float64(whole - draft_mass[row]) / float64(whole)
        if uniform(word) < odds:
            winner = draft
        elif not rest > RESIDUAL_FLOOR:  # only rounding is left: all of p takes part
            if draft_score[row] < score or (draft_score[row] == score and draft < winner):
                winner = draft
    drawn[row] = int32(winner)


# -- scan --------------------------------------------------------------------------------------


@device
def edit(z, n, first, row, known, said, lane, token, settings, factors,
         bias_ids, bias_values, seen_ids, seen_counts, exempt_ids):  # fmt: skip
    """Bias and penalties of the `n` ids from `first` on; z, known, said lie in shared memory."""
    tid, at = cuda.threadIdx.x, row * SETTINGS
    for i in range(tid, settings[at + N_BIAS], BLOCK):
        place = bias_ids[settings[at + BIAS_AT] + i] - first
        if place >= 0 and place < n:
            z[place] += bias_values[settings[at + BIAS_AT] + i]
    if settings[at + PENALISED] == 0:
        cuda.syncthreads()  # z has its bias
        return
    start = row  # the lane's first row
    while start > 0 and lane[start - 1] == lane[row]:
        start -= 1
    unread = settings[at + UNREAD]
    n_said = row - start + unread
    if tid < n_said:
        said[tid] = token[start + 1 - unread + tid]
        known[tid] = 0
    cuda.syncthreads()  # z has its bias, `said` and `known` are filled
    for i in range(tid, settings[at + N_SEEN], BLOCK):
        seen = seen_ids[settings[at + SEEN_AT] + i]
        place = seen - first
        if place >= 0 and place < n:
            count = int64(seen_counts[settings[at + SEEN_AT] + i])
            for k in range(n_said):
                if said[k] == seen:
                    count += 1
                    known[k] = 1
            if not is_exempt(seen, at, exempt_ids, settings):
                z[place] = penalised(z[place], count, row, factors)
    cuda.syncthreads()  # `known` is whole
    if tid < n_said and known[tid] == 0:
        place = said[tid] - first
        count = int64(0)
        earlier = False
        for k in range(n_said):
            if said[k] == said[tid]:
                count += 1
                earlier = earlier or k < tid
        if place >= 0 and place < n and not earlier:
            if not is_exempt(said[tid], at, exempt_ids, settings):
                z[place] = penalised(z[place], count, row, factors)
    cuda.syncthreads()  # z has its penalties


@kernel(
    "i8* best, i8* mass, u4* bins, i4* drawn, i4* failed, i8* draft_mass, f8* draft_score, "
    "f4* edited, i8* slice_best, u4* tally, f4* logits, i4* lane, i4* token, "
    "i4* settings, f8* factors, i4* bias_ids, f4* bias_values, i4* seen_ids, i4* seen_counts, "
    "i4* exempt_ids, u4* mask, i4 n_rows, i4 n_vocab, i4 stride",
    block=BLOCK,
)
def scan(best, mass, bins, drawn, failed, draft_mass, draft_score, edited, slice_best,
         tally, logits, lane, token, settings, factors, bias_ids, bias_values, seen_ids,
         seen_counts, exempt_ids, mask, n_rows, n_vocab, stride):  # fmt: skip
    tid, slice_, job = cuda.threadIdx.x, cuda.blockIdx.x, cuda.blockIdx.y
    n = cuda.gridDim.x
    row, raw = job % n_rows, job >= n_rows
    ptx.let_next_begin()
    ptx.wait_for_front()
    if lane[row] < 0 or (raw and settings[row * SETTINGS + N_TOP] < 0):
        return
    z = cuda.shared.array(SLICE, float32)
    held = cuda.shared.array(HELD, int64)
    known = cuda.shared.array(ROWS_MOST, int32)
    said = cuda.shared.array(ROWS_MOST, int32)
    first = slice_ * SLICE
    size = min(SLICE, n_vocab - first)
    base = int64(row) * stride + first
    for i in range(4 * tid, size, 4 * BLOCK):
        a, b, c, d = ptx.load16(logits, base + i)
        ptx.store16(z, i, a, b, c, d)
    cuda.syncthreads()  # the slice is in `z`
    changed = is_edited(row, settings) and not raw
    masked = settings[row * SETTINGS + MASKED] > 0 and not raw
    if changed:
        edit(z, size, first, row, known, said, lane, token, settings, factors,
             bias_ids, bias_values, seen_ids, seen_counts, exempt_ids)  # fmt: skip
    found = int64(-1)
    words = (n_vocab + 31) // 32
    for i in range(tid, size, BLOCK):
        x, token_id = z[i], first + i
        key = rising(x)
        allowed = True
        if masked:
            allowed = (mask[row * words + token_id // 32] >> (token_id % 32)) & 1 == 1
        if int64(ptx.as_u4(x)) & NUMBERS == NUMBERS:
            key = int64(BAD)
        if allowed or key == BAD:
            found = max(found, key << 30 | (NO_ID - token_id))
        if changed:
            edited[base + i] = x if allowed else float32(-INF)
    found = block_greatest(found, held)
    if tid == 0:
        slice_best[job * n + slice_] = found
    if not last_of(tally, job, n, held):
        return
    found = slice_best[job * n + tid] if tid < n else int64(-1)
    found = block_greatest(found, held)
    bins[job * BINS + tid] = uint32(0)  # for `weigh`, as what follows
    if tid == 0:
        best[job] = found
        mass[job] = int64(0)
        if not raw:
            first_best = int32(NO_ID - (found & NO_ID))
            drawn[row] = first_best
            failed[row] = int32(NOTHING) if found < 0 else int32(FINE)
            if found >> 30 == BAD:
                failed[row] = first_best
            draft_mass[row] = int64(0)
            draft_score[row] = float64(INF)


# -- weigh -------------------------------------------------------------------------------------


@kernel(
    "i8* mass, u4* bins, i4* deep, i4* drawn, i8* draft_mass, f8* draft_score, f8* log_mass, "
    "f8* slice_score, i4* slice_winner, u4* tally, i8* best, i4* failed, f4* edited, f4* logits, "
    "i4* lane, i4* token, i4* settings, f8* factors, i4 n_rows, i4 n_vocab, i4 stride",
    block=BLOCK,
)
def weigh(mass, bins, deep, drawn, draft_mass, draft_score, log_mass, slice_score, slice_winner,
          tally, best, failed, edited, logits, lane, token, settings, factors, n_rows, n_vocab,
          stride):  # fmt: skip
    tid, slice_, job = cuda.threadIdx.x, cuda.blockIdx.x, cuda.blockIdx.y
    n = cuda.gridDim.x
    row, raw = job % n_rows, job >= n_rows
    ptx.let_next_begin()
    ptx.wait_for_front()
    if not is_wanted(row, raw, lane, settings, failed):
        return
    held = cuda.shared.array(HELD, int64)
    scores = cuda.shared.array(WARPS, float64)
    winners = cuda.shared.array(WARPS, int64)
    counts = cuda.shared.array(BINS, uint32)
    counts[tid] = uint32(0)
    cuda.syncthreads()  # `counts` is zero
    narrow = is_narrow(row, raw, n_vocab, settings, factors)
    racing = not narrow and not raw
    draft = draft_of(row, lane, token, n_rows)
    stream = stream_of(row, draft, settings)
    most = value(best[job] >> 30)
    temperature = 1.0 if raw else factors[row * FACTORS + TEMPERATURE]
    cut = float32(-INF) if raw else float32(most + factors[row * FACTORS + DROP])
    source = edited if is_edited(row, settings) and not raw else logits
    first = slice_ * SLICE
    size = min(SLICE, n_vocab - first)
    base = int64(row) * stride + first
    whole, score, winner = int64(0), float64(INF), int64(-1)
    four = cuda.local.array(4, float32)
    noise = cuda.local.array(4, uint64)
    for i in range(4 * tid, size, 4 * BLOCK):
        a, b, c, d = ptx.load16(source, base + i)
        four[0], four[1], four[2], four[3] = (
            ptx.as_f4(a), ptx.as_f4(b), ptx.as_f4(c), ptx.as_f4(d),
        )  # fmt: skip
        any_left = False
        for k in range(4):
            any_left = any_left or (four[k] >= cut and four[k] > float32(-INF))
        if any_left:
            if racing:
                noise[0], noise[1], noise[2], noise[3] = philox(
                    (first + i) // 4, stream, settings, row
                )
            for k in range(4):
                if four[k] >= cut and four[k] > float32(-INF):
                    depth = (most - float64(four[k])) / temperature
                    w = math.exp(-depth)
                    whole += counted(w)
                    if narrow and depth_bin(depth) < BINS - 1:
                        ptx.add(counts, depth_bin(depth), uint32(1))
                    if racing and w > 0.0:
                        if stream == RESIDUAL and first + i + k == draft:
                            draft_mass[row] = counted(w)
                            draft_score[row] = race(noise[k], w, float64(INF))
                        else:
                            e = race(noise[k], w, score)
                            if e < score:  # ids rise, so the lower of equals stays
                                score, winner = e, int64(first + i + k)
    _, whole = block_count(whole, held)
    if tid == 0:
        ptx.add(mass, job, whole)
    if racing:
        score, winner = block_first(score, winner, scores, winners)
        if tid == 0:
            slice_score[job * n + slice_] = score
            slice_winner[job * n + slice_] = int32(winner)
    if narrow and counts[tid] > 0:  # `block_count` had its barriers
        ptx.add(bins, job * BINS + tid, counts[tid])
    if not last_of(tally, job, n, held):
        return
    whole = mass[job]
    if racing:
        score, winner = float64(INF), int64(-1)
        if tid < n:
            score, winner = slice_score[job * n + tid], int64(slice_winner[job * n + tid])
        score, winner = block_first(score, winner, scores, winners)
        if tid == 0:
            decide(row, winner, score, whole, draft, stream, drawn, draft_mass, draft_score,
                   settings)  # fmt: skip
    if raw and tid == 0:
        log_mass[row] = math.log(float64(whole) / UNIT)
    if narrow:
        # The first bin that holds the top_k-th id; without top_k, the first below which there lies
        # less than 1 - top_p of the mass, if every id there weighed what its bin allows.
        number = settings[row * SETTINGS + N_TOP] if raw else settings[row * SETTINGS + TOP_K]
        few = number > 0 and number < n_vocab
        amount = int64(bins[job * BINS + tid])
        if few:
            need = int64(number)
        else:
            amount *= counted(math.exp(-float64(tid) / STEPS)) + 1
            need = int64(0)
        mine, total = block_count(amount, held)
        if not few:
            below = n_vocab * (counted(math.exp(-(BINS - 1.0) / STEPS)) + 1)
            rest = (1.0 - factors[row * FACTORS + TOP_P]) * (1.0 - SLACK) * float64(whole)
            need = total + below - int64(rest)
        if tid == 0:
            deep[job] = BINS - 1
        cuda.syncthreads()  # what follows is written after it
        if mine >= need and (tid == 0 or mine - amount < need):
            deep[job] = tid


# -- collect -----------------------------------------------------------------------------------


@device
def listed(c, job, n, starts, ids):
    """The c-th id of a job's list: `n` parts, of which part s begins at `starts[s]`."""
    low, high = 0, n
    while high - low > 1:
        middle = (low + high) // 2
        if starts[middle] <= c:
            low = middle
        else:
            high = middle
    return int64(ids[(job * n + low) * SLICE + c - starts[low]])


@device
def is_kept(behind, token_id, limit, last):
    """Ids rank by how far their z lies behind the best one, then by themselves."""
    return behind < limit or (behind == limit and token_id <= last)


@kernel(
    "i4* drawn, i8* draft_mass, f8* draft_score, i4* top_ids, f8* top_logprobs, i4* ids, "
    "i4* slice_n, u4* tally, f8* log_mass, i8* mass, i4* deep, i8* best, i4* failed, f4* edited, "
    "f4* logits, i4* lane, i4* token, i4* settings, f8* factors, i4 n_rows, i4 n_vocab, i4 stride",
    block=BLOCK,
)
def collect(drawn, draft_mass, draft_score, top_ids, top_logprobs, ids, slice_n, tally, log_mass,
            mass, deep, best, failed, edited, logits, lane, token, settings, factors, n_rows,
            n_vocab, stride):  # fmt: skip
    tid, slice_, job = cuda.threadIdx.x, cuda.blockIdx.x, cuda.blockIdx.y
    n = cuda.gridDim.x
    row, raw = job % n_rows, job >= n_rows
    ptx.let_next_begin()
    ptx.wait_for_front()
    if not is_wanted(row, raw, lane, settings, failed):
        return
    if not is_narrow(row, raw, n_vocab, settings, factors):
        return
    held = cuda.shared.array(HELD, int64)
    scores = cuda.shared.array(WARPS, float64)
    winners = cuda.shared.array(WARPS, int64)
    starts = cuda.shared.array(STARTS, int32)
    amounts = cuda.shared.array(BINS, int64)
    found = cuda.shared.array(4, int64)
    top_behind = cuda.shared.array(32, int64)
    top_id = cuda.shared.array(32, int64)
    key = best[job] >> 30
    most = value(key)
    temperature = 1.0 if raw else factors[row * FACTORS + TEMPERATURE]
    cut = float32(-INF) if raw else float32(most + factors[row * FACTORS + DROP])
    source = edited if is_edited(row, settings) and not raw else logits
    first, base = slice_ * SLICE, int64(row) * stride

    # The slice's ids down to the bin `deep`, ascending.
    n_listed = int64(0)
    for i in range(0, min(SLICE, n_vocab - first), BLOCK):
        here = False
        if first + i + tid < n_vocab:
            x = source[base + first + i + tid]
            if x >= cut and x > float32(-INF):
                here = depth_bin((most - float64(x)) / temperature) <= deep[job]
        place, more = block_rank(here, held)
        if here:
            ids[(job * n + slice_) * SLICE + n_listed + place - 1] = first + i + tid
        n_listed += more
    if tid == 0:
        slice_n[job * n + slice_] = int32(n_listed)
    if not last_of(tally, job, n, held):
        return

    # Where each slice's part begins in the job's list, and how far back the list goes.
    place, n_listed = block_count(int64(slice_n[job * n + tid]) if tid < n else int64(0), held)
    if tid == 0:
        starts[0] = 0
    if tid < n:
        starts[tid + 1] = int32(place)
    cuda.syncthreads()  # `starts` is filled
    span = int64(0)
    for c in range(tid, n_listed, BLOCK):
        span = max(span, key - rising(source[base + listed(c, job, n, starts, ids)]))
    span = block_greatest(span, held)

    # Twice a selection by the digits of "behind": of so many ids, then of so much mass.
    limit, last = int64(1) << 32, int64(NO_ID)
    number = settings[row * SETTINGS + N_TOP] if raw else settings[row * SETTINGS + TOP_K]
    top_p = 1.0 if raw else factors[row * FACTORS + TOP_P]
    few = number > 0 and number < n_vocab
    by_mass = not few or number >= n_listed
    need = float64(number)
    for _ in range(int64(not by_mass) + int64(top_p < 1.0)):
        if by_mass:
            whole = mass[job]
            if few:
                part = int64(0)
                for c in range(tid, n_listed, BLOCK):
                    token_id = listed(c, job, n, starts, ids)
                    behind = key - rising(source[base + token_id])
                    if is_kept(behind, token_id, limit, last):
                        part += counted(math.exp(-(most - value(key - behind)) / temperature))
                _, whole = block_count(part, held)
            need = top_p * float64(whole)
        digits, before, shift = int64(0), int64(0), 24
        while shift > 0 and span >> shift == 0:
            shift -= 8
        while shift >= 0:
            amounts[tid] = int64(0)
            cuda.syncthreads()  # `amounts` is zero
            for c in range(tid, n_listed, BLOCK):
                token_id = listed(c, job, n, starts, ids)
                behind = key - rising(source[base + token_id])
                if behind >> (shift + 8) == digits and is_kept(behind, token_id, limit, last):
                    amount = int64(1)
                    if by_mass:
                        amount = counted(math.exp(-(most - value(key - behind)) / temperature))
                    ptx.add(amounts, (behind >> shift) & 255, amount)
            cuda.syncthreads()  # `amounts` is whole
            mine = amounts[tid]
            upto, _ = block_count(mine, held)
            enough = float64(before + upto) >= need
            enough_before = tid > 0 and float64(before + upto - mine) >= need
            if (enough and not enough_before) or (tid == 255 and not enough):
                found[0] = int64(tid)
                found[1] = before + upto - mine
            cuda.syncthreads()  # `found` holds the digit and what lies before it
            digits = digits << 8 | found[0]
            before = found[1]
            shift -= 8
        # Of the ids with this very z, the lowest m complete it.
        unit = int64(1)
        if by_mass:
            unit = counted(math.exp(-(most - value(key - digits)) / temperature))
        m = int64(1)
        if unit > 0:
            m = max(m, int64((need - float64(before)) / float64(unit)))
        if m > 1 and float64(before + (m - 1) * unit) >= need:
            m -= 1
        while float64(before + m * unit) < need and m < n_vocab:
            m += 1
        if tid == 0:
            found[2] = int64(NO_ID)
        passed = int64(0)
        for c in range(0, n_listed, BLOCK):
            here, token_id = False, int64(0)
            if c + tid < n_listed:
                token_id = listed(c + tid, job, n, starts, ids)
                behind = key - rising(source[base + token_id])
                here = behind == digits and is_kept(behind, token_id, limit, last)
            place, more = block_rank(here, held)
            if here and passed + place == m:
                found[2] = token_id
            passed += more
        cuda.syncthreads()  # `found` holds the last id
        limit, last, by_mass = digits, found[2], True

    if raw:
        passed = int64(0)
        for c in range(0, n_listed, BLOCK):
            here, token_id, behind = False, int64(0), int64(0)
            if c + tid < n_listed:
                token_id = listed(c + tid, job, n, starts, ids)
                behind = key - rising(source[base + token_id])
                here = is_kept(behind, token_id, limit, last)
            place, more = block_rank(here, held)
            if here and passed + place <= TOP_MOST:
                top_behind[passed + place - 1] = behind
                top_id[passed + place - 1] = token_id
            passed += more
        cuda.syncthreads()  # the best ids are there, in ascending order
        passed = min(passed, int64(TOP_MOST))
        if tid < passed:
            rank = 0
            for k in range(passed):
                if is_kept(top_behind[k], k, top_behind[tid], tid - 1):
                    rank += 1
            top_ids[row * TOP_MOST + rank] = int32(top_id[tid])
            top_logprobs[row * TOP_MOST + rank] = (
                value(key - top_behind[tid]) - most - log_mass[row]
            )
        return

    draft = draft_of(row, lane, token, n_rows)
    stream = stream_of(row, draft, settings)
    part, score, winner = int64(0), float64(INF), int64(-1)
    for c in range(tid, n_listed, BLOCK):
        token_id = listed(c, job, n, starts, ids)
        behind = key - rising(source[base + token_id])
        if is_kept(behind, token_id, limit, last):
            w = math.exp(-(most - value(key - behind)) / temperature)
            part += counted(w)
            n0, n1, n2, n3 = philox(token_id // 4, stream, settings, row)
            low, high = (n0, n2) if token_id % 4 % 2 == 0 else (n1, n3)
            word = low if token_id % 4 < 2 else high
            if stream == RESIDUAL and token_id == draft:
                draft_mass[row] = counted(w)
                draft_score[row] = race(word, w, float64(INF)) if w > 0.0 else float64(INF)
            elif w > 0.0:
                e = race(word, w, score)
                if e < score:  # ids rise in each thread
                    score, winner = e, token_id
    _, whole = block_count(part, held)  # its barriers show the draft's numbers, too
    score, winner = block_first(score, winner, scores, winners)
    if tid == 0:
        decide(row, winner, score, whole, draft, stream, drawn, draft_mass, draft_score, settings)


# -- settle ------------------------------------------------------------------------------------


@kernel(
    "i4* said, i4* last, f8* chosen, i4* drawn, i4* failed, i8* best, f8* log_mass, f4* edited, "
    "f4* logits, i4* lane, i4* token, i4* settings, i4 n_rows, i4 stride",
    block=ROWS_MOST,
)
def settle(said, last, chosen, drawn, failed, best, log_mass, edited, logits, lane, token, settings,
           n_rows, stride):  # fmt: skip
    start = cuda.threadIdx.x
    ptx.let_next_begin()
    ptx.wait_for_front()
    if start >= n_rows or lane[start] < 0:
        return
    mine = lane[start]
    if start > 0 and lane[start - 1] == mine:
        return
    to = mine * SAID
    said[to + FAILED_ROW] = -1
    row, n, going = start, 0, True
    while going:
        if failed[row] != FINE:
            said[to + FAILED_ROW] = row - start
            said[to + FAILED_ID] = failed[row]
            if failed[row] >= 0:
                source = edited if is_edited(row, settings) else logits
                bits = ptx.as_u4(source[int64(row) * stride + failed[row]])
                said[to + FAILED_BITS] = int32(bits)
            n, going = 0, False
        else:
            said[to + SAID_IDS + n] = drawn[row]
            n += 1
            if settings[row * SETTINGS + N_TOP] >= 0:
                z = float64(logits[int64(row) * stride + drawn[row]])
                chosen[row] = z - value(best[n_rows + row] >> 30) - log_mass[row]
            going = drawn[row] >= 0 and drawn[row] == draft_of(row, lane, token, n_rows)
            row += 1
    said[to + N_IDS] = n
    if n > 0:
        last[mine] = drawn[row - 1]


# -- launchers ---------------------------------------------------------------------------------


def launches(n_rows, n_vocab, *, sampled, logprobs):
    """(kernel, grid, block) of a step in order. `sampled`: rows may be other than greedy."""
    grid = n_slices(n_vocab), n_rows * (1 + logprobs)
    middle = (weigh, collect) if sampled or logprobs else ()
    return [*((k, grid, BLOCK) for k in (scan, *middle)), (settle, 1, ROWS_MOST)]


def arguments(each, arrays, numbers):
    """A kernel's, by the names in its signature."""
    return [arrays[n] if letters.endswith("*") else numbers[n] for n, letters in each.parameters]


def sample(stream, arrays, *, n_rows, n_vocab, stride, sampled, logprobs, dependent=False):
    """Draw and accept. `arrays`: by the names of `shapes`; J = 2R iff `logprobs`, without which
    N_TOP must be -1 in all rows."""
    assert n_vocab % 4 == 0 and stride % 4 == 0 and n_rows <= ROWS_MOST
    numbers = {"n_rows": n_rows, "n_vocab": n_vocab, "stride": stride}
    for each, grid, block in launches(n_rows, n_vocab, sampled=sampled, logprobs=logprobs):
        given = arguments(each, arrays, numbers)
        each.launch(stream, grid, block, *given, dependent=dependent)
