"""Exponentially weighted moving means and variances, as pandas has them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...api.flags_and_backends import checked_backend, flag
from ...api.tensor_subclasses import overridable
from ...errors import ScanTypeError, ScanValueError
from ...monoids.leaf_checks import check_axis, check_tensor
from ...monoids.monoid import Monoid
from ...wording import shown
from ..argument_errors import check_devices, named_scan
from ..operands import carry_dtype, checked_offsets, expanded, is_readable
from .weighted_moments import FADES, MEANS, VARIANCES

__all__ = ["ewm_mean", "ewm_var"]


@overridable
def ewm_mean(
    x: Tensor,
    alpha: Tensor | float,
    adjust: bool = True,
    ignore_na: bool = False,
    axis: int = -1,
    *,
    offsets: Tensor | None = None,
    backend: str | None = None,
    deterministic: bool | None = None,
) -> Tensor:
    """Exponentially weighted moving mean, with the values of pandas.

        y[t] = Σ w[s]·x[s] / Σ w[s], over s ≤ t, with w[s] = (1 − α)^(t − s)

    >>> import torch, assocscan
    >>> assocscan.ewm_mean(torch.tensor([4.0, 1.0, 1.0]), 0.5)
    tensor([4.0000, 2.0000, 1.4286])

    As `Series.ewm(alpha=α, adjust=…, ignore_na=…).mean()`:

    x: any shape with at least one dimension, real. NaN and infinite values are gaps: they are left
        out, and y[t] is there the mean of what came before; NaN before the first observation.
    alpha: a number, 0 < α ≤ 1, or a tensor that broadcasts to the shape of x: [channels, 1] beside
        x [channels, L]. It may change along the axis: step t multiplies what came before by
        1 − α[t].
    adjust: `False` gives y[t] = (1 − α)·y[t−1] + α·x[t], with y[0] = x[0]. The average that
        begins with y[−1] = 0 is linear_recurrence(1 - alpha, alpha * x, axis=axis).
        A series without gaps that comes in chunks goes on with
        linear_recurrence(1 - alpha, alpha * x, init=y, axis=axis), y the last mean of the chunk
        before; with `adjust=True` take associative_scan(ops.ema, (x, decay), axis, init=state,
        return_final=True) for all chunks, with decay 1 − α in the shape of x.
    ignore_na: whether gaps do not count as steps. By default what came before fades in a gap, too:
        with `adjust=False` an observation k steps after the last one makes of y the mean
        ((1 − α)^k·y + α·x) / ((1 − α)^k + α), as pandas documents it. (For α = 0.5 alone the code
        of pandas 3.1 divides otherwise: it takes that α for irregular times.)

    offsets: int64 or int32 [S + 1], the boundaries of S sequences packed along the axis, each with
        a start of its own.

    >>> nan = float("nan")
    >>> assocscan.ewm_mean(torch.tensor([4.0, nan, 1.0]), 0.5)
    tensor([4.0000, 4.0000, 1.6000])
    >>> assocscan.ewm_mean(torch.tensor([4.0, nan, 1.0]), 0.5, ignore_na=True)
    tensor([4., 4., 2.])

    `offsets`, `backend` and `deterministic` mean what they mean in `associative_scan`.

    Returns y in the shape and dtype of x; integers and bool are converted to the default float
    dtype, and 16-bit floats are computed in float32. Differentiable in x and in a tensor alpha;
    the gradient at gaps is 0.

    Numbers: as exact as a loop in the dtype of the computation. α enters as 1 − α, whose rounding
    changes α by up to 3e-8 in float32: means over more than 10⁶ steps are for float64.

    Raises:
        TypeError: x is not a tensor of real numbers, or alpha neither a number nor a tensor of
            floats.
        ValueError: alpha is not in (0, 1], where that can be read without waiting for a GPU; it
            does not broadcast to x, or is on another device.
        IndexError, ValueError: `axis` is out of range (`AxisError`).

    Cost per element: about 25 flops; reads x twice, writes y, writes and reads one number more.

    Source: D. H. D. West, "Updating mean and variance estimates: an improved method",
    Communications of the ACM 22(9), 1979.
    """
    adjust = mode("adjust", adjust)
    engine = {"offsets": offsets, "backend": backend, "deterministic": deterministic}
    return _scanned(MEANS[adjust], x, alpha, adjust, ignore_na, axis, engine)


def mode(name: str, value: Any) -> bool:
    """A bool argument at a position where other functions have `axis`: an int is refused, so that
    an axis passed by position is not read as a flag."""
    if isinstance(value, int) and not isinstance(value, bool):
        raise ScanTypeError(
            f"{name} is {value}, expected True or False; pass the axis by name, axis={value}"
        )
    return flag(name, value)


@overridable
def ewm_var(
    x: Tensor,
    alpha: Tensor | float,
    adjust: bool = True,
    ignore_na: bool = False,
    bias: bool = False,
    axis: int = -1,
    *,
    offsets: Tensor | None = None,
    backend: str | None = None,
    deterministic: bool | None = None,
) -> Tensor:
    """Exponentially weighted moving variance, with the values of pandas.

        v[t] = Σ w[s]·(x[s] − m[t])² / Σ w[s], with the weights w and the mean m of `ewm_mean`

    >>> import torch, assocscan
    >>> x = torch.tensor([4.0, 1.0, 1.0])
    >>> assocscan.ewm_var(x, 0.5, bias=True)
    tensor([0.0000, 2.0000, 1.1020])
    >>> assocscan.ewm_var(x, 0.5)
    tensor([   nan, 4.5000, 1.9286])

    As `Series.ewm(alpha=α, adjust=…, ignore_na=…).var(bias=…)`. With `bias=False` v is divided by
    1 − Σ w² / (Σ w)², so that its expectation is the variance of independent x; it is NaN where
    only one observation has any weight. (pandas 3.1 has 0 there at some steps of a gap after the
    first observation, by rounding.)

    All other arguments, gaps, dtypes, derivatives and errors are as in `ewm_mean`.

    `offsets`, `backend` and `deterministic` mean what they mean in `associative_scan`.

    Numbers: v is a sum of squares of distances from means, not a difference of large numbers.
    Distances whose square is beyond the dtype (2e19 in float32) give an infinite v, or NaN.

    Cost per element: about 40 flops; reads x twice, writes v, writes and reads one number more.

    Source: D. H. D. West, "Updating mean and variance estimates: an improved method",
    Communications of the ACM 22(9), 1979.
    """
    adjust = mode("adjust", adjust)
    op = VARIANCES[adjust, flag("bias", bias)]
    engine = {"offsets": offsets, "backend": backend, "deterministic": deterministic}
    return _scanned(op, x, alpha, adjust, ignore_na, axis, engine)


def _scanned(
    op: Monoid,
    x: Tensor,
    alpha: Tensor | float,
    adjust: bool,
    ignore_na: bool,
    axis: int,
    engine: dict[str, Any],
) -> Tensor:
    """Two scans: the fade of each observation (if gaps count as steps or `adjust` is off), then the
    weighted moments of all observations up to each step."""
    checked_backend(engine["backend"], engine["deterministic"])
    ignore_na = mode("ignore_na", ignore_na)
    check_tensor("x", x)
    if x.is_complex():
        raise ScanTypeError(f"x has dtype {x.dtype}, expected real numbers")
    dtype = x.dtype if x.is_floating_point() else torch.get_default_dtype()
    x = x.to(carry_dtype(dtype))
    axis = check_axis(axis, x.shape, x.dim(), "x")
    engine["offsets"] = checked_offsets(engine["offsets"], x, axis)
    alpha = checked_alpha(alpha, x)
    names = {"xs": "x", "xs[0]": "x", "xs[1]": "alpha", "xs[2]": "alpha"}
    if adjust and ignore_na:
        fade = 1 - alpha
    else:
        steps = x.detach(), alpha.expand(x.shape)
        fade = named_scan(names, FADES[ignore_na], steps, axis, inclusive=False, **engine)
    leaves = (x, fade) if adjust else (x, fade, alpha)
    xs = tuple(t.expand(x.shape) for t in leaves)
    y: Tensor = named_scan(names, op, xs, axis, **engine)
    return y.to(dtype)


def checked_alpha(alpha: object, x: Tensor) -> Tensor:
    """alpha as a tensor in the dtype of x that broadcasts to it."""
    if isinstance(alpha, (int, float)) and not isinstance(alpha, bool):
        if not 0 < alpha <= 1:
            raise ScanValueError(f"alpha is {shown(alpha)}, expected 0 < alpha ≤ 1")
        return torch.full((), alpha, dtype=x.dtype, device=x.device)
    check_tensor("alpha", alpha, " or a number")
    assert isinstance(alpha, Tensor)
    if not alpha.is_floating_point():
        raise ScanTypeError(f"alpha has dtype {alpha.dtype}, expected a float: alpha.float()")
    check_devices("x", x, alpha=alpha)
    expanded(alpha, x, "alpha")
    if is_readable(alpha):
        wrong = ~((alpha > 0) & (alpha <= 1))
        if bool(wrong.any()):
            raise ScanValueError(
                f"alpha holds {alpha[wrong][0].item()}, expected 0 < alpha ≤ 1 everywhere"
            )
    return alpha.to(x.dtype)
