"""The kernels that train ds4-tiny, in Triton's interpreter, against the same in plain torch."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

os.environ["TRITON_INTERPRET"] = "1"  # before Triton declares anything
torch = pytest.importorskip("torch", reason="torch is for training alone: pip install .[train]")
pytest.importorskip("triton", reason="the kernels are Triton's")

import triton.language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

from ds4d.model.synth import geometry  # noqa: E402
from ops.tiny import kernels, middle, model, sinkhorn  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor

pytestmark = pytest.mark.skipif(
    not sinkhorn._INTERPRETED or os.environ.get("TINY_NO_TRITON", "") != "",
    reason="the kernels were declared for a GPU, or are off by TINY_NO_TRITON",
)
HEADS, DIM = 8, 24  # padded to 32
INDEX_HEADS, INDEX_DIM = 4, 16


@pytest.fixture(autouse=True)
def cut_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits so low that 384 tokens reach them; few programs, as each is slow here."""
    for name, tile in kernels.TILES.items():
        monkeypatch.setitem(kernels.TILES, name, replace(tile, tokens=32))
    tile = replace(kernels.TILES["choose"], tokens=64, keys=64)
    monkeypatch.setitem(kernels.TILES, "choose", tile)
    for name in sinkhorn.TILES:
        monkeypatch.setitem(sinkhorn.TILES, name, (16, 32, 4, 128))
        monkeypatch.setitem(middle.TILES, name, (32, 4))
    monkeypatch.setattr(kernels, "PARTS", {4: 256, 128: 128})
    monkeypatch.setattr(kernels, "KEY_PART", 128)
    torch.manual_seed(5)


@pytest.fixture(autouse=True)
def whole_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6 takes int() of arrays of one number, which numpy 2.4 refuses."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor: object, scope: interpreter._LangPatchScope) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


@pytest.fixture(autouse=True)
def products_of_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6 multiplies the bits of bf16 as whole numbers."""
    dot = interpreter.InterpreterBuilder.create_dot

    def wide(a: interpreter.TensorHandle) -> interpreter.TensorHandle:
        if a.dtype.scalar != tl.bfloat16:
            return a
        bits = a.data.astype("uint32") << 16
        return interpreter.TensorHandle(bits.view("float32"), tl.float32)

    monkeypatch.setattr(
        interpreter.InterpreterBuilder, "create_dot",
        lambda self, a, b, *more: dot(self, wide(a), wide(b), *more),
    )  # fmt: skip


def normal(*shape: int) -> Tensor:
    return torch.randn(shape).requires_grad_()


def apart(a: Tensor, b: Tensor) -> float:
    a, b = a.float(), b.float()
    return ((a - b).norm() / b.norm().clamp_min(1e-9)).item()


# A dialogue as long as the row; two, the first no longer than the window.
OWNERS = torch.tensor([[7, 7, 7], [0, 1, 1]])


@pytest.mark.parametrize(("ratio", "top_k"), [(0, 8), (128, 8), (4, 8), (4, 96)])
def test_attention_and_its_gradients_are_those_of_all_scores_in_memory(
    ratio: int, top_k: int
) -> None:
    B, n = OWNERS.shape
    T = n * kernels.BLOCK
    S = T // ratio if ratio else 0
    q, kv, sinks = normal(B, T, HEADS, DIM), normal(B, T, DIM), normal(HEADS)
    inputs = {"q": q, "kv": kv, "sinks": sinks}
    rows = index = None
    if ratio:
        inputs["rows"] = rows = normal(B, S, DIM)
    if ratio == 4:
        index = normal(B, T, INDEX_HEADS, INDEX_DIM), normal(B, S, INDEX_DIM), None
        index = (*index[:2], normal(B, T, INDEX_HEADS))
        inputs |= dict(zip(("qi", "keys", "w"), index, strict=True))
    spans, dense = kernels.spans(OWNERS), torch.tensor(False)
    away = torch.randn(B, T, HEADS, DIM)
    found = []
    for way in (kernels.reference, kernels.attend):
        o, loss = way(q, kv, rows, sinks, spans, ratio, index, top_k, dense)
        grads = torch.autograd.grad((o * away).sum() + 100 * loss, list(inputs.values()))
        found.append(
            {"o": o.detach(), "loss": loss.detach()} | dict(zip(inputs, grads, strict=True))
        )
    assert (ratio == 4) == (found[0]["loss"] > 0)
    for name, value in found[0].items():
        assert apart(found[1][name], value) < 1e-5, name


def test_exactly_the_rows_that_score_as_much_as_the_kth_are_chosen() -> None:
    B, n, top_k = *OWNERS.shape, 24
    T = n * kernels.BLOCK
    S = T // 4
    scores = torch.randn(B, T, S).round(decimals=1) + 0.0  # ties, both signs, no -0
    spans = kernels.spans(OWNERS)
    bits = torch.ops.tiny.choose(scores, spans, torch.tensor(False), top_k)
    chosen = (bits[..., None] >> torch.arange(32) & 1).flatten(-2).bool()
    first = spans[0].repeat_interleave(kernels.BLOCK, 1)
    for b in range(B):
        for t in range(0, T, 7):
            low, high = int(first[b, t]) // 4, (t + 1) // 4
            seen = scores[b, t, low:high]
            least = seen.topk(top_k).values[-1] if len(seen) > top_k else -torch.inf
            assert torch.equal(chosen[b, t, low:high], seen >= least), (b, t)
    bits = torch.ops.tiny.choose(scores, spans, torch.tensor(True), top_k)
    assert (bits[0, -1] == -1).all()  # all in sight, in a dense layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n_tokens", [64, 70])
def test_the_step_between_sublayers_and_its_gradients_are_those_of_torch(
    n_tokens: int, dtype: torch.dtype
) -> None:
    D, close = 64, 1e-5 if dtype == torch.float32 else 2e-2
    X, y = (torch.randn(1, n_tokens, *s).to(dtype).requires_grad_() for s in ((4, D), (D,)))
    inputs = [X, y, *(normal(1, n_tokens, *s) for s in ((4,), (4, 4)))]
    fn = (torch.randn(24, 4 * D) / 16).requires_grad_()
    inputs += [fn, normal(1), normal(4), normal(D)]
    found = []
    for way in (sinkhorn._step_reference, sinkhorn.step):
        made = way(*inputs, 1e-6, 1e-6)
        torch.manual_seed(1)
        loss = sum((m * torch.randn_like(m)).sum() for m in made)
        found.append([*made, *torch.autograd.grad(loss, inputs)])
    for i, (want, got) in enumerate(zip(*found, strict=True)):
        assert got.dtype == want.dtype, i
        assert apart(got, want) < close, i
    found = []
    for way in (sinkhorn._end_reference, sinkhorn.end):
        X = way(*inputs[:4])
        found.append([X, *torch.autograd.grad(X.float().square().sum(), inputs[:4])])
    for i, (want, got) in enumerate(zip(*found, strict=True)):
        assert got.dtype == want.dtype, i
        assert apart(got, want) < close, i


def test_the_mixing_matrix_and_its_gradient_are_those_of_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    comb, away = normal(130, 4, 4), torch.randn(130, 4, 4)
    found = []
    for is_on in (False, True):
        monkeypatch.setattr(sinkhorn, "_USE_TRITON", is_on)
        M = sinkhorn.sinkhorn(comb, 20)
        found.append((M, *torch.autograd.grad((M * away).sum(), comb)))
    for want, got in zip(*found, strict=True):
        assert apart(got, want) < 1e-5


def gates_and_ups(n: int, n_experts: int, n_channels: int, clamp: float) -> Tensor:
    """[n, 2 E C], a third of them beyond the clamp, some exactly at its bounds."""
    ab = torch.randn(n, 2 * n_experts * n_channels) * clamp
    ab[1::5, ::3], ab[2::5, ::3] = clamp, -clamp
    return ab


@pytest.mark.parametrize("is_rounded", [False, True])
@pytest.mark.parametrize("n_tokens", [32, 37])
def test_the_middle_of_the_experts_and_its_gradients_are_those_of_torch(
    n_tokens: int, is_rounded: bool
) -> None:
    E, C, clamp = 3, 64, 1.5
    ab, w = gates_and_ups(n_tokens, E, C, clamp).requires_grad_(), normal(n_tokens, E)
    with torch.no_grad():
        w[3] = 0.0  # blocks of nothing
    found = []
    for way in (middle._reference, middle.middle):
        mid = way(ab, w, clamp, is_rounded)
        torch.manual_seed(1)
        found.append([mid, *torch.autograd.grad((mid * torch.randn_like(mid)).sum(), (ab, w))])
    (want, *grads), (got, *got_grads) = found
    if is_rounded:
        exact = middle._reference(ab, w, clamp, False)
        assert torch.equal(want, model.int8_blocks(exact, model.Precision(torch.float32)))
        # The last bit of a sigmoid may decide a number that lies between two steps.
        blocks, steps = want.unflatten(-1, (-1, 32)), got.unflatten(-1, (-1, 32))
        d = blocks.abs().amax(-1, keepdim=True) / 127
        off = ((steps - blocks) / d.clamp_min(1e-20)).abs()
        assert off.max() < 1.01
        assert (off > 1e-3).sum() <= 2
        assert (blocks.abs() > 126.9 * d)[d[..., 0] > 0].any(-1).all()  # the largest: 127 steps
    else:
        assert apart(got, want) < 1e-6
    for name, a, b in zip(("ab", "w"), grads, got_grads, strict=True):
        assert apart(b, a) < 1e-6, name
    (a, b), (da, db) = ab.detach().chunk(2, -1), got_grads[0].chunk(2, -1)
    has_weight = (w != 0).repeat_interleave(C, 1)
    assert torch.equal(da != 0, (a <= clamp) & has_weight)
    assert torch.equal(db != 0, (b.abs() <= clamp) & has_weight)


def test_the_middle_takes_bf16() -> None:
    E, C, clamp = 3, 32, 2.0
    ab, w = gates_and_ups(21, E, C, clamp).bfloat16().requires_grad_(), normal(21, E)
    away, found = torch.randn(21, E * C), []
    for way in (middle._reference, middle.middle):
        mid = way(ab, w, clamp, True)
        found.append([mid, *torch.autograd.grad((mid * away).sum(), (ab, w))])
    for i, (want, got) in enumerate(zip(*found, strict=True)):
        assert got.dtype == want.dtype, i
        assert apart(got, want) < 8e-3, i  # the interpreter cuts where a GPU rounds


def test_the_middle_keeps_what_is_no_number() -> None:
    ab, w = torch.zeros(2, 128), torch.ones(2, 1)
    ab[0, 3] = ab[1, 70] = torch.nan
    mid = middle.middle(ab, w, 10.0, False)
    assert mid.isnan().nonzero().tolist() == [[0, 3], [1, 6]]


SMALL = replace(
    geometry("micro"), n_layers=2, ratios=(4, 128), n_hash_layers=1, index_heads=4,
    expert_clamp=(10.0,) * 2, shared_clamp=(10.0,) * 2,
)  # fmt: skip


def tiny() -> model.Tiny:
    torch.manual_seed(2)
    precision = model.Precision(torch.float32, activations=False, rows=False)
    made = model.Tiny(SMALL, precision)
    with torch.no_grad():
        for name in made.names():
            if name.endswith(("sinks.weight", "ape.weight", "fn.weight")):
                made.tensor(name).add_(0.3 * torch.randn_like(made.tensor(name)))
    return made


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # the compiler looks
def test_the_model_compiled_with_kernels_is_the_one_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One graph a layer, of operations whose shapes are known without running them."""
    made, dense = tiny(), torch.tensor(False)
    ids = torch.randint(0, made.g.n_vocab, (1, 128))
    owner, weights = torch.tensor([[3]]), torch.ones(128)
    found = []
    for is_on in (False, True):
        monkeypatch.setattr(sinkhorn, "_USE_TRITON", is_on)
        if is_on:
            made.layer = torch.compile(
                model.layer, dynamic=False, fullgraph=True, backend="aot_eager"
            )
        X, align, loads = made.streams(ids, owner, dense)
        total, _ = made.head_loss(
            made.params(""), X.flatten(0, 1), ids.flatten(), weights, made.precision, made.g
        )
        made.zero_grad()
        (total + 100 * align).backward()
        grads = {n: p.grad.clone() for n, p in made.named_parameters() if p.grad is not None}
        found.append({"X": X.detach(), "align": align.detach(), "loads": loads, **grads})
    assert len(found[0]) > 60
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        assert apart(found[1][name], value) < 2e-5, name


def test_a_dialogue_is_alone_in_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The streams of a packed dialogue are those it has behind any other."""
    monkeypatch.setattr(sinkhorn, "_USE_TRITON", False)
    made, dense = tiny(), torch.tensor(False)
    ids = torch.randint(0, made.g.n_vocab, (1, 512))
    with torch.no_grad():
        X, _, _ = made.streams(ids, torch.tensor([[0, 0, 1, 1]]), dense)
        ids[:, :256] = 3
        Y, _, _ = made.streams(ids, torch.tensor([[4, 4, 1, 1]]), dense)
    assert apart(Y[:, 256:], X[:, 256:]) < 1e-6
    assert apart(Y[:, :256], X[:, :256]) > 0.1
