"""Trees taken apart and put together in code that Dynamo reads.

Dynamo passes tuples of tensors and constants in and out of functions that it does not read, and
strings out of functions whose results are constants. So structures go by strings, and by templates:
trees whose leaves are numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..caching.bounded import BoundedCache
from ..pytrees import flatten, unflatten

Template = Any  # a tree of the places of its leaves, counted from 0
Call = tuple[Any, ...]

# Structures of arguments by their token; structures of results by the call that they are of.
_TEMPLATES: BoundedCache[str, Template] = BoundedCache()
_RESULTS: BoundedCache[Call, Template] = BoundedCache()


# ---- Read by Dynamo ----


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


def numbered(tree: Any, leaves: list[Any]) -> Template:
    """The tree's structure; its leaves are appended to `leaves`."""
    if isinstance(tree, dict):
        return {name: numbered(part, leaves) for name, part in tree.items()}
    if isinstance(tree, (tuple, list)):
        return like(tree, [numbered(part, leaves) for part in tree])
    leaves.append(tree)
    return len(leaves) - 1


def rebuilt(template: Template, leaves: Sequence[Any], place: list[int]) -> Any:
    """The tree of this structure with the leaves from `place` on."""
    if isinstance(template, dict):
        return {name: rebuilt(part, leaves, place) for name, part in template.items()}
    if isinstance(template, (tuple, list)):
        return like(template, [rebuilt(part, leaves, place) for part in template])
    place[0] += 1
    return leaves[place[0] - 1]


def like(tree: Any, parts: list[Any]) -> Any:
    """The parts as a tuple, named tuple or list, as `tree` is one."""
    if hasattr(tree, "_fields"):
        return type(tree)(*parts)
    return parts if isinstance(tree, list) else tuple(parts)


def decoded(code: str, call: Call, leaves: Sequence[Any]) -> Any:
    """The tree that `encoded` wrote down."""
    stack: list[Any] = []
    used = 0
    for word in code.split(" "):
        if word == ".":
            stack.append(leaves[used])
            used += 1
            continue
        count, place = int(word[1:].split(":")[0]), int(word.split(":")[1])
        parts = stack[len(stack) - count :]
        stack = stack[: len(stack) - count]
        if word[0] == "d":
            stack.append({key_at(call, place, k): part for k, part in enumerate(parts)})
        else:
            stack.append(parts if word[0] == "l" else tuple(parts))
    return stack[0]


def template_token(template: Template) -> str:
    """A name for a structure of arguments."""
    token: str = token_of_form(form_of(template)) + ""
    return token


def form_of(template: Template) -> Any:
    """A structure in tuples, with the kind of each node: Dynamo passes a named tuple on without its
    entries."""
    if isinstance(template, dict):
        parts = [(name, form_of(part)) for name, part in template.items()]
        return ("dict", None, tuple(parts))
    if isinstance(template, (tuple, list)):
        forms = tuple([form_of(part) for part in template])
        if hasattr(template, "_fields"):
            return ("named", type(template), forms)
        return ("list" if isinstance(template, list) else "tuple", None, forms)
    return template


# ---- Constants of a graph, and what its nodes run ----


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def token_of_form(form: Any) -> str:
    template = template_of(form)
    token = repr(flatten(template)[1]) + repr(template)
    if token not in _TEMPLATES:
        _TEMPLATES.insert(token, template)
    return token


def template_of(form: Any) -> Template:
    """The structure that `form_of` took apart."""
    if not isinstance(form, tuple):
        return form
    kind, made, parts = form
    if kind == "dict":
        return {name: template_of(part) for name, part in parts}
    forms = [template_of(part) for part in parts]
    if kind == "named":
        return made(*forms)
    return forms if kind == "list" else tuple(forms)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def result_structure(call: Call) -> str:
    """The structure of a call's results, which `run` has found on fake tensors."""
    words: list[str] = []
    encoded(_RESULTS[call], words, [])
    return " ".join(words)


def encoded(tree: Template, words: list[str], nodes: list[Any]) -> None:
    """Write a structure in postfix order: a leaf is ".", an inner node its kind, the number of its
    parts and its place among the inner nodes (`nodes`)."""
    if not isinstance(tree, (dict, tuple, list)):
        words.append(".")
        return
    place = len(nodes)
    nodes.append(tree)
    for part in tree.values() if isinstance(tree, dict) else tree:
        encoded(part, words, nodes)
    kind = "d" if isinstance(tree, dict) else "l" if isinstance(tree, list) else "t"
    kind = "n" if hasattr(tree, "_fields") else kind
    words.append(f"{kind}{len(tree)}:{place}")


def node_at(call: Call, place: int) -> Any:
    nodes: list[Any] = []
    encoded(_RESULTS[call], [], nodes)
    return nodes[place]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def key_at(call: Call, place: int, k: int) -> Any:
    """A key of a dict among a call's results."""
    return list(node_at(call, place))[k]


def tree_of(token: str, leaves: Sequence[Any]) -> Any:
    """The tree of this structure with these leaves."""
    places, spec = flatten(_TEMPLATES[token])
    return unflatten([leaves[k] for k in places], spec)


def remember_results(call: Call, results: Any) -> tuple[torch.Tensor, ...]:
    """The leaves of a call's results, whose structure is kept."""
    leaves: list[torch.Tensor] = []
    _RESULTS.insert(call, numbered(results, leaves))
    return tuple(leaves)
