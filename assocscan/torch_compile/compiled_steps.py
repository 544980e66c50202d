"""`nonlinear_recurrence` inside `torch.compile`: see `compiled_calls`.

Dynamo reads the step, and `lower`, called once on numbers; the parts of its graph between arguments
and results become functions that are named by tokens (`operator_from_graph`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..monoids import dynamo_tokens as tokens
from ..pytrees import align
from ..trace.signatures import takes_inputs
from .argument_trees import (
    _TEMPLATES,
    Call,
    Template,
    numbered,
    rebuilt,
    template_token,
    tree_of,
)
from .compiled_calls import with_class
from .operator_from_graph import begin, end, new_number, operator_between, why_not_between

NAMES = ("init", "xs", "params")


# ---- Read by Dynamo ----


def nonlinear_recurrence(step: Any, options: dict[str, Any]) -> Any:
    """The function as Dynamo reads it. options: all arguments but `step`, by name."""
    trees = [options[name] for name in NAMES]
    leaves: list[Any] = []
    templates = [numbered(tree, leaves) for tree in trees]
    like = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if not like:
        return uncompiled(step, options)
    elements = [element(leaf, like[0]) for leaf in leaves]
    has_params = len(numbered_leaves(trees[2])) > 0
    places = templates if has_params else templates[:2]
    token, structure = part_token(step, places, elements, templates[0])
    if not token:
        return uncompiled(step, options)
    lower, lowered, lower_token = options["lower"], 0, ""
    if lower is not None:
        lowered = 2 if lower_reads_inputs(lower) else 1
        lower_token, structure = part_token(lower, templates[:lowered], elements, None)
        if not lower_token:
            return uncompiled(step, options)
    for name in ("reset", "offsets"):
        if options[name] is not None:
            leaves.append(options[name])
    flags = tuple(
        sorted(
            (name, value)
            for name, value in options.items()
            if name not in (*NAMES, "lower", "reset", "offsets") and value is not None
        )
    )
    given = options["reset"] is not None, options["offsets"] is not None
    # The class of a named tuple cannot become a constant: graphs have tuples in their place.
    shapes = tuple([template_token(without_names(t)) + "" for t in templates])
    shape = template_token(without_names(structure)) + ""
    call = (token, lower_token, lowered, shape, shapes, given, flags)
    results = with_class(run(call, *leaves), leaves)
    place = [0]
    outputs = rebuilt(structure, results, place)
    if not options["return_final"]:
        return outputs
    return outputs, rebuilt(templates[0], results, place)


def numbered_leaves(tree: Any) -> list[Any]:
    leaves: list[Any] = []
    numbered(tree, leaves)
    return leaves


def element(leaf: Any, like: torch.Tensor) -> torch.Tensor:
    """One element of a leaf: a tensor without dimensions."""
    if isinstance(leaf, torch.Tensor):
        return leaf.new_empty(())
    if isinstance(leaf, bool):
        return like.new_empty((), dtype=torch.bool)
    if isinstance(leaf, int):
        return like.new_empty((), dtype=torch.int64)
    return like.new_empty(())


def part_token(
    fn: Callable[..., Any],
    templates: Sequence[Template],
    elements: Sequence[torch.Tensor],
    wanted: Template | None,
) -> tuple[str, Template]:
    """The token of a function, found by calling it on elements, and the structure of its results;
    empty where it captures a tensor.

    wanted: the structure that the results must have, in whose order they are taken; None: any.
    """
    number = new_number() + 0
    arguments = begin(number, *elements)
    trees = [at_places(template, arguments) for template in templates]
    results: list[Any] = []
    structure = numbered(fn(*trees), results)
    results = [as_element(t, elements) for t in results]
    if wanted is not None:
        order = places_in(wanted, structure)
        if len(order) != len(results):
            return "", structure
        structure, results = wanted, [results[k] for k in order]
    if not all(isinstance(t, torch.Tensor) for t in results):
        return "", structure
    end(number, *results)
    if why_not_between(number) + "":
        return "", structure
    return operator_between(number, getattr(fn, "__name__", "step")) + "", structure


def as_element(value: Any, elements: Sequence[torch.Tensor]) -> Any:
    """A number that a function returned as a tensor."""
    if isinstance(value, bool):
        return elements[0].new_full((), value, dtype=torch.bool)
    if isinstance(value, int):
        return elements[0].new_full((), value, dtype=torch.int64)
    if isinstance(value, float):
        floats = [t for t in elements if t.dtype.is_floating_point]
        dtype = floats[0].dtype if floats else torch.get_default_dtype()
        return elements[0].new_full((), value, dtype=dtype)
    return value


def places_in(wanted: Template, tree: Template) -> list[int]:
    """The leaves of a tree of places in the order of `wanted`; fewer where structures differ."""
    if isinstance(wanted, dict):
        if not isinstance(tree, dict) or set(wanted) != set(tree):
            return []
        return [k for name in wanted for k in places_in(wanted[name], tree[name])]
    if isinstance(wanted, (tuple, list)):
        if type(wanted) is not type(tree) or len(wanted) != len(tree):
            return []
        return [k for a, b in zip(wanted, tree, strict=True) for k in places_in(a, b)]
    return [tree] if isinstance(tree, int) else []


def without_names(template: Template) -> Template:
    """A structure with tuples in the place of named tuples."""
    if isinstance(template, dict):
        return {name: without_names(part) for name, part in template.items()}
    if isinstance(template, list):
        return [without_names(part) for part in template]
    if isinstance(template, tuple):
        return tuple([without_names(part) for part in template])
    return template


def at_places(template: Template, leaves: Sequence[Any]) -> Any:
    """The tree whose leaves are those at the template's numbers."""
    return rebuilt(template, [leaves[k] for k in numbered_leaves(template)], [0])


@torch.compiler.disable(  # type: ignore[untyped-decorator]
    reason="the step or the lower of a nonlinear_recurrence cannot be compiled: it captures a "
    "tensor or a number computed from one (pass what it captures in params=); or it uses "
    "torch.no_grad (use x.detach()); or arguments or "
    "results do not fit (the call without torch.compile says how)"
)
def uncompiled(step: Any, options: dict[str, Any]) -> Any:
    from ..functional.nonlinear.nonlinear_recurrence import nonlinear_recurrence as called

    return called(step, **options)


# ---- Constants of a graph ----


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def lower_reads_inputs(lower: Any) -> bool:
    return takes_inputs(lower)


# ---- Nodes of a graph, run on fake tensors when it is built ----


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def run(call: Call, *leaves: Any) -> tuple[torch.Tensor, ...]:
    """The leaves of the results."""
    from ..functional.nonlinear.nonlinear_recurrence import nonlinear_recurrence as called

    token, lower_token, lowered, lower_structure, shapes, (has_reset, has_offsets), flags = call
    options = dict(flags)
    *leaves, options["offsets"] = leaves if has_offsets else (*leaves, None)  # type: ignore[assignment]
    *leaves, options["reset"] = leaves if has_reset else (*leaves, None)  # type: ignore[assignment]
    init, xs, params = (tree_of(shape, leaves) for shape in shapes)
    count = [len(numbered_leaves(tree)) for tree in (init, xs, params)]
    step = of_trees(token, shapes[0], count, 0)
    lower = of_trees(lower_token, lower_structure, count, lowered) if lowered else None
    results = called(step, xs, init, params=params, lower=lower, **options)
    outputs, finals = results if options["return_final"] else (results, None)
    found = align(_TEMPLATES[lower_structure], outputs, "the result")
    if options["return_final"]:
        found += align(_TEMPLATES[shapes[0]], finals, "the last state")
    return tuple(found)


def of_trees(token: str, structure: str, count: Sequence[int], taken: int) -> Callable[..., Any]:
    """A function of trees of the part of a graph. It takes `taken` trees of (h, x); 0: as a step
    does, h and x, and params where there are any."""
    flat, total = tokens.resolve_token(token), sum(count)

    def on_leaves(*trees: Any) -> Any:
        given = [leaf for tree in trees for leaf in numbered_leaves(tree)]
        given += [given[0]] * (total - len(given))  # which the part does not read
        found = flat(given, [])
        return tree_of(structure, found)

    if taken == 1:
        fn: Callable[..., Any] = lambda h: on_leaves(h)  # noqa: E731
    elif taken == 2 or not count[2]:
        fn = lambda h, x: on_leaves(h, x)  # noqa: E731
    else:
        fn = lambda h, x, params: on_leaves(h, x, params)  # noqa: E731
    fn.__name__ = token.partition("#")[0]
    return fn
