"""Scans of DTensors: over ranks where the scanned axis is sharded, on each rank's own part else.

    placement on a dimension of the mesh     what runs
    Shard(axis)                              `distributed.associative_scan` over that dimension
    Shard(another batch dimension)           a scan of the local part
    Replicate()                              the same scan on every rank

Results have the placements of xs; what has no axis, finals and reductions, is replicated where the
axis is sharded. Gradients are those of one process: a replicated tensor counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ..api.bind_arguments import batch_axis, resolve_operator
from ..errors import ScanTypeError, ScanValueError
from ..monoids.monoid import Monoid
from ..pytrees import flatten, leaf_paths, tree_map, unflatten
from .agreement import in_turn
from .associative_scan import associative_scan
from .reduce import reduce

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Placements = tuple[Placement, ...]
OVER_RANKS: dict[str, Callable[..., Any]] = {"associative_scan": associative_scan, "reduce": reduce}


class OnOneRank(torch.autograd.Function):
    """A value that all ranks have: its cotangent, which all have too, counts on one of them."""

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, counts: bool) -> torch.Tensor:
        ctx.counts = counts
        return t.detach()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None]:
        return g if ctx.counts else torch.zeros_like(g), None


def run(function: Callable[..., Any], op: Any, xs: Any, axis: Any, **options: Any) -> Any:
    """What `function` returns for xs that hold DTensors: `associative_scan`, `reduce`, or one that
    raises what is wrong with the arguments of such a call."""
    group = group_along(op, xs, axis)
    if group is None:
        return run_in_turn(function, op, xs, axis, **options)
    return in_turn(group, 1, lambda: run_in_turn(function, op, xs, axis, **options), lambda: xs)


def group_along(op: Any, xs: Any, axis: Any) -> ProcessGroup | None:
    """The ranks among which the axis is cut, as far as the first DTensor of xs tells; None where
    it is not cut, and where the axis or the operator is not one."""
    try:
        leaves, spec = flatten(xs)
        place = next(k for k, t in enumerate(leaves) if isinstance(t, DTensor))
        first = leaves[place]
        ndim = first.dim()
        if not isinstance(axis, int) or axis < 0:
            operator = resolve_operator(op, xs)
            if isinstance(operator, Monoid):
                ndim -= operator.element_ndims(spec)[place]
            axis = range(ndim)[axis]
    except Exception:  # said where the arguments are checked
        return None
    along = along_of(tuple(first.placements), axis)
    mesh = first.device_mesh
    if len(along) != 1 or mesh.get_coordinate() is None:
        return None
    group: ProcessGroup = mesh.get_group(along[0])
    return group


def along_of(placements: Placements, axis: int) -> list[int]:
    """The dimensions of the mesh over which the axis is cut."""
    return [k for k, p in enumerate(placements) if isinstance(p, Shard) and p.dim == axis]


def run_in_turn(function: Callable[..., Any], op: Any, xs: Any, axis: int, **options: Any) -> Any:
    """`run`, within the turn of this rank."""
    if getattr(function, "__name__", "") not in OVER_RANKS:
        return function()
    if options.pop("offsets", None) is not None:
        raise ScanTypeError("xs holds DTensors and offsets are given; scan x.to_local() instead")
    options.pop("deterministic", None)
    leaves, spec = flatten(xs)
    paths = leaf_paths(spec, "xs")
    axis, batch_ndim = checked_axis(op, leaves, spec, axis)
    mesh, placements = common_placements(leaves, paths, batch_ndim)
    along = along_of(placements, axis)
    if len(along) > 1:
        raise ScanValueError(
            f"{paths[0]} is sharded along axis {axis} on {len(along)} dimensions of its mesh; a "
            "scan takes one: x.redistribute(placements=…)"
        )
    locals_ = unflatten([t.to_local() for t in leaves], spec)
    rest = without_axis(placements, axis)
    if options.get("init") is not None:
        init, init_spec = flatten(options["init"])
        ndims = [batch_ndim - 1] * len(init)
        if len(init) == len(leaves) and not is_lifted(op, leaves, spec):
            ndims = [t.dim() - 1 for t in leaves]
        parts = [local_init(t, mesh, rest, along, n) for t, n in zip(init, ndims, strict=True)]
        options["init"] = unflatten(parts, init_spec)
    if along:
        called = OVER_RANKS[function.__name__]
        results = called(op, locals_, axis, group=mesh.get_group(along[0]), **options)
    else:
        results = function(op, locals_, axis, **options)

    sizes = {p.dim: leaves[0].shape[p.dim] for p in placements if isinstance(p, Shard)}

    def whole(t: torch.Tensor) -> DTensor:
        return from_local(t, mesh, placements, sizes)

    def carry(t: torch.Tensor) -> DTensor:
        if along:
            t = OnOneRank.apply(t, mesh.get_local_rank(along[0]) == 0)
        shifted = {d - (d > axis): n for d, n in sizes.items() if d != axis}
        return from_local(t, mesh, rest, shifted)

    if function.__name__ == "reduce":
        return tree_map(carry, results)
    if options.get("return_final"):
        return tree_map(whole, results[0]), tree_map(carry, results[1])
    return tree_map(whole, results)


def checked_axis(op: Any, leaves: list[Any], spec: Any, axis: int) -> tuple[int, int]:
    """The axis, not negative, and the number of batch dimensions."""
    for path, t in zip(leaf_paths(spec, "xs"), leaves, strict=True):
        if not isinstance(t, DTensor):
            raise ScanTypeError(
                f"{path} is a {type(t).__name__}, but other leaves are DTensors; make it one: "
                "torch.distributed.tensor.distribute_tensor, or expand it like the others"
            )
    operator = resolve_operator(op, unflatten(leaves, spec))
    found, ndims = batch_axis(operator, axis, leaves, spec)
    return found, min(t.dim() - n for t, n in zip(leaves, ndims, strict=True))


def common_placements(
    leaves: Sequence[DTensor], paths: Sequence[str], batch_ndim: int
) -> tuple[Any, Placements]:
    """The mesh and the placements that all leaves have. Raises where they differ."""
    first = leaves[0]
    placements = tuple(first.placements)
    for path, t in zip(paths, leaves, strict=True):
        if t.device_mesh != first.device_mesh:
            raise ScanValueError(f"{path} is on another device mesh than {paths[0]}")
        if tuple(t.placements) != placements:
            raise ScanValueError(
                f"{path} has the placements {list(t.placements)}, but {paths[0]} has "
                f"{list(placements)}; {path}.redistribute(placements={paths[0]}.placements)"
            )
        for p in placements:
            if type(p) not in (Shard, Replicate):  # nor kinds of Shard with another order
                raise ScanValueError(
                    f"{path} has the placement {p}; a scan takes Shard and Replicate: "
                    f"{path}.redistribute(placements=…)"
                )
            if isinstance(p, Shard) and p.dim >= batch_ndim:
                raise ScanValueError(
                    f"{path} is sharded along dimension {p.dim}, which belongs to one element; "
                    f"only the first {batch_ndim} may be: {path}.redistribute(placements=…)"
                )
    for path, t in zip(paths, leaves, strict=True):
        for p in placements:
            if isinstance(p, Shard) and t.shape[p.dim] != first.shape[p.dim]:
                raise ScanValueError(
                    f"{path} has size {t.shape[p.dim]} along the sharded dimension {p.dim}, but "
                    f"{paths[0]} has {first.shape[p.dim]}"
                )
    return first.device_mesh, placements


def without_axis(placements: Placements, axis: int) -> Placements:
    """The placements of a tensor that lacks the axis."""
    return tuple(
        Replicate() if not isinstance(p, Shard) or p.dim == axis
        else Shard(p.dim - (p.dim > axis))
        for p in placements
    )  # fmt: skip


def is_lifted(op: Any, leaves: list[Any], spec: Any) -> bool:
    """Whether a `lift` makes the state of xs, so that its leaves may have other dimensions."""
    operator = resolve_operator(op, unflatten(leaves, spec))
    return isinstance(operator, Monoid) and operator.lift is not None


def local_init(t: Any, mesh: Any, placements: Placements, along: Sequence[int], ndim: int) -> Any:
    """This rank's part of a leaf of init: a number, a tensor that every rank has, or a DTensor.

    placements: of the carry. ndim: the dimensions of the leaf once it is expanded, unless it has
    more. Where it lacks a sharded one, or has it with size 1, every rank has the whole leaf.
    """
    if not isinstance(t, torch.Tensor):
        return t
    if not isinstance(t, DTensor):
        t = DTensor.from_local(t, mesh, [Replicate()] * mesh.ndim, run_check=False)
    missing = max(ndim - t.dim(), 0)
    own = tuple(
        Shard(p.dim - missing)
        if isinstance(p, Shard) and p.dim >= missing and t.shape[p.dim - missing] != 1
        else Replicate()
        for p in placements
    )
    # A distributed scan has its gradient on one rank, and zeros on the others; ranks that share a
    # leaf have the gradients of their rows: both are summed.
    gradients = [
        Partial() if k in along or (isinstance(p, Shard) and own[k].is_replicate()) else own[k]
        for k, p in enumerate(placements)
    ]
    return t.redistribute(placements=own).to_local(grad_placements=gradients)


def from_local(
    t: torch.Tensor, mesh: Any, placements: Placements, sizes: dict[int, int]
) -> DTensor:
    """The DTensor whose local part is t; sizes: of its sharded dimensions, which may be uneven."""
    shape = torch.Size([sizes.get(d, n) for d, n in enumerate(t.shape)])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        t.contiguous(), mesh, placements, run_check=False, shape=shape, stride=stride
    )
