"""The ranks of a process group, in the order in which a scan visits them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import distributed as dist

from ..api.flags_and_backends import flag
from ..errors import ScanTypeError, ScanValueError
from ..torch_state import in_functorch, in_functorch_or_forward_mode, is_dual, is_traced
from ..wording import shown

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

NO_GROUP = """there is no process group. In a program that torchrun starts, two lines make one:
    import torch.distributed as dist
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")"""
UNAVAILABLE = (
    "this build of torch has no torch.distributed (torch.distributed.is_available() is False), and "
    "assocscan.distributed needs it; install one that has, such as the wheels on pytorch.org"
)


@dataclass(frozen=True)
class Ranks:
    """A process group as one rank sees it.

    name: the group's name, by which torch's functional collectives find it.
    rank, size: this process's rank in the group, and how many ranks the group has.
    call: the number of the call that they were made for, the same on all ranks; 0 where the ranks
        do not compare what they do.
    """

    name: str
    rank: int
    size: int
    call: int = 0

    def in_order(self, reverse: bool) -> list[int]:
        """All ranks, the one first whose part the scan visits first."""
        return list(range(self.size))[:: -1 if reverse else 1]


def require_distributed() -> None:
    """Raise ScanValueError if torch was built without torch.distributed."""
    if not dist.is_available():
        raise ScanValueError(UNAVAILABLE)


def process_group(group: ProcessGroup | None) -> ProcessGroup:
    """The group that is meant: the default one for None.

    Raises ScanValueError where there is none or this process is not in it, and ScanTypeError for
    what is no group.
    """
    require_distributed()
    if group is None:
        if not dist.is_initialized():
            raise ScanValueError(NO_GROUP)
        found = dist.group.WORLD
        assert found is not None
        return found
    given: object = group
    if given is dist.GroupMember.NON_GROUP_MEMBER:
        raise ScanValueError(
            "this process is not a member of group: only the ranks of a group call a scan over it"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise ScanTypeError(f"group is {shown(group)}, expected a torch.distributed.ProcessGroup")
    return group


def ranks_of(group: ProcessGroup, call: int = 0) -> Ranks:
    """The ranks of a group, for the call of this number."""
    return Ranks(group.group_name, dist.get_rank(group), dist.get_world_size(group), call)


def reads_header(group: ProcessGroup, device: torch.device, check: bool | None) -> bool:
    """Whether ranks compare their arguments first: by default on gloo, where it costs one small
    message. On NCCL the host would wait for the GPU to read it. Never where the host cannot read:
    while a CUDA graph is captured, and on tensors of a tracer.

    device: of xs; the CPU where xs holds no tensor.

    A rank whose arguments are wrong answers as the others do, on every group that has one backend:
    a device that the group does not serve counts as the CPU, and a wrong `check` as None.
    """
    if is_traced() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return False
    if check is not None:
        with contextlib.suppress(ScanTypeError):
            return flag("check", check)
    backends = backends_of(group)
    kind = device.type if device.type in backends else "cpu"
    return "cpu" in backends if kind == "cpu" else backends[kind] == "gloo"


def refuse_transforms() -> None:
    """Raise ScanValueError within a torch.func transform."""
    if in_functorch():
        raise ScanValueError(
            "torch.func transforms of scans over ranks are not supported; batch dimensions need no "
            "vmap, and gradients are those of torch.autograd"
        )


def require_check(check: object) -> None:
    """Raise ScanTypeError for what `check` cannot be."""
    if check is not None:
        flag("check", check, ", or None: on gloo")


def require_sendable(group: ProcessGroup, tensors: Sequence[torch.Tensor]) -> None:
    """Raise ScanValueError where the group cannot send what comes of these tensors: it serves other
    devices, or one of them is dual, and collectives have no forward mode."""
    backends, device = backends_of(group), tensors[0].device
    if device.type not in backends:
        raise ScanValueError(
            f"the tensors are on {device}, but group sends those of {' and '.join(backends)} only"
        )
    if in_functorch_or_forward_mode() and any(map(is_dual, tensors)):
        raise ScanValueError(
            "forward mode through scans over ranks is not supported; use backward() or "
            "torch.autograd.grad"
        )


def header_device(group: ProcessGroup) -> torch.device:
    """Where the header lies, the same on every rank whatever it was called with: on the CPU, and on
    this process's own GPU where the group sends nothing else, as one of NCCL."""
    backends = backends_of(group)
    if "cpu" in backends:
        return torch.device("cpu")
    return torch.device(next(iter(backends)), torch.accelerator.current_device_index())


def backends_of(group: ProcessGroup) -> dict[str, str]:
    """The group's backends by the types of devices that they serve: {"cuda": "nccl"}."""
    pairs = (entry.partition(":") for entry in str(dist.get_backend_config(group)).split(","))
    return {device: backend for device, _, backend in pairs}
