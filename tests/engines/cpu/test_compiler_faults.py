"""Compilers that fail in every way: `auto` runs eagerly and says why, a named backend raises."""

from pathlib import Path

import pytest
from processes import (
    COMPILER,
    Run,
    compilations,
    libraries,
    needs_compiler,
    needs_fork,
    write_script,
)

pytestmark = [pytest.mark.thinned(4), needs_fork, needs_compiler]

# In the scripts $out is the library that is asked for.
FAULTS = {
    "writes nothing": (":", "ended without an error, but wrote no library"),
    "garbage": ("echo no library > $out", "cannot be loaded"),
    "an empty file": (": > $out", "an incomplete one of 0 bytes"),
    "half a library": (
        f'{COMPILER} "$@"; head -c 9000 $out > $out.half; mv $out.half $out',
        "an incomplete one of 9000 bytes",
    ),
    "a library without the function": (
        f"echo 'int x;' > $out.cpp; {COMPILER} -shared -fPIC $out.cpp -o $out",
        "undefined symbol: assocscan_run",
    ),
    "a folder": ("mkdir $out", "wrote no library"),
    "a pipe": ("mkfifo $out", "wrote no library"),
    "not UTF-8": ("printf 'boom \\377\\376'; exit 3", "exit status 3"),
    "killed": ("kill -9 $$", "killed by SIGKILL"),
    "hangs": ("sleep 100 & wait", "did not finish.*within 0.3 seconds"),
}
VERSIONS = {
    "not UTF-8": "printf '\\377\\376'; exit 0",
    "silent": "exit 0",
    "fails": "exit 1",
    "killed": "kill -9 $$",
}


def write_compiler(folder: Path, body: str, version: str = "echo fake; exit 0") -> Path:
    text = f"""case "$*" in *--version*) {version};; esac
echo "$*" >> {folder}/log
for out; do :; done
{body}"""
    return write_script(folder / "compiler", text)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_compiler_that_fails(run: Run, cache: Path, tmp_path: Path, fault: str) -> None:
    body, words = FAULTS[fault]
    script = f"""
assert [scan(), scan()] == [SUM, SUM]
with pytest.raises(BackendError, match={words!r}) as error:
    scan(backend="cpu")
said = only_warning()
import re
assert re.search({words!r}, said) and "'sum'" in said, said
assert "build-" not in said, "the name of a temporary folder makes every message another one"
"""
    script = "os.environ['ASSOCSCAN_COMPILE_SECONDS'] = '0.3'\n" * (fault == "hangs") + script
    run(script, CXX=write_compiler(tmp_path, body))
    assert compilations(tmp_path) == 1
    assert libraries(cache) == []


@pytest.mark.slow
@pytest.mark.parametrize("fault", VERSIONS)
def test_a_compiler_that_does_not_tell_its_version(
    run: Run, cache: Path, tmp_path: Path, fault: str
) -> None:
    compiler = write_compiler(tmp_path, f'exec {COMPILER} "$@"', VERSIONS[fault])
    run('assert scan(backend="cpu") == SUM and not warned', CXX=compiler)
    assert len(libraries(cache)) == 1


def test_a_compiler_whose_version_hangs(run: Run, tmp_path: Path) -> None:
    script = """
from assocscan.engines.cpu import compiler_process as build
build.VERSION_SECONDS = 0.2
assert scan(backend="cpu") == SUM and not warned
"""
    run(script, CXX=write_compiler(tmp_path, f'exec {COMPILER} "$@"', "sleep 100 & wait"))


def test_a_limit_that_is_no_number(run: Run) -> None:
    for text in ("soon", "-1", "0", "nan"):
        script = """
assert scan() == SUM
assert "ASSOCSCAN_COMPILE_SECONDS" in only_warning()
with pytest.raises(BackendError, match="expected a number of seconds above 0"):
    scan(backend="cpu")
"""
        run(script, ASSOCSCAN_COMPILE_SECONDS=text)


def test_a_failure_is_tried_again_later(run: Run, tmp_path: Path) -> None:
    """Ever more rarely; and what is mended works without another process."""
    body = f"""test -e {tmp_path}/mended || {{ echo 'No space left on device'; exit 1; }}
exec {COMPILER} "$@" """
    script = f"""
from assocscan.caching import load_once as once
clock = [0.0]
once.time = type("clock", (), {{"monotonic": staticmethod(lambda: clock[0])}})
attempts = []
for step in range(200):
    clock[0] = float(step)
    assert scan() == SUM
    count = len(Path("{tmp_path}/log").read_text().splitlines())
    if count > len(attempts):
        attempts.append(step)
assert attempts == [0, 30, 90], attempts
assert "No space left" in only_warning()
Path("{tmp_path}/mended").touch()
clock[0] = 210.0
assert scan(backend="cpu") == SUM and len(warned) == 1
"""
    run(script, CXX=write_compiler(tmp_path, body))


def test_other_operators_do_not_wait_for_a_slow_compilation(run: Run, tmp_path: Path) -> None:
    """Nor does one that fails stop another; those that want the same kernel compile it once."""
    body = f"""if mkdir {tmp_path}/first 2>/dev/null; then
while ! test -e {tmp_path}/done; do sleep 0.05; done; fi
exec {COMPILER} "$@" """
    script = f"""
results = []
threads = [threading.Thread(target=lambda: results.append(scan(backend="cpu"))) for _ in range(3)]
threads[0].start()
while not os.path.exists("{tmp_path}/first"):
    time.sleep(0.02)
for thread in threads[1:]: thread.start()
assert scan(ops.max, backend="cpu") == MAX
assert results == []
Path("{tmp_path}/done").touch()
for thread in threads: thread.join()
assert results == [SUM] * 3
"""
    run(script, CXX=write_compiler(tmp_path, body))
    assert compilations(tmp_path) == 2


def test_a_child_that_ends_while_its_parent_compiles(run: Run, tmp_path: Path) -> None:
    """It ends as a program does, with all that is to be done at its end."""
    body = f"""touch {tmp_path}/begun
while ! test -e {tmp_path}/done; do sleep 0.05; done
exec {COMPILER} "$@" """
    script = f"""
import atexit, weakref
thread = threading.Thread(target=lambda: results.append(scan(backend="cpu")))
results = []
thread.start()
while not os.path.exists("{tmp_path}/begun"):
    time.sleep(0.02)
child = os.fork()
if child == 0:
    atexit._run_exitfuncs()
    os._exit(0)
wait(child)
Path("{tmp_path}/done").touch()
thread.join()
assert results == [SUM]
"""
    run(script, CXX=write_compiler(tmp_path, body))


def test_a_child_that_holds_what_its_parent_opened(run: Run, tmp_path: Path) -> None:
    """Processes that live on, forked while a compiler is started, do not delay its end."""
    script = """
import subprocess
children = []

def forking(function):
    def start(*arguments, **options):
        children.append(os.fork())
        if children[-1] == 0:
            time.sleep(40)
            os._exit(0)
        return function(*arguments, **options)
    return start

os.posix_spawn = forking(os.posix_spawn)
subprocess._fork_exec = forking(subprocess._fork_exec)
begin = time.monotonic()
assert scan(backend="cpu") == SUM
seconds = time.monotonic() - begin
for child in children: os.kill(child, signal.SIGKILL)
assert len(children) == 2 and seconds < 30, (children, seconds)
"""
    run(script)


@pytest.mark.slow
def test_slow_compilations_are_announced(run: Run, tmp_path: Path) -> None:
    slow = write_compiler(tmp_path, f'sleep 0.4; exec {COMPILER} "$@"')
    script = f"""
from assocscan.engines.cpu import compiler_process as build
build.PATIENCE = 0.1
os.dup2(os.open("{tmp_path}/said", os.O_WRONLY | os.O_CREAT), 2)
assert scan(backend="cpu") == SUM and scan(ops.max, backend="cpu") == MAX and not warned
"""
    run(script, CXX=slow)
    said = (tmp_path / "said").read_text()
    assert said.count("\n") == 2 and "'sum'" in said and "'max'" in said and "0.1 seconds" in said
    assert "ASSOCSCAN_COMPILE_SECONDS" in said
