"""Every error: its classes, and that the message names what was seen."""

import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from table import AFFINE, CASES, affine, band, device_of
from torch import Tensor

import assocscan
from assocscan import (
    AssocScanError,
    AxisError,
    BackendError,
    FallbackWarning,
    Monoid,
    ScanValueError,
    TraceError,
    associative_scan,
    monoid,
    ops,
    reduce,
)
from assocscan.testing import assert_scan_close, reference_scan

PyTree = Any
Function = Callable[[PyTree, PyTree], PyTree]
BAND = CASES["band"].op
MATRIX = CASES["matrix"].op


def refuse(
    kind: type[Exception], mentions: list[str], op: Any, xs: PyTree, *args: Any, **options: Any
) -> None:
    """Assert that the scan raises `kind`, also an AssocScanError, naming all of `mentions`."""
    with pytest.raises(kind) as caught:
        associative_scan(op, xs, *args, **options)
    assert isinstance(caught.value, AssocScanError)
    for word in mentions:
        assert word in str(caught.value)


def ones(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


def as_monoid(function: Function, **options: Any) -> Any:
    return monoid(function, name=f"errors_{function.__qualname__}", **options)


def test_classes() -> None:
    for name in ("TraceError", "MonoidError", "BackendError", "AxisError"):
        assert issubclass(getattr(assocscan, name), AssocScanError)
    assert issubclass(AxisError, ValueError)
    assert issubclass(AxisError, IndexError)
    assert issubclass(FallbackWarning, Warning)


def test_operator_is_not_callable() -> None:
    refuse(TypeError, ["int"], 3, ones(4))


@pytest.mark.parametrize("op", [AFFINE, affine], ids=["monoid", "raw"])
def test_leaf_is_not_a_tensor(op: Any) -> None:
    refuse(TypeError, ["[1]", "float"], op, (ones(4), 2.0))
    refuse(TypeError, ["[0]", "ndarray"], op, (ones(4).numpy(), ones(4)))


@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_leaf_is_sparse_or_nested() -> None:
    refuse(TypeError, ["[1]", "sparse"], AFFINE, (ones(4), ones(4).to_sparse()))
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([ones(4), ones(3)], layout=layout)
        refuse(TypeError, ["[0]", "nested"], AFFINE, (nested, ones(2, 4)))


def widening(left: PyTree, right: PyTree) -> PyTree:
    return left[0] + right[0], (left[1] + right[1]).double()


def as_list(left: PyTree, right: PyTree) -> PyTree:
    return [left[0] + right[0], left[1] + right[1]]


def dropping(left: PyTree, right: PyTree) -> PyTree:
    return (left[0] + right[0],)


def renaming(left: PyTree, right: PyTree) -> PyTree:
    return {"a": left["a"] + right["a"], "c": left["b"]}


def joining(left: PyTree, right: PyTree) -> PyTree:
    return left[0] + right[0], torch.cat([left[1], right[1]], -1)


@pytest.mark.parametrize("raw", [False, True], ids=["monoid", "raw"])
def test_operator_changes_a_dtype(raw: bool) -> None:
    op = widening if raw else as_monoid(widening)
    refuse(TypeError, ["[1]", "float32", "float64"], op, (ones(4), ones(4)))


@pytest.mark.parametrize("raw", [False, True], ids=["monoid", "raw"])
def test_operator_changes_the_structure(raw: bool) -> None:
    wrap = (lambda function: function) if raw else as_monoid
    refuse(TypeError, ["tuple", "list"], wrap(as_list), (ones(4), ones(4)))
    refuse(TypeError, ["1", "2"], wrap(dropping), (ones(4), ones(4)))
    refuse(TypeError, ["'b'", "'c'"], wrap(renaming), {"a": ones(4), "b": ones(4)})


@pytest.mark.parametrize("raw", [False, True], ids=["monoid", "raw"])
def test_operator_changes_an_element_shape(raw: bool) -> None:
    op = joining if raw else as_monoid(joining, element_ndim=(0, 1))
    refuse(ValueError, ["[1]", "3", "6"], op, (ones(4), ones(4, 3)))


@pytest.mark.parametrize("op", [AFFINE, affine], ids=["monoid", "raw"])
def test_unequal_lengths(op: Any) -> None:
    refuse(ValueError, ["[1]", "4", "5"], op, (ones(2, 4), ones(2, 5)), 1)
    refuse(ValueError, ["[1]", "4", "1"], op, (ones(2, 4), ones(2, 1)), 1)


def test_batch_shapes_do_not_broadcast() -> None:
    refuse(ValueError, ["[1]", "[2, 4]", "[3, 4]"], AFFINE, (ones(2, 4), ones(3, 4)), 1)
    refuse(ValueError, ["[1]", "[2, 4]", "[4]"], AFFINE, (ones(2, 4), ones(4)), -1)


def test_leaf_has_fewer_dimensions_than_an_element() -> None:
    refuse(ValueError, ["[0]", "[2]"], MATRIX, (ones(2), ones(5, 2)))


def test_mixed_devices() -> None:
    refuse(ValueError, ["[1]", "cpu", "meta"], AFFINE, (ones(4), ones(4, device="meta")))


@pytest.mark.parametrize("empty", [(), [], {}, ((), {})], ids=str)
def test_empty_pytree(empty: PyTree) -> None:
    refuse(ValueError, ["xs"], AFFINE, empty)
    refuse(ValueError, ["xs"], affine, empty)


@pytest.mark.parametrize("op", [BAND, band], ids=["monoid", "raw"])
def test_neither_identity_nor_init(op: Any) -> None:
    xs = (ones(4), ones(4, dtype=torch.int64))
    refuse(ValueError, ["identity", "init"], op, xs, inclusive=False)
    offsets = torch.tensor([0, 4, 4])
    refuse(ValueError, ["identity", "init"], op, xs, offsets=offsets, return_final=True)
    empty = tuple(x[:0] for x in xs)
    refuse(ValueError, ["identity", "init"], op, empty, return_final=True)


@pytest.mark.parametrize("bounds", [[0, 4, 4], [0, 0], [0, 0, 0]], ids=str)
def test_neither_identity_nor_init_in_offsets_that_are_not_read_first(bounds: list[int]) -> None:
    """Under vmap and on a GPU, the eager engine is the first to see empty sequences."""
    x, op = ones(2, bounds[-1]), as_monoid(lambda left, right: left + right)
    scan = partial(associative_scan, op, offsets=torch.tensor(bounds), backend="eager")
    total = partial(reduce, op, offsets=torch.tensor(bounds), backend="eager")
    for function in (partial(scan, return_final=True), total):
        with pytest.raises(ScanValueError, match="declares no identity"):
            torch.vmap(function)(x)
    assert torch.vmap(scan)(x).shape == x.shape


def test_axis_out_of_range() -> None:
    for axis in (2, -3, 100):
        refuse(AxisError, [str(axis), "2"], AFFINE, (ones(3, 4), ones(3, 4)), axis)
        refuse(AxisError, [str(axis), "2"], affine, (ones(3, 4), ones(3, 4)), axis)
    refuse(AxisError, ["0"], ops.sum, torch.tensor(1.0))
    refuse(AxisError, ["1"], MATRIX, (ones(3, 2, 2), ones(3, 2)), 1)


def test_unknown_name() -> None:
    refuse(ValueError, ["afine", "affine"], "afine", (ones(4), ones(4)))


def test_unknown_backend() -> None:
    refuse(ValueError, ["gpu", "eager"], ops.sum, ones(4), backend="gpu")


def test_backend_cannot_run_here() -> None:
    refuse(BackendError, ["cuda"], ops.sum, ones(4), backend="cuda")


def test_init_of_another_structure() -> None:
    xs = (ones(4), ones(4))
    refuse(TypeError, ["init", "tuple", "list"], AFFINE, xs, init=[ones(), ones()])
    refuse(TypeError, ["init"], AFFINE, xs, init=(ones(),))
    refuse(TypeError, ["init"], AFFINE, xs, init=ones())


def test_init_does_not_broadcast() -> None:
    xs = (ones(3, 4), ones(3, 4))
    refuse(ValueError, ["init", "[1]", "[2]", "[3]"], AFFINE, xs, 1, init=(ones(3), ones(2)))
    offsets = torch.tensor([0, 1, 4])
    refuse(ValueError, ["init", "[0]"], AFFINE, xs, 1, init=(ones(3, 3),) * 2, offsets=offsets)


@pytest.mark.parametrize(
    "offsets",
    [
        torch.tensor([1, 4]),
        torch.tensor([0, 3]),
        torch.tensor([0, 5]),
        torch.tensor([0, 3, 2, 4]),
        torch.tensor([0, -1, 4]),
        torch.tensor([[0, 4]]),
        torch.tensor([], dtype=torch.int64),
        torch.tensor([0.0, 4.0]),
        torch.tensor([0, 4], dtype=torch.int16),
    ],
    ids=str,
)
def test_invalid_offsets(offsets: Tensor) -> None:
    kind = ValueError if offsets.dtype == torch.int64 else (TypeError, ValueError)
    refuse(kind, ["offsets"], ops.sum, ones(4), offsets=offsets)


def branching(left: Tensor, right: Tensor) -> Tensor:
    return left if left > right else right


def built_in_max(left: Tensor, right: Tensor) -> Tensor:
    return max(left, right)


def reading(left: Tensor, right: Tensor) -> Tensor:
    return left + right.item()


def adding_in_place(left: Tensor, right: Tensor) -> Tensor:
    return left.add_(right)


def augmented(left: Tensor, right: Tensor) -> Tensor:
    right += left
    return right


WEIGHT = torch.tensor(2.0)


def capturing(left: Tensor, right: Tensor) -> Tensor:
    return left + WEIGHT * right


UNTRACEABLE = (branching, built_in_max, reading, adding_in_place, augmented, capturing)


@pytest.mark.parametrize("function", UNTRACEABLE, ids=lambda f: f.__name__)
def test_untraceable_operators_name_the_line(function: Function) -> None:
    """The offending line is the first one of each function."""
    line = function.__code__.co_firstlineno + 1
    refuse(TraceError, [f"test_errors.py:{line}"], as_monoid(function), ones(4))


def test_other_memory_for_an_argument() -> None:
    """What `.data` and `set_` do leaves no trace in a graph."""

    def by_data(left: Tensor, right: Tensor) -> Tensor:
        left.data = right
        return left + right

    def by_set(left: Tensor, right: Tensor) -> Tensor:
        return left.set_(right) + right

    refuse(TraceError, ["by_data'", ".data", "compute a new tensor"], as_monoid(by_data), ones(4))
    refuse(TraceError, ["by_set'", "compute a new tensor"], as_monoid(by_set), ones(4))


def test_an_element_is_not_written_through_an_index() -> None:
    def writing(left: Tensor, right: Tensor) -> Tensor:
        left[0] = right[0]
        return left

    refuse(TraceError, ["test_errors.py"], as_monoid(writing, element_ndim=1), ones(4, 3))


def convolve(left: Tensor, right: Tensor) -> Tensor:
    """Circular convolution: associative, and no generator knows the Fourier transform."""
    return torch.fft.irfft(torch.fft.rfft(left) * torch.fft.rfft(right), left.shape[-1])


def test_operations_that_generators_lack() -> None:
    op = as_monoid(convolve, element_ndim=1)
    x = torch.rand(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    refuse(BackendError, ["fft"], op, x, backend="cpu")
    with pytest.warns(FallbackWarning, match="fft"):
        y = associative_scan(op, x)
    assert_scan_close(y, reference_scan(op, x), length=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = associative_scan(op, x)
    assert torch.equal(again, y)


def test_a_warning_names_the_users_line() -> None:
    """Past the package's own frames, and torch's."""
    x = torch.rand(5, 4)
    op = [Monoid(convolve, name=f"errors_line_{k}", element_ndim=1) for k in range(3)]
    with pytest.warns(FallbackWarning) as caught:
        first = sys._getframe().f_lineno
        associative_scan(op[0], x)
        assocscan.reduce(op[1], x)
        torch.vmap(assocscan.reduce, (None, 0))(op[2], x.expand(2, 5, 4))
    assert [w.lineno - first for w in caught] == [1, 2, 3]
    assert {w.filename for w in caught} == {__file__}


def test_a_captured_tensor_is_printed_as_a_trace_error() -> None:
    captured = torch.ones(())
    with pytest.raises(TraceError, match="uses a captured tensor") as caught:
        associative_scan(Monoid(lambda a, b: a + b * captured, name="captures"), ones(3))
    assert type(caught.value) is TraceError


def test_callables_that_are_not_pointwise_are_not_generated() -> None:
    refuse(BackendError, ["pointwise"], torch.matmul, ones(5, 2, 2), backend="cpu")


@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_tensors_without_memory(backend: str) -> None:
    device = device_of(backend)
    freed = torch.randn(2, 3, device=device)
    freed.untyped_storage().resize_(0)
    for x in (freed, torch._efficientzerotensor((2, 3), device=device)):
        refuse(BackendError, ["no memory of its own", "[2, 3]"], ops.sum, x, 1, backend=backend)


def by_product(left: Tensor, right: Tensor) -> Tensor:
    return right @ left


def maps(left: Any, right: Any) -> Any:
    (a1, b1), (a2, b2) = left, right
    return a2 @ a1, (a2 @ b1[..., None])[..., 0] + b2


def chains(left: Any, right: Any) -> Any:
    return tuple(b @ a for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize(
    ("op", "xs", "named"),
    [
        (by_product, ones(5, 2, 2), ["element_ndim=2)", "ops.matmul"]),
        (maps, (ones(5, 2, 2), ones(5, 2)), ["element_ndim=(2, 1))", "ops.matrix_affine"]),
        (chains, (ones(5, 2, 2),) * 3, ["=2)", "(2, 1)", "ops.matmul", "ops.matrix_affine"]),
    ],
)
def test_the_monoid_that_slices_of_matrices_are_meant_for(
    op: Callable[..., Any], xs: Any, named: list[str]
) -> None:
    refuse(BackendError, ["pointwise", *named], op, xs, backend="cpu")


@pytest.mark.parametrize("kind", [TraceError, TypeError])
@pytest.mark.parametrize("length", [0, 1, 4])
def test_a_result_that_is_no_tensor(kind: type[Exception], length: int) -> None:
    """It is of the wrong type, and the operator's text is wrong."""
    op = Monoid(lambda left, right: (left[0], None), name="half_a_result")
    x = ones(length)
    for _ in range(2):
        with pytest.raises(kind, match=r"'half_a_result' failed on .*it returned None"):
            associative_scan(op, (x, x))
