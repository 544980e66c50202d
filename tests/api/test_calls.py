"""Calls that do not fit, of every public function, layer and method: unknown keywords, arguments
that are missing, too many or of another kind. All are refused in our own words."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn, ones
from torch import distributed as dist

import assocscan
from assocscan import AssocScanError, Monoid, ScanTypeError, ops, segmented
from assocscan import nn as layers
from assocscan.monoids.call_errors import checked_call, checked_methods

x, y = torch.linspace(0.1, 0.9, 5), ones(2, 5, 3)
square, one = torch.eye(3), ones(1, 1)
likelihood = torch.full((4, 3), -1.0)


def decaying(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(0.5 * h + x)


# A call of each public function that fits, by its arguments' names.
FUNCTIONS: dict[str, dict[str, Any]] = {
    "associative_scan": {"op": ops.sum, "xs": x},
    "reduce": {"op": ops.sum, "xs": x},
    "explain": {"op": ops.sum, "xs": x},
    "windowed": {"op": ops.sum, "xs": x, "width": 2},
    **{name: {"x": y, "axis": 1} for name in ("cumsum", "cumprod", "cummax", "cummin")},
    "logcumsumexp": {"x": y},
    "linear_recurrence": {"a": y, "b": y, "init": y[:, 0]},
    "discounted_returns": {"rewards": x, "discount": 0.9, "done": x > 2, "bootstrap": x[0]},
    "gae": {"rewards": x, "values": x, "bootstrap": x[0], "discount": 0.9, "decay": 0.9},
    "vtrace": {"log_ratios": x, "rewards": x, "values": x, "bootstrap": x[0], "discount": 0.9,
               "clip_rho": 2.0},
    "lfilter": {"b": x[:2], "a": x[:2], "x": x},
    "matrix_recurrence": {"A": square, "b": y, "init": y[:, 0]},
    "nonlinear_recurrence": {"step": lambda h, x, p: torch.tanh(p * h + x), "xs": y,
                             "init": y[:, 0], "params": ones(3)},
    "explain_recurrence": {"step": lambda h, x, p: torch.tanh(p * h + x), "xs": y,
                           "init": y[:, 0], "params": ones(3)},
    "hmm_filter": {"initial": x[:3], "transition": square, "likelihood": likelihood},
    "hmm_smoother": {"initial": x[:3], "transition": square, "likelihood": likelihood,
                     "pairs": True},
    "viterbi": {"initial": x[:3], "transition": square, "likelihood": likelihood},
    "kalman_filter": {"y": ones(4, 1), "F": one, "H": one, "Q": one, "R": one, "mean": one[0],
                      "covariance": one},
    "rts_smoother": {"mean": ones(4, 1), "covariance": ones(4, 1, 1), "F": one, "Q": one},
    "selective_scan": {"u": y, "delta": y, "A": -ones(3, 2), "B": ones(2, 5, 2),
                       "C": ones(2, 5, 2), "D": ones(3), "z": y},
    "sosfilt": {"sos": ones(2, 6), "x": x},
    "forward_fill": {"x": x, "valid": x > 0.5},
    "ewm_mean": {"x": x, "alpha": 0.5},
    "ewm_var": {"x": x, "alpha": 0.5, "bias": True},
    "run_lengths": {"x": x},
    "run_length_encode": {"x": x},
    "compact": {"x": x, "keep": x > 0.5},
    "offsets_of": {"lengths": torch.tensor([3, 2])},
    "lengths_of": {"offsets": torch.tensor([0, 3, 5])},
    "to_padded": {"x": x, "offsets": torch.tensor([0, 3, 5]), "value": 1.0, "axis": 0},
    "from_padded": {"x": y[0], "lengths": torch.tensor([3, 2, 0, 1, 1])},
    "stream": {"op": ops.sum, "chunks": [x, x]},
    "segmented": {"op": ops.sum},
    "reversed_order": {"op": ops.sum},
    "with_lift": {"op": ops.sum, "fn": torch.square},
    "with_lower": {"op": ops.sum, "fn": torch.square},
    "monoid": {"fn": torch.minimum, "name": "least_of_test_calls"},
    "Monoid": {"combine": torch.minimum, "identity": 1.0, "element_ndim": 0},
    "Monoid.__call__": {"left": x, "right": x},
    "Monoid.identity_like": {"xs": x},
    "Monoid.source": {"target": "cpp", "like": x},
    "Monoid.check": {"like": x, "samples": 5},
    "nn.rglru": {"x": y, "recurrence": y, "gate": y, "decay": ones(3), "state": y[:, 0]},
    "nn.norm_linear_gelu": {"x": y, "weight": ones(4, 3), "bias": ones(4), "eps": 1e-5},
    "distributed.associative_scan": {"op": ops.sum, "xs": x},
    "distributed.reduce": {"op": ops.sum, "xs": x},
    "distributed.linear_recurrence": {"a": x, "b": x, "axis": 0},
}  # fmt: skip
LAYERS: dict[str, dict[str, Any]] = {
    "RGLRU": {"width": 4, "heads": 2},
    "LRU": {"features": 4, "states": 4, "min_radius": 0.9},
    "S5": {"features": 4, "states": 4, "min_step": 0.01},
    "Hawk": {"features": 4, "width": 4, "heads": 2, "conv_width": 4},
    "Mamba": {"features": 4, "states": 2, "expand": 2, "conv_width": 4, "dt_rank": 1},
    "MatrixLRU": {"features": 4, "heads": 2, "size": 2},
    "DiagonalGRU": {"features": 4, "width": 4},
    "DiagonalLSTM": {"features": 4, "width": 4},
    "DiagonalSLSTM": {"features": 4, "width": 4},
    "CausalConv": {"channels": 4, "width": 3},
    "AdaptiveRankSemiseparable": {"features": 4, "rank": 2, "gate_width": 1, "conv_width": 3},
    "BlockLinear": {"features": 4, "out_features": 4, "heads": 2},
    "NormLinearGELU": {"in_features": 4, "out_features": 4},
    "Bidirectional": {"forward_layer": layers.LRU(4), "backward_layer": layers.LRU(4)},
    "NormLinearTile": {"block_m": 64, "block_n": 64, "block_k": 64, "warps": 4, "stages": 2,
                       "staged": True, "per_sm": 1},
}  # fmt: skip
METHODS = [(name, "forward") for name in LAYERS if hasattr(getattr(layers, name), "forward")]
METHODS += [(name, "step") for name, _ in METHODS if hasattr(getattr(layers, name), "step")]


def public(name: str) -> Callable[..., Any]:
    """`nn.rglru`, `Monoid.check` (of a monoid), …"""
    if name.startswith("Monoid."):
        return getattr(ops.sum, name.partition(".")[2])  # type: ignore[no-any-return]
    found: Any = assocscan
    for part in name.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def method(name: str, of: str) -> Callable[..., Any]:
    layer = getattr(layers, name)(**LAYERS[name])
    return layer if of == "forward" else getattr(layer, of)  # type: ignore[no-any-return]


CALLABLES: list[Any] = [
    *(pytest.param(lambda name=name: public(name), id=name) for name in FUNCTIONS),
    *(pytest.param(lambda name=name: getattr(layers, name), id=name) for name in LAYERS),
    *(pytest.param(lambda pair=pair: method(*pair), id=".".join(pair)) for pair in METHODS),
]


def parameters(called: Callable[..., Any]) -> list[inspect.Parameter]:
    fn = called.forward if isinstance(called, nn.Module) else called
    return list(inspect.signature(fn).parameters.values())


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """A process group of one rank."""
    if dist.is_initialized():
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1
        )
        yield
        dist.destroy_process_group()


def test_the_tables_are_complete() -> None:
    """Whoever adds a public function adds a call that fits."""
    names = set(FUNCTIONS) | {f"nn.{name}" for name in LAYERS}
    of_package = {n for n in assocscan.__all__ if inspect.isfunction(getattr(assocscan, n))}
    of_layers = {f"nn.{n}" for n in layers.__all__}
    over_ranks = {f"distributed.{n}" for n in assocscan.distributed.__all__}
    # `product` takes operators, as many as there are; `monoids` takes nothing.
    assert of_package | of_layers | over_ranks <= names | {"product", "monoids"}


@pytest.mark.parametrize("find", CALLABLES)
def test_unknown_keywords(find: Callable[[], Callable[..., Any]]) -> None:
    with pytest.raises(ScanTypeError, match=r"\(\) has no argument 'zzz'; its arguments are \w"):
        find()(zzz=1)


@pytest.mark.parametrize("find", CALLABLES)
def test_missing_arguments(find: Callable[[], Callable[..., Any]]) -> None:
    called = find()
    named = [p for p in parameters(called) if p.kind is not p.VAR_KEYWORD]
    required = [p.name for p in named if p.default is p.empty]
    if not required:
        assert called in (assocscan.monoid, ops.sum.check)
        return
    with pytest.raises(ScanTypeError, match=rf"needs {required[0]}\b.*not passed"):
        called()


@pytest.mark.parametrize("find", CALLABLES)
def test_too_many_arguments(find: Callable[[], Callable[..., Any]]) -> None:
    called = find()
    positional = [p for p in parameters(called) if p.kind is p.POSITIONAL_OR_KEYWORD]
    with pytest.raises(ScanTypeError, match=rf"by position.* got {len(positional) + 1}"):
        called(*[None] * (len(positional) + 1))


@pytest.mark.parametrize("find", CALLABLES)
def test_signatures_are_shown_as_declared(find: Callable[[], Callable[..., Any]]) -> None:
    kinds = {p.kind for p in parameters(find())}
    assert inspect.Parameter.VAR_POSITIONAL not in kinds
    assert inspect.Parameter.VAR_KEYWORD not in kinds or find() is assocscan.monoid


class Other:
    """What no function takes."""


STRANGE: list[Any] = [np.ones(3), Other()]
MORE: list[Any] = [
    [1.0, 2.0], (1.0, 2.0), "a", 1.5, torch.tensor(1.0), torch.tensor(1), {"a": 1}, ones(0),
    ones(1, 1, 1, 1, 5), square.to_sparse(), ones(5, device="meta"), y.long(), [x], (x, x),
    x.to(torch.complex64), x.half(), -1,
]  # fmt: skip


def refused_or_taken(called: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Whatever does not run raises an error of our own."""
    try:
        result = called(**arguments)
        if inspect.isgenerator(result):
            list(result)
    except AssocScanError:
        pass


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "strange",
    [*STRANGE, *(pytest.param(value, marks=pytest.mark.exhaustive) for value in MORE)],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_of_another_kind(name: str, strange: Any) -> None:
    called, fitting = public(name), FUNCTIONS[name]
    for p in parameters(called):
        if p.kind is not p.VAR_KEYWORD:
            refused_or_taken(called, {**fitting, p.name: strange})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_another_kind(name: str) -> None:
    for p in inspect.signature(getattr(layers, name)).parameters:
        for strange in (*STRANGE, *MORE):
            refused_or_taken(getattr(layers, name), {**LAYERS[name], p: strange})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("pair", METHODS, ids=".".join)
def test_inputs_of_layers_of_another_kind(pair: tuple[str, str]) -> None:
    called = method(*pair)
    good = ones(2, 5, 4) if pair[1] == "forward" else ones(2, 4)
    for p in parameters(called):
        for strange in STRANGE:
            refused_or_taken(called, {"x": good, p.name: strange})


a, values = torch.rand(5), torch.rand(5)
ELSEWHERE: list[tuple[Callable[[], Any], list[str]]] = [
    (lambda: layers.Mamba(d_model=16, d_state=8, d_conv=4, expand=2),
     ["Mamba() has no", "pass features=16", "pass states=8", "pass conv_width=4"]),
    (lambda: layers.LRU(d_model=8, d_hidden=4, r_min=0.5),
     ["pass features=8", "pass states=4", "pass min_radius=0.5"]),
    (lambda: layers.RGLRU(dim=8, num_heads=2), ["pass width=8", "pass heads=2"]),
    (lambda: layers.CausalConv(dim=8), ["pass channels=8"]),
    (lambda: layers.RGLRU(8)(ones(1, 2, 8), places=1), ["RGLRU.forward() has no", "x, state"]),
    (lambda: layers.LRU(8).step(ones(1, 8), initial_state=None), ["LRU.step()", "pass state="]),
    (lambda: assocscan.linear_recurrence(gates=a, tokens=a), ["pass a=…", "pass b=…"]),
    (lambda: assocscan.gae(a, values, 0.9, 0.9),
     ["needs rewards, values, bootstrap, discount and decay, and decay was not passed",
      "bootstrap: 0.9, discount: 0.9"]),
    (lambda: assocscan.gae(a, values, a[0], gamma=0.9, lam=0.8),
     ["pass discount=0.9", "pass decay=0.8"]),
    (lambda: assocscan.gae(a, values, a[0], 0.9, 0.9, rewards=a), ["got rewards twice"]),
    (lambda: assocscan.hmm_filter(initial_probs=a, transition_matrix=a, log_likelihoods=a),
     ["pass initial=…", "pass transition=…", "pass likelihood=…"]),
    (lambda: assocscan.kalman_filter(a, foo=1), ["'foo'; its arguments are y, F, H"]),
    (lambda: assocscan.selective_scan(y, y, y, y, y, return_last_state=True),
     ["pass return_final=True"]),
    (lambda: assocscan.cumsum(input=a, dim=0), ["pass x=…", "pass axis=0"]),
    (lambda: assocscan.cumsum(a, packed_info=a), ["offsets=", "[S + 1]"]),
    (lambda: assocscan.cumprod(a, ray_indices=a), ["torch.searchsorted(ray_indices, "]),
    (lambda: assocscan.cumsum(a, lengths=a), ["offsets_of(lengths)"]),
    (lambda: assocscan.monoid(identiy=0.0), ["monoid() has no", "pass identity=0.0"]),
    (lambda: ops.sum.check(smaples=3), ["Monoid.check() has no", "pass samples=3"]),
    (lambda: assocscan.product(op=ops.sum), ["product() has no argument 'op'"]),
    (lambda: assocscan.linear_recurrence(b=a), ["needs a and b, and a was not passed"]),
    (lambda: assocscan.windowed(ops.sum, a, window=3), ["the number of steps is width"]),
    (lambda: assocscan.windowed(ops.sum, a, 3, min_periods=2, center=True),
     ["windowed(ops.count, ~x.isnan(), width, axis)", "'center': ", "docs/windows.md"]),
    (lambda: layers.DiagonalGRU(8, batch_first=True), ["x is [B, L, features]: leave it out"]),
    (lambda: layers.DiagonalLSTM(8, num_layers=2, bidirectional=True),
     ["this is one layer", "assocscan.nn.Bidirectional"]),
    (lambda: assocscan.run_lengths(a, offsets=a),
     ["assocscan.to_padded(x, offsets, axis=…)", "and pass axis=1"]),
    (lambda: assocscan.compact(a, a > 0, offsets=a), ["assocscan.to_padded(x, offsets, axis=…)"]),
]  # fmt: skip


@pytest.mark.parametrize("call,mentions", ELSEWHERE, ids=[f"{k}" for k in range(len(ELSEWHERE))])
def test_names_of_other_libraries(call: Callable[[], Any], mentions: list[str]) -> None:
    with pytest.raises(ScanTypeError) as caught:
        call()
    for words in mentions:
        assert words in str(caught.value)


def test_resets_of_other_libraries() -> None:
    """They are called `reset` here; of functions without it a call is named that does the same."""
    mask = torch.tensor([True, False, False, True, False])
    with pytest.raises(ScanTypeError, match=r"no argument 'reset_mask': pass reset=…"):
        assocscan.cumsum(a, axis=0, reset_mask=mask)  # type: ignore[arg-type]
    with pytest.raises(ScanTypeError) as caught:
        assocscan.lfilter(a[:2], a[:2], a, 0, reset=mask)
    assert "reverse" not in str(caught.value) and "as offsets=" in str(caught.value)
    with pytest.raises(ScanTypeError) as caught:
        assocscan.associative_scan(ops.sum, a, 0, reset=mask)  # type: ignore[call-overload]
    assert "associative_scan(segmented(op), (xs, reset))" in str(caught.value)
    got = assocscan.associative_scan(segmented(ops.sum), (a, mask), 0)
    torch.testing.assert_close(got, torch.cat([a[:3].cumsum(0), a[3:].cumsum(0)]))


def test_dir_lists_what_is_public() -> None:
    listed = {name for name in dir(assocscan) if not name.startswith("__")}
    assert listed == {*assocscan.__all__, "distributed", "nn", "testing"}


def test_a_type_error_from_inside_is_left_as_it_is() -> None:
    """Also one that Python raises for a call that the function makes."""

    def inner(a: int) -> int:
        return a

    @checked_call
    def outer(a: int) -> int:
        return inner(a, 2)  # type: ignore[call-arg]

    with pytest.raises(TypeError, match=r"inner\(\) takes 1 positional") as caught:
        outer(1)
    assert not isinstance(caught.value, ScanTypeError)
    with pytest.raises(ScanTypeError, match=r"outer\(\) needs a, which was not passed"):
        outer()  # type: ignore[call-arg]


def test_a_layer_derived_from_ours_has_its_own_arguments() -> None:
    @checked_methods
    class Base(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()

    class Derived(Base):
        def __init__(self, width: int, depth: int) -> None:
            super().__init__(width)

    with pytest.raises(TypeError, match="depth") as caught:
        Derived(3)  # type: ignore[call-arg]
    assert not isinstance(caught.value, ScanTypeError)
    with pytest.raises(ScanTypeError, match="Base"):
        Base()  # type: ignore[call-arg]


def test_a_compiled_function_says_it_too() -> None:
    def wrong(v: Tensor) -> Any:
        return assocscan.discounted_returns(v, gamma=0.9)  # type: ignore[call-arg]

    torch._dynamo.reset()
    with pytest.raises(ScanTypeError, match=r"pass discount=0\.9"):
        torch.compile(wrong, backend="eager")(a)
    torch._dynamo.reset()


def test_an_unhashable_argument_of_a_combinator() -> None:
    pair = assocscan.with_lift(ops.affine, lambda p: p, element_ndim=[0, 0])
    assert isinstance(pair, Monoid) and pair.element_ndim == [0, 0]


def test_the_identity_of_a_number() -> None:
    assert ops.sum.identity_like(torch.tensor(3.0)).shape == ()
