"""What users meet on the first day: each message names the cause and the remedy."""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import assocscan
from assocscan import (
    AssocScanError,
    AxisError,
    Monoid,
    MonoidError,
    ScanTypeError,
    ScanValueError,
    TraceError,
    associative_scan,
    compact,
    cummax,
    cumsum,
    discounted_returns,
    ewm_mean,
    explain,
    forward_fill,
    gae,
    hmm_filter,
    kalman_filter,
    lfilter,
    linear_recurrence,
    logcumsumexp,
    matrix_recurrence,
    ops,
    reduce,
    run_lengths,
    segmented,
    with_lift,
)

x, y, one = torch.ones(5), torch.ones(5, 2), torch.ones(1, 1)
OTHER = torch.device("meta")


def adding(left: Any, right: Any) -> Any:
    return left + right


def larger(left: Tensor, right: Tensor) -> Tensor:
    return max(left, right)


CONVERTING: tuple[Callable[[Tensor, Tensor], Any], ...] = (
    lambda left, right: left + float(right),
    lambda left, right: left + math.exp(right),
    lambda left, right: left + right.item(),
    lambda left, right: torch.from_numpy(left.numpy() + right.numpy()),
    lambda left, right: np.exp(left) + right,
)


def both(left: Tensor, right: Tensor) -> Tensor:
    return left if left > right else right + float(left)


def joined(left: Tensor, right: Tensor) -> Tensor:
    return torch.cat([left, right])


def own_list(left: Tensor, right: Tensor) -> Tensor:
    values: list[Tensor] = []
    values[0] = left
    return values[0]


def product(left: Tensor, right: Tensor) -> Tensor:
    return right @ left


def product_of_pairs(left: Any, right: Any) -> Any:
    return right[0] @ left[0], right[0] @ left[1] + right[1]


def dot(left: Tensor, right: Tensor) -> Tensor:
    return (left * right).sum(-1)


def last_size(left: Tensor, right: Tensor) -> Tensor:
    return left + right / right.shape[-1]


def pairwise(left: Any, right: Any) -> Any:
    a1, b1 = left
    a2, b2 = right
    return a2 * a1, a2 * b1 + b2


def sums_of_three(left: Any, right: Any) -> Any:
    return tuple(a + b for a, b in zip(left, right, strict=True))


three = Monoid(sums_of_three)


def op(**options: Any) -> Monoid:
    return Monoid(adding, name="adding_for_messages", **options)


def lifting(lift: Any, **options: Any) -> Monoid:
    return Monoid(pairwise, lift=lift, **options)


class Lower:
    def __call__(self, state: Any, xs: Any = None) -> Any:
        return state


Refused = tuple[Callable[[], Any], Any, list[str]]

STRUCTURES: list[Refused] = [
    (lambda: associative_scan(ops.affine, x), ScanTypeError,
     ["xs is a tensor", "'affine' takes a tuple of 2 tensors", "pass (xs0, xs1)"]),
    (lambda: associative_scan(ops.affine, {"a": x, "b": x}), ScanTypeError,
     ["xs is a dict", "'affine' takes a tuple of 2 tensors", "pass (xs['a'], xs['b'])"]),
    (lambda: associative_scan(ops.affine, [x, x]), ScanTypeError,
     ["xs is a list of 2", "a tuple of 2 tensors", "pass tuple(xs)"]),
    (lambda: associative_scan("sum", [x]), ScanTypeError,
     ["xs is a list of 1", "'sum' takes one tensor", "pass xs[0]"]),
    (lambda: reduce(ops.matrix_affine, y), ScanTypeError, ["'matrix_affine' takes a tuple (a, b)"]),
    (lambda: explain(ops.affine, x), ScanTypeError, ["'affine' takes a tuple of 2 tensors"]),
    (lambda: ops.affine.identity_like(x), ScanTypeError, ["'affine' takes a tuple of 2 tensors"]),
    (lambda: associative_scan(Monoid(adding, element_ndim=(0, 1)), y), ScanTypeError,
     ["xs is a tensor", "a tuple of 2 tensors", "element_ndim (0, 1)"]),
    *((lambda call=call: call(ops.argmin), ScanTypeError,
       ["is a tensor, but 'argmin' takes a tuple of 2 tensors, (value, index)"])
      for call in (lambda op: associative_scan(op, x), lambda op: op(x, x))),
    (lambda: reduce(ops.argmax, [x, x]), ScanTypeError, ["(value, index); pass tuple(xs)"]),
    (lambda: associative_scan(Monoid(lambda left, right: left[0], name="first"), x), TraceError,
     ["'first' failed on (left: float32[], right: float32[])", "each a tensor, as xs is"]),
    (lambda: associative_scan(lifting(lambda v: v), x), TraceError,
     ["'pairwise' failed on (left: float32[]", "left and right are each a tensor, as lift makes"]),
    (lambda: associative_scan(lifting(lambda v: v, identity=(1.0, 0.0)), x), ScanTypeError,
     ["lift of 'pairwise' makes a tensor", "identity (1.0, 0.0) is a tuple of 2"]),
    (lambda: associative_scan(
        Monoid(torch.matmul, name="product", element_ndim=2, lift=lambda v: v.sum()),
        torch.ones(5, 2, 2)), TraceError, ["left: float32[]", "as lift makes them"]),
    (lambda: associative_scan(pairwise, {"a": x, "b": x}), TraceError,
     ["left['a']: float32[2]", "test_messages.py", "each a dict with the keys ['a', 'b']"]),
    (lambda: associative_scan(segmented(ops.sum), x), ScanTypeError, ["a pair (xs, reset)"]),
]  # fmt: skip

FUNCTIONS: list[Refused] = [
    (lambda: associative_scan(ops.last_valid, x), TraceError,
     ["lift of 'last_valid' takes (x, valid)", "called as lift(xs), since xs is a tensor",
      "pass xs = (x, valid)"]),
    (lambda: associative_scan(op(lift=lambda a: a), (x, x)), TraceError,
     ["takes (a)", "called as lift(*xs) with 2 arguments, since xs is a tuple of 2",
      "pass one tensor"]),
    (lambda: associative_scan(op(lift=lambda a, b: a * b), x), TraceError,
     ["takes (a, b)", "lift(xs)", "pass xs = (a, b)"]),
    (lambda: associative_scan(with_lift(ops.sum, lambda a, b: a * b), x), TraceError,
     ["takes (a, b)", "lift(xs)", "pass xs = (a, b)"]),
    (lambda: associative_scan(op(lower=lambda s, p, q: s), x), TraceError,
     ["'adding_for_messages'", "lower(s, p, q)", "lower(state, xs)", "inputs come as one"]),
    (lambda: associative_scan(op(lower=lambda s, xs=None: s), x), TraceError,
     ["lower(s, xs=None)", "called as lower(state), without the inputs", "lower(state, xs)"]),
    (lambda: associative_scan(op(lower=lambda *a: a[0]), x), TraceError,
     ["lower(*a)", "without the inputs", "lower(state, xs)"]),
    (lambda: associative_scan(op(lower=lambda: 1), x), TraceError,
     ["lower of 'adding_for_messages' takes ()", "called as lower(state)"]),
    (lambda: associative_scan(op(lower=lambda s, *, k: s), x), TraceError,
     ["takes (s, *, k)", "lower(state)", "'k'"]),
    (lambda: associative_scan(op(lower=functools.partial(lambda *a: a[0])), x), TraceError,
     ["lower(*a)", "without the inputs"]),
    (lambda: associative_scan(op(lower=Lower()), x), TraceError,
     ["lower(state: 'Any', xs: 'Any' = None)", "without the inputs"]),
    (lambda: op(adjoint=(ops.affine, lambda y, x: y)), TraceError,
     ["adjoint of 'adding_for_messages' takes (y, x)", "called as element(y_t, x_next, g_t)"]),
    (lambda: op(adjoint=(ops.affine, lambda y, x, g, h: y)), TraceError,
     ["takes (y, x, g, h)", "called as element(y_t, x_next, g_t)", "'h'"]),
    (lambda: associative_scan(Monoid(lambda left: left, name="unary"), x), TraceError,
     ["'unary' takes (left)", "op(left, right)"]),
    (lambda: associative_scan(lambda left: left, x), TraceError, ["takes (left)", "op(left"]),
    (lambda: associative_scan(op(identity=lambda: 0.0), x), ScanTypeError,
     ["the identity of 'adding_for_messages' takes ()", "the element's shapes", "top-level"]),
    (lambda: associative_scan(op(identity=lambda a: torch.eye(a[-1])), x), MonoidError,
     ["the identity of 'adding_for_messages' failed", "test_messages.py", "IndexError"]),
    (lambda: associative_scan(larger, x), TraceError,
     ["'larger' branches", "test_messages.py", "return max(left, right)", "torch.maximum"]),
    (lambda: associative_scan(Monoid(larger), x), TraceError,
     ["'larger' branches", "return max(left, right)", "torch.where", "torch.maximum"]),
    *((lambda fn=fn, wrap=wrap: associative_scan(wrap(fn), x), TraceError,
       ["Python number or an array of a tensor", "test_messages.py", "tensors must stay tensors"])
      for wrap in (lambda fn: Monoid(fn, name="converting"), lambda fn: fn)
      for fn in CONVERTING),
    *((lambda fn=fn: Monoid(fn, name="converting")(x, x), TraceError, ["tensors must stay"])
      for fn in CONVERTING[:3]),
    (lambda: associative_scan(Monoid(both, name="both"), x), TraceError, ["'both' branches"]),
    (lambda: associative_scan(Monoid(joined, name="joined"), x), TraceError,
     ["torch.cat joins tensors along a dimension, and these have none", "element_ndim"]),
    (lambda: associative_scan(Monoid(own_list, name="own_list"), x), TraceError,
     ["IndexError: list assignment index out of range"]),
]  # fmt: skip

SHAPES: list[Refused] = [
    *((lambda fn=fn: associative_scan(Monoid(fn, name="product"), torch.ones(5, 2, 2)), TraceError,
       ["'product' failed", "elements are numbers", "declare element_ndim: 2 for matrices"])
      for fn in (product, lambda left, right: torch.einsum("ij,jk->ik", right, left),
                 lambda left, right: torch.linalg.inv(right),
                 lambda left, right: left.sum((0, 1)))),
    *((lambda fn=fn: associative_scan(Monoid(fn, name="of_vectors"), y), TraceError,
       ["'of_vectors' failed", "elements are numbers", "1 for vectors"])
      for fn in (lambda left, right: left[..., 0] + right, last_size)),
    *((lambda options=options: associative_scan(Monoid(pairwise, **options), (y, y)), TraceError,
       ["'pairwise.lower' works along a dimension", "test_messages.py", "element_ndim is 0",
        "xs[0], of shape [5, 2]", "declare element_ndim=1"])
      for options in ({"lower": lambda s: s[1].sum(-1)},
                      {"lower": lambda s, xs: (s[1] * xs[1]).sum(-1)},
                      {"lift": lambda a, b: (a, b), "lower": lambda s: s[1].logsumexp(-1)})),
    *((lambda fn=fn: associative_scan(Monoid(fn, name="along"), y), TraceError,
       ["operator 'along' works along a dimension", "declare element_ndim=1"])
      for fn in (dot, lambda left, right: left + right.softmax(-1),
                 lambda left, right: left + torch.linalg.vector_norm(right, dim=0),
                 lambda left, right: left + right.sort().values)),
    (lambda: associative_scan(Monoid(product_of_pairs), (torch.ones(5, 2, 2), y)), ScanValueError,
     ["another number of batch dimensions", "one element of 'product_of_pairs'", "(2, 1)"]),
    (lambda: associative_scan(ops.matmul, x), ScanValueError,
     ["xs has shape [5]", "its elements have 2 dimensions", "element_ndim of 'matmul'",
      "expected 3 dimensions or more"]),
    (lambda: ops.matmul(torch.ones(2, 3), torch.ones(2, 3)), TraceError, ["must be square"]),
    (lambda: associative_scan(Monoid(dot, element_ndim=1), y), ScanValueError,
     ["'dot' changes the shape of element from [2] to []", "the result have one shape"]),
    (lambda: associative_scan(dot, y), ScanValueError,
     ["n steps along axis 0", "left is [n, 2], the result [n]"]),
    (lambda: associative_scan(dot, y.mT, 1), ScanValueError,
     ["n steps along axis 1", "left is [2, n], the result [2]"]),
    (lambda: reduce(lambda left, right: torch.stack([left, right]), y), ScanValueError,
     ["left is [n, 2], the result [2, n, 2]"]),
    (lambda: associative_scan(lambda left, right: (left[0], right[1].sum()), (x, x)),
     ScanValueError, ["left[1] is [n], the result []"]),
    (lambda: associative_scan(Monoid(pairwise, element_ndim=(0, 1)), (x, y[0])), ScanValueError,
     ["another number of batch dimensions", "or correct element_ndim of 'pairwise'"]),
    (lambda: associative_scan(ops.matmul, torch.ones(5, 2, 3)), TraceError,
     ["'matmul' failed on (left: float32[2, 3], right: float32[2, 3])", "must be square"]),
    (lambda: associative_scan(ops.log_matmul, torch.ones(5, 2, 3)), TraceError, ["square"]),
    (lambda: associative_scan(op(element_ndim=3), y), ScanValueError,
     ["xs has shape [5, 2]", "its elements have 3 dimensions"]),
    (lambda: associative_scan(ops.matmul, torch.ones(2, 2)), AxisError,
     ["[2, 2]", "0 batch dimensions, and so none to scan along"]),
    (lambda: associative_scan(ops.sum, x, 1), AxisError, ["axis 1", "pass axis=0"]),
    (lambda: associative_scan(ops.sum, y, 2), AxisError, ["axis 2", "it may be -2 to 1"]),
    (lambda: associative_scan(ops.affine, (y, y[:1])), ScanValueError,
     ["xs[1] has 1", "xs[1].expand(5, -1)"]),
    (lambda: associative_scan(ops.affine, (y[:1], y)), ScanValueError,
     ["xs[1] has length 5", "xs[0] has 1", "xs[0].expand(5, -1)"]),
    (lambda: associative_scan(three, (y[:3], y, y)), ScanValueError,
     ["xs[1] has length 5", "xs[0] has 3 (shape [3, 2])"]),
    (lambda: associative_scan(ops.affine, (x, y)), ScanValueError,
     ["xs[0] has another number of batch dimensions than xs[1]", "unsqueeze xs[0]"]),
    (lambda: associative_scan(ops.affine, (y, x)), ScanValueError,
     ["xs[1] has another number of batch dimensions than xs[0]", "unsqueeze xs[1]"]),
    (lambda: associative_scan(three, (x, y, y)), ScanValueError,
     ["xs[0] has another number of batch dimensions than xs[1]", "unsqueeze xs[0]",
      "xs[0]: shape [5] with", "xs[2]: shape [5, 2] with"]),
    (lambda: associative_scan(three, (y, x, x)), ScanValueError,
     ["xs[0] has another number of batch dimensions than xs[1]", "unsqueeze the others"]),
    (lambda: associative_scan(pairwise, (y.mT, y.mT[:, :1]), 1), ScanValueError,
     ["xs[1].expand(-1, 5)"]),
]  # fmt: skip

VALUES: list[Refused] = [
    (lambda: associative_scan(ops.sum, x, offsets=[0, 5]), ScanTypeError,
     ["offsets must be a tensor, got list: torch.tensor(offsets)"]),
    (lambda: associative_scan(ops.sum, x, offsets=torch.tensor([0.0, 5.0])), ScanTypeError,
     ["offsets must be int32 or int64, got torch.float32; convert them: offsets.long()"]),
    (lambda: associative_scan(ops.sum, x, offsets=torch.tensor([2, 3])), ScanValueError,
     ["offsets[0] is 2, it must be 0; of lengths make offsets by", "offsets_of(lengths)"]),
    (lambda: associative_scan(ops.sum, x, offsets=torch.tensor([0, 5], device=OTHER)),
     ScanValueError, ["offsets", "meta device"]),
    (lambda: associative_scan(ops.sum, x, offsets=torch.tensor([0, 5]).to_sparse()),
     ScanTypeError, ["offsets", "sparse"]),
    (lambda: associative_scan(ops.sum, x, init=torch.nested.nested_tensor([x, x])),
     ScanTypeError, ["init is a nested tensor"]),
    (lambda: associative_scan(ops.sum, x, init=x[0].to_sparse()), ScanTypeError, ["init has the"]),
    (lambda: associative_scan(ops.sum, x, init="a"), ScanTypeError, ["init is a str"]),
    (lambda: associative_scan(ops.sum, x, reverse="no"), ScanTypeError,
     ["reverse is 'no', expected True or False"]),
    (lambda: associative_scan(ops.sum, x, inclusive=None), ScanTypeError, ["inclusive is None"]),
    (lambda: associative_scan(ops.sum, x, reverse=2), ScanTypeError, ["reverse is 2"]),
    (lambda: associative_scan(ops.sum, x, return_final="no"), ScanTypeError, ["return_final is"]),
    (lambda: reduce(ops.sum, x, reverse="no"), ScanTypeError, ["reverse is 'no'"]),
    (lambda: explain(ops.sum, x, inclusive="no"), ScanTypeError, ["inclusive is 'no'"]),
    (lambda: cumsum(x, reverse="no"), ScanTypeError, ["reverse is 'no'"]),
    (lambda: cummax(x, inclusive="no"), ScanTypeError, ["inclusive is 'no'"]),
    (lambda: linear_recurrence(y, y, return_final="no"), ScanTypeError, ["return_final is 'no'"]),
    *((lambda f=f: f(ops.sum, x, deterministic="no"), ScanTypeError,
       ["deterministic is 'no', expected True or False, or None"])
      for f in (associative_scan, reduce, explain)),
    (lambda: associative_scan(ops.sum, x, deterministic=2), ScanTypeError, ["deterministic is 2"]),
]  # fmt: skip

KEYWORDS: list[Refused] = [
    (lambda: associative_scan(ops.sum, y, dim=1), ScanTypeError,
     ["associative_scan() has no argument 'dim': pass axis=1"]),
    *((lambda call=call: call(fn=adding, elems=x), ScanTypeError, ["pass op=…", "pass xs=…"])
      for call in (associative_scan, reduce, explain)),
    (lambda: associative_scan(ops.sum, elems=x), ScanTypeError, ["'elems': pass xs=…"]),
    (lambda: associative_scan(ops.sum), ScanTypeError, ["xs was not passed"]),
    (lambda: associative_scan(xs=x), ScanTypeError, ["op was not passed"]),
    (lambda: associative_scan(ops.sum, y, 0, combine_mode="pointwise"), ScanTypeError,
     ["'combine_mode'", "leave it out"]),
    (lambda: associative_scan(ops.sum, y, 0, False, "pointwise"), ScanTypeError,
     ["inclusive is 'pointwise'"]),
    (lambda: associative_scan(ops.sum, y, True), ScanTypeError, ["pass reverse=True by name"]),
    (lambda: associative_scan(ops.sum, y, True, 1), ScanTypeError, ["pass reverse=True by name"]),
    (lambda: associative_scan(ops.sum, y, exclusive=True), ScanTypeError, ["inclusive=False"]),
    (lambda: associative_scan(ops.sum, y, return_finals=True), ScanTypeError,
     ["pass return_final=True"]),
    (lambda: associative_scan(ops.sum, y, cu_seqlens=x), ScanTypeError, ["pass offsets=…"]),
    (lambda: assocscan.ewm_mean(y, span=9), ScanTypeError, ["pass alpha=2 / (span + 1)"]),
    (lambda: assocscan.ewm_var(y, com=9), ScanTypeError, ["pass alpha=1 / (com + 1)"]),
    (lambda: associative_scan("add", y), ScanValueError, ["'add'; did you mean 'sum'?"]),
    (lambda: associative_scan("mul", y), ScanValueError, ["'mul'; did you mean 'prod'?"]),
    (lambda: associative_scan(ops.sum, y, zzz=1), ScanTypeError, ["'zzz'", "op, xs, axis"]),
    (lambda: reduce(ops.sum, y, dim=1), ScanTypeError, ["reduce() has no", "axis=1"]),
    (lambda: explain(ops.sum, y, dim=1), ScanTypeError, ["explain() has no", "axis=1"]),
    *((lambda f=f: f(y, dim=1), ScanTypeError, [f"{f.__name__}() has no", "pass axis=1"])
      for f in (cumsum, assocscan.cumprod, cummax, assocscan.cummin, logcumsumexp, run_lengths,
                forward_fill)),
    (lambda: linear_recurrence(y, y, dim=1), ScanTypeError, ["linear_recurrence()", "axis=1"]),
    (lambda: gae(x, x, x[0], 0.9, 0.9, dim=0), ScanTypeError, ["gae()", "axis=0"]),
    (lambda: discounted_returns(x, 0.9, dim=0), ScanTypeError, ["discounted_returns()", "axis=0"]),
    (lambda: compact(x, x > 0, dim=0), ScanTypeError, ["compact()", "axis=0"]),
    (lambda: lfilter(x, x, x, dim=0), ScanTypeError, ["lfilter()", "axis=0"]),
    (lambda: ewm_mean(x, 0.5, dim=0), ScanTypeError, ["ewm_mean()", "axis=0"]),
    (lambda: matrix_recurrence(one, y, dim=0), ScanTypeError, ["matrix_recurrence()", "axis=0"]),
]  # fmt: skip

ARGUMENTS: list[Refused] = [
    (lambda: linear_recurrence(0.9, x), AxisError, ["axis 1", "for b of shape [5]", "pass axis=0"]),
    (lambda: linear_recurrence(y, y, x[:3]), ScanValueError, ["init has shape [3]", "[5]"]),
    (lambda: linear_recurrence(y, y, x.to(OTHER)), ScanValueError, ["init is on meta", "b is on"]),
    (lambda: linear_recurrence(y, y.to(OTHER)), ScanValueError, ["a is on cpu but b is on meta"]),
    (lambda: linear_recurrence(y, y.to_sparse()), ScanTypeError, ["b has the layout"]),
    (lambda: linear_recurrence(y.to_sparse(), y), ScanTypeError, ["a has the layout"]),
    (lambda: cumsum(y, 5), AxisError, ["axis 5", "for x of shape [5, 2]"]),
    (lambda: cumsum(y.to_sparse(), 0), ScanTypeError, ["x has the layout"]),
    (lambda: cummax(y.to_sparse(), 0), ScanTypeError, ["x has the layout"]),
    (lambda: cummax(y, 1.5), ScanTypeError, ["axis must be an int, got 1.5"]),
    (lambda: logcumsumexp(y, 7), AxisError, ["x of shape [5, 2]"]),
    (lambda: run_lengths(torch.tensor(1)), AxisError, ["for x of shape []"]),
    (lambda: run_lengths(x, 3), AxisError, ["axis 3", "x of shape [5]"]),
    (lambda: compact(x, x > 0, 4), AxisError, ["axis 4", "x of shape [5]"]),
    (lambda: forward_fill(x, None, 4), AxisError, ["x of shape [5]"]),
    (lambda: forward_fill(x, x > 0, 4), AxisError, ["x of shape [5]"]),
    (lambda: forward_fill(x, (x > 0).to(OTHER)), ScanValueError, ["valid is on meta", "x is on"]),
    (lambda: forward_fill(x, x), ScanTypeError, ["valid has dtype", ".bool()"]),
    (lambda: discounted_returns(x, 0.9, axis=3), AxisError, ["rewards of shape [5]"]),
    (lambda: discounted_returns(y, 0.9, bootstrap=x[:3]), ScanValueError, ["bootstrap has shape"]),
    (lambda: discounted_returns(y, 0.9, bootstrap=x + 0j), ScanTypeError,
     ["bootstrap has dtype"]),
    (lambda: gae(x, x, x[0], 0.9, 0.9, done=x), ScanTypeError, ["done has dtype", "done.bool()"]),
    (lambda: gae(x[:4], x, x[0], 0.9, 0.9), ScanValueError,
     ["values has shape [5], one step more than the rewards, [4]", "values.narrow(0, 0, 4)",
      "values.select(0, 4), as bootstrap"]),
    (lambda: gae(x, x.to(OTHER), x[0], 0.9, 0.9), ScanValueError, ["values is on meta"]),
    (lambda: gae(x, x, x[0].to(OTHER), 0.9, 0.9), ScanValueError, ["bootstrap is on meta"]),
    (lambda: matrix_recurrence(torch.eye(2), y), AxisError, ["for b of shape", "pass axis=0"]),
    (lambda: matrix_recurrence(torch.eye(2), y, x[:3], 0), ScanValueError, ["init has shape [3]"]),
    (lambda: matrix_recurrence(torch.eye(2), y, x[:2].double(), 0), ScanTypeError,
     ["init has dtype"]),
    (lambda: matrix_recurrence(torch.eye(2, device=OTHER), y), ScanValueError, ["A is on meta"]),
    (lambda: ewm_mean(x, 0.5, axis=4), AxisError, ["x of shape [5]"]),
    (lambda: ewm_mean(x, 0.5, offsets=x), ScanTypeError, ["offsets"]),
    (lambda: lfilter(x, x.to(OTHER), x), ScanValueError, ["a is on meta", "x is on cpu"]),
    (lambda: hmm_filter(x[:3], torch.ones(3, 3, device=OTHER), torch.ones(4, 3)), ScanValueError,
     ["transition is on meta", "likelihood is on cpu"]),
    (lambda: kalman_filter(y[:, :1], *[one] * 4, one[0].to(OTHER), one), ScanValueError,
     ["mean is on meta", "y is on cpu"]),
]  # fmt: skip

EVERY = [*STRUCTURES, *FUNCTIONS, *SHAPES, *VALUES, *KEYWORDS, *ARGUMENTS]


@pytest.mark.filterwarnings("ignore:.*nested tensors")
@pytest.mark.parametrize("call,kind,mentions", EVERY, ids=[f"{k}" for k in range(len(EVERY))])
def test_message(
    call: Callable[[], Any],
    kind: type[Exception],
    mentions: list[str],
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Nothing is logged besides: torch logs fifteen lines for what fails on its fake tensors."""
    with caplog.at_level(logging.WARNING), pytest.raises(kind) as caught:
        call()
    assert isinstance(caught.value, AssocScanError)
    for words in mentions:
        assert words in str(caught.value)
    assert " at 0x" not in str(caught.value)
    assert not caplog.records and not capfd.readouterr().err


@pytest.mark.filterwarnings("ignore:.*quantiz.*")
def test_quantized_tensors_are_refused() -> None:
    quantized = torch.quantize_per_tensor(x, 1.0, 0, torch.quint8)
    for given in ((quantized, None), (x, quantized[0])):
        with pytest.raises(ScanTypeError, match=r"is quantized.*\.dequantize\(\)"):
            associative_scan(ops.sum, given[0], init=given[1])


@pytest.mark.parametrize(
    "yes,no",
    [(1, 0), (np.True_, np.False_), (torch.tensor(True), torch.tensor(False))],
    ids=["int", "numpy", "torch"],
)
def test_what_is_as_good_as_a_bool(yes: Any, no: Any) -> None:
    want = associative_scan(ops.sum, x, 0, True, False, return_final=True)
    got = associative_scan(ops.sum, x, 0, yes, no, return_final=yes)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_valid_lowers_are_told_apart_as_before() -> None:
    """A default that is not None is a number that the function carries along."""
    for lower, want in (
        (lambda s: s, 1.0),
        (lambda s, k=2.0: k * s, 2.0),
        (lambda s, xs: s + xs, 2.0),
        (lambda s, xs, k=2.0: k * (s + xs), 4.0),
        (functools.partial(lambda k, s: k * s, 3.0), 3.0),
        (functools.partial(torch.nn.functional.softplus, beta=2.0), math.log1p(math.e**2) / 2),
        (torch.nn.functional.relu, 1.0),
        (torch.neg, -1.0),
        (torch.nn.Sigmoid(), torch.sigmoid(x[0]).item()),
    ):
        assert associative_scan(op(lower=lower), x)[0].item() == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize(
    "function",
    [f for n, f in vars(assocscan).items() if inspect.isfunction(f) and not n.startswith("_")],
    ids=lambda f: f.__name__,
)
def test_signatures_show_no_unknown_keywords(function: Callable[..., Any]) -> None:
    kinds = [p.kind for p in inspect.signature(function).parameters.values()]
    if function is not assocscan.monoid:
        assert inspect.Parameter.VAR_KEYWORD not in kinds
