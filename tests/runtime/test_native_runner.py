"""The runner in C++ gives what the runner in Python gives, and leaves to it what it cannot do."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from processes import COMPILER, Run, libraries, write_script
from table import FLAGS, GPU, Engine, Flags
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import assocscan
from assocscan import BackendError, Monoid, associative_scan, monoid, ops
from assocscan.engines.base.executable import Executable
from assocscan.monoids.monoid import _REGISTRY, monoids
from assocscan.runtime import autograd
from assocscan.runtime.backends import availability
from assocscan.runtime.native import build, runner
from assocscan.runtime.native.programs import program_of


@pytest.fixture(autouse=True)
def loaded() -> Iterator[None]:
    if build.why_not() is not None:
        pytest.skip(str(build.why_not()))
    if runner.module is None:
        runner.load()
    assert runner.module is not None, runner.why_not
    for known in monoids().values():
        known.calls.clear()
        known.reductions.clear()
    yield


@pytest.fixture
def in_python(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], Any]:
    """Calls a function while the C++ runner is switched off."""

    def call(function: Callable[[], Any]) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(runner, "call", runner.never)
            patch.setattr(runner, "module", None)
            patch.setenv(runner.VARIABLE, "python")
            return function()

    return call


def answers(
    op: Any,
    xs: Any,
    axis: Any = 0,
    reverse: Any = False,
    inclusive: bool = True,
    init: Any = None,
    return_final: bool = False,
    backend: str = "auto",
) -> Any:
    """The result of the C++ runner alone; MISS where it does not know the call."""
    return runner.call(op, xs, axis, reverse, inclusive, init, return_final, backend)


def same(found: Any, expected: Any) -> None:
    a, b = tree_leaves(found), tree_leaves(expected)
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert x.dtype == y.dtype and x.stride() == y.stride()
        assert torch.equal(x, y)


@monoid(identity=((1.0, 0.0), 0.0), name="tests.nested")
def nested(left: Any, right: Any) -> Any:
    (a, b), c = left
    (p, q), r = right
    return (a * p, b * p + q), torch.maximum(c, r)


AFFINE = (ops.affine, lambda *shape: (torch.rand(shape), torch.randn(shape)))
CASES: dict[str, tuple[Monoid, Callable[..., Any]]] = {
    "sum": (ops.sum, lambda *shape: torch.randn(shape)),
    "affine": AFFINE,
    "nested": (
        nested,
        lambda *shape: ((torch.rand(shape), torch.randn(shape)), torch.randn(shape)),
    ),
    "complex": (
        ops.affine,
        lambda *shape: (
            torch.randn(shape, dtype=torch.complex64),
            torch.randn(shape, dtype=torch.complex64),
        ),
    ),
    "bfloat16": (ops.affine, lambda *shape: tuple(t.bfloat16() for t in AFFINE[1](*shape))),
    "matmul": (ops.matmul, lambda *shape: torch.randn(*shape, 3, 3) / 2),
}


@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.thinned(30)
def test_calls_and_gradients_are_the_same(
    engine: Engine, name: str, flags: Flags, in_python: Any
) -> None:
    if engine.name == "eager" or engine.interpreted:
        pytest.skip("eager calls are not cached, and Triton's interpreter runs in Python")
    op, draw = CASES[name]
    torch.manual_seed(0)
    tensors = [engine.put(draw(2, 40, 3)).requires_grad_()] if name in ("sum", "matmul") else [
        engine.put(t).requires_grad_() for t in tree_leaves(draw(2, 40, 3))
    ]  # fmt: skip
    shape = draw(2, 40, 3)
    xs = torch.utils._pytree.tree_unflatten(tensors, torch.utils._pytree.tree_structure(shape))
    state = engine.put(torch.utils._pytree.tree_map(lambda t: torch.rand_like(t[:, 0]), xs))
    accumulated = {torch.bfloat16: torch.float32}
    state = torch.utils._pytree.tree_map(
        lambda t: t.to(accumulated.get(t.dtype, t.dtype)).requires_grad_(), state
    )
    wanted = [*tensors, *(tree_leaves(state) if flags.init else [])]

    def both() -> Any:
        found = engine.scan(
            op, xs, 1, reverse=flags.reverse, inclusive=flags.inclusive,
            init=state if flags.init else None, return_final=flags.final,
        )  # fmt: skip
        results = tree_leaves(found)
        cotangents = [torch.ones_like(t) for t in results]
        return found, torch.autograd.grad(results, wanted, cotangents)

    expected = in_python(lambda: [both() for _ in range(3)][-1])
    for _ in range(
        4
    ):  # prepared; run in Python; registered with the runner; run by it, backward twice
        same(both(), expected)
    init = state if flags.init else None
    hot = answers(op, xs, 1, flags.reverse, flags.inclusive, init, flags.final, engine.name)
    assert hot is not runner.MISS
    assert tree_leaves(hot)[0].grad_fn.name() == "ScanBackward"
    same(hot, expected[0])


@pytest.mark.thinned(7)
@pytest.mark.parametrize("backend", ["cpu", "triton", "multipass", "cuda"])
@pytest.mark.parametrize("packed", [False, True])
def test_both_runners_run_the_same_lists(
    backend: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every executable that these calls run is run by both."""
    if availability()[backend] is not None:
        pytest.skip(f"no {backend}")
    engine = Engine(backend, GPU if backend != "cpu" else "cpu")
    if engine.device == "cpu" and backend != "cpu":
        pytest.skip("Triton's interpreter runs in Python")
    compared = []
    original = Executable.run

    def twice(executable: Executable, tensors: Any) -> Any:
        outputs, finals = original(executable, tensors)
        program = program_of(runner.module, executable)
        assert program is not None
        found = runner.module.run(program, tensors)
        assert found is not runner.MISS
        same(found, [*outputs, *finals])
        compared.append(executable)
        return outputs, finals

    monkeypatch.setattr(Executable, "run", twice)
    monkeypatch.setattr(runner, "run", lambda executable, tensors: executable.run(tensors))
    offsets = torch.tensor([0, 3, 3, 200, 300]) if packed else None
    for length, width in ((300, 5), (300, 40), (300, 1)):
        for op, draw in CASES.values():
            xs = engine.put(draw(length, width))
            engine.scan(op, xs, 0, return_final=True, offsets=engine.put(offsets))
    assert len(compared) >= 6


def known_call(axis: int = 1, grad: bool = True) -> tuple[Any, ...]:
    """A call that the runner knows."""
    xs = torch.rand(2, 30).requires_grad_(grad), torch.randn(2, 30).requires_grad_(grad)
    for _ in range(4):
        y = associative_scan(ops.affine, xs, axis)
        if grad:
            torch.autograd.grad(y, xs, [torch.ones(2, 30)] * 2)
    assert answers(ops.affine, xs, axis) is not runner.MISS
    return xs


@pytest.mark.thinned(8)
@pytest.mark.parametrize("with_init", [False, True])
@pytest.mark.parametrize("name", ["sum", "affine", "nested", "complex", "matmul"])
def test_reductions_and_their_gradients_are_the_same(
    name: str, with_init: bool, in_python: Any
) -> None:
    op, draw = CASES[name]
    torch.manual_seed(0)
    xs = draw(2, 40, 3)
    leaves = [t.to(GPU or "cpu").requires_grad_() for t in tree_leaves(xs)]
    xs = torch.utils._pytree.tree_unflatten(leaves, torch.utils._pytree.tree_structure(xs))
    init = torch.utils._pytree.tree_map(lambda t: t.detach()[:, 0].clone().requires_grad_(), xs)
    init = init if with_init else None
    wanted = [*leaves, *(tree_leaves(init) if with_init else [])]

    def both() -> Any:
        found = assocscan.reduce(op, xs, 1, reverse=with_init, init=init)
        results = tree_leaves(found)
        return found, torch.autograd.grad(results, wanted, [torch.ones_like(t) for t in results])

    expected = in_python(lambda: [both() for _ in range(3)][-1])
    ordinary = tree_leaves(associative_scan(op, xs, 1, with_init, init=init, return_final=True)[1])
    for found, final in zip(tree_leaves(expected[0]), ordinary, strict=True):
        torch.testing.assert_close(found, final)
    op.reductions.clear()
    for _ in range(4):
        same(both(), expected)
    hot = answers(op.reductions, xs, 1, with_init, True, init, True)
    assert hot is not runner.MISS
    assert tree_leaves(hot)[0].grad_fn.name() == "ScanBackward"
    same(hot, expected[0])
    assert answers(op, xs, 1, with_init, True, init, True) is runner.MISS  # that is a scan


@pytest.mark.thinned(7)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128])
@pytest.mark.parametrize("with_init", [False, True])
def test_last_states_are_answered(
    dtype: torch.dtype, with_init: bool, in_python: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    a, b = (torch.randn(2, 30, 3).to(dtype).requires_grad_() for _ in range(2))
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    init = torch.randn(2, 3).to(wide).requires_grad_() if with_init else None
    wanted = [a, b] if init is None else [a, b, init]

    def both() -> Any:
        last = assocscan.linear_recurrence(a, b, init, return_final="only")
        assert last.dtype == wide
        return last, torch.autograd.grad(last, wanted, torch.ones_like(last))

    expected = in_python(lambda: [both() for _ in range(3)][-1])
    for _ in range(4):
        same(both(), expected)
    monkeypatch.setattr("assocscan.functional.recurrence._recur", None)
    same(both(), expected)
    with pytest.raises(TypeError):  # of another length: what the runner does not know
        assocscan.linear_recurrence(a[:, 1:], b[:, 1:], init, return_final="only")


@pytest.mark.thinned(7)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("with_grad", [False, True])
def test_an_init_that_is_converted_and_expanded(dtype: torch.dtype, with_grad: bool) -> None:
    """Such calls are kept and answered too, with and without gradients."""
    a, b, p, h = [
        torch.rand(shape, dtype=dtype, requires_grad=with_grad)
        for shape in ((2, 12, 4), (2, 12, 4), (4,), (2, 1))
    ]

    def outcome(backend: str, h: Tensor) -> list[Tensor]:
        xs, init = (a, b), (p, h)
        (y, last) = associative_scan(
            ops.affine, xs, 1, init=init, return_final=True, backend=backend
        )
        results = [*y, *last]
        seeds = [torch.ones_like(t) for t in results]
        return results + list(
            torch.autograd.grad(results, (*xs, *init), seeds) if with_grad else ()
        )

    for init in (h, h, h, h, (2 * h).detach().requires_grad_(with_grad)):
        found, expected = outcome("cpu", init), outcome("eager", init)
        torch.testing.assert_close(found, expected, rtol=5e-3, atol=5e-3)
        assert [t.shape for t in found] == [t.shape for t in expected]
    assert len(ops.affine.calls) == 1
    known = answers(ops.affine, (a, b), 1, init=(p, h), return_final=True, backend="cpu")
    assert known is not runner.MISS


def test_gradients_that_are_summed_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the dimensions along which a leaf broadcasts: the fifth backward pass is in C++."""
    a, b = (torch.rand(shape, requires_grad=True) for shape in ((1, 12, 1), (2, 12, 4)))
    g = torch.randn(2, 12, 4)

    def gradients(backend: str) -> tuple[Tensor, ...]:
        _, y = associative_scan(ops.affine, (a, b), 1, backend=backend)
        return torch.autograd.grad(y, (a, b), g)

    def refused(*arguments: Any) -> Any:
        raise AssertionError("a backward pass in Python")

    expected = gradients("eager")
    for k in range(5):
        if k == 4:
            monkeypatch.setattr(autograd.Scan, "backward", refused)
        torch.testing.assert_close(gradients("cpu"), expected)


def test_other_surroundings_are_left_to_python() -> None:
    a, b = known_call()

    class Own(Tensor):
        pass

    def is_missed(x: Any, y: Any) -> None:
        assert answers(ops.affine, (x, y), 1) is runner.MISS

    is_missed(a.as_subclass(Own), b)
    is_missed(a.detach().clone().to(torch.complex64).conj(), b)
    is_missed([a], b)
    assert answers(ops.affine, [a, b], 1) is runner.MISS
    assert answers("affine", (a, b), 1) is runner.MISS
    assert answers(ops.affine, (a, b), 1.0) is runner.MISS
    assert answers(ops.affine, (a, b), 1, 1) is runner.MISS
    assert answers(ops.affine, (a, b), 2**70) is runner.MISS
    assert answers(ops.affine, (a.double(), b), 1) is runner.MISS
    assert answers(ops.affine, (a.detach(), b), 1) is runner.MISS
    assert answers(ops.affine, (a, b), 1, backend="cpu") is runner.MISS
    torch.func.vmap(lambda x, y: is_missed(x, y) or x)(a.detach(), b.detach())
    with torch.autograd.forward_ad.dual_level():
        is_missed(torch.autograd.forward_ad.make_dual(a.detach(), b.detach()), b)
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return f(*args, **(kwargs or {}))

    with Watch():
        is_missed(a, b)
    with torch.no_grad():
        is_missed(a, b)
    assert answers(ops.affine, (a, b), 1) is not runner.MISS


@pytest.mark.slow
def test_second_derivatives_batches_and_hooks_run_in_python() -> None:
    xs = known_call()
    assert torch.autograd.gradgradcheck(
        lambda *t: associative_scan(ops.affine, t, 1),
        tuple(torch.rand(2, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)),
    )
    y = associative_scan(ops.affine, xs, 1)[1]
    assert y.grad_fn.name() == "ScanBackward"
    batch = torch.randn(5, *y.shape)
    together = torch.autograd.grad(y, xs, batch, is_grads_batched=True, retain_graph=True)
    for k in range(5):
        alone = torch.autograd.grad(y, xs, batch[k], retain_graph=True)
        torch.testing.assert_close([part[k] for part in together], list(alone))
    once = torch.autograd.grad(y.square().sum(), xs, create_graph=True)
    assert all(g.requires_grad for g in once)
    with torch.autograd.set_detect_anomaly(True):
        associative_scan(ops.affine, xs, 1)[1].sum().backward()
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        y = associative_scan(ops.affine, xs, 1)[1]
    assert y.grad_fn.name() == "ScanBackward" and packed
    torch.autograd.grad(y.sum(), xs)


def test_checkpoints() -> None:
    xs = known_call()
    expected = torch.autograd.grad(associative_scan(ops.affine, xs, 1)[1].sum(), xs)

    def last(a: Tensor, b: Tensor) -> Tensor:
        return associative_scan(ops.affine, (a, b), 1)[1]

    for reentrant in (False, True):
        for x in xs:
            x.grad = None
        y: Any = checkpoint(last, *xs, use_reentrant=reentrant)
        y.sum().backward()
        same([x.grad for x in xs], expected)


def test_errors_of_autograd() -> None:
    xs = known_call()
    y = associative_scan(ops.affine, xs, 1)[1]
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()
    ys = associative_scan(ops.affine, xs, 1)
    with torch.no_grad():
        xs[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        ys[1].sum().backward()


def test_integers_are_summed_in_int64_after_another_call() -> None:
    x = torch.arange(10, dtype=torch.int32)
    for _ in range(4):
        assert associative_scan(ops.sum, x).dtype == torch.int32
    assert answers(ops.sum, x) is not runner.MISS
    for _ in range(4):
        assert assocscan.cumsum(x, 0).dtype == torch.int64


def test_results_without_gradient_have_none() -> None:
    x = torch.randn(2, 30, requires_grad=True)
    values, indices = x, torch.arange(30)[None]
    for _ in range(4):
        found = associative_scan(ops.argmax, (values, indices), 1)
    hot = answers(ops.argmax, (values, indices), 1)
    assert hot is not runner.MISS and hot[0].requires_grad and not hot[1].requires_grad
    g = torch.randn(2, 30)
    same(torch.autograd.grad(hot[0], x, g), torch.autograd.grad(found[0], x, g))


def test_a_monoid_is_freed_with_its_calls() -> None:
    op = monoid(lambda a, b: a + b, identity=0.0, name="tests.short_lived")
    x = torch.randn(50, requires_grad=True)
    for _ in range(4):
        associative_scan(op, x).sum().backward()
        assocscan.reduce(op, x).backward()
    assert op.calls.native is not None and op.reductions.native is not None
    kept = weakref.ref(op)
    del _REGISTRY["tests.short_lived"], op
    gc.collect()
    assert kept() is None


def mixed_calls(seed: int, count: int) -> None:
    """Random known and unknown calls, with and without gradient, against torch."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, 64), (3, 50), (2, 33)]
    for k in range(count):
        shape = shapes[int(torch.randint(3, (), generator=generator))]
        x = torch.randint(-8, 9, shape, generator=generator).float()
        if k % 3 == 0:
            x.requires_grad_()
        y = assocscan.cumsum(x, 1)
        assert torch.equal(y, torch.cumsum(x, 1))
        if x.requires_grad:
            (g,) = torch.autograd.grad(y.sum(), x)
            assert torch.equal(g[0], torch.arange(shape[1], 0, -1.0))


@pytest.mark.parametrize("count", [300, pytest.param(100_000, marks=pytest.mark.exhaustive)])
def test_threads(count: int) -> None:
    failed: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            mixed_calls(seed, count)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


@pytest.mark.parametrize("count", [20_000, pytest.param(1_000_000, marks=pytest.mark.exhaustive)])
def test_memory_stays_flat(count: int) -> None:
    x = torch.randn(64, requires_grad=True)
    g = torch.ones(64)

    def resident() -> int:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * 4096

    for _ in range(2000):
        torch.autograd.grad(assocscan.cumsum(x, 0), x, g)
    gc.collect()
    before = resident()
    for _ in range(count):
        torch.autograd.grad(assocscan.cumsum(x, 0), x, g)
    assert resident() - before < 4 << 20


def test_the_oldest_calls_make_room() -> None:
    op = monoid(lambda a, b: a + b, identity=0.0, name="tests.many_calls")
    x = torch.randn(4)
    for _ in range(3):
        associative_scan(op, x)
    calls = op.calls.native
    program = program_of(runner.module, next(iter(op.calls.values())).executable)
    for axis in range(5000):
        runner.module.insert_call(
            calls, x, axis, False, True, None, False, "auto", None, program, None, 0, (0,)
        )
    assert answers(op, x, 4999) is not runner.MISS
    assert answers(op, x, 1) is runner.MISS


@pytest.fixture
def refusing(tmp_path: Path) -> Path:
    """A compiler that fails on the runner alone."""
    text = f'case "$*" in *runner.cpp*) echo boom >&2; exit 1;; *) exec {COMPILER} "$@";; esac'
    return write_script(tmp_path / "refusing", text)


@pytest.mark.slow(2)
@pytest.mark.parametrize("mode", ["wait", "background", "python"])
def test_scans_run_without_a_runner(run: Run, refusing: Path, mode: str) -> None:
    script = """
        from assocscan.runtime.native import runner
        from assocscan.cli import env
        for _ in range(4):
            assert scan() == SUM
        if MODE == "background":
            for thread in threading.enumerate():
                if thread.name == "assocscan runner":
                    thread.join()
        assert runner.module is None
        line = env.runner_line()
        assert ("ASSOCSCAN_RUNNER" if MODE == "python" else "boom") in line, line
        for _ in range(2):
            assert scan() == SUM
        assert not [text for category, text in warned if category is FallbackWarning]
    """
    run(
        dedent(script).replace("MODE", repr(mode)),
        ASSOCSCAN_RUNNER=mode, CXX=refusing,
    )  # fmt: skip


def test_a_child_of_a_process_that_compiles(run: Run, logging: Path) -> None:
    """The thread that compiles is not in the child, which answers in Python or compiles itself."""
    script = """
        from assocscan.runtime.native import runner
        for _ in range(3):
            scan()
        assert runner._started
        def child():
            for _ in range(4):
                assert scan() == SUM
        wait(fork(child))
    """
    run(
        dedent(script),
        ASSOCSCAN_RUNNER="background", CXX=logging,
    )  # fmt: skip


@pytest.fixture
def endless(tmp_path: Path) -> Path:
    """A compiler that never finishes the runner; it writes its process id, and its child's."""
    text = f"""case "$*" in *runner.cpp*) ;; *) exec {COMPILER} "$@";; esac
sleep 100 & echo $! > {tmp_path}/child
echo $$ > {tmp_path}/written; mv {tmp_path}/written {tmp_path}/begun; wait"""
    return write_script(tmp_path / "endless", text)


def runs(number: str) -> bool:
    try:
        state = Path("/proc", number.strip(), "stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return state.rpartition(")")[2].split()[0] != "Z"


def check_nothing_is_left(folder: Path, cache: Path) -> None:
    time.sleep(0.2)
    left = [name for name in ("begun", "child") if (folder / name).exists()]
    left = [name for name in left if runs((folder / name).read_text(encoding="utf-8"))]
    for name in left:
        os.kill(int((folder / name).read_text(encoding="utf-8")), signal.SIGKILL)
    assert left == []
    libraries(cache)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are found in /proc")
@pytest.mark.parametrize("end", ["before", "while", "worker"])
def test_a_process_that_ends_stops_the_compiler(
    run: Run, cache: Path, endless: Path, tmp_path: Path, end: str
) -> None:
    """Whether its compiler runs by then or would be started a moment later."""
    script = """
        import atexit, multiprocessing
        from assocscan.runtime.native import build

        def begin():
            for _ in range(3):
                assert scan() == SUM

        def wait_for_compiler():
            while not os.path.exists(BEGUN):
                time.sleep(0.02)

        def ends():
            if END == "before":  # the thread reaches the compiler after the callbacks
                compiled, ended = build.compiled, threading.Event()
                build.compiled = lambda *options: ended.wait() and compiled(*options)
                begin()
                atexit._run_exitfuncs()
                ended.set()
                time.sleep(0.5)  # so long that a compiler would be started
            else:
                begin()
                wait_for_compiler()
                if END == "while":
                    start = time.monotonic()
                    atexit._run_exitfuncs()
                    assert time.monotonic() - start < 5

        if END == "worker":
            worker = multiprocessing.get_context("fork").Process(target=ends)
            worker.start()
            worker.join()
            assert worker.exitcode == 0
        else:
            wait(fork(ends))
    """
    script = dedent(script).replace("END", repr(end)).replace("BEGUN", repr(f"{tmp_path}/begun"))
    run(script, ASSOCSCAN_RUNNER="background", CXX=endless)
    check_nothing_is_left(tmp_path, cache)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are found in /proc")
def test_a_short_program_leaves_nothing(cache: Path, endless: Path, tmp_path: Path) -> None:
    """Other callbacks of `atexit`, here one that sleeps, let its threads go on for a while."""
    script = """
        import atexit, time
        atexit.register(time.sleep, 0.5)
        import torch, assocscan
        for _ in range(20):
            assocscan.cumsum(torch.ones(5))
    """
    environment = {"ASSOCSCAN_CACHE_DIR": str(cache), "ASSOCSCAN_RUNNER": "background"}
    environment = {**os.environ, **environment, "CXX": str(endless)}
    command = [sys.executable, "-c", dedent(script)]
    subprocess.run(command, env=environment, check=True, timeout=60)
    check_nothing_is_left(tmp_path, cache)


def test_errors_in_python_functions_reach_the_caller() -> None:
    """Ctrl-C, say; after a BackendError the runner in Python is asked."""

    def program(error: BaseException) -> Any:
        def raising(t: Tensor) -> list[Tensor]:
            raise error

        command = ("python", raising, (0,), (1,))
        return runner.module.program(2, 1, -1, (), (command,), (1,))

    x = torch.ones(3)
    with pytest.raises(KeyboardInterrupt):
        runner.module.run(program(KeyboardInterrupt()), [x])
    assert runner.module.run(program(BackendError("no")), [x]) is runner.MISS


def test_hooks_on_new_nodes() -> None:
    hook = getattr(torch.autograd.graph, "node_creation_hook", None)
    if hook is None:
        pytest.skip("this torch has no node_creation_hook")
    xs = known_call()
    made: list[str] = []
    with hook(lambda node: made.append(node.name())):
        associative_scan(ops.affine, xs, 1)
    assert made.count("ScanBackward") == 1


def test_a_wrong_value_is_said_once(run: Run) -> None:
    script = """
        from assocscan.runtime.native import runner
        for _ in range(4):
            assert scan() == SUM
        assert runner.module is None
        [said] = [text for category, text in warned if category is FallbackWarning]
        assert "'c++'" in said
    """
    run(dedent(script), ASSOCSCAN_RUNNER="c++")


def test_a_wrong_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(runner.VARIABLE, "c++")
    with pytest.raises(BackendError, match="ASSOCSCAN_RUNNER is 'c\\+\\+', expected one of"):
        runner.mode()
