"""Sizes of elements in graphs of symbolic sizes: the kernels are made for numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from assocscan import associative_scan, ops, reduce


@pytest.mark.slow
@pytest.mark.thinned(4)
@pytest.mark.parametrize("function", [associative_scan, reduce])
def test_matrices_of_symbolic_sizes(function: Any) -> None:
    torch._dynamo.reset()

    def product(A: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = function(ops.matmul, A, axis=1)
        return result

    compiled = torch.compile(product, fullgraph=True, backend="aot_eager", dynamic=True)
    for shape in ((2, 5, 3, 3), (3, 7, 3, 3), (2, 5, 2, 2)):
        A = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        torch.testing.assert_close(compiled(A), product(A))
        want = torch.autograd.grad(product(A).square().sum(), A)
        torch.testing.assert_close(torch.autograd.grad(compiled(A).square().sum(), A), want)
    torch._dynamo.reset()
