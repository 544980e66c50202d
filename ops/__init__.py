"""Ready-made monoids: `from assocscan import ops; associative_scan(ops.affine, (a, b))`."""

if __name__ != "assocscan.ops":
    raise ImportError("import assocscan.ops, not ops: a second copy registers every operator twice")

from assocscan.ops.arithmetic import prod, sum
from assocscan.ops.boolean import all, any, xor
from assocscan.ops.extrema import argmax, argmin, max, min
from assocscan.ops.logspace import logaddexp
from assocscan.ops.matrix import matmul, matrix_affine
from assocscan.ops.moments import mean, welford
from assocscan.ops.recurrence import affine

__all__ = [
    "affine",
    "all",
    "any",
    "argmax",
    "argmin",
    "logaddexp",
    "matmul",
    "matrix_affine",
    "max",
    "mean",
    "min",
    "prod",
    "sum",
    "welford",
    "xor",
]
