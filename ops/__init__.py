"""Ready-made monoids: `from assocscan import ops; associative_scan(ops.affine, (a, b))`."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

if __name__ != "assocscan.ops":
    raise ImportError("import assocscan.ops, not ops: a second copy registers every operator twice")

from assocscan.monoids.monoid import nearest as _nearest
from assocscan.ops.arithmetic import prod, sum
from assocscan.ops.automata import finite_state
from assocscan.ops.boolean import all, any, xor
from assocscan.ops.brackets import brackets
from assocscan.ops.companion import autoregression
from assocscan.ops.compensated import compensated_sum
from assocscan.ops.counting import count
from assocscan.ops.covariance import covariance
from assocscan.ops.extrema import argmax, argmin, max, min, minmax
from assocscan.ops.family import complete_docstrings as _complete_docstrings
from assocscan.ops.filling import last_valid
from assocscan.ops.integers import gcd
from assocscan.ops.kalman import kalman, rts, scalar_kalman
from assocscan.ops.log_recurrence import log_affine
from assocscan.ops.logspace import logaddexp
from assocscan.ops.matrix import matmul, matrix_affine
from assocscan.ops.moments import mean, welford
from assocscan.ops.moving import ema, ema_variance
from assocscan.ops.recurrence import affine
from assocscan.ops.rigid import se3
from assocscan.ops.rotation import quaternion, rotation2d
from assocscan.ops.semiring import log_matmul, max_matmul
from assocscan.ops.signed_log import signed_log_prod, signed_log_sum
from assocscan.ops.softmax import online_attention, online_softmax
from assocscan.ops.subarray import max_subarray
from assocscan.ops.tropical import max_affine

__all__ = [
    "affine",
    "all",
    "any",
    "argmax",
    "argmin",
    "autoregression",
    "brackets",
    "compensated_sum",
    "count",
    "covariance",
    "ema",
    "ema_variance",
    "finite_state",
    "gcd",
    "kalman",
    "last_valid",
    "log_affine",
    "log_matmul",
    "logaddexp",
    "matmul",
    "matrix_affine",
    "max",
    "max_affine",
    "max_matmul",
    "max_subarray",
    "mean",
    "min",
    "minmax",
    "online_attention",
    "online_softmax",
    "prod",
    "quaternion",
    "rotation2d",
    "rts",
    "scalar_kalman",
    "se3",
    "signed_log_prod",
    "signed_log_sum",
    "sum",
    "welford",
    "xor",
]

_complete_docstrings(globals()[name] for name in __all__)


def __dir__() -> list[str]:
    """The operators, without the modules that they lie in."""
    return sorted(__all__)


if not _TYPE_CHECKING:  # type checkers would take any name then

    def __getattr__(name: str) -> object:
        """Raise AttributeError for a name that is not here, with the nearest one that is."""
        hint = "" if name.startswith("_") else _nearest(name, __all__)
        raise AttributeError(f"assocscan.ops has no operator {name!r}{hint}")
