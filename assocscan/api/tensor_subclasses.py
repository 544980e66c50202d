"""Support for tensor subclasses with `__torch_function__`, as in torch's own functions.

If an argument's class overrides `__torch_function__`, the public function calls that method with
itself as `func`. If all classes inherit Tensor's default, the function runs and its results get the
class of the arguments, as with torch.cumsum. Tensors of classes that disable `__torch_function__`
(Parameter, FakeTensor, DTensor) are not handed over here. Scans and reductions of DTensors go to
`distributed.dtensors`, calls with jagged nested tensors to `functional.packing.jagged`.
Under torch.compile the subclass gets the call from `torch_compile.compiled_calls` instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.overrides import handle_torch_function

from ..errors import AssocScanError
from ..hooks import HOOKS
from ..monoids.call_errors import raise_of_call
from ..pytrees import flatten, tree_map
from ..torch_private import (
    NO_TORCH_FUNCTION,
    WithoutTorchFunctionOfClasses,
    is_jagged,
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
    """The leaves whose class is not in `_PLAIN` and has not disabled `__torch_function__`.

    Empty while Dynamo traces and where torch has disabled the protocol.
    """
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


def holds_dtensors(xs: Any) -> bool:
    """Whether a leaf is a DTensor. That module of torch need not have been imported."""
    return any(
        type(leaf) not in _PLAIN
        and any(base.__name__ == "DTensor" and base.__module__.startswith("torch.")
                for base in type(leaf).__mro__)
        for leaf in flatten(xs)[0]
    )  # fmt: skip


def axis_meant(unknown: Mapping[str, Any], axis: Any) -> Any:
    """The axis of a call with arguments that there are not, which may be it by another name."""
    return next((number for number in unknown.values() if type(number) is int), axis)


def checked(op: Any, xs: Any, axis: Any, check: Callable[..., Any], *args: Any) -> Any:
    """What `check` returns for an argument of a scan or a reduction; where it raises and xs holds
    DTensors, all ranks raise."""
    try:
        return check(*args)
    except AssocScanError:
        if holds_dtensors(xs):
            HOOKS.of_dtensors(functools.partial(check, *args), op, xs, axis)
        raise


def has_override(cls: Any) -> bool:
    """Whether a class has a `__torch_function__`, inherited or its own, that is not disabled."""
    return getattr(cls, "__torch_function__", NO_TORCH_FUNCTION) is not NO_TORCH_FUNCTION


def handed_over(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result of a public function whose arguments contain `overridden` leaves: from an active
    mode or their `__torch_function__`, or, if all inherit Tensor's default, by running the function
    and converting its results to the class."""
    leaves = overridden(*args, *kwargs.values())
    if any(is_jagged(leaf) for leaf in leaves):
        return HOOKS.of_jagged(function, args, kwargs)
    classes = {type(leaf) for leaf in leaves}
    if is_torch_function_mode_enabled() or not all(is_default(k) for k in classes):
        return handle_torch_function(function, leaves, *args, **kwargs)
    # Tensor's default method converts results in tuples and lists only; a scan may return any
    # pytree.
    cls = most_derived(list(classes))
    if cls is None:
        return handle_torch_function(function, leaves, *args, **kwargs)  # raises
    with WithoutTorchFunctionOfClasses():
        return tree_map(lambda t: of_class(t, cls), function(*args, **kwargs))


def is_default(cls: Any) -> bool:
    """Whether a class inherits `__torch_function__` from Tensor."""
    return getattr(cls.__torch_function__, "__func__", None) is _DEFAULT.__func__


def most_derived(classes: Sequence[Any]) -> Any:
    """The class that is a subclass of all of them; None where there is none."""
    for cls in classes:
        if all(issubclass(cls, other) for other in classes):
            return cls
    return None


def of_class(value: Any, cls: Any) -> Any:
    """`value`, viewed as the class if it is a tensor of another one."""
    is_other = isinstance(value, torch.Tensor) and not isinstance(value, cls)
    return value.as_subclass(cls) if is_other else value


def overridable(function: Function) -> Function:
    """Decorator: calls `__torch_function__` where an argument has one; and `checked_call`.

    It costs 0.5 µs per call. `associative_scan`, `cumsum` and its like instead make a cheaper test
    first and call `overridden` only if that fails.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if overridden(*args, *kwargs.values()):
            return handed_over(call, *args, **kwargs)
        if torch.compiler.is_dynamo_compiling() and holds_jagged(*args, *kwargs.values()):
            return HOOKS.uncompiled_jagged(call, args, kwargs)
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            raise_of_call(error, function, args, kwargs)
            raise

    return call  # type: ignore[return-value]


def holds_jagged(*arguments: Any) -> bool:
    """Whether an argument is a jagged nested tensor, in code that Dynamo reads."""
    return any(isinstance(t, torch.Tensor) and is_jagged(t) for t in arguments)


def takes_parts(result: Result) -> Result:
    """Decorator for a named tuple: its constructor also accepts one iterable of all entries. torch
    calls it that way when it converts the results of a function.
    """
    make: Any = result.__new__

    def new(cls: Any, *entries: Any, **named: Any) -> Any:
        if len(entries) == 1 and not named and not isinstance(entries[0], torch.Tensor):
            entries = tuple(entries[0])
        return make(cls, *entries, **named)

    result.__new__ = new  # type: ignore[method-assign, assignment]
    return result
