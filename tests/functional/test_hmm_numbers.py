"""Hidden Markov models whose numbers are hard for products of matrices."""

from __future__ import annotations

import pytest
import torch

from assocscan import hmm_filter


@pytest.mark.parametrize("backend", ["cpu", "eager"])
def test_a_state_without_an_exit_costs_no_digits(backend: str) -> None:
    """The weight of paths from it is −∞, whatever the other weights have grown to."""
    generator = torch.Generator().manual_seed(3)
    moves = torch.tensor([[0.0, 0, 0], [0.1, 0.5, 0.4], [0.1, 0.3, 0.6]]).log()
    start = torch.full((3,), 1 / 3).log()
    likelihood = torch.randn(5000, 3, generator=generator)
    found = hmm_filter(start, moves, likelihood, backend=backend)[0]
    exact = hmm_filter(start.double(), moves.double(), likelihood.double())[0]
    assert (found.double().exp() - exact.exp()).abs().max() < 1e-6
