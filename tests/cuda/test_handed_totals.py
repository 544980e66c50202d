"""Totals of segments that a reduction hands to the scan of the same elements, as both passes of a
distributed scan over one part do: values and gradients against a loop in float64, and what was
launched."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from two_passes import HANDED, calls_of, check_gradients, check_rank, gradients_of_init
from vector_cases import CASES, assert_close, expanded, loop, starts_of
from vector_kernels import Launched, cut, kernels_of, leaves_on

from assocscan.api.associative_scan import run_call
from assocscan.api.bind_arguments import bind
from assocscan.cuda import launcher
from assocscan.cuda.vectors import prepare
from assocscan.cuda.vectors.totals_source import TotalsKernel
from assocscan.engines.base.executable import Executable
from assocscan.engines.base.scan_spec import TensorSpec
from assocscan.engines.base.vectors import prepare as tensors_of
from assocscan.engines.base.vectors import results as layouts
from assocscan.engines.base.vectors.kernel import CHUNK, BackwardKernel, ForwardKernel
from assocscan.functional.selective_scan import NAMES, arrange
from assocscan.program.vectors.vector_adjoint import VectorAdjoint
from assocscan.runtime.operation_arguments import Dispatch
from assocscan.runtime.vectors.recomputed_gradient import RecomputedGradient


def launches(prepared: list[Launched]) -> list[list[type]]:
    return [kernels_of(p.executable) for p in prepared]


@pytest.mark.thinned(96)
@pytest.mark.parametrize("steps", [3 * CHUNK - 5, 2 * CHUNK + 1])
@pytest.mark.parametrize("inclusive", [True, False])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("starts", [True, False])
@pytest.mark.parametrize("name", HANDED)
def test_values(
    name: str, starts: bool, reverse: bool, inclusive: bool, steps: int, device: str,
    prepared: list[Launched],
) -> None:  # fmt: skip
    """A scan without init begins with its first element, and has the same totals."""
    case, leaves = CASES[name], leaves_on(device, name, (2, steps, 5, 3))
    init = starts_of(case, leaves) if starts else None
    total, call = calls_of(name, leaves, init, reverse, inclusive, True)
    with cut(1):
        totals = run_call(total, "cuda")[1]
        handed = call.handed
        assert handed is not None and handed.forward is not None
        ys, finals, _ = run_call(call, "cuda")
    assert handed.forward is None
    exact = [x.double() for x in leaves]
    _, wanted = loop(case.op, expanded(exact), reverse)
    for a, b in zip(totals, wanted, strict=True):
        assert_close(a, b, steps)
    exact_init = None if init is None else tuple(x.double() for x in init)
    outputs, last = loop(case.op, expanded(exact), reverse, inclusive, exact_init)
    for a, b in zip((*ys, *finals), (*outputs, *last), strict=True):
        assert_close(a, b, steps)
    assert launches(prepared) == [[TotalsKernel, ForwardKernel], [ForwardKernel]]


@pytest.mark.slow
@pytest.mark.thinned(48)
@pytest.mark.parametrize("steps", [3 * CHUNK - 5, 2 * CHUNK + 1])
@pytest.mark.parametrize("inclusive", [True, False])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", HANDED)
def test_gradients(
    name: str, reverse: bool, inclusive: bool, steps: int, device: str, prepared: list[Launched]
) -> None:
    """Each direction computes its totals once."""
    check_gradients(name, device, reverse, inclusive, False, steps)
    back = [p for p in prepared if type(p.kernel.operator) is VectorAdjoint]
    assert launches(back) == [[TotalsKernel, BackwardKernel], [BackwardKernel]]
    forward = [p for p in prepared if p not in back]
    assert launches(forward) == [[TotalsKernel, ForwardKernel], [ForwardKernel]]


@pytest.mark.slow
@pytest.mark.thinned(36)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("name", HANDED)
def test_ranks(name: str, rank: int, reverse: bool, device: str, prepared: list[Launched]) -> None:
    """The rank that comes first computes its totals alone going back, and then its gradients."""
    check_rank(name, device, rank, reverse)
    back = [p for p in prepared if type(p.kernel.operator) is VectorAdjoint]
    assert launches(back)[:2] == [[TotalsKernel, BackwardKernel], [BackwardKernel]]
    assert ([TotalsKernel] in launches(back)) == (rank == (2 if reverse else 0))


@pytest.mark.slow
@pytest.mark.thinned(4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_gradients_of_other_dtypes(dtype: torch.dtype, device: str) -> None:
    check_gradients("selective", device, False, True, False, 3 * CHUNK - 5, dtype)


@pytest.mark.slow
def test_cotangents_of_finals(device: str, prepared: list[Launched]) -> None:
    """All leaves of the final have one. The first pass carried the cotangent of one part of the
    state only, so its totals are not taken."""
    check_gradients("selective", device, False, True, True, 2 * CHUNK + 3)
    back = [p for p in prepared if type(p.kernel.operator) is VectorAdjoint]
    assert launches(back) == [[TotalsKernel, BackwardKernel]] * 2


@pytest.mark.exhaustive
def test_cotangents_that_change_between_the_passes(device: str, prepared: list[Launched]) -> None:
    def double(g: list[Tensor]) -> None:
        for t in g:
            t.mul_(2)

    check_gradients("gated", device, False, True, False, 2 * CHUNK + 3, between=double)
    back = [p for p in prepared if type(p.kernel.operator) is VectorAdjoint]
    assert launches(back) == [[TotalsKernel, BackwardKernel]] * 2


def test_an_axis_that_is_not_cut_hands_nothing(device: str, prepared: list[Launched]) -> None:
    leaves = leaves_on(device, "selective", (2, 3 * CHUNK, 5, 3))
    total, call = calls_of("selective", leaves, None, False, True, False)
    with cut(100):
        run_call(total, "cuda")
        handed = call.handed
        assert handed is not None and handed.forward is None
        (y,) = run_call(call, "cuda")[0]
    (wanted,), _ = loop(CASES["selective"].op, expanded([x.double() for x in leaves]))
    assert_close(y, wanted, 3 * CHUNK)
    assert launches(prepared) == [[ForwardKernel]] * 2


def test_the_gradient_of_init_alone_walks_nothing(device: str, prepared: list[Launched]) -> None:
    """Also outside of distributed scans."""
    case, leaves = CASES["selective"], leaves_on(device, "selective", (2, 2 * CHUNK + 3, 5, 3))
    init = tuple(x.requires_grad_() for x in starts_of(case, leaves))
    call = bind(case.op, expanded(leaves), 1, False, True, init, True, None)
    exact = tuple(x.detach().double().requires_grad_() for x in init)
    with cut(1):
        (y,), finals, _ = run_call(call, "cuda")
        got = torch.autograd.grad([y.sum(), finals[1].square().sum()], init, allow_unused=True)
    (wanted,), last = loop(case.op, expanded([x.double() for x in leaves]), init=exact)
    right = torch.autograd.grad([wanted.sum(), last[1].square().sum()], exact, allow_unused=True)
    assert got[0] is None and right[0] is None  # nothing depends on the decay before the scan
    assert_close(got[1], right[1], 4 * CHUNK)
    assert launches(prepared)[-1] == [TotalsKernel, BackwardKernel]
    assert not prepared[-1].kernel.walks
    plan = str(prepared[-1].executable.plan)
    assert "their totals are then combined" in plan


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("everything", [False, True])
def test_the_cut_is_that_of_the_scan_that_follows(
    everything: bool, dtype: torch.dtype, prepared: list[Launched], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scan's best tile may not fit in shared memory while the totals' does. The reduction must
    still cut as the tile that the scan gets in the end. Nothing is compiled."""
    monkeypatch.setattr(launcher, "load", lambda *given: SimpleNamespace(shared_bytes=0))
    monkeypatch.setattr(prepare, "shared_memory", lambda device: 227 << 10)
    for module in (prepare, tensors_of):
        monkeypatch.setattr(module, "processors", lambda device: 132)
    named: dict[str, Any] = dict.fromkeys(NAMES)
    for name, shape in SHAPES.items():
        if everything or name in REQUIRED:
            kind = torch.float32 if name in ("A", "D", "delta_bias") else dtype
            named[name] = torch.empty(shape, dtype=kind)
    arranged = arrange(named, softplus=everything)
    call = bind(arranged.op, arranged.leaves, 1, False, True, arranged.carry, False, None)
    op = call.traced.vectors
    assert op is not None
    spec, tensors = call.scan(op)
    spec = replace(spec, from_identity=True)
    given = [TensorSpec.of(t) for t in call.leaves]
    prepare.prepare(spec, given)
    total = replace(spec, operator=op.without_outputs(), final=(0, 1), followed_by=op)
    (kept,) = (executable := prepare.prepare(total, given)).outputs
    prepare.prepare(replace(spec, segments=sizes(executable, kept)[0]),
                    [*given, executable.specs[kept]])  # fmt: skip
    own, handing, taking = prepared
    assert own.segments == handing.segments == taking.segments > 1
    assert own.kernel.tile == taking.kernel.tile

    init = tuple(torch.empty(*spec.carry_batch, *leaf.shape) for leaf in op.state)
    call = replace(call, init=list(init))
    spec, tensors = call.scan(op)
    scan = RecomputedGradient(Dispatch("cuda"), spec, tensors, [True] * len(tensors))
    carries_shape, carries_dtype = layouts.gpu_carries(scan.spec)
    saved = [*tensors, torch.empty(carries_shape, dtype=carries_dtype)]
    outputs = [torch.empty(*spec.batch, *leaf.shape, dtype=leaf.dtype) for leaf in op.outputs]
    every, ordered = scan.backward_scan(saved, [True] * len(tensors), [*outputs, None])
    given = [TensorSpec.of(t) for t in ordered]
    prepare.prepare_backward(every, given)
    alone, _ = scan.backward_scan(
        saved, [k >= len(op.inputs) for k in range(len(tensors))], [*outputs, None]
    )
    executable = prepare.prepare_backward(replace(alone, followed_by=every.operator), given)
    (kept,) = executable.outputs
    prepare.prepare_backward(replace(every, segments=sizes(executable, kept)[0]),
                             [*given, executable.specs[kept]])  # fmt: skip
    own, handing, taking = prepared[3:]
    assert own.segments == handing.segments == taking.segments > 1
    assert own.kernel.tile == taking.kernel.tile
    if everything:
        assert own.kernel.tile != handing.kernel.tile


def sizes(executable: Executable, slot: int) -> tuple[int, ...]:
    made = executable.specs[slot]
    assert made is not None
    return made.shape


# Large enough that an H200 cuts the axis.
SHAPES = {
    "u": (1, 8192, 1536), "delta": (1, 8192, 1536), "A": (1536, 16), "B": (1, 8192, 16),
    "C": (1, 8192, 16), "D": (1536,), "z": (1, 8192, 1536), "delta_bias": (1536,),
}  # fmt: skip
REQUIRED = ("u", "delta", "A", "B", "C")


@pytest.mark.exhaustive
def test_cotangents_of_inference_mode(device: str, prepared: list[Launched]) -> None:
    """They have no version counters, so nothing says whether they change; no totals are handed."""
    leaves = [x.requires_grad_() for x in leaves_on(device, "gated", (1, 2 * CHUNK + 3, 5, 3))]
    init = tuple(x.detach().requires_grad_() for x in starts_of(CASES["gated"], leaves))
    call = calls_of("gated", leaves, init, False, True, False)[1]
    with cut(1):
        (y,), _, _ = run_call(call, "cuda")
        with torch.inference_mode():
            g = torch.ones_like(y)
        gradients_of_init([y], init, [g])
        torch.autograd.grad(y, leaves, g)
    back = [p for p in prepared if type(p.kernel.operator) is VectorAdjoint]
    assert launches(back) == [[TotalsKernel, BackwardKernel]] * 2
