"""Cached rows: the exact bits of spec/model.md 4.11."""

from dataclasses import replace

import numpy as np
import pytest
from oracle import VECTORS, e4m3_samples, missing, small, torch_e4m3

from ds4d.model import rows

TINY = small(head_dim=96, rope_dim=32, index_dim=64)
FLASH = small(head_dim=512, rope_dim=64, index_dim=128)
PLAIN = small()  # 24 unrotated channels, indexer of 16: neither rule applies


def gaussian(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_e4m3_codes_are_those_of_torch_on_every_value_and_midpoint():
    x = e4m3_samples()
    codes, scales = rows.encode_e4m3(x)
    assert (scales == 127).all()
    np.testing.assert_array_equal(codes, np.load(VECTORS / "e4m3.npz")["codes"])


@pytest.mark.oracle
@pytest.mark.skipif(missing() is not None, reason=missing() or "")
@pytest.mark.filterwarnings("default")
def test_the_recorded_e4m3_codes_are_what_torch_answers_today():
    x = e4m3_samples()
    np.testing.assert_array_equal(np.load(VECTORS / "e4m3.npz")["codes"], torch_e4m3(x))


def test_every_e4m3_code_but_nan_decodes_and_encodes_to_itself():
    codes = np.array([c for c in range(256) if c & 127 != 127], np.uint8)
    for code in codes:
        block = np.full((1, 64), 0x7E, np.uint8)  # a 448 holds the scale at 1
        block[0, 0] = code
        again, scales = rows.encode_e4m3(rows.decode_e4m3(block, np.array([[127]], np.uint8)))
        assert scales == 127
        np.testing.assert_array_equal(again, block)


def test_fp4_ties_go_to_the_even_code():
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    below, above = np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(9))
    x = np.zeros(32, np.float32)
    x[:7], x[7:14], x[14:21], x[21:28], x[31] = ties, below, above, -ties, 6
    decoded = rows.decode_fp4(*rows.encode_fp4(x))
    np.testing.assert_array_equal(decoded[:7], [0, 1, 1, 2, 2, 4, 4])
    np.testing.assert_array_equal(decoded[7:14], [0, 0.5, 1, 1.5, 2, 3, 4])
    np.testing.assert_array_equal(decoded[14:21], [0.5, 1, 1.5, 2, 3, 4, 6])
    np.testing.assert_array_equal(decoded[21:28], -decoded[:7])


def test_fp4_byte_j_holds_element_2j_in_its_low_nibble():
    x = np.zeros(32, np.float32)
    x[0], x[1], x[31] = 0.5, -1.5, 6
    codes, scales = rows.encode_fp4(x)
    assert codes[0] == 0x1 | 0xB << 4
    assert codes[15] == 0x7 << 4
    assert scales == 127


@pytest.mark.parametrize(("encode", "largest"), [(rows.encode_e4m3, 448), (rows.encode_fp4, 6)])
def test_a_scale_is_the_least_power_of_two_that_keeps_the_largest_value_in_range(encode, largest):
    for exponent in range(-12, 13):
        edge = np.float32(largest * 2.0**exponent)
        for amax, expected in (
            (edge, exponent),
            (np.nextafter(edge, np.float32(1e9)), exponent + 1),
        ):
            x = np.zeros(64, np.float32)
            x[5] = -amax
            _, scales = encode(x)
            assert scales[0] == 127 + expected


def test_the_floors_give_zero_blocks_their_scale():
    zeros = np.zeros(64, np.float32)
    codes, scales = rows.encode_e4m3(zeros)
    assert scales == 127 - 22  # 2^-22 is the least power of two not below 1e-4 / 448
    assert not codes.any()
    codes, scales = rows.encode_fp4(zeros)
    assert (scales == 1).all()  # 2^-126
    assert not codes.any()


def test_rounding_a_row_errs_by_half_a_step_at_most():
    x = gaussian(50, 512) * np.exp(gaussian(50, 1, seed=1) * 3)
    y = rows.decode_row(rows.encode_row(FLASH, x))
    blocks = np.abs(x[:, :448]).reshape(50, 7, 64)
    amax = np.repeat(blocks.max(-1), 64, axis=1)
    error = np.abs(y - x)[:, :448]
    # Relative 2^-4 of a normal value, half of 2^-9 scales of a subnormal one.
    bound = np.maximum(np.abs(x[:, :448]) * 2.0**-4, amax / 224 * 2.0**-10)
    assert (error <= bound).all()
    np.testing.assert_array_equal(y[:, 448:], x[:, 448:].astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("geometry", [TINY, FLASH, PLAIN])
def test_decoded_rows_encode_to_the_same_values(geometry):
    """The values, not always the bytes: a block whose largest value was rounded down to the next
    scale's range gets another scale byte."""
    x = gaussian(400, geometry.head_dim)
    once = rows.decode_row(rows.encode_row(geometry, x))
    np.testing.assert_array_equal(rows.decode_row(rows.encode_row(geometry, once)), once)
    k = gaussian(400, geometry.index_dim)
    if geometry.index_rows_are_fp4:
        once = rows.decode_fp4(*rows.encode_fp4(k))
        np.testing.assert_array_equal(rows.decode_fp4(*rows.encode_fp4(once)), once)
    else:
        once = rows.decode_index_row(rows.encode_index_row(geometry, k))
        again = rows.decode_index_row(rows.encode_index_row(geometry, once))
        np.testing.assert_array_equal(again, once)


def test_widths_at_flash_sizes_are_583_and_68_bytes():
    for geometry, row, index_row in (
        (FLASH, (448, 7, 64), (64, 4, 0)),
        (TINY, (64, 1, 32), (32, 2, 0)),
        (PLAIN, (0, 0, 32), (0, 0, 16)),
    ):
        assert rows.row_widths(geometry) == row
        assert rows.index_row_widths(geometry) == index_row
        planes = rows.encode_row(geometry, gaussian(3, 2, geometry.head_dim))
        assert tuple(p.shape for p in planes) == tuple((3, 2, n) for n in row)
        planes = rows.encode_index_row(geometry, gaussian(3, 2, geometry.index_dim))
        assert tuple(p.shape for p in planes) == tuple((3, 2, n) for n in index_row)


def test_rows_are_encoded_independently():
    x, k = gaussian(9, 96), gaussian(9, 64)
    for encode, data in ((rows.encode_row, x), (rows.encode_index_row, k)):
        together = encode(TINY, data)
        for i in range(9):
            for alone, plane in zip(encode(TINY, data[i]), together, strict=True):
                np.testing.assert_array_equal(alone, plane[i])


def test_a_geometry_that_fits_neither_rule_keeps_f16_rows():
    x, k = gaussian(4, 32), gaussian(4, 16)
    np.testing.assert_array_equal(
        rows.decode_row(rows.encode_row(PLAIN, x)), x.astype(np.float16).astype(np.float32)
    )
    np.testing.assert_array_equal(
        rows.decode_index_row(rows.encode_index_row(PLAIN, k)),
        k.astype(np.float16).astype(np.float32),
    )
    np.testing.assert_array_equal(rows.round_index_query(PLAIN, k), k)


@pytest.mark.parametrize("n", [32, 64, 128])
def test_hadamard_is_sylvesters_matrix_and_its_own_inverse(n):
    matrix = rows.hadamard(np.eye(n, dtype=np.float64))
    sylvester = np.ones((1, 1))
    while len(sylvester) < n:
        sylvester = np.block([[sylvester, sylvester], [sylvester, -sylvester]])
    np.testing.assert_allclose(matrix, sylvester * n**-0.5, atol=1e-15)
    np.testing.assert_allclose(matrix @ matrix, np.eye(n), atol=1e-14)


def test_scores_of_fp4_rows_and_queries_stay_near_the_unrounded_ones():
    """The Hadamard transform cancels in q.K; only the rounding remains."""
    q, k = gaussian(64, 64), gaussian(200, 64, seed=3)
    exact = q @ k.T
    rounded = (
        rows.round_index_query(TINY, q) @ rows.decode_index_row(rows.encode_index_row(TINY, k)).T
    )
    error = np.sqrt(np.mean((rounded - exact) ** 2) / np.mean(exact**2))
    assert error < 0.2
    assert np.sqrt(np.mean((q @ rows.hadamard(k).T - exact) ** 2) / np.mean(exact**2)) > 1


def test_the_rules_follow_the_widths():
    assert not replace(TINY, head_dim=104).rows_are_e4m3  # 72 unrotated
    assert not replace(TINY, index_dim=96).index_rows_are_fp4
