"""Entry points of torch.compile: the public functions as Dynamo traces them.

`compiled_calls` is imported when Dynamo first traces one of them: it imports torch's compiler,
which takes a second.
"""

from __future__ import annotations

from typing import Any

from ..hooks import HOOKS


def scan(op: Any, options: dict[str, Any], function: str) -> Any:
    from . import compiled_calls

    return compiled_calls.scan(op, options, function)


def recurrence(options: dict[str, Any], function: str) -> Any:
    from . import compiled_calls

    return compiled_calls.recurrence(options, function)


def combine(name: str, ops: Any, rest: tuple[Any, ...]) -> Any:
    from . import compiled_calls

    return compiled_calls.combine(name, ops, rest)


def nonlinear_recurrence(step: Any, options: dict[str, Any]) -> Any:
    from . import compiled_steps

    return compiled_steps.nonlinear_recurrence(step, options)


def uncompiled_jagged(*arguments: Any) -> Any:
    from . import compiled_calls

    return compiled_calls.uncompiled_jagged(*arguments)


def halo(*arguments: Any) -> Any:
    from . import compiled_calls

    return compiled_calls.halo(*arguments)


HOOKS.compiled_scan, HOOKS.compiled_recurrence = scan, recurrence
HOOKS.compiled_nonlinear_recurrence = nonlinear_recurrence
HOOKS.compiled_combinator, HOOKS.compiled_halo = combine, halo
HOOKS.uncompiled_jagged = uncompiled_jagged
