"""The prepared calls of functions that scan views of their tensors, such as `selective_scan`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...caching.bounded import MOST_CALLS, Calls
from ...errors import AssocScanError, BackendError
from ...program.vectors.vector_operator import VectorOperator
from ...runtime import backends
from ...runtime.native import runner
from ...runtime.prepared.prepared_call import PreparedCall, entry_of, tensor_key
from ..associative_scan import operator_of
from ..bind_arguments import bind
from .scan_of_views import Options, Plain, ScanOfViews, Views

# Keys of calls are made of the arguments of `associative_scan`: axis … backend. Those of a function
# are in its options, and these stand in their place.
NO_FLAGS = (0, False, True, None, False)


class FunctionCache:
    """The calls of one function, by its options.

    options: all arguments that are no tensors, and which tensors there are; the last one is the
        backend.
    plain: the function by `associative_scan` and torch's views: (options, tensors) → results.
    views: what it scans: (options, tensors) → Views.
    """

    def __init__(
        self,
        plain: Plain,
        views: Callable[[Options, Sequence[Tensor]], Views],
    ) -> None:
        self.plain, self.views = plain, views
        self.calls: dict[Options, Calls] = {}

    def run_native(self, options: Options, tensors: tuple[Any, ...]) -> Any:
        """The result of a call that the C++ runner has, or `runner.MISS`: a tensor, or a tuple
        where the function has several results. The arguments need not have been checked."""
        try:
            calls = self.calls.get(options)
        except TypeError:  # an option that cannot be hashed
            return runner.MISS
        if calls is None:
            return runner.MISS
        return runner.call(calls, tensors, *NO_FLAGS, options[-1] or "auto")

    def run(self, options: Options, tensors: tuple[Tensor, ...]) -> Any:
        """The result of a call as `run_native` gives it; `runner.MISS` for one that `plain` has to
        run: because it does not scan vectors, because there is no kernel for it, or because
        something looks at operations."""
        try:
            calls = self.calls.get(options)
        except TypeError:
            return runner.MISS
        if calls is None:
            if len(self.calls) >= MOST_CALLS:
                self.calls.clear()
            calls = self.calls.setdefault(options, Calls())
        named = options[-1] or "auto"
        entry = entry_of(calls, tensors, *NO_FLAGS, named)
        if entry is not None and entry.key in calls:
            return entry.run()
        if entry is None and tensor_key(tensors, torch.is_grad_enabled()) is None:
            return runner.MISS
        try:
            prepared = self.prepared(options, tensors)
        except AssocScanError:  # not cached: a kernel that cannot be made now may be made later
            return runner.MISS  # `plain` warns of it or raises it
        if entry is not None:
            entry.fill(prepared)
        try:
            return runner.MISS if prepared is None else prepared(tensors)
        except BackendError:
            if named != "auto":
                raise
            return runner.MISS

    def prepared(self, options: Options, tensors: Sequence[Tensor]) -> PreparedCall | None:
        """A call for this cache; None where `plain` has to run it, now and later. Raises the errors
        of `associative_scan`."""
        views = self.views(options, [t.detach() for t in tensors])
        if views.backend not in backends.BACKENDS or views.backend == "eager":
            return None
        call = bind(
            views.op, views.xs, views.axis, views.reverse, True, views.init, bool(views.finals),
            None,
        )  # fmt: skip
        if backends.why_not(call, views.backend) is not None:
            return None
        spec, given = call.scan(operator_of(call, views.backend))
        scanned = [t for t in given if t is not None]
        if not isinstance(spec.operator, VectorOperator) or any(
            k is not None and not begins_with(tensors[k], t)
            for t, k in zip(scanned, views.sources, strict=True)
        ):
            return None
        scan = ScanOfViews(self.plain, options, views, spec, scanned, tensors)
        gradient = None if scan.inner is None else scan
        return PreparedCall(scan.executable, gradient, scan.returned, result_of)


def result_of(results: Sequence[Any]) -> Any:
    return results[0] if len(results) == 1 else tuple(results)


def begins_with(whole: Tensor, t: Tensor) -> bool:
    """Whether a tensor that was made of `whole` is a view, no copy, and starts at its first
    element: a command repeats the shape and the strides of a view, not its offset."""
    return t.dtype == whole.dtype and t.data_ptr() == whole.data_ptr()
