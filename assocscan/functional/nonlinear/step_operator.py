"""A step h, x ↦ h' as an operator that engines walk along the axis (`Operator.sequential`).

A state of the scan is (h, parameters, x). An element has its x, and a step takes h and the
parameters of the carry and the x of the element:

    (h, p, _), (_, _, x)  ↦  (step(h, x, p), p, x)

So the parameters enter with the initial carry, once for each chain; and the gradient of that carry,
which the backward scan computes, is that of the parameters, summed over the steps. With a mask of
resets the initial h is one more parameter: where the mask is set, it takes the place of h.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...caching.bounded import BoundedCache, Calls
from ...errors import ScanTypeError, ScanValueError, TraceError
from ...monoids.monoid import Monoid
from ...monoids.raw_callables import MAX_RAW, MutableError, stable_key
from ...program.dtypes import STORAGE_ONLY, promoted_float
from ...pytrees import TreeSpec, align, flatten, template, unflatten
from ...torch_private import WithTorchFunction
from ...trace.closure_captures import frozen
from ...trace.expected_structure import fits
from ...trace.fx_trace import Found, FunctionWatch, Signature, Trace, isolated, trace
from ...trace.signatures import require_call, takes_inputs
from ...wording import user_line
from ..operands import carry_dtype

MAX_NUMBERS = 8  # of a state, unless the step has more of its own: an attribute `most_numbers`
Function = Callable[..., Any]


@dataclass(frozen=True)
class StepSpec:
    """What the operator of a step depends on, besides the functions.

    xs, init, params: the structures of the arguments. inputs: the dtypes of the leaves of xs.
    started: for each leaf of init its dtype; for numbers the kind of number.
    weights: the dtypes of the leaves of params.
    resets: whether there is a mask of resets.
    """

    xs: TreeSpec
    init: TreeSpec
    params: TreeSpec
    inputs: tuple[torch.dtype, ...]
    started: tuple[torch.dtype | type, ...]
    weights: tuple[torch.dtype, ...]
    resets: bool


_KNOWN: BoundedCache[Any, StepOperator] = BoundedCache(MAX_RAW)


def key_of(step: Function, lower: Function | None, spec: StepSpec) -> Any:
    """What decides the operator of a step. Raises MutableError where nothing does."""
    return stable_key(step, ()), stable_key(lower, ()), spec, torch.get_default_dtype()


def known_operator(step: Function, lower: Function | None, spec: StepSpec) -> StepOperator | None:
    """The operator of a step where one was made of functions and arguments like these."""
    try:
        return _KNOWN.get(key_of(step, lower, spec))
    except MutableError:
        return None


def step_operator(step: Function, lower: Function | None, spec: StepSpec) -> StepOperator:
    """A new operator of a step."""
    try:
        key = key_of(step, lower, spec)
    except MutableError:
        return StepOperator(step, lower, spec)
    return _KNOWN.insert(key, StepOperator(frozen(step), frozen(lower), spec))


class StepOperator(Monoid):
    """The operator of a step.

    dtypes: of the leaves of h. parameters: how many there are: those of the user, and with resets
    the leaves of the initial h. solutions: what the last solutions by Newton's method took
    (`newton.Report`).
    """

    sequential = True

    def __init__(self, step: Function, lower: Function | None, spec: StepSpec) -> None:
        name = getattr(step, "__name__", type(step).__name__).strip("<>")
        self.step_name, self.spec = name, spec
        self.step, self.lowering = step, lower
        self.has_params = spec.params.num_leaves > 0
        self.dtypes = self.state_dtypes()
        count = sum(1 + d.is_complex for d in self.dtypes)
        if count > getattr(step, "most_numbers", MAX_NUMBERS):
            raise ScanValueError(
                f"the state of step {name!r} has {count} numbers (a complex one counts twice), and "
                f"{MAX_NUMBERS} is the most that a chain can have"
            )
        self.check_lower()
        weights = [carry_dtype(d) for d in spec.weights]
        self.parameters = [
            *weights,
            *([carry_dtype(d) for d in self.dtypes] if spec.resets else []),
        ]
        first = len(self.dtypes)
        self.constant = tuple(range(first, first + len(self.parameters)))
        parts = first, len(self.parameters), len(spec.inputs) + spec.resets
        self._by_method: BoundedCache[Any, Calls] = BoundedCache(16)
        self.solutions: BoundedCache[Any, Any] = BoundedCache(16)
        super().__init__(
            self.advance,
            identity=tuple((0,) * n for n in parts),
            name=name,
            lift=self.element,
            lower=self.show_with_inputs if self.lower_reads_inputs() else self.show,
        )

    def calls_by(self, options: tuple[Any, ...]) -> Calls:
        """The calls of this step with other options than the usual ones."""
        known = self._by_method.get(options)
        return self._by_method.insert(options, Calls()) if known is None else known

    # ---- The functions that are traced ----

    def advance(self, left: Any, right: Any) -> Any:
        before, parameters, _ = left
        x = right[2]
        h, p = before, parameters[: len(self.spec.weights)]
        if self.spec.resets:
            *x, reset = x
            afresh = parameters[len(p) :]
            h = [torch.where(reset, a.to(b.dtype), b) for a, b in zip(afresh, before, strict=True)]
        return tuple(cast(self.stepped(h, x, p), before)), parameters, right[2]

    def stepped(self, h: Sequence[Any], x: Sequence[Any], p: Sequence[Any]) -> list[Any]:
        """The leaves of the user's step."""
        found = self.step(*self.arguments(h, x, p))
        return align(template(self.spec.init), found, f"the result of step {self.step_name!r}")

    def arguments(self, h: Sequence[Any], x: Sequence[Any], p: Sequence[Any]) -> tuple[Any, ...]:
        """What the user's step is called with."""
        spec = self.spec
        pair = unflatten(list(h), spec.init), unflatten(list(x), spec.xs)
        return (*pair, unflatten(list(p), spec.params)) if self.has_params else pair

    def element(self, *x: Tensor) -> Any:
        zeros = [torch.zeros_like(x[0], dtype=d) for d in (*self.dtypes, *self.parameters)]
        first = len(self.dtypes)
        return tuple(zeros[:first]), tuple(zeros[first:]), x

    def show(self, state: Any) -> Any:
        h = unflatten(list(state[0]), self.spec.init)
        return h if self.lowering is None else self.lowering(h)

    def show_with_inputs(self, state: Any, x: Any) -> Any:
        assert self.lowering is not None
        x = x[:-1] if self.spec.resets else x
        return self.lowering(
            unflatten(list(state[0]), self.spec.init), unflatten(list(x), self.spec.xs)
        )

    # ---- Dtypes ----

    def lower_reads_inputs(self) -> bool:
        return self.lowering is not None and takes_inputs(self.lowering)

    def state_dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes that the leaves of h keep: those that `step` gives on what it gave before."""
        count = 3 if self.has_params else 2
        call = "step(h, x, params)" if count == 3 else "step(h, x), since params is empty"
        require_call(self.step, count, f"step {self.step_name!r}", call)
        found = self.settled([self.given(k) for k in self.spec.started])
        # Finals of 16-bit states are float32, and may be the init of the next part: float32 does
        # not widen a state that is 16 bits without it.
        weak = [float if k == torch.float32 else k for k in self.spec.started]
        if weak == list(self.spec.started):
            return found
        narrow = self.settled([self.given(k) for k in weak])
        pairs = list(zip(narrow, found, strict=True))
        is_same = all(a == b or (a in STORAGE_ONLY and b == torch.float32) for a, b in pairs)
        return narrow if is_same else found

    def given(self, kind: torch.dtype | type) -> torch.dtype:
        """The dtype of a leaf of init. A number takes the precision of xs and params."""
        if isinstance(kind, torch.dtype):
            return kind
        return dtype_of_kind(kind, (*self.spec.inputs, *self.spec.weights))

    def settled(self, dtypes: list[torch.dtype]) -> tuple[torch.dtype, ...]:
        for _ in range(4):
            before, dtypes = dtypes, self.traced_step(dtypes)
            if before == dtypes:
                return tuple(dtypes)
        raise ScanTypeError(
            f"step {self.step_name!r} gives a state of other dtypes at every step, of "
            f"{listed(before)} at last {listed(dtypes)}; cast the state inside the step"
        )

    def traced_step(self, dtypes: Sequence[torch.dtype]) -> list[torch.dtype]:
        """The dtypes of the step's results for h of these dtypes."""
        spec = self.spec
        places = list(range(len(dtypes) + len(spec.inputs) + len(spec.weights)))
        first, second = len(dtypes), len(dtypes) + len(spec.inputs)
        tree = self.arguments(places[:first], places[first:second], places[second:])
        kinds = [Signature(d, ()) for d in (*dtypes, *spec.inputs, *spec.weights)]
        roles = ["h", "x", "params"][: len(tree)]
        name = self.step_name
        found = traced(self.step, tree, kinds, f"step {name!r}", roles)
        order = self.order_of(template(found.spec))
        results = [found.results[k] for k in order]
        for k, result in enumerate(results):
            if result.shape:
                raise ScanValueError(
                    f"step {name!r} returns shape {list(result.shape)} for leaf {k} of the state, "
                    "but is called on one element, numbers without dimensions, and must return such"
                )
        return [r.dtype for r in results]

    def order_of(self, result: Any) -> list[int]:
        """The places of the leaves of h in what step returns. Raises ScanTypeError where it has
        another structure than init."""
        wanted = template(self.spec.init)
        try:
            return align(wanted, result, "the result")
        except ScanTypeError as error:
            hint = ""
            if type(result) is tuple and len(result) == 2 and fits(wanted, result[0]):
                hint = (
                    ": where step returns (h, y) as that of jax.lax.scan does, return h alone and "
                    "pass lower= for y"
                )
            text = str(error).replace("not a leaf", "expected a tensor")
            raise ScanTypeError(
                f"step {self.step_name!r} returns another structure than that of init: {text}; it "
                f"returns the next h{hint}"
            ) from None

    def check_lower(self) -> None:
        """Raise where `lower` is no function of one element."""
        if self.lowering is None:
            return
        h = unflatten(list(range(len(self.dtypes))), self.spec.init)
        tree, kinds, roles = [h], list(self.dtypes), ["h", "x"]
        if self.lower_reads_inputs():
            places = range(len(kinds), len(kinds) + len(self.spec.inputs))
            tree.append(unflatten(list(places), self.spec.xs))
            kinds += self.spec.inputs
        signatures = [Signature(d, ()) for d in kinds]
        who = f"the lower of step {self.step_name!r}"
        traced(self.lowering, tuple(tree), signatures, who, roles[: len(tree)])


INSTEAD = (
    "; step and lower are written for one element, numbers without dimensions, and are the same "
    "for each channel; a state, input or parameter of several numbers is a tuple of tensors, "
    "as t.unbind(0) gives. Steps that mix channels (a matrix product over them, a sum or a "
    "softmax) have no kernel here: use torch.nn.GRU or a Python loop for a full recurrent "
    "matrix, and matrix_recurrence or selective_scan for a linear one"
)


def traced(
    fn: Function, tree: tuple[Any, ...], kinds: Sequence[Signature], who: str, roles: Sequence[str]
) -> Trace:
    """A step or a lower, called on one element. Raises TraceError where that fails, and where it
    works on several channels.

    tree: its arguments, whose leaves are numbers.
    who: what errors call it.
    """
    spec = flatten(tree)[1]
    try:
        found = trace(fn, spec, kinds, "", roles=roles)
    except TraceError as error:
        raise TraceError(in_words_of_steps(str(error), who)) from error
    mixes = found.along or reduction_in(fn, spec, kinds)
    if mixes:
        raise TraceError(mixes.replace(UNNAMED, who) + INSTEAD)
    return found


UNNAMED = "operator ''"  # what an error of a trace begins with
OF_SHAPES = ("shape", "size", "dimension", "0-d tensor")


def in_words_of_steps(text: str, who: str) -> str:
    """An error of the trace in the words of `nonlinear_recurrence`."""
    text = text.replace(UNNAMED, who).replace(", as xs is", "")
    head, found, _ = text.partition("; pass it as a leaf of xs")
    if found:
        place = "params=, for instance params=(w,) and step(h, x, params)"
        if who.startswith("the lower"):
            place = "xs, for instance xs=(x, w.expand_as(x)) and lower(h, x)"
        return f"{head}; pass it in {place}"
    head, found, _ = text.partition("; this operator's elements are numbers")
    of_shapes = " failed on " in head and any(
        words in head.partition("Error: ")[2] for words in OF_SHAPES
    )
    return head + INSTEAD if found or of_shapes else text


# Functions of torch that make one number of a whole tensor, and so of one number itself.
REDUCTIONS = frozenset(
    (
        "sum nansum mean nanmean prod amax amin aminmax argmax argmin any all std var std_mean "
        "var_mean median nanmedian mode quantile nanquantile norm vector_norm linalg_norm "
        "linalg_vector_norm frobenius_norm nuclear_norm logsumexp count_nonzero"
    ).split()
)


def reduces(name: str, args: Sequence[Any], kwargs: Any) -> bool:
    """Whether a function of torch, called so, is a reduction."""
    return name in REDUCTIONS or (len(args) == 1 and not kwargs and name in ("max", "min"))


def reduction_in(fn: Function, spec: TreeSpec, kinds: Sequence[Signature]) -> str:
    """Of a function that reduces a whole tensor, as `h.sum()`: that it does, and the user's line.
    On one number torch does nothing then, so that the trace does not show it."""
    examples = [torch.zeros((), dtype=kind.dtype, device="cpu") for kind in kinds]
    try:
        with isolated(), torch.no_grad(), WithTorchFunction(), FunctionWatch(reduces):
            fn(*unflatten(examples, spec))
    except Found as found:
        return f"{UNNAMED} reduces a whole tensor to one number{user_line(found)}"
    except Exception:  # it could be traced, but cannot be called on these numbers
        return ""
    return ""


def listed(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)


def cast(results: Sequence[Any], before: Sequence[Tensor]) -> list[Tensor]:
    """The step's results in the dtypes of the state before, which kernels may have widened."""
    return [
        new.to(old.dtype) if isinstance(new, Tensor) else torch.full_like(old, new)
        for new, old in zip(results, before, strict=True)
    ]


def dtype_of_kind(kind: type, others: Sequence[torch.dtype]) -> torch.dtype:
    """The dtype of a number of this kind; a float takes that of the other leaves."""
    if kind is bool or kind is int:
        return torch.bool if kind is bool else torch.int64
    real = promoted_float(others) or torch.get_default_dtype()
    return real if kind is float else torch.promote_types(real, torch.complex64)
