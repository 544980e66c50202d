"""`nonlinear_recurrence` inside `torch.compile`: see `compiled_calls`.

Dynamo reads the step, and `lower`, called once on numbers; the parts of its graph between arguments
and results become functions that are named by tokens (`operator_from_graph`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..functional.operands import carry_dtype
from ..monoids import dynamo_tokens as tokens
from ..pytrees import align
from ..trace.signatures import takes_inputs
from .argument_trees import (
    _TEMPLATES,
    Call,
    Template,
    numbered,
    places_in,
    rebuilt,
    template_token,
    tree_of,
)
from .compiled_calls import settle_captures, settled, with_class
from .operator_from_graph import (
    begin,
    end,
    new_number,
    operator_between,
    why_not_between,
)

NAMES = ("init", "xs", "params")
# Whether Dynamo reads the closure of a function that was made inside the compiled one.
READS_CELLS = torch.__version__ >= (2, 12)  # type: ignore[operator]


# ---- Read by Dynamo ----


def nonlinear_recurrence(step: Any, options: dict[str, Any]) -> Any:
    """The function as Dynamo reads it. options: all arguments but `step`, by name."""
    trees = [options[name] for name in NAMES]
    leaves: list[Any] = []
    templates = [numbered(tree, leaves) for tree in trees]
    like = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if not like:
        return uncompiled(step, options)
    states = len(numbered_leaves(trees[0]))
    real = real_dtype(leaves[states:])
    has_params = len(numbered_leaves(trees[2])) > 0
    places = templates if has_params else templates[:2]
    read = Reading(step, places, templates[0], like[0])
    for start in starts([dtype_of(leaf, real) for leaf in leaves], states, real):
        read.settled(start, states)
    if read.failed:
        return uncompiled(step, options)
    token, structure = read.token(), read.structure
    lower, lowered, lower_token = options["lower"], 0, ""
    if lower is not None:
        if READS_CELLS and not settle_captures(lower):
            return uncompiled(step, options)
        lowered = 2 if lower_reads_inputs(lower) else 1
        read_lower = Reading(lower, templates[:lowered], None, like[0])
        for dtypes in read.variants:
            read_lower.results_on(dtypes)
        if read_lower.failed:
            return uncompiled(step, options)
        lower_token, structure = read_lower.token(), read_lower.structure
    for name in ("reset", "offsets"):
        if options[name] is not None:
            leaves.append(options[name])
    flags = tuple(
        sorted(
            (name, settled(value))
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


def real_dtype(leaves: Sequence[Any]) -> torch.dtype:
    """The dtype of a float among the arguments: that of the tensors of xs and params together."""
    found: list[torch.dtype] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.dtype.is_floating_point:
            found = [torch.promote_types(found[0], leaf.dtype) if found else leaf.dtype]
    return found[0] if found else torch.get_default_dtype()


def dtype_of(leaf: Any, real: torch.dtype) -> torch.dtype:
    """The dtype that a leaf has in the call without torch.compile."""
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype
    if isinstance(leaf, bool):
        return torch.bool
    if isinstance(leaf, int):
        return torch.int64
    return torch.promote_types(real, torch.complex64) if isinstance(leaf, complex) else real


def starts(dtypes: list[torch.dtype], states: int, real: torch.dtype) -> list[list[torch.dtype]]:
    """The dtypes of the leaves on which the call without torch.compile calls its functions first:
    as they are; with states of float32 as narrow as xs; and in float32 where they are 16 bits."""
    weak = [real if d == torch.float32 else d for d in dtypes[:states]]
    found = [dtypes]
    for other in ([*weak, *dtypes[states:]], [carry_dtype(d) for d in dtypes]):
        if other not in found:
            found.append(other)
    return found


class Reading:
    """A function that Dynamo reads, once for each of several lists of dtypes of the leaves.

    wanted: the structure that its results must have, in whose order they are taken; None: any.
    variants: the lists of dtypes. numbers: of the parts of the graph. failed: whether one cannot
    stand alone, or results do not fit. structure: of the results.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        templates: Sequence[Template],
        wanted: Template | None,
        like: torch.Tensor,
    ) -> None:
        self.fn, self.templates, self.wanted, self.like = fn, templates, wanted, like
        self.variants: list[list[torch.dtype]] = []
        self.numbers: list[int] = []
        self.failed = False
        self.structure: Template = ()

    def settled(self, dtypes: list[torch.dtype], states: int) -> None:
        """Reads the function until it keeps the dtypes of the states, which come first."""
        for _ in range(4):
            if self.failed or dtypes in self.variants:
                return
            dtypes = [*self.results_on(dtypes), *dtypes[states:]]

    def results_on(self, dtypes: list[torch.dtype]) -> list[torch.dtype]:
        """The dtypes of the results for leaves of these; some where it failed."""
        number = new_number() + 0
        elements = [self.like.new_empty((), dtype=d) for d in dtypes]
        arguments = begin(number, *elements)
        trees = [at_places(template, arguments) for template in self.templates]
        results: list[Any] = []
        structure = numbered(self.fn(*trees), results)
        results = [as_element(t, elements) for t in results]
        if self.wanted is not None:
            order = places_in(self.wanted, structure)
            if len(order) != len(results):
                self.failed = True
                return dtypes
            structure, results = self.wanted, [results[k] for k in order]
        if not all(isinstance(t, torch.Tensor) for t in results):
            self.failed = True
            return dtypes
        end(number, *results)
        if why_not_between(number) + "":
            self.failed = True
            return dtypes
        self.structure = structure
        self.variants.append(dtypes)
        self.numbers.append(number)
        return [t.dtype for t in results]

    def token(self) -> str:
        token: str = operator_between(getattr(self.fn, "__name__", "step"), *self.numbers) + ""
        return token


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
    "torch.no_grad (use x.detach()) or torch.vmap; or it calls a custom autograd.Function (where "
    "no gradients are wanted: call within torch.no_grad); or arguments or results do not fit (the "
    "call without torch.compile says how)"
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
    flat = tokens.resolve_token(token)

    def on_leaves(*trees: Any) -> Any:
        given = [leaf for tree in trees for leaf in numbered_leaves(tree)]
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
