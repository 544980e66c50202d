"""Every engine against the sequential loop: operators × shapes × layouts × dtypes × flags."""

from collections.abc import Iterator
from itertools import accumulate, product

import pytest
import torch
from table import (
    AFFINE,
    CASES,
    DTYPES,
    EXACT,
    FLAGS,
    LAYOUTS,
    TWO_FLAGS,
    Engine,
    Flags,
    Problem,
    check,
    check_all,
    dtypes,
    expected,
    options,
    sampled,
)
from torch.utils._pytree import tree_leaves, tree_map

from assocscan import monoid
from assocscan.testing import assert_scan_close, reference_scan

pytestmark = pytest.mark.thinned(4)

OPERATORS = ("bicyclic", "matrix", "affine", "band", "brackets")
LENGTHS = (0, 1, 2, 3, 7, *(n + k for n in (16, 32, 64, 128) for k in (-1, 0, 1)), 1000, 4097)
INNERS = (1, 2, 3, 5, 8, 17, 64, 100)
BOUNDS = ((0,), (0, 0, 0), (0, 5), (0, 0, 3, 3, 40, 41, 41), (0, 64, 128, 130), (0, 1, 2, 3, 300))


def flags_of(case: str) -> tuple[Flags, ...]:
    return FLAGS if case in ("brackets", "affine", "band") else TWO_FLAGS


@pytest.mark.slow
@pytest.mark.thinned(11)
@pytest.mark.parametrize("length", sampled(LENGTHS, (0, 1, 2, 7, 33, 64, 127, 1000, 4097)))
@pytest.mark.parametrize("case", OPERATORS)
def test_contiguous_axis(engine: Engine, case: str, length: int) -> None:
    engine.skip_if_slow(length)
    check_all(engine, Problem(case, (3, length), axis=1), flags_of(case))


@pytest.mark.thinned(9)
@pytest.mark.parametrize("inner", sampled(INNERS, (1, 8, 17)))
@pytest.mark.parametrize("case", ["bicyclic", "affine", "brackets"])
def test_strided_axis(engine: Engine, case: str, inner: int) -> None:
    if engine.name == "multipass" and engine.interpreted and inner not in (1, 8):
        pytest.skip("the interpreter takes 3 s for each; triton runs the same kernels on them")
    several = FLAGS if case == "brackets" and inner >= 8 else TWO_FLAGS
    for length in (1, 2, 66, 257):
        check_all(engine, Problem(case, (2, length, inner), axis=1), several)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("case", ["bicyclic", "matrix"])
def test_strided_axis_of_every_length(engine: Engine, case: str) -> None:
    for length in LENGTHS[:-2] if engine.interpreted else LENGTHS[:-1]:
        check_all(engine, Problem(case, (length, 5), axis=0), TWO_FLAGS)


def test_short_axes_of_every_length(engine: Engine) -> None:
    lengths = range(0, 70, 3) if engine.interpreted else range(70)
    for length, reverse in product(lengths, (False, True)):
        flags = Flags(reverse, inclusive=not reverse)
        check(engine, Problem("bicyclic", (2, length), axis=1), flags)
        check(engine, Problem("bicyclic", (2, length, 3), axis=1), flags)


@pytest.mark.thinned(9)
@pytest.mark.parametrize("shape", [(1, 0), (0, 5), (0, 0), (3, 0, 2), (0, 5, 2), (2, 5, 0)])
@pytest.mark.parametrize("case", OPERATORS)
def test_nothing_to_scan(engine: Engine, case: str, shape: tuple[int, ...]) -> None:
    check_all(engine, Problem(case, shape, axis=1), flags_of(case))


@pytest.mark.thinned(12)
@pytest.mark.parametrize("axis", sampled([0, 1, 2, 3, -1, -2], (0, 2, -1)))
@pytest.mark.parametrize("case", EXACT)
def test_every_axis(engine: Engine, case: str, axis: int) -> None:
    check_all(engine, Problem(case, (3, 4, 5, 6), axis), TWO_FLAGS)


@pytest.mark.thinned(7)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "contiguous"])
@pytest.mark.parametrize("case", ["bicyclic", "matrix"])
def test_strides(engine: Engine, case: str, layout: str) -> None:
    for shape, axis in [((3, 65), 1), ((3, 34, 4), 1), ((65, 9), 0)]:
        check_all(engine, Problem(case, shape, axis, layout), TWO_FLAGS[1:])


@pytest.mark.thinned(12)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 150), (2, 150, 9)], ids=["contiguous", "strided"])
def test_dtypes(engine: Engine, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    problem = Problem(str(dtype).removeprefix("torch."), shape, axis=1)
    check_all(engine, problem, TWO_FLAGS[1:])
    xs, init = problem.inputs(engine.device)
    ys, final = engine.scan(AFFINE, xs, **options(problem, TWO_FLAGS[1], init))
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    assert dtypes(ys) == [dtype] * 2
    assert dtypes(final) == [wide] * 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_narrow_floats_are_rounded_once(engine: Engine, dtype: torch.dtype) -> None:
    """4096 terms of 2^-10 on top of 1: none of them moves a carry that is kept in 16 bits."""
    engine.skip_if_slow(4097)
    x = torch.full((2, 4097), 2.0**-10, dtype=dtype)
    x[:, 0] = 1
    a = torch.ones_like(x)
    _, h = engine.scan(AFFINE, engine.put((a, x)), 1)
    exact = 1 + torch.arange(4097) * 2.0**-10
    assert torch.equal(h.cpu(), exact.to(dtype).expand(2, -1))


def test_init_of_narrow_floats_may_be_float32(engine: Engine) -> None:
    xs, _ = Problem("bfloat16", (2, 40), axis=1).inputs()
    init = (torch.tensor([1.001, 1.0]), torch.tensor([0.0, 1.001]))
    result = engine.scan(AFFINE, engine.put(xs), 1, init=engine.put(init), return_final=True)
    oracle = reference_scan(AFFINE, xs, 1, init=init, return_final=True)
    assert_scan_close(result, oracle, length=40)


@pytest.mark.thinned(12)
@pytest.mark.parametrize("bounds", sampled(BOUNDS, BOUNDS[1::2]), ids=str)
@pytest.mark.parametrize("case", OPERATORS)
def test_packed_sequences(engine: Engine, case: str, bounds: tuple[int, ...]) -> None:
    check_all(engine, Problem(case, (2, bounds[-1]), 1, bounds=bounds), flags_of(case))
    check_all(engine, Problem(case, (bounds[-1], 9), 0, bounds=bounds), TWO_FLAGS)


def test_offsets_of_either_integer_dtype(engine: Engine) -> None:
    problem = Problem("brackets", (10,), 0, bounds=(0, 4, 4, 10))
    xs, init = problem.inputs(engine.device)
    arguments = options(problem, Flags(init=True, final=True), init)
    for dtype in (torch.int32, torch.int64):
        arguments["offsets"] = torch.tensor(problem.bounds, dtype=dtype)
        result = engine.scan(CASES["brackets"].op, xs, **arguments)
        assert_scan_close(result, expected(problem, Flags(init=True, final=True)), 10)


@pytest.mark.thinned(7)
@pytest.mark.parametrize("case", ["bicyclic", "matrix", "affine"])
def test_leaves_broadcast(engine: Engine, case: str) -> None:
    """One leaf varies along all but the first batch dimension, the other along all but the last."""
    problem = Problem(case, (3, 40, 4), axis=1)
    (first, second), init = problem.inputs()
    xs = (first[:1], second[:, :, :1])
    for flags in TWO_FLAGS:
        arguments = options(problem, flags, init)
        oracle = reference_scan(CASES[case].op, xs, **arguments)
        arguments["init"] = engine.put(arguments["init"])
        result = engine.scan(CASES[case].op, engine.put(xs), **arguments)
        assert_scan_close(result, oracle, length=40)


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.thinned(5)
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("shape", [(131_075, 1), (131_075, 3)], ids=str)
def test_long_axis(engine: Engine, shape: tuple[int, ...]) -> None:
    """Longer than any tile, so that carries cross tiles and threads; against plain integers."""
    engine.skip_if_slow(max(shape))
    xs, _ = Problem("bicyclic", shape, axis=0).inputs()
    columns = [list(zip(m, n, strict=True)) for m, n in zip(*map(by_column, xs), strict=True)]
    ys, final = engine.scan(CASES["bicyclic"].op, engine.put(xs), return_final=True)
    back = engine.scan(CASES["bicyclic"].op, engine.put(xs), reverse=True)
    for k in range(2):
        states = [[state[k] for state in accumulate(c, plain_bicyclic)] for c in columns]
        assert by_column(ys[k]) == states
        assert final[k].tolist() == [column[-1] for column in states]
        states = [[state[k] for state in accumulate(c[::-1], plain_bicyclic)] for c in columns]
        assert by_column(back[k]) == [column[::-1] for column in states]


def by_column(leaf: torch.Tensor) -> list[list[int]]:
    return leaf.T.tolist()


def plain_bicyclic(left: tuple[int, int], right: tuple[int, int]) -> tuple[int, int]:
    matched = min(left[1], right[0])
    return left[0] + right[0] - matched, right[1] + left[1] - matched


@pytest.mark.parametrize("view", ["conjugate", "negative"])
def test_lazy_views_are_resolved(engine: Engine, view: str) -> None:
    """x.conj() and x.conj().imag hold the memory of x, with a bit that says what it means."""
    a, b = engine.put(Problem("complex64", (2, 60), axis=1).inputs()[0])
    xs = (a.conj(), b.conj()) if view == "conjugate" else (a.conj().imag, b.conj().imag)
    assert all(x.is_conj() or x.is_neg() for x in xs)
    init = tree_map(lambda x: x[:, 0], xs)
    assert all(leaf.is_conj() or leaf.is_neg() for leaf in init)
    result = engine.scan(AFFINE, xs, 1, init=init)
    plain = tree_map(lambda x: x.cpu().resolve_conj().resolve_neg(), (xs, init))
    assert_scan_close(result, reference_scan(AFFINE, plain[0], 1, init=plain[1]), length=60)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fresh memory holds NaN, or the largest integer, while the test runs."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.thinned(11)
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("case", OPERATORS)
def test_no_uninitialised_memory_is_read(engine: Engine, case: str) -> None:
    assert torch.empty(4).isnan().all()
    check_all(engine, Problem(case, (2, 131), axis=1), flags_of(case))
    check_all(engine, Problem(case, (2, 131, 9), axis=1), TWO_FLAGS)
    check_all(engine, Problem(case, (41, 9), 0, bounds=(0, 0, 3, 40, 41)), TWO_FLAGS)


def sum_by_division(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left + torch.div(right * right, right, rounding_mode="floor")


SUM_BY_DIVISION = monoid(sum_by_division, name="engines_sum_by_division")


def test_lanes_without_elements_do_not_trap(engine: Engine) -> None:
    for length in (1, 5, 33, 130):
        x = torch.arange(1, 1 + 3 * length).view(3, length)
        y = engine.scan(SUM_BY_DIVISION, engine.put(x), 1)
        assert torch.equal(y.cpu(), x.cumsum(1))


def test_rows_do_not_leak_into_each_other(engine: Engine) -> None:
    for shape, axis in [((3, 37), 1), ((37, 3), 0)]:
        xs = (torch.full(shape, torch.inf), torch.full(shape, torch.nan))
        for leaf, value in zip(xs, (0.5, 0.25), strict=True):
            leaf.select(1 - axis, 1).fill_(value)  # the row between two that are not finite
        ys = engine.scan(AFFINE, engine.put(xs), axis)
        assert_scan_close(ys, reference_scan(AFFINE, xs, axis), length=37)
        assert all(leaf.select(1 - axis, 1).isfinite().all() for leaf in ys)


@pytest.mark.parametrize("shape", [(1, 70_000), (3, 500, 7)], ids=str)
def test_deterministic_runs_are_bitwise_equal(engine: Engine, shape: tuple[int, ...]) -> None:
    engine.skip_if_slow(shape[1])
    xs, _ = Problem("affine", shape, axis=1).inputs(engine.device)
    first = engine.scan(AFFINE, xs, 1, deterministic=True)
    for _ in range(3):
        again = engine.scan(AFFINE, xs, 1, deterministic=True)
        for one, other in zip(tree_leaves(first), tree_leaves(again), strict=True):
            assert torch.equal(one.view(torch.int32), other.view(torch.int32))
