"""Checks of the arguments of the operation `torch.ops.assocscan.scan` (`torch_operation`).

Engines do not check a `ScanSpec` and its tensors, because the package makes only valid ones. The
operation can be called with any arguments, by hand or from a graph that was changed; without these
checks kernels would read and write outside of the tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from ..engines.base.scan_spec import MaybeTensor, ScanSpec
from ..errors import AxisError, ScanTypeError, ScanValueError
from ..program.matrix_operator import MatrixOperator
from ..program.operator import Leaf, Operator, spans
from ..program.vectors.vector_adjoint import VectorAdjoint
from ..program.vectors.vector_operator import VectorOperator
from . import backends
from .gpu_engine_choice import why_triton

AnyOperator = Operator | MatrixOperator | VectorOperator | VectorAdjoint
OPERATION = "torch.ops.assocscan.scan"
BACKENDS = tuple(name for name in backends.BACKENDS if name != "eager")
MAX_BYTES = 1 << 60  # of a result, since sizes and strides are 64-bit integers
MAX_DIMS = 64
# Names of tensors in messages; {} is the leaf.
CARRY, EDGE = "leaf {} of init", "the edge of the input leaf {}"
# Of a backward pass over vectors:
CARRIES, SEED = (
    "the saved carries, the input leaf {}",
    "the cotangent of a final, the input leaf {}",
)
ROLES = {"input": "the input leaf {}", "init": CARRY, "boundary": EDGE}
Spec = ScanSpec[Any]
Place = tuple[torch.Tensor, Leaf, str, int]
Places = tuple[int, ...]


def fail(why: str) -> ScanValueError:
    return ScanValueError(f"{OPERATION}: {why}")


@functools.lru_cache(maxsize=1024)
def check_places(
    op: AnyOperator, read: Places, given: Places, final: Places, ahead: Places, edged: Places,
    counts: Places,
) -> None:  # fmt: skip
    """Check the lists of leaf numbers against the operator and one another.

    counts: the lengths of `inputs`, `init` and `edges`; they must be the lengths of `read`, `given`
    and `edged`.
    """
    inputs, state = len(op.inputs), len(op.state)
    lists = {"read": (read, inputs), "given": (given, state), "final": (final, state),
             "ahead": (ahead, inputs), "edged": (edged, inputs)}  # fmt: skip
    for name, (places, count) in lists.items():
        if len(set(places)) < len(places) or not all(0 <= k < count for k in places):
            raise fail(
                f"{name} is {list(places)}, expected different numbers below {count}, the leaves "
                f"of {op.name!r}"
            )
    tensors = {"inputs": "read", "init": "given", "edges": "edged"}
    for (argument, name), count in zip(tensors.items(), counts, strict=True):
        if len(lists[name][0]) != count:
            raise fail(
                f"{argument} has {count} tensors, but {name} names {len(lists[name][0])} leaves"
            )
    if not set(edged) <= set(ahead) or not set(ahead) <= set(read):
        raise fail(
            f"edged {list(edged)} must be among ahead {list(ahead)}, and these among read "
            f"{list(read)}"
        )
    missing = sorted(needed(op) - set(read))
    if missing:
        raise fail(f"{op.name!r} needs the input leaves {missing}, which are not in read")
    if not any(counts):
        raise fail("there is no tensor, expected one at least")
    if not isinstance(op, Operator) and ahead:
        what = "whole matrices" if isinstance(op, MatrixOperator) else "vectors"
        raise fail(f"ahead is {list(ahead)}, but {op.name!r}, of {what}, reads none ahead")
    if isinstance(op, VectorAdjoint) and final:
        raise fail(f"final is {list(final)}, but {op.name!r} is a backward pass, which has none")


def needed(op: AnyOperator) -> set[int]:
    """The input leaves that kernels of the operator read."""
    if not isinstance(op, Operator):
        return set(range(len(op.inputs)))
    parts = spans(op.inputs)
    return {k for k, part in enumerate(parts) if not op.used_inputs.isdisjoint(part)}


def check_start(spec: Spec) -> None:
    """Check that a scan which reads an entering carry has one: init, or the identity."""
    op, init = spec.operator, spec.init
    if isinstance(op, VectorAdjoint):
        op = op.op
    from_identity = spec.from_identity or (init is not None and len(init) < len(op.state))
    if from_identity and op.identity is None:
        raise fail(f"{op.name!r} declares no identity: init must give all leaves of its state")
    if spec.exclusive and init is None and not spec.from_identity:
        raise fail("an exclusive scan needs init, or from_identity")


def tensors_of(spec: Spec, tensors: Sequence[MaybeTensor]) -> list[Place]:
    """For each tensor but the offsets: the tensor, the expected `Leaf`, and role and number for
    messages."""
    op, found = spec.operator, []
    for (role, k), t in zip(spec.names, tensors, strict=True):
        if t is not None and role in ROLES:
            leaf = op.state[k] if role == "init" else op.inputs[k]
            name = ROLES[role]
            if role == "input" and isinstance(op, VectorAdjoint) and k >= op.carries:
                name = CARRIES if k == op.carries else SEED
            found.append((t, leaf, name, k))
    return found


def check_scan(spec: Spec, tensors: Sequence[MaybeTensor], backend: str) -> None:
    """Check a scan and the metadata of its tensors.

    Symbolic sizes of a traced graph are not checked here; the operation checks the real sizes when
    the graph runs.
    """
    check_axis(spec)
    check_start(spec)
    if backends.is_of_vectors(spec.operator):
        check_vectors(spec)
    for n in spec.batch:
        if type(n) is not int:
            return
    check_sizes(spec, tensors, backend)


def check_axis(spec: Spec) -> None:
    batch, axis = spec.batch, spec.axis
    if not 0 <= axis < len(batch):
        raise AxisError(
            f"{OPERATION}: axis {axis} is out of range for batch {list(batch)}; expected a number "
            f"from 0 to {len(batch) - 1}"
        )
    if len(batch) > MAX_DIMS:
        raise fail(f"batch has {len(batch)} dimensions, expected at most {MAX_DIMS}")


def check_vectors(spec: Spec) -> None:
    """Check the dimensions that an operator over vectors names, and what it is made for, against
    the scan."""
    op, rank = spec.operator, len(spec.batch)
    if op.lane is not None and (op.lane >= rank or op.lane == spec.axis):
        raise fail(
            f"{op.name!r} has saved carries along dimension {op.lane}, expected one of the {rank} "
            f"of batch other than the axis {spec.axis}"
        )
    if not isinstance(op, VectorAdjoint):
        return
    for dims in op.repeated:
        if any(d >= rank for d in dims):
            raise fail(f"{op.name!r} has repeated dimensions {list(dims)}, but batch has {rank}")
    if (op.exclusive, op.first) != (spec.exclusive, spec.begins_alone):
        raise fail(
            f"{op.name!r} is the backward pass of a scan with exclusive={op.exclusive} and "
            f"{'no' if op.first else 'an'} initial carry, which this scan is not"
        )
    if op.wants_init and spec.init is None:
        raise fail(f"{op.name!r} gives the gradient of init, but there is none")


def check_carries(k: int, t: torch.Tensor, spec: Spec, backend: str) -> None:
    shape, dtype = backends.vector_results(backend, spec.device).carries(spec)
    if t.layout is not torch.strided or t.dtype != dtype or tuple(t.shape) != shape:
        raise fail(
            f"{CARRIES.format(k)} are {t.dtype} of shape {list(t.shape)}, expected {dtype} of "
            f"shape {list(shape)}"
        )


def check_sizes(spec: Spec, tensors: Sequence[MaybeTensor], backend: str) -> None:
    """Check shapes, dtypes, devices and layouts of tensors against the batch and the operator."""
    op, batch, device = spec.operator, spec.batch, spec.device
    if min(batch) < 0:
        raise fail(f"batch is {list(batch)}, but no size is negative")
    if spec.sequences is not None:
        check_offsets(spec, tensors[-1])
    carry = spec.carry_batch
    for t, leaf, role, k in tensors_of(spec, tensors):
        if role == CARRIES:
            check_carries(k, t, spec, backend)
        else:
            check_leaf(role, k, t, carry if role in (CARRY, EDGE, SEED) else batch, leaf)
        if t.device != device:
            raise fail(f"{role.format(k)} is on {t.device}, another tensor on {device}")
    count = component_bytes(op)
    for n in (*batch, *(carry[:1] if spec.sequences is not None else ())):
        count *= n or 1
    if count > MAX_BYTES:
        raise fail(f"batch is {list(batch)}: results would have more than {MAX_BYTES} bytes")
    if spec.length == 0 and spec.final and spec.init is None and op.identity is None:
        raise fail(
            f"the final carry of an empty axis is init or the identity, and {op.name!r} "
            "declares no identity"
        )


@functools.lru_cache(maxsize=1024)
def component_bytes(op: AnyOperator) -> int:
    """An upper bound of the bytes of the largest leaf of an element. A component has at most 8
    bytes (a complex number is two components); 16 are counted, to be safe."""
    return max(16 * leaf.components for leaf in (*op.inputs, *op.state, *op.outputs))


def check_leaf(role: str, k: int, t: torch.Tensor, batch: Sequence[int], leaf: Leaf) -> None:
    """Check layout, dtype and shape of one tensor; `role` and `k` name it in messages."""
    if t.layout is not torch.strided:
        raise ScanTypeError(
            f"{OPERATION}: {role.format(k)} has the layout {t.layout}, expected a dense one"
        )
    if t.dtype is not leaf.dtype and t.dtype is not leaf.accumulator:
        raise ScanTypeError(f"{OPERATION}: {role.format(k)} is {t.dtype}, expected {leaf.dtype}")
    shape = tuple(t.shape)
    if shape == (*batch, *leaf.shape):
        return
    count = len(batch)
    fits = len(shape) == count + len(leaf.shape) and shape[count:] == leaf.shape
    if not fits or not all(n in (1, size) for n, size in zip(shape, batch, strict=False)):
        raise fail(
            f"{role.format(k)} has shape {list(shape)}, expected {[*batch, *leaf.shape]}, or 1 in "
            f"place of one of the first {count} sizes"
        )


def check_offsets(spec: Spec, offsets: MaybeTensor) -> None:
    assert offsets is not None
    if offsets.dtype not in (torch.int32, torch.int64) or offsets.layout is not torch.strided:
        raise ScanTypeError(
            f"{OPERATION}: offsets are {offsets.dtype} of layout {offsets.layout}, expected dense "
            "int32 or int64"
        )
    if offsets.dim() != 1 or offsets.shape[0] == 0:
        raise fail(f"offsets must have shape [S + 1] for S sequences, got {list(offsets.shape)}")
    if offsets.device.type not in ("cpu", spec.device.type):
        raise fail(f"offsets are on {offsets.device}, the other tensors on {spec.device}")


def check_memory_of(spec: Spec, tensors: Sequence[MaybeTensor]) -> None:
    """Check that the storage of each tensor, which may have been resized, is large enough for its
    shape and strides."""
    for t, _, role, k in tensors_of(spec, tensors):
        require_memory(OPERATION, role, k, t)
    if spec.sequences is not None and tensors[-1] is not None:
        require_memory(OPERATION, "offsets", 0, tensors[-1])


def require_memory(operation: str, role: str, k: int, t: torch.Tensor) -> None:
    """Check that the storage of t is large enough; the other arguments are for the message."""
    end = t.storage_offset() + 1
    for n, stride in zip(t.shape, t.stride(), strict=True):
        if n == 0:
            return
        end += (n - 1) * stride
    needs = end * t.itemsize
    try:
        has = t.untyped_storage().nbytes()
    except NotImplementedError:  # no storage (a wrapper subclass): engines check the address
        return
    if needs > has:
        raise ScanValueError(
            f"{operation}: {role.format(k)} reaches over {needs} bytes of memory, but has {has}"
        )


def check_backend(backend: str) -> None:
    if backend not in BACKENDS:
        raise fail(f"unknown backend {backend!r}; choose one of {', '.join(BACKENDS)}")


def why_not_engine(spec: Spec, backend: str) -> str | None:
    """Why the backend cannot run the scan; None where it can."""
    op: AnyOperator = spec.operator
    device = spec.device
    matrices = isinstance(op, MatrixOperator)
    if backends.is_of_vectors(op):
        if backends.vector_engine(backend, device) is None:
            return f"it has no kernels for operators of vectors on {device.type} tensors"
        if backend == "auto":
            backend = "cpu" if device.type == "cpu" else "triton"
        return backends.why_not_here(device, backend)
    if backend == "auto":
        backend = "cpu" if device.type == "cpu" and not matrices else "triton"
    reason = backends.why_not_here(device, backend)
    if reason is not None:
        return reason
    if isinstance(op, MatrixOperator):
        if backend in ("cpu", "cuda"):
            return "operators of whole matrices run on the triton and multipass backends"
        return None
    if backend == "cuda" and why_triton(spec) is not None:
        backend = "triton"
        reason = backends.why_not_here(device, backend)
    if reason is None and backend in ("triton", "multipass"):
        lacking = backends.unsupported_by_triton(op)
        return None if lacking is None else f"Triton cannot express {lacking!r}"
    return reason
