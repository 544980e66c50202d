"""Second and third derivatives of every engine against those of a plain loop, in float64.

An inclusive scan without init has no state before its first step. Kernels read zero there, where
most of these operators have infinite slopes, and no result may show it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import cuda_emulator
import pytest
import torch
from cuda_emulator import emulated
from curved import (
    CASES,
    POSITIVE,
    SINGULAR,
    Case,
    Question,
    Scan,
    between,
    derivatives,
    expected,
    named,
    weights,
)
from table import Engine
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.functional import hessian
from torch.func import jacfwd, jacrev

from assocscan import Monoid, explain, ops, with_lower
from assocscan.cuda import choose_tile as tuning
from assocscan.cuda.kernel import RowsTile
from assocscan.cuda.tile_choice_inputs import Choice
from assocscan.testing import reference_scan


def check(engine: Engine, question: Question) -> None:
    if engine.repeats(question.length):
        return
    got, want = derivatives(engine.scan_from_cpu, question), expected(question)
    for k, (one, other) in enumerate(zip(got, want, strict=True)):
        what = f"derivative {k} of {question}"
        assert other.isfinite().all(), f"{what}: the loop's is not finite"
        assert_close(one, other, what)


def assert_close(got: Tensor, want: Tensor, what: str) -> None:
    scale = float(want.abs().max()) if want.numel() else 1.0
    assert torch.allclose(got, want, rtol=1e-9, atol=1e-9 * max(scale, 1.0)), (
        f"{what}:\n{got}\nexpected\n{want}"
    )


def questions(name: str) -> Iterator[Question]:
    """Inclusive scans without init, of every length: they need no other kernels."""
    for length, reverse, packed in (
        (1, False, False), (1, True, True), (2, True, False), (5, False, True), (5, True, False),
        (33, False, False), (33, True, True),
    ):  # fmt: skip
        yield Question(name, length, reverse, packed=packed)


@pytest.mark.thinned(16)
@pytest.mark.parametrize("name", CASES)
def test_operators(engine: Engine, name: str) -> None:
    if engine.interpreted:
        pytest.skip("the interpreter runs fewer questions, below")
    for question in questions(name):
        check(engine, question)


@pytest.mark.thinned(7)
@pytest.mark.parametrize("name", SINGULAR)
def test_few_steps(engine: Engine, name: str) -> None:
    """What the interpreter of Triton can run in a second."""
    check(engine, Question(name, 5, packed=True))


@pytest.mark.slow
def test_flags(engine: Engine) -> None:
    """An exclusive scan from the identity, and an init that no gradient is wanted of, have slopes
    in the direction of a constant; they may be infinite too."""
    for inclusive, init in ((False, False), (False, True), (True, True)):
        check(engine, Question("roots", 5, False, inclusive, init, packed=True))
        if not engine.interpreted:
            check(engine, Question("roots", 2, True, inclusive, init))


@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", SINGULAR[:2])
def test_third_derivatives(engine: Engine, name: str) -> None:
    check(engine, Question(name, 5, packed=True, order=3))


def test_several_tiles(engine: Engine) -> None:
    """A step without a state before it at the start of a tile, inside, and at the end."""
    check(engine, Question("parallel", 150, packed=True))
    check(engine, Question("parallel", 150, reverse=True))


@contextmanager
def cuda_emulator_with_small_tiles() -> Iterator[Engine]:
    """The CUDA engine on the CPU, with tiles of 64 steps."""
    reason = cuda_emulator.why_unavailable()
    if reason is not None:
        pytest.skip(reason)
    with emulated(), tuning.forced(Choice(RowsTile(32, 2, 3, 16, 2, 2, late=1), "LOOKBACK")):
        yield Engine("cuda")


@pytest.mark.exhaustive
def test_several_tiles_of_cuda_kernels() -> None:
    with cuda_emulator_with_small_tiles() as engine:
        check(engine, Question("parallel", 150, packed=True))


WIDE = named(  # the product of positive numbers; the slopes of the root at zero are infinite
    "wide",
    lambda a, b: torch.sqrt(a * a * b * b),
    element_ndim=1,
    adjoint=(
        named("slopes", ops.affine.combine, element_ndim=(1, 1), lower=lambda s: s[1]),
        lambda state, following, cotangent: (following, cotangent),
    ),
)


@pytest.mark.filterwarnings("ignore::assocscan.FallbackWarning")  # the rule's own derivative
@pytest.mark.parametrize("reverse", [False, True], ids=["", "reverse"])
@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("init", [False, True], ids=["", "init"])
def test_an_adjoint_written_by_hand(
    engine: Engine, length: int, reverse: bool, init: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An element of 20 numbers, too many for a derived derivative."""
    if engine.interpreted:
        pytest.skip("the derivative is torch's own code")
    monkeypatch.setitem(CASES, "wide", Case(WIDE, between(0.5, 1.5, 1, 20)))
    check(engine, Question("wide", length, reverse, init=init))


class Steep(torch.autograd.Function):
    """The sine, with twice its slope: a gradient that cannot be generated."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 2 * g * x.cos()


def steep(op: Monoid) -> tuple[Monoid, Monoid]:
    """`op` with lowers of the state, and of the state and the inputs."""
    return (
        with_lower(op, lambda s: Steep.apply(s[1])),
        with_lower(op, lambda s, x: Steep.apply(s[1]) + x[1] ** 2),
    )


DEPENDENT: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "the same": lambda m: (m, m),
    "a multiple": lambda m: (m, 2 * m),
    "a square": lambda m: (m * m, m),
    "independent": lambda m: (m[:, :1], m[:, 1:]),
}


@pytest.mark.thinned(12)
@pytest.mark.filterwarnings("ignore::assocscan.FallbackWarning")  # by the eager engine
@pytest.mark.parametrize("init", [False, True], ids=["", "init"])
@pytest.mark.parametrize("name", DEPENDENT)
@pytest.mark.parametrize("op", steep(ops.affine), ids=["", "inputs"])
def test_inputs_that_depend_on_each_other(
    engine: Engine, op: Monoid, name: str, init: bool
) -> None:
    """Each input's gradient counts once, where autograd differentiates the scan."""
    if engine.interpreted:
        pytest.skip("the derivative is torch's own code")

    def scan(run: Scan, m: Tensor) -> Tensor:
        a, b = DEPENDENT[name](m)
        return run(op, (a, b), 0, init=(a[0] + 1, a[0]) if init else None)

    check_dependent(engine, scan, (4, 2, 2))


@pytest.mark.thinned(9)
@pytest.mark.filterwarnings("ignore::assocscan.FallbackWarning")
@pytest.mark.parametrize("init", [False, True], ids=["", "init"])
@pytest.mark.parametrize("op", steep(ops.matrix_affine), ids=["", "inputs"])
def test_an_adjoint_written_by_hand_and_a_lower(engine: Engine, op: Monoid, init: bool) -> None:
    """Autograd differentiates it again; the states that it reads are results of the same scan."""
    if engine.interpreted:
        pytest.skip("the derivative is torch's own code")

    def scan(run: Scan, m: Tensor) -> Tensor:
        return run(op, (m, m[..., 0]), 0, init=(m[0], m[1, 0]) if init else None)

    if engine.name != "eager":
        A, b = (engine.put(torch.ones(s)).requires_grad_() for s in ((4, 2, 2), (4, 2)))
        assert "own adjoint" in explain(op, (A, b), backend=engine.name).gradient
    check_dependent(engine, scan, (4, 2, 2))


def check_dependent(
    engine: Engine, scan: Callable[[Scan, Tensor], Tensor], shape: tuple[int, ...]
) -> None:
    """First and second derivatives of a scan of one tensor."""
    generator = torch.Generator().manual_seed(5)
    m = (0.5 + torch.rand(shape, generator=generator, dtype=torch.float64)).requires_grad_()
    found = []
    for run in (engine.scan_from_cpu, reference_scan):
        (first,) = torch.autograd.grad(scan(run, m).cos().sum(), m, create_graph=True)
        found.append((first, *torch.autograd.grad(first.sin().sum(), m)))
    for k, (got, want) in enumerate(zip(*found, strict=True)):
        assert_close(got.detach(), want.detach(), f"derivative {k + 1}")
    # Gradients that come back from a GPU are added to those on the CPU in either order.
    assert torch.autograd.gradgradcheck(
        lambda m: scan(engine.scan_from_cpu, m), (m,), nondet_tol=1e-12
    )


Curvature = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]
CURVATURES: dict[str, Curvature] = {
    "autograd": hessian,
    "jacrev(jacrev)": lambda f, x: jacrev(jacrev(f))(x),
    "jacfwd(jacrev)": lambda f, x: jacfwd(jacrev(f))(x),
    "jacrev(jacfwd)": lambda f, x: jacrev(jacfwd(f))(x),
    "jacfwd(jacfwd)": lambda f, x: jacfwd(jacfwd(f))(x),
}


@pytest.mark.thinned(11)
@pytest.mark.parametrize("inclusive", [True, False], ids=["inclusive", "exclusive"])
@pytest.mark.parametrize("name", ["parallel", "roots"])
@pytest.mark.parametrize("kind", CURVATURES)
def test_hessians(engine: Engine, kind: str, name: str, inclusive: bool) -> None:
    if engine.interpreted:
        pytest.skip("dozens of scans: left to engines that are compiled")
    (x,) = POSITIVE(torch.Generator().manual_seed(3), (4,))

    def curvature(scan: Scan, of: Curvature) -> Tensor:
        return of(lambda x: torch.tanh(scan(CASES[name].op, x, 0, inclusive=inclusive)).sum(), x)

    want = curvature(reference_scan, hessian)
    assert want.isfinite().all()
    assert_close(curvature(engine.scan_from_cpu, CURVATURES[kind]), want, f"{kind} of {name}")


@pytest.mark.thinned(4)
@pytest.mark.parametrize("inclusive", [True, False], ids=["inclusive", "exclusive"])
def test_init_varies_for_the_outer_transform(engine: Engine, inclusive: bool) -> None:
    """A state before the first step that is constant for the inner derivative may be a variable of
    the outer one."""
    if engine.interpreted:
        pytest.skip("dozens of scans: left to engines that are compiled")
    generator = torch.Generator().manual_seed(4)
    (x,), (init,) = POSITIVE(generator, (4,)), POSITIVE(generator, ())

    def total(scan: Scan, x: Tensor, init: Tensor) -> Tensor:
        y = scan(CASES["roots"].op, x, 0, inclusive=inclusive, init=init)
        return torch.tanh(y).sum()

    want = hessian(lambda x, init: total(reference_scan, x, init), (x, init))[0][1]
    for inner, outer in product((jacrev, jacfwd), repeat=2):
        got = outer(lambda c, inner=inner: inner(lambda v: total(engine.scan_from_cpu, v, c))(x))(
            init
        )
        assert_close(got, want, f"{outer.__name__} in init of {inner.__name__} in x")


@pytest.mark.thinned(5)
@pytest.mark.parametrize("init", [False, True], ids=["", "init"])
@pytest.mark.parametrize("inclusive", [True, False], ids=["inclusive", "exclusive"])
def test_tangents_beside_a_constant(engine: Engine, inclusive: bool, init: bool) -> None:
    """Forward mode: a carry that does not move passes on no tangent, whatever its slope."""
    question = Question("roots", 5, False, inclusive, init, packed=True)
    x, start = question.inputs()
    (v,) = weights([x], 1)

    def tangent(scan: Scan) -> Tensor:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x.detach(), v)
            y = scan(CASES["roots"].op, dual, init=start, **question.options)
            found = forward_ad.unpack_dual(y).tangent
        return found

    want = tangent(reference_scan)
    assert want.isfinite().all()
    assert_close(tangent(engine.scan_from_cpu), want, str(question))


@pytest.mark.by_hand
@pytest.mark.parametrize("length", [1, 2, 5, 33])
@pytest.mark.parametrize("name", CASES)
def test_every_combination(engine: Engine, name: str, length: int) -> None:
    for flags in product((False, True), repeat=4):
        question = Question(name, length, *flags)
        if question.is_defined:
            check(engine, question)


@pytest.mark.by_hand
@pytest.mark.parametrize("name", [*SINGULAR, "affine", "roots"])
def test_every_combination_of_cuda_kernels(name: str) -> None:
    with cuda_emulator_with_small_tiles() as engine:
        for inclusive, init in product((False, True), repeat=2):
            for length, reverse in ((1, False), (33, True), (150, False)):
                question = Question(name, length, reverse, inclusive, init, packed=True)
                if question.is_defined:
                    check(engine, question)
