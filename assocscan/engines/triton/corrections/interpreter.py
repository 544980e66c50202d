"""Triton's interpreter, with bfloat16 rounded as GPUs do, and faster.

As it comes, its conversions between bfloat16 and float32 truncate and lose denormals, and its
products of bfloat16 multiply the bits as integers; Triton 3.6 to 3.8 cannot use a tensor as a loop
bound with numpy 2.4. Its scan calls the combine function once per element, about 1 ms each; here
the same function is called on whole blocks. The replacements hold during this package's launches
alone: other kernels in the process find Triton's own. Imported only where TRITON_INTERPRET is set.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


def scan_blocks(ops: Any, inputs: tuple[Any, ...]) -> list[Any]:
    """The inclusive scan along `ops.axis`, doubling the distance at each level."""
    axis, values = ops.axis, [t.handle.data for t in inputs]
    length, distance = values[0].shape[axis], 1
    place = np.arange(length).reshape([-1 if d == axis else 1 for d in range(values[0].ndim)])
    while distance < length:
        source = np.maximum(np.arange(length) - distance, 0)
        early = [
            ops.to_tensor(v.take(source, axis), t.dtype)
            for v, t in zip(values, inputs, strict=True)
        ]
        late = [ops.to_tensor(v, t.dtype) for v, t in zip(values, inputs, strict=True)]
        found = ops.combine_fn.fn(*early, *late)
        found = found if isinstance(found, tuple) else (found,)
        values = [
            np.where(place < distance, v, f.handle.data) for v, f in zip(values, found, strict=True)
        ]
        distance *= 2
    return [ops.to_tensor(v, t.dtype) for v, t in zip(values, inputs, strict=True)]


def convert(source: np.ndarray, narrow: bool) -> np.ndarray:
    """float32 to the bits of bfloat16, or back."""
    source = np.ascontiguousarray(source)
    if narrow:
        return torch.from_numpy(source).bfloat16().view(torch.int16).numpy().view(np.uint16)
    return torch.from_numpy(source.view(np.int16)).view(torch.bfloat16).float().numpy()


def call_device_function(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Without patching the language once more: the launch of the kernel has done that, but for
    functions of Triton's own library, which see it by another name."""
    if self.fn.__module__.startswith("triton."):
        interpreter._patch_lang(self.fn)
    return self.rewrite()(*args, **kwargs)


@functools.cache
def replacements() -> tuple[tuple[Any, str, Any], ...]:
    """(object, attribute, replacement), made once from what Triton has."""
    builder = interpreter.InterpreterBuilder
    cast, dot, patch_tensor = builder.cast_impl, builder.create_dot, interpreter._patch_lang_tensor

    def cast_exactly(self: Any, source: Any, kind: Any) -> Any:
        pair = (source.dtype.scalar, kind.scalar)
        if pair not in ((tl.float32, tl.bfloat16), (tl.bfloat16, tl.float32)):
            return cast(self, source, kind)
        return interpreter.TensorHandle(convert(source.data, pair[0] == tl.float32), kind.scalar)

    def dot_exactly(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, *(_wide(factor) for factor in (a, b)), *rest)

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return (
        (interpreter.InterpretedFunction, "__call__", call_device_function),
        (interpreter.ScanOps, "generic_scan", scan_blocks),
        (builder, "cast_impl", cast_exactly),
        (builder, "create_dot", dot_exactly),
        (interpreter, "_patch_lang_tensor", patch_tensor_and_index),
    )


# Held during a launch: the interpreter keeps the program's place in one global object.
_LOCK = threading.RLock()


@contextlib.contextmanager
def corrected() -> Iterator[None]:
    """Launches in this context run with the replacements. numpy says nothing of infinities and NaN,
    which kernels compute with, in the lanes that pad a block from whatever was in memory before."""
    with _LOCK, np.errstate(all="ignore"), contextlib.ExitStack() as stack:
        for owner, name, replacement in replacements():
            before = owner.__dict__[name]
            setattr(owner, name, replacement)
            stack.callback(setattr, owner, name, before)
        yield


def _wide(factor: Any) -> Any:
    if factor.dtype.scalar != tl.bfloat16:
        return factor
    return interpreter.TensorHandle(convert(factor.data, False), tl.float32)
