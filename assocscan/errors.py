"""The error classes. Each is raised for one kind of mistake and says what was seen."""

from __future__ import annotations


class AssocScanError(Exception):
    """Base class of every error that assocscan raises on purpose.

    >>> import torch, assocscan
    >>> try:
    ...     assocscan.cumsum(torch.ones(3), axis=5)
    ... except assocscan.AssocScanError as error:
    ...     print(type(error).__name__)
    AxisError
    """


class TraceError(AssocScanError):
    """The operator cannot be traced: a branch on data, a mutated argument, a captured tensor.

    The message names the line of the operator.

    >>> import torch
    >>> from assocscan import associative_scan, monoid
    >>> @monoid(name="branch_example")
    ... def larger(left, right):
    ...     return left if left > right else right
    >>> associative_scan(larger, torch.ones(3))
    Traceback (most recent call last):
    assocscan.errors.TraceError: operator 'branch_example' branches on the value of a tensor ...
    """


class UntraceableError(TraceError):
    """Internal: not wrong, but only eager execution can run it (a captured tensor, say)."""


class MonoidError(AssocScanError):
    """A monoid is not one (a counterexample is given), or its name is taken.

    >>> import torch
    >>> from assocscan import monoid
    >>> @monoid(name="difference_example")
    ... def difference(left, right):
    ...     return left - right
    >>> difference.check(torch.zeros(1))
    Traceback (most recent call last):
    assocscan.errors.MonoidError: ...
    """


class BackendError(AssocScanError):
    """The named backend cannot run this scan; the message says why and what would help.

    >>> import torch
    >>> from assocscan import associative_scan, ops
    >>> associative_scan(ops.sum, torch.ones(3), backend="cuda")
    Traceback (most recent call last):
    assocscan.errors.BackendError: the cuda backend cannot run 'sum': ...
    """


class ScanTypeError(AssocScanError, TypeError):
    """A wrong type: operator, leaf, dtype or pytree structure. It is a TypeError too.

    >>> from assocscan import associative_scan, ops
    >>> associative_scan(ops.sum, [1, 2])
    Traceback (most recent call last):
    assocscan.errors.ScanTypeError: xs[0] is the int 1, expected a tensor: torch.tensor(xs)
    """


class ResultTypeError(TraceError, ScanTypeError):
    """Internal: an operator returned what is no tensor, which is wrong in its text and of the wrong
    type."""


class ScanValueError(AssocScanError, ValueError):
    """A wrong value: lengths, shapes, devices, names, or a missing identity.

    It is a ValueError too.

    >>> import torch
    >>> from assocscan import associative_scan
    >>> associative_scan("afine", torch.ones(3))
    Traceback (most recent call last):
    assocscan.errors.ScanValueError: no monoid is registered as 'afine'; did you mean 'affine'?
    """


class AxisError(AssocScanError, ValueError, IndexError):
    """The axis is out of range for the leaves. It is a ValueError and an IndexError too.

    >>> import torch, assocscan
    >>> assocscan.cumsum(torch.ones(3), axis=1)
    Traceback (most recent call last):
    assocscan.errors.AxisError: axis 1 is out of range for x of shape [3], ...
    """


class FallbackWarning(UserWarning):
    """A scan runs on a slower engine than it could; given once per operator and reason.

    `backend="eager"` asks for that engine, without the warning.

    Whoever would rather stop than run slowly makes it an error:

    >>> import torch, warnings
    >>> from assocscan import FallbackWarning, associative_scan, ops
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("error", FallbackWarning)
    ...     y = associative_scan(ops.sum, torch.ones(3))
    """


class UnsupportedOperation(AssocScanError):
    """Internal: a program cannot express this operation. `auto` catches it and runs eagerly."""
