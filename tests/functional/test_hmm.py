"""Hidden Markov models against plain loops and the enumeration of all paths."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from vector_engines import VECTOR_ENGINES, VectorEngine

from assocscan import hmm_filter, viterbi

F64 = torch.float64
HERE = [pytest.param(VectorEngine(name, "cpu"), id=name) for name in ("cpu", "eager")]
every_engine = pytest.mark.parametrize("engine", [*HERE, *VECTOR_ENGINES])


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


def error_in_float32(T: int, K: int, backend: str | None) -> tuple[float, float]:
    """Of the posteriors and, relatively, of the evidence, beside a loop in float64."""
    given = [t.float().double() for t in draw(T, K)]
    rows, evidence = filter_loop(*given)
    found = hmm_filter(*(t.float() for t in given), backend=backend)
    error = (found.log_probability.double().exp() - rows.exp()).abs().max()
    return float(error), float((found.log_evidence - evidence).abs() / (1 + evidence.abs()))


@pytest.mark.thinned(7)
@pytest.mark.parametrize("backend", ["cpu", "eager"])
@pytest.mark.parametrize("K", [1, 2, 3, 4])
def test_posteriors_in_float32(K: int, backend: str) -> None:
    posteriors, evidence = error_in_float32(3000, K, backend)
    assert posteriors < 1e-6 and evidence < 1e-6


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["cpu", "eager"])
@pytest.mark.parametrize("K", [2, 4])
def test_posteriors_of_a_long_series_in_float32(K: int, backend: str) -> None:
    posteriors, evidence = error_in_float32(100000, K, backend)
    assert posteriors < 1e-6 and evidence < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cpu", "eager"])
def test_gradients_in_float32(backend: str) -> None:
    """Those of the evidence, and of posteriors late in the series, beside float64."""
    given = [t.float().double() for t in draw(2000, 3)]

    def outcome(dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [t.to(dtype).requires_grad_() for t in given]
        found = hmm_filter(*leaves, backend=backend)
        late = found.log_probability[-100:]
        return torch.autograd.grad(found.log_evidence + (late * late.detach().sin()).sum(), leaves)

    loop = [t.clone().requires_grad_() for t in given]
    rows, evidence = filter_loop(*loop)
    late = rows[-100:]
    want = torch.autograd.grad(evidence + (late * late.detach().sin()).sum(), loop)
    for dtype, tolerance in ((F64, 1e-10), (torch.float32, 2e-5)):
        for _ in range(2):
            for g, w in zip(outcome(dtype), want, strict=True):
                torch.testing.assert_close(
                    g.double(), w, rtol=tolerance, atol=tolerance * float(w.abs().max())
                )


@pytest.mark.thinned(7)
@every_engine
def test_values_of_every_engine(engine: VectorEngine) -> None:
    """First and repeated calls, and with one tensor moved; a step that cannot be taken."""
    initial, transition, likelihood = (t.float() for t in draw(40, 2))
    transition[0, 1] = -math.inf
    rows, evidence = filter_loop(initial, transition, likelihood)
    best = viterbi(initial, transition, likelihood, backend="eager")
    moved = torch.cat([likelihood[:1], likelihood])[1:]
    with engine.running():
        for seen in (likelihood, likelihood, moved):
            given = [t.to(engine.device) for t in (initial, transition, seen)]
            found = hmm_filter(*given, backend=engine.backend)
            torch.testing.assert_close(found.log_probability.cpu(), rows, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(found.log_evidence.cpu(), evidence)
            if engine.device == "cpu" and engine.backend == "cuda":
                continue  # the maps of the way back are emulated for minutes
            path = viterbi(*given, backend=engine.backend)
            assert path.path.tolist() == best.path.tolist()
            torch.testing.assert_close(path.log_probability.cpu(), best.log_probability)


@pytest.mark.parametrize("backend", ["cpu", "eager"])
def test_nan_passes_on(backend: str) -> None:
    """From its step on, and not into the sequence behind it."""
    initial, transition, likelihood = draw(9, 2)
    clean = hmm_filter(initial, transition, likelihood[6:])
    likelihood[4, 1] = math.nan
    found = hmm_filter(initial, transition, likelihood, backend=backend)
    assert found.log_evidence.isnan() and found.log_probability[4:].isnan().all()
    assert found.log_probability[:4].isfinite().all()
    assert viterbi(initial, transition, likelihood, backend=backend).log_probability.isnan()
    offsets = torch.tensor([0, 6, 9])
    packed = hmm_filter(initial, transition, likelihood, offsets=offsets, backend=backend)
    torch.testing.assert_close(packed.log_probability[6:], clean.log_probability)
    torch.testing.assert_close(packed.log_evidence[1], clean.log_evidence)
    assert packed.log_evidence[0].isnan()


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


def test_where_floats_are_float64_by_default() -> None:
    initial, transition, likelihood = torch.rand(2).log(), torch.rand(2, 2).log(), torch.randn(9, 2)
    want = hmm_filter(initial, transition, likelihood, backend="eager")
    torch.set_default_dtype(torch.float64)
    try:
        found = hmm_filter(initial, transition, likelihood, backend="eager")
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found[0], want[0]) and torch.equal(found[1], want[1])
