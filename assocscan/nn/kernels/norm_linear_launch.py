"""The fused LayerNorm → Linear → GELU kernels as functions of tensors.

They are `torch.library` operators, so that compiled graphs hold them as they are.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ...engines.triton_scan import processors, shared_memory
from ...modes import has_own_dispatch, in_other_mode
from .norm_linear_tiles import INTERPRETED, Tile, choose

_LIBRARY = torch.library.Library("assocscan", "FRAGMENT")
_LIBRARY.define(
    "norm_linear_gelu(Tensor x, Tensor? gamma, Tensor? beta, Tensor weight, Tensor? bias, "
    "float eps, bool tanh, bool save) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.define("gelu_backward_sums(Tensor dy, Tensor z, bool tanh) -> (Tensor, Tensor)")

SHARED_MEMORY = 220 << 10  # what the candidates of sm_90 may take
TMA_ALIGNMENT = 16  # bytes, of pointers and row strides
BACKWARD_BLOCK = (32, 128, 8)  # rows, columns, steps of a program


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


def forward(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    tanh: bool,
    save: bool,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """(y, z, x̂, mean, rstd) for x [M, K] and weight [N, K].

    What backward reads is kept with `save`: z, mean and rstd, and x̂ where the tile is staged.
    """
    tile = tile_for(x, weight) if tile is None else tile
    (M, K), N = x.shape, weight.shape[0]
    y = x.new_empty((M, N), dtype=weight.dtype)
    z = mean = rstd = xhat = None
    if save:
        z = y.new_empty((M, N))
        mean, rstd = (x.new_empty((M, 1), dtype=torch.float32) for _ in range(2))
    x, weight = (t if t.stride(1) == 1 else t.contiguous() for t in (x, weight))
    gamma, beta, bias = (None if t is None else t.contiguous() for t in (gamma, beta, bias))
    if tile.staged:
        xhat = y.new_empty((M, K))
        normalize(x, gamma, beta, xhat, mean, rstd, eps)
        x = xhat
    launch(tile, x, gamma, beta, weight, bias, y, z, mean, rstd, eps, tanh)
    return y, z, xhat if save else None, mean, rstd


def operator(
    x: Tensor, gamma: Any, beta: Any, weight: Tensor, bias: Any, eps: float, tanh: bool, save: bool
) -> tuple[Tensor, ...]:
    """`forward` with empty tensors for those that are not kept."""
    found = forward(x, gamma, beta, weight, bias, eps, tanh, save)
    kinds = (*[weight.dtype] * 3, *[torch.float32] * 2)
    return tuple(
        x.new_empty((0,), dtype=d) if t is None else t for t, d in zip(found, kinds, strict=True)
    )


def normalize(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    out: Tensor,
    mean: Tensor | None,
    rstd: Tensor | None,
    eps: float,
) -> None:
    """Write x̂, and the statistics where they are wanted."""
    M, K = x.shape
    columns = min(_power_of_two(K), 4096)
    rows = max(1, 4096 // columns) if x.is_cuda else 16
    kinds = (x.dtype, dtype_of(gamma), dtype_of(beta), out.dtype)
    step = normal_step(kinds, M, K, x.stride(0), eps, rows, columns, mean is not None)
    step.run((x, gamma, beta, out, mean, rstd))


def launch(
    tile: Tile,
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    y: Tensor,
    z: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    eps: float,
    tanh: bool,
) -> None:
    """Run the product on x, which is x̂ already where the tile is staged."""
    (M, K), N = x.shape, weight.shape[0]
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
    step.run((given[0], gamma, beta, given[1], bias, given[2], given[3], mean, rstd))


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


def gelu_backward(dy: Tensor, z: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """dz = dy ⊙ GELU'(z) [M, N], and its column sums [N] in float32."""
    dy = dy if dy.stride(1) == 1 else dy.contiguous()
    (M, N), (rows, _, steps) = z.shape, BACKWARD_BLOCK
    dz = torch.empty_like(z)
    blocks = -(-M // (rows * steps))
    sums = z.new_empty((blocks, N), dtype=torch.float32)
    backward_step((dy.dtype, z.dtype), M, N, dy.stride(0), tanh).run((dy, z, dz, sums))
    return dz, sums.sum(0)


def _fake_forward(
    x: Tensor, gamma: Any, beta: Any, weight: Tensor, bias: Any, eps: float, tanh: bool, save: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    (M, K), N = x.shape, weight.shape[0]
    staged = save and tile_for(x, weight).staged
    y = x.new_empty((M, N), dtype=weight.dtype)
    mean = x.new_empty((M, 1) if save else (0,), dtype=torch.float32)
    return (
        y,
        y.new_empty((M, N) if save else (0,)),
        y.new_empty((M, K) if staged else (0,)),
        mean,
        torch.empty_like(mean),
    )


def _fake_backward(dy: Tensor, z: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(z), z.new_empty((z.shape[1],), dtype=torch.float32)


for _key in ("CUDA", "CPU"):  # the interpreter takes CPU tensors
    _LIBRARY.impl("norm_linear_gelu", operator, _key)
    _LIBRARY.impl("gelu_backward_sums", gelu_backward, _key)
torch.library.register_fake("assocscan::norm_linear_gelu", _fake_forward, lib=_LIBRARY)
torch.library.register_fake("assocscan::gelu_backward_sums", _fake_backward, lib=_LIBRARY)


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether nobody looks at operations: the functions above may run as they are."""
    return not (torch.compiler.is_compiling() or in_other_mode() or has_own_dispatch(tensors))


def norm_linear_gelu(*arguments: Any) -> tuple[Tensor | None, ...]:
    """`forward`, or its operation where somebody looks."""
    plain = is_plain(*arguments[:5])
    run: Any = forward if plain else torch.ops.assocscan.norm_linear_gelu
    results: tuple[Tensor | None, ...] = run(*arguments)
    return results


def gelu_backward_sums(dy: Tensor, z: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """`gelu_backward`, or its operation where somebody looks."""
    run: Any = gelu_backward if is_plain(dy, z) else torch.ops.assocscan.gelu_backward_sums
    results: tuple[Tensor, Tensor] = run(dy, z, tanh)
    return results


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


@functools.lru_cache(maxsize=1024)
def backward_step(kinds: Kinds, M: int, N: int, stride: int, tanh: bool) -> Step:
    from .norm_linear import gelu_backward_kernel

    rows, columns, steps = BACKWARD_BLOCK
    return Step(
        gelu_backward_kernel, (-(-M // (rows * steps)), -(-N // columns)), (M, N, stride), 4, 1,
        BLOCK_M=rows, BLOCK_N=columns, STEPS=steps, TANH=tanh,
    )  # fmt: skip


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
