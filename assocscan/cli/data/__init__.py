"""Two public-domain series for the demo, the documentation and the tests (see README.md)."""

import csv
from importlib.resources import files

import torch

__all__ = ["nile", "sunspots"]


def nile() -> tuple[torch.Tensor, torch.Tensor]:
    """Annual flow of the Nile at Aswan, 1871–1970.

    Returns (years [100], flow [100]), both float64; the flow is in 10⁸ m³.

    >>> years, flow = nile()
    >>> int(years[0]), float(flow[0]), round(float(flow.mean()), 2)
    (1871, 1120.0, 919.35)
    """
    years, flow = _columns("nile.csv")
    return years, flow


def sunspots() -> tuple[torch.Tensor, torch.Tensor]:
    """Monthly mean sunspot numbers, January 1749 – December 2008.

    Returns (years [3120], numbers [3120]), both float64; a month stands at its middle, so January
    1749 is 1749 + 1/24.

    >>> years, numbers = sunspots()
    >>> len(numbers), float(numbers.max()), int(years[numbers.argmax()])
    (3120, 253.8, 1957)
    """
    years, months, numbers = _columns("sunspots.csv")
    return years + (months - 0.5) / 12, numbers


def _columns(name: str) -> list[torch.Tensor]:
    lines = files(__name__).joinpath(name).read_text(encoding="utf-8").splitlines()
    rows = list(csv.reader(lines))[1:]
    table = torch.tensor([[float(cell) for cell in row] for row in rows], dtype=torch.float64)
    return [column.clone() for column in table.T]
