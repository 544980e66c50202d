"""Tensors on a GPU that outlive the call that makes them: workspaces, tables, flags.

They must not lie in the memory pool of a CUDA graph. torch.compile's CUDA graphs direct all that a
thread allocates into the graph's pool, already in the run before the capture, and take back what is
no output ("tensor(s) in the cudagraph pool not tracked as outputs").
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


def make_lasting(make: Callable[[], T], device: torch.device) -> T:
    """What `make` returns, made on the current stream by a thread of its own: pools are chosen by
    thread, and so are inference mode and dispatch modes, which should not reach it either."""
    if device.type != "cuda":
        return make()
    stream = torch.cuda.current_stream(device)

    def on_stream() -> T:
        with torch.cuda.stream(stream):
            return make()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(on_stream).result()
