"""How the threads of the CPU share a scan: their number, what one job is, whether the axis is cut.

A job is a row and a block of its lanes (direct form), or a block of rows (staged form). Of packed
sequences a job has only those that begin in one part of the axis. The two forms, rows and lanes:
see `prepare.py`. Each thread takes one job after another (`worker_threads.h`). If there are fewer
jobs than threads, all threads share each job: its axis is cut into chunks; a packed sequence is
never cut. Two kinds of scans are not cut, in which a carry walks along each row: steps that are not
associative (`Operator.sequential`), and matrix recurrences, since products of matrices may be far
larger than the states (`Operator.applies_matrices`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ..base.layout import CollapsedDim
from ..base.scan_spec import ScanSpec
from .kernel import STEPS, WIDE, Kernel, is_cheap

# Scans that move fewer bytes run on one thread: starting another takes longer than it saves (an
# estimate, not measured).
SERIAL_BYTES = 1 << 18
# The fewest steps per chunk of an axis that is cut.
MIN_CHUNK = 4096


@dataclass(frozen=True)
class Sharing:
    """inner: how many scans a kernel can take as lanes.
    block: the number of lanes (direct form) or rows (staged form) of one job.
    jobs: 0 if there is nothing to scan.
    threads: how many are used.
    """

    inner: int
    block: int
    jobs: int
    threads: int
    cuts_axis: bool


def share(
    spec: ScanSpec[Any],
    kernel: Kernel,
    bytes_moved: int,
    outer: list[CollapsedDim],
    lanes: list[CollapsedDim],
) -> Sharing:
    """How the threads share a scan.

    outer: its row dimensions. lanes: its lane dimensions (not read in the staged form).
    """
    rows, sequences = math.prod(row.size for row in outer), spec.sequence_count
    threads = torch.get_num_threads() if bytes_moved > SERIAL_BYTES else 1
    inner = math.prod(row.size for row in lanes) if kernel.direct else rows
    block = lane_block(kernel, inner, rows * sequences, threads, spec.length)
    jobs = -(-inner // block) * (rows if kernel.direct else 1) * sequences if spec.chains else 0
    cuts_axis = (
        0 < jobs < threads
        and sequences == 1
        and spec.length >= MIN_CHUNK * (threads + 1)
        and (kernel.direct or block == 1)
        and not kernel.operator.is_walked
    )
    return Sharing(inner, block, jobs, threads if cuts_axis else min(threads, jobs), cuts_axis)


def lane_block(kernel: Kernel, inner: int, outer: int, threads: int, length: int) -> int:
    """The number of lanes (direct form) or rows (staged form) of one job.

    A staged job of one row scans WIDE segments of it side by side. Cheap operators use one-row
    jobs for all long rows, because consecutive tiles are then consecutive in memory (1.34 G
    elements/s instead of 1.17 on one core, float32 sums of rows of 1024). But one-row jobs need two
    combines per element instead of one, so expensive operators take several rows, where there are
    enough.
    """
    if kernel.direct:
        wanted = -(-threads // max(outer, 1))
        block = -(-inner // wanted)
        return min(kernel.lanes, -(-block // WIDE) * WIDE)
    rows = inner // max(threads, 1)
    if kernel.operator.is_walked:
        return max(1, min(WIDE, rows))
    if length >= 2 * WIDE * STEPS and (is_cheap(kernel.operator) or rows < WIDE):
        return 1
    return max(1, min(WIDE, rows))
