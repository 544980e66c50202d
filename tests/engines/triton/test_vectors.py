"""Triton's kernels over vectors: values and gradients against a loop in float64."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_targets import TARGETS, resource_usage, run_compiling
from table import GPU
from torch import Tensor
from vector_cases import (
    CASES,
    affine,
    assert_close,
    check,
    check_packed,
    expanded,
    leaves_of,
    loop,
)

from assocscan import Monoid, associative_scan, reduce, selective_scan
from assocscan.engines.base.commands import Launch
from assocscan.engines.base.executable import Executable
from assocscan.engines.base.scan_spec import TensorSpec
from assocscan.engines.base.vectors.kernel import CHUNK
from assocscan.engines.base.vectors.prepare import lane_dimension
from assocscan.engines.triton.vectors import prepare, tile
from assocscan.program.vectors.vector_adjoint import VectorAdjoint
from assocscan.program.vectors.vector_operator import VectorOperator
from assocscan.runtime import executable_cache as executables
from assocscan.runtime import gpu_engine_choice
from assocscan.runtime.backends import availability
from assocscan.runtime.native import runner

# More than a chunk, and less; steps left over after whole groups, and none; a number of states that
# is padded; more lanes than a block, less, and as many.
SHAPES = [(1, 1, 1, 2), (2, 33, 5, 3), (1, 70, 37, 16), (1, 65, 9, 5), (1, 38, 32, 8)]


@pytest.fixture(autouse=True)
def chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Executable]]:
    """The executables that were prepared."""
    reason = availability()["triton"]
    if reason is not None:
        pytest.skip(reason)
    # Calls that the runner in C++ knows are not prepared again, so `found` would lack them.
    monkeypatch.setattr(runner, "call", runner.never)
    monkeypatch.setattr(runner, "module", None)
    monkeypatch.setattr(runner, "_started", [os.getpid()])
    found: list[Executable] = []

    def noting(function: Any) -> Any:
        def noted(*arguments: Any) -> Executable:
            found.append(function(*arguments))
            return found[-1]

        return noted

    monkeypatch.setattr(prepare, "launched", noting(prepare.launched))
    monkeypatch.setattr(gpu_engine_choice, "is_worth_vectors", lambda call: True)
    executables._PREPARED.clear()
    yield found
    executables._PREPARED.clear()


def leaves_on_gpu(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    return [x.to(GPU) for x in leaves_of(CASES[name], *shape, dtype)]  # type: ignore[call-arg]


def scan(op: Any, xs: Any, *arguments: Any, **options: Any) -> Any:
    return associative_scan(op, xs, 1, *arguments, backend="triton", **options)


def test_the_shapes_cross_the_edges_of_tiles() -> None:
    lanes = tile.choose_tile(16, True).lanes
    steps = {t - 1 for _, t, _, _ in SHAPES}  # the first one has no carry
    assert any(t > CHUNK for t in steps) and any(t < CHUNK for t in steps)
    assert {t % tile.GROUP == 0 for t in steps} == {True, False}
    assert any(c > lanes for *_, c, _ in SHAPES) and any(c < lanes for *_, c, _ in SHAPES)
    assert any(c % tile.choose_tile(n, True).lanes == 0 for *_, c, n in SHAPES)
    assert any(n != tile.choose_tile(n, True).states for *_, n in SHAPES)


@pytest.mark.slow
@pytest.mark.thinned(44)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(
    name: str, shape: tuple[int, int, int, int], chosen: list[Executable]
) -> None:
    check(CASES[name], leaves_on_gpu(name, shape, torch.float32), backend="triton")
    if name != "plain":  # which may also run as an operator over scalars
        assert {type(e.spec.operator) for e in chosen} == {VectorOperator, VectorAdjoint}


@pytest.mark.slow
@pytest.mark.thinned(7)
@pytest.mark.parametrize("name", ["selective", "max-plus", "softmax"])
@pytest.mark.parametrize("inclusive", [True, False])
@pytest.mark.parametrize("reverse", [True, False])
def test_flags(name: str, reverse: bool, inclusive: bool) -> None:
    leaves = leaves_on_gpu(name, (2, 11, 3, 5), torch.float32)
    options: Any = {"reverse": reverse, "inclusive": inclusive, "backend": "triton"}
    check(CASES[name], leaves, **options)
    sizes = [5 if name == "selective" or k == 1 else 1 for k in range(2)]
    init = tuple(torch.rand(2, 3, n, device=GPU) for n in sizes)
    check(CASES[name], leaves, **options, init=init)


@pytest.mark.slow
@pytest.mark.parametrize("states", [33, 260])
def test_many_states(states: int) -> None:
    """So many that a program has few lanes: as few as warps, or one."""
    leaves = leaves_on_gpu("gated", (1, 34, 3, states), torch.float32)
    check(CASES["gated"], leaves, backend="triton")


@pytest.mark.slow
@pytest.mark.parametrize("states", [3, 16])
def test_what_follows_from_leaves_that_are_equal_at_all_steps(states: int) -> None:
    """It has one value for all steps of a group, and is read at each of them."""
    u, delta, *others = leaves_on_gpu("selective", (2, 11, 5, states), torch.float32)
    check(CASES["selective"], [u[:, :1], delta[:, :1], *others], backend="triton")


@pytest.mark.slow
def test_leaves_wider_than_states() -> None:
    """The gradient of a float64 leaf without lanes, of a float32 state, is summed as float64."""
    narrowed = Monoid(
        affine, identity=(1.0, 0.0), name="narrowed", element_ndim=1,
        lift=lambda a, x, k: (a, x * k.float()), lower=lambda s: s[1].sum(-1),
    )  # fmt: skip
    a, x, k = (torch.rand(1, 11, n, m, device=GPU) for n, m in ((5, 1), (5, 1), (1, 16)))
    found = []
    for backend in ("triton", "eager"):
        leaves = [a.clone(), x.clone(), k.double()]
        y = associative_scan(narrowed, [t.requires_grad_() for t in leaves], 1, backend=backend)
        weights = torch.arange(1.0, y.numel() + 1, device=GPU).view(y.shape)
        found.append(torch.autograd.grad((y * weights).sum(), leaves))
    for got, wanted in zip(*found, strict=True):
        assert got.dtype == wanted.dtype
        limit = 11 * 64 * torch.finfo(torch.float32).eps  # of eleven steps
        torch.testing.assert_close(got, wanted, rtol=limit, atol=limit)


@pytest.mark.slow
@pytest.mark.thinned(7)
@pytest.mark.parametrize("name", ["selective", "plain"])
def test_float64(name: str) -> None:
    check(CASES[name], leaves_on_gpu(name, (2, 20, 3, 6), torch.float64), backend="triton")


@pytest.mark.exhaustive
def test_any_strides() -> None:
    """Slices of wider tensors, and tensors with the axis last."""
    case = CASES["selective"]
    leaves = leaves_on_gpu("selective", (2, 20, 18, 5), torch.float32)
    wide = [x.repeat_interleave(2, -1).repeat_interleave(3, 1)[:, ::3, :, ::2] for x in leaves]
    check(case, wide, backend="triton")
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in leaves]
    check(case, turned, backend="triton")


@pytest.mark.exhaustive
@pytest.mark.thinned(7)
@pytest.mark.parametrize("reverse", [False, True])
def test_packed_sequences(reverse: bool) -> None:
    leaves = leaves_on_gpu("selective", (2, 44, 3, 4), torch.float32)
    check_packed(
        CASES["selective"], leaves, (0, 0, 5, 5, 30, 31, 44), reverse=reverse, backend="triton"
    )


@pytest.mark.slow
def test_sixteen_bit_leaves_beside_float32() -> None:
    """Combined in float32 and rounded once, gradients too. Which products and sums are fused may
    differ between the two kernels, so results may by one rounding."""
    case = CASES["selective"]
    leaves = leaves_on_gpu("selective", (2, 20, 7, 16), torch.float32)
    mixed = [x.bfloat16() if k != 2 else x for k, x in enumerate(leaves)]  # A stays float32
    wide = [x.float().requires_grad_() for x in mixed]
    mixed = [x.requires_grad_() for x in mixed]
    y, exact = scan(case.op, expanded(mixed)), scan(case.op, expanded(wide))
    assert y.dtype == torch.bfloat16
    assert_rounded(y, exact)
    g = torch.randn_like(y)
    got = torch.autograd.grad(y, mixed, g)
    right = torch.autograd.grad(exact, wide, g.float())
    for a, b, x in zip(got, right, mixed, strict=True):
        assert a.dtype == x.dtype
        assert_rounded(a, b)


def assert_rounded(got: Tensor, exact: Tensor) -> None:
    """A result of at most 20 steps and 7 lanes, computed in float32 and rounded to its dtype: up to
    one rounding of the dtype, and eight of float32 in the sums before it."""
    eps = torch.finfo(got.dtype).eps
    limit = 8 * eps if got.dtype == torch.float32 else eps
    largest = float(exact.detach().abs().max())
    torch.testing.assert_close(got, exact.to(got.dtype), rtol=limit, atol=8 * 2**-23 * largest)


@pytest.mark.slow
def test_complex_states_and_bools() -> None:
    op = Monoid(
        affine, identity=(1.0, 0.0), name="complex_triton_test", element_ndim=1,
        lift=lambda decay, B, C, u: (decay, B * u),
        lower=lambda s, xs: (s[1] * xs[2]).sum(-1),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.complex128).to(GPU)

    poles = 0.5 * draw(1, 1, 3, 6) / draw(1, 1, 3, 6).abs().clamp_min(1)
    leaves = [poles, draw(2, 12, 1, 6), draw(2, 12, 1, 6), draw(2, 12, 3, 1)]
    leaves = [x.requires_grad_() for x in leaves]
    y = scan(op, expanded(leaves))
    (wanted,), _ = loop(op, expanded(leaves))
    torch.testing.assert_close(y, wanted)
    g = draw(*y.shape)
    got, right = (torch.autograd.grad(r, leaves, g) for r in (y, wanted))
    for a, b in zip(got, right, strict=True):
        torch.testing.assert_close(a, b)
    x = torch.rand(2, 20, 5, 3, device=GPU) > 0.5
    flipped = Monoid(lambda a, b: (a & ~b) | (~a & b), name="flipped_triton_test", element_ndim=1,
                     lower=lambda h: h.to(torch.int32).sum(-1))  # fmt: skip
    after = x.int().cumsum(1) % 2
    assert torch.equal(scan(flipped, x, init=x[:, 0]), (after ^ x[:, :1].int()).sum(-1))


@pytest.mark.parametrize("shape", [(0, 5, 4, 3), (2, 0, 4, 3), (2, 5, 0, 3)])
def test_nothing_to_scan(shape: tuple[int, int, int, int]) -> None:
    leaves = [x.requires_grad_() for x in leaves_on_gpu("selective", shape, torch.float32)]
    y, final = scan(CASES["selective"].op, expanded(leaves), return_final=True)
    assert y.shape == shape[:3] and final[1].shape == (shape[0], shape[2], 3)
    (y.sum() + final[1].sum()).backward()
    for x in leaves:
        assert x.grad is not None and not x.grad.any()


@pytest.mark.slow
def test_reduction_and_partial_gradients() -> None:
    case = CASES["gated"]
    leaves = leaves_on_gpu("gated", (2, 20, 3, 4), torch.float32)
    y = scan(case.op, expanded(leaves))
    last = reduce(case.op, expanded(leaves), 1, backend="triton")
    torch.testing.assert_close(last, y[:, -1])
    leaves[0].requires_grad_()
    _, final = scan(case.op, expanded(leaves), return_final=True)
    (got,) = torch.autograd.grad(final[1].sum(), leaves[0])
    exact = [x.detach().double() for x in leaves]
    exact[0].requires_grad_()
    _, end = loop(case.op, expanded(exact))
    assert_close(got, torch.autograd.grad(end[1].sum(), exact[0])[0], 200)


@pytest.mark.slow
def test_selective_scan(chosen: list[Executable]) -> None:
    """The function, with groups, gates and a state, as on the CPU."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    tensors = [draw(2, 20, 6), draw(2, 20, 6), -draw(6, 4).abs(), draw(2, 20, 2, 4),
               draw(2, 20, 2, 4), draw(6), draw(2, 20, 6), draw(6)]  # fmt: skip
    found = []
    for backend, device in (("triton", GPU), ("cpu", "cpu")):
        x = [t.to(device).requires_grad_() for t in tensors]
        init = torch.ones(2, 6, 4, device=device)
        results = selective_scan(
            *x, delta_softplus=True, init=init, return_final=True, backend=backend
        )
        loss = sum((r * r).sum() for r in results)
        assert isinstance(loss, Tensor)
        found.append([t.cpu() for t in (*results, *torch.autograd.grad(loss, x))])
    assert len(chosen) >= 2
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.exhaustive
def test_kernels_compile_and_stay_in_registers() -> None:
    """At the shape of a Mamba layer, for NVIDIA and AMD."""
    found = json.loads(run_compiling(Path(__file__)))
    assert {(kind, target) for kind, target, *_ in found} == {
        (kind, target) for kind in ("forward", "backward") for target in TARGETS
    }
    for kind, target, registers, stack in found:
        if target == "sm_90":
            assert stack == 0 and registers <= (168 if kind == "forward" else 255), (
                kind,
                registers,
            )


def test_threads_that_share_a_sum_round_alike() -> None:
    """Where a product and a sum may be fused, the first addition of a sum over threads takes no
    product of its own thread unrounded. In Triton's own sum it does."""
    own, ours = json.loads(run_compiling(Path(__file__), "sums"))
    assert own > 0 and ours == 0


# In the process that compiles.


def compile_sums() -> None:
    import triton
    from triton import language as tl
    from triton.backends.compiler import GPUTarget

    from assocscan.engines.triton import scalar

    @triton.jit
    def sums(x, y, z, total: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.arange(0, 32)[:, None] * 4 + tl.arange(0, 4)[None, :]
        products = tl.load(x + at) * tl.load(y + at)
        tl.store(z + tl.arange(0, 32)[:, None], total(products, 1))

    @triton.jit
    def own(x, axis: tl.constexpr):  # type: ignore[no-untyped-def]
        return tl.sum(x, axis, keep_dims=True)

    found = []
    for total in (own, scalar.total):
        source = triton.compiler.ASTSource(
            sums, {"x": "*fp32", "y": "*fp32", "z": "*fp32", "total": "constexpr"},
            {(3,): total},
        )  # fmt: skip
        options = {"enable_fp_fusion": True, "num_warps": 4}
        text = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
        shuffled = re.findall(r"shfl\.sync\.bfly\.b32\s+(%\w+)", text)
        addends = re.findall(r"fma\.rn\.f32\s+%\w+, %\w+, %\w+, (%\w+);", text)
        found.append(len(set(shuffled) & set(addends)))
    print(json.dumps(found))


def compile_all() -> None:
    from dataclasses import replace

    from test_compile import compile_kernel

    from assocscan.api.bind_arguments import bind
    from assocscan.autodiff.vector_adjoint import vector_adjoint

    case, sizes = CASES["selective"], {"b": 8, "t": 4096, "c": 1536, "n": 16}
    leaves = [
        torch.empty([sizes[d] if d in axes else 1 for d in "btcn"], device="meta")
        for _, axes in case.leaves
    ]
    call = bind(case.op, expanded(leaves), 1, False, True, None, False, None)
    assert call.traced.vectors is not None
    spec, tensors = call.scan(call.traced.vectors)
    specs = [None if t is None else TensorSpec.of(t) for t in tensors]
    lane = lane_dimension(spec, specs)
    spec = replace(spec, operator=call.traced.vectors.saving_carries(lane))
    repeated = tuple((1,) if t.shape[1] == 1 else () for t in leaves)
    adjoint = vector_adjoint(
        call.traced.vectors, False, True, (), tuple(range(5)), (0,), (), False, repeated, lane
    )  # fmt: skip
    forward = prepare.prepare(spec, specs)
    given = [*specs, *(forward.specs[k] for k in forward.outputs)]
    backward = prepare.prepare_backward(replace(spec, operator=adjoint), given)  # type: ignore[type-var]
    found = []
    for kind, executable in (("forward", forward), ("backward", backward)):
        for command in executable.commands:
            if not isinstance(command, Launch):
                continue
            kinds = [executable.specs[k] for k in command.slots]
            shown = [torch.empty(0, dtype=t.dtype, device="meta") for t in kinds if t is not None]
            for target in TARGETS:
                binary = compile_kernel(command.kernel, shown, target)  # type: ignore[arg-type]
                usage = resource_usage(binary["cubin"]) if "cubin" in binary else (0, 0)
                found.append((kind, target, *usage))
    print(json.dumps(found))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    compile_sums() if sys.argv[1:] == ["sums"] else compile_all()
