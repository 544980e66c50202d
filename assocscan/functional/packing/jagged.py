"""Scans of nested tensors with `layout=torch.jagged`: calls with their values and their offsets.

A jagged tensor [B, j, …] is a tensor of values, in which its B components stand back to back along
one dimension, and offsets: packed sequences. `run` passes both to the function that was called, and
makes jagged tensors of what it returns for every step. What it returns once for each sequence is an
ordinary tensor, with B in front.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...api.bind_arguments import resolve_operator
from ...errors import AxisError, ScanTypeError, ScanValueError
from ...hooks import HOOKS
from ...monoids.leaf_checks import check_axis
from ...monoids.monoid import Monoid
from ...pytrees import flatten, leaf_paths, tree_map, unflatten
from ...torch_private import (
    WithoutTorchFunctionOfClasses,
    is_jagged,
    jagged_like,
    ragged_dimension,
)


@dataclass(frozen=True)
class Rule:
    """What of a function's arguments and results is packed along the scanned axis.

    series: the arguments that have a value at every step, with the number of dimensions that belong
        to one element. The first one that is given decides the shape of the others.
    finals: the numbers of the results that there are once for each sequence.
    has_axis: whether the function takes an axis; others scan the last one before the element.
    has_batch: whether the values need a batch dimension in front.
    states: the arguments that then have one behind S.
    """

    series: Mapping[str, int]
    finals: tuple[int, ...] = ()
    has_axis: bool = True
    has_batch: bool = False
    states: tuple[str, ...] = ()


OF_X = Rule({"x": 0})
OF_RECURRENCE = Rule({"b": 0, "a": 0}, finals=(1,))
REWARDS = dict.fromkeys(
    ("rewards", "values", "log_ratios", "discount", "decay", "done", "truncated", "next_values"), 0
)
MARKOV = {"likelihood": 1, "transition": 2, "observed": 0}
DYNAMICS = {"F": 2, "Q": 2, "controls": 1, "B": 2}
RULES: dict[str, Rule] = {
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"), OF_X),
    "linear_recurrence": OF_RECURRENCE,
    "matrix_recurrence": Rule({"b": 1, "A": 2}, finals=(1,)),
    **dict.fromkeys(("lfilter", "sosfilt"), Rule({"x": 0}, finals=(1,))),
    **dict.fromkeys(("ewm_mean", "ewm_var"), Rule({"x": 0, "alpha": 0})),
    "forward_fill": Rule({"x": 0, "valid": 0}),
    **dict.fromkeys(("discounted_returns", "gae", "vtrace"), Rule(REWARDS)),
    "hmm_filter": Rule(MARKOV, finals=(1,), has_axis=False),
    "hmm_smoother": Rule(MARKOV, has_axis=False),
    "viterbi": Rule(MARKOV, finals=(1,), has_axis=False),
    "kalman_filter": Rule(
        {"y": 1, **DYNAMICS, "H": 2, "R": 2, "observed": 0}, finals=(2,), has_axis=False
    ),
    "rts_smoother": Rule({"mean": 1, "covariance": 2, **DYNAMICS}, has_axis=False),
    "selective_scan": Rule(
        {"u": 1, "delta": 1, "B": 1, "C": 1, "z": 1}, finals=(1,), has_axis=False, has_batch=True,
        states=("init",),
    ),
}  # fmt: skip
# Functions of a pytree `xs`, along an axis that counts the batch dimensions of the operator `op`
# where there is one.
OF_OPERATORS = ("associative_scan", "reduce", "windowed", "nonlinear_recurrence")


def run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a public function that was called with jagged tensors."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    of_operator = function.__name__ in OF_OPERATORS
    if of_operator:
        named = leaves_of(given["xs"])
        rule = Rule(dict.fromkeys(named, 0))
    else:
        rule = RULES.get(function.__name__, Rule({}))
        named = {key: given[key] for key in rule.series if key in given}
    first = next((key for key, t in named.items() if is_jagged(t)), None)
    if first is None:
        with WithoutTorchFunctionOfClasses():  # refuses nested tensors, in words of their argument
            return function(*args, **kwargs)
    packed = Packed(first, named[first], rule)
    check_options(given, first)
    if of_operator:
        take_elements(packed, given, named)
    else:
        take_arguments(packed, given, named)
    given["offsets"] = packed.offsets
    found = function(*bound.args, **bound.kwargs)
    if function.__name__ == "reduce" or given.get("return_final") == "only":
        return found
    if of_operator:
        if given.get("return_final"):
            return tree_map(packed.result, found[0]), found[1]
        return tree_map(packed.result, found)
    if given.get("include_initial"):
        packed = replace(packed, more=1)
    if isinstance(found, Tensor):
        return packed.result(found)
    parts = [packed.final(t) if k in rule.finals else packed.result(t) for k, t in enumerate(found)]
    return type(found)(*parts) if hasattr(found, "_fields") else tuple(parts)


def take_elements(packed: Packed, given: dict[str, Any], named: Mapping[str, Any]) -> None:
    """Put the values into the arguments of a scan or reduction with an operator."""
    values = [packed.values(key, t, None) for key, t in named.items()]
    spec = flatten(given["xs"])[1]
    element = 0
    operator = resolve_operator(given["op"], given["xs"]) if "op" in given else None
    if isinstance(operator, Monoid):
        element = operator.element_ndims(spec, "xs")[list(named).index(packed.name)]
    given["axis"] = packed.checked_axis(given["axis"], element)
    given["xs"] = unflatten(values, spec)


def take_arguments(packed: Packed, given: dict[str, Any], named: Mapping[str, Any]) -> None:
    """Put the values into the arguments of a named function."""
    rule = packed.rule
    axis = packed.checked_axis(given.get("axis", -1), rule.series[packed.name])
    if rule.has_axis:
        given["axis"] = axis
    for key, t in named.items():
        given[key] = packed.values(key, t, rule.series[key])
    for key in rule.states:
        if isinstance(given[key], Tensor):
            given[key] = given[key].unsqueeze(1)


def leaves_of(xs: Any) -> dict[str, Any]:
    """The leaves of a pytree by their paths."""
    leaves, spec = flatten(xs)
    return dict(zip(leaf_paths(spec, "xs"), leaves, strict=True))


def check_options(given: Mapping[str, Any], name: str) -> None:
    """Raise ScanValueError for arguments that a jagged tensor leaves no room for."""
    for option, why in (
        ("offsets", "the sequences are its components: leave offsets out"),
        ("reset", "a scan starts afresh in each of its components, or where a mask says so in a "
                  f"dense tensor: pass {name}.values(), and the starts in reset"),
    ):  # fmt: skip
        if given.get(option) is not None:
            raise ScanValueError(
                f"{name} is a jagged nested tensor, and {option} was passed; {why}"
            )
    if given.get("pairs"):
        raise ScanValueError(
            f"{name} is a jagged nested tensor, whose components have one pair fewer than steps: "
            f"for pairs=True pass {name}.values(), and offsets={name}.offsets()"
        )


@dataclass(frozen=True)
class Packed:
    """A jagged argument, which others have to fit.

    name: of the argument.
    like: the jagged tensor.
    more: how many results more than elements each sequence has.
    """

    name: str
    like: Any
    rule: Rule
    more: int = 0

    @property
    def offsets(self) -> Tensor:
        offsets: Tensor = self.like.offsets()
        return offsets

    def checked_axis(self, axis: Any, element: int) -> int:
        """The axis of the values. Raises AxisError where it is not the ragged dimension.

        axis: as the caller gave it, counted over the batch dimensions.
        element: how many dimensions belong to one element.
        """
        ragged, dims = ragged_dimension(self.like), self.like.dim() - element
        shape = list(self.like.shape)
        found = check_axis(axis, shape, dims, self.name)
        if found != ragged:
            remedy = f"pass axis={ragged}" if self.rule.has_axis else "the steps have to be ragged"
            raise AxisError(
                f"axis {found} of {self.name} is not its ragged dimension, which is {ragged} of "
                f"{shape}; {remedy}"
            )
        return ragged - 1

    def values(self, name: str, t: Any, element: int | None) -> Any:
        """What the function takes for this argument. Raises where it does not fit.

        element: as in `Rule`; None where nothing may be dense.
        """
        if not isinstance(t, Tensor):
            return t
        if not is_jagged(t):
            behind = 0
            if element is not None:
                behind = self.like.dim() - 1 - ragged_dimension(self.like)
                behind -= self.rule.series[self.name]
            if element is None or t.is_nested or t.dim() > behind + element:
                raise ScanTypeError(
                    f"{self.name} is a jagged nested tensor, but {name} is "
                    f"{'a nested tensor of another layout' if t.is_nested else 'a dense one'} of "
                    f"dtype {t.dtype}; pass one jagged in the same way"
                    f"{'' if element is None else ', or one without steps'}"
                )
            return t
        nested: Any = t
        if nested.lengths() is not None:
            raise ScanTypeError(
                f"{name} is a nested tensor whose components do not stand back to back; pass "
                f"{name}.contiguous()"
            )
        offsets = nested.offsets()
        if ragged_dimension(t) != ragged_dimension(self.like):
            raise ScanValueError(
                f"{name} is ragged in dimension {ragged_dimension(t)}, but {self.name} in "
                f"dimension {ragged_dimension(self.like)}"
            )
        if offsets is not self.offsets and not torch.equal(offsets, self.offsets):
            raise ScanValueError(
                f"{name} and {self.name} are jagged, but their components have different lengths"
            )
        values: Tensor = nested.values()
        return values.unsqueeze(0) if self.rule.has_batch else values

    def result(self, t: Tensor) -> Tensor:
        """Values for every step as a jagged tensor."""
        t = t.squeeze(0) if self.rule.has_batch else t
        if self.more == 0:
            return jagged_like(t, self.like, None)
        count = torch.arange(len(self.offsets), device=t.device, dtype=self.offsets.dtype)
        return jagged_like(t, self.like, self.offsets + self.more * count)

    def final(self, t: Tensor) -> Tensor:
        """What there is once for each sequence."""
        return t.squeeze(1) if self.rule.has_batch else t


HOOKS.of_jagged = run
