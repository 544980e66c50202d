"""torch.func, forward mode and higher derivatives, against the same of a loop in float64."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from table import AFFINE, Engine, affine, device_of, elements, values
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils._pytree import tree_leaves

from assocscan import (
    BackendError,
    associative_scan,
    linear_recurrence,
    monoid,
    nonlinear_recurrence,
    ops,
    with_lift,
    with_lower,
)
from assocscan.runtime.backends import availability
from assocscan.runtime.batched_gradients import one_by_one, takes_batches, vmapped
from assocscan.testing import reference_scan

pytestmark = [
    pytest.mark.thinned(7),
    pytest.mark.filterwarnings("ignore:operator 'matmul'.*torch.func may ask"),
]

PyTree = Any
REAL, COMPLEX = values(torch.float64), values(torch.complex128)
PAIR = elements((REAL, ()), (REAL, ()))

GATED = monoid(
    affine,
    identity=(1.0, 0.0),
    name="func_gated",
    lift=lambda x, gate: (torch.sigmoid(gate), x * gate),
    lower=lambda state, xs: state[1] * torch.tanh(xs[1]) + xs[0],
)
OFFSETS = torch.tensor([0, 2, 2, 5])
CASES: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "recurrence": (AFFINE, 2, {}),
    "gated, from the end": (GATED, 2, {"reverse": True, "return_final": True}),
    "exclusive": (AFFINE, 2, {"inclusive": False}),
    "packed": (AFFINE, 2, {"offsets": OFFSETS, "return_final": True}),
    "logaddexp": (ops.logaddexp, 1, {"reverse": True}),
    "maximum": (ops.max, 1, {}),
    "matrix": (ops.matrix_affine, 2, {}),
    "hand-written": (ops.matmul, 1, {}),
}
COMPILED = ("recurrence", "hand-written")
ELEMENTS = {"matrix": ((2, 2), (2,)), "hand-written": ((5, 5),)}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return REAL(torch.Generator().manual_seed(seed), shape).contiguous()


def inputs(name: str, *batch: int) -> tuple[Tensor, ...]:
    shapes = ELEMENTS.get(name, ((),) * CASES[name][1])
    return tuple(draw(*batch, *shape, seed=k) for k, shape in enumerate(shapes))


def scans(name: str, backend: str, axis: int = 0) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The scan of a case as a function of its leaves, and the loop."""
    op, _, options = CASES[name]
    device = device_of(backend)

    def scan(*xs: Tensor) -> tuple[Tensor, ...]:
        xs = tuple([x.to(device) for x in xs])
        tree = xs if len(xs) > 1 else xs[0]
        ys = tree_leaves(associative_scan(op, tree, axis, backend=backend, **options))
        return tuple([y.cpu() for y in ys])

    def loop(*xs: Tensor) -> tuple[Tensor, ...]:
        tree = xs if len(xs) > 1 else xs[0]
        return tuple(tree_leaves(reference_scan(op, tree, axis, **options)))

    return scan, loop


def chosen(engine: Engine, name: str) -> str:
    """auto where the named engine leaves a transform of this operator to the eager engine."""
    return "auto" if name == "hand-written" else engine.name


@pytest.fixture(params=["cpu", "triton"])
def compiled(request: pytest.FixtureRequest) -> Engine:
    reason = availability()[request.param]
    if reason is not None:
        pytest.skip(reason)
    return Engine(request.param, device_of(request.param))


@pytest.mark.thinned(7)
@pytest.mark.parametrize("name", CASES)
def test_jacobians(compiled: Engine, name: str) -> None:
    """Forward and reverse mode; each is a vmap over scans."""
    if compiled.name == "cpu" and name not in COMPILED:
        pytest.skip("seconds of compilation; these run in the interpreter")
    scan, loop = scans(name, chosen(compiled, name))
    xs = inputs(name, 5)
    everything = tuple(range(len(xs)))
    want = tuple(
        torch.autograd.functional.jacobian(lambda *xs, k=k: loop(*xs)[k], xs)
        for k in range(len(loop(*xs)))
    )
    for mode in (jacrev, jacfwd):
        got = mode(scan, everything)(*xs)
        torch.testing.assert_close(got, want)


@pytest.mark.thinned(7)
@pytest.mark.parametrize("name", ["recurrence", "packed"])
def test_hessians(compiled: Engine, name: str) -> None:
    """Forward over reverse, and every other order of the two modes."""
    if compiled.name == "cpu" and name != "recurrence":
        pytest.skip("seconds of compilation; this runs in the interpreter")
    scan, loop = scans(name, compiled.name)

    def loss(function: Callable[..., Any]) -> Callable[..., Tensor]:
        return lambda *xs: torch.stack([t.sin().square().sum() for t in function(*xs)]).sum()

    xs = inputs(name, 5 if name == "packed" else 4)
    everything = tuple(range(len(xs)))
    want = torch.autograd.functional.hessian(loss(loop), xs)
    orders = [(jacfwd, jacrev), (jacrev, jacrev), (jacfwd, jacfwd), (jacrev, jacfwd)]
    for outer, inner in orders if name == "recurrence" and compiled.interpreted else orders[:1]:
        got = outer(inner(loss(scan), everything), everything)(*xs)
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", ["recurrence", "packed", "hand-written"])
def test_vmap(compiled: Engine, name: str) -> None:
    """The mapped dimension anywhere, in some of the leaves, twice."""
    scan, loop = scans(name, chosen(compiled, name))
    xs = inputs(name, 3, 5)
    want = [loop(*(x[k] for x in xs)) for k in range(3)]
    expected = tuple(torch.stack(parts) for parts in zip(*want, strict=True))
    torch.testing.assert_close(vmap(scan)(*xs), expected)
    moved = tuple(x.movedim(0, 1) for x in xs)
    torch.testing.assert_close(vmap(scan, 1)(*moved), expected)
    if len(xs) == 2:
        got = vmap(scan, (None, 0))(xs[0][0], xs[1])
        want = [loop(xs[0][0], xs[1][k]) for k in range(3)]
        expected = tuple(torch.stack(parts) for parts in zip(*want, strict=True))
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("mapped", [vmapped, one_by_one])
def test_batches_of_cotangents_on_another_thread(mapped: Any) -> None:
    """A GPU's backward runs on a thread where the mode of the vmap is on and no level counted."""
    seen: list[int] = []

    @takes_batches
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
        assert g is not None
        seen.append(g.dim())
        if mapped is one_by_one:
            torch.rand(1)  # as the check of a derivative does, which that mode refuses
        return (g.cumsum(0),)

    def on_thread(g: Tensor) -> Tensor:
        with torch._C._IncludeDispatchKeyGuard(torch._C._parse_dispatch_key("VmapMode")):
            (result,) = backward(SimpleNamespace(scan=SimpleNamespace(batched=mapped)), g)
        assert result is not None
        return result

    cotangents = draw(3, 5)
    level = torch._C._vmapmode_increment_nesting()
    try:
        batched = torch._add_batch_dim(cotangents, 0, level)
        with ThreadPoolExecutor(1) as thread:
            result = thread.submit(on_thread, batched).result()
        got = torch._remove_batch_dim(result, level, 3, 0)
    finally:
        torch._C._vmapmode_decrement_nesting()
    assert set(seen) == {1}  # one cotangent, without the dimension of the batch
    torch.testing.assert_close(got, cotangents.cumsum(1))


@pytest.mark.filterwarnings("ignore:operator '_matmul_adjoint'")
@pytest.mark.parametrize("name", ["recurrence", "packed", "hand-written"])
def test_batched_gradients(compiled: Engine, name: str) -> None:
    """`is_grads_batched`, of which `jacobian(vectorize=True)` is made, and once more through it."""
    scan, _ = scans(name, compiled.name)
    xs = tuple(x.requires_grad_() for x in inputs(name, 5))
    ys = scan(*xs)
    cotangents = [draw(3, *y.shape, seed=k) for k, y in enumerate(ys)]
    options: dict[str, Any] = {"retain_graph": True, "create_graph": True}
    got = torch.autograd.grad(ys, xs, cotangents, is_grads_batched=True, **options)
    for k in range(3):
        want = torch.autograd.grad(ys, xs, [c[k] for c in cotangents], **options)
        torch.testing.assert_close([g[k] for g in got], list(want))
        second = [
            torch.autograd.grad(sum(g.sin().sum() for g in gradients), xs, retain_graph=True)
            for gradients in ([g[k] for g in got], want)
        ]
        torch.testing.assert_close(*second)


def test_a_named_engine_without_a_derivative_refuses(compiled: Engine) -> None:
    scan, _ = scans("hand-written", compiled.name)
    with pytest.raises(BackendError, match=r"torch.func may ask for the derivative of 'matmul'"):
        grad(lambda A: scan(A)[0].sum())(*inputs("hand-written", 3))


def test_nested_vmap_is_a_batch() -> None:
    a, b = draw(2, 3, 5), draw(3, 2, 5, seed=1)
    got = vmap(vmap(lambda a, b: linear_recurrence(a, b, axis=0)), (0, 1))(a, b)
    want = reference_scan(AFFINE, (a, b.transpose(0, 1)), 2)[1]
    torch.testing.assert_close(got, want)


def test_vmap_with_init_and_final() -> None:
    a, b, init = draw(2, 5), draw(2, 5, seed=1), draw(2, seed=2)

    def scan(a: Tensor, b: Tensor, init: Tensor) -> PyTree:
        return linear_recurrence(a, b, init, axis=0, return_final=True)

    ys, (_, h) = reference_scan(AFFINE, (a, b), 1, init=(init, init), return_final=True)
    torch.testing.assert_close(vmap(scan)(a, b, init), (ys[1], h))
    ys, (_, h) = reference_scan(
        AFFINE, (a[:1].expand(2, 5), b[:1].expand(2, 5)), 1, init=(init, init), return_final=True
    )
    torch.testing.assert_close(vmap(scan, (None, None, 0))(a[0], b[0], init), (ys[1], h))


@pytest.mark.parametrize("offsets", [None, torch.tensor([0, 2, 6])], ids=["one", "packed"])
@pytest.mark.parametrize("name", ["lift", "lower", "step"])
def test_derivatives_of_what_reads_no_input(
    compiled: Engine, name: str, offsets: Tensor | None
) -> None:
    """They are zero, and so are theirs, whose scans read no tensor at all."""
    x = compiled.put(torch.rand(2, 6, dtype=torch.float64))
    offsets = None if offsets is None else compiled.put(offsets)
    options: dict[str, Any] = {"offsets": offsets, "backend": compiled.name}
    scans: dict[str, Callable[[Tensor], Tensor]] = {
        "lift": lambda x: associative_scan(with_lift(ops.sum, torch.ones_like), x, 1, **options),
        "lower": lambda x: associative_scan(with_lower(ops.sum, torch.ones_like), x, 1, **options),
        "step": lambda x: nonlinear_recurrence(lambda h, x: h.sin(), x, 1.0, 1, **options),
    }

    def loss(x: Tensor) -> Tensor:
        return scans[name](x).sin().sum()

    for transform in (jacrev, jacfwd):
        for _ in range(2):
            assert not transform(loss)(x).any()
            assert not transform(jacrev(loss))(x).any() and not transform(jacfwd(loss))(x).any()


@pytest.mark.parametrize("offsets", [None, torch.tensor([0, 2, 6])], ids=["one", "packed"])
def test_an_init_that_vmap_shares(offsets: Tensor | None) -> None:
    """Its gradient is the sum over the batch; in reverse mode, and in forward over reverse."""
    a, b, init = draw(6, 3), draw(4, 6, 3, seed=1), draw(3, seed=2)
    if offsets is not None:
        init = draw(2, 3, seed=2)

    def loss(h: Tensor, is_scan: bool) -> Tensor:
        def one(b: Tensor) -> Tensor:
            chosen: Any = associative_scan if is_scan else reference_scan
            ys, last = chosen(AFFINE, (a, b), 0, init=(h, h), return_final=True, offsets=offsets)
            total: Tensor = ys[1].sin().sum() + last[0].sum() + last[1].square().sum()
            return total

        results = vmap(one)(b) if is_scan else torch.stack([one(x) for x in b])
        return results.sin().sum()

    x = init.clone().requires_grad_()
    (want,) = torch.autograd.grad(loss(x, False), x)
    torch.testing.assert_close(torch.autograd.grad(loss(x, True), x)[0], want)
    torch.testing.assert_close(grad(lambda h: loss(h, True))(init), want)
    got = jacfwd(jacrev(lambda h: loss(h, True)))(init)
    want = torch.autograd.functional.hessian(lambda h: loss(h, False), init)
    torch.testing.assert_close(got, want)


def test_vmap_of_gradients_of_vmap() -> None:
    a, b = draw(2, 3, 5), draw(2, 3, 5, seed=1)

    def loss(a: Tensor, b: Tensor) -> Tensor:
        return vmap(lambda a, b: linear_recurrence(a, b, axis=0))(a, b).square().sum()

    def loop(a: Tensor, b: Tensor) -> Tensor:
        total: Tensor = reference_scan(AFFINE, (a, b), a.dim() - 1)[1].square().sum()
        return total

    x, y = a.clone().requires_grad_(), b.clone().requires_grad_()
    want = torch.autograd.grad(loop(x, y), (x, y))
    torch.testing.assert_close(vmap(grad(loss, (0, 1)))(a, b), want)


def test_vmap_over_offsets_says_what_to_do() -> None:
    with pytest.raises(NotImplementedError, match="pack the offsets"):
        vmap(lambda x, o: associative_scan(ops.sum, x, offsets=o))(
            draw(2, 5), torch.tensor([[0, 5], [0, 5]])
        )


def test_jvp_and_vjp_agree(compiled: Engine) -> None:
    """⟨u, J t⟩ = ⟨Jᵀ u, t⟩ for complex numbers and their initial carry."""
    generator = torch.Generator().manual_seed(0)
    a, b, c, d, u = (COMPLEX(generator, (2, 6)) for _ in range(5))
    init, e = COMPLEX(generator, (2,)), COMPLEX(generator, (2,))

    def scan(a: Tensor, b: Tensor, init: Tensor) -> Tensor:
        carry = torch.ones_like(init), init
        given = compiled.put(((a, b), carry))
        h: Tensor = associative_scan(AFFINE, given[0], 1, init=given[1], backend=compiled.name)[1]
        return h.cpu()

    if compiled.name == "cpu":
        pytest.skip("seconds of compilation; this runs in the interpreter")
    value, tangent = jvp(scan, (a, b, init), (c, d, e))
    again, pull = vjp(scan, a, b, init)
    torch.testing.assert_close(value, again)
    forward = torch.vdot(u.flatten(), tangent.flatten()).real
    backward = sum(
        torch.vdot(g.flatten(), t.flatten()).real for g, t in zip(pull(u), (c, d, e), strict=True)
    )
    torch.testing.assert_close(forward, backward)


def test_dual_numbers() -> None:
    """Plain forward mode: tangents of some leaves only, and of the final carry."""
    a, b, t = draw(2, 5), draw(2, 5, seed=1), draw(2, 5, seed=2)
    step = 1e-6
    with forward_ad.dual_level():
        results = associative_scan(AFFINE, (a, forward_ad.make_dual(b, t)), 1, return_final=True)
        tangents = [forward_ad.unpack_dual(leaf).tangent for leaf in tree_leaves(results)]
    after, before = (
        tree_leaves(reference_scan(AFFINE, (a, b + s * t), 1, return_final=True))
        for s in (step, -step)
    )
    for got, x, y in zip(tangents, after, before, strict=True):
        want = (x - y) / (2 * step)
        torch.testing.assert_close(
            torch.zeros_like(want) if got is None else got, want, rtol=1e-6, atol=1e-8
        )


@pytest.mark.parametrize("reverse_first", [False, True])
def test_plain_forward_mode_and_autograd(reverse_first: bool) -> None:
    """Hessian times vector without torch.func, in both orders."""
    a, b, c, d = (draw(5, seed=k) for k in range(4))

    def product(loss: Callable[..., Tensor]) -> list[Tensor]:
        x, y = a.clone().requires_grad_(), b.clone().requires_grad_()
        with forward_ad.dual_level():
            duals = forward_ad.make_dual(x, c), forward_ad.make_dual(y, d)
            if not reverse_first:
                tangent = forward_ad.unpack_dual(loss(*duals)).tangent
                return list(torch.autograd.grad(tangent, (x, y)))
            gradients = torch.autograd.grad(loss(*duals), duals)
            return [forward_ad.unpack_dual(g).tangent for g in gradients]

    def scan(a: Tensor, b: Tensor) -> Tensor:
        y = associative_scan(AFFINE, (a, b), backend=backend)[1]
        return y.sin().square().sum()

    def loop(a: Tensor, b: Tensor) -> Tensor:
        h = [b[0]]
        for t in range(1, len(b)):
            h.append(a[t] * h[-1] + b[t])
        return torch.stack(h).sin().square().sum()

    backend = "triton" if availability()["triton"] is None else "auto"
    torch.testing.assert_close(product(scan), product(loop))


def test_integers_pass_through_transforms() -> None:
    x = torch.randint(-9, 9, (3, 7), generator=torch.Generator().manual_seed(0))
    assert torch.equal(vmap(lambda x: associative_scan(ops.sum, x))(x), x.cumsum(1))
    values, indices = vmap(lambda x: ops_cummax(x))(x.double())
    assert torch.equal(values, x.double().cummax(1).values)
    assert torch.equal(indices, x.double().cummax(1).indices)
    value, tangent = jvp(lambda x: ops_cummax(x)[0], (x.double(),), (torch.ones(3, 7).double(),))
    assert torch.equal(value, x.double().cummax(0).values)
    assert torch.equal(tangent, torch.ones(3, 7))


def ops_cummax(x: Tensor) -> tuple[Tensor, Tensor]:
    from assocscan import cummax

    return tuple(cummax(x, axis=0))


def test_functional_call_per_sample_gradients() -> None:
    """The usual use of vmap(grad): one gradient of the parameters for each sample."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(3, 4, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            a, b = self.inner(x).chunk(2, -1)
            h = linear_recurrence(torch.sigmoid(a), b, axis=0)
            assert isinstance(h, Tensor)
            return h

    model, x = Model(), draw(4, 6, 3)
    weights = dict(model.named_parameters())

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        total: Tensor = functional_call(model, weights, (x,)).square().sum()
        return total

    got = vmap(grad(loss), (None, 0))(weights, x)
    for k in range(4):
        model.zero_grad()
        a, b = model.inner(x[k]).chunk(2, -1)
        reference_scan(AFFINE, (torch.sigmoid(a), b), 0)[1].square().sum().backward()
        for name, weight in model.named_parameters():
            torch.testing.assert_close(got[name][k], weight.grad)
