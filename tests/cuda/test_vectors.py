"""CUDA kernels over vectors: values and gradients against a loop in float64, in the emulator and,
where there is one, on the GPU."""

from __future__ import annotations

from typing import Any

import pytest
import sanitized
import torch
from vector_cases import CASES, case, check, expanded, leaves_of, starts_of
from vector_kernels import (
    KINDS_OF_TILES,
    PASSES,
    Launched,
    leaves_on,
    passes,
    tiled,
    with_wide_indices,
)

from assocscan import associative_scan
from assocscan.cuda.vectors.tile import VectorTile, whole_tiles
from assocscan.engines.base.vectors.kernel import CHUNK

# More than a chunk, and less; steps left over after whole groups, and none; states that are padded;
# more lanes than a block, and less; lanes that fill 16 bytes, and others.
SHAPES = [(1, 1, 1, 2), (2, 37, 5, 3), (1, 66, 40, 16), (1, 33, 9, 5), (1, 64, 8, 32)]
# Cases that these kernels cannot express, or not their gradients: values of single states come from
# a sum or a maximum over all of them. Triton runs those.
REFUSED = {"softmax", "moments", "max-plus"}


def test_the_shapes_cross_the_edges_of_tiles() -> None:
    steps = {t - 1 for _, t, _, _ in SHAPES}
    group = whole_tiles(16, True)[0].group
    assert any(t > CHUNK for t in steps) and any(t < CHUNK for t in steps)
    assert {t % group == 0 for t in steps} == {True, False}
    lanes = whole_tiles(16, False)[0].lanes
    assert any(c > lanes for *_, c, _ in SHAPES) and any(c < lanes for *_, c, _ in SHAPES)
    assert any(n != whole_tiles(n, False)[0].states for *_, n in SHAPES)


@pytest.mark.thinned(57)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(
    name: str, shape: tuple[int, int, int, int], device: str, prepared: list[Launched]
) -> None:
    check(CASES[name], leaves_on(device, name, shape), backend="cuda")
    if name not in REFUSED and name != "plain":
        assert passes(prepared) == set(PASSES)


@pytest.mark.slow
@pytest.mark.thinned(21)
@pytest.mark.parametrize("name", ["selective", "gated", "max-plus"])
@pytest.mark.parametrize("inclusive", [True, False])
@pytest.mark.parametrize("reverse", [True, False])
def test_flags(name: str, reverse: bool, inclusive: bool, device: str) -> None:
    leaves = leaves_on(device, name, (2, 43, 4, 5))
    options: Any = {"reverse": reverse, "inclusive": inclusive, "backend": "cuda"}
    check(CASES[name], leaves, **options)
    check(CASES[name], leaves, **options, init=starts_of(CASES[name], leaves))


WITH_REDUCTION = {
    # A part of the state without states, which is an output.
    "returned decay": case(
        "returned_decay_test", lambda a, b: (a, b), lambda s: (s[1].sum(-1), s[0].squeeze(-1)),
        "decay:btc", "any:btcn",
    ),
    # An element that is equal for all states, in a state that is not.
    "equal states": case(
        "equal_states_test", lambda a, d, u, k: (a, d * u * torch.ones_like(a)),
        lambda s, xs: (s[1] * xs[3] * xs[2]).sum(-1), "decay:cn", "any:btc", "any:btc", "any:btn",
    ),
    # Single states that are given a sum over all of them: for Triton.
    "shared sum": case(
        "shared_sum_test", lambda a, b: (a, b),
        lambda s: s[1].sum(-1, keepdim=True).expand(s[1].shape), "decay:btc", "any:btcn",
    ),
}  # fmt: skip


@pytest.mark.thinned(9)
@pytest.mark.parametrize("name", WITH_REDUCTION)
@pytest.mark.parametrize("inclusive", [True, False])
def test_sums_and_single_states(
    name: str, inclusive: bool, device: str, prepared: list[Launched]
) -> None:
    given = WITH_REDUCTION[name]
    leaves = [x.to(device) for x in leaves_of(given, 2, 35, 4, 6)]
    check(given, leaves, inclusive=inclusive, backend="cuda")
    if name == "returned decay":
        assert passes(prepared) == set(PASSES)


@pytest.mark.thinned(7)
@pytest.mark.parametrize(
    "states, dtype", [(16, torch.float64), (64, torch.bfloat16), (128, torch.bfloat16)]
)
def test_rows_of_lanes_are_copied_by_their_own_size(
    states: int, dtype: torch.dtype, device: str, prepared: list[Launched]
) -> None:
    """Blocks of few lanes begin in the middle of 16 bytes."""
    leaves = leaves_on(device, "selective", (1, 34, 16, states), dtype)
    check(CASES["selective"], leaves, backend="cuda")
    assert passes(prepared) == set(PASSES)


@pytest.mark.thinned(11)
@pytest.mark.parametrize("states", [2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_few_states_of_16_bits(
    dtype: torch.dtype, states: int, device: str, prepared: list[Launched]
) -> None:
    """Widened rows are 16 bytes apart, however few states there are."""
    check(CASES["selective"], leaves_on(device, "selective", (1, 34, 3, states), dtype),
          backend="cuda")  # fmt: skip
    assert passes(prepared) == set(PASSES)


@pytest.mark.slow
def test_rows_of_16_bits_in_any_order(device: str) -> None:
    """Rows whose states are not adjacent are copied one by one, before they are widened."""
    leaves = leaves_on(device, "selective", (1, 40, 5, 6), torch.bfloat16)
    turned = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in leaves]
    assert turned[3].stride() != leaves[3].stride()
    check(CASES["selective"], turned, backend="cuda")


@pytest.mark.parametrize("final", [True, False])
def test_nothing_to_scan(final: bool, device: str) -> None:
    for shape in ((0, 5, 4, 3), (2, 0, 4, 3), (2, 5, 0, 3)):
        leaves = [x.requires_grad_() for x in leaves_on(device, "selective", shape)]
        found = associative_scan(
            CASES["selective"].op, expanded(leaves), 1, return_final=final, backend="cuda"
        )
        y = found[0] if final else found
        assert y.shape == shape[:3]
        y.sum().backward()
        assert all(x.grad is not None and not x.grad.any() for x in leaves)


def test_many_states(device: str, prepared: list[Launched]) -> None:
    """Threads with many states: the carries before the groups of a tile still fit."""
    check(CASES["scalar decay"], leaves_on(device, "scalar decay", (1, 3, 2, 600)), backend="cuda")
    assert passes(prepared) == set(PASSES)


TILES = [*KINDS_OF_TILES, VectorTile(32, 1, 4, 2, 2, 4, 8), VectorTile(64, 16, 4, 1, 4, 2, 8),
         VectorTile(128, 32, 1, 8, 3, 1, 8)]  # fmt: skip


@pytest.mark.slow
@pytest.mark.thinned(51)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["selective", "attention", "gated"])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_kind_of_tile(
    tile: VectorTile, name: str, dtype: torch.dtype, device: str, prepared: list[Launched]
) -> None:
    """One whole block of lanes and a bit; states that are padded."""
    many = tile.states > 64
    shape = (1, 35, tile.lanes + 3, 130 if many else tile.states * 3 // 4 + 1)
    with tiled(tile):
        check(CASES[name], leaves_on(device, name, shape, dtype), backend="cuda")
    assert {p.kernel.tile.threads for p in prepared} == {tile.threads}
    # Backward passes of 256 states or of eight leaves do not fit some of these; Triton runs them.
    fits = not many and name != "gated"
    assert passes(prepared) == set(PASSES) if fits else passes(prepared)


@pytest.mark.slow
@pytest.mark.thinned(40)
@pytest.mark.parametrize("name", ["gated", "attention", "turning"])
@pytest.mark.parametrize("lanes", [5, 40])
def test_wide_indices_give_the_same_values(
    lanes: int, name: str, device: str, prepared: list[Launched]
) -> None:
    def results() -> list[torch.Tensor]:
        leaves = [x.requires_grad_() for x in leaves_on(device, name, (2, 37, lanes, 5))]
        y = associative_scan(CASES[name].op, expanded(leaves), 1, backend="cuda")
        return [y.detach(), *torch.autograd.grad(y.square().sum(), leaves)]

    narrow = results()
    with with_wide_indices():
        wide = results()
    assert {(type(p.kernel.operator), p.kernel.wide) for p in prepared} == {
        (kind, wide) for kind in PASSES for wide in (False, True)
    }
    assert all(torch.equal(a, b) for a, b in zip(narrow, wide, strict=True))


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", sanitized.VECTORS)
def test_what_compute_sanitizer_is_given(mode: str, device: str) -> None:
    assert sanitized.check_vectors(mode, device) == len(sanitized.VECTORS[mode])
