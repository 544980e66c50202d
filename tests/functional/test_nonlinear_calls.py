"""Kinds of calls of `nonlinear_recurrence`: repeated, changed in one thing, mapped, on threads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from step_calls import F64, decayed, draw, each_backend
from steps import loop
from torch import Tensor
from torch.testing import assert_close

from assocscan import nonlinear_recurrence


@pytest.mark.exhaustive
def test_calls_that_differ_in_one_thing() -> None:
    """Each is remembered for itself, whatever came before."""
    x, init, p = draw(2, 9, 3), draw(2, 3), draw(3)
    gates = draw(2, 9, 3, seed=9)
    mask = draw(2, 9, seed=2) > 0
    calls: list[tuple[Any, dict[str, Any]]] = [
        ((decayed, x, init), {"params": p}),
        ((decayed, gates, init), {"params": p}),
        ((decayed, x, init + 1), {"params": p}),
        ((decayed, x, init), {"params": p + 1}),
        ((decayed, x, init), {"params": 0.5}),
        ((decayed, x, init), {"params": 0.25}),
        ((decayed, x, 0.0), {"params": 0.25}),
        ((decayed, x, 1.0), {"params": 0.25}),
        ((decayed, x[:, :8], init), {"params": p}),
        ((decayed, x, init), {"params": p, "reverse": True}),
        ((decayed, x, init), {"params": p, "reset": mask}),
        ((decayed, x, init), {"params": p, "reset": ~mask}),
        ((decayed, x, init), {"params": p, "reset": mask[:1, :, None]}),
        ((decayed, x, init), {"params": p, "offsets": torch.tensor([0, 4, 9])}),
        ((decayed, x, init), {"params": p, "offsets": torch.tensor([0, 5, 9])}),
        ((decayed, x, init), {"params": p, "lower": lambda h: h + 1}),
        ((decayed, x, init), {"params": p, "lower": lambda h: h + 2}),
        ((decayed, x, init), {"params": p, "lower": lambda h, x: h + x}),
        ((lambda h, x: torch.tanh(h) + x, x, init), {}),
        ((lambda h, x: torch.tanh(h) - x, x, init), {}),
        ((decayed, x.mT, draw(2, 9)), {"axis": 1, "params": 0.5}),
        ((decayed, x.float(), init.float()), {"params": p.float()}),
        ((decayed, x, init[0]), {"params": p}),
    ]  # fmt: skip
    for _ in range(3):
        for args, options in calls:
            want = loop(*args, **options)
            assert_close(nonlinear_recurrence(*args, **options), want[0])
            assert_close(nonlinear_recurrence(*args, **options, return_final=True), want)
            with torch.no_grad():
                assert_close(nonlinear_recurrence(*args, **options), want[0])
            with torch.inference_mode():
                assert_close(nonlinear_recurrence(*args, **options).clone(), want[0])
            leaf = args[1].detach().clone().requires_grad_()
            again = args[0], leaf, *args[2:]
            (g,) = torch.autograd.grad(nonlinear_recurrence(*again, **options).sum(), leaf)
            assert_close(g, torch.autograd.grad(loop(*again, **options)[0].sum(), leaf)[0])


@pytest.mark.exhaustive
def test_captured_numbers() -> None:
    """A step whose captured number, global or default changes is another step."""
    x = draw(1, 5, 2)
    scale = 0.5

    def step(h: Any, x: Any) -> Any:
        return torch.tanh(scale * h + x)

    first = nonlinear_recurrence(step, x, 0.0)
    assert_close(first, loop(step, x, 0.0)[0])
    scale = 2.0
    second = nonlinear_recurrence(step, x, 0.0)
    assert_close(second, loop(step, x, 0.0)[0])
    assert not torch.equal(first, second)

    class Settings:
        rate = 0.5

    settings = Settings()

    def mutable(h: Any, x: Any) -> Any:
        return torch.tanh(settings.rate * h + x)

    for rate in (0.5, 1.5):
        settings.rate = rate
        assert_close(nonlinear_recurrence(mutable, x, 0.0), loop(mutable, x, 0.0)[0])


@pytest.mark.thinned(7)
@each_backend
def test_steps_that_share_a_variable(backend: str) -> None:
    """Its value is that of the time of the call, also where an operator is read again later."""

    def results(function: Callable[..., Any], x: Tensor) -> list[Tensor]:
        found = []
        for k in (0.625, 3.0):
            first = x.new_full((2, 3), 0.25)
            found.append(function(lambda h, x: torch.tanh(k * h + x), x, first))  # noqa: B023
        return found

    def compared(x: Tensor) -> None:
        want = results(lambda *args: loop(*args)[0], x)
        got = results(lambda *args: nonlinear_recurrence(*args, backend=backend), x)
        assert_close(got, want)
        if x.requires_grad:
            weights = [draw(*x.shape, seed=k) for k in range(2)]
            for a, b, w in zip(got, want, weights, strict=True):
                assert_close(torch.autograd.grad(a, x, w), torch.autograd.grad(b, x, w))

    x = draw(2, 6, 3)
    compared(x)
    compared(x.clone().requires_grad_())
    compared(x.clone().requires_grad_())


@pytest.mark.exhaustive
def test_a_module_as_a_step() -> None:
    class Leaky(torch.nn.Module):
        def forward(self, h: Tensor, x: Tensor, rate: Tensor) -> Tensor:
            return torch.relu(rate * h + x)

    x, p = draw(2, 9, 3), torch.nn.Parameter(draw(3))
    got = nonlinear_recurrence(Leaky(), x, 0.0, params=p)
    want = loop(Leaky().forward, x, 0.0, params=p)[0]
    assert_close(got, want)
    assert_close(torch.autograd.grad(got.sum(), p), torch.autograd.grad(want.sum(), p))


@pytest.mark.thinned(7)
@each_backend
@pytest.mark.parametrize("where", [(0, None, None), (0, 0, None), (None, 0, 0), (1, 0, 0)])
def test_vmap(where: tuple[Any, ...], backend: str) -> None:
    x, h, p = (
        draw(*((4, *shape) if dim == 0 else (shape[0], 4, *shape[1:]) if dim == 1 else shape))
        for shape, dim in zip(((2, 6, 3), (2, 3), (3,)), where, strict=True)
    )

    def one(x: Tensor, h: Tensor, p: Tensor) -> Any:
        return nonlinear_recurrence(decayed, x, h, params=p, return_final=True, backend=backend)

    want = torch.vmap(lambda x, h, p: loop(decayed, x, h, params=p), where)(x, h, p)
    for _ in range(2):
        assert_close(torch.vmap(one, where)(x, h, p), want)


@pytest.mark.exhaustive
@each_backend
def test_torch_func(backend: str) -> None:
    x, h, p = draw(1, 3, 2), draw(1, 2), draw(2)

    def of(function: Callable[..., Any]) -> Callable[..., Tensor]:
        def scalar(x: Tensor, h: Tensor, p: Tensor) -> Tensor:
            found = function(decayed, x, h, params=p)
            found = found[0] if isinstance(found, tuple) else found
            return (found**3).sum()

        return scalar

    ours: Any = of(lambda *a, **o: nonlinear_recurrence(*a, **o, backend=backend))
    theirs = of(loop)
    for argnum in range(3):
        for _ in range(2):
            got = torch.func.grad(ours, argnum)(x, h, p)
            assert_close(got, torch.func.grad(theirs, argnum)(x, h, p))
        assert_close(
            torch.func.hessian(ours, argnum)(x, h, p), torch.func.hessian(theirs, argnum)(x, h, p)
        )
    rows = draw(4, 1, 3, 2)
    got = torch.vmap(torch.func.grad(ours), (0, None, None))(rows, h, p)
    assert_close(got, torch.vmap(torch.func.grad(theirs), (0, None, None))(rows, h, p))


@each_backend
def test_autocast(backend: str) -> None:
    """It changes nothing: the step is traced outside of it."""
    x = draw(2, 6, 3, dtype=torch.float32)
    want = nonlinear_recurrence(decayed, x, 0.0, params=0.5, backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        got = nonlinear_recurrence(decayed, x, 0.0, params=0.5, backend=backend)
        narrow = nonlinear_recurrence(decayed, x.bfloat16(), 0.0, params=0.5, backend=backend)
    assert got.dtype == torch.float32 and torch.equal(got, want)
    assert narrow.dtype == torch.bfloat16


@pytest.mark.exhaustive
def test_default_device_and_dtype() -> None:
    whole = torch.arange(6).view(1, 6, 1)
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, F64, torch.float32):
            torch.set_default_dtype(dtype)
            assert nonlinear_recurrence(decayed, whole, 0.0, params=0.5).dtype == dtype
    finally:
        torch.set_default_dtype(before)
    x = draw(1, 3, 2)
    for _ in range(2):
        with torch.device("meta"):
            got = nonlinear_recurrence(decayed, x, 0.25, params=0.375)
        assert_close(got, loop(decayed, x, 0.25, params=0.375)[0])


def test_meta() -> None:
    x = torch.empty(2, 6, 3, device="meta")
    h, last = nonlinear_recurrence(decayed, x, 0.0, params=0.5, return_final=True, backend="eager")
    assert h.device.type == "meta" and h.shape == (2, 6, 3) and last.shape == (2, 3)


@pytest.mark.exhaustive
def test_threads() -> None:
    """Steps that no thread has seen, and the same ones, at once."""
    x = draw(2, 50, 3)
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for k in range(6):
                scale = 0.1 * (k % 3 + 1)

                def step(h: Any, x: Any, scale: float = scale) -> Any:
                    return torch.tanh(scale * h + x)

                leaf = x.clone().requires_grad_()
                got = nonlinear_recurrence(step, leaf, 0.0)
                got.sum().backward()
                assert_close(got, loop(step, x, 0.0)[0])
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


@pytest.mark.exhaustive
def test_without_a_compiler() -> None:
    """In a process that cannot run the C++ compiler, torch operations run the loop."""
    code = (
        "import torch, warnings; from assocscan import nonlinear_recurrence as f\n"
        "warnings.simplefilter('ignore')\n"
        "x = torch.linspace(-1, 1, 5, requires_grad=True)\n"
        "y = f(lambda h, x: torch.sin(h * 1.0625) + x, x, 0.0, 0); y.sum().backward()\n"
        "h = torch.zeros(())\n"
        "for t in range(5): h = torch.sin(h * 1.0625) + x[t]\n"
        "assert torch.allclose(h, y[-1]), (h, y)\n"
    )
    environment = {**os.environ, "CXX": "/nowhere", "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True,
                          text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
