"""What the options of the command say, for the suites."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from assocscan.monoids.monoid import Monoid

SEED = 3407
FORWARD, BACKWARD, BOTH = "forward", "backward", "both"
PASSES = {FORWARD: "forward", BACKWARD: "backward", BOTH: "forward and backward"}


@dataclass(frozen=True)
class Settings:
    """How the command was called.

    shapes: (B, L, D), or (B, L, D, N) for suites of vectors of N states. peers: the names of those
    that take part, None for all. Empty `shapes`, `lengths`, `dtypes` and `passes`, and None for
    `op`: what the suite has. backend: of the contender "assocscan". repeat: milliseconds for which
    a timed call is repeated, None for the usual time.
    """

    device: torch.device
    quick: bool = False
    peers: tuple[str, ...] | None = None
    shapes: tuple[tuple[int, ...], ...] = ()
    lengths: tuple[int, ...] = ()
    chosen_dtypes: tuple[torch.dtype, ...] = ()
    passes: tuple[str, ...] = ()
    backend: str = "auto"
    op: Monoid | None = None
    repeat: int | None = None

    @property
    def is_gpu(self) -> bool:
        return self.device.type != "cpu"

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        usual = (torch.float32, torch.bfloat16) if self.is_gpu else (torch.float32,)
        return self.chosen_dtypes or usual

    def passes_or(self, *usual: str) -> tuple[str, ...]:
        return self.passes or usual

    def lengths_or(self, usual: Sequence[int]) -> tuple[int, ...]:
        return self.lengths or tuple(usual)

    def sizes(
        self, widths: Sequence[tuple[int, int]], lengths: Sequence[int]
    ) -> list[tuple[int, int, int]]:
        """(B, L, D) for each batch and width of the suite and each of its lengths; with `shapes`
        these, with `lengths` those lengths in place of the ones that a shape or the suite has."""
        if self.shapes:
            return [(b, n, d) for b, own, d in self.shapes for n in self.lengths_or([own])]
        return [(b, n, d) for b, d in widths for n in self.lengths_or(lengths)]

    def random(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """Uniform in [0, 1)."""
        generator = torch.Generator(self.device).manual_seed(SEED)
        return torch.rand(shape, generator=generator, device=self.device).to(dtype)

    def decays(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """Uniform in (0, 1): their logarithms are finite."""
        return self.random(shape, dtype).clamp_min(2.0**-10)


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def powers(first: int, last: int, step: int = 1) -> list[int]:
    """2^first, 2^(first + step), …, at most 2^last."""
    return [1 << k for k in range(first, last + 1, step)]
