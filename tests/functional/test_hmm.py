"""Hidden Markov models against plain loops and the enumeration of all paths."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from assocscan import hmm_filter, viterbi

F64 = torch.float64


def draw(T: int, K: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(T)
    sizes = ((K,), (K, K), (T, K))
    return tuple(torch.randn(s, generator=generator, dtype=F64).log_softmax(-1) for s in sizes)


def filter_loop(initial: Tensor, transition: Tensor, likelihood: Tensor) -> tuple[Tensor, Tensor]:
    p, rows, evidence = initial.exp(), [], 0.0
    for t, weights in enumerate(likelihood.exp()):
        p = (p if t == 0 else p @ transition.exp()) * weights
        evidence = evidence + p.sum().log()
        p = p / p.sum()
        rows.append(p)
    return torch.stack(rows).log(), evidence


def path_weights(initial: Tensor, transition: Tensor, likelihood: Tensor) -> dict[tuple, Tensor]:
    T, K = likelihood.shape
    weights = {}
    for path in itertools.product(range(K), repeat=T):
        total = initial[path[0]] + sum(likelihood[t, k] for t, k in enumerate(path))
        weights[path] = total + sum(transition[i, j] for i, j in itertools.pairwise(path))
    return weights


def test_filter() -> None:
    initial, transition, likelihood = draw(40, 3)
    found = hmm_filter(initial, transition, likelihood)
    rows, evidence = filter_loop(initial, transition, likelihood)
    torch.testing.assert_close(found.log_probability, rows)
    torch.testing.assert_close(found.log_evidence, evidence)
    both = hmm_filter(initial, transition, torch.stack([likelihood, likelihood.flip(0)]))
    torch.testing.assert_close(both.log_probability[0], rows)


def test_derivatives_of_the_evidence_are_the_smoothed_probabilities() -> None:
    """Also where some steps are impossible."""
    initial, transition, likelihood = draw(5, 3)
    transition[0, 1] = -math.inf
    parameters = [t.requires_grad_() for t in (initial, transition, likelihood)]
    evidence = hmm_filter(*parameters).log_evidence
    got = torch.autograd.grad(evidence, parameters)
    weights = path_weights(*(t.detach() for t in parameters))
    total = torch.logsumexp(torch.stack(list(weights.values())), 0)
    torch.testing.assert_close(evidence.detach(), total)
    smoothed, visits = torch.zeros(5, 3, dtype=F64), torch.zeros(3, 3, dtype=F64)
    for path, weight in weights.items():
        share = (weight - total).exp()
        for t, k in enumerate(path):
            smoothed[t, k] += share
        for i, j in itertools.pairwise(path):
            visits[i, j] += share
    torch.testing.assert_close(got[2], smoothed)
    torch.testing.assert_close(got[1], visits)
    torch.testing.assert_close(got[0], smoothed[0])


def test_viterbi_finds_the_best_of_all_paths() -> None:
    initial, transition, likelihood = draw(6, 3)
    likelihood.requires_grad_()
    found = viterbi(initial, transition, likelihood)
    weights = path_weights(initial, transition, likelihood)
    best = max(weights, key=lambda path: float(weights[path].detach()))
    assert tuple(found.path.tolist()) == best
    torch.testing.assert_close(found.log_probability, weights[best])
    (gradient,) = torch.autograd.grad(found.log_probability, likelihood)
    assert torch.equal(gradient, torch.nn.functional.one_hot(found.path, 3).to(F64))
    one = viterbi(initial, transition, likelihood[:1])
    assert one.path.tolist() == [int((initial + likelihood[0]).argmax())]


def test_against_hmmlearn() -> None:
    hmm = pytest.importorskip("hmmlearn.hmm")
    initial, transition, likelihood = draw(30, 3)
    model = hmm.CategoricalHMM(3, init_params="")
    model.startprob_, model.transmat_ = initial.exp().numpy(), transition.exp().numpy()
    model.emissionprob_ = torch.eye(3, dtype=F64).numpy() * 0.7 + 0.1
    seen = likelihood.argmax(-1)
    emission = torch.as_tensor(model.emissionprob_).log()[:, seen].T
    found = hmm_filter(initial, transition, emission)
    assert math.isclose(model.score(seen[:, None].numpy()), float(found.log_evidence))
    weight, path = model.decode(seen[:, None].numpy())
    best = viterbi(initial, transition, emission)
    assert best.path.tolist() == path.tolist()
    assert math.isclose(weight, float(best.log_probability))
