"""Programs as source code: one class per language, whose body is tables, and one walk for all.

What a language lacks, or leaves undefined (integer division by zero, wide shifts, casts out of
range), is in functions of the same names: `engines/base/cpp_and_cuda/scalar.h` for C++, CUDA C++
included, and `engines/triton/scalar.py` for Triton.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from .dtypes import CPP_TYPES, FLOATS, INT_BITS, TRITON_TYPES
from .program_builder import Instruction, Number, Program, decode
from .rewriting.joint_functions import with_joint_functions

LIBRARY = frozenset(
    "exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh "
    "atanh erf erfc atan2 hypot".split()
)


class Renderer:
    """A language: its tables, and the walk over a program.

    In a pattern {0}, {1}, {2} are operands and {T} is the result's type. `operations` holds for
    all operands, `by_operand` for those of one dtype, which goes first. Other operations call one
    of `functions`, or one of LIBRARY, whose names `library` completes. `joint_functions` are those
    that `rewriting` puts in place of several.
    """

    types: ClassVar[dict[str, str]]
    operations: ClassVar[dict[str, str]]
    by_operand: ClassVar[dict[str, dict[str, str]]] = {}
    functions: ClassVar[dict[str, str]]
    joint_functions: ClassVar[dict[str, str]] = {}
    library: ClassVar[str]
    definition: ClassVar[str]

    def literal(self, value: Number, dtype: str) -> str:
        """A constant with exactly this value and dtype."""
        raise NotImplementedError

    def pattern(self, op: str, operand: str, result: str) -> str | None:
        """The pattern of an operation on operands of one dtype; None if it is a call."""
        return self.by_operand.get(operand, {}).get(op) or self.operations.get(op)

    def expression(
        self, instruction: Instruction, names: Sequence[str], dtypes: Sequence[str]
    ) -> str:
        """The right-hand side of one instruction, given the name and dtype of every value."""
        op, args, dtype = instruction.op, instruction.args, instruction.dtype
        if op == "const":
            return self.literal(decode(instruction.literal), dtype)
        operands = [names[a] for a in args]
        pattern = self.pattern(op, dtypes[args[-1]], dtype)
        if pattern is not None:
            return pattern.format(*operands, T=self.types[dtype])
        function = self.functions.get(op) or self.joint_functions.get(op)
        if function is None:
            assert op in LIBRARY, op
            function = self.library.format(op)
        return f"{function}({', '.join(operands)})"

    def values(
        self, program: Program, inputs: Sequence[str], prefix: str = "v"
    ) -> tuple[list[str], list[str]]:
        """The lines that define the program's values, and the names of its outputs."""
        names = list(inputs)
        lines = []
        for k, i in enumerate(program.instructions):
            value = self.expression(i, names, program.dtypes)
            names.append(f"{prefix}{k}")
            lines.append(self.definition.format(T=self.types[i.dtype], name=names[-1], value=value))
        return lines, [names[v] for v in program.outputs]

    def unsupported(self, *programs: Program) -> str | None:
        """The first operation that this language cannot express."""
        known = {"const", *LIBRARY, *self.functions, *self.operations}
        known.update(*self.by_operand.values())
        ops = (i.op for program in programs for i in program.instructions)
        return next((op for op in ops if op not in known), None)


class Cpp(Renderer):
    """C++, with the functions of `scalar.h`. Small integers are computed as int and cut."""

    types = CPP_TYPES
    operations: ClassVar = {
        "add": "({T})({0} + {1})", "sub": "({T})({0} - {1})", "mul": "({T})({0} * {1})",
        "neg": "({T})(-{0})", "div": "{0} / {1}",
        "and": "({T})({0} & {1})", "or": "({T})({0} | {1})", "xor": "({T})({0} ^ {1})",
        "eq": "{0} == {1}", "ne": "{0} != {1}", "lt": "{0} < {1}", "le": "{0} <= {1}",
        "gt": "{0} > {1}", "ge": "{0} >= {1}",
        "where": "{0} ? {1} : {2}", "detach": "{0}", "cast": "cast<{T}>({0})",
    }  # fmt: skip
    _REAL: ClassVar = {"add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "neg": "-{0}"}
    by_operand: ClassVar = {"f32": _REAL, "f64": _REAL}
    functions: ClassVar = {
        "abs": "absolute", "min": "minimum", "max": "maximum", "not": "bit_not",
        "fmin": "smaller_number", "fmax": "larger_number",
        "shl": "shift_left", "shr": "shift_right", "floordiv": "floor_divide",
        "truncdiv": "trunc_divide", "remainder": "remainder_of", "fmod": "fmod_of",
        "pow": "power", "gcd": "gcd_of", "isnan": "is_nan", "isinf": "is_inf",
        "signbit": "is_negative", "rsqrt": "reciprocal_sqrt", "sigmoid": "sigmoid",
        "round": "round_even", "round_f16": "round_f16", "round_bf16": "round_bf16",
        "floor": "round_down", "ceil": "round_up", "trunc": "round_to_zero",
        "sqrt": "square_root", "copysign": "copy_sign", "exp": "exp_of", "expm1": "expm1_of",
        "log": "log_of", "log1p": "log1p_of", "tanh": "tanh_of",
        "sin": "sin_of", "cos": "cos_of",
    }  # fmt: skip
    joint_functions: ClassVar = {
        "log1p_exp": "log1p_exp_of", "log1p_signed_exp": "log1p_signed_exp",
        "exp_of_peak": "exp_of_peak", "log_of_sum": "log_of_sum", "peak": "peak_of",
    }  # fmt: skip
    library: ClassVar = "libm::{}"
    definition: ClassVar = "const {T} {name} = {value};"

    def literal(self, value: Number, dtype: str) -> str:
        if dtype == "b1":
            return "true" if value else "false"
        if dtype not in FLOATS:
            if value == -(1 << 63):
                return "INT64_MIN"
            return f"{int(value)}LL" if dtype == "i64" else f"({self.types[dtype]}){int(value)}"
        suffix = "f" if dtype == "f32" else ""
        value = float(value)
        if math.isnan(value):
            return f'__builtin_nan{suffix}("")'
        if math.isinf(value):
            return f"{'-' if value < 0 else ''}__builtin_inf{suffix}()"
        exact = float(repr(value)) == value and abs(value) < 1e6 and value == int(value)
        return f"{value!r}{suffix}" if exact else f"{value.hex()}{suffix}"

    def values(
        self, program: Program, inputs: Sequence[str], prefix: str = "v"
    ) -> tuple[list[str], list[str]]:
        return super().values(with_joint_functions(program), inputs, prefix)

    def statements(
        self, program: Program, inputs: Sequence[str], outputs: Sequence[str], prefix: str = "v"
    ) -> list[str]:
        """Declarations of the program's values, then one assignment per output."""
        lines, results = self.values(program, inputs, prefix)
        assignments = zip(outputs, results, strict=True)
        return [*lines, *(f"{target} = {result};" for target, result in assignments)]

    def struct(self, name: str, fields: Sequence[tuple[str, str]]) -> str:
        """`struct State { float s0; float s1; };`"""
        body = " ".join(f"{type_} {field};" for type_, field in fields)
        return f"struct {name} {{ {body} }};"

    def function(self, signature: str, result: str, body: Sequence[str]) -> str:
        """An inline function that fills and returns one `result`."""
        return inline(signature, [f"{result} y;", *body, "return y;"], result)


def inline(signature: str, lines: Sequence[str], result: str = "void") -> str:
    """An inline function of these lines in C++."""
    return "\n".join([f"INLINE {result} {signature} {{", *(f"    {line}" for line in lines), "}"])


class Triton(Renderer):
    """Triton, with the functions of `engines/triton/scalar.py`, which the text calls `scalar`.

    Every constant is a tensor without dimensions, so that a value has the dtype that the program
    gives it, and so that the same text works on tiles and on the scalars inside a scan.
    """

    types = TRITON_TYPES
    operations: ClassVar = {
        "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "neg": "-{0}",
        "and": "{0} & {1}", "or": "{0} | {1}", "xor": "{0} ^ {1}", "not": "~{0}",
        "eq": "{0} == {1}", "ne": "{0} != {1}", "lt": "{0} < {1}", "le": "{0} <= {1}",
        "gt": "{0} > {1}", "ge": "{0} >= {1}",
        "where": "tl.where({0}, {1}, {2})", "detach": "{0}", "cast": "{0}.to({T})",
        "isnan": "{0} != {0}", "isinf": 'tl.abs({0}) == float("inf")',
        "round_f16": "{0}.to(tl.float16).to(tl.float32)",
    }  # fmt: skip
    # Triton's own -x is 0 - x, its f32 division and square root are approximate, and True < False.
    _REAL: ClassVar = {
        "neg": "{0} * -1.0", "min": "scalar.minimum({0}, {1})", "max": "scalar.maximum({0}, {1})",
        "fmod": "scalar.libdevice.fmod({0}, {1})", "pow": "scalar.libdevice.pow({0}, {1})",
    }  # fmt: skip
    by_operand: ClassVar = {
        "f32": _REAL | {"div": "tl.div_rn({0}, {1})", "sqrt": "tl.sqrt_rn({0})"},
        "f64": _REAL | {"div": "{0} / {1}", "sqrt": "tl.sqrt({0})"},
        "u8": {"not": "{0} ^ 255"},  # ~x fails in the interpreter of Triton 3.6
        "b1": {
            "add": "{0} | {1}", "sub": "{0} ^ {1}", "mul": "{0} & {1}",
            "min": "{0} & {1}", "max": "{0} | {1}",
            "lt": "~{0} & {1}", "le": "~{0} | {1}", "gt": "{0} & ~{1}", "ge": "{0} | ~{1}",
        },
    }  # fmt: skip
    functions: ClassVar = {
        "abs": "tl.abs", "min": "tl.minimum", "max": "tl.maximum",
        "floor": "tl.floor", "ceil": "tl.ceil",
        "fmin": "scalar.smaller_number", "fmax": "scalar.larger_number",
        "shl": "scalar.shift_left", "shr": "scalar.shift_right",
        "floordiv": "scalar.floor_divide", "truncdiv": "scalar.trunc_divide",
        "remainder": "scalar.remainder_of", "fmod": "scalar.fmod_of", "pow": "scalar.power",
        "signbit": "scalar.is_negative", "sigmoid": "scalar.sigmoid", "gcd": "scalar.gcd",
        "tanh": "scalar.tanh",
        "round_bf16": "scalar.round_bf16", "rsqrt": "scalar.libdevice.rsqrt",
        "round": "scalar.libdevice.nearbyint", "trunc": "scalar.libdevice.trunc",
        "copysign": "scalar.libdevice.copysign",
    }  # fmt: skip
    library: ClassVar = "scalar.libdevice.{}"
    definition: ClassVar = "{name} = {value}"

    def pattern(self, op: str, operand: str, result: str) -> str | None:
        if op == "cast" and operand in FLOATS and result in INT_BITS:
            return "scalar.float_to_int({0}, {T})"
        return super().pattern(op, operand, result)

    def literal(self, value: Number, dtype: str) -> str:
        if dtype == "b1":
            return f"tl.full((), {bool(value)}, tl.int1)"
        if dtype not in FLOATS:
            return f"tl.full((), {int(value)}, {self.types[dtype]})"
        value = float(value)
        if value == 0 and math.copysign(1.0, value) < 0:
            # tl.full makes +0.0 of -0.0.
            bits = -(1 << 31) if dtype == "f32" else -(1 << 63)
            integer = self.types["i" + dtype[1:]]
            return f"tl.full((), {bits}, {integer}).to({self.types[dtype]}, bitcast=True)"
        text = repr(value) if math.isfinite(value) else f'float("{value!r}")'
        return f"tl.full((), {text}, {self.types[dtype]})"


CPP = Cpp()
TRITON = Triton()
