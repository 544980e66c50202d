"""Scans of sequences whose parts lie on the ranks of a process group.

Every rank passes its consecutive part of the sequence and gets the same part of the result:

>>> import tempfile, torch, torch.distributed as dist
>>> import assocscan
>>> store = dist.FileStore(tempfile.mktemp(), 1)
>>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
>>> assocscan.distributed.associative_scan("sum", torch.tensor([1, 2, 3]))
tensor([1, 3, 6])
>>> dist.destroy_process_group()

A call combines the local part without writing anything, gathers these totals from all ranks (one
small collective), combines the totals of the ranks before, and scans the local part with the result
as its initial carry.
"""

from .associative_scan import associative_scan
from .linear_recurrence import linear_recurrence
from .reduce import reduce

__all__ = ["associative_scan", "linear_recurrence", "reduce"]
