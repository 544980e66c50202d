"""The suites by name, and the options that each takes besides those that all take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .cases import Suite
from .peers import PEERS, Peer
from .selective_peers import SELECTIVE_PEERS
from .suite import (
    calls,
    distributed,
    engines,
    layers,
    nonlinear,
    operators,
    packed,
    precision,
    recurrence,
    rnn,
    selective,
    windows,
)
from .suite.sums import compensated, cumsum, long

SUITES: dict[str, Suite] = {
    "recurrence": recurrence.cases,
    "cumsum": cumsum.cases,
    "rnn": rnn.cases,
    "nonlinear": nonlinear.cases,
    "precision": precision.cases,
    "compensated": compensated.cases,
    "long": long.cases,
    "packed": packed.cases,
    "windows": windows.cases,
    "operators": operators.cases,
    "engines": engines.cases,
    "calls": calls.cases,
    "rglru": layers.rglru_cases,
    "norm_linear_gelu": layers.norm_linear_gelu_cases,
    "selective": selective.cases,
    "distributed": distributed.cases,
}
STATES_TOO = "shape B,L,D,N"  # --shape with a fourth size
SIZES = frozenset(("shape", "lengths", "dtype"))
TAKES: dict[str, frozenset[str]] = {
    "recurrence": SIZES | {"pass", "backend", "peers"},
    "cumsum": SIZES | {"pass", "backend"},
    "rnn": SIZES | {"backend"},
    "nonlinear": SIZES | {"pass", "backend"},
    "precision": frozenset(("lengths", "dtype", "backend", "peers")),
    "compensated": SIZES | {"pass", "backend"},
    "long": frozenset(("lengths", "dtype", "backend")),
    "packed": frozenset(("dtype", "backend")),
    "windows": SIZES | {"pass", "backend"},
    "operators": SIZES | {"pass", "backend", "op"},
    "engines": SIZES | {"pass", "backend", "op"},
    "calls": frozenset(("dtype", "pass", "backend")),
    "rglru": SIZES | {"pass"},
    "norm_linear_gelu": frozenset(("dtype", "pass")),
    "selective": SIZES | {STATES_TOO, "pass", "backend", "peers"},
    "distributed": frozenset(),
}
PEERS_OF: dict[str, Mapping[str, Peer]] = {
    "recurrence": PEERS,
    "precision": PEERS,
    "selective": SELECTIVE_PEERS,
}
# What a suite does not measure on CPUs.
ON_GPUS_ONLY: dict[str, str] = {
    "selective": "peak memory and the fraction of the exponential limit are measured on GPUs only",
}


def peers_of(suites: Iterable[str]) -> dict[str, Peer]:
    """The peers that can take part in one of these suites, by name."""
    tables = [PEERS_OF[suite] for suite in suites if suite in PEERS_OF]
    return {name: peer for table in tables for name, peer in table.items()}
