"""`testing.error_growth`: how the errors of a scan grow, beside those of a loop."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...errors import ScanTypeError, ScanValueError
from ...hooks import HOOKS
from ...monoids.leaf_checks import check_tensor
from ...monoids.monoid import Monoid
from ...pytrees import flatten, leaf_paths, unflatten
from ...testing import ErrorGrowth, reference_scan
from ...torch_state import is_differentiable
from ...wording import shown
from ..associative_scan import associative_scan


def error_growth(
    op: Any, like: Any, length: int, samples: Any, backend: str, seed: int
) -> list[ErrorGrowth]:
    if not isinstance(op, Monoid):
        raise ScanTypeError(f"op is {shown(op)}, expected a Monoid: a function with @monoid")
    if type(length) is not int or length < 1:
        raise ScanValueError(f"length is {shown(length)}, expected an int of 1 or more")
    length = 1 << (length.bit_length() - 1)
    xs = drawn(like, samples, length, torch.Generator().manual_seed(seed))
    # First, since it says what is wrong with inputs that do not fit.
    scanned = flatten(associative_scan(op, xs, backend=backend))[0]
    exact = flatten(reference_scan(op, xs))[0]
    looped = flatten(loop(op, xs, length, backend))[0]
    found = []
    for k in range(length.bit_length()):
        steps = slice((1 << k) // 2, 1 << k)
        wanted = [y[steps] for y in exact]
        if not all(bool(y.isfinite().all()) for y in wanted if is_differentiable(y)):
            break
        scan, walk = (
            max(error(y[steps], w) for y, w in zip(ys, wanted, strict=True))
            for ys in (scanned, looped)
        )
        found.append(ErrorGrowth(1 << k, scan, walk))
    return found


def loop(op: Monoid, xs: Any, length: int, backend: str) -> Any:
    """The scan of one step after the other, each with the carry that the one before left."""
    leaves, spec = flatten(xs)
    outputs, carry = [], None
    for t in range(length):
        step = unflatten([x[t : t + 1] for x in leaves], spec)
        y, carry = associative_scan(op, step, init=carry, return_final=True, backend=backend)
        flat, out_spec = flatten(y)
        outputs.append(flat)
    return unflatten([torch.cat(column) for column in zip(*outputs, strict=True)], out_spec)


def drawn(like: Any, samples: Any, length: int, generator: torch.Generator) -> Any:
    """Inputs of `length` steps: of the samples, or random numbers as in `like`."""
    name, given = ("like", like) if samples is None else ("samples", samples)
    if given is None:
        raise ScanTypeError("like is None: pass the inputs of one element, or samples=")
    leaves, spec = flatten(given)
    for path, leaf in zip(leaf_paths(spec, name), leaves, strict=True):
        check_tensor(path, leaf)
        if samples is not None and (leaf.dim() == 0 or len(leaf) != len(leaves[0])):
            raise ScanValueError(
                f"{path} has shape {list(leaf.shape)}, expected [n, ...]: inputs along one leading "
                "dimension, as many in each leaf"
            )
    if samples is None:
        return unflatten([random_leaf(leaf, length, generator) for leaf in leaves], spec)
    if len(leaves[0]) == 0:
        raise ScanValueError("samples holds no inputs; give at least one")
    which = torch.randint(len(leaves[0]), (length,), generator=generator)
    return unflatten([leaf[which.to(leaf.device)] for leaf in leaves], spec)


def random_leaf(leaf: Tensor, length: int, generator: torch.Generator) -> Tensor:
    """Normal numbers, integers from 0 to 9, or bools."""
    shape = (length, *leaf.shape)
    if is_differentiable(leaf):
        wide = torch.complex128 if leaf.is_complex() else torch.float64
        return torch.randn(shape, dtype=wide, generator=generator).to(leaf)
    most = 2 if leaf.dtype == torch.bool else 10
    return torch.randint(most, shape, generator=generator).to(leaf)


def error(got: Tensor, wanted: Tensor) -> float:
    """The greatest distance, relative to the greatest value; of integers 0 or infinite."""
    got = got.to(wanted.device, wanted.dtype)
    if not is_differentiable(wanted):
        return 0.0 if torch.equal(got, wanted) else math.inf
    if wanted.numel() == 0:
        return 0.0
    distance, size = float((got - wanted).abs().max()), float(wanted.abs().max())
    if not math.isfinite(distance):
        return math.inf
    return distance / size if size else (math.inf if distance else 0.0)


HOOKS.error_growth = error_growth
