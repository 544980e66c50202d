"""The directive `operators`: what every file of `assocscan.ops` says, and its operators by name.

An operator's own docstring has its formula, inputs, element, outputs, identity, cost and example.
What the operators of a file have in common stands in the docstring of the file, and comes first.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from docutils import nodes
from operator_files import families
from plain_docstrings import converted
from sphinx.util.docutils import SphinxDirective

from assocscan import Monoid, ops


class Operators(SphinxDirective):
    """One section for each file."""

    def run(self) -> list[nodes.Node]:
        lines: list[str] = []
        for module, names in families().items():
            title = ", ".join(names)
            said = importlib.import_module(f"assocscan.ops.{module}").__doc__ or ""
            lines += [title, "-" * len(title), "", *converted(said.strip().splitlines())]
            for name in names:
                made = getattr(ops, name)
                if isinstance(made, Monoid):
                    lines += [f".. py:data:: assocscan.ops.{name}", ""]
                    own = inspect.cleandoc(made.combine.__doc__ or "")
                    lines += [f"   {line}" for line in converted(own.splitlines())]
                else:
                    lines += [f".. autofunction:: assocscan.ops.{name}", ""]
                lines.append("")
        return self.parse_text_to_nodes("\n".join(lines), allow_section_headings=True)


def setup(app: Any) -> dict[str, bool]:
    app.add_directive("operators", Operators)
    return {"parallel_read_safe": True}
