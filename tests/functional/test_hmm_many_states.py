"""`hmm_filter` of many states, by products of probabilities, beside a loop in log space."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from assocscan import hmm_filter
from assocscan.functional.hmm import filter_and_viterbi, many_states

STATES = many_states.LEAST_STATES
pytestmark = pytest.mark.filterwarnings("ignore::assocscan.FallbackWarning")


def loop(initial: Tensor, transition: Tensor, likelihood: Tensor) -> tuple[Tensor, Tensor]:
    initial, transition, likelihood = (t.double() for t in (initial, transition, likelihood))
    found, evidence = [], torch.zeros((), dtype=torch.float64)
    state = initial
    for t in range(likelihood.shape[-2]):
        if t:
            now = transition if transition.dim() == 2 else transition[..., t, :, :]
            state = torch.logsumexp(state.unsqueeze(-1) + now, -2)
        joint = state + likelihood[..., t, :]
        seen = torch.logsumexp(joint, -1)
        state = joint - seen.unsqueeze(-1)
        found.append(state)
        evidence = evidence + seen
    return torch.stack(found, -2), evidence


def model(
    states: int, steps: int, batch: tuple[int, ...] = (), varies: bool = False, scale: float = 1.0
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(states + steps)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    moves = drawn(*batch, steps, states, states) if varies else drawn(states, states)
    return [
        drawn(states).log_softmax(-1),
        moves.log_softmax(-1),
        scale * drawn(*batch, steps, states),
    ]


def used(*given: Tensor) -> tuple[Any, bool]:
    """The result, and whether it came from products."""
    with mock.patch.object(filter_and_viterbi, "filtered", wraps=many_states.filtered) as spy:
        found: list[Any] = []
        spy.side_effect = lambda *a: found.append(many_states.filtered(*a)) or found[-1]
        return hmm_filter(*given), found[-1] is not None


@pytest.mark.parametrize("scale", [1.0, 60.0])
@pytest.mark.parametrize(
    "steps,batch,varies",
    [(64, (), False), (65, (3,), False), (66, (2, 1), False), (131, (2,), True), (95, (), True)],
)
def test_values(steps: int, batch: tuple[int, ...], varies: bool, scale: float) -> None:
    """Also with likelihoods that differ by hundreds, and where some are impossible."""
    given = model(STATES + 2, steps, batch, varies, scale)
    given[2][..., 7, :] = -1e4
    given[2][..., 7, 2] = 0
    given[2][..., 9, 1] = -math.inf
    given[0][3] = -math.inf
    for _ in range(2):
        (posterior, evidence), by_products = used(*given)
        right, total = loop(*given)
        assert by_products and posterior.dtype == torch.float32
        assert float((posterior.exp() - right.exp()).abs().max()) < 2e-6
        assert torch.equal(posterior.isinf(), right.isinf())
        finite = right.isfinite()
        torch.testing.assert_close(posterior[finite], right[finite].float(), rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(evidence, total.float(), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("varies", [False, True])
def test_gradients(varies: bool) -> None:
    given = [t.requires_grad_() for t in model(STATES, 67, (2,), varies)]
    weights = torch.randn(2, 67, STATES, generator=torch.Generator().manual_seed(1))
    (posterior, evidence), by_products = used(*given)
    assert by_products
    found = torch.autograd.grad((posterior * weights).sum() + evidence.sum(), given)
    posterior, evidence = loop(*given)
    right = torch.autograd.grad((posterior * weights).sum() + evidence.sum(), given)
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_float64_and_16_bits() -> None:
    given = [t.double() for t in model(STATES, 64)]
    (posterior, evidence), by_products = used(*given)
    right, total = loop(*given)
    assert by_products
    torch.testing.assert_close(posterior, right)
    torch.testing.assert_close(evidence, total)
    given = [t.bfloat16() for t in given]
    (posterior, evidence), by_products = used(*given)
    assert by_products and posterior.dtype == evidence.dtype == torch.bfloat16
    torch.testing.assert_close(posterior.double(), loop(*given)[0], rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("what", ["zero", "range", "nan", "infinite", "impossible", "few", "short"])
def test_what_needs_logarithms(what: str) -> None:
    """Where a product of probabilities might lose something, the scan in log space runs."""
    given = model(STATES - (what == "few"), 30 if what == "short" else 64)
    if what == "zero":
        given[1][2, 3] = -math.inf
    elif what == "range":
        given[1][2, 3] = given[1].max() - 31
    elif what == "nan":
        given[2][5, 1] = math.nan
    elif what == "infinite":
        given[2][5, 1] = math.inf
    elif what == "impossible":
        given[2][5] = -math.inf
    with (
        mock.patch.object(filter_and_viterbi, "forward", side_effect=KeyError("log space")),
        pytest.raises(KeyError, match="log space"),
    ):
        hmm_filter(*given)


def test_the_transition_of_step_0_is_not_read() -> None:
    given = model(STATES, 64, (), True)
    given[1][0] = math.nan
    (posterior, _), by_products = used(*given)
    assert by_products and posterior.isfinite().all()


def test_a_named_backend_and_autocast() -> None:
    given = model(STATES, 64)
    with torch.autocast("cpu", torch.bfloat16):
        (posterior, _), by_products = used(*given)
    assert by_products
    torch.testing.assert_close(posterior, loop(*given)[0].float(), rtol=1e-5, atol=1e-5)
    with mock.patch.object(filter_and_viterbi, "filtered", side_effect=AssertionError):
        torch.testing.assert_close(hmm_filter(*given, backend="eager")[0], posterior)
