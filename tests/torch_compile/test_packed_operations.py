"""Packed scans by torch operations, where offsets have no values: in graphs, and in torch.func."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from assocscan import (
    AssocScanError,
    associative_scan,
    cumprod,
    hmm_smoother,
    matrix_recurrence,
    nn,
    nonlinear_recurrence,
    ops,
    reduce,
    viterbi,
)

pytestmark = pytest.mark.filterwarnings("ignore::assocscan.FallbackWarning")
LIMIT = 10 * 64 * torch.finfo(torch.float32).eps  # of ten steps
# With an empty sequence first, amid, last, or nowhere.
OFFSETS = torch.tensor([0, 4, 4, 7, 10])
OTHERS = [[0, 0, 1, 9, 10], [0, 3, 5, 10, 10], [0, 1, 2, 3, 10]]


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def scan_with_all(a: Tensor, b: Tensor, h: Tensor, offsets: Tensor, **flags: bool) -> Any:
    ys, final = associative_scan(
        "affine",
        (a, b),
        0,
        init=(h, h),
        return_final=True,
        offsets=offsets,
        backend="eager",
        **flags,
    )
    return *ys, *final


def step(h: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(0.5 * h + x)


def folded(left: Tensor, right: Tensor) -> Tensor:
    """No pointwise function, and associative: e^left + e^right by torch.logsumexp."""
    return torch.logsumexp(torch.stack([left, right]), 0)


LAYER = nn.MatrixLRU(8, 2, 16)
HMM = draw(9), draw(9, 9), draw(10, 9)
CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "matrix_recurrence": (
        lambda A, o: matrix_recurrence(A, A[:, 0], axis=0, offsets=o), (draw(10, 15, 15) / 5,)),
    "reduce": (lambda A, o: reduce(ops.matmul, A, 0, offsets=o), (draw(10, 12, 12) / 4,)),
    "hmm_smoother": (lambda *x: hmm_smoother(*x[:3], offsets=x[3]), HMM),
    "viterbi": (lambda *x: viterbi(*x[:3], offsets=x[3])[1], HMM),
    "cumprod": (lambda x, o: cumprod(x, 0, offsets=o, backend="eager"), (draw(10, 3),)),
    "affine": (scan_with_all, (draw(10, 3), draw(10, 3), draw(4, 3))),
    "affine reverse": (
        lambda *x: scan_with_all(*x, reverse=True), (draw(10, 3), draw(10, 3), draw(4, 3))),
    "affine exclusive": (
        lambda *x: scan_with_all(*x, inclusive=False), (draw(10, 3), draw(10, 3), draw(4, 3))),
    "affine exclusive in reverse": (
        lambda *x: scan_with_all(*x, inclusive=False, reverse=True),
        (draw(10, 3), draw(10, 3), draw(4, 3))),
    "steps": (
        lambda x, h, o: nonlinear_recurrence(step, x, h, axis=0, offsets=o, backend="eager"),
        (draw(10, 3), draw(4, 3))),
    "steps in reverse": (
        lambda x, h, o: nonlinear_recurrence(
            step, x, h, axis=0, reverse=True, return_final=True, offsets=o, backend="eager"),
        (draw(10, 3), draw(4, 3))),
    "function": (lambda x, o: associative_scan(folded, x, 0, offsets=o), (draw(10, 3),)),
    "layer": (lambda x, o: LAYER(x, offsets=o)[0], (draw(1, 10, 8),)),
}  # fmt: skip


def weighted(function: Callable[..., Any], *arguments: Tensor) -> Tensor:
    """A number that depends on all results alike, and whose slopes differ."""
    found = function(*arguments)
    leaves = found if isinstance(found, tuple) else (found,)
    return torch.stack(
        [(y * torch.arange(1.0, y.numel() + 1).view(y.shape)).sum() for y in leaves]
    ).sum()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow(4)
def test_a_graph_takes_any_offsets(name: str) -> None:
    """Made once, with gradients; offsets are read when it runs."""
    function, arguments = CASES[name]
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *x: weighted(function, *x), backend="aot_eager", fullgraph=True, dynamic=False
    )
    for values in [OFFSETS.tolist(), *OTHERS]:
        results = []
        for call in (compiled, lambda *x: weighted(function, *x)):
            xs = [x.clone().requires_grad_() for x in arguments]
            y = call(*xs, torch.tensor(values))
            slopes = torch.autograd.grad(y, xs, allow_unused=True) if y.requires_grad else ()
            results.append([y, *slopes])
        torch.testing.assert_close(*results, rtol=LIMIT, atol=LIMIT)


@pytest.mark.parametrize("name", ["matrix_recurrence", "hmm_smoother", "cumprod", "affine"])
def test_torch_func(name: str) -> None:
    function, arguments = CASES[name]

    def loss(*x: Tensor) -> Tensor:
        return weighted(function, *x, OFFSETS)

    xs = [x.clone().requires_grad_() for x in arguments]
    wanted = torch.autograd.grad(loss(*xs), xs)
    got = torch.func.grad(loss, tuple(range(len(xs))))(*arguments)
    torch.testing.assert_close(got, wanted, rtol=LIMIT, atol=LIMIT)
    tangents = [torch.ones_like(x) for x in arguments]
    _, slope = torch.func.jvp(loss, arguments, tuple(tangents))
    size = sum(float(w.abs().sum()) for w in wanted)
    torch.testing.assert_close(slope, sum(w.sum() for w in wanted), rtol=0, atol=LIMIT * size)


def test_what_is_dropped_has_no_slope() -> None:
    """An infinite init of an empty sequence, beside the element that a graph combines it with."""

    def last(h: Tensor, a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
        init = torch.ones_like(h), h
        y = associative_scan("affine", (a, b), 0, init=init, offsets=offsets, backend="eager")[1]
        return weighted(lambda: y)

    torch._dynamo.reset()
    found = []
    for call in (last, torch.compile(last, backend="aot_eager", fullgraph=True)):
        xs = [torch.tensor([1.0, torch.inf, 2.0]), torch.full((4,), 0.5), torch.arange(1.0, 5.0)]
        leaves = [x.requires_grad_() for x in xs]
        y = call(*leaves, torch.tensor([0, 2, 2, 4]))
        found.append([y, *torch.autograd.grad(y, leaves)])
    torch.testing.assert_close(*found)
    assert all(t.isfinite().all() for t in found[0])


def test_export() -> None:
    function, (A,) = CASES["matrix_recurrence"]

    class Module(torch.nn.Module):
        def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
            result: Tensor = function(x, offsets)
            return result

    program = torch.export.export(Module(), (A, OFFSETS)).module()
    for values in OTHERS:
        torch.testing.assert_close(
            program(A, torch.tensor(values)), function(A, torch.tensor(values))
        )


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([0, 4, 3, 7, 10], "must not decrease"),
        ([0, 4, 4, 7, 9], "has length 10"),
        ([1, 4, 4, 7, 10], r"offsets\[0\] is 1"),
    ],
    ids=["decreasing", "short", "late"],
)
def test_wrong_offsets_of_a_graph(values: list[int], words: str) -> None:
    function, (x,) = CASES["cumprod"]
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    compiled(x, OFFSETS)
    with pytest.raises(ValueError, match=words) as caught:
        compiled(x, torch.tensor(values))
    assert isinstance(caught.value, AssocScanError)
