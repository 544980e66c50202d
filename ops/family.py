"""The docstring that `help(ops.x)` shows: that of the operator, and what its file adds."""

import inspect
import sys
from collections.abc import Iterable

from assocscan.monoids.monoid import Monoid


def complete_docstrings(operators: Iterable[Monoid]) -> None:
    """Append to each docstring what the operators of its file have in common.

    The docstring of a file begins with a title. What follows it, such as the source, is said once
    for all operators of the file. Without docstrings (`python -OO`) nothing is done.
    """
    for operator in operators:
        _, _, shared = (sys.modules[operator.origin[0]].__doc__ or "").partition("\n\n")
        if operator.__doc__ and shared:
            operator.__doc__ = f"{inspect.cleandoc(operator.__doc__)}\n\n{shared}"
