"""The error classes. Each is raised for one kind of mistake and says what was seen."""

from __future__ import annotations


class AssocScanError(Exception):
    """Base class of every error that assocscan raises on purpose."""


class TraceError(AssocScanError):
    """The operator cannot be traced: a branch on data, a mutated argument, a captured tensor."""


class UntraceableError(TraceError):
    """Internal: not wrong, but only eager execution can run it (a captured tensor, say)."""


class MonoidError(AssocScanError):
    """A monoid is not one (a counterexample is given), or its name is taken."""


class BackendError(AssocScanError):
    """The named backend cannot run this scan; the message says why and what would help."""


class ScanTypeError(AssocScanError, TypeError):
    """A wrong type: operator, leaf, dtype or pytree structure."""


class ScanValueError(AssocScanError, ValueError):
    """A wrong value: lengths, shapes, devices, names, or a missing identity."""


class AxisError(AssocScanError, ValueError, IndexError):
    """The axis is out of range for the leaves."""


class FallbackWarning(UserWarning):
    """A scan runs on a slower engine than it could; given once per operator and reason."""


class UnsupportedOperation(AssocScanError):
    """Internal: a program cannot express this operation. `auto` catches it and runs eagerly."""
