"""Makes prepared calls of `associative_scan` and `reduce`, so that one with the same flags and the
same metadata of its tensors skips all checks (`runtime.prepared.prepared_call`).

Reductions have a cache beside that of the scans of an operator; their results are the final
carries, in the dtypes of the state where kernels write wider ones (of 16 bits).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...engines.base.executable import Executable, converted
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
    """Fill the entry of a call that was run."""
    prepared = prepared_call(entry, call, backend, spec, scan)
    if prepared is not None:
        entry.fill(prepared)


def converted_results(
    entry: CacheEntry,
    call: ScanCall,
    backend: str,
    spec: ScanSpec[Any],
    scan: GeneratedGradient | RecomputedGradient,
) -> tuple[list[torch.Tensor], list[torch.Tensor]] | None:
    """Outputs and finals of a first call whose `init` or `offsets` `bind` converted, run as its
    repetitions will be, and its entry is filled; None for other calls. What is saved for the
    gradient is then the same at each call, as `torch.utils.checkpoint` wants it."""
    if is_same(bound_tensors(entry, call), entry.tensors):
        return None
    prepared = prepared_call(entry, call, backend, spec, scan)
    if prepared is None or prepared.gradient is None:
        return None
    results = prepared.gradient.results(entry.tensors)
    entry.fill(prepared)
    found = [results[k] for k in prepared.returned]
    count = len(found) - len(call.final)
    return found[:count], found[count:]


def bound_tensors(entry: CacheEntry, call: ScanCall) -> list[torch.Tensor]:
    """The tensors of a call as `bind` made them of the entry's."""
    tensors, packed = entry.tensors, []
    if call.offsets is not None:  # as given, unless `bind` converted them
        packed = [tensors[-1] if tensors[-1].dtype == call.offsets.dtype else call.offsets]
    return [*call.leaves, *(call.init or []), *packed]


def is_same(bound: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> bool:
    return all(a is b for a, b in zip(bound, tensors, strict=True))


def prepared_call(
    entry: CacheEntry,
    call: ScanCall,
    backend: str,
    spec: ScanSpec[Any],
    scan: GeneratedGradient | RecomputedGradient | None,
) -> PreparedCall | None:
    """What repeats a call; None where it cannot be prepared. Where `bind` converted `init` or
    `offsets`, the prepared call converts them too."""
    tensors = entry.tensors
    if call.offsets is not None and reads_offsets(call):
        return None
    bound, first = bound_tensors(entry, call), len(call.leaves)
    try:
        executable = executables.prepare(backend, spec if scan is None else scan.spec, bound)
    except BackendError:  # such a call is not cached; the scan itself may run
        return None
    if call.offsets is not None and not executable.checks_offsets:
        executable = after_check(executable, bound, spec.length)
    gradient: Gradient | None = scan
    if scan is not None:
        scan.executable = executable
    if not is_same(bound, tensors):
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
    returned, put = (*range(count), *range(last - finals, last)), put_of(call, count)
    if call.final_only and not are_final_dtypes(call):
        kinds = [leaf.dtype for leaf in call.traced.state]
        if scan is None:
            executable = finals_in(executable, tensors, kinds)
        else:  # autograd converts cotangents
            put, python_only = put_in(kinds, put), True
    return PreparedCall(executable, gradient, returned, put, python_only)


def are_final_dtypes(call: ScanCall) -> bool:
    """Whether a reduction returns final carries as kernels write them: for 16-bit states these are
    float32, and are converted."""
    return all(leaf.accumulator == leaf.dtype for leaf in call.traced.state)


def finals_in(
    scan: Executable, tensors: Sequence[torch.Tensor], kinds: Sequence[torch.dtype]
) -> Executable:
    """The list that scans and converts the finals to these dtypes."""
    commands = commands_on(tensors, scan.spec.device)
    outputs, finals = commands.inline(scan, range(len(tensors)))
    slots = [converted(commands, k, kind) for k, kind in zip(finals, kinds, strict=True)]
    return commands.build(outputs, slots, lambda: scan.plan)


def put_in(
    kinds: Sequence[torch.dtype], put: Callable[[Sequence[Any]], Any]
) -> Callable[[Sequence[Any]], Any]:
    """`put` of results in these dtypes."""
    return lambda results: put([t.to(kind) for t, kind in zip(results, kinds, strict=True)])


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
