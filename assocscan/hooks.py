"""What lower floors call of upper ones, which they do not import.

Each field is filled in by the module that it names, when that is imported; importing the package
imports them all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

Options = dict[str, Any]  # arguments by name


def unfilled(*args: object, **options: object) -> NoReturn:
    raise RuntimeError("a module that fills in `assocscan.hooks` was not imported")


@dataclass
class Hooks:
    """The functions, by what they do.

    monoid_source, check_monoid, pickled_monoid: `Monoid.source`, `check` and `__reduce__`
        (`api/printed_source`, `api/checks/check_monoid`, `monoids/pickling`).
    error_growth: `testing.error_growth` (`api/checks/error_growth`).
    exclusive_form: what an exclusive scan of a combined monoid runs (`monoids/combinators`).
    of_dtensors: a public function on arguments that hold DTensors (the package, which imports
        `distributed/dtensors` before the first one).
    of_jagged: a public function, the tuple of its arguments and the dict of those by name, which
        hold jagged nested tensors (`functional/packing/jagged`).
    compiled_…: calls as Dynamo traces them (`torch_compile`): of a scan with an operator and a
        linear recurrence, with the name of the public function; of a nonlinear recurrence; of a
        combinator; of a halo.
    uncompiled_jagged: as `of_jagged`, where Dynamo traces a function and breaks the graph for it.
    """

    monoid_source: Callable[[Any, str, Any], str] = unfilled
    check_monoid: Callable[[Any, Any, Any], None] = unfilled
    pickled_monoid: Callable[[Any], tuple[Any, ...]] = unfilled
    error_growth: Callable[[Any, Any, int, Any, str, int], Any] = unfilled
    exclusive_form: Callable[[Any], Any] = unfilled
    of_dtensors: Callable[..., Any] = unfilled
    of_jagged: Callable[..., Any] = unfilled
    compiled_scan: Callable[[Any, Options, str], Any] = unfilled
    compiled_recurrence: Callable[[Options, str], Any] = unfilled
    compiled_nonlinear_recurrence: Callable[[Any, Options], Any] = unfilled
    compiled_combinator: Callable[[str, Any, tuple[Any, ...]], Any] = unfilled
    uncompiled_jagged: Callable[..., Any] = unfilled
    compiled_halo: Callable[[Any, int, Any, bool, str | None], tuple[Any, Any]] = unfilled


HOOKS = Hooks()
