"""Errors of calls that do not fit the signature of a public function: `ScanTypeError`, in place of
Python's own TypeError, with the right arguments.

There are two ways to them. `checked_call` wraps a function. That costs 0.1 µs per call or more, so
functions whose repeated calls take a microsecond (`cumsum`) are not wrapped. They are declared with
`*surplus: NoReturn` and `**unknown: NoReturn`, which take what does not fit, and call `refuse_call`
where there is any. `known_keywords` hides these from `help()`; the type makes type checkers refuse
what Python accepts. Only an argument that is passed twice gets Python's own TypeError there.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from ..errors import ScanTypeError
from ..wording import shown
from .names_elsewhere import (
    INSTEAD,
    OF_CELLS,
    OF_PACKED,
    OF_RUNS,
    OF_WINDOWS,
    RENAMED,
    RESETS,
    advice_on_resets,
)

Function = TypeVar("Function", bound=Callable[..., Any])
Class = TypeVar("Class", bound=type)

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
# How close a name has to be to that of an argument: at 0.6, the default, `reset` is `reverse`.
CLOSE = 0.7
# The default of required parameters, after `known_keywords`.
NOT_PASSED: Any = ...
METHODS = ("__init__", "__new__", "__call__", "forward", "step", "identity_like", "source", "check")


def checked_call(function: Function) -> Function:
    """Decorator: a call that does not fit the signature raises ScanTypeError.

    It must be the innermost decorator. Errors that the function itself raises are left as they are.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            raise_of_call(error, function, args, kwargs)
            raise

    return with_own_code(call, function)


def with_own_code(wrapper: Any, function: Function) -> Function:
    """The wrapper of a function, with a code object of its own. torch.compile limits the number of
    graphs of one: wrappers that share it would count the graphs of all functions together."""
    wrapper.__code__ = wrapper.__code__.replace(co_name=function.__name__)
    return wrapper  # type: ignore[no-any-return]


def checked_methods(cls: Class) -> Class:
    """Decorator: `checked_call` for those of `METHODS` that the class itself defines."""
    for name in METHODS:
        method = vars(cls).get(name)
        if method is not None:
            setattr(cls, name, checked_call(getattr(method, "__func__", method)))
    return cls


def raise_of_call(
    error: TypeError, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Raise ScanTypeError if the error is Python's, of a call of `function` that does not fit.

    The frame that catches the error is then the last one: the function's was not entered.
    """
    if error.__traceback__ is not None and error.__traceback__.tb_next is None:
        said = mistakes(function, args, kwargs)
        if said:
            raise ScanTypeError(said) from None


def mistakes(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """What is wrong with the arguments of a call; empty if they fit the signature."""
    parameters = list(inspect.signature(function).parameters.values())
    owner, _, method = function.__qualname__.rpartition(".")
    is_method = bool(owner) and "<locals>" not in owner
    name = function.__qualname__ if is_method else function.__name__
    if method in ("__init__", "__new__"):
        name = owner
    of_two = method == "__call__" and owner == "Monoid"
    if of_two:
        name = args[0].name
    if is_method:
        parameters, args = parameters[1:], args[1:]
    kinds = {p.kind for p in parameters}
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    named = [p.name for p in parameters if p.kind in _NAMED]
    given = dict(zip(positional, args, strict=False))
    surplus = () if inspect.Parameter.VAR_POSITIONAL in kinds else args[len(positional) :]
    unknown = {} if inspect.Parameter.VAR_KEYWORD in kinds else kwargs
    unknown = {key: value for key, value in unknown.items() if key not in named}
    twice = {key: value for key, value in kwargs.items() if key in given}
    required = [p.name for p in parameters if p.kind in _NAMED and p.default is p.empty]
    passed = given | {key: value for key, value in kwargs.items() if key in named}
    said = described(name, parameters, required, passed, surplus, unknown, twice)
    return f"{said}. {of_scans(name)}" if said and of_two else said


def of_scans(name: str) -> str:
    """What an error of a direct call of a monoid adds: a scan may have been meant."""
    return f"It combines two elements; a scan is associative_scan({name!r}, xs, axis)"


def known_keywords(function: Function) -> Function:
    """Decorator for a function that ends in `*surplus, **unknown`: hides both from the signature
    that `help()` and `inspect` show, and gives the required parameters the default NOT_PASSED:
    without one Python's own error would come first."""
    signature = inspect.signature(function)
    visible = [p for p in signature.parameters.values() if p.kind not in _VARIABLE]
    function.__signature__ = signature.replace(parameters=visible)  # type: ignore[attr-defined]
    required = [p for p in visible if p.default is p.empty]
    function.__defaults__ = (NOT_PASSED,) * len(required) + (function.__defaults__ or ())
    return function


def refuse_call(
    function: Callable[..., Any],
    surplus: Sequence[Any],
    unknown: Mapping[str, Any],
    /,
    **required: Any,
) -> NoReturn:
    """Raise ScanTypeError for a call of a function that `known_keywords` decorates.

    required: the values of its required parameters, NOT_PASSED for those that were not.
    """
    parameters = list(inspect.signature(function).parameters.values())
    passed = {key: value for key, value in required.items() if value is not NOT_PASSED}
    raise ScanTypeError(
        described(function.__name__, parameters, list(required), passed, surplus, unknown, {})
    )


def described(
    name: str,
    parameters: Sequence[inspect.Parameter],
    required: Sequence[str],
    passed: Mapping[str, Any],
    surplus: Sequence[Any],
    unknown: Mapping[str, Any],
    twice: Mapping[str, Any],
) -> str:
    """The message for a call, one sentence for each kind of mistake; empty if there is none."""
    known = [p.name for p in parameters if p.kind in _NAMED]
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    said = []
    if {"times", "halflife"} <= {*unknown}:  # one alpha stands for a halflife in steps, not in time
        unknown = {key: value for key, value in unknown.items() if key != "halflife"}
    if unknown:
        found = "; ".join(advice(key, value, known) for key, value in unknown.items())
        said.append(f"{name}() has no {found}")
    for key, value in twice.items():
        said.append(f"{name}() got {key} twice: by position and as {key}={shown(value)}")
    if surplus:
        rest = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        by_name = f"; pass by name {', '.join(rest)}" if rest else ""
        said.append(
            f"{name}() takes {len(positional)} argument{'s' * (len(positional) != 1)} by position"
            f"{f' ({names})' if (names := ', '.join(positional)) else ''}, but got "
            f"{len(positional) + len(surplus)}{by_name}"
        )
    missing = [key for key in required if key not in passed]
    if missing and not unknown:
        given = ", ".join(f"{key}: {shown(value)}" for key, value in passed.items())
        which = "which" if missing == list(required) else f"and {listed(missing)}"
        said.append(
            f"{name}() needs {listed(required)}, {which} {'was' if len(missing) == 1 else 'were'} "
            f"not passed{f'; it got {given}' if given else ''}"
        )
    return ". ".join(said)


def listed(names: Sequence[str]) -> str:
    """`a, b and c`."""
    head, last = ", ".join(names[:-1]), names[-1]
    return f"{head} and {last}" if head else last


def advice(name: str, value: Any, known: Iterable[str]) -> str:
    """The message for one unknown argument, such as `argument 'dim': pass axis=1`."""
    known = list(known)
    if name in ("reset", *RESETS):
        return f"argument {name!r}: {advice_on_resets(known)}"
    if name == "offsets" and {"x", "axis"} <= {*known}:
        return f"argument {name!r}: {OF_PACKED}"
    if name == "offsets" and known == ["x"]:
        return f"argument {name!r}: {OF_RUNS}"
    if name in OF_WINDOWS and {"width", "offsets"} <= {*known}:
        return f"argument {name!r}: {OF_WINDOWS[name]}"
    if name in INSTEAD and INSTEAD[name].needs in (*known, ""):
        return f"argument {name!r}: {INSTEAD[name].advice.replace('NAME', name)}"
    right = OF_CELLS.get(name) if {*known} == {"features", "width"} else None
    if right is None:
        right = next((other for other in RENAMED.get(name, ()) if other in known), None)
    if right is None:
        right = next(iter(difflib.get_close_matches(name, known, 1, CLOSE)), None)
    if right is None:
        rest = f"its arguments are {', '.join(known)}" if known else "it has none by name"
        return f"argument {name!r}; {rest}"
    example = value if isinstance(value, (bool, int, float, str)) else "…"
    return f"argument {name!r}: pass {right}={example!r}".replace("'…'", "…")
