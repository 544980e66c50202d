"""Direct calls of monoids: left ∘ right for two states, or for two batches of them.

An element without batch dimensions is a batch of one. Python numbers stand for 0-dimensional
tensors: beside a tensor they take its dtype, as in torch; among themselves they are computed in the
precision of Python (float64), and the result is numbers again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import AssocScanError, ScanTypeError, ScanValueError
from ..program.operator import Leaf
from ..pytrees import TreeSpec, align, flatten, leaf_paths, template, unflatten
from ..trace.expected_structure import require_state
from ..trace.fx_trace import SQUARE, Signature, failure, isolated, not_square
from ..trace.signatures import positional_count
from ..trace.traced_monoid import lifted
from .batch_mapping import map_elements
from .call_errors import of_scans
from .leaf_checks import NUMBERS, broadcast_batches, check_tensor

if TYPE_CHECKING:
    from .monoid import Monoid

PRECISE = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


def combine_states(monoid: Monoid, left: Any, right: Any) -> Any:
    """left ∘ right, in the structure of `left`."""
    first, spec = flatten(left)
    tree = template(spec)
    try:
        require_state(monoid, tree, "left")
        require_state(monoid, template(flatten(right)[1]), "right")
    except ScanTypeError as error:
        raise ScanTypeError(f"{error}. {of_scans(monoid.name)}") from None
    values = [*first, *align(tree, right, "right")]
    paths = [*leaf_paths(spec, "left"), *leaf_paths(spec, "right")]
    tensors = as_tensors(paths, values)
    ndims = [*state_ndims(monoid, spec, tensors[: len(first)])] * 2
    check_shapes(monoid, paths, tensors, ndims)
    pair = flatten((tree, tree))[1]
    try:
        results, made = map_elements(monoid.combine, tensors, ndims, pair, pointwise=False)
    except AssocScanError:
        raise
    except Exception as error:
        kinds = [Signature(t.dtype, t.shape) for t in tensors]
        seen = ", ".join(f"{path}: {kind}" for path, kind in zip(paths, kinds, strict=True))
        elements = [t.shape[t.dim() - n :] for t, n in zip(tensors, ndims, strict=True)]
        hint = SQUARE if not_square(elements) else ""
        what = f"operator {monoid.name!r} failed on ({seen})"
        raise failure(what, monoid.name, error, hint=hint) from error
    leaves = align(tree, unflatten(results, made), f"the result of operator {monoid.name!r}")
    if all(isinstance(value, NUMBERS) for value in values):
        leaves = [t.item() if t.dim() == 0 else t for t in leaves]
    return unflatten(leaves, spec)


def as_tensors(paths: list[str], values: list[Any]) -> list[torch.Tensor]:
    """The leaves of both sides as tensors of one device, numbers in the dtype of the other side."""
    devices: dict[torch.device, str] = {}
    for path, value in zip(paths, values, strict=True):
        if not isinstance(value, NUMBERS):
            check_tensor(path, value, " or a number")
            devices.setdefault(value.device, path)
    if len(devices) > 1:
        seen = " but ".join(f"{path} is on {device}" for device, path in devices.items())
        raise ScanValueError(f"{seen}; move them to one device")
    device = next(iter(devices), torch.device("cpu"))
    half = len(values) // 2
    others = [*values[half:], *values[:half]]
    return [
        value if isinstance(value, torch.Tensor) else number(path, value, other, device)
        for path, value, other in zip(paths, values, others, strict=True)
    ]


def number(path: str, value: Any, other: Any, device: torch.device) -> torch.Tensor:
    """A 0-dimensional tensor, for a number that meets `other`."""
    if isinstance(other, torch.Tensor):
        dtype = torch.result_type(other, value)
    else:
        dtype = next(d for k, d in PRECISE.items() if isinstance(value, k))
    try:
        return torch.full((), value, dtype=dtype, device=device)
    except (RuntimeError, OverflowError):
        raise ScanValueError(f"{path} is {value!r}, which {dtype} cannot hold") from None


def check_shapes(
    monoid: Monoid, paths: list[str], tensors: list[torch.Tensor], ndims: list[int]
) -> None:
    """Both sides have leaves of the element's shape, and batch dimensions that broadcast."""
    for path, t, n in zip(paths, tensors, ndims, strict=True):
        if t.dim() < n:
            raise ScanValueError(
                f"{path} has shape {list(t.shape)}, but this leaf of an element of "
                f"{monoid.name!r} has {n} dimension{'s' * (n != 1)}"
            )
    half = len(tensors) // 2
    for k, (a, b, n) in enumerate(zip(tensors[:half], tensors[half:], ndims[:half], strict=True)):
        if a.shape[a.dim() - n :] != b.shape[b.dim() - n :]:
            raise ScanValueError(
                f"{paths[k]} has shape {list(a.shape)} and {paths[half + k]} {list(b.shape)}, of "
                f"which the last {n} belong to an element of {monoid.name!r}: these must be equal"
            )
    broadcast_batches(paths, tensors, ndims)


def state_ndims(monoid: Monoid, spec: TreeSpec, leaves: list[torch.Tensor]) -> Sequence[int]:
    """The element dimensions of each leaf of a state."""
    if monoid.lift is None:
        return monoid.element_ndims(spec)
    if spec not in monoid.ranks:
        known = lifted_ranks(monoid, spec)
        if known is None:
            return [0 if monoid.element_ndim == 0 else t.dim() for t in leaves]
        monoid.ranks[spec] = known
    return monoid.ranks[spec]


def lifted_ranks(monoid: Monoid, spec: TreeSpec) -> list[int] | None:
    """The ranks of what the lift makes: of inputs that were scanned, or else of examples. None
    where it takes none of them."""
    for known in monoid.traced():
        if known.state_spec == spec:
            return [len(leaf.shape) for leaf in known.state]
    for example in examples(monoid):
        inputs, input_spec = flatten(example)
        try:
            with isolated():
                made, state = lifted(monoid, input_spec, inputs)
        except AssocScanError:
            continue
        if made == spec:
            return [len(leaf.shape) for leaf in state]
    return None


def examples(monoid: Monoid) -> Iterator[Any]:
    """Inputs that a lift may take, as trees of `Leaf`: numbers of the identity's types or of one
    type; element dimensions have size 2."""
    count = None if monoid.lift is None else positional_count(monoid.lift)
    if count is None:
        return
    ndim = monoid.element_ndim
    ranks = [ndim] * count if isinstance(ndim, int) else list(flatten(ndim)[0])
    if len(ranks) != count:
        return
    tried = [[torch.float32] * count, [torch.int64] * count, [torch.bool] * count]
    if monoid.identity is not None and not callable(monoid.identity):
        types = [type(v) for v in flatten(monoid.identity)[0]]
        if len(types) == count and all(t in PRECISE for t in types):
            tried.insert(0, [PRECISE[t] for t in types])
    for dtypes in tried:
        leaves = [Leaf(d, (2,) * n) for d, n in zip(dtypes, ranks, strict=True)]
        yield leaves[0] if count == 1 else tuple(leaves)
