"""Operators with curvature, how to draw their elements, and derivatives of their scans by a loop.

Most have infinite slopes at zero, which is what kernels read where there is no state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from assocscan import Monoid, ops
from assocscan.testing import reference_scan

PyTree = Any
Scan = Callable[..., PyTree]
Draw = Callable[[torch.Generator, tuple[int, ...]], tuple[Tensor, ...]]


def between(low: float, high: float, leaves: int = 1, *element: int) -> Draw:
    """Random leaves in [low, high)."""

    def draw(generator: torch.Generator, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
        given = {"generator": generator, "dtype": torch.float64}
        parts = [torch.rand((*shape, *element), **given) for _ in range(leaves)]
        return tuple(low + (high - low) * part for part in parts)

    return draw


def with_zeros(generator: torch.Generator, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    (x,) = between(0.5, 1.5)(generator, shape)
    return (torch.where(torch.rand(shape, generator=generator) < 0.2, 0.0, x),)


def matrix(generator: torch.Generator, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    """2 × 2, near the identity: products of many are not singular."""
    (x,) = between(-0.2, 0.2, 1, 2, 2)(generator, shape)
    return (x + torch.eye(2, dtype=torch.float64),)


class Case(NamedTuple):
    """An operator and its elements; states are drawn as they are, unless the init is constant."""

    op: Monoid
    draw: Draw
    constant: float | None = None


def moebius(left: PyTree, right: PyTree) -> PyTree:
    """z → (a z + b) / (c z + d), composed, with d brought back to one."""
    a1, b1, c1, d1 = left
    a2, b2, c2, d2 = right
    d = c2 * b1 + d2 * d1
    return (a2 * a1 + b2 * c1) / d, (a2 * b1 + b2 * d1) / d, (c2 * a1 + d2 * c1) / d, d / d


def rotate(left: PyTree, right: PyTree) -> PyTree:
    (c1, s1), (c2, s2) = left, right
    return c2 * c1 - s2 * s1, s2 * c1 + c2 * s1


def divided(left: PyTree, right: PyTree) -> PyTree:
    """h → h / a + b."""
    (a1, b1), (a2, b2) = left, right
    return a1 * a2, b1 / a2 + b2


def log_determinant(m: Tensor) -> Tensor:
    return torch.log(m[0, 0] * m[1, 1] - m[0, 1] * m[1, 0])


def named(name: str, fn: Callable[..., PyTree], **parts: Any) -> Monoid:
    return Monoid(fn, name=f"second_{name}", **parts)


POSITIVE = between(0.5, 1.5)
CASES = {
    "log product": Case(named("lp", lambda a, b: a * b, identity=1.0, lower=torch.log), POSITIVE),
    "parallel": Case(named("par", lambda a, b: 1 / (1 / a + 1 / b), identity=math.inf), POSITIVE),
    "roots": Case(
        named("roots", lambda a, b: (a.sqrt() + b.sqrt()) ** 2, identity=0.0),
        POSITIVE,
        constant=0.0,
    ),
    "harmonic": Case(
        named("harmonic", lambda a, b: a + b, lift=torch.reciprocal, lower=torch.reciprocal),
        POSITIVE,
    ),
    "moebius": Case(named("moebius", moebius), between(0.5, 1.0, 4)),
    "angle": Case(
        named("angle", rotate, identity=(1.0, 0.0), lower=lambda s: torch.atan2(s[1], s[0])),
        between(0.5, 1.0, 2),
    ),
    "affine": Case(ops.affine, between(-1.0, 1.0, 2)),
    "recurrence": Case(
        named("recurrence", ops.affine.combine, identity=(1.0, 0.0), lower=lambda s: s[1]),
        between(-1.0, 1.0, 2),
    ),
    "divided": Case(
        named("divided", divided, identity=(1.0, 0.0), lower=lambda s: s[1]), between(0.8, 2.0, 2)
    ),
    "logaddexp": Case(ops.logaddexp, between(-1.0, 1.0)),
    "product with zeros": Case(ops.prod, with_zeros),
    "matrix": Case(
        named(
            "matrix",
            lambda a, b: b @ a,
            identity=lambda shape: torch.eye(shape[-1]),
            element_ndim=2,
            lower=log_determinant,
        ),
        matrix,
    ),
}
# One slope that is infinite at zero; all results NaN; several leaves.
SINGULAR = ("log product", "parallel", "moebius")


class Question(NamedTuple):
    """Which derivatives; hashable, so that all engines share the loop's answer."""

    name: str
    length: int
    reverse: bool = False
    inclusive: bool = True
    init: bool = False
    packed: bool = False
    order: int = 2

    def inputs(self) -> tuple[PyTree, PyTree]:
        """(xs, init), of which all but a constant init require a gradient."""
        generator = torch.Generator().manual_seed(self.length)
        case = CASES[self.name]
        batch = (2,) if self.bounds is None else (len(self.bounds) - 1, 2)
        xs, init = case.draw(generator, (2, self.length)), case.draw(generator, batch)
        for leaf in xs if case.constant is not None else (*xs, *init):
            leaf.requires_grad_()
        if case.constant is not None:
            init = tuple(torch.full_like(leaf, case.constant) for leaf in init)
        return only(xs), only(init) if self.init else None

    @property
    def bounds(self) -> tuple[int, ...] | None:
        """Offsets: empty sequences at both ends and inside, and sequences of one step."""
        if not self.packed:
            return None
        one, three = min(1, self.length), min(3, self.length)
        return (0, 0, one, one, three, self.length, self.length)

    @property
    def is_defined(self) -> bool:
        """Whether the first output is: it may need an identity."""
        return self.inclusive or self.init or CASES[self.name].op.identity is not None

    @property
    def options(self) -> dict[str, Any]:
        return {
            "axis": 1,
            "reverse": self.reverse,
            "inclusive": self.inclusive,
            "offsets": None if self.bounds is None else torch.tensor(self.bounds),
        }


def only(leaves: tuple[Tensor, ...]) -> PyTree:
    return leaves[0] if len(leaves) == 1 else leaves


def weights(leaves: list[Tensor], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in leaves]


def pull(outputs: list[Tensor], inputs: list[Tensor], cotangents: list[Tensor]) -> list[Tensor]:
    """A gradient that can be differentiated; zeros where nothing depends on an input."""
    pairs = [(y, g) for y, g in zip(outputs, cotangents, strict=True) if y.requires_grad]
    if not pairs:
        return [torch.zeros_like(t) for t in inputs]
    ys, gs = zip(*pairs, strict=True)
    return list(
        torch.autograd.grad(
            ys, inputs, gs, create_graph=True, allow_unused=True, materialize_grads=True
        )
    )


def derivatives(scan: Scan, question: Question) -> list[Tensor]:
    """The first derivatives with random cotangents, then those of these in random directions, with
    respect to the inputs and to the first cotangents."""
    xs, init = question.inputs()
    outputs = tree_leaves(scan(CASES[question.name].op, xs, init=init, **question.options))
    inputs = [t for t in tree_leaves((xs, init)) if t is not None and t.requires_grad]
    cotangents = [g.requires_grad_() for g in weights(outputs, 1)]
    results = found = pull(outputs, inputs, cotangents)
    for order in range(2, question.order + 1):
        found = pull(found, [*inputs, *cotangents], weights(found, order))
        results = [*results, *found]
    return [t.detach() for t in results]


@cache
def expected(question: Question) -> list[Tensor]:
    return derivatives(reference_scan, question)
