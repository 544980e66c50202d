"""`selective_scan`: the recurrence of Mamba, as one operator of the public interface."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import ops
from ..api.caches.function_cache import FunctionCache
from ..api.caches.scan_of_views import Views
from ..api.flags_and_backends import checked_backend, flag
from ..api.tensor_subclasses import overridable
from ..monoids.monoid import Monoid
from ..runtime.native import runner
from ..torch_state import has_own_dispatch, needs_dispatcher
from .argument_errors import named_scan
from .recurrence import carry_from
from .selective_scan_arguments import REQUIRED, check_arguments

OPTIONAL = ("D", "z", "delta_bias")
LEAVES = (*REQUIRED, *OPTIONAL)  # of the scan
OF_CHANNELS = ("A", "D", "delta_bias")  # which do not depend on the step
NAMES = (*LEAVES, "init", "offsets")  # of all tensors


@overload
def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    *,
    init: Tensor | None = None,
    return_final: Literal[False] = False,
    offsets: Tensor | None = None,
    backend: str | None = None,
    deterministic: bool | None = None,
) -> Tensor: ...
@overload
def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    *,
    init: Tensor | None = None,
    return_final: Literal[True],
    offsets: Tensor | None = None,
    backend: str | None = None,
    deterministic: bool | None = None,
) -> tuple[Tensor, Tensor]: ...
@overload
def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    *,
    init: Tensor | None = None,
    return_final: bool = False,
    offsets: Tensor | None = None,
    backend: str | None = None,
    deterministic: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]: ...
@overridable
def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    *,
    init: Tensor | None = None,
    return_final: bool = False,
    offsets: Tensor | None = None,
    backend: str | None = None,
    deterministic: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The selective state-space recurrence of Mamba: N states per channel, which the input steers.

        h[t, c, n] = exp(Δ[t, c] · A[c, n]) · h[t−1, c, n] + Δ[t, c] · u[t, c] · B[t, n]
        y[t, c]    = (Σ_n C[t, n] · h[t, c, n] + D[c] · u[t, c]) · silu(z[t, c])

    with Δ = delta + delta_bias, or softplus of that with `delta_softplus`; terms that are not given
    are left out.

    >>> import torch, assocscan
    >>> u = torch.tensor([[[8.0], [0.0], [0.0]]])          # 1 sequence, 3 steps, 1 channel
    >>> delta, B = torch.ones(1, 3, 1), torch.ones(1, 3, 1)
    >>> A = torch.tensor([[0.5]]).log()                    # h halves at every step
    >>> assocscan.selective_scan(u, delta, A, B, B).flatten()
    tensor([8., 4., 2.])

    A sequence in pieces, each taking the states that the one before left:

    >>> one, two = torch.ones(1, 1, 1), torch.ones(1, 2, 1)
    >>> y, h = assocscan.selective_scan(u[:, :1], one, A, one, one, return_final=True)
    >>> assocscan.selective_scan(u[:, 1:], two, A, two, two, init=h).flatten()
    tensor([4., 2.])

    u, delta, z: [batch, L, channels].
    A: [channels, N], real (negative where states decay).
    B, C: [batch, L, N], or [batch, L, groups, N] for groups of consecutive channels: channel c
        uses group c // (channels // groups).
    D, delta_bias: [channels].
    init: [batch, channels, N], h before the first step; zero by default. For a scan from the end
        flip the tensors that have L, and y.
    return_final: also return the last h, [batch, channels, N], for which L may be 0.
    offsets: int64 or int32 [S + 1], the boundaries of S sequences packed along L; init and the last
        h are then [S, batch, channels, N].

    Tensors may have any strides and are read as they lie: mamba's [batch, channels, L] is passed as
    its view `u.mT`. Float dtypes may be mixed: it is computed in float32, in float64 where a tensor
    has it. y has the dtype of u, the last h that of the computation. Differentiable in all tensors,
    and more than once.

    `backend` and `deterministic` mean what they mean in `associative_scan`.

    Raises:
        TypeError: an argument is not a tensor of floats, or a flag no bool.
        ValueError: shapes do not fit, or tensors are on several devices.
        BackendError: the named backend cannot run.

    Cost per step and channel: 6 N flops and N exponentials; reads u, delta and z, per group N
    numbers of B and of C, and writes y.

    Source: A. Gu and T. Dao, "Mamba: linear-time sequence modeling with selective state spaces",
    arXiv 2312.00752, section 3 and algorithm 2.
    """
    result: Tensor | tuple[Tensor, Tensor] = scan_channels(
        u, delta, A, B, C, D, z, delta_bias, delta_softplus, init=init, return_final=return_final,
        offsets=offsets, backend=backend, deterministic=deterministic,
    )  # fmt: skip
    return result


def scan_channels(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    *,
    reverse: bool = False,
    init: Tensor | None = None,
    return_final: bool = False,
    offsets: Tensor | None = None,
    backend: str | None = None,
    deterministic: bool | None = None,
) -> Any:
    """`selective_scan` with `reverse`: y, or (y, the last h) with `return_final`."""
    tensors = (u, delta, A, B, C, D, z, delta_bias, init)
    lacks = (D is None, z is None, delta_bias is None, init is None)
    is_cached = offsets is None and not torch.compiler.is_dynamo_compiling()
    are_bools = type(delta_softplus) is type(reverse) is type(return_final) is bool
    if is_cached and are_bools and deterministic is None:
        given = tuple([t for t in tensors if t is not None])
        found = CALLS.run_native((lacks, delta_softplus, reverse, return_final, backend), given)
        if found is not runner.MISS:
            return found
    delta_softplus = flag("delta_softplus", delta_softplus)
    reverse, return_final = flag("reverse", reverse), flag("return_final", return_final)
    checked_backend(backend, deterministic)
    arguments: dict[str, Any] = dict(zip(NAMES, (*tensors, offsets), strict=True))
    _, dtype = check_arguments(arguments)
    if init is not None:
        arguments["init"] = init.to(dtype)
    if is_cached:
        given = tuple([t for t in arguments.values() if t is not None])
        found = CALLS.run((lacks, delta_softplus, reverse, return_final, backend), given)
        if found is not runner.MISS:
            return found
    return scan_by(
        named_scan, arguments, delta_softplus, reverse, return_final, backend=backend,
        deterministic=deterministic,
    )  # fmt: skip


def scan_by(
    scan: Callable[..., Any],
    tensors: dict[str, Any],
    softplus: bool,
    reverse: bool,
    return_final: bool,
    **engine: Any,
) -> Any:
    """`scan_channels` by `scan` in place of the cache: y, or (y, the last h), as views of what it
    gives.

    scan: has the parameters of `named_scan`; one that scans over ranks, for instance.
    tensors: by NAMES; None where one is missing. engine: backend and deterministic as the caller
        gave them.
    """
    arranged = arrange(tensors, softplus)
    names = {f"xs[{k}]": name for k, name in enumerate(arranged.names)}
    result = scan(
        {**names, "xs": "u", "init": "init"}, arranged.op, arranged.leaves, 1, reverse,
        init=arranged.carry, return_final=return_final, offsets=tensors["offsets"], **engine,
    )  # fmt: skip
    y: Tensor = result[0] if return_final else result
    y = y.squeeze(-1).flatten(-2)
    return (y, result[1][1].flatten(-3, -2)) if return_final else y


class Arranged(NamedTuple):
    """A selective scan as `associative_scan` is called: the operator, the leaves with the names of
    the arguments that they are views of, and the carry that enters."""

    op: Monoid
    names: tuple[str, ...]
    leaves: tuple[Tensor, ...]
    carry: tuple[Tensor, Tensor] | None


def arrange(tensors: dict[str, Any], softplus: bool) -> Arranged:
    """tensors: as in `scan_by`.

    The scan's batch dimensions are [batch, L, groups, channels of a group]; its elements are
    vectors over n, of size 1 for what has one number per channel. All leaves are views: what does
    not depend on a dimension has the size 1 or, along L, the stride 0 there.

    Raises the errors of `check_arguments`.
    """
    groups, dtype = check_arguments(tensors)
    given = {name: tensors[name] for name in LEAVES if tensors[name] is not None}
    u, init = given["u"], tensors["init"]
    grouped = (groups, u.shape[2] // groups)
    leaves = tuple([leaf_view(name, t, grouped, u.shape[1]) for name, t in given.items()])
    optional = tuple([name for name in OPTIONAL if name in given])
    carry = None
    if init is not None:
        h = init.to(dtype).view(*init.shape[:-2], *grouped, init.shape[-1])
        carry = carry_from(h)
    return Arranged(OPERATORS[optional, softplus, dtype], tuple(given), leaves, carry)


# A call without its tensors: whether D, z, delta_bias and init are missing; then delta_softplus,
# reverse, return_final and backend.
Options = tuple[tuple[bool, ...], bool, bool, bool, "str | None"]


def by_name(options: Options, tensors: Sequence[Tensor]) -> dict[str, Any]:
    """The tensors of a call by NAMES; None where one is missing."""
    lacks = dict(zip((*OPTIONAL, "init", "offsets"), (*options[0], True), strict=True))
    given = iter(tensors)
    return {name: None if lacks.get(name) else next(given) for name in NAMES}


def call_of(options: Options, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The results of a call, by `associative_scan`."""
    _, softplus, reverse, return_final, backend = options
    arguments = by_name(options, tensors)
    found = scan_by(named_scan, arguments, softplus, reverse, return_final, backend=backend)
    return found if return_final else (found,)


def views_of(options: Options, tensors: Sequence[Tensor]) -> Views:
    """What a call scans."""
    _, softplus, reverse, return_final, backend = options
    arguments = by_name(options, tensors)
    arranged, u, A = arrange(arguments, softplus), arguments["u"], arguments["A"]
    return Views(
        arranged.op, arranged.leaves, 1, reverse, arranged.carry, backend or "auto",
        repeated=tuple([(1,) if name in OF_CHANNELS else () for name in arranged.names]),
        init_sources=() if arranged.carry is None else (None, len(tensors) - 1),
        outputs=((0, tuple(u.shape)),),
        finals=((1, (u.shape[0], *A.shape)),) if return_final else (),
    )  # fmt: skip


CALLS = FunctionCache(call_of, views_of)


def leaf_view(name: str, t: Tensor, grouped: tuple[int, int], steps: int) -> Tensor:
    """A view with the dimensions [batch, L, groups, channels of a group, n]."""
    if name in ("B", "C"):  # [batch, L, N] or [batch, L, groups, N]
        return t.view(*t.shape[:2], t.shape[2] if t.dim() == 4 else 1, 1, t.shape[-1])
    if name in ("u", "delta", "z"):
        return t.view(*t.shape[:2], *grouped, 1)
    states = t.shape[1] if name == "A" else 1
    t = t.view(1, 1, *grouped, states)
    plain = torch.compiler.is_compiling() or needs_dispatcher() or has_own_dispatch([t])
    if plain or not (t.requires_grad and torch.is_grad_enabled()):
        return t.expand(-1, steps, -1, -1, -1)
    repeated: Tensor = Repeated.apply(t, steps)
    return repeated


class Repeated(torch.autograd.Function):
    """A tensor repeated along the axis, as `expand` does. The kernel sums its gradient over the
    steps and gives each of them an equal part, as a tensor with stride 0: the sum of the parts is
    taken from one of them, where `expand` would add up as many numbers as there are states in all.
    """

    @staticmethod
    def forward(ctx: Any, t: Tensor, steps: int) -> Tensor:
        ctx.sizes_before_expand = tuple(t.shape)  # as `torch_private.sizes_before_expand`
        return t.expand(-1, steps, -1, -1, -1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        if g.shape[1] > 0 and g.stride(1) == 0:
            return g.narrow(1, 0, 1) * g.shape[1], None
        return g.sum(1, keepdim=True), None


def operator(optional: tuple[str, ...], softplus: bool, dtype: torch.dtype) -> Monoid:
    """The operator of selective scans with these optional tensors, computed in this dtype.

    An element is the map h ↦ a · h + b of N states; maps compose as those of `ops.affine` do.
    """
    names = ("u", "delta", "A", "B", "C", *optional)

    def named(xs: Sequence[Tensor]) -> dict[str, Tensor]:
        return {name: x.to(dtype) for name, x in zip(names, xs, strict=True)}

    def lift(*xs: Tensor) -> tuple[Tensor, Tensor]:
        x = named(xs)
        delta = x["delta"] + x["delta_bias"] if "delta_bias" in x else x["delta"]
        delta = F.softplus(delta) if softplus else delta
        return torch.exp(delta * x["A"]), delta * x["u"] * x["B"]

    def lower(state: tuple[Tensor, Tensor], xs: Sequence[Tensor]) -> Tensor:
        x = named(xs)
        y = (x["C"] * state[1]).sum(-1, keepdim=True)
        y = y + x["D"] * x["u"] if "D" in x else y
        y = y * F.silu(x["z"]) if "z" in x else y
        return y.to(xs[0].dtype)

    affine = ops.affine
    return Monoid(
        affine.combine, identity=affine.identity, name="selective_scan", element_ndim=1, lift=lift,
        lower=lower,
    )  # fmt: skip


# One operator per combination of options, so that each is traced once. Made at import, where
# torch.compile meets them as constants.
OPERATORS = {
    options: operator(*options)
    for options in product(
        [names for n in range(len(OPTIONAL) + 1) for names in combinations(OPTIONAL, n)],
        (False, True),
        (torch.float32, torch.float64),
    )
}
