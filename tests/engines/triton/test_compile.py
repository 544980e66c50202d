"""Every built-in operator compiles for NVIDIA and AMD GPUs, where there is none.

The scans run on meta tensors, which get the layouts and the tiles of GPU tensors, and every launch
compiles its kernel instead. That happens in processes of their own: where Triton interprets, it
cannot compile.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from gpu_targets import TARGETS, resource_usage, run_compiling
from operators import CASES as OPERATORS
from steps import gru
from torch import Tensor
from torch.utils._pytree import tree_leaves

from assocscan import associative_scan, monoid, nonlinear_recurrence, ops, reduce
from assocscan.engines.triton.corrections import lane_promises
from assocscan.engines.triton.kernel import Tile
from assocscan.engines.triton.prepare import LoadedKernel, float_options
from assocscan.engines.triton.tiles import forced
from assocscan.runtime import backends as engines

pytest.importorskip("triton", reason="Triton is not installed")

POINTERS = {
    torch.bool: "*i1", torch.uint8: "*u8", torch.int8: "*i8", torch.int16: "*i16",
    torch.int32: "*i32", torch.int64: "*i64", torch.float16: "*fp16", torch.bfloat16: "*bf16",
    torch.float32: "*fp32", torch.float64: "*fp64", torch.complex64: "*fp32",
    torch.complex128: "*fp64",
}  # fmt: skip
# Many chains of a long axis: [batch, axis] and [batch, axis, lanes].
ROWS, LANES = (4096, 8192), (16, 8192, 1024)
BF16, F32, I64 = torch.bfloat16, torch.float32, torch.int64


class Case(NamedTuple):
    """An operator, and the dtype and element shape of every leaf of its input."""

    op: Any
    leaves: tuple[tuple[torch.dtype, tuple[int, ...]], ...]

    @property
    def scalar(self) -> bool:
        return not any(shape for _, shape in self.leaves)

    def inputs(self, batch: Sequence[int], gradient: bool = False) -> Any:
        xs = tuple(meta(dtype, *batch, *shape) for dtype, shape in self.leaves)
        if gradient:
            for x in xs:
                x.requires_grad_(x.is_floating_point() or x.is_complex())
        return xs if len(xs) > 1 else xs[0]


def meta(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def case(op: Any, *leaves: torch.dtype) -> Case:
    return Case(op, tuple((dtype, ()) for dtype in leaves))


def matrices(op: Any, size: int) -> Case:
    leaves = ((F32, (size, size)), (F32, (size,)))
    return Case(op, leaves[:1] if op is ops.matmul else leaves)


CASES = {
    "sum": case(ops.sum, F32),
    "sum int64": case(ops.sum, I64),
    "prod": case(ops.prod, F32),
    "max": case(ops.max, F32),
    "max int64": case(ops.max, I64),
    "min": case(ops.min, F32),
    "any": case(ops.any, torch.bool),
    "all": case(ops.all, torch.bool),
    "xor": case(ops.xor, I64),
    "logaddexp": case(ops.logaddexp, F32),
    "argmax": case(ops.argmax, F32, I64),
    "argmin": case(ops.argmin, F32, I64),
    "affine": case(ops.affine, F32, F32),
    "affine bfloat16": case(ops.affine, BF16, BF16),
    "affine complex64": case(ops.affine, torch.complex64, torch.complex64),
    "mean": case(ops.mean, F32),
    "welford": case(ops.welford, F32),
    "matmul 2x2": matrices(ops.matmul, 2),
    "matmul 4x4": matrices(ops.matmul, 4),
    "matrix_affine 2x2": matrices(ops.matrix_affine, 2),
    "matrix_affine 4x4": matrices(ops.matrix_affine, 4),
}
# The rest of the table of operators, in float32; one kernel each.
NARROW = {torch.float64: F32}
LIBRARY = {
    op.op.name: Case(
        op.op,
        tuple((NARROW.get(x.dtype, x.dtype), tuple(x.shape)) for x in tree_leaves(op.sample())),
    )
    for op in OPERATORS
    if not op.label and op.op.name not in {case.op.name for case in CASES.values()}
}
# Their derivatives are the elements of one scan; the others' choose between elements.
SMOOTH = ("sum", "prod", "logaddexp", "affine", "affine bfloat16", "affine complex64", "mean",
          "welford", "matmul 2x2", "matrix_affine 2x2")  # fmt: skip
# Of the scalar ones, those that keep a few registers in local memory, by Triton 3.6 or 3.8.
SPILLING = {
    "rows": {"argmax", "argmin", "welford backward"},
    "lanes": {"affine complex64", "affine complex64 backward", "mean backward"},
}  # fmt: skip


class Compiled(NamedTuple):
    """One kernel: what it is, and what a thread of it takes where that is known."""

    name: str
    target: str
    flags: dict[str, Any]
    registers: int | None = None
    stack: int | None = None
    error: str | None = None

    @property
    def is_scalar(self) -> bool:
        return CASES[self.name.removesuffix(" backward")].scalar


# In the process that compiles.


class Compiler:
    """Stands in for `LoadedKernel.launch`."""

    def __init__(self) -> None:
        self.target, self.name = "sm_90", ""
        self.compiled: list[Compiled] = []

    def launch(self, loaded: LoadedKernel, given: Sequence[Tensor]) -> None:
        kernel = loaded.kernel
        flags = {
            "lanes": kernel.lanes, "single": kernel.single, "cut": kernel.cut,
            "packed": kernel.packed, "wide": kernel.wide, "reverse": kernel.reverse,
            "exclusive": kernel.exclusive, "init": kernel.init is not None,
            "final": bool(kernel.final), "tile": str(kernel.tile),
        }  # fmt: skip
        done = Compiled(self.name, self.target, flags)
        try:
            binary = compile_kernel(loaded, given, self.target)
        except Exception as error:  # all that fail are to be shown
            done = done._replace(error=f"{type(error).__name__}: {error}")
        else:
            if "cubin" in binary:
                registers, stack = resource_usage(binary["cubin"])
                done = done._replace(registers=registers, stack=stack)
        self.compiled.append(done)


def compile_kernel(loaded: LoadedKernel, given: Sequence[Tensor], target: str) -> dict[str, Any]:
    """The kernel as Triton's launcher would specialise it, with every pointer aligned."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kinds = [POINTERS[t.dtype] for t in given]
    constants, attributes = {}, {(k,): [["tt.divisibility", 16]] for k in range(len(given))}
    for k, n in enumerate(loaded.integers, len(given)):
        kinds.append("constexpr" if n == 1 else "i32" if n < 2**31 else "i64")
        if n == 1:
            constants[(k,)] = 1
        elif n % 16 == 0:
            attributes[(k,)] = [["tt.divisibility", 16]]
    signature = dict(zip(loaded.function.arg_names, kinds, strict=True))
    source = ASTSource(loaded.function, signature, constants, attributes)
    gpu = GPUTarget(*TARGETS[target])
    options = {"num_warps": loaded.kernel.tile.warps, **float_options(gpu.backend, loaded.fused)}
    with lane_promises.mended():  # Triton keeps what is compiled here
        return compile(source, target=gpu, options=options).asm


def forward(case: Case, batch: Sequence[int], **options: Any) -> Any:
    return associative_scan(case.op, case.inputs(batch), 1, **{"backend": "triton", **options})


def backward(case: Case, batch: Sequence[int]) -> None:
    """The forward scan that saves what the backward scan needs, and that one."""
    xs = case.inputs(batch, gradient=True)
    ys = tree_leaves(associative_scan(case.op, xs, 1, backend="triton"))
    smooth = [y for y in ys if y.requires_grad]
    torch.autograd.grad(smooth, tree_leaves(xs), [torch.empty_like(y) for y in smooth])


def all_operators(compiler: Compiler, batch: Sequence[int]) -> None:
    for name, case in CASES.items():
        compiler.name = name
        forward(case, batch)
        if name in SMOOTH:
            compiler.name = f"{name} backward"
            backward(case, batch)


OTHERS = tuple(name for name in TARGETS if name != "sm_90")


def other_targets(compiler: Compiler) -> None:
    """Every operator for one of the other targets, by rows or by lanes, in turns."""
    for k, (name, case) in enumerate(CASES.items()):
        compiler.name, compiler.target = name, OTHERS[k % len(OTHERS)]
        by_lanes = case.scalar and "complex" not in name and k // len(OTHERS) % 2 == 1
        forward(case, LANES if by_lanes else ROWS)
    for name, target, batch in (("affine", "gfx942", LANES), ("welford", "sm_80", ROWS)):
        compiler.name, compiler.target = f"{name} backward", target
        backward(CASES[name], batch)


def library(compiler: Compiler) -> None:
    """By rows and by lanes and for every target, in turns; and without outputs. On small tiles,
    which compile three times faster; the operators of CASES are compiled on those that run."""
    rows, lanes = Tile(1, 64, 1, 1), Tile(32, 4, 2, 1)
    for k, (name, case) in enumerate(LIBRARY.items()):
        compiler.name, compiler.target = name, tuple(TARGETS)[k % len(TARGETS)]
        by_lanes = case.scalar and k % 2 == 1
        with forced(lanes if by_lanes else rows):
            forward(case, LANES if by_lanes else ROWS)
    compiler.target = "sm_90"
    for name, case in (("affine", CASES["affine"]), ("se3", LIBRARY["se3"])):
        for backend in ("triton", "multipass"):
            compiler.name = f"{name} reduced"
            with forced(rows):
                reduce(case.op, case.inputs((3, 100_000)), 1, backend=backend)


def mixed(left: Any, right: Any) -> Any:
    """A bool beside a float, which is what totals are converted for."""
    return left[0] & right[0], left[1] + right[1] * left[0].to(F32)


MIXED = case(monoid(mixed, identity=(True, 0.0), name="compile_mixed"), torch.bool, F32)
BACKWARDS = {"reverse": True, "inclusive": False, "return_final": True}


def variants(compiler: Compiler) -> None:
    """What else a kernel can be: for one component, and a part of it for a bool beside a float."""
    for batch in (ROWS, LANES):
        compiler.name = "sum"
        outer = (batch[0], *batch[2:])
        packed = {"offsets": torch.tensor([0, 5, 5, batch[1]])}
        sum_, length = CASES["sum"], 2**31 // batch[0] + 2**16
        forward(sum_, (batch[0], 100, *batch[2:]))
        forward(sum_, batch, reverse=True)
        forward(sum_, batch, inclusive=False)
        forward(sum_, batch, init=sum_.inputs(outer), return_final=True)
        forward(sum_, batch, **packed)
        forward(sum_, batch, init=sum_.inputs((3, *outer)), **packed, **BACKWARDS)
        forward(sum_, (batch[0], length, *batch[2:]), reverse=True)
        compiler.name = "mixed"
        forward(MIXED, batch, init=MIXED.inputs(outer), **BACKWARDS)
    compiler.name = "sum multipass"
    offsets = torch.tensor([0, 5, 5, 70_000, 100_000])
    for batch in ((3, 100_000), (1, 100_000, 33)):
        forward(CASES["sum"], batch, backend="multipass")
        forward(CASES["sum"], batch, backend="multipass", offsets=offsets, **BACKWARDS)


def walked(compiler: Compiler) -> None:
    """Steps that are not associative, and their derivatives."""
    lanes, rows = (8, 8192, 1536), (4096, 8192)
    for target, name, dtype, shape in (
        ("sm_90", "lanes", F32, lanes), ("sm_90", "lanes", BF16, lanes),
        ("sm_90", "rows", F32, rows), ("gfx942", "lanes", F32, lanes),
    ):  # fmt: skip
        compiler.name, compiler.target = f"gru {name}", target
        xs = tuple(meta(dtype, *shape).requires_grad_() for _ in range(3))
        weights = tuple(meta(dtype, *shape[2:]).requires_grad_() for _ in range(3))
        h = nonlinear_recurrence(gru, xs, 0.0, params=weights, backend="triton")
        compiler.name = f"gru {name} backward"
        torch.autograd.grad(h, [*xs, *weights], torch.empty_like(h))


GROUPS: dict[str, Callable[[Compiler], None]] = {
    "rows": lambda compiler: all_operators(compiler, ROWS),
    "lanes": lambda compiler: all_operators(compiler, LANES),
    "other targets": other_targets,
    "library": library,
    "variants": variants,
    "walked": walked,
}


def compile_group(group: str) -> list[Compiled]:
    compiler = Compiler()
    LoadedKernel.launch = lambda loaded, given: compiler.launch(loaded, given)  # type: ignore
    engines.why_not = lambda call, backend: None  # meta tensors are not on a GPU
    GROUPS[group](compiler)
    return compiler.compiled


# In the process of the tests.


def compiled(group: str) -> list[Compiled]:
    """Every kernel of the group. Fails with those that do not compile."""
    said = run_compiling(Path(__file__), group)
    found = [Compiled(*fields) for fields in json.loads(said.splitlines()[-1])]
    failed = [f"{c.name}, {c.target}, {c.flags}: {c.error}" for c in found if c.error is not None]
    assert not failed, "\n".join(failed)
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("group", ["rows", "lanes"])
def test_every_operator(group: str) -> None:
    found = compiled(group)
    assert {c.name for c in found} == {*CASES, *(f"{name} backward" for name in SMOOTH)}
    assert all(c.flags["lanes"] == (group == "lanes") for c in found)
    spilled = {c.name: c.stack for c in found if c.stack and c.is_scalar}
    assert spilled.keys() <= SPILLING[group], spilled
    assert max(spilled.values(), default=0) <= 80, spilled


@pytest.mark.exhaustive
def test_other_targets() -> None:
    found = compiled("other targets")
    assert {c.name for c in found} == {*CASES, "affine backward", "welford backward"}
    kinds = {(c.target, c.flags["lanes"]) for c in found}
    assert kinds == {(target, lanes) for target in OTHERS for lanes in (True, False)}


@pytest.mark.exhaustive
def test_library() -> None:
    """Every other operator; a reduction has no kernel that scans its chunks again."""
    found = compiled("library")
    assert {c.name for c in found} == {*LIBRARY, "affine reduced", "se3 reduced"}
    reductions = [c.flags for c in found if c.name.endswith("reduced")]
    assert {(f["cut"], f["packed"]) for f in reductions} == {("whole", False), ("whole", True)}


@pytest.mark.exhaustive
def test_variants() -> None:
    """Each flag is met with each value, by rows and by lanes."""
    found = compiled("variants")
    for lanes in (True, False):
        flags = [c.flags for c in found if c.flags["lanes"] == lanes]
        for name in ("packed", "wide", "reverse", "exclusive", "init", "final"):
            assert {f[name] for f in flags} == {True, False}, name
        cuts = {(f["cut"], f["packed"]) for f in flags}
        assert cuts == {(cut, p) for cut in ("whole", "totals", "rescan") for p in (True, False)}


@pytest.mark.exhaustive
def test_walked() -> None:
    found = compiled("walked")
    assert len(found) == 8 and {c.target for c in found} == {"sm_90", "gfx942"}
    assert not any(c.stack for c in found), [(c.name, c.target, c.stack) for c in found]


def test_every_operator_is_here() -> None:
    here = {case.op.name for case in (*CASES.values(), *LIBRARY.values())}
    assert here == set(ops.__all__)


if __name__ == "__main__":
    print(json.dumps(compile_group(sys.argv[1])))
