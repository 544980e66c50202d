"""Wrong calls of the plain functions over series: what is refused, and in which words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import zeros

from assocscan import (
    AxisError,
    ScanTypeError,
    ScanValueError,
    gae,
    hmm_filter,
    kalman_filter,
    lfilter,
    rts_smoother,
    viterbi,
    vtrace,
)
from assocscan import discounted_returns as returns
from assocscan import matrix_recurrence as recurrence

one = torch.ones(1, 1)
many = torch.full((3,), 0.5 + 2j)
cut = torch.tensor([False, True, False])


def kalman(y: Any, F: Any = one, H: Any = one, Q: Any = one) -> Any:
    return kalman_filter(y, F, H, Q, one, zeros(1), one)


@pytest.mark.parametrize(
    "call,error,words",
    [
        (lambda: hmm_filter(zeros(3), zeros(3, 3), zeros(3)), ScanValueError, r"likelihood.*\[3\]"),
        (lambda: hmm_filter(zeros(3), zeros(3, 3), zeros(0, 3)), ScanValueError, "T ≥ 1"),
        (lambda: viterbi(zeros(3), zeros(3, 3), zeros(0, 3)), ScanValueError, "T ≥ 1"),
        (lambda: viterbi(zeros(3), zeros(1, 1), zeros(4, 3)), ScanValueError, r"expected \[3, 3\]"),
        (lambda: viterbi(zeros(1), zeros(3, 3), zeros(4, 3)), ScanValueError, r"initial.*\[3\]"),
        (lambda: kalman(zeros(4)), ScanValueError, r"y has shape \[4\], expected \[\.\.\., T, m\]"),
        (lambda: kalman(zeros(0, 1)), ScanValueError, "T ≥ 1"),
        (lambda: kalman(zeros(4, 1).long()), ScanTypeError, "y has dtype torch.int64.*a float"),
        (lambda: kalman(zeros(4, 1), one.double()), ScanTypeError, "F has dtype torch.float64"),
        (lambda: kalman(zeros(4, 1), 1.0), ScanTypeError, "F is a float"),
        (lambda: kalman(zeros(4, 1), zeros(())), ScanValueError, r"F has shape \[\]"),
        (lambda: kalman(zeros(4, 2), zeros(3, 3), one), ScanValueError, r"Q has shape \[1, 1\]"),
        (lambda: rts_smoother(zeros(3), one, one, one), ScanValueError, "mean has shape"),
        (lambda: lfilter(zeros(2), zeros(2), zeros(5), 9), AxisError, "axis 9"),
        (lambda: lfilter(zeros(2), zeros(2), zeros(())), AxisError, "out of range"),
        (lambda: gae(zeros(3), zeros(3), 0.0, 0.9, 0.9), ScanTypeError, "bootstrap is a float"),
        (lambda: gae(zeros(3), zeros(3), zeros(2), 0.9, 0.9), ScanValueError, "bootstrap has"),
        (lambda: gae(zeros(3), zeros(3), zeros(()), 0.9, 0.9, axis=2), AxisError, "axis 2"),
        (lambda: returns(zeros(3), 0.9, done=zeros(3)), ScanTypeError, "float32, expected"),
        (lambda: gae(*[zeros(3)] * 2, zeros(()), 0.9, 0.9, done=[1]), ScanTypeError, "is a list"),
        (lambda: returns(zeros(3), 0.9, bootstrap=1.0), ScanTypeError, "bootstrap is a float"),
        (lambda: returns(zeros(3), "a"), ScanTypeError, "discount is a str"),
        (lambda: returns(zeros(3), many), ScanTypeError, "discount has dtype torch.complex64"),
        (lambda: returns(zeros(3), 0.9, bootstrap=many[0]), ScanTypeError, "bootstrap has dtype"),
        (lambda: returns(zeros(3), 0.9, truncated=cut, next_values=many), ScanTypeError, "next_v"),
        (lambda: returns(zeros(3), 0.9, truncated=cut, next_values=cut), ScanTypeError, "mask of"),
        (lambda: gae(zeros(3), many, zeros(()), 0.9, 0.9), ScanTypeError, "values has .*complex"),
        (lambda: gae(zeros(3), cut, zeros(()), 0.9, 0.9), ScanTypeError, r"bool.*values\.float"),
        (lambda: gae(zeros(3), zeros(3), many[0], 0.9, 0.9), ScanTypeError, "bootstrap has dtype"),
        (lambda: gae(zeros(3), zeros(3), zeros(()), 0.9, many), ScanTypeError, "decay has dtype"),
        (lambda: vtrace(many, *[zeros(3)] * 2, zeros(()), 0.9), ScanTypeError, "log_ratios has"),
        (lambda: vtrace(*[zeros(3)] * 3, many[0], 0.9), ScanTypeError, "bootstrap has dtype"),
        (lambda: kalman(zeros(4, 1).bfloat16()), ScanTypeError, "F has dtype torch.float32"),
        (lambda: rts_smoother(zeros(3, 1), one, zeros(1), one), ScanValueError, r"F has .* \[1\]"),
        (lambda: lfilter(zeros(2), zeros(2), [1.0]), ScanTypeError, "x is a list, expected"),
        (lambda: recurrence(one, zeros(4, 2), axis=0), ScanValueError, r"expected \[2, 2\]"),
        (lambda: recurrence(one, zeros(4, 1), [1], 0), ScanTypeError, "init is a list"),
    ],
)
def test_refused(call: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


def test_an_episode_of_no_steps() -> None:
    empty = zeros(2, 0)
    assert gae(empty, empty, zeros(2), 0.9, 0.9).shape == (2, 0)
    assert returns(empty, 0.9).shape == (2, 0)
    empty.requires_grad_()
    gae(empty, empty, zeros(2), 0.9, 0.9).sum().backward()
    with pytest.raises(ScanValueError, match="bootstrap"):
        gae(empty, empty, zeros(7, 7), 0.9, 0.9)
