"""Functions that scan views of their tensors, such as `selective_scan`, as one operation.

Making the views, and the views of their gradients, takes longer in Python than small kernels. So
such a call is one list of commands: the views, the scan, the views of its results; with one
autograd node on the function's own tensors, whose backward pass is one list too. Calls are kept by
the metadata of their tensors, and the C++ runner answers those that were made before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...caching.bounded import BoundedCache
from ...engines.base import forced_choices as overrides
from ...engines.base.commands import Misaligned, Slot, SlotArgument
from ...engines.base.executable import CommandList, Executable, FunctionSpec
from ...engines.base.scan_spec import MaybeTensor, ScanSpec, TensorSpec
from ...errors import AssocScanError, BackendError
from ...monoids.monoid import Monoid
from ...program.vectors.vector_operator import VectorOperator
from ...runtime import backends
from ...runtime import executable_cache as executables
from ...runtime.autograd import Scan
from ...runtime.backward_cache import MAX_BACKWARD, CachedBackward, layout_key
from ...runtime.batched_gradients import one_by_one
from ...runtime.native import runner
from ...runtime.native.backward import backward
from ...runtime.native.programs import program_of
from ...runtime.operation_arguments import Dispatch
from ...runtime.scan_call import ScanCall
from ...runtime.vectors.recomputed_gradient import RecomputedGradient
from ..associative_scan import operator_of
from ..bind_arguments import bind
from ..eager_path import separate
from .call_cache import metadata

aten = torch.ops.aten
MOST = 512  # as many calls as the runner keeps
Options = Any  # hashable
Pair = tuple[Slot, Tensor]
Function = Callable[[Options, Sequence[Tensor]], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Views:
    """What a function scans: the arguments of `associative_scan`, whose leaves are views of the
    function's tensors. The first of these are the tensors of xs, in their order.

    sources: for each leaf of init, and then for offsets, the number of the function's tensor; None
        for a constant.
    outputs, finals: the results of the function: which outputs and which finals of the scan, and
        their shapes there.
    """

    op: Monoid
    xs: tuple[Tensor, ...]
    axis: int
    reverse: bool
    init: tuple[Tensor, ...] | None
    offsets: Tensor | None
    backend: str
    sources: tuple[int | None, ...]
    outputs: tuple[tuple[int, tuple[int, ...]], ...]
    finals: tuple[tuple[int, tuple[int, ...]], ...]


class FunctionCache:
    """The calls of one function.

    options: all arguments that are no tensors, and which tensors there are; hashable.
    plain: the function by `associative_scan` and torch's views: (options, tensors) → results.
    views: what it scans.
    """

    def __init__(
        self, name: str, plain: Function, views: Callable[[Options, Sequence[Tensor]], Views]
    ) -> None:
        self.name, self.plain, self.views = name, plain, views
        self.hot: dict[Options, runner.HotFunction] = {}
        self.known: BoundedCache[Any, ScanOfViews | None] = BoundedCache(MOST)

    def again(self, options: Options, tensors: tuple[Any, ...]) -> Any:
        """The result of a call that the runner knows, or `runner.MISS`. A function of one result
        gives that tensor, others a tuple. Nothing is checked before."""
        try:
            function = self.hot.get(options)
        except TypeError:  # an argument that the function refuses
            return runner.MISS
        if function is None or runner.call is None:
            return runner.MISS
        return runner.call(function, tensors, 0, False, True, None, False, "auto")

    def run(self, options: Options, tensors: tuple[Tensor, ...]) -> Sequence[Tensor] | None:
        """The results of a call; None where it has to be run as `plain`: it does not scan vectors,
        no kernel can be made, or something looks at operations. Raises the errors of `views`."""
        kinds = metadata(tensors)
        if kinds is None:
            return None
        key = options, torch.get_default_dtype(), torch.get_num_threads(), kinds
        if overrides.generation:
            scan = self.prepared(options, tensors)
        elif key not in self.known:
            scan = self.known.keep(key, self.prepared(options, tensors))
            runner.start(is_first=True)
        else:
            scan = self.known[key]
            if runner.module is None:
                runner.start(is_first=False)
            elif scan is not None:
                self.tell(scan, options, tensors)
        if scan is None:
            return None
        if scan.is_packed and not self.accepts(options, tensors):
            return None
        try:
            return scan.run(tensors)
        except Misaligned:
            return None

    def accepts(self, options: Options, tensors: Sequence[Tensor]) -> bool:
        """Whether the offsets are valid, which their metadata does not say."""
        try:
            self.bound(self.views(options, [t.detach() for t in tensors]))
        except AssocScanError:
            return False
        return True

    def bound(self, views: Views) -> ScanCall:
        return bind(
            views.op, views.xs, views.axis, views.reverse, True, views.init, bool(views.finals),
            views.offsets,
        )  # fmt: skip

    def prepared(self, options: Options, tensors: Sequence[Tensor]) -> ScanOfViews | None:
        """A call, prepared; None where `plain` runs it, or gives the error."""
        views = self.views(options, [t.detach() for t in tensors])
        if views.backend not in backends.BACKENDS or views.backend == "eager":
            return None
        try:
            call = self.bound(views)
            if backends.why_not(call, views.backend) is not None:
                return None
            spec, scanned = call.scan(operator_of(call, views.backend))
            whole = [t for t in scanned if t is not None]
            sources = *range(len(views.xs)), *views.sources
            is_same = all(k is None or is_view(t, tensors[k])
                          for t, k in zip(whole, sources, strict=True))  # fmt: skip
            if not isinstance(spec.operator, VectorOperator) or not is_same:
                return None
            return ScanOfViews(self, options, views, spec, whole, tensors)
        except AssocScanError:
            return None

    def tell(self, scan: ScanOfViews, options: Options, tensors: tuple[Tensor, ...]) -> None:
        """Have the runner answer such calls from now on."""
        executable = scan.executable
        if scan.told == executable.version or scan.is_packed:
            return
        scan.told = executable.version
        program = program_of(runner.module, executable)
        if program is None:
            return
        function = self.hot.get(options) or runner.HotFunction()
        if function.hot is None:
            function.hot = runner.module.new_calls()
        gradient = None
        if scan.inner is not None:
            reads = (True,) * len(tensors)
            gradient = scan, backward, reads, scan.saved_results, scan.integers, self.name
        count = len(scan.returned)
        dropped = runner.module.keep(
            function.hot, tensors, 0, False, True, None, False, "auto", program, gradient,
            0 if count == 1 else (0,) * count, scan.returned,
        )  # fmt: skip
        if dropped:  # calls that were told before have to be told again
            self.known.clear()
        if len(self.hot) >= MOST:
            self.hot.clear()
        self.hot[options] = function


def is_view(t: Tensor, whole: Tensor) -> bool:
    """Whether a tensor begins where another one does and has its dtype."""
    return t.dtype == whole.dtype and t.data_ptr() == whole.data_ptr() and not t.is_conj()


class GradientOfViews(RecomputedGradient):
    """The gradient of a scan of leaves that nothing else can see: they are summed along all the
    dimensions in which they are repeated.

    repeated: these dimensions for each leaf.
    """

    def __init__(
        self,
        dispatch: Dispatch,
        spec: ScanSpec[VectorOperator],
        tensors: Sequence[MaybeTensor],
        wanted: Sequence[bool],
    ) -> None:
        self.dims = [
            () if t is None else tuple(
                d for d in range(len(spec.batch)) if t.shape[d] > 1 and t.stride(d) == 0
            )
            for t in tensors[: len(spec.operator.inputs)]
        ]  # fmt: skip
        super().__init__(dispatch, spec, tensors, wanted)

    def summed_dims(self, leaf: int) -> tuple[int, ...]:
        return self.dims[leaf]


class ScanOfViews:
    """A call of a function, prepared (`runtime.autograd.Differentiable`).

    sources: for each tensor that is scanned, the number of the function's tensor of which it is a
        view; None for a constant. layouts: their shapes and strides.
    executable: from the function's tensors to its results, the saved carries after the outputs.
    returned, saved_results, integers: numbers of the executable's results: what the function
        returns, the carries, and what has no derivative.
    inner: the gradient of the scan; None where none is wanted.
    backward: the executables of backward passes.
    """

    batched = staticmethod(one_by_one)

    def __init__(
        self,
        cache: FunctionCache,
        options: Options,
        views: Views,
        spec: ScanSpec[VectorOperator],
        scanned: Sequence[Tensor],
        tensors: Sequence[Tensor],
    ) -> None:
        self.plain, self.options, self.views = cache.plain, options, views
        self.sources, self.count = (*range(len(views.xs)), *views.sources), len(tensors)
        self.is_packed = views.offsets is not None
        self.layouts = [(tuple(t.shape), t.stride()) for t in scanned]
        self.constants = {n: t for n, t in enumerate(scanned) if self.sources[n] is None}
        needs = [torch.is_grad_enabled() and t.requires_grad for t in tensors]
        self.inner: GradientOfViews | None = None
        if True in needs:
            wanted = [k is not None and needs[k] for k in self.sources]
            self.inner = GradientOfViews(Dispatch(views.backend), spec, scanned, wanted)
            spec = self.inner.spec
        self.spec = spec
        self.results: list[TensorSpec] = []  # of the scan: outputs, carries, finals
        self.executable = self.forward_executable(tensors)
        outputs, finals, carries = len(views.outputs), len(views.finals), int(True in needs)
        self.saved_results = self.integers = tuple(range(outputs, outputs + carries))
        last = range(outputs + carries, outputs + carries + finals)
        self.returned = *range(outputs), *last
        self.backward: BoundedCache[Any, CachedBackward] = BoundedCache(MAX_BACKWARD)
        self.told: Any = None  # the version of the executable that the runner knows

    def run(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The results of the function, connected to the autograd graph."""
        results = self.forward(tensors) if self.inner is None else Scan.apply(self, *tensors)
        return [results[k] for k in self.returned]

    def forward(self, tensors: Sequence[MaybeTensor]) -> list[Tensor]:
        outputs, finals = self.executable.run(tensors)
        return outputs + finals

    def saved(
        self, tensors: Sequence[MaybeTensor], results: Sequence[Tensor]
    ) -> Sequence[MaybeTensor]:
        return [*tensors, *(results[k] for k in self.saved_results)]

    def forward_executable(self, tensors: Sequence[Tensor]) -> Executable:
        views, commands = self.views, self.command_list(tensors)
        slots, scanned = zip(*self.scanned(commands, tensors), strict=True)
        inner = executables.prepare(views.backend, self.spec, scanned)
        outputs, finals = commands.inline(inner, slots)
        self.results = [commands.spec_of(slot) for slot in (*outputs, *finals)]
        carries = outputs[len(self.spec.operator.outputs) :]
        return commands.build(
            [*(reshaped(commands, outputs[k], shape) for k, shape in views.outputs), *carries],
            [reshaped(commands, finals[k], shape) for k, shape in views.finals],
            lambda: inner.plan,
        )

    def command_list(self, tensors: Sequence[MaybeTensor]) -> CommandList:
        names = tuple(("tensor", k) for k in range(len(tensors)))
        specs = [None if t is None else TensorSpec.of(t) for t in tensors]
        return CommandList(FunctionSpec(names, self.spec.device), specs)

    def scanned(self, commands: CommandList, given: Sequence[MaybeTensor]) -> list[Pair]:
        """The slots and the tensors that are scanned; the function's tensors are given first."""
        found = []
        for n, (k, layout) in enumerate(zip(self.sources, self.layouts, strict=True)):
            if k is None:
                constant = self.constants[n]
                found.append((commands.constant(constant), constant))
            else:
                found.append(viewed(commands, given, k, *layout))
        return found

    def gradients(
        self,
        saved: Sequence[MaybeTensor],
        needed: Sequence[bool],
        cotangents: Sequence[MaybeTensor],
    ) -> Sequence[MaybeTensor]:
        """The gradient of each of the function's tensors."""
        given = (*saved, *cotangents)
        key = layout_key(needed, given)
        if key is None:
            return self.by_autograd(saved, needed, cotangents)
        try:
            known = self.backward.get(key)
            if known is None:
                made = self.backward_executable(saved, needed, cotangents)
                known = self.backward.keep(key, made)
            return known.run(given)
        except (BackendError, Misaligned):
            return self.by_autograd(saved, needed, cotangents)

    def by_autograd(
        self,
        saved: Sequence[MaybeTensor],
        needed: Sequence[bool],
        cotangents: Sequence[MaybeTensor],
    ) -> list[MaybeTensor]:
        """`gradients` by calling the function again, without this cache: they can be differentiated
        where that is wanted."""
        create_graph = torch.is_grad_enabled()
        tensors = []
        for t, n in zip(saved[: self.count], needed, strict=True):
            assert t is not None
            tensors.append(separate(t) if create_graph else t.detach().requires_grad_(bool(n)))
        with torch.enable_grad():
            results = self.plain(self.options, tensors)
        seeds = [g for k, g in enumerate(cotangents) if k not in self.saved_results]
        pairs = [(y, g) for y, g in zip(results, seeds, strict=True) if g is not None]
        found = iter(
            torch.autograd.grad(
                [y for y, _ in pairs], [t for t, n in zip(tensors, needed, strict=True) if n],
                [g for _, g in pairs], create_graph=create_graph, allow_unused=True,
            )
        )  # fmt: skip
        return [next(found) if n else None for n in needed]

    def backward_executable(
        self,
        saved: Sequence[MaybeTensor],
        needed: Sequence[bool],
        cotangents: Sequence[MaybeTensor],
    ) -> CachedBackward:
        """The backward pass, from the saved tensors and the cotangents to the gradients."""
        inner, views, given = self.inner, self.views, (*saved, *cotangents)
        assert inner is not None
        commands = self.command_list(given)
        pairs: list[Pair | None] = [*self.scanned(commands, given)]
        carries = saved[self.count]
        assert carries is not None
        pairs.append((self.count, carries))
        # A cotangent for each result of the scan, in its shape there.
        outputs = len(inner.given.operator.outputs)
        seeds: list[Pair | None] = [None] * len(self.results)
        places = [k for k, _ in views.outputs], [outputs + 1 + k for k, _ in views.finals]
        for place, n in zip((*places[0], *places[1]), self.returned, strict=True):
            g = cotangents[n]
            if g is not None:
                g = g.view(self.results[place].shape)
                k = len(saved) + n
                seeds[place] = viewed(commands, given, k, tuple(g.shape), g.stride())
        needs = [k is not None and needed[k] for k in self.sources]
        packed = [pairs.pop(len(self.sources) - 1)] if self.is_packed else []  # offsets are last
        spec, ordered = inner.backward_scan(pairs, needs, seeds)
        ordered += packed
        slots = [None if pair is None else pair[0] for pair in ordered]
        tensors = [None if pair is None else pair[1] for pair in ordered]
        executable = executables.prepare(views.backend, spec, tensors)
        found, ends = commands.inline(executable, slots)
        adjoint = spec.operator
        at = dict(zip(adjoint.wanted, found, strict=True))
        at.update({n: ends[k] for n, k in inner.gradients_at_init(adjoint, needs).items()})
        results: list[int | None] = [None] * self.count
        gradients: list[Slot] = []
        for n, slot in at.items():
            k = self.sources[n]
            t = None if k is None else given[k]
            assert k is not None and t is not None
            results[k] = len(gradients)
            gradients.append(reshaped(commands, slot, tuple(t.shape)))
        made = commands.build(gradients, [], lambda: executable.plan)
        return CachedBackward(made, [*range(len(given))], results)


def viewed(
    commands: CommandList,
    given: Sequence[MaybeTensor],
    k: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
) -> Pair:
    """The slot of a view of the tensor in slot k, and the view itself."""
    t = given[k]
    assert t is not None
    view = t.as_strided(shape, strides)
    slot = commands.torch(
        aten.as_strided.default, (SlotArgument(k), shape, strides), TensorSpec.of(view)
    )
    return slot, view


def reshaped(commands: CommandList, slot: Slot, shape: tuple[int, ...]) -> Slot:
    given = commands.spec_of(slot)
    if given.shape == shape:
        return slot
    # Its strides are those of a contiguous tensor only if it is one; nothing reads them here.
    spec = TensorSpec.dense(shape, given.dtype, given.device)
    return commands.torch(aten.reshape.default, (SlotArgument(slot), shape), spec)
