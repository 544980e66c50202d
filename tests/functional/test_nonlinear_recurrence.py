"""`nonlinear_recurrence` beside a loop of plain torch."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from steps import (
    CASES,
    WHOLE_NUMBERS,
    Case,
    Given,
    arguments,
    gru,
    integrate_and_fire,
    logistic,
    loop,
    lstm,
    random_step,
)
from torch import Tensor
from torch.testing import assert_close
from torch.utils import _pytree as pytree

from assocscan import nonlinear_recurrence

F64 = torch.float64
INTERPRETED = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="Triton takes CPU tensors in its interpreter"
)
BACKENDS = ["cpu", "eager"]
each_backend = pytest.mark.parametrize(
    "backend",
    [*BACKENDS, pytest.param("triton", marks=[INTERPRETED, pytest.mark.exhaustive])],
)
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
GRU, LSTM = CASES[:2]
OFFSETS = torch.tensor([0, 3, 3, 8, 8, 9, 17])


def decayed(h: Any, x: Any, rate: Any) -> Any:
    return torch.tanh(rate * h + x)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=F64).to(dtype)


def run(case: Case, given: Given, **options: Any) -> Any:
    xs, init, params = given
    return nonlinear_recurrence(case.step, xs, init, params=params, return_final=True, **options)


def beside(case: Case, given: Given, backend: str, own_init: bool = False, **options: Any) -> None:
    """The same call twice, beside the loop."""
    want = loop(case.step, given.xs, given.init, params=given.params, own_init=own_init, **options)
    for _ in range(2):
        got = run(case, given, backend=backend, **options)
        assert pytree.tree_structure(got) == pytree.tree_structure(want)
        assert_close(pytree.tree_leaves(got), pytree.tree_leaves(want), equal_nan=True)


# ---- Values ----


@pytest.mark.thinned(20)
@each_backend
@pytest.mark.parametrize("case", (*CASES, *WHOLE_NUMBERS), ids=lambda case: case.name)
def test_values(case: Case, backend: str) -> None:
    for length in (17, 1, 2):
        beside(case, arguments(case, length), backend)
    beside(case, arguments(case, 17, seed=5), backend)
    beside(case, arguments(case, 6, batch=1, channels=9), backend)
    beside(case, arguments(case, 17), backend, reverse=True)


@pytest.mark.thinned(7)
@each_backend
def test_no_steps(backend: str) -> None:
    """Of length 0: no states, and init as the last one."""
    given = arguments(LSTM, 0)
    for _ in range(2):
        (h, c), last = run(LSTM, given, backend=backend)
        assert h.shape == c.shape == (2, 0, 3) and h.dtype == F64
        assert_close(last, given.init)
    (h, c), (last_h, last_c) = nonlinear_recurrence(
        lstm, given.xs, (1.0, given.init[1]), params=given.params, return_final=True,
        backend=backend,
    )  # fmt: skip
    assert_close(last_h, torch.ones(2, 3, dtype=F64))
    assert_close(last_c, given.init[1])
    init = draw(2, 3).requires_grad_()
    _, last = nonlinear_recurrence(
        decayed, draw(2, 0, 3), init, params=0.5, return_final=True, backend=backend
    )
    last.backward(torch.full_like(last, 2.0))
    assert init.grad is not None and torch.equal(init.grad, torch.full_like(init, 2.0))
    no_chains = nonlinear_recurrence(
        decayed, draw(2, 4, 0), draw(2, 0), params=0.5, return_final=True, backend=backend
    )
    assert [t.shape for t in no_chains] == [(2, 4, 0), (2, 0)]


@pytest.mark.thinned(10)
@each_backend
@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
def test_axes(axis: int, backend: str) -> None:
    xs = draw(4, 5, 3), draw(4, 5, 3)[:, :, :1].expand(4, 5, 3)
    shape = [n for d, n in enumerate((4, 5, 3)) if d != axis % 3]

    def step(h: Any, x: Any) -> Any:
        return torch.tanh(0.7 * h + x[0]) * x[1]

    for init in (draw(*shape), draw(shape[1]), 0.25):
        want, last = loop(step, xs, init, axis)
        for _ in range(2):
            got = nonlinear_recurrence(step, xs, init, axis, return_final=True, backend=backend)
            assert_close(got, (want, last))


def layouts(t: Tensor) -> Iterator[Tensor]:
    """Tensors of these values: behind another address, with other strides, expanded."""
    yield t
    yield t.clone()
    yield torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape)
    yield t.movedim(1, -1).contiguous().movedim(-1, 1)
    yield t.movedim(0, -1).contiguous().movedim(-1, 0)
    yield torch.stack([t, -t], -1)[..., 0]
    yield t.flip(1).flip(1)
    yield torch.zeros(2 * t.shape[0], *t.shape[1:], dtype=t.dtype)[::2].copy_(t)


@each_backend
def test_strides(backend: str) -> None:
    given = arguments(GRU, 7)
    want, last = loop(gru, given.xs, given.init, params=given.params)
    z, r, n = given.xs
    for k, (a, b) in enumerate(zip(layouts(z), reversed([*layouts(n)]), strict=True)):
        got = run(GRU, Given((a, r, b), given.init, given.params), backend=backend)
        assert_close(got, (want, last), msg=lambda text, k=k: f"layout {k}: {text}")
    init = torch.stack([given.init, given.init], -1)[..., 1]
    params = tuple(torch.stack([p, p], -1)[:, 0] for p in given.params)
    assert_close(run(GRU, Given(given.xs, init, params), backend=backend), (want, last))
    shared = given.xs[0][:1, :1].expand(2, 7, 3)
    beside(GRU, Given((shared, r, n), given.init[:1].expand(2, 3), given.params), backend)
    thin = given.xs[0][:, :, :1], given.xs[1][:1], given.xs[2]
    beside(GRU, Given(thin, given.init[0], given.params), backend)


@each_backend
def test_a_result_that_the_caller_changes(backend: str) -> None:
    """The last state is no view of the states, nor of init."""
    given = arguments(GRU, 4)
    h, last = run(GRU, given, backend=backend)
    kept = last.clone()
    h.zero_()
    assert torch.equal(last, kept)
    empty, entered = run(GRU, arguments(GRU, 0), backend=backend)
    before = arguments(GRU, 0).init
    entered.zero_()
    again = run(GRU, arguments(GRU, 0), backend=backend)[1]
    assert empty.shape == (2, 0, 3) and torch.equal(again, before)


def test_a_long_row_is_not_cut() -> None:
    """Steps are not associative: a row is walked from its beginning with any number of threads."""
    xs, init = 1e-3 * draw(1, 2**16, 1), torch.full((1, 1), 0.4, dtype=F64)
    packed = torch.tensor([0, 7, 2**15, 2**16])
    before = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 4):
            torch.set_num_threads(count)
            found.append([
                nonlinear_recurrence(step, xs, init, **options, return_final=True)
                for step, options in (
                    (lambda h, x: torch.tanh(2 * h + x), {}),
                    (lambda h, x: torch.tanh(2 * h + x), {"offsets": packed}),
                    (logistic, {"reverse": True}),
                )
            ])  # fmt: skip
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        for (a, last_a), (b, last_b) in zip(found[0], other, strict=True):
            assert torch.equal(a, b) and torch.equal(last_a, last_b)
    walked = loop(lambda h, x: torch.tanh(2 * h + x), xs[:, :50], init)[0]
    assert_close(found[0][0][0][:, :50], walked)


@pytest.mark.exhaustive
def test_a_long_row_beside_the_loop() -> None:
    given = arguments(LSTM, 2**16, batch=1, channels=1)
    assert_close(run(LSTM, given), loop(lstm, given.xs, given.init, params=given.params))
    given, leaves = tracked(arguments(LSTM, 3000, batch=1, channels=1))
    want = loop(lstm, given.xs, given.init, params=given.params)[0][0]
    weight = draw(1, 3000, 1, seed=3)
    expected = gradients(want, leaves, [weight])
    assert_close(gradients(run(LSTM, given)[0][0], leaves, [weight]), expected)


@each_backend
def test_parts_of_a_sequence(backend: str) -> None:
    """One after the other they give exactly what one call gives."""
    for case in (GRU, LSTM):
        given = arguments(case, 17)
        whole, last = run(case, given, backend=backend)
        for cut in (1, 8, 16):
            parts, h = [], given.init
            for begin, end in ((0, cut), (cut, 17)):
                xs = pytree.tree_map(lambda t, b=begin, e=end: t[:, b:e], given.xs)
                y, h = run(case, Given(xs, h, given.params), backend=backend)
                parts.append(y)
            for k, t in enumerate(pytree.tree_leaves(whole)):
                assert torch.equal(torch.cat([pytree.tree_leaves(p)[k] for p in parts], 1), t)
            assert all(map(torch.equal, pytree.tree_leaves(h), pytree.tree_leaves(last)))


# ---- Structures ----


class State(NamedTuple):
    position: Any
    speed: Any


@pytest.mark.exhaustive
@each_backend
def test_structures(backend: str) -> None:
    """Dicts are matched by key, numbers stand for tensors, trees of params are passed on."""

    def pendulum(h: State, x: Any, params: Any) -> State:
        speed = h.speed - params["g"] * torch.sin(h.position) * params["dt"][0] + x["push"]
        return State(h.position + params["dt"][0] * speed, speed)

    push, start = draw(2, 9, 3), draw(2, 3)
    params: dict[str, Any] = {"g": draw(3), "dt": [0.1]}
    want, last = loop(pendulum, {"push": push}, State(start, 0.0), params=params)
    for _ in range(2):
        got, final = nonlinear_recurrence(
            pendulum, {"push": push}, State(start, 0.0), params=params, return_final=True,
            backend=backend,
        )  # fmt: skip
        assert type(got) is State and type(final) is State
        assert_close((*got, *final), (*want, *last))

    def swapped(h: Any, x: Any) -> Any:
        """Its result has the keys in another order."""
        return {"b": torch.cos(h["a"]), "a": torch.sin(h["b"]) + x}

    init = {"a": 1.0, "b": start}
    want, last = loop(swapped, push, init)
    got, final = nonlinear_recurrence(swapped, push, init, return_final=True, backend=backend)
    for key in "ab":
        assert_close((got[key], final[key]), (want[key], last[key]))

    def single(h: Any, x: Any) -> Any:
        return [torch.tanh(h[0] + x)]

    assert_close(
        nonlinear_recurrence(single, push, [0.0], backend=backend), loop(single, push, [0.0])[0]
    )


@pytest.mark.exhaustive
@each_backend
def test_numbers(backend: str) -> None:
    """As init and among params; another number is another call, of the same kernel."""
    x = draw(2, 6, 3, dtype=torch.float32)

    def step(h: Any, x: Any, params: Any) -> Any:
        return torch.tanh(params[0] * h + x) + params[1]

    for first in (0.0, -0.5, 0.0):
        for rate in (0.5, draw(3), 0.5, 0.25, 2):
            got = nonlinear_recurrence(step, x, first, params=(rate, 0.125), backend=backend)
            want = loop(step, x.double(), first, params=(rate, 0.125))[0]
            assert got.dtype == (F64 if isinstance(rate, Tensor) else torch.float32)
            assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    assert nonlinear_recurrence(decayed, x, torch.zeros(()), params=0.5).dtype == torch.float32


@pytest.mark.exhaustive
@each_backend
@pytest.mark.parametrize("reverse", [False, True])
def test_lower(reverse: bool, backend: str) -> None:
    given = arguments(LSTM, 9)

    def sent(state: Any) -> Any:
        return torch.exp(state[0]) - state[1]

    def with_gate(state: Any, x: Any) -> Any:
        return {"y": state[0] * torch.sigmoid(x[3]), "on": state[1] > 0}

    for lower in (sent, with_gate):
        want, last = loop(
            lstm, given.xs, given.init, params=given.params, lower=lower, reverse=reverse
        )
        for _ in range(2):
            got, final = run(LSTM, given, lower=lower, reverse=reverse, backend=backend)
            assert_close(got, want)
            assert_close(final, last)
    empty = run(LSTM, arguments(LSTM, 0), lower=sent, backend=backend)[0]
    assert empty.shape == (2, 0, 3)
    x = draw(2, 5, 3).requires_grad_()
    y = nonlinear_recurrence(logistic_like, x, 0.1, lower=lambda h, x: h * x, backend=backend)
    (found,) = torch.autograd.grad(y.square().sum(), x)
    want = loop(logistic_like, x, 0.1, lower=lambda h, x: h * x)[0]
    assert_close(found, torch.autograd.grad(want.square().sum(), x)[0])


def logistic_like(h: Any, x: Any) -> Any:
    return torch.sin(2 * h) + x


# ---- Dtypes ----


@pytest.mark.exhaustive
@each_backend
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_floats_of_16_bits(dtype: torch.dtype, backend: str) -> None:
    """Computed in float32, rounded once where they are stored: h is not rounded between steps."""
    x, p, init = draw(2, 17, 3, dtype=dtype), draw(3, dtype=dtype), draw(2, 3, dtype=dtype)
    want, last = loop(decayed, x.float(), init.float(), params=p.float())
    for _ in range(2):
        h, final = nonlinear_recurrence(
            decayed, x, init, params=p, return_final=True, backend=backend
        )
        assert h.dtype == dtype and final.dtype == torch.float32
        assert_close(h, want.to(dtype), rtol=2**-7 if dtype == torch.bfloat16 else 2**-10, atol=0)
        assert_close(final, last, rtol=1e-5, atol=1e-6)
    # The last state, in float32, does not widen the states of the next part.
    more, _ = nonlinear_recurrence(decayed, x, final, params=p, return_final=True, backend=backend)
    assert more.dtype == dtype
    assert nonlinear_recurrence(decayed, x, 0.0, params=0.5, backend=backend).dtype == dtype
    wide = nonlinear_recurrence(decayed, x.float(), init, params=p, backend=backend)
    assert wide.dtype == torch.float32
    assert_close(wide, want, rtol=1e-5, atol=1e-6)


@pytest.mark.exhaustive
@each_backend
def test_parts_of_16_bits(backend: str) -> None:
    x, p = draw(2, 16, 3, dtype=torch.bfloat16), draw(3, dtype=torch.bfloat16)
    whole, last = nonlinear_recurrence(decayed, x, 0.0, params=p, return_final=True)
    first, h = nonlinear_recurrence(decayed, x[:, :5], 0.0, params=p, return_final=True)
    second, h = nonlinear_recurrence(decayed, x[:, 5:], h, params=p, return_final=True)
    assert torch.equal(torch.cat([first, second], 1), whole) and torch.equal(h, last)


MIXES = [
    (torch.float32, torch.float64, torch.float32),
    (torch.bfloat16, torch.float32, torch.float32),
    (torch.float16, torch.float32, torch.float64),
    (torch.int64, torch.float32, torch.bfloat16),
    (torch.float32, torch.bfloat16, torch.float32),
    (torch.int32, torch.float16, torch.float16),
]


@pytest.mark.thinned(9)
@each_backend
@pytest.mark.parametrize("dtypes", MIXES)
def test_mixed_dtypes(dtypes: tuple[torch.dtype, ...], backend: str) -> None:
    """The result has the dtype that the step gives for its arguments."""
    x, init, p = (
        (3 * draw(*shape)).to(dtype) for shape, dtype in zip(((2, 9, 3), (2, 3), (3,)), dtypes,
                                                             strict=True)
    )  # fmt: skip
    for _ in range(2):
        h = nonlinear_recurrence(decayed, x, init, params=p, backend=backend)
        kinds = {t: t for t in dtypes if t.is_floating_point}
        widest = next(iter(kinds))
        for kind in kinds:
            widest = torch.promote_types(widest, kind)
        assert h.dtype in (widest, torch.bfloat16, torch.float16) or widest == F64
        want = loop(decayed, x.double(), init.double(), params=p.double())[0]
        rough = 2e-2 if h.dtype.itemsize == 2 else 1e-5 if h.dtype == torch.float32 else 1e-6
        assert_close(h.double(), want, rtol=rough, atol=rough)


@each_backend
def test_a_state_of_several_dtypes(backend: str) -> None:
    """A float beside a counter and a flag; gradients flow through the float alone."""

    def step(h: Any, x: Any) -> Any:
        v, count, fired = h
        v = torch.where(fired, 0.1 * v, 0.9 * v) + x
        fires = v > 0.5
        return v, count + fires, fires

    x = draw(2, 12, 3).requires_grad_()
    init = draw(2, 3), 0, False
    for first in (init, (0.0, torch.zeros(2, 3, dtype=torch.int64), torch.ones(3).bool())):
        want, last = loop(step, x, first)
        for _ in range(2):
            got, final = nonlinear_recurrence(step, x, first, return_final=True, backend=backend)
            assert [t.dtype for t in got] == [F64, torch.int64, torch.bool]
            assert_close((*got, *final), (*want, *last))
            (found,) = torch.autograd.grad(got[0].square().sum(), x)
            assert_close(
                found, torch.autograd.grad(want[0].square().sum(), x, retain_graph=True)[0]
            )


@pytest.mark.exhaustive
@each_backend
def test_eight_numbers(backend: str) -> None:
    def ring(h: Any, x: Any) -> Any:
        return tuple(torch.sin(h[k - 1]) + x / (k + 1) for k in range(8))

    x, init = draw(2, 5, 3), tuple(draw(2, 3, seed=k) for k in range(8))
    assert_close(nonlinear_recurrence(ring, x, init, backend=backend), loop(ring, x, init)[0])


# ---- Packed sequences, and resets ----


@pytest.mark.thinned(32)
@each_backend
@pytest.mark.parametrize("reverse", [False, True])
@each_case
def test_packed_sequences(case: Case, reverse: bool, backend: str) -> None:
    """Empty ones among them; each starts from its own init, or all from one."""
    given = arguments(case, 17)
    options: dict[str, Any] = {"offsets": OFFSETS, "reverse": reverse}
    beside(case, given, backend, **options)
    leaves, spec = pytree.tree_flatten(given.init)
    if all(isinstance(t, Tensor) for t in leaves):
        own = [torch.stack([t * (0.5 + s / 10) for s in range(6)]) for t in leaves]
        changed = given._replace(init=pytree.tree_unflatten(own, spec))
        beside(case, changed, backend, own_init=True, **options)
        other = torch.tensor([0, 0, 4, 9, 9, 9, 17])
        beside(case, changed, backend, own_init=True, offsets=other, reverse=reverse)
    beside(case, given, backend, offsets=OFFSETS.int())


@each_backend
def test_packed_gradients(backend: str) -> None:
    given = arguments(GRU, 17)
    for own in (False, True):
        init = torch.stack([given.init * k for k in range(6)]) if own else given.init
        leaves = [t.clone().requires_grad_() for t in (*given.xs, init, *given.params)]
        changed = Given(tuple(leaves[:3]), leaves[3], tuple(leaves[4:]))
        y, last = loop(gru, changed.xs, changed.init, params=changed.params, offsets=OFFSETS,
                       own_init=own)  # fmt: skip
        weights = draw(*y.shape, seed=1), draw(*last.shape, seed=2)
        want = torch.autograd.grad((y, last), leaves, weights)
        for _ in range(2):
            got = run(GRU, changed, offsets=OFFSETS, backend=backend)
            assert_close(torch.autograd.grad(got, leaves, weights), want)


@each_backend
def test_no_sequences(backend: str) -> None:
    h, last = nonlinear_recurrence(
        decayed, draw(2, 0, 3), 0.0, params=draw(3), offsets=torch.tensor([0]),
        return_final=True, backend=backend,
    )  # fmt: skip
    assert h.shape == (2, 0, 3) and last.shape == (0, 2, 3)


RESETS = {
    "steps": (9, 1), "rows": (2, 9), "whole": (2, 9, 3), "broadcast": (1, 9, 3),
}  # fmt: skip


@pytest.mark.thinned(12)
@each_backend
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("kind", RESETS)
def test_resets(kind: str, reverse: bool, backend: str) -> None:
    """There h[t] = step(init, x[t]); with gradients, of init too."""
    mask = draw(*RESETS[kind], seed=4) > 0.3
    given = arguments(LSTM, 9)
    beside(LSTM, given, backend, reset=mask, reverse=reverse)
    beside(LSTM, given._replace(init=(0.5, -1.0)), backend, reset=mask, reverse=reverse)
    leaves = [t.clone().requires_grad_() for t in (*given.xs, *given.init, *given.params)]
    changed = Given(tuple(leaves[:4]), tuple(leaves[4:6]), tuple(leaves[6:]))
    options: dict[str, Any] = {"reset": mask, "reverse": reverse}
    want = loop(lstm, changed.xs, changed.init, params=changed.params, **options)
    weights = [draw(*t.shape, seed=k) for k, t in enumerate(pytree.tree_leaves(want))]
    expected = torch.autograd.grad(pytree.tree_leaves(want), leaves, weights)
    for _ in range(3):
        got = pytree.tree_leaves(run(LSTM, changed, backend=backend, **options))
        assert_close(torch.autograd.grad(got, leaves, weights), expected)
        mask.logical_not_().logical_not_()


@pytest.mark.exhaustive
@each_backend
def test_resets_of_one_row(backend: str) -> None:
    x, mask = draw(9, 3), draw(9, seed=4) > 0
    for shape in ((9,), (9, 1), (9, 3)):
        m = mask.view(9, *[1] * (len(shape) - 1)).expand(shape)
        want = loop(decayed, x, 0.5, 0, params=0.7, reset=m)
        for flipped in (m, ~m, m):
            got = nonlinear_recurrence(
                decayed, x, 0.5, 0, params=0.7, reset=flipped, return_final=True, backend=backend
            )
            if flipped is m:
                assert_close(got, want)
            else:
                assert_close(got, loop(decayed, x, 0.5, 0, params=0.7, reset=~m))


# ---- Values that are not finite ----


@each_backend
def test_nan_and_infinity(backend: str) -> None:
    """They go where the loop's go: not past a reset, nor into another channel or leaf."""
    x, init = draw(2, 9, 3), draw(2, 3)
    x[0, 2, 0], x[1, 4, 1], x[1, 6, 2] = torch.nan, torch.inf, -torch.inf
    mask = torch.zeros(2, 9, dtype=torch.bool)
    mask[:, 5] = True

    def pair(h: Any, x: Any) -> Any:
        a, b = h
        return a * a + x, torch.where(x > 0, b, 0.5 * b)

    for reset in (None, mask):
        want = loop(pair, x, (init, init), reset=reset)
        for _ in range(2):
            got = nonlinear_recurrence(
                pair, x, (init, init), reset=reset, return_final=True, backend=backend
            )
            for found, expected in zip(pytree.tree_leaves(got), pytree.tree_leaves(want),
                                       strict=True):  # fmt: skip
                assert torch.equal(found.isnan(), expected.isnan())
                assert_close(found, expected, equal_nan=True)
    assert want[0][0].isnan().any() and want[0][1].isfinite().all()
    grown = nonlinear_recurrence(
        lambda h, x: h * h + x, torch.ones(1, 20, 2, dtype=F64), torch.tensor([2.0, 1e-3]),
        backend=backend,
    )  # fmt: skip
    assert grown[0, -1, 0] == torch.inf
    init = init.clone()
    init[0, 0] = torch.nan
    assert torch.equal(
        nonlinear_recurrence(decayed, x.nan_to_num(0), init, params=0.5, backend=backend).isnan(),
        loop(decayed, x.nan_to_num(0), init, params=0.5)[0].isnan(),
    )


@pytest.mark.exhaustive
@each_backend
def test_gradients_past_nan(backend: str) -> None:
    """A NaN in one chain leaves the gradients of the others alone."""
    x = draw(2, 9, 3)
    x[0, 2, 0] = torch.nan
    x.requires_grad_()
    mask = torch.zeros(9, 1, dtype=torch.bool)
    mask[5] = True
    weight = draw(2, 9, 3, seed=1)
    for reset in (None, mask):
        want = loop(decayed, x, 0.5, params=0.7, reset=reset)[0]
        (expected,) = torch.autograd.grad(want, x, weight)
        for _ in range(2):
            got = nonlinear_recurrence(decayed, x, 0.5, params=0.7, reset=reset, backend=backend)
            (found,) = torch.autograd.grad(got, x, weight)
            assert_close(found, expected, equal_nan=True)
        assert found[1].isfinite().all() and found[0, :, 1:].isfinite().all()


# ---- Derivatives ----


def tracked(given: Given) -> tuple[Given, list[Tensor]]:
    """The arguments, of which those that may have a gradient want one."""
    leaves, spec = pytree.tree_flatten(given)
    leaves = [
        t.clone().requires_grad_()
        if isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex())
        else t
        for t in leaves
    ]
    return pytree.tree_unflatten(leaves, spec), [
        t for t in leaves if isinstance(t, Tensor) and t.requires_grad
    ]


def differentiable(results: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves(results)
    return [t for t in leaves if t.is_floating_point() or t.is_complex()]


def gradients(results: Any, leaves: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(results, leaves, weights, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for g, t in zip(found, leaves, strict=True)]


@pytest.mark.thinned(16)
@each_backend
@each_case
def test_gradients(case: Case, backend: str) -> None:
    for length in (9, 1):
        given, leaves = tracked(arguments(case, length))
        want = differentiable(loop(case.step, given.xs, given.init, params=given.params))
        weights = [torch.randn_like(t) for t in want]
        for w in weights:
            w[:1] = 0  # nothing flows into a row, so that its gradients are exactly 0
        expected = gradients(want, leaves, weights)
        for _ in range(3):
            got = differentiable(run(case, given, backend=backend))
            assert_close(gradients(got, leaves, weights), expected)


@pytest.mark.thinned(7)
@each_backend
@pytest.mark.parametrize("which", ["xs", "init", "params", "final"])
def test_some_gradients(which: str, backend: str) -> None:
    """Of one argument alone; of the last state alone."""
    given, leaves = tracked(arguments(GRU, 6))
    x, h, p = leaves[1], leaves[3], leaves[5]
    wanted = {"xs": x, "init": h, "params": p, "final": x}[which]
    given = pytree.tree_map(lambda t: t if t is wanted else t.detach(), given)
    part = 1 if which == "final" else 0
    want = loop(gru, given.xs, given.init, params=given.params)[part]
    weight = draw(*want.shape, seed=6)
    (expected,) = torch.autograd.grad(want, wanted, weight)
    for _ in range(3):
        (found,) = torch.autograd.grad(run(GRU, given, backend=backend)[part], wanted, weight)
        assert found.shape == wanted.shape
        assert_close(found, expected)


@pytest.mark.thinned(7)
@each_backend
def test_gradients_of_broadcast_arguments(backend: str) -> None:
    """They are summed to the shapes of the arguments."""
    shapes = (1, 9, 3), (2, 9, 1), (3,), (1, 1), ()
    leaves = [draw(*shape, seed=k).requires_grad_() for k, shape in enumerate(shapes)]
    a, b, h, p, q = leaves

    def step(h: Any, x: Any, params: Any) -> Any:
        return torch.tanh(params[0] * h + x[0]) * torch.cos(params[1] * x[1])

    want = loop(step, (a, b), h, params=(p, q))[0]
    weight = draw(*want.shape, seed=6)
    expected = torch.autograd.grad(want, leaves, weight)
    for _ in range(3):
        got = nonlinear_recurrence(step, (a, b), h, params=(p, q), backend=backend)
        found = torch.autograd.grad(got, leaves, weight)
        assert [t.shape for t in found] == [t.shape for t in leaves]
        assert_close(found, expected)


@pytest.mark.exhaustive
@each_backend
def test_one_tensor_in_several_places(backend: str) -> None:
    t = draw(2, 2, 2).requires_grad_()

    def step(h: Any, x: Any, params: Any) -> Any:
        return torch.sin(h * x[0] + params * x[1])

    def result(function: Callable[..., Any]) -> Tensor:
        return function(step, (t, t), t[:, 0], params=t[:, 1])

    (expected,) = torch.autograd.grad(loop(step, (t, t), t[:, 0], params=t[:, 1])[0].sum(), t)
    for _ in range(2):
        got = nonlinear_recurrence(step, (t, t), t[:, 0], params=t[:, 1], backend=backend)
        assert_close(torch.autograd.grad(got.sum(), t)[0], expected)


@pytest.mark.exhaustive
@each_backend
@each_case
def test_second_derivatives(case: Case, backend: str) -> None:
    """By finite differences, in both modes of autograd."""
    if backend == "triton" and case.name not in ("gru", "logistic", "integrate_and_fire"):
        pytest.skip("Triton's interpreter is slow; what it runs is derived as for the CPU")
    given, leaves = tracked(arguments(case, 3, batch=1, channels=2, seed=3))
    spec = pytree.tree_structure(given)
    everything = pytree.tree_leaves(given)
    places = [k for k, t in enumerate(everything) if isinstance(t, Tensor) and t.requires_grad]

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        changed = [*everything]
        for k, t in zip(places, tensors, strict=True):
            changed[k] = t
        return tuple(differentiable(run(case, pytree.tree_unflatten(changed, spec),
                                        backend=backend)))  # fmt: skip

    assert torch.autograd.gradcheck(
        function, leaves, check_forward_ad=True, check_batched_grad=True, fast_mode=True
    )
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


@pytest.mark.exhaustive
@each_backend
def test_second_derivatives_beside_the_loop(backend: str) -> None:
    def second(function: Callable[[Given], Any]) -> tuple[Tensor, ...]:
        given, leaves = tracked(arguments(GRU, 5, batch=1))
        first = torch.autograd.grad(function(given).square().sum(), leaves, create_graph=True)
        terms = torch.stack([(g * g).sum() * (k + 1) for k, g in enumerate(first)])
        return torch.autograd.grad(terms.sum(), leaves)

    want = second(lambda given: loop(gru, given.xs, given.init, params=given.params)[0])
    for _ in range(2):
        assert_close(second(lambda given: run(GRU, given, backend=backend)[0]), want)


@pytest.mark.thinned(7)
@each_backend
def test_forward_mode(backend: str) -> None:
    given = arguments(GRU, 5)
    leaves, spec = pytree.tree_flatten(given)
    tangents = [draw(*t.shape, seed=40 + k) for k, t in enumerate(leaves)]

    def through(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *tensors: function(pytree.tree_unflatten(list(tensors), spec))

    _, want = torch.func.jvp(
        through(lambda g: loop(gru, g.xs, g.init, params=g.params)), tuple(leaves), tuple(tangents)
    )
    for _ in range(2):
        _, got = torch.func.jvp(
            through(lambda g: run(GRU, g, backend=backend)), tuple(leaves), tuple(tangents)
        )
        assert_close(got, want)


def saved_by(call: Callable[[], Any]) -> list[Tensor]:
    """The tensors that autograd keeps for the backward pass."""
    kept: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        call()
    return kept


@pytest.mark.thinned(7)
@pytest.mark.parametrize("case", [GRU, LSTM], ids=lambda case: case.name)
def test_only_states_are_saved(case: Case) -> None:
    """Beside the arguments: the gates are computed again."""
    given, leaves = tracked(arguments(case, 64, channels=5))
    for _ in range(2):
        results: list[Any] = []
        kept = saved_by(lambda results=results: results.append(run(case, given, backend="cpu")))
        states = pytree.tree_leaves(results[0][0])
        addresses = {t.data_ptr() for t in (*leaves, *states)}
        of_steps = [t for t in kept if t.dim() == 3]
        assert {t.data_ptr() for t in of_steps} <= addresses
        assert len({t.data_ptr() for t in of_steps}) == len(given.xs) + len(states)
        assert sum(t.untyped_storage().nbytes() for t in kept if t.dim() < 3) < 4096


@pytest.mark.exhaustive
def test_states_that_lower_hides_are_saved_once() -> None:
    given, leaves = tracked(arguments(LSTM, 64, channels=5))
    for _ in range(2):
        kept = saved_by(lambda: run(LSTM, given, lower=lambda h: h[0], backend="cpu"))
        large = {t.data_ptr() for t in kept if t.dim() == 3} - {t.data_ptr() for t in leaves}
        assert len(large) == 2  # h, which is returned, and c


# ---- Repeated calls ----


@pytest.mark.exhaustive
def test_calls_that_differ_in_one_thing() -> None:
    """Each is remembered for itself, whatever came before."""
    x, init, p = draw(2, 9, 3), draw(2, 3), draw(3)
    gates = draw(2, 9, 3, seed=9)
    mask = draw(2, 9, seed=2) > 0
    calls: list[tuple[Any, dict[str, Any]]] = [
        ((decayed, x, init), {"params": p}),
        ((decayed, gates, init), {"params": p}),
        ((decayed, x, init + 1), {"params": p}),
        ((decayed, x, init), {"params": p + 1}),
        ((decayed, x, init), {"params": 0.5}),
        ((decayed, x, init), {"params": 0.25}),
        ((decayed, x, 0.0), {"params": 0.25}),
        ((decayed, x, 1.0), {"params": 0.25}),
        ((decayed, x[:, :8], init), {"params": p}),
        ((decayed, x, init), {"params": p, "reverse": True}),
        ((decayed, x, init), {"params": p, "reset": mask}),
        ((decayed, x, init), {"params": p, "reset": ~mask}),
        ((decayed, x, init), {"params": p, "reset": mask[:1, :, None]}),
        ((decayed, x, init), {"params": p, "offsets": torch.tensor([0, 4, 9])}),
        ((decayed, x, init), {"params": p, "offsets": torch.tensor([0, 5, 9])}),
        ((decayed, x, init), {"params": p, "lower": lambda h: h + 1}),
        ((decayed, x, init), {"params": p, "lower": lambda h: h + 2}),
        ((decayed, x, init), {"params": p, "lower": lambda h, x: h + x}),
        ((lambda h, x: torch.tanh(h) + x, x, init), {}),
        ((lambda h, x: torch.tanh(h) - x, x, init), {}),
        ((decayed, x.mT, draw(2, 9)), {"axis": 1, "params": 0.5}),
        ((decayed, x.float(), init.float()), {"params": p.float()}),
        ((decayed, x, init[0]), {"params": p}),
    ]  # fmt: skip
    for _ in range(3):
        for args, options in calls:
            want = loop(*args, **options)
            assert_close(nonlinear_recurrence(*args, **options), want[0])
            assert_close(nonlinear_recurrence(*args, **options, return_final=True), want)
            with torch.no_grad():
                assert_close(nonlinear_recurrence(*args, **options), want[0])
            with torch.inference_mode():
                assert_close(nonlinear_recurrence(*args, **options).clone(), want[0])
            leaf = args[1].detach().clone().requires_grad_()
            again = args[0], leaf, *args[2:]
            (g,) = torch.autograd.grad(nonlinear_recurrence(*again, **options).sum(), leaf)
            assert_close(g, torch.autograd.grad(loop(*again, **options)[0].sum(), leaf)[0])


@pytest.mark.exhaustive
def test_captured_numbers() -> None:
    """A step whose captured number, global or default changes is another step."""
    x = draw(1, 5, 2)
    scale = 0.5

    def step(h: Any, x: Any) -> Any:
        return torch.tanh(scale * h + x)

    first = nonlinear_recurrence(step, x, 0.0)
    assert_close(first, loop(step, x, 0.0)[0])
    scale = 2.0
    second = nonlinear_recurrence(step, x, 0.0)
    assert_close(second, loop(step, x, 0.0)[0])
    assert not torch.equal(first, second)

    class Settings:
        rate = 0.5

    settings = Settings()

    def mutable(h: Any, x: Any) -> Any:
        return torch.tanh(settings.rate * h + x)

    for rate in (0.5, 1.5):
        settings.rate = rate
        assert_close(nonlinear_recurrence(mutable, x, 0.0), loop(mutable, x, 0.0)[0])


@pytest.mark.thinned(7)
@each_backend
def test_steps_that_share_a_variable(backend: str) -> None:
    """Its value is that of the time of the call, also where an operator is read again later."""

    def results(function: Callable[..., Any], x: Tensor) -> list[Tensor]:
        found = []
        for k in (0.625, 3.0):
            first = x.new_full((2, 3), 0.25)
            found.append(function(lambda h, x: torch.tanh(k * h + x), x, first))  # noqa: B023
        return found

    def compared(x: Tensor) -> None:
        want = results(lambda *args: loop(*args)[0], x)
        got = results(lambda *args: nonlinear_recurrence(*args, backend=backend), x)
        assert_close(got, want)
        if x.requires_grad:
            weights = [draw(*x.shape, seed=k) for k in range(2)]
            for a, b, w in zip(got, want, weights, strict=True):
                assert_close(torch.autograd.grad(a, x, w), torch.autograd.grad(b, x, w))

    x = draw(2, 6, 3)
    compared(x)
    compared(x.clone().requires_grad_())
    compared(x.clone().requires_grad_())


@pytest.mark.exhaustive
def test_a_module_as_a_step() -> None:
    class Leaky(torch.nn.Module):
        def forward(self, h: Tensor, x: Tensor, rate: Tensor) -> Tensor:
            return torch.relu(rate * h + x)

    x, p = draw(2, 9, 3), torch.nn.Parameter(draw(3))
    got = nonlinear_recurrence(Leaky(), x, 0.0, params=p)
    want = loop(Leaky().forward, x, 0.0, params=p)[0]
    assert_close(got, want)
    assert_close(torch.autograd.grad(got.sum(), p), torch.autograd.grad(want.sum(), p))


# ---- Transforms and modes ----


@pytest.mark.thinned(7)
@each_backend
@pytest.mark.parametrize("where", [(0, None, None), (0, 0, None), (None, 0, 0), (1, 0, 0)])
def test_vmap(where: tuple[Any, ...], backend: str) -> None:
    x, h, p = (
        draw(*((4, *shape) if dim == 0 else (shape[0], 4, *shape[1:]) if dim == 1 else shape))
        for shape, dim in zip(((2, 6, 3), (2, 3), (3,)), where, strict=True)
    )

    def one(x: Tensor, h: Tensor, p: Tensor) -> Any:
        return nonlinear_recurrence(decayed, x, h, params=p, return_final=True, backend=backend)

    want = torch.vmap(lambda x, h, p: loop(decayed, x, h, params=p), where)(x, h, p)
    for _ in range(2):
        assert_close(torch.vmap(one, where)(x, h, p), want)


@pytest.mark.exhaustive
@each_backend
def test_torch_func(backend: str) -> None:
    x, h, p = draw(1, 3, 2), draw(1, 2), draw(2)

    def of(function: Callable[..., Any]) -> Callable[..., Tensor]:
        def scalar(x: Tensor, h: Tensor, p: Tensor) -> Tensor:
            found = function(decayed, x, h, params=p)
            found = found[0] if isinstance(found, tuple) else found
            return (found**3).sum()

        return scalar

    ours: Any = of(lambda *a, **o: nonlinear_recurrence(*a, **o, backend=backend))
    theirs = of(loop)
    for argnum in range(3):
        for _ in range(2):
            got = torch.func.grad(ours, argnum)(x, h, p)
            assert_close(got, torch.func.grad(theirs, argnum)(x, h, p))
        assert_close(
            torch.func.hessian(ours, argnum)(x, h, p), torch.func.hessian(theirs, argnum)(x, h, p)
        )
    rows = draw(4, 1, 3, 2)
    got = torch.vmap(torch.func.grad(ours), (0, None, None))(rows, h, p)
    assert_close(got, torch.vmap(torch.func.grad(theirs), (0, None, None))(rows, h, p))


@each_backend
def test_autocast(backend: str) -> None:
    """It changes nothing: the step is traced outside of it."""
    x = draw(2, 6, 3, dtype=torch.float32)
    want = nonlinear_recurrence(decayed, x, 0.0, params=0.5, backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        got = nonlinear_recurrence(decayed, x, 0.0, params=0.5, backend=backend)
        narrow = nonlinear_recurrence(decayed, x.bfloat16(), 0.0, params=0.5, backend=backend)
    assert got.dtype == torch.float32 and torch.equal(got, want)
    assert narrow.dtype == torch.bfloat16


@pytest.mark.exhaustive
def test_default_device_and_dtype() -> None:
    whole = torch.arange(6).view(1, 6, 1)
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, F64, torch.float32):
            torch.set_default_dtype(dtype)
            assert nonlinear_recurrence(decayed, whole, 0.0, params=0.5).dtype == dtype
    finally:
        torch.set_default_dtype(before)
    x = draw(1, 3, 2)
    for _ in range(2):
        with torch.device("meta"):
            got = nonlinear_recurrence(decayed, x, 0.25, params=0.375)
        assert_close(got, loop(decayed, x, 0.25, params=0.375)[0])


def test_meta() -> None:
    x = torch.empty(2, 6, 3, device="meta")
    h, last = nonlinear_recurrence(decayed, x, 0.0, params=0.5, return_final=True, backend="eager")
    assert h.device.type == "meta" and h.shape == (2, 6, 3) and last.shape == (2, 3)


@pytest.mark.exhaustive
def test_threads() -> None:
    """Steps that no thread has seen, and the same ones, at once."""
    x = draw(2, 50, 3)
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for k in range(6):
                scale = 0.1 * (k % 3 + 1)

                def step(h: Any, x: Any, scale: float = scale) -> Any:
                    return torch.tanh(scale * h + x)

                leaf = x.clone().requires_grad_()
                got = nonlinear_recurrence(step, leaf, 0.0)
                got.sum().backward()
                assert_close(got, loop(step, x, 0.0)[0])
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


@pytest.mark.exhaustive
def test_without_a_compiler() -> None:
    """In a process that cannot run the C++ compiler, torch operations run the loop."""
    code = (
        "import torch, warnings; from assocscan import nonlinear_recurrence as f\n"
        "warnings.simplefilter('ignore')\n"
        "x = torch.linspace(-1, 1, 5, requires_grad=True)\n"
        "y = f(lambda h, x: torch.sin(h * 1.0625) + x, x, 0.0, 0); y.sum().backward()\n"
        "h = torch.zeros(())\n"
        "for t in range(5): h = torch.sin(h * 1.0625) + x[t]\n"
        "assert torch.allclose(h, y[-1]), (h, y)\n"
    )
    environment = {**os.environ, "CXX": "/nowhere", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True,
                          text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr


# ---- Random steps ----


def check_random(seed: int, backend: str) -> None:
    step, count, inputs, weights = random_step(seed)
    drawn = Given(
        tuple(draw(2, 6, 3, seed=seed + k) for k in range(inputs)),
        tuple(draw(2, 3, seed=seed + 10 + k) for k in range(count)),
        tuple(draw(3, seed=seed + 20 + k) for k in range(weights)),
    )
    given, leaves = tracked(drawn)
    case = Case(f"random {seed}", step, None, None)
    want = pytree.tree_leaves(loop(step, given.xs, given.init, params=given.params))
    tensors = [draw(*t.shape, seed=seed + 30 + k) for k, t in enumerate(want)]
    expected = gradients(want, leaves, tensors)
    for _ in range(2):
        got = pytree.tree_leaves(run(case, given, backend=backend))
        assert_close(got, want)
        assert_close(gradients(got, leaves, tensors), expected)


@pytest.mark.parametrize("seed", range(1))
def test_random_steps(seed: int) -> None:
    for backend in BACKENDS:
        check_random(seed, backend)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(1, 40))
def test_more_random_steps(seed: int) -> None:
    for backend in BACKENDS:
        check_random(seed, backend)


@each_backend
def test_numbers_that_are_known(backend: str) -> None:
    """A neuron's, by hand: 0.75, then 0.375 + 0.75 fires, and so on."""
    x = torch.full((1, 6, 1), 0.75, dtype=F64)
    v, count = nonlinear_recurrence(integrate_and_fire, x, (0.0, 0), params=0.5, backend=backend)
    assert v[0, :, 0].tolist() == [0.75, 0.125, 0.8125, 0.15625, 0.828125, 0.1640625]
    assert count[0, :, 0].tolist() == [0, 1, 1, 2, 2, 3]
