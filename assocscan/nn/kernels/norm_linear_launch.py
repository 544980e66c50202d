"""The fused LayerNorm → Linear → GELU kernels as functions of tensors.

They are `torch.library` operators, so that compiled graphs hold them as they are.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ...engines.triton_scan import processors, shared_memory
from .norm_linear_tiles import INTERPRETED, Tile, choose

_LIBRARY = torch.library.Library("assocscan", "FRAGMENT")
_LIBRARY.define(
    "linear_gelu(Tensor x, Tensor weight, Tensor? bias, bool tanh, bool save) -> (Tensor, Tensor)"
)

SHARED_MEMORY = 220 << 10  # what the candidates of sm_90 may take
TMA_ALIGNMENT = 16  # bytes, of pointers and row strides


def tile_for(x: Tensor, weight: Tensor) -> Tile:
    """The tile that this product runs with."""
    itemsize = weight.dtype.itemsize
    if not x.is_cuda:
        return INTERPRETED[itemsize]
    return choose(x.shape[0], itemsize, shared_memory(x.device) >= SHARED_MEMORY)


@functools.cache
def has_tma(device: torch.device) -> bool:
    """Whether tiles are moved by descriptors: sm_90 or newer, and Triton's interpreter."""
    if device.type != "cuda":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] > 8


def precision(dtype: torch.dtype) -> str:
    """How a product of this dtype is computed: float32 as torch's settings allow."""
    if dtype != torch.float32 or torch.version.hip is not None:
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"


def norm_linear_gelu(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    tanh: bool,
    tile: Tile | None = None,
) -> Tensor:
    """y [M, N] for x [M, K] and weight [N, K], of which backward will not be asked."""
    tile = tile_for(x, weight) if tile is None else tile
    if tile.staged:
        x = normalize(x, gamma, beta, eps, weight.dtype)[0]
        return linear_gelu(x, weight, bias, tanh, tile=tile)[0]
    y = x.new_empty((x.shape[0], weight.shape[0]), dtype=weight.dtype)
    launch(tile, x, gamma, beta, weight, bias, y, None, eps, tanh)
    return y


def linear_gelu(
    x: Tensor, weight: Tensor, bias: Tensor | None, tanh: bool, save: bool = False,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y = GELU(z) and, with `save`, z = x Wᵀ + b; else an empty tensor in its place."""
    tile = (tile_for(x, weight) if tile is None else tile)._replace(staged=True)
    y = x.new_empty((x.shape[0], weight.shape[0]), dtype=weight.dtype)
    z = torch.empty_like(y) if save else None
    launch(tile, x, None, None, weight, bias, y, z, 0.0, tanh)
    return y, y.new_empty((0,)) if z is None else z


def normalize(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    eps: float,
    dtype: torch.dtype,
    save: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """LayerNorm of rows in `dtype`; with `save` their mean and 1 / √(variance + eps) [M, 1]."""
    M, K = x.shape
    x, gamma, beta = of_unit_stride(x), contiguous(gamma), contiguous(beta)
    out, mean, rstd = x.new_empty((M, K), dtype=dtype), None, None
    if save:
        mean, rstd = (x.new_empty((M, 1), dtype=torch.float32) for _ in range(2))
    columns = min(_power_of_two(K), 4096)
    rows = max(1, 4096 // columns) if x.is_cuda else 16
    kinds = (x.dtype, dtype_of(gamma), dtype_of(beta), dtype)
    step = normal_step(kinds, M, K, x.stride(0), eps, rows, columns, save)
    step.run((x, gamma, beta, out, mean, rstd))
    return out, mean, rstd


def of_unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def contiguous(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


def launch(
    tile: Tile,
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    y: Tensor,
    z: Tensor | None,
    eps: float,
    tanh: bool,
) -> None:
    """Run the product on x, which is x̂ already where the tile is staged."""
    (M, K), N = x.shape, weight.shape[0]
    x, weight = of_unit_stride(x), of_unit_stride(weight)
    gamma, beta, bias = contiguous(gamma), contiguous(beta), contiguous(bias)
    loads = tile.staged and tile.tma_load and has_descriptors(x, weight)
    stores = tile.tma_store and has_descriptors(y)
    given: list[Any] = [x, weight, y, z]
    if loads:
        given[0] = descriptor(x, tile.block_m, tile.block_k)
        given[1] = descriptor(weight, tile.block_n, tile.block_k)
    if stores:
        given[2] = descriptor(y, tile.block_m, tile.block_n)
        given[3] = given[2] if z is None else descriptor(z, tile.block_m, tile.block_n)
    kinds = (x.dtype, dtype_of(gamma), dtype_of(beta), weight.dtype, dtype_of(bias))
    count = processors(x.device) if x.is_cuda else 2  # programs that the interpreter lets walk
    step = product_step(
        tile, kinds, M, N, K, x.stride(0), weight.stride(0), count, eps, tanh, z is not None,
        loads, stores, precision(weight.dtype),
    )  # fmt: skip
    step.run((given[0], gamma, beta, given[1], bias, given[2], given[3]))


def descriptor(t: Tensor, rows: int, columns: int) -> Any:
    """A tensor descriptor of tiles [rows, columns]."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(t, [rows, columns])


def has_descriptors(*tensors: Tensor) -> bool:
    """Whether all can be moved by TMA: sm_90 or newer, and aligned."""
    if not has_tma(tensors[0].device):
        return False
    return all(
        t.data_ptr() % TMA_ALIGNMENT == 0 and t.stride(0) * t.element_size() % TMA_ALIGNMENT == 0
        for t in tensors
    )


def _fake(x: Tensor, weight: Tensor, bias: Any, tanh: bool, save: bool) -> tuple[Tensor, Tensor]:
    y = x.new_empty((x.shape[0], weight.shape[0]), dtype=weight.dtype)
    return y, torch.empty_like(y) if save else y.new_empty((0,))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _, ctx.tanh, _ = inputs
    ctx.save_for_backward(x, weight, output[1])


def _backward(ctx: Any, dy: Tensor, dz: Tensor) -> tuple[Tensor | None, ...]:
    """z is differentiated as any other result: so second derivatives are right."""
    x, weight, z = ctx.saved_tensors
    needs = ctx.needs_input_grad
    dz = dz + torch.ops.aten.gelu_backward(dy, z, approximate="tanh" if ctx.tanh else "none")
    dx = dz @ weight if needs[0] else None
    dw = dz.T @ x if needs[1] else None
    return dx, dw, dz.sum(0) if needs[2] else None, None, None


for _key in ("CUDA", "CPU"):  # the interpreter takes CPU tensors
    _LIBRARY.impl("linear_gelu", linear_gelu, _key)
torch.library.register_fake("assocscan::linear_gelu", _fake, lib=_LIBRARY)
torch.library.register_autograd(
    "assocscan::linear_gelu", _backward, setup_context=_setup_context, lib=_LIBRARY
)

Kinds = tuple[torch.dtype | None, ...]


def dtype_of(t: Tensor | None) -> torch.dtype | None:
    return None if t is None else t.dtype


class Step:
    """A kernel with all that does not depend on addresses: numbers, and constants in the order of
    its parameters.

    Triton's own launcher works out anew, at every call, what a kernel is compiled for. That is kept
    here by devices and by which pointers are aligned.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], numbers: tuple[float, ...], warps: int,
        stages: int, **constants: Any,
    ) -> None:  # fmt: skip
        self.kernel, self.grid, self.numbers = kernel, (*grid, 1, 1)[:3], numbers
        self.constants, self.values = constants, tuple(constants.values())
        # Triton is about to change the default of fusion.
        self.options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
        self.compiled: dict[Any, Any] = {}

    def run(self, tensors: tuple[Any, ...]) -> None:
        """Launch on the device of the tensors; absent ones are passed as any other pointer."""
        first = next(t for t in tensors if isinstance(t, Tensor))
        given = [first if t is None else t for t in tensors]
        device = first.device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self.launch(device, given)
        else:
            self.launch(device, given)

    def launch(self, device: torch.device, given: list[Any]) -> None:
        aligned = [t.data_ptr() % 16 == 0 for t in given if isinstance(t, Tensor)]
        key = (device, *aligned)
        known = self.compiled.get(key)
        if known is not None:
            known[self.grid](*given, *self.numbers, *self.values)
            return
        compiled = self.kernel[self.grid](*given, *self.numbers, **self.constants, **self.options)
        if hasattr(compiled, "packed_metadata"):  # the interpreter returns None
            self.compiled[key] = compiled


@functools.lru_cache(maxsize=1024)
def normal_step(
    kinds: Kinds, M: int, K: int, stride: int, eps: float, rows: int, columns: int, save: bool
) -> Step:
    from .norm_linear import normalize_kernel

    return Step(
        normalize_kernel, (-(-M // rows),), (M, K, stride, eps), 4, 1,
        BLOCK_M=rows, BLOCK_S=columns, AFFINE=kinds[1] is not None, SAVE=save,
    )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def product_step(
    tile: Tile, kinds: Kinds, M: int, N: int, K: int, x_stride: int, w_stride: int,
    processors: int, eps: float, tanh: bool, save: bool, loads: bool, stores: bool, precision: str,
) -> Step:  # fmt: skip
    from .norm_linear import norm_linear_gelu_kernel

    programs, splits = tile.programs(M, N, processors)
    return Step(
        norm_linear_gelu_kernel, (programs,), (M, N, K, x_stride, w_stride, splits, eps),
        tile.warps, tile.stages,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, BLOCK_S=tile.block_k,
        NORMALIZE=not tile.staged, DESCRIPTORS=loads, AFFINE=kinds[1] is not None,
        BIAS=kinds[4] is not None, SAVE=save, TANH=tanh, EVEN_K=K % tile.block_k == 0,
        PRECISION=precision, FLATTEN=tile.persistent, STORES=stores,
    )  # fmt: skip


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
