"""Repeated calls of `selective_scan`: what the C++ runner answers is what the first call gave."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from selective_loops import Tensors, draw
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from assocscan import BackendError, ScanTypeError, ScanValueError, selective_scan
from assocscan.api.caches.function_cache import FunctionCache
from assocscan.api.caches.scan_of_views import ScanOfViews
from assocscan.functional.selective_scan import CALLS, NAMES, OPTIONAL, call_of, scan_channels
from assocscan.nn import Mamba
from assocscan.runtime.native import build, runner

pytestmark = pytest.mark.skipif(build.why_not() is not None, reason="the runner cannot be built")
NODE = "ScanBackward"


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """The runner is there, and knows no call."""
    runner.load()
    assert runner.module is not None
    CALLS.calls.clear()
    yield


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One entry for each call that the runner did not answer."""
    calls: list[Any] = []
    run = CALLS.run

    def counting(options: Any, tensors: Any) -> Any:
        calls.append(options)
        return run(options, tensors)

    monkeypatch.setattr(CALLS, "run", counting)
    return calls


def by_associative_scan(given: Tensors, *flags: bool) -> tuple[Tensor, ...]:
    """The results by `associative_scan`; flags: softplus, reverse, return_final."""
    softplus, reverse, final = flags or (False,) * 3
    lacks = tuple(n not in given for n in (*OPTIONAL, "init"))
    return call_of((lacks, softplus, reverse, final, None), in_order(given))


def in_order(given: Tensors) -> list[Tensor]:
    return [given[name] for name in NAMES if name in given]


def as_tuple(found: Any) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def results(given: Tensors, **options: Any) -> tuple[Tensor, ...]:
    return as_tuple(scan_channels(**given, **options))


def gradients(found: tuple[Tensor, ...], given: Tensors, **options: Any) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    seeds = [torch.randn(y.shape, generator=generator, dtype=y.dtype) for y in found]
    wanted = [t for t in in_order(given) if t.requires_grad]
    return torch.autograd.grad(found, wanted, seeds, materialize_grads=True, **options)


def same_bits(found: Any, expected: Any) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)


def leaves(dtype: torch.dtype = torch.float32, wanted: Any = None, **options: Any) -> Tensors:
    given = draw(**options)
    return {
        name: t.to(dtype).requires_grad_(wanted is None or name in wanted)
        for name, t in given.items()
    }


SUBSETS = [(), ("D", "z"), OPTIONAL]
FLAGS = list(itertools.product([False, True], repeat=4))


@pytest.mark.thinned(18)
@pytest.mark.parametrize("optional", SUBSETS, ids=str)
@pytest.mark.parametrize(("softplus", "reverse", "init", "final"), FLAGS)
def test_every_repetition_gives_the_same_bits(
    optional: tuple[str, ...], softplus: bool, reverse: bool, init: bool, final: bool,
    counted: list[Any],
) -> None:  # fmt: skip
    given = leaves(optional=optional, init=init, groups=2)
    options: Any = {"delta_softplus": softplus, "reverse": reverse, "return_final": final}
    first = results(given, **options)
    expected = gradients(first, given)
    other = by_associative_scan(given, softplus, reverse, final)
    torch.testing.assert_close(first, other)
    torch.testing.assert_close(expected, gradients(other, given), rtol=1e-5, atol=1e-6)
    for repetition in range(4):
        found = results(given, **options)
        assert found[0].grad_fn is not None
        same_bits(found, first)
        same_bits(gradients(found, given), expected)
        assert len(counted) == min(repetition + 2, 2)
    assert found[0].grad_fn.name() == NODE
    with torch.no_grad():
        for _ in range(3):
            same_bits(results(given, **options), first)
        assert len(counted) == 4


@pytest.mark.thinned(54)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "wanted", [("u",), ("A", "D"), ("B", "init"), ("z", "delta_bias", "delta")], ids=str
)
def test_dtypes_and_some_gradients(
    dtype: torch.dtype, wanted: tuple[str, ...], counted: list[Any]
) -> None:
    given = leaves(dtype, wanted)
    if dtype is not torch.float64:
        given["init"] = given["init"].detach().float().requires_grad_("init" in wanted)
    first = results(given, return_final=True)
    expected = gradients(first, given)
    for _ in range(3):
        found = results(given, return_final=True)
        same_bits(found, first)
        same_bits(gradients(found, given), expected)
    assert len(counted) == 2


def test_strides_and_repeated_tensors(counted: list[Any]) -> None:
    """Views of one tensor, the same tensor twice, channels before steps, other places in memory."""
    one = leaves()
    z = one["u"]
    for given in (
        {**one, "z": z},
        {n: t.mT.contiguous().mT if t.dim() == 3 and n != "init" else t for n, t in one.items()},
        {**one, "u": torch.cat([z, z], -1).chunk(2, -1)[1]},
    ):
        counted.clear()
        first = results(given)
        wanted = [one[n] for n in one if n != "init"]
        g = torch.randn_like(first[0])
        expected = torch.autograd.grad(first[0], wanted, g, allow_unused=True)
        for _ in range(3):
            found = results(given)
            same_bits(found, first)
            again = torch.autograd.grad(found[0], wanted, g, allow_unused=True)
            for a, b in zip(again, expected, strict=True):
                assert (a is None and b is None) or torch.equal(a, b)
        assert len(counted) == 2


def test_cotangents_of_any_layout_and_of_some_results() -> None:
    given = leaves()
    wanted = in_order(given)
    for _ in range(3):
        y, last = results(given, return_final=True)
    dense = torch.autograd.grad(y, wanted, torch.ones_like(y), retain_graph=True)
    for _ in range(3):
        y, last = results(given, return_final=True)
        same_bits(torch.autograd.grad(y.sum(), wanted, retain_graph=True), dense)
        turned = torch.ones_like(y.mT).contiguous().mT
        same_bits(torch.autograd.grad(y, wanted, turned, retain_graph=True), dense)
        some = torch.autograd.grad(last.sum(), wanted, allow_unused=True)
        assert some[NAMES.index("C")] is None or not some[NAMES.index("C")].any()


def warmed_up(**options: Any) -> tuple[Tensors, Tensor]:
    """Arguments, and y of a call that the runner answers."""
    given = leaves(**options)
    for _ in range(3):
        y = selective_scan(**given)
    gradients((y,), given, retain_graph=True)
    assert y.grad_fn is not None and y.grad_fn.name() == NODE
    return given, y


def test_second_derivatives_batches_and_hooks() -> None:
    given, y = warmed_up(dtype=torch.float64)
    wanted = in_order(given)
    once = torch.autograd.grad(y.square().sum(), wanted, create_graph=True)
    twice = torch.autograd.grad(sum(g.square().sum() for g in once), wanted)
    (z,) = by_associative_scan(given)
    right = torch.autograd.grad(z.square().sum(), wanted, create_graph=True)
    torch.testing.assert_close(once, right)
    right = torch.autograd.grad(sum(g.square().sum() for g in right), wanted)
    torch.testing.assert_close(twice, right)
    batch = torch.randn(3, *y.shape, dtype=y.dtype)
    y = selective_scan(**given)
    together = torch.autograd.grad(y, wanted, batch, is_grads_batched=True, retain_graph=True)
    for k in range(3):
        alone = torch.autograd.grad(y, wanted, batch[k], retain_graph=True)
        torch.testing.assert_close([part[k] for part in together], list(alone))
    seen: list[Tensor] = []
    hook = given["A"].register_hook(seen.append)
    expected = gradients((y,), given, retain_graph=True)
    hook.remove()
    assert torch.equal(seen[0], expected[NAMES.index("A")])
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        y = selective_scan(**given)
    same_bits(gradients((y,), given), expected)
    with torch.autograd.set_detect_anomaly(True):
        same_bits(gradients((selective_scan(**given),), given), expected)


def test_transforms_see_operations() -> None:
    given, _ = warmed_up(dtype=torch.float64)
    names = [n for n in NAMES if n in given]

    def loss(*tensors: Tensor) -> Tensor:
        return selective_scan(**dict(zip(names, tensors, strict=True))).sin().sum()

    tensors = in_order(given)
    expected = torch.autograd.grad(loss(*tensors), tensors)
    plain = [t.detach() for t in tensors]
    found = torch.func.grad(loss, tuple(range(len(names))))(*plain)
    torch.testing.assert_close(list(found), list(expected))
    many = [torch.stack([t, t]) for t in plain]
    mapped = torch.func.vmap(loss)(*many)
    torch.testing.assert_close(mapped, torch.stack([loss(*plain)] * 2))


def test_checkpoints_and_errors_of_autograd() -> None:
    given, y = warmed_up()
    expected = gradients((y,), given)
    names = [n for n in NAMES if n in given]
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(3))
    for reentrant in (False, True):
        for t in given.values():
            t.grad = None
        again: Any = checkpoint(
            lambda *t: selective_scan(**dict(zip(names, t, strict=True))), *in_order(given),
            use_reentrant=reentrant,
        )  # fmt: skip
        again.backward(g)
        same_bits([t.grad for t in in_order(given)], expected)
    y = selective_scan(**given)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()
    y = selective_scan(**given)
    with torch.no_grad():
        given["B"].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_arguments_are_checked_after_many_calls() -> None:
    given, _ = warmed_up()
    with pytest.raises(ScanValueError, match="A has shape"):
        selective_scan(**{**given, "A": given["A"][:-1]})
    with pytest.raises(ScanTypeError, match="u is"):
        selective_scan(**{**given, "u": given["u"].tolist()})
    with pytest.raises(ScanTypeError, match="delta_softplus"):
        selective_scan(**given, delta_softplus=[1])  # type: ignore[call-overload]
    with pytest.raises(ScanValueError, match="unknown backend"):
        selective_scan(**given, backend="gpu")
    with pytest.raises(ScanTypeError, match="deterministic"):
        selective_scan(**given, deterministic="yes")  # type: ignore[call-overload]
    y = selective_scan(**given)
    same_bits([selective_scan(**given, deterministic=True)], [y])
    with pytest.raises(ScanTypeError, match="delta_softplus"):
        selective_scan(**given, delta_softplus=0.0)  # type: ignore[call-overload]
    with pytest.raises(ScanTypeError, match="reverse"):
        scan_channels(**given, reverse="yes")  # type: ignore[arg-type]
    same_bits([selective_scan(**given, backend="auto", delta_softplus=0)], [y])  # type: ignore[call-overload]


def test_offsets_are_checked_at_every_call() -> None:
    given = leaves(steps=11, init=True, sequences=2)
    offsets = torch.tensor([0, 4, 11])
    first = as_tuple(selective_scan(**given, offsets=offsets, return_final=True))
    expected = gradients(first, given)
    for _ in range(3):
        found = as_tuple(selective_scan(**given, offsets=offsets, return_final=True))
        same_bits(found, first)
        same_bits(gradients(found, given), expected)
    for k, end in enumerate((0, 4)):
        part = {n: t[:, end : (4, 11)[k]] if t.dim() == 3 and n != "init" else t
                for n, t in given.items()}  # fmt: skip
        part["init"] = given["init"][k]
        y, last = selective_scan(**part, return_final=True)
        torch.testing.assert_close(y, first[0][:, end : (4, 11)[k]])
        torch.testing.assert_close(last, first[1][k])
    with pytest.raises(ScanValueError, match="offsets"):
        selective_scan(**given, offsets=torch.tensor([0, 12, 11]), return_final=True)
    moved = selective_scan(**given, offsets=torch.tensor([0, 5, 11]))
    assert not torch.equal(moved, first[0])


def test_init_of_another_dtype() -> None:
    """It is converted: `init` has the gradient of the conversion."""
    given = leaves()
    given["init"] = given["init"].detach().bfloat16().requires_grad_()
    wide = {**given, "init": given["init"].detach().float().requires_grad_()}
    for _ in range(3):
        y, h = selective_scan(**given, return_final=True)
        right = selective_scan(**wide, return_final=True)
        same_bits((y, h), right)
        (narrow,) = torch.autograd.grad(y.sum() + h.sum(), given["init"])
        (exact,) = torch.autograd.grad(right[0].sum() + right[1].sum(), wide["init"])
        assert narrow.dtype == torch.bfloat16 and torch.equal(narrow, exact.bfloat16())


def test_under_autocast(counted: list[Any]) -> None:
    given, y = warmed_up()
    with torch.autocast("cpu", torch.bfloat16):
        counted.clear()
        same_bits([selective_scan(**given)], [y])
    assert not counted


def test_layer_is_answered_too(counted: list[Any]) -> None:
    layer, x = Mamba(8, states=4), torch.randn(2, 9, 8)
    parameters = list(layer.parameters())
    first = torch.autograd.grad(layer(x)[0].sum(), parameters)
    for _ in range(4):
        y, state = layer(x)
        same_bits(torch.autograd.grad(y.sum() + 0 * state.scan.sum(), parameters), first)
    assert len(counted) == 2


def test_without_the_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    given, y = warmed_up()
    expected = gradients((y,), given)
    monkeypatch.setattr(runner, "call", runner.never)
    monkeypatch.setattr(runner, "module", None)
    monkeypatch.setattr(runner, "start", lambda is_first: None)
    for _ in range(3):
        found = selective_scan(**given)
        same_bits([found], [y])
        same_bits(gradients((found,), given), expected)


def test_no_tensors_are_kept() -> None:
    given, y = warmed_up(optional=("D",))
    gradients((y,), given)
    watched = [StorageWeakRef(t.untyped_storage()) for t in given.values()]
    del given, y
    gc.collect()
    assert all(ref.expired() for ref in watched)
    assert kept()


def kept() -> list[Any]:
    """What is kept of the calls, with all options."""
    return [prepared for calls in CALLS.calls.values() for prepared in calls.values()]


EXPANDED = [(n, d) for n in ("u", "delta", "B", "C", "z") for d in range(3)]
EXPANDED += [("A", 0), ("A", 1), ("D", 0), ("delta_bias", 0)]


@pytest.mark.thinned(9)
@pytest.mark.parametrize(("name", "dim"), EXPANDED, ids=str)
def test_arguments_that_the_caller_expanded(name: str, dim: int) -> None:
    one = leaves(torch.float64)
    narrow = one[name].detach().narrow(dim, 0, 1).clone().requires_grad_()
    for _ in range(4):
        given = {**one, name: narrow.expand(one[name].shape)}
        (y,) = results(given)
        (z,) = by_associative_scan(given)
        g = torch.randn_like(y)
        wanted = [narrow, *(t for n, t in one.items() if n != name and n != "init")]
        torch.testing.assert_close(
            torch.autograd.grad(y, wanted, g), torch.autograd.grad(z, wanted, g)
        )


@pytest.mark.parametrize("pack", [torch.Tensor.contiguous, torch.clone], ids=["dense", "clone"])
def test_hooks_that_change_strides(pack: Any) -> None:
    """Tensors that autograd saved may come back with other strides than they went."""
    one = leaves(torch.float64)
    turned = {n: t.mT.contiguous().mT if t.dim() == 3 else t for n, t in one.items()}
    u, z = torch.cat([one["u"], one["z"]], -1).chunk(2, -1)
    for given in (turned, {**one, "u": u, "z": z}):
        (right,) = by_associative_scan(given)
        wanted = in_order(one)
        expected = torch.autograd.grad(right.sum(), wanted, retain_graph=True)
        for _ in range(3):
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                (y,) = results(given)
            found = torch.autograd.grad(y.sum(), wanted, retain_graph=True)
            torch.testing.assert_close(found, expected)
            (y,) = results(given)
            found = torch.autograd.grad(y.sum(), wanted, retain_graph=True)
            torch.testing.assert_close(found, expected)


def test_results_may_be_changed_in_place() -> None:
    given = leaves()
    expected = None
    for _ in range(5):
        y, h = results(given, return_final=True)
        y += 1
        h.mul_(2)
        found = torch.autograd.grad(y.sum() + h.sum(), in_order(given))
        if expected is not None:
            same_bits(found, expected)
        expected = found
        with torch.no_grad():
            y, h = results(given, return_final=True)
        y *= torch.ones((), requires_grad=True)
        assert y.requires_grad and not y._is_view() and not h._is_view()


def test_mapped_gradients() -> None:
    """torch.func.vmap over torch.autograd.grad of one result."""
    given = leaves(torch.float64)
    for _ in range(4):
        (y,) = results(given)
        g = torch.randn(3, *y.shape, dtype=y.dtype)
        found = torch.func.vmap(
            lambda v, y=y: torch.autograd.grad(y, in_order(given), v, retain_graph=True)
        )(g)
        for k in range(3):
            alone = torch.autograd.grad(y, in_order(given), g[k], retain_graph=True)
            torch.testing.assert_close([t[k] for t in found], list(alone))


@pytest.mark.parametrize("backend", [[], {}], ids=str)
def test_options_that_cannot_be_hashed(backend: Any) -> None:
    given, _ = warmed_up()
    with pytest.raises(ScanValueError, match="unknown backend"):
        selective_scan(**given, backend=backend)
    with pytest.raises(ScanValueError, match="offsets must have shape"):
        selective_scan(**given, offsets=torch.tensor(3))


def test_an_error_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a kernel fails when it runs, `auto` goes another way and a named backend raises."""
    given = leaves()
    (right,) = by_associative_scan(given)
    expected = gradients((right,), given)

    def failing(self: Any, tensors: Any) -> Any:
        raise BackendError("no memory left")

    monkeypatch.setattr(runner, "call", runner.never)
    (y,) = results(given)
    monkeypatch.setattr(ScanOfViews, "forward", failing)
    torch.testing.assert_close(results(given)[0], right)
    with pytest.raises(BackendError, match="no memory left"):
        results(given, backend="cpu")
    monkeypatch.setattr(ScanOfViews, "backward_list", failing_backward)
    torch.testing.assert_close(gradients((y,), given), expected)


def failing_backward(self: Any, *arguments: Any) -> Any:
    raise BackendError("no kernel")


def test_a_kernel_that_is_made_later(monkeypatch: pytest.MonkeyPatch) -> None:
    given = leaves()
    prepare = FunctionCache.prepared

    def failing(self: Any, *arguments: Any) -> Any:
        raise BackendError("not while a graph is captured")

    monkeypatch.setattr(FunctionCache, "prepared", failing)
    (right,) = results(given)
    assert not kept()
    monkeypatch.setattr(FunctionCache, "prepared", prepare)
    torch.testing.assert_close(results(given)[0], right)
    assert kept() != [None]


def test_carries_that_a_hook_moved() -> None:
    """Saved carries that come back at other addresses, or not dense, are read as they should be."""
    given = leaves()
    (y,) = results(given)
    expected = gradients((y,), given)

    def shifted(t: Tensor) -> Tensor:
        if t.dtype.is_floating_point:
            return t
        place = torch.empty(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape)
        return place.copy_(t)

    for _ in range(3):
        for pack in (shifted, lambda t: t if t.dtype.is_floating_point else t.mT.contiguous().mT):
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                (y,) = results(given)
            torch.testing.assert_close(gradients((y,), given), expected)
        same_bits(gradients(results(given), given), expected)
