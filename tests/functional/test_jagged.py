"""Jagged nested tensors: each component is scanned on its own, as packed sequences are."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from table import Engine
from torch import Tensor

import assocscan
from assocscan import (
    AssocScanError,
    AxisError,
    ScanTypeError,
    ScanValueError,
    associative_scan,
    cumprod,
    cumsum,
    linear_recurrence,
    monoid,
    ops,
    reduce,
)
from assocscan.functional.packing.jagged import OF_OPERATORS, RULES

F64 = torch.float64
LENGTHS = [3, 0, 4]
OFFSETS = torch.tensor([0, 3, 3, 7])
S, L = 3, 7


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.rand(shape, generator=generator, dtype=F64) + 0.5


def jagged(values: Tensor, offsets: Tensor = OFFSETS, dim: int = 1) -> Any:
    return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=dim)


def spd(*shape: int) -> Tensor:
    half = draw(*shape, seed=7) / 4
    return half @ half.mT + torch.eye(shape[-1], dtype=F64) / 2


x, flags = draw(L, 2), (torch.arange(2 * L) % 3 == 1).view(L, 2)
logs = draw(L, 3).log_softmax(-1)
square = draw(3, 3).log_softmax(-1)
gates = draw(1, L, 2)


def decayed(h: Tensor, x: Tensor, rate: Tensor) -> Tensor:
    return torch.tanh(rate * h + x)


KALMAN = {"H": draw(1, 2), "R": spd(1, 1)}
DYNAMICS = {"F": draw(2, 2) / 4, "Q": spd(2, 2)}
# Of each function: the arguments that become jagged, as they are packed, and all others.
CALLS: dict[Callable[..., Any], list[tuple[dict[str, Tensor], dict[str, Any]]]] = {
    **{f: [({"x": x}, {"axis": 0, "reverse": True})]
       for f in (assocscan.cummax, assocscan.cummin, assocscan.logcumsumexp)},
    cumsum: [({"x": x}, {"axis": 0, "inclusive": False}), ({"x": x[:, 0]}, {}),
             ({"x": x}, {"axis": 0, "include_initial": True}),
             ({"x": x.bool()}, {"axis": 0, "dtype": F64})],
    cumprod: [({"x": x}, {"axis": -2}), ({"x": x}, {"axis": 0, "include_initial": True})],
    linear_recurrence: [
        ({"a": x, "b": x}, {"axis": 0, "init": draw(S, 2), "return_final": True}),
        ({"b": x}, {"a": 0.5, "axis": 0, "init": 1.0}),
        ({"b": x}, {"a": draw(2), "axis": 0, "return_final": "only"}),
    ],
    assocscan.matrix_recurrence: [
        ({"A": draw(L, 2, 2) / 2, "b": x}, {"axis": 0, "init": draw(S, 2), "return_final": True}),
        ({"b": x}, {"A": draw(2, 2), "axis": 0, "return_final": "only"}),
    ],
    assocscan.nonlinear_recurrence: [
        ({"xs": x}, {"step": decayed, "init": draw(S, 2), "params": draw(2), "axis": 0,
                     "return_final": True}),
        ({"xs": x}, {"step": decayed, "init": 0.5, "params": 0.9, "axis": 0, "reverse": True,
                     "lower": lambda h, x: h * x}),
    ],
    assocscan.lfilter: [
        ({"x": x}, {"b": draw(3), "a": draw(3), "axis": 0, "return_final": True}),
        ({"x": x}, {"b": draw(2, 3), "a": draw(2, 3), "axis": 0}),
    ],
    assocscan.sosfilt: [
        ({"x": x}, {"sos": torch.eye(1, 6, dtype=F64) + torch.eye(6, dtype=F64)[3:4], "axis": 0,
                    "return_final": True}),
    ],
    assocscan.ewm_mean: [({"x": x.masked_fill(flags, torch.nan)}, {"alpha": 0.3, "axis": 0}),
                         ({"x": x, "alpha": x / 2}, {"axis": 0})],
    assocscan.ewm_var: [({"x": x}, {"alpha": 0.3, "axis": 0, "bias": True})],
    assocscan.forward_fill: [({"x": x.masked_fill(flags, torch.nan)}, {"axis": 0, "limit": 1}),
                             ({"x": x, "valid": flags}, {"axis": 0})],
    assocscan.discounted_returns: [
        ({"rewards": x, "done": flags}, {"discount": 0.9, "bootstrap": draw(S, 2), "axis": 0}),
    ],
    assocscan.gae: [
        ({"rewards": x, "values": draw(L, 2), "truncated": flags, "next_values": x},
         {"discount": draw(2), "decay": 0.8, "bootstrap": draw(S, 2), "axis": 0}),
    ],
    assocscan.vtrace: [
        ({"log_ratios": x - 1, "rewards": x, "values": x},
         {"discount": 0.9, "bootstrap": draw(S, 2), "axis": 0}),
    ],
    assocscan.hmm_filter: [
        ({"likelihood": logs}, {"transition": square, "initial": draw(S, 3).log_softmax(-1)}),
        ({"likelihood": logs, "transition": square.repeat(L, 1, 1), "observed": flags[:, 0]},
         {"initial": square[0]}),
    ],
    assocscan.hmm_smoother: [
        ({"likelihood": logs}, {"transition": square, "initial": square[0]}),
    ],
    assocscan.viterbi: [({"likelihood": logs}, {"transition": square, "initial": square[0]})],
    assocscan.kalman_filter: [
        ({"y": draw(L, 1)},
         {**KALMAN, **DYNAMICS, "mean": draw(S, 2), "covariance": spd(S, 2, 2)}),
        ({"y": draw(L, 1), "F": draw(L, 2, 2) / 4, "controls": draw(L, 1)},
         {**KALMAN, "Q": spd(2, 2), "B": draw(2, 1), "mean": draw(2), "covariance": spd(2, 2)}),
    ],
    assocscan.rts_smoother: [({"mean": draw(L, 2), "covariance": spd(L, 2, 2)}, DYNAMICS)],
    assocscan.selective_scan: [
        ({"u": gates[0], "delta": gates[0], "B": draw(L, 3), "C": draw(L, 3)},
         {"A": -draw(2, 3), "init": draw(S, 2, 3), "return_final": True}),
        ({"u": gates[0], "delta": gates[0], "z": gates[0], "B": draw(L, 2, 3), "C": draw(L, 2, 3)},
         {"A": -draw(2, 3), "D": draw(2)}),
    ],
}  # fmt: skip
CASES = [(f, *case) for f, cases in CALLS.items() for case in cases]
each_case = pytest.mark.parametrize(
    "function,series,rest", CASES,
    ids=[f"{f.__name__}-{'-'.join([*s, *r])}" for f, s, r in CASES],
)  # fmt: skip


def test_the_table_has_every_function() -> None:
    """That takes offsets; `explain` and `explain_recurrence` make no results."""
    public = [getattr(assocscan, n) for n in assocscan.__all__ if n.islower() and n != "ops"]
    packed = {f.__name__ for f in public if callable(f) and "offsets" in parameters(f)}
    # One of them has offsets as all that it takes, another one besides a tensor of values.
    packed -= {"explain", "explain_recurrence", "lengths_of", "to_padded"}
    assert packed == {f.__name__ for f in CALLS} | set(OF_OPERATORS)
    assert packed == RULES.keys() | set(OF_OPERATORS)


def parameters(function: Callable[..., Any]) -> Any:
    return inspect.signature(function).parameters


def packed_call(function: Any, series: dict[str, Tensor], rest: dict[str, Any]) -> list[Tensor]:
    """The results on packed sequences."""
    given = {**series, **rest}
    if function is assocscan.selective_scan:  # which needs a batch
        given |= {name: t[None] for name, t in series.items()}
        given |= {"init": rest["init"][:, None]} if "init" in rest else {}
        found = function(**given, offsets=OFFSETS)
        return [found[0][0], found[1][:, 0]] if isinstance(found, tuple) else [found[0]]
    found = function(**given, offsets=OFFSETS)
    return [found] if isinstance(found, Tensor) else list(found)


@pytest.mark.thinned(8)
@each_case
def test_values_are_those_of_packed_sequences(
    function: Any, series: dict[str, Tensor], rest: dict[str, Any]
) -> None:
    want = packed_call(function, series, rest)
    given = {**rest, **({"axis": 1} if rest.get("axis") == 0 else {})}
    for _ in range(2):
        found = function(**{name: jagged(t) for name, t in series.items()}, **given)
        assert isinstance(found, Tensor) or type(found).__name__ in (
            "tuple", "CumulativeExtremum", "HMMResult", "ViterbiResult", "KalmanResult",
            "SmootherResult", "VTraceResult",
        )  # fmt: skip
        parts = [found] if isinstance(found, Tensor) else list(found)
        for part, expected in zip(parts, want, strict=True):
            if part.is_nested:
                offsets = OFFSETS + torch.arange(4) if "include_initial" in rest else OFFSETS
                assert torch.equal(part.offsets(), offsets)
                part = part.values()
            assert part.dtype == expected.dtype
            torch.testing.assert_close(part, expected, rtol=0, atol=0, equal_nan=True)
    assert (rest.get("return_final") == "only") != any(
        part.is_nested for part in ([found] if isinstance(found, Tensor) else found)
    )


def test_the_result_lines_up_with_what_was_scanned() -> None:
    """It has the same offsets, not equal ones, so that torch adds both."""
    t = jagged(x)
    for y in (cumsum(t, 1), associative_scan(ops.sum, t, 1), linear_recurrence(1.0, t)):
        assert y.offsets() is t.offsets() and torch.equal((y - t).values(), y.values() - x)
    most = jagged(x)
    assert most._get_max_seqlen() == 4
    assert cumsum(most, 1)._maybe_max_seqlen == 4


def test_gradients_flow_to_the_nested_tensor() -> None:
    leaf = torch.nested.nested_tensor([*x.split(LENGTHS)], layout=torch.jagged, requires_grad=True)
    values = x.clone().requires_grad_()
    init = draw(S, 2).requires_grad_()
    for scan in (
        lambda t, **o: linear_recurrence(t, t, init, **o),
        lambda t, **o: cumprod(t, **o),
        lambda t, **o: associative_scan(ops.affine, (t, t), **o)[1],
    ):
        for _ in range(2):
            y, want = scan(leaf, axis=1), scan(values, axis=0, offsets=OFFSETS)
            weight = draw(L, 2, seed=3)
            y.values().backward(weight)
            (gradient,) = torch.autograd.grad(want, values, weight)
            torch.testing.assert_close(leaf.grad.values(), gradient)
            leaf.grad = None


def test_windows_of_each_component() -> None:
    for _ in range(2):
        found = assocscan.windowed(ops.max, jagged(x), 2, axis=1)
        assert found.is_nested and torch.equal(found.offsets(), OFFSETS)
        want = assocscan.windowed(ops.max, x, 2, offsets=OFFSETS)
        torch.testing.assert_close(found.values(), want)


def test_scans_and_reductions_of_operators(engine: Engine) -> None:
    @monoid(identity={"a": 1.0, "b": 0.0}, name="pair_of_test_jagged")
    def pair(left: Any, right: Any) -> Any:
        return {"a": left["a"] * right["a"], "b": right["a"] * left["b"] + right["b"]}

    values = x.float()
    xs = {"a": values, "b": values + 1}
    nested = {name: jagged(engine.put(t), engine.put(OFFSETS)) for name, t in xs.items()}
    init = {"a": 1.0, "b": engine.put(draw(S, 2).float())}
    want, last = associative_scan(pair, xs, init={**init, "b": init["b"].cpu()}, offsets=OFFSETS,
                                  return_final=True)  # fmt: skip
    got, final = engine.scan(pair, nested, 1, init=init, return_final=True)
    total = reduce(pair, nested, 1, init=init, backend=engine.name)
    for name in "ab":
        torch.testing.assert_close(got[name].values().cpu(), want[name])
        torch.testing.assert_close(final[name].cpu(), last[name])
        torch.testing.assert_close(total[name].cpu(), last[name])
    raw = associative_scan(torch.maximum, nested["a"], -2)
    torch.testing.assert_close(
        raw.values().cpu(), associative_scan(torch.maximum, values, offsets=OFFSETS)
    )
    # Elements of matrices: the axis is counted over the batch dimensions.
    matrices = draw(L, 2, 2)
    for axis in (1, -1):
        product = associative_scan(ops.matmul, jagged(matrices), axis)
        want = associative_scan(ops.matmul, matrices, offsets=OFFSETS)
        torch.testing.assert_close(product.values(), want)


def test_a_ragged_dimension_that_is_not_the_second() -> None:
    t = jagged(x).transpose(1, 2)
    for axis in (2, -1):
        y = cumsum(t, axis)
        assert y.shape == t.shape
        torch.testing.assert_close(
            y.transpose(1, 2).values(), cumsum(x, 0, offsets=OFFSETS), rtol=0, atol=0
        )
    with pytest.raises(AxisError, match=r"axis 1 of x is not its ragged dimension.*pass axis=2"):
        cumsum(t, 1)


# torch itself reads `.grad` of the nested tensors that a broken graph passes on.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_compiled() -> None:
    """Whole; of functions that Dynamo reads no further into, the graph breaks."""
    torch._dynamo.reset()
    t = jagged(x.clone()).requires_grad_()
    whole = [
        lambda t: cumsum(t * t, 1) + t,
        lambda t: associative_scan(ops.affine, (t, t), 1)[1],
        lambda t: linear_recurrence(0.5, t, return_final=True)[0],
        lambda t: reduce(ops.prod, t, 1),
    ]
    parts = [
        lambda t: assocscan.cummax(t, 1).values,
        lambda t: cumsum(t, 1, include_initial=True),
        lambda t: assocscan.forward_fill(t, axis=1),
        lambda t: associative_scan(torch.minimum, t, 1),
    ]

    def results(function: Callable[[Any], Any]) -> list[Tensor]:
        y = function(t)
        y = y.values() if y.is_nested else y
        (g,) = torch.autograd.grad(y.square().sum(), t)
        return [y, g.values()]

    for function in (*whole, *parts):
        compiled: Any = torch.compile(function, backend="aot_eager", fullgraph=function in whole)
        torch.testing.assert_close(results(compiled), results(function))


other = jagged(x, torch.tensor([0, 2, 4, 7]))
GAPS = torch.nested.narrow(draw(3, 5, 2), 1, OFFSETS[:3] * 0, torch.tensor([2, 3, 1]), torch.jagged)


@pytest.mark.filterwarnings("ignore:.*nested tensors")
@pytest.mark.parametrize(
    "call,error,words",
    [
        (lambda t: cumsum(t), AxisError, "axis 2 of x is not its ragged dimension, which is 1"),
        (lambda t: cumsum(t, 0), AxisError, "axis 0 of x is not.*pass axis=1"),
        (lambda t: associative_scan(ops.sum, t), AxisError, "axis 0 of xs is not"),
        (lambda t: cumsum(t, 3), AxisError, "axis 3 is out of range for x"),
        (lambda t: cumsum(t, 1, offsets=OFFSETS), ScanValueError, "leave offsets out"),
        (lambda t: associative_scan(ops.affine, (t, x), 1), ScanTypeError,
         r"xs\[0\] is a jagged nested tensor, but xs\[1\] is a dense one"),
        (lambda t: reduce(ops.affine, (x, t), 1), ScanTypeError, r"xs\[1\] is a jagged .*xs\[0\]"),
        (lambda t: linear_recurrence(x, t), ScanTypeError, "b is a jagged .* a is a dense one"),
        (lambda t: linear_recurrence(t, x, axis=1), ScanTypeError, "a is a jagged .* b is a dense"),
        (lambda t: linear_recurrence(0.5, t, t), ScanTypeError, "init is a nested tensor"),
        (lambda t: linear_recurrence(other, t), ScanValueError,
         "a and b are jagged, but their components have different lengths"),
        (lambda t: linear_recurrence(t.transpose(1, 2), t), ScanValueError, "in dimension 2"),
        (lambda t: cumsum(GAPS, 1), ScanTypeError, r"do not stand back to back.*x.contiguous\(\)"),
        (lambda t: cumsum(torch.nested.nested_tensor([x, x]), 1), ScanTypeError, "offsets="),
        (lambda t: linear_recurrence(torch.nested.nested_tensor([x, x]), t), ScanTypeError,
         "a nested tensor of another layout"),
        (lambda t: assocscan.run_lengths(t, 1), ScanTypeError, "x is a nested tensor"),
        (lambda t: assocscan.hmm_smoother(square[0], square, jagged(logs), pairs=True),
         ScanValueError, "pairs=True pass likelihood.values"),
        (lambda t: assocscan.hmm_filter(square[0], square, jagged(logs).transpose(1, 2)),
         AxisError, "the steps have to be ragged"),
        (lambda t: assocscan.to_padded(t, OFFSETS), ScanTypeError, "x is a nested tensor"),
    ],
)  # fmt: skip
def test_refused(call: Callable[[Any], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        call(jagged(x))
    assert isinstance(caught.value, AssocScanError)


def test_what_is_contiguous_again_is_taken() -> None:
    y = cumsum(GAPS.contiguous(), 1)
    for part, whole in zip(y.unbind(), GAPS.unbind(), strict=True):
        torch.testing.assert_close(part, whole.cumsum(0))
