"""Linear recurrences of vectors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import ops
from ..api.flags_and_backends import checked_backend, flag
from ..api.tensor_subclasses import overridable
from ..engines.base.shifted_leaves import carry_shape
from ..errors import ScanTypeError, ScanValueError
from ..monoids.combinators import with_lower
from ..monoids.leaf_checks import check_axis, check_tensor, in_front
from ..program.matrix_operator import SIZES
from ..runtime.backends import why_not_here
from ..torch_state import in_own_dtype
from .argument_errors import check_devices, named_reduce, named_scan
from .operands import carry_dtype, checked_offsets, expanded
from .recurrence import ONLY, ReturnFinal

__all__ = ["matrix_recurrence"]


@overridable
def matrix_recurrence(
    A: Tensor,
    b: Tensor,
    init: Tensor | None = None,
    axis: int = 1,
    reverse: bool = False,
    return_final: ReturnFinal = False,
    *,
    offsets: Tensor | None = None,
    backend: str | None = None,
    deterministic: bool | None = None,
) -> Any:
    """h[t] = A[t] @ h[t−1] + b[t], with h[−1] = init or 0.

    >>> import torch, assocscan
    >>> turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]])
    >>> b = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    >>> assocscan.matrix_recurrence(turn, b, axis=0)
    tensor([[ 1.,  0.],
            [ 0.,  1.],
            [-1.,  0.]])

    A, b and init have one dtype, real or complex:

    A: [d, d], or [..., d, d] with leading dimensions that broadcast to those of b: for b [B, L, d]
        and axis 1, [L, d, d] changes in time. A[t] leads from h[t−1] to h[t].
    b: [..., d], the axis among the leading dimensions, as [B, L, d].
    init: [d] or [..., d], with leading dimensions that broadcast to those of b without the axis: h
        before the first step. 0 by default.
    axis: one of the dimensions of b but the last, which is not counted: for b [B, L, d], L is 1 or
        -1, and -2 is B.
    reverse: h[t] = A[t] @ h[t+1] + b[t], from the end.
    return_final: True: also return the last h; "only": it alone.
    offsets: int64 or int32 [S + 1], the boundaries of S sequences packed along the axis; init is
        then [S, ..., d], or without S if all begin alike, which is meant where both fit.

    Returns h in the shape of b, and the last h in that shape without the axis, with a leading S if
    there are `offsets`. A block-diagonal A of n blocks is A [..., n, d, d] with b [..., n, d]: its
    blocks are a batch dimension. The cumulative products of A are never written. Differentiable;
    matrices of more than 16 entries have a hand-written adjoint.

    `offsets`, `backend` and `deterministic` mean what they mean in `associative_scan`.

    Raises:
        TypeError: A and b are not tensors of one dtype, or `return_final` is neither a bool nor
            "only".
        ValueError: A does not broadcast to b.

    A kernel is generated for d up to 14, on GPUs for all up to 64: from 15 on, A and b are filled
    up with zeros to 16, 32 or 64. The kernel compiles for seconds at d = 8, for half a minute with
    its gradient at d = 12. Larger ones are walked by one torch operation for each step, of 2d²
    flops; in `torch.compile` and with `offsets` the eager engine runs them.

    Numbers: on the CPU a carry walks along each row, with a loop's error. On GPUs and in the eager
    engine products of matrices are formed. Where these are far larger than the states (powers of a
    non-normal A may grow before they decay), their rounding is too, and a loop is more exact.
    `lfilter` avoids this for companion matrices.

    Cost per element: 2d² flops where elements are taken one by one, 2d³ where they are combined in
    a tree; reads A and b, writes h.

    Source: as `ops.matrix_affine`.
    """
    check_tensor("A", A)
    check_tensor("b", b)
    check_devices("b", b, A=A)
    if A.dtype != b.dtype:
        raise ScanTypeError(f"A has dtype {A.dtype}, but b has {b.dtype}; convert one")
    d = b.shape[-1] if b.dim() else 0
    try:
        if A.shape[-2:] != (d, d):
            raise RuntimeError
        A = A.expand(*b.shape, d)
    except RuntimeError:
        raise ScanValueError(
            f"A has shape {list(A.shape)}, expected {[d, d]}, or that with leading dimensions "
            f"which broadcast to {list(b.shape[:-1])}"
        ) from None
    axis = check_axis(axis, b.shape, b.dim() - 1, "b")
    carry = None
    if init is not None:
        check_tensor("init", init)
        check_init(init, b, axis, offsets)
        unit = torch.eye(d, dtype=init.dtype, device=b.device)
        carry = unit.expand(*init.shape, d), init
    is_last = isinstance(return_final, str) and return_final == "only"
    is_wanted = is_last or flag("return_final", return_final, ONLY)
    checked_backend(backend, deterministic)
    side = kernel_side(d, b, backend)
    if side is None and is_walkable(b, init, backend, offsets):
        h, final = walk(A, b, init, axis, flag("reverse", reverse), is_last)
        if is_last:
            return final
        return (h, final) if is_wanted else h
    is_filled = side is not None and side > d
    if side is not None and is_filled:
        A, b = padded((A, b), side)
        carry = None if carry is None else padded(carry, side)
    names = {"xs[0]": "A", "xs": "b", "init": "init"}
    engine: Any = {
        "init": carry, "offsets": offsets, "backend": backend, "deterministic": deterministic,
    }  # fmt: skip
    if is_last:
        wide = carry_dtype(b.dtype)  # a 16-bit state is not rounded again
        last = named_reduce(names, VECTOR, (A.to(wide), b.to(wide)), axis, reverse, **engine)
        return last[..., :d] if is_filled else last
    result = named_scan(names, VECTOR, (A, b), axis, reverse, return_final=is_wanted, **engine)
    found = (result[0], result[1][1]) if is_wanted else (result,)
    if is_filled:
        found = tuple(t[..., :d] for t in found)
    return found if is_wanted else found[0]


def check_init(init: Tensor, b: Tensor, axis: int, offsets: Tensor | None) -> None:
    """Raise ScanValueError where init does not broadcast to b without the axis. The scan's own
    error would show the shape of the pair (A, init). Offsets are checked only before an error: else
    the scan checks them."""
    d, others = b.shape[-1], (*b.shape[:axis], *b.shape[axis + 1 :])
    if isinstance(offsets, Tensor) and offsets.dim() == 1:
        others = (offsets.shape[0] - 1, *others)
    sizes, others = tuple(init.shape)[::-1], others[::-1]
    fits = 0 < len(sizes) <= len(others) and sizes[0] == d
    if fits and all(n in (1, size) for n, size in zip(sizes, others, strict=False)):
        return
    state = (*carry_shape(b[..., 0], axis, checked_offsets(offsets, b, axis)), d)
    first = "" if offsets is None else in_front(state[0])
    raise ScanValueError(
        f"init has shape {list(init.shape)}, which does not broadcast to {list(state)}, the "
        f"shape of b without axis {axis}{first}"
    )


def kernel_side(d: int, b: Tensor, backend: str | None) -> int | None:
    """The side to which d × d matrices are filled up, so that a kernel can hold them; None where
    none can."""
    if d <= MOST_UNROLLED:
        return d
    is_chosen = backend in (None, "auto") and b.device.type != "cpu"
    if not is_chosen and backend not in ("triton", "multipass"):
        return None
    if not b.is_floating_point() or why_not_here(b.device, "triton") is not None:
        return None
    return next((side for side in SIZES if side >= d), None)


def padded(pair: tuple[Tensor, Tensor], side: int) -> tuple[Tensor, Tensor]:
    """Matrices and vectors with zeros behind."""
    more = side - pair[1].shape[-1]
    return pad(pair[0], (0, more, 0, more)), pad(pair[1], (0, more))


def is_walkable(
    b: Tensor, init: Tensor | None, backend: str | None, offsets: Tensor | None
) -> bool:
    """Whether a loop over the axis may take the place of a scan that no kernel can run."""
    wide = carry_dtype(b.dtype)
    if init is not None and (
        init.device != b.device or torch.promote_types(init.dtype, wide) != wide
    ):
        return False  # the scan says what is wrong
    is_chosen = backend in (None, "auto") and offsets is None
    return is_chosen and not torch.compiler.is_compiling()


@in_own_dtype
def walk(
    A: Tensor, b: Tensor, init: Tensor | None, axis: int, reverse: bool, is_last: bool
) -> tuple[Tensor, Tensor]:
    """(h, the last one) by one product for each step, 16-bit numbers computed in float32; b in the
    place of h where the last one alone is wanted."""
    dtype, wide = b.dtype, carry_dtype(b.dtype)
    axis -= b.dim()
    steps = list(zip(A.to(wide).unbind(axis - 1), b.to(wide).unbind(axis), strict=True))
    h: Tensor | None = None
    if init is not None or not steps:
        a_step = b.new_empty(()).expand(carry_shape(b, b.dim() + axis, None))
        start = b.new_zeros(()) if init is None else init
        h = expanded(start, a_step, "init", "b without the axis").to(wide)
    states = []
    for matrix, added in reversed(steps) if reverse else steps:
        h = added if h is None else (matrix @ h.unsqueeze(-1)).squeeze(-1) + added
        if not is_last:
            states.append(h)
    assert h is not None
    final = h.clone()  # h may be a part of b or of init
    if is_last:
        return b, final
    if reverse:
        states.reverse()
    if not states:  # empty, and a function of all three
        return (A.sum(-1) + b + h.unsqueeze(axis)).to(dtype), final
    return torch.stack(states, axis).to(dtype), final


MOST_UNROLLED = 14  # at most this side, the products of two elements are unrolled to scalars
VECTOR = with_lower(ops.matrix_affine, lambda state: state[1])
