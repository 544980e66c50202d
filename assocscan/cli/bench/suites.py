"""The suites by name, and the options that each takes besides those that all take."""

from __future__ import annotations

from .cases import Suite
from .suite import cumsum, distributed, engines, layers, long, operators, precision, recurrence, rnn

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
    "distributed": distributed.cases,
}
SIZES = frozenset(("shape", "lengths", "dtype"))
TAKES: dict[str, frozenset[str]] = {
    "recurrence": SIZES | {"pass", "backend", "peers"},
    "cumsum": SIZES | {"pass", "backend"},
    "rnn": SIZES | {"backend"},
    "precision": frozenset(("lengths", "dtype", "backend", "peers")),
    "long": frozenset(("lengths", "dtype", "backend")),
    "operators": SIZES | {"pass", "backend", "op"},
    "engines": SIZES | {"pass", "backend", "op"},
    "rglru": SIZES | {"pass"},
    "norm_linear_gelu": frozenset(("dtype", "pass")),
    "distributed": frozenset(),
}
