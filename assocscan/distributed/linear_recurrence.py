"""`distributed.linear_recurrence`: h[t] = a[t] · h[t−1] + b[t] over the parts of several ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..functional.operands import Number
from ..functional.recurrence import NAMES, operands
from ..hooks import HOOKS
from ..monoids.call_errors import checked_call
from ..monoids.leaf_checks import require_tensor
from .agreement import over_ranks
from .associative_scan import scan

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@over_ranks
@checked_call
def linear_recurrence(
    a: Tensor | Number,
    b: Tensor,
    init: Tensor | Number | None = None,
    axis: int = 1,
    reverse: bool = False,
    return_final: bool = False,
    *,
    group: ProcessGroup | None = None,
    check: bool | None = None,
) -> Any:
    """`assocscan.linear_recurrence` of a sequence whose consecutive parts lie on the ranks of
    `group`.

        h[t] = a[t] · h[t−1] + b[t],   t over the whole sequence, the part of rank 0 first

    Every rank passes its part of a and b, of any length, and gets the same part of h; with
    `return_final` also the last state of the whole, on every rank. Parameters are those of
    `assocscan.linear_recurrence`; `group`, `init` and `check` are those of
    `distributed.associative_scan`, which says what gradients mean here.

    >>> import tempfile, torch, torch.distributed as dist
    >>> import assocscan
    >>> store = dist.FileStore(tempfile.mktemp(), 1)
    >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> assocscan.distributed.linear_recurrence(0.5, torch.tensor([8.0, 0.0, 1.0]), axis=0)
    tensor([8., 4., 3.])
    >>> dist.destroy_process_group()

    Raises what `assocscan.linear_recurrence` and `distributed.associative_scan` raise.

    Cost: reads a and b twice and writes h; one all-gather of two numbers for each channel.
    """
    if torch.compiler.is_dynamo_compiling():
        name = None if group is None else group.group_name
        return HOOKS.compiled_recurrence(
            {
                "a": a, "b": b, "init": init, "axis": axis, "reverse": reverse,
                "return_final": return_final, "group": name, "check": check,
            },
            "distributed.linear_recurrence",
        )  # fmt: skip

    def made() -> Any:
        require_tensor("b", b)
        return operands(a, b, init)

    flags = {"axis": axis, "reverse": reverse, "inclusive": True, "return_final": return_final}
    result = scan(made, b, flags, group, check, function="linear_recurrence", names=NAMES)
    return (result[0], result[1][1]) if return_final else result
