"""A `Program` run by torch on tensors, one per input: for checks, and as a last resort.

Integer division by zero and wide shifts give what generated code gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..program.dtypes import EXACT_DTYPES
from ..program.program_builder import Program, decode

# With floating-point values in float64 whatever their dtype, for checks.
TORCH_DTYPES = EXACT_DTYPES | {"f32": torch.float64}

Function = Callable[..., torch.Tensor]


def division(function: Function, by_minus_one: Function) -> Function:
    """An integer division, or its remainder: 0 where the divisor is 0, and wrapping for -1."""

    def divide(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if a.is_floating_point():
            return function(a, b)
        minus_one = (b == -1) & (b < 0)
        plain = function(a, torch.where((b == 0) | minus_one, torch.ones_like(b), b))
        found = torch.where(minus_one, by_minus_one(a), plain)
        return torch.where(b == 0, torch.zeros_like(found), found)

    return divide


def shift(function: Function) -> Function:
    """A shift by any number: by a negative one or by the width or more, all bits leave."""

    def by(a: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        width = 8 * a.dtype.itemsize
        wide = (n < 0) | (n >= width)
        shifted = function(a, torch.where(wide, torch.zeros_like(n), n))
        beyond = -(a < 0).to(a.dtype) if function is torch.bitwise_right_shift else 0 * a
        return torch.where(wide, beyond, shifted)

    return by


def arithmetic(function: Function, on_bools: Function) -> Function:
    """An operation that torch refuses on bools."""
    return lambda *values: (on_bools if values[0].dtype == torch.bool else function)(*values)


OPERATIONS: dict[str, Function] = {
    "div": torch.true_divide, "min": torch.minimum, "max": torch.maximum,
    "sub": arithmetic(torch.sub, torch.logical_xor), "neg": arithmetic(torch.neg, torch.clone),
    "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor,
    "not": torch.bitwise_not, "atan2": torch.atan2, "detach": torch.detach,
    "shl": shift(torch.bitwise_left_shift), "shr": shift(torch.bitwise_right_shift),
    "floordiv": division(torch.floor_divide, torch.neg),
    "truncdiv": division(lambda a, b: torch.div(a, b, rounding_mode="trunc"), torch.neg),
    "remainder": division(torch.remainder, torch.zeros_like),
    "fmod": division(torch.fmod, torch.zeros_like),
    "round_f16": lambda a: a.half().to(a.dtype), "round_bf16": lambda a: a.bfloat16().to(a.dtype),
}  # fmt: skip


# The states are the last dimension, which has size 1 in a value that does not vary along them.
REDUCTIONS: dict[str, Function] = {
    "sum_states": lambda a: a.sum(-1, keepdim=True, dtype=a.dtype),
    "max_states": lambda a: a.amax(-1, keepdim=True),
    "min_states": lambda a: a.amin(-1, keepdim=True),
}
OPERATIONS.update(REDUCTIONS)


def evaluate(
    program: Program, inputs: Sequence[torch.Tensor], dtypes: dict[str, torch.dtype] = TORCH_DTYPES
) -> list[torch.Tensor]:
    """The outputs of `program`; other operations have torch's own name."""
    values = [t.to(dtypes[kind]) for t, kind in zip(inputs, program.inputs, strict=True)]
    device = inputs[0].device if inputs else None
    for i in program.instructions:
        dtype = dtypes[i.dtype]
        if i.op == "const":
            values.append(torch.tensor(decode(i.literal), dtype=dtype, device=device))
        elif i.op == "cast":
            values.append(values[i.args[0]].to(dtype))
        else:
            function = OPERATIONS.get(i.op) or getattr(torch, i.op)
            values.append(function(*(values[a] for a in i.args)))
    return [values[v] for v in program.outputs]
