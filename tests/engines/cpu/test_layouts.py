"""Leaves in different memory orders on the CPU engine: which way each is read, and the values."""

from collections.abc import Iterator
from itertools import permutations
from typing import Any

import pytest
import torch
from table import CASES, FLAGS, TWO_FLAGS, Flags
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from assocscan import associative_scan, explain, linear_recurrence, monoid, ops, reduce
from assocscan.api.bind_arguments import bind
from assocscan.engines.base.layout import lay_out, tensors_by_name
from assocscan.engines.base.scan_spec import TensorSpec
from assocscan.engines.cpu import copies, threads_and_jobs
from assocscan.engines.cpu import prepare as cpu
from assocscan.engines.cpu.compiler import why_unavailable
from assocscan.engines.cpu.copy_or_tile import Route, choose
from assocscan.testing import assert_scan_close, reference_scan

PyTree = Any
Order = tuple[int, ...]

pytestmark = [
    pytest.mark.thinned(4),
    pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable())),
]


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def stored(x: Tensor, order: Order) -> Tensor:
    """`x` with its dimensions in this order in memory, outermost first."""
    return x.permute(order).contiguous().permute([order.index(d) for d in range(x.dim())])


def route(xs: PyTree, axis: int) -> Route:
    call = bind(ops.affine, xs, axis, False, True, None, False, None)
    spec, tensors = call.scan(call.traced.operator)
    specs = [None if t is None else TensorSpec.of(t) for t in tensors]
    return choose(spec, lay_out(spec, tensors_by_name(spec, specs)))


A, B = ("input", 0), ("input", 1)
OUTPUTS = {("output", 0), ("output", 1)}
CHOICES = [
    # shape, axis, orders of the two leaves, what goes through tiles, what is copied
    ((4, 1024, 512), 1, (0, 1, 2), (0, 1, 2), set(), set()),
    ((4, 1024, 512), 1, (0, 1, 2), (0, 2, 1), {B}, set()),  # mamba's [batch, channels, length]
    ((4, 1024, 512), 1, (0, 2, 1), (0, 1, 2), {A, *OUTPUTS}, set()),
    ((4, 1024, 512), 1, (0, 2, 1), (0, 2, 1), set(), set()),
    ((4, 1024, 512), 1, (0, 1, 2), (1, 0, 2), set(), set()),
    ((64, 512, 64), 1, (0, 1, 2), (2, 1, 0), set(), {B}),
    ((64, 512, 64), 1, (2, 1, 0), (0, 1, 2), set(), {B}),
    ((4096, 512), 0, (0, 1), (1, 0), {B}, set()),
    ((4096, 512), 1, (1, 0), (0, 1), {B}, set()),
    ((4096, 512), 1, (0, 1), (1, 0), {A, *OUTPUTS}, set()),
    ((1, 512, 256, 16), 1, (0, 1, 2, 3), (0, 1, 3, 2), {B}, set()),
    ((1, 512, 256, 16), 1, (0, 1, 2, 3), (0, 2, 1, 3), {B}, set()),
    ((1, 512, 256, 16), 1, (0, 1, 2, 3), (0, 3, 2, 1), {B}, set()),
    ((1, 512, 256, 16), 1, (0, 2, 1, 3), (0, 1, 2, 3), set(), set()),
    ((1, 512, 256, 16), 3, (0, 1, 2, 3), (0, 2, 1, 3), set(), set()),
]


@pytest.mark.parametrize(("shape", "axis", "first", "second", "tiled", "copied"), CHOICES)
def test_choice(
    shape: Order, axis: int, first: Order, second: Order, tiled: set[Any], copied: set[Any]
) -> None:
    found = route((stored(torch.empty(shape), first), stored(torch.empty(shape), second)), axis)
    assert found.tiled == tiled
    assert found.copied == copied


def test_broadcast_leaves_are_not_copied() -> None:
    """In whichever dimensions they are broadcast."""
    full = torch.empty(1, 512, 256, 16)
    for shape in ((1, 512, 256, 1), (1, 512, 1, 16), (1, 512, 1, 1)):
        small = torch.empty(shape)
        for leaf in (small, small.expand_as(full)):
            assert not route((leaf, full), 1).copied
    assert route((full, torch.empty(()).expand_as(full)), 1).tiled == set()


def test_small_tensors_are_not_copied() -> None:
    """In the second-level cache nothing is fetched twice; a copy would be one more call."""
    for scale, copied in ((1, False), (16, True)):
        x = torch.rand(16, 32 * scale, 16)
        xs = x, stored(torch.rand(x.shape), (2, 1, 0))
        plan = explain(ops.affine, xs, axis=1)
        assert any(" = copy " in command for command in plan.commands) == copied


def test_explain_says_what_is_not_read_in_place() -> None:
    x = torch.rand(64, 512, 64)

    def why(*xs: Tensor) -> str:
        return explain(ops.affine, xs, axis=1).why

    assert "xs" not in why(x, x)
    assert (
        "copies xs[1] first: its order differs, (2, 1, 0) against (0, 1, 2), and a job would use "
        "little of each cache line"
    ) in why(x, stored(x, (2, 1, 0)))
    assert "reads xs[1] through a tile: its order differs, (0, 2, 1) against (0, 1, 2)" in why(
        x, stored(x, (0, 2, 1))
    )
    assert (
        "writes ys[0], ys[1] through a tile: their order differs, (0, 2, 1) against (0, 1, 2)"
    ) in why(stored(x, (0, 2, 1)), x)
    x = torch.rand(1, 512, 256, 16)
    assert "reads xs[0] through a tile: it is broadcast over dimension 3" in why(x[..., :1], x)
    matrices = stored(torch.rand(64, 512, 2, 2), (2, 3, 0, 1))
    plan = explain(ops.matrix_affine, (matrices, torch.rand(64, 512, 2)), axis=1)
    assert "copies xs[0] first: its elements are spread over memory" in plan.why


def inputs(case: str, shape: Order, orders: tuple[Order, ...]) -> tuple[PyTree, PyTree]:
    """Leaves whose batch dimensions lie in these orders, and an init whose dimensions do too."""
    generator = torch.Generator().manual_seed(0)
    xs, init = (
        draw(generator, s)
        for draw, s in ((CASES[case].draw, shape), (CASES[case].draw_state, shape[:1] + shape[2:]))
    )
    leaves, spec = tree_flatten(xs)
    n = len(shape)
    laid = [
        stored(x, (*order, *range(n, x.dim()))) for x, order in zip(leaves, orders, strict=True)
    ]
    return tree_unflatten(laid, spec), tree_map(
        lambda t: stored(t, (1, 0, *range(2, t.dim()))), init
    )


def dense(tree: PyTree) -> PyTree:
    return tree_map(lambda t: t.contiguous(), tree)


@pytest.mark.thinned(7)
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_every_order(order: Order, axis: int) -> None:
    """Exact, and in the order of the first leaf."""
    shape = (9, 35, 21)
    for orders in (((0, 1, 2), order), (order, (0, 1, 2))):
        (m, n), _ = inputs("bicyclic", shape, orders)
        found = associative_scan(CASES["bicyclic"].op, (m, n), axis, backend="cpu")
        assert_scan_close(found, reference_scan(CASES["bicyclic"].op, (m, n), axis), shape[axis])
        assert [y.stride() for y in found] == [m.stride()] * 2


@pytest.mark.thinned(12)
@pytest.mark.parametrize(
    ("case", "flags"),
    [*(("affine", flags) for flags in FLAGS), *(("matrix", flags) for flags in TWO_FLAGS)],
)
def test_flags(case: str, flags: Flags, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles, and copies of one leaf, with carries in an order of their own and packed sequences."""
    monkeypatch.setattr(threads_and_jobs, "SERIAL_BYTES", 0)
    shape = (5, 37, 18)
    for order in ((0, 2, 1), (2, 1, 0)):
        xs, init = inputs(case, shape, ((0, 1, 2), order))
        options: dict[str, Any] = {
            "axis": 1, "reverse": flags.reverse, "inclusive": flags.inclusive,
            "init": init if flags.init else None, "return_final": flags.final,
        }  # fmt: skip
        op = CASES[case].op
        found = associative_scan(op, xs, backend="cpu", **options)
        assert_scan_close(found, reference_scan(op, xs, **options), 37)
        alike = associative_scan(op, dense(xs), backend="cpu", **options)
        assert all(map(torch.equal, tree_leaves(found), tree_leaves(alike)))
        if not CASES[case].allows(flags, 0):
            continue
        options["offsets"] = torch.tensor([0, 1, 1, 18, 37])
        if flags.init:
            options["init"] = tree_map(lambda t: t.expand(4, *t.shape), init)
        found = associative_scan(op, xs, backend="cpu", **options)
        assert_scan_close(found, reference_scan(op, xs, **options), 37)


@pytest.mark.thinned(7)
@pytest.mark.parametrize(
    "case", ["float32", "float64", "float16", "bfloat16", "complex64", "int8", "bool"]
)
def test_dtypes(case: str) -> None:
    """The same bits as from copies that lie alike."""
    for order in ((0, 2, 1), (1, 2, 0)):
        xs, _ = inputs(case, (6, 33, 40), ((0, 1, 2), order))
        found = associative_scan(CASES[case].op, xs, axis=1, backend="cpu")
        alike = associative_scan(CASES[case].op, dense(xs), axis=1, backend="cpu")
        assert_scan_close(found, reference_scan(CASES[case].op, xs, axis=1), 33)
        assert all(map(torch.equal, tree_leaves(found), tree_leaves(alike)))


@pytest.mark.parametrize("reverse", [False, True])
def test_lanes_of_several_jobs(reverse: bool) -> None:
    """More lanes than one job has, whose limits are no row's, in both kinds of rows."""
    shape = (3, 19, 150, 5)
    for order in ((0, 1, 3, 2), (0, 2, 1, 3), (3, 0, 2, 1)):
        xs, _ = inputs("bicyclic", shape, ((0, 1, 2, 3), order))
        assert route(xs, 1).tiled | route(xs, 1).copied
        found = associative_scan(CASES["bicyclic"].op, xs, 1, reverse, backend="cpu")
        expected = reference_scan(CASES["bicyclic"].op, xs, 1, reverse)
        assert_scan_close(found, expected, 19)


@pytest.mark.slow
def test_axis_that_is_cut(two_threads: None) -> None:
    """Chunks of one job's lanes, reduced to their totals and scanned, through tiles."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(-3, 4, (13001, 9), generator=generator)
    b = torch.randint(-3, 4, (9, 13001), generator=generator).T
    plan = explain(ops.affine, (a, b), backend="cpu")
    assert "the axis cut" in plan.grid
    assert "reads xs[1] through a tile" in plan.why
    for reverse in (False, True):
        found = associative_scan(ops.affine, (a, b), reverse=reverse, backend="cpu")
        expected = reference_scan(ops.affine, (a, b), reverse=reverse)
        assert all(map(torch.equal, found, expected))
        total = reduce(ops.affine, (a, b), reverse=reverse, backend="cpu")
        last = 0 if reverse else -1
        assert all(torch.equal(t, y[last]) for t, y in zip(total, expected, strict=True))


@pytest.mark.parametrize(
    ("shape", "offsets", "grid"),
    [
        ((13001, 9), None, "2 threads over 1 jobs, the axis cut"),
        ((13001, 9), (0, 13001), "2 threads over 1 jobs, the axis cut"),  # one packed sequence
        ((13001, 9), (0, 9000, 13001), "2 threads over 2 jobs"),
        ((12287, 9), None, "1 threads over 1 jobs"),  # shorter than 3 chunks of MIN_CHUNK
        ((100_000,), None, "2 threads over 1 jobs, the axis cut"),
    ],
)
def test_explain_says_whether_the_axis_is_cut(
    shape: Order, offsets: Order | None, grid: str, two_threads: None
) -> None:
    """Both the plan and `assocscan_run` have it from `threads_and_jobs`."""
    packed = None if offsets is None else torch.tensor(offsets)
    xs = torch.rand(shape), torch.rand(shape)
    assert explain(ops.affine, xs, offsets=packed, backend="cpu").grid == grid


@monoid(identity=(0.0,) * 5, name="layouts_sums", lower=lambda state: state[0] + state[4])
def sums(left: PyTree, right: PyTree) -> PyTree:
    return tuple(x + y for x, y in zip(left, right, strict=True))


def test_outputs_in_another_order_than_most() -> None:
    """The first leaf's order is the output's; the walk is that of the other four."""
    shape = (64, 33, 64)
    generator = torch.Generator().manual_seed(0)
    orders = ((2, 1, 0), *[(0, 1, 2)] * 4)
    xs = tuple(stored(torch.rand(shape, generator=generator), order) for order in orders)
    plan = explain(sums, xs, axis=1, backend="cpu")
    assert "copies xs[0] first" in plan.why
    assert "copies ys last" in plan.why
    found = associative_scan(sums, xs, axis=1, backend="cpu")
    assert found.stride() == xs[0].stride()
    assert torch.equal(found, associative_scan(sums, dense(xs), axis=1, backend="cpu"))
    xs[0].requires_grad_()
    for _ in range(4):  # prepared, cached, and by the runner in C++
        y = associative_scan(sums, xs, axis=1, backend="cpu")
        y += 1  # an output that is a copy is no view: it may be changed
        assert torch.equal(y, found + 1)


COTANGENTS = {
    "permuted": lambda y: torch.einsum("bldn,bln->bld", y, torch.ones_like(y[:, :, 0])).sum(),
    "expanded": lambda y: y.sum(),
    "expanded in part": lambda y: (y.sum(3) * torch.arange(y.shape[2])).sum(),
}


@pytest.mark.thinned(7)
@pytest.mark.parametrize("name", COTANGENTS)
@pytest.mark.parametrize("with_init", [False, True])
def test_gradients(name: str, with_init: bool) -> None:
    """First and second derivatives, with the bits that contiguous cotangents give."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64, requires_grad=True)

    a, b, init = draw(2, 19, 12, 6), draw(2, 19, 12, 6), draw(2, 12, 6)
    leaves = (a, b, init) if with_init else (a, b)

    def derivatives(h: Tensor) -> list[Tensor]:
        first = torch.autograd.grad(COTANGENTS[name](h), leaves, create_graph=True)
        return [*first, *torch.autograd.grad(sum((g**2).sum() for g in first), leaves)]

    class Dense(torch.autograd.Function):
        """The identity, whose cotangent is contiguous."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g.contiguous()

    def scan(a: Tensor, b: Tensor) -> Tensor:
        return linear_recurrence(a, b, init if with_init else None, axis=1)

    found = derivatives(scan(a, b))
    alike = derivatives(Dense.apply(scan(a, b)))
    h = init if with_init else torch.zeros(2, 12, 6, dtype=torch.float64)
    steps = []
    for t in range(19):
        h = a[:, t] * h + b[:, t]
        steps.append(h)
    expected = derivatives(torch.stack(steps, 1))
    for g, same, e in zip(found, alike, expected, strict=True):
        torch.testing.assert_close(g, e)
        assert torch.equal(g, same)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.bfloat16, torch.float32, torch.complex64, torch.complex128]
)
@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_copies(dtype: torch.dtype, order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "MIN_BYTES", 0)
    generator = torch.Generator().manual_seed(0)
    x = (10 * torch.rand(17, 33, 20, generator=generator)).to(dtype)
    for source in (stored(x, (1, 2, 0)), x[:1].expand(x.shape), x[:, ::3]):
        spec = TensorSpec.of(source)
        found = copies.prepare_copy(spec, order, cpu.prepare)(source)
        assert torch.equal(found, source)
        assert found.stride() == copies.spec_of_copy(spec, order).strides
        sizes = [source.shape[d] for d in order if source.stride(d)]
        dense_strides = [found.stride(d) for d in order if source.stride(d)]
        assert dense_strides == list(torch.empty(sizes).stride())
