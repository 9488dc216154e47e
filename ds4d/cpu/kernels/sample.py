"""The O(V) loops of the sampler: penalties, masks, sort keys, weights, and the Gumbel race.

    penalise   z_i -> (z_i > 0 ? z_i / r : z_i r) - f32(presence [n_i > 0] + frequency n_i)
    mask       z_i -> -inf where bit i is clear
    ranked     ids by z descending, id ascending
    weigh      w_i = exp((z_i - max z) / T)
    race       argmin E_i / w_i with E_i = -ln(1 - v_i), v_i Philox noise

The race is Gumbel-max after a monotone map: ln w + G is largest where E / w is smallest. Because
E >= v, most ids are out of the race before their logarithm is taken. Logits are float32; weights
and scores are float64 because they cost nothing here and make these loops pick what
`speculation/accept.py`, their reference, picks. Which ids play is decided in `cpu/sampler.py`,
which also compiles and caches `KERNELS`. A division by zero gives an infinity, which the checks
there turn into the failure of one lane.
"""

import numpy as np
from numba import njit

U32 = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)
BINS = 256
SIGN = np.uint32(0x80000000)
M0, M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
W0, W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)


@njit(nogil=True, error_model="numpy")
def penalise(z, ids, generated, drawn, exempt, repetition, presence, frequency):
    """In place on z [V] f32; `ids`, `generated` [n] i32 the history, `drawn`, `exempt` i32.

    Every id is changed once, with its count in `generated` and `drawn` together.
    """
    r = np.float32(repetition)
    for i in range(ids.size + drawn.size):
        if i < ids.size:
            token, count = ids[i], generated[i]
        else:  # a drawn id that the history doesn't know, at its first occurrence
            token, count = drawn[i - ids.size], np.int32(0)
            known = False
            for j in range(ids.size):
                known |= ids[j] == token
            for j in range(i - ids.size):
                known |= drawn[j] == token
            if known:
                continue
        free = False
        for j in range(exempt.size):
            free |= exempt[j] == token
        if free:
            continue
        n = np.int64(count)
        for j in range(drawn.size):
            if drawn[j] == token:
                n += 1
        x = z[token] / r if z[token] > 0 else z[token] * r
        z[token] = x - np.float32(presence * (n > 0) + frequency * n)


@njit(nogil=True, error_model="numpy")
def mask(z, bits):
    """In place on z [V] f32; bits [ceil(V/32)] u32. How many ids are left."""
    left = 0
    for word in range((z.size + 31) // 32):
        b = bits[word]
        for i in range(32 * word, min(32 * word + 32, z.size)):
            if b >> np.uint32(i & 31) & np.uint32(1):
                left += 1
            else:
                z[i] = -np.inf
    return left


@njit(nogil=True, error_model="numpy")
def above(z, cut):
    """Ids [n] i32, ascending, with z >= cut and z > -inf."""
    ids = np.empty(z.size, np.int32)
    n = 0
    for i in range(z.size):
        ids[n] = i
        n += (z[i] >= cut) & (z[i] > -np.inf)
    return ids[:n]


@njit(nogil=True, error_model="numpy")
def ranked(z, ids):
    """`ids` [n] i32 by z descending, id ascending: one sort of u64 keys.

    Upper half of a key: the IEEE bits of z, made monotone and falling; lower half: the id.
    """
    keys = np.empty(ids.size, np.uint64)
    bits = (z[ids] + np.float32(0)).view(np.uint32)  # + 0: -0.0 and 0.0 are one value
    for i in range(ids.size):
        b = bits[i]
        falling = b if b & SIGN else ~(b | SIGN)
        keys[i] = np.uint64(falling) << HALF | np.uint64(ids[i])
    keys.sort()
    order = np.empty(ids.size, np.int32)
    for i in range(ids.size):
        order[i] = np.int32(keys[i] & U32)
    return order


@njit(nogil=True, error_model="numpy")
def weigh(z, ids, best, temperature):
    """Weights [n] f64 of `ids` [n]; the best id has 1."""
    weights = np.empty(ids.size, np.float64)
    for i in range(ids.size):
        weights[i] = np.exp((np.float64(z[ids[i]]) - best) / temperature)
    return weights


@njit(nogil=True, error_model="numpy")
def likely(z, ids, best, temperature, top_p):
    """A superset of the top_p nucleus of `ids` [n], and the mass that the nucleus must reach.

    A histogram of the mass over ln w, in steps of an eighth, shows how deep the nucleus goes; so
    only about as many ids as it holds have to be sorted.
    """
    bins = np.zeros(BINS, np.float64)
    total = 0.0
    for i in range(ids.size):
        x = (best - np.float64(z[ids[i]])) / temperature
        w = np.exp(-x)
        total += w
        bins[np.int64(min(8 * x, BINS - 1.0))] += w
    need = top_p * total
    depth, reached = 0, bins[0]
    while depth < BINS - 1 and reached < need * (1 + 1e-9):  # beyond the rounding of these sums
        depth += 1
        reached += bins[depth]
    kept = np.empty(ids.size, np.int32)
    n = 0
    for i in range(ids.size):
        x = (best - np.float64(z[ids[i]])) / temperature
        kept[n] = ids[i]
        n += np.int64(min(8 * x, BINS - 1.0)) <= depth
    return kept[:n], need


@njit(nogil=True, error_model="numpy")
def log_mass(z, best):
    """ln of the sum of exp(z - best) over z [V]."""
    total = 0.0
    for i in range(z.size):
        total += np.exp(np.float64(z[i]) - best)
    return np.log(total)


@njit(nogil=True, error_model="numpy")
def philox(c0, c1, c2, c3, seed):
    """Philox 4x32-10: counter words and results are u64 below 2^32, `seed` is the 64-bit key."""
    k0, k1 = seed & U32, seed >> HALF
    for _ in range(10):
        a, b = c0 * M0, c2 * M1
        c0, c1, c2, c3 = b >> HALF ^ c1 ^ k0, b & U32, a >> HALF ^ c3 ^ k1, a & U32
        k0, k1 = k0 + W0 & U32, k1 + W1 & U32
    return c0, c1, c2, c3


@njit(nogil=True, error_model="numpy")
def race(ids, weights, seed, position, stream, epoch):
    """The winner among `ids` [n] i32 in any order; -1 if no weight [n] f64 is positive."""
    best, winner = np.inf, -1
    block = np.uint64(1) << HALF  # none
    words = (block, block, block, block)
    for i in range(ids.size):
        w = weights[i]
        if not w > 0:
            continue
        token = np.uint64(ids[i])
        if token >> np.uint64(2) != block:
            block = token >> np.uint64(2)
            words = philox(block, position, stream, epoch, seed)
        v = (np.float64(words[token & np.uint64(3)]) + 0.5) * 2.0**-32
        if v > best * w:
            continue
        e = -np.log1p(-v) / w
        if e < best or (e == best and ids[i] < winner):
            best, winner = e, np.int64(ids[i])
    return winner


KERNELS = (above, likely, log_mass, mask, penalise, race, ranked, weigh)
