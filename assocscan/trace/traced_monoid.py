"""A monoid at given dtypes and element shapes.

Two traces of each function where 16-bit floats are involved: one on the true dtypes, which says
what the user gets, and one with float32 in their place, which is what the kernels compute.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from ..errors import ScanTypeError, ScanValueError, TraceError, UnsupportedOperation
from ..program.dtypes import STORAGE_ONLY, promoted_float
from ..program.matrix_operator import MatrixOperator
from ..program.operator import Leaf, Operator, promoted, scalars, spans
from ..program.program_builder import Builder, Program
from ..program.symbolic_tensors import Sym, Tensors
from ..program.vectors.state_axis import StateBuilder
from ..program.vectors.vector_operator import VectorOperator, part_dtypes, parts
from ..pytrees import TreeSpec, align, describe, flatten, is_leaf, leaf_paths, template
from .declared_identity import identity_literals, is_uniform, resolve_identity
from .expected_structure import kind, require_lifted
from .fx_trace import Signature, Trace, isolated, observe, trace
from .matrices_and_vectors.trace_matrices import matrix_operator
from .matrices_and_vectors.trace_states import size_of_states, state_program
from .missing_dtypes import require_implemented
from .pointwise import POINTWISE, operation_name
from .scalarize import MAX_INSTRUCTIONS, scalarize
from .signatures import require_call, takes_inputs

# Elements of at least so many components that stand alone are scanned component by component, as if
# their dimensions were batch dimensions: sums of (8, 4096, C) float32 on one core take 0.20 ms for
# C = 8 and 0.23 for 32, as elements of vectors 0.34 and 4.8; for C = 4 both take 0.18.
MIN_COMPONENTS = 8
# Why no kernel is made for elements with vectors or matrices of size 0.
SIZE_0 = "an element has size 0"


@dataclass(frozen=True)
class TracedMonoid:
    """An operator at given dtypes and element shapes. Without `operator`, `why_not` is the reason
    why it runs eagerly.

    `by_component`: the same for scalar elements, where all operations are pointwise on elements of
    one shape. There is no `operator` then: the kernel is that of one component, whatever the size.
    `vectors`: the operator with a state axis, where its elements are vectors that have one.
    `along`: what works along a dimension of elements that are numbers; empty where nothing does.
    """

    input_spec: TreeSpec
    state_spec: TreeSpec
    output_spec: TreeSpec
    inputs: tuple[Leaf, ...]
    state: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    identity: tuple[torch.Tensor, ...] | None
    unroll: Callable[[], tuple[Operator | None, str]] = field(compare=False)
    pointwise: bool
    matrices: MatrixOperator | None = None
    by_component: TracedMonoid | None = None
    vectors: VectorOperator | None = None
    along: str = field(default="", compare=False)
    verified: list[str | None] = field(default_factory=list, compare=False)

    @cached_property
    def _unrolled(self) -> tuple[Operator | None, str]:
        return self.unroll()

    @property
    def operator(self) -> Operator | None:
        """The operator over scalars."""
        return self._unrolled[0]

    @property
    def why_not(self) -> str:
        return self._unrolled[1]


def untraced(spec: TreeSpec, leaves: tuple[Leaf, ...], why_not: str) -> TracedMonoid:
    """A raw callable on slices that has no program: an element is what xs is."""
    return TracedMonoid(
        spec, spec, spec, leaves, leaves, leaves, None, lambda: (None, why_not), False
    )


def lift_arguments(spec: TreeSpec) -> TreeSpec:
    """The argument tuple of `lift(*xs)` for a tuple or list, of `lift(xs)` otherwise."""
    tree = template(spec)
    arguments = tuple(tree) if type(tree) in (tuple, list) else (tree,)
    return flatten(arguments)[1]


def lifted(
    monoid: Any, input_spec: TreeSpec, inputs: Sequence[Leaf]
) -> tuple[TreeSpec, tuple[Leaf, ...]]:
    """The state that the monoid's lift makes of these input leaves."""
    return Steps(monoid, input_spec, tuple(inputs)).lifted()


def trace_monoid(monoid: Any, input_spec: TreeSpec, inputs: tuple[Leaf, ...]) -> TracedMonoid:
    """Trace `monoid` (combine, lift, lower, identity) for these input leaves."""
    steps = Steps(monoid, input_spec, inputs)
    steps.read(widens=True)
    by_component = steps.by_component()
    if by_component is not None:
        return steps.traced(lambda: (None, ""), steps.pointwise, by_component=by_component)
    if steps.has_size_0():
        return steps.traced(lambda: (None, SIZE_0), steps.pointwise)
    matrices = steps.matrices()

    def unroll() -> tuple[Operator | None, str]:
        if matrices is not None and matrices.combine.products > MAX_INSTRUCTIONS:
            # As unrolling would find out, after seconds.
            return None, f"the element unrolls to more than {MAX_INSTRUCTIONS} scalar operations"
        try:
            with isolated():
                return steps.operator(), ""
        except UnsupportedOperation as error:
            return None, str(error)

    vectors = steps.vectors()
    traced = steps.traced(
        unroll, steps.pointwise, matrices=matrices, vectors=vectors, along=steps.along()
    )
    if vectors is None:  # with a state axis it is unrolled when an engine needs that
        _ = traced.operator
    return traced


class Steps:
    """The traces that `trace_monoid` needs, on true dtypes and on those that kernels compute in;
    `read` finds what they give."""

    state_spec: TreeSpec
    state: tuple[Leaf, ...]
    output_spec: TreeSpec
    outputs: tuple[Leaf, ...]
    identity: tuple[torch.Tensor, ...] | None

    def __init__(self, monoid: Any, spec: TreeSpec, inputs: tuple[Leaf, ...]) -> None:
        self.monoid, self.spec, self.inputs = monoid, spec, inputs
        self.traces: dict[tuple[Any, ...], Trace] = {}
        self.calls: dict[str, tuple[TreeSpec, list[Signature]]] = {}  # the last of each role
        self.pointwise = True

    def read(self, widens: bool) -> None:
        """Find the structures and leaves of state and outputs, and the identity. widens: whether
        floats of a state are combined in the widest of them."""
        self.state_spec, declared = self.lifted()
        self.state = promoted(declared) if widens else declared
        traced = self.trace("combine", *self.arguments("combine", self.state), wide=False)
        check_results(traced, self.state_spec, self.state, self.monoid.name, self.monoid.combine)
        self.output_spec, self.outputs = self.state_spec, declared
        if self.monoid.lower is not None:
            traced = self.trace("lower", *self.arguments("lower", declared), wide=False)
            self.output_spec, self.outputs = traced.spec, leaves_of(traced)
        self.identity = resolve_identity(self.monoid, self.state_spec, self.state)

    def traced(
        self, unroll: Callable[[], tuple[Operator | None, str]], pointwise: bool, **forms: Any
    ) -> TracedMonoid:
        """What `read` found, with the operator in other forms."""
        return TracedMonoid(
            self.spec, self.state_spec, self.output_spec, self.inputs, self.state, self.outputs,
            self.identity, unroll, pointwise, **forms,
        )  # fmt: skip

    def label(self, role: str) -> str:
        return str(self.monoid.name) if role == "combine" else f"{self.monoid.name}.{role}"

    def trace(self, role: str, spec: TreeSpec, leaves: Sequence[Leaf], wide: bool) -> Trace:
        dtypes = [
            torch.float32 if wide and leaf.dtype in STORAGE_ONLY else leaf.dtype for leaf in leaves
        ]
        key = (role, tuple(dtypes))
        if key not in self.traces:
            arguments = [Signature(d, leaf.shape) for d, leaf in zip(dtypes, leaves, strict=True)]
            self.calls[role] = spec, arguments
            fn, roles = getattr(self.monoid, role), self.roles(role, len(template(spec)))
            lifted = role == "combine" and self.monoid.lift is not None
            self.traces[key] = trace(
                fn, spec, arguments, self.label(role), roles=roles, lifted=lifted
            )
            scalar = all(leaf.shape == () for leaf in leaves)
            self.pointwise &= scalar and is_pointwise(self.traces[key], ())
        return self.traces[key]

    def roles(self, role: str, count: int) -> list[str]:
        """What the arguments of a call are called, which `count` must fit."""
        name = self.monoid.name
        if role == "combine":
            require_call(self.monoid.combine, 2, f"operator {name!r}", "op(left, right)")
            return ["left", "right"]
        if role == "lower":
            call = "lower(state)" if count == 1 else "lower(state, xs)"
            require_call(self.monoid.lower, count, f"the lower of {name!r}", call)
            return ["state", "xs"][:count]
        return ["xs"] if count == 1 else [f"xs[{k}]" for k in range(count)]

    def along(self) -> str:
        """`TracedMonoid.along`, of the first function that has it."""
        if any(leaf.shape for leaf in self.inputs):
            return ""
        return next((t.along for t in self.traces.values() if t.along), "")

    def lifted(self) -> tuple[TreeSpec, tuple[Leaf, ...]]:
        if self.monoid.lift is None:
            return self.spec, self.inputs
        traced = self.trace("lift", *self.arguments("lift", ()), wide=False)
        if not traced.results:
            raise ScanValueError(f"lift of {self.monoid.name!r} returns an empty pytree")
        require_lifted(self.monoid, template(traced.spec))
        return traced.spec, leaves_of(traced)

    def arguments(self, role: str, state: Sequence[Leaf]) -> tuple[TreeSpec, list[Leaf]]:
        """What the function of this role is called with."""
        if role == "lift":
            return lift_arguments(self.spec), [*self.inputs]
        element = template(self.state_spec)
        if role == "combine":
            return flatten((element, element))[1], [*state, *state]
        if self.lower_takes_inputs():
            return flatten((element, template(self.spec)))[1], [*state, *self.inputs]
        return flatten((element,))[1], [*state]

    def lower_takes_inputs(self) -> bool:
        try:
            return takes_inputs(self.monoid.lower)
        except TraceError as error:
            raise TraceError(f"operator {self.monoid.name!r}: {error}") from None

    def wide(self, role: str) -> Trace:
        """The trace of a function on the dtypes that kernels compute in."""
        return self.trace(role, *self.arguments(role, self.state), wide=True)

    def combine(self) -> tuple[Trace, list[int]]:
        """The trace of `combine`, and which of its results each leaf of the state is."""
        traced = self.wide("combine")
        return traced, aligned(traced, self.state_spec, self.monoid.name)

    def lift_and_lower(
        self, program: Callable[..., Program], cast: Callable[..., Program]
    ) -> tuple[Program, Program]:
        """The programs of `lift` and `lower`.

        program: that of a trace. cast: the one that returns its inputs, cast to the dtypes of the
        results. Both take leaves that are not read as `extra`.
        """
        if self.monoid.lift is None:
            lift = cast(self.inputs, self.state)
        else:
            lift = program(self.wide("lift"), self.inputs, self.state)
        if self.monoid.lower is None:
            return lift, cast(self.state, self.outputs, extra=self.inputs)
        _, given = self.arguments("lower", self.state)
        unread = () if len(given) > len(self.state) else self.inputs
        return lift, program(self.wide("lower"), given, self.outputs, extra=unread)

    def operator(self) -> Operator:
        combine, order = self.combine()
        lift, lower = self.lift_and_lower(program, cast_program)
        for role, (spec, arguments) in self.calls.items():
            require_implemented(getattr(self.monoid, role), spec, arguments, self.label(role))
        return Operator(
            self.monoid.name, self.inputs, self.state, self.outputs, lift,
            program(combine, (*self.state, *self.state), self.state, order), lower,
            identity_literals(self.identity, self.state),
            sequential=self.monoid.sequential, constant=self.monoid.constant,
        )  # fmt: skip

    def has_size_0(self) -> bool:
        """Whether an element has a vector or matrix of size 0: the layouts of kernels are made of
        the numbers of each leaf."""
        return any(0 in leaf.shape for leaf in (*self.inputs, *self.state, *self.outputs))

    def has_uniform_identity(self) -> bool:
        pairs = zip(self.identity or (), self.state, strict=False)
        return all(is_uniform(value, leaf) for value, leaf in pairs)

    def by_component(self) -> TracedMonoid | None:
        """The monoid on scalars, where every component of its elements stands alone."""
        shape = self.inputs[0].shape
        if math.prod(shape) < MIN_COMPONENTS or self.monoid.adjoint is not None:
            return None
        if any(leaf.shape != shape for leaf in (*self.inputs, *self.state, *self.outputs)):
            return None
        if not self.has_uniform_identity():
            return None
        for role in ("combine", "lift", "lower"):
            if getattr(self.monoid, role) is not None:
                self.wide(role)
        if not all(is_pointwise(traced, shape) for traced in self.traces.values()):
            return None
        for traced in self.traces.values():
            as_scalars(traced, shape)
        scalar = copy.copy(self)
        scalar.inputs, scalar.state, scalar.outputs = (
            tuple(Leaf(leaf.dtype) for leaf in leaves)
            for leaves in (self.inputs, self.state, self.outputs)
        )
        if self.identity is not None:
            scalar.identity = tuple(v.flatten()[0].clone() for v in self.identity)
        operator, why_not = None, ""
        try:
            operator = scalar.operator()
        except UnsupportedOperation as error:
            why_not = str(error)
        return scalar.traced(lambda: (operator, why_not), pointwise=True)

    def matrices(self) -> MatrixOperator | None:
        """The operator over whole leaves, where they are matrices too large to unroll."""
        monoid = self.monoid
        if monoid.lift is not None or (monoid.lower is not None and takes_inputs(monoid.lower)):
            return None
        if not any(leaf.shape for leaf in self.state):
            return None
        combine, order = self.combine()
        lower = None if monoid.lower is None else self.wide("lower")
        return matrix_operator(monoid.name, self.state, self.identity, combine, order, lower)

    def vectors(self) -> VectorOperator | None:
        """The operator with a state axis; None where it has none."""
        state = self.state
        size = size_of_states((*self.inputs, *state, *self.outputs))
        if size is None or not self.has_uniform_identity():
            return None
        try:
            combine, order = self.combine()
            advance = state_program(combine, (*state, *state), state, size, order)
            lift, lower = self.lift_and_lower(
                functools.partial(state_program, size=size),
                functools.partial(cast_states, size=size),
            )
        except UnsupportedOperation:
            return None
        literals = identity_literals(self.identity, state)
        if literals is not None:
            literals = tuple(
                literals[span.start + part]
                for span, leaf in zip(spans(state), state, strict=True)
                for part in range(parts(leaf))
            )
        return VectorOperator(
            self.monoid.name, size, self.inputs, state, self.outputs, lift, advance, lower, literals
        )


def leaves_of(traced: Trace) -> tuple[Leaf, ...]:
    return tuple(Leaf(r.dtype, r.shape) for r in traced.results)


def cast_states(
    leaves: Sequence[Leaf], results: Sequence[Leaf], size: int, extra: Sequence[Leaf] = ()
) -> Program:
    """The program of vectors that returns its inputs, cast to the dtypes of `results`."""
    everything = (*leaves, *extra)
    varies = [leaf.shape == (size,) for leaf in everything for _ in range(parts(leaf))]
    builder = StateBuilder(part_dtypes(everything), varies, size)
    return builder.build([builder.cast(k, d) for k, d in enumerate(part_dtypes(results))])


def cast_program(
    leaves: Sequence[Leaf], results: Sequence[Leaf], extra: Sequence[Leaf] | None = None
) -> Program:
    """The program that returns its inputs, cast to the dtypes of `results`; `extra` as of
    `program`."""
    kinds = scalars(tuple(results))
    builder = Builder((*scalars(tuple(leaves)), *unread(extra)))
    return builder.build([builder.cast(k, kind) for k, kind in enumerate(kinds)])


def unread(extra: Sequence[Leaf] | None) -> tuple[str, ...]:
    return () if extra is None else (*scalars(tuple(extra)), "b1")


def program(
    traced: Trace,
    arguments: Sequence[Leaf],
    results: Sequence[Leaf],
    order: Sequence[int] | None = None,
    extra: Sequence[Leaf] | None = None,
) -> Program:
    """The scalar program of a trace. extra: of a `lower`, the leaves that it does not read, which
    are inputs too, and after them the flag of the edge."""
    builder = Builder((*scalars(tuple(arguments)), *unread(extra)))
    symbols, start = [], 0
    for leaf in arguments:
        ids = torch.arange(start, start + leaf.components)
        start += leaf.components
        planes = ids.view(*leaf.shape, 2 if leaf.dtype.is_complex else 1).unbind(-1)
        symbols.append(Sym(planes[0], leaf.dtype, planes[1] if leaf.dtype.is_complex else None))
        if leaf.dtype in STORAGE_ONLY:
            symbols[-1].dtype = torch.float32
    values = scalarize(traced.graph.graph, builder, symbols, traced.graph)
    tensors = Tensors(builder)
    outputs: list[int] = []
    for k, leaf in zip(order or range(len(results)), results, strict=True):
        wide = torch.float32 if leaf.dtype in STORAGE_ONLY else leaf.dtype
        value = tensors.symbolic(values[k], wide)
        outputs.extend(torch.stack(value.planes(), -1).reshape(-1).tolist())
    return builder.build(outputs)


def aligned(
    traced: Trace, spec: TreeSpec, name: str, line: str = "", one: str = "expected one tensor"
) -> list[int]:
    """For each leaf of `spec`, which of the traced results it is. For the error: where the function
    stands, and what is said where one tensor is right."""
    wanted, found = template(spec), template(traced.spec)
    result = f"the result of operator {name!r}{line}"
    if is_leaf(wanted) != is_leaf(found):
        seen = "one tensor" if is_leaf(found) else describe(found)
        right = one if is_leaf(wanted) else f"expected {kind(wanted)}"
        raise ScanTypeError(f"{result} is {seen}, {right}")
    order: list[int] = align(wanted, found, result)
    return order


def first_line(fn: Any) -> str:
    """` (file.py:12)`, where a function begins; empty where that is not known."""
    code = getattr(fn, "__code__", None)
    return "" if code is None else f" ({Path(code.co_filename).name}:{code.co_firstlineno})"


def check_results(
    traced: Trace, spec: TreeSpec, state: Sequence[Leaf], name: str, fn: Any, **said: str
) -> None:
    """Raise where an operator changes the structure, a dtype or a shape of the element. said: `one`
    of `aligned`.

    A float may become the widest float of the element, which it is combined in.
    """
    paths = leaf_paths(spec, "element")
    widest = promoted_float(leaf.dtype for leaf in state)
    order = aligned(traced, spec, name, first_line(fn), **said)
    for k, path, leaf in zip(order, paths, state, strict=True):
        result = traced.results[k]
        floats = leaf.dtype.is_floating_point and result.dtype.is_floating_point
        is_known = floats and promoted_float((result.dtype, widest)) == widest
        if result.dtype != leaf.dtype and not is_known:
            raise ScanTypeError(
                f"operator {name!r} changes the dtype of {path} from {leaf.dtype} to "
                f"{result.dtype}; cast inside the operator, or cast xs so that it need not change"
            )
        if result.shape != leaf.shape:
            raise ScanValueError(
                f"operator {name!r} changes the shape of {path} from {list(leaf.shape)} to "
                f"{list(result.shape)}; left, right and the result have one shape"
            )


def is_pointwise(traced: Trace, shape: tuple[int, ...]) -> bool:
    """Whether every operation is pointwise on tensors of exactly this shape."""
    return next(not_pointwise(traced, shape), None) is None


def not_pointwise(traced: Trace, shape: tuple[int, ...]) -> Iterator[str]:
    """The names of the operations that are not pointwise on tensors of exactly this shape."""
    for node in traced.graph.graph.nodes:
        if node.op == "get_attr":
            yield "a constant tensor"
        if node.op != "call_function":
            continue
        value, name = node.meta.get("val"), operation_name(node)
        if name == "scalar_tensor":
            continue
        is_of_shape = isinstance(value, torch.Tensor) and tuple(value.shape) == shape
        if name not in POINTWISE or not is_of_shape:
            yield name


def as_scalars(traced: Trace, shape: tuple[int, ...]) -> Trace:
    """The same pointwise graph with scalar values recorded in place of tensors of `shape`."""
    for node in traced.graph.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and tuple(value.shape) == shape:
            node.meta["val"] = torch.empty((), dtype=value.dtype)
    return traced


def observed(
    monoid: Any, input_spec: TreeSpec, inputs: tuple[Leaf, ...], why_not: str
) -> TracedMonoid:
    """`trace_monoid` where torch cannot trace, as `why_not` says: the functions are run once on
    example tensors, to learn the structures, shapes and dtypes that the eager engine needs."""
    steps = ObservedSteps(monoid, input_spec, inputs)
    steps.read(widens=False)
    return steps.traced(lambda: (None, why_not), pointwise=False)


class ObservedSteps(Steps):
    """`Steps` that run the functions and record no graph."""

    def trace(self, role: str, spec: TreeSpec, leaves: Sequence[Leaf], wide: bool) -> Trace:
        arguments = [Signature(leaf.dtype, leaf.shape) for leaf in leaves]
        fn, roles = getattr(self.monoid, role), self.roles(role, len(template(spec)))
        return Trace(
            GraphModule({}, Graph()), *observe(fn, spec, arguments, self.label(role), roles)
        )
