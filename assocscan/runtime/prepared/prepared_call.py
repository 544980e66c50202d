"""`PreparedCall`: a call as it is remembered, the key under which it is kept, and where.

A call that was made before skips all checks: its list of commands runs, in C++ if the runner is
there. Whoever makes such calls (`associative_scan`, `reduce`, a function that scans views of its
tensors) asks `place_of` where the call is kept, and builds a `PreparedCall` where there is none.
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
from ..autograd import backward_of_node
from ..native import runner

Key = tuple[Any, ...]
PLAIN = (torch.Tensor, torch.nn.Parameter)


def tensor_key(tensors: Sequence[MaybeTensor], with_grad: bool) -> Key | None:
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


def gathered(tree: Any, leaves: list[Any]) -> Any:
    """Append the leaves of nested tuples to `leaves` and return the structure.

    Other containers count as leaves, and a call with one is not kept: the entries of a dictionary,
    for instance, have no fixed order.
    """
    if type(tree) is tuple:
        return tuple([gathered(part, leaves) for part in tree])
    leaves.append(tree)
    return None


class Gradient(Protocol):
    """The argument of the autograd function, as a kept call has it.

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
    answered: whether the C++ runner may answer such calls.
    """

    def __init__(
        self,
        executable: Executable,
        gradient: Gradient | None,
        returned: Sequence[int],
        put: Callable[[Sequence[Any]], Any],
        answered: bool = True,
    ) -> None:
        self.executable, self.gradient = executable, gradient
        self.returned, self.put, self.answered = returned, put, answered
        self.told: Any = None  # the version of the executable that the runner knows

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Any:
        results: Sequence[torch.Tensor]
        if self.gradient is None:
            outputs, finals = runner.run(self.executable, tensors)
            results = outputs + finals
        else:
            results = self.gradient.results(tensors)
        return self.put([results[k] for k in self.returned])


class Place:
    """Where a call is kept: among the calls of its function, by its key.

    arguments: xs, axis, reverse, inclusive, init, return_final, backend, offsets; as the runner
        takes them.
    tensors: those of xs and init, and offsets if there are any.
    """

    def __init__(
        self, calls: Calls, key: Key, arguments: tuple[Any, ...], tensors: tuple[Any, ...]
    ) -> None:
        self.calls, self.key, self.arguments, self.tensors = calls, key, arguments, tensors

    def again(self) -> Any:
        """The result of the call if it is kept, else `runner.MISS`; also where it cannot run now
        and the caller has named no backend. The runner answers the next one."""
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
            runner.teach(self.calls, self.arguments, prepared, backward_of_node)
        return result

    def keep(self, prepared: PreparedCall | None) -> None:
        """Keep the call; None: such calls are not prepared."""
        self.calls.keep(self.key, prepared)


def place_of(
    calls: Calls, xs: Any, axis: Any, reverse: bool, inclusive: bool, init: Any,
    return_final: bool, backend: str, offsets: Any = None,
) -> Place | None:  # fmt: skip
    """Where this call is kept; None for calls that are not: arguments of other kinds, a forced tile
    or mode, and where something looks at operations. Offsets are int64 or int32,
    contiguous, on the device of the tensors."""
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
    return Place(calls, key, arguments, tensors)
