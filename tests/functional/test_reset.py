"""`reset=`: a scan starts afresh at marked steps, and nothing before them reaches what follows."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from math import inf, nan
from typing import Any

import pytest
import torch
from cuda_emulator import emulated, why_unavailable
from table import Engine
from torch import Tensor

import assocscan
from assocscan import (
    ScanTypeError,
    ScanValueError,
    associative_scan,
    cummax,
    cummin,
    cumprod,
    cumsum,
    linear_recurrence,
    logcumsumexp,
    ops,
    segmented,
    with_lower,
)

F64 = torch.float64
LENGTH = 13
STARTS = (0, 4, 5, 9)
RESET = torch.tensor([t in STARTS for t in range(LENGTH)])
# A segment of a scan from the end starts with its last step.
ENDS = RESET.roll(-1)
SEGMENTS = [*itertools.pairwise((*STARTS, LENGTH))]
Scan = Callable[..., Any]


def recur(x: Tensor, axis: int = -1, **options: Any) -> Any:
    return linear_recurrence(0.3 * x, x, axis=axis, **options)


def extremum(function: Scan) -> Scan:
    return lambda x, axis=-1, **options: function(x, axis, **options).values


SCANS: dict[str, Scan] = {
    "cumsum": cumsum,
    "cumsum, compensated": lambda x, *a, **o: cumsum(x, *a, compensated=True, **o),
    "cumsum, exclusive": lambda x, *a, **o: cumsum(x, *a, inclusive=False, **o),
    "cumprod": cumprod,
    "cumprod, exclusive": lambda x, *a, **o: cumprod(x, *a, inclusive=False, **o),
    "cummax": extremum(cummax),
    "cummin": extremum(cummin),
    "logcumsumexp": logcumsumexp,
    "linear_recurrence": recur,
}
INTERPRETED = ("cumsum", "cumprod, exclusive", "linear_recurrence")
each_scan = pytest.mark.parametrize("name", SCANS)
each_direction = pytest.mark.parametrize("reverse", [False, True])


def sample(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=F64) + 0.5


def alone(scan: Scan, x: Tensor, reverse: bool) -> Tensor:
    """Every segment of the last axis by itself."""
    return torch.cat([scan(x[..., a:b], reverse=reverse) for a, b in SEGMENTS], -1)


def derivatives(
    function: Callable[[Tensor], Tensor], x: Tensor, cotangent: Tensor, order: int = 2
) -> list[Tensor]:
    """The value, the gradient, and the gradient of the gradient's product with numbers."""
    leaf = x.clone().requires_grad_()
    y = function(leaf)
    (first,) = torch.autograd.grad(y, leaf, cotangent, create_graph=order > 1)
    found = [y.detach(), first.detach()]
    if order > 1:
        weight = sample(*first.shape, seed=2).to(first)
        product = (first * weight).sum()
        if not product.requires_grad:  # of an extremum
            return [*found, torch.zeros_like(leaf)]
        found += torch.autograd.grad(product, leaf, allow_unused=True, materialize_grads=True)
    return found


def test_the_functions_that_take_it() -> None:
    public = [getattr(assocscan, n) for n in assocscan.__all__ if n.islower() and n != "ops"]
    takers = {f.__name__ for f in public if "reset" in inspect.signature(f).parameters}
    tested = {"cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "linear_recurrence"}
    assert tested <= takers
    for name in tested:
        parameter = inspect.signature(getattr(assocscan, name)).parameters["reset"]
        assert parameter.kind is parameter.KEYWORD_ONLY and parameter.default is None


@pytest.mark.thinned(7)
@each_scan
@each_direction
def test_segments_are_those_of_each_alone(engine: Engine, name: str, reverse: bool) -> None:
    """Twice, then one element further in memory, then without gradients."""
    if engine.interpreted and name not in INTERPRETED:
        pytest.skip("the interpreter runs fewer functions")
    scan, reset = SCANS[name], engine.put(ENDS if reverse else RESET)
    whole = sample(2, LENGTH + 1)
    for x in (whole[:, :-1], whole[:, :-1], whole[:, 1:]):
        x = x.float() if engine.interpreted else x
        cotangent = sample(2, LENGTH, seed=1).to(x.dtype)
        want = derivatives(lambda t: alone(scan, t, reverse), x, cotangent)
        got = derivatives(
            lambda t: scan(t, reset=reset, reverse=reverse, backend=engine.name),
            engine.put(x), engine.put(cotangent),
        )  # fmt: skip
        torch.testing.assert_close([t.cpu() for t in got], want)
    y = scan(engine.put(x), reset=reset, reverse=reverse, backend=engine.name)
    torch.testing.assert_close(y.cpu(), want[0])


@pytest.mark.thinned(7)
@each_scan
@each_direction
def test_nothing_reaches_the_other_segments(engine: Engine, name: str, reverse: bool) -> None:
    """NaN, infinities, and numbers whose products overflow, in values and both gradients."""
    if engine.interpreted and name not in INTERPRETED:
        pytest.skip("the interpreter runs fewer functions")
    check_independence(SCANS[name], engine, reverse)


@pytest.mark.slow
@pytest.mark.thinned(7)
@pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
@pytest.mark.parametrize("name", ["cumprod", "linear_recurrence"])
def test_nothing_reaches_the_other_segments_in_cuda(name: str) -> None:
    with emulated():
        check_independence(SCANS[name], Engine("cuda"), False)


def check_independence(scan: Scan, engine: Engine, reverse: bool) -> None:
    reset, ones = engine.put(ENDS if reverse else RESET), torch.ones(LENGTH)

    def found(x: Tensor) -> list[Tensor]:
        function = lambda t: scan(t, reset=reset, reverse=reverse, backend=engine.name)  # noqa: E731
        return [t.cpu() for t in derivatives(function, engine.put(x), engine.put(ones))]

    clean = sample(LENGTH).float()
    want = found(clean)
    for value, segment in itertools.product((1e30, inf, nan), (0, 1, 2, 3)):
        start, end = SEGMENTS[segment]
        dirty = clean.clone()
        dirty[start:end] = value
        others = torch.ones(LENGTH, dtype=torch.bool)
        others[start:end] = False
        for one, other in zip(found(dirty), want, strict=True):
            torch.testing.assert_close(one[others], other[others])


@pytest.mark.thinned(7)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int64])
@each_direction
def test_long_axes_beside_a_loop(dtype: torch.dtype, reverse: bool) -> None:
    """Over many chunks and threads, where half of the segments overflow; in the dtype itself."""
    length = 20000
    generator = torch.Generator().manual_seed(0)
    reset = torch.rand(length, generator=generator) < 0.01
    wild = reset.long().cumsum(0) % 2 == 1
    x = torch.randint(-3, 4, (length,), generator=generator).to(dtype)
    x = torch.where(wild, 60000 if dtype == torch.float16 else 10**18, x).to(dtype)
    values, marks = x.tolist(), reset.tolist()
    order = range(length)[::-1] if reverse else range(length)
    want, state = [0.0] * length, 0
    for t in order:
        state = values[t] if marks[t] else state + values[t]
        want[t] = state
    for _ in range(2):
        got = cumsum(x, reset=reset, reverse=reverse)
        calm = ~wild if not reverse else ~reset_side(reset, wild)
        assert torch.equal(got[calm].double(), torch.tensor(want, dtype=F64)[calm])


@pytest.mark.parametrize("threads", [1, 2])
def test_no_infinity_comes_from_aggregates(threads: int) -> None:
    """On the CPU: where a is 1e30 and the state stays 0, products of a are infinite and the state
    is not, within a segment of a tile too."""
    before, length = torch.get_num_threads(), 30000
    generator = torch.Generator().manual_seed(0)
    reset = torch.rand(length, generator=generator) < 0.01
    wild = reset.long().cumsum(0) % 2 == 1
    a = torch.where(wild, 1e30, torch.rand(length, generator=generator))
    b = torch.where(wild, 0.0, torch.randn(length, generator=generator))
    torch.set_num_threads(threads)
    try:
        h = linear_recurrence(a, b, axis=0, reset=reset)
    finally:
        torch.set_num_threads(before)
    assert (h[wild] == 0).all() and h.isfinite().all()


def reset_side(reset: Tensor, wild: Tensor) -> Tensor:
    """Where a scan from the end has met a wild number since its last start."""
    met, found = False, []
    for marked, is_wild in zip(reset.flip(0).tolist(), wild.flip(0).tolist(), strict=True):
        met = is_wild or (met and not marked)
        found.append(met)
    return torch.tensor(found[::-1])


@pytest.mark.thinned(7)
@each_direction
def test_what_enters_and_leaves(engine: Engine, reverse: bool) -> None:
    """init enters the first step unless that is marked; the last state is that of the last
    segment."""
    for _, first in itertools.product(range(2), (False, True)):
        reset = RESET.clone()
        reset[0] = first
        reset = engine.put(reset.flip(0) if reverse else reset)
        a, b = (sample(LENGTH, 2, seed=k).requires_grad_() for k in (1, 2))
        init = sample(2, seed=3).requires_grad_()
        h, rows = init, []
        for t in range(LENGTH):
            h = b[t] if t in STARTS[0 if first else 1 :] else a[t] * h + b[t]
            rows.append(h)
        want = [torch.stack(rows), h, h]
        leaves = [a, b, init]
        given = [engine.put(t.flip(0) if reverse and t.dim() == 2 else t) for t in leaves]
        options: Any = {"axis": 0, "reverse": reverse, "reset": reset, "backend": engine.name}
        y, last = linear_recurrence(*given, return_final=True, **options)
        only = linear_recurrence(*given, return_final="only", **options)
        got = [t.cpu() for t in (y.flip(0) if reverse else y, last, only)]
        torch.testing.assert_close(got, want)
        weights = [sample(*t.shape, seed=4) for t in want]
        for one, other in zip(
            torch.autograd.grad(got, leaves, weights, allow_unused=True, materialize_grads=True),
            torch.autograd.grad(want, leaves, weights, allow_unused=True, materialize_grads=True),
            strict=True,
        ):
            torch.testing.assert_close(one, other)


def test_states_of_16_bits_stay_wide() -> None:
    x = sample(LENGTH).bfloat16()
    want = recur(x[9:].float(), return_final="only")
    for form in ("only", True):
        found = recur(x, reset=RESET, return_final=form)
        last = found if form == "only" else found[1]
        assert last.dtype == torch.float32
        torch.testing.assert_close(last, want, rtol=1e-2, atol=0)


@pytest.mark.thinned(7)
@each_direction
def test_positions_are_those_of_the_whole_axis(reverse: bool) -> None:
    x = torch.tensor([3, 1, 3, 2, 9, 1, 1, 0, 2, 2, 5, 4, 5])
    reset = ENDS if reverse else RESET
    for function, dtype in itertools.product((cummax, cummin), (torch.int32, torch.uint16)):
        values, indices = function(x.to(dtype), reset=reset, reverse=reverse)
        assert torch.equal(x[indices], values.long())
        for a, b in SEGMENTS:
            part = function(x[a:b], reverse=reverse)
            assert torch.equal(values[a:b].long(), part.values)
            assert torch.equal(indices[a:b], part.indices + a)


def test_identities_in_front() -> None:
    """At the front of the axis alone, in scan order; an exclusive scan begins anew with it."""
    x = torch.arange(1, LENGTH + 1)
    for function, identity in ((cumsum, 0), (cumprod, 1)):
        plain = function(x, reset=RESET)
        more = function(x, reset=RESET, include_initial=True)
        assert torch.equal(more[1:], plain) and more[0] == identity
        back = function(x, reset=ENDS, reverse=True, include_initial=True)
        assert torch.equal(back[:-1], function(x, reset=ENDS, reverse=True))
        assert back[-1] == identity
        without = function(x, reset=RESET, inclusive=False)
        assert (without[list(STARTS)] == identity).all()


def test_shapes_of_masks() -> None:
    """The sizes of x up to the axis come first, then torch's rules."""
    x = sample(LENGTH, LENGTH, LENGTH)
    rows = torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(1)) < 0.3
    for _ in range(2):
        same = cumsum(x, 1, reset=rows)
        assert torch.equal(same, cumsum(x, 1, reset=rows[:, :, None]))
        assert torch.equal(same, cumsum(x, 1, reset=rows[:, :, None].expand(x.shape)))
        assert torch.equal(cumsum(x, 0, reset=RESET), cumsum(x, 0, reset=RESET[:, None, None]))
        # [L, L] of axis 0 is not "up to the axis": it lines up with the last dimensions.
        assert torch.equal(cumsum(x, 0, reset=rows), cumsum(x, 0, reset=rows.expand(x.shape)))
        every = cumsum(x, 2, reset=torch.tensor(True))
        assert torch.equal(every, x)
        assert torch.equal(cumsum(x, 2, reset=RESET), cumsum(x, 2, reset=RESET.expand(x.shape)))
    decay = sample(LENGTH)
    h = linear_recurrence(decay, x, reset=rows)
    for b in range(3):
        assert torch.equal(h[b], linear_recurrence(decay, x[b], axis=0, reset=rows[b]))


def test_nothing_to_scan() -> None:
    empty, none = torch.zeros(2, 0), torch.zeros(0, dtype=torch.bool)
    assert cumsum(empty, 1, reset=none.expand(2, 0)).shape == (2, 0)
    assert linear_recurrence(1.0, empty, 2.0, reset=none, return_final="only").tolist() == [2, 2]
    assert cumsum(torch.tensor(3), reset=torch.tensor(True)) == 3
    assert cummax(torch.tensor(3), 0, reset=torch.tensor([True])).indices == 0
    assert cumsum(torch.tensor([True, True, True]), reset=torch.tensor([1, 0, 1]) > 0).tolist() == [
        1, 2, 1
    ]  # fmt: skip
    x = torch.tensor([2, 3, 4])
    assert cumprod(x, dtype=torch.complex64, reset=x > 3).tolist() == [2, 6, 4]


@pytest.mark.slow
@pytest.mark.thinned(7)
@each_scan
def test_mapped_and_compiled(name: str) -> None:
    torch._dynamo.reset()
    scan, x = SCANS[name], sample(3, LENGTH)
    masks = torch.stack([RESET, ~RESET, RESET.roll(1)])
    want = torch.stack([scan(row, reset=mask) for row, mask in zip(x, masks, strict=True)])
    call = lambda t, m: scan(t, reset=m)  # noqa: E731
    torch.testing.assert_close(torch.func.vmap(call)(x, masks), want)
    shared = torch.func.vmap(call, (0, None))(x, RESET)
    torch.testing.assert_close(shared, scan(x, reset=RESET))
    compiled: Any = torch.compile(call, fullgraph=True, backend="aot_eager")
    got, plain = (derivatives(lambda t, f=f: f(t, masks), x, x, 1) for f in (compiled, call))
    torch.testing.assert_close(got, plain)
    tangent = torch.func.jvp(lambda t: call(t, RESET), (x,), (x,))[1]
    torch.testing.assert_close(
        tangent, torch.func.jvp(lambda t: alone(scan, t, False), (x,), (x,))[1]
    )


@pytest.mark.parametrize(
    "call,error,words",
    [
        (lambda x: cumsum(x, reset=RESET[:3]), ScanValueError,
         r"reset has shape \[3\], expected \[13\], the sizes of x up to axis 0"),
        (lambda x: linear_recurrence(x, x[None], reset=RESET[:, None]), ScanValueError,
         r"reset .*\[13, 1\], expected \[1, 13\], the sizes of b up to axis 1, .* to \[1, 13\]"),
        (lambda x: cumprod(x, reset=RESET.long()), ScanTypeError, r"with reset.bool\(\)"),
        (lambda x: cummax(x, reset=True), ScanTypeError, "reset is a bool"),
        (lambda x: cummin(x, reset=RESET.to("meta")), ScanValueError, "reset is on meta, but x"),
        (lambda x: logcumsumexp(x, reset=RESET, offsets=torch.tensor([0, 13])), ScanValueError,
         "reset and offsets were passed"),
        (lambda x: linear_recurrence(x, x, axis=0, reset=RESET, offsets=torch.tensor([0, 13])),
         ScanValueError, "reset and offsets were passed"),
        (lambda x: cumsum(x, 1, reset=RESET), IndexError, "axis 1 is out of range for x"),
        (lambda x: cummax(x, inclusive=False, reset=RESET), ScanValueError, "no exclusive form"),
        (lambda x: cumsum(x, inclusive=False, include_initial=True, reset=RESET), ScanValueError,
         "Leave out inclusive=False"),
        (lambda x: linear_recurrence("a", x, axis=0, reset=RESET), ScanTypeError, "a is a str"),
        (lambda x: linear_recurrence(x[:3], x, axis=0, reset=RESET), ScanValueError,
         r"a has shape \[3\], which does not broadcast to that of b"),
        (lambda x: linear_recurrence(x, x, x, axis=0, reset=RESET), ScanValueError,
         r"init has shape \[13\]"),
        (lambda x: cumsum(torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 13])),
                          reset=RESET), ScanValueError, "pass x.values"),
    ],
)  # fmt: skip
def test_refused(call: Callable[[Tensor], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call(sample(LENGTH))


@each_direction
@pytest.mark.parametrize("bad", [inf, -inf, nan])
@pytest.mark.parametrize("how", ["first", "reset", "offsets", "reset and init"])
@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_gradients_past_what_is_not_read(backend: str, how: str, bad: float, reverse: bool) -> None:
    """a[t] is not read where a sequence or a segment begins. Whatever it is, its gradient is 0, and
    all other gradients equal those of a loop."""
    cuts = list(STARTS[:1] if how == "first" else STARTS)
    heads = [t - 1 for t in [*cuts[1:], LENGTH]] if reverse else cuts
    read = [t for t in range(LENGTH) if t not in heads]
    generator = torch.Generator().manual_seed(5)
    a, b, weights = torch.rand(3, LENGTH, generator=generator, dtype=F64).unbind()
    a[heads] = bad
    init = torch.tensor(0.7, dtype=F64) if how == "reset and init" else None
    options: dict[str, Any] = {}
    if how == "offsets":
        options["offsets"] = torch.tensor([0, 0, *cuts[1:], LENGTH])
    elif how != "first":
        options["reset"] = torch.isin(torch.arange(LENGTH), torch.tensor(heads))
    a.requires_grad_(), b.requires_grad_()
    state, states = torch.zeros((), dtype=F64), [torch.zeros(())] * LENGTH
    for t in reversed(range(LENGTH)) if reverse else range(LENGTH):
        state = b[t] if t in heads else a[t] * state + b[t]
        states[t] = state
    h = torch.stack(states)
    for _, final in itertools.product(range(2), (False, True, "only")):
        options["return_final"] = final
        found = linear_recurrence(a, b, init, 0, reverse, backend=backend, **options)
        results = found if isinstance(found, tuple) else (found,)
        last = h[0 if reverse else -1]
        if how == "offsets":
            ends = cuts if reverse else [t - 1 for t in [*cuts[1:], LENGTH]]
            last = torch.cat([torch.zeros(1, dtype=F64), h[ends]])
        exact = {False: (h,), True: (h, last), "only": (last,)}[final]
        got, wanted = (
            torch.autograd.grad(
                sum((t * weights[: t.numel()].view_as(t)).sum() for t in ts), (a, b),
                retain_graph=True,
            )
            for ts in (results, exact)
        )  # fmt: skip
        for x, y in zip(results, exact, strict=True):
            torch.testing.assert_close(x, y)
        assert not got[0][heads].any()
        torch.testing.assert_close(got[0][read], wanted[0][read])
        torch.testing.assert_close(got[1], wanted[1])


@pytest.mark.parametrize("bad", [inf, nan])
@pytest.mark.parametrize("how", ["plain", "only", "offsets", "reset"])
@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_no_gradient_reaches_what_is_not_read(backend: str, how: str, bad: float) -> None:
    """The first a[t] is finite, its neighbour is not."""
    a, b = torch.full((8,), 0.5), torch.ones(8)
    a[5 if how in ("offsets", "reset") else 1] = bad
    options: dict[str, Any] = {
        "plain": {}, "only": {"return_final": "only"}, "reset": {"reset": torch.arange(8) == 4},
        "offsets": {"offsets": torch.tensor([0, 4, 8])},
    }[how]  # fmt: skip
    a.requires_grad_()
    for _ in range(2):
        h = linear_recurrence(a, b, axis=0, backend=backend, **options)
        (gradient,) = torch.autograd.grad(h.sum(), a)
        assert gradient[0] == 0
        if how in ("offsets", "reset"):
            assert gradient[4] == 0
            torch.testing.assert_close(gradient[1:4], torch.tensor([1.75, 2.25, 1.75]))


@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_resets_of_matrices(backend: str) -> None:
    op = segmented(with_lower(ops.matrix_affine, lambda state: state[1]))
    A, b, reset = torch.full((8, 2, 2), 0.25), torch.ones(8, 2), torch.arange(8) == 4
    A[4, 0, 1] = inf
    A.requires_grad_()
    y = associative_scan(op, ((A, b), reset), backend=backend)
    (gradient,) = torch.autograd.grad(y.sum(), A)
    want = torch.tensor([0.0, 7, 9, 7, 0, 7, 9, 7])
    torch.testing.assert_close(gradient.sum((1, 2)), want)


@pytest.mark.parametrize("length", [0, 1])
@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_short_sequences_have_gradients_of_all_leaves(backend: str, length: int) -> None:
    marks, offsets = torch.ones(length, dtype=torch.bool), torch.tensor([0, 0, length])
    calls: list[tuple[dict[str, Any], Any]] = [
        ({}, None), ({"return_final": "only"}, None), ({"reset": marks}, 2.0),
        ({"offsets": offsets}, None), ({"offsets": offsets}, 2.0),
    ]  # fmt: skip
    for options, init in calls:
        a, b = (torch.full((length,), 0.5, requires_grad=True) for _ in range(2))
        h = linear_recurrence(a, b, init, axis=0, backend=backend, **options)
        found = torch.autograd.grad(h.sum(), (a, b))
        read = init is not None and "offsets" in options
        assert torch.equal(found[0], torch.full((length,), 2.0 if read else 0.0))
        assert torch.equal(found[1], torch.ones(length))


@each_direction
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bad", [inf, nan])
def test_traced_packed_sequences(bad: float, reverse: bool) -> None:
    """torch.jit.trace records torch operations, and packed sequences as one scan."""
    offsets = torch.tensor([0, 3, 3, 8])

    def scan(a: Tensor, b: Tensor) -> Tensor:
        h: Tensor = linear_recurrence(a, b, axis=0, reverse=reverse, offsets=offsets)
        return h

    a, b = torch.full((8,), 0.5, requires_grad=True), torch.ones(8)
    traced = torch.jit.trace(scan, (a, b), check_trace=False)
    a = torch.full((8,), 0.5)
    a[[2, 7] if reverse else [0, 3]] = bad
    a.requires_grad_()
    want, got = (torch.autograd.grad(f(a, b).sum(), a)[0] for f in (scan, traced))
    torch.testing.assert_close(got, want)
    assert torch.equal(traced(a, b), scan(a, b))
