"""Functions that scan views of their tensors, such as `selective_scan`, as one operation.

Making the views, and the views of their gradients, takes longer in Python than small kernels. So
such a call is one list of commands: the views, the scan, the views of its results; with one
autograd node on the function's own tensors, whose backward pass is one list too. Calls are kept by
the metadata of their tensors, and the C++ runner answers those that were made before.
"""

from __future__ import annotations

import contextlib
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
from ...runtime.vectors.recomputed_gradient import RecomputedGradient
from ...runtime.vectors.saved_carries import ALIGNMENT
from ...torch_private import storage_number
from ...torch_state import in_functorch
from ..associative_scan import operator_of
from ..bind_arguments import bind
from ..eager_path import separate
from .call_cache import NODE, metadata

aten = torch.ops.aten
MOST = 512  # as many calls as the runner keeps
Options = Any  # hashable
SlotAndTensor = tuple[Slot, Tensor]
ShapeAndStrides = tuple[tuple[int, ...], tuple[int, ...]]
# A result of the function: the number of the scan's output or final that it is, and the shape that
# the function gives it.
Result = tuple[int, tuple[int, ...]]


@dataclass(frozen=True)
class Views:
    """What a function scans: arguments of `associative_scan`, whose leaves are views of the
    function's tensors. xs has a leaf for each of the function's first tensors, in their order.

    repeated: for each leaf of xs, the dimensions along which its view repeats the tensor.
    init_sources: for each leaf of init, the number of the function's tensor; None for a constant.
    outputs, finals: the function's results, the outputs first.
    """

    op: Monoid
    xs: tuple[Tensor, ...]
    axis: int
    reverse: bool
    init: tuple[Tensor, ...] | None
    backend: str
    repeated: tuple[tuple[int, ...], ...]
    init_sources: tuple[int | None, ...]
    outputs: tuple[Result, ...]
    finals: tuple[Result, ...]

    @property
    def sources(self) -> tuple[int | None, ...]:
        """For each tensor of the scan, the number of the function's tensor; None for a constant."""
        return (*range(len(self.xs)), *self.init_sources)


class FunctionCache:
    """The calls of one function.

    options: all arguments that are no tensors, and which tensors there are.
    plain: the function by `associative_scan` and torch's views: (options, tensors) → results.
    views: what it scans: (options, tensors) → Views.
    """

    def __init__(
        self,
        plain: Callable[[Options, Sequence[Tensor]], tuple[Tensor, ...]],
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
        kinds = metadata(tensors)
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
            views.op,
            views.xs,
            views.axis,
            views.reverse,
            True,
            views.init,
            bool(views.finals),
            None,
        )
        if backends.why_not(call, views.backend) is not None:
            return None
        spec, given = call.scan(operator_of(call, views.backend))
        scanned = [t for t in given if t is not None]
        if not isinstance(spec.operator, VectorOperator) or any(
            k is not None and not begins_with(tensors[k], t)
            for t, k in zip(scanned, views.sources, strict=True)
        ):
            return None
        return ScanOfViews(self, options, views, spec, scanned, tensors)

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


class GradientOfViews(RecomputedGradient):
    """The gradient of a scan of views. Along dimensions in which a view repeats the function's
    tensor, the kernel sums the gradient: no hook and no caller sees the view, and so nobody misses
    its entries.

    repeated: as in `Views`.
    """

    def __init__(
        self,
        dispatch: Dispatch,
        spec: ScanSpec[VectorOperator],
        tensors: Sequence[MaybeTensor],
        wanted: Sequence[bool],
        repeated: Sequence[tuple[int, ...]],
    ) -> None:
        # Set first: the base class asks for `summed_dims`.
        self.summed = [
            () if t is None else tuple(d for d in dims if t.shape[d] > 1)
            for t, dims in zip(tensors, repeated, strict=False)
        ]
        super().__init__(dispatch, spec, tensors, wanted)

    def summed_dims(self, leaf: int) -> tuple[int, ...]:
        return self.summed[leaf]


class ScanOfViews:
    """A call of a function, prepared (`runtime.autograd.Differentiable`). It keeps no tensor of the
    call.

    kinds: of the function's tensors. layouts: of what is scanned, the views of the tensors that
        `sources` numbers.
    constants: what is scanned and is no view, by its number.
    executable: from the function's tensors to its results, the saved carries after the outputs.
    returned, carries: numbers of results of the executable: the function's own, and the carries.
    inner: the gradient of the scan; None where none is wanted.
    raw: the results of the scan as it gives them: the outputs, the carries, the finals.
    is_named: whether the caller named the backend, which then runs the call or raises.
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
        self.plain, self.options, self.backend = cache.plain, options, views.backend
        self.outputs, self.finals, self.sources = views.outputs, views.finals, views.sources
        self.is_named = views.backend != "auto"
        self.kinds = [TensorSpec.of(t) for t in tensors]
        self.layouts = [layout_of(t) for t in scanned]
        self.constants = {n: t for n, t in enumerate(scanned) if self.sources[n] is None}
        needs = [torch.is_grad_enabled() and t.requires_grad for t in tensors]
        self.inner: GradientOfViews | None = None
        if True in needs:
            wanted = [k is not None and needs[k] for k in self.sources]
            self.inner = GradientOfViews(
                Dispatch(views.backend), spec, scanned, wanted, views.repeated
            )
            spec = self.inner.spec
        self.spec = spec
        self.raw: list[TensorSpec] = []
        self.executable = self.forward_executable(tensors)
        count, saved = len(self.outputs), int(self.inner is not None)
        self.carries = tuple(range(count, count + saved))
        self.integers = self.carries  # they are bits, which have no derivative
        last = range(count + saved, count + saved + len(self.finals))
        self.returned = (*range(count), *last)
        self.backward: BoundedCache[Any, CachedBackward] = BoundedCache(MAX_BACKWARD)
        self.told: Any = None  # the executable and its version that the runner knows

    def run(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The results of the function, connected to the autograd graph."""
        results = self.forward(tensors) if self.inner is None else Scan.apply(self, *tensors)
        return [results[k] for k in self.returned]

    def forward(self, tensors: Sequence[MaybeTensor]) -> list[Tensor]:
        try:
            outputs, finals = self.executable.run(tensors)
        except Misaligned:  # the addresses are aligned in another way than those of the last call
            self.executable = self.forward_executable(tensors)
            outputs, finals = self.executable.run(tensors)
        return outputs + finals

    def saved(
        self, tensors: Sequence[MaybeTensor], results: Sequence[Tensor]
    ) -> Sequence[MaybeTensor]:
        return [*tensors, *(results[k] for k in self.carries)]

    def forward_executable(self, tensors: Sequence[MaybeTensor]) -> Executable:
        commands = self.command_list(tensors)
        slots, scanned = zip(*self.views_of(commands, tensors), strict=True)
        inner = executables.prepare(self.backend, self.spec, scanned)
        outputs, finals = commands.inline(inner, slots)
        self.raw = [commands.spec_of(slot) for slot in (*outputs, *finals)]
        carries = outputs[len(self.spec.operator.outputs) :]
        return commands.build(
            [*(reshaped(commands, outputs[k], shape) for k, shape in self.outputs), *carries],
            [reshaped(commands, finals[k], shape) for k, shape in self.finals],
            lambda: inner.plan,
        )

    def command_list(self, tensors: Sequence[MaybeTensor]) -> CommandList:
        names = tuple(("tensor", k) for k in range(len(tensors)))
        specs = [None if t is None else TensorSpec.of(t) for t in tensors]
        return CommandList(FunctionSpec(names, self.spec.device), specs)

    def views_of(
        self, commands: CommandList, tensors: Sequence[MaybeTensor]
    ) -> list[SlotAndTensor]:
        """The views that are scanned, and the constants. The function's tensors are given first."""
        found = []
        for n, (k, layout) in enumerate(zip(self.sources, self.layouts, strict=True)):
            if k is None:
                constant = self.constants[n]
                found.append((commands.constant(constant), constant))
            else:
                found.append(viewed(commands, tensors, k, layout))
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
        if key is None or self.are_changed(saved):
            return self.by_torch(saved, needed, cotangents)
        try:
            known = self.backward.get(key)
            if known is not None:
                with contextlib.suppress(Misaligned):
                    return known.run(given)
            made = self.backward_executable(saved, needed, cotangents)
            return self.backward.keep(key, made).run(given)
        except BackendError:
            if self.is_named:
                raise
            return self.by_torch(saved, needed, cotangents)

    def are_changed(self, saved: Sequence[MaybeTensor]) -> bool:
        """Whether a hook on saved tensors gave back other strides, or carries that kernels cannot
        read."""
        *tensors, carries = saved
        assert carries is not None
        kinds = [None if t is None else TensorSpec.of(t) for t in tensors]
        is_whole = carries.is_contiguous() and carries.data_ptr() % ALIGNMENT == 0
        return kinds != self.kinds or carries.device != self.spec.device or not is_whole

    def by_torch(
        self,
        saved: Sequence[MaybeTensor],
        needed: Sequence[bool],
        cotangents: Sequence[MaybeTensor],
    ) -> list[MaybeTensor]:
        """`gradients` by calling the function again by `plain`, under autograd or torch.func.
        Where it is asked for, they have derivatives themselves."""
        tensors = [t for t in saved[: len(self.kinds)] if t is not None]
        places = [k for k, n in enumerate(needed) if n]
        chosen = [n for n, k in enumerate(self.returned) if cotangents[k] is not None]
        seeds = [cotangents[self.returned[n]] for n in chosen]
        create_graph = torch.is_grad_enabled()

        def results(*wanted: Tensor) -> tuple[Tensor, ...]:
            mixed = list(tensors)
            for k, t in zip(places, wanted, strict=True):
                mixed[k] = t
            found = self.plain(self.options, mixed)
            return tuple([found[n] for n in chosen])

        if in_functorch():
            _, pull = torch.func.vjp(results, *[tensors[k] for k in places])  # type: ignore[misc]
            found = pull(tuple(seeds))
        else:
            leaf = separate if create_graph else detached
            wanted = [leaf(tensors[k]) for k in places]
            with torch.enable_grad():
                found = torch.autograd.grad(
                    results(*wanted), wanted, seeds, create_graph=create_graph, allow_unused=True
                )
        at = dict(zip(places, found, strict=True))
        return [at.get(k) for k in range(len(needed))]

    def backward_executable(
        self,
        saved: Sequence[MaybeTensor],
        needed: Sequence[bool],
        cotangents: Sequence[MaybeTensor],
    ) -> CachedBackward:
        """The backward pass, from the saved tensors and the cotangents to the gradients."""
        inner, tensors = self.inner, (*saved, *cotangents)
        carries = saved[len(self.kinds)]
        assert inner is not None and carries is not None
        commands = self.command_list(tensors)
        scanned = [*self.views_of(commands, tensors), (len(self.kinds), carries)]
        # A cotangent for each result of the scan, in the shape that the scan gave it. Result
        # `returned[i]` of the executable is result `numbers[i]` of the scan.
        seeds: list[SlotAndTensor | None] = [None] * len(self.raw)
        first_final = len(inner.given.operator.outputs) + 1
        numbers = [k for k, _ in self.outputs] + [first_final + k for k, _ in self.finals]
        for number, result in zip(numbers, self.returned, strict=True):
            g = cotangents[result]
            if g is not None:
                layout = layout_of(g.view(self.raw[number].shape))
                seeds[number] = viewed(commands, tensors, len(saved) + result, layout)
        needs = [k is not None and needed[k] for k in self.sources]
        spec, ordered = inner.backward_scan(scanned, needs, seeds)
        executable = executables.prepare(
            self.backend, spec, [None if pair is None else pair[1] for pair in ordered]
        )
        slots = [None if pair is None else pair[0] for pair in ordered]
        outputs, ends = commands.inline(executable, slots)
        found = dict(zip(spec.operator.wanted, outputs, strict=True))
        found.update({n: ends[k] for n, k in inner.gradients_at_init(spec.operator, needs).items()})
        gradients: list[Slot] = []
        number_of: list[int | None] = [None] * len(self.kinds)
        for n, slot in found.items():
            k = self.sources[n]
            assert k is not None
            number_of[k] = len(gradients)
            gradients.append(reshaped(commands, slot, self.kinds[k].shape))
        made = commands.build(gradients, [], lambda: executable.plan)
        return CachedBackward(made, [*range(len(tensors))], number_of)


def layout_of(t: Tensor) -> ShapeAndStrides:
    return tuple(t.shape), t.stride()


def detached(t: Tensor) -> Tensor:
    return t.detach().requires_grad_()


def viewed(
    commands: CommandList, tensors: Sequence[MaybeTensor], k: int, layout: ShapeAndStrides
) -> SlotAndTensor:
    """A view of the tensor in slot k."""
    t = tensors[k]
    assert t is not None
    view = t.as_strided(*layout)
    arguments = SlotArgument(k), *layout
    return commands.torch(aten.as_strided.default, arguments, TensorSpec.of(view)), view


def reshaped(commands: CommandList, slot: Slot, shape: tuple[int, ...]) -> Slot:
    """A result in another shape. For autograd it is a tensor of its own, so that the caller may
    change it in place."""
    given = commands.spec_of(slot)
    if given.shape == shape:
        return slot
    sample = torch.empty_strided(given.shape, given.strides, dtype=given.dtype, device="meta")
    made = sample.reshape(shape)
    is_view = storage_number(made) == storage_number(sample)
    function = aten._unsafe_view.default if is_view else aten.reshape.default
    spec = TensorSpec(shape, made.stride(), given.dtype, given.device)
    return commands.torch(function, (SlotArgument(slot), shape), spec)
