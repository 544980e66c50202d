"""Random scans: operators × shapes × axes × strides × dtypes × flags against the oracle."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from table import (
    CASES,
    ENGINES,
    EXACT,
    LAYOUTS,
    Engine,
    Flags,
    Problem,
    check,
    expected,
    options,
)
from torch.utils._pytree import tree_leaves, tree_map

from assocscan.testing import assert_scan_close, reference_scan

# A kernel is compiled for each operator, dtype and all flags but reverse, so that these are few.
TYPED = ("bool", "uint8", "bfloat16", "complex128")
NAMES = ("bicyclic", "matrix", "affine", "band", "brackets", *TYPED)

lengths = st.one_of(st.integers(0, 70), st.integers(0, 600))
sizes = st.integers(0, 5)
carries = st.sampled_from([(True, False, False), (False, True, True)])
flags = st.builds(lambda reverse, others: Flags(reverse, *others), st.booleans(), carries)
engines = pytest.mark.parametrize("engine", ENGINES, ids=lambda e: e.name, indirect=True)


@st.composite
def problems(draw: st.DrawFn, names: tuple[str, ...] = NAMES, packed: bool = False) -> Problem:
    ndim = draw(st.integers(1, 4))
    axis = draw(st.integers(-ndim, ndim - 1))
    shape = draw(st.lists(sizes, min_size=ndim, max_size=ndim))
    bounds = None
    if packed:
        steps = draw(st.lists(st.integers(0, 40), max_size=5))
        bounds = tuple(sum(steps[:k]) for k in range(len(steps) + 1))
    shape[axis] = draw(lengths) if bounds is None else bounds[-1]
    layout, seed = draw(st.sampled_from(sorted(LAYOUTS))), draw(st.integers(0, 9))
    return Problem(draw(st.sampled_from(names)), tuple(shape), axis, layout, bounds, seed)


def skips(engine: Engine, problem: Problem) -> bool:
    """The interpreter, 0.1 s for a tile iteration, takes three examples of ten."""
    return engine.interpreted and problem.seed > 2


@pytest.mark.thinned(4)
@engines
@settings(max_examples=150)
@given(problem=problems(), flags=flags)
def test_scan(engine: Engine, problem: Problem, flags: Flags) -> None:
    if problem.allows(flags) and not skips(engine, problem):
        check(engine, problem, flags)


@engines
@settings(max_examples=40)
@given(problem=problems(packed=True), flags=flags)
def test_packed_sequences(engine: Engine, problem: Problem, flags: Flags) -> None:
    if problem.allows(flags) and not skips(engine, problem):
        check(engine, problem, flags)


@pytest.mark.slow(2)
@engines
@settings(max_examples=40)
@given(problem=problems(("bicyclic", "matrix", "affine")), flags=flags, data=st.data())
def test_leaves_broadcast(
    engine: Engine, problem: Problem, flags: Flags, data: st.DataObject
) -> None:
    """One leaf of xs and every leaf of init have size 1 in some batch dimensions."""

    def shrink(leaf: torch.Tensor, dims: list[int]) -> torch.Tensor:
        for dim in data.draw(st.sets(st.sampled_from(dims)) if dims else st.just(set())):
            leaf = leaf.narrow(dim, 0, 1)
        return leaf

    if skips(engine, problem):
        return
    xs, init = map(list, problem.inputs())
    axis = problem.axis % len(problem.shape)
    dims = [d for d, size in enumerate(problem.shape) if d != axis and size > 0]
    which = data.draw(st.integers(0, 1))
    xs[which] = shrink(xs[which], dims)
    init = tuple(shrink(leaf, [d - (d > axis) for d in dims]) for leaf in init)
    arguments = options(problem, flags, init)
    op = CASES[problem.case].op
    oracle = reference_scan(op, tuple(xs), **arguments)
    arguments["init"] = engine.put(arguments["init"])
    assert_scan_close(engine.scan(op, engine.put(tuple(xs)), **arguments), oracle, problem.steps)


@pytest.mark.slow
@engines
@settings(max_examples=40)
@given(problem=problems(EXACT), flags=flags, data=st.data())
def test_streaming_over_chunks(
    engine: Engine, problem: Problem, flags: Flags, data: st.DataObject
) -> None:
    """The final of one chunk is the init of the next."""
    if skips(engine, problem):
        return
    flags = flags._replace(final=True, init=True)
    cut = data.draw(st.integers(0, problem.length))
    xs, carry = problem.inputs(engine.device)
    op, arguments = CASES[problem.case].op, options(problem, flags, None)
    parts = [(0, cut), (cut, problem.length)]
    outputs = []
    for start, stop in reversed(parts) if flags.reverse else parts:
        chunk = tree_map(lambda x, a=start, b=stop: narrow(x, problem, a, b), xs)
        arguments["init"] = carry
        ys, carry = engine.scan(op, chunk, **arguments)
        outputs.append(ys)
    if flags.reverse:
        outputs.reverse()
    axis = problem.axis % len(problem.shape)
    whole = tree_map(lambda *leaves: torch.cat(leaves, axis), *outputs)
    assert_scan_close((whole, carry), expected(problem, flags), problem.steps)


def narrow(leaf: torch.Tensor, problem: Problem, start: int, stop: int) -> torch.Tensor:
    return leaf.narrow(problem.axis % len(problem.shape), start, stop - start)


@pytest.mark.exhaustive
@engines
@settings(max_examples=20)
@given(problem=problems(EXACT), inclusive=st.booleans())
def test_reverse_is_a_flipped_scan(engine: Engine, problem: Problem, inclusive: bool) -> None:
    if skips(engine, problem):
        return
    xs, init = problem.inputs(engine.device)
    axis = problem.axis % len(problem.shape)
    op = CASES[problem.case].op
    back = engine.scan(op, xs, axis, reverse=True, inclusive=inclusive, init=init)
    flipped = tree_map(lambda x: x.flip(axis), xs)
    forward = engine.scan(op, flipped, axis, inclusive=inclusive, init=init)
    for one, other in zip(tree_leaves(back), tree_leaves(forward), strict=True):
        assert torch.equal(one, other.flip(axis))
