"""GPU tensors that are kept after the call that makes them: workspaces, tables, flags.

They must not be allocated in the memory pool of a CUDA graph. Under torch.compile with CUDA graphs,
everything that the calling thread allocates goes to the graph's pool, in the warm-up run before the
capture too. torch reuses the memory of all tensors in the pool that are not outputs of the graph
("tensor(s) in the cudagraph pool not tracked as outputs"). The pool is chosen by thread, so these
tensors are made in a thread of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


def make_lasting(make: Callable[[], T], device: torch.device) -> T:
    """Call `make` in a new thread, on the current stream, and return its result. Inference mode and
    dispatch modes belong to the calling thread too, so they do not apply to the new tensors."""
    if device.type != "cuda":
        return make()
    stream = torch.cuda.current_stream(device)

    def on_stream() -> T:
        with torch.cuda.stream(stream):
            return make()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(on_stream).result()
