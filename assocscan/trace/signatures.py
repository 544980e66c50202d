"""Signatures of the user's functions: how `lift`, `lower` and the others are called."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch

from ..errors import TraceError
from .closure_captures import is_of_library

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def signature_of(fn: Callable[..., Any]) -> inspect.Signature | None:
    """None for a function of C, which has none."""
    try:
        return inspect.signature(fn.forward if isinstance(fn, torch.nn.Module) else fn)
    except (TypeError, ValueError):
        return None


def positional(fn: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters that an argument may be given to by position."""
    signature = signature_of(fn)
    if signature is None:
        return []
    return [p for p in signature.parameters.values() if p.kind in _POSITIONAL]


def positional_count(fn: Callable[..., Any]) -> int | None:
    """How many positional parameters a function requires; None where that is not said."""
    signature = signature_of(fn)
    if signature is None or takes_any_number(signature):
        return None
    return sum(p.default is p.empty for p in positional(fn)) or None


def takes_any_number(signature: inspect.Signature) -> bool:
    return any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values())


def takes_inputs(lower: Callable[..., Any]) -> bool:
    """Whether `lower` is called as lower(state, xs): it requires two positional parameters.

    Raises TraceError where the signature leaves open whether the inputs are expected.
    """
    parameters = positional(lower)
    required = sum(p.default is p.empty for p in parameters)
    if required == 2:
        return True
    if required > 2:
        raise TraceError(
            f"lower{signature_of(lower)} requires {required} arguments, but is called as "
            "lower(state, xs): the inputs come as one argument, a tuple where xs is one, to be "
            "unpacked inside, and there is no third argument"
        )
    if may_expect_inputs(lower, parameters):
        raise TraceError(
            f"lower{signature_of(lower)} would be called as lower(state), without the inputs, "
            "since it requires fewer than two positional arguments; write lower(state, xs) to be "
            "given them, or lower(state)"
        )
    return False


def may_expect_inputs(lower: Callable[..., Any], parameters: list[inspect.Parameter]) -> bool:
    """Whether the author of lower(*args) or lower(state, xs=None) may count on being given the
    inputs. A default other than None is a value that the function carries: lower(state, k=k)."""
    written: Any = lower
    while isinstance(written, functools.partial):
        written = written.func
    if isinstance(written, torch.nn.Module) or is_of_library(getattr(written, "__module__", None)):
        return False
    if not isinstance(written, (types.FunctionType, types.MethodType)):
        written = vars(type(written)).get("__call__")  # of an object of the user's class
    if not isinstance(written, (types.FunctionType, types.MethodType)):
        return False
    signature = signature_of(lower)
    if signature is not None and takes_any_number(signature):
        return True
    return len(parameters) > 1 and parameters[1].default is None


def require_call(fn: Callable[..., Any], count: int, who: str, call: str) -> None:
    """Raise TraceError where `fn` cannot be called with `count` positional arguments.

    who, call: what the function is and how it is called, for the message.
    """
    signature = signature_of(fn)
    if signature is None:
        return
    try:
        signature.bind(*range(count))
    except TypeError as error:
        raise TraceError(f"{who} takes {signature}, but is called as {call}: {error}") from None
