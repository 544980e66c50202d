"""Elements that are too large for a kernel, and those that need none of their own size."""

import time
from typing import Any

import pytest
import torch
from processes import needs_compiler
from table import FLAGS, TWO_FLAGS, Draw, Engine, Flags, device_of, elements, integers, values
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from assocscan import BackendError, FallbackWarning, Monoid, associative_scan, explain, reduce
from assocscan.engines.cpu import compiler
from assocscan.testing import assert_scan_close, reference_scan

pytestmark = needs_compiler
PyTree = Any

FLIPPED = Monoid(
    lambda left, right: torch.where(right > 0, right, left) + 0 * left.flip(-1),
    name="limit_flipped",
    element_ndim=1,
)


def last_positive(x: Tensor) -> Tensor:
    found = [x[0]]
    for row in x[1:]:
        found.append(torch.where(row > 0, row, found[-1]))
    return torch.stack(found)


def test_an_operator_that_would_compile_for_minutes() -> None:
    """`auto` runs it eagerly, says so once, and is not slow about it."""
    x = torch.randn(6, 800, dtype=torch.float64)
    with pytest.raises(BackendError, match="limit of the cpu backend is 2000 scalars"):
        associative_scan(FLIPPED, x, backend="cpu")
    with pytest.warns(FallbackWarning, match="'limit_flipped'.*2400 scalars") as caught:
        begin = time.process_time()
        first, second = associative_scan(FLIPPED, x), associative_scan(FLIPPED, x)
        assert time.process_time() - begin < 5
    assert len(caught) == 1
    assert first.equal(last_positive(x)) and second.equal(first)


def affine(left: PyTree, right: PyTree) -> PyTree:
    return right[0] * left[0], right[0] * left[1] + right[1]


def decayed(x: Tensor, gate: Tensor) -> PyTree:
    return torch.sigmoid(gate), x * gate


def gated(state: PyTree, xs: PyTree) -> PyTree:
    return {"h": state[1] * torch.tanh(xs[1]), "x": xs[0]}


def vectors(shape: tuple[int, ...], dtype: torch.dtype, leaves: int = 2) -> Draw:
    return elements(*[(values(dtype), shape)] * leaves)


# Every component stands alone: name → the operator, and a draw of its elements.
AFFINE = Monoid(affine, identity=(1.0, 0.0), name="limit_affine", element_ndim=1)
MATRICES = Monoid(
    affine,
    identity=lambda a, b: (torch.ones(a), torch.zeros(b)),
    name="limit_matrices",
    element_ndim=2,
)
GATED = Monoid(
    affine, identity=(1.0, 0.0), name="limit_gated", element_ndim=1, lift=decayed, lower=gated
)
ALONE = {
    "float32": (AFFINE, vectors((9,), torch.float32)),
    "bfloat16": (AFFINE, vectors((9,), torch.bfloat16)),
    "complex64": (AFFINE, vectors((9,), torch.complex64)),
    "int32": (AFFINE, vectors((9,), torch.int32)),
    "matrices": (MATRICES, vectors((3, 4), torch.float64)),
    "gated": (GATED, vectors((9,), torch.float64)),
    "max": (
        Monoid(torch.maximum, identity=-torch.inf, name="limit_max", element_ndim=1),
        lambda g, shape: integers(-99, 99, torch.int64)(g, (*shape, 20)),
    ),
}
# So that components do not stand alone, or are too few.
TOGETHER = {
    "flipped": (FLIPPED, lambda g, shape: values(torch.float64)(g, (*shape, 9))),
    "identities": (
        Monoid(
            torch.maximum,
            name="limit_identities",
            element_ndim=1,
            identity=lambda x: -100 - torch.arange(x[0]),
        ),
        lambda g, shape: integers(-99, 99, torch.int64)(g, (*shape, 20)),
    ),
    "few": (AFFINE, vectors((7,), torch.float64)),
}


def scans(
    op: Monoid, draw: Draw, shape: tuple[int, ...], axis: int, flags: Flags, bounds: Any, run: Any
) -> PyTree:
    generator = torch.Generator().manual_seed(0)
    xs = draw(generator, shape)
    outer = shape[:axis] + shape[axis + 1 :]
    init = draw(generator, outer if bounds is None else (len(bounds) - 1, *outer))
    if xs[0].dtype == torch.bfloat16:
        init = tree_map(lambda t: t.float(), init)
    offsets = None if bounds is None else torch.tensor(bounds)
    return run(
        op, xs, axis, reverse=flags.reverse, inclusive=flags.inclusive,
        init=init if flags.init else None, return_final=flags.final, offsets=offsets,
    )  # fmt: skip


@pytest.mark.thinned(11)
@pytest.mark.parametrize("engine", ["cpu", "eager", "triton"])
@pytest.mark.parametrize("name", [*ALONE, *TOGETHER])
def test_components_that_stand_alone(name: str, engine: str) -> None:
    """Like scalars in further batch dimensions; against the oracle, which knows elements."""
    op, draw = (ALONE | TOGETHER)[name]
    chosen = Engine(engine, device_of(engine))
    spec = op.of(draw(torch.Generator(), ()))[0]
    assert (spec.by_component is not None) == (name in ALONE)
    cases = [((2, 7), 1, None), ((7, 3), 0, None), ((2, 7), 1, (0, 3, 3, 7))]
    for shape, axis, bounds in cases[: 1 if engine == "triton" else 3]:
        for flags in FLAGS if (name, engine) == ("float32", "cpu") else TWO_FLAGS:
            if op.identity is None and not flags.init:
                continue
            got = scans(op, draw, shape, axis, flags, bounds, chosen.scan_from_cpu)
            want = scans(op, draw, shape, axis, flags, bounds, reference_scan)
            assert_scan_close(got, want, 7)


def test_one_kernel_for_vectors_of_any_size() -> None:
    """It is that of scalars, compiled once; and its plan counts components among the lanes."""
    op = Monoid(lambda a, b: a + b + 0 * a * b, identity=0.0, name="limit_sum", element_ndim=1)
    known = len(compiler._LOADED)
    begin = time.process_time()
    for size in (1500, 100_000, 64):
        x = torch.rand(2, 5, size, dtype=torch.float64)
        assert_scan_close(associative_scan(op, x, 1, backend="cpu"), x.cumsum(1), 5)
        assert_scan_close(reduce(op, x, 1, backend="cpu"), x.sum(1), 5)
    assert time.process_time() - begin < 5
    assert len(compiler._LOADED) <= known + 2
    assert explain(op, x, 1).normal_form == (2, 5, 64)
    assert op.source("cpp", like=x) == op.source("cpp", like=x[0, 0, :9])


@pytest.mark.slow
def test_gradients_of_vectors_are_generated(recwarn: pytest.WarningsRecorder) -> None:
    """On CPUs: of elements of 17 to 64 scalars, too, that depend on one another."""
    generator = torch.Generator().manual_seed(0)
    for op, draw in (ALONE[name] for name in ("gated", "matrices", "complex64")):
        grads = []
        for backend in ("cpu", "eager"):
            generator.manual_seed(0)
            xs = [t.requires_grad_() for t in draw(generator, (2, 6))]
            init = [t.requires_grad_() for t in draw(generator, (2,))]
            ys, final = associative_scan(
                op, tuple(xs), 1, init=tuple(init), return_final=True, backend=backend
            )
            total = sum(t.abs().square().sum() for t in (*tree_leaves(ys), *final))
            grads.append(torch.autograd.grad(total, [*xs, *init]))
        for got, want in zip(*grads, strict=True):
            torch.testing.assert_close(got, want)
    assert not recwarn.list


def test_a_raised_dimension_stays_a_batch_dimension() -> None:
    """Under vmap, with leaves that broadcast, and with an init given per component."""
    a, b = torch.rand(1, 7, 9), torch.rand(4, 7, 9)
    init = (torch.rand(9), torch.rand(4, 9))
    got = associative_scan(AFFINE, (a, b), 1, init=init, backend="cpu")
    assert_scan_close(got, reference_scan(AFFINE, (a, b), 1, init=init), 7)
    mapped = torch.vmap(lambda x, y: associative_scan(AFFINE, (x, y), 0))(a.expand(4, 7, 9), b)
    assert_scan_close(mapped, reference_scan(AFFINE, (a.expand(4, 7, 9), b), 1), 7)
