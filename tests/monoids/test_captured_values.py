"""A number that the functions of a monoid see is read at every call, as by a loop."""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from assocscan import (
    FallbackWarning,
    associative_scan,
    monoid,
    ops,
    product,
    reduce,
    segmented,
    windowed,
    with_lift,
)
from assocscan.monoids.captured_values import present
from assocscan.monoids.monoid import Monoid

factor = 1.0


def weighted(left: Tensor, right: Tensor) -> Tensor:
    """Associative for every factor: a + b + factor."""
    return left + right + factor


def helper() -> float:
    return factor


def loop(x: Tensor, added: float) -> Tensor:
    found = [x[0]]
    for value in x[1:]:
        found.append(found[-1] + value + added)
    return torch.stack(found)


Change = Callable[[float], None]


def of_global() -> tuple[Any, Change]:
    return weighted, lambda value: globals().update(factor=value)


def of_helper() -> tuple[Any, Change]:
    return lambda a, b: a + b + helper(), lambda value: globals().update(factor=value)


def of_closure() -> tuple[Any, Change]:
    own = 1.0

    def change(value: float) -> None:
        nonlocal own
        own = value

    return lambda a, b: a + b + own, change


def of_attribute() -> tuple[Any, Change]:
    config = types.SimpleNamespace(added=1.0)
    return lambda a, b: a + b + config.added, lambda value: setattr(config, "added", value)


def of_entry() -> tuple[Any, Change]:
    config = {"added": 1.0}
    return lambda a, b: a + b + config["added"], lambda value: config.update(added=value)


def of_method() -> tuple[Any, Change]:
    class Sum:
        added = 1.0

        def combine(self, a: Tensor, b: Tensor) -> Tensor:
            return a + b + self.added

    made = Sum()
    return made.combine, lambda value: setattr(made, "added", value)


def of_partial() -> tuple[Any, Change]:
    combine, change = of_closure()
    return functools.partial(lambda f, a, b: f(a, b), combine), change


KINDS = (of_global, of_helper, of_closure, of_attribute, of_entry, of_method, of_partial)


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def changing(request: pytest.FixtureRequest) -> tuple[Monoid, Change]:
    globals().update(factor=1.0)
    combine, change = request.param()
    return Monoid(combine, name=f"captured_{request.param.__name__}"), change


X = torch.tensor([0.5, -1.0, 2.0, 4.0])


def test_every_call_has_the_present_value(changing: tuple[Monoid, Change]) -> None:
    op, change = changing
    for added in (1.0, 1.0, 0.25, 1.0, -0.0, 3):
        change(added)
        for x in (X, X.double(), X):
            torch.testing.assert_close(associative_scan(op, x), loop(x, added))
        torch.testing.assert_close(reduce(op, X), loop(X, added)[-1])
        torch.testing.assert_close(windowed(op, X, 2)[-1], X[-1] + X[-2] + added)


@pytest.mark.parametrize("kind", [of_global, of_helper, of_closure, of_entry, of_partial])
def test_backward_has_the_value_of_forward(kind: Callable[[], tuple[Any, Change]]) -> None:
    """Of what stands in closures and globals; attributes are read where they are. The gradient of
    the square of the last result depends on what is added."""
    globals().update(factor=1.0)
    combine, change = kind()
    op = Monoid(combine, lower=lambda y: y * y, name="captured_backward")
    for added in (2.0, 3.0):
        change(added)
        x = X.clone().requires_grad_()
        y = associative_scan(op, x)
        change(5.0)
        y[-1].backward()
        want = torch.full_like(X, 2 * float(loop(X, added)[-1]))
        torch.testing.assert_close(x.grad, want)


def test_gradient_depends_on_the_value() -> None:
    temperature = 1.0

    @monoid(identity=-torch.inf, name="captured_soft")
    def soft(left: Tensor, right: Tensor) -> Tensor:
        return torch.logaddexp(left / temperature, right / temperature) * temperature

    def gradient(function: Callable[[Tensor], Tensor], later: float) -> Tensor:
        nonlocal temperature
        x = X.clone().requires_grad_()
        y = function(x)
        temperature = later
        return torch.autograd.grad(y, x)[0]

    for now, later in ((1.0, 1.0), (0.1, 0.1), (1.0, 0.1), (0.3, 2.0)):
        temperature = now
        found = gradient(lambda x: associative_scan(soft, x)[-1], later)
        torch.testing.assert_close(found, torch.softmax(X / now, 0))


def test_lifts_and_combinators() -> None:
    decay = 0.9
    op = with_lift(ops.affine, lambda b: (torch.full_like(b, decay), b))
    flags = torch.tensor([False, False, True, False])
    soft, change = of_closure()
    both = product(Monoid(soft, name="captured_part"), ops.sum)
    parts = segmented(Monoid(soft, name="captured_part"))
    for now in (0.9, 0.9, 0.5):
        decay = now
        change(now)
        expected = [X[0]]
        for value in X[1:]:
            expected.append(now * expected[-1] + value)
        torch.testing.assert_close(associative_scan(op, X)[1], torch.stack(expected))
        torch.testing.assert_close(associative_scan(both, X)[0], loop(X, now))
        cut = torch.cat([loop(X[:2], now), loop(X[2:], now)])
        torch.testing.assert_close(associative_scan(parts, (X, flags)), cut)


def test_a_registered_name() -> None:
    globals().update(factor=1.0)
    monoid(weighted, name="captured_by_name")
    for added in (1.0, 2.0):
        globals().update(factor=added)
        torch.testing.assert_close(associative_scan("captured_by_name", X), loop(X, added))


def test_source_and_check_have_the_present_value() -> None:
    combine, change = of_closure()
    op = monoid(name="captured_source")(combine)
    texts = []
    for added in (3.25, 7.25, 3.25):
        change(added)
        texts.append(op.source("cpp", like=X[0]))
        op.check(like=X[0])
    assert texts[0] == texts[2] != texts[1]


class Level(enum.Enum):
    LOW = 1.0
    HIGH = 4.0


class Slotted:
    __slots__ = ("added",)

    def __init__(self, added: float) -> None:
        self.added = added


class Called(Slotted):
    def __call__(self) -> float:
        return self.added

    def __getitem__(self, k: int) -> float:
        return self.added + k


class Config:
    added = 1.0

    @property
    def doubled(self) -> float:
        return 2 * self.added

    def get(self) -> float:
        return self.added

    def combine(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b + self.get()


def changed_by(set_: Callable[[Any], None], combine: Any, **options: Any) -> list[float]:
    """The second result at two values, by one monoid."""
    op = Monoid(combine, name="captured_kind", **options)
    found = []
    for value in (1.0, 4.0):
        set_(value)
        found += [float(associative_scan(op, X)[1]) for _ in range(2)]
    return found


ADDED = [0.5, 0.5, 3.5, 3.5]  # of X[0] + X[1] + 1 and + 4


def test_kinds_of_values() -> None:
    c: Any = None

    def rebound(made: Callable[[float], Any]) -> Callable[[float], None]:
        def set_(value: float) -> None:
            nonlocal c
            c = made(value)

        return set_

    def replaced(value: float) -> Any:
        return lambda: value

    some = Config()
    kinds: list[tuple[Callable[[float], None], Any]] = [
        (rebound(lambda v: types.SimpleNamespace(added=v)), lambda a, b: a + b + c.added),
        (rebound(Slotted), lambda a, b: a + b + c.added),
        (rebound(Called), lambda a, b: a + b + c()),
        (rebound(Called), lambda a, b: a + b + c[0]),
        (rebound(Called), lambda a, b: a + b + getattr(c, "".join(["add", "ed"]))),
        (rebound(replaced), lambda a, b: a + b + c()),
        (rebound(np.float32), lambda a, b: a + b + c),
        (rebound(lambda v: np.array([v])), lambda a, b: a + b + float(c[0])),
        (rebound(lambda v: [[v] * 3]), lambda a, b: a + b + c[0][0]),
        (rebound(lambda v: {"k": v, "t": object()}), lambda a, b: a + b + c["k"]),
        (rebound(Level), lambda a, b: a + b + c.value),
        (rebound(Fraction), lambda a, b: a + b + float(c)),
        (rebound(lambda v: functools.partial(lambda w: w[0], [v])), lambda a, b: a + b + c()),
        (rebound(lambda v: functools.lru_cache(replaced(v))), lambda a, b: a + b + c()),
        (lambda v: setattr(some, "added", v), lambda a, b: a + b + some.doubled / 2),
        (lambda v: setattr(some, "added", v), lambda a, b: a + b + some.get()),
        (lambda v: setattr(some, "added", v), some.combine),
        (lambda v: setattr(Config, "added", v), lambda a, b: a + b + Config().added),
    ]  # fmt: skip
    for k, (set_, combine) in enumerate(kinds):
        assert changed_by(set_, combine) == ADDED, k
    Config.added = 1.0


def test_functions_that_see_other_attributes_of_one_object() -> None:
    config = types.SimpleNamespace(added=0.0, scale=1.0)
    op = Monoid(
        lambda a, b: a + b + config.added, lift=lambda x: x * config.scale, name="captured_two"
    )
    for config.scale in (1.0, 10.0):
        for config.added in (0.0, 2.0):
            want = loop(X * config.scale, config.added)
            torch.testing.assert_close(associative_scan(op, X), want)


def test_collections_without_end() -> None:
    """That hold themselves, and that are longer than what is looked at."""
    ring: list[Any] = [1.0]
    ring.append(ring)
    op = Monoid(lambda a, b: a + b + ring[0], name="captured_ring")
    for ring[0] in (1.0, 4.0):
        torch.testing.assert_close(associative_scan(op, X), loop(X, ring[0]))
    many = {f"k{k}": 1.0 for k in range(60)}
    op = Monoid(lambda a, b: a + b + many["k0"], name="captured_many")
    for many["k0"] in (1.0, 4.0):
        many[f"new{many['k0']}"] = 0.0
        torch.testing.assert_close(associative_scan(op, X), loop(X, many["k0"]))


@pytest.mark.slow
def test_backward_where_a_global_was_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator that only the eager engine runs."""
    monkeypatch.setitem(globals(), "factor", None)

    def combine(a: Tensor, b: Tensor) -> Tensor:
        return b @ a if factor is None else b @ a * factor

    op = Monoid(combine, element_ndim=2, name="captured_none")
    x = torch.eye(9).repeat(3, 1, 1).requires_grad_()
    with pytest.warns(FallbackWarning, match="gradient cannot be generated"):
        y = associative_scan(op, x)[-1].sum()
    monkeypatch.setitem(globals(), "factor", 2.0)
    (found,) = torch.autograd.grad(y, x)
    assert float(found.max()) == 1.0


def test_others_are_themselves() -> None:
    """Built-in operators, and those that see nothing but modules and functions of libraries."""

    @monoid(identity=0.0, name="captured_nothing")
    def plain(left: Tensor, right: Tensor) -> Tensor:
        return torch.add(left, right)

    for op in (plain, ops.affine, ops.logaddexp, ops.kalman, segmented(ops.sum)):
        assert present(op) is op
        assert op.sees_nothing


def test_the_same_values_are_traced_once() -> None:
    combine, change = of_closure()
    op = Monoid(combine, name="captured_again")
    versions = []
    for added in (1.0, 2.0, 1.0, 2.0):
        change(added)
        versions.append(present(op))
    assert versions[0] is versions[2] is not versions[1] is versions[3]
    assert present(versions[0]) is versions[0]
