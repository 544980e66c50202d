"""Associative scans for PyTorch, with the operator written as a plain function."""

from . import ops
from .api import associative_scan
from .combinators import product, reversed_order, segmented, with_lift, with_lower
from .errors import (
    AssocScanError,
    AxisError,
    BackendError,
    FallbackWarning,
    MonoidError,
    ScanTypeError,
    ScanValueError,
    TraceError,
)
from .functions import cummax, cummin, cumprod, cumsum, linear_recurrence, logcumsumexp
from .monoid import Monoid, monoid, monoids
from .plan import Plan, explain
from .reduction import reduce

__version__ = "0.1.0"

__all__ = [
    "AssocScanError",
    "AxisError",
    "BackendError",
    "FallbackWarning",
    "Monoid",
    "MonoidError",
    "Plan",
    "ScanTypeError",
    "ScanValueError",
    "TraceError",
    "associative_scan",
    "cummax",
    "cummin",
    "cumprod",
    "cumsum",
    "explain",
    "linear_recurrence",
    "logcumsumexp",
    "monoid",
    "monoids",
    "ops",
    "product",
    "reduce",
    "reversed_order",
    "segmented",
    "with_lift",
    "with_lower",
]
