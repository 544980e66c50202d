"""Results of torch operations in memory of their own: torch may return a view of an input, and the
caller may write to a result."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...torch_private import is_functorch_tensor, storage_number
from ..base.layout import Finals, Outputs
from ..base.scan_spec import MaybeTensor, dense_strides

Tensors = list[torch.Tensor]


def owned(results: Tensors, inputs: Sequence[MaybeTensor]) -> Tensors:
    """The results, cloned where one shares memory with an input or another result, or where a
    stride of 0 makes its own elements share memory."""
    taken = {storage_id(t) for t in inputs if t is not None}
    separate = []
    for t in results:
        t = t.resolve_conj().resolve_neg()
        overlaps = any(s == 0 and n > 1 for s, n in zip(t.stride(), t.shape, strict=True))
        if overlaps or storage_id(t) in taken:
            t = t.clone(memory_format=torch.contiguous_format)
        taken.add(storage_id(t))
        separate.append(t)
    return separate


def storage_id(t: torch.Tensor) -> int:
    """A number that is equal for tensors on the same storage. Wrapper tensors of torch.func do not
    give access to their storage: there it is the id of the tensor."""
    if is_functorch_tensor(t):
        return id(t)
    return storage_number(t)


def in_layout(results: Tensors, outputs: Outputs, finals: Finals) -> Tensors:
    """The results, outputs then finals, with the strides and dtypes that were declared for them.
    Compiled graphs rely on these."""
    declared = [*outputs, *((shape, dense_strides(shape), dtype) for shape, dtype in finals)]
    made = []
    for t, (shape, strides, dtype) in zip(results, declared, strict=True):
        if t.stride() != strides or t.dtype != dtype:
            t = torch.empty_strided(shape, strides, dtype=dtype, device=t.device).copy_(t)
        made.append(t)
    return made
