"""LayerNorm, Linear and GELU as one layer, fused on GPUs."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn import functional as F

from ...api.flags_and_backends import flag
from ...caching.bounded import Calls
from ...engines.triton import loader as triton_loader
from ...errors import BackendError, ScanTypeError, ScanValueError
from ...monoids.call_errors import NOT_PASSED, checked_methods, known_keywords, refuse_call
from ...monoids.leaf_checks import check_tensor
from ...runtime.native import runner
from ...torch_private import TorchDispatchMode
from ...torch_state import (
    has_own_dispatch,
    in_functorch_or_forward_mode,
    needs_dispatcher,
    without_autocast,
)
from ...wording import shown
from ..states import require_number, require_sizes
from .checks import DTYPES, Operands
from .tiles import Tile, check_tile

BACKENDS = ("auto", "triton", "torch")
HAS_TRITON = triton_loader.is_installed()
# The fused calls that were made, by all of their arguments but the tensors; None for those that the
# runner does not have yet.
MOST_CALLS = 512
_calls: dict[Any, Calls | None] = {}


@known_keywords
def norm_linear_gelu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 1e-5,
    approximate: str = "none",
    backend: str = "auto",
    *surplus: NoReturn,
    tile: Tile | None = None,
    **unknown: NoReturn,
) -> Tensor:
    """y = GELU(LayerNorm(x) Wᵀ + b), the functional form of `NormLinearGELU`.

    x [..., in], weight [out, in], bias [out], norm_weight and norm_bias [in] (both or neither);
    returns [..., out] in the dtype of weight, or in autocast's where it is on. backend: "triton"
    runs the fused kernels or raises BackendError; "torch" runs torch's operations; "auto" takes the
    kernels on GPUs for 16-bit floats and float32, outside of torch.func's transforms and of forward
    mode. Dtypes are equal; bias, norm_weight and norm_bias may be float32 beside 16 bits.

    >>> import torch
    >>> from assocscan.nn import norm_linear_gelu
    >>> norm_linear_gelu(torch.tensor([[1.0, 3.0]]), torch.eye(2))
    tensor([[-0.1587,  0.8413]])

    Raises ValueError for shapes, names and tiles that do not fit, TypeError for dtypes that differ.
    """
    if unknown or surplus or x is NOT_PASSED or weight is NOT_PASSED:
        refuse_call(norm_linear_gelu, surplus, unknown, x=x, weight=weight)
    key: Any = None
    if not is_dynamo_compiling():
        # Here and not in a helper: Dynamo would read one on its own.
        try:
            key = call_key(weight, bias, norm_weight, norm_bias, eps, approximate, backend, tile)
            function = _calls.get(key)
        except (TypeError, AttributeError):  # an argument that `check` refuses
            function = key = None
        if function is not None:
            given = tuple([t for t in (x, norm_weight, norm_bias, weight, bias) if t is not None])
            found = runner.call(function, given, 0, False, True, None, False, "auto")
            if found is not runner.MISS:
                return found  # type: ignore[no-any-return]
    check(x, weight, bias, norm_weight, norm_bias, eps, approximate, backend)
    check_tile(tile)
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):
        weight = weight.to(torch.get_autocast_dtype(x.device.type))
    elif x.dtype != weight.dtype:
        raise ScanTypeError(f"x is {x.dtype} and weight {weight.dtype}; cast one of them")
    operands = Operands(x, norm_weight, norm_bias, weight, bias)
    reason = why_not_fused(x, weight)
    if backend == "triton" and reason is not None:
        raise BackendError(f"the fused LayerNorm, Linear and GELU cannot run: {reason}")
    by_torch = reason is not None or (backend == "auto" and not x.is_cuda)
    if backend == "torch" or by_torch or 0 in (x.numel(), weight.numel()):
        return unfused(operands, eps, approximate)
    if x.dim() == 2:
        y = fused(operands, eps, approximate, tile)
    else:
        rows = Operands(x.reshape(-1, x.shape[-1]), *operands[1:])
        y = fused(rows, eps, approximate, tile).reshape(*x.shape[:-1], weight.shape[0])
    if not torch.compiler.is_compiling():
        repeated(key, operands, eps, approximate, backend, tile)
    return y


def call_key(
    weight: Tensor, bias: Any, norm_weight: Any, norm_bias: Any, eps: float, approximate: str,
    backend: str, tile: Tile | None,
) -> tuple[Any, ...]:  # fmt: skip
    """Everything that the runner does not see of the tensors: which there are, how products in
    float32 are computed, and whether autocast changes dtypes."""
    fast = weight.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision
    casts = torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")
    return (bias is None, norm_weight is None, norm_bias is None, eps, approximate, backend, tile,
            fast, casts)  # fmt: skip


def repeated(
    key: Any, tensors: Operands, eps: float, approximate: str, backend: str, tile: Tile | None
) -> None:
    """Count a fused call. From its second time on, the C++ runner is given it."""
    if any(t is not None and type(t) not in (Tensor, nn.Parameter) for t in tensors):
        return
    if needs_dispatcher() or torch.is_autocast_enabled(tensors.x.device.type):
        return
    if key is None:
        _, gamma, beta, weight, bias = tensors
        key = call_key(weight, bias, gamma, beta, eps, approximate, backend, tile)
    if key not in _calls:
        if len(_calls) >= MOST_CALLS:
            _calls.clear()
        _calls[key] = None
        runner.start(is_first=True)
    elif runner.module is None:
        runner.start(is_first=False)
    else:
        from . import programs

        function = _calls[key] or Calls()
        layer = programs.Layer(eps, approximate, tile, unfused)
        programs.tell(function, layer, tensors)
        _calls[key] = function


@checked_methods
class NormLinearGELU(nn.Module):
    """y = GELU(LayerNorm(x) Wᵀ + b), one fused matrix product on GPUs.

        LayerNorm(x) = (x − mean) / √(variance + eps) ⊙ γ + β     over the last dimension
        GELU(z) = z Φ(z), or with approximate="tanh" z σ(2 √(2/π) (z + 0.044715 z³))

    x [..., in_features] → y [..., out_features]. Parameters: weight [out, in] and bias [out] of the
    linear map, norm_weight γ and norm_bias β [in].

    On a GPU, for float16, bfloat16 and float32, Triton kernels compute it with float32 accumulators
    and statistics that are merged without cancellation; elsewhere torch's operations do. float32
    products have float32's accuracy, by three TF32 products each; plain TF32 runs only where torch
    allows it (`torch.backends.cuda.matmul.fp32_precision`, `allow_tf32`). The backward pass is
    torch's own, that of its LayerNorm, matrix product and GELU. tile: as in `norm_linear_gelu`.

    >>> import torch
    >>> from assocscan.nn import NormLinearGELU
    >>> NormLinearGELU(16, 32)(torch.randn(2, 50, 16)).shape
    torch.Size([2, 50, 32])

    Raises ValueError for an unknown `approximate`, a tile that cannot be, and x of another width.

    Cost per row: 2 · in · out flops; reads x, writes y (and z = LayerNorm(x) Wᵀ + b for backward).

    Source: J. L. Ba, J. R. Kiros, G. E. Hinton, "Layer normalization", arXiv 1607.06450;
    D. Hendrycks and K. Gimpel, "Gaussian error linear units", arXiv 1606.08415.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        eps: float = 1e-5,
        approximate: str = "none",
        *,
        tile: Tile | None = None,
    ) -> None:
        super().__init__()
        check_tile(tile)
        require_sizes(in_features=in_features, out_features=out_features)
        bias = flag("bias", bias)
        self.eps, self.approximate, self.tile = eps, approximate, tile
        self.norm_weight = nn.Parameter(torch.ones(in_features))
        self.norm_bias = nn.Parameter(torch.zeros(in_features))
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        check(self.norm_weight, self.weight, self.bias, self.norm_weight, self.norm_bias, eps,
              approximate, "auto")  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """y [..., out_features]."""
        return norm_linear_gelu(
            x, self.weight, self.bias, self.norm_weight, self.norm_bias, self.eps,
            self.approximate, tile=self.tile,
        )  # fmt: skip

    def extra_repr(self) -> str:
        out_features, in_features = self.weight.shape
        return f"{in_features}, {out_features}, approximate={self.approximate!r}"


def check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    approximate: str,
    backend: str,
) -> None:
    """Raise where types, shapes or names do not fit."""
    optional = {"bias": bias, "norm_weight": norm_weight, "norm_bias": norm_bias}
    given = {name: t for name, t in optional.items() if t is not None}
    for name, tensor in {"x": x, "weight": weight, **given}.items():
        # Other classes of tensors are left to torch's operations.
        if type(tensor) in (Tensor, nn.Parameter) or not isinstance(tensor, Tensor):
            check_tensor(name, tensor)
    check_dtypes(x, weight, given)
    require_number("eps", eps)
    if not isinstance(approximate, str) or approximate not in ("none", "tanh"):
        raise ScanValueError(f"approximate must be 'none' or 'tanh', got {shown(approximate)}")
    if not isinstance(backend, str) or backend not in BACKENDS:
        names = ", ".join(BACKENDS)
        raise ScanValueError(f"unknown backend {shown(backend)}; choose one of {names}")
    if (norm_weight is None) != (norm_bias is None):
        raise ScanValueError("norm_weight and norm_bias come together, or neither does")
    if weight.dim() != 2:
        raise ScanValueError(f"weight has shape {list(weight.shape)}, expected [out, in]")
    out_features, in_features = weight.shape
    if x.dim() == 0 or x.shape[-1] != in_features:
        raise ScanValueError(
            f"x has shape {list(x.shape)}, but weight {list(weight.shape)} needs {in_features} in "
            "its last dimension"
        )
    for name, t, size in (
        ("bias", bias, out_features),
        ("norm_weight", norm_weight, in_features),
        ("norm_bias", norm_bias, in_features),
    ):
        if t is not None and (t.dim() != 1 or t.shape[0] != size):
            raise ScanValueError(
                f"{name} has shape {list(t.shape)}, but weight {list(weight.shape)} needs [{size}]"
            )


def check_dtypes(x: Tensor, weight: Tensor, given: dict[str, Tensor]) -> None:
    """Raise where dtypes differ. Parameters may be float32 where what they meet has 16 bits;
    autocast converts all of them."""
    tensors = {"x": x, "weight": weight, **given}
    if any(type(t) not in (Tensor, nn.Parameter) for t in tensors.values()):
        return
    for name, t in tensors.items():
        if not t.dtype.is_floating_point:
            raise ScanTypeError(f"{name} is {t.dtype}, expected a real float")
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):
        return
    for name, t in given.items():
        other = "weight" if name == "bias" else "x"
        dtype = tensors[other].dtype
        if t.dtype != dtype and (t.dtype != torch.float32 or dtype.itemsize != 2):
            raise ScanTypeError(f"{name} is {t.dtype} and {other} {dtype}; cast one of them")
    norms = [given[name].dtype for name in ("norm_weight", "norm_bias") if name in given]
    if len(set(norms)) > 1:
        raise ScanTypeError(f"norm_weight is {norms[0]} and norm_bias {norms[1]}; cast one of them")


def why_not_fused(x: Tensor, weight: Tensor) -> str | None:
    """Why the Triton kernels cannot run; None where they can."""
    if not HAS_TRITON:
        return "Triton is not installed (it comes with torch's CUDA wheels)"
    if not torch.compiler.is_compiling() and in_functorch_or_forward_mode():
        return "a torch.func transform or forward mode is at work, which sees torch's operations"
    if not x.is_cuda and not (x.device.type == "cpu" and triton_loader.is_interpreting()):
        return f"x is on {x.device}, it runs on CUDA tensors"
    if x.dtype not in DTYPES or weight.dtype not in DTYPES:
        names = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        return f"x is {x.dtype} and weight {weight.dtype}; it takes {names}"
    return None


def unfused(operands: Operands, eps: float, approximate: str) -> Tensor:
    """The same by torch's operations."""
    x, gamma, beta, weight, bias = operands
    normal = F.layer_norm(x, x.shape[-1:], gamma, beta, eps)
    bias = None if bias is None else bias.to(weight.dtype)
    return F.gelu(F.linear(normal.to(weight.dtype), weight, bias), approximate=approximate)


def fused(operands: Operands, eps: float, approximate: str, tile: Tile | None) -> Tensor:
    """The same by Triton kernels, for x [M, in]."""
    from . import launch  # it defines the operator

    x, gamma, beta, weight, bias = operands
    needs = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands)
    if torch.compiler.is_compiling() or needs_dispatcher() or has_own_dispatch(operands):
        # Somebody looks at operations: of LayerNorm, compilers make a better kernel than ours.
        normal = F.layer_norm(x, x.shape[1:], gamma, beta, eps).to(weight.dtype)
        y: Tensor = torch.ops.assocscan.linear_gelu(
            normal, weight, bias, approximate == "tanh", needs
        )[0]
        return y
    if needs:
        return recorded(operands, eps, approximate, tile)
    return launch.norm_linear_gelu(operands, eps, approximate == "tanh", tile)


class Known(TorchDispatchMode):
    """Operations on the tensors that are given, inside, have results that are known already:
    autograd records them, and nothing is computed. Others, which hooks of saved tensors may run,
    are computed."""

    def __init__(self, *results: tuple[Any, tuple[Any, ...], Any]) -> None:
        super().__init__()
        self.results = {func: (inputs, result) for func, inputs, result in results}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs, result = self.results.get(func, (None, None))
        if inputs is not None and all(a is b for a, b in zip(args, inputs, strict=False)):
            del self.results[func]
            return result
        return func(*args, **(kwargs or {}))


def recorded(operands: Operands, eps: float, approximate: str, tile: Tile | None) -> Tensor:
    """By the kernels, with the gradients of `unfused`.

    Its operations are recorded with the kernels' results: so backward never enters Python, and has
    derivatives itself.
    """
    x, gamma, beta, weight, bias = operands
    if torch.is_autocast_enabled(x.device.type):
        with without_autocast(x.device.type):
            return recorded(operands, eps, approximate, tile)
    from . import launch

    aten, shape = torch.ops.aten, x.shape[1:]
    dtype = x.dtype if gamma is None else gamma.dtype
    if x.dtype == dtype == weight.dtype:
        normal = torch.native_layer_norm(x, shape, gamma, beta, eps)[0]
    else:  # LayerNorm would write x̂ in `dtype`, for another pass over it
        rows, mean, rstd = launch.normalize(x, gamma, beta, eps, weight.dtype, save=True)
        wide = x.to(dtype)
        if not x.is_cuda:  # whose LayerNorm keeps its statistics in the dtype of x
            mean, rstd = (None if t is None else t.to(dtype) for t in (mean, rstd))
        shown = rows if dtype == weight.dtype else wide.detach()
        with Known(
            (aten.native_layer_norm.default, (wide,), (shown, mean, rstd)),
            (aten._to_copy.default, (shown,), rows),
        ):
            normal = torch.native_layer_norm(wide, shape, gamma, beta, eps)[0].to(weight.dtype)
    y, z = launch.linear_gelu(normal, weight, bias, approximate == "tanh", True, tile)
    columns = weight.t()
    factors = (normal, columns)
    known = (aten.mm.default, factors) if bias is None else (aten.addmm.default, (bias, *factors))
    with Known((*known, z), (aten.gelu.default, (z,), y)):
        found = normal.mm(columns) if bias is None else torch.addmm(bias, normal, columns)
        return F.gelu(found, approximate=approximate)
