"""The C++ compiler and its cache: missing, failing, interrupted, shared; threads and fork."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from processes import (
    COMPILER,
    Run,
    compilations,
    libraries,
    needs_compiler,
    needs_fork,
    write_script,
)
from table import CASES, TWO_FLAGS, Problem, expected, options
from torch.utils._pytree import tree_leaves

from assocscan import associative_scan
from assocscan.engines.cpu import compiler
from assocscan.testing import assert_scan_close

pytestmark = needs_fork


@pytest.mark.slow
def test_without_a_compiler(run: Run, cache: Path, tmp_path: Path) -> None:
    """auto warns once for all operators and runs eagerly; naming the engine is refused."""
    script = """
def check(*missing):
    assert [scan(), scan(ops.max), scan()] == [SUM, MAX, SUM]
    with pytest.raises(BackendError) as error:
        scan(backend="cpu")
    for message in (only_warning(), str(error.value)):
        assert "no C++ compiler" in message, message
        assert all(name in message for name in missing), message
    assert len(warned) == 1

wait(fork(lambda: check("c++", "g++", "clang++"), {"PATH": os.environ["EMPTY"]}))
wait(fork(lambda: check("/nonexistent"), {"CXX": "/nonexistent"}))
"""
    run(script, EMPTY=tmp_path)
    assert not cache.exists() or libraries(cache) == []


@pytest.mark.slow
def test_a_failing_compiler(run: Run, cache: Path, failing: Path) -> None:
    script = """
assert [scan(), scan()] == [SUM, SUM]
message = only_warning()
assert "boom" in message and "'sum'" in message, message
with pytest.raises(BackendError, match="boom"):
    scan(backend="cpu")
assert scan(ops.max) == MAX
assert len(warned) == 2 and "'max'" in warned[1][1], warned
"""
    run(script, CXX=failing)
    assert libraries(cache) == []


def test_a_failing_compilation_is_not_repeated(run: Run, cache: Path, failing: Path) -> None:
    run("assert [scan() for _ in range(3)] == [SUM] * 3", CXX=failing)
    assert compilations(failing.parent) == 1


@needs_compiler
@pytest.mark.parametrize("what", ["compiler", "library"])
def test_auto_never_raises_for_what_cannot_be_run(
    run: Run, cache: Path, tmp_path: Path, what: str
) -> None:
    """A compiler that is no program, and a cached library that is none (a full disk, noexec)."""
    script = """
if "CXX" not in os.environ:
    wait(fork(lambda: scan(backend="cpu")))
    for library in CACHE.iterdir():
        library.write_text("truncated")
assert scan() == SUM
"""
    text = write_script(tmp_path / "text", "")
    text.write_text("no program\n", encoding="utf-8")
    run(script, **({"CXX": text} if what == "compiler" else {}))


@pytest.mark.slow
@needs_compiler
def test_a_cache_folder_that_cannot_be_written(run: Run, tmp_path: Path) -> None:
    """One warning for all kernels, which go to a folder that no one else can write to."""
    (tmp_path / "file").touch()
    (tmp_path / "temporary").mkdir()
    script = """
assert [scan(), scan(ops.max)] == [SUM, MAX]
folder, = Path(os.environ["TMPDIR"]).glob("assocscan-*")
assert str(CACHE) in only_warning() and str(folder) in only_warning()
assert folder.stat().st_mode & 0o777 == 0o700
assert sorted(path.suffix for path in folder.iterdir()) == [".so", ".so"]
assert scan(ops.min, backend="cpu") == [0] * 5
assert len(warned) == 1
"""
    run(script, ASSOCSCAN_CACHE_DIR=tmp_path / "file/cache", TMPDIR=tmp_path / "temporary")


@needs_compiler
def test_processes_that_compile_the_same_kernel_at_once(run: Run, cache: Path) -> None:
    script = """
ready, go = os.pipe()

def check():
    os.close(go)
    os.read(ready, 1)  # until the parent closes its end
    assert scan(backend="cpu") == SUM and not warned

processes = [fork(check) for _ in range(4)]
os.close(go)
for process in processes: wait(process)
"""
    run(script)
    assert len(libraries(cache)) == 1


@needs_compiler
def test_an_interrupted_compilation_leaves_nothing(run: Run, cache: Path, tmp_path: Path) -> None:
    """Neither files nor a compiler that still runs; the next call compiles."""
    interrupting = f"""case "$*" in *--version*) exec {COMPILER} "$@";; esac
mkdir {tmp_path}/first 2>/dev/null || exec {COMPILER} "$@"
for last; do :; done
echo half a library > "$last"
kill -INT $PPID
sleep 60 & echo $! > {tmp_path}/child; wait"""
    script = f"""
with pytest.raises(KeyboardInterrupt):
    scan()
assert list(CACHE.iterdir()) == []
child = Path("{tmp_path}/child")
number = child.read_text().strip() if child.exists() else ""
if number:  # else the interrupt came before it was written
    time.sleep(0.2)
    state = Path("/proc") / number / "stat"
    assert not state.exists() or state.read_text().split()[2] == "Z"
assert scan(backend="cpu") == SUM and not warned
"""
    run(script, CXX=write_script(tmp_path / "interrupting", interrupting))
    assert len(libraries(cache)) == 1


@pytest.mark.slow
@needs_compiler
def test_a_second_process_finds_the_kernel(run: Run, cache: Path, logging: Path) -> None:
    """Unless its compiler has another version."""
    script = """
def check():
    assert scan(backend="cpu") == SUM

wait(fork(check))
wait(fork(check))
assert len(list(CACHE.iterdir())) == 1
wait(fork(check, {"VERSION": "another"}))
assert len(list(CACHE.iterdir())) == 2
"""
    run(script, CXX=logging)
    assert compilations(logging.parent) == len(libraries(cache)) == 2


@needs_compiler
def test_other_arguments_make_another_kernel(run: Run, cache: Path, logging: Path) -> None:
    script = """
for level in ("-O1", "-DNDEBUG"):
    wait(fork(lambda: scan(backend="cpu"), {"CXX": f"{os.environ['LOGGING']} {level}"}))
"""
    run(script, LOGGING=logging)
    assert compilations(logging.parent) == len(libraries(cache)) == 2


X86 = """processor	: {0}
model name	: A processor
cpu MHz		: 2{0}00.0
flags		: fpu sse avx2
vmx flags	: ept

"""
ARM = """processor	: {0}
BogoMIPS	: 10{0}.00
Features	: fp asimd {1}
CPU implementer	: 0x41
CPU part	: {2}

"""


def test_the_cpu_in_the_key() -> None:
    """It tells ARM processors apart; two cores, at any clock, are one processor."""
    x86 = compiler.description("".join(X86.format(k) for k in range(2)))
    assert x86 == "model name\t: A processor\nflags\t\t: fpu sse avx2"
    found = {
        compiler.description("".join(map(ARM.format, range(2), features, parts)))
        for features in (("", ""), ("sve", "sve"))
        for parts in (("0xd0c", "0xd0c"), ("0xd40", "0xd40"), ("0xd0c", "0xd40"))
    }
    assert len(found) == 6
    assert compiler.description(ARM.format(0, "", "0xd0c")) in found


@pytest.mark.exhaustive
@needs_compiler
def test_threads_that_need_the_same_kernels_at_once(run: Run, cache: Path) -> None:
    script = """
numbers = torch.linspace(-1, 1, 500)
a, b = numbers.expand(3, -1), numbers.flip(0).expand(3, -1)
barrier, results, errors = threading.Barrier(6), [], []

def work():
    try:
        barrier.wait()
        for _ in range(20):
            x, y = a.clone().requires_grad_(), b.clone().requires_grad_()
            _, h = associative_scan(ops.affine, (x, y), axis=1, backend="cpu")
            h.square().sum().backward()
            results.append((h.detach(), x.grad, y.grad, torch.tensor(scan(backend="cpu"))))
    except BaseException as error:
        errors.append(error)

threads = [threading.Thread(target=work) for _ in range(6)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not errors and not warned, (errors, warned)
assert len(results) == 120
assert all(torch.equal(s, t) for one in results for s, t in zip(one, results[0]))
h = torch.zeros(3)
for t in range(500):
    h = a[:, t] * h + b[:, t]
    assert torch.allclose(results[0][0][:, t], h, atol=1e-5)
assert results[0][3].tolist() == SUM
"""
    run(script)
    assert len(libraries(cache)) == 3


@needs_compiler
def test_after_fork(run: Run, cache: Path) -> None:
    """The child has its parent's kernels, makes its own, and starts its own threads."""
    script = """
torch.set_num_threads(2)
x = torch.arange(20000).remainder(7)
wanted = x.cumsum(0).tolist()

def check():
    for _ in range(3):
        assert associative_scan(ops.sum, x, backend="cpu").tolist() == wanted
    assert scan(ops.max, backend="cpu") == MAX

assert associative_scan(ops.sum, x, backend="cpu").tolist() == wanted
wait(fork(check))
check()
assert not warned
"""
    run(script)
    assert len(libraries(cache)) == 2


@needs_compiler
def test_fork_while_another_thread_compiles(run: Run, cache: Path, tmp_path: Path) -> None:
    """The first compilation waits until the child has finished its own."""
    slow = f"""case "$*" in *--version*) ;; *)
mkdir {tmp_path}/first 2>/dev/null && while ! test -e {tmp_path}/done; do sleep 0.1; done;; esac
exec {COMPILER} "$@"
"""
    script = f"""
thread = threading.Thread(target=scan)
thread.start()
while not os.path.exists("{tmp_path}/first"):
    time.sleep(0.05)
process = fork(lambda: scan(ops.max, backend="cpu"), seconds=8)
status = os.waitpid(process, 0)[1]
Path("{tmp_path}/done").touch()
thread.join()
assert status == 0, status
"""
    run(script, CXX=write_script(tmp_path / "slow", slow))


LONG = 16500  # is cut among three threads


@pytest.fixture
def restored_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.thinned(9)
@needs_compiler
@pytest.mark.parametrize("flags", TWO_FLAGS, ids=str)
@pytest.mark.parametrize(
    "problem",
    [
        Problem("bicyclic", (1, LONG), axis=1),
        Problem("float64", (1, LONG), axis=1),
        Problem("float64", (LONG, 9), axis=0),
    ],
    ids=["integer row", "float row", "float columns"],
)
@pytest.mark.usefixtures("restored_threads")
def test_one_long_row_on_several_threads(problem: Problem, flags: object) -> None:
    """Right for every number of threads, and bitwise equal from run to run."""
    op = CASES[problem.case].op
    xs, init = problem.inputs()
    oracle = expected(problem, flags)
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        first, *others = (
            associative_scan(op, xs, **options(problem, flags, init), backend="cpu")
            for _ in range(5)
        )
        assert_scan_close(first, oracle, LONG)
        for again in others:
            assert all(map(torch.equal, tree_leaves(again), tree_leaves(first)))
