"""A raw callable as Dynamo has read it: the part of its graph between two marks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from operator import delitem, setitem
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..caching.bounded import BoundedCache
from ..monoids import dynamo_tokens as tokens
from ..torch_private import dynamo_graph, functions_read_by_dynamo, peek_interpreter_stack

_NUMBERS = itertools.count()
# How many custom autograd functions Dynamo had read when a part of the graph began.
_FUNCTIONS: BoundedCache[int, int] = BoundedCache()
GRAD_MODE = "_set_grad_enabled"
TRANSFORMS = {f"_{name}_increment_nesting" for name in ("vmap", "grad", "jvp")} | {"_add_batch_dim"}
NUMBERS = (torch.SymFloat, torch.SymInt, torch.SymBool)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def new_number() -> int:
    number = next(_NUMBERS)
    _FUNCTIONS.insert(number, functions_read_by_dynamo())
    return number


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def begin(number: int, *arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Marks the arguments of the operator with this number."""
    return tuple([t.detach() for t in arguments])


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def end(number: int, *results: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Marks its results."""
    return tuple([t.detach() for t in results])


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def why_not_between(number: int) -> str:
    """Why the operator cannot stand alone; empty where it can."""
    nodes = nodes_of_graph()
    if not all(any(is_mark(n, kind, number) for n in nodes) for kind in (begin, end)):
        return "the graph broke inside it"
    called = names_between(number)
    if GRAD_MODE in called:
        return "it switches gradients off or on"
    if not called.isdisjoint(TRANSFORMS):
        return "it uses torch.vmap or another transform of torch.func"
    if _FUNCTIONS.get(number) != functions_read_by_dynamo() and derivatives_are_wanted():
        return "it calls a custom autograd.Function, whose backward the graph does not have"
    part = Part(number)
    for node in part.captured():
        value = node.meta.get("example_value")
        if not isinstance(value, NUMBERS):
            return "it captures a tensor"
        if value.node.expr.free_symbols and not value.node.has_hint():
            return "it captures a number that is computed from a tensor"
    return ""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def operator_between(name: Any, *numbers: int) -> str:
    """The token of an operator, under this name, that was read once for each of these numbers: on
    arguments of different dtypes, which a cast to `x.dtype` makes constants of the graph. Numbers
    that it captured become constants, which are guarded."""
    variants = [Variant(Part(number)) for number in numbers]

    def operator(left: list[torch.Tensor], right: list[torch.Tensor]) -> list[torch.Tensor]:
        given = [*left, *right]
        return variants[best_variant(variants, given)](given)

    operator.__name__ = name if isinstance(name, str) else "operator"
    return tokens.token_of_callable(operator)


class Variant:
    """A part of a graph as a function of tensors of certain dtypes."""

    def __init__(self, part: Part) -> None:
        self.module = part.module()
        nodes: tuple[Any, ...] = part.first.args[1:]
        self.dtypes = [node.meta["example_value"].dtype for node in nodes]

    def __call__(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        unread = [given[0]] * (len(self.dtypes) - len(given))
        return list(self.module(*given, *unread))


def best_variant(variants: Sequence[Variant], given: Sequence[torch.Tensor]) -> int:
    """The number of the variant for most of the dtypes of these tensors."""
    same = [
        sum(t.dtype == dtype for t, dtype in zip(given, v.dtypes, strict=False)) for v in variants
    ]
    return same.index(max(same))


def derivatives_are_wanted() -> bool:
    """Whether the graph may be differentiated: Dynamo guards both."""
    return torch.is_grad_enabled() or peek_interpreter_stack() is not None


def names_between(number: int) -> set[str]:
    """The names of the functions that are called inside, also where no result depends on them, as
    on what torch.no_grad and torch.vmap put around their functions."""
    nodes = nodes_of_graph()
    first, last = (
        next(k for k, n in enumerate(nodes) if is_mark(n, kind, number)) for kind in (begin, end)
    )
    return {getattr(n.target, "__name__", "") for n in nodes[first:last]}


def nodes_of_graph() -> list[Node]:
    """The graph that Dynamo is building; none where it is not."""
    graph = dynamo_graph()
    return [] if graph is None else list(graph.nodes)


def is_mark(node: Node, kind: Callable[..., Any], number: int) -> bool:
    return node.target is kind and bool(node.args[0] == number)


class Part:
    """The nodes between the marks of a number in the graph that Dynamo is building."""

    def __init__(self, number: int) -> None:
        nodes = nodes_of_graph()
        self.first, self.last = (
            next(n for n in nodes if is_mark(n, kind, number)) for kind in (begin, end)
        )
        self.arguments: dict[Any, Node] = {
            n.args[1]: n for n in self.first.users if n.op == "call_function" and n is not self.last
        }
        needed = ancestors(self.last)
        for node in nodes[nodes.index(self.first) : nodes.index(self.last)]:
            if writes(node):  # no result depends on the node, but on what it writes to
                needed |= {node, *ancestors(node)}
        self.inner: list[Node] = []  # what depends on the arguments, in the graph's order
        inside = {self.first}
        for node in nodes:
            if node in needed and any(source in inside for source in node.all_input_nodes):
                inside.add(node)
                if node not in self.arguments.values() and node is not self.last:
                    self.inner.append(node)

    def results(self) -> tuple[Any, ...]:
        return tuple(self.last.args[1:])

    def captured(self) -> list[Node]:
        """Nodes outside that the part reads."""
        own = {*self.inner, *self.arguments.values()}
        sources = [n for node in self.inner for n in node.all_input_nodes]
        return [n for n in dict.fromkeys([*sources, *self.results()]) if n not in own]

    def module(self) -> GraphModule:
        """The part as a function of its arguments."""
        graph, count = Graph(), len(self.first.args) - 1
        places = [graph.placeholder(f"x{k}") for k in range(count)]
        copies: dict[Node, Any] = {n: places[k] for k, n in self.arguments.items()}
        copies |= {n: constant(n.meta["example_value"]) for n in self.captured()}
        for node in self.inner:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[n] for n in self.results()))
        return GraphModule(torch.nn.Module(), graph)


def writes(node: Node) -> bool:
    """Whether the operation changes a tensor in place."""
    if "out" in node.kwargs or node.target in (setitem, delitem):
        return True
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    is_method = name.endswith("_") and not name.endswith("__")  # such as add_
    is_called = node.op in ("call_method", "call_function")
    return is_called and (is_method or name.strip("_") in AUGMENTED)


AUGMENTED = frozenset(
    "iadd isub imul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift".split()
)


def ancestors(node: Node) -> set[Node]:
    found: set[Node] = set()
    left = [node]
    while left:
        for source in left.pop().all_input_nodes:
            if source not in found:
                found.add(source)
                left.append(source)
    return found


def constant(value: Any) -> bool | int | float:
    """The number that a symbol stands for, guarded."""
    kinds: dict[type, Callable[[Any], bool | int | float]] = {
        torch.SymFloat: float,
        torch.SymInt: int,
        torch.SymBool: bool,
    }
    return kinds[type(value)](value)
