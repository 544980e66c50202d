"""Graphs with a symbolic batch and length, made from examples whose sizes are equal by chance.

A graph that asked whether its batch is 3 would be valid for 3, or for all but 3. So each graph runs
on other sizes, without being made anew, and gives what a plain call gives, with its gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from symbolic_cases import FUNCTIONS, LAYERS, OF_ONE_LENGTH, PACKED, Called, Case, arguments
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

Sizes = dict[str, int]
# Equal to the channels and to one another; 2, as the sizes of some elements.
EXAMPLES = ({"B": 3, "L": 3, "S": 3}, {"B": 2, "L": 2, "S": 3})
OTHERS = ({"B": 4, "L": 9, "S": 5}, {"B": 3, "L": 17, "S": 3}, {"B": 7, "L": 2, "S": 4})
OF_ONE = {"B": 1, "L": 1, "S": 3}
BY_DEFAULT = {
    "affine, init and final", "gae", "lfilter", "linear_recurrence, decay of channels", "LRU",
    "raw callable", "run_lengths", "selective_scan, packed",
}  # fmt: skip
COMPILED_BY_DEFAULT = {"linear_recurrence, init", "raw callable"}
CASES = (*FUNCTIONS, *PACKED, *LAYERS)
pytestmark = [
    pytest.mark.filterwarnings("ignore::assocscan.FallbackWarning"),
    # Of calls of a monoid on elements, whose trees are kept by a function of pytrees.
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
]


def table(by_default: set[str], **kinds: tuple[Any, ...]) -> list[Any]:
    """All cases in all kinds, of which each is the values of other arguments; by default some, in
    the first kind."""
    rows = []
    for case in CASES:
        for k, (kind, values) in enumerate(kinds.items()):
            marks = () if k == 0 and case.name in by_default else (pytest.mark.exhaustive,)
            rows.append(pytest.param(case, *values, marks=marks, id=f"{case.name}-{kind}"))
    return rows


def results(
    function: Callable[..., Any], model: nn.Module, case: Case, sizes: Sizes
) -> tuple[list[Any], list[Tensor | None]]:
    """What the function gives for arguments of these sizes, and the gradients."""
    xs = [
        t.requires_grad_(case.differentiated and t.is_floating_point())
        for t in arguments(case, sizes)
    ]
    found = tree_leaves(function(*xs))
    terms = [t.abs().square().sum() for t in found if isinstance(t, Tensor) and t.requires_grad]
    if not terms:
        return found, []
    leaves = [*xs, *model.parameters()]
    wanted = [t for t in leaves if t.requires_grad]
    return found, list(torch.autograd.grad(torch.stack(terms).sum(), wanted, allow_unused=True))


def check(function: Callable[..., Any], model: Called, case: Case, sizes: Sizes) -> None:
    found, gradients = results(function, model, case, sizes)
    right, expected = results(model, model, case, sizes)
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)
    for got, want in zip(gradients, expected, strict=True):
        assert (got is None) == (want is None)
        if want is not None:
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


def exported(
    model: Called, case: Case, sizes: Sizes, strict: bool, names: str = "BLS"
) -> nn.Module:
    """The case with named dimensions: torch refuses a graph that is not valid for all of them."""
    # With one packed sequence, results of each sequence have a size of 1, which is apart.
    dims = {name: torch.export.Dim(name, min=3 if name == "S" else None) for name in names}
    shapes = tuple({k: dims[n] for k, n in enumerate(shape) if n in dims} for shape in case.shapes)
    program = torch.export.export(
        model, arguments(case, sizes), dynamic_shapes={"xs": shapes}, strict=strict
    )
    module: nn.Module = program.module()
    return module


@pytest.mark.thinned(5)
@pytest.mark.parametrize(
    ("case", "example", "strict"),
    table(BY_DEFAULT, of_3=(EXAMPLES[0], False), of_2=(EXAMPLES[1], False),
          strict=(EXAMPLES[0], True)),
)  # fmt: skip
def test_export(case: Case, example: Sizes, strict: bool) -> None:
    model = Called(case)
    program = exported(model, case, example, strict)
    for sizes in (*OTHERS, OF_ONE):
        check(program, model, case, sizes)


@pytest.mark.slow(2)
@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("case", OF_ONE_LENGTH, ids=lambda case: case.name)
def test_export_of_one_length(case: Case, strict: bool) -> None:
    """What no kernel is generated for: torch operations, as many as the length asks for, and for
    any batch."""
    model = Called(case)
    program = exported(model, case, {"B": 3, "L": 4, "S": 3}, strict, names="B")
    for batch in (1, 3, 5):
        check(program, model, case, {"B": batch, "L": 4, "S": 3})


@pytest.mark.parametrize(
    ("case", "example"),
    table(COMPILED_BY_DEFAULT, of_3=(EXAMPLES[0],)),
)
@pytest.mark.slow(2)
def test_compile(case: Case, example: Sizes) -> None:
    """With symbols that are not shared between sizes that are equal in the example."""
    model = Called(case)
    torch.compiler.reset()
    with (
        torch.fx.experimental._config.patch(use_duck_shape=False),
        torch._dynamo.config.patch(error_on_recompile=True),
    ):
        compiled = torch.compile(model, backend="aot_eager", dynamic=True, fullgraph=True)
        for sizes in (example, *OTHERS):
            check(compiled, model, case, sizes)
