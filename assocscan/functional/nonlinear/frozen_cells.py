"""Functions whose captured values stay as they are.

An operator is kept for later calls with a step that behaves equally, and may read its function
again then: for other dtypes, or where a gradient is first wanted. By then the variables that the
function captured may have other values, as in

    [nonlinear_recurrence(lambda h, x: torch.tanh(k * h + x), x, h) for k in (0.5, 1.0)]

where both functions share one variable k. So an operator keeps a copy with variables of its own.
"""

from __future__ import annotations

import functools
import types
from typing import Any

from ...trace.closure_captures import is_of_library


def frozen(value: Any, copies: dict[int, Any] | None = None) -> Any:
    """A function with copies of the variables that it captures, and of the functions in these.

    copies: those made so far, by the identity of the original: functions may capture themselves.
    """
    copies = {} if copies is None else copies
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, functools.partial):
        keywords = {name: frozen(v, copies) for name, v in value.keywords.items()}
        arguments = [frozen(v, copies) for v in value.args]
        return functools.partial(frozen(value.func, copies), *arguments, **keywords)
    if not isinstance(value, types.FunctionType) or is_of_library(value.__module__):
        return value
    if not value.__closure__:
        return value
    cells = tuple(types.CellType() for _ in value.__closure__)
    copy = types.FunctionType(
        value.__code__, value.__globals__, value.__name__, value.__defaults__, cells
    )
    copy.__kwdefaults__ = value.__kwdefaults__
    copy.__module__, copy.__qualname__ = value.__module__, value.__qualname__
    copy.__dict__.update(value.__dict__)
    copies[id(value)] = copy
    for cell, given in zip(cells, value.__closure__, strict=True):
        try:
            cell.cell_contents = frozen(given.cell_contents, copies)
        except ValueError:  # nothing is assigned to it yet
            continue
    return copy
