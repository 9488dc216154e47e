"""Block formats against the gguf package, and the quantisers."""

import hashlib

import gguf
import numpy as np
import pytest

from ds4d.model import grid
from ds4d.model.quants import Quant, Tensor, dequantize, dequantize_rows, quantize

RNG = np.random.default_rng(7)
BLOCKED = (Quant.Q8_0, Quant.Q2_K, Quant.Q4_K, Quant.IQ2_XXS, Quant.MXFP4)
EDGE_HALVES = np.array(
    [0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x7BFF, 0xFBFF, 0x3C00, 0x1234, 0xB555], "<u2"
)
"""±0, the least and greatest subnormals, the least normal, ±65504, 1 and two more."""
HALVES_AT = {Quant.Q8_0: (0,), Quant.Q2_K: (80, 82), Quant.Q4_K: (0, 2), Quant.IQ2_XXS: (0,)}


def random_blocks(quant: Quant, n: int) -> np.ndarray:
    raw = RNG.integers(0, 256, (n, quant.block_bytes), dtype=np.uint8)
    for at in HALVES_AT.get(quant, ()):
        halves = RNG.choice(EDGE_HALVES, n)
        halves[n // 2 :] = RNG.normal(0, 1, n - n // 2).astype("<f2").view("<u2")
        raw[:, at : at + 2] = halves.view(np.uint8).reshape(n, 2)
    if quant is Quant.MXFP4:
        raw[:, 0] = np.arange(n) % 256  # every exponent, the subnormal and the absurd ones too
    return raw


@pytest.mark.parametrize("quant", BLOCKED)
def test_random_blocks_equal_the_gguf_package_bit_for_bit(quant):
    raw = random_blocks(quant, 1024)
    with np.errstate(over="ignore"):
        theirs = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(quant.value))
    ours = dequantize(Tensor("t", quant, (1024, quant.block), raw.reshape(-1)))
    assert ours.dtype == np.float32
    assert np.array_equal(ours.reshape(theirs.shape) + 0.0, theirs + 0.0)  # -0 and 0 are one


@pytest.mark.parametrize("quant", BLOCKED)
def test_float64_differs_by_at_most_the_one_rounding_of_float32(quant):
    tensor = Tensor("t", quant, (254, quant.block), random_blocks(quant, 254).reshape(-1))
    wide, narrow = dequantize(tensor, np.float64), dequantize(tensor)
    assert wide.dtype == np.float64
    with np.errstate(over="ignore"):  # MXFP4's greatest exponent
        assert np.array_equal(wide.astype(np.float32), narrow)


def test_plain_types_equal_the_gguf_package_on_every_pattern_of_16_bits():
    patterns = np.arange(65536, dtype="<u2")
    for quant in (Quant.F16, Quant.BF16):
        ours = dequantize(Tensor("t", quant, (65536,), patterns.view(np.uint8)))
        theirs = gguf.quants.dequantize(
            patterns.view(np.float16) if quant is Quant.F16 else patterns.view(np.uint8),
            gguf.GGMLQuantizationType(quant.value),
        )
        assert np.array_equal(ours, theirs.reshape(-1), equal_nan=True)


def test_f32_and_i32_come_out_as_they_went_in():
    floats = RNG.normal(size=(3, 5)).astype(np.float32)
    whole = np.array([[-(2**31), 2**31 - 1, 0]], np.int32)
    assert np.array_equal(dequantize(quantize(floats, Quant.F32, "f")), floats)
    back = dequantize(quantize(whole, Quant.I32, "i"), np.float64)
    assert back.dtype == np.int32 and np.array_equal(back, whole)


def test_an_mxfp4_value_is_the_formula_of_the_specification():
    """x = 2^(e - 127) {0, .5, 1, 1.5, 2, 3, 4, 6}, low nibbles first."""
    raw = np.zeros(17, np.uint8)
    raw[0], raw[1], raw[16] = 130, 0xF1, 0x2B
    values = dequantize(Tensor("t", Quant.MXFP4, (32,), raw))
    assert values[0] == 8 * 0.5 and values[16] == 8 * -6
    assert values[15] == 8 * -1.5 and values[31] == 8 * 1


def test_the_grid_is_the_published_one():
    codes = grid.CODES.astype("<u2").tobytes()
    assert hashlib.sha256(codes).hexdigest() == (
        "915952ebc4af8ddba8113583ca1316fc818843f7b825bbf1a25ae1c39bf0e16d"
    )
    assert hashlib.sha256(grid.GRID.tobytes()).hexdigest() == (
        "05826b5d3e472a3a78f196be62ac78acf81df0f909626e12ab9fa2a5d490dd54"
    )
    assert grid.SIGNS.tobytes() == gguf.quants.IQ2_XXS.ksigns


@pytest.mark.parametrize("quant", [*BLOCKED, Quant.F16, Quant.BF16, Quant.F32, Quant.I32])
def test_rows_are_the_rows_of_the_whole_tensor(quant):
    shape = (6, 3, quant.block)
    raw = random_blocks(quant, 18) if quant in BLOCKED else RNG.normal(size=shape)
    if quant in BLOCKED:
        tensor = Tensor("t", quant, shape, raw.reshape(-1))
    else:
        tensor = quantize(raw.astype(np.int32) if quant is Quant.I32 else raw, quant, "t")
    whole = dequantize(tensor)
    assert np.array_equal(dequantize_rows(tensor, [4, 0, 4]), whole[[4, 0, 4]])
    with pytest.raises(IndexError):
        dequantize_rows(tensor, [6])


@pytest.mark.parametrize("scale", [1e-7, 1e-3, 1.0, 300.0])
def test_q8_0_gives_the_bytes_that_the_gguf_package_gives(scale):
    values = (RNG.normal(size=(512, 64)) * scale).astype(np.float32)
    values[3] = 0
    values[4, :32] = np.arange(32) - 15.5  # halves: they go away from zero
    values[5, :32] = 127 * np.float32(scale)
    values[5, 1] = np.nextafter(np.float32(63.5), np.float32(0)) * np.float32(scale)
    theirs = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    assert quantize(values, Quant.Q8_0, "t").data.tobytes() == theirs.tobytes()


def test_a_q8_0_block_of_almost_nothing_is_zero():
    tensor = quantize(np.full((1, 32), 1e-42, np.float32), Quant.Q8_0, "t")
    assert not tensor.data.any()


@pytest.mark.parametrize("quant", [Quant.F16, Quant.BF16])
def test_halves_give_the_bytes_that_the_gguf_package_gives(quant):
    values = RNG.normal(size=(64, 64)).astype(np.float32)
    values[0, :4] = [0.0, -0.0, 1e-41, 6e-8]
    bits = RNG.integers(0, 2**16, 64, dtype=np.uint32) << 16 | 0x8000  # ties of BF16
    values[1] = np.where(np.abs(bits.view(np.float32)) < 1e4, bits.view(np.float32), 1)
    theirs = gguf.quants.quantize(values, gguf.GGMLQuantizationType(quant.value))
    assert quantize(values, quant, "t").data.tobytes() == theirs.tobytes()


@pytest.mark.parametrize(
    ("values", "quant", "sentence"),
    [
        (np.ones((2, 33)), Quant.Q8_0, "has shape (2, 33), expected rows of a multiple of 32"),
        (np.float32(1), Quant.F32, "has shape (), expected rows of a multiple of 1"),
        (np.ones(256), Quant.Q2_K, "is for Q2_K, which is read only: F32, F16, BF16, I32 or Q8_0"),
        (np.array([np.nan]), Quant.F32, "holds a value that is not finite"),
        (np.array([1e39]), Quant.F32, "holds a value beyond float32"),
        (np.array([70000.0]), Quant.F16, "holds a value beyond float16"),
        (np.array([3.4e38]), Quant.BF16, "holds a value beyond BF16"),
        (np.full(32, 1e7), Quant.Q8_0, "holds a value beyond float16"),
        (np.array([2**31]), Quant.I32, "holds a value that is no int32"),
        (np.array([1.0]), Quant.I32, "holds a value that is no int32"),
    ],
)
def test_what_a_type_cannot_hold_is_refused(values, quant, sentence):
    with pytest.raises(ValueError) as error:
        quantize(values, quant, "w")
    assert str(error.value) == f"tensor w {sentence}"


def test_bytes_that_do_not_suit_the_shape_are_refused():
    with pytest.raises(ValueError) as error:
        dequantize(Tensor("w", Quant.Q8_0, (2, 32), np.zeros(67, np.uint8)))
    assert str(error.value) == "tensor w of shape (2, 32) has 67 bytes, expected 68 for Q8_0"
