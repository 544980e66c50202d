"""Every named function that scans one axis takes `offsets`: packed sequences give what each gives
alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import assocscan
from assocscan import ScanTypeError, ScanValueError
from assocscan.engines.base import packed_offsets

F64 = torch.float64
LENGTHS = [3, 1, 5, 2]
OFFSETS = torch.tensor([0, 3, 4, 9, 11])
S, L = len(LENGTHS), sum(LENGTHS)
Named = Callable[..., Any]


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.rand(shape, generator=generator, dtype=F64) + 0.5


def logs(*shape: int) -> Tensor:
    return draw(*shape).log_softmax(-1)


def spd(*shape: int) -> Tensor:
    half = draw(*shape, seed=7) / 4
    return half @ half.mT + torch.eye(shape[-1], dtype=F64) / 2


x, flags = draw(2, L), (torch.arange(2 * L) % 3 == 1).view(2, L)
gaps = x.masked_fill(flags, torch.nan)


def decayed(h: Tensor, x: Tensor, rate: Tensor) -> Tensor:
    return torch.tanh(rate * h + x)


KALMAN = {"y": draw(2, L, 1), "F": draw(L, 2, 2) / 4, "H": draw(1, 2), "Q": spd(L, 2, 2),
          "R": spd(1, 1)}  # fmt: skip
# Function; arguments of one time axis (with that axis); arguments that all sequences share; those
# with a leading S; how many results are packed along the time axis, and which axis that is.
CASES: list[tuple[Named, dict[str, tuple[Tensor, int]], dict[str, Any], dict[str, Tensor], Any]] = [
    *((f, {"x": (x, 1)}, {}, {}, [1]) for f in
      (assocscan.cumsum, assocscan.cumprod, assocscan.logcumsumexp)),
    (assocscan.cumsum, {"x": (x, 1)}, {"reverse": True, "inclusive": False}, {}, [1]),
    (assocscan.cumsum, {"x": (x.mT.contiguous(), 0)}, {"axis": 0, "compensated": True}, {}, [0]),
    (assocscan.cumsum, {"x": (x, 1)}, {"include_initial": True}, {}, [1]),
    (assocscan.cumprod, {"x": (x.mT.contiguous(), 0)},
     {"axis": 0, "reverse": True, "include_initial": True}, {}, [0]),
    (assocscan.linear_recurrence, {"a": (x, 1), "b": (draw(2, L, seed=1), 1)},
     {"return_final": True}, {"init": draw(S, 2)}, [1, None]),
    (assocscan.linear_recurrence, {"b": (x.mT.contiguous(), 0)},
     {"a": 0.5, "axis": 0, "reverse": True}, {"init": draw(S, 2)}, [0]),
    (assocscan.linear_recurrence, {"a": (x, 1), "b": (x, 1)}, {"return_final": "only"}, {}, [None]),
    (assocscan.matrix_recurrence, {"A": (draw(2, L, 2, 2) / 2, 1), "b": (draw(2, L, 2), 1)},
     {"return_final": True}, {"init": draw(S, 2, 2)}, [1, None]),
    (assocscan.matrix_recurrence, {"b": (draw(2, L, 2), 1)},
     {"A": draw(2, 2) / 2, "return_final": "only"}, {"init": draw(S, 1, 2)}, [None]),
    (assocscan.selective_scan,
     {k: (draw(1, L, n), 1) for k, n in (("u", 2), ("delta", 2), ("B", 3), ("C", 3))},
     {"A": -draw(2, 3), "return_final": True}, {"init": draw(S, 1, 2, 3)}, [1, None]),
    (assocscan.nonlinear_recurrence, {"xs": (x, 1)},
     {"step": decayed, "params": draw(2), "return_final": True}, {"init": draw(S, 2)}, [1, None]),
    (assocscan.nonlinear_recurrence, {"xs": (x.mT.contiguous(), 0)},
     {"step": decayed, "init": draw(2), "params": 0.5, "lower": lambda h, x: h * x, "axis": 0,
      "reverse": True}, {}, [0]),
    (assocscan.lfilter, {"x": (x, 1)}, {"b": draw(4), "a": draw(3)}, {}, [1]),
    (assocscan.lfilter, {"x": (x.mT.contiguous(), 0)}, {"b": draw(2), "a": draw(1), "axis": 0}, {},
     [0]),
    (assocscan.sosfilt, {"x": (x, 1)}, {"sos": draw(2, 6), "return_final": True},
     {"zi": draw(S, 2, 2, 2)}, [1, None]),
    (assocscan.sosfilt, {"x": (x.mT.contiguous(), 0)}, {"sos": draw(1, 6), "axis": 0}, {}, [0]),
    (assocscan.forward_fill, {"x": (gaps, 1)}, {}, {}, [1]),
    (assocscan.ewm_mean, {"x": (gaps, 1), "alpha": (x / 2, 1)}, {}, {}, [1]),
    (assocscan.ewm_mean, {"x": (gaps.mT.contiguous(), 0)},
     {"alpha": 0.3, "adjust": False, "axis": 0}, {}, [0]),
    (assocscan.ewm_var, {"x": (gaps, 1)}, {"alpha": 0.3, "ignore_na": True}, {}, [1]),
    (assocscan.ewm_var, {"x": (gaps, 1)}, {"alpha": 0.3, "bias": True}, {}, [1]),
    (assocscan.forward_fill, {"x": (x, 1), "valid": (flags, 1)}, {"reverse": True}, {}, [1]),
    (assocscan.forward_fill, {"x": (gaps, 1)}, {"limit": 1}, {}, [1]),
    (assocscan.windowed, {"xs": (x, 1)}, {"op": "logaddexp", "width": 3, "axis": 1}, {}, [1]),
    (assocscan.windowed, {"xs": (x.mT.contiguous(), 0)},
     {"op": torch.add, "width": 2, "reverse": True}, {}, [0]),
    (assocscan.discounted_returns, {"rewards": (x, 1), "done": (flags, 1)}, {"discount": 0.9},
     {"bootstrap": draw(S, 2)}, [1]),
    (assocscan.gae, {"rewards": (x, 1), "values": (draw(2, L, seed=3), 1), "done": (flags, 1)},
     {"discount": 0.9, "decay": 0.8}, {"bootstrap": draw(S, 2)}, [1]),
    (assocscan.vtrace,
     {"log_ratios": (x - 1, 1), "rewards": (x, 1), "values": (draw(2, L, seed=3), 1),
      "truncated": (flags, 1), "next_values": (draw(2, L, seed=4), 1)},
     {"discount": 0.9}, {"bootstrap": draw(S, 2)}, [1, 1]),
    (assocscan.hmm_filter, {"likelihood": (logs(2, L, 3), 1)}, {"transition": logs(3, 3)},
     {"initial": logs(S, 2, 3)}, [1, None]),
    (assocscan.hmm_filter, {"likelihood": (logs(2, L, 3), 1), "transition": (logs(L, 3, 3), 0)},
     {"initial": logs(3)}, {}, [1, None]),
    (assocscan.hmm_smoother,
     {"likelihood": (logs(2, L, 3), 1), "observed": (~flags, 1)}, {"transition": logs(3, 3)},
     {"initial": logs(S, 2, 3)}, [1]),
    (assocscan.viterbi, {"likelihood": (logs(2, L, 3), 1), "transition": (logs(L, 3, 3), 0)}, {},
     {"initial": logs(S, 2, 3)}, [1, None]),
    (assocscan.kalman_filter, {"y": (KALMAN["y"], 1), "F": (KALMAN["F"], 0), "Q": (KALMAN["Q"], 0)},
     {"H": KALMAN["H"], "R": KALMAN["R"]},
     {"mean": draw(S, 2, 2), "covariance": spd(S, 2, 2, 2)}, [1, 1, None]),
    (assocscan.kalman_filter,
     {"y": (KALMAN["y"], 1), "controls": (draw(2, L, 1), 1), "observed": (~flags, 1)},
     {**{k: KALMAN[k] for k in "HR"}, "F": KALMAN["F"][0], "Q": KALMAN["Q"][0], "B": draw(2, 1)},
     {"mean": draw(S, 2, 2), "covariance": spd(S, 2, 2, 2)}, [1, 1, None]),
    (assocscan.rts_smoother, {"mean": (draw(2, L, 2), 1), "covariance": (spd(2, L, 2, 2), 1),
                              "F": (KALMAN["F"], 0), "Q": (KALMAN["Q"], 0)}, {}, {}, [1, 1]),
]  # fmt: skip
each_case = pytest.mark.parametrize(
    "case", CASES, ids=lambda c: f"{c[0].__name__}-{'-'.join(c[2]) or 'plain'}"
)
# They scan, but not one axis each, or return what has no sequences.
PADDING = {"offsets_of", "lengths_of", "to_padded", "from_padded"}
OTHERS = {"explain_recurrence", "compact", "run_lengths", "run_length_encode", "stream", *PADDING}


def test_the_table_has_every_function() -> None:
    public = [getattr(assocscan, n) for n in assocscan.__all__ if n.islower()]
    named = {f.__name__ for f in public if getattr(f, "__module__", "").count(".functional.")}
    tested = {case[0].__name__ for case in CASES} | {"cummax", "cummin"}
    assert named - OTHERS == tested
    for name in tested:
        parameter = inspect.signature(getattr(assocscan, name)).parameters["offsets"]
        assert parameter.kind is parameter.KEYWORD_ONLY and parameter.default is None


def parts(case: Any, lengths: list[int]) -> list[dict[str, Any]]:
    """The arguments of each sequence alone."""
    _, series, shared, states, _ = case
    cut = {k: t.split(lengths, axis) for k, (t, axis) in series.items()}
    return [
        {**shared, **{k: ts[s] for k, ts in cut.items()}, **{k: t[s] for k, t in states.items()}}
        for s in range(len(lengths))
    ]


def whole(case: Any) -> dict[str, Any]:
    _, series, shared, states, _ = case
    return {**shared, **{k: t for k, (t, _) in series.items()}, **states}


def joined(case: Any, results: list[list[Tensor]]) -> list[Tensor]:
    """The results of the sequences as one call returns them."""
    columns = zip(*results, strict=True)
    return [
        torch.stack(column) if axis is None else torch.cat(column, axis)
        for column, axis in zip(columns, case[4], strict=True)
    ]


@pytest.mark.thinned(9)
@each_case
@pytest.mark.parametrize("backend", ["cpu", "eager"])
def test_packed_sequences_are_those_of_each_alone(case: Any, backend: str) -> None:
    function = case[0]
    alone = [tree_leaves(function(**given, backend=backend)) for given in parts(case, LENGTHS)]
    for offsets in (OFFSETS, OFFSETS.int()):
        got = tree_leaves(function(**whole(case), offsets=offsets, backend=backend))
        for result, want in zip(got, joined(case, alone), strict=True):
            assert result.dtype == want.dtype
            torch.testing.assert_close(result, want, equal_nan=True)


@pytest.mark.thinned(9)
@each_case
def test_gradients(case: Any) -> None:
    function, _, _, states, _ = case

    def gradients(packed: bool) -> list[Tensor]:
        given = whole(case)
        wanted = {k: t.detach().clone().requires_grad_() for k, t in given.items()
                  if isinstance(t, Tensor) and t.is_floating_point()}  # fmt: skip
        given |= wanted
        if packed:
            results = tree_leaves(function(**given, offsets=OFFSETS))
        else:
            series = {k: (given[k], axis) for k, (_, axis) in case[1].items()}
            shared = {k: given[k] for k in case[2]}
            again = (function, series, shared, {k: given[k] for k in states}, case[4])
            results = joined(case, [tree_leaves(function(**p)) for p in parts(again, LENGTHS)])
        tracked = [t.nan_to_num() for t in results if t.requires_grad]
        weights = [torch.linspace(-1, 2, t.numel(), dtype=F64).view(t.shape) for t in tracked]
        return [*torch.autograd.grad(tracked, list(wanted.values()), weights, allow_unused=True)]

    torch.testing.assert_close(gradients(True), gradients(False), equal_nan=True)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("function", [assocscan.cummax, assocscan.cummin])
def test_positions_are_those_of_the_whole_axis(function: Named, reverse: bool) -> None:
    values, indices = function(x, reverse=reverse, offsets=OFFSETS)
    for begin, end in zip(OFFSETS[:-1].tolist(), OFFSETS[1:].tolist(), strict=True):
        part = function(x[:, begin:end], reverse=reverse)
        assert torch.equal(values[:, begin:end], part.values)
        assert torch.equal(indices[:, begin:end], part.indices + begin)


def test_empty_sequences() -> None:
    """They write nothing; what leaves them is what entered."""
    offsets = torch.tensor([0, 0, 3, 3])
    b, init = draw(3), draw(3)
    h, last = assocscan.linear_recurrence(
        0.5, b, init, 0, return_final=True, offsets=offsets
    )  # fmt: skip
    torch.testing.assert_close(h, assocscan.linear_recurrence(0.5, b, init[1], 0))
    torch.testing.assert_close(last, torch.stack([init[0], h[-1], init[2]]))
    likelihood, initial = logs(3, 2), logs(3, 2)
    transition = logs(2, 2)
    filtered, evidence = assocscan.hmm_filter(initial, transition, likelihood, offsets=offsets)
    alone = assocscan.hmm_filter(initial[1], transition, likelihood)
    torch.testing.assert_close(filtered, alone.log_probability)
    torch.testing.assert_close(evidence[1], alone.log_evidence)
    torch.testing.assert_close(evidence[::2], torch.zeros(2, dtype=F64))
    path, best = assocscan.viterbi(initial, transition, likelihood, offsets=offsets)
    assert torch.equal(path, assocscan.viterbi(initial[1], transition, likelihood).path)
    torch.testing.assert_close(best[::2], initial[::2].max(-1).values)
    one = torch.ones(1, 1, dtype=F64)
    found = assocscan.kalman_filter(draw(3, 1), one, one, one, one, draw(1), one, offsets=offsets)
    assert found.log_likelihood.shape == (3,) and found.log_likelihood[::2].tolist() == [0, 0]
    returns = assocscan.gae(b, b, init, 0.9, 0.9, offsets=offsets)
    torch.testing.assert_close(returns, assocscan.gae(b, b, init[1], 0.9, 0.9))


@each_case
def test_wrong_offsets(case: Any) -> None:
    function, given = case[0], whole(case)
    with pytest.raises(ScanValueError, match="axis has length 11"):
        function(**given, offsets=torch.tensor([0, 3, 4, 9, 12]))
    with pytest.raises(ScanTypeError, match="offsets must be int32 or int64"):
        function(**given, offsets=OFFSETS.double())
    with pytest.raises(ScanTypeError, match="offsets must be a tensor, got list"):
        function(**given, offsets=OFFSETS.tolist())


@pytest.mark.slow(10)
@each_case
def test_offsets_are_checked_once(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though a function may use them itself, in several scans, too."""
    checks = []
    monkeypatch.setattr(packed_offsets, "validated", lambda values, _: checks.append(1) or values)
    function, given = case[0], whole(case)
    for offsets in (OFFSETS, OFFSETS.int()):
        function(**given, offsets=offsets)
        assert checks == [1]
        checks.clear()


@pytest.mark.parametrize("function", [assocscan.linear_recurrence, assocscan.matrix_recurrence])
def test_states_of_other_counts(function: Named) -> None:
    b = draw(2, L, 2)
    a = draw(2, L, 2) if function is assocscan.linear_recurrence else draw(2, 2)
    with pytest.raises(ScanValueError, match=r"init.*\[4, 2"):
        function(a, b, draw(3, 2, 2), offsets=OFFSETS)


def test_compiled() -> None:
    def call(x: Tensor, init: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
        h, last = assocscan.linear_recurrence(
            0.5, x, init, return_final=True, offsets=offsets
        )  # fmt: skip
        advantage = assocscan.gae(x, x, init, 0.9, 0.9, offsets=offsets)
        return h, last, advantage, assocscan.cumsum(x, offsets=offsets)

    given = x, draw(S, 2), OFFSETS
    compiled: Any = torch.compile(call, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*given), call(*given))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.thinned(8)
@each_case
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_on_a_gpu(case: Any, where: str) -> None:
    """Offsets there are not waited for, nor are those that come from the CPU."""
    function, given = case[0], whole(case)
    moved = {k: t.cuda() if isinstance(t, Tensor) else t for k, t in given.items()}
    got = tree_leaves(function(**moved, offsets=OFFSETS.to(where)))
    for result, want in zip(got, tree_leaves(function(**given, offsets=OFFSETS)), strict=True):
        torch.testing.assert_close(result.cpu(), want, equal_nan=True)
