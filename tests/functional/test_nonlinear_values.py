"""Values of `nonlinear_recurrence` beside a loop of torch, by case, layout, structure and dtype."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from step_calls import (
    BACKENDS,
    F64,
    GRU,
    LSTM,
    beside,
    decayed,
    draw,
    each_backend,
    gradients,
    run,
    tracked,
)
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


@pytest.mark.slow
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
