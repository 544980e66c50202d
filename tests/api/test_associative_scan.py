"""What `associative_scan` means: axes, pytrees, broadcasting, carries, callables, memory."""

from collections import namedtuple
from collections.abc import Callable
from itertools import accumulate, pairwise, product
from typing import Any

import pytest
import torch
from table import AFFINE, CASES, Engine, affine
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from assocscan import FallbackWarning, associative_scan, monoid, ops
from assocscan.errors import ScanTypeError
from assocscan.testing import assert_scan_close, reference_scan

pytestmark = pytest.mark.thinned(4)

PyTree = Any
Pair = namedtuple("Pair", "a b")


def draw(*shape: int) -> Tensor:
    """Small integers, as floats: every scan below is exact."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(sum(shape))).float()


def assert_equal(got: PyTree, want: PyTree) -> None:
    """Same structure, and the same tensors up to the dtype of floats."""
    assert_scan_close(got, tree_map(reference_dtype, want), length=1)


def reference_dtype(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def test_axis_defaults_to_the_first() -> None:
    xs = (draw(5, 2), draw(5, 2))
    assert_equal(associative_scan(AFFINE, xs), reference_scan(AFFINE, xs, 0))


def test_negative_axes_count_from_the_last_batch_dimension() -> None:
    op = CASES["matrix"].op
    xs = (draw(2, 5, 3, 2, 2), draw(2, 5, 3, 2))
    for axis in (0, 1, 2):
        ys = associative_scan(op, xs, axis - 3)
        assert_equal(ys, reference_scan(op, xs, axis))


def test_negative_axes_of_raw_callables_refer_to_the_first_leaf() -> None:
    xs = (draw(4, 5), draw(4, 5, 3))
    with pytest.warns(FallbackWarning, match="its leaves have different shapes"):
        ys = associative_scan(affine_of_vectors, xs, -1)
    assert_equal(ys, reference_scan(affine_of_vectors, xs, 1))


def affine_of_vectors(left: PyTree, right: PyTree) -> PyTree:
    a1, b1 = left
    a2, b2 = right
    return a2 * a1, a2.unsqueeze(-1) * b1 + b2


STRUCTURES: dict[str, tuple[Callable[..., PyTree], Callable[[PyTree], tuple[Tensor, Tensor]]]] = {
    "tuple": (lambda a, b: (a, b), lambda t: t),
    "list": (lambda a, b: [a, b], lambda t: t),
    "dict": (lambda a, b: {"a": a, "b": b}, lambda t: (t["a"], t["b"])),
    "namedtuple": (Pair, lambda t: (t.a, t.b)),
    "nested": (lambda a, b: {"x": [a], "y": (Pair(b, b),)}, lambda t: (t["x"][0], t["y"][0].b)),
}


@pytest.mark.parametrize("raw", [False, True], ids=["monoid", "raw"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_structures(engine: Engine, structure: str, raw: bool) -> None:
    pack, unpack = STRUCTURES[structure]

    def combine(left: PyTree, right: PyTree) -> PyTree:
        return pack(*affine(unpack(left), unpack(right)))

    op = combine if raw else monoid(combine, name=f"frontend_{structure}")
    a, b, init = draw(2, 6), draw(2, 6) + 1, (draw(2), draw(2) - 1)
    want, last = reference_scan(affine, (a, b), 1, init=init, return_final=True)
    xs = engine.put(pack(a, b))
    ys, final = engine.scan(op, xs, 1, init=engine.put(pack(*init)), return_final=True)
    assert type(ys) is type(final) is type(xs)
    assert_equal(ys, pack(*want))
    assert_equal(final, pack(*last))


def test_dicts_are_matched_by_key() -> None:
    def combine(left: PyTree, right: PyTree) -> PyTree:
        a, b = affine((left["a"], left["b"]), (right["a"], right["b"]))
        return {"b": b, "a": a}

    a, b = draw(6), draw(6) + 1
    init = {"b": torch.tensor(3.0), "a": torch.tensor(2.0)}
    want = reference_scan(affine, (a, b), init=(init["a"], init["b"]))
    for op in (combine, monoid(combine, name="frontend_dict_order")):
        ys = associative_scan(op, {"a": a, "b": b}, init=init)
        assert list(ys) == ["a", "b"]
        assert_equal(ys, dict(zip("ab", want, strict=True)))


def test_one_tensor_is_a_pytree() -> None:
    y = associative_scan(ops.sum, torch.arange(4))
    assert torch.equal(y, torch.tensor([0, 1, 3, 6]))


def test_state_has_the_broadcast_batch_shape() -> None:
    xs = (draw(1, 6, 1), draw(4, 6, 3))
    ys, final = associative_scan(AFFINE, xs, 1, return_final=True)
    assert [leaf.shape for leaf in ys] == [(4, 6, 3)] * 2
    assert [leaf.shape for leaf in final] == [(4, 3)] * 2
    assert_equal((ys, final), reference_scan(AFFINE, xs, 1, return_final=True))


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 1), (1, 3), (2, 3)], ids=str)
def test_init_broadcasts_to_the_batch_shape_without_the_axis(
    engine: Engine, shape: tuple[int, ...]
) -> None:
    xs, init = (draw(2, 6, 3), draw(2, 6, 3)), (torch.full(shape, 2.0), draw(2, 3))
    arguments = {"init": init, "return_final": True}
    got = engine.scan(AFFINE, engine.put(xs), 1, init=engine.put(init), return_final=True)
    assert_equal(got, reference_scan(AFFINE, xs, 1, **arguments))


def test_init_of_matrices_broadcasts_over_the_batch() -> None:
    op, xs = CASES["matrix"].op, (draw(2, 5, 2, 2), draw(2, 5, 2))
    init = (torch.eye(2), torch.ones(1, 2))
    assert_equal(associative_scan(op, xs, 1, init=init), reference_scan(op, xs, 1, init=init))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", ["bicyclic", "matrix", "brackets"])
def test_streaming_equals_one_scan(engine: Engine, name: str, reverse: bool) -> None:
    case, generator = CASES[name], torch.Generator().manual_seed(0)
    xs = engine.put(case.draw(generator, (2, 50)))
    options = {"axis": 1, "reverse": reverse, "return_final": True}
    whole, last = engine.scan(case.op, xs, **options)
    cuts = [0, 7, 7, 8, 40, 50]
    chunks = list(pairwise(cuts))
    carry, parts = None, []
    for start, stop in reversed(chunks) if reverse else chunks:
        chunk = tree_map(lambda x, a=start, b=stop: x[:, a:b], xs)
        y, carry = engine.scan(case.op, chunk, init=carry, **options)
        parts.append(y)
    joined = tree_map(lambda *ys: torch.cat(ys, 1), *(parts[::-1] if reverse else parts))
    for got, want in zip(tree_leaves((joined, carry)), tree_leaves((whole, last)), strict=True):
        assert torch.equal(got, want)


def test_final_of_an_empty_axis_is_init_or_the_identity(engine: Engine) -> None:
    xs, init = engine.put((draw(3, 0), draw(3, 0))), engine.put((draw(3), draw(3)))
    for inclusive in (True, False):
        arguments = {"inclusive": inclusive, "return_final": True}
        _, final = engine.scan(AFFINE, xs, 1, **arguments)
        assert_equal(final, engine.put((torch.ones(3), torch.zeros(3))))
        _, final = engine.scan(AFFINE, xs, 1, init=init, **arguments)
        assert_equal(final, init)


@pytest.mark.parametrize("inclusive", [True, False])
@pytest.mark.parametrize("reverse", [False, True])
def test_pointwise_callables(engine: Engine, reverse: bool, inclusive: bool) -> None:
    xs, init = (draw(2, 30, 3), draw(2, 30, 3)), (draw(2, 3), draw(2, 3))
    arguments = {"axis": 1, "reverse": reverse, "inclusive": inclusive, "return_final": True}
    got = engine.scan(affine, engine.put(xs), init=engine.put(init), **arguments)
    assert_equal(got, reference_scan(affine, xs, init=init, **arguments))


def batched_matmul(left: Tensor, right: Tensor) -> Tensor:
    return right @ left


def then(left: Tensor, right: Tensor) -> Tensor:
    """Composition of maps of {0, …, 4}, each a vector of images."""
    return torch.gather(right, -1, left)


@pytest.mark.parametrize("backend", ["eager", "auto"])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.filterwarnings("ignore::assocscan.FallbackWarning")
def test_callables_that_see_whole_slices(backend: str, reverse: bool) -> None:
    maps = torch.randint(0, 5, (19, 3, 5), generator=torch.Generator().manual_seed(0))
    for op, x in ((then, maps), (batched_matmul, torch.sign(draw(19, 2, 2)))):
        y = associative_scan(op, x, 0, reverse, backend=backend)
        assert_equal(y, reference_scan(op, x, 0, reverse))


def test_callables_with_leaves_of_differing_rank() -> None:
    xs, init = (draw(9, 4), draw(9, 4, 3)), (draw(4), draw(4, 3))
    for reverse in (False, True):
        arguments = {"reverse": reverse, "init": init, "return_final": True}
        got = associative_scan(affine_of_vectors, xs, backend="eager", **arguments)
        assert_equal(got, reference_scan(affine_of_vectors, xs, **arguments))


def test_callables_are_told_apart_by_closure_and_defaults() -> None:
    def weighted(weight: float) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda left, right: left + right + weight

    x = torch.ones(4)
    for weight in (0.0, 1.0, 2.0):
        want = torch.arange(1.0, 5.0) * (1 + weight) - weight
        assert torch.equal(associative_scan(weighted(weight), x), want)
        bound = eval(f"lambda left, right, weight={weight}: left + right + weight")
        assert torch.equal(associative_scan(bound, x), want)


def shares_memory(one: PyTree, other: PyTree) -> bool:
    storages = [
        {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(tree) if leaf.numel()}
        for tree in (one, other)
    ]
    return not storages[0].isdisjoint(storages[1])


def last_of(left: PyTree, right: PyTree) -> PyTree:
    return right


@pytest.mark.thinned(7)
@pytest.mark.parametrize("length", [1, 2, 9])
def test_outputs_do_not_alias_inputs(engine: Engine, length: int) -> None:
    keep = monoid(last_of, name="frontend_last", lift=lambda a: a, lower=lambda state, x: x)
    x, init = engine.put(draw(2, length)), engine.put(draw(2))
    for op in (keep, last_of, ops.max):
        result = engine.scan(op, x, 1, init=init, return_final=True)
        assert not shares_memory(result, (x, init))
        assert not shares_memory(*result)
        exclusive = engine.scan(op, x, 1, inclusive=False, init=init, return_final=True)
        assert not shares_memory(exclusive, (x, init))


def test_the_final_of_an_empty_axis_does_not_alias_init(engine: Engine) -> None:
    init = engine.put(draw(2))
    _, final = engine.scan(ops.sum, engine.put(draw(2, 0)), 1, init=init, return_final=True)
    assert torch.equal(final, init)
    assert not shares_memory(final, init)


def test_inputs_are_not_modified(engine: Engine) -> None:
    xs, init = engine.put((draw(3, 70), draw(3, 70))), engine.put((draw(3), draw(3)))
    before = tree_map(torch.clone, (xs, init))
    for reverse, inclusive in product((False, True), (False, True)):
        engine.scan(AFFINE, xs, 1, reverse=reverse, inclusive=inclusive, init=init)
    for leaf, copy in zip(tree_leaves((xs, init)), tree_leaves(before), strict=True):
        assert torch.equal(leaf, copy)


SPECIAL = (-0.0, 0.0, 1.0, torch.nan, 2.0, torch.inf, -torch.inf, -0.0)


@pytest.mark.thinned(12)
@pytest.mark.parametrize("first", SPECIAL, ids=str)
@pytest.mark.parametrize("op", [ops.sum, ops.max, ops.prod], ids=["sum", "max", "prod"])
def test_special_values_pass_as_in_a_loop(engine: Engine, op: Any, first: float) -> None:
    for second, third in product(SPECIAL, SPECIAL):
        x = torch.tensor([first, second, third])
        loop = torch.stack(list(accumulate(x, op.combine)))
        y = engine.scan(op, engine.put(x)).cpu()
        assert torch.equal(y.isnan(), loop.isnan())
        numbers = ~loop.isnan()
        assert torch.equal(y[numbers], loop[numbers])
        if op is not ops.max:  # torch.maximum(0.0, -0.0) may be either
            assert torch.equal(y[numbers].signbit(), loop[numbers].signbit())


def test_negative_zeros_stay_negative(engine: Engine) -> None:
    """No padding and no identity is added to an inclusive scan."""
    for shape, axis in (((2, 67), 1), ((67, 3), 0)):
        x = torch.full(shape, -0.0)
        for reverse in (False, True):
            assert engine.scan(ops.sum, engine.put(x), axis, reverse=reverse).signbit().all()


def test_vector_times_matrix() -> None:
    """torch squeezes its own temporary in place there; the operator changes nothing."""

    def row_affine(left: PyTree, right: PyTree) -> PyTree:
        return left[0] @ right[0], left[1] @ right[0] + right[1]

    op = monoid(row_affine, element_ndim=(2, 1), name="frontend_row_affine")
    A, b = torch.randn(3, 2, 2), torch.randn(3, 2)
    _, h = associative_scan(op, (A, b))
    torch.testing.assert_close(h[2], (b[0] @ A[1] + b[1]) @ A[2] + b[2])


def test_flags_are_read_at_every_call() -> None:
    x, flag = torch.randn(2, 7), torch.tensor(True)
    for _ in range(2):
        associative_scan(ops.sum, x, 1, reverse=flag)
    flag.fill_(False)
    torch.testing.assert_close(associative_scan(ops.sum, x, 1, reverse=flag), x.cumsum(1))


@pytest.mark.filterwarnings("ignore")
def test_tracers_see_torch_operations() -> None:
    x = torch.randn(2, 7)
    associative_scan(ops.sum, x, 1)
    traced = torch.jit.trace(lambda v: associative_scan(ops.sum, v, 1), (x,), check_trace=False)
    torch.testing.assert_close(traced(x + 1), (x + 1).cumsum(1))


@pytest.mark.filterwarnings("ignore::assocscan.FallbackWarning")
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16], ids=str)
def test_dtypes_that_torch_cannot_add(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(ScanTypeError, match=rf"'sum' needs for leaves of \({name}\).*float32"):
        associative_scan("sum", torch.ones(4).to(dtype))
