"""Associative scans for PyTorch, with the operator written as a plain function.

Start with `associative_scan`, which scans with any operator, or with a loop that has a name, such
as `cumsum` or `linear_recurrence`. `help(assocscan.cumsum)` shows one function.

Scans: associative_scan, reduce, windowed, stream, explain, Plan.
Operators: ops (ready-made), monoid, Monoid, monoids, product, segmented, reversed_order, with_lift,
    with_lower.
Cumulative functions: cumsum, cumprod, cummax, cummin, logcumsumexp.
Recurrences: linear_recurrence, matrix_recurrence, nonlinear_recurrence, explain_recurrence,
    selective_scan.
Series and filters: ewm_mean, ewm_var, lfilter, sosfilt, forward_fill, run_lengths,
    run_length_encode, compact.
Models: hmm_filter, hmm_smoother, viterbi, kalman_filter, rts_smoother.
Rewards: discounted_returns, gae, vtrace.
Packed sequences: offsets_of, lengths_of, to_padded, from_padded.
Modules: nn (layers), distributed (one scan over several devices), testing.
Errors: AssocScanError is the base of ScanTypeError, ScanValueError, AxisError, TraceError,
    MonoidError and BackendError; FallbackWarning says that a scan runs slowly.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import (
    ops,
    torch_compile,  # noqa: F401  registers what Dynamo traces
)
from .api import printed_source as _source  # noqa: F401  registers Monoid.source
from .api.associative_scan import associative_scan
from .api.checks import check_monoid as _check  # noqa: F401  registers Monoid.check
from .api.checks import error_growth as _growth  # noqa: F401  registers testing.error_growth
from .api.explain import explain
from .api.reduce import reduce
from .engines.base.explained_plan import Plan
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
from .functional.cumulative import cummax, cummin, cumprod, cumsum, logcumsumexp
from .functional.filters.lfilter import lfilter
from .functional.filters.sosfilt import sosfilt
from .functional.hmm.filter_and_viterbi import hmm_filter, viterbi
from .functional.hmm.smoother import hmm_smoother
from .functional.kalman.kalman_filter import kalman_filter
from .functional.kalman.rts_smoother import rts_smoother
from .functional.nonlinear.explain_recurrence import explain_recurrence
from .functional.nonlinear.nonlinear_recurrence import nonlinear_recurrence
from .functional.packing import jagged as _jagged  # noqa: F401  registers scans of nested tensors
from .functional.packing.padding import from_padded, lengths_of, offsets_of, to_padded
from .functional.recurrence import linear_recurrence
from .functional.rewards.returns import discounted_returns, gae
from .functional.rewards.vtrace import vtrace
from .functional.selective_scan import selective_scan
from .functional.sequences import compact, forward_fill, run_length_encode, run_lengths
from .functional.series.ewm import ewm_mean, ewm_var
from .functional.series.windowed import windowed
from .functional.stream import stream
from .functional.vector_recurrences import matrix_recurrence
from .hooks import HOOKS as _HOOKS
from .monoids import pickling as _pickling  # noqa: F401  registers how monoids are pickled
from .monoids.combinators import product, reversed_order, segmented, with_lift, with_lower
from .monoids.monoid import Monoid, monoid, monoids
from .runtime import torch_operation as _library  # noqa: F401  registers the operation of torch

if TYPE_CHECKING:
    from . import distributed as distributed
    from . import nn as nn

__version__ = "0.2.0"

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
    "compact",
    "cummax",
    "cummin",
    "cumprod",
    "cumsum",
    "discounted_returns",
    "ewm_mean",
    "ewm_var",
    "explain",
    "explain_recurrence",
    "forward_fill",
    "from_padded",
    "gae",
    "hmm_filter",
    "hmm_smoother",
    "kalman_filter",
    "lengths_of",
    "lfilter",
    "linear_recurrence",
    "logcumsumexp",
    "matrix_recurrence",
    "monoid",
    "monoids",
    "nonlinear_recurrence",
    "offsets_of",
    "ops",
    "product",
    "reduce",
    "reversed_order",
    "rts_smoother",
    "run_length_encode",
    "run_lengths",
    "segmented",
    "selective_scan",
    "sosfilt",
    "stream",
    "to_padded",
    "viterbi",
    "vtrace",
    "windowed",
    "with_lift",
    "with_lower",
]

_LAZY = ("distributed", "nn")


def _of_dtensors(*args: Any, **options: Any) -> Any:
    """Registers scans of DTensors, without importing what they need before the first one."""
    from .distributed import dtensors

    return dtensors.run(*args, **options)


_HOOKS.of_dtensors = _of_dtensors


def __getattr__(name: str) -> Any:
    """`assocscan.nn` and `assocscan.distributed` are imported at their first use."""
    if name in _LAZY:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Public names, and those that begin with `__`, which tools look for."""
    special = {name for name in globals() if name.startswith("__")}
    return sorted({*__all__, *_LAZY, *special, "testing"})
