"""What a suite is made of: cases, each with contenders that do the same work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from assocscan.pytrees import flatten

from .measuring.checks import Check
from .measuring.operation_counts import Arithmetic
from .settings import BACKWARD, FORWARD, Settings

OURS, ENGINE, TORCH, PEER, OTHER = "ours", "engine", "torch", "peer", "other"


@dataclass(frozen=True)
class Contender:
    """One way of doing the work of a case.

    make: prepares it (inputs in its layout, compilation) and returns the call that is timed.
    kind: OURS (what users call), ENGINE (ours, in a form that users need not choose), TORCH (what
    one writes in torch without us), PEER, or OTHER (other work, for comparison).
    turned: brings a result of the call into the layout of the case's check.
    check: its own, where it does other work than the case; `checked` is False where nothing can
    be compared.
    wall: it runs outside torch's streams and waits for itself: timed by the clock.
    bytes: what it must move, where that is not what the case says.
    apart: it may end the process it runs in, and so gets one of its own.
    """

    make: Callable[[], Callable[[], Any]]
    kind: str = ENGINE
    turned: Callable[[Any], Any] | None = None
    check: Check | None = None
    checked: bool = True
    wall: bool = False
    bytes: int | None = None
    apart: bool = False


@dataclass(frozen=True)
class Case:
    """Work of one size, done by several contenders.

    group: which plot it belongs to; x: its place on that plot's axis, of the quantity `x_name`.
    bytes: what must move: each input read once, each output written once.
    check: tells how far a result is from the right one; None where the contenders return errors.
    errors: the contenders' calls return errors, one for each seed, and are not timed.
    missing: contenders that cannot take part, and why.
    memory: on GPUs the peak memory of a call is reported.
    exponentials: how many the work takes; where there are any, GPUs' times are compared with them.
    arithmetic: what the work computes at least; on GPUs the nearest limit is reported.
    """

    group: str
    x_name: str
    x: float
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int
    contenders: Mapping[str, Contender]
    check: Check | None = None
    errors: bool = False
    missing: Mapping[str, str] = field(default_factory=dict)
    memory: bool = False
    exponentials: int = 0
    arithmetic: Arithmetic | None = None


Suite = Callable[[Settings], "list[Callable[[], Case]]"]


def contender(call: Callable[[], Any], kind: str = ENGINE, **options: Any) -> Contender:
    """A call that needs no preparation."""
    return Contender(lambda: call, kind, **options)


def passes_of(
    scan: Callable[..., Any], inputs: tuple[Tensor, ...], which: str, cotangents: Any = None
) -> Callable[[], Any]:
    """The call of one pass: `scan(*inputs)`; its gradients alone, by a graph that is kept; or both.

    The gradients are those of all inputs with floats, for the cotangents in the structure of the
    result.
    """
    if which == FORWARD:
        return lambda: scan(*inputs)
    leaves = tuple(t.detach().requires_grad_(is_float(t)) for t in inputs)
    wanted = [t for t in leaves if t.requires_grad]
    given = flatten(cotangents)[0]

    def gradients(result: Any, **options: Any) -> tuple[Tensor, ...]:
        outputs = flatten(result)[0]
        pairs = [(y, g) for y, g in zip(outputs, given, strict=True) if y.requires_grad]
        ys, gs = [y for y, _ in pairs], [g for _, g in pairs]
        return torch.autograd.grad(ys, wanted, gs, allow_unused=True, **options)

    if which == BACKWARD:
        result = scan(*leaves)
        return lambda: gradients(result, retain_graph=True)
    return lambda: gradients(scan(*leaves))


def is_float(t: Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()
