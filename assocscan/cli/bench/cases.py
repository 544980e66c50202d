"""What a suite is made of: cases, each with contenders that do the same work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

SEED = 3407


@dataclass(frozen=True)
class Settings:
    """How the command was called. peers: the names of those that take part, None for all."""

    device: torch.device
    quick: bool = False
    peers: tuple[str, ...] | None = None

    @property
    def is_gpu(self) -> bool:
        return self.device.type != "cpu"

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.float32, torch.bfloat16) if self.is_gpu else (torch.float32,)

    def random(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """Uniform in [0, 1)."""
        generator = torch.Generator(self.device).manual_seed(SEED)
        return torch.rand(shape, generator=generator, device=self.device).to(dtype)


@dataclass(frozen=True)
class Contender:
    """One way of doing the work of a case.

    make: prepares it (inputs in its layout, compilation) and returns the call that is timed.
    wall: it runs outside torch's streams and waits for itself: timed by the clock.
    bytes: what it must move, where that is not what the case says.
    """

    make: Callable[[], Callable[[], Any]]
    wall: bool = False
    bytes: int | None = None


@dataclass(frozen=True)
class Case:
    """Work of one size, done by several contenders.

    group: which plot it belongs to; x: its place on that plot's axis, of the quantity `x_name`.
    bytes: what must move: each input read once, each output written once.
    errors: the contenders' calls return errors, and are not timed.
    missing: contenders that cannot take part, and why.
    """

    group: str
    x_name: str
    x: float
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int
    contenders: Mapping[str, Contender]
    errors: bool = False
    missing: Mapping[str, str] = field(default_factory=dict)


Suite = Callable[[Settings], "list[Callable[[], Case]]"]


def contender(call: Callable[[], Any]) -> Contender:
    """A call that needs no preparation."""
    return Contender(lambda: call)


def forward_backward(
    scan: Callable[..., Tensor], inputs: tuple[Tensor, ...]
) -> Callable[[], object]:
    """One forward pass and its gradients, with a random cotangent."""
    leaves = tuple(t.detach().requires_grad_() for t in inputs)
    cotangent = torch.rand_like(scan(*leaves).detach())
    return lambda: torch.autograd.grad(scan(*leaves), leaves, cotangent)


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def powers(first: int, last: int, step: int = 1) -> list[int]:
    """2^first, 2^(first + step), …, at most 2^last."""
    return [1 << k for k in range(first, last + 1, step)]
