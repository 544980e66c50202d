"""Scans inside `torch.compile`: what Dynamo, which reads Python bytecode, is given to see.

Dynamo must not read the tracing of an operator, and cannot pass an operator to a function that it
does not read. So an operator goes by a token, a string: a monoid's is an attribute, which Dynamo
guards; a raw callable's is asked for, and what the callable captured is compared with what it was,
so that Dynamo guards that too. The rest of the call runs as Python code on fake tensors, where it
becomes the operation of `library`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from . import tokens
from .monoid import _REGISTRY, Monoid
from .visible import names_in

_PLAIN = (bool, int, float, complex, str, torch.dtype)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def token_of_callable(fn: Callable[..., Any]) -> str:
    """A name for a raw callable, kept for the graphs that hold it."""
    return tokens.token_of_callable(fn)


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


def guard_captures(fn: Any) -> None:
    """Make Dynamo recompile when a number that the callable can see changes."""
    try:
        cells = fn.__closure__
    except AttributeError:  # made inside the compiled function, which is guarded as a whole
        cells = None
    for k, cell in enumerate(cells or ()):
        value = cell.cell_contents
        if isinstance(value, _PLAIN) and value != captured(fn, k):
            raise RuntimeError("a captured number changed during compilation")
    for name in plain_globals(fn).split(","):
        if name and fn.__globals__[name] != named(fn, name):
            raise RuntimeError("a global number changed during compilation")


def token_of(op: Monoid) -> str:
    """Computed, so a constant: Dynamo guards the attribute where it can, which is not where the
    operator was made inside the compiled function."""
    return op.token + ""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def keeps_structure(token: str) -> bool:
    """Whether the outputs have the structure of the inputs."""
    op = tokens.resolve_token(token)
    return not isinstance(op, Monoid) or (op.lift is None and op.lower is None)


def scan(op: Any, options: dict[str, Any], function: str = "associative_scan") -> Any:
    """`associative_scan` as Dynamo reads it, or `reduce`."""
    if isinstance(op, str):
        op = registered(op)
    if isinstance(op, Monoid):
        token = token_of(op)
    else:
        token = token_of_callable(op) + ""  # computed, so a constant
        guard_captures(op)
    xs, final = options["xs"], options.get("return_final", False)
    if not (keeps_structure(token) and has_named_tuple(xs)):
        return scan_fake_tensors(function, token, given(options))
    results = scan_to_tuples(function, token, given(options))
    return (
        (shaped_as(xs, results[0]), shaped_as(xs, results[1])) if final else shaped_as(xs, results)
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def combined(combinator: str, names: tuple[str, ...], *rest: Any) -> Any:
    """What a combinator makes of the operators of these tokens."""
    from . import combinators

    return getattr(combinators, combinator)([tokens.resolve_token(n) for n in names], *rest)


def combine(combinator: str, ops: Sequence[Any], rest: Sequence[Any]) -> Any:
    """A combinator as Dynamo reads it: a constant, made from what is guarded."""
    from .combinators import require_monoid

    found = [require_monoid(registered(op) if isinstance(op, str) else op) for op in ops]
    for part in rest:
        guard_captures(part)
    return combined(combinator, tuple([token_of(op) for op in found]), *rest)


def recurrence(options: dict[str, Any]) -> Any:
    """`linear_recurrence` as Dynamo reads it."""
    return recur_on_fake_tensors(given(options))


def given(options: dict[str, Any]) -> dict[str, Any]:
    """Without those that are None, which Dynamo cannot pass on."""
    return {name: value for name, value in options.items() if value is not None}


def is_named_tuple(tree: Any) -> bool:
    return isinstance(tree, tuple) and hasattr(tree, "_fields")


def has_named_tuple(tree: Any) -> bool:
    if isinstance(tree, dict):
        return any(has_named_tuple(part) for part in tree.values())
    if isinstance(tree, (tuple, list)):
        return is_named_tuple(tree) or any(has_named_tuple(part) for part in tree)
    return False


def shaped_as(like: Any, tree: Any) -> Any:
    """`tree` with the named tuples that `like` has where it has plain ones: Dynamo cannot take
    named tuples from a function that it does not read."""
    if isinstance(like, dict):
        return {name: shaped_as(like[name], part) for name, part in tree.items()}
    if not isinstance(like, (tuple, list)):
        return tree
    parts = [shaped_as(a, b) for a, b in zip(like, tree, strict=True)]
    if is_named_tuple(like):
        return type(like)(*parts)
    return parts if isinstance(like, list) else tuple(parts)


def without_named_tuples(tree: Any) -> Any:
    """The same tree with plain tuples."""
    if isinstance(tree, dict):
        return {name: without_named_tuples(part) for name, part in tree.items()}
    if not isinstance(tree, (tuple, list)):
        return tree
    parts = [without_named_tuples(part) for part in tree]
    return parts if isinstance(tree, list) else tuple(parts)


def registered(name: str) -> Any:
    """The monoid of a name; for an unknown one the name, which raises where it is resolved."""
    return entry(_REGISTRY, name)


def entry(registry: Mapping[str, Any], name: str) -> Any:
    return registry[name] if name in registry else name  # noqa: SIM401


# What follows runs when the graph is built, on fake tensors; with `backend="eager"` at every call.


def node(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that Dynamo puts into its graph unread. torch.export(strict=True) refuses the
    pytrees that nonstrict_trace leaves there; what it takes returns tensors, tuples and lists."""
    any_tree = torch._dynamo.nonstrict_trace(function)
    tuples = torch._dynamo.allow_in_graph(function)

    def call(*arguments: Any) -> Any:
        return tuples(*arguments) if torch.compiler.is_exporting() else any_tree(*arguments)

    return call


def public(function: str) -> Callable[..., Any]:
    """The function of the package's interface."""
    from .api import associative_scan
    from .reduction import reduce

    return {"associative_scan": associative_scan, "reduce": reduce}[function]


@node
def scan_fake_tensors(function: str, token: str, options: dict[str, Any]) -> Any:
    return public(function)(tokens.resolve_token(token), **options)


@node
def scan_to_tuples(function: str, token: str, options: dict[str, Any]) -> Any:
    return without_named_tuples(public(function)(tokens.resolve_token(token), **options))


@node
def recur_on_fake_tensors(options: dict[str, Any]) -> Any:
    from .functions import linear_recurrence

    return linear_recurrence(**options)
