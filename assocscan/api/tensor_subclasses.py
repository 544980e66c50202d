"""Tensor subclasses that override functions (`__torch_function__`) are handed the call, with the
public function as `func`, as by torch's own functions.

If all classes inherit the default `__torch_function__` of Tensor, the results get the class of the
arguments, as those of torch.cumsum do. Classes without the protocol (Parameter, FakeTensor,
DTensor) are not concerned. torch.compile hands calls over by itself, at the node of the graph
(`dynamo`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.overrides import handle_torch_function

from ..pytrees import flatten, tree_map
from ..torch_private import (
    NO_TORCH_FUNCTION,
    WithoutTorchFunctionOfClasses,
    is_torch_function_enabled,
    is_torch_function_mode_enabled,
)

Function = TypeVar("Function", bound=Callable[..., Any])
Result = TypeVar("Result", bound=type)

_PLAIN = frozenset(
    (torch.Tensor, torch.nn.Parameter, type(None), bool, int, float, complex, str, torch.dtype)
)
_DEFAULT: Any = torch.Tensor.__torch_function__


def overridden(*arguments: Any) -> list[Any]:
    """The leaves of the arguments that the call is to be handed over to."""
    if torch.compiler.is_dynamo_compiling() or not is_torch_function_enabled():
        return []
    found = []
    for argument in arguments:
        if type(argument) in _PLAIN:
            continue
        for leaf in flatten(argument)[0]:
            if type(leaf) not in _PLAIN and has_override(type(leaf)):
                found.append(leaf)
    return found


def has_override(kind: Any) -> bool:
    """Whether a class, not one of `_PLAIN`, overrides torch's functions."""
    return getattr(kind, "__torch_function__", NO_TORCH_FUNCTION) is not NO_TORCH_FUNCTION


def handed_over(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What the classes of the arguments make of the call of a public function."""
    leaves = overridden(*args, *kwargs.values())
    kinds = {type(leaf) for leaf in leaves}
    if is_torch_function_mode_enabled() or not all(is_default(k) for k in kinds):
        return handle_torch_function(function, leaves, *args, **kwargs)
    # torch's own rule gives the class to tensors in tuples and lists alone.
    kind = most_derived(list(kinds))
    if kind is None:
        return handle_torch_function(function, leaves, *args, **kwargs)  # raises
    with WithoutTorchFunctionOfClasses():
        return tree_map(lambda t: of_class(t, kind), function(*args, **kwargs))


def is_default(kind: Any) -> bool:
    """Whether a class takes over `__torch_function__` from Tensor."""
    return getattr(kind.__torch_function__, "__func__", None) is _DEFAULT.__func__


def most_derived(kinds: Sequence[Any]) -> Any:
    """The class that is a subclass of all of them; None where there is none."""
    for kind in kinds:
        if all(issubclass(kind, other) for other in kinds):
            return kind
    return None


def of_class(value: Any, kind: Any) -> Any:
    is_other = isinstance(value, torch.Tensor) and not isinstance(value, kind)
    return value.as_subclass(kind) if is_other else value


def overridable(function: Function) -> Function:
    """The public function, handed over where an argument overrides it. Costs 0.5 µs per call: the
    functions that are called most look by themselves."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if overridden(*args, *kwargs.values()):
            return handed_over(call, *args, **kwargs)
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]


def takes_parts(result: Result) -> Result:
    """Let a named tuple also be built from one iterable of its entries, as torch does when it
    rebuilds the results of a function."""
    make: Any = result.__new__

    def new(cls: Any, *entries: Any, **named: Any) -> Any:
        if len(entries) == 1 and not named and not isinstance(entries[0], torch.Tensor):
            entries = tuple(entries[0])
        return make(cls, *entries, **named)

    result.__new__ = new  # type: ignore[method-assign, assignment]
    return result
