"""Does the derived derivative agree with torch's autograd through the user's own function?

A custom `autograd.Function` or a `torch.no_grad` inside an operator leaves no trace in its graph,
so that its derivative would silently be that of the formula. Before an operator's first gradient,
its functions are run on a few random elements: it is watched what they compute without autograd,
and the derivative of their programs is compared with autograd's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..errors import UnsupportedOperation
from ..program.dtypes import FLOATS
from ..program.element_components import component_views
from ..program.operator import Leaf, scalars
from ..program.program_builder import Builder, Program
from ..pytrees import TreeSpec, align, flatten, template, unflatten
from ..torch_private import WithTorchFunction
from ..torch_state import is_differentiable
from ..trace.fx_trace import isolated
from ..trace.signatures import takes_inputs
from ..trace.traced_monoid import TracedMonoid, lift_arguments
from .derivative_rules import vjp
from .evaluate import evaluate

SAMPLES = 4
# Far above rounding, far below any other formula.
TOLERANCE = 1e-3


def require_derivable(operator: Any, spec: TracedMonoid) -> None:
    """Raise UnsupportedOperation where autograd has another gradient; checked once."""
    if not spec.verified:
        with isolated():
            spec.verified.append(gradient_differs(operator, spec))
    if spec.verified[0] is not None:
        raise UnsupportedOperation(
            f"autograd through its {spec.verified[0]} gives another gradient than its formula has, "
            "as a custom autograd.Function or torch.no_grad does; x.detach() is part of a formula"
        )


def is_derivable(operator: Any, spec: TracedMonoid) -> bool:
    """Whether autograd has the gradient of the formula; found once."""
    try:
        require_derivable(operator, spec)
    except UnsupportedOperation:
        return False
    return True


def gradient_differs(operator: Any, spec: TracedMonoid) -> str | None:
    """Which function of the operator has an autograd gradient of its own; None for none."""
    assert spec.operator is not None
    tree = template(spec.state_spec)
    pair = flatten((tree, tree))[1]
    checks: list[tuple[str, Any, TreeSpec, tuple[Leaf, ...], Program, TreeSpec]] = [
        ("combine", operator.combine, pair, (*spec.state, *spec.state), spec.operator.combine,
         spec.state_spec)
    ]  # fmt: skip
    if operator.lift is not None:
        arguments = lift_arguments(spec.input_spec)
        checks.append(
            ("lift", operator.lift, arguments, spec.inputs, spec.operator.lift, spec.state_spec)
        )
    if operator.lower is not None:
        both = takes_inputs(operator.lower)
        call = (tree, template(spec.input_spec)) if both else (tree,)
        leaves = (*spec.state, *spec.inputs) if both else spec.state
        checks.append(
            ("lower", operator.lower, flatten(call)[1], leaves, spec.operator.lower,
             spec.output_spec)
        )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    for role, fn, call_spec, leaves, program, result_spec in checks:
        for _ in range(SAMPLES):
            if sample_differs(fn, call_spec, leaves, program, result_spec, generator):
                return role
    return None


def sample_differs(
    fn: Callable[..., Any],
    spec: TreeSpec,
    leaves: Sequence[Leaf],
    program: Program,
    result_spec: TreeSpec,
    generator: torch.Generator,
) -> bool:
    """Compare on one random element; what autograd cannot do in float64 is not compared. A custom
    autograd.Function and `torch.no_grad` count as a difference: there may be one at other
    elements."""
    wide = [widened(leaf) for leaf in leaves]
    inputs = [draw(leaf, generator) for leaf in wide]
    wanted = [t for t in inputs if t.requires_grad]
    try:
        with torch.enable_grad(), WithTorchFunction(), _Watch() as watch:
            result = fn(*unflatten(list(inputs), spec))
        results = align(template(result_spec), result, "the operator")
    except Exception:  # the function may not take float64, or a single element
        return False
    # Results that autograd does not track count too: the formula of one may have a derivative.
    smooth = [t for t in results if is_number(t)]
    if not smooth or not wanted:
        return False
    cotangents = {id(t): torch.randn(t.shape, dtype=t.dtype, generator=generator) for t in smooth}
    outputs = [t for t in smooth if t.requires_grad]
    if watch.found or any(has_custom_function(t) for t in outputs):
        return True
    expected: Sequence[torch.Tensor] = [torch.zeros_like(t) for t in wanted]
    if outputs:
        expected = torch.autograd.grad(
            outputs, wanted, [cotangents[id(t)] for t in outputs], materialize_grads=True,
            allow_unused=True,
        )  # fmt: skip
    seeds: list[torch.Tensor | None] = []
    for t in results:
        leaf = widened(Leaf(t.dtype, tuple(t.shape))) if isinstance(t, torch.Tensor) else None
        count = leaf.components if leaf is not None else 1
        seed = cotangents.get(id(t))
        parts = [None] * count if seed is None or leaf is None else component_views(seed, leaf)
        seeds.extend(parts)
    got = derivative(program, wide, inputs, seeds)
    flat = [
        part
        for g, t, leaf in zip(iter_grads(expected, inputs), inputs, wide, strict=True)
        for part in (component_views(g, leaf) if t.requires_grad else [None] * leaf.components)
    ]
    return any(far(a, b) for a, b in zip(got, flat, strict=True) if b is not None)


class _Watch(TorchFunctionMode):
    """found: whether a number was computed of tensors that require a gradient while none was
    recorded: under `torch.no_grad`, or within an autograd.Function."""

    found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not torch.is_grad_enabled() and getattr(func, "__name__", "") != "detach":
            given = flatten((args, tuple((kwargs or {}).values())))[0]
            made = result if isinstance(result, (tuple, list)) else [result]
            self.found |= any(map(requires_gradient, given)) and any(map(is_number, made))
        return result


def requires_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def is_number(value: Any) -> bool:
    """Whether it is a tensor that autograd could track."""
    return isinstance(value, torch.Tensor) and is_differentiable(value)


def has_custom_function(t: torch.Tensor) -> bool:
    """Whether a custom autograd.Function took part in making it."""
    left: list[Any] = [t.grad_fn]
    found: set[Any] = set()
    while left:
        node = left.pop()
        if node is None or node in found:
            continue
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return True
        found.add(node)
        left += [source for source, _ in node.next_functions]
    return False


def iter_grads(grads: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """One gradient per input, those without one standing for themselves."""
    remaining = iter(grads)
    return [next(remaining) if t.requires_grad else t for t in inputs]


def widened(leaf: Leaf) -> Leaf:
    """The same leaf in double precision."""
    if leaf.dtype.is_complex:
        return Leaf(torch.complex128, leaf.shape)
    return Leaf(torch.float64, leaf.shape) if leaf.dtype.is_floating_point else leaf


def draw(leaf: Leaf, generator: torch.Generator) -> torch.Tensor:
    if leaf.dtype.is_floating_point or leaf.dtype.is_complex:
        value = torch.rand(leaf.shape, dtype=leaf.dtype, generator=generator) + 0.25
        return value.requires_grad_()
    return torch.randint(1, 3, leaf.shape, generator=generator).to(leaf.dtype)


def derivative(
    program: Program,
    leaves: Sequence[Leaf],
    inputs: Sequence[torch.Tensor],
    seeds: Sequence[torch.Tensor | None],
) -> list[torch.Tensor | None]:
    """The program's cotangents at these inputs, per input component."""
    kinds = program.inputs
    seeded = [
        k for k, s in enumerate(seeds) if s is not None and program.output_dtypes[k] in FLOATS
    ]
    builder = Builder((*kinds, *(program.output_dtypes[k] for k in seeded)))
    values = {k: len(kinds) + n for n, k in enumerate(seeded)}
    found = vjp(builder, program, range(len(kinds)), [values.get(k) for k in range(len(seeds))])
    count = len(scalars(tuple(leaves)))
    kept = [k for k in range(count) if found[k] is not None]
    built = builder.build([v for v in (found[k] for k in kept) if v is not None])
    flat = [
        p.detach() for t, leaf in zip(inputs, leaves, strict=True) for p in component_views(t, leaf)
    ]
    flat.extend(torch.zeros(()) for _ in range(len(kinds) - count))
    chosen = [seeds[k] for k in seeded]
    results = evaluate(built, [*flat, *(s for s in chosen if s is not None)])
    by_component = dict(zip(kept, results, strict=True))
    return [by_component.get(k) for k in range(count)]


def far(got: torch.Tensor | None, wanted: torch.Tensor) -> bool:
    value = torch.zeros_like(wanted) if got is None else got
    if not bool(torch.isfinite(value)) or not bool(torch.isfinite(wanted)):
        return False
    return bool((value - wanted).abs() > TOLERANCE * (1 + wanted.abs()))
