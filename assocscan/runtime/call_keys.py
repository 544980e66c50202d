"""Keys of calls: everything that a kept call depends on of its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..engines.base.scan_spec import ALIGNMENTS, MaybeTensor
from ..torch_state import needs_dispatcher

PLAIN = (torch.Tensor, torch.nn.Parameter)


def tensor_key(tensors: Sequence[MaybeTensor], with_grad: bool) -> tuple[Any, ...] | None:
    """Of each tensor the dtype, shape, strides, device and alignment; with_grad: and whether it
    requires a gradient. None where one has no memory of its own, or something looks at operations.
    """
    if needs_dispatcher():
        return None
    parts: list[Any] = []
    try:
        for t in tensors:
            if t is None:
                parts.append(None)
                continue
            if type(t) not in PLAIN or t.layout is not torch.strided or t.is_nested:
                return None
            if t.is_conj() or t.is_neg():
                return None
            low = t.data_ptr() & 15
            parts += (t.dtype, t.shape, t.stride(), t.device, ALIGNMENTS[low],
                      with_grad and t.requires_grad)  # fmt: skip
    except RuntimeError:  # a wrapper of a transform has no address
        return None
    return tuple(parts)
