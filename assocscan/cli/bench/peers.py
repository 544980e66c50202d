"""Other people's scans, called as their documentation says.

Each takes the layout that it was made for: `rows` are [B, D, L] with the axis last, else [B, L, D].
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ... import torch_private
from .cases import Contender, Settings

Scan = Callable[..., Any]


@dataclass(frozen=True)
class Peer:
    """A linear recurrence h[t] = a[t] h[t−1] + b[t] of another library.

    module: what must be importable. load: imports it and returns scan(a, b). gpu: runs on GPUs
    only. differentiable: its scan has gradients. wall: it runs outside torch's streams.
    logarithm: it is given log a, which is not timed.
    """

    module: str
    distributions: tuple[str, ...]
    load: Callable[[], Scan]
    rows: bool = False
    gpu: bool = True
    differentiable: bool = True
    wall: bool = False
    logarithm: bool = False

    def missing(self, settings: Settings) -> str | None:
        """Why it cannot take part; None where it can."""
        if importlib.util.find_spec(self.module) is None:
            return "not installed"
        if self.gpu and not settings.is_gpu:
            return "runs on GPUs only"
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


def torch_associative_scan() -> Scan:
    """torch's prototype, compiled, as it asks to be."""
    associative_scan = torch_private.torch_associative_scan()

    def combine(left: Any, right: Any) -> Any:
        return left[0] * right[0], left[1] * right[0] + right[1]

    def scan(a: Tensor, b: Tensor) -> Any:
        mode = "pointwise" if a.is_cuda else "generic"
        return associative_scan(combine, (a, b), 1, combine_mode=mode)[1]

    return torch.compile(scan)


def jax() -> Scan:
    """On the device that JAX found; the tensors are handed over by DLPack once."""
    import jax as library

    def combine(left: Any, right: Any) -> Any:
        return left[0] * right[0], left[1] * right[0] + right[1]

    compiled = library.jit(lambda a, b: library.lax.associative_scan(combine, (a, b), axis=1)[1])
    return lambda a, b: library.block_until_ready(compiled(a, b))


def to_jax(t: Tensor) -> Any:
    import jax as library

    return library.dlpack.from_dlpack(t)


PEERS: dict[str, Peer] = {
    "torch associative_scan": Peer(
        "torch", (), torch_associative_scan, gpu=True, differentiable=False
    ),
    "accelerated-scan": Peer("accelerated_scan", ("accelerated-scan",), accelerated_scan, True),
    "accelerated-scan warp": Peer(
        "accelerated_scan", ("accelerated-scan",), accelerated_scan_warp, True
    ),
    "fpscan": Peer("fpscan", ("fpscan",), fpscan, True),
    "fla": Peer("fla", ("fla-core", "flash-linear-attention"), fla, logarithm=True),
    "fla chunk": Peer("fla", ("fla-core", "flash-linear-attention"), fla_chunk, logarithm=True),
    "jax": Peer("jax", ("jax",), jax, gpu=False, differentiable=False, wall=True),
}


def recurrence_contenders(
    settings: Settings, a: Tensor, b: Tensor, backward: bool
) -> tuple[dict[str, Contender], dict[str, str]]:
    """The peers that can scan a and b [B, L, D], and why the others cannot."""
    from .cases import forward_backward

    found, missing = {}, {}
    for name, peer in PEERS.items():
        reason = peer.missing(settings)
        if settings.peers is not None and name not in settings.peers:
            reason = "not asked for"
        if reason is None and backward and not peer.differentiable:
            reason = "has no gradient here"
        if reason is not None:
            missing[name] = reason
            continue

        def make(peer: Peer = peer) -> Callable[[], Any]:
            inputs: tuple[Any, Any] = (a, b)
            if peer.logarithm:
                inputs = a.log(), b
            if peer.rows:
                inputs = a.mT.contiguous(), b.mT.contiguous()
            scan = peer.load()
            if backward:
                return forward_backward(scan, inputs)
            if peer.wall:
                inputs = to_jax(a), to_jax(b)
            return lambda: scan(*inputs)

        found[name] = Contender(make, peer.wall)
    return found, missing


def cub_cumsum(x: Tensor) -> Callable[[], Any]:
    """CUB's scan as CuPy launches it, in place: cupy.cumsum would copy first."""
    import cupy
    from cupy.cuda import cub

    array = cupy.from_dlpack(x.clone())
    stream = cupy.cuda.Stream.from_external(torch.cuda.current_stream(x.device))

    def call() -> Any:
        with stream:
            return cub.device_scan(array, cub.CUPY_CUB_CUMSUM)

    return call
