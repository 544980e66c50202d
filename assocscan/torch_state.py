"""What surrounds a call: torch.func transforms, forward mode, tracers, dispatch modes.

Where nothing does, tensors are memory and an engine runs at once. Elsewhere they may stand for
something else, and the scan has to be an operation that whoever looks can see (`library`).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd import forward_ad

from .torch_private import (
    FORWARD_LEVEL,
    NO_TORCH_DISPATCH,
    dispatch_modes,
    hint_of,
    interpreter_stack,
    is_forward_mode_enabled,
    is_functorch_tensor,
    is_mapped_tensor,
    jit_tracing_state,
    len_dispatch_modes,
    level_of,
    mapped_dimension,
    peek_interpreter_stack,
    register_namedtuple,
    unwrapped,
)

P = ParamSpec("P")
R = TypeVar("R")


def loadable(result: type[R]) -> type[R]:
    """Decorator for a named tuple of tensors: `torch.load` may make it, which by default makes only
    what is known to run nothing (`weights_only=True`), and `torch.export` may save a program that
    returns it. There the class is called "assocscan." and its name, so that its module may move."""
    torch.serialization.add_safe_globals([result])
    register_namedtuple(result, serialized_type_name=f"assocscan.{result.__name__}")
    return result


def needs_dispatcher() -> bool:
    """Whether tensors may not be what they seem, or somebody records what is done to them."""
    return (
        peek_interpreter_stack() is not None
        or getattr(forward_ad, FORWARD_LEVEL, -1) >= 0
        or len_dispatch_modes() > 0
        or jit_tracing_state() is not None
    )


def is_traced() -> bool:
    """Whether a tracer or a compiler is at work, whose tensors have no values to read. Dispatch
    modes of other kinds, such as torch's counter of flops, run operations as they are."""
    if jit_tracing_state() is not None:
        return True
    return len_dispatch_modes() > 0 and any(mode.is_infra_mode() for mode in dispatch_modes())


def in_functorch() -> bool:
    """Whether a torch.func transform is at work."""
    return peek_interpreter_stack() is not None


def in_functorch_or_forward_mode() -> bool:
    """Whether a torch.func transform or forward mode is at work: gradients may be wanted that
    `requires_grad` does not show."""
    return peek_interpreter_stack() is not None or getattr(forward_ad, FORWARD_LEVEL, -1) >= 0


def may_be_differentiated() -> bool:
    """Whether a torch.func transform or forward mode may ask for derivatives of what runs here. In
    the forward of an autograd function, which has its own derivative, both modes are off."""
    is_on = torch.is_grad_enabled() or is_forward_mode_enabled()
    return is_on and in_functorch_or_forward_mode()


def innermost(t: torch.Tensor) -> torch.Tensor:
    """The tensor that torch.func transforms have wrapped."""
    while is_functorch_tensor(t):
        t = unwrapped(t)
    return t


def mapped_size(tensors: Iterable[torch.Tensor]) -> int:
    """How many times torch.func.vmap runs what these tensors enter."""
    sizes: dict[int, int] = {}
    for t in tensors:
        while is_functorch_tensor(t):
            inner = unwrapped(t)
            if is_mapped_tensor(t):
                sizes[level_of(t)] = hint_of(inner.shape[mapped_dimension(t)])
            t = inner
    return math.prod(sizes.values())


def is_symbolic(size: object) -> bool:
    """Whether a size is a symbol of the graph that is being traced, rather than a number.

    Dynamo shows symbols as numbers to the code that it reads; there any size may be one.
    """
    return torch.compiler.is_dynamo_compiling() or isinstance(size, torch.SymInt)


def is_less(number: int, bound: int) -> bool:
    """Whether a number is less than another. A symbol is compared by its value, which then guards
    the graph; one that has none before the graph runs is taken for a number that is not."""
    if not is_symbolic(number):
        return number < bound
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # slow to import

    return bool(guard_or_false(number < bound))


def same_shape(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two shapes are equal. Sizes are compared only where there are as many in both.

    Tuples of different lengths compare sizes from the left, before their lengths: [3] == [B, L, 3]
    asks whether B is 3, and the answer binds the graph that is being traced to such batches.
    """
    return len(one) == len(other) and tuple(one) == tuple(other)


def wants_further_derivatives() -> bool:
    """Whether forward mode is at work, or torch.func differentiates more than once."""
    kinds = [level.key().name for level in interpreter_stack() or ()]
    is_forward = getattr(forward_ad, FORWARD_LEVEL, -1) >= 0
    return is_forward or "Jvp" in kinds or kinds.count("Grad") > 1


def has_own_dispatch(tensors: Iterable[Any]) -> bool:
    """Whether some tensor is of a class with an own `__torch_dispatch__` (FakeTensor, DTensor)."""
    return any(
        type(t) is not torch.Tensor
        and type(t) is not torch.nn.Parameter
        and getattr(type(t), "__torch_dispatch__", NO_TORCH_DISPATCH) is not NO_TORCH_DISPATCH
        for t in tensors
    )


def is_tracked(tensors: Iterable[torch.Tensor | None]) -> bool:
    """Whether a derivative is wanted: some tensor requires a gradient or carries a tangent."""
    if torch.is_grad_enabled():
        for t in tensors:
            if t is not None and t.requires_grad:
                return True
    return is_forward_mode() and any(t is not None and is_dual(t) for t in tensors)


def is_forward_mode() -> bool:
    """Whether tensors can carry tangents here. A compiled jvp enters its level unseen by Python."""
    return is_forward_mode_enabled() and in_functorch_or_forward_mode()


def is_dual(t: torch.Tensor) -> bool:
    """Whether t carries a tangent, on the one level that there is."""
    return forward_ad.unpack_dual(t, level=0).tangent is not None


@contextlib.contextmanager
def without_autocast(device_type: str) -> Iterator[None]:
    """Outside the caller's autocast; not by torch.autocast, which torch.export writes down."""
    enabled = torch.is_autocast_enabled(device_type)
    torch.set_autocast_enabled(device_type, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device_type, enabled)


def in_own_dtype(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator: autocast, which would round matrix products to 16 bits, is off in the function."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        device_type = next(
            (t.device.type for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)), "cpu"
        )
        if device_type == "meta" or not torch.is_autocast_enabled(device_type):
            return function(*args, **kwargs)
        if torch.compiler.is_compiling():  # a graph has to say it, also one of torch.export
            with torch.autocast(device_type, enabled=False):
                return function(*args, **kwargs)
        with without_autocast(device_type):
            return function(*args, **kwargs)

    return call


def is_differentiable(t: torch.Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()
