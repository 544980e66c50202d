"""A `Program` run by torch on tensors, one per input: for checks, never for speed.

Floating-point values are computed in float64 whatever their dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .program import Program, decode

TORCH_DTYPES = {
    "b1": torch.bool, "u8": torch.uint8, "i8": torch.int8, "i16": torch.int16,
    "i32": torch.int32, "i64": torch.int64, "f32": torch.float64, "f64": torch.float64,
}  # fmt: skip

Function = Callable[..., torch.Tensor]

OPERATIONS: dict[str, Function] = {
    "div": torch.true_divide, "min": torch.minimum, "max": torch.maximum,
    "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor,
    "not": torch.bitwise_not, "shl": torch.bitwise_left_shift, "shr": torch.bitwise_right_shift,
    "floordiv": torch.floor_divide, "atan2": torch.atan2, "detach": torch.clone,
    "truncdiv": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "round_f16": lambda a: a.half().double(), "round_bf16": lambda a: a.bfloat16().double(),
}  # fmt: skip


def evaluate(program: Program, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs of `program`; other operations have torch's own name."""
    values = [t.to(TORCH_DTYPES[kind]) for t, kind in zip(inputs, program.inputs, strict=True)]
    for i in program.instructions:
        dtype = TORCH_DTYPES[i.dtype]
        if i.op == "const":
            values.append(torch.tensor(decode(i.literal), dtype=dtype))
        elif i.op == "cast":
            values.append(values[i.args[0]].to(dtype))
        else:
            function = OPERATIONS.get(i.op) or getattr(torch, i.op)
            values.append(function(*(values[a] for a in i.args)))
    return [values[v] for v in program.outputs]
