"""The layers, against loops over the positions written from their formulas, in float64."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from selective_loops import mamba_loop
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import assocscan
from assocscan import ScanTypeError, ScanValueError
from assocscan.nn import (
    LRU,
    RGLRU,
    S5,
    AdaptiveRankSemiseparable,
    Bidirectional,
    BlockLinear,
    CausalConv,
    DiagonalGRU,
    DiagonalLSTM,
    DiagonalSLSTM,
    Hawk,
    Mamba,
    MatrixLRU,
    rglru,
)
from assocscan.nn.ar_ssm import SemiseparableState
from assocscan.runtime import backends

pytestmark = pytest.mark.thinned(4)

F64 = torch.float64
BATCH, LENGTH, FEATURES = 2, 7, 4


def scan_loop(
    a: Tensor, b: Tensor, multiply: Callable[[Tensor, Tensor], Tensor] = torch.mul
) -> Tensor:
    """h[t] = a[t] h[t−1] + b[t] along axis 1, from zero."""
    h, out = torch.zeros_like(b[:, 0]), []
    for t in range(b.shape[1]):
        h = multiply(a[:, t], h) + b[:, t]
        out.append(h)
    return torch.stack(out, 1)


def conv_loop(layer: CausalConv, x: Tensor) -> Tensor:
    out = []
    for t in range(x.shape[1]):
        taps = [layer.weight[:, k] * x[:, t - k] for k in range(min(layer.weight.shape[1], t + 1))]
        out.append(sum(taps, torch.zeros_like(x[:, 0])))
    y = torch.stack(out, 1)
    return y if layer.bias is None else y + layer.bias


def block_linear_loop(layer: BlockLinear, x: Tensor) -> Tensor:
    matrix = torch.block_diag(*(w.T for w in layer.weight))
    return x @ matrix.T + layer.bias


def rglru_loop(layer: RGLRU, x: Tensor) -> Tensor:
    heads, size = layer.heads, x.shape[-1] // layer.heads
    both = block_linear_loop(layer.gates, x).unflatten(-1, (heads, 2, size))
    r, i = (both[..., k, :].flatten(-2).sigmoid() for k in (0, 1))
    a = torch.exp(-8 * F.softplus(layer.decay) * r)
    return scan_loop(a, torch.sqrt(1 - a * a) * i * x)


def hawk_loop(layer: Hawk, x: Tensor) -> Tensor:
    gate = layer.gate
    z = F.layer_norm(x, x.shape[-1:], gate.norm_weight, gate.norm_bias)
    branch = F.gelu(F.linear(z, gate.weight, gate.bias), approximate="tanh")
    h = rglru_loop(layer.recurrence, conv_loop(layer.conv, layer.input(layer.norm(x))))
    return layer.output(branch * h)


def interleaved(parts: Tensor, dim: int) -> Tensor:
    real, imaginary = parts.unflatten(dim, (-1, 2)).unbind(dim + 1 if dim >= 0 else dim)
    return torch.complex(real, imaginary)


def lru_loop(layer: LRU, x: Tensor) -> Tensor:
    eigenvalues = torch.exp(torch.complex(-layer.nu.exp(), layer.theta.exp()))
    B, C = interleaved(layer.B, 0), interleaved(layer.C, -1).conj()
    h = scan_loop(
        eigenvalues.expand(x.shape[0], x.shape[1], -1), layer.gamma.exp() * (x.to(B.dtype) @ B.T)
    )
    return (h @ C.T).real + layer.D * x


def s5_loop(layer: S5, x: Tensor) -> Tensor:
    eigenvalues = torch.complex(-layer.decay.exp(), layer.frequency)
    a = torch.exp(eigenvalues * layer.log_step.exp())
    B, C = interleaved(layer.B, 0), interleaved(layer.C, -1).conj()
    driven = (a - 1) / eigenvalues * (x.to(B.dtype) @ B.T)
    h = scan_loop(a.expand(x.shape[0], x.shape[1], -1), driven)
    return 2 * (h @ C.T).real + layer.D * x


def matrix_lru_loop(layer: MatrixLRU, x: Tensor) -> Tensor:
    rows = layer.transition(x).unflatten(-1, (layer.heads, layer.size, layer.size + 1))
    rows = rows.exp() / rows.exp().sum(-1, keepdim=True)
    b = rows[..., -1] * layer.value(x).unflatten(-1, (layer.heads, layer.size))
    h = scan_loop(rows[..., :-1], b, lambda A, h: torch.einsum("...ij,...j->...i", A, h))
    return layer.output(h.flatten(-2))


def ar_ssm_loop(layer: AdaptiveRankSemiseparable, x: Tensor) -> Tensor:
    gate = layer.complexity(x)
    keys, queries = gate * (x @ layer.U.weight.T), gate * (x @ layer.V.weight.T)
    total = scan_loop(torch.ones_like(keys), keys)
    return conv_loop(layer.local, x) + layer.output(total * queries)


def gates_of(layer: Any, count: int) -> Callable[[Tensor, Tensor], list[Tensor]]:
    """x[t], h[t−1] ↦ W x[t] + b + u ⊙ h[t−1] of each gate."""

    def gates(x: Tensor, h: Tensor) -> list[Tensor]:
        both = x @ layer.input.weight.T + layer.input.bias
        width = both.shape[-1] // count
        return [both[:, k * width : (k + 1) * width] + layer.recurrent[k] * h for k in range(count)]

    return gates


def gru_loop(layer: DiagonalGRU, x: Tensor) -> Tensor:
    u, gates, out = layer.recurrent, gates_of(layer, 3), []
    h = x.new_zeros(x.shape[0], u.shape[1])
    for t in range(x.shape[1]):
        z, r, n = gates(x[:, t], h)
        n = torch.tanh(n - u[2] * h + r.sigmoid() * u[2] * h)
        h = (1 - z.sigmoid()) * n + z.sigmoid() * h
        out.append(h)
    return torch.stack(out, 1)


def lstm_loop(layer: DiagonalLSTM, x: Tensor) -> Tensor:
    gates, out = gates_of(layer, 4), []
    h = c = x.new_zeros(x.shape[0], layer.recurrent.shape[1])
    for t in range(x.shape[1]):
        i, f, g, o = gates(x[:, t], h)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        out.append(h)
    return torch.stack(out, 1)


def slstm_loop(layer: DiagonalSLSTM, x: Tensor) -> Tensor:
    """Without a stabiliser, as in equations 8 to 11 of the paper."""
    gates, out = gates_of(layer, 4), []
    h = c = n = x.new_zeros(x.shape[0], layer.recurrent.shape[1])
    for t in range(x.shape[1]):
        i, f, z, o = gates(x[:, t], h)
        c = f.sigmoid() * c + i.exp() * z.tanh()
        n = f.sigmoid() * n + i.exp()
        h = o.sigmoid() * c / n
        out.append(h)
    return torch.stack(out, 1)


LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Tensor], Tensor]]] = {
    "RGLRU": (lambda: RGLRU(FEATURES, heads=2), rglru_loop),
    "CausalConv": (lambda: CausalConv(FEATURES, width=3), conv_loop),
    "Hawk": (lambda: Hawk(FEATURES, width=6, heads=3), hawk_loop),
    "Mamba": (lambda: Mamba(FEATURES, states=3, conv_width=3, dt_rank=2, bias=True), mamba_loop),
    "LRU": (lambda: LRU(FEATURES, states=3), lru_loop),
    "S5": (lambda: S5(FEATURES, states=6), s5_loop),
    "MatrixLRU": (lambda: MatrixLRU(FEATURES, heads=3, size=2), matrix_lru_loop),
    "AR-SSM": (lambda: AdaptiveRankSemiseparable(FEATURES, rank=3), ar_ssm_loop),
    "DiagonalGRU": (lambda: DiagonalGRU(FEATURES), gru_loop),
    "DiagonalLSTM": (lambda: DiagonalLSTM(FEATURES), lstm_loop),
    "DiagonalSLSTM": (lambda: DiagonalSLSTM(FEATURES), slstm_loop),
}

# The LSTM is like the sLSTM, and the default run has the one with more state.
each_layer = pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.exhaustive) if n == "DiagonalLSTM" else n for n in LAYERS],
)


def left_state(layer: nn.Module, result: Any) -> Any:
    """The state that a call of the layer returned."""
    return result["state"] if isinstance(layer, AdaptiveRankSemiseparable) else result


def build(name: str) -> tuple[nn.Module, Callable[[Any, Tensor], Tensor], Tensor]:
    """The layer in float64 with every parameter away from its special start, and an input."""
    torch.manual_seed(0)
    layer = LAYERS[name][0]().to(F64)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    x = torch.randn(BATCH, LENGTH, FEATURES, dtype=F64, requires_grad=True)
    return layer, LAYERS[name][1], x


def assert_close(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


@pytest.mark.thinned(7)
@each_layer
def test_values_and_gradients_are_those_of_the_loop(name: str) -> None:
    layer, loop, x = build(name)
    got, want = layer(x)[0], loop(layer, x)
    assert_close(got, want)
    cotangent = torch.randn_like(want)
    inputs = [x, *layer.parameters()]
    for parameter, a, b in zip(
        ["x", *dict(layer.named_parameters())],
        torch.autograd.grad(got, inputs, cotangent),
        torch.autograd.grad(want, inputs, cotangent),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10, msg=lambda m, p=parameter: p + m)


@pytest.mark.thinned(7)
@each_layer
def test_chunks_and_steps_are_the_whole(name: str) -> None:
    layer, _, x = build(name)
    with torch.no_grad():
        whole, last = layer(x)
        last = left_state(layer, last)
        first, state = layer(x[:, :3])
        second, chunked = layer(x[:, 3:], left_state(layer, state))
        assert_close(torch.cat([first, second], 1), whole)
        assert_close(left_state(layer, chunked), last)
        steps, state = [], None
        for t in range(LENGTH):
            y, state = layer.step(x[:, t], state)
            steps.append(y)
        assert_close(torch.stack(steps, 1), whole)
        assert_close(state, last)


def test_gradients_flow_through_the_state() -> None:
    layer, loop, x = build("RGLRU")
    state = layer(x[:, :3])[1]
    second, _ = layer(x[:, 3:], state)
    cotangent = torch.randn(BATCH, LENGTH - 3, FEATURES, dtype=F64)
    got = torch.autograd.grad(second, x, cotangent)[0]
    want = torch.autograd.grad(loop(layer, x)[:, 3:], x, cotangent)[0]
    assert got[:, :3].abs().max() > 0
    assert_close(got, want)


@each_layer
def test_empty_sequences_leave_the_state(name: str) -> None:
    layer, _, x = build(name)
    with torch.no_grad():
        state = left_state(layer, layer(x)[1])
        y, after = layer(x[:, :0], state)
        assert y.shape == (BATCH, 0, FEATURES)
        assert_close(left_state(layer, after), state)
        given, left = (tree_leaves(t) for t in (state, left_state(layer, after)))
        assert not {t.data_ptr() for t in given} & {t.data_ptr() for t in left}


@pytest.mark.parametrize("width", [1, 4])
def test_convolutions_of_empty_sequences_have_gradients_and_dtype_of_others(width: int) -> None:
    """Gradients of parameters too, where x has none: as of a rank whose part is empty."""
    conv, x = CausalConv(FEATURES, width), torch.ones(BATCH, 0, FEATURES)
    conv(x)[0].sum().backward()
    for parameter in conv.parameters():
        assert_close(parameter.grad, torch.zeros_like(parameter))
    with torch.autocast("cpu", torch.bfloat16):
        y, state = conv(x)
    assert y.dtype == torch.bfloat16
    assert state.dtype == torch.float32


@each_layer
def test_reverse_runs_from_the_end(name: str) -> None:
    layer, loop, x = build(name)
    assert_close(layer(x, reverse=True)[0], loop(layer, x.flip(1)).flip(1))


def test_bidirectional_joins_both_directions() -> None:
    first, loop, x = build("LRU")
    second = LRU(FEATURES, states=5).to(F64)
    want = torch.cat([loop(first, x), loop(second, x.flip(1)).flip(1)], -1)
    assert_close(Bidirectional(first, second)(x), want)


@each_layer
def test_bidirectional_takes_every_recurrent_layer(name: str) -> None:
    layer, loop, x = build(name)
    want = torch.cat([loop(layer, x), loop(layer, x.flip(1)).flip(1)], -1)
    assert_close(Bidirectional(layer, layer)(x), want)


def test_bidirectional_refuses_layers_without_a_direction() -> None:
    with pytest.raises(ScanTypeError, match="a BlockLinear has no direction"):
        Bidirectional(LRU(4), BlockLinear(4, 4))


@pytest.mark.thinned(7)
@pytest.mark.parametrize(
    "name",
    ["RGLRU", "LRU", "S5", "MatrixLRU",
     *(pytest.param(n, marks=pytest.mark.exhaustive) for n in LAYERS if n.startswith("Diagonal"))],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_stay_wide_under_autocast(name: str, dtype: torch.dtype) -> None:
    layer, _, x = build(name)
    layer, x = layer.float(), x.detach().to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        _, state = layer(x)
        _, after = layer.step(x[:, 0], state)
    wide = torch.complex64 if name in ("LRU", "S5") else torch.float32
    assert {t.dtype for t in (*tree_leaves(state), *tree_leaves(after))} == {wide}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rglru_in_other_dtypes(dtype: torch.dtype) -> None:
    """16-bit inputs are rounded once: the error is that of the output's dtype."""
    torch.manual_seed(1)
    x, r, i = (torch.randn(2, 50, 5).to(dtype) for _ in range(3))
    decay = torch.rand(5)
    h, last = rglru(x, r, i, decay)
    assert h.dtype == dtype and last.dtype == torch.float32
    a = torch.exp(-decay.double() * r.double().sigmoid())
    want = scan_loop(a, torch.sqrt(1 - a * a) * i.double().sigmoid() * x.double())
    rtol = {torch.float32: 1e-5, torch.bfloat16: 2**-8}[dtype]
    torch.testing.assert_close(h.double(), want, rtol=rtol, atol=1e-5)
    torch.testing.assert_close(last.double(), want[:, -1], rtol=1e-5, atol=1e-5)


def test_rglru_is_accurate_where_nothing_decays() -> None:
    """With 1 − a² below float32's resolution of 1 the scale still has all its digits."""
    x, r = torch.ones(1, 1, 1), torch.zeros(1, 1, 1)
    decay = torch.tensor([1e-9])
    h, _ = rglru(x, r, x + 100, decay)
    assert h.item() == pytest.approx(math.sqrt(-math.expm1(-1e-9)), rel=1e-6)


@pytest.mark.parametrize("decay", [1.0, 1e-3, 1e-7, 1e-12, 0.0])
def test_rglru_gradient_is_bounded(decay: float) -> None:
    """The true one where the root's derivative is below 1000, and 1000 times the rest above."""
    d = torch.tensor([decay], dtype=F64, requires_grad=True)
    one = torch.ones(1, 1, 1, dtype=F64)
    h, _ = rglru(one, 0 * one, 0 * one, d)  # h = √(1 − exp(−d)) / 2
    slope = torch.autograd.grad(h.sum(), d)[0].item()
    root = math.sqrt(-math.expm1(-decay))
    steep = 1000.0 if root < 0.5 / 1000 else 0.5 / root
    assert slope == pytest.approx(0.5 * steep * math.exp(-decay), rel=1e-9)


def test_rglru_starts_with_the_radii_of_the_paper() -> None:
    torch.manual_seed(0)
    radius = torch.exp(-RGLRU(4096).decays())  # a^c
    assert 0.9 <= radius.min() < 0.901 and 0.998 < radius.max() <= 0.9991
    assert (radius**2).mean().item() == pytest.approx((0.9**2 + 0.999**2) / 2, abs=2e-3)


def test_lru_starts_in_its_ring_with_unit_gain() -> None:
    torch.manual_seed(0)
    layer = LRU(2, states=4096, min_radius=0.5, max_radius=0.9, max_phase=1.0)
    eigenvalues = layer.eigenvalues()
    assert eigenvalues.abs().min() > 0.499 and eigenvalues.abs().max() < 0.901
    assert eigenvalues.angle().min() > 0 and eigenvalues.angle().max() <= 1.0
    # Σ_k |λ|^2k γ² = 1: white noise keeps its variance.
    gain = layer.gamma.exp() ** 2 / (1 - eigenvalues.abs() ** 2)
    torch.testing.assert_close(gain, torch.ones_like(gain), rtol=1e-4, atol=0.0)


def test_s5_starts_from_hippo() -> None:
    """The kept eigenvalues and their conjugates are those of the normal part of HiPPO-LegS."""
    states = 8
    layer = S5(3, states)
    root = (2 * torch.arange(states) + 1).double().sqrt()
    legs = -(torch.outer(root, root).tril(-1) + torch.diag(torch.arange(states) + 1.0).double())
    low_rank = torch.outer(root, root) / 2
    want = torch.linalg.eigvals(legs + low_rank)
    kept = torch.complex(-layer.decay.exp(), layer.frequency).to(torch.complex128)
    both = torch.cat([kept, kept.conj()])
    order, wanted = both.imag.argsort(), want.imag.argsort()
    torch.testing.assert_close(both[order], want[wanted], rtol=1e-5, atol=1e-5)


def test_matrix_lru_never_exceeds_its_input() -> None:
    torch.manual_seed(0)
    layer = MatrixLRU(4, heads=2, size=3)
    A, b = layer.elements(10 * torch.randn(2, 200, 4))
    assert (A.abs().sum(-1) <= 1 + 1e-6).all()
    state = None
    values = torch.randn(2, 200, 4)
    largest = layer.value(values).abs().max()
    for t in range(200):
        _, state = layer.step(values[:, t], state)
        assert state.abs().max() <= largest
    assert b.shape == (2, 200, 2, 3)


@pytest.mark.parametrize("reverse", [False, True])
def test_ar_ssm_is_the_same_fused_or_not(reverse: bool) -> None:
    layer, _, x = build("AR-SSM")
    assert isinstance(layer, AdaptiveRankSemiseparable)
    total = torch.randn(BATCH, 3, dtype=F64, requires_grad=True)
    state = SemiseparableState(torch.randn(BATCH, 2, FEATURES, dtype=F64), total)
    fused, diagnostics = layer(x, state, reverse)
    layer.use_fused_scan = False
    plain, without = layer(x, state, reverse)
    assert_close(fused, plain)
    assert_close(diagnostics["state"], without["state"])
    weight = torch.randn_like(x)
    inputs = [x, total, *layer.parameters()]
    for a, b in zip(*(torch.autograd.grad(y, inputs, weight) for y in (fused, plain)), strict=True):
        assert_close(a, b)
    assert diagnostics["engine"] in ("cpu", "eager")
    assert diagnostics["used_fused_scan"] == (diagnostics["engine"] == "cpu")
    assert without["engine"] == "torch.cumsum" and not without["used_fused_scan"]
    rank = layer.complexity(x).sum(-1).mean()
    assert_close(diagnostics["effective_rank"], rank.detach())
    assert_close(3 * diagnostics["gate_l1"], rank)


@pytest.mark.filterwarnings("ignore::assocscan.FallbackWarning")
@pytest.mark.parametrize("compiled", [False, True])
def test_ar_ssm_tells_what_ran(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    """Where no kernel can be generated, the sum is run by torch operations, and not fused."""
    if compiled and why_not_compiled() is not None:
        pytest.skip("torch.compile cannot take scans")
    layer = AdaptiveRankSemiseparable(FEATURES, rank=3)
    call = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    x = torch.randn(BATCH, 5, FEATURES)
    if backends.availability()["cpu"] is None:
        _, seen = call(x)
        assert seen["engine"] == ("compiled" if compiled else "cpu") and seen["used_fused_scan"]
    monkeypatch.setattr(backends, "why_not", lambda call, backend: "a test does without")
    monkeypatch.setattr(backends, "why_not_here", lambda device, backend: "as above")
    assocscan.nn.ar_ssm._CONTEXT.calls.clear()
    torch._dynamo.reset()
    _, seen = call(x)
    assert seen["engine"] == "eager" and not seen["used_fused_scan"]
    if not compiled:
        _, seen = layer.forward_bidirectional(x)
        assert seen["engine"] == "eager" and not seen["used_fused_scan"]
    torch._dynamo.reset()


@pytest.mark.parametrize("fused", [False, True])
def test_ar_ssm_of_nothing_and_of_16_bits(fused: bool) -> None:
    layer = AdaptiveRankSemiseparable(FEATURES, rank=3, use_fused_scan=fused)
    y, diagnostics = layer(torch.ones(BATCH, 0, FEATURES))
    assert y.shape == (BATCH, 0, FEATURES)
    assert diagnostics["effective_rank"] == 0 and diagnostics["gate_l1"] == 0
    assert not any(t.any() for t in diagnostics["state"])
    y, diagnostics = layer.bfloat16()(torch.ones(BATCH, LENGTH, FEATURES).bfloat16())
    assert y.dtype == torch.bfloat16 and diagnostics["state"].total.dtype == torch.float32


def test_ar_ssm_bidirectional_is_the_mean_of_both() -> None:
    layer, loop, x = build("AR-SSM")
    assert isinstance(layer, AdaptiveRankSemiseparable)
    want = (loop(layer, x) + loop(layer, x.flip(1)).flip(1)) / 2
    assert_close(layer.forward_bidirectional(x)[0], want)


@each_layer
def test_nothing_looks_ahead(name: str) -> None:
    layer, _, x = build(name)
    with torch.no_grad():
        before = layer(x)[0]
        x[:, 4] += torch.randn(FEATURES, dtype=F64)
        after = layer(x)[0]
    assert_close(after[:, :4], before[:, :4])
    assert (after[:, 4:] - before[:, 4:]).abs().max() > 1e-3


@functools.cache
def why_not_compiled() -> str | None:
    """Why torch.compile cannot take a scan whole; None where it can."""
    scan = torch.compile(lambda x: assocscan.cumsum(x, 0), backend="aot_eager", fullgraph=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scan(torch.ones(3))
    except Exception as error:
        return str(error).partition("\n")[0]
    return None


@pytest.mark.thinned(7)
# Dynamo does so itself.
@each_layer
def test_compiled_layers_are_the_loop(name: str) -> None:
    """All but CausalConv scan, and are skipped as long as torch.compile cannot take scans."""
    reason = None if name == "CausalConv" else why_not_compiled()
    if reason is not None:
        pytest.skip(f"torch.compile cannot take scans yet: {reason}")
    layer, loop, x = build(name)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    got, want = compiled(x)[0], loop(layer, x)
    assert_close(got, want)
    cotangent = torch.randn_like(want)
    inputs = [x, *layer.parameters()]
    for a, b in zip(*(torch.autograd.grad(y, inputs, cotangent) for y in (got, want)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("heads", [1, 2])
def test_autocast_of_block_linear(heads: int) -> None:
    layer, x = BlockLinear(8, 8, heads), torch.ones(2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    assert layer(x).dtype == torch.float32


@pytest.mark.parametrize(
    "make", [lambda: BlockLinear(6, 6, 4), lambda: S5(3, 5), lambda: MatrixLRU(4, 0, 3),
             lambda: AdaptiveRankSemiseparable(4, 0), lambda: BlockLinear(6, 6, 0),
             lambda: RGLRU(-1), lambda: LRU(0), lambda: Hawk(4, 0), lambda: CausalConv(4, 0),
             lambda: DiagonalGRU(4, 0), lambda: DiagonalLSTM(0), lambda: DiagonalSLSTM(4, -1)]
)  # fmt: skip
def test_sizes_that_do_not_fit_are_refused(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(ScanValueError):
        make()


@pytest.mark.parametrize(
    "make", [LRU, RGLRU, Hawk, Mamba, DiagonalGRU, DiagonalLSTM, DiagonalSLSTM]
)
def test_sizes_are_whole_numbers(make: Any) -> None:
    with pytest.raises(ScanTypeError, match=r"is 8\.0, expected a whole number"):
        make(8.0)
    make(np.int64(8))


@pytest.mark.parametrize(
    "layer",
    [
        RGLRU(4),
        Hawk(4),
        Mamba(4),
        LRU(4, 3),
        S5(4, 6),
        MatrixLRU(4, 2, 2),
        AdaptiveRankSemiseparable(4, 2),
        DiagonalGRU(4, 3),
        DiagonalLSTM(4, 3),
        DiagonalSLSTM(4, 3),
    ],
)
@pytest.mark.parametrize("shape", [(4,), (7, 4), (2, 3, 7, 4), (2, 7, 5)], ids=str)
def test_other_shapes_are_refused(layer: nn.Module, shape: tuple[int, ...]) -> None:
    """Without a batch dimension, the scan would run along the states."""
    with pytest.raises(ScanValueError, match=r"the layer takes \[B, L, 4\]"):
        layer(torch.ones(shape))
    with pytest.raises(ScanValueError, match=r"the layer takes \[B, 4\]"):
        layer.step(torch.ones(2, 7, 4))


@pytest.mark.parametrize(
    "layer,shape",
    [(LRU(4, 3), (2, 3)), (S5(4, 6), (2, 3)), (RGLRU(4), (2, 4)), (MatrixLRU(4, 2, 2), (2, 2, 2)),
     (DiagonalGRU(4, 3), (2, 3))],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_states_that_do_not_fit_are_refused(layer: nn.Module, shape: tuple[int, ...]) -> None:
    x, state = torch.ones(2, 7, 4), torch.zeros(shape)
    step: Any = layer.step
    for wrong in (torch.zeros(3, *shape[1:]), torch.zeros(*shape[:-1], 5), state[None]):
        for call, given in ((layer, x), (step, x[:, 0])):
            with pytest.raises(ScanValueError, match=r"state has shape .*, expected \[2, .*of x"):
                call(given, wrong)
    for call, given in ((layer, x), (step, x[:, 0])):
        with pytest.raises(ScanTypeError, match=r"state is a tuple, expected a tensor \[B, "):
            call(given, (state,))
        expected = call(given, state)[0]
        torch.testing.assert_close(call(given, state[:1])[0], expected)  # the same in every row


@pytest.mark.parametrize("layer", [Hawk(4), Mamba(4), AdaptiveRankSemiseparable(4, 2)])
def test_states_that_are_no_pairs_are_refused(layer: nn.Module) -> None:
    x = torch.ones(2, 7, 4)
    step: Any = layer.step
    for call, given in ((layer, x), (step, x[:, 0])):
        for wrong in (torch.zeros(2, 4), {"conv": x}, [None, None], (1.0, None)):
            with pytest.raises(ScanTypeError, match=r"expected a pair \(conv, "):
                call(given, wrong)


@pytest.mark.parametrize("layer", [DiagonalLSTM(4, 3), DiagonalSLSTM(4, 3)])
def test_states_of_several_parts_that_do_not_fit_are_refused(layer: Any) -> None:
    x = torch.ones(2, 7, 4)
    state = layer(x)[1]
    for call, given in ((layer, x), (layer.step, x[:, 0])):
        for wrong in (state.cell, list(state), state[:1], (*state, state.cell)):
            with pytest.raises(ScanTypeError, match=r"state is a .*, expected \(hidden, cell"):
                call(given, wrong)
        for part in (None, 0.0):
            with pytest.raises(ScanTypeError, match=r"state\.cell is .*, expected \(hidden, cell"):
                call(given, state._replace(cell=part))
        for part in (torch.zeros(3, 3), torch.zeros(2, 4), state.cell[None]):
            with pytest.raises(
                ScanValueError, match=r"state\.cell has shape .*, expected \[2, 3\]: \[B, width\]"
            ):
                call(given, state._replace(cell=part))
        first = type(state)(*(t[:1] for t in state))  # the same in every row
        every = type(state)(*(t.expand(2, 3) for t in first))
        torch.testing.assert_close(call(given, first), call(given, every))


def test_errors_of_rglru_name_its_arguments() -> None:
    x, decay = torch.ones(2, 7, 4), torch.ones(4)
    with pytest.raises(ScanValueError, match=r"x has length 7 .* but gate has 3"):
        rglru(x, x, x[:, :3], decay)
    with pytest.raises(ScanValueError, match=r"decay has shape \[3\], expected \[4\]"):
        rglru(x, x, x, decay[:3])
    with pytest.raises(ScanValueError, match=r"x has shape \[7, 4\], expected \[B, L, D\]"):
        rglru(x[0], x[0], x[0], decay)
    with pytest.raises(ScanValueError, match=r"state has shape \[2, 3\]"):
        rglru(x, x, x, decay, x[:, 0, :3])
    with pytest.raises(
        ScanValueError, match=r"x has shape \[2, 7, 3\], the layer takes \[\.\.\., 4"
    ):
        BlockLinear(4, 4, 2)(x[..., :3])


CONVERTING = [LRU(4, 3), S5(4, 6)]
KEEPING = [
    RGLRU(4), Hawk(4), Mamba(4), MatrixLRU(4, 2, 2), AdaptiveRankSemiseparable(4, 2),
    CausalConv(4), BlockLinear(4, 4, 2), Bidirectional(RGLRU(4), RGLRU(4)),
    DiagonalGRU(4, 3), DiagonalLSTM(4, 3), DiagonalSLSTM(4, 3),
]  # fmt: skip


@pytest.mark.thinned(7)
@pytest.mark.parametrize("layer", KEEPING, ids=lambda layer: type(layer).__name__)
def test_other_dtypes_are_refused(layer: nn.Module) -> None:
    x = torch.ones(2, 3, 4)
    calls: list[tuple[Any, Tensor]] = [(layer, x)]
    if hasattr(layer, "step"):
        calls.append((layer.step, x[:, 0]))
    for call, given in calls:
        found = r"x is torch\.bfloat16 and the layer's parameters are torch\.float32: pass x\.to"
        with pytest.raises(ScanTypeError, match=rf"{found}.*autocast.*layer\.to\(torch\.bfloat16"):
            call(given.bfloat16())
        for dtype in (torch.float64, torch.int64, torch.complex64):
            with pytest.raises(ScanTypeError, match=f"{dtype} .* pass x.to.torch.float32"):
                call(given.to(dtype))
        with torch.autocast("cpu", torch.bfloat16):
            call(given.bfloat16())
            with pytest.raises(ScanTypeError, match=r"torch\.float64 .* parameters"):
                call(given.double())


@pytest.mark.parametrize("layer", CONVERTING, ids=["LRU", "S5"])
def test_layers_of_their_own_dtype_take_floats(layer: nn.Module) -> None:
    x = torch.ones(2, 3, 4)
    assert layer(x.double())[0].dtype == torch.float64
    for dtype in (torch.int64, torch.complex64):
        with pytest.raises(ScanTypeError, match=r"the layer takes real floats: pass x\.float"):
            layer(x.to(dtype))


def test_a_layer_put_in_place_of_a_linear_one_may_convert() -> None:
    class Converting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.to(self.weight.dtype))

    layer = MatrixLRU(4, 2, 2)
    layer.transition, layer.value = Converting(4, 12), Converting(4, 4)
    assert layer(torch.ones(2, 3, 4).double())[0].shape == (2, 3, 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [lambda: LRU(8), lambda: S5(8, 8)], ids=["LRU", "S5"])
def test_complex_layers_of_16_bits(make: Any, dtype: torch.dtype) -> None:
    """Parameters and inputs of 16 bits; complex numbers of 32 bits each."""
    torch.manual_seed(0)
    layer = make().to(dtype)
    x = torch.randn(2, 5, 8).to(dtype)
    y, state = layer(x)
    assert y.dtype == dtype and state.dtype == torch.complex64
    wide = make()
    wide.load_state_dict({k: v.float() for k, v in layer.state_dict().items()})
    tolerance = 7 * torch.finfo(dtype).eps  # of parameters, inputs, states and products
    torch.testing.assert_close(y, wide(x.float())[0].to(dtype), rtol=tolerance, atol=tolerance)
    y.float().square().sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())
    step, after = layer.step(x[:, 0])
    torch.testing.assert_close(step, y[:, 0], rtol=tolerance, atol=tolerance)
    assert after.dtype == torch.complex64


def test_printed_layers_say_their_sizes() -> None:
    printed = {
        "LRU(6, states=4)": LRU(6, 4),
        "S5(6, states=4)": S5(6, 4),
        "BlockLinear(6, 4, heads=2)": BlockLinear(6, 4, 2),
        "CausalConv(3, width=4, bias=False)": CausalConv(3, bias=False),
    }
    assert [str(layer) for layer in printed.values()] == [*printed]


@pytest.mark.parametrize("decay", [1.0, 1e-6])
def test_second_derivatives_of_rglru(decay: float) -> None:
    """They equal a loop's, at decays for which the derivative of the root is below its bound."""
    torch.manual_seed(0)
    x, r, i = (torch.randn(2, 4, 3, dtype=F64, requires_grad=True) for _ in range(3))
    d = torch.full((3,), decay, dtype=F64, requires_grad=True)

    def loop(x: Tensor, r: Tensor, i: Tensor, d: Tensor) -> Tensor:
        log_a = -d * r.sigmoid()
        scale = torch.sqrt(-torch.expm1(2 * log_a))
        return scan_loop(log_a.exp(), scale * i.sigmoid() * x)

    def second(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        leaves = x, r, i, d
        first = torch.autograd.grad(function(*leaves).sin().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum((g * g).sum() for g in first), leaves)

    torch.testing.assert_close(second(lambda *t: rglru(*t)[0]), second(loop))


def test_ar_ssm_in_a_transform_that_comes_first() -> None:
    """The engine is asked for once for each shape, with tensors that have memory."""
    layer, x = AdaptiveRankSemiseparable(4, 3), torch.randn(2, 17, 4)
    found = torch.func.grad(lambda x: layer(x)[0].sum())(x)
    again = x.clone().requires_grad_()
    (want,) = torch.autograd.grad(layer(again)[0].sum(), again)
    torch.testing.assert_close(found, want)
