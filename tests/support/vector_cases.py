"""Operators over vectors, drawn leaves, and a loop in float64 to compare with."""

from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from assocscan import Monoid, associative_scan

Tensors = tuple[Tensor, ...]


def affine(left: Any, right: Any) -> Any:
    a1, b1 = left
    a2, b2 = right
    return a2 * a1, a2 * b1 + b2


class Case(NamedTuple):
    """An operator, written so that it also works on tensors with leading batch dimensions.

    leaves: how to draw each leaf of xs: its kind (`draw`) and the axes it varies along, of
    b(atch), t(ime), c(hannel), n (states).
    """

    op: Monoid
    leaves: tuple[tuple[str, str], ...]


def case(
    name: str, lift: Callable[..., Any] | None, lower: Callable[..., Any] | None, *leaves: str,
    combine: Callable[[Any, Any], Any] = affine, identity: Any = (1.0, 0.0),
) -> Case:  # fmt: skip
    pairs = tuple((leaf.split(":")[0], leaf.split(":")[1]) for leaf in leaves)
    # A leaf without states has elements of shape [1], so that the functions broadcast as written.
    op = Monoid(combine, identity=identity, name=name, element_ndim=1, lift=lift, lower=lower)
    return Case(op, pairs)


def selective_lift(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensors:
    return torch.exp(delta * A), delta * u * B


def gated_lower(state: Tensors, xs: Tensors) -> Tensor:
    u, _, _, _, C, D, z, _ = xs
    y = (state[1] * C).sum(-1, keepdim=True) + D * u
    return (y * torch.nn.functional.silu(z)).squeeze(-1)


def gated_lift(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor, bias: Tensor
) -> Tensors:
    step = torch.nn.functional.softplus(delta + bias)
    return torch.exp(step * A), step * u * B


def max_plus(left: Any, right: Any) -> Any:
    return left[0] + right[0], torch.maximum(left[1] + right[0], right[1])


def turning_lift(delta: Tensor, speed: Tensor, u: Tensor, B: Tensor, C: Tensor) -> Tensors:
    """A rotation and a decay, by two numbers of each state that turn into one another."""
    a, b = 0.9 - delta * speed, delta * (speed + 1)
    pushed = u * B
    return a, -b, b, a, pushed, 0.5 * pushed


def turning_combine(left: Any, right: Any) -> Any:
    """(M, v) then (N, w): (N·M, N·v + w), with 2×2 matrices."""
    a1, b1, c1, d1, x1, y1 = left
    a2, b2, c2, d2, x2, y2 = right
    return (
        a2 * a1 + b2 * c1, a2 * b1 + b2 * d1, c2 * a1 + d2 * c1, c2 * b1 + d2 * d1,
        a2 * x1 + b2 * y1 + x2, c2 * x1 + d2 * y1 + y2,
    )  # fmt: skip


CASES = {
    "selective": case(
        "selective_test", selective_lift, lambda s, xs: (s[1] * xs[4]).sum(-1),
        "any:btc", "small:btc", "negative:cn", "any:btn", "any:btn",
    ),
    "gated": case(
        "gated_test", gated_lift, gated_lower, "any:btc", "any:btc", "negative:cn", "any:btn",
        "any:btn", "any:c", "any:btc", "any:c",
    ),
    "two decays": case(
        "two_decays_test", lambda a, b, x, k: (a * torch.sigmoid(b), x * k), None,
        "decay:btn", "any:cn", "any:btc", "any:btn",
    ),
    "clamped input": case(
        "clamped_test", lambda a, x, k: (a, torch.clamp(x * k, -0.5, 0.5)),
        lambda s: s[1].mean(-1), "decay:cn", "any:btc", "any:btn",
    ),
    "attention": case(  # gated linear attention: keys and queries along n, values along c
        "attention_test", lambda a, k, v, q: (a, k * v), lambda s, xs: (s[1] * xs[3]).sum(-1),
        "decay:btn", "any:btn", "any:btc", "any:btn",
    ),
    "turning": case(
        "turning_test", turning_lift, lambda s, xs: (s[4] * xs[4]).sum(-1), "small:btc", "any:cn",
        "any:btc", "any:btn", "any:btn", combine=turning_combine,
        identity=(1.0, 0.0, 0.0, 1.0, 0.0, 0.0),
    ),
    "max-plus": case(
        "max_plus_test", lambda a, b, c: (a, b + c), lambda s: s[1].amax(-1), "any:btc", "any:btn",
        "any:cn", combine=max_plus, identity=(0.0, float("-inf")),
    ),
    "softmax": case(  # two reductions, one after the other
        "softmax_test", lambda a, x: (a, x), lambda s: (torch.softmax(s[1], -1) * s[1]).sum(-1),
        "decay:c", "any:btcn",
    ),
    "no identity": case(
        "no_identity_test", lambda a, b: (a, b), lambda s, xs: (s[0] * s[1] + xs[0]).sum(-1),
        "decay:btcn", "any:btcn", identity=None,
    ),
    "moments": case(  # more state leaves than inputs, more outputs than both
        "moments_test", lambda x: (x, x * x), lambda s: (s[0], s[1], s[0].sum(-1), s[1].amin(-1)),
        "any:btcn", combine=lambda a, b: (a[0] + b[0], a[1] + b[1]), identity=(0.0, 0.0),
    ),
    "plain": case("plain_test", None, None, "decay:btcn", "any:btcn"),
    "scalar decay": case(
        "scalar_decay_test", lambda a, b: (a, b), lambda s: s[1], "decay:", "any:btcn"
    ),
}  # fmt: skip


def draw(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return {
        "any": x, "small": 0.1 * torch.sigmoid(x), "negative": -0.5 - torch.sigmoid(x),
        "decay": torch.sigmoid(x),
    }[kind]  # fmt: skip


def leaves_of(
    case: Case, b: int, t: int, c: int, n: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[Tensor]:
    """The leaves without the axes along which they do not vary, each of those with size 1."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {"b": b, "t": t, "c": c, "n": n}
    return [
        draw(kind, tuple(sizes[d] if d in axes else 1 for d in "btcn"), generator).to(dtype)
        for kind, axes in case.leaves
    ]


def expanded(leaves: list[Tensor]) -> Tensors:
    """The leaves as xs: those without time are repeated along it by `expand`."""
    sizes = {x.shape[1] for x in leaves}
    length = 0 if 0 in sizes else max(sizes)
    return tuple(x.expand(-1, length, -1, -1) for x in leaves)


def loop(
    op: Monoid, xs: Tensors, reverse: bool = False, inclusive: bool = True, init: Any = None
) -> tuple[Tensors, Tensors]:
    """Outputs and the final state, one step after the other; xs [b, t, c or 1, n or 1]."""
    shape = torch.broadcast_shapes(*(x.shape for x in xs))
    state: Any = init
    if state is None and not inclusive:
        elements = tuple(v[:, :0] for v in xs)
        kinds = elements if op.lift is None else op.lift(*elements)
        state = tuple(
            torch.full((1, 1, e.shape[-1]), float(v), dtype=xs[0].dtype, device=xs[0].device)
            for v, e in zip(op.identity, kinds, strict=True)
        )
    outputs: list[Any] = []
    times = range(shape[1])
    for t in reversed(times) if reverse else times:
        x = tuple(v[:, t] for v in xs)
        element = x if op.lift is None else op.lift(*x)
        before, state = state, element if state is None else op.combine(state, element)
        shown = state if inclusive else before
        shown = tuple(v.expand(shape[0], shape[2], v.shape[-1]) for v in shown)
        if op.lower is None:
            outputs.append(shown)
        else:
            takes_xs = op.lower.__code__.co_argcount == 2
            outputs.append(as_tuple(op.lower(shown, x) if takes_xs else op.lower(shown)))
    if reverse:
        outputs.reverse()
    finals = tuple(v.expand(shape[0], shape[2], v.shape[-1]) for v in state)
    return tuple(torch.stack(parts, 1) for parts in zip(*outputs, strict=True)), finals


def starts_of(case: Case, leaves: list[Tensor]) -> Tensors:
    """A random init."""
    elements: Any = leaves if case.op.lift is None else case.op.lift(*leaves)
    batch, _, lanes, _ = torch.broadcast_shapes(*(x.shape for x in leaves))
    generator = torch.Generator().manual_seed(2)
    return tuple(
        torch.rand(batch, lanes, e.shape[-1], generator=generator, dtype=torch.float64).to(e)
        for e in elements
    )


def cotangents(results: Sequence[Tensor]) -> list[Tensor]:
    """Random ones, half of them zero."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for y in results:
        g = torch.randn(y.shape, generator=generator, dtype=torch.float64)
        found.append((g * (torch.rand(y.shape, generator=generator) < 0.5)).to(y))
    return found


def as_tuple(y: Any) -> Tensors:
    return y if isinstance(y, tuple) else (y,)


def assert_close(got: Tensor, wanted: Tensor, steps: int, what: str = "") -> None:
    """Within the rounding of `steps` operations, relative to the largest value."""
    assert got.shape == wanted.shape, what
    if not wanted.numel():
        return
    assert torch.equal(got.isinf(), wanted.isinf()), what
    got, wanted = (torch.where(t.isinf(), t.sign(), t) for t in (got, wanted))
    eps = torch.finfo(got.dtype).eps
    error = (got.double() - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30)
    assert error < eps * (16 + 5 * steps**0.5), (what, float(error))


def check(
    case: Case, leaves: list[Tensor], *, reverse: bool = False, inclusive: bool = True,
    init: Tensors | None = None, backend: str = "cpu", finals: bool = True,
    wanted_leaves: Collection[int] | None = None,
) -> None:  # fmt: skip
    """Outputs, finals and all gradients, with random cotangents of which half are zero.

    finals: whether final states are returned, and have cotangents. wanted_leaves: the numbers of
    the leaves with a gradient; None: all.
    """
    wants = [wanted_leaves is None or k in wanted_leaves for k in range(len(leaves))]
    leaves = [x.detach().requires_grad_(w) for x, w in zip(leaves, wants, strict=True)]
    exact = [x.detach().double().requires_grad_(x.requires_grad) for x in leaves]
    starts = None if init is None else tuple(x.detach().requires_grad_() for x in init)
    exact_starts = (
        None if starts is None else tuple(x.detach().double().requires_grad_() for x in starts)
    )
    found = associative_scan(
        case.op, expanded(leaves), 1, reverse, inclusive, init=starts, return_final=finals,
        backend=backend,
    )  # fmt: skip
    ys, final = found if finals else (found, ())
    with torch.no_grad():
        again = associative_scan(
            case.op, expanded(leaves), 1, reverse, inclusive, init=starts, backend=backend
        )
    wanted, last = loop(case.op, expanded(exact), reverse, inclusive, exact_starts)
    length = max(x.shape[1] for x in leaves)
    results, references = (*as_tuple(ys), *final), (*wanted, *(last if finals else ()))
    for k, (y, r) in enumerate(zip(results, references, strict=True)):
        assert_close(y.detach(), r.detach(), length, f"result {k}")
    for y, z in zip(as_tuple(ys), as_tuple(again), strict=True):
        if y.is_cuda:  # the kernel that saves carries may round its sums in another order
            assert_close(z, y.detach().double(), length, "without a gradient")
        else:
            torch.testing.assert_close(y, z, rtol=0, atol=0)
    generator = torch.Generator().manual_seed(1)
    cotangents = []
    for r in references:
        g = torch.randn(r.shape, generator=generator, dtype=torch.float64)
        g[torch.rand(r.shape, generator=generator) < 0.5] = 0
        cotangents.append(g.to(leaves[0]))
    inputs = [x for x in (*leaves, *(starts or ())) if x.requires_grad]
    exact_inputs = [x for x in (*exact, *(exact_starts or ())) if x.requires_grad]
    connected = [k for k, r in enumerate(references) if r.requires_grad]
    given = [cotangents[k] for k in connected]
    got = torch.autograd.grad([results[k] for k in connected], inputs, given, allow_unused=True)
    right = torch.autograd.grad(
        [references[k] for k in connected], exact_inputs, [g.double() for g in given],
        allow_unused=True,
    )  # fmt: skip
    for k, (g, r) in enumerate(zip(got, right, strict=True)):
        if r is None or g is None:
            assert (r is None or not r.any()) and (g is None or not g.any()), f"gradient {k}"
        else:
            # A gradient that is a sum over axes is rounded as often as it has terms.
            assert_close(g, r, length * max(1, results[0].numel() // g.numel()), f"gradient {k}")


def check_packed(
    case: Case, leaves: list[Tensor], bounds: Sequence[int], *, reverse: bool = False,
    backend: str = "auto",
) -> None:  # fmt: skip
    """Packed sequences with an init each, empty ones too: values, finals and all gradients equal
    what each sequence gives alone."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    some = starts_of(case, leaves)
    init = tuple(torch.stack([x + s for s in range(len(bounds) - 1)]) for x in some)
    init = tuple(x.detach().requires_grad_() for x in init)
    starts = tuple(x.detach().double().requires_grad_() for x in init)
    ys, final = associative_scan(
        case.op, expanded(leaves), 1, reverse, init=init, return_final=True, backend=backend,
        offsets=torch.tensor(bounds, device=leaves[0].device),
    )  # fmt: skip
    parts, lasts = [], []
    for s, (begin, end) in enumerate(pairwise(bounds)):
        start = tuple(x[s] for x in starts)
        if begin < end:
            xs = tuple(x[:, begin:end] for x in expanded(exact))
            outputs, start = loop(case.op, xs, reverse, init=start)
            parts.append(outputs)
        lasts.append(start)
    got = [*as_tuple(ys), *final]
    wanted = [torch.cat(p, 1) for p in zip(*parts, strict=True)]
    wanted += [torch.stack(f) for f in zip(*lasts, strict=True)]
    for k, (y, r) in enumerate(zip(got, wanted, strict=True)):
        assert_close(y.detach(), r.detach(), bounds[-1], f"result {k}")
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y) for y in got]
    found = torch.autograd.grad(got, [*leaves, *init], cotangents)
    right = torch.autograd.grad(wanted, [*exact, *starts], [g.double() for g in cotangents])
    for k, (g, r) in enumerate(zip(found, right, strict=True)):
        assert_close(g, r, bounds[-1] * max(1, got[0].numel() // g.numel()), f"gradient {k}")
