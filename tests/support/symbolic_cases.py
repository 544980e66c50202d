"""All functions and layers, with the dimensions of their arguments that may be symbolic.

Names of dimensions stand for batch ("B") and length ("L"); all other sizes are 3 (or 2), so that an
example of B = 3 or L = 3 has sizes that are equal by chance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import assocscan
from assocscan import nn as layers
from assocscan import ops

C = 3
Shape = tuple[str | int, ...]


class Case(NamedTuple):
    """A function of float tensors of these shapes.

    layer: makes a module, which the function then takes first.
    differentiated: whether its gradients are compared too; their kernel may take minutes to make.
    """

    name: str
    function: Callable[..., Any]
    shapes: tuple[Shape, ...]
    layer: Callable[[], nn.Module] | None = None
    differentiated: bool = True


class Called(nn.Module):
    """What is exported: the function of a case."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = case.function
        self.layer = None if case.layer is None else case.layer()

    def forward(self, *xs: Tensor) -> Any:
        return self.function(*xs) if self.layer is None else self.function(self.layer, *xs)


def arguments(case: Case, sizes: dict[str, int]) -> tuple[Tensor, ...]:
    torch.manual_seed(sum(sizes.values()))
    ends = torch.linspace(0, sizes["L"], sizes["S"]).long()
    return tuple(
        ends
        if shape == OFFSETS
        else torch.randn([sizes[n] if isinstance(n, str) else n for n in shape])
        for shape in case.shapes
    )


OFFSETS: Shape = ("S",)
X: Shape = ("B", "L", C)
STEP: Shape = ("B", C)


def spread(x: Tensor) -> Tensor:
    """A covariance made of any matrix."""
    return x @ x.mT + torch.eye(x.shape[-1])


def kalman(
    y: Tensor, F: Tensor, H: Tensor, Q: Tensor, R: Tensor, m: Tensor, P: Tensor, **packed: Any
) -> Any:
    return tuple(
        assocscan.kalman_filter(y, 0.3 * F, H, spread(Q), spread(R), m, spread(P), **packed)
    )


def steered(y: Tensor, controls: Tensor, offsets: Any, *model: Tensor) -> Any:
    """Known inputs, and some rows that were not observed; filtered, then smoothed."""
    F, H, Q, R, m, P = model
    F, Q = 0.3 * F, spread(Q)
    inputs: dict[str, Any] = {"controls": controls, "B": H.mT, "offsets": offsets}
    found = assocscan.kalman_filter(
        y, F, H, Q, spread(R), m, spread(P), observed=controls[..., 0] > 0, **inputs
    )
    return found.log_likelihood, *assocscan.rts_smoother(*found[:2], F, Q, **inputs)


def smoothed(m: Tensor, P: Tensor, F: Tensor, Q: Tensor, **packed: Any) -> Any:
    return tuple(assocscan.rts_smoother(m, spread(P), F, spread(Q), **packed))


def posterior(initial: Tensor, transition: Tensor, likelihood: Tensor, **packed: Any) -> Any:
    transition = transition.log_softmax(-1)
    return tuple(assocscan.hmm_filter(initial.log_softmax(-1), transition, likelihood, **packed))


def marginals(initial: Tensor, transition: Tensor, likelihood: Tensor, **packed: Any) -> Any:
    transition = transition.log_softmax(-1)
    return assocscan.hmm_smoother(initial.log_softmax(-1), transition, likelihood, **packed)


def path(initial: Tensor, transition: Tensor, likelihood: Tensor, **packed: Any) -> Any:
    transition = transition.log_softmax(-1)
    return tuple(assocscan.viterbi(initial.log_softmax(-1), transition, likelihood, **packed))


def selective(*xs: Tensor, **options: Any) -> Any:
    u, delta, A, *rest = xs
    return assocscan.selective_scan(u, delta, -A.exp(), *rest, delta_softplus=True, **options)


def recurrence(a: Any, b: Tensor, init: Any = None, **options: Any) -> Any:
    a = a.sigmoid() if isinstance(a, Tensor) else a
    return assocscan.linear_recurrence(a, b, init, **options)


def decayed(h: Tensor, x: Tensor, rate: Tensor) -> Tensor:
    return torch.tanh(rate * h + x) * torch.sigmoid(x - h)


def nonlinear(x: Tensor, init: Any, params: Any, **options: Any) -> Any:
    return assocscan.nonlinear_recurrence(decayed, x, init, params=params, **options)


def oscillator(x: Tensor, position: Tensor, weight: Tensor) -> Any:
    """A state of two numbers, of which one starts at a number."""

    def step(h: Any, x: Any, params: Any) -> Any:
        speed = h["v"] + 0.1 * torch.sin(h["q"] * params[0]) - 0.1 * x
        return {"q": torch.tanh(h["q"] + params[1] * speed), "v": speed}

    h, last = assocscan.nonlinear_recurrence(
        step, x, {"q": position, "v": 0.0}, params=(weight, 0.5), return_final=True
    )
    return h["q"], h["v"], last["q"]


def filtered(b: Tensor, a: Tensor, x: Tensor, zi: Any = None, **options: Any) -> Any:
    a = torch.cat([a[..., :1].exp(), 0.2 * a[..., 1:].tanh()], -1)
    return assocscan.lfilter(b, a, x, 1, zi=zi, **options)


def in_sections(b: Tensor, a: Tensor, x: Tensor, zi: Any = None, **options: Any) -> Any:
    sos = torch.cat([b, a[..., :1].exp(), 0.2 * a[..., 1:].tanh()], -1)
    return assocscan.sosfilt(sos, x, 1, zi=zi, **options)


def weighted(function: Any, x: Tensor, alpha: Any, **options: Any) -> Tensor:
    """Of values with gaps; 0 where there is none yet."""
    alpha = alpha.sigmoid() if isinstance(alpha, Tensor) else alpha
    x = torch.where(x > 0.7, torch.nan, x)
    y: Tensor = function(x, alpha, axis=1, **options).nan_to_num(0)
    return y


def returns(x: Tensor, done: Tensor, last: Tensor) -> Tensor:
    return assocscan.discounted_returns(x, 0.9, done > 0, last, axis=1)


def advantages(x: Tensor, v: Tensor, last: Tensor, done: Tensor) -> Tensor:
    return assocscan.gae(x, v, last, 0.9, 0.8, done > 0, axis=1)


def entering(x: Tensor, offsets: Tensor, *element: int) -> Tensor:
    """What enters each of the packed sequences, and each row of x."""
    count = offsets.shape[0] - 1
    return torch.ones(count, x.shape[0], *element) * x.mean()


def scan(op: Any, **options: Any) -> Callable[..., Any]:
    return lambda *xs: assocscan.associative_scan(op, xs if len(xs) > 1 else xs[0], 1, **options)


def with_init(*xs: Tensor) -> Any:
    return assocscan.associative_scan(ops.affine, xs[:2], 1, init=(xs[2], xs[3]), return_final=True)


Y: Shape = ("B", "L", 2)
MODEL: tuple[Shape, ...] = ((2, 2), (2, 2), (2, 2), (2, 2))
SELECTIVE: tuple[Shape, ...] = (X, X, (C, 2), ("B", "L", 2), ("B", "L", 2))

FUNCTIONS = (
    Case("sum", scan(ops.sum), (X,)),
    Case("affine", scan(ops.affine), (X, X)),
    Case("affine, broadcast", scan(ops.affine), ((1, "L", C), ("B", "L", 1))),
    Case("affine, init and final", with_init, (X, X, (C,), STEP)),
    Case("raw callable", scan(lambda x, y: (x[0] * y[0], y[0] * x[1] + y[1])), (X, X)),
    Case("segmented", lambda x, r: scan(assocscan.segmented(ops.sum))(x, r > 0), (X, X)),
    Case("exclusive", scan(ops.affine, inclusive=False), (X, X)),
    Case("reduce", lambda x: assocscan.reduce(ops.prod, x, 1), (X,)),
    Case("vectors", scan(ops.matrix_affine), (("B", "L", C, C), X)),
    Case("windowed", lambda x: assocscan.windowed(ops.logaddexp, x, 2, 1), (X,)),
    Case("windowed, reversed",
         lambda *xs: assocscan.windowed(ops.affine, xs, 4, 1, True), (X, ("B", "L", 1))),
    Case("windowed, raw callable",
         lambda x: assocscan.windowed(lambda a, b: a + b, x, 3, 1), (X,)),
    Case("quaternion", scan(ops.quaternion), (("B", "L", 4),)),
    Case("cumsum", lambda x: assocscan.cumsum(x, 1, inclusive=False), (X,)),
    Case("cumsum over batch", lambda x: assocscan.cumsum(x, 0, reverse=True), (X,)),
    Case("cumprod", lambda x: assocscan.cumprod(x, 1, dtype=torch.float64), (X,)),
    Case("cummax", lambda x: tuple(assocscan.cummax(x, 1)), (X,)),
    Case("cummin", lambda x: tuple(assocscan.cummin(x, 0)), (X,)),
    Case("logcumsumexp", lambda x: assocscan.logcumsumexp(x, 1, reverse=True), (X,)),
    Case("linear_recurrence", recurrence, (X, X)),
    Case("linear_recurrence, decay of channels", recurrence, ((C,), X)),
    Case("linear_recurrence, decay of steps", recurrence, (("L", 1), X)),
    Case("linear_recurrence, decay of rows", recurrence, (("B", 1, 1), X)),
    Case("linear_recurrence, gate", recurrence, (("B", "L", 1), X)),
    Case("linear_recurrence, number", lambda x: recurrence(0.5, x, 1.0, axis=0), (X,)),
    Case("linear_recurrence, init", recurrence, ((C,), X, STEP)),
    Case("linear_recurrence, init of channels", recurrence, (X, X, (C,))),
    Case("linear_recurrence, final",
         lambda *xs: recurrence(*xs, return_final=True), ((C,), X, STEP)),
    Case("linear_recurrence, only", lambda *xs: recurrence(*xs, return_final="only"), ((C,), X)),
    Case("linear_recurrence, batch", lambda *xs: recurrence(*xs, axis=0), ((C,), X)),
    Case("matrix_recurrence", assocscan.matrix_recurrence, ((C, C), X)),
    Case("matrix_recurrence, init", assocscan.matrix_recurrence, (("L", C, C), X, STEP)),
    Case("nonlinear_recurrence", nonlinear, (X, STEP, (C,))),
    Case("nonlinear_recurrence, number", lambda x: nonlinear(x, 0.5, 1.0), (X,)),
    Case("nonlinear_recurrence, batch", lambda *xs: nonlinear(*xs, axis=0), (X, (C,), (C,))),
    Case("nonlinear_recurrence, broadcast",
         lambda *xs: assocscan.nonlinear_recurrence(
             lambda h, x: torch.tanh(0.5 * h * x[0]) + x[1], xs, 0.0),
         ((1, "L", C), ("B", "L", 1))),
    Case("nonlinear_recurrence, lower",
         lambda *xs: nonlinear(*xs, lower=lambda h, x: h * x, reverse=True, return_final=True),
         (X, STEP, (C,))),
    Case("nonlinear_recurrence, reset",
         lambda x, h, p, m: nonlinear(x, h, p, reset=m > 0), (X, STEP, (C,), ("B", "L"))),
    Case("nonlinear_recurrence, reset of steps",
         lambda x, h, p, m: nonlinear(x, h, p, reset=m > 0, return_final=True),
         (X, STEP, (C,), ("L", 1))),
    Case("nonlinear_recurrence, pair", oscillator, (X, STEP, (C,))),
    Case("lfilter", filtered, ((C,), (C,), X)),
    Case("lfilter of channels", filtered, ((C, 4), (C, 3), X)),
    Case("lfilter, carried", lambda *xs: filtered(*xs, return_final=True),
         ((4,), (3,), X, ("B", C, 3))),
    Case("sosfilt", in_sections, ((2, C), (2, C), X)),
    Case("sosfilt, carried", lambda *xs: in_sections(*xs, return_final=True),
         ((2, C), (2, C), X, (2, "B", C, 2))),
    Case("ewm_mean", lambda *xs: weighted(assocscan.ewm_mean, *xs), (X, (C,))),
    Case("ewm_mean, of steps",
         lambda *xs: weighted(assocscan.ewm_mean, *xs, adjust=False), (X, ("L", 1))),
    Case("ewm_var",
         lambda x: weighted(assocscan.ewm_var, x, 0.3, ignore_na=True, bias=True), (X,)),
    Case("discounted_returns", returns, (X, X, STEP)),
    Case("gae", advantages, (X, X, STEP, X)),
    Case("gae, cut",
         lambda x, v, last, m, n: assocscan.gae(
             x, v, last, 0.9, 0.8, axis=1, truncated=m > 0, next_values=n),
         (X, X, STEP, X, X)),
    Case("vtrace", lambda *xs: tuple(assocscan.vtrace(*xs[:4], 0.9, xs[4] > 0, 1)),
         (X, X, X, STEP, X)),
    Case("cumsum, reset", lambda x, m: assocscan.cumsum(x, 1, reset=m > 0), (X, ("B", "L"))),
    Case("linear_recurrence, reset",
         lambda a, b, m: recurrence(a, b, reset=m > 0, return_final=True), (X, X, ("L", 1))),
    Case("cumsum, initial", lambda x: assocscan.cumsum(x, 1, include_initial=True), (X,)),
    Case("forward_fill, limited",
         lambda x, m: assocscan.forward_fill(x, m > 0, 1, limit=2), (X, ("L", 1))),
    Case("forward_fill", lambda x, m: assocscan.forward_fill(x, m > 0, 1), (X, ("L", 1))),
    Case("run_lengths", lambda x: assocscan.run_lengths(x > 0, 1), (X,)),
    Case("compact", lambda x, m: assocscan.compact(x, m > 0, 1), (X, ("L", 1))),
    Case("hmm_filter", posterior, ((C,), (C, C), X)),
    Case("hmm_filter, of steps", posterior, (STEP, ("L", C, C), X)),
    Case("hmm_smoother", marginals, ((C,), (C, C), X)),
    Case("viterbi", path, ((C,), (C, C), X)),
    Case("kalman_filter", kalman, (Y, *MODEL, (2,), (2, 2)), differentiated=False),
    Case("kalman_filter, of steps", kalman, (Y, ("L", 2, 2), *MODEL[1:], ("B", 2), (2, 2)),
         differentiated=False),
    Case("kalman_filter, steered", lambda y, u, *model: steered(y, u, None, *model),
         (Y, Y, *MODEL, (2,), (2, 2)), differentiated=False),
    Case("rts_smoother", smoothed, (Y, ("B", "L", 2, 2), (2, 2), (2, 2))),
    Case("selective_scan", selective, SELECTIVE),
    Case("selective_scan, all", lambda *xs: selective(*xs[:-1], init=xs[-1], return_final=True),
         (*SELECTIVE, (C,), X, (C,), ("B", C, 2))),
    Case("monoid on elements", lambda *xs: ops.affine(xs[:2], xs[2:]), (STEP, STEP, (C,), (C,))),
    Case("run_length_encode", lambda x: assocscan.run_length_encode(x > 0), (("L",),)),
    Case("rglru", lambda x, r, g, d: layers.rglru(x, r, g, d.exp()), (X, X, X, (C,))),
)  # fmt: skip

# Run by torch operations: a graph holds as many as the length asks for.
OF_ONE_LENGTH = (
    Case("not pointwise", scan(lambda x, y: (x + y).softmax(-1)), (X,)),
    Case("matrix_recurrence, large", lambda A, x: assocscan.matrix_recurrence(0.2 * A, x),
         ((15, 15), ("B", "L", 15))),
)  # fmt: skip
PACKED = (
    Case("cumsum, packed", lambda x, o: assocscan.cumsum(x, 1, offsets=o), (X, OFFSETS)),
    Case("cummax, packed", lambda x, o: tuple(assocscan.cummax(x, 1, offsets=o)), (X, OFFSETS)),
    Case("linear_recurrence, packed",
         lambda a, x, o: recurrence(a, x, offsets=o, return_final=True), ((C,), X, OFFSETS)),
    Case("linear_recurrence, packed, init",
         lambda a, x, o: recurrence(a, x, entering(x, o, C), offsets=o), ((C,), X, OFFSETS)),
    Case("raw callable, packed",
         lambda x, o: scan(lambda one, two: one * two + two, offsets=o)(x), (X, OFFSETS)),
    Case("reduce, packed", lambda x, o: assocscan.reduce(ops.sum, x, 1, offsets=o), (X, OFFSETS)),
    Case("windowed, packed",
         lambda x, o: assocscan.windowed(ops.mean, x, 3, 1, offsets=o), (X, OFFSETS)),
    Case("matrix_recurrence, packed",
         lambda A, x, o: assocscan.matrix_recurrence(A, x, entering(x, o, C), offsets=o),
         ((C, C), X, OFFSETS)),
    Case("nonlinear_recurrence, packed",
         lambda x, h, p, o: nonlinear(x, h, p, offsets=o, return_final=True),
         (X, STEP, (C,), OFFSETS)),
    Case("nonlinear_recurrence, packed, init",
         lambda x, p, o: nonlinear(x, entering(x, o, C), p, offsets=o), (X, (C,), OFFSETS)),
    Case("lfilter, packed",
         lambda *xs: filtered(*xs[:3], entering(xs[2], xs[3], C, 2), offsets=xs[3],
                              return_final=True),
         ((C,), (C,), X, OFFSETS)),
    Case("sosfilt, packed",
         lambda b, a, x, o: in_sections(
             b, a, x, entering(x, o, 2, C, 2).transpose(1, 2), offsets=o, return_final=True),
         ((2, C), (2, C), X, OFFSETS)),
    Case("ewm_mean, packed",
         lambda x, o: weighted(assocscan.ewm_mean, x, 0.3, offsets=o), (X, OFFSETS)),
    Case("discounted_returns, packed",
         lambda x, o: assocscan.discounted_returns(x, 0.9, x > 0, entering(x, o, C), 1, offsets=o),
         (X, OFFSETS)),
    Case("cumsum, initial, packed",
         lambda x, o: assocscan.cumsum(x, 1, include_initial=True, offsets=o), (X, OFFSETS)),
    Case("vtrace, packed",
         lambda x, v, o: tuple(
             assocscan.vtrace(v, x, v, entering(x, o, C), 0.9, v > 0, 1, offsets=o)),
         (X, X, OFFSETS)),
    Case("gae, packed",
         lambda x, v, o: assocscan.gae(x, v, entering(x, o, C), 0.9, 0.8, v > 0, 1, offsets=o),
         (X, X, OFFSETS)),
    Case("forward_fill, packed", lambda x, o: assocscan.forward_fill(x, x > 0, 1, offsets=o),
         (X, OFFSETS)),
    Case("hmm_filter, packed", lambda *xs: posterior(*xs[:3], offsets=xs[3]),
         ((C,), (C, C), X, OFFSETS)),
    Case("hmm_smoother, packed", lambda *xs: marginals(*xs[:3], offsets=xs[3]),
         ((C,), (C, C), X, OFFSETS)),
    Case("viterbi, packed", lambda *xs: path(*xs[:3], offsets=xs[3]), ((C,), (C, C), X, OFFSETS)),
    Case("kalman_filter, packed", lambda *xs: kalman(*xs[:7], offsets=xs[7]),
         (Y, *MODEL, (2,), (2, 2), OFFSETS), differentiated=False),
    Case("kalman_filter, steered, packed", lambda *xs: steered(*xs[:2], xs[-1], *xs[2:-1]),
         (Y, Y, *MODEL, (2,), (2, 2), OFFSETS), differentiated=False),
    Case("rts_smoother, packed", lambda *xs: smoothed(*xs[:4], offsets=xs[4]),
         (Y, ("B", "L", 2, 2), (2, 2), (2, 2), OFFSETS)),
    Case("selective_scan, packed",
         lambda *xs: selective(*xs[:5], init=entering(xs[0], xs[5], C, 2), offsets=xs[5],
                               return_final=True),
         (*SELECTIVE, OFFSETS)),
    Case("LRU, packed", lambda layer, x, o: layer(x, offsets=o), (X, OFFSETS),
         lambda: layers.LRU(C)),
    Case("Hawk, packed", lambda layer, x, o: layer(x, offsets=o), (X, OFFSETS),
         lambda: layers.Hawk(C)),
    Case("DiagonalGRU, packed", lambda layer, x, o: layer(x, offsets=o), (X, OFFSETS),
         lambda: layers.DiagonalGRU(C)),
    Case("Mamba, packed", lambda layer, x, o: layer(x, offsets=o), (X, OFFSETS),
         lambda: layers.Mamba(C, states=2)),
)  # fmt: skip


def called(layer: Any, x: Tensor, *state: Any) -> Any:
    return tuple(layer(x, *state))


def adaptive(layer: Any, x: Tensor) -> Any:
    y, found = layer(x)
    return y, tuple(found["state"]), found["gate_l1"]


def carried(layer: Any, first: Tensor, second: Tensor) -> Any:
    """Two parts of a sequence."""
    y, state = layer(first)
    return y, layer(second, state)


LAYERS = (
    Case("LRU", called, (X,), lambda: layers.LRU(C)),
    Case("LRU, carried", carried, (X, X), lambda: layers.LRU(C)),
    Case("S5", called, (X,), lambda: layers.S5(C, 6)),
    Case("RGLRU", called, (X,), lambda: layers.RGLRU(C)),
    Case("RGLRU, carried", carried, (X, X), lambda: layers.RGLRU(C)),
    Case("Hawk", called, (X,), lambda: layers.Hawk(C)),
    Case("MatrixLRU", called, (X,), lambda: layers.MatrixLRU(C, heads=3, size=2)),
    Case("MatrixLRU, carried", carried, (X, X), lambda: layers.MatrixLRU(C, heads=3, size=2)),
    Case("Mamba", called, (X,), lambda: layers.Mamba(C, states=2)),
    Case("Mamba, carried", carried, (X, X), lambda: layers.Mamba(C, states=2)),
    Case("DiagonalGRU", called, (X,), lambda: layers.DiagonalGRU(C)),
    Case("DiagonalGRU, carried", carried, (X, X), lambda: layers.DiagonalGRU(C)),
    Case("DiagonalLSTM", called, (X,), lambda: layers.DiagonalLSTM(C)),
    Case("DiagonalLSTM, carried", carried, (X, X), lambda: layers.DiagonalLSTM(C)),
    Case("DiagonalSLSTM", called, (X,), lambda: layers.DiagonalSLSTM(C)),
    Case("DiagonalSLSTM, carried", carried, (X, X), lambda: layers.DiagonalSLSTM(C)),
    Case("CausalConv", called, (X,), lambda: layers.CausalConv(C, width=3)),
    Case("AdaptiveRankSemiseparable", adaptive, (X,),
         lambda: layers.AdaptiveRankSemiseparable(C, rank=3)),
    Case("Bidirectional", lambda layer, x: layer(x), (X,),
         lambda: layers.Bidirectional(layers.LRU(C), layers.RGLRU(C))),
    Case("BlockLinear", lambda layer, x: layer(x), (X,), lambda: layers.BlockLinear(C, C, heads=3)),
    Case("NormLinearGELU", lambda layer, x: layer(x), (X,), lambda: layers.NormLinearGELU(C, 4)),
)  # fmt: skip
