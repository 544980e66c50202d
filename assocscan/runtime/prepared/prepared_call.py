"""`PreparedCall`: the command lists of a call, its key, and its entry in the call cache.

A repeated call skips all checks: its list of commands runs, in C++ if the runner is there.
`associative_scan`, `reduce`, `windowed` and functions that scan views of their tensors ask
`entry_of` for the entry of a call, run it, and fill it with a `PreparedCall` where it is empty.

    prepared call    the command lists of a call, forward and backward, and the form of its result
    call cache       the prepared calls of one function, by key (`caching.bounded.Calls`)
    entry            a key in a call cache, with a prepared call or none yet
    insert           put a value into a cache
    register         insert a prepared call into the cache of the C++ runner too
    repeated call    one whose key has a prepared call
    miss             there is no prepared call for the key, or it cannot run now
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ...caching.bounded import Calls
from ...engines.base import forced_choices as overrides
from ...engines.base.executable import Executable
from ...engines.base.scan_spec import ALIGNMENTS, MaybeTensor
from ...errors import BackendError
from ...torch_state import needs_dispatcher
from ..autograd import backward_in_python
from ..native import runner

Key = tuple[Any, ...]
PLAIN = (torch.Tensor, torch.nn.Parameter)


def tensor_key(tensors: Sequence[MaybeTensor], with_grad: bool) -> Key | None:
    """Of each tensor the dtype, shape, strides, device and alignment; with_grad: and whether it
    requires a gradient. None where one has no memory of its own; and under torch.func, forward
    mode, a dispatch mode or a tracer (`needs_dispatcher`).
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


def gathered(tree: Any, leaves: list[Any]) -> Any:
    """Append the leaves of nested tuples to `leaves` and return the structure.

    Other containers count as leaves, and a call with one is not cached: the items of a dictionary,
    for instance, have no fixed order.
    """
    if type(tree) is tuple:
        return tuple([gathered(part, leaves) for part in tree])
    leaves.append(tree)
    return None


class Gradient(Protocol):
    """The gradient of a prepared call: the argument of the autograd function.

    reads: which tensors are saved for the backward pass. saved_results: which results are saved
    after them. integers: the results that have no derivative. backward: the backward lists.
    """

    @property
    def reads(self) -> Sequence[bool]: ...
    @property
    def saved_results(self) -> Sequence[int]: ...
    @property
    def integers(self) -> Sequence[int]: ...
    @property
    def backward(self) -> Any: ...
    def results(self, tensors: Sequence[Any]) -> Sequence[torch.Tensor]:
        """All results of the executable, connected to the autograd graph."""


class PreparedCall:
    """A call: its forward list, its gradient and the form of its results.

    executable: from the tensors of the call, in their order, to all results.
    gradient: None where no gradient is wanted. It holds the backward lists.
    returned: the numbers of the results that the caller gets.
    put: from these results to what the caller gets.
    python_only: whether the C++ runner may not run it.
    """

    def __init__(
        self,
        executable: Executable,
        gradient: Gradient | None,
        returned: Sequence[int],
        put: Callable[[Sequence[Any]], Any],
        python_only: bool = False,
    ) -> None:
        self.executable, self.gradient = executable, gradient
        self.returned, self.put, self.python_only = returned, put, python_only
        self.registered: Any = None  # the version of the executable that the C++ runner has

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Any:
        results: Sequence[torch.Tensor]
        if self.gradient is None:
            outputs, finals = runner.run(self.executable, tensors)
            results = outputs + finals
        else:
            results = self.gradient.results(tensors)
        return self.put([results[k] for k in self.returned])


class CacheEntry:
    """The entry of a call in the call cache of its function; it may be empty.

    arguments: xs, axis, reverse, inclusive, init, return_final, backend, offsets; as the runner
        takes them.
    tensors: those of xs and init, and offsets if there are any.
    """

    def __init__(
        self, calls: Calls, key: Key, arguments: tuple[Any, ...], tensors: tuple[Any, ...]
    ) -> None:
        self.calls, self.key, self.arguments, self.tensors = calls, key, arguments, tensors

    def run(self) -> Any:
        """The result of the prepared call, and it is registered with the C++ runner. `runner.MISS`
        where the entry is empty, or the call cannot run now and the caller named no backend."""
        prepared: PreparedCall | None = self.calls.get(self.key)
        if prepared is None:
            return runner.MISS
        try:
            result = prepared(self.tensors)
        except BackendError:
            if self.arguments[6] != "auto":
                raise
            return runner.MISS
        if runner.module is not None:
            runner.register(self.calls, self.arguments, prepared, backward_in_python)
        return result

    def fill(self, prepared: PreparedCall | None) -> None:
        """Insert the prepared call; None: such calls cannot be prepared."""
        self.calls.insert(self.key, prepared)


def entry_of(
    calls: Calls, xs: Any, axis: Any, reverse: bool, inclusive: bool, init: Any,
    return_final: bool, backend: str, offsets: Any = None,
) -> CacheEntry | None:  # fmt: skip
    """The entry of a call; None for calls that are not cached: arguments of other kinds, offsets
    that are not contiguous or on another device than the tensors, a forced tile or mode; and for
    all under torch.func, forward mode, a dispatch mode or a tracer (`needs_dispatcher`)."""
    if overrides.generation or type(axis) is not int:
        return None
    found: list[Any] = []
    structure = gathered(xs, found), init is not None and (gathered(init, found),), offsets is None
    if offsets is not None:
        if type(offsets) is not torch.Tensor or not found or type(found[0]) not in PLAIN:
            return None
        if offsets.dtype not in (torch.int64, torch.int32) or offsets.device != found[0].device:
            return None
        if offsets.dim() != 1 or not offsets.is_contiguous():
            return None
        found.append(offsets)
    tensors = tuple(found)
    kinds = tensor_key(tensors, torch.is_grad_enabled())
    if kinds is None:
        return None
    key = (structure, axis, reverse, inclusive, return_final, backend, torch.get_default_dtype(),
           torch.get_num_threads(), kinds)  # fmt: skip
    arguments = xs, axis, reverse, inclusive, init, return_final, backend, offsets
    return CacheEntry(calls, key, arguments, tensors)
