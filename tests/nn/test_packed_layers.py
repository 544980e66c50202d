"""Layers on packed sequences: what each sequence gives when it runs on its own."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from assocscan import ScanTypeError, ScanValueError, lengths_of, to_padded
from assocscan import nn as layers
from assocscan.nn import (
    LRU,
    RGLRU,
    S5,
    AdaptiveRankSemiseparable,
    Bidirectional,
    CausalConv,
    DiagonalGRU,
    DiagonalLSTM,
    DiagonalSLSTM,
    Hawk,
    Mamba,
    MatrixLRU,
    rglru,
)

F64 = torch.float64
FEATURES = 4
# Empty ones, and ones that are shorter than the convolutions reach back.
OFFSETS = torch.tensor([0, 0, 5, 6, 6, 8, 14, 14])
SEQUENCES = [*itertools.pairwise(OFFSETS.tolist())]
S, L = len(SEQUENCES), 14

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "RGLRU": lambda: RGLRU(FEATURES, heads=2),
    "CausalConv": lambda: CausalConv(FEATURES, width=4),
    "CausalConv of one tap": lambda: CausalConv(FEATURES, width=1, bias=False),
    "Hawk": lambda: Hawk(FEATURES, width=6, heads=3),
    "Mamba": lambda: Mamba(FEATURES, states=3, conv_width=3, dt_rank=2, bias=True),
    "Mamba of one tap": lambda: Mamba(FEATURES, states=1, conv_width=1),
    "LRU": lambda: LRU(FEATURES, states=3),
    "S5": lambda: S5(FEATURES, states=6),
    "MatrixLRU": lambda: MatrixLRU(FEATURES, heads=3, size=2),
    "AR-SSM": lambda: AdaptiveRankSemiseparable(FEATURES, rank=3),
    "AR-SSM, compensated": lambda: AdaptiveRankSemiseparable(FEATURES, rank=3, compensated=True),
    "AR-SSM, not fused": lambda: AdaptiveRankSemiseparable(FEATURES, 3, use_fused_scan=False),
    "DiagonalGRU": lambda: DiagonalGRU(FEATURES),
    "DiagonalLSTM": lambda: DiagonalLSTM(FEATURES),
    "DiagonalSLSTM": lambda: DiagonalSLSTM(FEATURES),
}
# Of the diagonal layers the default run has the one with most state.
each_layer = pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.exhaustive) if n in ("DiagonalGRU", "DiagonalLSTM") else n
     for n in LAYERS],
)  # fmt: skip


def build(name: str) -> nn.Module:
    """The layer in float64 with every parameter away from its special start."""
    torch.manual_seed(0)
    layer = LAYERS[name]().to(F64)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return layer


def sample(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def call(layer: nn.Module, x: Tensor, state: Any = None, *rest: Any, **options: Any) -> Any:
    """(y, state) of every layer."""
    y, after = layer(x, state, *rest, **options)
    return y, after["state"] if isinstance(layer, AdaptiveRankSemiseparable) else after


def each_alone(layer: nn.Module, x: Tensor, states: list[Any], reverse: bool) -> Any:
    """What the layer gives for each sequence, put together as a packed call returns it."""
    results = [
        call(layer, x[:, a:b], state, reverse)
        for (a, b), state in zip(SEQUENCES, states, strict=True)
    ]
    y = torch.cat([y for y, _ in results], 1)
    return y, tree_map(lambda *parts: torch.stack(parts), *(after for _, after in results))


def entering(layer: nn.Module, x: Tensor) -> Any:
    """Random states for all sequences, in the structure of the layer's."""
    _, like = call(layer, x[:, :1])
    leaves = itertools.count(1)
    return tree_map(
        lambda t: torch.randn(
            (S, *t.shape), dtype=t.dtype, generator=torch.Generator().manual_seed(next(leaves))
        ).requires_grad_(),
        like,
    )


def gradients(results: Any, leaves: list[Tensor]) -> list[Tensor]:
    """Of sums with random weights of the output and of the states that leave."""
    total = torch.zeros((), dtype=F64)
    for k, t in enumerate(tree_leaves(results)):
        t = torch.view_as_real(t) if t.is_complex() else t
        total = total + (t * sample(*t.shape, seed=k)).sum()
    return list(torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True))


def test_every_layer_that_has_a_state_takes_offsets() -> None:
    for name in layers.__all__:
        made = getattr(layers, name)
        forward = getattr(made, "forward", made) if inspect.isclass(made) else made
        if "state" in inspect.signature(forward).parameters or made is Bidirectional:
            parameter = inspect.signature(forward).parameters["offsets"]
            assert parameter.kind is parameter.KEYWORD_ONLY and parameter.default is None, name


@pytest.mark.thinned(11)
@each_layer
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("carried", [False, True])
def test_packed_is_each_on_its_own(name: str, batch: int, reverse: bool, carried: bool) -> None:
    """Outputs, states that leave, gradients of inputs, states and parameters; twice, then one
    element further in memory, then without gradients."""
    layer, whole = build(name), sample(batch, L + 1, FEATURES)
    states, parts, given = None, [None] * S, []
    if carried:
        states = entering(layer, whole)
        parts = [tree_map(lambda t, s=s: t[s], states) for s in range(S)]
        given = tree_leaves(states)
    for x in (whole[:, :-1], whole[:, :-1], whole[:, 1:]):
        x = x.detach().requires_grad_()
        leaves = [x, *given, *layer.parameters()]
        want = each_alone(layer, x, parts, reverse)
        got = call(layer, x, states, reverse, offsets=OFFSETS)
        assert [t.shape for t in tree_leaves(got)] == [t.shape for t in tree_leaves(want)]
        torch.testing.assert_close(tree_leaves(got), tree_leaves(want), rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(
            gradients(got, leaves), gradients(want, leaves), rtol=1e-8, atol=1e-10
        )
    with torch.no_grad():
        plain = call(layer, x, states, reverse, offsets=OFFSETS.int())
    torch.testing.assert_close(tree_leaves(plain), tree_leaves(want), rtol=1e-9, atol=1e-11)


@pytest.mark.thinned(5)
@each_layer
def test_a_sequence_in_pieces(name: str) -> None:
    """The states of one packed call enter the next one."""
    layer, x = build(name), sample(2, L, FEATURES)
    cut = [(a, a + (b - a) // 2, b) for a, b in SEQUENCES]
    with torch.no_grad():
        want, last = call(layer, x, offsets=OFFSETS)
        state, pieces = None, []
        for k in (0, 1):
            part = torch.cat([x[:, c[k] : c[k + 1]] for c in cut], 1)
            ends = torch.tensor([0, *itertools.accumulate(c[k + 1] - c[k] for c in cut)])
            y, state = call(layer, part, state, offsets=ends)
            pieces.append(y.split([c[k + 1] - c[k] for c in cut], 1))
        got = torch.cat([t for pair in zip(*pieces, strict=True) for t in pair], 1)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(tree_leaves(state), tree_leaves(last))


@pytest.mark.thinned(4)
@each_layer
def test_nothing_flows_from_one_sequence_to_another(name: str) -> None:
    """Be it NaN: the others' outputs, states and gradients are those without it."""
    layer, clean = build(name), sample(2, L, FEATURES)
    start, end = SEQUENCES[1]
    dirty = clean.clone()
    dirty[:, start:end] = torch.nan
    others = [s for s in range(S) if s != 1]
    found = []
    for x in (clean, dirty):
        x.requires_grad_()
        y, after = call(layer, x, offsets=OFFSETS)
        (gradient,) = torch.autograd.grad(y[:, end:].square().sum(), x)
        found.append([y[:, end:], gradient[:, end:], *(t[others] for t in tree_leaves(after))])
    torch.testing.assert_close(*found)


@pytest.mark.slow(3)
@pytest.mark.parametrize(
    "name",
    ["RGLRU", "Hawk", "Mamba", "LRU", "MatrixLRU", "AR-SSM",
     pytest.param("DiagonalGRU", marks=pytest.mark.exhaustive),
     pytest.param("DiagonalLSTM", marks=pytest.mark.exhaustive),
     pytest.param("DiagonalSLSTM", marks=pytest.mark.exhaustive)],
)  # fmt: skip
def test_16_bits(name: str) -> None:
    torch.manual_seed(0)
    layer = LAYERS[name]().bfloat16()
    x = torch.randn(2, L, FEATURES).bfloat16()
    want = each_alone(layer, x, [None] * S, False)
    got = call(layer, x, offsets=OFFSETS)
    for a, b in zip(tree_leaves(got), tree_leaves(want), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@pytest.mark.thinned(5)
@pytest.mark.parametrize(
    "name", ["CausalConv", "Hawk", "Mamba", "LRU", "MatrixLRU", "AR-SSM", "DiagonalGRU",
             "DiagonalLSTM", "DiagonalSLSTM"]
)  # fmt: skip
def test_compiled(name: str) -> None:
    torch._dynamo.reset()
    layer, x = build(name), sample(2, L, FEATURES).requires_grad_()
    states = entering(layer, x)
    compiled: Any = torch.compile(layer, backend="aot_eager", fullgraph=True)
    leaves = [x, *tree_leaves(states), *layer.parameters()]

    def results(module: Any, offsets: Tensor) -> Any:
        y, after = module(x, states, offsets=offsets)
        after = after["state"] if isinstance(after, dict) else after
        return y, after

    for offsets in (OFFSETS, OFFSETS.flip(0).neg() + L):
        want, got = results(layer, offsets), results(compiled, offsets)
        torch.testing.assert_close(tree_leaves(got), tree_leaves(want))
        torch.testing.assert_close(gradients(got, leaves), gradients(want, leaves))


def test_both_directions() -> None:
    layer = Bidirectional(build("LRU"), build("Hawk"))
    x = sample(2, L, FEATURES)
    want = torch.cat([layer(x[:, a:b]) for a, b in SEQUENCES], 1)
    torch.testing.assert_close(layer(x, offsets=OFFSETS), want)
    rank = build("AR-SSM")
    want = torch.cat([rank.forward_bidirectional(x[:, a:b])[0] for a, b in SEQUENCES], 1)
    torch.testing.assert_close(rank.forward_bidirectional(x, offsets=OFFSETS)[0], want)


@each_layer
def test_no_steps_and_no_sequences(name: str) -> None:
    layer, x = build(name), sample(2, 0, FEATURES)
    states = entering(layer, sample(2, 1, FEATURES))
    y, after = call(layer, x, states, offsets=torch.zeros(S + 1, dtype=torch.int64))
    assert y.shape == x.shape
    torch.testing.assert_close(tree_leaves(after), tree_leaves(states))
    y, after = call(layer, x, offsets=torch.tensor([0]))
    assert y.shape == x.shape and all(t.shape[:2] == (0, 2) for t in tree_leaves(after))


class Model(nn.Module):
    """A Hawk block between an embedding and the logits of the next token."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, 8)
        self.block = Hawk(8, width=8, heads=2)
        self.logits = nn.Linear(8, tokens)

    def forward(self, x: Tensor, offsets: Tensor | None = None) -> Tensor:
        x = self.embed(x)
        logits: Tensor = self.logits(x + self.block(x, offsets=offsets)[0])
        return logits


def test_a_model_learns_the_same_from_packed_and_from_padded_documents() -> None:
    """The same losses, step by step, and in the end the same parameters."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([9, 2, 17, 1, 5])
    offsets = F.pad(lengths.cumsum(0), (1, 0))
    tokens = torch.randint(7, (int(lengths.sum()),), generator=generator)
    follows = torch.randint(7, (int(lengths.sum()),), generator=generator)
    rows, targets = to_padded(tokens, offsets), to_padded(follows, offsets, -100)
    assert targets.shape == (5, 17) and torch.equal(lengths_of(offsets), lengths)
    histories = []
    for packed in (True, False):
        torch.manual_seed(1)
        model = Model(7).to(F64)
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        losses = []
        for _ in range(8):
            if packed:
                logits, wanted = model(tokens[None], offsets)[0], follows
            else:
                logits, wanted = model(rows).flatten(0, 1), targets.flatten()
            loss = F.cross_entropy(logits, wanted, ignore_index=-100)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        histories.append([torch.stack(losses), *(p.detach() for p in model.parameters())])
    assert histories[0][0][-1] < 0.9 * histories[0][0][0]
    torch.testing.assert_close(*histories, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["RGLRU", "LRU", "S5", "MatrixLRU", "DiagonalGRU"])
def test_states_that_do_not_fit_are_refused(name: str) -> None:
    layer, x = build(name), sample(2, L, FEATURES)
    state = entering(layer, x).detach()
    for wrong in (state[:-1], state[..., :1].expand(*state.shape[:-1], 5), state[None]):
        with pytest.raises(
            ScanValueError, match=r"state has shape .*, expected \[7, 2, .*\[S, B, "
        ):
            layer(x, wrong, offsets=OFFSETS)
    one = layer(x, state[0], offsets=OFFSETS)  # the same for all sequences
    torch.testing.assert_close(one, layer(x, state[:1].expand_as(state), offsets=OFFSETS))


@pytest.mark.parametrize("name", ["RGLRU", "CausalConv", "Hawk", "Mamba", "LRU", "S5", "AR-SSM"])
def test_refused(name: str) -> None:
    layer, x = build(name), sample(2, L, FEATURES)
    with pytest.raises(ScanValueError, match=r"offsets\[-1\] is 14, but the axis has length 13"):
        layer(x[:, 1:], offsets=OFFSETS)
    with pytest.raises(ScanTypeError, match="offsets must be a tensor, got list"):
        layer(x, offsets=[0, L])
    with pytest.raises(ScanValueError, match="are no sequences"):
        layer(x, offsets=torch.tensor([0]))
    with pytest.raises(ScanTypeError, match="has no argument 'cu_seqlens': pass offsets="):
        layer(x, cu_seqlens=OFFSETS)


def test_refused_beside_others() -> None:
    x = sample(2, L, FEATURES)
    group: Any = object()
    for layer in (
        LRU(FEATURES), CausalConv(FEATURES), Hawk(FEATURES), Mamba(FEATURES),
        DiagonalGRU(FEATURES), DiagonalLSTM(FEATURES), DiagonalSLSTM(FEATURES),
    ):  # fmt: skip
        with pytest.raises(ScanValueError, match="offsets and group were passed"):
            layer(x.float(), offsets=OFFSETS, group=group)
    with pytest.raises(ScanValueError, match="offsets and group were passed"):
        rglru(x, x, x, x[0, 0].exp(), offsets=OFFSETS, group=group)
    state = sample(2, 3, FEATURES)
    with pytest.raises(ScanValueError, match=r"expected \[7, 2, 3, 4\]: \[S, B, conv_width"):
        build("CausalConv")(x, state, offsets=OFFSETS)
    with pytest.raises(ScanValueError, match=r"expected \[7, 2, 8, 3\]: \[S, B, width, states\]"):
        build("Mamba")(x, (None, sample(2, 8, 3)), offsets=OFFSETS)


@pytest.mark.parametrize("name", [name for name in LAYERS if "AR-SSM" not in name])
def test_the_advice_for_steps_after_packed_sequences_is_right(name: str) -> None:
    """A state [S, 1, …] beside x of S rows: the error of each tensor of it names the view."""
    layer = LAYERS[name]().double()
    _, state = layer(torch.randn(1, L, FEATURES, dtype=F64), offsets=OFFSETS)
    x = torch.randn(S, FEATURES, dtype=F64)
    want, _ = layer.step(x, tree_map(lambda t: t[:, 0], state))
    for _ in tree_leaves(state):
        with pytest.raises(ScanValueError) as caught:
            layer.step(x, state)
        said = str(caught.value)
        assert f"of x [{S}, {FEATURES}]; a state" in said and said.endswith(".squeeze(1)")
        advised = said.rpartition("; pass ")[2]
        part = advised.removesuffix(".squeeze(1)").removeprefix("state").removeprefix(".")
        fitting = eval(advised, {"state": state})
        state = state._replace(**{part: fitting}) if part else fitting
    found, _ = layer.step(x, state)
    torch.testing.assert_close(found, want)
