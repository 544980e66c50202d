"""The call cache: a call with the metadata of an earlier one skips all checks.

At small sizes a call takes the time of its Python code. The key is made of the flags and of the
structure, shapes, strides, dtypes, devices and alignments of the tensors; each Monoid has its own
cache. The entry is the executable or, where a gradient is needed, the argument of the autograd
function `Scan`, which holds the executable. Calls with offsets are not cached. Reductions are kept
beside the scans of an operator, where their results are the final carries as the kernels write
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...caching.bounded import BoundedCache
from ...engines.base import forced_choices as overrides
from ...engines.base.executable import Executable
from ...engines.base.scan_spec import ScanSpec
from ...errors import BackendError
from ...monoids.monoid import MAX_CALLS, Monoid
from ...pytrees import flatten, unflatten
from ...runtime import executable_cache as executables
from ...runtime.autograd import Scan
from ...runtime.call_keys import tensor_key
from ...runtime.generated_gradient import GeneratedGradient
from ...runtime.native import runner
from ...runtime.native.backward import backward
from ...runtime.native.programs import numbers_of, program_of, structure_of
from ...runtime.scan_call import ScanCall
from ...runtime.vectors.recomputed_gradient import RecomputedGradient

Key = tuple[Any, ...]
NODE = "ScanBackward"  # the name of the C++ runner's autograd node


def lookup(
    op: Any, xs: Any, axis: int, reverse: bool, inclusive: bool, init: Any, return_final: bool,
    backend: str, is_reduction: bool = False,
) -> tuple[Key | None, Callable[[], Any] | None]:  # fmt: skip
    """The key of a call, None where such calls are not cached; and a function that runs the cached
    call, None where there is none."""
    if not isinstance(op, Monoid) or type(axis) is not int:
        return None, None
    keeper = reductions_of(op) if is_reduction else op
    if overrides.generation:  # a tile or mode is forced: bypass the cache
        return None, None
    found: list[Any] = []
    structure = gathered(xs, found), init is not None and (gathered(init, found),)
    tensors = tuple(found)
    parts = tensor_key(tensors, torch.is_grad_enabled())
    if parts is None:
        return None, None
    key = (structure, axis, reverse, inclusive, return_final, backend, torch.get_default_dtype(),
           torch.get_num_threads(), parts)  # fmt: skip
    known = keeper.calls.get(key)
    if known is None:
        return key, None
    arguments = xs, axis, reverse, inclusive, init, return_final, backend
    return key, lambda: again(keeper, arguments, known, tensors)


def reductions_of(op: Monoid) -> runner.HotFunction:
    """What keeps the reductions of an operator, as the operator itself keeps its scans."""
    if op.reductions is None:
        op.reductions = runner.HotFunction(BoundedCache(MAX_CALLS))
    found: runner.HotFunction = op.reductions
    return found


def again(
    keeper: Monoid | runner.HotFunction,
    arguments: tuple[Any, ...],
    known: CachedCall | CachedGradient,
    tensors: tuple[torch.Tensor, ...],
) -> Any:
    """Run a cached call, and tell the C++ runner about it."""
    result = known(tensors)
    if runner.module is None:
        runner.start(is_first=False)
    elif known.told != known.executable.version:
        known.told = known.executable.version
        tell_runner(keeper, arguments, known, tensors)
    return result


def is_repeated(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether `expand` may have made one of the tensors: what its gradient is summed along is seen
    in Python only (`runtime.vectors.recomputed_gradient`)."""
    return any(
        t.requires_grad and n > 1 and s == 0
        for t in tensors for n, s in zip(t.shape, t.stride(), strict=True)
    )  # fmt: skip


def tell_runner(
    keeper: Monoid | runner.HotFunction,
    arguments: tuple[Any, ...],
    known: CachedCall | CachedGradient,
    tensors: Sequence[torch.Tensor],
) -> None:
    """Have the C++ runner answer such calls from now on, if their result is made of tuples."""
    executable, form = known.executable, known.form
    program = program_of(runner.module, executable)
    if program is None:
        return
    last = len(executable.outputs) + len(executable.finals)
    outputs: list[Any] = list(range(form.count))
    finals: list[Any] = list(range(last - form.finals, last))
    numbers = form.put(outputs, finals)
    structure = structure_of(numbers)
    if structure is None:
        return
    gradient = None
    if isinstance(known, CachedGradient):
        scan = known.scan
        if isinstance(scan, GeneratedGradient):
            reads = tuple(scan.reads)
            saved = tuple([scan.output_of_state[k] for k in scan.states])
        elif is_repeated(tensors):
            return
        else:
            reads, saved = (True,) * len(tensors), scan.saved_results
        gradient = scan, backward, reads, saved, tuple(scan.integers), NODE
    if keeper.hot is None:
        keeper.hot = runner.module.new_calls()
    dropped = runner.module.keep(
        keeper.hot, *arguments, program, gradient, structure, tuple(numbers_of(numbers))
    )
    if dropped:  # calls that were told before have to be told again
        keeper.calls.clear()


def gathered(tree: Any, leaves: list[Any]) -> Any:
    """Append the leaves of nested tuples to `leaves` and return the structure.

    Other containers count as leaves, and a call with one is not cached: the entries of a
    dictionary, for instance, have no fixed order.
    """
    if type(tree) is tuple:
        return tuple([gathered(part, leaves) for part in tree])
    leaves.append(tree)
    return None


def remember(
    key: Key,
    call: ScanCall,
    init: Any,
    backend: str,
    spec: ScanSpec[Any],
    scan: GeneratedGradient | RecomputedGradient | None,
) -> None:
    """Keep a call that was run, if `bind` left `init` as the caller gave it.

    A cached call passes the caller's tensors to the executable as they are. Where `bind` made other
    tensors of `init` (converted, expanded or reordered it), the call is not kept.
    """
    given: list[Any] = []
    if init is not None:
        gathered(init, given)
    if any(a is not b for a, b in zip(call.init or (), given, strict=True)):
        return
    runner.start(is_first=True)
    tensors = [*call.leaves, *given]
    assert isinstance(call.operator, Monoid)
    keeper = reductions_of(call.operator) if call.final_only else call.operator
    form = ResultForm(call)
    try:
        executable = executables.prepare(backend, spec if scan is None else scan.spec, tensors)
    except BackendError:  # the scan ran; if it cannot be prepared again now, it is not cached
        return
    if scan is None:
        keeper.calls.keep(key, CachedCall(executable, form))
    else:
        scan.executable = executable
        keeper.calls.keep(key, CachedGradient(scan, form))


class ResultForm:
    """The structure of a result, and `put`, which builds it from outputs and finals."""

    def __init__(self, call: ScanCall) -> None:
        self.outputs, self.state = call.traced.output_spec, call.state_spec
        self.return_final, self.final_only = call.return_final, call.final_only
        self.count = 0 if call.final_only else len(call.traced.outputs)
        self.finals = len(call.traced.state) if call.return_final else 0
        # The two commonest structures, a tensor and a flat tuple, do not need `unflatten`.
        leaf = call.leaves[0]
        self.is_one_tensor = self.outputs == flatten(leaf)[1]
        self.is_flat_tuple = self.outputs == flatten((leaf,) * self.count)[1]

    def put(self, outputs: Sequence[torch.Tensor], finals: Sequence[torch.Tensor]) -> Any:
        ys: Any
        if self.final_only:
            return unflatten(list(finals), self.state)
        if self.is_one_tensor:
            ys = outputs[0]
        elif self.is_flat_tuple:
            ys = tuple(outputs)
        else:
            ys = unflatten(list(outputs), self.outputs)
        return (ys, unflatten(list(finals), self.state)) if self.return_final else ys


class CachedCall:
    """A cached call without gradients: an executable."""

    def __init__(self, executable: Executable, form: ResultForm) -> None:
        self.executable, self.form = executable, form
        self.told: Any = None  # the version of the executable that the C++ runner knows

    def __call__(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        outputs, finals = self.executable.run(tensors)
        return self.form.put(outputs, finals)


class CachedGradient:
    """A cached call with gradients: the argument of the autograd function `Scan`."""

    def __init__(self, scan: GeneratedGradient | RecomputedGradient, form: ResultForm) -> None:
        assert scan.executable is not None
        self.scan, self.form, self.executable = scan, form, scan.executable
        self.told: Any = None

    def __call__(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        scan, given = self.scan, tensors
        if isinstance(scan, RecomputedGradient):
            scan, given = scan.of_call(tensors)  # type: ignore[assignment]
        results = Scan.apply(scan, *given)
        form = self.form
        return form.put(results[: form.count], results[len(results) - form.finals :])
