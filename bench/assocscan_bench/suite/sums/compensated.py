"""`compensated`: long float32 sums with and without `compensated=True`, and by torch.

`cumsum`, and the scan of the layer `nn.AdaptiveRankSemiseparable`: a running sum between two
products. The errors are those beside float64, of 8 channels of 8 rows at most.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from assocscan import ops
from assocscan.functional.cumulative import cumsum
from assocscan.nn.ar_ssm import cumulative, fused

from ...cases import ENGINE, OURS, TORCH, Case, Contender, passes_of
from ...measuring.checks import Lanes, Verdict, against, scan_check
from ...settings import BACKWARD, BOTH, FORWARD, PASSES, Settings, short

LENGTH, WIDTHS = 1 << 17, [(1, 32)]
ON_GPUS = [(1, 32), (4, 512)]
# Arrays read or written: x, y; then ḡ, dx.
ARRAYS = {FORWARD: 2, BACKWARD: 2, BOTH: 4}
# Of the layer three inputs and y; then three inputs, ḡ and three gradients.
ARRAYS_OF_LAYER = {FORWARD: 4, BACKWARD: 7, BOTH: 11}


def cases(settings: Settings) -> list[Callable[[], Case]]:
    """Sums, then the layer's, of 131072 steps."""
    widths = ON_GPUS if settings.is_gpu else WIDTHS
    lengths = [1 << 12] if settings.quick else [LENGTH]
    return [
        functools.partial(make, settings, shape, dtype, which)
        for make in (sum_case, layer_case)
        for dtype in settings.chosen_dtypes or (torch.float32,)
        for which in settings.passes_or(FORWARD)
        for shape in settings.sizes(widths, lengths)
    ]


def sum_case(
    settings: Settings, shape: tuple[int, int, int], dtype: torch.dtype, which: str
) -> Case:
    x = settings.random(shape, dtype)
    cotangent = None if which == FORWARD else torch.rand_like(x)

    def ours(compensated: bool) -> Callable[[Tensor], Tensor]:
        return lambda t: cumsum(t, 1, compensated=compensated, backend=settings.backend)

    def theirs(t: Tensor) -> Tensor:
        return torch.cumsum(t, 1)

    ways: dict[str, tuple[Callable[..., Tensor], str]] = {
        "assocscan": (ours(False), OURS),
        "assocscan, compensated": (ours(True), ENGINE),
        "torch.cumsum": (theirs, TORCH),
    }
    check = scan_check(ops.sum, x, 1, which, cotangent)
    return case_of("cumsum", ways, (x,), cotangent, which, ARRAYS[which] * x.nbytes, check)


def layer_case(
    settings: Settings, shape: tuple[int, int, int], dtype: torch.dtype, which: str
) -> Case:
    parts = tuple(settings.random(shape, dtype).roll(k, 1) for k in range(3))
    cotangent = None if which == FORWARD else torch.rand_like(parts[0])

    def ours(compensated: bool) -> Callable[..., Tensor]:
        return lambda *t: fused((t[0], t[1], t[2]), None, False, compensated, None)[0]

    def theirs(*t: Tensor) -> Tensor:
        return cumulative((t[0], t[1], t[2]), None, False)[0]

    ways: dict[str, tuple[Callable[..., Tensor], str]] = {
        "assocscan": (ours(False), OURS),
        "assocscan, compensated": (ours(True), ENGINE),
        "torch.cumsum and products": (theirs, TORCH),
    }
    lanes = Lanes(shape, 1)

    def expected() -> object:
        few = [lanes.of(t).double().requires_grad_(which != FORWARD) for t in parts]
        key, query, gate = few
        y = (key * gate).cumsum(1) * (query * gate)
        return y if cotangent is None else torch.autograd.grad(y, few, lanes.of(cotangent).double())

    compare = against(expected, dtype, shape[1])

    def check(result: Tensor | tuple[Tensor, ...]) -> Verdict:
        found = (result,) if isinstance(result, Tensor) else result
        return compare([lanes.of(t) for t in found])

    moved = ARRAYS_OF_LAYER[which] * parts[0].nbytes
    return case_of("the layer's scan", ways, parts, cotangent, which, moved, check)


def case_of(
    title: str,
    ways: dict[str, tuple[Callable[..., Tensor], str]],
    inputs: tuple[Tensor, ...],
    cotangent: Tensor | None,
    which: str,
    moved: int,
    check: Callable[..., Verdict],
) -> Case:
    contenders = {
        name: Contender(functools.partial(passes_of, scan, inputs, which, cotangent), kind)
        for name, (scan, kind) in ways.items()
    }
    batch, length, width = inputs[0].shape
    dtype = inputs[0].dtype
    group = f"{title}, ({batch}, L, {width}) {short(dtype)}, {PASSES[which]}"
    shape = tuple(inputs[0].shape)
    return Case(group, "L", length, shape, dtype, moved, contenders, check)
