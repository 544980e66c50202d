"""The engine for matrices on GPUs: one program per chain, or per chunk of a chain.

    scan            one kernel; a program walks its chain
    scan_multipass  chunks of the axis are combined to totals, those are scanned, and every chunk is
                    scanned again from the carry before it
    scan_auto       one of the two, by how many chains there are

A chunk is a packed sequence: the three passes of `scan_multipass` are scans of this same engine, on
offsets of its own making, and only the axis is cut. For d×d matrices it does twice the products of
one walk, and as many more as there are chunks.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any, cast

import torch

from ....caching.bounded import BoundedCache
from ....program.matrices import MatrixOperator
from ....program.operator import Leaf
from ...base.chunks import cut_axis, offsets_of
from ...base.lasting import make_lasting
from ...base.layout import CollapsedDim, Layout, LeafStrides, gather_tensors, lay_out
from ...base.problem import ScanProblem
from ..kernel import Tile
from ..loader import load
from ..scan import Prepared, Tensors, allocate, is_wide, launch, processors, unit
from ..tiles import forced_tile
from .kernel import MatrixKernel, Start, TilePort
from .source import source

# Programs per multiprocessor that are wanted, and the shortest axis that is cut for them: chosen by
# reason, not yet measured.
PROGRAMS = 2
LONG_AXIS = 64

Results = tuple[list[torch.Tensor], list[torch.Tensor]]
_PREPARED: BoundedCache[Any, Prepared] = BoundedCache()


def operator_of(problem: ScanProblem) -> MatrixOperator:
    """`ScanProblem` names the operator of the other engines; here it is one of matrices."""
    return cast(MatrixOperator, problem.operator)


def scan_auto(problem: ScanProblem) -> Results:
    """In chunks where chains are too few to fill the GPU and sequences are long enough (on
    average: of packed ones no more is known without waiting for the GPU)."""
    few = math.prod(problem.carry_batch) < PROGRAMS * processors(problem.device)
    sequences = 1 if problem.offsets is None else len(problem.offsets) - 1
    long = problem.length >= LONG_AXIS * max(sequences, 1)
    return scan_multipass(problem) if few and long else scan(problem)


def scan(problem: ScanProblem) -> Results:
    """Run the problem in one kernel: its outputs, and the final carries asked for."""
    return run(problem, None)


def run(problem: ScanProblem, fresh: torch.Tensor | None) -> Results:
    """As `scan`; `fresh`: which sequences start from their first element in place of init."""
    tensors = gather_tensors(problem)
    start: Start = "either" if fresh is not None else "given" if problem.init else "fresh"
    prepared = prepare(problem, tensors, start)
    for name in prepared.copies:
        tensors[name] = tensors[name].contiguous()
    outputs, finals = allocate(prepared, problem, tensors)
    if math.prod(problem.carry_batch) == 0:
        return outputs, finals
    op = operator_of(problem)
    for role, k in prepared.pointers:
        if role == "scratch":
            size = matrix_kernel(prepared).scratch_size * prepared.grid[0]
            tensors[role, k] = torch.empty(size, dtype=op.accumulator, device=problem.device)
        elif role == "fresh" and fresh is not None:
            tensors[role, k] = fresh
        elif role in ("identity", "init") and (role, k) not in tensors:
            tensors[role, k] = identity(op, k, problem.device)
    launch(prepared, tensors, [] if problem.offsets is None else [offsets_of(problem)])
    return outputs, finals


@functools.lru_cache(maxsize=128)
def identity(op: MatrixOperator, leaf: int, device: torch.device) -> torch.Tensor:
    """The identity's leaf on the device."""
    return make_lasting(lambda: op.identity_tensor(leaf).to(device), device)


# One kernel.


def prepare(problem: ScanProblem, tensors: Tensors, start: Start) -> Prepared:
    """The prepared launch for these shapes, strides and flags."""
    key = (
        problem.operator, problem.batch, problem.axis, problem.reverse, problem.exclusive, start,
        problem.final, None if problem.offsets is None else len(problem.offsets), problem.device,
        forced_tile(), tuple((name, t.dtype, t.shape, t.stride()) for name, t in tensors.items()),
    )  # fmt: skip
    known = _PREPARED.get(key)
    if known is None:
        known = _PREPARED.keep(key, build(problem, lay_out(problem, tensors), start))
    return known


def build(problem: ScanProblem, layout: Layout, start: Start) -> Prepared:
    """The kernel and its arguments."""
    op = operator_of(problem)
    fills = start == "fresh" and op.identity is not None and (
        problem.exclusive or bool(problem.final)
    )  # fmt: skip
    tile = forced_tile() or choose_tile(op)
    kernel = MatrixKernel(
        op, tile, choose_slice(problem.device), problem.reverse, problem.exclusive,
        len(layout.rows), start, fills, problem.final, (),
        problem.offsets is not None, is_wide(layout, problem),
    )  # fmt: skip
    kernel = replace(kernel, ports=tuple(ports(problem, layout, kernel)))
    sequences = 1 if problem.offsets is None else len(problem.offsets) - 1
    programs = math.prod(row.size for row in layout.rows) * sequences
    copies = {name for name, walk in layout.walks.items() if walk.copy} & set(kernel.pointers)
    return Prepared(
        load(source(kernel)), cast(Any, kernel), (programs, 1, 1), kernel.pointers,
        integers(kernel, problem, layout, sequences), layout.outputs, layout.finals,
        frozenset(copies), (),
    )  # fmt: skip


def matrix_kernel(prepared: Prepared) -> MatrixKernel:
    return cast(MatrixKernel, prepared.kernel)


def ports(
    problem: ScanProblem, layout: Layout, kernel: MatrixKernel
) -> list[tuple[str, int, TilePort]]:
    """The ports of every leaf that the kernel reads or writes, in the order of its pointers."""
    op, count, carried = kernel.operator, len(kernel.operator.state), kernel.carried
    read = {v - count for v in kernel.needed if v >= count}
    if kernel.start != "given":
        read |= set(carried)
    found: list[tuple[str, int, TilePort]] = []
    for (role, k), walk in layout.walks.items():
        if (role == "input" and k not in read) or (role == "init" and k not in carried):
            continue
        leaf = op.outputs[k] if role == "output" else op.state[k]
        element = tuple(unit(s) for s in element_strides(leaf, walk))
        outer = tuple(None if row.by_name[role, k] else 0 for row in layout.rows)
        step = unit(walk.strides[problem.axis])
        found.append((role, k, TilePort(walk.dtype, leaf.shape, element, step, outer)))
    # The identity stands wherever there is nothing else: one tensor for all chains.
    if kernel.start == "fresh" and not kernel.fills:
        return found
    missing = "identity" if kernel.start == "fresh" else "init"
    for k in carried:
        if (missing, k) not in layout.walks:
            leaf = op.state[k]
            element = (1,) if len(leaf.shape) == 1 else (None, 1)
            outer = (0,) * len(layout.rows)
            found.append((missing, k, TilePort(op.accumulator, leaf.shape, element, 0, outer)))
    return found


def element_strides(leaf: Leaf, walk: LeafStrides) -> list[int]:
    """The strides of the element's own dimensions, from the distances of its components."""
    if len(leaf.shape) == 1:
        return [walk.offsets[1]]
    return [walk.offsets[leaf.shape[1]], walk.offsets[1]]


def integers(
    kernel: MatrixKernel, problem: ScanProblem, layout: Layout, sequences: int
) -> list[int]:
    """The integer arguments: sizes, then the strides that the kernel asks for."""
    values = {"length": problem.length, "sequences": sequences}
    values.update({f"size{d}": row.size for d, row in enumerate(layout.rows)})
    found = [values[name] for name in kernel.sizes()]
    for role, k, which in kernel.strides():
        walk = layout.walks.get((role, k))
        if walk is None:  # the identity, one for all
            found.append(kernel.operator.state[k].shape[1] if which == "element0" else 0)
        elif which == "step":
            found.append(walk.strides[problem.axis])
        elif which == "sequence":
            found.append(walk.sequence)
        elif which.startswith("element"):
            leaf = kernel.port[role, k]
            strides = element_strides(Leaf(leaf.dtype, leaf.shape), walk)
            found.append(strides[int(which.removeprefix("element"))])
        else:
            row: CollapsedDim = layout.rows[int(which.removeprefix("outer"))]
            found.append(row.by_name[role, k])
    return found


def choose_tile(op: MatrixOperator) -> Tile:
    """One chain, one step; as many warps as the largest leaf needs for its registers."""
    largest = max(math.prod(leaf.shape) for leaf in op.state)
    return Tile(1, 1, 1, min(8, max(1, largest // 128)), stages=1)


def choose_slice(device: torch.device) -> int:
    """The terms of a product that are summed at a time; only NVIDIA's dot needs slices."""
    if torch.version.hip is not None or device.type == "xpu":
        return 0
    return 32


# Several.


def scan_multipass(problem: ScanProblem) -> Results:
    """Run the problem in chunks, if there is more than one."""
    length, chains = problem.length, math.prod(problem.carry_batch)
    chunk_length = choose_chunk(length, chains, processors(problem.device))
    if length <= chunk_length or chains == 0:
        return scan(problem)
    op = operator_of(problem)
    chunks, starts, fresh = cut_axis(problem, chunk_length)
    leaves = op.total(problem.final)

    totals = replace(
        problem, operator=cast(Any, op.showing(())), exclusive=False, init=None,
        from_identity=False, final=leaves, offsets=chunks,
    )  # fmt: skip
    _, carries = scan(totals)

    given = problem.init
    prefixes = ScanProblem(
        cast(Any, op.carries(leaves)), list(carries), tuple(totals.carry_batch), 0,
        problem.reverse, exclusive=True,
        init=None if given is None else [given[k] for k in leaves],
        from_identity=given is None, offsets=starts,
        final=tuple(n for n, k in enumerate(leaves) if k in problem.final),
    )  # fmt: skip
    before, finals = scan_auto(prefixes)
    in_order = [k for k in leaves if k in problem.final]
    finals = [finals[in_order.index(k)] for k in problem.final]
    if not op.outputs:
        return [], finals

    entering: list[torch.Tensor | None] = [None] * len(op.state)
    for k, t in zip(leaves, before, strict=True):
        entering[k] = t
    rescan = replace(problem, init=entering, from_identity=False, final=(), offsets=chunks)
    outputs, _ = run(rescan, fresh if given is None else None)
    return outputs, finals


def choose_chunk(length: int, chains: int, multiprocessors: int) -> int:
    """How many steps a chunk has: enough chunks to fill the GPU, but no more than √(2 · length),
    where walking the totals would take as long as walking the chunks."""
    wanted = -(-PROGRAMS * multiprocessors // max(chains, 1))
    return -(-length // max(1, min(wanted, math.isqrt(2 * length))))
