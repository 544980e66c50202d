"""The operation `torch.ops.assocscan.scan`: its registrations, its keys, and what sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from table import AFFINE, Engine, device_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from assocscan import ScanValueError, associative_scan, cumsum, linear_recurrence, monoid, ops
from assocscan.autodiff.adjoint_operator import Request, derive
from assocscan.caching.bounded import BoundedCache
from assocscan.program import deserialization, serialization
from assocscan.program.operator import Leaf
from assocscan.program.transforms import with_edge_input
from assocscan.pytrees import flatten
from assocscan.runtime.backends import availability

PyTree = Any
SCAN = torch.ops.assocscan.scan.default


class Recorder(TorchDispatchMode):
    """The arguments of every scan that is dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []
        self.others: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is SCAN:
            self.calls.append(args)
        else:
            self.others.add(func.name())
        return func(*args, **(kwargs or {}))


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.rand(shape, generator=generator, dtype=torch.float64).to(dtype)


def recurrence_with_final(a: Tensor, b: Tensor, init: Tensor, backend: str) -> list[Tensor]:
    (_, h), (_, last) = associative_scan(
        AFFINE, (a, b), 1, init=(init, init), return_final=True, backend=backend
    )
    return [h, last]


def packed(a: Tensor, b: Tensor, _: Tensor, backend: str) -> list[Tensor]:
    offsets = torch.tensor([0, 2, 2, 5])
    return list(associative_scan(AFFINE, (a, b), 1, True, offsets=offsets, backend=backend))


def exclusive(a: Tensor, _: Tensor, init: Tensor, backend: str) -> list[Tensor]:
    y: Tensor = associative_scan(ops.logaddexp, a, 1, inclusive=False, init=init, backend=backend)
    return [y]


@pytest.mark.thinned(4)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # opcheck reads it
@pytest.mark.parametrize(
    "scan,backend",
    [
        (recurrence_with_final, "cpu"),
        (recurrence_with_final, "triton"),
        (packed, "triton"),
        (exclusive, "triton"),
    ],
)
def test_opcheck(scan: Callable[..., list[Tensor]], backend: str) -> None:
    """Forward and backward, as torch sees them: schema, fake tensors, Autograd key, AOT."""
    if availability()[backend] is not None:
        pytest.skip(str(availability()[backend]))
    a, b, init = (
        draw(*shape).to(device_of(backend)).requires_grad_()
        for shape in ((2, 5, 3), (2, 5, 3), (2, 3))
    )
    with Recorder() as seen:
        results = scan(a, b, init, backend)
        torch.stack([r.sum() for r in results]).sum().backward()
    assert len(seen.calls) == 2
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for number, arguments in enumerate(seen.calls):
        given = [tracked(x) if isinstance(x, list) else x for x in arguments]
        graphs = ("test_aot_dispatch_dynamic",) if backend == "cpu" and number == 0 else ()
        torch.library.opcheck(SCAN, tuple(given), test_utils=(*checks, *graphs))


def tracked(values: list[Any]) -> list[Any]:
    return [
        t.detach().clone().requires_grad_(t.is_floating_point()) if isinstance(t, Tensor) else t
        for t in values
    ]


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "expanded", "permuted"])
def test_fake_strides_are_the_real_ones(layout: str) -> None:
    x = {
        "contiguous": lambda: draw(2, 4, 3),
        "transposed": lambda: draw(2, 3, 4).transpose(1, 2),
        "expanded": lambda: draw(2, 1, 3).expand(2, 4, 3),
        "permuted": lambda: draw(4, 3, 2).permute(2, 0, 1),
    }[layout]()
    with Recorder() as seen:
        real = associative_scan(AFFINE, (x, x), 1, return_final=True)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = associative_scan(AFFINE, (mode.from_tensor(x),) * 2, 1, return_final=True)
    assert len(seen.calls) == 1
    for one, other in zip(flatten(real)[0], flatten(fake)[0], strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


def test_plain_calls_do_not_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """An eager call, its backward included, enters no operation of ours."""
    from assocscan.runtime import operation_arguments as operation

    def refuse(*_: Any) -> Any:
        raise AssertionError("dispatched")

    monkeypatch.setattr(operation, "call", refuse)
    a, b = draw(2, 5).requires_grad_(), draw(2, 5).requires_grad_()
    for _ in range(2):  # cold, then warm
        linear_recurrence(a, b).sum().backward()
        with torch.no_grad():
            linear_recurrence(a, b)


def test_dispatch_modes_see_one_operation() -> None:
    x = draw(2, 70)
    with Recorder() as seen:
        y = cumsum(x)
    assert len(seen.calls) == 1
    assert not seen.others
    torch.testing.assert_close(y, x.cumsum(1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_autocast_changes_nothing(backend: str, dtype: torch.dtype) -> None:
    A, b = draw(4, 2, 2, dtype=dtype), draw(4, 2, dtype=dtype)
    expected = associative_scan(ops.matrix_affine, (A, b), 0, backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = associative_scan(ops.matrix_affine, (A, b), 0, backend=backend)
        with Recorder():
            seen = associative_scan(ops.matrix_affine, (A, b), 0, backend=backend)
    for results in (plain, seen):
        for one, other in zip(results, expected, strict=True):
            assert one.dtype == dtype
            assert torch.equal(one, other)


OPERATORS = {
    "affine": (ops.affine, (torch.float32,) * 2, ()),
    "int": (ops.argmax, (torch.int32, torch.int64), ()),
    "complex": (ops.affine, (torch.complex64,) * 2, ()),
    "infinite identity": (ops.max, (torch.float64,), ()),
    "matrix": (ops.matmul, (torch.float32,), (2, 2)),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_keys_stand_for_the_operator(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text alone gives the same operator again, NaN and infinities included."""
    op, dtypes, shape = OPERATORS[name]
    leaves = tuple(Leaf(d, shape) for d in dtypes)
    example = tuple(range(len(leaves))) if len(leaves) > 1 else 0
    operator = op.trace_for(flatten(example)[1], leaves).operator
    assert operator is not None
    # Other tests of this process may have written an equal operator before.
    monkeypatch.setattr(serialization, "_WRITTEN", BoundedCache())
    monkeypatch.setattr(deserialization, "_KNOWN", BoundedCache())
    key, program = serialization.write(operator)
    assert key.startswith(f"{op.name}:")
    assert deserialization.read(key, program) is operator
    monkeypatch.setattr(deserialization, "_KNOWN", BoundedCache())
    again = deserialization.read(key, program)
    assert again == operator
    assert again is not operator
    assert again.name == op.name


def test_keys_of_derived_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the edge of a derivative is stands in the text, for a further derivative."""
    operator = ops.logaddexp.trace_for(flatten(0)[1], (Leaf(torch.float32),)).operator
    assert operator is not None
    derived = derive(operator, Request(False, False, (0,), frozenset(), frozenset({0}))).operator
    assert derived.edge is not None
    for op in (derived, with_edge_input(derived)):
        key, program = serialization.write(op)
        with monkeypatch.context() as patch:
            patch.setattr(deserialization, "_KNOWN", BoundedCache())
            again = deserialization.read(key, program)
        assert again == op
        assert again.edge == derived.edge


def test_whole_matrices_have_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves = (Leaf(torch.float32, (8, 8)), Leaf(torch.float32, (8,)))
    matrices = ops.matrix_affine.trace_for(flatten((0, 1))[1], leaves).matrices
    assert matrices is not None
    key, program = serialization.write(matrices)
    monkeypatch.setattr(deserialization, "_KNOWN", BoundedCache())
    assert deserialization.read(key, program) == matrices


def test_a_changed_program_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = ops.sum.trace_for(flatten(0)[1], (Leaf(torch.float32),)).operator
    other = ops.prod.trace_for(flatten(0)[1], (Leaf(torch.float32),)).operator
    assert operator is not None and other is not None
    key, (_, program) = serialization.write(operator)[0], serialization.write(other)
    monkeypatch.setattr(deserialization, "_KNOWN", BoundedCache())
    with pytest.raises(ScanValueError, match=r"'sum'.*hash"):
        deserialization.read(key, program)


def test_redefining_a_monoid_leaves_its_old_key() -> None:
    def define(factor: float) -> Any:
        return monoid(lambda left, right: left + factor * right, name=f"torch_op_{factor}")

    first, second = define(2.0), define(3.0)
    x = draw(2, 5)
    with Recorder() as seen:
        before = associative_scan(first, x, 1)
        associative_scan(second, x, 1)
    assert seen.calls[0][0] != seen.calls[1][0]
    assert torch.equal(SCAN(*seen.calls[0])[0], before)


def test_offsets_are_checked_when_the_operation_runs(engine: Engine) -> None:
    if engine.name == "eager":
        pytest.skip("runs as torch operations")
    x, offsets = torch.arange(6.0), torch.tensor([0, 4, 6])
    with Recorder() as seen:
        engine.scan(ops.sum, engine.put(x), offsets=offsets)
    arguments = list(seen.calls[0])
    arguments[5] = torch.tensor([0, 7, 6])
    with pytest.raises(ScanValueError, match="offsets must not decrease"):
        SCAN(*arguments)
