"""What `selective_scan` takes: checks of its tensors, with errors in the caller's names."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from ..errors import ScanTypeError, ScanValueError
from ..monoids.leaf_checks import check_tensor
from .argument_errors import check_devices

REQUIRED = ("u", "delta", "A", "B", "C")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_arguments(tensors: Mapping[str, Tensor | None]) -> tuple[int, torch.dtype]:
    """The number of groups, and the dtype in which the scan is computed.

    tensors: by the names of `selective_scan`; None where an optional one is absent. The offsets are
        checked here as far as the shape of init depends on them.

    Raises ScanTypeError and ScanValueError.
    """
    given: dict[str, Tensor] = {}
    init, offsets = tensors["init"], tensors["offsets"]
    for name, t in tensors.items():
        if name != "offsets" and (t is not None or name in REQUIRED):
            check_tensor(name, t)
            given[name] = cast(Tensor, t)
    dtype = common_dtype(given)
    u = given["u"]
    check_devices("u", u, **given)
    if u.dim() != 3:
        raise ScanValueError(f"u has shape {list(u.shape)}, expected [batch, L, channels]")
    for name in ("delta", "z"):
        if name in given and given[name].shape != u.shape:
            raise ScanValueError(
                f"{name} has shape {list(given[name].shape)}, expected {list(u.shape)}, the shape "
                "of u"
            )
    check_states(given["A"], u)
    for name in ("D", "delta_bias"):
        if name in given and given[name].shape != u.shape[2:]:
            raise ScanValueError(
                f"{name} has shape {list(given[name].shape)}, expected {list(u.shape[2:])}, the "
                "channels of u"
            )
    groups = common_groups(given)
    if init is not None:
        check_init(init, u, given["A"].shape[1], offsets)
    return groups, dtype


def common_dtype(given: Mapping[str, Tensor]) -> torch.dtype:
    """float64 where a tensor has it, else float32."""
    for name, t in given.items():
        if t.dtype not in FLOATS:
            hint = f": {name}.float()" if not (t.is_floating_point() or t.is_complex()) else ""
            raise ScanTypeError(
                f"{name} has dtype {t.dtype}, expected float16, bfloat16, float32 or float64{hint}"
            )
    return functools.reduce(torch.promote_types, [t.dtype for t in given.values()], torch.float32)


def check_states(A: Tensor, u: Tensor) -> None:
    """Raise ScanValueError where A is not [channels, N]; where its channels are the second
    dimension of u, say how u is passed."""
    channels = u.shape[2]
    if A.dim() == 2 and A.shape[0] == channels and A.shape[1] > 0:
        return
    hint = ""
    if A.dim() == 2 and A.shape[0] == u.shape[1]:
        hint = "; tensors of shape [batch, channels, L] are passed as their views u.mT, delta.mT, …"
    raise ScanValueError(
        f"A has shape {list(A.shape)}, expected [{channels}, N] with N ≥ 1, the {channels} "
        f"channels of u {list(u.shape)}{hint}"
    )


def common_groups(given: Mapping[str, Tensor]) -> int:
    """The groups of B and C: where both have more than one, they are equal."""
    u, states = given["u"], given["A"].shape[1]
    batch, steps, channels = u.shape
    found: dict[str, int] = {}
    for name in ("B", "C"):
        t = given[name]
        if t.dim() not in (3, 4) or (*t.shape[:2], t.shape[-1]) != (batch, steps, states):
            hint = ""
            if t.dim() in (3, 4) and (t.shape[0], *t.shape[-2:]) == (batch, states, steps):
                view = f"{name}.mT" if t.dim() == 3 else f"{name}.movedim(-1, 1)"
                hint = f": {view}"
            raise ScanValueError(
                f"{name} has shape {list(t.shape)}, expected [{batch}, {steps}, {states}] or "
                f"[{batch}, {steps}, groups, {states}] (batch and L of u, N of A){hint}"
            )
        found[name] = 1 if t.dim() == 3 else t.shape[2]
        if found[name] == 0 or channels % found[name]:
            raise ScanValueError(
                f"{name} has {found[name]} groups (shape {list(t.shape)}), which do not divide the "
                f"{channels} channels of u"
            )
    groups = max(found.values())
    if min(found.values()) not in (1, groups):
        raise ScanValueError(
            f"B has {found['B']} groups but C has {found['C']}; give both as many, or one of them "
            "one"
        )
    return groups


def check_init(init: Tensor, u: Tensor, states: int, offsets: Tensor | None) -> None:
    """Raise ScanValueError where init has not the shape of a state."""
    shape, meaning = [u.shape[0], u.shape[2], states], "[batch, channels, N]"
    if offsets is not None:
        if not isinstance(offsets, Tensor) or offsets.dim() != 1:
            return  # the scan refuses these offsets
        shape, meaning = [offsets.shape[0] - 1, *shape], "[S, batch, channels, N]"
    if list(init.shape) != shape:
        raise ScanValueError(f"init has shape {list(init.shape)}, expected {shape}, {meaning}")
