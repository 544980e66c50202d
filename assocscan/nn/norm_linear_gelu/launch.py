"""The fused LayerNorm → Linear → GELU kernels as functions of tensors.

They are `torch.library` operators, so that compiled graphs hold them as they are.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...engines.base.commands import Description
from ...engines.base.device_properties import processors, shared_memory
from ...engines.triton import loader as triton_loader
from ...engines.triton.prepare import described_kernel
from ...engines.triton.tiles import power_of_two
from .checks import Operands, check, check_shapes
from .tiles import INTERPRETED, Tile, choose

_LIBRARY = torch.library.Library("assocscan", "FRAGMENT")
_LIBRARY.define(
    "linear_gelu(Tensor x, Tensor weight, Tensor? bias, bool tanh, bool save) -> (Tensor, Tensor)"
)

SHARED_MEMORY = 220 << 10  # what the candidates of sm_90 may take
TMA_ALIGNMENT = 16  # bytes, of pointers and row strides


@functools.lru_cache(maxsize=1024)
def tile_for(rows: int, itemsize: int, device: torch.device) -> Tile:
    """The tile that a product runs with."""
    if device.type != "cuda":
        return INTERPRETED[itemsize]
    return choose(rows, itemsize, shared_memory(device) >= SHARED_MEMORY)


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
    operands: Operands, eps: float, tanh: bool, tile: Tile | None = None
) -> Tensor:
    """y [M, N] for x [M, K] and weight [N, K], of which backward will not be asked."""
    x, gamma, beta, weight, bias = operands
    tile = tile_for(x.shape[0], weight.dtype.itemsize, x.device) if tile is None else tile
    if tile.staged:
        x = normalize(x, gamma, beta, eps, weight.dtype)[0]
        return linear_gelu(x, weight, bias, tanh, tile=tile)[0]
    y = x.new_empty((x.shape[0], weight.shape[0]), dtype=weight.dtype)
    launch(tile, operands, y, None, eps, tanh)
    return y


def linear_gelu(
    x: Tensor, weight: Tensor, bias: Tensor | None, tanh: bool, save: bool = False,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """y = GELU(z) and, with `save`, z = x Wᵀ + b."""
    tile = tile_for(x.shape[0], weight.dtype.itemsize, x.device) if tile is None else tile
    tile = tile if tile.staged else tile._replace(staged=True)
    y = x.new_empty((x.shape[0], weight.shape[0]), dtype=weight.dtype)
    z = torch.empty_like(y) if save else None
    launch(tile, Operands(x, None, None, weight, bias), y, z, 0.0, tanh)
    return y, z


def operator(
    x: Tensor, weight: Tensor, bias: Tensor | None, tanh: bool, save: bool
) -> tuple[Tensor, Tensor]:
    """`linear_gelu` of arguments that are checked, with an empty tensor where z is not saved."""
    check(x, weight, bias)
    if 0 in (*x.shape, *weight.shape):  # a launch has one program at least
        linear = F.linear(x, weight, None if bias is None else bias.to(weight.dtype))
        y = F.gelu(linear, approximate="tanh" if tanh else "none")
        return y, linear if save else y.new_empty((0,))
    y, z = linear_gelu(x, weight, bias, tanh, save)
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
    tensors = (x, gamma, beta, out, mean, rstd)
    normal_step(x.device, kinds_of(tensors), M, K, x.stride(0), eps).run(tensors)
    return out, mean, rstd


def of_unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def contiguous(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


def launch(
    tile: Tile, operands: Operands, y: Tensor, z: Tensor | None, eps: float, tanh: bool
) -> None:
    """Run the product on x, which is x̂ already where the tile is staged."""
    x, gamma, beta, weight, bias = operands
    (M, K), N = x.shape, weight.shape[0]
    x, weight = of_unit_stride(x), of_unit_stride(weight)
    tensors = (x, contiguous(gamma), contiguous(beta), weight, contiguous(bias), y, z)
    product_step(
        tile, x.device, kinds_of(tensors), M, N, K, x.stride(0), weight.stride(0), eps, tanh,
        precision(weight.dtype),
    ).run(tensors)  # fmt: skip


def _fake(x: Tensor, weight: Tensor, bias: Any, tanh: bool, save: bool) -> tuple[Tensor, Tensor]:
    check_shapes(x, weight, bias)
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
    _LIBRARY.impl("linear_gelu", operator, _key)
torch.library.register_fake("assocscan::linear_gelu", _fake, lib=_LIBRARY)
torch.library.register_autograd(
    "assocscan::linear_gelu", _backward, setup_context=_setup_context, lib=_LIBRARY
)

# Of each tensor of a kernel: its dtype, and whether its address is a multiple of 16.
Kind = tuple[torch.dtype, bool] | None


def kinds_of(tensors: Sequence[Tensor | None]) -> tuple[Kind, ...]:
    return tuple(
        [None if t is None else (t.dtype, t.data_ptr() % TMA_ALIGNMENT == 0) for t in tensors]
    )


class Step:
    """A kernel with all that does not depend on addresses: numbers, and constants in the order of
    its parameters. Tensors whose places are in `blocks` are passed as descriptors of such tiles.

    Triton's own launcher works out anew, at every call, what a kernel is compiled for, and checks
    every descriptor.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], numbers: tuple[float, ...], warps: int,
        stages: int, blocks: dict[int, list[int]], **constants: Any,
    ) -> None:  # fmt: skip
        self.kernel, self.grid, self.numbers = kernel, (*grid, 1, 1)[:3], numbers
        self.constants, self.values = constants, tuple(constants.values())
        # Triton is about to change the default of fusion.
        self.options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
        self.blocks, self.descriptors = blocks, dict[int, Any]()
        self.compiled: Any = None

    def run(self, tensors: Sequence[Any]) -> None:
        """Launch on the device of the tensors; absent ones are passed as any other pointer."""
        device = tensors[0].device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self.launch(tensors)
        else:
            self.launch(tensors)

    def launch(self, tensors: Sequence[Any]) -> None:
        if self.compiled is None:
            self.compile_and_launch(tensors)
            return
        other = tensors[0].data_ptr()
        given = [other if t is None else t.data_ptr() for t in tensors]
        for place, known in self.descriptors.items():
            given[place] = rebased(known, tensors[place])
        self.compiled[self.grid](*given, *self.numbers, *self.values)

    def described(self, slots: Sequence[int | None], device: torch.device) -> Description:
        """The launch for the C++ runner, on tensors in these slots, which are aligned to 16 bytes.
        Where descriptors have to be encoded, and before the kernel is compiled, it calls `run`."""
        known = None
        if device.type == "cuda" and torch.version.cuda and self.compiled and not self.descriptors:
            known = described_kernel(
                self.compiled, len(slots), len(self.numbers) + len(self.values)
            )
        if known is None:
            places = [k for k, slot in enumerate(slots) if slot is not None]

            def run(*given: Tensor) -> tuple[()]:
                tensors: list[Any] = [None] * len(slots)
                for k, t in zip(places, given, strict=True):
                    tensors[k] = t if t.dim() == 2 else t.view(-1, t.shape[-1])
                self.run(tensors)
                return ()

            return "python", run, tuple([slot for slot in slots if slot is not None]), ()
        first = slots[0]
        numbers = tuple([bits(n) for n in self.numbers]) + (0,) * len(self.values)
        return ("triton", tuple([first if slot is None else slot for slot in slots]), numbers,
                math.prod(self.grid), 32 * self.options["num_warps"], *known)  # fmt: skip

    def compile_and_launch(self, tensors: Sequence[Any]) -> None:
        """Through Triton's launcher."""
        from triton.tools.tensor_descriptor import TensorDescriptor

        given = [tensors[0] if t is None else t for t in tensors]
        for place, block in self.blocks.items():
            given[place] = TensorDescriptor.from_tensor(given[place], block)
        compiled = triton_loader.launch(
            self.kernel, self.grid, *given, *self.numbers, **self.constants, **self.options
        )
        if hasattr(compiled, "packed_metadata"):  # the interpreter returns None
            self.descriptors = {place: rebased(given[place], None) for place in self.blocks}
            self.compiled = compiled


def bits(number: float) -> int:
    """The bits of a kernel's number: an integer itself, a float as the bits of its float32."""
    if isinstance(number, int):
        return number
    found: int = struct.unpack("<i", struct.pack("<f", number))[0]
    return found


def rebased(descriptor: Any, t: Tensor | None) -> Any:
    """The descriptor for another tensor of the same shape and strides."""
    found = object.__new__(type(descriptor))
    found.__dict__.update(descriptor.__dict__, base=t)
    return found


@functools.lru_cache(maxsize=1024)
def normal_step(
    device: torch.device, kinds: tuple[Kind, ...], M: int, K: int, stride: int, eps: float
) -> Step:  # fmt: skip
    from .kernels import normalize_kernel

    columns = min(power_of_two(K), 4096)
    rows = max(1, 4096 // columns) if device.type == "cuda" else 16
    return Step(
        normalize_kernel, (-(-M // rows),), (M, K, stride, eps), 4, 1, {},
        BLOCK_M=rows, BLOCK_S=columns, AFFINE=kinds[1] is not None, SAVE=kinds[4] is not None,
    )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def product_step(
    tile: Tile, device: torch.device, kinds: tuple[Kind, ...], M: int, N: int, K: int,
    x_stride: int, w_stride: int, eps: float, tanh: bool, precision: str,
) -> Step:  # fmt: skip
    from .kernels import norm_linear_gelu_kernel

    x, gamma, _, weight, bias, y, z = kinds

    def has_descriptor(kind: Kind, stride: int) -> bool:
        return kind is None or (kind[1] and stride * kind[0].itemsize % TMA_ALIGNMENT == 0)

    loads = tile.staged and tile.tma_load and has_tma(device)
    loads = loads and has_descriptor(x, x_stride) and has_descriptor(weight, w_stride)
    stores = tile.tma_store and has_tma(device) and has_descriptor(y, N) and has_descriptor(z, N)
    blocks = dict[int, list[int]]()
    if loads:
        blocks |= {0: [tile.block_m, tile.block_k], 3: [tile.block_n, tile.block_k]}
    if stores:
        blocks |= {n: [tile.block_m, tile.block_n] for n in (5, 6) if kinds[n] is not None}
    # The interpreter lets two programs walk.
    programs, splits = tile.programs(M, N, processors(device) if device.type == "cuda" else 2)
    return Step(
        norm_linear_gelu_kernel, (programs,), (M, N, K, x_stride, w_stride, splits, eps),
        tile.warps, tile.stages, blocks,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, BLOCK_S=tile.block_k,
        NORMALIZE=not tile.staged, DESCRIPTORS=loads, AFFINE=gamma is not None,
        BIAS=bias is not None, SAVE=z is not None, TANH=tanh, EVEN_K=K % tile.block_k == 0,
        PRECISION=precision, FLATTEN=tile.persistent, STORES=stores,
    )  # fmt: skip
