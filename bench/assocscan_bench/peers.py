"""Linear recurrences of other libraries, called as their documentation says.

Each takes the layout that it was made for: `rows` are [B, D, L] with the axis last, else [B, L, D].
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from assocscan import torch_private

from .cases import PEER, TORCH, Contender, passes_of
from .settings import FORWARD, PASSES, Settings

Scan = Callable[..., Any]


@dataclass(frozen=True)
class Peer:
    """A scan of another library, h[t] = a[t] h[t−1] + b[t] where nothing else is said.

    module: what must be importable. load: imports it and returns scan(a, b). rows: it takes the
    axis last. gpu: runs on GPUs
    only. differentiable: its scan has gradients. wall: it runs outside torch's streams.
    logarithm: it is given log a, which is not timed. compiles: torch compiles it, in 10 seconds and
    more on a CPU. apart: it was seen to end in illegal memory accesses, and runs in a process of
    its own.
    """

    module: str
    distributions: tuple[str, ...]
    load: Callable[[], Scan]
    rows: bool = False
    gpu: bool = True
    differentiable: bool = True
    wall: bool = False
    logarithm: bool = False
    compiles: bool = False
    apart: bool = False

    @property
    def kind(self) -> str:
        return TORCH if self.module == "torch" else PEER

    def missing(self, settings: Settings) -> str | None:
        """Why it cannot take part; None where it can."""
        if importlib.util.find_spec(self.module) is None:
            return "not installed"
        if self.gpu and not settings.is_gpu:
            return "runs on GPUs only"
        if self.compiles and settings.quick and not settings.is_gpu:
            return "torch compiles it for longer than a quick run takes"
        return None


def accelerated_scan() -> Scan:
    from accelerated_scan.scalar import scan

    return lambda a, b: scan(a, b)


def accelerated_scan_warp() -> Scan:
    from accelerated_scan.warp import scan

    return lambda a, b: scan(a, b)


def fpscan() -> Scan:
    from fpscan import pscan

    return lambda a, b: pscan(a, b)


def fla() -> Scan:
    """HGRN's recurrence."""
    from fla.ops.hgrn import fused_recurrent_hgrn

    return lambda log_a, b: fused_recurrent_hgrn(b, log_a)[0]


def fla_chunk() -> Scan:
    from fla.ops.hgrn import chunk_hgrn

    return lambda log_a, b: chunk_hgrn(b, log_a)[0]


def combine(left: Any, right: Any) -> Any:
    return left[0] * right[0], left[1] * right[0] + right[1]


def torch_scan() -> Scan:
    """torch's prototype, which asks to be compiled."""
    associative_scan = torch_private.torch_associative_scan()

    def scan(a: Tensor, b: Tensor) -> Any:
        mode = "pointwise" if a.is_cuda else "generic"
        return associative_scan(combine, (a, b), 1, combine_mode=mode)[1]

    torch.compiler.reset()  # so that each size is compiled for itself
    return scan


def torch_associative_scan() -> Scan:
    return torch.compile(torch_scan())


def jax() -> Scan:
    """On the device that JAX found; the tensors are handed over by DLPack once."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else it takes most of the GPU
    import jax as library

    compiled = library.jit(lambda a, b: library.lax.associative_scan(combine, (a, b), axis=1)[1])
    return lambda a, b: library.block_until_ready(compiled(a, b))


def to_jax(t: Tensor) -> Any:
    import jax as library

    return library.dlpack.from_dlpack(t)


PEERS: dict[str, Peer] = {
    "torch associative_scan": Peer(
        "torch", (), torch_associative_scan, gpu=False, differentiable=False, compiles=True
    ),
    "accelerated-scan": Peer(
        "accelerated_scan", ("accelerated-scan",), accelerated_scan, True, apart=True
    ),
    "accelerated-scan warp": Peer(
        "accelerated_scan", ("accelerated-scan",), accelerated_scan_warp, True, apart=True
    ),
    "fpscan": Peer("fpscan", ("fpscan",), fpscan, True),
    "fla": Peer("fla", ("fla-core", "flash-linear-attention"), fla, logarithm=True),
    "fla chunk": Peer("fla", ("fla-core", "flash-linear-attention"), fla_chunk, logarithm=True),
    "jax": Peer("jax", ("jax",), jax, gpu=False, differentiable=False, wall=True),
}


def taking_part(
    peers: Mapping[str, Peer], settings: Settings, which: str
) -> tuple[dict[str, Peer], dict[str, str]]:
    """Of the peers that were asked for: those that can do this pass, and why the others cannot."""
    found, missing = {}, {}
    for name, peer in peers.items():
        if settings.peers is not None and name not in settings.peers:
            continue
        reason = peer.missing(settings)
        if reason is None and which != FORWARD and not peer.differentiable:
            reason = f"has no gradient here ({PASSES[which]})"
        if reason is None:
            found[name] = peer
        else:
            missing[name] = reason
    return found, missing


def recurrence_contenders(
    settings: Settings, a: Tensor, b: Tensor, which: str = FORWARD, cotangent: Tensor | None = None
) -> tuple[dict[str, Contender], dict[str, str]]:
    """The peers that can scan a and b [B, L, D], and why the others cannot; of those that were
    asked for."""
    peers, missing = taking_part(PEERS, settings, which)
    found = {
        name: Contender(
            functools.partial(prepared, peer, a, b, which, cotangent),
            peer.kind,
            functools.partial(turned, peer, a, which),
            wall=peer.wall,
            apart=peer.apart,
        )
        for name, peer in peers.items()
    }
    return found, missing


def prepared(
    peer: Peer, a: Tensor, b: Tensor, which: str, cotangent: Tensor | None
) -> Callable[[], Any]:
    """The call of a peer on inputs in its layout."""
    inputs: tuple[Any, ...] = (a.log() if peer.logarithm else a, b)
    if peer.rows:
        inputs = tuple(t.mT.contiguous() for t in inputs)
        cotangent = None if cotangent is None else cotangent.mT.contiguous()
    scan = peer.load()
    if peer.wall:
        inputs = tuple(to_jax(t) for t in inputs)
        return lambda: scan(*inputs)
    return passes_of(scan, inputs, which, cotangent)


def turned(peer: Peer, a: Tensor, which: str, result: Any) -> Any:
    """What a peer returned, as [B, L, D] tensors; gradients of log a as gradients of a."""
    results = list(result) if isinstance(result, (tuple, list)) else [result]
    results = [t if isinstance(t, Tensor) else torch.utils.dlpack.from_dlpack(t) for t in results]
    if peer.rows:
        results = [t.mT for t in results]
    if which == FORWARD:
        return results[0]
    if peer.logarithm:
        results[0] = results[0] / a
    return tuple(results)


def cub_cumsum(x: Tensor) -> Callable[[], Any]:
    """CUB's scan as CuPy launches it, in place: cupy.cumsum would copy first. Its first call gives
    the sums of x, the second the sums of these."""
    import cupy
    from cupy.cuda import cub

    total = x.clone()
    array = cupy.from_dlpack(total)
    stream = cupy.cuda.Stream.from_external(torch.cuda.current_stream(x.device))

    def call() -> Any:
        with stream:
            cub.device_scan(array, cub.CUPY_CUB_CUMSUM)
        return total

    return call
