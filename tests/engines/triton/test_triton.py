"""The Triton engines beyond the table: forced tiles, many chunks, memory, and what cannot run.

On GPUs where there is one; else in Triton's interpreter, on CPU tensors.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import math
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from golden import check_golden
from table import CASES, ENGINES, GPU, TWO_FLAGS, Engine, Flags, Problem, check, options
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from assocscan import BackendError, associative_scan, monoid, ops
from assocscan.engines.base.commands import Allocate
from assocscan.engines.triton import loader as triton_loader
from assocscan.engines.triton import multipass, tiles
from assocscan.engines.triton import prepare as triton_scan
from assocscan.engines.triton.kernel import Tile, TritonKernel
from assocscan.engines.triton.prepare import LoadedKernel
from assocscan.program import cpp_and_triton_expressions as expressions
from assocscan.runtime import backends as engines
from assocscan.runtime import executable_cache as executables
from assocscan.runtime.backends import availability
from assocscan.testing import assert_scan_close, reference_scan

pytestmark = pytest.mark.thinned(4)

pytest.importorskip("triton", reason="Triton is not installed")

TRITON = Engine("triton", GPU)
MULTIPASS = Engine("multipass", GPU)


@pytest.fixture(autouse=True)
def fresh_reasons() -> Iterator[None]:
    """What is known of the machine's engines, and of calls, is found out anew by every test."""
    ops.sum.calls.clear()
    executables._PREPARED.clear()
    engines.why_not_here.cache_clear()
    yield
    executables._PREPARED.clear()
    engines.why_not_here.cache_clear()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[TritonKernel]:
    """The kernels that the test launches."""
    launched: list[TritonKernel] = []
    launch = LoadedKernel.launch

    def watched(loaded: LoadedKernel, given: Any) -> None:
        launched.append(loaded.kernel)
        launch(loaded, given)

    monkeypatch.setattr(LoadedKernel, "launch", watched)
    return launched


# Every form of a kernel: one tile or several, one item or several, one segment or several.
ROW_TILES = (
    Tile(1, 2, 1, 1), Tile(2, 8, 1, 1), Tile(4, 4, 1, 1, prefetch=True),
    Tile(2, 8, 1, 1, stages=2), Tile(2, 4, 2, 1), Tile(1, 2, 4, 1, prefetch=True),
)  # fmt: skip
LANE_TILES = (
    Tile(4, 1, 2, 1), Tile(2, 1, 4, 1, prefetch=True), Tile(4, 1, 4, 1, stages=2),
    Tile(4, 4, 2, 1), Tile(2, 2, 4, 1, prefetch=True), Tile(4, 4, 2, 1, stages=2),
    Tile(4, 8, 1, 1), Tile(2, 4, 1, 1, prefetch=True),
)  # fmt: skip
EDGES = Flags(reverse=True, init=True, final=True)
SOME_FLAGS = (*TWO_FLAGS, EDGES, Flags(inclusive=False))


def flags_at(length: int) -> tuple[Flags, ...]:
    """All for some lengths; where the interpreter runs, only half of them for each."""
    return SOME_FLAGS[length % 2 :: 2] if TRITON.interpreted else SOME_FLAGS


@pytest.mark.parametrize("tile", ROW_TILES, ids=str)
def test_row_tiles_at_every_length(kernels: list[TritonKernel], tile: Tile) -> None:
    with tiles.forced(tile):
        for length in (0, 1):  # an axis of one step has lanes, whichever it is
            check(TRITON, Problem("bicyclic", (3, length), 1), TWO_FLAGS[1])
        kernels.clear()
        for length in range(2, 2 * tile.steps + 2):
            for flags in flags_at(length):
                check(TRITON, Problem("bicyclic", (3, length), 1), flags)
    assert {(kernel.tile, kernel.lanes) for kernel in kernels} == {(tile, False)}
    assert {kernel.single for kernel in kernels} == {True, False}


@pytest.mark.thinned(9)
@pytest.mark.parametrize("tile", LANE_TILES, ids=str)
def test_lane_tiles_at_every_length(kernels: list[TritonKernel], tile: Tile) -> None:
    """Five lanes are more than one tile has, and not a multiple."""
    with tiles.forced(tile):
        for length in range(2, 2 * tile.steps + 2):
            for flags in flags_at(length):
                check(TRITON, Problem("bicyclic", (length, 5), 0), flags)
    assert {(kernel.tile, kernel.lanes) for kernel in kernels} == {(tile, True)}


@pytest.mark.thinned(12)
@pytest.mark.parametrize("case", ["matrix", "band", "brackets", "bool"])
@pytest.mark.parametrize("tile", [*ROW_TILES[2::2], LANE_TILES[4], LANE_TILES[1]], ids=str)
def test_tiles_of_other_operators(case: str, tile: Tile) -> None:
    """Several components, none of an identity, lift and lower, bool."""
    with tiles.forced(tile):
        for flags in SOME_FLAGS:
            problem = Problem(case, (3, 11) if tile in ROW_TILES else (2, 11, 3), 1)
            if problem.allows(flags):
                check(TRITON, problem, flags)


@pytest.mark.thinned(5)
@pytest.mark.parametrize("tile", [*ROW_TILES[1::4], LANE_TILES[4], LANE_TILES[2]], ids=str)
def test_tiles_of_packed_sequences(tile: Tile) -> None:
    bounds = (0, 0, 1, 8, 8, 25, 25)
    shape, axis = ((2, 25), 1) if tile in ROW_TILES else ((25, 5), 0)
    with tiles.forced(tile):
        for flags in SOME_FLAGS:
            check(TRITON, Problem("bicyclic", shape, axis, bounds=bounds), flags)


@pytest.fixture
def depths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Chunks of eight steps; the axis's length at every level of the multi-pass engine."""
    lengths: list[int] = []
    prepare = multipass.prepare

    def watched(spec: Any, tensors: Any) -> Any:
        lengths.append(spec.length)
        assert len(lengths) < 9, f"no end: {lengths}"
        return prepare(spec, tensors)

    monkeypatch.setattr(multipass, "prepare", watched)
    monkeypatch.setitem(engines.SCALARS, "multipass", watched)
    monkeypatch.setattr(multipass, "choose_chunk", lambda *shape: 8)
    return lengths


@pytest.mark.exhaustive
@pytest.mark.parametrize("shape,axis", [((2, 100), 1), ((100, 3), 0)], ids=["rows", "lanes"])
@pytest.mark.parametrize("case", ["bicyclic", "brackets", "band"])
def test_chunks_of_chunks(depths: list[int], case: str, shape: tuple[int, ...], axis: int) -> None:
    problem = Problem(case, shape, axis)
    tile = Tile(16, 8, 1, 1) if axis == 1 else Tile(4, 2, 4, 1)
    with tiles.forced(tile):
        for flags in filter(problem.allows, SOME_FLAGS):
            depths.clear()
            check(MULTIPASS, problem, flags)
            assert depths == [100, 13, 2]


@pytest.mark.parametrize("tile", [Tile(16, 8, 1, 1), Tile(16, 4, 2, 1)], ids=str)
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_chunks_of_every_count(depths: list[int], extra: int, tile: Tile) -> None:
    with tiles.forced(tile):
        for chunks in range(1, 10):
            depths.clear()
            flags = SOME_FLAGS[chunks % len(SOME_FLAGS)]
            check(MULTIPASS, Problem("bicyclic", (3, 8 * chunks + extra), 1), flags)


BOUNDS = {
    "mixed": (0, 0, 0, 7, 8, 40, 40, 85, 86, 86),
    "one long": (0, 90, 90),
    "multiples": (0, 8, 16, 16, 24, 96),
    "many": (0, 0, 0, 0, 9, *range(9, 30), 30, 30),
}


@pytest.mark.thinned(7)
@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("rows", [True, False], ids=["rows", "lanes"])
def test_chunks_of_packed_sequences(depths: list[int], name: str, rows: bool) -> None:
    """Also more sequences than a chunk has steps, which chunks of chunks do not reduce."""
    bounds = BOUNDS[name]
    shape, axis = ((2, bounds[-1]), 1) if rows else ((bounds[-1], 3), 0)
    row_tile = Tile(16, 4, 2, 1) if len(bounds) % 2 else Tile(16, 8, 1, 1)
    with tiles.forced(row_tile if rows else Tile(4, 4, 2, 1)):
        for flags in TWO_FLAGS:
            depths.clear()
            check(MULTIPASS, Problem("bicyclic", shape, axis, bounds=bounds), flags)
            assert 0 < len(depths) < 5


def test_chunks_of_packed_sequences_without_identity(depths: list[int]) -> None:
    problem = Problem("band", (1, 40), 1, bounds=(0, 1, 9, 40))
    with tiles.forced(Tile(16, 8, 1, 1)):
        for flags in (Flags(final=True), TWO_FLAGS[1]):
            check(MULTIPASS, problem, flags)
    assert len(depths) > 2


def worst(dtype: torch.dtype) -> float | int:
    """What memory that is not ours holds."""
    return math.nan if dtype.is_floating_point else torch.iinfo(dtype).max


def inside(x: Tensor) -> Tensor:
    """`x` as a part of a larger tensor, strided in every dimension, the rest of it poisoned."""
    sizes = [2 * n + 3 for n in x.shape]
    storage = torch.full(sizes, worst(x.dtype), dtype=x.dtype, device=x.device)
    part = storage[tuple(slice(2, 2 + 2 * n, 2) for n in x.shape)]
    return part.copy_(x)


def dense_inside(x: Tensor) -> Tensor:
    """`x` contiguous, the memory on both sides of it poisoned."""
    storage = torch.full((x.numel() + 128,), worst(x.dtype), dtype=x.dtype, device=x.device)
    return storage[61 : 61 + x.numel()].view(x.shape).copy_(x)


# In the interpreter, tiles have 256 or 64 steps and chunks 64.
SHAPES: list[tuple[tuple[int, ...], int]] = [((3, 37), 1), ((2, 70, 3), 1), ((70, 3), 0)]


@pytest.mark.thinned(4)
@pytest.mark.parametrize("embed", [inside, dense_inside], ids=lambda f: f.__name__)
@pytest.mark.parametrize("engine", [TRITON, MULTIPASS], ids=lambda engine: engine.name)
@pytest.mark.parametrize("case", ["affine", "bicyclic"])
def test_memory_around_inputs_is_not_used(engine: Engine, case: str, embed: Any) -> None:
    for shape, axis in SHAPES:
        problem = Problem(case, shape, axis)
        xs, init = problem.inputs(engine.device)
        for flags in TWO_FLAGS:
            plain = engine.scan(CASES[case].op, xs, **options(problem, flags, init))
            poisoned = tree_map(embed, (xs, init))
            result = engine.scan(
                CASES[case].op, poisoned[0], **options(problem, flags, poisoned[1])
            )
            # On a GPU, kernels for misaligned inputs are others and may associate otherwise.
            tolerance = (shape[axis] * torch.finfo(torch.float32).eps,) * 2
            for one, other in zip(tree_leaves(result), tree_leaves(plain), strict=True):
                exact = engine.interpreted or not one.is_floating_point()
                rtol, atol = (0.0, 0.0) if exact else tolerance
                torch.testing.assert_close(one, other, rtol=rtol, atol=atol)


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Results are allocated with guards on both sides, which must be there afterwards."""
    guards: list[Tensor] = []

    def strided(size: tuple[int, ...], stride: tuple[int, ...], **kind: Any) -> Tensor:
        n = 1 + sum((s - 1) * step for s, step in zip(size, stride, strict=True))
        storage = torch.full((n + 512,), worst(kind["dtype"]), **kind)
        guards.extend([storage[:256], storage[256 + n :]])
        return storage[256 : 256 + n].as_strided(size, stride, 256)

    def bind(command: Allocate) -> Any:
        def run(table: list[Any]) -> None:
            table[command.slot] = strided(
                command.shape, command.strides, dtype=command.dtype, device=command.device
            )

        return run

    monkeypatch.setattr(Allocate, "bind", bind)
    yield
    assert guards
    for guard in guards:
        assert (guard.isnan() if guard.is_floating_point() else guard == worst(guard.dtype)).all()


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("engine", [TRITON, MULTIPASS], ids=lambda engine: engine.name)
@pytest.mark.parametrize("case", ["affine", "bicyclic"])
def test_nothing_is_written_outside_of_results(engine: Engine, case: str) -> None:
    for shape, axis in SHAPES:
        for flags in TWO_FLAGS:
            check(engine, Problem(case, shape, axis), flags)
    for flags in TWO_FLAGS:
        check(engine, Problem(case, (2, 90), 1, bounds=(0, 0, 5, 80, 80, 90)), flags)


def greatest_divisor(left: Tensor, right: Tensor) -> Tensor:
    return torch.gcd(left, right)


GCD = monoid(greatest_divisor, identity=0, name="triton_gcd")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int64], ids=str)
def test_common_divisors_of_the_least_integers(dtype: torch.dtype) -> None:
    """A loop, which the table of scalar operations cannot have: it runs them inside a scan, too."""
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    numbers = torch.tensor([low, high, 0, 1, 12, 18, high - 1, low + 2], dtype=dtype)
    x = torch.cartesian_prod(numbers, numbers)
    _, last = TRITON.scan(GCD, TRITON.put(x), 1, return_final=True)
    divisors = [math.gcd(*pair) for pair in x.tolist()]  # torch.gcd(low, high) is −1
    assert last.tolist() == [d if d <= high else low for d in divisors]


@pytest.mark.parametrize("engine", [TRITON, MULTIPASS], ids=lambda engine: engine.name)
def test_an_operation_that_triton_lacks(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lacks none today: one is taken away."""
    monkeypatch.delitem(expressions.TRITON.functions, "gcd")
    monkeypatch.setattr(engines, "unsupported_by_triton", engines.unsupported_by_triton.__wrapped__)
    x = engine.put(torch.tensor([12, 18, 27]))
    with pytest.raises(BackendError, match=rf"{engine.name}.*'triton_gcd'.*'gcd'"):
        engine.scan(GCD, x)
    with pytest.raises(BackendError, match=r"'triton_gcd'.*'gcd'"):
        GCD.source("triton", like=x)


def test_cpu_tensors_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_loader, "is_interpreting", lambda: False)
    for backend in ("triton", "multipass"):
        with pytest.raises(BackendError, match=r"no GPU was found|cpu, it runs on GPU tensors"):
            associative_scan(ops.sum, torch.ones(3), backend=backend)


def test_tensors_without_data_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_loader, "is_interpreting", lambda: True)
    with pytest.raises(BackendError, match="tensors on the meta device have no data"):
        associative_scan(ops.sum, torch.ones(3, device="meta"), backend="triton")


def test_availability(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = availability()
    assert set(reasons) == {*engines.BACKENDS} - {"auto"}
    assert {e.name for e in ENGINES if reasons[e.name] is None} >= {"eager", "triton", "multipass"}
    monkeypatch.setattr(triton_loader, "is_interpreting", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    without_gpu = availability()
    for backend in ("triton", "multipass"):
        assert "no GPU was found (TRITON_INTERPRET=1" in str(without_gpu[backend])


def test_triton_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_loader, "is_installed", lambda: False)
    assert "Triton is not installed" in str(availability()["multipass"])
    x = torch.arange(5.0, device=GPU)
    with pytest.raises(BackendError, match=r"triton backend.*Triton is not installed"):
        associative_scan(ops.sum, x, backend="triton")
    with pytest.raises(BackendError, match="Triton is not installed"):
        triton_loader._load("")
    if GPU == "cpu":  # auto takes another engine; on GPUs see test_gpu.py
        assert associative_scan(ops.sum, x).tolist() == [0, 1, 3, 6, 10]


@pytest.mark.parametrize("rows", [True, False], ids=["rows", "lanes"])
def test_few_kernels_for_many_lengths(monkeypatch: pytest.MonkeyPatch, rows: bool) -> None:
    """With the tiles of GPUs: as many as there are powers of two, and not more."""
    sources: set[str] = set()
    choose = tiles.choose
    monkeypatch.setattr(LoadedKernel, "launch", lambda *ignored: None)
    monkeypatch.setattr(triton_scan, "choose", lambda op, shape, _: choose(op, shape, False))
    monkeypatch.setattr(triton_loader, "load", sources.add)
    op = monoid(lambda a, b: a + b, identity=0, name=f"triton_few_kernels_{rows}")
    for length in range(1, 301):
        x = torch.empty((3, length) if rows else (length, 300), device=GPU)
        for flags in ({}, {"init": 0.0}):
            TRITON.scan(op, x, int(rows), **flags)
    assert len(sources) <= 2 * 12


def test_lengths_of_one_tile_share_a_kernel() -> None:
    op = monoid(lambda a, b: a * b + a + b, identity=0, name="triton_shared_kernel")
    x = torch.ones(3, 400, dtype=torch.int64, device=GPU)
    TRITON.scan(op, x, 1)
    known = len(triton_loader._LOADED)
    for length in (300, 257, 399):
        assert_scan_close(
            TRITON.scan(op, x[:, :length], 1), reference_scan(op, x[:, :length].cpu(), 1), length
        )
    assert len(triton_loader._LOADED) == known


@pytest.mark.parametrize("shape", [(2, 150), (2, 150, 3)], ids=["rows", "lanes"])
def test_gradient_in_chunks_that_begins_from_init(shape: tuple[int, ...]) -> None:
    """The backward elements of `logaddexp` depend on the state before each step, before the first
    on init: the totals of the chunks read it too."""
    generator = torch.Generator().manual_seed(0)
    x, init, cotangent = (
        torch.randn(size, dtype=torch.float64, generator=generator).requires_grad_()
        for size in (shape, (2, *shape[2:]), shape)
    )
    y = MULTIPASS.scan_from_cpu(ops.logaddexp, x, 1, init=init, reverse=True)
    expected = reference_scan(ops.logaddexp, x, 1, init=init, reverse=True)
    got = torch.autograd.grad(y, (x, init), cotangent)
    for one, other in zip(got, torch.autograd.grad(expected, (x, init), cotangent), strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-11)


def test_source() -> None:
    text = ops.affine.source("triton")
    assert text == ops.affine.source("triton")
    tree = ast.parse(text)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert [f.name for f in functions] == ["lift", "combine", "advance", "lower"]
    assert all(ast.unparse(f.decorator_list[0]) == "triton.jit" for f in functions)
    check_golden("affine.triton", text)


def test_every_kernel_has_readable_source(kernels: list[TritonKernel]) -> None:
    """Triton and tracebacks read it from the module's loader."""
    TRITON.scan(CASES["brackets"].op, torch.ones(2, 5, dtype=torch.int8, device=GPU), 1)
    from assocscan.engines.triton.source import source

    text = source(kernels[-1])
    ast.parse(text)
    assert "def scan(" in text
    module = triton_loader.module_of(text)
    assert module.__file__ is not None and not os.path.lexists(module.__file__)
    linecache.clearcache()
    assert inspect.getsource(module) == triton_loader.FIRST_LINE + text
    assert inspect.getsource(module.combine.fn).startswith("@triton.jit")
