"""The table: operators × layouts × flags. Every engine runs all of it.

A new engine is one entry of ENGINES; a new operator is one entry of CASES.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from assocscan import BackendError, associative_scan, monoid
from assocscan.engines.triton import multipass
from assocscan.runtime import backends as engines
from assocscan.testing import assert_scan_close, bicyclic, reference_scan

PyTree = Any
Draw = Callable[[torch.Generator, tuple[int, ...]], PyTree]

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
DTYPES = (torch.bool, *INTEGERS, *FLOATS, *COMPLEX)


# The interpreter takes some 0.1 s for a tile iteration of a kernel: longer axes are left to GPUs.
LONGEST_INTERPRETED = 300


def sampled(values: Iterable[Any], always: Iterable[Any]) -> list[Any]:
    """Parameters of a test of which all but some are left to the exhaustive run."""
    kept = tuple(always)
    return [v if v in kept else pytest.param(v, marks=pytest.mark.exhaustive) for v in values]


def device_of(backend: str) -> str:
    """The device of tensors that a backend takes here; "auto" is asked about the CPU's."""
    return GPU if backend in engines.GPU_ENGINES else "cpu"


@dataclass(frozen=True)
class Engine:
    """A backend and the device that its tests use."""

    name: str
    device: str = "cpu"

    @property
    def interpreted(self) -> bool:
        """Whether it is Triton's interpreter that runs: some 0.1 s per scan."""
        return self.name in ("triton", "multipass") and self.device == "cpu"

    def scan(self, op: Any, xs: PyTree, axis: int = 0, **options: Any) -> PyTree:
        try:
            return associative_scan(op, xs, axis, backend=self.name, **options)
        except BackendError as error:
            if "bytes, more than" in str(error):  # the CUDA engine and large elements
                pytest.skip(str(error))
            raise

    def scan_from_cpu(self, op: Any, xs: PyTree, axis: int = 0, **options: Any) -> PyTree:
        """`scan` of tensors on the CPU, to which the results return; differentiable."""
        options["init"] = self.put(options.get("init"))
        return tree_map(lambda t: t.cpu(), self.scan(op, self.put(xs), axis, **options))

    def repeats(self, length: int) -> bool:
        """Whether this is a scan that another engine of the table runs by the same code: an axis
        that is one chunk (of 64 steps in the interpreter) is left by multipass to triton."""
        if self.name != "multipass" or not self.interpreted:
            return False
        return length <= multipass.choose_chunk(length, 1, 1, True)

    def skip_if_slow(self, length: int) -> None:
        """Skip a test of that length where it would take the interpreter seconds."""
        if self.interpreted and length > LONGEST_INTERPRETED:
            pytest.skip(f"the interpreter runs axes of up to {LONGEST_INTERPRETED} steps")

    def put(self, tree: PyTree) -> PyTree:
        """The tensors of `tree` on the engine's device; None stays None."""
        return tree_map(lambda leaf: leaf if leaf is None else leaf.to(self.device), tree)


GPU = "cuda" if torch.cuda.is_available() else "cpu"  # Triton's interpreter takes CPU tensors
ENGINES: tuple[Engine, ...] = (
    Engine("eager"), Engine("cpu"), Engine("triton", GPU), Engine("multipass", GPU),
)  # fmt: skip
if engines.availability()["cuda"] is None:
    ENGINES += (Engine("cuda", GPU),)


class Flags(NamedTuple):
    reverse: bool = False
    inclusive: bool = True
    init: bool = False
    final: bool = False


_BOOL = (False, True)
FLAGS = tuple(Flags(*values) for values in product(_BOOL, _BOOL, _BOOL, _BOOL))
# An engine compiles a kernel for most flags: where an operator has had them all, two are enough.
TWO_FLAGS = (Flags(), Flags(reverse=True, inclusive=False, init=True, final=True))


@dataclass(frozen=True)
class Case:
    """An operator, and how to draw inputs and states of a given batch shape for it."""

    op: Any
    draw: Draw
    draw_state: Draw
    has_identity: bool = True

    def allows(self, flags: Flags, length: int) -> bool:
        """Whether every output is defined: some need an identity."""
        empty = length == 0 and flags.final
        return self.has_identity or flags.init or (flags.inclusive and not empty)


def integers(low: int, high: int, dtype: torch.dtype) -> Draw:
    def draw(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(low, high, shape, generator=generator).to(dtype)

    return draw


def values(dtype: torch.dtype) -> Draw:
    """Any integer or bool of the dtype; floats and both parts of complex numbers in [−1, 1)."""
    if dtype == torch.bool:
        return integers(0, 2, dtype)
    if not (dtype.is_floating_point or dtype.is_complex):
        return integers(torch.iinfo(dtype).min, torch.iinfo(dtype).max, dtype)

    def draw(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
        parts = 2 * torch.rand((*shape, 2), generator=generator, dtype=torch.float64) - 1
        return (torch.view_as_complex(parts) if dtype.is_complex else parts[..., 0]).to(dtype)

    return draw


def elements(*draws: tuple[Draw, tuple[int, ...]]) -> Draw:
    """A tuple of leaves, each given by its draw and element shape."""
    return lambda generator, shape: tuple(draw(generator, shape + last) for draw, last in draws)


def affine(left: PyTree, right: PyTree) -> PyTree:
    """For bool this is (and, or): an affine map too, and not commutative either."""
    a1, b1 = left
    a2, b2 = right
    return a2 * a1, a2 * b1 + b2


def matrix_affine(left: PyTree, right: PyTree) -> PyTree:
    a1, b1 = left
    a2, b2 = right
    return a2 @ a1, a2 @ b1 + b2


def band(left: PyTree, right: PyTree) -> PyTree:
    """The rectangular band: associative, not commutative, without identity."""
    return left[0], right[1]


def lift_bracket(x: Tensor) -> PyTree:
    x = x.to(torch.int32)
    return torch.clamp(-x, min=0), torch.clamp(x, min=0)


def lower_bracket(state: PyTree, x: Tensor) -> PyTree:
    return {"depth": 3 * state[1] + x, "broken": state[0] > 0}


AFFINE = monoid(affine, identity=(1.0, 0.0), name="table_affine")


def affine_case(dtype: torch.dtype) -> Case:
    draw = elements((values(dtype), ()), (values(dtype), ()))
    return Case(AFFINE, draw, draw)


_SMALL = integers(0, 4, torch.int64)
_PAIR = elements((_SMALL, ()), (_SMALL, ()))
_INT32 = integers(0, 4, torch.int32)
_WRAPPING = elements((values(torch.int32), (2, 2)), (values(torch.int32), (2,)))
_MIXED = elements((values(torch.float32), ()), (values(torch.int64), ()))

CASES = {
    "bicyclic": Case(monoid(bicyclic, identity=(0, 0), name="table_bicyclic"), _PAIR, _PAIR),
    "matrix": Case(
        monoid(
            matrix_affine,
            identity=lambda a, b: (torch.eye(a[-1]), torch.zeros(b)),
            element_ndim=(2, 1),
            name="table_matrix_affine",
        ),
        _WRAPPING,
        _WRAPPING,
    ),
    "affine": affine_case(torch.float32),
    "band": Case(monoid(band, name="table_band"), _MIXED, _MIXED, has_identity=False),
    "brackets": Case(
        monoid(
            bicyclic,
            identity=(0, 0),
            name="table_brackets",
            lift=lift_bracket,
            lower=lower_bracket,
        ),
        integers(-1, 2, torch.int8),
        elements((_INT32, ()), (_INT32, ())),
    ),
}
CASES |= {str(dtype).removeprefix("torch."): affine_case(dtype) for dtype in DTYPES}
EXACT = ("bicyclic", "matrix", "band", "brackets")


def _transposed(x: Tensor) -> Tensor:
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def _sliced(x: Tensor) -> Tensor:
    return torch.stack([x, ~x if x.dtype == torch.bool else x + 1], -1).flatten(-2)[..., ::2]


def _misaligned(x: Tensor) -> Tensor:
    return torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(x.shape)


def _expanded(x: Tensor) -> Tensor:
    """The first of the batch for all of it, with stride 0."""
    return x[:1].expand_as(x)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": _transposed,
    "sliced": _sliced,
    "misaligned": _misaligned,
    "expanded": _expanded,
}


class Problem(NamedTuple):
    """What the oracle is asked; hashable, so that all engines share its answer."""

    case: str
    shape: tuple[int, ...]  # the batch shape
    axis: int
    layout: str = "contiguous"
    bounds: tuple[int, ...] | None = None  # offsets
    seed: int = 0

    @property
    def length(self) -> int:
        return self.shape[self.axis]

    @property
    def steps(self) -> int:
        """What `tolerance` takes for the number of steps; it allows 2 √steps roundings.

        Where the axis is expanded all steps are equal. An engine multiplies such numbers in pairs,
        the equal products in pairs, and so on: each time the relative error doubles, as both
        factors have the same one. A product of L equal numbers is off by up to L - 1 roundings,
        none of which cancels another, and L² steps allow 2 L."""
        alike = self.layout == "expanded" and self.axis % len(self.shape) == 0
        return self.length**2 if alike else self.length

    def inputs(self, device: str = "cpu") -> tuple[PyTree, PyTree]:
        """(xs, init)."""
        generator = torch.Generator().manual_seed(self.seed)
        case, layout = CASES[self.case], LAYOUTS[self.layout]
        axis = self.axis % len(self.shape)
        outer = self.shape[:axis] + self.shape[axis + 1 :]
        if self.bounds is not None:
            outer = (len(self.bounds) - 1, *outer)
        xs, init = case.draw(generator, self.shape), case.draw_state(generator, outer)
        return tree_map(lambda x: layout(x.to(device)), xs), tree_map(lambda x: x.to(device), init)

    def allows(self, flags: Flags) -> bool:
        sections = pairwise(self.bounds or (0, self.length))
        shortest = min((stop - first for first, stop in sections), default=1)
        return CASES[self.case].allows(flags, shortest)


def options(problem: Problem, flags: Flags, init: PyTree) -> dict[str, Any]:
    return {
        "axis": problem.axis,
        "reverse": flags.reverse,
        "inclusive": flags.inclusive,
        "init": init if flags.init else None,
        "return_final": flags.final,
        "offsets": None if problem.bounds is None else torch.tensor(problem.bounds),
    }


@cache
def _reference(problem: Problem, flags: Flags) -> PyTree:
    xs, init = problem.inputs()
    return reference_scan(CASES[problem.case].op, xs, **options(problem, flags, init))


def expected(problem: Problem, flags: Flags) -> PyTree:
    """The oracle's answer; one run of it serves with and without the final."""
    with_final = flags._replace(final=True)
    if flags.final or not problem.allows(with_final):
        return _reference(problem, flags)
    return _reference(problem, with_final)[0]


def check(engine: Engine, problem: Problem, flags: Flags) -> None:
    """Run one cell of the table against the oracle."""
    if engine.repeats(problem.length):
        return
    xs, init = problem.inputs(engine.device)
    result = engine.scan(CASES[problem.case].op, xs, **options(problem, flags, init))
    try:
        assert_scan_close(result, expected(problem, flags), problem.steps)
    except AssertionError as error:
        raise AssertionError(f"{engine.name}, {problem}, {flags}: {error}") from None


def check_all(engine: Engine, problem: Problem, several: tuple[Flags, ...] = FLAGS) -> None:
    """Check several flags; the first and the last alone where an interpreter runs."""
    if engine.interpreted:
        several = (*several[:1], *several[-1:])[: len(several)]
    for flags in filter(problem.allows, several):
        check(engine, problem, flags)


def dtypes(tree: PyTree) -> list[torch.dtype]:
    return [leaf.dtype for leaf in tree_leaves(tree)]
