"""Other ways to run the GRU of the suite `nonlinear`: torch's and JAX's scan, a loop in Triton as a
user would write it, and Newton's method over the whole axis.

All of it is written here: Newton's method follows the description of ParaRNN (arXiv 2510.21450),
not its code.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from assocscan import linear_recurrence, torch_private

from .cases import OTHER, PEER, TORCH, Contender, passes_of
from .peers import to_jax
from .settings import FORWARD, Settings

Step = Callable[[Tensor, Any, Any], Tensor]


def contenders(
    settings: Settings, step: Step, inputs: tuple[Tensor, ...], which: str,
    cotangent: Tensor | None, is_short: bool,
) -> tuple[dict[str, Contender], dict[str, str]]:  # fmt: skip
    """Those that can take part, and why the others cannot. inputs: three gates, three weights.
    is_short: the axis is not too long for loops of operations."""
    forward_only = "has no gradient here" if which != FORWARD else None
    on_gpu = None if settings.is_gpu else "runs on GPUs only"
    no_jax = None if importlib.util.find_spec("jax") else "not installed"
    compiles = "torch compiles it for longer than a quick run takes" if settings.quick else None
    ways: dict[str, tuple[str | None, Callable[[], Contender]]] = {
        "torch scan": (
            on_gpu or compiles or (None if is_short else "not run on so long an axis"),
            lambda: Contender(
                lambda: passes_of(torch_scan(step), inputs, which, cotangent), TORCH, apart=True
            ),
        ),
        "jax lax.scan": (
            no_jax,
            lambda: Contender(
                lambda: jax_scan(inputs, which, cotangent), PEER, from_jax, wall=True
            ),
        ),
        "loop in Triton": (
            forward_only or on_gpu,
            lambda: Contender(lambda: functools.partial(triton_loop, *inputs), OTHER),
        ),
        "Newton, whole axis": (
            forward_only,
            lambda: Contender(lambda: functools.partial(newton, step, *inputs), OTHER),
        ),
    }
    found = {name: make() for name, (why, make) in ways.items() if why is None}
    return found, {name: why for name, (why, _) in ways.items() if why is not None}


def torch_scan(step: Step) -> Callable[..., Tensor]:
    """torch's prototype, compiled."""
    scan = torch_private.torch_scan()

    def run(z: Tensor, r: Tensor, n: Tensor, *weights: Tensor) -> Tensor:
        def combine(h: Tensor, x: Any) -> tuple[Tensor, Tensor]:
            after = step(h, x, weights)
            return after, after.clone()

        h: Tensor = scan(combine, torch.zeros_like(z[:, 0]), (z, r, n), dim=1)[1]
        return h.movedim(0, 1) if h.shape != z.shape else h

    torch.compiler.reset()
    return torch.compile(run)


def jax_scan(inputs: tuple[Tensor, ...], which: str, cotangent: Tensor | None) -> Callable[[], Any]:
    """`jax.lax.scan`, compiled; its gradient by `jax.vjp`."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else it takes most of the GPU
    import jax
    import jax.numpy as jnp

    def gru(z: Any, r: Any, n: Any, uz: Any, ur: Any, un: Any) -> Any:
        def step(h: Any, x: Any) -> Any:
            z, r, n = x
            z, r = jax.nn.sigmoid(z + uz * h), jax.nn.sigmoid(r + ur * h)
            h = (1 - z) * jnp.tanh(n + r * (un * h)) + z * h
            return h, h

        steps = tuple(jnp.moveaxis(t, 1, 0) for t in (z, r, n))
        return jnp.moveaxis(jax.lax.scan(step, jnp.zeros_like(steps[0][0]), steps)[1], 0, 1)

    def both(g: Any, *given: Any) -> Any:
        return jax.vjp(gru, *given)[1](g)

    given = [to_jax(t.detach()) for t in inputs]
    if which == FORWARD or cotangent is None:
        compiled = jax.jit(gru)
        return lambda: jax.block_until_ready(compiled(*given))
    g, gradients = to_jax(cotangent), jax.jit(both)
    return lambda: jax.block_until_ready(gradients(g, *given))


def from_jax(result: Any) -> Any:
    if isinstance(result, tuple):
        return tuple(torch.utils.dlpack.from_dlpack(t) for t in result)
    return torch.utils.dlpack.from_dlpack(result)


@functools.cache
def triton_kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def kernel(z, r, n, uz, ur, un, out, L, D, BLOCK: tl.constexpr, STAGES: tl.constexpr):  # type: ignore[no-untyped-def]
        blocks = tl.cdiv(D, BLOCK)
        row, c = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
        here = c < D
        uz = tl.load(uz + c, here).to(tl.float32)
        ur = tl.load(ur + c, here).to(tl.float32)
        un = tl.load(un + c, here).to(tl.float32)
        at = row.to(tl.int64) * L * D + c
        h = tl.zeros([BLOCK], tl.float32)
        for _ in tl.range(0, L, num_stages=STAGES):
            update = tl.sigmoid(tl.load(z + at, here).to(tl.float32) + uz * h)
            keep = tl.sigmoid(tl.load(r + at, here).to(tl.float32) + ur * h)
            new = tl.load(n + at, here).to(tl.float32) + keep * (un * h)
            h = (1 - update) * (2 * tl.sigmoid(2 * new) - 1) + update * h
            tl.store(out + at, h, here)
            at += D

    return kernel


def triton_loop(z: Tensor, r: Tensor, n: Tensor, *weights: Tensor) -> Tensor:
    """A program walks along the axis with 64 channels; the best block and depth of those tried."""
    batch, length, width = z.shape
    out, block = torch.empty_like(z), 64
    grid = (batch * -(-width // block),)
    triton_kernel()[grid](z, r, n, *weights, out, length, width, block, 16, num_warps=1)
    return out


def newton(step: Step, z: Tensor, r: Tensor, n: Tensor, *weights: Tensor) -> Tensor:
    """All steps at once: the tangent of the step at a guess, by one compiled kernel, and a linear
    scan of it along the whole axis, until no state changes by more than 1e-4."""
    h = step(torch.zeros_like(z[:, :1]), (z, r, n), weights)
    for _ in range(64):
        before = torch.cat([torch.zeros_like(h[:, :1]), h[:, :-1]], 1)
        slopes, offsets = tangent_of(step)(before, z, r, n, *weights)
        after = linear_recurrence(slopes, offsets)
        change = (after - h).abs().max()
        h = torch.where(after.isfinite(), after, offsets)
        if not change > 1e-4:
            break
    return h


@functools.cache
def tangent_of(step: Step) -> Callable[..., tuple[Tensor, Tensor]]:
    """J and f − J h, by one kernel."""

    def tangent(h: Tensor, z: Tensor, r: Tensor, n: Tensor, *weights: Tensor) -> Any:
        def f(h: Tensor) -> Tensor:
            return step(h, (z, r, n), weights)

        found: Any = torch.func.jvp(f, (h,), (torch.ones_like(h),))
        value, slope = found
        return slope, value - slope * h

    return torch.compile(tangent)
