"""Operations of `torch.ops.assocscan` called by hand, with what does not fit: kernels would read or
write outside of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from assocscan import (
    AssocScanError,
    AxisError,
    BackendError,
    Monoid,
    ScanTypeError,
    ScanValueError,
    associative_scan,
    ops,
)
from assocscan.program import serialization
from assocscan.program.operator import Leaf
from assocscan.pytrees import flatten

F32 = Leaf(torch.float32)
PLACES = (
    "key", "program", "inputs", "init", "edges", "offsets", "batch", "axis", "reverse", "exclusive",
    "from_identity", "read", "given", "final", "ahead", "edged", "backend",
)  # fmt: skip


def operator(op: Any, *leaves: Leaf) -> Any:
    example: Any = tuple(range(len(leaves))) if len(leaves) > 1 else 0
    traced = op.trace_for(flatten(example)[1], leaves)
    return traced.matrices or traced.operator


AFFINE = operator(ops.affine, F32, F32)
MATRICES = operator(ops.matmul, Leaf(torch.float32, (8, 8)))


def arguments(**changed: Any) -> list[Any]:
    """A right call of h[t] = a[t] h[t-1] + b[t] on [2, 5, 3], with init and finals; changed."""
    right: dict[str, Any] = dict(zip(PLACES, (
        *serialization.write(changed.pop("operator", AFFINE)),
        [torch.full((2, 5, 3), 0.5), torch.ones(1, 5, 3)], [torch.ones(2, 3), torch.ones(1, 3)], [],
        None, [2, 5, 3], 1, False, False, False, [0, 1], [0, 1], [0, 1], [], [], "cpu",
    ), strict=True))  # fmt: skip
    assert changed.keys() <= right.keys()
    return list((right | changed).values())


def scan(**changed: Any) -> list[Tensor]:
    return torch.ops.assocscan.scan(*arguments(**changed))


def cut(t: Tensor, count: int = 4) -> Tensor:
    """The tensor with less memory than its sizes say."""
    t.untyped_storage().resize_(count)
    return t


x, wide, double = torch.ones(2, 5, 3), torch.ones(2, 5, 4), torch.ones(2, 5, 3).double()
carry = torch.ones(2, 3)
packed = {"init": [], "given": [], "final": []}
WRONG: dict[str, tuple[type[AssocScanError], dict[str, Any]]] = {
    "batch that is too long": (ScanValueError, {"batch": [2, 4000, 3]}),
    "batch that is too short": (ScanValueError, {"batch": [2, 4, 3]}),
    "batch of fewer dimensions": (ScanValueError, {"batch": [2, 5]}),
    "batch of more dimensions": (ScanValueError, {"batch": [2, 5, 3, 1]}),
    "no batch": (AxisError, {"batch": [], "axis": 0}),
    "negative batch": (ScanValueError, {"batch": [2, -5, 3]}),
    "batch of more than 64 bits": (
        ScanValueError,
        {
            "batch": [1 << 40, 5, 1 << 40],
            "inputs": [torch.ones(1, 5, 1)] * 2,
            "init": [torch.ones(1, 1)] * 2,
        },
    ),
    "batch of many dimensions": (ScanValueError, {"batch": [1] * 70}),
    "axis beyond": (AxisError, {"axis": 3}),
    "negative axis": (AxisError, {"axis": -1}),
    "one input": (ScanValueError, {"inputs": [x]}),
    "three inputs": (ScanValueError, {"inputs": [x, x, x]}),
    "no inputs": (ScanValueError, {"inputs": [], "read": []}),
    "an input that is not read": (ScanValueError, {"inputs": [x], "read": [0]}),
    "nothing at all": (
        ScanValueError,
        {"inputs": [], "read": [], "init": [], "given": [], "from_identity": True},
    ),
    "shape of an input": (ScanValueError, {"inputs": [x, wide]}),
    "dtype of an input": (ScanTypeError, {"inputs": [x, double]}),
    "complex input": (ScanTypeError, {"inputs": [x, x.to(torch.complex64)]}),
    "sparse input": (ScanTypeError, {"inputs": [x, x.to_sparse()]}),
    "input of another device": (ScanValueError, {"inputs": [x, x.to("meta")]}),
    "read twice": (ScanValueError, {"read": [0, 0]}),
    "read beyond": (ScanValueError, {"read": [0, 2]}),
    "read negative": (ScanValueError, {"read": [0, -1]}),
    "shape of init": (ScanValueError, {"init": [carry, torch.ones(2, 4)]}),
    "short init": (ScanValueError, {"init": [carry, torch.ones(3)]}),
    "init with the axis": (ScanValueError, {"init": [carry, x]}),
    "dtype of init": (ScanTypeError, {"init": [carry, carry.long()]}),
    "one init": (ScanValueError, {"init": [carry]}),
    "given beyond": (ScanValueError, {"given": [0, 7]}),
    "final beyond": (ScanValueError, {"final": [0, 2]}),
    "final twice": (ScanValueError, {"final": [0, 0]}),
    "negative final": (ScanValueError, {"final": [-1]}),
    "ahead beyond": (ScanValueError, {"ahead": [2]}),
    "edge of no leaf": (ScanValueError, {"edges": [carry]}),
    "edge of a leaf not ahead": (ScanValueError, {"edges": [carry], "edged": [0]}),
    "shape of an edge": (ScanValueError, {"edges": [x], "edged": [0], "ahead": [0]}),
    "exclusive of nothing": (ScanValueError, {"exclusive": True, "init": [], "given": []}),
    "offsets that decrease": (ScanValueError, {"offsets": torch.tensor([0, 3, 2, 5])} | packed),
    "offsets beyond": (ScanValueError, {"offsets": torch.tensor([0, 50])} | packed),
    "negative offsets": (ScanValueError, {"offsets": torch.tensor([-7, 5])} | packed),
    "offsets of floats": (ScanTypeError, {"offsets": torch.tensor([0.0, 5.0])} | packed),
    "offsets of two dimensions": (ScanValueError, {"offsets": torch.tensor([[0, 5]])} | packed),
    "no offsets": (ScanValueError, {"offsets": torch.tensor([], dtype=torch.int64)} | packed),
    "offsets without memory": (
        ScanValueError,
        {"offsets": torch.tensor([0, 5], device="meta")} | packed,
    ),
    "init without sequences": (ScanValueError, {"offsets": torch.tensor([0, 2, 5, 5])}),
    "unknown backend": (ScanValueError, {"backend": 'cpu"); abort("'}),
    "eager backend": (ScanValueError, {"backend": "eager"}),
    "input with less memory": (ScanValueError, {"inputs": [x, cut(torch.ones(2, 5, 3))]}),
    "init with less memory": (ScanValueError, {"init": [carry, cut(torch.ones(2, 3))]}),
    "offsets with less memory": (
        ScanValueError,
        {"offsets": cut(torch.tensor([0, 5]), 8)} | packed,
    ),
}


def test_the_right_call_is_right() -> None:
    h = scan()[1]
    again = associative_scan(
        ops.affine,
        (torch.full((2, 5, 3), 0.5), torch.ones(1, 5, 3)),
        1,
        init=(torch.ones(2, 3), torch.ones(1, 3)),
    )[1]
    assert torch.equal(h, again)


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_refused(case: str) -> None:
    kind, changed = WRONG[case]
    with pytest.raises(kind):
        scan(**changed)


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_refused_where_a_gradient_is_wanted(case: str) -> None:
    kind, changed = WRONG[case]
    given = dict(zip(PLACES, arguments(**changed), strict=True))
    if case.endswith("less memory"):
        given["inputs"][0] = given["inputs"][0].requires_grad_()
    else:
        given["inputs"] = [
            t.clone().requires_grad_() if t.dtype.is_floating_point else t for t in given["inputs"]
        ]
    with pytest.raises(kind):
        torch.ops.assocscan.scan(*given.values())


@pytest.mark.parametrize(
    "case",
    [c for c in WRONG if "less memory" not in c and "backend" not in c and "offsets" not in c],
)
def test_wrong_arguments_are_refused_without_data(case: str) -> None:
    """Where shapes alone are asked for, as when a graph is built."""
    kind, changed = WRONG[case]
    given = dict(zip(PLACES, arguments(**changed), strict=True))
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(kind):
        torch.ops.assocscan.scan(*given.values())


def test_an_identity_that_is_not_declared_is_not_read() -> None:
    without = operator(Monoid(torch.add, name="raw operation without identity"), F32)
    given = {"operator": without, "inputs": [x], "read": [0], "init": [], "given": []}
    for flags in (
        {"from_identity": True, "final": []},
        {"exclusive": True, "final": []},
        {"batch": [2, 0, 3], "inputs": [torch.ones(2, 0, 3)], "final": [0]},
    ):
        with pytest.raises(ScanValueError):
            scan(**{**given, **flags})


def test_matrices_run_where_their_kernels_are() -> None:
    A = torch.eye(8).expand(4, 8, 8)
    given = {"operator": MATRICES, "inputs": [A], "read": [0], "init": [], "given": [],
             "final": [], "batch": [4], "axis": 0}  # fmt: skip
    for backend in ("cpu", "cuda"):
        with pytest.raises(BackendError):
            scan(**given, backend=backend)
    with pytest.raises(ScanValueError, match="ahead"):
        scan(**given, backend="triton", ahead=[0])
    with pytest.raises(ScanValueError, match="shape"):
        scan(**{**given, "inputs": [torch.ones(4, 8, 7)]}, backend="triton")


def test_plain_calls_do_not_check(monkeypatch: pytest.MonkeyPatch) -> None:
    from assocscan.runtime import operation_arguments as operation
    from assocscan.runtime import torch_operation as library

    def refuse(*_: Any) -> Any:
        raise AssertionError("checked")

    monkeypatch.setattr(operation, "check_places", refuse)
    monkeypatch.setattr(operation, "check_scan", refuse)
    monkeypatch.setattr(library, "check_memory_of", refuse)
    a = torch.ones(5, requires_grad=True)
    for _ in range(2):  # cold, then warm
        associative_scan(ops.affine, (a, a))[1].sum().backward()
    with pytest.raises(AssertionError, match="checked"):
        scan()


Gelu = Callable[..., tuple[Tensor, Tensor]]
rows, weight, bias = torch.ones(4, 8), torch.ones(6, 8), torch.ones(6)
WRONG_GELU: dict[str, tuple[type[AssocScanError], tuple[Any, ...]]] = {
    "wide x": (ScanValueError, (torch.ones(4, 9), weight, bias)),
    "x of three dimensions": (ScanValueError, (torch.ones(2, 2, 8), weight, bias)),
    "x of one dimension": (ScanValueError, (torch.ones(8), weight, bias)),
    "weight of one dimension": (ScanValueError, (rows, torch.ones(8), bias)),
    "long bias": (ScanValueError, (rows, weight, torch.ones(7))),
    "short bias": (ScanValueError, (rows, weight, torch.ones(1))),
    "bias of two dimensions": (ScanValueError, (rows, weight, torch.ones(6, 1))),
    "dtypes": (ScanTypeError, (rows, weight.half(), bias)),
    "float64": (ScanTypeError, (rows.double(), weight.double(), None)),
    "integers": (ScanTypeError, (rows.long(), weight.long(), None)),
    "integer bias": (ScanTypeError, (rows, weight, bias.long())),
    "weight with less memory": (ScanValueError, (rows, cut(torch.ones(6, 8)), bias)),
    "x with less memory": (ScanValueError, (cut(torch.ones(4, 8)), weight, bias)),
    "bias with less memory": (ScanValueError, (rows, weight, cut(torch.ones(6)))),
}


@pytest.fixture
def gelu() -> Gelu:
    pytest.importorskip("triton", reason="Triton is not installed")
    from assocscan.nn.norm_linear_gelu import launch  # noqa: F401, it defines the operation

    operation: Gelu = torch.ops.assocscan.linear_gelu
    return operation


@pytest.mark.parametrize("case", WRONG_GELU)
def test_wrong_arguments_of_linear_gelu_are_refused(case: str, gelu: Gelu) -> None:
    kind, given = WRONG_GELU[case]
    with pytest.raises(kind, match="linear_gelu"):
        gelu(*given, False, True)


@pytest.mark.parametrize("sizes", [(0, 8, 6), (4, 0, 6), (4, 8, 0)])
def test_linear_gelu_of_nothing(sizes: tuple[int, int, int], gelu: Gelu) -> None:
    m, k, n = sizes
    y, z = gelu(torch.ones(m, k), torch.ones(n, k), torch.ones(n), False, True)
    want = torch.ones(m, n) if k == 0 else torch.empty(m, n)
    assert torch.equal(z, want)
    assert torch.equal(y, torch.nn.functional.gelu(want))
