"""Every named function takes `backend` and `deterministic`, as `associative_scan` does."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import assocscan
from assocscan import (
    AssocScanError,
    BackendError,
    ScanTypeError,
    ScanValueError,
    associative_scan,
    explain,
    ops,
    reduce,
    windowed,
)
from assocscan.api import associative_scan as api
from assocscan.functional.nonlinear import nonlinear_recurrence
from assocscan.runtime.backends import availability
from assocscan.runtime.native import runner

F64 = torch.float64
Named = Callable[..., Any]


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.rand(shape, generator=generator, dtype=F64) + 0.5


x, flags, one = draw(9), torch.arange(9) % 3 == 1, torch.ones(1, 1, dtype=F64)
likely = draw(9, 2).log()
HIDDEN = {"initial": likely[0], "transition": likely[:2], "likelihood": likely}


def decayed(h: Tensor, x: Tensor, rate: Tensor) -> Tensor:
    return torch.tanh(rate * h + x)


# The functions, arguments, and the argument that errors of its scan call by name.
CALLS: dict[Named, tuple[dict[str, Any], str]] = {
    assocscan.cumsum: ({"x": x}, "x"),
    assocscan.cumprod: ({"x": x}, "x"),
    assocscan.cummax: ({"x": x}, "x"),
    assocscan.cummin: ({"x": x}, "x"),
    assocscan.logcumsumexp: ({"x": x}, "x"),
    assocscan.linear_recurrence: ({"a": x, "b": x, "init": x[0], "axis": 0}, "b"),
    assocscan.matrix_recurrence: (
        {"A": draw(2, 2) / 4, "b": draw(9, 2), "init": draw(2), "axis": 0}, "b",
    ),
    assocscan.selective_scan: (
        {"u": x[None, :, None], "delta": x[None, :, None], "A": one, "B": x[None, :, None],
         "C": x[None, :, None], "D": x[:1], "init": one[None]},
        "u",
    ),
    assocscan.nonlinear_recurrence: (
        {"step": decayed, "xs": x, "init": x[0], "axis": 0, "params": x[1]}, "xs",
    ),
    assocscan.lfilter: ({"b": draw(2), "a": draw(3), "x": x}, "x"),
    assocscan.sosfilt: ({"sos": draw(2, 6), "x": x}, "x"),
    assocscan.forward_fill: ({"x": x, "valid": flags}, "x"),
    assocscan.ewm_mean: ({"x": x, "alpha": x / 2}, "x"),
    assocscan.ewm_var: ({"x": x, "alpha": x[:1] / 2, "bias": True}, "x"),
    assocscan.run_lengths: ({"x": x.round()}, "x"),
    assocscan.compact: ({"x": x, "keep": flags}, "x"),
    assocscan.discounted_returns: (
        {"rewards": x, "discount": x, "done": flags, "bootstrap": x[0]}, "rewards",
    ),
    assocscan.gae: (
        {"rewards": x, "values": x, "bootstrap": x[0], "discount": x, "decay": x, "done": flags},
        "rewards",
    ),
    assocscan.vtrace: (
        {"log_ratios": x - 1, "rewards": x, "values": x, "bootstrap": x[0], "discount": x,
         "done": flags, "truncated": flags.flip(0), "next_values": x},
        "rewards",
    ),
    assocscan.hmm_filter: (HIDDEN, "likelihood"),
    assocscan.hmm_smoother: (HIDDEN, "likelihood"),
    assocscan.viterbi: (HIDDEN, "likelihood"),
    assocscan.kalman_filter: (
        {"y": x[:, None], "F": one, "H": one, "Q": one, "R": one, "mean": one[0],
         "covariance": one},
        "y",
    ),
    assocscan.rts_smoother: (
        {"mean": x[:, None], "covariance": draw(9, 1, 1), "F": one, "Q": one}, "mean",
    ),
}  # fmt: skip
SCANS: dict[Named, dict[str, Any]] = {
    associative_scan: {"op": ops.sum, "xs": x},
    reduce: {"op": ops.sum, "xs": x},
    explain: {"op": ops.sum, "xs": x},
    windowed: {"op": ops.sum, "xs": x, "width": 3},
}
every_function = pytest.mark.parametrize("function", CALLS, ids=lambda f: f.__name__)
PADDING = {"offsets_of", "lengths_of", "to_padded", "from_padded"}
# They scan nothing, or chunk after chunk; `windowed` is in `SCANS`.
OTHERS = {"explain_recurrence", "run_length_encode", "stream", "windowed", *PADDING}


def test_the_table_has_every_function() -> None:
    public = [getattr(assocscan, n) for n in assocscan.__all__ if n.islower()]
    named = {f.__name__ for f in public if getattr(f, "__module__", "").count(".functional.")}
    assert named - OTHERS == {f.__name__ for f in CALLS}


@pytest.mark.parametrize("function", [*CALLS, *SCANS], ids=lambda f: f.__name__)
def test_signatures(function: Named) -> None:
    """Keywords alone, so that arguments may come in between later."""
    known = inspect.signature(function).parameters
    for name in ("backend", "deterministic"):
        assert known[name].kind is inspect.Parameter.KEYWORD_ONLY
        default = "auto" if name == "backend" and function in SCANS else None
        assert known[name].default == default
    if function in CALLS:
        said = " ".join(str(function.__doc__).split())
        shared = "`backend` and `deterministic` mean what they mean in `associative_scan`."
        assert shared in said or "Everything else is as in `cum" in said


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The backends that scans of this test are made with, but for those that C++ answers."""
    found: list[str] = []

    def looking(asked: Callable[..., Any]) -> Callable[..., Any]:
        def look(*arguments: Any) -> Any:
            found.append(arguments[7])
            return asked(*arguments)

        return look

    monkeypatch.setattr(api, "entry_of", looking(api.entry_of))
    # Which asks C++ first, whatever `deterministic` is.
    asks_first = SimpleNamespace(call=looking(runner.call), MISS=runner.MISS)
    monkeypatch.setattr(nonlinear_recurrence, "runner", asks_first)
    return found


@pytest.mark.thinned(8)
@every_function
@pytest.mark.parametrize("backend", ["cpu", "eager", "auto", None])
def test_results_are_equal(function: Named, backend: str | None, asked: list[str]) -> None:
    arguments, _ = CALLS[function]
    want = function(**arguments)
    asked.clear()
    for deterministic in (True, None, None, None):  # the runner may answer the last ones
        got = function(**arguments, backend=backend, deterministic=deterministic)
        assert type(got) is type(want)
        for result, value in zip(tree_leaves(got), tree_leaves(want), strict=True):
            assert result.dtype == value.dtype
            torch.testing.assert_close(result, value)
    assert asked and set(asked) == {backend or "auto"}


def on_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) else value


@pytest.mark.slow(6)
@every_function
def test_a_backend_that_cannot_run(function: Named) -> None:
    """The error names the backend, the reason, and what the caller passed."""
    arguments, name = CALLS[function]
    with pytest.raises(BackendError, match="the cuda backend cannot run") as caught:
        function(**arguments, backend="cuda")
    reason = availability()["cuda"] or f"{name} is on cpu, it runs on tensors of NVIDIA GPUs"
    assert str(caught.value).endswith(reason)
    placed = {key: on_meta(value) for key, value in arguments.items()}
    with pytest.raises(BackendError, match=rf": {name} is on meta, it runs on CPU tensors"):
        function(**placed, backend="cpu")


def refusal(call: Callable[[], Any]) -> tuple[type[AssocScanError], str]:
    with pytest.raises(AssocScanError) as caught:
        call()
    return type(caught.value), str(caught.value)


@every_function
def test_wrong_values(function: Named) -> None:
    arguments, _ = CALLS[function]
    wrong: list[dict[str, Any]] = [
        {"backend": "gpu"}, {"backend": 3}, {"backend": ""}, {"backend": False},
        {"deterministic": "no"}, {"deterministic": 2},
    ]  # fmt: skip
    for given in wrong:
        want = refusal(lambda given=given: associative_scan(ops.sum, x, **given))
        assert want[0] is (ScanValueError if "backend" in given else ScanTypeError)
        assert refusal(lambda given=given: function(**arguments, **given)) == want


def test_wrong_values_where_nothing_is_scanned() -> None:
    b, a = draw(2), draw(1)
    torch.testing.assert_close(assocscan.lfilter(b, a, x, backend="cuda")[0], b[0] * x[0] / a[0])
    with pytest.raises(ScanValueError, match="unknown backend 'gpu'"):
        assocscan.lfilter(b, a, x, backend="gpu")
    with pytest.raises(ScanTypeError, match="deterministic is 'no'"):
        assocscan.lfilter(b, a, x, deterministic="no")  # type: ignore[arg-type]
    empty = x[:0]
    with pytest.raises(ScanValueError, match="unknown backend 'gpu'"):
        assocscan.gae(empty, empty, x[0], 0.9, 0.9, backend="gpu")
    with pytest.raises(BackendError, match="the cuda backend"):
        assocscan.gae(empty, empty, x[0], 0.9, 0.9, backend="cuda")


@pytest.mark.parametrize("function", CALLS, ids=lambda f: f.__name__)
def test_a_misspelt_keyword(function: Named) -> None:
    with pytest.raises(TypeError, match="backends"):
        function(**CALLS[function][0], backends="cpu")


@pytest.mark.parametrize("function", SCANS, ids=lambda f: f.__name__)
def test_none_is_auto(function: Named) -> None:
    arguments = SCANS[function]
    want = function(**arguments, backend="auto")
    for _ in range(3):
        got = function(**arguments, backend=None)
        assert torch.equal(got, want) if isinstance(got, Tensor) else got == want
    with pytest.raises(ScanValueError, match="unknown backend 'None'"):
        function(**arguments, backend="None")


@pytest.mark.thinned(7)
@every_function
def test_gradients(function: Named) -> None:
    arguments, _ = CALLS[function]
    differentiable = {
        key: value
        for key, value in arguments.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }

    def gradients(**engine: Any) -> tuple[Tensor | None, ...]:
        inputs = {k: t.detach().clone().requires_grad_() for k, t in differentiable.items()}
        results = tree_leaves(function(**{**arguments, **inputs}, **engine))
        tracked = [t for t in results if t.requires_grad]
        if not tracked:
            return ()
        weighted = [
            (t * torch.linspace(-1, 2, t.numel(), dtype=F64).view(t.shape)).sum() for t in tracked
        ]
        return torch.autograd.grad(
            torch.stack(weighted).sum(), list(inputs.values()), allow_unused=True
        )

    want = gradients()
    assert bool(want) is (function is not assocscan.run_lengths)
    for backend in ("cpu", "eager"):
        torch.testing.assert_close(gradients(backend=backend), want)


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each call that the runner in C++ was asked for, whether it knew it."""
    if runner.module is None:
        pytest.skip("the runner is not there")
    found: list[bool] = []
    call = runner.call

    def look(*arguments: Any) -> Any:
        result = call(*arguments)
        found.append(result is not runner.MISS)
        return result

    monkeypatch.setattr(runner, "call", look)
    return found


@pytest.mark.parametrize("backend", ["cpu", "auto", None])
@pytest.mark.parametrize("name", ["cumsum", "cumprod", "logcumsumexp", "linear_recurrence"])
def test_the_runner_answers(name: str, backend: str | None, answered: list[bool]) -> None:
    function = getattr(assocscan, name)
    arguments, _ = CALLS[function]
    want = function(**arguments, backend="eager")
    for _ in range(4):
        answered.clear()
        got = function(**arguments, backend=backend)
    assert answered == [True]
    torch.testing.assert_close(got, want)
    answered.clear()
    torch.testing.assert_close(function(**arguments, backend=backend, deterministic=True), want)
    assert answered == []
    with pytest.raises(ScanValueError, match="unknown backend"):
        function(**arguments, backend="gpu")


@pytest.fixture
def dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.thinned(7)
@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("backend", ["cpu", "eager", None])
@pytest.mark.parametrize("name", ["cumsum", "linear_recurrence", "gae", "lfilter"])
def test_torch_compile(name: str, backend: str | None) -> None:
    """One graph, whose scan is run by the backend."""
    function = getattr(assocscan, name)
    arguments, _ = CALLS[function]
    given = {k: v for k, v in arguments.items() if isinstance(v, Tensor)}
    options = {k: v for k, v in arguments.items() if k not in given}
    nodes: list[Any] = []

    def capture(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        nodes.extend(graph.graph.nodes)
        return graph.forward

    def call(given: dict[str, Any]) -> Any:
        return function(**given, **options, backend=backend, deterministic=True)

    from torch._dynamo.backends.common import aot_autograd

    compiler = aot_autograd(fw_compiler=capture)
    got = torch.compile(call, fullgraph=True, backend=compiler)(given)
    torch.testing.assert_close(got, function(**arguments))
    scans = [n for n in nodes if n.target is torch.ops.assocscan.scan.default]
    if backend == "eager":
        assert not scans
    else:
        # A filter changes its states first, by a scan of one step.
        assert [n.args[-1] for n in scans] == [backend or "auto"] * (2 if name == "lfilter" else 1)


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("name", ["cumsum", "linear_recurrence"])
def test_gradients_under_torch_compile(name: str) -> None:
    function = getattr(assocscan, name)
    arguments = {**CALLS[function][0]}
    key = "x" if name == "cumsum" else "b"

    def gradient(call: Named, **engine: Any) -> Tensor:
        t = arguments[key].clone().requires_grad_()
        (found,) = torch.autograd.grad(call(**{**arguments, key: t}, **engine).square().sum(), t)
        return found

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(gradient(compiled, backend="cpu"), gradient(function))
