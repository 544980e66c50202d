"""Scans over ranks against one process: values, gradients and second derivatives."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import thinning
import torch
from ranks import Rank, World

import assocscan
from assocscan import Monoid, distributed, monoid, ops
from assocscan.distributed import agreement
from assocscan.functional.selective_scan import NAMES, scan_by, selective_scan
from assocscan.monoids.combinators import with_lower
from assocscan.nn.mamba import scan_over_ranks
from assocscan.nn.matrix_lru import _RECURRENCE as MATRIX_RECURRENCE
from assocscan.pytrees import flatten
from assocscan.runtime.vectors.recomputed_gradient import RecomputedGradient

LENGTHS = {2: [(5, 4), (0, 7), (6, 0), (1, 1)],
           3: [(4, 5, 3), (0, 4, 0), (3, 0, 2)],
           4: [(2, 3, 4, 1), (0, 0, 5, 2), (0, 3, 0, 0)]}  # fmt: skip


@monoid(identity=(0, 0), name="distributed_bicyclic")
def bicyclic(left: Any, right: Any) -> Any:
    """Neither commutative nor invertible, exact on integers."""
    m, n = left
    r, s = right
    least = torch.minimum(n, r)
    return m + r - least, s + n - least


no_identity = Monoid(bicyclic.combine, name="distributed_no_identity")

curved = Monoid(
    lambda left, right: (left[0] * right[0], left[1] * right[0] + right[1]),
    identity=(1.0, 0.0),
    name="distributed_lifted",
    lift=lambda x, z: (torch.sigmoid(x), x * z),
    lower=lambda state, xs: torch.tanh(state[1]) * xs[0],
)


def floats(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed + 7))


def integers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 5, shape, generator=torch.Generator().manual_seed(seed))


def raw(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return torch.logaddexp(left, right)


# Name → (operator, xs of length n along axis 1, an init).
def case(name: str, n: int) -> tuple[Any, Any, Any]:
    pair = floats(2, n, 3) * 0.5, floats(2, n, 3, seed=1)
    if name == "affine":
        return ops.affine, pair, (floats(2, 3, seed=2), floats(2, 3, seed=3))
    if name == "lifted":
        return curved, pair, (floats(2, 3, seed=2), floats(2, 3, seed=3))
    if name == "one row":
        return ops.affine, tuple(t[0, :, 0] for t in pair), (floats(), floats(seed=3))
    if name == "complex":
        c = torch.complex(*pair)
        return ops.affine, (c, c * 0.5), (c.new_ones(2, 3), c.new_zeros(2, 3))
    if name == "matrices":
        A = floats(2, n, 2, 2) * 0.6
        return ops.matmul, A, floats(2, 2, 2, seed=4)
    if name == "vector states":
        xs = floats(2, n, 2, 2) * 0.6, floats(2, n, 2, seed=5)
        return ops.matrix_affine, xs, (floats(2, 2, 2, seed=6), floats(2, 2, seed=8))
    if name == "dict":
        op = Monoid(lambda a, b: {"m": torch.logaddexp(a["m"], b["m"]), "s": a["s"] + b["s"]},
                    name="distributed_dict")  # fmt: skip
        xs = {"m": pair[0], "s": pair[1]}
        return op, xs, {"m": floats(2, 3, seed=2), "s": floats(2, 3, seed=3)}
    if name == "bicyclic":
        return bicyclic, (integers(2, n), integers(2, n, seed=1)), (integers(2), integers(2))
    if name == "no identity":
        return no_identity, (integers(2, n), integers(2, n, seed=1)), (integers(2), integers(2))
    assert name == "raw", name
    return raw, floats(2, n, 3), floats(2, 3, seed=1)


SMOOTH = ("affine", "one row", "lifted", "complex", "matrices", "vector states", "dict", "raw")
CASES = (*SMOOTH, "bicyclic", "no identity")


def close(actual: Any, expected: Any, exact: bool = False) -> None:
    options = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-12, "atol": 1e-12}
    for a, e in zip(flatten(actual)[0], flatten(expected)[0], strict=True):
        torch.testing.assert_close(a, e, **options)


def thinned(step: int, world: Rank, name: str, *choices: Any) -> list[Any]:
    """One in `step` combinations; which ones depends on the case, so that each meets one."""
    first = int(step * thinning.place(f"{name} on {world.size} ranks"))
    return list(itertools.product(*choices))[first::step]


def check_values(world: Rank, name: str) -> None:
    axis = axis_of(name)
    for lengths in LENGTHS[world.size]:
        op, xs, start = case(name, sum(lengths))
        can_be_exclusive = isinstance(op, Monoid) and op.identity is not None
        for reverse, inclusive, init in thinned(
            3, world, name, (False, True), (True, False), (None, start)
        ):
            if not inclusive and init is None and not can_be_exclusive:
                continue
            options = {"init": init, "return_final": True, "backend": "auto"}
            whole, final = assocscan.associative_scan(op, xs, axis, reverse, inclusive, **options)
            part = world.part(xs, lengths, axis)
            mine, last = distributed.associative_scan(
                op, part, axis, reverse, inclusive, group=world.group, **options
            )
            exact = name not in SMOOTH
            close(mine, world.part(whole, lengths, axis), exact)
            close(last, final, exact)
            total = distributed.reduce(op, part, axis, reverse, group=world.group, init=init)
            close(total, assocscan.reduce(op, xs, axis, reverse, init=init), exact)


@pytest.mark.thinned(12)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_values(world: World, name: str, size: int) -> None:
    world.run(check_values, size, name)


def weights(tree: Any, seed: int, keep: float = 0.6) -> list[torch.Tensor]:
    """A cotangent for every leaf, partly zero."""
    found = []
    for k, t in enumerate(flatten(tree)[0]):
        generator = torch.Generator().manual_seed(100 * seed + k)
        w = torch.randn(t.shape, dtype=t.dtype, generator=generator)
        found.append(w * (torch.rand(t.shape, generator=generator) < keep))
    return found


def dot(tensors: Any, cotangents: Any) -> torch.Tensor:
    pairs = zip(flatten(tensors)[0], flatten(cotangents)[0], strict=True)
    total: Any = sum(
        ((t * w.conj()).real.sum() for t, w in pairs), torch.zeros((), dtype=torch.float64)
    )
    return total


def leaves(tree: Any) -> Any:
    return assocscan.pytrees.tree_map(lambda t: t.detach().clone().requires_grad_(), tree)


def check_gradients(world: Rank, name: str, function: str) -> None:
    flags = (False, True)
    for case_ in thinned(7, world, name, LENGTHS[world.size], flags, flags, flags):
        check_gradient(world, name, function, *case_)


def axis_of(name: str) -> int:
    return 0 if name == "one row" else 1


def check_gradient(
    world: Rank, name: str, function: str, lengths: Any, reverse: bool, with_init: bool, last: bool
) -> None:
    """First and second derivatives in xs and init, for cotangents of outputs and (with `last`) of
    finals that differ from rank to rank."""
    axis, (op, xs, start) = axis_of(name), case(name, sum(lengths))
    inclusive = not (with_init and last)

    def outputs(xs: Any, init: Any, module: Any, **options: Any) -> tuple[Any, Any]:
        if function == "reduce":
            return (), module.reduce(op, xs, axis, reverse, init=init, **options)
        if last:
            options["return_final"] = True
        found = module.associative_scan(op, xs, axis, reverse, inclusive, init=init, **options)
        return found if last else (found, ())

    whole, whole_init = leaves(xs), leaves(start) if with_init else None
    part, init = (
        leaves(world.part(xs, lengths, axis)),
        leaves(start) if with_init else None,
    )
    expected_y, expected_final = outputs(whole, whole_init, assocscan)
    y, final = outputs(part, init, distributed, group=world.group)
    w_y = weights(expected_y, 1)
    w_final = [weights(expected_final, 2 + rank) for rank in range(world.size)]
    loss = dot(y, [world.part(w, lengths, axis) for w in w_y]) + dot(final, w_final[world.rank])
    expected = dot(expected_y, w_y) + sum(dot(expected_final, w) for w in w_final)

    count = len(flatten(part)[0])
    given = [*flatten(part)[0], *(flatten(init)[0] if with_init else ())]
    given_whole = [*flatten(whole)[0], *(flatten(whole_init)[0] if with_init else ())]
    wanted = derivatives(expected, given_whole, True)
    compare(world, derivatives(loss, given, False), wanted, count, axis, lengths, reverse)
    found = derivatives(loss, given, True)
    compare(world, found, wanted, count, axis, lengths, reverse)

    second = weights(given_whole, 9)
    is_first = world.rank == (world.size - 1 if reverse else 0)
    own = [world.part(v, lengths, axis) for v in second[:count]]
    own += [v * is_first for v in second[count:]]
    wanted = derivatives(dot(wanted, second) + expected, given_whole, False)
    found = derivatives(dot(found, own) + loss, given, False)
    compare(world, found, wanted, count, axis, lengths, reverse)


def derivatives(loss: torch.Tensor, tensors: Any, create_graph: bool) -> list[torch.Tensor]:
    found = torch.autograd.grad(loss, tensors, retain_graph=True, create_graph=create_graph,
                                materialize_grads=True)  # fmt: skip
    return list(found)


def compare(
    world: Rank, found: Any, wanted: Any, count: int, axis: int, lengths: Any, reverse: bool
) -> None:
    """xs have the parts of the whole's gradient; init has it on the first rank, zeros elsewhere."""
    first = world.size - 1 if reverse else 0
    close(found[:count], [world.part(g, lengths, axis) for g in wanted[:count]])
    for g, expected in zip(found[count:], wanted[count:], strict=True):
        close(g, expected if world.rank == first else torch.zeros_like(expected))


@pytest.mark.slow
@pytest.mark.thinned(24)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", SMOOTH)
def test_gradients_of_scans(world: World, name: str, size: int) -> None:
    world.run(check_gradients, size, name, "associative_scan")


@pytest.mark.slow
@pytest.mark.thinned(12)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", SMOOTH)
def test_gradients_of_reductions(world: World, name: str, size: int) -> None:
    world.run(check_gradients, size, name, "reduce")


def check_repeated(world: Rank) -> None:
    """A parameter that is repeated along the axis: the kernel sums its gradient, so that no tensor
    of the size of all steps is made."""
    repeated = []
    made = RecomputedGradient.adjoint

    def noting(self: RecomputedGradient, *given: Any) -> Any:
        adjoint = made(self, *given)
        repeated.append(adjoint.repeated)
        return adjoint

    u, delta = (floats(1, 10, 4, seed=k).requires_grad_() for k in range(2))
    B, C = (floats(1, 10, 3, seed=k) for k in (2, 3))
    A = (-floats(4, 3, seed=4).abs()).requires_grad_()
    scan = functools.partial(scan_over_ranks, world.group)

    def run(part: Any, by: Any) -> torch.Tensor:
        tensors = dict.fromkeys(NAMES) | dict(zip(NAMES, [part(u), part(delta), A], strict=False))
        y: torch.Tensor = by(tensors | {"B": part(B), "C": part(C)})
        return y

    with mock.patch.object(RecomputedGradient, "adjoint", noting):
        y = run(lambda t: world.part(t, (6, 4), 1),
                lambda tensors: scan_by(scan, tensors, True, False, False))  # fmt: skip
        (got,) = torch.autograd.grad(y.sum(), A)
    assert (1,) in repeated[-1], repeated
    torch.distributed.all_reduce(got, group=world.group)
    whole = run(lambda t: t, lambda tensors: selective_scan(**tensors, delta_softplus=True))
    close(got, torch.autograd.grad(whole.sum(), A)[0])


@pytest.mark.slow
def test_repeated_leaves(world: World) -> None:
    world.run(check_repeated, 2)


RECURRENCES = {
    "scalars": with_lower(ops.affine, lambda state: state[1]),
    "matrices": MATRIX_RECURRENCE,  # of size 5, with a hand-written adjoint
}


def check_states_that_leave(world: Rank, name: str, reverse: bool) -> None:
    """The product of all a enters and leaves the parts, but no output depends on it: nothing of it
    is saved or differentiated."""
    op, lengths = RECURRENCES[name], (4, 0, 5, 3)[: world.size]
    n = sum(lengths)
    xs = floats(2, n, 3) * 0.5, floats(2, n, 3, seed=1)
    if name == "matrices":
        xs = floats(2, n, 5, 5) * 0.5, floats(2, n, 5, seed=1)
    whole, part = leaves(xs), leaves(world.part(xs, lengths, 1))
    expected = assocscan.associative_scan(op, whole, 1, reverse)
    y = distributed.associative_scan(op, part, 1, reverse, group=world.group)
    close(y, world.part(expected, lengths, 1))
    scans = [node.scan for node in nodes_of(y) if hasattr(node, "scan")]
    assert scans
    for scan in scans:
        assert set(scan.spec.final) <= {1}
        assert getattr(scan, "states", (1,)) == (1,)
    w = torch.cos(expected.detach())
    got = torch.autograd.grad(y, part, world.part(w, lengths, 1), materialize_grads=True)
    wanted = torch.autograd.grad(expected, whole, w)
    close(got, [world.part(g, lengths, 1) for g in wanted])


def nodes_of(y: torch.Tensor) -> Iterator[Any]:
    """The nodes of the autograd graph of `y`."""
    seen, found = set(), [y.grad_fn]
    while found:
        node = found.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            found += [n for n, _ in node.next_functions]


@pytest.mark.slow(2)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    "name", ["scalars", pytest.param("matrices", marks=pytest.mark.exhaustive)]
)
def test_states_that_leave(world: World, name: str, reverse: bool) -> None:
    world.run(check_states_that_leave, 4, name, reverse)


def check_results_in_place(world: Rank) -> None:
    """Results have memory of their own: writing to them is allowed, and harms nothing."""
    for lengths in ((5, 4), (9, 0), (0, 9)):
        x = floats(2, 9, 3)
        part = world.part(x, lengths, 1).clone().requires_grad_()
        total = distributed.reduce("sum", part, 1, group=world.group)
        y, last = distributed.associative_scan("sum", part, 1, group=world.group, return_final=True)
        for t in (total, last):
            assert t.untyped_storage().nbytes() <= world.size * t.nbytes
            t.mul_(2.0)
        close((total, last), (2 * x.sum(1),) * 2)
        close(y, world.part(x.cumsum(1), lengths, 1))
        (total.sum() + y.sum()).backward()


def test_results_in_place(world: World) -> None:
    world.run(check_results_in_place, 2)


def check_odd_states(world: Rank) -> None:
    """No sequence in the batch, twice differentiated; and a state that has no derivative."""
    nothing = floats(0, 4, 3).requires_grad_()
    y = distributed.associative_scan("sum", nothing, 1, group=world.group)
    (g,) = torch.autograd.grad(y.square().sum(), nothing, create_graph=True)
    (gg,) = torch.autograd.grad(g.sum(), nothing)
    assert gg.shape == nothing.shape

    counting = Monoid(lambda a, b: a + b, identity=0, name="distributed_counting",
                      lift=lambda x: (x > 0).long(), lower=lambda s, x: s * x)  # fmt: skip
    x = floats(2, 9, 3)
    part = world.part(x, (5, 4), 1).clone().requires_grad_()
    y = distributed.associative_scan(counting, part, 1, group=world.group)
    counts = world.part((x > 0).cumsum(1), (5, 4), 1)
    close(y, counts * part)
    close(torch.autograd.grad(y.sum(), part)[0], counts.double())


@pytest.mark.slow
def test_odd_states(world: World) -> None:
    world.run(check_odd_states, 2)


SCAN = importlib.import_module("assocscan.distributed.associative_scan")
# Those that are not kept: no Monoid, no tuple of tensors, no identity.
NOT_KEPT = ("raw", "dict", "no identity")


@contextlib.contextmanager
def counted() -> Iterator[list[Any]]:
    """Ranks do not compare their arguments, as on NCCL; the parts that were kept are noted."""
    found: list[Any] = []

    def noting(*given: Any) -> Any:
        part = KEPT_BY(*given)
        if part is not None:
            found.append(part.prepared)
        return part

    with (
        mock.patch.object(agreement, "reads_header", return_value=False),
        mock.patch.object(SCAN, "kept", noting),
    ):
        yield found


KEPT_BY = SCAN.kept


def check_kept(world: Rank, name: str) -> None:
    """Calls whose like was made before: values, and first and second derivatives."""
    for _ in range(2):
        with counted() as found:
            check_values(world, name)
    assert bool(found) == (name not in NOT_KEPT), found
    # Totals of several dtypes, and of programs that are no kernels, are packed by torch.
    assert all(p.total is not None and p.scan is not None for p in found), name
    if name in SMOOTH:
        for _ in range(2):
            with counted() as found:
                check_gradients(world, name, "associative_scan")
        assert bool(found) == (name not in NOT_KEPT), found


@pytest.mark.slow
@pytest.mark.thinned(27)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_kept_calls(world: World, name: str, size: int) -> None:
    world.run(check_kept, size, name)


def check_kept_apart(world: Rank) -> None:
    """What a kept call must not be used for, and what it must not keep or share."""
    lengths = tuple(range(4, 4 + world.size))
    pair = floats(2, sum(lengths), 3) * 0.5, floats(2, sum(lengths), 3, seed=1)

    def run(*, op: Any = ops.affine, xs: Any = pair, **options: Any) -> None:
        whole = assocscan.associative_scan(op, xs, 1, **options)
        mine = distributed.associative_scan(
            op, world.part(xs, lengths, 1), 1, group=world.group, check=False, **options
        )
        if options.get("return_final"):
            close(mine[1], whole[1])
            mine, whole = mine[0], whole[0]
        close(mine, world.part(whole, lengths, 1))

    longer = tuple(torch.cat([t, t], 2) for t in pair)
    init = floats(2, 3, seed=2), floats(2, 3, seed=3)
    for _ in range(2):
        run()
        run(xs=tuple(t.float().double() for t in pair))
        run(xs=longer)
        run(xs=tuple(t[..., 1:4] for t in longer))  # other strides and addresses
        run(reverse=True)
        run(inclusive=False)
        run(init=init)
        run(init=(init[0][:1], init[1]))  # is expanded, and so not kept
        run(init=(1.0, 0.5))
        run(return_final=True)
        run(op=ops.argmax, xs=(pair[0], integers(*pair[0].shape)))  # of two dtypes
        run(op=ops.sum, xs=pair[0])
        run(op="sum", xs=pair[0])
        run(op=ops.logaddexp, xs=pair[1].float().double(), backend="eager")
    part = world.part(pair, lengths, 1)
    for _ in range(2):  # a carry of one number, whose cotangent has the stride 0
        x = leaves(world.part(pair[0][:1, :, :1], lengths, 1))
        _, final = distributed.associative_scan(
            "sum", x, 1, group=world.group, check=False, return_final=True
        )
        final.sum().backward()
        close(x.grad, torch.full_like(x, world.size))
    finals = []
    for _ in range(2):
        _, final = distributed.associative_scan(
            ops.affine, part, 1, group=world.group, check=False, return_final=True
        )
        finals.append([t.clone() for t in final])
        for t in final:
            t.zero_()
    close(*finals, exact=True)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_what_kept_calls_depend_on(world: World, size: int) -> None:
    world.run(check_kept_apart, size)
