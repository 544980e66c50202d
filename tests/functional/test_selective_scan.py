"""`selective_scan` against a loop in float64: values and all gradients, on every engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from selective_loops import Tensors, draw, selective_loop
from table import ENGINES, Engine, sampled
from torch import Tensor

from assocscan import selective_scan
from assocscan.functional.selective_scan import OPERATORS, OPTIONAL

F64 = torch.float64
KERNELS = [e for e in ENGINES if e.name in ("cpu", "eager")]
SLOW = [e for e in ENGINES if e.name not in ("cpu", "eager")]


def cotangents(y: Tensor, last: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Random ones, and random ones for some steps and channels alone."""
    generator = torch.Generator().manual_seed(1)
    pairs = []
    for kept in (1.0, 0.4):
        pair = []
        for t in (y, last):
            g = torch.randn(t.shape, generator=generator, dtype=F64)
            mask = torch.rand(t.shape, generator=generator, dtype=F64) < kept
            pair.append(g * mask)
        pairs.append((pair[0], pair[1]))
    return pairs


def gradients(
    results: tuple[Tensor, Tensor], inputs: Tensors, g: tuple[Tensor, Tensor], again: bool = True
) -> list[Tensor]:
    given = [c.to(y.dtype).to(y.device) for y, c in zip(results, g, strict=True)]
    leaves = list(inputs.values())
    kept = {"retain_graph": again, "materialize_grads": True}  # of no steps, nothing depends on A
    return list(torch.autograd.grad(results, leaves, given, **kept))


def agree(
    inputs: Tensors,
    softplus: bool,
    engine: Engine,
    dtype: torch.dtype = F64,
    view: Callable[[str, Tensor], Tensor] = lambda name, t: t,
    **options: Any,
) -> None:
    """Values and gradients of an engine's scan in `dtype`, against the loop in float64 on the same
    numbers.

    Rounding errors of one step are a few units; those of all steps add up at most.
    """
    leaves = {name: t.to(dtype).to(engine.device).requires_grad_() for name, t in inputs.items()}
    given = {name: view(name, t) for name, t in leaves.items()}
    results = selective_scan(
        **given, delta_softplus=softplus, return_final=True, backend=engine.name, **options
    )
    exact = {name: t.detach().cpu().double().requires_grad_() for name, t in leaves.items()}
    want = selective_loop(**exact, delta_softplus=softplus, **options)
    steps = inputs["u"].shape[1]
    eps = torch.finfo(dtype).eps
    rtol = 8 * (steps + 4) * eps

    def same(got: Tensor, right: Tensor, name: str) -> None:
        atol = rtol * float(right.detach().abs().max()) if right.numel() else 0.0
        torch.testing.assert_close(
            got.detach().cpu().double(), right.detach(), rtol=rtol, atol=atol,
            msg=lambda text: f"{name}: {text}",
        )  # fmt: skip

    for name, got, right in zip(("y", "final"), results, want, strict=True):
        same(got, right, name)
    for g in cotangents(*want):
        for name, got, right in zip(
            leaves, gradients(results, leaves, g), gradients(want, exact, g), strict=True
        ):
            assert got.dtype == leaves[name].dtype
            same(got, right, f"gradient of {name}")


every_engine = pytest.mark.parametrize("engine", KERNELS, ids=lambda e: e.name)
SUBSETS = [names for n in range(4) for names in itertools.combinations(OPTIONAL, n)]


@pytest.mark.thinned(8)
@every_engine
@pytest.mark.parametrize("softplus", [False, True])
@pytest.mark.parametrize("optional", sampled(SUBSETS, [(), ("D", "z"), OPTIONAL]), ids=str)
def test_options(engine: Engine, optional: tuple[str, ...], softplus: bool) -> None:
    agree(draw(optional=optional), softplus, engine)


@pytest.mark.thinned(7)
@every_engine
@pytest.mark.parametrize("states", [1, 2, 7, 16])
def test_states(engine: Engine, states: int) -> None:
    agree(draw(states=states, groups=2, seed=states), True, engine)


SIZES = [(1, 1, 1), (3, 1, 5), (1, 2, 1), (1, 17, 3), (2, 65, 7), (0, 5, 6), (2, 5, 0), (2, 0, 6)]


@pytest.mark.thinned(8)
@every_engine
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_sizes(engine: Engine, size: tuple[int, int, int]) -> None:
    agree(draw(*size), True, engine)
    if size[1] == 0:
        last = draw(*size)["init"]
        given = draw(*size, init=False)
        y, h = selective_scan(**given, return_final=True, backend=engine.name)
        assert y.shape == size and h.shape == last.shape and not h.any()
        _, h = selective_scan(**given, init=last, return_final=True, backend=engine.name)
        assert torch.equal(h, last)


@pytest.mark.thinned(7)
@every_engine
@pytest.mark.parametrize("groups", [0, 1, 2, 3, 6])
def test_groups(engine: Engine, groups: int) -> None:
    inputs = draw(groups=groups)
    agree(inputs, True, engine)
    for name in ("B", "C"):  # the other has one group
        one = inputs[name] if groups == 0 else inputs[name][:, :, 0]
        agree({**inputs, name: one.clone()}, True, engine)


@every_engine
@pytest.mark.parametrize("init", [False, True])
def test_offsets(engine: Engine, init: bool) -> None:
    inputs = draw(steps=11, groups=2, init=init, sequences=4)
    for kind in (torch.int32, torch.int64):
        agree(inputs, True, engine, offsets=torch.tensor([0, 3, 3, 4, 11], dtype=kind))


STRIDES = {
    "channels first": lambda name, t: t.mT.contiguous().mT if t.dim() > 2 else t,
    "every other": lambda name, t: t.repeat_interleave(2, -1)[..., ::2],
    "first dimension last": lambda name, t: t.movedim(0, -1).contiguous().movedim(-1, 0),
    "steps of one number": lambda name, t: (
        t[:, :1].expand(t.shape) if name in ("delta", "B") else t
    ),
}  # fmt: skip


@every_engine
@pytest.mark.parametrize("strides", STRIDES)
def test_strides(engine: Engine, strides: str) -> None:
    inputs = draw(groups=3)
    if strides == "steps of one number":
        leaves = {name: STRIDES[strides](name, t) for name, t in inputs.items()}
        assert leaves["B"].stride(1) == 0
        got = selective_scan(**leaves, backend=engine.name)
        torch.testing.assert_close(got, selective_loop(**leaves)[0])
        return
    agree(inputs, True, engine, view=STRIDES[strides])


@pytest.mark.exhaustive
@every_engine
def test_long_sequences(engine: Engine) -> None:
    """Gradients of 4096 steps, values of 65536: autograd of so long a loop takes minutes."""
    agree(draw(1, 2**12, 2, 2), True, engine)
    inputs = draw(1, 2**16, 2, 2)
    got = selective_scan(**inputs, delta_softplus=True, return_final=True, backend=engine.name)
    for y, want in zip(got, selective_loop(**inputs, delta_softplus=True), strict=True):
        # The error of a step decays as the state does: in sum less than 100 of them.
        atol = 100 * torch.finfo(F64).eps * float(want.abs().max())
        torch.testing.assert_close(y, want, rtol=1e-12, atol=atol)


def test_leaves_are_views() -> None:
    """What the operator is given has the memory of the arguments."""
    from assocscan.functional.selective_scan import leaf_view

    inputs = draw(groups=2, init=False)
    for name, t in inputs.items():
        leaf = leaf_view(name, t, (2, 3), 5)
        assert leaf.untyped_storage().data_ptr() == t.untyped_storage().data_ptr()
        assert leaf.dim() == 5 and leaf.shape[1] == 5
        distinct = [n for n, stride in zip(leaf.shape, leaf.stride(), strict=True) if stride]
        assert torch.Size(distinct).numel() == t.numel()


@pytest.mark.thinned(7)
@pytest.mark.parametrize("engine", SLOW, ids=lambda e: e.name)
@pytest.mark.parametrize("steps", [1, 9, 70])
def test_gpu_engines(engine: Engine, steps: int) -> None:
    if engine.repeats(steps):
        pytest.skip("as triton")
    agree(draw(steps=steps, groups=2), True, engine, torch.float32)


@every_engine
def test_float32(engine: Engine) -> None:
    agree(draw(steps=33, states=4), True, engine, torch.float32)


MIXED = {
    "bfloat16": {},
    "float32 parameters": dict.fromkeys(("A", "D", "delta_bias", "init"), torch.float32),
    "float16 beside": dict.fromkeys(("B", "z"), torch.float16),
    "float64 beside": {"A": F64},
    "float64 init": {"init": F64},
}


@pytest.mark.thinned(7)
@every_engine
@pytest.mark.parametrize("case", MIXED)
def test_16_bits(engine: Engine, case: str) -> None:
    """y is rounded once: to within half a unit of the loop's, and what float32 loses."""
    dtypes = {name: MIXED[case].get(name, torch.bfloat16) for name in draw()}
    inputs = {
        name: t.to(dtypes[name]).requires_grad_() for name, t in draw(steps=17, groups=2).items()
    }
    wide = F64 if F64 in dtypes.values() else torch.float32
    y, last = selective_scan(**inputs, delta_softplus=True, return_final=True, backend=engine.name)
    assert y.dtype == torch.bfloat16 and last.dtype == wide
    exact = {name: t.detach().double().requires_grad_() for name, t in inputs.items()}
    want = selective_loop(**exact, delta_softplus=True)
    lost = 8 * 21 * torch.finfo(wide).eps
    unit = torch.finfo(torch.bfloat16).eps / 2
    torch.testing.assert_close(
        y.double(), want[0], rtol=unit + lost, atol=lost * float(want[0].detach().abs().max())
    )
    torch.testing.assert_close(
        last.double(), want[1], rtol=lost, atol=lost * float(want[1].detach().abs().max())
    )
    for g in cotangents(*want):
        rounded = g[0].bfloat16().double(), g[1].to(wide).double()
        for name, got, right in zip(
            inputs, gradients((y, last), inputs, rounded), gradients(want, exact, rounded),
            strict=True,
        ):  # fmt: skip
            assert got.dtype == dtypes[name]
            # Gradients of leaves that are read at several places are sums of rounded numbers.
            terms = 17 * 3 * torch.finfo(got.dtype).eps
            torch.testing.assert_close(
                got.double(), right, rtol=terms, atol=terms * float(right.detach().abs().max()),
                msg=lambda text, name=name: f"gradient of {name}: {text}",
            )  # fmt: skip


def as_function(names: list[str], **options: Any) -> Callable[..., Any]:
    def call(*tensors: Tensor) -> Any:
        given = dict(zip(names, tensors, strict=True))
        return selective_scan(**given, delta_softplus=True, return_final=True, **options)

    return call


@every_engine
def test_gradcheck(engine: Engine) -> None:
    inputs = {name: t.requires_grad_() for name, t in draw(1, 3, 2, 2, groups=2).items()}
    call = as_function(list(inputs), backend=engine.name)
    assert torch.autograd.gradcheck(call, tuple(inputs.values()))


@pytest.mark.exhaustive
@every_engine
def test_second_derivatives(engine: Engine) -> None:
    inputs = {name: t.requires_grad_() for name, t in draw(1, 2, 2, 1).items()}
    call = as_function(list(inputs), backend=engine.name)
    assert torch.autograd.gradgradcheck(call, tuple(inputs.values()))


@every_engine
def test_pieces_are_the_whole(engine: Engine) -> None:
    given = {"delta_softplus": True, "return_final": True, "backend": engine.name}
    inputs = draw(steps=9, groups=2)
    along = ("u", "delta", "B", "C", "z")
    whole, last = selective_scan(**inputs, **given)
    parts, state = [], inputs["init"]
    for cut in (slice(0, 4), slice(4, 4), slice(4, 9)):
        part = {name: t[:, cut] if name in along else t for name, t in inputs.items()}
        y, state = selective_scan(**{**part, "init": state}, **given)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    torch.testing.assert_close(state, last)


@every_engine
def test_vmap(engine: Engine) -> None:
    """Over all arguments but A, which is the same for all."""
    inputs = draw(groups=2, optional=("D", "delta_bias"))
    other = draw(groups=2, optional=("D", "delta_bias"), seed=5)
    stacked = {n: t if n == "A" else torch.stack([t, other[n]]) for n, t in inputs.items()}
    call = as_function(list(inputs), backend=engine.name)
    axes = tuple(None if name == "A" else 0 for name in inputs)
    got = torch.func.vmap(call, in_dims=axes)(*stacked.values())
    want = [call(*inputs.values()), call(*{**other, "A": inputs["A"]}.values())]
    for k in range(2):
        torch.testing.assert_close(got[k], torch.stack([w[k] for w in want]))
    per_example = torch.func.vmap(
        torch.func.grad(lambda *t: call(*t)[0].square().sum()), in_dims=axes
    )(*stacked.values())
    u = inputs["u"].clone().requires_grad_()
    call(u, *list(inputs.values())[1:])[0].square().sum().backward()
    torch.testing.assert_close(per_example[0], u.grad)


@pytest.mark.slow
@pytest.mark.thinned(7)
@every_engine
@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_compile(engine: Engine, dynamic: bool) -> None:
    torch._dynamo.reset()
    inputs = {name: t.requires_grad_() for name, t in draw(steps=6, groups=2).items()}
    call = as_function(list(inputs), backend=engine.name)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    got, want = (f(*inputs.values()) for f in (compiled, call))
    torch.testing.assert_close(got, want)
    g = cotangents(*want)[0]
    torch.testing.assert_close(gradients(got, inputs, g, False), gradients(want, inputs, g))
    torch._dynamo.reset()


def test_results_are_reproducible() -> None:
    inputs = {name: t.requires_grad_() for name, t in draw(steps=33, groups=2).items()}
    runs = []
    for _ in range(2):
        results = selective_scan(
            **inputs, delta_softplus=True, return_final=True, deterministic=True
        )
        runs.append([*results, *gradients(results, inputs, cotangents(*results)[0])])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_operators_are_made_once() -> None:
    """One for each combination of options, whatever the shapes and strides."""
    op = OPERATORS[("D",), True, torch.float32]
    before = len(op.traced())
    for steps, batch in ((3, 1), (5, 2), (8, 4)):
        given = {n: t.float() for n, t in draw(batch, steps, 6, 3, optional=("D",)).items()}
        selective_scan(**given, delta_softplus=True, backend="eager")
    assert len(op.traced()) == before + 1
    assert len(OPERATORS) == 2 ** len(OPTIONAL) * 2 * 2


def test_a_subclass_of_tensor() -> None:
    class Named(Tensor):
        pass

    inputs = draw()
    y = selective_scan(**{**inputs, "u": inputs["u"].as_subclass(Named)})
    assert type(y) is Named
    torch.testing.assert_close(y.as_subclass(Tensor), selective_scan(**inputs))


def test_all_options_have_one_name() -> None:
    assert {op.name for op in OPERATORS.values()} == {"selective_scan"}
