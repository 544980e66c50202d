"""Keeps calls of `associative_scan` and `reduce`: a later one with the same flags and the same
metadata of its tensors skips all checks (`runtime.prepared.prepared_call`).

Calls with offsets are not kept. Reductions are kept beside the scans of an operator, where their
results are the final carries as the kernels write them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...engines.base.scan_spec import ScanSpec
from ...errors import BackendError
from ...pytrees import flatten, unflatten
from ...runtime import executable_cache as executables
from ...runtime.generated_gradient import GeneratedGradient
from ...runtime.prepared.prepared_call import Place, PreparedCall
from ...runtime.scan_call import ScanCall
from ...runtime.vectors.recomputed_gradient import RecomputedGradient


def remember(
    place: Place,
    call: ScanCall,
    backend: str,
    spec: ScanSpec[Any],
    scan: GeneratedGradient | RecomputedGradient | None,
) -> None:
    """Keep a call that was run, if `bind` left `init` as the caller gave it.

    A kept call passes the caller's tensors to the executable as they are. Where `bind` made other
    tensors of `init` (converted, expanded or reordered it), the call is not kept.
    """
    tensors = place.tensors
    given = tensors[len(call.leaves) :]
    if any(a is not b for a, b in zip(call.init or (), given, strict=True)):
        return
    try:
        executable = executables.prepare(backend, spec if scan is None else scan.spec, tensors)
    except BackendError:  # the scan ran; if it cannot be prepared again now, it is not kept
        return
    if scan is not None:
        scan.executable = executable
    last = len(executable.outputs) + len(executable.finals)
    count = 0 if call.final_only else len(call.traced.outputs)
    finals = len(call.traced.state) if call.return_final else 0
    in_python = isinstance(scan, RecomputedGradient) and is_repeated(tensors)
    returned = (*range(count), *range(last - finals, last))
    place.keep(PreparedCall(executable, scan, returned, put_of(call, count), not in_python))


def is_repeated(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether `expand` may have made one of the tensors: what its gradient is summed along is seen
    in Python only (`runtime.vectors.recomputed_gradient`)."""
    return any(
        t.requires_grad and n > 1 and s == 0
        for t in tensors for n, s in zip(t.shape, t.stride(), strict=True)
    )  # fmt: skip


def put_of(call: ScanCall, count: int) -> Callable[[Sequence[Any]], Any]:
    """What makes the result of a call of its `count` outputs and its finals."""
    outputs, state = call.traced.output_spec, call.state_spec
    return_final, final_only = call.return_final, call.final_only
    # The two commonest structures, a tensor and a flat tuple, do not need `unflatten`.
    leaf = call.leaves[0]
    is_one_tensor = outputs == flatten(leaf)[1]
    is_flat_tuple = outputs == flatten((leaf,) * count)[1]

    def put(results: Sequence[Any]) -> Any:
        ys: Any
        if final_only:
            return unflatten(list(results), state)
        if is_one_tensor:
            ys = results[0]
        elif is_flat_tuple:
            ys = tuple(results[:count])
        else:
            ys = unflatten(list(results[:count]), outputs)
        return (ys, unflatten(list(results[count:]), state)) if return_final else ys

    return put
