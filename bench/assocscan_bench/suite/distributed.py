"""`distributed`: recurrences and a selective scan over the ranks of a process group, and the time
of the collective alone.

Weak scaling is the time of a rank's part alone, without the others, over that of the call on all.

The ranks are processes that this one starts: with gloo on the CPU, with NCCL on GPUs, one each. All
calls are timed by the clock of this process, from the message that starts the ranks to the last
answer, after each has waited for its device.
"""

from __future__ import annotations

import functools
import math
import shutil
import tempfile
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing import connection
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing
from torch import Tensor

from ..cases import Case, Contender, passes_of
from ..selective_inputs import draw
from ..settings import BACKWARD, FORWARD, Settings, short

SECONDS = 300.0  # for one message: the first call compiles
RECURRENCE, SELECTIVE = "recurrence", "selective scan"
COLLECTIVE, TOTAL = "collective alone", "total of the part alone"
PASSES = ("forward", "backward")
ALONE = "{} of the part alone"  # without the other ranks: what weak scaling is measured by


@dataclass(frozen=True)
class Work:
    """What each rank scans. shape: (B, L, D) of its part, (B, L, D, N) of a selective scan."""

    scan: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        sizes = ", ".join(map(str, (self.shape[0], "L", *self.shape[2:])))
        return f"{self.scan} ({sizes}) {short(self.dtype)}"

    @property
    def bytes(self) -> tuple[int, int, int]:
        """What a rank must move, forward, backward and for its total: each tensor once."""
        rows, size = math.prod(self.shape[:2]), self.dtype.itemsize
        series = rows * self.shape[2] * size
        if self.scan == RECURRENCE:  # a, b → h; a, h, ∂h → ∂a, ∂b
            return 3 * series, 5 * series, 2 * series
        read = 3 * series + 2 * rows * self.shape[3] * size  # u, delta, z; B, C
        return read + series, 2 * read + series, read

    @property
    def state_bytes(self) -> int:
        """The bytes of a total: a product and a state for each channel, in float32."""
        return 2 * 4 * math.prod(self.shape) // self.shape[1]


def works(settings: Settings) -> list[Work]:
    """For each rank: (1, 2^24, 64) float32, (8, 65536, 1536) bfloat16, (1, 65536, 1536, 16); less
    on CPUs and with --quick."""
    if not settings.is_gpu:
        length = 1 << 12 if settings.quick else 1 << 16
        narrow = 16 if settings.quick else 256
        return [
            Work(RECURRENCE, (1, length, 64), torch.float32),
            Work(RECURRENCE, (2, length // 4, narrow), torch.bfloat16),
            Work(SELECTIVE, (1, length // 16, narrow, 16), torch.float32),
        ]
    length, steps = (1 << 20, 1 << 12) if settings.quick else (1 << 24, 1 << 16)
    return [
        Work(RECURRENCE, (1, length, 64), torch.float32),
        Work(RECURRENCE, (8, steps, 1536), torch.bfloat16),
        Work(SELECTIVE, (1, steps, 1536, 16), torch.float32),
    ]


def cases(settings: Settings) -> list[Callable[[], Case]]:
    """On 1, 2 and 4 ranks: as many steps on each (weak), or the steps of the first work cut up
    (strong)."""
    devices = torch.cuda.device_count() if settings.is_gpu else 4
    sizes = [n for n in (1, 2, 4, 8) if n <= devices]
    return [
        functools.partial(case, settings, kind, size, work)
        for kind in ("weak", "strong")
        for work in works(settings)[: None if kind == "weak" else 1]
        for size in (sizes[:2] if settings.quick else sizes)
    ]


def case(settings: Settings, kind: str, size: int, work: Work) -> Case:
    """This work on every rank (weak), or on all together (strong)."""
    batch, length, *rest = work.shape
    own = length if kind == "weak" else length // size
    part = replace(work, shape=(batch, own, *rest))
    ranks = Processes(size, settings.device.type, part)
    # The collective is read and written by every rank.
    forward, backward, total = part.bytes
    moved = {COLLECTIVE: 2 * part.state_bytes * size, TOTAL: total}
    for name, count in zip(PASSES, (forward, backward), strict=True):
        moved |= {name: count, ALONE.format(name): count}
    contenders = {
        name: Contender(functools.partial(ranks.prepare, name), wall=True, checked=False,
                        bytes=count)
        for name, count in moved.items()
    }  # fmt: skip
    shape = (batch, own * size, *rest)
    group = f"{kind} scaling, {work}"
    return Case(group, "ranks", size, shape, work.dtype, forward, contenders)


class Processes:
    """The ranks, which run a call each time they are told to."""

    def __init__(self, size: int, device: str, work: Work) -> None:
        context: Any = torch.multiprocessing.get_context("spawn")
        folder = tempfile.mkdtemp()
        self.pipes: list[connection.Connection] = []
        self.processes: list[Any] = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = rank, size, device, work, f"{folder}/store", theirs
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


def be_rank(rank: int, size: int, device: str, work: Work, store: str, pipe: Any) -> None:
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
                calls = calls or calls_on(place, work)
                calls[name]()
                if on_gpu:
                    torch.cuda.synchronize()
                pipe.send("")
            except Exception as error:
                pipe.send("".join(traceback.format_exception_only(error)).strip())
    except EOFError:
        dist.destroy_process_group()


def calls_on(device: torch.device, work: Work) -> dict[str, Callable[[], object]]:
    """The timed calls, on inputs of this rank."""
    import torch.distributed as dist

    from assocscan.distributed.collectives import gather, token_of
    from assocscan.distributed.ranks import ranks_of

    group = dist.group.WORLD
    assert group is not None
    inputs, cotangent, alone, over_ranks, total = scans(device, work, group)
    batch, _, *rest = work.shape
    state = [torch.rand((batch, *rest), device=device) for _ in range(2)]
    calls: dict[str, Callable[[], object]] = {
        COLLECTIVE: lambda: gather(ranks_of(group), 1, state, token_of(*state)),
        TOTAL: total,
    }
    for which, name in zip((FORWARD, BACKWARD), PASSES, strict=True):
        for title, scan in ((name, over_ranks), (ALONE.format(name), alone)):
            calls[title] = first_call_prepares(passes_of, scan, inputs, which, cotangent)
    return calls


def first_call_prepares(make: Callable[..., Callable[[], object]], *given: Any) -> Any:
    """The call that `make` prepares, when it is called first: its graph then takes memory, and its
    collectives are called by all ranks."""
    made: list[Callable[[], object]] = []

    def call() -> object:
        if not made:
            made.append(make(*given))
        return made[0]()

    return call


def scans(
    device: torch.device, work: Work, group: Any
) -> tuple[
    tuple[Tensor, ...], Tensor, Callable[..., Tensor], Callable[..., Tensor], Callable[[], object]
]:
    """The inputs of this rank, a cotangent of the output, the scan of the part alone, that over the
    ranks, and the total of the part."""
    from assocscan.api.reduce import reduce
    from assocscan.distributed import linear_recurrence as over_ranks
    from assocscan.functional.recurrence import linear_recurrence
    from assocscan.functional.selective_scan import NAMES, arrange, scan_by, selective_scan
    from assocscan.nn.mamba import scan_over_ranks

    if work.scan == RECURRENCE:
        a, b, g = (torch.rand(work.shape, device=device).to(work.dtype) for _ in range(3))
        together = functools.partial(over_ranks, group=group)
        return (a, b), g, linear_recurrence, together, lambda: reduce("affine", (a, b), 1)
    batch, length, width, states = work.shape
    inputs, cotangent = draw(Settings(device), (batch, length, width, states), work.dtype)

    def alone(*tensors: Tensor) -> Tensor:
        u, delta, A, B, C, D, z, bias = tensors
        return selective_scan(u, delta, A, B, C, D, z, bias, True)

    def on_ranks(*tensors: Tensor) -> Tensor:
        named = dict(zip(NAMES, (*tensors, None, None), strict=True))
        y: Tensor = scan_by(functools.partial(scan_over_ranks, group), named, True, False, False)
        return y

    views = arrange(dict(zip(NAMES, (*inputs, None, None), strict=True)), True)
    return inputs, cotangent, alone, on_ranks, lambda: reduce(views.op, views.leaves, 1)
