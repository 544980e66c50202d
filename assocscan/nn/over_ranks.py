"""Layers over ranks: an error of one rank is raised by all (`distributed.agreement`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from ..monoids.call_errors import with_own_code

Function = TypeVar("Function", bound=Callable[..., Any])
Layer = TypeVar("Layer", bound=type[nn.Module])


def shares_errors(headers: Callable[..., int]) -> Callable[[Function], Function]:
    """Decorator of a function with the argument `group`, None where there are no ranks.

    headers: how many headers the ranks exchange in a call, from its arguments by position.
    """

    def decorated(function: Function) -> Function:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling():
                return function(*args, **kwargs)
            group = kwargs.get("group")
            if group is None:  # also by position, where it does not belong
                group = next((t for t in args if type(t).__name__ == "ProcessGroup"), None)
            if group is None:
                return function(*args, **kwargs)
            from ..distributed.agreement import call_in_turn

            return call_in_turn(function, headers(*args), args, kwargs)

        return with_own_code(call, function)

    return decorated


def layer_over_ranks(headers: Callable[[Any], int]) -> Callable[[Layer], Layer]:
    """Class decorator of a layer; above `checked_methods`, so that errors of calls that do not fit
    the signature are raised by all ranks too.

    headers: how many headers the ranks exchange in a call of the layer.
    """

    def decorated(cls: Layer) -> Layer:
        made: Any = cls
        made.headers_over_ranks = property(headers)
        made.forward = shares_errors(lambda layer, *_: headers(layer))(made.forward)
        return cls

    return decorated


def headers_of(layer: nn.Module) -> int:
    """How many headers the ranks exchange in a call of the layer; 0 of other modules."""
    return getattr(layer, "headers_over_ranks", 0)


def one_header(*_: Any) -> int:
    """Of a layer that is one scan."""
    return 1
