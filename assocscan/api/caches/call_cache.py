"""Makes prepared calls of `associative_scan` and `reduce`, so that one with the same flags and the
same metadata of its tensors skips all checks (`runtime.prepared.prepared_call`).

Reductions have a cache beside that of the scans of an operator; their results are the final carries
as the kernels write them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...engines.base.executable import Executable
from ...engines.base.scan_spec import ScanSpec
from ...errors import BackendError
from ...pytrees import flatten, unflatten
from ...runtime import executable_cache as executables
from ...runtime.generated_gradient import GeneratedGradient
from ...runtime.prepared.backward_lists import commands_on
from ...runtime.prepared.prepared_call import CacheEntry, Gradient, PreparedCall
from ...runtime.scan_call import ScanCall
from ...runtime.vectors.recomputed_gradient import RecomputedGradient
from .converted_arguments import AfterConversion, ConvertedGradient, after_conversion


def cache_call(
    entry: CacheEntry,
    call: ScanCall,
    backend: str,
    spec: ScanSpec[Any],
    scan: GeneratedGradient | RecomputedGradient | None,
) -> None:
    """Fill the entry of a call that was run. Where `bind` converted `init` or `offsets`, the
    prepared call converts them too."""
    tensors, init = entry.tensors, call.init or []
    if call.offsets is not None and reads_offsets(call):
        return
    packed = []
    if call.offsets is not None:  # as given, unless `bind` converted them
        packed = [tensors[-1] if tensors[-1].dtype == call.offsets.dtype else call.offsets]
    bound, first = [*call.leaves, *init, *packed], len(call.leaves)
    try:
        executable = executables.prepare(backend, spec if scan is None else scan.spec, bound)
    except BackendError:  # the scan ran; if it cannot be prepared now, it is not cached
        return
    if packed and not executable.checks_offsets:
        executable = after_check(executable, bound, spec.length)
    gradient: Gradient | None = scan
    if scan is not None:
        scan.executable = executable
    if any(a is not b for a, b in zip(bound, tensors, strict=True)):
        if isinstance(scan, RecomputedGradient) and is_repeated(tensors):
            gradient = AfterConversion(scan, bound, first)
        else:
            executable = after_conversion(executable, tensors, bound, first)
            if scan is not None:
                gradient = ConvertedGradient(scan, executable, tensors, bound, first)
    last = len(executable.outputs) + len(executable.finals)
    count = 0 if call.final_only else len(call.traced.outputs)
    finals = len(call.final)
    python_only = isinstance(scan, RecomputedGradient) and is_repeated(tensors)
    returned = (*range(count), *range(last - finals, last))
    entry.fill(PreparedCall(executable, gradient, returned, put_of(call, count), python_only))


def reads_offsets(call: ScanCall) -> bool:
    """Whether `bind` looks for empty sequences, which have no final without an identity."""
    needs_identity = call.return_final and call.init is None
    return needs_identity and call.traced.identity is None and call.leaves[0].device.type == "cpu"


def after_check(scan: Executable, tensors: Sequence[torch.Tensor], length: int) -> Executable:
    """The list that checks the offsets, the last of the tensors, and scans."""
    commands, last = commands_on(tensors, scan.spec.device), len(tensors) - 1
    commands.check_offsets(last, length)
    outputs, finals = commands.inline(scan, range(len(tensors)))
    return commands.build(outputs, finals, lambda: scan.plan)


def is_repeated(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether `expand` may have made one of the tensors: what its gradient is summed along is seen
    in Python only (`runtime.vectors.recomputed_gradient`)."""
    return any(
        t.requires_grad and n > 1 and s == 0
        for t in tensors for n, s in zip(t.shape, t.stride(), strict=True)
    )  # fmt: skip


def put_of(call: ScanCall, count: int) -> Callable[[Sequence[Any]], Any]:
    """What makes the result of a call of its `count` outputs and its finals."""
    outputs, state = call.traced.output_spec, call.final_spec
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
