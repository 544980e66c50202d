"""The calls of functions that scan views of their tensors, such as `selective_scan`: kept by the
metadata of the tensors, and told to the C++ runner when they are repeated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...caching.bounded import BoundedCache
from ...engines.base import forced_choices as overrides
from ...errors import AssocScanError, BackendError
from ...program.vectors.vector_operator import VectorOperator
from ...runtime import backends
from ...runtime.call_keys import tensor_key
from ...runtime.native import runner
from ...runtime.native.backward import backward
from ...runtime.native.programs import program_of
from ..associative_scan import operator_of
from ..bind_arguments import bind
from .call_cache import NODE
from .scan_of_views import Options, Plain, ScanOfViews, Views

MOST = 512  # as many calls as the runner keeps


class FunctionCache:
    """The calls of one function.

    options: all arguments that are no tensors, and which tensors there are.
    plain: the function by `associative_scan` and torch's views: (options, tensors) → results.
    views: what it scans: (options, tensors) → Views.
    """

    def __init__(
        self,
        plain: Plain,
        views: Callable[[Options, Sequence[Tensor]], Views],
    ) -> None:
        self.plain, self.views = plain, views
        self.hot: dict[Options, runner.HotFunction] = {}
        self.known: BoundedCache[Any, ScanOfViews | None] = BoundedCache(MOST)

    def again(self, options: Options, tensors: tuple[Any, ...]) -> Any:
        """The result of a call that the runner knows, or `runner.MISS`: a tensor, or a tuple where
        the function has several results. The arguments need not have been checked."""
        try:
            function = self.hot.get(options)
        except TypeError:  # an option that cannot be hashed
            return runner.MISS
        if function is None or runner.call is None:
            return runner.MISS
        return runner.call(function, tensors, *NO_FLAGS)

    def run(self, options: Options, tensors: tuple[Tensor, ...]) -> Sequence[Tensor] | None:
        """The results of a call, or None for one that `plain` has to run: because it does not scan
        vectors, because there is no kernel for it, or because something looks at operations."""
        try:
            scan = self.scan_for(options, tensors)
        except AssocScanError:  # not kept: a kernel that cannot be made now may be made later
            return None  # `plain` warns of it or raises it
        try:
            return None if scan is None else scan.run(tensors)
        except BackendError:
            if scan is None or scan.is_named:
                raise
            return None

    def scan_for(self, options: Options, tensors: tuple[Tensor, ...]) -> ScanOfViews | None:
        """The prepared call, kept or new; None for `plain`. From its second time on the runner is
        told of it."""
        kinds = tensor_key(tensors, torch.is_grad_enabled())
        if kinds is None:
            return None
        if overrides.generation:  # a tile or mode is forced
            return self.prepared(options, tensors)
        key = options, torch.get_default_dtype(), torch.get_num_threads(), kinds
        try:
            is_known = key in self.known
        except TypeError:
            return None
        if not is_known:
            runner.start(is_first=True)
            return self.known.keep(key, self.prepared(options, tensors))
        scan = self.known.get(key)
        if runner.module is None:
            runner.start(is_first=False)
        elif scan is not None:
            self.tell(scan, options, tensors)
        return scan

    def prepared(self, options: Options, tensors: Sequence[Tensor]) -> ScanOfViews | None:
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
        return ScanOfViews(self.plain, options, views, spec, scanned, tensors)

    def tell(self, scan: ScanOfViews, options: Options, tensors: tuple[Tensor, ...]) -> None:
        """Have the runner answer such calls from now on."""
        executable = scan.executable
        if scan.told == (executable, executable.version):
            return
        scan.told = executable, executable.version
        program = program_of(runner.module, executable)
        if program is None:
            return
        if len(self.hot) >= MOST:
            self.hot.clear()
            self.known.clear()
        function = self.hot.setdefault(options, runner.HotFunction())
        if function.hot is None:
            function.hot = runner.module.new_calls()
        gradient = None
        if scan.inner is not None:
            reads = (True,) * len(tensors)
            gradient = scan, backward, reads, scan.carries, scan.integers, NODE
        count = len(scan.returned)
        dropped = runner.module.keep(
            function.hot, tensors, *NO_FLAGS, program, gradient,
            0 if count == 1 else (0,) * count, scan.returned,
        )  # fmt: skip
        if dropped:  # calls that were told before have to be told again
            self.known.clear()


# The runner's call takes the arguments of `associative_scan`. Those of a function are in its
# options, and these fill the places.
NO_FLAGS = (0, False, True, None, False, "auto")  # axis … backend


def begins_with(whole: Tensor, t: Tensor) -> bool:
    """Whether a tensor that was made of `whole` is a view, no copy, and starts at its first
    element: a command repeats the shape and the strides of a view, not its offset."""
    return t.dtype == whole.dtype and t.data_ptr() == whole.data_ptr()
