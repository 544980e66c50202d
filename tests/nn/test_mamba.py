"""`nn.Mamba` against the Mamba of the package transformers, which is plain torch operations."""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

import pytest
import torch
from mamba_models import FEATURES, LanguageModel, config, counterpart, losses, text
from repository import ROOT
from torch import Tensor
from torch.nn import functional as F

import assocscan
from assocscan import ScanTypeError, ScanValueError
from assocscan.nn import Mamba

F32 = torch.float32


@pytest.fixture(scope="module")
def theirs() -> ModuleType:
    """Imported here, which takes seconds. It is among the packages that tests need, for the
    versions of Python that it takes."""
    pytest.importorskip("transformers")
    from transformers.models.mamba import modeling_mamba

    module: ModuleType = modeling_mamba
    return module


def random_mixer(module: ModuleType, **options: Any) -> Any:
    torch.manual_seed(0)
    mixer = module.MambaMixer(config(**options), layer_idx=0)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return mixer


def close(got: Tensor, want: Tensor, terms: int, name: str) -> None:
    """To within the rounding errors of `terms` additions, of numbers as large as the largest."""
    rtol = terms * torch.finfo(F32).eps
    atol = rtol * float(want.detach().abs().max())
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol, msg=lambda text: f"{name}: {text}")


CONFIGS: list[Any] = [
    {},
    {"state_size": 16, "expand": 3},
    {"use_bias": True, "use_conv_bias": False, "conv_kernel": 4, "time_step_rank": 1},
]


@pytest.mark.thinned(4)
@pytest.mark.parametrize("options", CONFIGS, ids=str)
def test_outputs_and_gradients_are_those_of_transformers(
    theirs: ModuleType, options: dict[str, Any]
) -> None:
    mixer = random_mixer(theirs, **options)
    layer = counterpart(mixer.config)
    layer.load_state_dict(mixer.state_dict())  # strict: the same names and shapes
    assert {n: p.shape for n, p in layer.named_parameters()} == {
        n: p.shape for n, p in mixer.named_parameters()
    }
    x = torch.randn(2, 17, FEATURES)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    results = [layer(inputs[0])[0], mixer(inputs[1])]
    terms = 17 * 4 * FEATURES
    close(results[0], results[1], terms, "y")
    for kept in (1.0, 0.3):
        cotangent = torch.randn(2, 17, FEATURES) * (torch.rand(2, 17, FEATURES) < kept)
        got, want = (
            torch.autograd.grad(y, [t, *dict(m.named_parameters()).values()], cotangent,
                                retain_graph=True)
            for y, t, m in zip(results, inputs, (layer, mixer), strict=True)
        )  # fmt: skip
        names = ["x", *dict(layer.named_parameters())]
        order = ["x", *dict(mixer.named_parameters())]
        for name, gradient in zip(names, got, strict=True):
            close(gradient, want[order.index(name)], 4 * terms, f"gradient of {name}")


@pytest.mark.exhaustive
def test_a_language_model_trains_as_that_of_transformers(theirs: ModuleType) -> None:
    torch.manual_seed(0)
    model = theirs.MambaForCausalLM(config()).train()
    ours = LanguageModel(model.config)
    ours.load_state_dict(model.state_dict())
    batches = text(20)
    want, got = losses(model, batches), losses(ours, batches)
    assert want[-1] < 0.8 * want[0]
    assert got == pytest.approx(want, rel=1e-5)


@pytest.fixture
def recipe(theirs: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The code of the page, run; what it replaced comes back after the test.

    Returns a list to which each of its scans appends."""
    monkeypatch.setattr(theirs, "mamba_selective_scan", theirs.mamba_selective_scan)
    calls: list[str] = []

    def counted(*args: Any, **options: Any) -> Any:
        calls.append("scan")
        return scan(*args, **options)

    scan = assocscan.selective_scan
    page = (ROOT / "docs/selective_scan.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```\{code-block\} python\n(.*?)```", page, re.DOTALL)
    monkeypatch.setattr(assocscan, "selective_scan", counted)
    exec(compile(code, "docs/selective_scan.md", "exec"), {})
    return calls


@pytest.mark.slow
def test_the_recipe_for_transformers(theirs: ModuleType, request: pytest.FixtureRequest) -> None:
    """Logits, gradients and generated tokens are those of its loop."""
    torch.manual_seed(0)
    model = theirs.MambaForCausalLM(config())
    (tokens,) = text(1)

    def run() -> tuple[Tensor, list[Tensor], Tensor]:
        model.train()
        logits = model(tokens).logits
        cotangent = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
        gradients = torch.autograd.grad(logits, list(model.parameters()), cotangent)
        model.eval()
        made = model.generate(tokens, max_new_tokens=6, do_sample=False)
        return logits, list(gradients), made

    want = run()
    calls = request.getfixturevalue("recipe")
    got = run()
    assert calls.count("scan") == 2 * 2  # blocks × (training and reading the prompt)
    terms = 18 * 4 * FEATURES
    close(got[0], want[0], terms, "logits")
    for (name, _), a, b in zip(model.named_parameters(), got[1], want[1], strict=True):
        close(a, b, 4 * terms, f"gradient of {name}")
    assert torch.equal(got[2], want[2])


def test_it_starts_as_in_the_paper() -> None:
    torch.manual_seed(0)
    layer = Mamba(2048, states=5)
    torch.testing.assert_close(layer.decay(), -torch.arange(1.0, 6).expand(4096, 5))
    assert torch.equal(layer.D, torch.ones(4096))
    step = F.softplus(layer.dt_proj.bias)
    assert 1e-3 * (1 - 1e-5) <= step.min() < 1.01e-3 and 0.099 < step.max() <= 0.1 * (1 + 1e-5)
    # Uniform in the logarithm: its mean is in the middle, to within 4 standard errors.
    spread = torch.tensor(100.0).log() / 12**0.5 / 4096**0.5
    assert abs(step.log().mean() - torch.tensor(1e-2).log()) < 4 * spread
    assert layer.dt_proj.weight.shape == (4096, 128)
    bound = 128**-0.5
    assert 0.99 * bound < layer.dt_proj.weight.abs().max() <= bound
    shapes = {name: tuple(p.shape) for name, p in Mamba(20).named_parameters()}
    assert shapes == {
        "A_log": (40, 16), "D": (40,), "in_proj.weight": (80, 20), "conv1d.weight": (40, 1, 4),
        "conv1d.bias": (40,), "x_proj.weight": (34, 40), "dt_proj.weight": (40, 2),
        "dt_proj.bias": (40,), "out_proj.weight": (20, 40),
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits(dtype: torch.dtype) -> None:
    """Parameters and inputs of 16 bits; the states of the scan are float32, in steps too."""
    torch.manual_seed(0)
    layer = Mamba(8, states=4).to(dtype)
    x = torch.randn(2, 7, 8).to(dtype)
    y, state = layer(x)
    assert y.dtype == state.conv.dtype == dtype and state.scan.dtype == F32
    wide = Mamba(8, states=4)
    wide.load_state_dict({k: v.float() for k, v in layer.state_dict().items()})
    want = wide(x.float())[0].detach()
    rtol = 8 * torch.finfo(dtype).eps  # of six rounded results on the way
    torch.testing.assert_close(y.float(), want, rtol=rtol, atol=rtol * float(want.abs().max()))
    y.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
    before = None
    for t in range(7):
        out, before = layer.step(x[:, t], before)
        torch.testing.assert_close(
            out.float(), want[:, t], rtol=rtol, atol=rtol * float(want.abs().max())
        )
    assert before is not None and before.scan.dtype == F32


def test_states_stay_wide_under_autocast() -> None:
    layer, x = Mamba(8, states=4), torch.randn(2, 7, 8)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = layer(x)
        y_next, after = layer.step(x[:, 0], state)
    assert y.dtype == y_next.dtype == torch.bfloat16
    assert state.scan.dtype == after.scan.dtype == F32


def test_gradients_flow_through_the_state() -> None:
    """To what came before, through the convolution's state and the scan's."""
    torch.manual_seed(0)
    layer = Mamba(6, states=3).double()
    x = torch.randn(2, 9, 6, dtype=torch.float64, requires_grad=True)
    cotangent = torch.randn(2, 4, 6, dtype=torch.float64)
    _, state = layer(x[:, :5])
    pieces = torch.autograd.grad(layer(x[:, 5:], state)[0], [x, *layer.parameters()], cotangent)
    whole = torch.autograd.grad(layer(x)[0][:, 5:], [x, *layer.parameters()], cotangent)
    assert pieces[0][:, :5].abs().max() > 0
    for a, b in zip(pieces, whole, strict=True):
        torch.testing.assert_close(a, b)


def test_errors() -> None:
    layer, x = Mamba(8, states=4), torch.randn(2, 5, 8)
    _, state = layer(x)
    other = torch.randn(3, 5, 8)
    with pytest.raises(ScanValueError, match=r"state of the scan.*\[2, 16, 4\], expected \[3, 16"):
        layer(other, state)
    with pytest.raises(ScanValueError, match=r"state of the scan.*\[2, 16, 4\], expected \[3, 16"):
        layer.step(other[:, 0], state)
    with pytest.raises(ScanValueError, match=r"state of the convolution.*expected \[2, 3, 16\]"):
        layer(x, (state.conv[:1], state.scan))
    with pytest.raises(ScanValueError, match=r"state of the scan has shape \[2, 16, 3\]"):
        layer(x, (state.conv, state.scan[..., :3]))
    with pytest.raises(ScanTypeError, match=r"state is .*expected a pair \(conv, scan\)"):
        layer(x, state.scan)
    with pytest.raises(ScanTypeError, match="the layer takes a tensor"):
        layer(x.numpy())
    for wrong in ({"states": 0}, {"conv_width": -1}, {"dt_rank": 0}, {"expand": 0}):
        (name,) = wrong
        with pytest.raises(ScanValueError, match=f"{name} is .*expected 1 or more"):
            Mamba(8, **wrong)
    with pytest.raises(ScanTypeError, match=r"features is 8\.0, expected a whole number"):
        Mamba(8.0)  # type: ignore[arg-type]
