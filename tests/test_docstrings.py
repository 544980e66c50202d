"""The examples in the docstrings of functions made of operators."""

from __future__ import annotations

import doctest
import importlib

import pytest

pytestmark = pytest.mark.usefixtures("without_kernels")
MODULES = "combinators filters markov reduction rewards statespace streams".split()


@pytest.mark.parametrize("module", MODULES)
def test_examples(module: str) -> None:
    failed, attempted = doctest.testmod(importlib.import_module(f"assocscan.{module}"))
    assert attempted and not failed
