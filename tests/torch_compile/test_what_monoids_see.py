"""Values that a monoid's functions see, by themselves or in functions that they call: a compiled
call has those of the moment, as an uncompiled one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from assocscan import Monoid, associative_scan, ops, product, reduce, segmented, with_lift

FACTOR = 0.5
NUMBERS = [0.5]
TABLE = {"factor": 0.5}


class Settings:
    factor = 0.5

    def __init__(self) -> None:
        self.scale = 0.5

    def combine(self, left: Tensor, right: Tensor) -> Tensor:
        return left + self.scale * right

    def __call__(self, x: Tensor) -> Tensor:
        return self.scale * x


SETTINGS = Settings()


def scaled(x: Tensor) -> Tensor:
    return FACTOR * x


def scaled_twice(x: Tensor) -> Tensor:
    return scaled(x) + FACTOR * x


def set_all(value: float) -> None:
    global FACTOR
    FACTOR = NUMBERS[0] = TABLE["factor"] = Settings.factor = SETTINGS.scale = value


@pytest.fixture(autouse=True)
def dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    set_all(0.5)
    yield
    set_all(0.5)
    torch._dynamo.reset()


HELPED = Monoid(lambda a, b: a + scaled_twice(b), name="sees_a_helpers_global", identity=0.0)
LISTED = Monoid(lambda a, b: a + NUMBERS[0] * b, name="sees_an_entry")
FOUND = Monoid(lambda a, b: a + TABLE["factor"] * b, name="sees_a_table")
OF_CLASS = Monoid(lambda a, b: a + Settings.factor * b, name="sees_a_class")
OF_OBJECT = Monoid(lambda a, b: a + SETTINGS.scale * b, name="sees_an_object")
CALLED = Monoid(lambda a, b: a + SETTINGS(b), name="sees_a_callable_object")
METHOD = Monoid(SETTINGS.combine, name="sees_by_a_method")
LIFTED = Monoid(lambda a, b: a + b, lift=lambda x: scaled(x), name="sees_in_a_lift")
LOWERED = Monoid(lambda a, b: a + b, lower=lambda x: scaled(x), name="sees_in_a_lower")
START = Monoid(lambda a, b: a + b, identity=lambda _: FACTOR, name="sees_in_the_identity")
X = torch.randn(7, generator=torch.Generator().manual_seed(0))

CALLS: dict[str, Callable[[Tensor], Any]] = {
    "an entry": lambda x: associative_scan(LISTED, x),
    "a table": lambda x: associative_scan(FOUND, x),
    "a class": lambda x: associative_scan(OF_CLASS, x),
    "an object": lambda x: associative_scan(OF_OBJECT, x),
    "a callable object": lambda x: associative_scan(CALLED, x),
    "a method": lambda x: associative_scan(METHOD, x),
    "a lift": lambda x: associative_scan(LIFTED, x),
    "a lower": lambda x: associative_scan(LOWERED, x),
    "the identity": lambda x: associative_scan(START, x, inclusive=False),
    "a helper": lambda x: associative_scan(HELPED, x),
    "a helper, made inside": lambda x: associative_scan(with_lift(ops.sum, lambda x: scaled(x)), x),
    "a helper, in parts": lambda x: [
        reduce(product(HELPED, "max"), x), associative_scan(segmented(HELPED), (x, x > 0))
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.slow(3)
def test_a_value_that_changes(name: str) -> None:
    """Another value is another graph; the same one is not."""
    function, graphs = CALLS[name], []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(function, fullgraph=True, backend=backend)
    for value in (0.5, 0.5, 3.0, 3.0, 0.5):
        set_all(value)
        torch.testing.assert_close(compiled(X), function(X), rtol=0, atol=0)
    assert len(graphs) == 2


def changes_an_object(x: Tensor) -> Any:
    SETTINGS.scale = SETTINGS.scale + 1
    return associative_scan(OF_OBJECT, x)


def changes_an_entry(x: Tensor) -> Any:
    NUMBERS[0] += 1
    return associative_scan(LISTED, x)


def changes_a_global(x: Tensor) -> Any:
    global FACTOR
    FACTOR = FACTOR + 1
    return associative_scan(HELPED, x)


def changes_it_later(x: Tensor) -> Any:
    y = associative_scan(OF_OBJECT, x)
    SETTINGS.scale = SETTINGS.scale + 1
    return y


@pytest.mark.parametrize(
    "function", [changes_an_object, changes_an_entry, changes_a_global, changes_it_later]
)
@pytest.mark.slow(2)
def test_what_the_compiled_function_changes(function: Callable[[Tensor], Any]) -> None:
    """Dynamo makes the changes after the graph has run: so the graph breaks where a scan may see
    one that comes before it."""
    wanted = [function(X) for _ in range(3)]
    set_all(0.5)
    compiled = torch.compile(function, backend="eager")
    torch.testing.assert_close([compiled(X) for _ in range(3)], wanted, rtol=0, atol=0)


class Counting(nn.Module):
    """A module that holds an operator, which sees the module."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.calls = 0.5, 0
        self.op = Monoid(lambda a, b: a + self.factor * b, name="sees_its_module")

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        self.factor *= 2
        return associative_scan(self.op, x)


def test_a_module_that_its_operator_sees() -> None:
    plain, compiled = Counting(), torch.compile(Counting(), backend="eager")
    for factor in (1.0, 2.0, 4.0):
        want = torch.cat([X[:1], X[:1] + factor * X[1:].cumsum(0)])
        torch.testing.assert_close(plain(X), want)
        torch.testing.assert_close(compiled(X), want)


def test_objects_that_change_elsewhere() -> None:
    """What the function changes is nothing that the operator sees: one graph."""
    calls = []

    def function(x: Tensor) -> Any:
        calls.append(1)
        return associative_scan(OF_OBJECT, x)

    compiled = torch.compile(function, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(X), associative_scan(OF_OBJECT, X))
