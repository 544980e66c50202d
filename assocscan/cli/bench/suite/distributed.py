"""`distributed`: recurrences over the ranks of a process group, weak and strong scaling, and the
time of the collective alone.

The ranks are processes that this one starts: with gloo on the CPU, with NCCL on GPUs, one each. All
calls are timed by the clock of this process, from the message that starts the ranks to the last
answer, after each has waited for its device.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
import traceback
import weakref
from collections.abc import Callable
from multiprocessing import connection
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing

from ..cases import Case, Contender
from ..settings import Settings

SECONDS = 300.0  # for one message: the first call compiles
CALLS = ("forward", "forward and backward", "collective alone")


def cases(settings: Settings) -> list[Callable[[], Case]]:
    """On 1, 2 and 4 ranks: as many steps on each (weak), or the same steps cut up (strong)."""
    devices = torch.cuda.device_count() if settings.is_gpu else 4
    sizes = [n for n in (1, 2, 4, 8) if n <= devices]
    length = (1 << 20 if settings.quick else 1 << 24) if settings.is_gpu else (
        1 << 12 if settings.quick else 1 << 16)  # fmt: skip
    return [
        functools.partial(case, settings, kind, size, length)
        for kind in ("weak", "strong")
        for size in (sizes[:2] if settings.quick else sizes)
    ]


def case(settings: Settings, kind: str, size: int, length: int) -> Case:
    """(1, length, 64) float32 on every rank (weak), or on all together (strong)."""
    own = length if kind == "weak" else length // size
    ranks = Processes(size, settings.device.type, (1, own, 64))
    shape = (1, own * size, 64)
    moved = 3 * 4 * own * 64  # by each rank
    states = 2 * 2 * 4 * 64 * size  # what the collective reads and writes
    contenders = {
        name: Contender(functools.partial(ranks.prepare, name), wall=True, checked=False,
                        bytes=states if name == CALLS[-1] else None)
        for name in CALLS
    }  # fmt: skip
    return Case(f"{kind} scaling", "ranks", size, shape, torch.float32, moved, contenders)


class Processes:
    """The ranks, which run a call each time they are told to."""

    def __init__(self, size: int, device: str, shape: tuple[int, ...]) -> None:
        context: Any = torch.multiprocessing.get_context("spawn")
        folder = tempfile.mkdtemp()
        self.pipes: list[connection.Connection] = []
        self.processes: list[Any] = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = rank, size, device, shape, f"{folder}/store", theirs
            process = context.Process(target=be_rank, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        weakref.finalize(self, end, self.pipes, self.processes, folder)

    def prepare(self, name: str) -> Callable[[], int]:
        """The call of this name, on all ranks."""
        return functools.partial(self.call, name)

    def call(self, name: str) -> int:
        """How many ranks have answered: all. Raises the error of one that has one."""
        for pipe in self.pipes:
            pipe.send(name)
        for pipe in self.pipes:
            if not pipe.poll(SECONDS):
                raise TimeoutError(f"a rank has not answered for {SECONDS:.0f} seconds")
            error = pipe.recv()
            if error:
                raise RuntimeError(error)
        return len(self.pipes)


def end(pipes: list[connection.Connection], processes: list[Any], folder: str) -> None:
    """End the ranks, and remove what they met by."""
    for pipe in pipes:
        pipe.close()
    for process in processes:
        process.join(10)
        process.kill()
    shutil.rmtree(folder, ignore_errors=True)


def be_rank(
    rank: int, size: int, device: str, shape: tuple[int, ...], store: str, pipe: Any
) -> None:
    """Join the group, and run calls until the pipe is closed."""
    dist: Any = torch.distributed
    on_gpu = device == "cuda"
    torch.set_num_threads(max(torch.get_num_threads() // size, 1))
    place = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(place)
    dist.init_process_group("nccl" if on_gpu else "gloo", store=dist.FileStore(store, size),
                            rank=rank, world_size=size)  # fmt: skip
    calls: dict[str, Callable[[], object]] | None = None
    try:
        while True:
            name = pipe.recv()
            try:
                calls = calls or calls_on(place, shape)
                calls[name]()
                if on_gpu:
                    torch.cuda.synchronize()
                pipe.send("")
            except Exception as error:
                pipe.send("".join(traceback.format_exception_only(error)).strip())
    except EOFError:
        dist.destroy_process_group()


def calls_on(device: torch.device, shape: tuple[int, ...]) -> dict[str, Callable[[], object]]:
    """The timed calls, on inputs of this shape."""
    import torch.distributed as dist

    from ....distributed import linear_recurrence
    from ....distributed.collectives import gather, token_of
    from ....distributed.ranks import ranks_of

    group = dist.group.WORLD
    assert group is not None
    a, b = (torch.rand(shape, device=device) for _ in range(2))
    leaves = a.clone().requires_grad_(), b.clone().requires_grad_()
    state = [t[:, 0].clone() for t in (a, b)]
    weights = torch.rand_like(b)
    return {
        "forward": lambda: linear_recurrence(a, b),
        "forward and backward": lambda: torch.autograd.grad(
            linear_recurrence(*leaves), leaves, weights
        ),
        "collective alone": lambda: gather(ranks_of(group), 1, state, token_of(*state)),
    }
