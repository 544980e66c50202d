"""Steps of recurrences that are not associative, and the loop that tests compare with."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Function = Callable[..., Any]


class Memory(NamedTuple):
    """The state of sLSTM: cell, normaliser, stabiliser."""

    c: Any
    n: Any
    m: Any


def gru(h: Any, x: Any, params: Any) -> Any:
    (z, r, n), (uz, ur, un) = x, params
    z, r = torch.sigmoid(z + uz * h), torch.sigmoid(r + ur * h)
    return (1 - z) * torch.tanh(n + r * (un * h)) + z * h


def lstm(state: Any, x: Any, params: Any) -> Any:
    h, c = state
    i, f, g, o = (a + u * h for a, u in zip(x, params, strict=True))
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def slstm(state: Any, x: Any, params: Any) -> Any:
    """Exponential gates; m keeps their exponents at most 0."""
    c, n, m = state
    h = c / torch.clamp(n, min=1e-6)
    i, f, z = (a + u * h for a, u in zip(x, params, strict=True))
    most = torch.maximum(f + m, i)
    i, f = torch.exp(i - most), torch.exp(f + m - most)
    return Memory(f * c + i * torch.tanh(z), f * n + i, most)


def lotka_volterra(state: Any, dt: Any, params: Any) -> Any:
    """One step of Euler's method."""
    prey, predators = state["prey"], state["predators"]
    alpha, beta, gamma, delta = params
    return {
        "prey": prey + dt * (alpha * prey - beta * prey * predators),
        "predators": predators + dt * (delta * prey * predators - gamma * predators),
    }


def logistic(h: Any, x: Any) -> Any:
    return 3.9 * h * (1 - h) + x


def integrate_and_fire(state: Any, current: Any, leak: Any) -> Any:
    v, count = state
    v = leak * v + current
    fires = v > 1
    return torch.where(fires, v - 1, v), torch.where(fires, count + 1, count)


def mala(h: Any, x: Any, params: Any) -> Any:
    """A chain of the Metropolis-adjusted Langevin algorithm for the density exp(−s h⁴ / 4)."""
    normal, log_uniform = x
    step, s = params

    def mean(h: Any) -> Any:
        return h - step * s * h * h * h

    proposed = mean(h) + torch.sqrt(2 * step) * normal
    ratio = s * (h**4 - proposed**4) / 4
    forth, back = proposed - mean(h), h - mean(proposed)
    ratio = ratio + (forth * forth - back * back) / (4 * step)
    return torch.where(log_uniform < ratio, proposed, h)


def rotating(h: Any, x: Any, weight: Any) -> Any:
    """A complex state."""
    return x + weight * h * h.conj() * torch.exp(-h * h.conj())


def clipped_counter(h: Any, x: Any) -> Any:
    """Integers."""
    return torch.where(x > 0, torch.minimum(h + x, torch.full_like(h, 7)), h // 2)


def parity(h: Any, x: Any) -> Any:
    return h ^ x


class Case(NamedTuple):
    """A step, and how its arguments are drawn.

    xs, init, params: trees of functions of (shape, seed) that draw a tensor, or of numbers.
    """

    name: str
    step: Function
    xs: Any
    init: Any
    params: Any = ()


def normal(scale: float = 1.0, shift: float = 0.0, dtype: torch.dtype = torch.float64) -> Function:
    def draw(shape: Sequence[int], seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(list(shape), generator=generator, dtype=torch.float64)
        return (drawn * scale + shift).to(dtype)

    return draw


def uniform(low: float, high: float) -> Function:
    def draw(shape: Sequence[int], seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return (
            torch.rand(list(shape), generator=generator, dtype=torch.float64) * (high - low) + low
        )

    return draw


def complex_normal(shape: Sequence[int], seed: int) -> Tensor:
    return torch.complex(normal(0.5)(shape, seed), normal(0.5)(shape, seed + 1000))


def log_uniform(shape: Sequence[int], seed: int) -> Tensor:
    return uniform(0.0, 1.0)(shape, seed).log()


def integers(shape: Sequence[int], seed: int) -> Tensor:
    return normal(3.0)(shape, seed).long()


def bits(shape: Sequence[int], seed: int) -> Tensor:
    return normal()(shape, seed) > 0


N = normal()
CASES = (
    Case("gru", gru, (N, N, N), N, (N, N, N)),
    Case("lstm", lstm, (N, N, N, N), (N, N), (N, N, N, N)),
    Case("slstm", slstm, (N, N, N), Memory(0.0, 0.0, 0.0), (N, N, N)),
    Case("lotka_volterra", lotka_volterra, uniform(0.01, 0.05),
         {"predators": uniform(0.5, 1.5), "prey": uniform(0.5, 1.5)},
         (1.1, uniform(0.3, 0.5), 0.4, uniform(0.05, 0.2))),
    Case("logistic", logistic, normal(1e-3), uniform(0.3, 0.6)),
    Case("integrate_and_fire", integrate_and_fire, uniform(0.2, 0.8), (N, 0), uniform(0.5, 0.9)),
    Case("mala", mala, (N, log_uniform), N, (uniform(0.1, 0.3), 1.5)),
    Case("rotating", rotating, complex_normal, complex_normal, complex_normal),
)  # fmt: skip
WHOLE_NUMBERS = (
    Case("clipped_counter", clipped_counter, integers, integers),
    Case("parity", parity, bits, bits),
)


def drawn(tree: Any, shape: Sequence[int], seed: int) -> Any:
    leaves, spec = pytree.tree_flatten(tree)
    return pytree.tree_unflatten(
        [t(shape, seed + 17 * k) if callable(t) else t for k, t in enumerate(leaves)], spec
    )


class Given(NamedTuple):
    xs: Any
    init: Any
    params: Any


def arguments(case: Case, length: int, batch: int = 2, channels: int = 3, seed: int = 0) -> Given:
    """xs [B, L, C], init [B, C], params [C]."""
    return Given(
        drawn(case.xs, [batch, length, channels], seed),
        drawn(case.init, [batch, channels], seed + 100),
        drawn(case.params, [channels], seed + 200),
    )


def called(step: Function, h: Any, x: Any, params: Any) -> Any:
    return step(h, x, params) if pytree.tree_leaves(params) else step(h, x)


def loop(
    step: Function,
    xs: Any,
    init: Any,
    axis: int = 1,
    *,
    params: Any = (),
    lower: Function | None = None,
    reverse: bool = False,
    reset: Tensor | None = None,
    offsets: Tensor | None = None,
    own_init: bool = False,
) -> tuple[Any, Any]:
    """The states (or what lower makes of them) and the last one, by one call of `step` per step on
    all chains. own_init: init has a leading S.

    It computes in the dtypes that it is given; numbers of init are float64 or int64.
    """
    leaves, spec = pytree.tree_flatten(xs)
    batch = torch.broadcast_shapes(*[t.shape for t in leaves])
    axis = axis % len(batch)
    leaves = [t.expand(batch).movedim(axis, 0) for t in leaves]
    rows = [t.unbind(0) for t in leaves]
    if offsets is not None:
        ends = offsets.tolist()
        parts = []
        for s, (begin, end) in enumerate(itertools.pairwise(ends)):
            cut = pytree.tree_unflatten([t[begin:end] for t in leaves], spec)
            first = pytree.tree_map(lambda t, s=s: t[s], init) if own_init else init
            parts.append(loop(step, cut, first, 0, params=params, lower=lower, reverse=reverse))
        outputs = joined([y for y, _ in parts], lambda ts: torch.cat(ts).movedim(0, axis))
        return outputs, joined([last for _, last in parts], torch.stack)

    def carry(t: Any) -> Tensor:
        kind = torch.float64 if isinstance(t, float) else None
        return torch.as_tensor(t, dtype=kind).expand(leaves[0].shape[1:])

    h = first = pytree.tree_map(carry, init)
    length = leaves[0].shape[0]
    if reset is not None:
        if reset.shape == batch[: axis + 1]:
            reset = reset.reshape(*reset.shape, *[1] * (len(batch) - axis - 1))
        reset = reset.expand(batch).movedim(axis, 0)
    outputs: list[Any] = [None] * length
    for t in reversed(range(length)) if reverse else range(length):
        x = pytree.tree_unflatten([row[t] for row in rows], spec)
        if reset is not None:
            mask = reset[t]
            h = pytree.tree_map(lambda a, b, mask=mask: torch.where(mask, a, b), first, h)
        h = called(step, h, x, params)
        if isinstance(init, dict):  # in the order of the keys of init
            h = {key: h[key] for key in init}
        shown = h if lower is None else lower(h, x) if takes_two(lower) else lower(h)
        outputs[t] = shown
    if not length:
        shown = first if lower is None else lower(first)
        return pytree.tree_map(lambda t: t[None][:0].movedim(0, axis), shown), first
    return joined(outputs, lambda ts: torch.stack(ts, axis)), h


def takes_two(lower: Function) -> bool:
    return lower.__code__.co_argcount == 2


def joined(trees: Sequence[Any], join: Function) -> Any:
    spec = pytree.tree_flatten(trees[0])[1]
    columns = zip(*[pytree.tree_leaves(tree) for tree in trees], strict=True)
    return pytree.tree_unflatten([join(list(column)) for column in columns], spec)


# ---- Random steps ----

UNARY: tuple[tuple[str, Function], ...] = (
    ("tanh", torch.tanh), ("sigmoid", torch.sigmoid), ("sin", torch.sin),
    ("exp", lambda a: torch.exp(-a * a)), ("relu", torch.relu), ("abs", torch.abs),
    ("log", lambda a: torch.log1p(a * a)), ("root", lambda a: torch.sqrt(1 + a * a)),
    ("half", lambda a: 0.5 * a), ("neg", torch.neg), ("atan", torch.atan),
)  # fmt: skip
BINARY: tuple[tuple[str, Function], ...] = (
    ("add", torch.add), ("sub", torch.sub), ("mul", torch.mul), ("min", torch.minimum),
    ("max", torch.maximum), ("div", lambda a, b: a / (1 + b * b)),
    ("where", lambda a, b: torch.where(a > b, a, 0.5 * b)),
    ("hypot", lambda a, b: torch.sqrt(0.5 + a * a + b * b)),
)  # fmt: skip


def random_step(seed: int) -> tuple[Function, int, int, int]:
    """A step of random expressions, and how many leaves its h, x and params have. Each new h is a
    bounded function of an expression, so that chains stay finite."""
    generator = torch.Generator().manual_seed(seed)

    def below(n: int) -> int:
        return int(torch.randint(n, (), generator=generator))

    count, inputs, weights = 1 + below(3), 1 + below(2), below(3)

    def tree(depth: int) -> Any:
        if depth == 0 or below(6) == 0:
            return ("leaf", below(count + inputs + weights))
        if below(2):
            return ("one", below(len(UNARY)), tree(depth - 1))
        return ("two", below(len(BINARY)), tree(depth - 1), tree(depth - 1))

    trees = [tree(3) for _ in range(count)]
    mixing = [0.1 + below(9) / 10 for _ in range(count)]

    def value(node: Any, leaves: Sequence[Any]) -> Any:
        if node[0] == "leaf":
            return leaves[node[1]]
        if node[0] == "one":
            return UNARY[node[1]][1](value(node[2], leaves))
        return BINARY[node[1]][1](value(node[2], leaves), value(node[3], leaves))

    def step(h: Any, x: Any, params: Any = ()) -> Any:
        leaves = (*h, *x, *params)
        return tuple(
            a * torch.tanh(value(node, leaves)) + (1 - a) * torch.tanh(old)
            for a, node, old in zip(mixing, trees, h, strict=True)
        )

    return step, count, inputs, weights
