"""What `nonlinear_recurrence` refuses: each error says what was seen, and what would be right."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from assocscan import AssocScanError, TraceError, nonlinear_recurrence

x, h, p = torch.randn(2, 6, 3), torch.zeros(2, 3), torch.randn(3)
W = torch.randn(3, 3)
OFFSETS = torch.tensor([0, 2, 4, 6])
CHANNELS = ["step and lower are written for one element", "torch.nn.GRU"]


def run(step: Any, xs: Any = x, init: Any = h, axis: Any = 1, **options: Any) -> Any:
    return nonlinear_recurrence(step, xs, init, axis, **options)


def fine(h: Any, x: Any) -> Any:
    return torch.tanh(h + x)


def scaled(h: Any, x: Any, p: Any) -> Any:
    return torch.tanh(p * h + x)


def branching(h: Any, x: Any) -> Any:
    if h > 0:
        return h
    return x


def without_return(h: Any, x: Any) -> None:
    h + x


def swapping(h: Any, x: Any) -> Any:
    return h.long() if h.is_floating_point() else h.double()


# What is wrong, the kind of Python's errors that it is one of, and words of the message.
Wrong = tuple[Callable[[], Any], type[Exception], list[str]]
OF_STEPS: dict[str, Wrong] = {
    "another structure": (lambda: run(lambda h, x: [h[0] + x], init=(h,)), TypeError,
                          ["the result is a list of 1, expected a tuple of 1"]),
    "as jax.lax.scan's": (lambda: run(lambda h, x: (h + x, h)), TypeError,
                          ["the result is a tuple of 2, expected a tensor", "return h alone",
                           "lower="]),
    "other keys": (lambda: run(lambda h, x: {"b": h["a"] + x}, init={"a": h}), TypeError,
                   ["has the keys ['b'], expected ['a']"]),
    "another shape": (lambda: run(lambda h, x: torch.stack([h, x])), ValueError,
                      ["returns shape [2]", "without dimensions"]),
    "changing dtypes": (lambda: run(swapping), TypeError,
                        ["other dtypes at every step, of int64 at last float64", "cast the state"]),
    "nine numbers": (lambda: run(lambda h, x: tuple(a + x for a in h), init=(h,) * 9), ValueError,
                     ["has 9 numbers", "8 is the most"]),
    "ten numbers": (lambda: run(lambda h, x: tuple(a + x for a in h), init=(h * 1j,) * 5),
                    ValueError, ["has 10 numbers (a complex one counts twice)"]),
    "captured": (lambda: run(lambda h, x: torch.tanh(h * p + x)), TraceError,
                 ["captured tensor (test_nonlinear_errors.py:", "pass it in params="]),
    "captured and transformed": (
        lambda: torch.func.grad(lambda w: run(lambda h, x: w * h + x).sum())(p[0]), TraceError,
        ["captured tensor that torch.func", "pass it in params="]),
    "matmul": (lambda: run(lambda h, x, w: torch.tanh(h @ w + x), params=W), TraceError, CHANNELS),
    "captured matrix": (lambda: run(lambda h, x: torch.tanh(h @ W + x)), TraceError, CHANNELS),
    "linear": (lambda: run(lambda h, x, w: torch.nn.functional.linear(h, w) + x, params=W),
               TraceError, CHANNELS),
    "sum of channels": (lambda: run(lambda h, x: h.sum(-1) + x), TraceError, CHANNELS),
    "sum": (lambda: run(lambda h, x: h.sum() + x), TraceError,
            ["reduces a whole tensor to one number (test_nonlinear_errors.py:", *CHANNELS]),
    "mean": (lambda: run(lambda h, x: torch.mean(h) + x), TraceError, ["reduces a", *CHANNELS]),
    "norm": (lambda: run(lambda h, x: h / h.norm() + x), TraceError, ["reduces a", *CHANNELS]),
    "norm of channels": (lambda: run(lambda h, x: h / h.norm(dim=-1) + x), TraceError, CHANNELS),
    "max": (lambda: run(lambda h, x: torch.max(h) + x), TraceError, ["reduces a", *CHANNELS]),
    "softmax": (lambda: run(lambda h, x: torch.softmax(h, -1) + x), TraceError, CHANNELS),
    "layer norm": (lambda: run(lambda h, x: torch.nn.functional.layer_norm(h, (3,)) + x),
                   TraceError, CHANNELS),
    "cat": (lambda: run(lambda h, x: torch.cat([h, x])), TraceError, CHANNELS),
    "index": (lambda: run(lambda h, x: h[0] + x), TraceError, CHANNELS),
    "size": (lambda: run(lambda h, x: h / h.shape[-1] + x), TraceError, CHANNELS),
    "branch": (lambda: run(branching), TraceError,
               ["step 'branching' branches on the value of a tensor", "torch.where"]),
    "Python's min": (lambda: run(lambda h, x: min(h, x)), TraceError, ["torch.minimum"]),
    "math": (lambda: run(lambda h, x: math.exp(h) + x), TraceError, ["torch.exp(x)"]),
    "numpy": (lambda: run(lambda h, x: np.tanh(h.numpy()) + x), TraceError, ["x.numpy()"]),
    "nothing": (lambda: run(without_return), TraceError,
                ["it returned None", "is a `return` missing?"]),
    "in place": (lambda: run(lambda h, x: h.add_(x)), TraceError,
                 ["changes one of its arguments in place", "compute a new tensor"]),
    "failing": (lambda: run(lambda h, x: h + x["a"]), TraceError,
                ["step 'lambda' failed on (h: float32[], x: float32[])"]),
    "too few arguments": (lambda: run(lambda h: h), TraceError,
                          ["called as step(h, x), since params is empty"]),
    "without params": (lambda: run(fine, params=p), TraceError, ["called as step(h, x, params)"]),
    "no function": (lambda: run(None), TypeError, ["step must be a function", "got None"]),
    "lower, no function": (lambda: run(fine, lower=3), TypeError, ["lower must be a function"]),
    "lower, three": (lambda: run(fine, lower=lambda a, b, c: a), TraceError, ["requires 3"]),
    "lower, nothing": (lambda: run(fine, lower=lambda h: None), TraceError,
                       ["the lower of step 'fine' failed on (h: float32[])", "returned None"]),
    "lower, sum": (lambda: run(fine, lower=lambda h: h.sum(-1)), TraceError, CHANNELS),
    "lower, matmul": (lambda: run(fine, lower=lambda h: h @ W), TraceError, CHANNELS),
    "lower, captured": (lambda: run(fine, lower=lambda h: h * p), TraceError,
                        ["the lower of step 'fine' uses a captured tensor", "pass it in xs"]),
    "lower, branch": (lambda: run(fine, lower=lambda h: h if h > 0 else -h), TraceError,
                      ["the lower of step 'fine' branches"]),
}  # fmt: skip
OF_ARGUMENTS: dict[str, Wrong] = {
    "params of sequences": (lambda: run(scaled, params=torch.ones(3, 2, 3), offsets=OFFSETS),
                            ValueError, ["params has shape [3, 2, 3]", "the same parameters"]),
    "params of steps": (lambda: run(scaled, params=torch.ones(2, 6, 3)), ValueError,
                        ["params has shape [2, 6, 3]", "[2, 3]", "is passed in xs"]),
    "params": (lambda: run(lambda h, x, p: h * p[1] + x, params=(1.0, torch.ones(4))), ValueError,
               ["params[1] has shape [4], which does not broadcast to [2, 3]"]),
    "params of another kind": (lambda: run(scaled, params=None), TypeError,
                               ["params is None, expected a tensor or a number"]),
    "init": (lambda: run(fine, init=torch.zeros(5)), ValueError,
             ["init has shape [5], which does not broadcast to [2, 3]"]),
    "init with the axis": (lambda: run(fine, init=h[:, None]), ValueError,
                           ["init has shape [2, 1, 3]", "without the axis"]),
    "init before xs": (lambda: nonlinear_recurrence(fine, h, x), ValueError,
                       ["init has shape", "the order of arguments is step, xs, init"]),
    "init of sequences": (lambda: run(fine, init=torch.zeros(2, 2, 3), offsets=OFFSETS),
                          ValueError, ["[3, 2, 3]", "each of the 3 sequences"]),
    "init for xs, pairs": (lambda: nonlinear_recurrence(
        lambda h, x: h[0] * x, torch.zeros(2, 3), (torch.zeros(2, 6, 3), torch.zeros(2, 6, 3))),
        ValueError, ["init has no axis of steps; the order of arguments is step, xs, init"]),
    "no init": (lambda: run(fine, init=None), TypeError, ["init is None"]),
    "init, array": (lambda: run(fine, init=np.zeros(3)), TypeError, ["torch.as_tensor(init)"]),
    "init, empty": (lambda: run(fine, init=()), ValueError, ["init is an empty pytree"]),
    "init, large": (lambda: run(lambda h, x: h + 1, init=2**70), TypeError, ["cannot hold"]),
    "init, no whole number": (lambda: run(lambda h, x: (h + x).long(), init=0.5), TypeError,
                              ["is 0.5, which torch.int64 cannot hold"]),
    "init, no truth value": (lambda: run(lambda h, x: h + x > 0, init=2), TypeError,
                             ["is 2, which torch.bool cannot hold"]),
    "offsets and reset": (
        lambda: run(fine, offsets=OFFSETS, reset=torch.zeros(2, 6, dtype=torch.bool)), ValueError,
        ["reset and offsets were passed", "leave offsets out"]),
    "reset, dtype": (lambda: run(fine, reset=torch.zeros(2, 6)), TypeError, ["reset.bool()"]),
    "reset, shape": (lambda: run(fine, reset=torch.zeros(5, dtype=torch.bool)), ValueError,
                     ["reset has shape [5], expected [2, 6]"]),
    "reset, list": (lambda: run(fine, reset=[True] * 6), TypeError, ["reset is a list"]),
    "offsets, list": (lambda: run(fine, offsets=[0, 6]), TypeError, ["torch.tensor(offsets)"]),
    "offsets, end": (lambda: run(fine, offsets=torch.tensor([0, 7])), ValueError,
                     ["offsets[-1] is 7, but the axis has length 6"]),
    "method": (lambda: run(fine, method="foo"), ValueError,
               ["method is 'foo', expected one of auto, loop, newton"]),
    "method, number": (lambda: run(fine, method=3), ValueError, ["method is 3"]),
    "tolerance, text": (lambda: run(fine, tolerance="a"), TypeError, ["tolerance is 'a'"]),
    "tolerance, bool": (lambda: run(fine, tolerance=True), TypeError, ["tolerance is True"]),
    "tolerance, zero": (lambda: run(fine, tolerance=0.0), ValueError, ["a positive number"]),
    "tolerance, NaN": (lambda: run(fine, tolerance=math.nan), ValueError, ["a positive number"]),
    "iterations, float": (lambda: run(fine, max_iterations=1.5), TypeError, ["expected an int"]),
    "iterations, bool": (lambda: run(fine, max_iterations=True), TypeError, ["expected an int"]),
    "iterations, zero": (lambda: run(fine, max_iterations=0), ValueError, ["at least 1"]),
    "xs, empty": (lambda: run(fine, ()), ValueError, ["xs is an empty pytree"]),
    "xs, number": (lambda: run(fine, 1.0), TypeError, ["xs is the float 1.0"]),
    "xs, list": (lambda: run(fine, [1.0, 2.0]), TypeError, ["xs[0] is the float 1.0"]),
    "lengths": (lambda: run(lambda h, x: h + x[0], (x, x[:, :5])), ValueError,
                ["xs[0] has length 6 along axis 1", "xs[1] has 5"]),
    "dimensions": (lambda: run(lambda h, x: h + x[0], (x, x[0])), ValueError,
                   ["xs[1] has another number of batch dimensions", "unsqueeze xs[1]"]),
    "batches": (lambda: run(lambda h, x: h + x[0], (x, torch.ones(3, 6, 3))), ValueError,
                ["do not broadcast"]),
    "devices of xs": (lambda: run(lambda h, x: h + x[0], (x, x.to("meta"))), ValueError,
                      ["xs[0] is on cpu but xs[1] is on meta"]),
    "device of init": (lambda: run(fine, init=h.to("meta")), ValueError, ["init is on meta"]),
    "device of params": (lambda: run(scaled, params=p.to("meta")), ValueError,
                         ["params is on meta, but xs is on cpu"]),
    "axis": (lambda: run(fine, axis=3), IndexError, ["axis 3 is out of range", "-3 to 2"]),
    "axis of a row": (lambda: run(fine, torch.ones(5), 0.0), IndexError, ["pass axis=0"]),
    "axis, bool": (lambda: run(fine, axis=True), TypeError, ["axis must be an int"]),
    "no axis": (lambda: run(fine, torch.ones(()), 0.0), IndexError, ["none to scan along"]),
    "params by position": (lambda: nonlinear_recurrence(scaled, x, h, 1, p),  # type: ignore[misc]
                           TypeError, ["4 arguments by position", "pass by name params"]),
    "jax's length": (lambda: run(fine, length=6), TypeError, ["no argument 'length'"]),
    "final": (lambda: run(fine, return_final="only"), TypeError, ["return_final is 'only'"]),
    "sparse": (lambda: run(fine, x.to_sparse()), TypeError, ["xs has the layout", ".to_dense()"]),
}  # fmt: skip
CALLS = OF_STEPS | OF_ARGUMENTS


@pytest.mark.thinned(7)
@pytest.mark.parametrize("name", CALLS)
def test_refused(name: str) -> None:
    """Every time, and not only where nothing like it was called before."""
    call, kind, words = CALLS[name]
    texts = []
    for _ in range(2):
        with pytest.raises(kind) as caught:
            call()
        assert isinstance(caught.value, AssocScanError)
        texts.append(str(caught.value))
        for part in words:
            assert part in texts[-1]
        assert "element_ndim" not in texts[-1] and "operator" not in texts[-1]
    assert texts[0] == texts[1]


def test_refused_after_a_call_that_is_taken() -> None:
    """A known step is checked again in every argument."""
    run(fine)
    run(scaled, params=p)
    for name in OF_ARGUMENTS:
        test_refused(name)


def test_a_name_is_that_of_the_function() -> None:
    class Step:
        def __call__(self, h: Tensor, x: Tensor) -> Tensor:
            return h.softmax(0) + x

    with pytest.raises(TraceError, match="step 'Step' works along a dimension"):
        run(Step())


def test_a_transform_inside_a_step() -> None:
    def step(h: Tensor, x: Tensor) -> Tensor:
        slope: Tensor = torch.func.grad(lambda q: q**4 / 4)(h)
        return h - 0.1 * slope + x

    with pytest.raises(TraceError, match=r"torch\.func\.grad .* write the derivative out"):
        nonlinear_recurrence(step, torch.zeros(2, 5), 0.0)
