"""What the caller of a named function passed the leaves of its scan as, for error messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..pytrees import TreeSpec, leaf_paths


@dataclass(frozen=True)
class LeafNames:
    """Names of leaves by their paths in the scan: {"xs": "rewards", "xs[1]": "values"}.

    given: a name for a whole (`xs`, `init`) is that of all its leaves that have none of their own.
    axis_of: the argument whose axis is meant where one is out of range; empty: that of the leaf.
    """

    given: Mapping[str, str] = field(default_factory=dict)
    axis_of: str = ""

    def of(self, path: str) -> str:
        """The caller's name for a path such as `xs[1]`."""
        whole = "init" if path.startswith("init") else "xs"
        return self.given.get(path) or self.given.get(whole) or path

    def paths(self, spec: TreeSpec, whole: str = "xs") -> list[str]:
        """The names of all leaves of `xs` or `init`, which `spec` describes."""
        return [self.of(path) for path in leaf_paths(spec, whole)]


OWN = LeafNames()  # of a call of `associative_scan` itself
