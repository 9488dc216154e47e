"""The CPU engine: equal to the reference within stated bounds, equal to itself bit for bit."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from cpu_models import (
    AWKWARD,
    GREEDY,
    PACKED,
    open_engine,
    prefill,
    random_ids,
    run_all,
    run_rows,
    seat,
    tensors_of,
    work,
)

from ds4d.cpu import engine as cpu
from ds4d.engine import LAST_DRAWN, DraftWork, Sampling
from ds4d.errors import CheckpointError, ModelFileError, OutOfMemory
from ds4d.model import layout, rows, synth
from ds4d.model.quants import Quant
from ds4d.model.reference import Reference

MINI = synth.geometry("mini")
N = 280  # two windows of ratio 128, and an indexer that has long been choosing


@pytest.fixture(scope="session")
def folder(request):
    """Compiled kernels, kept from run to run."""
    return request.config.cache.mkdir("ds4d-kernels")


@pytest.fixture(scope="module")
def model():
    return PACKED, tensors_of(PACKED)


@pytest.fixture(scope="module")
def opened(model, folder):
    """One engine for all tests that leave no lane seated behind them."""
    engine = open_engine(*model, folder)
    yield engine
    engine.close()


@pytest.fixture
def engine(opened):
    yield opened
    for lane, mine in enumerate(opened._lanes):
        if mine is not None:
            opened.vacate(lane)
    for _, frontier in list(opened._live.values()):
        opened.drop(frontier)


@pytest.fixture(scope="module")
def ids():
    return random_ids(PACKED, N)


@pytest.fixture(scope="module")
def alone(opened, ids):
    """Logits, frontier and pages of the ids run through one lane in blocks of 32."""
    seat(opened, 0, [0, 1])
    logits = run_all(opened, 0, ids)
    state = _state(opened, 0)
    opened.vacate(0)
    return logits, state


def _state(engine, lane):
    """All that the lane's future depends on, as bytes: its frontier, and rows below its length."""
    frontier = engine.capture(lane)
    data = engine.read_frontier(frontier)
    engine.drop(frontier)
    return data, _compressed(engine, lane)


def _compressed(engine, lane):
    """Planes of the complete rows of every layer, in bytes."""
    g, layout, mine = engine.geometry, engine._layout, engine._lane(lane)
    kinds = [(layout.kv, at, g.ratios[i]) for i, at in layout.kv_offset.items()]
    kinds += [(layout.index, at, 4) for at in layout.index_offset.values()]
    out = []
    for form, offset, ratio in kinds:
        per_page = g.page_tokens // ratio
        pages = [np.frombuffer(engine.read_page(p), np.uint8) for p in mine.pages]
        blocks = [p[offset : offset + form.block_bytes(per_page)] for p in pages]
        planes = [form.views(block, per_page) for block in blocks]
        n = mine.n_tokens // ratio
        out += [np.concatenate(plane)[:n].tobytes() for plane in zip(*planes, strict=True)]
    return out


# -- against the reference ------------------------------------------------------------------------


def _only(*ratios):
    n = len(ratios)
    name = "-".join(map(str, ratios))
    none = {"index_heads": 0, "index_dim": 0, "index_top_k": 0}
    clamp = {"expert_clamp": (10.0,) * n, "shared_clamp": (10.0,) * n}
    return replace(AWKWARD, name=name, n_layers=n, ratios=ratios, **none, **clamp)


SLIDING = _only(0, 0)
LONG = _only(0, 128)


@pytest.mark.parametrize("geometry", [PACKED, AWKWARD, SLIDING, LONG], ids=lambda g: g.name)
def test_exact_mode_is_the_exact_reference(geometry, folder):
    tensors, ids = tensors_of(geometry, "f32"), random_ids(geometry, N)
    reference = Reference(geometry, tensors, exact=True)
    truth = reference.prefill(reference.new_state(), ids, all_logits=True)
    engine = open_engine(geometry, tensors, folder, exact=True)
    seat(engine, 1, [3, 5])
    prefill(engine, 1, ids[:100])
    logits = run_all(engine, 1, ids[100:])
    engine.close()
    assert np.abs(logits - truth[100:]).max() < 1e-5  # of an RMS of 1


def _forced(geometry, kinds, n, folder):
    """Every layer of the engine, fed what the reference's layer was fed: inputs and outputs
    [layers, n, streams, width] of both, and their states."""
    g, tensors, ids = geometry, tensors_of(geometry, kinds), random_ids(geometry, n)
    reference = Reference(g, tensors)
    state = reference.new_state()
    streams = [reference.embed(ids)]
    for layer in range(g.n_layers):
        streams.append(reference.layer(layer, streams[-1], ids, state, 0))
    engine = open_engine(g, tensors, folder)
    seat(engine, 0, [0, 1])
    forward = engine._forward
    x = forward.arena.X.x.reshape(-1, g.streams, forward.arena.width)[..., : g.width]
    out = np.zeros((g.n_layers, *streams[0].shape), np.float32)
    for start in range(0, n, 32):
        rows = slice(start, min(start + 32, n))
        pos = np.arange(n)[rows]
        forward.step.set(ids[rows], pos, np.zeros(len(pos)))
        engine._team.run(0, forward.layer_starts[0])
        assert np.array_equal(x[: len(pos)], streams[0][rows])
        for layer in range(g.n_layers):
            x[: len(pos)] = streams[layer][rows]
            engine._team.run(*forward.layer_starts[layer : layer + 2])
            out[layer, rows] = x[: len(pos)]
    engine._lane(0).n_tokens = n
    engine.close()
    return np.stack(streams), out, state, engine


@pytest.mark.parametrize(
    ("geometry", "kinds", "n"),
    [
        (PACKED, "q8", N),
        (AWKWARD, "q8", N),
        (MINI, "2bit", 40),
        (MINI, "4bit", 40),
        (MINI, "mxfp4", 40),
    ],
    ids=lambda v: getattr(v, "name", str(v)),
)
def test_each_layer_does_what_the_references_layer_does(geometry, kinds, n, folder):
    """Float sums in another order: 1e-6 of what a layer changes. Where that moves a value over a
    rounding tie of int8, e4m3 or FP4, a row is off by one step there: at most 3 rows in 10 of a
    layer, and by no more than 5 %. Of a layer's cached values at most two, or 1 in 200, differ, and
    no row by more than 5 %."""
    streams, out, state, engine = _forced(geometry, kinds, n, folder)
    for layer in range(geometry.n_layers):
        change = np.sqrt(np.mean((streams[layer + 1] - streams[layer]) ** 2))
        off = (out[layer] - streams[layer + 1]).reshape(n, -1)
        off = np.sqrt(np.mean(off**2, axis=1)) / change
        assert np.median(off) < 1e-6, layer
        assert np.mean(off > 1e-5) < 0.3, layer
        assert off.max() < 5e-2, layer
    for ours, truth in _cached_rows(engine, state):
        off = ours - truth
        assert np.sum(off != 0) <= max(2, off.size / 200)
        assert np.sqrt(np.mean(off**2, axis=1) / np.mean(truth**2, axis=1)).max() < 5e-2


def _cached_rows(engine, state):
    """Rows of every layer's ring and pages as decoded from the engine's bytes, and the
    reference's: pairs of [rows, channels] f32."""
    g, layout, n = engine.geometry, engine._layout, engine._lane(0).n_tokens
    window = np.arange(max(0, n - g.window), n)
    rings = layout.kv.views(engine._state.rings[0], layout.capacity)
    for layer, theirs in enumerate(state.layers):
        planes = [plane[layer, window % layout.capacity] for plane in rings]
        yield _decoded(layout.kv, planes), theirs.ring.values[window % g.window]
    kinds = (
        (layout.kv, layout.kv_offset, "compressed"),
        (layout.index, layout.index_offset, "index"),
    )
    for form, offsets, name in kinds:
        for layer, offset in offsets.items():
            per_page, n_rows = g.page_tokens // g.ratios[layer], n // g.ratios[layer]
            if n_rows:
                blocks = engine._state.pages[:2, offset : offset + form.block_bytes(per_page)]
                planes = [np.concatenate(p)[:n_rows] for p in form.views(blocks, per_page)]
                yield _decoded(form, planes), getattr(state.layers[layer], name).values[:n_rows]


def _decoded(form, planes):
    codes, halves, scales = planes
    if form.kind == layout.HALF:
        return codes.copy().view(np.float16).astype(np.float32)
    scales = scales[:, : form.n_scales]
    if form.kind == layout.FP4:
        return rows.decode_fp4(codes, scales)
    return rows.decode_row(rows.Planes(codes, scales, halves.copy().view(np.float16)))


# -- against itself -------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [1, 7])
def test_a_row_has_the_same_bits_in_a_pass_of_any_size(engine, ids, alone, block):
    seat(engine, 2, [4, 5])
    n = N if block > 1 else 140
    logits = run_all(engine, 2, ids[:n], block)
    assert logits.tobytes() == alone[0][:n].tobytes()
    if n == N:
        assert _state(engine, 2) == alone[1]


@pytest.mark.parametrize("chunks", [[N], [1, 128, 33, N - 162], [256, N - 256]])
def test_a_prompt_has_the_same_bits_in_any_chunks(engine, ids, alone, chunks):
    seat(engine, 3, [7, 6])
    for start, n in zip(np.cumsum([0, *chunks]), chunks, strict=False):
        done = prefill(engine, 3, ids[start : start + n])
        assert not done.cancelled
    assert engine.length(3) == N
    assert _state(engine, 3) == alone[1]


def test_a_lane_has_the_same_bits_alone_and_in_a_cohort(engine, ids, alone):
    """Four lanes at different depths step together, with different numbers of rows."""
    starts = [0, 100, 201, 130]
    for lane, start in enumerate(starts):
        seat(engine, lane, [2 * lane, 2 * lane + 1])
        if start:
            prefill(engine, lane, ids[:start])
    for _ in range(6):
        cohort, spans = [], []
        for lane, k in enumerate([1, 4, 2, 5]):
            at = engine.length(lane)
            cohort.append(work(lane, ids[at], ids[at + 1 : at + k]))
            spans.append(slice(at, at + k))
        logits, places = engine.logits(cohort)
        for each, place, span in zip(cohort, places, spans, strict=True):
            assert logits[place].tobytes() == alone[0][span].tobytes()
            mine = engine._lane(each.lane)
            mine.n_tokens = mine.highest = span.stop


@pytest.mark.parametrize("threads", [2, 3])
def test_bits_do_not_depend_on_the_number_of_threads(model, folder, ids, alone, threads):
    engine = open_engine(*model, folder, threads=threads)
    seat(engine, 0, [1, 0])
    logits = run_all(engine, 0, ids)
    state = _state(engine, 0)
    engine.close()
    assert logits.tobytes() == alone[0].tobytes()
    assert state == alone[1]


@pytest.mark.parametrize("at", [0, 3, 129, 256])
def test_a_restored_frontier_goes_on_as_if_nothing_had_happened(engine, ids, alone, at):
    seat(engine, 0, [8, 9])
    if at:
        prefill(engine, 0, ids[:at])
    frontier = engine.capture(0)
    run_all(engine, 0, ids[::-1][: N - at])  # something else, in the same lane and pages
    engine.restore(0, frontier)
    assert engine.length(0) == at
    logits = run_all(engine, 0, ids[at:])
    assert logits.tobytes() == alone[0][at:].tobytes()
    assert _state(engine, 0) == alone[1]


def test_bytes_of_frontier_and_pages_carry_a_lane_to_another_engine(
    model, folder, engine, ids, alone
):
    seat(engine, 0, [10, 11])
    prefill(engine, 0, ids[:200])
    frontier = engine.capture(0)
    data, pages = engine.read_frontier(frontier), [engine.read_page(p) for p in (10, 11)]
    assert len(data) == frontier.n_bytes
    assert {len(page) for page in pages} == {engine.page_bytes}
    other = open_engine(*model, folder, lanes=1, pages=3)
    assert other.row_fingerprint == engine.row_fingerprint
    seat(other, 0, [2, 1])
    for page, raw in zip((2, 1), pages, strict=True):
        other.write_page(page, raw)
    other.restore(0, other.write_frontier(data))
    logits = run_all(other, 0, ids[200:])
    state = _state(other, 0)
    other.close()
    assert logits.tobytes() == alone[0][200:].tobytes()
    assert state == alone[1]


def test_a_frontier_at_a_multiple_of_128_is_small(engine, ids):
    seat(engine, 0, [0, 1])
    prefill(engine, 0, ids[:255])
    large = engine.capture(0)
    prefill(engine, 0, ids[255:256])
    small = engine.capture(0)
    g = engine.geometry
    raw = g.n_layers * g.window * sum(engine._layout.kv.planes)
    carried = 2 * 4 * (g.head_dim + g.index_dim) * 4 * g.ratios.count(4)  # series A
    assert raw + carried <= small.n_bytes <= raw + carried + 200
    assert large.n_bytes > 1.5 * small.n_bytes


def test_truncated_is_never_been_there(engine, ids, alone):
    seat(engine, 0, [0, 1])
    prefill(engine, 0, ids[:140])
    run_rows(engine, 0, ids[:30])  # rejected in the end
    engine.truncate(0, 141)
    engine.truncate(0, 140)
    logits = run_all(engine, 0, ids[140:])
    assert logits.tobytes() == alone[0][140:].tobytes()
    assert _state(engine, 0) == alone[1]


def test_a_page_is_shared_until_one_writes_to_a_copy(engine, ids, alone):
    seat(engine, 0, [0])
    prefill(engine, 0, ids[:256])
    frontier = engine.capture(0)
    engine.map_pages(0, [1])
    seat(engine, 1, [0, 2])
    engine.restore(1, frontier)
    for lane in (0, 1):
        assert run_all(engine, lane, ids[256:]).tobytes() == alone[0][256:].tobytes()
    engine.copy_page(1, 3)
    assert engine.read_page(3) == engine.read_page(1)


# -- verify ---------------------------------------------------------------------------------------


def test_greedy_drafts_are_accepted_as_far_as_they_are_what_would_be_said(engine, ids, alone):
    best = alone[0].argmax(1)
    seat(engine, 0, [0, 1])
    prefill(engine, 0, ids[:100])
    [plain] = engine.verify([work(0, ids[100])])
    assert (plain.ids, plain.n_accepted) == ((int(best[100]),), 0)
    engine.truncate(0, 100)

    said = [int(ids[100])]
    while len(said) < 9:
        [step] = engine.verify([work(0, said[-1])])
        said += step.ids
    assert engine.length(0) == 108
    engine.truncate(0, 100)
    wrong = (said[4] + 1) % PACKED.n_vocab
    [drafted] = engine.verify([work(0, said[0], [*said[1:4], wrong, *said[5:]])])
    assert drafted.ids == tuple(said[1:5])
    assert drafted.n_accepted == 3
    assert engine.length(0) == 104
    [after] = engine.verify([work(0, LAST_DRAWN, said[5:])])
    assert after.ids[:4] == tuple(said[5:])
    assert after.failed is None
    assert after.ms > 0


def test_seeded_text_is_the_same_with_drafts_and_beside_others(engine, ids):
    sampling = Sampling(temperature=0.9, top_p=0.95, seed=7, seeded=True, top_logprobs=2)
    told = {}
    for name, drafts in (("alone", False), ("drafted", True)):
        for lane in range(2):
            seat(engine, lane, [2 * lane, 2 * lane + 1])
            prefill(engine, lane, ids[:50])
        said, probs, pending = [], [], int(ids[50])
        while len(said) < 20:
            draft = told["alone"][0][len(said) + 1 :][:3] if drafts else ()
            draft = tuple(told["alone"][0][len(said) :][:3]) if drafts else draft
            cohort = [work(0, pending, draft, sampling, len(said))]
            if drafts:
                cohort.append(work(1, ids[engine.length(1)]))
            step = engine.verify(cohort)[0]
            said += step.ids
            probs += step.logprobs
            pending = said[-1]
        told[name] = said[:20], probs[:20]
        for lane in range(2):
            engine.vacate(lane)
    assert told["alone"] == told["drafted"]
    assert len(set(told["alone"][0])) > 5


def test_a_lane_with_a_number_that_is_none_fails_alone(engine, ids, alone):
    for lane in range(2):
        seat(engine, lane, [2 * lane, 2 * lane + 1])
        prefill(engine, lane, ids[:64])
    engine._state.inputs[0][:, 0] = np.nan  # what lane 0's next compressed row is made of
    for at in range(64, 68):
        hurt, well = engine.verify([work(0, ids[at]), work(1, ids[at])])
        if hurt.failed:
            break
    assert "expected a number" in hurt.failed
    assert hurt.ids == ()
    assert well.failed is None
    assert engine.length(1) == at + 1
    assert well.ids == (int(alone[0][at].argmax()),)


# -- prefill --------------------------------------------------------------------------------------


class _After:
    """A flag that is set from the n-th look on."""

    def __init__(self, n):
        self.n = n

    def is_set(self):
        self.n -= 1
        return self.n < 0


@pytest.mark.parametrize("looks", [0, 1, 3])
def test_a_cancelled_chunk_leaves_the_lane_as_it_was(engine, ids, alone, looks):
    seat(engine, 0, [0, 1])
    prefill(engine, 0, ids[:70])
    before = _state(engine, 0)
    done = prefill(engine, 0, ids[::-1][:200], _After(looks))
    assert done.cancelled
    assert done.n_tokens == engine.length(0) == 70
    assert _state(engine, 0) == before
    assert run_all(engine, 0, ids[70:]).tobytes() == alone[0][70:].tobytes()


def test_the_heartbeat_moves_while_the_engine_works(engine, ids):
    seat(engine, 0, [0, 1])
    seen = []

    class Look:
        def is_set(self):
            seen.append(engine.heartbeat)
            return False

    prefill(engine, 0, ids[:64], Look())
    assert len(seen) == 2 * -(-PACKED.n_layers // cpu.LAYERS_A_GROUP)
    assert seen == sorted(set(seen))


def test_the_interpreter_is_free_while_the_engine_works(engine, ids):
    """A thread that only counts gets on during a pass, though no Python runs in it."""
    seat(engine, 0, [0, 1])
    stop, count = threading.Event(), [0]

    def counting():
        while not stop.is_set():
            count[0] += 1

    thread = threading.Thread(target=counting)
    thread.start()
    prefill(engine, 0, ids)
    stop.set()
    thread.join()
    assert count[0] > 100


def test_threads_sleep_between_calls(model, folder, ids):
    engine = open_engine(*model, folder, threads=4)
    seat(engine, 0, [0])
    prefill(engine, 0, ids[:64])
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1  # of 1.2 that four busy threads would take
    engine.close()


# -- sizes, refusals ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("geometry", "kinds", "exact"),
    [(PACKED, "q8", False), (AWKWARD, "f32", True), (MINI, "2bit", False)],
    ids=lambda v: getattr(v, "name", str(v)),
)
def test_need_is_what_an_engine_then_has(geometry, kinds, exact, folder):
    tensors = tensors_of(geometry, kinds)
    need = cpu.need(geometry, tensors, lanes=3, pages=5, frontiers=2, threads=2, exact=exact)
    sizes = {"lanes": 3, "pages": 5, "frontiers": 2, "threads": 2}
    engine = open_engine(geometry, tensors, folder, exact=exact, **sizes)
    parts = need.parts
    assert parts["weights"] == engine._forward.weight_bytes
    assert parts["pages"] == engine._state.pages.nbytes
    assert parts["frontiers"] == engine._frontiers.nbytes
    held = engine._state.rings.nbytes + engine._state.page_table.nbytes
    assert parts["lanes"] == held + sum(a.nbytes for a in engine._state.inputs)
    assert engine.need(lanes=3, pages=5, frontiers=2, chunk=256) == need
    arena = vars(engine._forward.arena).values()
    held = sum(a.nbytes for a in arena if isinstance(a, np.ndarray))
    for a in arena:
        if hasattr(a, "want"):
            held += a.x.nbytes + sum(kept.nbytes for kept in a._keep if kept.dtype != np.int64)
    assert 0.7 * parts["arena"] < held <= parts["arena"]
    frontier = engine._layout.frontier_bytes_max
    seat(engine, 0, [0])
    prefill(engine, 0, random_ids(geometry, 255))
    assert 0.9 * frontier < engine.capture(0).n_bytes <= frontier
    engine.close()


def test_only_what_a_file_needs_is_compiled(model, engine):
    names = {kernel.name for kernel in engine._program.kernels()}
    assert {"tile_q8_0", "tile_f16"} <= names
    assert not names & {"tile_q2_k", "tile_q4_k", "tile_iq2_xxs", "tile_mxfp4", "embed_f32"}


def test_progress_ends_at_one_for_weights_and_kernels(model, folder):
    told = []
    open_engine(*model, folder, progress=lambda what, share: told.append((what, share))).close()
    assert ("weights", 1.0) in told
    assert told[-1] == ("kernels", 1.0)
    assert all(0 <= share <= 1 for _, share in told)


def test_another_model_has_another_fingerprint(model, folder, engine):
    geometry, tensors = model
    changed = dict(tensors)
    name = "blk.1.attn_kv.weight"
    data = tensors[name].data.copy()
    data[5] ^= 1
    changed[name] = replace(tensors[name], data=data)
    for other in ((geometry, changed), (replace(geometry, rope_theta=20_000.0), tensors)):
        made = open_engine(*other, folder)
        assert made.row_fingerprint != engine.row_fingerprint
        made.close()


def test_what_was_not_promised_is_refused(engine, ids):
    with pytest.raises(OutOfMemory, match="lane 4 of 4"):
        engine.seat(4)
    seat(engine, 0, [0])
    with pytest.raises(OutOfMemory, match="room for 256 positions, not 257"):
        prefill(engine, 0, np.resize(ids, 257))
    assert engine.length(0) == 0
    with pytest.raises(OutOfMemory, match="page 12 of 12"):
        engine.map_pages(0, [1, 12])
    with pytest.raises(OutOfMemory, match="all 4 frontiers"):
        for _ in range(5):
            engine.capture(0)


def test_what_makes_no_sense_is_refused_in_one_sentence(engine, ids):
    with pytest.raises(ValueError, match="lane 1 is not seated"):
        prefill(engine, 1, ids)
    seat(engine, 1, [0])
    with pytest.raises(ValueError, match="seated already"):
        engine.seat(1)
    with pytest.raises(ValueError, match="at least one"):
        prefill(engine, 1, ids[:0])
    with pytest.raises(ValueError, match="vocabulary of 320"):
        prefill(engine, 1, [320])
    with pytest.raises(ValueError, match=r"rows, expected 1\.\.32"):
        engine.verify([work(1, 0, range(32))])
    with pytest.raises(ValueError, match="twice"):
        engine.verify([work(1, 0), work(1, 0)])
    with pytest.raises(ValueError, match="drawn nothing"):
        engine.verify([work(1, LAST_DRAWN)])
    prefill(engine, 1, ids[:60])
    with pytest.raises(ValueError, match=r"28\.\.60, not to 27"):
        engine.truncate(1, 27)
    frontier = engine.capture(1)
    engine.restore(1, frontier)
    with pytest.raises(ValueError, match=r"60\.\.60, not to 59"):
        engine.truncate(1, 59)
    engine.drop(frontier)
    with pytest.raises(ValueError, match="was dropped"):
        engine.drop(frontier)
    with pytest.raises(NotImplementedError, match="no drafter"):
        engine.draft([DraftWork(lane=1, pending=0, n_max=1, sampling=GREEDY, epoch=0, position=0)])


def test_bytes_that_are_no_frontier_or_page_are_refused(engine, ids):
    seat(engine, 0, [0])
    prefill(engine, 0, ids[:60])
    data = engine.read_frontier(engine.capture(0))
    other_version = bytes([data[0] + 1]) + data[1:]
    far = data[:8] + (10**6).to_bytes(8, "little") + data[16:]
    for bad in (b"", data[:-16], data + bytes(16), other_version, far):
        with pytest.raises(CheckpointError):
            engine.write_frontier(bad)
    with pytest.raises(CheckpointError, match="expected"):
        engine.write_page(0, bytes(3))


@pytest.mark.parametrize(
    "change",
    [{"head_dim": 2000}, {"n_experts": 5000}, {"streams": 17}, {"ratios": (0, 3, 0, 0, 0)}],
)
def test_a_geometry_beyond_the_kernels_is_refused(model, folder, change):
    with pytest.raises(ModelFileError, match=next(iter(change)).removesuffix("s")):
        open_engine(replace(PACKED, **change), model[1], folder)


def test_an_expert_table_that_names_no_expert_is_refused(model, folder):
    geometry, tensors = model
    name = "blk.0.ffn_gate_tid2eid.weight"
    data = tensors[name].data.copy()
    data[16:20] = np.array([99], "<i4").view(np.uint8)
    broken = {**tensors, name: replace(tensors[name], data=data)}
    with pytest.raises(
        ModelFileError, match=rf"{name} names expert 99 for token 1, expected 0\.\."
    ):
        open_engine(geometry, broken, folder)


@pytest.mark.parametrize(
    "name", ["blk.1.indexer.proj.weight", "blk.2.exp_probs_b.bias", "blk.0.attn_q_a.weight"]
)
def test_a_weight_that_is_not_finite_is_named_when_the_engine_opens(model, folder, name):
    """A half, a float, and the scale of a block. In the first two it would not show in logits."""
    geometry, tensors = model
    data = tensors[name].data.copy()
    data[:4] = 0xFF
    broken = {**tensors, name: replace(tensors[name], data=data)}
    with pytest.raises(ModelFileError, match=f"tensor {name} holds a value that is not finite"):
        open_engine(geometry, broken, folder)


def test_an_expert_that_a_table_names_again_and_again_counts_as_often(folder):
    """So a pass has three times as many rows for one expert as it has rows."""
    tensors, ids = tensors_of(PACKED, "f32"), random_ids(PACKED, 32)
    name = "blk.0.ffn_gate_tid2eid.weight"
    table = np.full(tensors[name].shape, 5, np.int32)
    tensors[name] = replace(tensors[name], data=table.reshape(-1).view(np.uint8))
    reference = Reference(PACKED, tensors, exact=True)
    truth = reference.prefill(reference.new_state(), ids, all_logits=True)
    engine = open_engine(PACKED, tensors, folder, exact=True)
    seat(engine, 0, [0])
    logits = run_rows(engine, 0, ids)
    engine.close()
    assert np.abs(logits - truth).max() < 1e-5


def test_brain_floats_become_floats(folder):
    kinds = {"*ffn_gate_inp.weight": Quant.BF16, "token_embd.weight": Quant.Q8_0}
    tensors, ids = tensors_of(PACKED, kinds), random_ids(PACKED, 20)
    held = {t.quant for t in tensors.values()}
    reference = Reference(PACKED, tensors)
    truth = reference.prefill(reference.new_state(), ids[:1], all_logits=True)
    engine = open_engine(PACKED, tensors, folder)
    seat(engine, 0, [0])
    logits = run_rows(engine, 0, ids[:1])
    engine.close()
    assert {Quant.BF16, Quant.Q8_0} <= held
    assert np.abs(logits - truth).max() < 2e-2
