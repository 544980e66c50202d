"""Scans inside `torch.compile`: the code that Dynamo, which reads Python bytecode, sees. It decides
which calls go into the graph, and which break it (`uncompiled`).

The graph gets one node, a function of flat tensors and constants (`run`) that Dynamo does not read;
it runs the public function on fake tensors, where that becomes the operation of `library`. Trees
are taken apart before it and put together after it, in code that Dynamo does read.

Operators go by a token, a string. A monoid's is an attribute, which Dynamo guards. A raw callable
is called once, on slices, where Dynamo reads it: so whatever it captured, through closures,
globals or attributes, is guarded as in any other function; the part of the graph between its
arguments and its results is then the operator (`operator_from_graph`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import guard_scalar

from ..api.bind_arguments import resolve_operator
from ..api.tensor_subclasses import has_override, most_derived
from ..errors import ScanValueError
from ..functional.operands import carry_dtype
from ..monoids import dynamo_tokens as tokens
from ..monoids.captured_values import may_see, same_values
from ..monoids.monoid import _REGISTRY, Monoid, resolve
from ..torch_private import (
    changed_under_dynamo,
    group_of_name,
    guard_in_dynamo,
    is_made_under_dynamo,
)
from ..trace.closure_captures import names_in
from .argument_trees import (
    Call,
    Template,
    decoded,
    numbered,
    places_in,
    rebuilt,
    remember_results,
    result_structure,
    template_token,
    tree_of,
)
from .operator_from_graph import (
    begin,
    end,
    new_number,
    operator_between,
    why_not_between,
)

# AXES[k] = k, for negative k too.
AXES = (*range(64), *range(-64, 0))
_PLAIN = (bool, int, float, complex, str, torch.dtype)


# ---- Read by Dynamo ----


def scan(op: Any, options: dict[str, Any], function: str) -> Any:
    """`associative_scan` as Dynamo reads it, or `reduce`."""
    if isinstance(op, str):
        op = registered(op)
    if isinstance(op, str):
        raise ScanValueError(unknown_name(op) + "")
    if not (isinstance(op, Monoid) or callable(op)):
        resolve_operator(op, options["xs"])  # raises
    options = {**options, "axis": constant(options["axis"])}
    leaves: list[Any] = []
    template = numbered(options["xs"], leaves)
    given = {name: value for name, value in options.items() if value is not None}
    if isinstance(op, Monoid):
        token, same = token_of(op), keeps_structure(token_of(op))
        if sees_changes(token):
            return uncompiled(function, op, options)
        guard_operator(op)
    else:
        if not can_be_sliced(leaves, options["axis"]):
            return uncompiled(function, op, options)
        token, why_not = token_of_raw(op, template, leaves, options["axis"])
        same = True
        if why_not:
            return uncompiled(function, op, options)
    del given["xs"]
    count = len(leaves)
    init = given.pop("init", None)
    init_token = ""
    if isinstance(op, Monoid):
        if init is not None:
            init_token = template_token(numbered(init, leaves)) + ""
    else:
        if init is not None:
            parts: list[Any] = []
            order = places_in(template, numbered(init, parts))
            if len(order) != count or len(parts) != count:
                return uncompiled(function, op, options)  # which says what does not fit
            leaves.extend([parts[k] for k in order])
            init_token = template_token(list(range(count, len(leaves)))) + ""
        template = list(range(count))  # the operator found in the graph takes lists
    offsets = given.pop("offsets", None)
    if offsets is not None:
        leaves.append(offsets)
    xs_token = template_token(template) + ""
    flags = tuple(sorted(given.items()))
    call = (function, token, xs_token, init_token, offsets is not None, flags)
    results = with_class(run(call, *leaves), leaves)
    if same:
        shape = numbered(options["xs"], [])
        shape = (shape, shape) if options.get("return_final", False) else shape
        return rebuilt(shape, results, [0])
    code = result_structure(call) + ""
    if "n" in code:  # a named tuple that lift or lower makes: its class cannot become a constant
        return uncompiled(function, op, options)
    return decoded(code, call, results)


def with_class(results: Sequence[torch.Tensor], leaves: Sequence[Any]) -> Sequence[torch.Tensor]:
    """The results in the class of the leaves, which Dynamo does not always give to those of a
    function that it does not read (2.15, after a method of theirs was called)."""
    kinds = [
        type(t)
        for t in leaves
        if isinstance(t, torch.Tensor)
        and type(t) is not torch.Tensor
        and type(t) is not torch.nn.Parameter
        and not t.is_nested  # what is made of nested tensors has the right class, or is dense
        and has_override(type(t))
    ]
    kind = most_derived(kinds)
    return results if kind is None else [t.as_subclass(kind) for t in results]


def token_of(op: Monoid) -> str:
    """Computed, so a constant: Dynamo guards the attribute where it can, which is not where the
    operator was made inside the compiled function."""
    return op.token + ""


def constant(axis: Any) -> Any:
    """An axis that Dynamo does not take for a size that varies: it makes constants of indices."""
    if isinstance(axis, bool) or not isinstance(axis, int) or not -64 <= axis < 64:
        return axis
    return AXES[axis]


def can_be_sliced(leaves: Sequence[Any], axis: Any) -> bool:
    """Whether the arguments are such that a raw callable can be called on slices."""
    if not leaves or not isinstance(axis, int):
        return False
    return all(
        isinstance(t, torch.Tensor) and not t.is_nested and -t.dim() <= axis < t.dim()
        for t in leaves
    )


def token_of_raw(
    op: Callable[..., Any], template: Template, leaves: list[Any], axis: int
) -> tuple[str, str]:
    """The token of a raw callable, found by calling it; or why it has none. 16-bit floats are
    combined in float32, so that it is called on such too."""
    axis = axis + leaves[0].dim() if axis < 0 else axis
    own = [t.dtype for t in leaves]
    wide = [carry_dtype(dtype) for dtype in own]
    numbers: list[int] = []
    for dtypes in [own] if own == wide else [own, wide]:
        number = new_number() + 0
        slices = [
            t.new_empty([*t.shape[:axis], *t.shape[axis + 1 :]], dtype=dtype)
            for t, dtype in zip((*leaves, *leaves), (*dtypes, *dtypes), strict=True)
        ]
        arguments = begin(number, *slices)
        left = rebuilt(template, arguments, [0])
        right = rebuilt(template, arguments[len(leaves) :], [0])
        results: list[Any] = []
        structure = numbered(op(left, right), results)
        order = places_in(template, structure)
        if len(order) != len(results) or not all(isinstance(t, torch.Tensor) for t in results):
            return "", "structure"
        end(number, *[results[k] for k in order])
        why_not = why_not_between(number) + ""
        if why_not:
            return "", why_not
        numbers.append(number)
    return operator_between(getattr(op, "__name__", "operator"), *numbers) + "", ""


@torch.compiler.disable(  # type: ignore[untyped-decorator]
    reason="the operator of an associative_scan or reduce cannot be compiled: it captures a tensor "
    "or a number computed from one (pass what it captures as a leaf of xs, expanded along the "
    "axis); or it uses torch.no_grad (use x.detach()) or torch.vmap; or it calls a custom "
    "autograd.Function (where no gradients are wanted: call within torch.no_grad); or arguments or "
    "results do not fit (the call without torch.compile says how); or its lower makes a named "
    "tuple (make a plain one); or a Monoid may see what the compiled function changes (change it "
    "outside); or a function that is no Monoid scans a nested tensor (pass its values and offsets)"
)
def uncompiled(function: str, op: Any, options: dict[str, Any]) -> Any:
    return public(function)(op, **options)


@torch.compiler.disable(  # type: ignore[untyped-decorator]
    reason="of nested tensors only scans with monoids, reductions, cumsum, cumprod, logcumsumexp "
    "and linear recurrences are compiled: pass x.values(), and offsets=x.offsets()"
)
def uncompiled_jagged(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return function(*args, **kwargs)


@torch.compiler.disable(  # type: ignore[untyped-decorator]
    reason="a function that a combinator gets captures a module or a tensor (let it capture a "
    "number, k = self.k, or pass the tensor as a leaf of xs), or is a functools.partial"
)
def uncompiled_combinator(combinator: str, ops: Sequence[Any], *rest: Any) -> Any:
    """What the combinator makes of them, by the code that runs without `torch.compile`."""
    from ..monoids import combinators

    return getattr(combinators, combinator)(ops, *rest)


def recurrence(options: dict[str, Any], function: str) -> Any:
    """`linear_recurrence` as Dynamo reads it, or `distributed.linear_recurrence`."""
    given = {name: value for name, value in options.items() if value is not None}
    results = recur(function, **given)
    leaves = [options["a"], options["b"], options["init"]]
    if isinstance(results, torch.Tensor):
        return with_class((results,), leaves)[0]
    return tuple(with_class(results, leaves))


def registered(name: str) -> Any:
    """The monoid of a name; for an unknown one the name, which raises where it is resolved."""
    return entry(_REGISTRY, name)


def entry(registry: Mapping[str, Any], name: str) -> Any:
    return registry[name] if name in registry else name  # noqa: SIM401


def combine(combinator: str, ops: Sequence[Any], rest: Sequence[Any]) -> Any:
    """A combinator as Dynamo reads it: a constant, made from what is guarded."""
    from ..monoids.combinators import require_monoid

    found = [require_monoid(registered(op) if isinstance(op, str) else op) for op in ops]
    for op in found:
        guard_operator(op)
    functions = [part for part in rest if not isinstance(part, tuple)]  # not of dimensions
    constant = [settle_captures(fn) for fn in functions]
    if not all(constant):
        return uncompiled_combinator(combinator, ops, *rest)
    for fn in functions:
        guard_captures(fn)
    return combined(combinator, tuple([token_of(op) for op in found]), *rest)


def guard_captures(fn: Any) -> None:
    """Make Dynamo recompile when a number that the callable can see changes."""
    if isinstance(fn, MethodType):  # not a constant in 2.11
        return
    for k, cell in enumerate(cells_of(fn)):
        value = cell.cell_contents
        if isinstance(value, _PLAIN) and differ(value, captured(fn, k)):
            raise RuntimeError("a captured number changed during compilation")
    for name in plain_globals(fn).split(","):
        if name and differ(fn.__globals__[name], named(fn, name)):
            raise RuntimeError("a global number changed during compilation")


def cells_of(fn: Any) -> Sequence[Any]:
    """The cells of a function's closure."""
    if isinstance(fn, MethodType):  # not a constant in 2.11
        return ()
    try:
        return fn.__closure__ or ()
    except AttributeError:  # made inside the compiled function, which is guarded as a whole
        return ()


def settle_captures(fn: Any) -> bool:
    """Make constants of the numbers that a function captures. Whether it can be a constant then."""
    constant = not isinstance(fn, functools.partial)
    for cell in cells_of(fn):
        value = cell.cell_contents
        if isinstance(value, (torch.Tensor, torch.nn.Module)):
            constant = False
        elif isinstance(value, (int, float)) and fn_is_made_here():
            cell.cell_contents = settled(value)
    return constant


def settled(value: Any) -> Any:
    """A number as a constant of the graph, which its value guards: Dynamo makes a symbol of one
    that changes from call to call."""
    return guard_scalar(value) if isinstance(value, (int, float)) else value


def differ(value: Any, other: Any) -> bool:
    """Two plain values; NaN is as NaN."""
    return bool(value != other and not (value != value and other != other))


def guard_operator(op: Monoid) -> None:
    """Guard what an operator, and those that it is made of, can see. One that was made inside the
    compiled function was guarded there; Dynamo cannot guard its attributes."""
    if not op.guarded:
        guard_values(token_of(op))


# ---- Constants of a graph ----


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def unknown_name(name: str) -> str:
    """What is said of a name that no monoid has."""
    try:
        resolve(name)
    except ScanValueError as error:
        return str(error)
    return f"{name!r} was registered during compilation"


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def keeps_structure(token: str) -> bool:
    """Whether the outputs have the structure of the inputs."""
    op = tokens.resolve_token(token)
    return bool(op.lift is None and op.lower is None)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def guard_values(token: str) -> bool:
    """Whether the operator's functions see values besides their arguments. Dynamo compiles anew
    where these change."""
    return guarded(tokens.resolve_token(token))


def guarded(op: Monoid) -> bool:
    holds = same_values(op)
    if holds is not None:
        guard_in_dynamo(holds, f"what the functions of monoid {op.name!r} see has changed")
    return holds is not None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def sees_changes(token: str) -> bool:
    """Whether the operator's functions may see what the compiled function has changed."""
    return may_see(tokens.resolve_token(token), changed_under_dynamo())


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def fn_is_made_here() -> bool:
    """Whether `fn` of the calling function was made by the code that Dynamo reads. A cell of
    another one is not written to, as that would change what exists outside."""
    return is_made_under_dynamo("fn")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def captured(fn: Any, cell: int) -> Any:
    """What a cell of the closure holds."""
    return fn.__closure__[cell].cell_contents


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def named(fn: Any, name: str) -> Any:
    """What a global name of the function holds."""
    return fn.__globals__[name]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def plain_globals(fn: Any) -> str:
    """The global names that the function's code, inner functions included, reads numbers from."""
    space = getattr(fn, "__globals__", {})
    code = getattr(fn, "__code__", None)
    names = () if code is None else names_in(code)
    return ",".join(sorted({n for n in names if isinstance(space.get(n), _PLAIN)}))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def combined(combinator: str, names: tuple[str, ...], *rest: Any) -> Any:
    """What a combinator makes of the operators of these tokens."""
    return unread_combined(combinator, names, rest)


# Where the graph has broken, `combined` runs as any function does, and Dynamo would read what it
# calls once more.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def unread_combined(combinator: str, names: tuple[str, ...], rest: tuple[Any, ...]) -> Any:
    """A copy, as the same operator may come into a graph from outside as well, where it has to be
    guarded."""
    op = uncompiled_combinator(combinator, [tokens.resolve_token(n) for n in names], *rest)
    guarded(op)
    return op.guarded_copy()


# ---- Nodes of a graph, run on fake tensors when it is built ----


def public(function: str) -> Callable[..., Any]:
    """The function of the package's interface."""
    from ..api.associative_scan import associative_scan
    from ..api.reduce import reduce

    known: dict[str, Callable[..., Any]] = {"associative_scan": associative_scan, "reduce": reduce}
    return known.get(function) or over_ranks(function)


def over_ranks(function: str) -> Callable[..., Any]:
    """`distributed.associative_scan` and its like, which take the name of a group here."""
    from .. import distributed

    called = getattr(distributed, function.partition(".")[2])

    def call(*args: Any, group: str | None = None, **options: Any) -> Any:
        return called(*args, group=None if group is None else group_of_name(group), **options)

    return call


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def run(call: Call, *leaves: Any) -> tuple[torch.Tensor, ...]:
    """The leaves of the results."""
    function, token, xs_token, init_token, has_offsets, flags = call
    options = dict(flags)
    if has_offsets:
        *leaves, options["offsets"] = leaves  # type: ignore[assignment]
    xs = tree_of(xs_token, leaves)
    if init_token:
        options["init"] = tree_of(init_token, leaves)
    results = public(function)(tokens.resolve_token(token), xs, **options)
    return remember_results(call, results)


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def recur(function: str, **options: Any) -> Any:
    from ..functional.recurrence import linear_recurrence

    return (linear_recurrence if "." not in function else over_ranks(function))(**options)


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def halo(
    x: torch.Tensor, count: int, state: torch.Tensor, reverse: bool, group: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    from ..distributed.halo import halo as exchanged

    found = None if group is None else group_of_name(group)
    return exchanged(x, count, state, reverse, found)
