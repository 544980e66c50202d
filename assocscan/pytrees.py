"""Pytrees: flattening with leaf paths, and matching one tree's structure against another's."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from .errors import ScanTypeError
from .torch_private import pytree

TreeSpec = pytree.TreeSpec
tree_map = pytree.tree_map
_LEAF = pytree.tree_flatten(0)[1]


@functools.cache
def _tuple_of(n: int) -> TreeSpec:
    return pytree.tree_flatten((0,) * n)[1]


def flatten(tree: Any) -> tuple[list[Any], TreeSpec]:
    """Leaves and structure. A tensor and a flat tuple of tensors, which most calls have, are told
    without a walk through the registry (10 µs)."""
    if isinstance(tree, torch.Tensor):
        return [tree], _LEAF
    if type(tree) is tuple and tree and all(isinstance(t, torch.Tensor) for t in tree):
        return list(tree), _tuple_of(len(tree))
    return pytree.tree_flatten(tree)


def unflatten(leaves: Sequence[Any], spec: TreeSpec) -> Any:
    """The tree of this structure with these leaves."""
    if spec is _LEAF:
        return leaves[0]
    n = len(leaves)
    if n and spec is _tuple_of(n):
        return tuple(leaves)
    return pytree.tree_unflatten(leaves, spec)


def leaf_paths(spec: TreeSpec, root: str) -> list[str]:
    """`xs[0]`, `xs['a'].h`, … for every leaf, in flattening order."""
    n = spec.num_leaves
    if spec is _LEAF:
        return [root]
    if n and spec is _tuple_of(n):
        return [f"{root}[{k}]" for k in range(n)]
    tree = unflatten(list(range(n)), spec)
    entries, _ = pytree.tree_flatten_with_path(tree)
    return [root + pytree.keystr(path) for path, _ in entries]


def align(template: Any, tree: Any, where: str, path: str = "") -> list[Any]:
    """The leaves of `tree` in the order of `template`'s; dicts are matched by key.

    Raises ScanTypeError where the structures differ (a tuple is not a list).
    """
    if pytree.tree_is_leaf(template):
        if not pytree.tree_is_leaf(tree):
            raise ScanTypeError(f"{where}{path} is {describe(tree)}, not a leaf")
        return [tree]
    if type(template) is not type(tree):
        raise ScanTypeError(f"{where}{path} is {describe(tree)}, expected {describe(template)}")
    if isinstance(template, dict):
        if template.keys() != tree.keys():
            raise ScanTypeError(
                f"{where}{path} has the keys {list(tree)}, expected {list(template)}"
            )
        pairs = [(f"[{k!r}]", template[k], tree[k]) for k in template]
    elif isinstance(template, (tuple, list)):
        if len(template) != len(tree):
            raise ScanTypeError(f"{where}{path} is {describe(tree)}, expected {describe(template)}")
        pairs = [(f"[{k}]", a, b) for k, (a, b) in enumerate(zip(template, tree, strict=True))]
    else:
        leaves, spec = flatten(tree)
        if spec != flatten(template)[1]:
            raise ScanTypeError(f"{where}{path} has another structure")
        return list(leaves)
    return [leaf for key, a, b in pairs for leaf in align(a, b, where, path + key)]


def spread(template: Any, tree: Any, where: str) -> list[int]:
    """A number per leaf of `template`; one in the place of a subtree is that of all of it."""
    if isinstance(tree, int):
        return [tree] * len(flatten(template)[0])
    if type(tree) in (tuple, list) and type(tree) is type(template) and len(tree) == len(template):
        parts = zip(template, tree, strict=True)
        return [n for part, number in parts for n in spread(part, number, where)]
    return align(template, tree, where)


def is_leaf(tree: Any) -> bool:
    return bool(pytree.tree_is_leaf(tree))


def template(spec: TreeSpec) -> Any:
    """A tree of leaf numbers with this structure."""
    return unflatten(list(range(spec.num_leaves)), spec)


def describe(tree: Any) -> str:
    """`tuple of 2`, `dict with keys ['a']`, `tensor`, … for error messages."""
    if pytree.tree_is_leaf(tree):
        return "a leaf" if isinstance(tree, int) else f"a {type(tree).__name__}"
    if isinstance(tree, dict):
        return f"a {type(tree).__name__} with the keys {list(tree)}"
    size = f" of {len(tree)}" if isinstance(tree, (tuple, list)) else ""
    return f"a {type(tree).__name__}{size}"


def top_level(tree: Any) -> Sequence[Any] | None:
    """The entries of the outermost container, None for a leaf."""
    if pytree.tree_is_leaf(tree):
        return None
    return list(tree.values()) if isinstance(tree, dict) else list(tree)
