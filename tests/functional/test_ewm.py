"""`ewm_mean` and `ewm_var` beside pandas and beside loops."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from table import Engine
from torch import Tensor

from assocscan import (
    AxisError,
    ScanTypeError,
    ScanValueError,
    associative_scan,
    ewm_mean,
    ewm_var,
    linear_recurrence,
    ops,
)

F64, NAN = torch.float64, math.nan
MODES = list(itertools.product((True, False), (True, False)))
every_mode = pytest.mark.parametrize("adjust,ignore_na", MODES)
LENGTH = 40


def sample(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def with_gaps(*shape: int) -> Tensor:
    """Rows that begin with a gap, have none, hold nothing, and hold infinite values."""
    x = sample(*shape)
    x = x.masked_fill(sample(*shape, seed=1) > 0.5, NAN)
    x[0, :4], x[1] = NAN, sample(shape[1], seed=2)
    x[2], x[3, 5], x[3, 9] = NAN, math.inf, -math.inf
    return x


Moments = tuple[Tensor, Tensor, Tensor]


def loop(x: Tensor, alpha: Tensor, adjust: bool, ignore_na: bool) -> Moments:
    """Mean, biased and unbiased variance, one step after the other: all weights are kept."""
    rows: list[list[Tensor]] = [[], [], []]
    valid = x.isfinite()
    x = torch.where(valid, x, 0)
    weights = torch.zeros_like(x)
    alpha = alpha.expand(x.shape)
    for t in range(x.shape[-1]):
        seen, here = valid[..., t], torch.arange(x.shape[-1]) == t
        is_step = (seen | (not ignore_na))[..., None]
        weights = torch.where(is_step, weights * (1 - alpha[..., t, None]), weights)
        new = torch.ones_like(alpha[..., t])
        if not adjust:
            new = torch.where(valid[..., :t].any(-1), alpha[..., t], new)
        weights = torch.where(seen[..., None] & here, new[..., None], weights)
        any_yet = valid[..., : t + 1].any(-1)
        total = torch.where(any_yet[..., None], weights.sum(-1, keepdim=True), 1)
        if not adjust:
            weights = torch.where(seen[..., None], weights / total, weights)
        share = weights / torch.where(any_yet[..., None], weights.sum(-1, keepdim=True), 1)
        mean = (share * x).sum(-1)
        v = (share * (x - mean[..., None]).square()).sum(-1)
        u = 1 - share.square().sum(-1)
        has_two = valid[..., : t + 1].sum(-1) > 1
        rows[0].append(torch.where(any_yet, mean, NAN))
        rows[1].append(torch.where(any_yet, v, NAN))
        rows[2].append(torch.where(has_two, v / torch.where(has_two, u, 1), NAN))
    mean, biased, unbiased = (torch.stack(row, -1) for row in rows)
    return mean, biased, unbiased


def scans(x: Tensor, alpha: Any, adjust: bool, ignore_na: bool, **options: Any) -> Moments:
    return (
        ewm_mean(x, alpha, adjust, ignore_na, **options),
        ewm_var(x, alpha, adjust, ignore_na, True, **options),
        ewm_var(x, alpha, adjust, ignore_na, **options),
    )


@pytest.mark.slow(2)
@every_mode
@pytest.mark.parametrize("alpha", [0.05, 0.3, 0.7, 1.0])
def test_as_in_pandas(alpha: float, adjust: bool, ignore_na: bool) -> None:
    pandas = pytest.importorskip("pandas")
    x = with_gaps(6, LENGTH)
    ewm = pandas.DataFrame(x.T.numpy()).ewm(alpha=alpha, adjust=adjust, ignore_na=ignore_na)
    want = ewm.mean(), ewm.var(bias=True), ewm.var()
    for call in range(2):
        axis, given = (-1, x) if call else (0, x.mT.contiguous())
        for found, frame in zip(
            scans(given, alpha, adjust, ignore_na, axis=axis), want, strict=True
        ):
            found = found if call else found.mT
            expected = torch.tensor(frame.to_numpy()).mT
            # pandas divides by a difference, which loses digits where one weight is far above all.
            torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-7, atol=1e-12)


def test_half_is_no_special_value() -> None:
    """pandas takes α = 0.5 for irregular times, and gives another value here."""
    x = torch.tensor([1.0, NAN, 2.0])
    for alpha in (0.5, 0.5000001):
        y = ewm_mean(x, alpha, adjust=False)
        torch.testing.assert_close(y[-1], torch.tensor((0.25 + 0.5 * 2) / 0.75))


def values_and_gradients(
    function: Callable[..., Moments], x: Tensor, alpha: Tensor, mode: tuple[bool, bool], **o: Any
) -> list[Tensor]:
    leaves = [x.clone().requires_grad_(), alpha.clone().requires_grad_()]
    results = function(*leaves, *mode, **o)
    sizes = [sample(*y.shape, seed=5 + k).to(y) for k, y in enumerate(results)]
    total = sum((y * g).nansum() for y, g in zip(results, sizes, strict=True))
    assert isinstance(total, Tensor)
    return [*(y.detach() for y in results), *torch.autograd.grad(total, leaves)]


@pytest.mark.thinned(7)
@every_mode
def test_beside_a_loop(engine: Engine, adjust: bool, ignore_na: bool) -> None:
    """Values and gradients; those at gaps are 0. An alpha for each row, then one for each step."""
    if engine.interpreted and (adjust, ignore_na) != (False, False):
        pytest.skip("the interpreter takes long")
    x = with_gaps(5, 12).float()
    steps = 0.1 + 0.8 * torch.rand(5, 12, generator=torch.Generator().manual_seed(3))
    for alpha in (steps[:, :1], steps):
        want = values_and_gradients(loop, x.double(), alpha.double(), (adjust, ignore_na))
        on = engine.put(x), engine.put(alpha)
        found = values_and_gradients(scans, *on, (adjust, ignore_na), backend=engine.name)
        for got, expected in zip(found, want, strict=True):
            torch.testing.assert_close(
                got.cpu().double(), expected, equal_nan=True, rtol=2e-4, atol=2e-4
            )
        assert (found[3].cpu()[~x.isfinite()] == 0).all()


@pytest.mark.exhaustive
@every_mode
def test_second_derivatives(adjust: bool, ignore_na: bool) -> None:
    x, gaps = sample(2, 6), torch.tensor([True, False, False, True, True, False])
    alpha = torch.tensor([[0.3], [0.8]], dtype=F64)

    def call(x: Tensor, alpha: Tensor) -> Tensor:
        x = x.masked_fill(gaps, NAN)
        return torch.cat([y[..., 1:] for y in scans(x, alpha, adjust, ignore_na)]).nan_to_num(0)

    leaves = [t.requires_grad_() for t in (x, alpha)]
    torch.autograd.gradcheck(call, leaves)
    torch.autograd.gradgradcheck(call, leaves)


def float32_loop(x: np.ndarray[Any, Any], alpha: float) -> tuple[Any, Any]:
    """Mean and biased variance as pandas' loops compute them, in float32."""
    one, decay = np.float32(1), np.float32(1) - np.float32(alpha)
    mean, v, weight = x[0], np.zeros_like(x[0]), one
    means, variances = [mean], [v]
    for new in x[1:]:
        weight, before = weight * decay, mean
        total = weight + one
        mean = (weight * before + new) / total
        v = (weight * (v + (before - mean) ** 2) + (new - mean) ** 2) / total
        weight = total
        means.append(mean)
        variances.append(v)
    return np.stack(means, -1), np.stack(variances, -1)


@pytest.mark.slow(2)
@pytest.mark.parametrize("alpha", [0.3, 1e-3])
def test_float32_over_many_steps(alpha: float) -> None:
    """At most the errors of a loop in float32, about: 0 and 10⁶ with noise, and a value of 10¹²
    that fades."""
    pandas = pytest.importorskip("pandas")
    noise = sample(100000)
    spike = torch.ones(100000, dtype=F64) + noise / 100
    spike[3] = 1e12
    x = torch.stack([noise, 1e6 + noise, spike]).float()
    ewm = pandas.DataFrame(x.mT.double().numpy()).ewm(alpha=alpha)
    loops = float32_loop(x.mT.numpy(), alpha)
    found = ewm_mean(x, alpha), ewm_var(x, alpha, bias=True)
    for got, looped, frame in zip(found, loops, (ewm.mean(), ewm.var(bias=True)), strict=True):
        exact = frame.to_numpy().T
        size = np.abs(exact)
        size[:2] = size[:2].max(-1, keepdims=True)
        errors = [(np.abs(t - exact) / np.maximum(size, 1e-20))[:, 5:].max(-1)
                  for t in (got.numpy(), looped)]  # fmt: skip
        assert (errors[0] <= np.maximum(3 * errors[1], 2e-6)).all(), errors


def test_long_gaps_change_nothing() -> None:
    """The weights would underflow within the gap, and did not mean anything before its end."""
    x = torch.full((400,), NAN)
    x[:2], x[390] = torch.tensor([2.0, 5.0]), 7.0
    for adjust in (True, False):
        y, v = ewm_mean(x, 0.5, adjust), ewm_var(x, 0.5, adjust, bias=True)
        assert y[1:390].unique().shape == (1,) and v[1:390].unique().shape == (1,)
        assert y[390] == 7 and v[390] < 1e-30
    constant = torch.full((1000,), 0.1)
    assert (ewm_mean(constant, 0.03) == 0.1).all() and (ewm_var(constant, 0.03)[1:] == 0).all()
    large = torch.tensor([3e38, -3e38, 3e38, -3e38])
    assert ewm_mean(large, 0.4).isfinite().all()


def test_packed() -> None:
    x, offsets = with_gaps(5, LENGTH), torch.tensor([0, 7, 7, 20, LENGTH])
    for mode in MODES:
        found = scans(x, 0.3, *mode, offsets=offsets)
        parts = [scans(t, 0.3, *mode) for t in x.split(offsets.diff().tolist(), 1)]
        for got, *alone in zip(found, *parts, strict=True):
            torch.testing.assert_close(got, torch.cat(alone, 1), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int32, torch.bool])
def test_dtypes(dtype: torch.dtype) -> None:
    """16-bit floats are rounded once; integers become floats."""
    x = (10 * sample(2, 3000)).to(dtype)
    want = scans(x.to(F64), 0.01, True, False)
    for found, exact in zip(scans(x, 0.01, True, False), want, strict=True):
        assert found.dtype == (dtype if dtype.is_floating_point else torch.float32)
        torch.testing.assert_close(found.double(), exact, equal_nan=True, rtol=4e-3, atol=4e-3)
    alpha = torch.tensor(0.01, dtype=F64)
    assert ewm_mean(x, alpha).dtype == ewm_mean(x, 0.01).dtype


def test_addresses_strides_and_sizes() -> None:
    """The same call again, one element further, of other strides, and of no or one step."""
    whole = with_gaps(5, LENGTH + 1).float()
    for x in (whole[:, :-1], whole[:, :-1], whole[:, 1:], whole[::2, ::3], whole.mT.clone().mT):
        want = scans(x.double(), 0.2, True, False)
        for got, exact in zip(scans(x, 0.2, True, False), want, strict=True):
            torch.testing.assert_close(got.double(), exact, equal_nan=True, rtol=1e-4, atol=1e-4)
    for shape in ((0,), (2, 0), (0, 3), (1,)):
        x = sample(*shape)
        y, v, _ = scans(x, 0.5, True, False)
        assert y.shape == x.shape and torch.equal(y, x) and (v == 0).all()


def test_compiled_and_mapped() -> None:
    x, alpha = with_gaps(5, LENGTH), torch.tensor([[0.3]], dtype=F64)

    def call(x: Tensor, alpha: Tensor) -> Moments:
        return scans(x, alpha, False, False)

    want = call(x, alpha)
    compiled: Any = torch.compile(call, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(x, alpha), want, equal_nan=True)
    mapped = torch.func.vmap(call, (0, None))(x[:, None], alpha)
    torch.testing.assert_close([t[:, 0] for t in mapped], list(want), equal_nan=True)


x = torch.ones(4, 5)


@pytest.mark.parametrize(
    "call,error,words",
    [
        (lambda: ewm_mean(x, 0.0), ScanValueError, r"alpha is 0\.0, expected 0 < alpha"),
        (lambda: ewm_mean(x, 1.5), ScanValueError, r"alpha is 1\.5"),
        (lambda: ewm_mean(x, NAN), ScanValueError, "alpha is nan"),
        (lambda: ewm_mean(x, True), ScanTypeError, "alpha is a bool"),
        (lambda: ewm_var(x, "a"), ScanTypeError, "alpha is a str"),
        (lambda: ewm_var(x, torch.tensor([0.5, 2.0])[:, None, None]), ScanValueError, "broadcast"),
        (lambda: ewm_var(x, torch.tensor([2.0])), ScanValueError, r"alpha holds 2\.0"),
        (lambda: ewm_var(x, torch.ones(4)), ScanValueError, r"alpha has shape \[4\].*\[4, 5\]"),
        (lambda: ewm_var(x, torch.ones(5).long()), ScanTypeError, r"alpha\.float\(\)"),
        (lambda: ewm_var(x, torch.ones(5, device="meta")), ScanValueError, "alpha is on meta"),
        (lambda: ewm_mean(x + 0j, 0.5), ScanTypeError, "x has dtype torch.complex64"),
        (lambda: ewm_mean([1.0], 0.5), ScanTypeError, "x is a list"),
        (lambda: ewm_mean(x, 0.5, axis=2), AxisError, r"axis 2.*\[4, 5\]"),
        (lambda: ewm_mean(torch.tensor(1.0), 0.5), AxisError, r"shape \[\]"),
        (lambda: ewm_mean(x, 0.5, "no"), ScanTypeError, "adjust is 'no'"),
        (lambda: ewm_var(x, 0.5, bias=2), ScanTypeError, "bias is 2"),
    ],
)
def test_refused(call: Callable[[], Tensor], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


def test_series_in_chunks() -> None:
    """As the docstring says how they go on."""
    x, alpha, axis = torch.rand(3, 20, dtype=torch.float64), 0.3, 1
    parts, y = [], ewm_mean(x[:, :8], alpha, adjust=False)
    parts.append(y)
    for chunk in (x[:, 8:9], x[:, 9:]):
        b, last = alpha * chunk, parts[-1][:, -1]
        parts.append(linear_recurrence(1 - alpha, b, init=last, axis=axis))
    torch.testing.assert_close(torch.cat(parts, 1), ewm_mean(x, alpha, adjust=False))
    state, parts = None, []
    for chunk in (x[:, :8], x[:, 8:9], x[:, 9:]):
        decay = torch.tensor(1 - alpha, dtype=x.dtype).expand(chunk.shape)
        y, state = associative_scan(ops.ema, (chunk, decay), axis, init=state, return_final=True)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), ewm_mean(x, alpha))
