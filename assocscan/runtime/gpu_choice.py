"""`auto` on GPUs: the single-pass CUDA engine, one Triton kernel, or the multi-pass engine.

Fractions of copy below are those of h[t] = a h[t−1] + b, measured on an H100 (132 multiprocessors,
2026-11-21) unless they say otherwise.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from ..cuda import launcher as cuda_launcher
from ..cuda import prepare as cuda_scan
from ..engines.base.device_properties import processors
from ..engines.base.executable import Executable
from ..engines.base.spec import ScanSpec, TensorSpec
from ..engines.triton import multipass
from ..engines.triton import prepare as triton_scan
from ..program.operator import Operator

Spec = ScanSpec[Operator]
Given = Sequence[TensorSpec | None]

# Contiguous rows by one Triton program each reach 0.99 to 1.01 on (12288, 8192) and (12288, 1024),
# by the CUDA engine 0.97 and 0.94 in float32, 0.96 and 0.92 in bfloat16. Fewer and longer rows need
# several blocks each: (64, 2^20) 0.66 against 0.98, (16, 65536) 0.33 against 0.66; (64, 4096) 0.85
# against 0.59, (132, 16384) 0.82 against 0.72.
MANY_ROWS = 2.0  # per multiprocessor
LONG_ROW, LONG_FEW_ROWS, FEW_ROWS = 1 << 15, 1 << 13, 32
# With faster memory (bytes per second and multiprocessor: 37e9 on an H200, 25e9 on an H100) long
# rows by Triton fall behind: 12288 rows of 8192 in float32 reach 0.90 on an H200, of 16384 in
# bfloat16 0.81, by the CUDA engine 1.00 and 0.96; half as long ones 1.02 and 0.95 (2026-11-22).
FAST_MEMORY = 30e9
LONG_ROW_BYTES = 24 << 10
# Triton's loads of rows in reverse are scalar: cumsum of (12288, 8192) 0.63 in float32, 0.33 in
# bfloat16; the backward pass there, a reverse scan of three inputs, 0.88 and 0.51 against 0.96 and
# 0.94.
# Short rows leave most of a CUDA tile empty: the backward pass of rows of 333 runs at 0.17 against
# 0.20, of 512 and more at 0.85 to 0.96 against 0.18 to 0.88.
SHORT_ROW = 512
# Adjacent lanes: 0.90 to 0.97 against 0.72 to 0.97 in float32 where chains are many, 0.78 to 0.92
# against 0.59 to 0.80 in bfloat16; where they are few, 0.90 against 0.05. Few steps fill no tile:
# a recurrence on (4, L, 5120), (64, L, 512) and (8, L, 1536) takes 0.93 to 1.08 times Triton's time
# for L = 8, 0.90 to 1.05 for 16, 0.81 to 1.02 for 32, 0.68 to 1.02 for 64 (H200, float32 and
# bfloat16, forward and backward).
SHORT_AXIS = 32
# Without the CUDA engine the axis is cut where it is long and programs are few: 64 rows of 2^20 run
# at 0.66 in one Triton kernel and at 0.61 cut, 8 rows of 2^22 at 0.11 and 0.60; 64 programs of 16
# lanes at 0.74 and 0.58, 16 of them at 0.19 and 0.57. 16 rows of 8192 run at 0.75 in one kernel,
# cut at 0.36.
FEW_PROGRAMS = 0.42
LONG_AXIS = 1 << 15
NARROW_TILE_BYTES = 64
# States of more scalars spill in Triton's tiles: complex64 on (8, 8192, 768) 0.39 against 0.95.
NARROW_STATE = 3


def prepare(spec: Spec, tensors: Given) -> Executable:
    """By the fastest engine for the shape."""
    engine, why = choose(spec, tensors)
    return ENGINES[engine](spec, tensors).because(why)


def prepare_cuda(spec: Spec, tensors: Given) -> Executable:
    """`backend="cuda"`. Derivatives whose elements are too large for its kernels, and scans that
    carry nothing from step to step, run on Triton."""
    reason = cuda_scan.why_not_operator(spec.operator, spec.final) if spec.length else None
    if reason is None:
        return cuda_scan.prepare(spec, tensors)
    return triton_scan.prepare(spec, tensors).because(reason)


ENGINES = {"cuda": prepare_cuda, "triton": triton_scan.prepare, "multipass": multipass.prepare}


def choose(spec: Spec, tensors: Given) -> tuple[str, str]:
    """The engine and the reason."""
    reason = cuda_reason(spec.operator, spec.final, spec.device)
    if reason is None and is_for_cuda(spec, tensors) and not cuda_scan.needs_copies(spec, tensors):
        return "cuda", "single pass"
    if spec.length < LONG_AXIS:
        return "triton", f"the axis is short (under {LONG_AXIS}): every program walks its chains"
    count = programs(spec, tensors)
    if count < FEW_PROGRAMS * processors(spec.device):
        return "multipass", f"{count} programs would not fill the GPU: the axis is cut"
    return "triton", f"{count} programs fill the GPU: each walks its chains"


@functools.lru_cache(maxsize=4096)
def cuda_reason(op: Operator, final: tuple[int, ...], device: torch.device) -> str | None:
    """Why the CUDA engine is not there for an operator."""
    if device.type != "cuda" or cuda_launcher.why_unavailable() is not None:
        return "not available"
    return cuda_launcher.why_not_device(device) or cuda_scan.why_not_operator(op, final)


def is_for_cuda(spec: Spec, tensors: Given) -> bool:
    """Whether the single-pass CUDA engine is the faster one for the shape, where it can run."""
    length = spec.length
    if spec.sequences is not None or length < SHORT_AXIS:
        return False
    if has_lanes(spec, tensors):
        return True
    if not cuda_launcher.has_bulk_copies(spec.device) or length < SHORT_ROW:
        return False
    if spec.reverse or spec.shifted or spec.operator.width > NARROW_STATE:
        return True
    count = processors(spec.device)
    if spec.chains >= MANY_ROWS * count:
        size = max((t.itemsize for t in inputs_of(spec, tensors)), default=0)
        fast = cuda_launcher.memory_bandwidth(spec.device) > FAST_MEMORY * count
        return fast and length * size >= LONG_ROW_BYTES
    return length >= (LONG_FEW_ROWS if spec.chains <= FEW_ROWS else LONG_ROW)


def inputs_of(spec: Spec, tensors: Given) -> list[TensorSpec]:
    return [t for t in tensors[: len(spec.operator.inputs)] if t is not None]


def has_lanes(spec: Spec, tensors: Given) -> bool:
    """Whether elements of different chains lie nearer to one another than those of one chain."""
    others = [d for d, n in enumerate(spec.batch) if n > 1 and d != spec.axis]
    return any(
        0 < t.strides[d] < t.strides[spec.axis] for t in inputs_of(spec, tensors) for d in others
    )


def programs(spec: Spec, tensors: Given) -> int:
    """About how many programs walk the chains: one per row, or per 64 bytes of adjacent lanes."""
    if spec.length > 1 and not has_lanes(spec, tensors):
        return spec.chains
    kinds = [t.dtype for t in inputs_of(spec, tensors)]
    kinds += [leaf.dtype for leaf in spec.operator.outputs]  # some scans read no input
    inner = math.prod(spec.batch[spec.axis + 1 :])
    together = min(inner, NARROW_TILE_BYTES // min(kinds[0].itemsize, 8))
    return spec.chains // max(together, 1)
