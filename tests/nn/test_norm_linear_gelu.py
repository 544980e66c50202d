"""LayerNorm → Linear → GELU: the Triton kernels, interpreted or on a GPU, against float64 loops."""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_targets import TARGETS, resource_usage, run_compiling
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from assocscan import BackendError, ScanTypeError, ScanValueError
from assocscan.nn import NormLinearGELU, norm_linear_gelu

pytest.importorskip("triton", reason="Triton is not installed")

from assocscan.nn.norm_linear_gelu import launch
from assocscan.nn.norm_linear_gelu.checks import Operands
from assocscan.nn.norm_linear_gelu.tiles import CANDIDATES, CHOSEN, SMALL, Tile

pytestmark = pytest.mark.thinned(4)

norm_linear_module: Any = importlib.import_module("assocscan.nn.norm_linear_gelu.layer")
GPU = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
# Of float32 tensors whose size is about 1; a 16-bit result is rounded, and z once more in training.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def draw(
    rows: int, features: int, outputs: int, dtype: torch.dtype = torch.float32, offset: float = 0.0
) -> list[Tensor]:
    """x, weight, bias, norm_weight, norm_bias."""
    generator = torch.Generator().manual_seed(rows + features)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tensors = [
        normal(rows, features) + offset, normal(outputs, features) / features**0.5,
        normal(outputs), 1 + 0.2 * normal(features), 0.2 * normal(features),
    ]  # fmt: skip
    return [t.to(dtype).to(GPU).requires_grad_() for t in tensors]


def loop(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, gamma: Tensor | None = None,
    beta: Tensor | None = None, approximate: str = "none",
) -> Tensor:  # fmt: skip
    """Row by row, from the formulas, in float64."""
    rows = []
    for row in x:
        normal = (row - row.mean()) / torch.sqrt((row - row.mean()).square().mean() + 1e-5)
        z = weight @ (normal if gamma is None or beta is None else normal * gamma + beta)
        z = z if bias is None else z + bias
        if approximate == "tanh":
            inner = (2 / torch.pi) ** 0.5 * (z + 0.044715 * z**3)
            rows.append(0.5 * z * (1 + torch.tanh(inner)))
        else:
            rows.append(z * 0.5 * torch.special.erfc(-z / 2**0.5))
    return torch.stack(rows)


def wide(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.detach().cpu().double().requires_grad_() for t in tensors]


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", SIZES, ids=SIZES.values())
def test_values_and_gradients(dtype: torch.dtype, approximate: str, backend: str) -> None:
    """The last tiles of rows, columns and features are partial."""
    tensors = draw(19, 24, 33, dtype)
    y = norm_linear_gelu(*tensors, approximate=approximate, backend=backend)
    assert y.dtype == dtype
    exact = wide(tensors)
    want = loop(*exact, approximate=approximate)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(y.cpu().double(), want, rtol=2 * tolerance, atol=tolerance)
    cotangent = torch.randn(y.shape, dtype=torch.float64).to(dtype)
    got = torch.autograd.grad(y, tensors, cotangent.to(GPU))
    for a, b in zip(got, torch.autograd.grad(want, exact, cotangent.double()), strict=True):
        error = (a.cpu().double() - b).abs().max() / b.abs().max()
        assert a.dtype == dtype and error < 2 * tolerance


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 7, 5), (16, 16, 16), (17, 33, 15)], ids=str)
def test_any_shape(shape: tuple[int, int, int]) -> None:
    tensors = draw(*shape)
    with torch.no_grad():
        y = norm_linear_gelu(*tensors, backend="triton")
        torch.testing.assert_close(y.cpu().double(), loop(*wide(tensors)), rtol=4e-6, atol=4e-6)


@pytest.mark.parametrize("given", [2, 3], ids=["weight", "and bias"])
def test_parameters_may_be_absent(given: int) -> None:
    tensors = draw(5, 8, 6)[:given]
    y = norm_linear_gelu(*tensors, backend="triton")
    exact = wide(tensors)
    torch.testing.assert_close(y.cpu().double(), loop(*exact), rtol=4e-6, atol=4e-6)
    got = torch.autograd.grad(y.sum(), tensors)
    for a, b in zip(got, torch.autograd.grad(loop(*exact).sum(), exact), strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=1e-4, atol=2e-5)


FORMS = {
    "normalising": Tile(16, 16, 16, 4, 1, staged=False, per_sm=1),
    "normalising wide": Tile(32, 16, 32, 4, 1, staged=False, per_sm=4),
    "staged": Tile(16, 32, 16, 4, 1, staged=True, per_sm=1),
    "staged, walking": Tile(16, 16, 16, 4, 1, staged=True, per_sm=1, persistent=True),
    "staged, stored by TMA": Tile(16, 16, 16, 4, 1, staged=True, per_sm=1, tma_store=True),
}


@pytest.mark.thinned(7)
@pytest.mark.parametrize("features", [32, 20, 9], ids=["even", "aligned", "odd"])
@pytest.mark.parametrize("form", FORMS)
def test_forms_of_the_kernel(form: str, features: int) -> None:
    """Every form writes every place, whatever was there; what backward needs is saved."""
    x, weight, bias, gamma, beta = (t.detach() for t in draw(37, features, 44))
    tile = FORMS[form]
    y = launch.norm_linear_gelu(Operands(x, gamma, beta, weight, bias), 1e-5, False, tile)
    exact = wide([x, weight, bias, gamma, beta])
    torch.testing.assert_close(y.cpu().double(), loop(*exact), rtol=4e-6, atol=4e-6)
    normal, mean, rstd = launch.normalize(x, gamma, beta, 1e-5, x.dtype, save=True)
    assert mean is not None and rstd is not None
    spread = exact[0].var(1, keepdim=True, unbiased=False)
    torch.testing.assert_close(
        mean.cpu().double(), exact[0].mean(1, keepdim=True), rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(rstd.cpu().double(), (spread + 1e-5).rsqrt(), rtol=1e-5, atol=1e-6)
    want = ((exact[0] - mean.cpu()) * rstd.cpu()) * exact[3] + exact[4]
    torch.testing.assert_close(normal.cpu().double(), want, rtol=1e-5, atol=1e-6)
    y, z = launch.linear_gelu(normal, weight, bias, False, save=True, tile=tile)
    torch.testing.assert_close(y.cpu().double(), loop(*exact), rtol=4e-6, atol=4e-6)
    product = want @ exact[1].T + exact[2]
    assert z is not None
    torch.testing.assert_close(z.cpu().double(), product, rtol=1e-5, atol=5e-6)


def test_statistics_survive_a_mean_far_from_zero() -> None:
    """A sum of squares minus a squared mean would leave nothing of the variance here."""
    x, weight, *_ = (t.detach() for t in draw(9, 64, 16, offset=10_000.0))
    y = norm_linear_gelu(x, weight, backend="triton")
    want = loop(x.cpu().double(), weight.cpu().double())
    # The mean itself is a float32: off by up to half a unit of 10000, 5e-4 of a deviation.
    torch.testing.assert_close(y.cpu().double(), want, rtol=4e-3, atol=4e-3)
    by_torch = norm_linear_gelu(x, weight, backend="torch").cpu().double()
    assert (y.cpu().double() - want).abs().max() <= 3 * (by_torch - want).abs().max()


def test_strided_inputs_and_leading_dimensions() -> None:
    x, weight, *_ = (t.detach() for t in draw(12, 16, 16))
    want = loop(x.cpu().double(), weight.cpu().double()).view(3, 4, 16)
    rows = torch.stack([x, x + 1], 1)[:, 0]
    assert rows.stride() == (32, 1)
    y = norm_linear_gelu(rows.view(3, 4, 16), weight.T.contiguous().T, backend="triton")
    torch.testing.assert_close(y.cpu().double(), want, rtol=4e-6, atol=4e-6)


def test_empty_batches() -> None:
    x, weight, *_ = draw(3, 8, 6)
    assert norm_linear_gelu(x, weight[:0], backend="triton").shape == (3, 0)
    y = norm_linear_gelu(x[:0], weight, backend="triton")
    assert y.shape == (0, 6)
    assert torch.autograd.grad(y.sum(), weight)[0].abs().max() == 0


@pytest.mark.parametrize("watched", [False, True])
def test_second_derivatives(watched: bool) -> None:
    """Where a mode watches, the product is one operation, which it sees."""

    def penalty(backend: str) -> tuple[Tensor, ...]:
        x, *parameters = draw(5, 8, 6)
        with FlopCounterMode(display=False) if watched else contextlib.nullcontext():
            y = norm_linear_gelu(x, *parameters, backend=backend)
        slope = torch.autograd.grad(y.square().sum(), x, create_graph=True)[0]
        return torch.autograd.grad(slope.square().sum(), parameters)

    for a, b in zip(penalty("triton"), penalty("torch"), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_backward_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """No node of the graph is Python's: backward takes what eager's takes. (The C++ runner has a
    node of its own: `test_norm_linear_programs`.)"""
    monkeypatch.setattr(norm_linear_module.runner, "call", norm_linear_module.runner.never)
    y = norm_linear_gelu(*draw(5, 8, 6), backend="triton")
    names, node = [], y.grad_fn
    while node is not None:
        names.append(node.name())
        node = next((n for n, _ in reversed(node.next_functions[:2]) if n is not None), None)
    assert names[:3] == ["GeluBackward0", "AddmmBackward0", "NativeLayerNormBackward0"]
    assert y.grad_fn is not None and y.is_contiguous() and not y.is_leaf


def test_tangents_run_through_torchs_operations() -> None:
    x, *rest = (t.detach() for t in draw(3, 8, 6))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x) + x)
        y, want = (norm_linear_gelu(dual, *rest, backend=b) for b in ("auto", "torch"))
        torch.testing.assert_close(
            forward_ad.unpack_dual(y).tangent, forward_ad.unpack_dual(want).tangent
        )
        with pytest.raises(BackendError, match="forward mode"):
            norm_linear_gelu(dual, *rest, backend="triton")


def test_large_values_do_not_become_nan() -> None:
    """Infinities and the far tails of GELU, of 16-bit results by their own formula."""
    z = torch.tensor([-1e30, -40.0, -3.0, 0.0, 3.0, 40.0, 1e30])
    x = torch.tensor([[-1.0, 1.0]])
    for dtype in (torch.bfloat16, torch.float32):
        for approximate in ("none", "tanh"):
            weight = torch.zeros(len(z), 2, dtype=dtype, device=GPU)
            bias = z.to(dtype).to(GPU).requires_grad_()
            y = norm_linear_gelu(
                x.to(dtype).to(GPU), weight, bias, approximate=approximate, backend="triton"
            )
            given = bias.detach().cpu().double().requires_grad_()
            want = torch.nn.functional.gelu(given, approximate=approximate)
            torch.testing.assert_close(
                y[0].cpu().double(), want.detach(), rtol=8e-3, atol=1e-6, equal_nan=False
            )
            slope = torch.autograd.grad(y.sum(), bias)[0].cpu().double()[1:-1]
            exact = torch.autograd.grad(want.sum(), given)[0][1:-1]
            torch.testing.assert_close(slope, exact, rtol=8e-3, atol=1e-6)


def test_tf32_runs_only_where_torch_allows_it() -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        assert launch.precision(torch.float32) == "tf32x3"
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert launch.precision(torch.float32) == "tf32"
        assert launch.precision(torch.bfloat16) == "ieee"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_autocast_computes_in_its_dtype() -> None:
    x, *parameters = draw(9, 16, 8)
    with torch.autocast(GPU, torch.bfloat16):
        y = norm_linear_gelu(x, *parameters, backend="triton")
    assert y.dtype == torch.bfloat16
    want = loop(*wide([x, *parameters]))
    torch.testing.assert_close(y.cpu().double(), want, rtol=3e-2, atol=3e-2)
    grads = torch.autograd.grad(y.sum(), [x, *parameters])
    assert {g.dtype for g in grads} == {torch.float32}
    exact = wide([x, *parameters])
    for a, b in zip(grads, torch.autograd.grad(loop(*exact).sum(), exact), strict=True):
        assert (a.cpu().double() - b).abs().max() < 3e-2 * b.abs().max()


def test_parameters_of_autocasts_dtype() -> None:
    """x in float32, all parameters in bfloat16: nothing is cast after LayerNorm."""
    x, *parameters = draw(9, 16, 8)
    x = (3 * x + 1).detach().requires_grad_()
    narrow = [t.detach().bfloat16().requires_grad_() for t in parameters]
    with torch.autocast(GPU, torch.bfloat16):
        y = norm_linear_gelu(x, *narrow, backend="triton")
    exact = wide([x, *narrow])
    want = loop(*exact)
    torch.testing.assert_close(y.cpu().double(), want, rtol=3e-2, atol=3e-2)
    grads = torch.autograd.grad(y.sum(), [x, *narrow])
    for a, b in zip(grads, torch.autograd.grad(want.sum(), exact), strict=True):
        assert (a.cpu().double() - b).abs().max() < 3e-2 * b.abs().max()


@pytest.mark.parametrize("autocast", [False, True])
def test_hooks_of_saved_tensors_compute(autocast: bool) -> None:
    """They run while the operations are recorded, and see none of the results known there."""
    x, weight, *rest = draw(9, 12, 12)
    eye = torch.eye(12, device=GPU)

    def run(hooks: Any) -> tuple[Tensor, ...]:
        context = torch.autocast(GPU, torch.bfloat16) if autocast else contextlib.nullcontext()
        with context, hooks:
            y = norm_linear_gelu(x, weight, *rest, backend="triton")
        return y, *torch.autograd.grad(y.float().square().sum(), (x, weight, *rest))

    def pack(t: Tensor) -> tuple[torch.dtype, Tensor]:
        wide = t.to(torch.float64)
        if t.shape == (12, 12):  # in the same strides: products in another order round otherwise
            wide = torch.empty_like(wide).copy_(wide @ eye.double())
        return t.dtype, wide

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept[1].to(kept[0]))
    for a, b in zip(run(hooks), run(contextlib.nullcontext()), strict=True):
        torch.testing.assert_close(a, b)
    with torch.autograd.graph.save_on_cpu():
        assert torch.equal(run(contextlib.nullcontext())[0], run(hooks)[0])


def test_nothing_is_computed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """All results known to a recorded call are used."""
    left: list[int] = []
    leave = norm_linear_module.Known.__exit__

    def leaving(self: Any, *error: Any) -> Any:
        left.append(len(self.results))
        return leave(self, *error)

    monkeypatch.setattr(norm_linear_module.Known, "__exit__", leaving)
    monkeypatch.setattr(norm_linear_module.runner, "call", norm_linear_module.runner.never)
    x, weight, *rest = draw(5, 8, 6)
    norm_linear_gelu(x, weight, backend="triton")
    norm_linear_gelu(x, weight, *rest, backend="triton")
    with torch.autocast(GPU, torch.bfloat16):
        norm_linear_gelu(x, weight, *rest, backend="triton")
    assert left == [0, 0, 0, 0]


# Dynamo does so itself.
def test_compiled_graphs_hold_the_kernels() -> None:
    x, *parameters = draw(9, 16, 8)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(*tensors: Tensor) -> Tensor:
        return norm_linear_gelu(*tensors, backend="triton")

    inputs = [x, *parameters]
    y = compiled(*inputs)
    exact = wide(inputs)
    want = loop(*exact)
    torch.testing.assert_close(y.cpu().double(), want, rtol=4e-6, atol=4e-6)
    cotangent = torch.randn(want.shape, dtype=torch.float32)
    got = torch.autograd.grad(y, inputs, cotangent.to(GPU))
    for a, b in zip(got, torch.autograd.grad(want, exact, cotangent.double()), strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=1e-4, atol=2e-5)


def test_parameters_may_be_strided_or_expanded() -> None:
    x, weight, *_ = (t.detach() for t in draw(5, 8, 6))
    wide = torch.randn(8, 16, device=GPU)
    one = wide[0, :1]
    for bias, gamma, beta in (
        (wide[0, :12:2], wide[1, ::2], wide[:, 3]),
        (one.expand(6), one.expand(8), one.expand(8)),
    ):
        y, want = (
            norm_linear_gelu(x, weight, bias, gamma, beta, backend=b) for b in ("triton", "torch")
        )
        torch.testing.assert_close(y, want, rtol=4e-6, atol=4e-6)


def test_batches_of_cotangents_and_transforms() -> None:
    """One by one for autograd.grad; transforms see torch's operations."""
    tensors = draw(3, 8, 6)
    y = norm_linear_gelu(*tensors, backend="triton")
    cotangents = torch.randn(4, *y.shape, device=GPU)
    got = torch.autograd.grad(y, tensors, cotangents, is_grads_batched=True, retain_graph=True)
    rows = [torch.autograd.grad(y, tensors, g, retain_graph=True) for g in cotangents]
    for k, g in enumerate(got):
        torch.testing.assert_close(g, torch.stack([row[k] for row in rows]))
    x, *rest = (t.detach() for t in tensors)
    jacobian = torch.func.jacrev(lambda x: norm_linear_gelu(x, *rest))(x)
    assert jacobian.shape == (3, 6, 3, 8)
    with pytest.raises(BackendError, match="transform"):
        torch.func.grad(lambda x: norm_linear_gelu(x, *rest, backend="triton").sum())(x)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # opcheck reads it
def test_operators_keep_torchs_rules() -> None:
    x, weight, bias, *_ = (t.detach() for t in draw(5, 8, 6))
    for given in (weight.requires_grad_(), bias), (weight, None):
        arguments = (x.requires_grad_(), *given, True, True)
        torch.library.opcheck(torch.ops.assocscan.linear_gelu.default, arguments)
    with torch.no_grad():
        torch.library.opcheck(
            torch.ops.assocscan.linear_gelu.default, (x, weight, bias, False, False)
        )


def test_the_layer_is_the_function() -> None:
    torch.manual_seed(0)
    layer = NormLinearGELU(8, 5, approximate="tanh").double()
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    want = loop(
        x.flatten(0, 1), layer.weight, layer.bias, layer.norm_weight, layer.norm_bias, "tanh"
    )
    torch.testing.assert_close(layer(x), want.view(2, 3, 5))
    assert "8, 5" in repr(layer)


@pytest.mark.parametrize(
    "arguments",
    [
        {"weight": torch.ones(3, 5)},
        {"weight": torch.ones(4)},
        {"bias": torch.ones(4)},
        {"norm_weight": torch.ones(4)},
        {"bias": torch.ones(2, 3)},
        {"norm_weight": torch.ones(2, 4), "norm_bias": torch.ones(4)},
        {"approximate": "sigmoid"},
        {"backend": "cuda"},
    ],
    ids=lambda a: next(iter(a)),
)
def test_what_does_not_fit_is_refused(arguments: dict[str, Any]) -> None:
    given = {"x": torch.ones(2, 4), "weight": torch.ones(3, 4), **arguments}
    with pytest.raises(ScanValueError):
        norm_linear_gelu(**given)


def test_dtypes_that_do_not_fit_are_refused() -> None:
    x, weight = torch.ones(2, 4), torch.ones(3, 4)
    with pytest.raises(ScanTypeError, match="bfloat16"):
        norm_linear_gelu(x, weight.bfloat16())
    with pytest.raises(BackendError, match="float64"):
        norm_linear_gelu(x.double().to(GPU), weight.double().to(GPU), backend="triton")


@pytest.mark.parametrize(
    ("name", "dtypes", "words"),
    [
        ("bias", (torch.float64,), "bias is torch.float64 and weight torch.float32"),
        ("bias", (torch.bfloat16,), "bias is torch.bfloat16 and weight torch.float32"),
        ("norm", (torch.float64, torch.float64), "norm_weight is torch.float64 and x"),
        ("norm", (torch.bfloat16, torch.float32), "norm_weight is torch.bfloat16 and x"),
        ("norm", (torch.float32, torch.float64), "norm_bias is torch.float64 and x"),
        ("bias", (torch.int64,), "bias is torch.int64, expected a real float"),
    ],
)
def test_parameters_of_other_dtypes_are_refused(
    name: str, dtypes: tuple[torch.dtype, ...], words: str
) -> None:
    x, weight = torch.ones(2, 4), torch.ones(3, 4)
    names = ("bias",) if name == "bias" else ("norm_weight", "norm_bias")
    sizes = {"bias": 3, "norm_weight": 4, "norm_bias": 4}
    given = {n: torch.ones(sizes[n], dtype=d) for n, d in zip(names, dtypes, strict=True)}
    for _ in range(2):
        with pytest.raises(ScanTypeError, match=words):
            norm_linear_gelu(x, weight, **given)
    with pytest.raises(ScanTypeError, match=r"x is torch.int64, expected a real float"):
        norm_linear_gelu(x.long(), weight.long())
    mixed = torch.ones(4), torch.ones(4, dtype=torch.bfloat16)
    with pytest.raises(ScanTypeError, match=r"norm_weight is .* and norm_bias torch.bfloat16"):
        norm_linear_gelu(x.bfloat16(), weight.bfloat16(), None, *mixed)
    wide = torch.ones(3), torch.ones(4), torch.zeros(4)
    assert norm_linear_gelu(x.half(), weight.half(), *wide).dtype == torch.float16


@pytest.mark.parametrize("rows", [1, 512, 8192, 100_000])
def test_programs_cover_all_tiles(rows: int) -> None:
    """Each block of rows has programs, and each of its tiles of columns one of them."""
    for tile in {*CANDIDATES[2], *CANDIDATES[4], *CHOSEN.values(), *SMALL.values()}:
        programs, splits = tile.programs(rows, 4096, 132)
        blocks, across = -(-rows // tile.block_m), -(-4096 // tile.block_n)
        if tile.staged:
            assert splits == 1 and 0 < programs <= blocks * across
        else:
            assert programs == blocks * splits and 0 < splits <= across


# In a process that compiles: where Triton interprets, it cannot.


def compile_for(target: str, tile: Tile, dtype: str, save: bool) -> tuple[int, int]:
    """Registers, and bytes of local memory, of a thread of the main kernel."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from assocscan.engines.triton.corrections import lane_promises
    from assocscan.nn.norm_linear_gelu.kernels import norm_linear_gelu_kernel as kernel

    hopper = target == "sm_90"
    loads, stores = tile.staged and tile.tma_load and hopper, tile.tma_store and hopper
    constants = {
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k,
        "BLOCK_S": tile.block_k, "NORMALIZE": not tile.staged, "DESCRIPTORS": loads,
        "AFFINE": True, "BIAS": True, "SAVE": save, "TANH": False, "EVEN_K": True,
        "PRECISION": "tf32x3" if dtype == "fp32" else "ieee", "FLATTEN": tile.persistent,
        "STORES": stores,
    }  # fmt: skip
    names = kernel.arg_names
    kinds = dict.fromkeys(names, "i32") | dict.fromkeys(constants, "constexpr")
    pointers = ("x", "gamma", "beta", "weight", "bias", "y", "z")
    kinds |= dict.fromkeys(pointers, f"*{dtype}")
    kinds["eps"] = "fp32"
    if loads:
        kinds["x"] = f"tensordesc<{dtype}[{tile.block_m},{tile.block_k}]>"
        kinds["weight"] = f"tensordesc<{dtype}[{tile.block_n},{tile.block_k}]>"
    if stores:
        kinds["y"] = kinds["z"] = f"tensordesc<{dtype}[{tile.block_m},{tile.block_n}]>"
    multiples = ("N", "K", "x_stride", "w_stride")
    aligned = [k for k, n in enumerate(names) if kinds[n].startswith("*") or n in multiples]
    source = ASTSource(
        kernel,
        kinds,
        {(names.index(name),): value for name, value in constants.items()},
        {(k,): [["tt.divisibility", 16]] for k in aligned},
    )
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    options["enable_fp_fusion"] = True
    with lane_promises.mended():  # Triton keeps what is compiled here
        binary = compile(source, target=GPUTarget(*TARGETS[target]), options=options).asm
    return resource_usage(binary["cubin"])


COMPILED = ((2, False), (2, True), (4, False), (4, True))


def main() -> None:
    found = {}
    for size, few in COMPILED:
        name = f"{size} {'few' if few else 'many'}"
        dtype = "bf16" if size == 2 else "fp32"
        found[name] = compile_for("sm_90", CHOSEN[size, few], dtype, save=size == 2)
    print(json.dumps(found))


@pytest.mark.exhaustive
def test_chosen_tiles_compile_without_spilling_much() -> None:
    found = json.loads(run_compiling(Path(__file__)).splitlines()[-1])
    assert len(found) == len(COMPILED)
    assert all(stack <= 128 for _, stack in found.values()), found  # 112 by Triton 3.6


if __name__ == "__main__":
    main()
