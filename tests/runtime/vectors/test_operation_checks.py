"""The library operation on vectors, called by hand with what does not fit: kernels would read or
write outside of tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from vector_cases import CASES, expanded, leaves_of

from assocscan import AssocScanError, BackendError, ScanTypeError, ScanValueError, associative_scan
from assocscan.program import deserialization, serialization
from assocscan.program.vectors.vector_adjoint import VectorAdjoint

SCAN = torch.ops.assocscan.scan.default
PLACES = (
    "key", "program", "inputs", "init", "edges", "offsets", "batch", "axis", "reverse", "exclusive",
    "from_identity", "read", "given", "final", "ahead", "edged", "backend",
)  # fmt: skip
Given = dict[str, Any]


def right_calls() -> list[Given]:
    """The arguments of a scan on [2, 40, 5] with init and finals, and of its backward pass."""
    from torch.utils._python_dispatch import TorchDispatchMode

    found: list[Given] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is SCAN:
                found.append(dict(zip(PLACES, args, strict=True)))
            return func(*args, **(kwargs or {}))

    case = CASES["gated"]
    leaves = [x.requires_grad_() for x in leaves_of(case, 2, 40, 5, 3)]
    init = tuple(torch.rand(2, 5, 3).requires_grad_() for _ in range(2))
    with Recorder():
        y, final = associative_scan(case.op, expanded(leaves), 1, init=init, return_final=True)
        torch.autograd.grad(
            [y, *final], [*leaves, *init], [torch.ones_like(t) for t in (y, *final)]
        )
    return [{name: detached(value) for name, value in call.items()} for call in found]


def detached(value: Any) -> Any:
    if isinstance(value, list):
        return [detached(v) for v in value]
    return value.detach() if isinstance(value, Tensor) else value


FORWARD, BACKWARD = right_calls()
ADJOINT = deserialization.read(BACKWARD["key"], BACKWARD["program"])
assert isinstance(ADJOINT, VectorAdjoint)
SEED = ADJOINT.carries + 1


def with_input(k: int, change: Callable[[Tensor], Tensor]) -> Callable[[Given], Given]:
    def changed(given: Given) -> Given:
        tensors = list(given["inputs"])
        tensors[k] = change(tensors[k])
        return {"inputs": tensors}

    return changed


def with_operator(**fields: Any) -> Callable[[Given], Given]:
    def changed(given: Given) -> Given:
        op = deserialization.read(given["key"], given["program"])
        key, program = serialization.write(replace(op, **fields))
        return {"key": key, "program": program}

    return changed


def cut(t: Tensor) -> Tensor:
    """With less memory than its sizes say."""
    t = t.clone()
    t.untyped_storage().resize_(4)
    return t


Change = Callable[[Given], Given]
BOTH: dict[str, tuple[type[AssocScanError], Change]] = {
    "long batch": (ScanValueError, lambda g: {"batch": [2, 4000, 5]}),
    "short batch": (ScanValueError, lambda g: {"batch": [2, 30, 5]}),
    "a leaf less": (
        ScanValueError, lambda g: {"inputs": g["inputs"][1:], "read": g["read"][1:]}
    ),
    "shape of a leaf": (ScanValueError, with_input(0, lambda t: t[:, :, :4])),
    "states of a leaf": (ScanValueError, with_input(2, lambda t: t[..., :2])),
    "dtype of a leaf": (ScanTypeError, with_input(0, lambda t: t.double())),
    "leaf with less memory": (ScanValueError, with_input(0, cut)),
    "init with less memory": (ScanValueError, lambda g: {"init": [cut(t) for t in g["init"]]}),
    "shape of init": (ScanValueError, lambda g: {"init": [t[:, :4] for t in g["init"]]}),
    "ahead": (ScanValueError, lambda g: {"ahead": [0]}),
    "another backend": (BackendError, lambda g: {"backend": "multipass"}),
    "lane beyond": (ScanValueError, with_operator(lane=3)),
    "lane along the axis": (ScanValueError, with_operator(lane=1)),
}  # fmt: skip
BACKWARDS: dict[str, tuple[type[AssocScanError], Change]] = {
    "final": (ScanValueError, lambda g: {"final": [0]}),
    "short carries": (ScanValueError, with_input(ADJOINT.carries, lambda t: t[1:])),
    "carries of fewer lanes": (ScanValueError, with_input(ADJOINT.carries, lambda t: t[..., :64])),
    "carries of floats": (ScanValueError, with_input(ADJOINT.carries, lambda t: t.float())),
    "carries with less memory": (ScanValueError, with_input(ADJOINT.carries, cut)),
    "cotangent with less memory": (ScanValueError, with_input(ADJOINT.carries - 1, cut)),
    "shape of a cotangent": (
        ScanValueError, with_input(ADJOINT.carries - 1, lambda t: t[:, :-1].contiguous())
    ),
    "shape of a seed": (ScanValueError, with_input(SEED, lambda t: t[..., :2])),
    "seed with the axis": (ScanValueError, with_input(SEED, lambda t: t.unsqueeze(1))),
    "seed with less memory": (ScanValueError, with_input(SEED, cut)),
    "another lane": (ScanValueError, with_operator(lane=0)),
    "no lane": (ScanValueError, with_operator(lane=None)),
    "repeated beyond": (
        ScanValueError, with_operator(repeated=((3,), *ADJOINT.repeated[1:]))
    ),
    "of an exclusive scan": (ScanValueError, with_operator(exclusive=True)),
    "of a scan without init": (ScanValueError, with_operator(first=True)),
    "exclusive": (ScanValueError, lambda g: {"exclusive": True}),
    "without init": (ScanValueError, lambda g: {"init": [], "given": [], "from_identity": True}),
}  # fmt: skip
CASES_OF = [
    *((kind, name) for kind in ("forward", "backward") for name in BOTH),
    *(("backward", name) for name in BACKWARDS),
]


def call(kind: str, name: str) -> tuple[type[AssocScanError], list[Any]]:
    right = FORWARD if kind == "forward" else BACKWARD
    error, change = (BOTH | BACKWARDS)[name]
    return error, list((right | change(right)).values())


def test_the_right_calls_are_right() -> None:
    assert len(SCAN(*FORWARD.values())) == 4  # y, the carries, two finals
    assert len(SCAN(*BACKWARD.values())) == len(ADJOINT.wanted) + len(ADJOINT.ends)


@pytest.mark.parametrize("kind,name", CASES_OF)
def test_wrong_arguments_are_refused(kind: str, name: str) -> None:
    error, arguments = call(kind, name)
    with pytest.raises(error):
        SCAN(*arguments)


@pytest.mark.parametrize(
    "kind,name", [c for c in CASES_OF if "memory" not in c[1] and "backend" not in c[1]]
)
def test_wrong_arguments_are_refused_without_data(kind: str, name: str) -> None:
    """Where shapes alone are asked for, as when a graph is built."""
    error, arguments = call(kind, name)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(error):
        SCAN(*arguments)
