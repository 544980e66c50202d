"""Every scalar operation, rendered as Triton, against the same program rendered as C++.

The Triton text runs in Triton's interpreter, or on the GPU where there is one; and it is compiled
for NVIDIA and AMD, as a function of tiles and as the function that a scan combines with.
"""

import ctypes
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from gpu_targets import TARGETS, run_compiling
from table import sampled
from torch import Tensor

from assocscan.engines.cpu import compiler
from assocscan.engines.triton import loader as triton_loader
from assocscan.program.cpp_and_triton_expressions import CPP, LIBRARY, TRITON
from assocscan.program.dtypes import INT_BITS
from assocscan.program.program_builder import COMPARISONS, Builder, Program

pytest.importorskip("triton", reason="Triton is not installed")

DTYPES = {
    "b1": torch.bool, "u8": torch.uint8, "i8": torch.int8, "i16": torch.int16,
    "i32": torch.int32, "i64": torch.int64, "f32": torch.float32, "f64": torch.float64,
}  # fmt: skip
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

ANY = {*COMPARISONS, "add", "sub", "mul", "min", "max", "where", "detach"}
WHOLE = {"and", "or", "xor", "not"}
NUMBER = {"neg", "abs", "signbit", "fmin", "fmax", "floordiv", "remainder", "fmod", "pow"}
REAL = {"isnan", "isinf", "floor", "ceil", "round", "trunc", "sqrt", "rsqrt", "sigmoid", "div",
        "copysign", *LIBRARY}  # fmt: skip
OPERATIONS = {
    "b1": ANY | WHOLE,
    **dict.fromkeys(INT_BITS, ANY | WHOLE | NUMBER | {"shl", "shr", "truncdiv"}),
    "f32": ANY | NUMBER | REAL | {"round_f16", "round_bf16"},
    "f64": ANY | NUMBER | REAL,
}
BINARY = (COMPARISONS | {"add", "sub", "mul", "div", "min", "max", "fmin", "fmax", "and", "or",
          "xor", "shl", "shr", "floordiv", "truncdiv", "remainder", "fmod", "pow", "copysign",
          "atan2", "hypot"})  # fmt: skip
# Denormals are not flushed in libdevice, and multiplications and additions not fused.
OPTIONS = {
    "cuda": {"enable_reflect_ftz": False, "enable_fp_fusion": False},
    "hip": {"enable_fp_fusion": False},
}
# Of these the last bits may differ.
INEXACT = LIBRARY | {"pow", "rsqrt", "sigmoid"}


def edges(kind: str) -> Tensor:
    """Values at which something special happens."""
    dtype = DTYPES[kind]
    if kind == "b1":
        return torch.tensor([False, True])
    if kind in INT_BITS:
        info, bits = torch.iinfo(dtype), INT_BITS[kind]
        values = {0, 1, 2, 3, 5, 7, 31, bits - 1, bits, bits + 1, 100, info.max, info.max - 1}
        if kind != "u8":
            values |= {-1, -2, -3, -7, -bits, -100, info.min, info.min + 1}
        return torch.tensor(sorted(values), dtype=dtype)
    info = torch.finfo(dtype)
    positive = [0.0, info.smallest_normal / 8, info.smallest_normal, 0.3, 0.5, 1.0, 1.5, 2.0, 2.5,
                3.0, 7.0, 30.0, 88.5, 127.5, 128.0, 255.0, 1025.0, 65519.0, 65520.0, 2.0**31,
                2.0**31 - 1, 2.0**63, 0.75 * info.max, math.inf, math.nan,
                1.00390625, 1.01171875]  # fmt: skip
    return torch.tensor([s * v for v in positive for s in (1.0, -1.0)], dtype=dtype)


def everything(kind: str) -> tuple[Program, list[str]]:
    """The program of all operations on two inputs of a dtype, and the operation of each output."""
    builder = Builder((kind, kind))
    named = {}
    for op in sorted(OPERATIONS[kind] - {"where"}):
        named[op] = builder.emit(op, *((0, 1) if op in BINARY else (0,)))
    named["where"] = builder.emit("where", named["eq"], 1, 0)
    for target in DTYPES:
        if target != kind:
            named[f"to {target}"] = builder.cast(0, target)
    return builder.build(list(named.values())), list(named)


def constants() -> Program:
    """The edge values of every dtype, as constants."""
    builder = Builder(("i32", "i32"))
    return builder.build([builder.const(v, d) for d in DTYPES for v in edges(d).tolist()])


def cpp_text(program: Program) -> str:
    """`assocscan_run({size, x, y, outputs…})`."""
    types = [CPP.types[d] for d in (*program.inputs, *program.output_dtypes)]
    pointers = [f"auto p{k} = ({t}*)p[{k + 1}];" for k, t in enumerate(types)]
    targets = [f"p{k + 2}[i]" for k in range(len(program.outputs))]
    body = CPP.statements(program, ["p0[i]", "p1[i]"], targets)
    head = '#include "scalar.h"\nextern "C" void assocscan_run(void** p) {'
    loop = "for (int64_t i = 0; i < (int64_t)p[0]; ++i) {"
    return "\n".join([head, *pointers, loop, *body, "}}", ""])


HEADER = """import triton
import triton.language as tl

from assocscan.engines.triton import scalar
"""
AT = {
    "tiles": "tl.program_id(0) * SIZE + tl.arange(0, SIZE)",
    "scalars": "tl.program_id(0)",
}


def function(signature: str, body: Sequence[str]) -> str:
    return f"\n\n@triton.jit\ndef {signature}:\n" + "".join(f"    {line}\n" for line in body)


def triton_text(program: Program, shape: str) -> str:
    """`scan(x, y, outputs…, SIZE)`: a program takes a tile of SIZE pairs, or one pair."""
    lines, results = TRITON.values(program, ["x", "y"])
    outputs = [f"p{k}" for k in range(len(results))]
    loads = ["x = tl.load(x_ptr + at)", "y = tl.load(y_ptr + at)"]
    stores = [f"tl.store({p} + at, {r})" for p, r in zip(outputs, results, strict=True)]
    signature = f"scan(x_ptr, y_ptr, {', '.join(outputs)}, SIZE: tl.constexpr)"
    return HEADER + function(signature, [f"at = {AT[shape]}", *loads, *lines, *stores])


def scan_text(program: Program) -> str:
    """`scan(x, y, SIZE)`: a scan whose combine function, not associative, sums all results."""
    lines, results = TRITON.values(program, ["x", "y"])
    total = " + ".join(f"{r}.to({TRITON.types[program.inputs[0]]})" for r in results)
    body = ["at = tl.arange(0, SIZE)", "x = tl.load(x_ptr + at)",
            "tl.store(y_ptr + at, tl.associative_scan(x, 0, combine))"]  # fmt: skip
    combine = function("combine(x, y)", [*lines, f"return {total}"])
    return HEADER + combine + function("scan(x_ptr, y_ptr, SIZE: tl.constexpr)", body)


def run_cpp(program: Program, x: Tensor, y: Tensor) -> list[Tensor]:
    if compiler.why_unavailable() is not None:
        pytest.skip(f"nothing to compare with: {compiler.why_unavailable()}")
    outputs = [torch.empty(len(x), dtype=DTYPES[d]) for d in program.output_dtypes]
    pointers = [t.data_ptr() for t in (x, y, *outputs)]
    arguments = (ctypes.c_int64 * (len(pointers) + 1))(len(x), *pointers)
    compiler.load(cpp_text(program))(arguments)
    return outputs


def run_triton(program: Program, x: Tensor, y: Tensor, shape: str = "tiles") -> list[Tensor]:
    outputs = [torch.empty(len(x), dtype=DTYPES[d], device=DEVICE) for d in program.output_dtypes]
    options = {} if DEVICE == "cpu" else OPTIONS["cuda"]
    # The interpreter is slow per program, the compiler per element of a thread.
    size = 1 if shape == "scalars" else len(x) if DEVICE == "cpu" else min(len(x), 128)
    kernel = triton_loader.load(triton_text(program, shape))
    grid = (len(x) // size,)
    triton_loader.launch(kernel, grid, x.to(DEVICE), y.to(DEVICE), *outputs, SIZE=size, **options)
    return [t.cpu() for t in outputs]


def padded(x: Tensor) -> Tensor:
    """Repeated up to a power of two."""
    size = 1 << (len(x) - 1).bit_length()
    return x.repeat(-(-size // len(x)))[:size].contiguous()


def compare(name: str, got: Tensor, wanted: Tensor, operands: Sequence[Tensor]) -> None:
    if name in INEXACT:
        torch.testing.assert_close(got, wanted, equal_nan=True, msg=lambda m: f"{name}: {m}")
        return
    differ = got != wanted
    if got.is_floating_point():
        differ = (differ & ~(got.isnan() & wanted.isnan())) | (
            (got == 0) & (wanted == 0) & (got.signbit() != wanted.signbit())
        )
    if differ.any():
        k = int(differ.nonzero()[0])
        values = ", ".join(repr(t[k].item()) for t in operands)
        pytest.fail(f"{name}({values}) = {got[k].item()!r}, in C++ {wanted[k].item()!r}")


@pytest.mark.thinned(4)
@pytest.mark.parametrize("kind", DTYPES)
def test_operations(kind: str) -> None:
    program, names = everything(kind)
    x, y = (padded(t) for t in torch.cartesian_prod(edges(kind), edges(kind)).unbind(1))
    results = zip(names, run_triton(program, x, y), run_cpp(program, x, y), strict=True)
    for name, got, wanted in results:
        compare(name, got, wanted, (x, y))


@pytest.mark.thinned(4)
@pytest.mark.parametrize("kind", DTYPES)
def test_scalars(kind: str) -> None:
    program, names = everything(kind)
    x = edges(kind)
    y = x.roll(len(x) // 3)
    for name, *values in zip(
        names, run_triton(program, x, y, "scalars"), run_cpp(program, x, y), strict=True
    ):
        compare(name, *values, (x, y))


def test_constants() -> None:
    x = torch.zeros(4, dtype=torch.int32)
    program = constants()
    for got, wanted in zip(run_triton(program, x, x), run_cpp(program, x, x), strict=True):
        compare("constant", got, wanted, (wanted,))


def test_every_operation_is_here() -> None:
    known = {*CPP.operations, *CPP.functions, *LIBRARY}
    assert known - {"cast", "gcd"} == set().union(*OPERATIONS.values())


def test_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    """It lacks none today: one is taken away."""
    monkeypatch.delitem(TRITON.functions, "gcd")
    builder = Builder(("i32", "i32"))
    one = builder.build([builder.emit("add", 0, 1), builder.cast(0, "f32")])
    two = builder.build([builder.emit("mul", 0, builder.emit("gcd", 0, 1))])
    assert TRITON.unsupported(one, everything("f64")[0]) is None
    assert TRITON.unsupported(one, two) == "gcd"
    assert CPP.unsupported(one, two) is None


@pytest.mark.parametrize("target", sampled(TARGETS, ["sm_90"]))
def test_compilation(target: str) -> None:
    """In a process of its own: where Triton interprets, it cannot compile."""
    run_compiling(Path(__file__), target)


def compile_all(target: str) -> None:
    """All operations for one target: on tiles, as scalars in a scan, and all constants."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    programs = {kind: everything(kind)[0] for kind in DTYPES}
    pointers = {d: "*" + d.replace("b", "i").replace("f", "fp") for d in DTYPES}
    sources = [(p, triton_text(p, "tiles")) for p in (*programs.values(), constants())]
    sources += [(programs[kind].select([]), scan_text(programs[kind])) for kind in ("i16", "f32")]
    for program, text in sources:
        kernel = triton_loader.load(text)
        kinds = [pointers[d] for d in (*program.inputs, *program.output_dtypes)]
        signature = dict(zip(kernel.arg_names, [*kinds, "constexpr"], strict=True))
        ast = ASTSource(kernel, signature=signature, constexprs={"SIZE": 128})
        gpu = GPUTarget(*TARGETS[target])
        compile(ast, target=gpu, options=OPTIONS[gpu.backend])


if __name__ == "__main__":
    compile_all(sys.argv[1])
