"""Copies of tensors into another order of their dimensions, by a scan that combines nothing.

torch copies line by line of the result: where neighbours in the result are far apart in the source,
every element is a cache line of its own. A scan along the source's innermost dimension, with the
result's innermost ones as lanes, reads it through tiles: 33 MB of float32 in 13 to 16 ms on one
core instead of 40 to 77 (docs/performance/cpu-layouts.md).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ...program.ir import Builder
from ...program.operator import Leaf, Operator
from ..base.memory import empty_strided
from ..base.problem import ScanProblem, contiguous_strides

# Smaller tensors are left to torch: they are copied in less time than a kernel is compiled in.
MIN_BYTES = 1 << 20
# A copy does not look at its words: one kernel for all dtypes of a size.
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Order = tuple[int, ...]
Run = Callable[[ScanProblem, Order], tuple[list[torch.Tensor], list[torch.Tensor]]]


def compact(t: torch.Tensor) -> torch.Tensor:
    """`t` with size 1 where it is broadcast by a stride of 0."""
    for d, (size, stride) in enumerate(zip(t.shape, t.stride(), strict=True)):
        if stride == 0 and size > 1:
            t = t.narrow(d, 0, 1)
    return t


def strides_in(t: torch.Tensor, order: Order) -> tuple[int, ...]:
    """The strides of a dense tensor of this shape whose dimensions lie in this order."""
    return contiguous_strides(tuple(t.shape), order, ())


def stand_in(t: torch.Tensor, order: Order) -> torch.Tensor:
    """A tensor without memory that lies as `copied` would."""
    small = compact(t)
    empty = torch.empty_strided(small.shape, strides_in(small, order), dtype=t.dtype, device="meta")
    return empty.expand(t.shape)


def copied(t: torch.Tensor, order: Order, run: Run) -> torch.Tensor:
    """`t` in fresh memory, its dimensions in this order, outermost first; broadcast ones stay so.

    `run` scans a problem of one input and one output, whose dimensions lie in the order given.
    """
    small = compact(t)
    sizes, strides = small.shape, small.stride()
    axis = min(range(t.dim()), key=lambda d: (sizes[d] < 2, strides[d]))
    innermost = [d for d in order if sizes[d] > 1][-1:]
    if small.nbytes < MIN_BYTES or t.itemsize not in WORDS or innermost == [axis]:
        empty = empty_strided(tuple(sizes), strides_in(small, order), t.dtype)
        return empty.copy_(small).expand(t.shape)
    words = small.view(WORDS[t.itemsize])
    problem = ScanProblem(copying(words.dtype), [words], tuple(sizes), axis)
    return run(problem, order)[0][0].view(t.dtype).expand(t.shape)


@functools.cache
def copying(dtype: torch.dtype) -> Operator:
    """The operator without state whose outputs are its inputs."""
    leaf = Leaf(dtype)
    kinds = (leaf.scalar,)
    nothing, same = Builder(()).build([]), Builder((*kinds, "b1")).build([0])
    return Operator("copy", (leaf,), (), (leaf,), Builder(kinds).build([]), nothing, same, ())
