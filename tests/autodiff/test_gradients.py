"""Derivatives of every engine against autograd through the oracle's loop, in float64."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from table import (
    FLAGS,
    LAYOUTS,
    TWO_FLAGS,
    Draw,
    Engine,
    Flags,
    affine,
    elements,
    integers,
    matrix_affine,
    sampled,
    values,
)
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from assocscan import monoid, monoids, ops
from assocscan.engines.eager import program_interpreter as interpreted
from assocscan.runtime import backends as engines
from assocscan.runtime import executable_cache as executables
from assocscan.testing import reference_scan

pytestmark = pytest.mark.thinned(4)

PyTree = Any

REAL, COMPLEX = values(torch.float64), values(torch.complex128)


@dataclass(frozen=True)
class Smooth:
    """A differentiable operator, and how to draw its inputs and states."""

    op: Any
    draw: Draw
    draw_state: Draw


def positive(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    return REAL(generator, shape).abs() + 0.5


def same(op: Any, draw: Draw) -> Smooth:
    return Smooth(op, draw, draw)


def weighted_mean(left: PyTree, right: PyTree) -> PyTree:
    """(count, mean): an integer leaf beside a float one."""
    n1, m1 = left
    n2, m2 = right
    n = n1 + n2
    return n, m1 + (m2 - m1) * n2 / n


def quaternion(left: PyTree, right: PyTree) -> PyTree:
    """The Hamilton product: four coupled leaves, not commutative."""
    a, b, c, d = left
    e, f, g, h = right
    return (
        a * e - b * f - c * g - d * h,
        a * f + b * e + c * h - d * g,
        a * g - b * h + c * e + d * f,
        a * h + b * g - c * f + d * e,
    )


RECURRENCE = monoid(
    affine, identity=(1.0, 0.0), name="gradients_recurrence", lower=lambda state: state[1]
)
TRACED_MATRIX = monoid(
    matrix_affine,
    identity=lambda a, b: (torch.eye(a[-1]), torch.zeros(b)),
    element_ndim=(2, 1),
    name="gradients_matrix_affine",
)
GATED = monoid(
    affine,
    identity=(1.0, 0.0),
    name="gradients_gated",
    lift=lambda x, gate: (torch.sigmoid(gate), x * gate),
    lower=lambda state, xs: state[1] * torch.tanh(xs[1]) + xs[0],
)
PAIR = elements((REAL, ()), (REAL, ()))
MATRIX = elements((REAL, (2, 2)), (REAL, (2,)))
COUNTED = elements((integers(1, 5, torch.int64), ()), (REAL, ()))

SMOOTH = {
    "affine": same(ops.affine, PAIR),
    "recurrence": same(RECURRENCE, PAIR),
    "gated": same(GATED, PAIR),
    "complex": same(ops.affine, elements((COMPLEX, ()), (COMPLEX, ()))),
    "logaddexp": same(ops.logaddexp, REAL),
    "prod": same(ops.prod, positive),
    "welford": Smooth(
        ops.welford, REAL, elements((integers(1, 5, torch.int64), ()), (REAL, ()), (positive, ()))
    ),
    "weighted mean": same(
        monoid(weighted_mean, identity=(0, 0.0), name="gradients_weighted_mean"), COUNTED
    ),
    "quaternion": same(
        monoid(quaternion, identity=(1.0, 0.0, 0.0, 0.0), name="gradients_quaternion"),
        elements(*[(REAL, ())] * 4),
    ),
    "traced matrix": same(TRACED_MATRIX, MATRIX),
    "matrix": same(ops.matrix_affine, MATRIX),
}
# An engine derives and compiles a backward scan for most flags and sets of cotangents.
COMBINATIONS = (
    (TWO_FLAGS[0], "last output only"),
    (TWO_FLAGS[1], "random"),
    (TWO_FLAGS[1], "partly zero"),
)
OFFSETS = (0, 0, 5, 6, 6, 37)


class Question(NamedTuple):
    """Which gradients are asked for; hashable, so that all engines share the oracle's answer."""

    name: str
    shape: tuple[int, ...]
    axis: int
    flags: Flags = Flags()
    cotangents: str = "random"
    bounds: tuple[int, ...] | None = None

    def inputs(self) -> tuple[PyTree, PyTree]:
        """(xs, init), of which the floats require a gradient."""
        generator = torch.Generator().manual_seed(len(self.name))
        outer = self.shape[: self.axis] + self.shape[self.axis + 1 :]
        if self.bounds is not None:
            outer = (len(self.bounds) - 1, *outer)
        smooth = SMOOTH[self.name]
        xs, init = smooth.draw(generator, self.shape), smooth.draw_state(generator, outer)
        return tracked(xs), tracked(init) if self.flags.init else None

    @property
    def options(self) -> dict[str, Any]:
        return {
            "axis": self.axis,
            "reverse": self.flags.reverse,
            "inclusive": self.flags.inclusive,
            "return_final": self.flags.final,
            "offsets": None if self.bounds is None else torch.tensor(self.bounds),
        }


def tracked(tree: PyTree) -> PyTree:
    return tree_map(lambda x: x.detach().clone().requires_grad_(is_inexact(x)), tree)


def is_inexact(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def draw_cotangents(outputs: list[Tensor], kind: str) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    drawn: list[Tensor | None] = []
    for output in outputs:
        cotangent = values(output.dtype)(generator, tuple(output.shape))
        if kind == "partly zero":
            cotangent *= torch.rand(output.shape, generator=generator) < 0.5
        drawn.append(cotangent)
    if kind == "last output only":
        drawn[:-1] = [None] * (len(drawn) - 1)
    return drawn


def pull_back(outputs: PyTree, inputs: PyTree, kind: str) -> list[Tensor]:
    """The gradient of every input that requires one, zero where none arrives."""
    inexact = [leaf for leaf in tree_leaves(outputs) if is_inexact(leaf)]
    wanted = [
        leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
    pairs = zip(inexact, draw_cotangents(inexact, kind), strict=True)
    used = [(y, g.to(y.device)) for y, g in pairs if g is not None and y.requires_grad]
    if not used:
        return [torch.zeros_like(x) for x in wanted]
    ys, gs = zip(*used, strict=True)
    return list(torch.autograd.grad(ys, wanted, gs, allow_unused=True, materialize_grads=True))


@cache
def oracle(question: Question) -> list[Tensor]:
    xs, init = question.inputs()
    outputs = reference_scan(SMOOTH[question.name].op, xs, init=init, **question.options)
    return pull_back(outputs, (xs, init), question.cotangents)


def check(engine: Engine, question: Question) -> None:
    if engine.repeats(question.shape[question.axis]):
        return
    xs, init = question.inputs()
    op = SMOOTH[question.name].op
    outputs = engine.scan(op, engine.put(xs), init=engine.put(init), **question.options)
    got = pull_back(outputs, (xs, init), question.cotangents)
    assert_gradients_close(got, oracle(question), str(question))


def assert_gradients_close(got: list[Tensor], want: list[Tensor], what: str) -> None:
    for k, (one, other) in enumerate(zip(got, want, strict=True)):
        scale = float(other.abs().max()) if other.numel() else 1.0
        close = torch.allclose(one, other, rtol=1e-9, atol=1e-11 * max(scale, 1.0))
        assert close, f"gradient {k} of {what}:\n{one}\nexpected\n{other}"


@pytest.mark.thinned(7)
@pytest.mark.parametrize("name", SMOOTH)
def test_operators(engine: Engine, name: str) -> None:
    for flags, kind in COMBINATIONS:
        check(engine, Question(name, (2, 37), 1, flags, kind))


@pytest.mark.thinned(7)
@pytest.mark.parametrize("name", ["affine", "gated", "welford", "traced matrix"])
def test_strided_axis(engine: Engine, name: str) -> None:
    for inner, (flags, kind) in product((3, 9), COMBINATIONS[1:]):
        check(engine, Question(name, (37, inner), 0, flags, kind))


@pytest.mark.thinned(9)
@pytest.mark.parametrize("flags", sampled(FLAGS, FLAGS[::3]), ids=str)
@pytest.mark.parametrize("kind", ["random", "last output only"])
def test_flags(engine: Engine, kind: str, flags: Flags) -> None:
    for length in (1, 2, 3, 18):
        check(engine, Question("affine", (2, length), 1, flags, kind))


@pytest.mark.thinned(7)
@pytest.mark.parametrize("name", ["affine", "gated", "matrix", "welford"])
def test_packed_sequences(engine: Engine, name: str) -> None:
    for flags, kind in COMBINATIONS:
        check(engine, Question(name, (2, 37), 1, flags, kind, OFFSETS))


def test_long_axis(engine: Engine) -> None:
    engine.skip_if_slow(1500)
    for flags, kind in COMBINATIONS:
        check(engine, Question("recurrence", (1, 1500), 1, flags, kind))
        check(engine, Question("recurrence", (1500, 9), 0, flags, kind))


@pytest.mark.parametrize("shape", [(2, 0), (0, 5), (0, 0)], ids=str)
def test_nothing_to_scan(engine: Engine, shape: tuple[int, ...]) -> None:
    """The final of an empty axis is init: its gradient is the final's cotangent."""
    for flags in (Flags(init=True, final=True), Flags(inclusive=False, init=True, final=True)):
        check(engine, Question("affine", shape, 1, flags))


@pytest.mark.thinned(7)
@pytest.mark.parametrize("name", ["affine", "recurrence"])
def test_leaves_broadcast(engine: Engine, name: str) -> None:
    """The gradient of a broadcast leaf is summed over what it was broadcast to."""
    a, b = tracked(PAIR(torch.Generator().manual_seed(1), (2, 20, 3)))
    init = tracked(PAIR(torch.Generator().manual_seed(2), (3,)))
    op = SMOOTH[name].op
    for first, second in ((a[:1, :, :1], b), (a, b[:, :, :1]), (a[:1], b[:, :, :1])):
        got, want = (
            pull_back(scan(op, (first, second), axis=1, init=init), (a, b, init), "random")
            for scan in (engine_scan(engine), reference_scan)
        )
        assert_gradients_close(got, want, f"{tuple(first.shape)}, {tuple(second.shape)}")


def engine_scan(engine: Engine) -> Callable[..., PyTree]:
    def scan(op: Any, xs: PyTree, axis: int, init: PyTree = None) -> PyTree:
        return engine.scan(
            op, engine.put(xs), axis, init=None if init is None else engine.put(init)
        )

    return scan


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "contiguous"])
def test_strided_inputs_and_cotangents(engine: Engine, layout: str) -> None:
    a, b = tracked(PAIR(torch.Generator().manual_seed(3), (4, 21)))
    got, want = [], []
    for scan, result in ((engine_scan(engine), got), (reference_scan, want)):
        _, h = scan(SMOOTH["affine"].op, (LAYOUTS[layout](a), LAYOUTS[layout](b)), axis=1)
        cotangent = LAYOUTS[layout](torch.linspace(-1, 2, 84, dtype=torch.float64).view(4, 21))
        result += torch.autograd.grad(h, (a, b), cotangent.to(h.device))
    assert_gradients_close(got, want, layout)


def test_cotangent_of_stride_zero(engine: Engine) -> None:
    """The sum's backward passes on one number, expanded."""
    a, b = tracked(PAIR(torch.Generator().manual_seed(4), (2, 33)))
    got, want = (
        torch.autograd.grad(scan(SMOOTH["recurrence"].op, (a, b), axis=1).sum(), (a, b))
        for scan in (engine_scan(engine), reference_scan)
    )
    assert_gradients_close(list(got), list(want), "sum")


@pytest.mark.parametrize("which", [0, 1])
def test_only_some_leaves_require_a_gradient(engine: Engine, which: int) -> None:
    question = Question("recurrence", (2, 30), 1)
    xs, _ = question.inputs()
    xs[1 - which].requires_grad_(False)
    y = engine.scan(RECURRENCE, engine.put(xs), 1)
    assert_gradients_close(pull_back(y, xs, "random"), [oracle(question)[which]], f"leaf {which}")


def test_raw_callables(engine: Engine) -> None:
    a, b = tracked(PAIR(torch.Generator().manual_seed(5), (2, 25)))
    for reverse in (False, True):
        got = pull_back(
            engine.scan(affine, engine.put((a, b)), 1, reverse=reverse), (a, b), "random"
        )
        want = pull_back(reference_scan(affine, (a, b), 1, reverse), (a, b), "random")
        assert_gradients_close(got, want, f"reverse={reverse}")


def test_integer_leaves_have_no_gradient(engine: Engine) -> None:
    xs, _ = Question("weighted mean", (2, 9), 1).inputs()
    count, mean = engine.scan(SMOOTH["weighted mean"].op, engine.put(xs), 1)
    assert not count.requires_grad
    assert mean.requires_grad


def test_gradient_mode_is_respected(engine: Engine) -> None:
    xs, _ = Question("affine", (2, 9), 1).inputs()
    with torch.no_grad():
        quiet = engine.scan(ops.affine, engine.put(xs), 1)
    detached = engine.scan(ops.affine, engine.put(tree_map(Tensor.detach, xs)), 1)
    assert not any(leaf.requires_grad for leaf in (*quiet, *detached))


def test_inputs_changed_before_backward_are_noticed(engine: Engine) -> None:
    """The eager engine multiplies copies: its gradients stay right."""
    a, b = engine.put(Question("recurrence", (2, 9), 1).inputs()[0])
    leaf, a = a, a.clone()
    y = engine.scan(RECURRENCE, (a, b), 1)
    wanted = torch.autograd.grad(y.sum(), (leaf, b), retain_graph=True)
    with torch.no_grad():
        a.mul_(2)
    if engine.name == "eager":
        got = torch.autograd.grad(y.sum(), (leaf, b))
        assert all(map(torch.equal, got, wanted))
        return
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.thinned(7)
@pytest.mark.parametrize("shape", [(2, 37), (2, 70, 6)], ids=str)
@pytest.mark.parametrize("flags", [Flags(), Flags(init=True)], ids=["", "init"])
@pytest.mark.parametrize("dtype,error", [(torch.float32, 1e-4), (torch.bfloat16, 0.05)], ids=str)
def test_gradients_have_the_dtype_of_their_inputs(
    engine: Engine, dtype: torch.dtype, error: float, flags: Flags, shape: tuple[int, ...]
) -> None:
    """A state, and so an init beside the outputs that are read again, is float32."""
    question = Question("recurrence", shape, 1, flags)
    given = tree_map(
        lambda x: x.detach().to(dtype).requires_grad_(),
        [tree for tree in question.inputs() if tree is not None],
    )
    xs, init = engine.put([*given, None][:2])
    got = pull_back(engine.scan(RECURRENCE, xs, 1, init=init), given, "random")
    for one, other in zip(got, oracle(question), strict=True):
        assert one.dtype == dtype
        assert float((one - other).abs().max()) <= error * float(other.abs().max())


@pytest.mark.thinned(9)
@pytest.mark.parametrize(
    "name,flags",
    [
        ("affine", TWO_FLAGS[1]),
        ("complex", TWO_FLAGS[0]),
        *(
            pytest.param(name, flags, marks=pytest.mark.exhaustive)
            for name, flags in (
                ("logaddexp", TWO_FLAGS[1]),
                ("welford", TWO_FLAGS[0]),
                ("traced matrix", TWO_FLAGS[0]),
            )
        ),
    ],
    ids=str,
)
def test_finite_differences(engine: Engine, name: str, flags: Flags) -> None:
    """First and second derivatives, independently of the oracle's autograd."""
    if engine.interpreted:
        pytest.skip("hundreds of scans: left to engines that are compiled")
    question = Question(name, (2, 4), 1, flags)
    leaves, spec = tree_flatten(engine.put(question.inputs()))
    leaves = [leaf if leaf is None else tracked(leaf) for leaf in leaves]

    def scan(*leaves: Tensor | None) -> tuple[Tensor, ...]:
        xs, init = tree_unflatten(leaves, spec)
        ys = engine.scan(SMOOTH[name].op, xs, init=init, **question.options)
        return tuple(leaf for leaf in tree_leaves(ys) if is_inexact(leaf))

    # Each subset of the cotangents would be a kernel of its own; the tests above leave some out.
    assert torch.autograd.gradcheck(scan, leaves, check_undefined_grad=False)
    assert torch.autograd.gradgradcheck(
        scan, leaves, gen_non_contig_grad_outputs=True, check_undefined_grad=False
    )


def test_init_of_a_single_row(engine: Engine) -> None:
    """The init of a 1-D scan has no dimension at all."""
    x, init = torch.randn(5).requires_grad_(), torch.tensor(2.0).requires_grad_()
    xs, carry = engine.put(x), engine.put(init)
    engine.scan(ops.sum, xs, 0, init=carry).sum().backward()
    assert init.grad is not None
    assert init.grad.item() == 5


def test_derivatives_that_carry_nothing(engine: Engine) -> None:
    """The second derivative of a maximum is zero: its scan has a state without components."""
    x, init, g = (engine.put(t) for t in (torch.randn(2, 7), torch.randn(2), torch.randn(2, 7)))
    x.requires_grad_(), init.requires_grad_()
    y = engine.scan(ops.max, x, 1, init=init)
    first = torch.autograd.grad((y * g).sum(), (x, init), create_graph=True)
    total = torch.stack([t.sum() for t in first]).sum()
    if total.requires_grad:  # torch's own operations leave no graph
        second = torch.autograd.grad(total, (x, init), allow_unused=True)
        assert all(t is None or not t.any() for t in second)


def test_by_torch_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward scans that no engine can run (`engines.eager.interpreted`)."""
    monkeypatch.setitem(engines.SCALARS, "cpu", interpreted.prepare)
    executables._PREPARED.clear()
    for name, (flags, kind) in product(SMOOTH, COMBINATIONS):
        check(Engine("cpu"), Question(name, (2, 9), 1, flags, kind))
        check(Engine("cpu"), Question(name, (2, 37), 1, flags, kind, OFFSETS))
    executables._PREPARED.clear()
    for known in monoids().values():
        known.calls.clear()
        known.reductions.clear()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradient_of_a_carry_is_not_rounded_to_16_bits(engine: Engine, dtype: torch.dtype) -> None:
    """The carry of 16-bit states is float32: so is its gradient, here the product of all a."""
    torch.manual_seed(0)
    a = (torch.rand(20, 3) / 4 + 0.75).to(dtype)
    start = torch.zeros(3)
    given = [engine.put(t) for t in (a, torch.zeros_like(a), start)]
    h0 = given[2].requires_grad_()
    ones = engine.put(torch.ones(3))
    _, (_, h) = engine.scan(ops.affine, tuple(given[:2]), init=(ones, h0), return_final=True)
    (g,) = torch.autograd.grad(h.sum(), h0)
    torch.testing.assert_close(g.cpu().double(), a.double().prod(0), rtol=1e-5, atol=0)
