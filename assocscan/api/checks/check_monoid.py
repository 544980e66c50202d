"""`Monoid.check`: a property test for associativity and the identity."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from ...errors import MonoidError, ScanTypeError, ScanValueError
from ...hooks import HOOKS
from ...monoids.leaf_checks import check_tensor
from ...program.operator import Leaf
from ...pytrees import TreeSpec, align, flatten, leaf_paths, template, unflatten
from ...trace.fx_trace import isolated
from ..printed_source import default_example

if TYPE_CHECKING:
    from ...monoids.monoid import Monoid

Tensors = list[torch.Tensor]
# The accepted rounding error, in units of eps times the square of the largest magnitude.
SLACK = 64.0
# How much larger than the others some states are that are drawn. The products of three of them are
# far from the greatest float32.
LARGEST = 1e4
# The end of a message about states that were drawn, not given.
DRAWN = (
    "\n(these were drawn; if the inputs have other dtypes, pass like=, an example of them; where "
    "not all such elements are possible, pass samples=, states with one leading dimension, in the "
    "structure of the operator's element)"
)


def check_monoid(monoid: Monoid, like: Any, samples: Any) -> None:
    """Raise MonoidError with a counterexample if `monoid` is not associative, or its identity not
    neutral, on sample states.

    samples: how many random states are drawn, or a batch of states to draw from.
    """
    if isinstance(samples, bool):
        raise ScanTypeError(f"samples is {samples}, expected how many states to draw, or states")
    with isolated():
        if like is None:
            like = default_example(monoid)
            if monoid.lift is None and not isinstance(samples, int):
                require_kinds(monoid, like, samples)
        compare_samples(monoid, like, samples)


def require_kinds(monoid: Monoid, example: Any, samples: Any) -> None:
    """Raise ScanTypeError where the samples are no numbers of the identity's types. The operator
    is not traced before: it may not take numbers of these types either, and is not to blame."""
    leaves, spec = flatten(example)
    values = align(template(spec), samples, "samples")
    for path, value, leaf in zip(leaf_paths(spec, "samples"), values, leaves, strict=True):
        if isinstance(value, torch.Tensor) and not torch.can_cast(value.dtype, leaf.dtype):
            raise ScanTypeError(
                f"{path} is {value.dtype}, but this leaf of the identity of {monoid.name!r} stands "
                f"for {leaf.dtype}; pass like=, example leaves of xs, for other dtypes"
            )


def compare_samples(monoid: Monoid, example: Any, samples: Any) -> None:
    """Compare (a ∘ b) ∘ c with a ∘ (b ∘ c), and e ∘ a and a ∘ e with a, for states drawn from the
    samples, and e ∘ e with e. They are combined in the dtypes in which a scan combines them."""
    traced, _, _ = monoid.of(example, "like")
    spec, state = traced.state_spec, traced.state
    generator = torch.Generator().manual_seed(0)
    if isinstance(samples, int):
        if samples < 1:
            raise ScanValueError(f"samples is {samples}, expected 1 or more states")
        pool = random_states(monoid, example, samples, generator)
    else:
        pool = given_states(samples, spec, state)
    pool = [t.to(leaf.accumulator) for t, leaf in zip(pool, state, strict=True)]
    count = pool[0].shape[0]
    if count == 0:
        raise ScanValueError("samples holds no states; give at least one")
    number = count if isinstance(samples, int) else 3 * count
    draws = [torch.randint(count, (number,), generator=generator) for _ in range(3)]
    a, b, c = (unflatten([t[d] for t in pool], spec) for d in draws)
    advice = DRAWN if isinstance(samples, int) else ""
    left, right = monoid(monoid(a, b), c), monoid(a, monoid(b, c))
    magnitude = magnitudes((a, b, c, left, right), state)
    compare(monoid, left, right, magnitude, state, "it is not associative",
            {"a": a, "b": b, "c": c}, ("(a ∘ b) ∘ c", "a ∘ (b ∘ c)"), advice)  # fmt: skip
    if traced.identity is None:
        return
    e = unflatten(
        [v.to(leaf.accumulator).expand(number, *leaf.shape)
         for v, leaf in zip(traced.identity, state, strict=True)], spec,
    )  # fmt: skip
    for sides, combined in (("e ∘ a", monoid(e, a)), ("a ∘ e", monoid(a, e))):
        compare(monoid, combined, a, magnitude, state, "its identity is not neutral",
                {"e": e, "a": a}, (sides, "expected a"), advice)  # fmt: skip
    # Neutral beside every state that was drawn, it may still fail beside itself: counts of 0 are
    # then added, and a quotient by their sum is 0 / 0.
    compare(monoid, monoid(e, e), e, magnitude, state, "its identity is not neutral",
            {"e": e}, ("e ∘ e", "expected e"), "")  # fmt: skip


def given_states(samples: Any, spec: TreeSpec, state: tuple[Leaf, ...]) -> Tensors:
    """The leaves of the caller's states. Raises where they are not those of a batch of states."""
    try:
        pool: Tensors = align(template(spec), samples, "samples")
    except ScanTypeError as error:
        raise ScanTypeError(f"{error}; samples are states, as combine takes them") from None
    paths = leaf_paths(spec, "samples")
    for path, t, leaf in zip(paths, pool, state, strict=True):
        check_tensor(path, t)
        if t.is_meta:
            raise ScanValueError(f"{path} is on the meta device; it holds the states to draw from")
        if t.dim() != 1 + len(leaf.shape) or tuple(t.shape[1:]) != leaf.shape:
            expected = ", ".join(map(str, ("n", *leaf.shape)))
            raise ScanValueError(
                f"{path} has shape {list(t.shape)}, expected [{expected}]: n states along one "
                "leading dimension, each as like= makes it"
            )
        if len(t) != len(pool[0]):
            raise ScanValueError(
                f"{path} holds {len(t)} states and {paths[0]} {len(pool[0])}; all leaves must hold "
                "the same number"
            )
        if not torch.can_cast(t.dtype, leaf.accumulator):
            raise ScanTypeError(
                f"{path} is {t.dtype}, but this leaf of a state is {leaf.dtype}; pass like=, "
                "example leaves of xs, for other dtypes"
            )
    return pool


def random_states(monoid: Monoid, example: Any, count: int, generator: Any) -> Tensors:
    """`count` states, which are random inputs after `lift`."""
    traced, leaves, ndims = monoid.of(example, "like")
    inputs = [
        random_leaf(Leaf(t.dtype, tuple(t.shape[t.dim() - n :])), count, generator)
        for t, n in zip(leaves, ndims, strict=True)
    ]
    if monoid.lift is None:
        return inputs
    from ...monoids.batch_mapping import map_elements
    from ...trace.traced_monoid import lift_arguments

    arguments = lift_arguments(traced.input_spec)
    states, spec = map_elements(monoid.lift, inputs, ndims, arguments, pointwise=False)
    aligned: Tensors = align(template(traced.state_spec), unflatten(states, spec), "lift")
    return without_overflows(aligned, traced.state)


def without_overflows(states: Tensors, state: tuple[Leaf, ...]) -> Tensors:
    """The states, in which those that are too large to be combined twice are copies of the ones
    before: a lift may take an exponential of the large numbers."""
    count = states[0].shape[0]
    too_large = torch.zeros(count, dtype=torch.bool)
    for t, leaf in zip(states, state, strict=True):
        if leaf.dtype.is_floating_point or leaf.dtype.is_complex:
            too_large |= ~(t.abs().reshape(count, -1) <= 10 * LARGEST).all(1)
    numbers = torch.arange(count)
    kept = torch.where(too_large & (numbers % 2 == 1), numbers - 1, numbers)
    return [t[kept] for t in states]


def random_leaf(leaf: Leaf, count: int, generator: torch.Generator) -> torch.Tensor:
    """`count` random elements: normal numbers, integers from −20 (uint8: 0) to 20, or bools.

    Half of the numbers are up to LARGEST times as large, so that an operator is also seen where it
    saturates, and at most a quarter of the greatest integer, so that sums of three do not wrap.
    """
    shape = (count, *leaf.shape)
    if leaf.dtype == torch.bool:
        return torch.randint(2, shape, generator=generator).bool()
    powers = torch.rand(count, dtype=torch.float64, generator=generator) * math.log(LARGEST)
    is_large = torch.arange(count) % 2 == 1
    scale = torch.where(is_large, powers.exp(), 1.0).view(count, *[1] * len(leaf.shape))
    if leaf.dtype.is_floating_point or leaf.dtype.is_complex:
        wide = torch.complex128 if leaf.dtype.is_complex else torch.float64
        return (torch.randn(shape, dtype=wide, generator=generator) * scale).to(leaf.dtype)
    low = 0 if leaf.dtype == torch.uint8 else -20
    most = max(20, torch.iinfo(leaf.dtype).max // 4)
    numbers = torch.randint(low, 21, shape, generator=generator) * scale
    return numbers.clamp(-most, most).to(leaf.dtype)


def magnitudes(trees: tuple[Any, ...], state: tuple[Leaf, ...]) -> torch.Tensor:
    """Per draw, the largest finite magnitude among operands and results, and at least 1."""
    largest = torch.ones((), dtype=torch.float64)
    for tree in trees:
        for t, leaf in zip(flatten(tree)[0], state, strict=True):
            wide = t.abs().to(torch.float64) if t.dtype != torch.bool else t.double()
            flat = wide.reshape(t.shape[0], -1) if leaf.shape else wide.unsqueeze(-1)
            finite = torch.where(flat.isfinite(), flat, 0.0)
            if finite.shape[-1]:
                largest = torch.maximum(largest, finite.amax(-1))
    return largest


def compare(
    monoid: Monoid,
    got: Any,
    wanted: Any,
    magnitude: torch.Tensor,
    state: tuple[Leaf, ...],
    complaint: str,
    operands: dict[str, Any],
    names: tuple[str, str],
    advice: str,
) -> None:
    leaves, spec = flatten(got)
    others = align(template(spec), wanted, f"operator {monoid.name!r}")
    for path, x, y, leaf in zip(leaf_paths(spec, ""), leaves, others, state, strict=True):
        wrong = differs(x, y, magnitude, leaf)
        if bool(wrong.any()):
            k = int(wrong.nonzero()[0, 0])
            values = "\n".join(f"  {n} = {show(v, k)}" for n, v in operands.items())
            raise MonoidError(
                f"{monoid.name!r} is not a monoid: {complaint} in element{path}\n{values}\n"
                f"  {names[0]} = {show(got, k)}\n  {names[1]} = {show(wanted, k)}"
                f"{advice}"
            )


def differs(x: torch.Tensor, y: torch.Tensor, magnitude: torch.Tensor, leaf: Leaf) -> torch.Tensor:
    """Which draws differ by more than rounding.

    The tolerance of floats is proportional to the magnitude squared: an operator may multiply two
    components, and the product is rounded.
    """
    exact = (x == y) | ((x != x) & (y != y))
    if leaf.dtype.is_floating_point or leaf.dtype.is_complex:
        scale = magnitude.reshape(-1, *[1] * len(leaf.shape)) ** 2
        tolerance = SLACK * torch.finfo(leaf.accumulator).eps * scale
        distance = (x - y).abs().to(torch.float64)
        exact = exact | (distance <= tolerance)
    return ~exact.reshape(exact.shape[0], -1).all(-1)


def show(tree: Any, k: int) -> Any:
    """State k of a batch, as Python numbers, for the message."""
    leaves, spec = flatten(tree)
    return unflatten([t[k].tolist() for t in leaves], spec)


HOOKS.check_monoid = check_monoid
