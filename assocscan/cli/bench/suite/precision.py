"""`precision`: the error of linear recurrences against a float64 loop over the same inputs.

Seeds 3407, 4, 42 and 57, decays near 1, inputs in float32, float16 and bfloat16. The error is
the largest difference over the largest value; that of a 16-bit output holds its rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ....functional.recurrence import linear_recurrence
from ..cases import OURS, TORCH, Case, Contender, contender
from ..peers import recurrence_contenders
from ..settings import Settings, short
from .rnn import loop

SEEDS = (3407, 4, 42, 57)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def cases(settings: Settings) -> list[Callable[[], Case]]:
    """Every seed in every dtype."""
    seeds = SEEDS[:2] if settings.quick else SEEDS
    return [functools.partial(case, settings, s, dtype) for dtype in DTYPES for s in seeds]


def case(settings: Settings, seed: int, dtype: torch.dtype) -> Case:
    shape = (2, 256 if settings.quick else 4096, 64)
    generator = torch.Generator().manual_seed(seed)
    a = (0.9 + 0.1 * torch.rand(shape, generator=generator)).to(dtype)
    b = torch.randn(shape, generator=generator).to(dtype)
    exact = loop(a.double(), b.double())
    a, b = a.to(settings.device), b.to(settings.device)
    peers, missing = recurrence_contenders(settings, a, b)
    contenders = {
        "assocscan": contender(lambda: [error(linear_recurrence(a, b), exact)], OURS),
        "loop of torch operations": contender(lambda: [error(loop(a, b), exact)], TORCH),
    }
    for name, peer in peers.items():
        contenders[name] = Contender(functools.partial(compared, peer, exact))
    return Case(
        f"{short(dtype)}", "seed", seed, shape, dtype, 0, contenders, errors=True, missing=missing
    )


def compared(peer: Contender, exact: Tensor) -> Callable[[], list[float]]:
    call = peer.make()
    return lambda: [error(call(), exact)]


def error(got: Any, exact: Tensor) -> float:
    """The largest difference over the largest value; rows [B, D, L] are turned."""
    h = (got if isinstance(got, Tensor) else torch.utils.dlpack.from_dlpack(got)).cpu().double()
    h = h if h.shape == exact.shape else h.mT
    return float((h - exact).abs().max() / exact.abs().max())
