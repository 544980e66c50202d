"""`auto` on GPUs: the single-pass CUDA engine, one Triton kernel, or the multi-pass engine.

The measurements behind the constants: docs/performance/triton.md.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..cuda import launcher as cuda_launcher
from ..cuda import prepare as cuda_scan
from ..cuda.vectors import prepare as cuda_vectors
from ..cuda.vectors.step_graph import NotExpressible
from ..engines.base.device_properties import processors
from ..engines.base.executable import Executable
from ..engines.base.fallback_warning import warn_once
from ..engines.base.scan_spec import ScanSpec, TensorSpec, memory_order
from ..engines.triton import multipass
from ..engines.triton import prepare as triton_scan
from ..engines.triton.vectors import prepare as triton_vectors
from ..errors import BackendError
from ..program.operator import Operator
from ..program.vectors.vector_operator import VectorOperator
from ..torch_private import hint_of
from ..torch_state import mapped_size

if TYPE_CHECKING:
    from .scan_call import ScanCall

Spec = ScanSpec[Operator]
Given = Sequence[TensorSpec | None]

# Rows per multiprocessor from which `auto` takes Triton, with a program for each row, in place of
# the CUDA engine.
MANY_ROWS = 2.0
# Rows of at least LONG_ROW steps go to the CUDA engine; where there are at most FEW_ROWS rows,
# those of at least LONG_FEW_ROWS steps.
LONG_ROW, LONG_FEW_ROWS, FEW_ROWS = 1 << 15, 1 << 13, 32
# Memory bandwidth per multiprocessor (bytes per second) above which long rows go to the CUDA engine
# even where there are MANY_ROWS.
FAST_MEMORY = 30e9
LONG_ROW_BYTES = 24 << 10  # the least bytes of such a row
# From COSTLY operations in `combine` on, scans of LONG_COSTLY_ROW steps go to the CUDA engine even
# where there are MANY_ROWS: it calls `combine` about twice for each step, Triton more often.
COSTLY, LONG_COSTLY_ROW = 10, 1 << 13
# Steps below which a row leaves most of a CUDA tile empty.
SHORT_ROW = 512
# Steps below which the axis fills no CUDA tile, not even a tile of lanes, which has fewer steps.
SHORT_AXIS = 32
# Triton programs per multiprocessor below which a long axis is cut, if the CUDA engine is not used;
# FEW_NARROW_PROGRAMS for scalars of fewer than 4 bytes, because a program then loads fewer bytes at
# a time.
FEW_PROGRAMS, FEW_NARROW_PROGRAMS = 0.42, 0.64
LONG_AXIS = 1 << 15  # the least steps of an axis that is cut
# `programs` counts one Triton program for this many bytes of adjacent lanes, each counted as at
# least 4 and at most 8 bytes.
NARROW_TILE_BYTES = 64
# Leaves whose strides the CUDA engine cannot read are copied for it only if there are fewer than
# FEW_CHAINS chains per multiprocessor, of at least LONG_CHAIN steps.
FEW_CHAINS, LONG_CHAIN = 8.0, 1 << 11
LEAST_WALKED = 32  # adjacent chains from which the CUDA engine walks
# Scalars of a state above which Triton's tiles spill registers.
NARROW_STATE = 3
# An operator over vectors that also fits the CUDA kernels over scalars runs there below this many
# chains. For few chains of a long axis they are up to 80 times faster, since kernels over vectors
# walk a chain from end to end (or in segments, if totals do not depend on the states).
MANY_CHAINS = 1 << 11
# With at most so many scalars of state and an output with a value for each state it always runs
# there. Without such an output MANY_CHAINS decides: a gradient over scalars, which reads all
# states, then has to save and read more than the outputs.
SMALL_STATE = 8
# MOST_VECTOR_WORDS: operators over vectors whose states have more 32-bit words always use the
# kernels over vectors. MOST_ROW_WORDS: of states of more words, the CUDA engine scans lanes but not
# rows.
MOST_VECTOR_WORDS = MOST_ROW_WORDS = 24


def prepare(spec: Spec, tensors: Given) -> Executable:
    """By the fastest engine for the shape."""
    engine, why = choose(spec, tensors)
    return ENGINES[engine](spec, tensors).because(why)


def is_worth_vectors(call: ScanCall) -> bool:
    """Whether a scan on a GPU takes the kernels over vectors, and not those over scalars. A graph
    keeps what was chosen when it was traced, without a guard on the sizes."""
    scalars = call.traced.operator
    if scalars is None:
        return True
    if cuda_scan.too_large(scalars, call.final, MOST_VECTOR_WORDS) is not None:
        return True
    op = call.traced.vectors
    if scalars.width <= SMALL_STATE and (op is None or any(map(op.varies, op.outputs))):
        return False
    chains = math.prod(map(hint_of, call.carry_batch(0))) * mapped_size(call.leaves)
    return chains >= MANY_CHAINS


def prepare_vectors(spec: ScanSpec[Any], tensors: Given) -> Executable:
    """A scan over vectors, or a backward pass of one: by CUDA where it can, else by Triton."""
    why = no_cuda(spec.device)
    return triton_vectors_of(spec, tensors, why) if why else prepare_vectors_cuda(spec, tensors)


def prepare_vectors_cuda(spec: ScanSpec[Any], tensors: Given) -> Executable:
    try:
        return either_pass(cuda_vectors, spec, tensors)
    except NotExpressible as error:
        return triton_vectors_of(spec, tensors, str(error))
    except BackendError as error:
        if spec.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise  # the next call, outside of the capture, can load the kernel
        op = spec.operator if isinstance(spec.operator, VectorOperator) else spec.operator.op
        warn_once(op, f"its CUDA kernel cannot be prepared, and Triton's runs: {error}")
        return triton_vectors_of(spec, tensors, "the CUDA kernel cannot be prepared")


def triton_vectors_of(spec: ScanSpec[Any], tensors: Given, why: str) -> Executable:
    return either_pass(triton_vectors, spec, tensors).because(f"by Triton: {why}")


def either_pass(engine: Any, spec: ScanSpec[Any], tensors: Given) -> Executable:
    """A scan over vectors, or a backward pass of one, by the module of an engine."""
    is_forward = isinstance(spec.operator, VectorOperator)
    prepare: Callable[..., Executable] = engine.prepare if is_forward else engine.prepare_backward
    return prepare(spec, tensors)


@functools.cache
def no_cuda(device: torch.device) -> str | None:
    """Why no CUDA kernel runs on a device."""
    if device.type != "cuda":
        return "no NVIDIA GPU"
    return cuda_launcher.why_unavailable() or cuda_launcher.why_not_device(device)


def prepare_cuda(spec: Spec, tensors: Given) -> Executable:
    """`backend="cuda"`: by the CUDA engine, or by Triton where `why_triton` says so, and for steps
    that are not associative where it cannot walk."""
    reason = why_triton(spec) or too_wide_for_rows(spec, tensors)
    if (
        reason is None
        and spec.operator.sequential
        and not (spec.length and cuda_scan.can_walk(spec, tensors))
    ):
        reason = "chains are not adjacent in memory: Triton walks"
    if reason is None:
        return cuda_scan.prepare(spec, tensors)
    return triton_scan.prepare(spec, tensors).because(reason)


def why_triton(spec: Spec) -> str | None:
    """Why Triton runs a scan of `backend="cuda"`: its elements are too large for the CUDA kernels,
    as in some derivatives, or it carries nothing from step to step. None where the CUDA engine
    runs it."""
    return cuda_scan.why_not_operator(spec.operator, spec.final) if spec.length else None


def too_wide_for_rows(spec: Spec, tensors: Given) -> str | None:
    """Why Triton scans rows of large elements; None if the scan is no such one."""
    if spec.operator.sequential or has_lanes(spec, tensors):
        return None
    return cuda_scan.too_large(spec.operator, spec.final, MOST_ROW_WORDS)


ENGINES = {
    "cuda": prepare_cuda, "triton": triton_scan.prepare, "multipass": multipass.prepare,
    "lookback": multipass.prepare_lookback,
}  # fmt: skip


def choose(spec: Spec, tensors: Given) -> tuple[str, str]:
    """The engine and the reason."""
    reason = cuda_reason(spec.operator, spec.final, spec.device)
    reason = reason or too_wide_for_rows(spec, tensors)
    if spec.operator.sequential:
        engine = "triton" if reason or not walks_by_cuda(spec, tensors) else "cuda"
        return engine, "steps are not associative: every thread walks along its chains"
    if reason is None and is_for_cuda(spec, tensors):
        if not cuda_scan.needs_copies(spec, tensors):
            return "cuda", "single pass"
        if copies_pay(spec, tensors):
            return "cuda", "single pass after copies: one program per chain would not fill the GPU"
    if spec.length < LONG_AXIS:
        return "triton", f"the axis is short (under {LONG_AXIS}): every program walks its chains"
    count = programs(spec, tensors)
    size = max((t.itemsize for t in inputs_of(spec, tensors)), default=4)
    few = FEW_PROGRAMS if size >= 4 else FEW_NARROW_PROGRAMS
    if count < few * processors(spec.device):
        if goes_on(spec.device) and multipass.look_back_pays(spec, tensors):
            return "lookback", f"{count} programs would not fill the GPU: one for each tile"
        return "multipass", f"{count} programs would not fill the GPU: the axis is cut"
    return "triton", f"{count} programs fill the GPU: each walks its chains"


def goes_on(device: torch.device) -> bool:
    """Whether the GPU guarantees forward progress of running programs, so that others may wait for
    them: NVIDIA, compute capability 7.0 or higher."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (7, 0)


def walks_by_cuda(spec: Spec, tensors: Given) -> bool:
    """Whether the CUDA engine walks along the chains, a warp for each 32 of them that are adjacent
    in memory."""
    inner = math.prod(spec.batch[spec.axis + 1 :])
    is_enough = spec.length > 0 and inner >= LEAST_WALKED
    return (
        is_enough
        and cuda_scan.can_walk(spec, tensors)
        and not cuda_scan.needs_copies(spec, tensors)
    )


@functools.lru_cache(maxsize=4096)
def cuda_reason(op: Operator, final: tuple[int, ...], device: torch.device) -> str | None:
    """Why the CUDA engine cannot run the operator on this device; None if it can."""
    return no_cuda(device) or cuda_scan.why_not_operator(op, final)


def is_for_cuda(spec: Spec, tensors: Given) -> bool:
    """Whether the single-pass CUDA engine is the faster one for the shape, where it can run."""
    length = spec.length
    if length < SHORT_AXIS:
        return False
    if has_lanes(spec, tensors):
        return True
    if not cuda_launcher.has_bulk_copies(spec.device) or length < SHORT_ROW:
        return False
    # The CUDA engine scans packed sequences as one row, whatever their lengths; Triton starts a
    # program for each sequence.
    if spec.sequences is not None:
        return True
    # Triton loads rows in reverse one scalar at a time.
    if spec.reverse or spec.shifted or spec.operator.width > NARROW_STATE:
        return True
    count = processors(spec.device)
    if spec.chains >= MANY_ROWS * count:
        op = spec.operator
        if op.outputs and len(op.combine.instructions) >= COSTLY and length >= LONG_COSTLY_ROW:
            return True
        size = max((t.itemsize for t in inputs_of(spec, tensors)), default=0)
        fast = cuda_launcher.memory_bandwidth(spec.device) > FAST_MEMORY * count
        return fast and length * size >= LONG_ROW_BYTES
    return length >= (LONG_FEW_ROWS if spec.chains <= FEW_ROWS else LONG_ROW)


def copies_pay(spec: Spec, tensors: Given) -> bool:
    """Whether it pays to copy the leaves whose strides the CUDA engine cannot read. It does where
    chains are few and long and the outputs have lanes. Elsewhere Triton, which reads such leaves
    without a copy, is faster."""
    if spec.chains >= FEW_CHAINS * processors(spec.device) or spec.length < LONG_CHAIN:
        return False
    order = memory_order(spec.batch, [(t.shape, t.strides) for t in inputs_of(spec, tensors)])
    inner = next((d for d in reversed(order) if spec.batch[d] > 1), spec.axis)
    return inner != spec.axis


def inputs_of(spec: Spec, tensors: Given) -> list[TensorSpec]:
    return [t for t in tensors[: len(spec.operator.inputs)] if t is not None]


def has_lanes(spec: Spec, tensors: Given) -> bool:
    """Whether elements of different chains lie nearer to one another than those of one chain."""
    others = [d for d, n in enumerate(spec.batch) if n > 1 and d != spec.axis]
    return any(
        0 < t.strides[d] < t.strides[spec.axis] for t in inputs_of(spec, tensors) for d in others
    )


def programs(spec: Spec, tensors: Given) -> int:
    """About how many programs walk the chains: one per row; or one for 16 adjacent lanes, 8 if an
    item of the first input has 8 bytes or more."""
    # A scan that reads no input has no lanes and returns here; so `inputs_of(...)[0]` exists below.
    if not has_lanes(spec, tensors):
        return spec.chains
    size = inputs_of(spec, tensors)[0].itemsize
    inner = math.prod(spec.batch[spec.axis + 1 :])
    together = min(inner, NARROW_TILE_BYTES // min(max(size, 4), 8))
    return spec.chains // max(together, 1)
