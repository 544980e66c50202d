"""Every ATen operation of the table, generated as C++, against torch on edge values.

One kernel per dtype holds them all: a scan whose `lower` returns each operation's result.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from assocscan import Monoid, associative_scan
from assocscan.testing import reference_scan
from assocscan.trace.pointwise import DIRECT

pytestmark = pytest.mark.thinned(4)

Operation = Callable[[Tensor, Tensor], Tensor]

ARITHMETIC: dict[str, Operation] = {
    "add": lambda x, y: x + y,
    "add_alpha": lambda x, y: torch.add(x, y, alpha=3),
    "sub": lambda x, y: x - y,
    "rsub": lambda x, y: 2 - x,
    "mul": lambda x, y: x * y,
    "neg": lambda x, y: -x,
    "abs": lambda x, y: x.abs(),
    "sign": lambda x, y: x.sign(),
    "square": lambda x, y: x.square(),
    "minimum": torch.minimum,
    "maximum": torch.maximum,
    "clamp": lambda x, y: x.clamp(-2, 3),
    "clamp_min": lambda x, y: x.clamp(min=1),
    "clamp_max": lambda x, y: x.clamp(max=1),
    "clamp_min_scalar": lambda x, y: torch.clamp_min(x, 1),
    "clamp_max_scalar": lambda x, y: torch.clamp_max(x, 1),
    "clamp_tensor": lambda x, y: torch.clamp(x, min=y),
    "where": lambda x, y: torch.where(x > y, x, y * 2),
    "where_scalar": lambda x, y: torch.where(x > 0, x, 1),
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
    "gt_scalar": lambda x, y: x > 1.5,
    "logical_and": torch.logical_and,
    "logical_or": torch.logical_or,
    "logical_xor": torch.logical_xor,
    "logical_not": lambda x, y: torch.logical_not(x),
    "isnan": lambda x, y: torch.isnan(x),
    "isinf": lambda x, y: torch.isinf(x),
    "isfinite": lambda x, y: torch.isfinite(x),
    "relu": lambda x, y: torch.relu(x),
    "true_divide": lambda x, y: x / y,
    "pow_2": lambda x, y: x**2,
    "to_float": lambda x, y: x.to(torch.float32),
    "to_double": lambda x, y: x.to(torch.float64),
    "to_bool": lambda x, y: x.to(torch.bool),
    "full_like": lambda x, y: torch.full_like(x, 2),
    "lerp": lambda x, y: torch.lerp(x * 1.0, y * 1.0, 0.25),
    "addcmul": lambda x, y: torch.addcmul(x, x, y),
}

REAL: dict[str, Operation] = {
    "fmin": torch.fmin,
    "fmax": torch.fmax,
    "signbit": lambda x, y: torch.signbit(x),
    "copysign": torch.copysign,
    "reciprocal": lambda x, y: x.reciprocal(),
    "floor": lambda x, y: x.floor(),
    "ceil": lambda x, y: x.ceil(),
    "round": lambda x, y: x.round(),
    "trunc": lambda x, y: x.trunc(),
    "frac": lambda x, y: x.frac(),
    "floor_divide": lambda x, y: torch.floor_divide(x, y),
    "trunc_divide": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "remainder": torch.remainder,
    "fmod": torch.fmod,
    "to_int64": lambda x, y: x.clamp(-1000, 1000).nan_to_num().to(torch.int64),
    "to_int8": lambda x, y: x.clamp(-100, 100).nan_to_num().to(torch.int8),
    "sqrt": lambda x, y: x.sqrt(),
    "rsqrt": lambda x, y: x.rsqrt(),
    "exp": lambda x, y: x.exp(),
    "exp2": lambda x, y: x.exp2(),
    "expm1": lambda x, y: x.expm1(),
    "log": lambda x, y: x.log(),
    "log2": lambda x, y: x.log2(),
    "log10": lambda x, y: x.log10(),
    "log1p": lambda x, y: x.log1p(),
    "logaddexp": torch.logaddexp,
    "softplus": lambda x, y: torch.nn.functional.softplus(x),
    "gelu": lambda x, y: torch.nn.functional.gelu(x),
    "gelu by tanh": lambda x, y: torch.nn.functional.gelu(x, approximate="tanh"),
    "leaky relu": lambda x, y: torch.nn.functional.leaky_relu(x, 0.2),
    "hardtanh": lambda x, y: torch.nn.functional.hardtanh(x, -0.4, 0.7),
    "sigmoid": lambda x, y: x.sigmoid(),
    "silu": lambda x, y: torch.nn.functional.silu(x),
    "sin": lambda x, y: x.clamp(-50, 50).sin(),
    "cos": lambda x, y: x.clamp(-50, 50).cos(),
    "tan": lambda x, y: x.clamp(-1.5, 1.5).tan(),
    "asin": lambda x, y: x.asin(),
    "acos": lambda x, y: x.acos(),
    "atan": lambda x, y: x.atan(),
    "sinh": lambda x, y: x.sinh(),
    "cosh": lambda x, y: x.cosh(),
    "tanh": lambda x, y: x.tanh(),
    "asinh": lambda x, y: x.asinh(),
    "acosh": lambda x, y: x.acosh(),
    "atanh": lambda x, y: x.atanh(),
    "erf": lambda x, y: x.erf(),
    "erfc": lambda x, y: x.erfc(),
    "atan2": torch.atan2,
    "hypot": torch.hypot,
    "pow": lambda x, y: x.abs().pow(y.clamp(-3, 3)),
    "pow_half": lambda x, y: x**0.5,
    "pow_3": lambda x, y: x**3,
    "pow_minus_2": lambda x, y: x**-2,
    "pow_base": lambda x, y: 2.0**x,
    "round_trip_bf16": lambda x, y: x.to(torch.bfloat16).to(torch.float32),
    "round_trip_f16": lambda x, y: x.to(torch.float16).to(torch.float32),
}

INTEGER: dict[str, Operation] = {
    "bitwise_and": torch.bitwise_and,
    "bitwise_or": torch.bitwise_or,
    "bitwise_xor": torch.bitwise_xor,
    "bitwise_not": lambda x, y: ~x,
    "shift_left": lambda x, y: x << y.abs().clamp(0, 6),
    "shift_right": lambda x, y: x >> y.abs().clamp(0, 6),
    "gcd": torch.gcd,
    "floor_divide": lambda x, y: torch.floor_divide(x, torch.where(y == 0, 3, y)),
    "trunc_divide": lambda x, y: torch.div(x, torch.where(y == 0, 3, y), rounding_mode="trunc"),
    "remainder": lambda x, y: torch.remainder(x, torch.where(y == 0, 3, y)),
    "fmod": lambda x, y: torch.fmod(x, torch.where(y == 0, 3, y)),
    "pow": lambda x, y: x.pow(y.abs().clamp(0, 5)),
    "to_uint8": lambda x, y: x.to(torch.uint8),
    "to_int8": lambda x, y: x.to(torch.int8),
}

BOOLEAN = ("eq", "ne", "logical_and", "logical_or", "logical_xor", "logical_not", "to_float",
           "maximum", "minimum", "mul", "add", "where")  # fmt: skip


def scan_all(operations: dict[str, Operation], x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Every operation's result, through the generated engine."""

    def every(state: Any, xs: Any) -> dict[str, Tensor]:
        return {name: operation(*xs) for name, operation in operations.items()}

    keep = Monoid(lambda left, right: right, name="keep", lower=every)
    result: dict[str, Tensor] = associative_scan(keep, (x, y), 0, backend="cpu")
    return result


def pairs(values: Tensor) -> tuple[Tensor, Tensor]:
    return tuple(torch.cartesian_prod(values, values).unbind(1))  # type: ignore[return-value]


def clamped(x: Tensor, low: int | None, high: int | None) -> Tensor:
    """clamp, also for bounds that an integer dtype cannot hold (torch before 2.15 wraps them)."""
    wide = x if x.is_floating_point() else x.long()
    return wide.clamp(low, high).to(x.dtype)


# What torch before 2.15 computes otherwise, with what is right.
CORRECTED: dict[str, Operation] = {"clamp": lambda x, y: clamped(x, -2, 3)}


def compare(operations: dict[str, Operation], x: Tensor, y: Tensor) -> None:
    for name, got in scan_all(operations, x, y).items():
        wanted = CORRECTED.get(name, operations[name])(x, y)
        assert got.dtype == wanted.dtype, name
        torch.testing.assert_close(got, wanted, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_floating_point(dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).tiny
    values = [0.0, -0.0, 1.0, -1.0, 0.5, -0.3, 1.5, 2.5, -2.5, 7.0, 30.0, -80.0, tiny, tiny / 8,
              1e30, float("inf"), float("-inf"), float("nan")]  # fmt: skip
    compare(ARITHMETIC | REAL, *pairs(torch.tensor(values, dtype=dtype)))


@pytest.mark.thinned(4)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_integers(dtype: torch.dtype) -> None:
    info = torch.iinfo(dtype)
    values = [0, 1, 2, 3, 7, 100, info.max, info.max - 1]
    values += [] if dtype == torch.uint8 else [-1, -2, -7, -100, info.min + 1]
    compare(ARITHMETIC | INTEGER, *pairs(torch.tensor(values, dtype=dtype)))


def test_booleans() -> None:
    chosen = {name: ARITHMETIC[name] for name in BOOLEAN if name != "where"}
    compare(chosen, *pairs(torch.tensor([False, True])))


def test_the_table_is_covered() -> None:
    tested = set(ARITHMETIC) | set(REAL) | set(INTEGER)
    renamed = {"bitwise_left_shift", "bitwise_right_shift", "__lshift__", "__rshift__"}
    assert set(DIRECT) - renamed <= tested
    assert len(tested) >= 60


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64])
def test_undefined_behaviour_is_defined(dtype: torch.dtype) -> None:
    low = torch.iinfo(dtype).min
    bits = torch.iinfo(dtype).bits
    x = torch.tensor([5, -5, low, low, 1, -8, 3], dtype=dtype)
    y = torch.tensor([0, 0, -1, 0, bits, bits, -1], dtype=dtype)
    got = scan_all(
        {
            "floor": lambda a, b: torch.floor_divide(a, b),
            "trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
            "remainder": torch.remainder,
            "fmod": torch.fmod,
            "left": lambda a, b: a << b,
            "right": lambda a, b: a >> b,
        },
        x,
        y,
    )
    for name in ("floor", "trunc", "remainder", "fmod"):
        assert got[name][[0, 1, 3]].tolist() == [0, 0, 0], name
    assert got["floor"][2] == low
    assert got["trunc"][2] == low
    assert got["left"][4:].tolist() == [0, 0, 0]
    assert got["right"][4:].tolist() == [0, -1, 0]


def test_casts_out_of_range_do_not_trap() -> None:
    x = torch.tensor([1e30, -1e30, float("inf"), float("nan"), 3.7, -3.7])
    got = scan_all({"i64": lambda a, b: a.long(), "i8": lambda a, b: a.to(torch.int8)}, x, x)
    assert got["i64"][4:].tolist() == [3, -3]
    assert got["i8"][4:].tolist() == [3, -3]


COMPLEX: dict[str, Operation] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "real_times": lambda x, y: 2.5 * x,
    "conj": lambda x, y: x.conj() * y,
    "abs": lambda x, y: x.abs(),
    "angle": lambda x, y: x.angle(),
    "real": lambda x, y: x.real,
    "imag": lambda x, y: x.imag,
    "exp": lambda x, y: x.exp(),
    "log": lambda x, y: x.log(),
    "sqrt": lambda x, y: x.sqrt(),
    "square": lambda x, y: x**2,
    "reciprocal": lambda x, y: x.reciprocal(),
    "sgn": lambda x, y: x.sgn(),
    "complex": lambda x, y: torch.complex(x.real, y.imag),
    "polar": lambda x, y: torch.polar(x.abs(), y.angle()),
    "view_as_real": lambda x, y: torch.view_as_real(x).sum(-1),
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "where": lambda x, y: torch.where(x.real > 0, x, y),
}


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex(dtype: torch.dtype) -> None:
    parts = torch.tensor([1.0, -2.0, 0.5, 3.0, -0.25])
    values = torch.complex(*pairs(parts)).to(dtype)
    compare(COMPLEX, *pairs(values))


ELEMENT: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda m: m.sum(),
    "sum_dim": lambda m: m.sum(0),
    "mean": lambda m: m.mean(-1, keepdim=True),
    "prod": lambda m: m.prod(0),
    "amax": lambda m: m.amax(1),
    "amin": lambda m: m.amin(0),
    "max": lambda m: m.max(),
    "any": lambda m: (m > 1).any(),
    "all": lambda m: (m > -5).all(1),
    "var": lambda m: m.var(0),
    "norm": lambda m: m.norm(),
    "logsumexp": lambda m: m.logsumexp(0),
    "softmax": lambda m: m.softmax(-1),
    "cumsum": lambda m: m.cumsum(1),
    "mm": lambda m: m @ m,
    "mv": lambda m: m @ m[0],
    "dot": lambda m: torch.dot(m[0], m[1]),
    "outer": lambda m: torch.outer(m[0], m[1]),
    "einsum": lambda m: torch.einsum("ij,kj->ik", m, m),
    "addmm": lambda m: torch.addmm(m, m, m, alpha=2.0, beta=0.5),
    "bmm": lambda m: torch.stack([m, m]) @ torch.stack([m.T, m]),
    "transpose": lambda m: m.mT,
    "permute": lambda m: m.permute(1, 0),
    "view": lambda m: m.reshape(-1),
    "select": lambda m: m[1],
    "slice": lambda m: m[:, 1:],
    "cat": lambda m: torch.cat([m, m[:1]]),
    "stack": lambda m: torch.stack([m[0], m[2]], -1),
    "expand": lambda m: m[:1].expand(3, 3),
    "diagonal": lambda m: m.diagonal(),
    "trace": lambda m: m.trace(),
    "diag_embed": lambda m: torch.diag_embed(m[0]),
    "eye": lambda m: m + torch.eye(3, dtype=m.dtype),
    "tril": lambda m: m.tril(),
    "triu": lambda m: m.triu(1),
    "flip": lambda m: m.flip(0),
    "roll": lambda m: m.roll(1, 0),
    "unbind": lambda m: m.unbind(1)[2],
    "index": lambda m: m[[2, 0]],
    "squeeze": lambda m: m.unsqueeze(0).squeeze(0),
    "repeat": lambda m: m.repeat(2, 1),
    "pad": lambda m: torch.nn.functional.pad(m, (1, 0), value=2.0),
    "arange": lambda m: m * torch.arange(3, dtype=m.dtype),
    "cross": lambda m: torch.linalg.cross(m[0], m[1]),
    "write": lambda m: write_corner(m),
}


def write_corner(m: Tensor) -> Tensor:
    result = torch.zeros_like(m)
    result[0, 0] = m[1, 1]
    result[1:, 2] += m[1:, 0]
    return result


@pytest.mark.parametrize("part", range(4))
def test_matrix_elements(part: int) -> None:
    names = list(ELEMENT)[part::4]

    def every(state: Tensor) -> dict[str, Tensor]:
        return {name: ELEMENT[name](state) for name in names}

    keep = Monoid(lambda left, right: right, name="keep", element_ndim=2, lower=every)
    m = torch.randn(6, 3, 3, dtype=torch.float64)
    got = associative_scan(keep, m, 0, backend="cpu")
    wanted = reference_scan(keep, m, 0)
    for name in names:
        torch.testing.assert_close(got[name], wanted[name], msg=lambda s, n=name: f"{n}: {s}")


@pytest.mark.parametrize("backend", ["cpu", "eager"])
def test_detached_values_pass_no_gradient(backend: str) -> None:
    """y = x · detach(x) has the derivative x, not 2x."""
    op = Monoid(lambda left, right: left + right, name="detached", lift=lambda x: x * x.detach())
    x = torch.tensor([3.0, 5.0], dtype=torch.float64, requires_grad=True)
    y = associative_scan(op, x, backend=backend)
    assert y.tolist() == [9.0, 34.0]
    assert torch.autograd.grad(y[1], x)[0].tolist() == [3.0, 5.0]


def check_slopes(name: str, function: Callable[..., Tensor], *xs: Tensor, **options: Any) -> None:
    op = Monoid(lambda a, b: a + b, identity=0.0, name=f"{name}_slopes", lift=function)
    leaves = tuple(x.requires_grad_() for x in xs)
    results = associative_scan(op, leaves if len(leaves) > 1 else xs[0], **options), function(*xs)
    torch.testing.assert_close(*results, equal_nan=True)
    slopes = [torch.autograd.grad(y.sum(), leaves) for y in results]
    torch.testing.assert_close(*slopes, equal_nan=True)


@pytest.mark.parametrize("name", ["softplus", "elu", "selu", "celu"])
def test_slopes_where_one_of_two_formulas_overflows(name: str) -> None:
    """Each is one formula below a bound and another above, whose exponential overflows there."""
    x = torch.tensor([[-1e30, -100.0, -1.0, 0.0, 2.0, 19.9, 20.0, 88.0, 100.0, 1e30]])
    check_slopes(name, getattr(torch.nn.functional, name), x)


@pytest.mark.parametrize("name", ["gelu", "leaky_relu", "hardtanh", "relu6"])
def test_slopes_of_activations(name: str) -> None:
    """Also at their bounds."""
    x = torch.tensor([[-9.0, -1.0, -0.3, 0.0, 0.2, 1.0, 5.9, 6.0, 7.0]], dtype=torch.float64)
    check_slopes(name, getattr(torch.nn.functional, name), x, backend="cpu")


def test_slopes_of_xlogy() -> None:
    """The derivative by x is log y where x is 0 too."""
    x = torch.tensor([[0.0, 0.0, 2.0, 0.0, float("nan")]], dtype=torch.float64)
    y = torch.tensor([[3.5, 0.5, 3.0, -1.0, 2.0]], dtype=torch.float64)
    check_slopes("xlogy", torch.xlogy, x, y, backend="cpu")
