"""Tensor subclasses: those with a `__torch_function__` are handed the call, as by torch functions;
classes of which a scan is not defined are refused."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor

import assocscan
from assocscan import AssocScanError, ScanTypeError, associative_scan, ops, reduce
from assocscan.functional.packing.jagged import OF_OPERATORS, RULES
from assocscan.nn import rglru


class Plain(Tensor):
    """Takes `__torch_function__` over from Tensor."""


class Derived(Plain):
    pass


class Unrelated(Tensor):
    pass


class Recording(Tensor):
    """Writes down which functions it is handed."""

    seen: ClassVar[list[Any]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


class Answering:
    """No tensor at all: every function that is handed it returns what it was called with."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func, types, args, kwargs


class Pair(NamedTuple):
    a: Any
    b: Any


x, flags, one = torch.rand(4) + 0.5, torch.tensor([True, False, True, True]), torch.ones(1, 1)
likely, gates = torch.rand(4, 2).log(), torch.rand(1, 4, 2)


def decayed(h: Tensor, x: Tensor, rate: Tensor) -> Tensor:
    return torch.tanh(rate * h + x)


# Public functions with arguments that they take, and in each call some that may be of any class.
CALLS: dict[Callable[..., Any], dict[str, Any]] = {
    associative_scan: {"op": ops.sum, "xs": x, "init": x[0]},
    reduce: {"op": ops.sum, "xs": x, "init": x[0]},
    assocscan.windowed: {"op": ops.sum, "xs": x, "width": 2},
    assocscan.cumsum: {"x": x, "reset": flags},
    assocscan.cumprod: {"x": x, "reset": flags},
    assocscan.cummax: {"x": x, "reset": flags},
    assocscan.cummin: {"x": x, "reset": flags},
    assocscan.logcumsumexp: {"x": x, "reset": flags},
    assocscan.linear_recurrence: {"a": x, "b": x, "init": x[0], "axis": 0, "reset": flags},
    assocscan.matrix_recurrence: {"A": torch.eye(2), "b": gates[0], "init": gates[0, 0], "axis": 0},
    assocscan.selective_scan: {
        "u": gates, "delta": gates, "A": -torch.ones(gates.shape[2], 1), "B": gates[..., :1],
        "C": gates[..., :1], "D": gates[0, 0], "z": gates, "delta_bias": gates[0, 0],
        "init": gates[:, 0, :, None],
    },
    assocscan.nonlinear_recurrence: {"step": decayed, "xs": x, "init": x[0], "axis": 0,
                                     "params": x[1], "reset": flags},
    assocscan.lfilter: {"b": x, "a": x, "x": x},
    assocscan.sosfilt: {"sos": torch.rand(2, 6) + 0.5, "x": x},
    assocscan.forward_fill: {"x": x, "valid": flags},
    assocscan.ewm_mean: {"x": x, "alpha": x / 2},
    assocscan.ewm_var: {"x": x, "alpha": x / 2, "bias": True},
    assocscan.run_lengths: {"x": x},
    assocscan.run_length_encode: {"x": x},
    assocscan.compact: {"x": x, "keep": flags},
    assocscan.discounted_returns: {"rewards": x, "discount": x, "done": flags, "bootstrap": x[0],
                                   "truncated": ~flags, "next_values": x},
    assocscan.gae: {"rewards": x, "values": x, "bootstrap": x[0], "discount": x, "decay": x,
                    "done": flags, "truncated": ~flags, "next_values": x},
    assocscan.vtrace: {"log_ratios": x, "rewards": x, "values": x, "bootstrap": x[0], "discount": x,
                       "done": flags, "truncated": ~flags, "next_values": x},
    assocscan.hmm_filter: {"initial": likely[0], "transition": likely[:2], "likelihood": likely},
    assocscan.hmm_smoother: {"initial": likely[0], "transition": likely[:2], "likelihood": likely,
                             "observed": flags},
    assocscan.viterbi: {"initial": likely[0], "transition": likely[:2], "likelihood": likely},
    assocscan.kalman_filter: {"y": x[:, None], "F": one, "H": one, "Q": one, "R": one,
                              "mean": one[0], "covariance": one, "controls": x[:, None], "B": one,
                              "observed": flags},
    assocscan.rts_smoother: {"mean": x[:, None], "covariance": x[:, None, None], "F": one,
                             "Q": one, "controls": x[:, None], "B": one},
    assocscan.offsets_of: {"lengths": torch.tensor([1, 3])},
    assocscan.lengths_of: {"offsets": torch.tensor([0, 1, 4])},
    assocscan.to_padded: {"x": x, "offsets": torch.tensor([0, 1, 4])},
    assocscan.from_padded: {"x": x.view(2, 2), "lengths": torch.tensor([1, 2])},
    rglru: {"x": gates, "recurrence": gates, "gate": gates, "decay": x[:2], "state": gates[0, :1]},
}  # fmt: skip
TENSORS = [
    (function, name)
    for function, arguments in CALLS.items()
    for name, value in arguments.items()
    if isinstance(value, Tensor)
]
every_tensor = pytest.mark.parametrize(
    "function,name", TENSORS, ids=[f"{f.__name__}-{n}" for f, n in TENSORS]
)


def test_the_table_has_every_function() -> None:
    without_tensors = {
        "explain", "explain_recurrence", "monoid", "monoids", "product", "reversed_order",
        "segmented", "stream", "with_lift", "with_lower",
    }  # fmt: skip
    public = {n for n in assocscan.__all__ if callable(getattr(assocscan, n)) and n.islower()}
    assert public - without_tensors == {f.__name__ for f in CALLS} - {"rglru"}


def leaves_of(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


@pytest.mark.thinned(12)
@every_tensor
@pytest.mark.parametrize("kind", [Plain, Recording])
def test_the_class_of_any_argument_is_kept(
    function: Callable[..., Any], name: str, kind: Any
) -> None:
    arguments = CALLS[function]
    want = function(**arguments)
    Recording.seen.clear()
    got = function(**{**arguments, name: arguments[name].as_subclass(kind)})
    assert type(got) is (kind if isinstance(want, Tensor) else type(want))
    for result, value in zip(leaves_of(got), leaves_of(want), strict=True):
        assert type(result) is kind
        assert torch.equal(result.as_subclass(Tensor), value)
    if kind is Recording:
        assert Recording.seen.count(function) == 1


@pytest.mark.parametrize("function", CALLS, ids=lambda f: f.__name__)
def test_what_the_class_answers_is_returned(function: Callable[..., Any]) -> None:
    """With the function, and the arguments in their places."""
    name = next(name for f, name in TENSORS if f is function)
    given = {**CALLS[function], name: Answering()}
    if "backend" in inspect.signature(function).parameters:
        given |= {"backend": "eager", "deterministic": True}
    func, types, args, kwargs = function(**given)
    assert func is function and types == (Answering,)
    bound = inspect.signature(function).bind(*args, **kwargs).arguments
    for key, value in given.items():
        assert bound[key] is value


def halves(left: Any, right: Any) -> Any:
    return {"a": left["a"] + right["a"] / 2}


def paired(left: Pair, right: Pair) -> Pair:
    return Pair(left.a * right.a, left.b + right.b)


def test_structures_of_leaves() -> None:
    own = x.as_subclass(Plain)
    for xs in ((own, x), (x, own)):
        results = associative_scan(ops.affine, xs)
        assert [type(t) for t in results] == [Plain, Plain]
    ys, final = associative_scan(ops.affine, (x, x), init=(own[0], 0.0), return_final=True)
    assert all(type(t) is Plain for t in (*ys, *final))
    assert type(associative_scan(halves, {"a": own})["a"]) is Plain
    pair = associative_scan(paired, Pair(x, own))
    assert type(pair) is Pair and type(pair.a) is type(pair.b) is Plain
    assert type(associative_scan(ops.sum, own, backend="eager")) is Plain
    assert type(associative_scan(ops.sum, x, offsets=torch.tensor([0, 4]).as_subclass(Plain))) is (
        Plain
    )


def test_classes_that_meet() -> None:
    """The one that is a subclass of all others decides, as in torch's functions."""
    base, derived = x.as_subclass(Plain), x.as_subclass(Derived)
    assert type(torch.add(base, derived)) is Derived
    for xs in ((base, derived), (derived, base)):
        assert all(type(t) is Derived for t in associative_scan(ops.affine, xs))
    with pytest.raises(TypeError, match=r"no implementation found for .*associative_scan"):
        associative_scan(ops.affine, (base, x.as_subclass(Unrelated)))


def test_classes_without_the_protocol() -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    assert type(associative_scan(ops.sum, torch.nn.Parameter(x))) is Tensor
    assert type(assocscan.cumsum(torch.nn.Parameter(x))) is Tensor
    with FakeTensorMode():
        assert isinstance(associative_scan(ops.sum, torch.ones(4)), FakeTensor)


def test_gradients() -> None:
    own = x.clone().as_subclass(Plain).requires_grad_()
    y = associative_scan(ops.sum, own)
    assert type(y) is Plain
    y.sum().backward()
    assert own.grad is not None and own.grad.tolist() == [4.0, 3.0, 2.0, 1.0]


def shifted(left: Tensor, right: Tensor) -> Tensor:
    return left + right


COMPILED: list[Callable[[Any], Any]] = [
    lambda v: associative_scan(ops.sum, v),
    lambda v: associative_scan(shifted, v),
    lambda v: associative_scan(ops.affine, (v, v))[1],
    lambda v: reduce(ops.sum, v),
    lambda v: assocscan.cumsum(v),
    lambda v: assocscan.cummax(v).values,
    lambda v: assocscan.linear_recurrence(0.5, v, axis=0),
    lambda v: assocscan.linear_recurrence(0.5, v, axis=0, return_final=True)[1],
]


class Silent(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


@functools.cache
def takes_subclasses() -> bool:
    """Whether torch itself runs a graph of AOTAutograd on a subclass; 2.11 does not."""
    try:
        torch.compile(torch.sin, backend="aot_eager")(x.as_subclass(Plain))
    except TypeError:
        return False
    return True


@pytest.mark.thinned(7)
@pytest.mark.parametrize("kind", [Plain, Silent])
@pytest.mark.parametrize("number", range(len(COMPILED)))
def test_compiled_calls_keep_the_class(kind: Any, number: int) -> None:
    torch._dynamo.reset()
    function, own = COMPILED[number], x.as_subclass(kind)
    backend = "aot_eager" if takes_subclasses() else "eager"
    got = torch.compile(function, fullgraph=True, backend=backend)(own)
    assert type(got) is kind
    torch.testing.assert_close(got.as_subclass(Tensor), function(x), rtol=1e-6, atol=0)


def nested(t: Tensor, layout: torch.layout) -> Tensor:
    parts = [t, t] if t.dim() else [t[None], t[None]]
    return torch.nested.nested_tensor(parts, layout=layout)


def masked(t: Tensor) -> Any:
    from torch.masked import masked_tensor

    return masked_tensor(t, torch.ones_like(t, dtype=torch.bool))


def distributed(t: Tensor) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    return distribute_tensor(t, init_device_mesh("cpu", (1,)), [Replicate()])


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    if not torch.distributed.is_available():
        pytest.skip("torch was built without torch.distributed")
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


# Tensors that stand for something else, and what is said of them.
OTHERS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "sparse": (Tensor.to_sparse, ".to_dense()"),
    "nested": (lambda t: nested(t, torch.strided), "offsets="),
    "jagged": (lambda t: nested(t, torch.jagged), "offsets="),
    "quantized": (
        lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
        ".dequantize()",
    ),
    "mkldnn": (lambda t: t.float().reshape(-1).to_mkldnn(), ".to_dense()"),
    "masked": (masked, ".to_tensor(value)"),
    "distributed": (distributed, ".to_local()"),
}


# Jagged tensors in the place of these are scanned, or refused for their axis: `test_jagged`.
OF_JAGGED = {
    (f, key)
    for f in CALLS
    for key in (RULES[f.__name__].series if f.__name__ in RULES else ())
} | {(getattr(assocscan, name), "xs") for name in OF_OPERATORS}  # fmt: skip
OF_DTENSORS = {"associative_scan", "reduce", "cumsum", "cumprod", "logcumsumexp"}


@every_tensor
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.usefixtures("one_rank")
def test_other_tensors_are_refused(function: Callable[..., Any], name: str, other: str) -> None:
    make, remedy = OTHERS[other]
    if other == "jagged" and (function, name) in OF_JAGGED:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # prototypes
        given = {**CALLS[function], name: make(CALLS[function][name])}
        if name == "x" and other == "distributed":
            given.pop("reset", None)  # a mask of DTensors is not taken
        if other == "distributed" and name in ("x", "xs") and function.__name__ in OF_DTENSORS:
            assert type(function(**given)) is type(given[name])
            return
        with pytest.raises(ScanTypeError) as caught:
            function(**given)
    assert isinstance(caught.value, AssocScanError)
    assert str(caught.value).startswith(name) and remedy in str(caught.value)
