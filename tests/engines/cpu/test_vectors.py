"""Operators over vectors on the CPU: values and gradients against a loop in float64."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from vector_cases import (
    CASES,
    Case,
    affine,
    assert_close,
    check,
    check_packed,
    expanded,
    leaves_of,
    loop,
)

from assocscan import BackendError, Monoid, associative_scan, explain, reduce
from assocscan.engines.cpu.vectors import prepare
from assocscan.engines.cpu.vectors.kernel import WIDTH, chunk_steps

SHAPES = [(1, 1, 1, 2), (2, 33, 5, 3), (3, 70, 37, 16), (2, 130, 16, 7), (1, 65, 40, 64)]


def test_the_shapes_cross_the_edges_of_tiles() -> None:
    """More than a chunk and less than a block of lanes, whole blocks and partial ones."""
    assert any(t > chunk_steps(n) for _, t, _, n in SHAPES)
    assert {c % WIDTH == 0 for *_, c, _ in SHAPES} == {True, False}
    assert any(c < WIDTH for *_, c, _ in SHAPES) and any(c > WIDTH for *_, c, _ in SHAPES)


@pytest.mark.thinned(10)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str, shape: tuple[int, int, int, int]) -> None:
    case = CASES[name]
    leaves = leaves_of(case, *shape)
    plan = explain(case.op, expanded(leaves), 1, backend="cpu")
    assert "states" in plan.tile or (name == "plain" and shape[3] >= 8), plan
    check(case, leaves)


@pytest.mark.thinned(7)
@pytest.mark.parametrize("name", ["gated", "max-plus", "plain", "softmax"])
@pytest.mark.parametrize("inclusive", [True, False])
@pytest.mark.parametrize("reverse", [True, False])
def test_flags(name: str, reverse: bool, inclusive: bool) -> None:
    case = CASES[name]
    leaves = leaves_of(case, 2, 67, 21, 5)
    check(case, leaves, reverse=reverse, inclusive=inclusive)
    sizes = [5 if (name != "max-plus" and name != "softmax") or k == 1 else 1 for k in range(2)]
    init = tuple(torch.rand(2, 21, n) for n in sizes)
    check(case, leaves, reverse=reverse, inclusive=inclusive, init=init)


@pytest.mark.parametrize("name", ["selective", "gated", "plain"])
def test_float64(name: str) -> None:
    check(CASES[name], leaves_of(CASES[name], 2, 40, 19, 6, torch.float64))


def test_views_with_the_axis_last() -> None:
    """[batch, channels, time] tensors, passed as transposed views: read and written as they lie."""
    case = CASES["gated"]
    leaves = leaves_of(case, 2, 50, 24, 8)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in leaves]
    assert turned[0].stride() != leaves[0].stride()
    check(case, turned)
    y = associative_scan(case.op, expanded(turned), 1)
    assert y.stride(1) == 1


def test_any_strides() -> None:
    """Slices of wider tensors, negative steps excluded: torch has none."""
    case = CASES["selective"]
    wide = [
        x.repeat_interleave(2, -1).repeat_interleave(3, 1) for x in leaves_of(case, 2, 40, 18, 5)
    ]
    check(case, [x[:, ::3, :, ::2] for x in wide])


@pytest.mark.thinned(4)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("shape", [(1, 300, 50, 6), (5, 80, 10, 8)])
def test_threads(threads: int, shape: tuple[int, int, int, int]) -> None:
    """One row whose lanes are shared, and several rows: leaves without rows or lanes are summed
    over the workers. Twice the same bits."""
    case, before = CASES["gated"], torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        leaves = leaves_of(case, *shape)
        check(case, leaves)
        found = []
        for _ in range(2):
            x = [t.clone().requires_grad_() for t in leaves]
            y = associative_scan(case.op, expanded(x), 1)
            found.append([y, *torch.autograd.grad(y.square().sum(), x)])
        for a, b in zip(*found, strict=True):
            assert torch.equal(a, b)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("bounds", [(0, 64), (0, 0, 5, 5, 40, 41, 64), (0, 32, 64)])
@pytest.mark.parametrize("reverse", [False, True])
def test_packed_sequences(reverse: bool, bounds: tuple[int, ...]) -> None:
    case = CASES["gated"]
    check_packed(case, leaves_of(case, 2, 64, 20, 4), bounds, reverse=reverse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_leaves_beside_float32(dtype: torch.dtype) -> None:
    """Combined in float32, rounded once; gradients in the dtypes of their leaves."""
    case = CASES["selective"]
    leaves = leaves_of(case, 2, 40, 17, 16)
    mixed = [x.to(dtype) if k != 2 else x for k, x in enumerate(leaves)]  # A stays float32
    leaves = [x.float().requires_grad_() for x in mixed]
    mixed = [x.requires_grad_() for x in mixed]
    y, final = associative_scan(case.op, expanded(mixed), 1, return_final=True)
    exact, exact_final = associative_scan(case.op, expanded(leaves), 1, return_final=True)
    assert y.dtype == dtype and final[1].dtype == torch.float32
    assert torch.equal(y, exact.to(dtype)) and torch.equal(final[1], exact_final[1])
    g = torch.randn_like(y)
    got = torch.autograd.grad(y, mixed, g)
    right = torch.autograd.grad(exact, leaves, g.float())
    for a, b, x in zip(got, right, mixed, strict=True):
        assert a.dtype == x.dtype
        assert torch.equal(a, b.to(a.dtype))


def test_complex_states() -> None:
    """A diagonal state space with complex poles and inputs that change what is read and written."""
    op = Monoid(
        affine, identity=(1.0, 0.0), name="complex_vector_test", element_ndim=1,
        lift=lambda decay, B, C, u: (decay, B * u),
        lower=lambda s, xs: (s[1] * xs[2]).sum(-1),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.complex128)

    poles = torch.polar(torch.rand(9, 6).double() * 0.9, 6 * torch.rand(9, 6).double())
    leaves = [poles[None, None], draw(2, 45, 1, 6), draw(2, 45, 1, 6), draw(2, 45, 9, 1)]
    leaves = [x.requires_grad_() for x in leaves]
    plan = explain(op, expanded(leaves), 1)
    assert "states" in plan.tile
    y, final = associative_scan(op, expanded(leaves), 1, return_final=True)
    (wanted,), last = loop(op, expanded(leaves))
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(final, last)
    g = draw(*y.shape)
    got = torch.autograd.grad(y, leaves, g, retain_graph=True)
    right = torch.autograd.grad(wanted, leaves, g)
    for a, b in zip(got, right, strict=True):
        torch.testing.assert_close(a, b)


def test_real_parts_of_complex_states() -> None:
    """What S4D returns; of init, whose imaginary part no output reads, the gradient is real."""
    op = Monoid(affine, identity=(1.0, 0.0), name="real_part_test", element_ndim=1,
                lower=lambda s: 2 * s[1].real.sum(-1))  # fmt: skip
    total = Monoid(lambda a, b: a + b, identity=0.0, name="complex_sum_test", element_ndim=1,
                   lower=lambda s: s.real.sum(-1))  # fmt: skip
    a = 0.9 * torch.exp(1j * torch.rand(1, 20, 3, 4).double())
    xs = a.requires_grad_(), torch.randn(1, 20, 3, 4, dtype=torch.complex128, requires_grad=True)
    assert "states" in explain(op, xs, 1).tile
    y = associative_scan(op, xs, 1)
    (wanted,), _ = loop(op, xs)
    torch.testing.assert_close(y, wanted)
    g = torch.randn_like(y)
    for p, q in zip(torch.autograd.grad(y, xs, g), torch.autograd.grad(wanted, xs, g), strict=True):
        torch.testing.assert_close(p, q)
    init = torch.randn(1, 3, 4, dtype=torch.complex128, requires_grad=True)
    (grad,) = torch.autograd.grad(associative_scan(total, xs[1], 1, init=init).sum(), init)
    torch.testing.assert_close(grad, torch.full_like(grad, 20.0))


def test_bools() -> None:
    """A carry of bools is read, inverted and written."""
    x = torch.rand(2, 40, 5, 3) > 0.5
    flipped = Monoid(lambda a, b: (a & ~b) | (~a & b), name="flipped_test", element_ndim=1,
                     lower=lambda h: h.to(torch.int32).sum(-1))  # fmt: skip
    parity = Monoid(lambda a, b: a ^ b, identity=False, name="parity_test", element_ndim=1,
                    lower=lambda h: (~h).to(torch.int32).sum(-1))  # fmt: skip
    after = x.int().cumsum(1) % 2
    got = associative_scan(flipped, x, 1, init=x[:, 0])
    assert torch.equal(got, (after ^ x[:, :1].int()).sum(-1))
    before = torch.cat([torch.zeros_like(after[:, :1]), after[:, :-1]], 1)
    got = associative_scan(parity, x, 1, inclusive=False)
    assert torch.equal(got, (1 - before).sum(-1))


def test_operators_that_read_the_first_element_only() -> None:
    first = Monoid(lambda a, b: a, name="first_vector_test", element_ndim=1,
                   lower=lambda h: h.sum(-1))  # fmt: skip
    x = torch.randn(2, 20, 3, 4, requires_grad=True)
    y = associative_scan(first, x, 1, backend="cpu")
    torch.testing.assert_close(y, x[:, :1].sum(-1).expand(2, 20, 3))
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad[:, 0], torch.full((2, 3, 4), 20.0)) and not grad[:, 1:].any()


def test_integers() -> None:
    op = Monoid(
        lambda a, b: (a[0] + b[0], torch.maximum(a[1] + b[0], b[1])), name="integer_vector_test",
        identity=(0, float("-inf")), element_ndim=1, lower=lambda s: (s[1].amax(-1), s[1].sum(-1)),
    )  # fmt: skip
    xs = torch.randint(-9, 9, (3, 50, 20, 5)), torch.randint(-9, 9, (3, 50, 20, 5))
    assert "states" in explain(op, xs, 1).tile
    most, total = associative_scan(op, xs, 1)
    state = [x[:, 0] for x in xs]
    for t in range(50):
        if t:
            state = list(op.combine(state, [x[:, t] for x in xs]))
        assert torch.equal(most[:, t], state[1].amax(-1))
        assert torch.equal(total[:, t], state[1].sum(-1))


@pytest.mark.parametrize("shape", [(0, 5, 4, 3), (2, 0, 4, 3), (2, 5, 0, 3)])
def test_nothing_to_scan(shape: tuple[int, int, int, int]) -> None:
    case = CASES["selective"]
    leaves = [x.requires_grad_() for x in leaves_of(case, *shape)]
    y, final = associative_scan(case.op, expanded(leaves), 1, return_final=True)
    assert y.shape == shape[:3] and final[1].shape == (shape[0], shape[2], 3)
    (y.sum() + final[1].sum()).backward()
    for x in leaves:
        assert x.grad is not None and not x.grad.any()


def test_reduction() -> None:
    case = CASES["selective"]
    leaves = [x.requires_grad_() for x in leaves_of(case, 2, 70, 20, 6)]
    xs = expanded(leaves)
    y = associative_scan(case.op, xs, 1)
    torch.testing.assert_close(reduce(case.op, xs, 1), y[:, -1])


@pytest.mark.slow
def test_second_derivatives() -> None:
    case = CASES["gated"]
    leaves = [x.requires_grad_() for x in leaves_of(case, 1, 4, 2, 2, torch.float64)]

    def scan(*x: Tensor) -> Any:
        return associative_scan(case.op, expanded(list(x)), 1, backend="cpu")

    assert torch.autograd.gradcheck(scan, leaves)
    assert torch.autograd.gradgradcheck(scan, leaves)


def test_torch_func_and_many_cotangents() -> None:
    """torch.func, and many cotangents at once, give the same gradients."""
    case = CASES["selective"]
    leaves = leaves_of(case, 1, 9, 3, 3, torch.float64)

    def scan(*x: Tensor) -> Tensor:
        y: Tensor = associative_scan(case.op, expanded(list(x)), 1)
        return y

    direct = torch.autograd.functional.jacobian(scan, tuple(leaves))
    functional = torch.func.jacrev(scan, tuple(range(5)))(*leaves)
    batched = torch.autograd.functional.jacobian(scan, tuple(leaves), vectorize=True)
    for a, b, c in zip(direct, functional, batched, strict=True):
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(a, c)


def test_partial_cotangents() -> None:
    """Gradients of some leaves, from the final alone, and none from an integer result."""
    case = CASES["gated"]
    leaves = leaves_of(case, 2, 40, 5, 4)
    leaves[0].requires_grad_()
    leaves[2].requires_grad_()
    _, final = associative_scan(case.op, expanded(leaves), 1, return_final=True)
    got = torch.autograd.grad(final[1].sum(), [leaves[0], leaves[2]])
    exact = [x.detach().double() for x in leaves]
    exact[0].requires_grad_()
    exact[2].requires_grad_()
    _, last = loop(case.op, expanded(exact))
    for a, b in zip(got, torch.autograd.grad(last[1].sum(), [exact[0], exact[2]]), strict=True):
        assert_close(a, b, 400)


MEMORY = """
import resource, torch
from vector_cases import CASES, expanded, leaves_of
from assocscan import associative_scan

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

op = CASES["selective"].op
def run(steps):
    x = [t.requires_grad_() for t in leaves_of(CASES["selective"], 1, steps, 256, 16)]
    y = associative_scan(op, expanded(x), 1)
    torch.autograd.grad(y, x, torch.ones_like(y))
run(64)  # compiles
x = [t.requires_grad_() for t in leaves_of(CASES["selective"], 1, 4096, 256, 16)]
g = torch.ones(1, 4096, 256)
before = peak()
y = associative_scan(op, expanded(x), 1)
grads = torch.autograd.grad(y, x, g)
results = sum(t.nbytes for t in (y, *grads))
print(peak() - before - results)
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux")
def test_memory() -> None:
    """Beyond inputs and results, a small part of the 64 MiB of all states."""
    support = Path(__file__).parents[2] / "support"
    paths = os.pathsep.join([str(support), *filter(None, sys.path)])
    found = subprocess.run(
        [sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert int(found.stdout) < 20 << 20


def test_states_that_differ_have_no_such_form() -> None:
    """A constant with an entry for each state, values moved between states: unrolled as before."""
    weights = Monoid(
        affine, identity=(1.0, 0.0), name="weights_test", element_ndim=1,
        lower=lambda s: (s[1] * torch.arange(4)).sum(-1),
    )  # fmt: skip
    turned = Monoid(affine, identity=(1.0, 0.0), name="turned_test", element_ndim=1,
                    lower=lambda s: s[1].flip(-1))  # fmt: skip
    xs = torch.rand(2, 10, 3, 4), torch.rand(2, 10, 3, 4)
    for op in (weights, turned):
        assert "states" not in explain(op, xs, 1).tile
        y = associative_scan(op, xs, 1)
        (wanted,), _ = loop(op, xs)
        torch.testing.assert_close(y, wanted)


def test_gradients_of_repeated_leaves() -> None:
    """A leaf with stride 0 has a gradient for each repetition, whoever looks at it."""
    case = CASES["selective"]
    leaves = leaves_of(case, 1, 30, 20, 4)
    A = leaves[2].requires_grad_()

    def scan(repeated: Tensor) -> Tensor:
        xs = expanded(leaves)  # a batch of one, which a repeated leaf may make two
        y: Tensor = associative_scan(case.op, (*xs[:2], repeated, *xs[3:]), 1)
        return y.sum()

    dense = A.detach().expand(1, 30, 20, 4).contiguous().requires_grad_()
    (wanted,) = torch.autograd.grad(scan(dense), dense)
    total = wanted.sum(1, keepdim=True)
    own = A.detach().expand(1, 30, 20, 4).requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(scan(own), own)[0], wanted)
    kept = A.expand(1, 30, 20, 4)
    loss = scan(kept)
    got = torch.autograd.grad(loss, (kept, A), retain_graph=True)
    torch.testing.assert_close(got[0], wanted)
    torch.testing.assert_close(got[1], total)
    del kept, own, dense
    torch.testing.assert_close(torch.autograd.grad(loss, A)[0], total)
    base = A.detach().expand(1, 30, 20, 4).requires_grad_()  # repeated before, but not by autograd
    twice = torch.autograd.grad(scan(base.expand(2, -1, -1, -1)), base)[0]
    torch.testing.assert_close(twice, 2 * wanted)
    seen: list[Tensor] = []
    hooked = A.expand(1, 30, 20, 4)
    hooked.register_hook(seen.append)
    loss = scan(hooked)
    del hooked
    loss.backward()
    torch.testing.assert_close(seen[0], wanted)


def test_gradients_of_repeated_sixteen_bit_leaves() -> None:
    """Rounded once more than the sum itself: a share of a rounded sum would be off by more."""
    op = Monoid(
        affine, identity=(1.0, 0.0), name="weighted_test", element_ndim=1,
        lower=lambda s, xs: (s[1] * xs[2]).sum(-1), lift=lambda a, b, c: (a, b),
    )  # fmt: skip
    a, b = torch.full((1, 4097, 1, 1), 0.5), torch.rand(1, 4097, 1, 64)
    c = torch.ones(1, 1, 1, 64, dtype=torch.float16, requires_grad=True)
    y = associative_scan(op, (a, b, c.expand(-1, 4097, -1, -1)), 1)
    g = torch.rand_like(y)
    y.backward(g)
    (_, h), _ = loop(Monoid(affine, name="states_test"), (a.double(), b.double()))
    wanted = (h * g.double()[..., None]).sum(1, keepdim=True)
    assert c.grad is not None
    torch.testing.assert_close(c.grad.double(), wanted, rtol=6e-4, atol=0)


def test_hooks_on_saved_tensors_may_change_strides() -> None:
    case = CASES["gated"]
    leaves = [
        x.transpose(0, 2).contiguous().transpose(0, 2) for x in leaves_of(case, 20, 30, 20, 3)
    ]
    found = []
    for unpack in (lambda t: t, lambda t: t.contiguous()):
        x = [t.clone(memory_format=torch.preserve_format).requires_grad_() for t in leaves]
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
            y = associative_scan(case.op, expanded(x), 1)
        found.append(torch.autograd.grad(y.square().sum(), x))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_many_states_on_a_small_stack() -> None:
    case = CASES["softmax"]
    leaves = [x.requires_grad_() for x in leaves_of(case, 1, 17, 2, 5000)]
    y = associative_scan(case.op, expanded(leaves), 1)
    (wanted,), _ = loop(case.op, expanded([x.detach().double() for x in leaves]))
    assert_close(y.detach(), wanted, 5000)
    y.sum().backward()


def test_bits_of_constants_and_of_numbers() -> None:
    """Zeros of two signs differ, and bits are not numbers."""
    xs = torch.rand(1, 5, 3, 2) + 0.5, torch.randn(1, 5, 3, 2)
    signs = Monoid(
        affine, identity=(1.0, 0.0), name="signs_test", element_ndim=1,
        lower=lambda s: torch.copysign(s[1], torch.tensor([0.0, -0.0])).sum(-1),
    )  # fmt: skip
    bits = Monoid(
        affine, identity=(1.0, 0.0), name="bits_test", element_ndim=1,
        lower=lambda s: (s[1].view(torch.int32) & 0xFF).sum(-1),
    )  # fmt: skip
    torch.testing.assert_close(associative_scan(signs, xs, 1), loop(signs, xs)[0][0])
    assert "states" not in explain(bits, xs, 1).tile


@pytest.mark.exhaustive
def test_values_that_are_the_same_for_all_states() -> None:
    """Constants made like a state count N times in a sum; what is repeated over the states passes
    the sum of its cotangents."""
    lowers: list[Any] = [
        lambda s: torch.ones_like(s[1]).sum(-1) * s[1].amax(-1),
        lambda s: s[1].mean(-1, keepdim=True).repeat(*[1] * (s[1].dim() - 1), 5),
        lambda s: s[0].sum(-1, keepdim=True) + torch.zeros_like(s[1]),
        lambda s: s[1].sum(-1, keepdim=True).expand_as(s[1]) * 1,
    ]
    for k, lower in enumerate(lowers):
        for lift in (None, lambda a, b: (torch.sigmoid(a.expand_as(b)) * 1, b)):
            op = Monoid(affine, identity=(1.0, 0.0), name=f"repeated_{k}_test", element_ndim=1,
                        lift=lift, lower=lower)  # fmt: skip
            leaves = (("decay", "btc" if lift else "btcn"), ("any", "btcn"))
            check(Case(op, leaves), leaves_of(Case(op, leaves), 2, 40, 6, 5))


def test_a_backward_kernel_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch operations compute the gradient, unless a backend is named."""
    op = Monoid(affine, identity=(1.0, 0.0), name="limit_test", element_ndim=1,
                lower=lambda s: s[1].exp().sum(-1))  # fmt: skip
    xs = [torch.rand(1, 5, 3, 4).requires_grad_() for _ in range(2)]
    y, named = (associative_scan(op, tuple(xs), 1, backend=b) for b in ("auto", "cpu"))
    monkeypatch.setattr(prepare, "MAX_OPERATIONS", 1)
    got = torch.autograd.grad(y.sum(), xs)
    with pytest.raises(BackendError, match="operations"):
        torch.autograd.grad(named.sum(), xs)
    (wanted,), _ = loop(op, tuple(xs))
    for a, b in zip(got, torch.autograd.grad(wanted.sum(), xs), strict=True):
        torch.testing.assert_close(a, b)
