"""Ranks that disagree, wrong arguments, and the flags of distributed scans."""

from __future__ import annotations

import contextlib
import functools
import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import SIZE, Rank, World
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import assocscan
from assocscan import Monoid, ScanTypeError, ScanValueError, distributed, ops
from assocscan.distributed.ranks import header_device, reads_header

scan = distributed.associative_scan


def last(left: Any, right: Any) -> Any:
    return right


def counted(call: Callable[[], Any], by_torch: bool) -> Any:
    with FlopCounterMode(display=False) if by_torch else contextlib.nullcontext():
        return call()


def kept(call: Callable[[], Any], elsewhere: bool) -> Any:
    with save_on_cpu() if elsewhere else contextlib.nullcontext():
        return call()


def disagreements(rank: int) -> dict[str, Callable[[Any], Any]]:
    """What one rank does otherwise, by a part of the message that all get."""
    odd = rank == 1
    x, op = torch.ones(3, 2), ops.max if odd else ops.sum
    other = Monoid(lambda a, b: b if odd else a + b, name="distributed_differs")
    double = x.double() if odd else x
    return {
        "the operator": lambda g: scan(op, x, group=g),
        "the operator: 'distributed_differs'": lambda g: scan(other, x, group=g),
        "the dtype of xs": lambda g: scan("sum", double, group=g),
        "the shape of xs": lambda g: scan("sum", torch.ones(3, 4 if odd else 2), group=g),
        "the structure of xs": lambda g: scan(last, (x,) if odd else x, group=g),
        "axis": lambda g: scan("sum", torch.ones(2, 2), axis=int(odd), group=g),
        "reverse: False on rank": lambda g: scan("sum", x, reverse=odd, group=g),
        "inclusive": lambda g: scan("sum", x, inclusive=odd, group=g),
        "return_final": lambda g: scan("sum", x, return_final=odd, group=g),
        "whether init is given": lambda g: scan("sum", x, init=1.0 if odd else None, group=g),
        "whether xs requires": lambda g: scan("sum", x.clone().requires_grad_(odd), group=g),
        "whether operations are recorded": lambda g: counted(lambda: scan("sum", x, group=g), odd),
        "whether saved tensors have hooks": lambda g: kept(
            lambda: scan("sum", x.clone().requires_grad_(), group=g), odd
        ),
        "the function": lambda g: (distributed.reduce if odd else scan)("sum", x, group=g),
        "the dtype of a: ": lambda g: distributed.linear_recurrence(double, double, group=g),
    }


def check_disagreements(world: Rank) -> None:
    messages = []
    for expected, call in disagreements(world.rank).items():
        with pytest.raises(ScanValueError, match="disagree") as caught:
            call(world.group)
        messages.append(str(caught.value))
        assert expected.partition(":")[0] in messages[-1], messages[-1]
        assert "rank 1" in messages[-1]
    everyone: list[Any] = [None] * world.size
    dist.all_gather_object(everyone, messages, world.group)
    assert all(told == everyone[0] for told in everyone), everyone


@pytest.mark.slow
@pytest.mark.thinned(7)
@pytest.mark.parametrize("size", [2, 3])
def test_disagreements_give_the_same_error_on_every_rank(world: World, size: int) -> None:
    world.run(check_disagreements, size)


SCALE = 1.0  # read by `by_global`


def by_global(left: Any, right: Any) -> Any:
    return left.sort(-1)[0] + SCALE * right


def sorts(left: Any, right: Any) -> Any:
    return left + right.sort(-1)[0]


class Weighted:
    """An operator that is an object. Its code does not name `rank`."""

    def __init__(self, weight: float, rank: int) -> None:
        self.weight, self.rank = weight, rank

    def __call__(self, left: Any, right: Any) -> Any:
        return left.sort(-1)[0] + self.weight * right

    def combine(self, left: Any, right: Any) -> Any:
        return self(left, right)


def without_programs(number: float, rank: int) -> dict[str, Any]:
    """Operators for which no code is generated, which see a number besides their arguments."""
    tensor, several = torch.tensor([number]), [1, (number,)]
    greatest = torch.maximum if number == 1 else torch.minimum

    def captures(left: Any, right: Any) -> Any:
        return left.sort(-1)[0] + number * right

    def inner(left: Any, right: Any) -> Any:
        return captures(left, right)

    def with_default(left: Any, right: Any, scale: float = number) -> Any:
        return left.sort(-1)[0] + scale * right

    def of_list(left: Any, right: Any) -> Any:
        return left.sort(-1)[0] + several[1][0] * right  # type: ignore[index]

    def lift(x: Any) -> Any:
        return x * number

    return {
        "closure": captures, "inner": inner, "default": with_default, "list": of_list,
        "partial": functools.partial(with_default, scale=number),
        "tensor": lambda a, b: a.sort(-1)[0] + tensor * b,
        "function": lambda a, b: greatest(a.sort(-1)[0], b),
        "object": Weighted(number, rank), "method": Weighted(number, rank).combine,
        "global": by_global,
        "lift": Monoid(sorts, name="distributed_lifted", lift=lift, element_ndim=1),
        "identity": Monoid(sorts, name="distributed_empty", identity=number, element_ndim=1),
        "names": (lambda a, b: torch.maximum(a.sort(-1)[0], b)) if number == 1 else (
                  lambda a, b: torch.minimum(a.sort(-1)[0], b)),
    }  # fmt: skip


def check_captured_values(world: Rank) -> None:
    """What an operator without a program sees: noticed where it differs, and only there."""
    x = torch.ones(3, 2)
    space = globals()
    for number in (1.0, 2.0 if world.rank == 1 else 1.0):
        space["SCALE"] = number
        differs = []
        for name, op in without_programs(number, world.rank).items():
            try:
                scan(op, x, group=world.group, backend="eager")
            except ScanValueError as error:
                assert "the ranks disagree on " in str(error) and "operator" in str(error), error
                differs.append(name)
        told: list[Any] = [None] * world.size
        dist.all_gather_object(told, number, world.group)
        assert differs == ([] if len({*told}) == 1 else [*without_programs(1.0, 0)]), differs


@pytest.mark.parametrize("size", [2])
def test_captured_values_are_compared(world: World, size: int) -> None:
    world.run(check_captured_values, size)


def check_errors_of_one_rank(world: Rank) -> None:
    bad = world.rank == 1
    x: Any = [1, 2] if bad else torch.ones(3)
    with pytest.raises(ScanTypeError, match=r"xs\[0\] is the int 1"):
        scan("sum", x, group=world.group)
    with pytest.raises(ScanTypeError, match="reverse is 'yes'"):
        distributed.reduce("sum", torch.ones(2), reverse="yes" if bad else True, group=world.group)
    with pytest.raises(ScanTypeError, match="init is"):
        distributed.linear_recurrence(
            0.5, torch.ones(2), "x" if bad else None, 0, group=world.group
        )
    # The group works on.
    assert scan("sum", torch.ones(1), group=world.group).item() == world.rank + 1


@pytest.mark.slow
def test_an_error_of_one_rank_is_raised_by_all(world: World) -> None:
    world.run(check_errors_of_one_rank, 3)


def check_group_of_gpus(world: Rank) -> None:
    """A group that sends tensors of GPUs alone, as one of NCCL: a rank whose xs holds no tensor
    does what the others do.

    Every rank makes such a group of its own: torch numbers a process's groups, and ranks that had
    made different numbers of them could not make the next one together.
    """
    gpus = dist.new_group([world.rank], backend="cuda:gloo", use_local_synchronization=True)
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "current_device_index", lambda: 3)
        assert header_device(gpus) == gpu
    assert header_device(world.group) == cpu
    for check in (True, False, None):
        assert reads_header(gpus, cpu, check) == bool(check)
    assert reads_header(world.group, cpu, None)
    with pytest.raises(ScanTypeError, match=r"xs\[0\] is the int 1"):
        scan("sum", [1, 2], group=gpus)


def test_a_group_that_sends_no_cpu_tensors(world: World) -> None:
    world.run(check_group_of_gpus, SIZE)


def check_empty_whole(world: Rank) -> None:
    empty = torch.ones(0, 2)
    raw = torch.add
    for check in (True, False):
        options: Any = {"group": world.group, "return_final": True, "check": check}
        y, final = scan("sum", empty, **options)
        assert y.shape == (0, 2) and final.tolist() == [0, 0]
        _, final = scan(raw, empty, init=torch.ones(2), **options)
        assert final.tolist() == [1, 1]
        with pytest.raises(ScanValueError, match="declares no identity"):
            scan(raw, empty, **options)
        assert scan(raw, empty, group=world.group, check=check).shape == (0, 2)
    with pytest.raises(ScanValueError, match="the parts of all ranks are empty"):
        op = Monoid(torch.add, identity=0, name="distributed_reads", lower=lambda s, xs: s * xs)
        distributed.reduce(op, empty, group=world.group)


def check_without_header(world: Rank) -> None:
    """Lengths that nobody knows: the identity stands for empty parts."""
    for lengths in ((0, 4), (3, 0), (2, 2)):
        x = torch.randn(sum(lengths), 3, dtype=torch.float64,
                        generator=torch.Generator().manual_seed(1))  # fmt: skip
        for op in (ops.sum, torch.logaddexp):
            part = world.part(x, lengths).requires_grad_()
            y = scan(op, part, group=world.group, check=False)
            whole = x.clone().requires_grad_()
            expected = assocscan.associative_scan(op, whole)
            torch.testing.assert_close(y, world.part(expected, lengths))
            (g,) = torch.autograd.grad(y.square().sum(), part)
            (wanted,) = torch.autograd.grad(expected.square().sum(), whole)
            torch.testing.assert_close(g, world.part(wanted, lengths))


def check_last_inputs(world: Rank) -> None:
    """A `lower` that reads the last inputs, which may lie on any rank."""
    op = Monoid(lambda a, b: a * b, identity=1.0, name="distributed_last",
                lower=lambda s, xs: s - 2 * xs)  # fmt: skip
    x = torch.randn(4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for lengths in ((4, 0, 0), (1, 3, 0), (0, 2, 2)):
        for reverse in (False, True):
            for check in (True, False):
                whole, part = x.clone().requires_grad_(), world.part(x, lengths).requires_grad_()
                expected = assocscan.reduce(op, whole, reverse=reverse)
                y = distributed.reduce(op, part, reverse=reverse, group=world.group, check=check)
                torch.testing.assert_close(y, expected)
                (g,) = torch.autograd.grad(y.sum(), part)
                (wanted,) = torch.autograd.grad(expected.sum() * world.size, whole)
                torch.testing.assert_close(g, world.part(wanted, lengths))


def check_recurrence(world: Rank) -> None:
    """Operands that broadcast, dtypes that promote, 16-bit carries in float32, bits that repeat."""
    lengths = (5, 0, 40)
    g = torch.Generator().manual_seed(0)
    b, a = torch.randn(2, 45, 3, generator=g), torch.rand(2, 45, 3, generator=g)
    options: Any = {"return_final": True, "group": world.group}
    part = world.part(b, lengths, 1)
    for decay, own in ((0.5, 0.5), (a[0, 0], a[0, 0]), (a, world.part(a, lengths, 1))):
        for init in (None, 2.0, torch.ones(2, 3)):
            for reverse in (False, True):
                h, last = distributed.linear_recurrence(own, part, init, 1, reverse, **options)
                wanted, end = assocscan.linear_recurrence(decay, b, init, 1, reverse, True)
                torch.testing.assert_close(h, world.part(wanted, lengths, 1))
                torch.testing.assert_close(last, end)
                again, _ = distributed.linear_recurrence(own, part, init, 1, reverse, **options)
                assert torch.equal(h, again)
    half, parts = b.bfloat16(), part.bfloat16()
    h, last = distributed.linear_recurrence(0.999, parts, **options)
    wanted, end = assocscan.linear_recurrence(0.999, half, return_final=True)
    assert h.dtype == torch.bfloat16 and last.dtype == torch.float32
    torch.testing.assert_close(last, end, rtol=1e-5, atol=1e-5)  # float32: a carry is not rounded
    torch.testing.assert_close(h, world.part(wanted, lengths, 1), rtol=2**-7, atol=2**-7)
    h.mul_(2)  # results are ordinary tensors
    x = part.clone().requires_grad_()
    y = distributed.linear_recurrence(0.5, x, group=world.group)
    y += 1
    y.sum().backward()


@pytest.mark.slow
@pytest.mark.thinned(7)
@pytest.mark.parametrize("check", [check_empty_whole, check_without_header])
def test_empty_parts(world: World, check: Callable[..., None]) -> None:
    world.run(check, 2)


@pytest.mark.slow
@pytest.mark.thinned(7)
@pytest.mark.parametrize("check", [check_last_inputs, check_recurrence])
def test_flags(world: World, check: Callable[..., None]) -> None:
    world.run(check, 3)


def test_without_a_group() -> None:
    with pytest.raises(ScanValueError, match=r"(?s)import torch\.distributed.*init_process_group"):
        scan("sum", torch.ones(2))
    with pytest.raises(ScanTypeError, match="group is 3, expected a torch"):
        scan("sum", torch.ones(2), group=3)
    with pytest.raises(ScanTypeError, match="argument 'dim': pass axis=0"):
        scan("sum", torch.ones(2), dim=0)


def test_torch_without_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_available", lambda: False)
    with pytest.raises(ScanValueError, match="this build of torch has no"):
        scan("sum", torch.ones(2))


@pytest.mark.slow
def test_is_imported_at_its_first_use() -> None:
    script = (
        "import sys, torch\n"
        "before = {m for m in sys.modules if m.startswith('torch.distributed')}\n"
        "import assocscan; assert 'assocscan.distributed' not in sys.modules\n"
        "after = {m for m in sys.modules if m.startswith('torch.distributed')}\n"
        "assert after == before, after - before\n"
        "assert assocscan.distributed.reduce"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=240)


def check_checkpoints(world: Rank) -> None:
    """Under activation checkpointing; graphs free their memory; backward passes can be repeated."""
    lengths = (4, 0, 3)
    x = torch.randn(2, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = x.clone().requires_grad_()
    part = world.part(x, lengths, 1).clone().requires_grad_()

    def twice(x: torch.Tensor, module: Any, **options: Any) -> torch.Tensor:
        y = module.linear_recurrence(x.sigmoid(), x, **options)
        return module.linear_recurrence(0.5, y.tanh(), reverse=True, **options).sin()

    (wanted,) = torch.autograd.grad(twice(whole, assocscan).square().sum(), whole)
    for reentrant in (False, True):
        y = checkpoint(
            lambda t: twice(t, distributed, group=world.group), part, use_reentrant=reentrant
        )
        part.grad = None
        y.square().sum().backward()
        torch.testing.assert_close(part.grad, world.part(wanted, lengths, 1))
    y = twice(part, distributed, group=world.group)
    loss = y.square().sum()
    for _ in range(2):
        (found,) = torch.autograd.grad(loss, part, retain_graph=True)
        torch.testing.assert_close(found, world.part(wanted, lengths, 1))
    # Second derivatives through two scans, of which one runs from the end.
    (first,) = torch.autograd.grad(loss, part, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), part)
    (whole_first,) = torch.autograd.grad(
        twice(whole, assocscan).square().sum(), whole, create_graph=True
    )
    (whole_second,) = torch.autograd.grad(whole_first.square().sum(), whole)
    torch.testing.assert_close(second, world.part(whole_second, lengths, 1))
    # A graph is freed at once, without the garbage collector: nothing in it is a cycle.
    gc.collect()
    gc.disable()
    h = distributed.linear_recurrence(0.5, part, group=world.group)
    mark = type("Mark", (), {})()
    assert h.grad_fn is not None
    h.grad_fn.metadata["mark"] = mark
    alive = weakref.ref(mark)
    h.square().sum().backward()
    del mark, h
    assert alive() is None
    gc.enable()


@pytest.mark.exhaustive
def test_checkpoints_and_repeated_gradients(world: World) -> None:
    world.run(check_checkpoints, 3)
