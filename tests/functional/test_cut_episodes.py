"""Episodes that are cut, and V-trace, against loops over the steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from table import Engine
from torch import Tensor

import assocscan
from assocscan import ScanTypeError, ScanValueError, discounted_returns, gae, vtrace

F64, NAN = torch.float64, math.nan
B, T = 3, 13


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def flags(seed: int, often: float = 0.3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(B, T, generator=generator) < often


# Both at some steps, neither at most, and a cut at the last step of a row.
DONE, CUT = flags(1), flags(2)
CUT[0, -1] = True
assert (DONE & CUT).any() and (DONE & ~CUT).any() and (CUT & ~DONE).any()
REWARDS, VALUES, NEXT, DISCOUNT, RATIOS = (rand(B, T, seed=k) for k in range(5))
BOOTSTRAP = rand(B, seed=9)


def returns_loop(rewards: Tensor, discount: Tensor, bootstrap: Tensor, later: Tensor) -> Tensor:
    g, rows = bootstrap, []
    for t in reversed(range(rewards.shape[1])):
        g = torch.where(CUT[:, t], later[:, t], torch.where(DONE[:, t], 0.0, g))
        g = rewards[:, t] + discount[:, t] * g
        rows.append(g)
    return torch.stack(rows[::-1], 1)


def gae_loop(
    rewards: Tensor, values: Tensor, bootstrap: Tensor, discount: Tensor, later: Tensor
) -> Tensor:
    a, after, rows = torch.zeros_like(bootstrap), bootstrap, []
    for t in reversed(range(rewards.shape[1])):
        after = torch.where(CUT[:, t], later[:, t], torch.where(DONE[:, t], 0.0, after))
        a = torch.where(CUT[:, t] | DONE[:, t], 0.0, a)
        a = rewards[:, t] + discount[:, t] * after - values[:, t] + discount[:, t] * 0.8 * a
        after = values[:, t]
        rows.append(a)
    return torch.stack(rows[::-1], 1)


def vtrace_loop(
    ratios: Tensor, rewards: Tensor, values: Tensor, bootstrap: Tensor, discount: Tensor,
    later: Tensor, clip_rho: float = 1.0, clip_c: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    difference, after, targets, advantages = torch.zeros_like(bootstrap), bootstrap, [], []
    for t in reversed(range(rewards.shape[1])):
        rho, c = (ratios[:, t].clamp(max=math.log(m)).exp() for m in (clip_rho, clip_c))
        after = torch.where(CUT[:, t], later[:, t], torch.where(DONE[:, t], 0.0, after))
        difference = torch.where(CUT[:, t] | DONE[:, t], 0.0, difference)
        delta = rewards[:, t] + discount[:, t] * after - values[:, t]
        advantages.append(rho * (delta + discount[:, t] * difference))
        difference = rho * delta + discount[:, t] * c * difference
        targets.append(values[:, t] + difference)
        after = values[:, t]
    return torch.stack(targets[::-1], 1), torch.stack(advantages[::-1], 1)


ENDS: dict[str, Any] = {"truncated": CUT}
CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any], list[Tensor]]] = {
    "discounted_returns": (
        lambda r, d, b, n, **o: discounted_returns(r, d, DONE, b, **ENDS, next_values=n, **o),
        returns_loop,
        [REWARDS, DISCOUNT, BOOTSTRAP, NEXT],
    ),
    "gae": (
        lambda r, v, b, d, n, **o: gae(r, v, b, d, 0.8, DONE, **ENDS, next_values=n, **o),
        gae_loop,
        [REWARDS, VALUES, BOOTSTRAP, DISCOUNT, NEXT],
    ),
    "vtrace": (
        lambda l, r, v, b, d, n, **o: tuple(vtrace(l, r, v, b, d, DONE, **ENDS, next_values=n, **o)),  # noqa: E501, E741
        vtrace_loop,
        [RATIOS, REWARDS, VALUES, BOOTSTRAP, DISCOUNT, NEXT],
    ),
}  # fmt: skip
each = pytest.mark.parametrize("name", CASES)


def results(function: Callable[..., Any], tensors: list[Tensor], **options: Any) -> list[Tensor]:
    """Values, and the gradients of random cotangents."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    found = function(*leaves, **options)
    found = [found] if isinstance(found, Tensor) else list(found)
    cotangents = [rand(*y.shape, seed=20 + k).to(y.dtype) for k, y in enumerate(found)]
    return [*(y.detach() for y in found), *torch.autograd.grad(found, leaves, cotangents)]


@each
def test_values_and_gradients(engine: Engine, name: str) -> None:
    """Twice, so that the call is repeated; then with a value that is not read."""
    if engine.device != "cpu":
        pytest.skip("these run where other tests of devices do")
    function, loop, tensors = CASES[name]
    dtype = torch.float32 if engine.interpreted else F64
    given = [t.to(dtype) for t in tensors]
    want = results(loop, given)
    for _ in range(2):
        torch.testing.assert_close(results(function, given, backend=engine.name), want)
    given[-1] = torch.where(CUT, given[-1], NAN)
    torch.testing.assert_close(results(function, given, backend=engine.name), want)


@pytest.mark.slow
@pytest.mark.thinned(8)
@each
def test_second_derivatives(name: str) -> None:
    function, _, tensors = CASES[name]
    leaves = [t.clone().requires_grad_() for t in tensors]
    torch.autograd.gradcheck(function, leaves, fast_mode=True)
    torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


@each
def test_nothing_flows_across_a_cut(name: str) -> None:
    """Neither in the values nor in the gradients, be it NaN or infinite."""
    function, loop, tensors = CASES[name]
    for worst in (math.nan, math.inf):
        given = [t.clone() for t in tensors]
        for t, whole in zip(given, tensors, strict=True):
            if whole is REWARDS or whole is VALUES or whole is RATIOS:
                t[:, 8:] = worst
        want, got = results(loop, given), results(function, given)
        count = 2 if name == "vtrace" else 1
        torch.testing.assert_close(got[:count], want[:count], equal_nan=True)
        assert any(w.isfinite()[:, :8].any() for w in want[:count])
    # What follows the last end before step 8 is NaN; a loss that takes what came before has none.
    last = (CUT | DONE)[:, :8].float().cumsum(1).argmax(1)
    before = torch.arange(T) <= last[:, None]
    leaves = [t.clone().requires_grad_() for t in given]
    found = function(*leaves)
    found = found if isinstance(found, tuple) else (found,)
    total = sum(torch.where(before, y, 0.0).sum() for y in found)
    for leaf, grad in zip(leaves, torch.autograd.grad(total, leaves), strict=True):
        if leaf.shape == REWARDS.shape:
            assert grad[before].isfinite().all()
            assert not grad[~before].nan_to_num().any()


@each
def test_long_rows(name: str) -> None:
    """Cut into segments and chunks: what precedes a cut is what the part alone gives."""
    length, end = 40000, 20011
    cut = torch.arange(length) == end
    series = [rand(length, seed=k) for k in range(4)]
    bad = [torch.where(torch.arange(length) > end, NAN, t) for t in series]
    call: dict[str, Callable[..., Any]] = {
        "discounted_returns": lambda r, v, n, q, b, **o: discounted_returns(r, 0.9, None, b, **o),
        "gae": lambda r, v, n, q, b, **o: gae(r, v, b, 0.9, 0.8, **o),
        "vtrace": lambda r, v, n, q, b, **o: vtrace(q, r, v, b, 0.9, **o)[0],
    }
    whole = call[name](*bad, rand(), truncated=cut, next_values=bad[2])
    parts = [t[: end + 1] for t in series]
    torch.testing.assert_close(whole[: end + 1], call[name](*parts, parts[2][end]))
    assert whole[end + 1 :].isnan().all()


@each
@pytest.mark.parametrize("axis", [0, 1])
def test_packed(name: str, axis: int) -> None:
    """Each sequence as it is alone; a cut at its last step comes before its bootstrap."""
    offsets = torch.tensor([0, 4, 4, 9, T])
    bootstraps = rand(4, B, seed=30)

    def call(offsets: Any, bootstrap: Tensor, series: list[Tensor], ends: list[Tensor]) -> Any:
        rewards, values, later, discount, ratios, done, cut = (
            t.movedim(1, axis) for t in (*series, *ends)
        )
        o = {"axis": axis, "truncated": cut, "next_values": later, "offsets": offsets}
        if name == "gae":
            return (gae(rewards, values, bootstrap, discount, 0.8, done, **o),)
        if name == "vtrace":
            return vtrace(ratios, rewards, values, bootstrap, discount, done, **o)
        return (discounted_returns(rewards, discount, done, bootstrap, **o),)

    series = [REWARDS, VALUES, NEXT, DISCOUNT, RATIOS]
    got = call(offsets, bootstraps, series, [DONE, CUT])
    for s, (begin, end) in enumerate(itertools.pairwise(offsets.tolist())):
        if begin == end:
            continue
        parts = [[t[:, begin:end] for t in group] for group in (series, [DONE, CUT])]
        for whole, alone in zip(got, call(None, bootstraps[s], *parts), strict=True):
            torch.testing.assert_close(whole.narrow(axis, begin, end - begin), alone)


def test_a_step_that_is_both_is_cut() -> None:
    """`done` may be terminated | truncated."""
    options = {"truncated": CUT, "next_values": NEXT}
    for done in (DONE | CUT, DONE & ~CUT):
        y = discounted_returns(REWARDS, 0.9, done, BOOTSTRAP, **options)
        torch.testing.assert_close(
            y, discounted_returns(REWARDS, 0.9, DONE, BOOTSTRAP, **options), rtol=0, atol=0
        )


def test_on_policy_targets_are_advantages_with_a_decay_of_one() -> None:
    targets, advantages = vtrace(torch.zeros(B, T, dtype=F64), REWARDS, VALUES, BOOTSTRAP, 0.9, DONE)  # fmt: skip  # noqa: E501
    a = gae(REWARDS, VALUES, BOOTSTRAP, 0.9, 1.0, DONE)
    torch.testing.assert_close(targets, VALUES + a)
    torch.testing.assert_close(advantages, a)


@pytest.mark.parametrize("clips", [(1.0, 1.0), (2.5, 0.3), (0.0, 1.0), (math.inf, 1.2)])
def test_clips(clips: tuple[float, float]) -> None:
    arguments = [4 * RATIOS, REWARDS, VALUES, BOOTSTRAP, DISCOUNT]
    got = vtrace(*arguments, DONE, truncated=CUT, next_values=NEXT, clip_rho=clips[0],
                 clip_c=clips[1])  # fmt: skip
    safe = [max(c, 1e-300) for c in clips]
    torch.testing.assert_close(tuple(got), vtrace_loop(*arguments, NEXT, *safe))


def test_huge_ratios_are_clipped_before_they_overflow() -> None:
    ratios = torch.tensor([1000.0, -1000.0, 0.5, 1e30], requires_grad=True)
    ones = torch.ones(4)
    found = vtrace(ratios, ones, ones, torch.tensor(1.0), 0.5, clip_rho=2.0)
    assert all(t.isfinite().all() for t in found)
    (gradient,) = torch.autograd.grad(found.targets.sum() + found.advantages.sum(), ratios)
    assert gradient[2] != 0 and gradient[[0, 1, 3]].tolist() == [0, 0, 0]


@pytest.mark.thinned(8)
@pytest.mark.parametrize("wide", range(5))
def test_dtypes_promote(wide: int) -> None:
    """One argument of float64 among those of float32 decides; 16-bit floats follow no bootstrap."""
    given = [RATIOS, REWARDS, VALUES, BOOTSTRAP, NEXT]
    given = [t if k == wide else t.float() for k, t in enumerate(given)]
    found = vtrace(*given[:4], 0.9, DONE, truncated=CUT, next_values=given[4])
    want = vtrace_loop(*(t.double() for t in given[:4]), torch.full((B, T), 0.9), given[4].double())
    assert all(t.dtype == F64 for t in found)
    torch.testing.assert_close(tuple(found), want, rtol=1e-6, atol=1e-6)
    a = gae(given[1], given[2], given[3], 0.9, 0.8, DONE, truncated=CUT, next_values=given[4])
    assert a.dtype == (torch.float32 if wide == 0 else F64)
    half = [t.bfloat16() for t in given]
    found = vtrace(*half[:3], BOOTSTRAP.float(), 0.9, DONE, truncated=CUT, next_values=half[4])
    want = vtrace_loop(*(t.double() for t in half[:3]), BOOTSTRAP, torch.full((B, T), 0.9),
                       half[4].double())  # fmt: skip
    for y, w in zip(found, want, strict=True):
        assert y.dtype == torch.bfloat16
        # One rounding on store; the discount 0.9 is rounded as well.
        assert (y.double() - w).abs().max() <= 2**-7 * w.abs().max()


def test_dtypes_promote_beside_a_tensor_of_discounts() -> None:
    """The value that decides enters by the masks or by the shift, beside narrower series alone."""
    ratios, rewards, values, discount = (t.float() for t in (RATIOS, REWARDS, VALUES, DISCOUNT))
    for bootstrap, later in ((BOOTSTRAP, NEXT.float()), (BOOTSTRAP.float(), NEXT)):
        ends: dict[str, Any] = {"truncated": CUT, "next_values": later}
        wide = [t.double() for t in (rewards, values, bootstrap, discount, later)]
        found = [
            discounted_returns(rewards, discount, DONE, bootstrap, **ends),
            gae(rewards, values, bootstrap, discount, torch.full((B, T), 0.8), DONE, **ends),
            *vtrace(ratios, rewards, values, bootstrap, discount, DONE, **ends),
        ]
        want = [
            returns_loop(wide[0], wide[3], wide[2], wide[4]),
            gae_loop(*wide),
            *vtrace_loop(ratios.double(), *wide),
        ]
        assert all(t.dtype == F64 for t in found)
        torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-6)


def test_the_gradient_at_a_tie_of_ratio_and_clip() -> None:
    """On policy every ratio is 1, as the clips are: the gradient is that of ratios not clipped."""
    tensors = [torch.zeros_like(RATIOS), *CASES["vtrace"][2][1:]]
    function = CASES["vtrace"][0]
    wide = results(lambda *t: function(*t, clip_rho=9.0, clip_c=9.0), tensors)
    torch.testing.assert_close(results(function, tensors), wide)


@pytest.mark.slow
def test_compiled_and_mapped() -> None:
    def call(*t: Tensor) -> Any:
        o: dict[str, Any] = {"truncated": CUT[0], "next_values": t[5]}
        return (
            *vtrace(t[0], t[1], t[2], t[3], 0.9, DONE[0], **o),
            gae(t[1], t[2], t[3], 0.9, 0.8, DONE[0], **o),
            discounted_returns(t[1], t[4], DONE[0], t[3], **o),
        )

    rows = [RATIOS, REWARDS, VALUES, BOOTSTRAP, DISCOUNT, NEXT]
    alone = [call(*(t[k] for t in rows)) for k in range(B)]
    want = tuple(torch.stack(column) for column in zip(*alone, strict=True))
    torch.testing.assert_close(torch.func.vmap(call)(*rows), want)
    compiled: Any = torch.compile(call, fullgraph=True, backend="aot_eager")
    for k in (0, 1, 0):
        leaves = [t[k].clone().requires_grad_() for t in rows]
        found = compiled(*leaves)
        torch.testing.assert_close(found, alone[k])
        gradients = torch.autograd.grad(sum(y.sum() for y in found), leaves)
        plain = torch.autograd.grad(sum(y.sum() for y in call(*leaves)), leaves)
        torch.testing.assert_close(gradients, plain)


x, y = torch.zeros(3), torch.zeros(())


@pytest.mark.parametrize(
    "call,error,words",
    [
        (lambda **o: discounted_returns(x, 1.0, **o), ScanValueError, "truncated needs next_val"),
        (lambda **o: gae(x, x, y, 0.9, 0.9, **o), ScanValueError, "truncated needs next_values"),
        (lambda **o: vtrace(x, x, x, y, 0.9, **o), ScanValueError, "truncated needs next_values"),
        (lambda **_: gae(x, x, y, 0.9, 0.9, next_values=x), ScanValueError, "needs truncated"),
        (lambda **o: gae(x, x, y, 0.9, 0.9, next_values=1.0, **o), ScanTypeError, "next_values is"),
        (lambda **o: discounted_returns(x, 0.9, next_values=x[:2], **o), ScanValueError,
         r"next_values has shape \[2\]"),
        (lambda **_: discounted_returns(x, 0.9, truncated=x, next_values=x), ScanTypeError,
         r"truncated has dtype torch.float32.*\.bool\(\)"),
        (lambda **_: vtrace(x.long(), x, x, y, 0.9), ScanTypeError, r"log_ratios\.float\(\)"),
        (lambda **_: vtrace(x[:2], x, x, y, 0.9), ScanValueError, r"log_ratios has shape \[2\]"),
        (lambda **_: vtrace(x, x, x, 0.0, 0.9), ScanTypeError, "bootstrap is a float"),
        (lambda **_: vtrace(x, x, x, y, 0.9, clip_rho=-1.0), ScanValueError, "clip_rho is -1.0"),
        (lambda **_: vtrace(x, x, x, y, 0.9, clip_c=NAN), ScanValueError, "clip_c is nan"),
        (lambda **_: vtrace(x, x, x, y, 0.9, clip_c=x), ScanTypeError, "clip_c is a tensor"),
        (lambda **_: vtrace(x, x, x, y, 0.9, axis=1), assocscan.AxisError, "rewards of shape"),
        (lambda **_: vtrace(x, x.to("meta"), x, y, 0.9), ScanValueError, "rewards is on meta"),
    ],
)  # fmt: skip
def test_refused(call: Callable[..., Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call(truncated=torch.zeros(3).bool())


def test_no_steps() -> None:
    empty = torch.zeros(2, 0, requires_grad=True)
    none = torch.zeros(2, 0).bool()
    found = vtrace(
        empty, empty, empty, torch.zeros(2), 0.9, none, truncated=none, next_values=empty
    )
    assert [t.shape for t in found] == [(2, 0), (2, 0)]
    found.targets.sum().backward()


def test_a_ratio_that_overflows() -> None:
    """Without a clip it weighs infinitely, also where the next target is the next value."""
    one = torch.ones(2)
    ratios, end = torch.tensor([100.0, -200.0]), torch.tensor(1.0)
    for _ in range(2):
        targets, advantages = vtrace(ratios, one, one, end, 0.5, clip_rho=float("inf"))
        assert targets.tolist() == [float("inf"), 1.0]
        assert advantages.tolist() == [float("inf"), 0.0]


@pytest.mark.parametrize("backend", ["cpu", "eager"])
def test_what_weighs_the_next_episode_is_not_read(backend: str) -> None:
    """NaN in λ, or an infinite c, at the last step of an episode."""
    ones, value = torch.ones(5), torch.ones(())
    done = torch.tensor([False, False, True, False, False])
    decay = torch.where(done, torch.nan, 0.5)
    ratios = torch.where(done, 100.0, 0.0)
    for _ in range(2):
        found = gae(ones, ones, value, 0.9, decay, done, backend=backend)
        torch.testing.assert_close(found, gae(ones, ones, value, 0.9, 0.5, done, backend=backend))
        wide = vtrace(ratios, ones, ones, value, 0.9, done, clip_c=math.inf, backend=backend)
        usual = vtrace(ratios, ones, ones, value, 0.9, done, clip_c=1.0, backend=backend)
        torch.testing.assert_close(wide, usual)
