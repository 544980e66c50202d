"""What the first programs of users did wrong, and what is said of it: scans in the place of
operators, swapped inputs, lists for tuples, random operators, names, axes, arrays, and habits of
other libraries."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import dropout

import assocscan
from assocscan import (
    AssocScanError,
    AxisError,
    BackendError,
    FallbackWarning,
    Monoid,
    MonoidError,
    ScanTypeError,
    ScanValueError,
    TraceError,
    associative_scan,
    cummax,
    cumprod,
    cumsum,
    linear_recurrence,
    logcumsumexp,
    matrix_recurrence,
    monoid,
    ops,
    reduce,
    segmented,
    stream,
)

x, y = torch.rand(5), torch.rand(2, 5, 4)
mask = torch.tensor([True, False, True, False, False])
number = torch.tensor(1.0)

Refused = tuple[Callable[[], Any], type[Exception], list[str]]

PAIRS: list[Refused] = [
    (lambda: associative_scan(segmented(ops.sum), [x, mask]), ScanTypeError,
     ["a pair (xs, reset)", "got a list of 2; pass tuple(xs)"]),
    (lambda: associative_scan(segmented(ops.sum), (mask, x)), ScanTypeError,
     ["got the mask first: pass (xs, reset), in this order"]),
    (lambda: associative_scan(segmented(ops.affine), (mask, (x, x))), ScanTypeError,
     ["got the mask first"]),
    (lambda: associative_scan(segmented(ops.sum), (x, mask.int())), ScanTypeError,
     ["got reset with dtype torch.int32 (convert it: reset != 0)"]),
    (lambda: associative_scan(segmented(ops.affine), ([x, x], mask)), ScanTypeError,
     ["xs[0] is a list of 2, but 'affine' takes a tuple of 2", "pass tuple(xs[0])"]),
    (lambda: associative_scan(ops.last_valid, (mask, x)), TraceError,
     ["'last_valid.lift'", "the mask first, a tensor of bool: are inputs swapped?"]),
]  # fmt: skip

OPERATORS: list[Refused] = [
    *((lambda op=op: associative_scan(op, x), ScanTypeError,
       [f"op is {op.__name__}, which is itself a scan", "its operator is ops.sum"])
      for op in (torch.cumsum, torch.Tensor.cumsum, np.cumsum, cumsum)),
    (lambda: reduce(torch.logcumsumexp, x), ScanTypeError, ["its operator is ops.logaddexp"]),
    (lambda: associative_scan(assocscan.gae, x), ScanTypeError, ["op is gae", "itself a scan"]),
    (lambda: associative_scan(associative_scan, x), ScanTypeError, ["itself a scan"]),
    (lambda: Monoid(torch.cumprod), ScanTypeError, ["its operator is ops.prod"]),
    (lambda: stream(linear_recurrence, [x, x]), ScanTypeError,
     ["op is linear_recurrence, which is itself a scan", "its operator is ops.affine"]),
    (lambda: associative_scan(sum, x), ScanTypeError, ["Python's sum", "ops.sum or torch.add"]),
    (lambda: associative_scan(max, x), ScanTypeError, ["Python's max", "torch.maximum"]),
    (lambda: associative_scan(torch.sum, x), TraceError,
     ["got (Tensor, Tensor); left and right are each a tensor", "called as op(left, right)"]),
    (lambda: associative_scan(torch.softmax, x), TraceError,
     ["must be int, not Tensor", "called as op(left, right)"]),
    (lambda: associative_scan(lambda left, right: left + torch.randn_like(right), x,
                              backend="cpu"), AssocScanError, ["it is random", "'randn_like'"]),
]  # fmt: skip

AXES: list[Refused] = [
    *((lambda f=f: f(number, 1), AxisError,
       ["axis 1 is out of range for x of shape [], which counts as one step; pass axis=0"])
      for f in (cumsum, cumprod, cummax, logcumsumexp)),
    (lambda: associative_scan(ops.quaternion, y, 2), AxisError,
     ["[2, 5, 4], which has 2 batch dimensions", "the last dimension belongs to one element and "
      "is not counted"]),
    (lambda: associative_scan(ops.quaternion, y, -3), AxisError, ["not counted: pass axis=-2"]),
    (lambda: associative_scan(ops.matmul, torch.rand(2, 5, 3, 3), -3), AxisError,
     ["the last 2 dimensions belong to one element and are not counted: pass axis=-1"]),
    (lambda: matrix_recurrence(torch.eye(4), x[:4].expand(5, 4)), AxisError,
     ["axis 1", "b of shape [5, 4]", "pass axis=0", "the last dimension belongs to one element"]),
    (lambda: cumsum(x, np.arange(2)), ScanTypeError, ["axis must be an int, got a NumPy ndarray"]),
]  # fmt: skip


def scanned(chunks: Any, **options: Any) -> list[Any]:
    return list(stream(ops.sum, chunks, **options))


STREAMS: list[Refused] = [
    (lambda: scanned(np.ones((4, 2))), ScanTypeError,
     ["chunks is a NumPy ndarray", "torch.from_numpy(chunks).split(n, 0)"]),
    (lambda: scanned([np.ones(4)]), ScanTypeError,
     ["chunk 0 is a NumPy ndarray", "(torch.from_numpy(x) for x in chunks)"]),
    (lambda: scanned([x, np.ones(4)]), ScanTypeError, ["chunk 1 is a NumPy ndarray"]),
    (lambda: list(stream(ops.affine, [(np.ones(4), np.ones(4))])), ScanTypeError,
     ["chunk 0[0] is", "(tuple(map(torch.from_numpy, xs)) for xs in chunks)"]),
    (lambda: scanned([x], device="gpu"), AssocScanError, ["device is 'gpu'", "torch.device"]),
    (lambda: scanned([x], device=1.5), ScanTypeError, ["device is 1.5"]),
]  # fmt: skip


class Series:
    """A stand-in for that of pandas."""

    __module__ = "pandas"

    def to_numpy(self) -> Any:
        return np.ones(3)


def affine_of_dicts() -> Monoid:
    return Monoid(
        lambda a, b: {"A": b["A"] @ a["A"], "b": b["A"] @ a["b"] + b["b"]},
        identity={"A": torch.eye(4), "b": 0.0},
        element_ndim={"A": 2, "b": 1},
        name="affine_of_dicts",
    )


def kalman(**given: torch.Tensor) -> Any:
    unit = torch.eye(2)
    model = {"F": unit, "H": ones(1, 2), "Q": unit, "R": ones(1, 1), "covariance": unit}
    return assocscan.kalman_filter(**{"y": ones(9, 1), "mean": ones(2), **model, **given})


ones, offsets = torch.ones, torch.tensor([0, 2, 5])
series: Any = Series()
# From other libraries, where arguments have other shapes, places and classes.
HABITS: list[Refused] = [
    (lambda: cumsum(series), ScanTypeError, ["x is a Series", ": torch.as_tensor(x.to_numpy())"]),
    (lambda: assocscan.forward_fill(x, 3), ScanTypeError,  # type: ignore[arg-type]
     ["valid is 3", "for a limit pass limit=3"]),
    (lambda: associative_scan(lambda a, b: (a, b), x), ScanTypeError,
     ["a tuple of 2, but xs is one tensor: return one tensor, or pass xs in that structure"]),
    (lambda: associative_scan(lambda a, b: a[0] + b[0], (x, x)), ScanTypeError,
     ["'<lambda>' (test_mistakes.py:", "is one tensor, expected a tuple of 2 tensors"]),
    (lambda: associative_scan(Monoid(torch.add, name="number", identity=0.0), (x, x)),
     ScanTypeError, ["'number' takes one tensor, as its identity is", "identity=(0.0, 0.0)"]),
    (lambda: affine_of_dicts().check(), ScanTypeError,
     ["like={'A': torch.eye(4), 'b': torch.zeros(4)}",
      "its identity['b'] is 0.0, which does not tell the length of the vector"]),
    (lambda: associative_scan(ops.sum, x.to("meta"), backend="triton"), BackendError,
     ["xs is on meta", "tensors on the meta device have no data"]),
    (lambda: assocscan.lfilter([0.2, 0.3], (1.0, -0.7), x.double()), ScanTypeError,
     ["b is a list and a is a tuple, expected tensors: ",
      "torch.tensor(b, dtype=x.dtype), torch.tensor(a, dtype=x.dtype)"]),
    (lambda: assocscan.lfilter(np.ones(2), ones(2), x), ScanTypeError,
     ["torch.as_tensor(b, dtype=x.dtype)"]),
    (lambda: assocscan.sosfilt([[1.0, 0.0, 0.0, 1.0, 0.0, 0.0]], x), ScanTypeError,
     ["torch.tensor(sos, dtype=x.dtype)"]),
    (lambda: kalman(H=ones(2, 1)), ScanValueError,
     ["expected [1, 2] ([m, n] with m = 1 from y and n = 2 from F), or [9, 1, 2] ([T, m, n],"]),
    (lambda: kalman(mean=ones(3)), ScanValueError,
     ["mean has shape [3], expected [2] ([n] with n = 2 from F)"]),
    (lambda: kalman(y=ones(4, 9, 1), mean=ones(3)), ScanValueError,
     ["leading dimensions broadcast to [4]"]),
    *((lambda f=f: f(ones(3), ones(4, 4), ones(5, 3)), ScanValueError,
       ["[3, 3] ([K, K] with K = 3 from likelihood), or [5, 3, 3] ([T, K, K], one for each step)"])
      for f in (assocscan.hmm_filter, assocscan.hmm_smoother, assocscan.viterbi)),
    *((lambda f=f: f(ones(5), ones(5, 5), ones(5, 30)), ScanValueError,
       ["likelihood has shape [5, 30], expected [30, 5] ([..., T, K] with K = 5 from initial and "
        "transition); it looks transposed: pass likelihood.mT"])
      for f in (assocscan.hmm_filter, assocscan.hmm_smoother, assocscan.viterbi)),
    (lambda: assocscan.hmm_filter(ones(2, 10), ones(10, 10), ones(2, 30, 9)), ScanValueError,
     ["likelihood has shape [2, 30, 9], expected [2, 30, 10]"]),
    (lambda: matrix_recurrence(ones(4, 4), y, ones(3, 4)), ScanValueError,
     ["init has shape [3, 4], which does not broadcast to [2, 4], the shape of b without axis 1"]),
    (lambda: assocscan.run_length_encode(x, offsets=offsets), ScanTypeError,
     ["'offsets': encode one sequence after the other"]),
    (lambda: assocscan.nn.DiagonalGRU(input_size=4, hidden_size=3), ScanTypeError,
     ["pass features=4", "pass width=3"]),
    (lambda: assocscan.vtrace(x, x, x, ones(()), 0.9, lambda_=0.5), ScanTypeError,
     ["'lambda_': there is no λ"]),
    (lambda: associative_scan(lambda a, b: a + b, x, inclusive=False), ScanValueError,
     ["declares no identity; pass init=, or declare one: monoid(identity=…)"]),
    (lambda: associative_scan(ops.argmax, (x, x), inclusive=False), ScanValueError,
     ["'argmax' declares no identity; pass init=(-torch.inf, -1)"]),
    (lambda: reduce(ops.argmax, (x, x), offsets=torch.tensor([0, 3, 3, 5])), ScanValueError,
     ["the result of an empty sequence is init or the identity, and 'argmax' declares no identity; "
      "sequence 1 is empty (offsets[1] = offsets[2] = 3); pass init=(-torch.inf, -1)"]),
    (lambda: reduce(ops.argmin, (x.long(), x), offsets=torch.tensor([0, 0, 5, 5])), ScanValueError,
     ["sequence 0 is empty (offsets[0] = offsets[1] = 0), as is 1 more of 3; "
      "pass init=(torch.iinfo(torch.int64).max, -1)"]),
    (lambda: associative_scan(ops.argmin, (x[:0], x[:0]), return_final=True), ScanValueError,
     ["the final carry of an empty sequence is init", "no identity; pass init=(torch.inf, -1)"]),
    (lambda: linear_recurrence(y, y, ones(5)), ScanValueError,
     ["init has shape [5]", "[2, 4], the shape of b without axis 1"]),
    (lambda: linear_recurrence(x, x, ones(3), axis=0, offsets=offsets), ScanValueError,
     ["[2], the shape of b without axis 0, with 2 in front for the sequences"]),
    (lambda: associative_scan(ops.affine, (y, y), init=(1.0, ones(3))), ScanValueError,
     ["init[1] has shape [3]", "[5, 4], the batch shape of xs without axis 0"]),
    (lambda: associative_scan(ops.matmul, ones(5, 2, 2), init=ones(3, 3)), ScanValueError,
     ["the batch shape of xs without axis 0, and [2, 2] for an element"]),
    (lambda: matrix_recurrence(ones(4, 4), y, ones(3)), ScanValueError,
     ["[2, 4], the shape of b without axis 1"]),
    (lambda: assocscan.discounted_returns(y, 0.9, bootstrap=ones(4)), ScanValueError,
     ["bootstrap has shape [4]", "[2, 5], the shape of rewards without axis 2"]),
    (lambda: assocscan.gae(y, y, ones(4), 0.9, 0.9), ScanValueError,
     ["bootstrap has shape [4]", "the rewards without axis 2, [2, 5]"]),
    (lambda: assocscan.gae(x, x, ones(3), 0.9, 0.9, offsets=offsets), ScanValueError,
     ["the rewards without axis 0, with 2 in front for the sequences, [2]"]),
    (lambda: linear_recurrence(y[..., 0], y), ScanValueError,
     ["pass a.unsqueeze(-1), of shape [2, 5, 1]"]),
    (lambda: linear_recurrence(ones(2), y), ScanValueError, ["pass a.view(2, 1, 1)"]),
    (lambda: assocscan.ewm_mean(ones(3, 5), ones(3)), ScanValueError,
     ["pass alpha.unsqueeze(-1), of shape [3, 1]"]),
    (lambda: assocscan.hmm_filter(ones(3), ones(3, 3), offsets), ScanTypeError,
     ["likelihood has dtype torch.int64", "Of symbols y [T]", "it is emission[:, y].T"]),
    (lambda: assocscan.from_padded(ones(2, 3), ones(2, 3) > 0), ScanTypeError,
     ["expected integers: mask.sum(1) for a mask [S, longest]"]),
    (lambda: assocscan.lengths_of(mask), ScanTypeError, ["expected integers: offsets.long()"]),
    (lambda: cumsum(ones(3, 3, 4), 1, reset=ones(3) > 0), ScanValueError,
     ["pass reset.unsqueeze(-1), of shape [3, 1]"]),
    (lambda: assocscan.discounted_returns(y, 0.9, ones(2, 4)), ScanTypeError,
     ["done has dtype torch.float32 and shape [2, 4]", "after the last step as bootstrap="]),
    (lambda: assocscan.discounted_returns(y, 0.9, torch.ones_like(y)), ScanTypeError,
     ["convert it with done.bool()"]),
    (lambda: assocscan.nn.RGLRU(8).step(ones(5, 8), ones(5, 1, 8)), ScanValueError,
     ["pass state.squeeze(1)"]),
    (lambda: linear_recurrence(300, x.to(torch.int8), axis=0), ScanTypeError,
     ["a is 300, which torch.int8 cannot hold"]),
    (lambda: linear_recurrence(1, x.to(torch.int8), 300, 0), ScanTypeError,
     ["init is 300, which torch.int8 cannot hold"]),
    (lambda: assocscan.discounted_returns(x, 1e39), ScanTypeError,
     ["discount is 1e+39, which torch.float32 cannot hold"]),
    (lambda: assocscan.discounted_returns(x, mask), ScanTypeError,
     ["discount is a mask of bool, expected a number or a tensor of numbers; were discount and "
      "done swapped?"]),
    (lambda: assocscan.discounted_returns(x, True, mask), ScanTypeError,
     ["discount is True, expected a number"]),
    (lambda: assocscan.gae(x, x, x[0], mask, 0.9), ScanTypeError,
     ["discount is a mask of bool", "were discount and done swapped?"]),
    (lambda: assocscan.gae(x, x, x[0], 0.9, mask), ScanTypeError,
     ["decay is a mask of bool", "were decay and done swapped?"]),
    (lambda: assocscan.vtrace(x, x, x, x[0], mask), ScanTypeError,
     ["discount is a mask of bool", "were discount and done swapped?"]),
    (lambda: linear_recurrence(x, 0.9, axis=0), ScanTypeError,  # type: ignore[call-overload]
     ["b is the float 0.9, expected a tensor; were a and b swapped? linear_recurrence(0.9, x)"]),
    (lambda: linear_recurrence(x, 2, 1.0, 0), ScanTypeError,  # type: ignore[call-overload]
     ["b is the int 2", "linear_recurrence(2, x)", "torch.full_like(a, 2)"]),
    (lambda: assocscan.ewm_mean(x, halflife=3), ScanTypeError,  # type: ignore[call-arg]
     ["'halflife': pass alpha=1 - 0.5 ** (1 / halflife)"]),
    (lambda: assocscan.lfilter(x, x, x, init=x), ScanTypeError, ["pass zi=…"]),
    (lambda: assocscan.kalman_filter(mask=mask), ScanTypeError, ["pass observed=…"]),
]  # fmt: skip

LISTS = [*PAIRS, *OPERATORS, *AXES, *STREAMS, *HABITS]


@pytest.mark.parametrize("call,kind,mentions", LISTS, ids=[f"{k}" for k in range(len(LISTS))])
def test_message(call: Callable[[], Any], kind: type[Exception], mentions: list[str]) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert isinstance(caught.value, AssocScanError)
    for words in mentions:
        assert words in str(caught.value)


@pytest.mark.parametrize("reverse", [False, True])
def test_the_advice_for_states_before_steps_is_right(reverse: bool) -> None:
    a, b, init = torch.rand(5), torch.rand(5), torch.tensor(3.0)
    with pytest.raises(ScanTypeError) as caught:
        linear_recurrence(a, b, axis=0, inclusive=False)  # type: ignore[call-overload]
    call = "associative_scan(ops.affine, (a, b), axis, inclusive=False, init=(1.0, init))[1]"
    assert call in str(caught.value)
    before = associative_scan(ops.affine, (a, b), 0, reverse, inclusive=False, init=(1.0, init))[1]
    h = linear_recurrence(a, b, init, 0, reverse)
    want = [h[1:], init[None]] if reverse else [init[None], h[:-1]]
    torch.testing.assert_close(before, torch.cat(want))


def test_the_advice_for_masks_of_restarts_is_right() -> None:
    x, mask = torch.rand(2, 5), torch.rand(2, 5) > 0.5
    with pytest.raises(ScanTypeError) as caught:
        assocscan.ewm_mean(x, 0.5, reset=mask)  # type: ignore[call-arg]
    assert "cat([mask.flatten().nonzero().flatten(), tensor([B * L])])" in str(caught.value)
    mask[:, 0] = True
    offsets = torch.cat([mask.flatten().nonzero().flatten(), torch.tensor([10])])
    found = assocscan.ewm_mean(x.flatten(), 0.5, offsets=offsets).view(2, 5)
    for row in range(2):
        starts = [*mask[row].nonzero().flatten().tolist(), 5]
        for begin, end in pairwise(starts):
            part = assocscan.ewm_mean(x[row, begin:end], 0.5)
            torch.testing.assert_close(found[row, begin:end], part)


def test_the_advice_for_streams_of_arrays_runs() -> None:
    chunks: Any = [np.arange(3.0), np.arange(3.0)]
    got = scanned(torch.from_numpy(part) for part in chunks)
    assert torch.cat(got).tolist() == [0.0, 1.0, 3.0, 3.0, 4.0, 6.0]
    pairs: Any = [(np.ones(2), np.ones(2))]
    (pair,) = stream(ops.affine, (tuple(map(torch.from_numpy, xs)) for xs in pairs))
    assert pair[1].tolist() == [1.0, 2.0]


def random_operators() -> Iterator[tuple[Any, str]]:
    def dropped(left: Any, right: Any) -> Any:
        return dropout(left + right)

    def noisy(left: Any, right: Any) -> Any:
        return left + right + torch.randn_like(right)

    yield dropped, "bernoulli"
    yield noisy, "randn_like"
    yield Monoid(lambda a, b: dropout(a + b), name="dropping"), "bernoulli"
    yield Monoid(lambda a, b: a + b * torch.rand(()), name="drawing"), "rand"
    yield Monoid(lambda a, b: a + b + torch.empty_like(a).uniform_(), name="filling"), "uniform"
    yield Monoid(lambda a, b: a + b, name="lift_draws", lift=lambda v: dropout(v)), "bernoulli"
    yield Monoid(torch.matmul, name="kept", element_ndim=2, lower=torch.rand_like), "rand_like"


@pytest.mark.parametrize("op,drawn", [*random_operators()], ids=lambda v: getattr(v, "__name__", v))
def test_random_operators_are_named_as_such(op: Any, drawn: str) -> None:
    xs = torch.rand(5, 2, 2) if getattr(op, "element_ndim", 0) else x
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        associative_scan(op, xs)
    said = [str(w.message) for w in caught if w.category is FallbackWarning]
    assert len(said) == 1 and "it is random" in said[0] and f"'{drawn}' in it" in said[0]
    assert "pass them as a leaf of xs" in said[0] and "monoid(" not in said[0]


def test_a_dropout_that_is_off_is_not_random() -> None:
    op = Monoid(lambda a, b: dropout(a + b, training=False), name="off")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(associative_scan(op, x), x.cumsum(0))


def test_a_name_that_is_taken() -> None:
    """By another lambda, whose line is said; and by a function of the same name."""
    monoid(lambda left, right: left + right, name="taken_by_mistakes")
    for make in (monoid, lambda fn, name: monoid(name=name)(fn)):
        with pytest.raises(MonoidError) as caught:
            make(lambda left, right: left * right, name="taken_by_mistakes")
        said = str(caught.value)
        assert "'taken_by_mistakes' is taken by" in said and "another name by name=" in said
        assert said.count("test_mistakes.py:") == 2

    def taken_by_mistakes(left: Any, right: Any) -> Any:
        return left - right

    with pytest.raises(MonoidError, match=r"give .*taken_by_mistakes .* a name by name="):
        monoid(taken_by_mistakes)


def test_a_segmented_operator_still_takes_what_it_took() -> None:
    pairs = associative_scan(segmented(ops.affine), ((x, x), mask))
    a, b = x[:2], x[:2]
    torch.testing.assert_close(pairs[1][:2], torch.stack([b[0], a[1] * b[0] + b[1]]))


def test_a_line_of_the_user_is_shown_as_it_is_written() -> None:
    """What an error calls the leaves is no part of its other words."""

    def failing(left: Any, right: Any) -> Any:
        xs = left.item()
        return xs + right

    with pytest.raises(TraceError, match=r"test_mistakes.py:\d+: xs = left.item\(\)"):
        list(stream(failing, [x]))
    with pytest.raises(AxisError, match="out of range for chunk 0 of shape"):
        list(stream(ops.sum, [x], 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("op", [ops.argmax, ops.argmin], ids=lambda op: str(op.name))
def test_the_init_that_is_advised_for_empty_sequences(op: Any, dtype: torch.dtype) -> None:
    x, offsets = torch.tensor([0, 0, 0, 0, 0]).to(dtype), torch.tensor([0, 3, 3, 5])
    with pytest.raises(ScanValueError) as caught:
        reduce(op, (x, torch.arange(5)), offsets=offsets)
    init = eval(str(caught.value).rpartition("init=")[2], {"torch": torch})
    value, place = reduce(op, (x, torch.arange(5)), offsets=offsets, init=init)
    assert place.tolist() == [2, -1, 4] and value.dtype == dtype


@pytest.mark.parametrize("function", [assocscan.ewm_mean, assocscan.ewm_var])
def test_the_advice_for_irregular_times_is_right(function: Any) -> None:
    """Ten steps of one distance: then it is an alpha."""
    x, times, halflife = torch.rand(10), torch.arange(10.0) * 2, 3
    with pytest.raises(ScanTypeError) as caught:
        function(x, halflife=halflife, times=times)
    said = str(caught.value)
    assert "associative_scan(ops.ema, (x, decay), axis)" in said and "alpha=" not in said
    assert "0.5 ** (times.diff(prepend=times[:1]) / halflife)" in said
    decay = 0.5 ** (times.diff(prepend=times[:1]) / halflife)
    want = assocscan.ewm_mean(x, 1 - 0.5 ** (2 / halflife))
    torch.testing.assert_close(associative_scan(ops.ema, (x, decay), 0), want)
    variance = associative_scan(ops.ema_variance, (x, decay), 0)[1]
    want = assocscan.ewm_var(x, 1 - 0.5 ** (2 / halflife), bias=True)
    torch.testing.assert_close(variance, want)
