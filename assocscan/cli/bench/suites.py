"""The suites by name."""

from __future__ import annotations

from .cases import Suite
from .suite import cumsum, engines, layers, long, operators, precision, recurrence, rnn

SUITES: dict[str, Suite] = {
    "recurrence": recurrence.cases,
    "cumsum": cumsum.cases,
    "rnn": rnn.cases,
    "precision": precision.cases,
    "long": long.cases,
    "operators": operators.cases,
    "engines": engines.cases,
    "rglru": layers.rglru_cases,
    "norm_linear_gelu": layers.norm_linear_gelu_cases,
}
