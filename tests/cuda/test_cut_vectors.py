"""CUDA scans over vectors whose axis is cut into segments: values and gradients against a loop in
float64, in the emulator and, where there is one, on the GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from vector_cases import CASES, Case, assert_close, check, expanded, leaves_of, loop, starts_of
from vector_kernels import KINDS_OF_TILES, PASSES, Launched, cut, launched, leaves_on, passes, tiled

from assocscan import associative_scan, reduce
from assocscan.api.bind_arguments import bind
from assocscan.cuda.vectors import prepare
from assocscan.cuda.vectors.tile import VectorTile
from assocscan.cuda.vectors.totals_source import TotalsKernel
from assocscan.engines.base.scan_spec import TensorSpec
from assocscan.engines.base.vectors import results as layouts
from assocscan.engines.base.vectors.kernel import CHUNK, ForwardKernel
from assocscan.monoids.combinators import with_lower
from assocscan.program.vectors.vector_adjoint import VectorAdjoint
from assocscan.program.vectors.vector_operator import VectorOperator

# The passes (forward, backward) that are cut, without finals and with finals that have a cotangent.
# One of the finals of "scalar decay" is shared by all states. The other operators of the table have
# no kernels here.
EVERY = ("selective", "gated", "two decays", "clamped input", "attention", "turning")
CUT = dict.fromkeys(EVERY, ((True, True), (True, True))) | {
    "scalar decay": ((True, True), (True, False)),
    "max-plus": ((True, False), (True, False)),
    "no identity": ((False, False), (False, False)),
}


def expected(name: str, finals: bool) -> set[type]:
    """The passes that are cut."""
    return {kind for kind, is_cut in zip(PASSES, CUT[name][finals], strict=True) if is_cut}


def cut_passes(prepared: list[Launched]) -> set[type]:
    return {type(p.kernel.operator) for p in prepared if p.segments > 1}


@pytest.mark.slow
@pytest.mark.thinned(7)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cut(dtype: torch.dtype, device: str, prepared: list[Launched]) -> None:
    leaves = leaves_on(device, "selective", (1, 3 * CHUNK + 1, 5, 4), dtype)
    with cut(1):
        check(CASES["selective"], leaves, backend="cuda")
    assert cut_passes(prepared) == set(PASSES)
    assert {p.segments for p in prepared} == {4}


@pytest.mark.slow
@pytest.mark.thinned(366)
@pytest.mark.parametrize("finals", [True, False])
@pytest.mark.parametrize("starts", [False, True])
@pytest.mark.parametrize("inclusive", [True, False])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", CUT)
def test_flags(
    name: str, reverse: bool, inclusive: bool, starts: bool, finals: bool, device: str,
    prepared: list[Launched],
) -> None:  # fmt: skip
    case, leaves = CASES[name], leaves_on(device, name, (2, 2 * CHUNK + 5, 3, 3))
    if not inclusive and not starts and case.op.identity is None:
        pytest.skip("an exclusive scan needs an identity, or an init")
    init = starts_of(case, leaves) if starts else None
    with cut(1):
        check(case, leaves, reverse=reverse, inclusive=inclusive, init=init, finals=finals,
              backend="cuda")  # fmt: skip
    assert cut_passes(prepared) == expected(name, finals)


LENGTHS = [
    (chunks, length)
    for chunks in (1, 2)
    for length in (
        CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1, 2 * CHUNK + 2, 3 * CHUNK, 4 * CHUNK - 1, 4 * CHUNK,
        4 * CHUNK + 1, 4 * CHUNK + 2, 5 * CHUNK, 6 * CHUNK + 1,
    )
    if length > chunks * CHUNK
]  # fmt: skip


@pytest.mark.thinned(63)
@pytest.mark.parametrize("inclusive", [True, False])
@pytest.mark.parametrize("chunks, length", LENGTHS)
def test_lengths(
    chunks: int, length: int, inclusive: bool, device: str, prepared: list[Launched]
) -> None:
    """Segments that are full, that end with one step, and a last one without a step of its own."""
    with cut(chunks):
        check(CASES["selective"], leaves_on(device, "selective", (1, length, 3, 2)),
              inclusive=inclusive, backend="cuda")  # fmt: skip
    assert cut_passes(prepared) == set(PASSES)
    assert {p.segments for p in prepared} == {-(-length // (chunks * CHUNK))}


def test_the_final_state_has_the_bits_of_the_last_one(
    device: str, prepared: list[Launched]
) -> None:
    """The first step stands alone, so the last of the segments has no step left. The final state is
    that of the segment with the last step; totals are rounded differently."""
    leaves = leaves_on(device, "selective", (1, 2 * CHUNK + 1, 40, 4))
    for n in range(4):
        leaves[4] = torch.zeros_like(leaves[4])
        leaves[4][..., n] = 1  # the output is one of the states
        with cut(1):
            y, final = associative_scan(
                CASES["selective"].op, expanded(leaves), 1, return_final=True, backend="cuda"
            )
        assert torch.equal(final[1][..., n], y[:, -1])
    assert {p.segments for p in prepared} == {3}


@pytest.mark.slow
@pytest.mark.thinned(366)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str
)
@pytest.mark.parametrize("states", [2, 3, 7, 16, 33, 64])
@pytest.mark.parametrize("lanes", [1, 5, 33, 40, 65, 97])
def test_lanes_and_states(
    lanes: int, states: int, dtype: torch.dtype, device: str, prepared: list[Launched]
) -> None:
    leaves = leaves_on(device, "selective", (1, 2 * CHUNK + 3, lanes, states), dtype)
    with cut(1):
        check(CASES["selective"], leaves, backend="cuda")
    assert cut_passes(prepared) == set(PASSES)


@pytest.mark.slow
@pytest.mark.thinned(18)
@pytest.mark.parametrize("wanted", [(2,), (3,), (2, 3), (0, 1, 4), ()])
@pytest.mark.parametrize("starts", [True, False])
def test_some_gradients(
    starts: bool, wanted: tuple[int, ...], device: str, prepared: list[Launched]
) -> None:
    """Only A, only B, …; with no leaf, that of init alone."""
    if not (starts or wanted):
        pytest.skip("no gradient")
    case, leaves = CASES["selective"], leaves_on(device, "selective", (2, 2 * CHUNK + 3, 5, 6))
    init = starts_of(case, leaves) if starts else None
    with cut(1):
        check(case, leaves, init=init, wanted_leaves=wanted, backend="cuda")
    assert cut_passes(prepared) == set(PASSES)


def transposed(x: torch.Tensor) -> torch.Tensor:
    """With its lanes next to each other in memory."""
    return x.transpose(2, 3).contiguous().transpose(2, 3)


@pytest.mark.slow
@pytest.mark.thinned(7)
@pytest.mark.parametrize("turn", [False, True])
@pytest.mark.parametrize("segments", [True, False])
def test_the_gradient_of_a_leaf_along_all_segments_has_its_declared_strides(
    segments: bool, turn: bool, device: str, prepared: list[Launched]
) -> None:
    case, leaves = CASES["selective"], leaves_on(device, "selective", (1, 2 * CHUNK + 3, 5, 6))
    if turn:
        leaves[2] = transposed(leaves[2])
    with cut(1 if segments else 100):
        check(case, leaves, backend="cuda")
    (backward,) = (p for p in prepared if type(p.kernel.operator) is VectorAdjoint)
    assert (backward.segments > 1) == segments
    executable = backward.executable
    spec, count = executable.spec, len(executable.spec.names)
    tensors = [executable.specs[k] for k in range(count)]
    declared, _ = layouts.GPU_RESULTS.results_of(spec, tensors)  # type: ignore[arg-type]
    for slot, (shape, strides, dtype) in zip(executable.outputs, declared, strict=True):
        made = executable.specs[slot]
        assert made is not None
        sizes = [(n, s) for n, s in zip(made.shape, made.strides, strict=True) if n > 1]
        assert sizes == [(n, s) for n, s in zip(shape, strides, strict=True) if n > 1]
        assert made.dtype == dtype
    lane_stride, state_stride = declared[2][1][-2:]
    assert (lane_stride < state_stride) == turn


@pytest.mark.slow
@pytest.mark.thinned(4)
@pytest.mark.parametrize("pairs", [(torch.float64, torch.float32), (torch.float32, torch.bfloat16)])
def test_rows_narrower_than_the_rest(pairs: Any, device: str, prepared: list[Launched]) -> None:
    wide, narrow = pairs
    leaves = leaves_on(device, "selective", (1, 2 * CHUNK + 3, 5, 6), wide)
    mixed = [x.to(narrow) if k >= 3 else x for k, x in enumerate(leaves)]
    exact = [x.double().requires_grad_() for x in mixed]
    mixed = [x.requires_grad_() for x in mixed]
    with cut(1):
        y = associative_scan(CASES["selective"].op, expanded(mixed), 1, backend="cuda")
        g = torch.rand_like(y)
        got = torch.autograd.grad(y, mixed, g)
    (wanted,), _ = loop(CASES["selective"].op, expanded(exact))
    assert_close(y.detach(), wanted.detach(), 67)
    for a, b in zip(got, torch.autograd.grad(wanted, exact, g.double()), strict=True):
        assert_close(a, b, 67 * 30)
    assert cut_passes(prepared) == set(PASSES)


@pytest.mark.slow
def test_complex_states(device: str, prepared: list[Launched]) -> None:
    case, steps = CASES["attention"], 2 * CHUNK + 3
    drawn = [x.to(torch.complex128) for x in leaves_of(case, 1, steps, 3, 5, torch.float64)]
    turned = [leaves_of(case, 1, steps, 3, 5, torch.float64, seed=k)[k] for k in range(4)]
    leaves = [(x + 0.3j * y).to(device).requires_grad_() for x, y in
              zip(drawn, turned, strict=True)]  # fmt: skip
    with cut(1):
        y = associative_scan(case.op, expanded(leaves), 1, backend="cuda")
        g = torch.randn(y.shape, dtype=y.dtype).to(device)
        got = torch.autograd.grad(y, leaves, g)
    (wanted,), _ = loop(case.op, expanded(leaves))
    torch.testing.assert_close(y, wanted)
    for a, b in zip(got, torch.autograd.grad(wanted, leaves, g), strict=True):
        torch.testing.assert_close(a, b)
    assert cut_passes(prepared) == set(PASSES)


@pytest.mark.slow
def test_what_is_not_cut(device: str, prepared: list[Launched]) -> None:
    """Packed sequences, and axes of one segment."""
    case = CASES["selective"]
    leaves = [x.requires_grad_() for x in leaves_on(device, "selective", (1, 70, 3, 4))]
    bounds = torch.tensor([0, 66, 66, 70], device=device)
    with cut(1):
        y = associative_scan(case.op, expanded(leaves), 1, offsets=bounds, backend="cuda")
        got = torch.autograd.grad(y.square().sum(), leaves)
        exact = [x.detach().double().requires_grad_() for x in leaves]
        parts = [tuple(x[:, a:b] for x in expanded(exact)) for a, b in ((0, 66), (66, 70))]
        wanted = torch.cat([loop(case.op, part)[0][0] for part in parts], 1)
        assert_close(y.detach(), wanted.detach(), 70)
        right = torch.autograd.grad(wanted.square().sum(), exact)
        for a, b in zip(got, right, strict=True):
            assert_close(a, b, 70 * 12)
        check(case, leaves_on(device, "selective", (1, CHUNK, 3, 4)), backend="cuda")
    assert passes(prepared) == set(PASSES) and not cut_passes(prepared)


@pytest.mark.parametrize("cuts", [True, False])
def test_explain_says_the_segments(cuts: bool, device: str, prepared: list[Launched]) -> None:
    leaves = leaves_on(device, "selective", (1, 3 * CHUNK, 5, 4))
    with cut(1 if cuts else 3):
        associative_scan(CASES["selective"].op, expanded(leaves), 1, backend="cuda")
    text = str(prepared[-1].executable.plan)
    assert ("each of 3 segments of the axis" in text) == cuts
    assert ("totals of" in text) == cuts
    assert f"{3 if cuts else 1} programs" in text


@pytest.mark.exhaustive
@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tile", KINDS_OF_TILES, ids=str)
def test_tiles(tile: VectorTile, dtype: torch.dtype, device: str, prepared: list[Launched]) -> None:
    shape = (1, 2 * CHUNK + 3, tile.lanes + 3, tile.states - 3)
    with tiled(tile), cut(1):
        check(CASES["selective"], leaves_on(device, "selective", shape, dtype), backend="cuda")
    assert cut_passes(prepared) == set(PASSES)


@pytest.mark.slow
def test_two_runs_give_the_same_bits(device: str) -> None:
    leaves = [x.requires_grad_() for x in leaves_on(device, "gated", (1, 3 * CHUNK + 1, 40, 5))]

    def results() -> list[torch.Tensor]:
        y, final = associative_scan(
            CASES["gated"].op, expanded(leaves), 1, return_final=True, backend="cuda"
        )
        grads = torch.autograd.grad(y.square().sum() + final[1].sum(), leaves)
        return [y, *final, *grads]

    with cut(1):
        first, *others = (results() for _ in range(3))
    for again in others:
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.slow
def test_few_chains_of_a_long_axis_are_cut(
    device: str, prepared: list[Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a forced number of segments."""
    monkeypatch.setattr(prepare, "processors", lambda device: 1)
    check(CASES["selective"], leaves_on(device, "selective", (1, 16 * CHUNK + 5, 2, 2)),
          backend="cuda")  # fmt: skip
    assert cut_passes(prepared) == set(PASSES)


# ---- reductions: nothing but final states leaves them ----


def final_state(case: Case, leaves: list[torch.Tensor], **flags: Any) -> tuple[torch.Tensor, ...]:
    """By `reduce`, before `lower`."""
    op = with_lower(case.op, None)
    op.reductions.clear()  # what was prepared by other cuts
    found: tuple[torch.Tensor, ...] = reduce(op, expanded(leaves), 1, backend="cuda", **flags)
    return found


# The operators of which segments have totals.
REDUCED = [name for name in CUT if CUT[name][0][0]]


@pytest.mark.thinned(213)
@pytest.mark.parametrize("starts", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    "chunks, length",
    [
        (1, CHUNK + 1),  # no step is left for the last segment: the first one stands alone
        (1, 3 * CHUNK - 5),
        (1, 4 * CHUNK),
        (2, 5 * CHUNK + 3),
    ],
)
@pytest.mark.parametrize("lanes, states", [(3, 3), (40, 16), (67, 4)])
@pytest.mark.parametrize("name", REDUCED)
def test_reductions(
    name: str, lanes: int, states: int, chunks: int, length: int, reverse: bool, starts: bool,
    device: str, prepared: list[Launched],
) -> None:  # fmt: skip
    """Totals of all segments, then one block for each block of lanes, which combines them."""
    case, leaves = CASES[name], leaves_on(device, name, (2, length, lanes, states))
    init = starts_of(case, leaves) if starts else None
    with cut(chunks):
        got = final_state(case, leaves, reverse=reverse, init=init)
    exact = None if init is None else tuple(x.double() for x in init)
    _, wanted = loop(case.op, expanded([x.double() for x in leaves]), reverse, init=exact)
    for a, b in zip(got, wanted, strict=True):
        assert_close(a, b, length)
    found = prepared[-1]
    assert found.segments == -(-length // (chunks * CHUNK))
    groups = 2 * -(-lanes // found.kernel.tile.lanes)
    assert launched(found.executable) == [
        (TotalsKernel, groups * found.segments), (ForwardKernel, groups)
    ]  # fmt: skip


def test_a_reduction_through_lower(device: str, prepared: list[Launched]) -> None:
    case, leaves = CASES["gated"], leaves_on(device, "gated", (2, 2 * CHUNK + 3, 5, 4))
    with cut(1):
        got = reduce(case.op, expanded(leaves), 1, backend="cuda")
    (wanted,), _ = loop(case.op, expanded([x.double() for x in leaves]))
    assert_close(got, wanted[:, -1], 2 * CHUNK)
    assert launched(prepared[-1].executable) == [(TotalsKernel, 6), (ForwardKernel, 2)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_reduction(dynamic: bool, device: str, prepared: list[Launched]) -> None:
    case, leaves = CASES["selective"], leaves_on(device, "selective", (2, 2 * CHUNK + 5, 5, 4))
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=dynamic)
    def run(xs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        found: torch.Tensor = reduce(case.op, xs, 1, backend="cuda")
        return found

    with cut(1):
        got = run(expanded(leaves))
    (wanted,), _ = loop(case.op, expanded([x.double() for x in leaves]))
    assert_close(got, wanted[:, -1], 2 * CHUNK)
    assert launched(prepared[-1].executable) == [(TotalsKernel, 6), (ForwardKernel, 2)]


def test_reductions_with_narrow_wide_and_complex_numbers(
    device: str, prepared: list[Launched]
) -> None:
    steps = 2 * CHUNK + 3
    for dtype in (torch.bfloat16, torch.float64):
        leaves = leaves_on(device, "selective", (1, steps, 5, 6), dtype)
        with cut(1):
            got = final_state(CASES["selective"], leaves)
        _, wanted = loop(CASES["selective"].op, expanded([x.double() for x in leaves]))
        for a, b in zip(got, wanted, strict=True):
            assert_close(a, b, steps)
    case = CASES["attention"]
    leaves = [(x + 0.3j * x).to(device) for x in leaves_of(case, 1, steps, 3, 5, torch.float64)]
    with cut(1):
        got = final_state(case, leaves)
    for a, b in zip(got, loop(case.op, expanded(leaves))[1], strict=True):
        torch.testing.assert_close(a, b)
    assert {p.segments for p in prepared} == {3}


def test_a_reduction_with_a_gradient_saves_carries_and_walks_all_segments(
    device: str, prepared: list[Launched]
) -> None:
    case, leaves = CASES["selective"], leaves_on(device, "selective", (1, 3 * CHUNK + 1, 5, 4))
    leaves = [x.requires_grad_() for x in leaves]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    with cut(1):
        got = final_state(case, leaves)
        gradients = torch.autograd.grad(got[1].square().sum(), leaves[:4])
    _, wanted = loop(case.op, expanded(exact))
    for a, b in zip(got, wanted, strict=True):
        assert_close(a.detach(), b.detach(), 3 * CHUNK)
    right = torch.autograd.grad(wanted[1].square().sum(), exact[:4])
    for a, b in zip(gradients, right, strict=True):
        assert_close(a, b, 3 * CHUNK * 12)
    forward = next(p for p in prepared if type(p.kernel.operator) is VectorOperator)
    assert launched(forward.executable) == [(TotalsKernel, 3), (ForwardKernel, 4)]


def test_a_reduction_without_an_identity_walks_the_axis_once(
    device: str, prepared: list[Launched]
) -> None:
    case, leaves = CASES["no identity"], leaves_on(device, "no identity", (1, 2 * CHUNK + 5, 3, 4))
    with cut(1):
        got = final_state(case, leaves)
    for a, b in zip(got, loop(case.op, expanded([x.double() for x in leaves]))[1], strict=True):
        assert_close(a, b, 2 * CHUNK)
    assert launched(prepared[-1].executable) == [(ForwardKernel, 1)]


def test_one_state_leaf_of_an_exclusive_scan_without_outputs(device: str) -> None:
    """It starts from the identity. Totals have all parts, also where the carry has not."""
    case, leaves = CASES["two decays"], leaves_on(device, "two decays", (2, 3 * CHUNK + 1, 5, 4))
    call = bind(case.op, expanded(leaves), 1, False, False, None, True, None)
    assert call.traced.vectors is not None
    spec, tensors = call.scan(call.traced.vectors.without_outputs())
    spec = replace(spec, final=(1,))
    with cut(1):
        executable = prepare.prepare(spec, [TensorSpec.of(t) for t in call.leaves])
    outputs, (got,) = executable.run(tensors)
    assert not outputs and launched(executable) == [(TotalsKernel, 8), (ForwardKernel, 2)]
    _, wanted = loop(case.op, expanded([x.double() for x in leaves]))
    assert_close(got, wanted[1], 3 * CHUNK)


def test_the_plan_says_what_a_reduction_does(device: str, prepared: list[Launched]) -> None:
    leaves = leaves_on(device, "selective", (1, 3 * CHUNK, 5, 4))
    for chunks in (1, 3):
        with cut(chunks):
            final_state(CASES["selective"], leaves)
    segments, whole = (str(p.executable.plan) for p in prepared)
    assert "walks each of 3 segments of the axis; their totals are then combined" in segments
    name = "'with_lower(selective_test, NoneType)' (vectors)"
    assert f"CUDA totals of {name}, 3 blocks" in segments
    assert f"CUDA {name}, 1 blocks" in segments
    assert "3 programs" in segments
    assert "walks the axis" in whole and "totals" not in whole


def test_a_reduction_over_few_chains_is_cut(
    device: str, prepared: list[Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a forced number of segments."""
    leaves = leaves_on(device, "selective", (1, 16 * CHUNK + 5, 2, 2))
    monkeypatch.setattr(prepare, "processors", lambda device: 1)
    final_state(CASES["selective"], leaves)
    (first, blocks), second = launched(prepared[-1].executable)
    assert first is TotalsKernel and blocks == prepared[-1].segments > 1
    assert second == (ForwardKernel, 1)
