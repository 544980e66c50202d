"""The library operation on vectors: what is dispatched to it, and checks of its registration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from assocscan.program import deserialization, serialization

SCAN = torch.ops.assocscan.scan.default
Call = tuple[list[Any], Any]  # arguments and results

STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "axis last": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "batch last": lambda x: x.movedim(0, 2).contiguous().movedim(2, 0),
    "every other": lambda x: x.repeat_interleave(2, -1)[..., ::2],
}


class Recorder(TorchDispatchMode):
    """The arguments and results of every scan that is dispatched.

    change: what is called in the place of the arguments.
    """

    def __init__(self, change: Callable[[list[Any]], list[Any]] = lambda given: given) -> None:
        super().__init__()
        self.change = change
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not SCAN:
            return func(*args, **(kwargs or {}))
        given = self.change(list(args))
        self.calls.append((given, func(*given)))
        return self.calls[-1][1]

    def operators(self) -> list[Any]:
        return [deserialization.read(*given[:2]) for given, _ in self.calls]


def with_tensors(arguments: Sequence[Any], change: Callable[[Tensor], Tensor]) -> list[Any]:
    """The arguments of a call, with other tensors in their lists."""
    return [
        [change(t) for t in x] if isinstance(x, list) and x and isinstance(x[0], Tensor) else x
        for x in arguments
    ]


def check_fake_results(calls: Sequence[Call]) -> None:
    """A forward and a backward scan have, on fake tensors, results of the shapes, strides and
    dtypes of the real ones."""
    assert len(calls) == 2
    for given, real in calls:
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = SCAN(*with_tensors(given, lambda t: mode.from_tensor(t.detach())))
        for a, b in zip(fake, real, strict=True):
            assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def check_registration(calls: Sequence[Call]) -> None:
    """Schema, fake tensors, Autograd key, AOT: of a forward and of a backward scan."""
    assert len(calls) == 2
    for number, (arguments, _) in enumerate(calls):
        given = with_tensors(
            arguments, lambda t: t.detach().clone().requires_grad_(t.is_floating_point())
        )
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(SCAN, tuple(given), test_utils=checks)
        if number == 0:  # as it is called first, without carries: AOT adds the backward pass
            op = replace(deserialization.read(*given[:2]), saves_carries=False, lane=None)
            given[:2] = serialization.write(op)
            torch.library.opcheck(SCAN, tuple(given), test_utils=("test_aot_dispatch_dynamic",))
