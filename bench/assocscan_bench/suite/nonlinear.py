"""`nonlinear`: a GRU whose recurrent weights are one number per channel, forward and backward.

Contenders: `nonlinear_recurrence` as it chooses, by Newton's method, and the loop of torch
operations that it replaces. That is not compiled: torch.compile unrolls it, and took 45 s for 128
steps of it (docs/nonlinear.md). Other ways to run the same step are in `nonlinear_peers`. Then the
layer `nn.DiagonalGRU` beside torch.nn.GRU, another model: each of its steps multiplies by a matrix.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from assocscan.functional.nonlinear.nonlinear_recurrence import nonlinear_recurrence
from assocscan.nn import DiagonalGRU

from ..cases import OTHER, OURS, TORCH, Case, Contender, passes_of
from ..measuring.checks import Lanes, Verdict, against
from ..measuring.reference import reference
from ..nonlinear_peers import contenders as peers
from ..settings import BACKWARD, BOTH, FORWARD, PASSES, SEED, Settings, short
from .rnn import RECURRENCE

Sizes = tuple[tuple[int, int, int], ...]
# Many chains of a long axis and of a short one; few chains of a long one.
SIZES: Sizes = ((8, 8192, 1536), (8, 2048, 1536), (1, 65536, 512), (1, 65536, 64))
ON_CPU: Sizes = ((4, 1024, 256), (1, 8192, 16))
QUICK: Sizes = ((2, 128, 64),)
# Fewer steps on GPUs, where each operation of each step is a kernel to start.
LONGEST_LOOP, LONGEST_ON_CPU = 4096, 8192
# Arrays read or written: three gates and h; then three gates, h, ḡ and three gradients.
ARRAYS = {FORWARD: 4, BACKWARD: 8, BOTH: 12}
# Of a layer x and h; then x, h, ḡ and the gradient of x.
ARRAYS_OF_LAYERS = {FORWARD: 2, BACKWARD: 4, BOTH: 6}


def gru(h: Tensor, x: Any, weights: Any) -> Tensor:
    (z, r, n), (uz, ur, un) = x, weights
    z, r = torch.sigmoid(z + uz * h), torch.sigmoid(r + ur * h)
    return (1 - z) * torch.tanh(n + r * (un * h)) + z * h


def loop(z: Tensor, r: Tensor, n: Tensor, *weights: Tensor) -> Tensor:
    """One step after the other, by torch operations, in a form that autograd records well."""
    h = torch.zeros_like(z[:, 0])
    steps = []
    for x in zip(z.unbind(1), r.unbind(1), n.unbind(1), strict=True):
        h = gru(h, x, weights)
        steps.append(h)
    return torch.stack(steps, 1)


def cases(settings: Settings) -> list[Callable[[], Case]]:
    usual = SIZES if settings.is_gpu else ON_CPU
    shapes = QUICK if settings.quick else usual
    if settings.shapes or settings.lengths:
        shapes = tuple(settings.sizes([(b, d) for b, _, d in shapes], [shapes[0][1]]))
    return [
        functools.partial(make, settings, shape, dtype, which)
        for make in (case, layer_case)
        for dtype in settings.dtypes
        for which in settings.passes_or(FORWARD, BOTH)
        for shape in shapes
    ]


def case(settings: Settings, shape: tuple[int, int, int], dtype: torch.dtype, which: str) -> Case:
    batch, length, width = shape
    gates = tuple(2 * settings.random(shape, dtype).roll(k, 1) - 1 for k in range(3))
    weights = tuple(2 * settings.random((width,), dtype).roll(k, 0) - 1 for k in range(3))
    cotangent = None if which == FORWARD else torch.rand_like(gates[0])
    inputs = (*gates, *weights)

    def recurrence(method: str) -> Callable[[], Any]:
        def scan(z: Tensor, r: Tensor, n: Tensor, *params: Tensor) -> Tensor:
            h: Tensor = nonlinear_recurrence(
                gru, (z, r, n), 0.0, params=params, method=method, backend=settings.backend
            )
            return h

        return passes_of(scan, inputs, which, cotangent)

    contenders = {
        "assocscan": Contender(lambda: recurrence("auto"), OURS),
        "assocscan, Newton": Contender(lambda: recurrence("newton")),
    }
    if settings.is_gpu:  # on CPUs that is the first one
        contenders["assocscan, loop"] = Contender(lambda: recurrence("loop"))
    missing = {}
    longest = LONGEST_LOOP if settings.is_gpu else LONGEST_ON_CPU
    if length <= longest:
        contenders["loop of torch operations"] = Contender(
            lambda: passes_of(loop, inputs, which, cotangent), TORCH
        )
    else:
        missing["loop of torch operations"] = f"not run beyond {longest} steps"
    if settings.peers is None:
        others, absent = peers(settings, gru, inputs, which, cotangent, length <= longest)
        contenders |= others
        missing |= absent
    group = f"({batch}, L, {width}) {short(dtype)}, {PASSES[which]}"
    return Case(
        group, "L", length, shape, dtype, ARRAYS[which] * gates[0].nbytes, contenders,
        check_of(gates, weights, which, cotangent), missing=missing,
    )  # fmt: skip


def layer_case(
    settings: Settings, shape: tuple[int, int, int], dtype: torch.dtype, which: str
) -> Case:
    """Layers with as many features as channels, and the gradients of x and of all weights."""
    batch, length, width = shape
    x = 2 * settings.random(shape, dtype) - 1
    cotangent = None if which == FORWARD else torch.rand_like(x)

    def layer(make: Callable[[int], nn.Module]) -> Callable[[], Any]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            made = make(width).to(settings.device, dtype)
        names, weights = zip(*made.named_parameters(), strict=True)

        def run(x: Tensor, *weights: Tensor) -> Tensor:
            named = dict(zip(names, weights, strict=True))
            h: Tensor = torch.func.functional_call(made, named, (x,))[0]
            return h

        return passes_of(run, (x, *(w.detach() for w in weights)), which, cotangent)

    ways: dict[str, tuple[Callable[[int], nn.Module], str]] = {
        "nn.DiagonalGRU": (DiagonalGRU, OURS),
        "torch.nn.GRU": (lambda width: nn.GRU(width, width, batch_first=True), OTHER),
    }
    contenders = {
        name: Contender(functools.partial(layer, make), kind, checked=False)
        for name, (make, kind) in ways.items()
    }
    group = f"layers, ({batch}, L, {width}) {short(dtype)}, {PASSES[which]}"
    moved = ARRAYS_OF_LAYERS[which] * x.nbytes
    return Case(group, "L", length, shape, dtype, moved, contenders)


def check_of(
    gates: tuple[Tensor, ...], weights: tuple[Tensor, ...], which: str, cotangent: Tensor | None
) -> Callable[[Any], Verdict]:
    """Against a loop in float64, on lanes spread over all of them. Gradients of the weights, which
    all rows have a part in, are not compared."""
    lanes = Lanes(tuple(gates[0].shape), 1)
    channels = Lanes((1, 1, gates[0].shape[2]), 1)

    def few(t: Tensor) -> Tensor:
        # On the CPU, where an operation on few numbers costs less than the start of a kernel.
        return lanes.of(t).detach().cpu().double()

    def expected() -> Any:
        params = [channels.of(w[None, None]).detach().cpu().double() for w in weights]
        xs = [few(t) for t in gates]
        h = loop(*xs, *(w[:, 0] for w in params))
        if which == FORWARD or cotangent is None:
            return h
        return gradients(xs, params, h, few(cotangent))

    compare = against(expected, gates[0].dtype, gates[0].shape[1])

    def check(result: Any) -> Verdict:
        found = [result] if isinstance(result, Tensor) else list(result)[:3]
        return compare([lanes.of(t) for t in found])

    return check


def gradients(xs: list[Tensor], weights: list[Tensor], h: Tensor, cotangent: Tensor) -> Any:
    """The gradients of xs, where h is known. The adjoint λ[t−1] = ∂h[t]/∂h[t−1] λ[t] + h̄[t−1] is a
    linear recurrence, and autograd computes its slopes ∂h[t]/∂h[t−1] at all steps at once."""
    before = torch.cat([torch.zeros_like(h[:, :1]), h[:, :-1]], 1).requires_grad_()
    inputs = [x.requires_grad_() for x in xs]
    after = gru(before, inputs, weights)
    (slopes,) = torch.autograd.grad(after.sum(), before, retain_graph=True)
    slopes = torch.cat([slopes[:, 1:], torch.zeros_like(slopes[:, :1])], 1)
    adjoint = reference(RECURRENCE, (slopes.flip(1), cotangent.flip(1)), 1).flip(1)
    return torch.autograd.grad(after, inputs, adjoint)
