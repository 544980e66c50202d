"""What a process leaves behind when it ends or is killed: nothing that the next does not remove."""

from pathlib import Path

from processes import COMPILER, Run, libraries, needs_compiler, needs_fork, write_script

pytestmark = needs_fork


@needs_compiler
def test_build_folders_of_killed_processes_are_removed(
    run: Run, cache: Path, tmp_path: Path
) -> None:
    """The next process that compiles removes them. Folders of living processes stay, and so does a
    folder of the user's that has such a name."""
    stuck = write_script(
        tmp_path / "stuck",
        f"""case "$*" in *--version*) ;; *)
mkdir {tmp_path}/begun 2>/dev/null && while ! test -e {tmp_path}/done; do sleep 0.05; done;; esac
exec {COMPILER} "$@" """,
    )
    script = f"""
CACHE.mkdir(mode=0o700)
(CACHE / "build-of-mine").mkdir()
killed = fork(lambda: scan(backend="cpu"))
while not os.path.exists("{tmp_path}/begun"):
    time.sleep(0.02)

def others():
    return sorted(path.name for path in CACHE.glob("build-*") if path.name != "build-of-mine")

left = others()
assert len(left) == 1
wait(fork(lambda: scan(ops.max, backend="cpu")))
assert others() == left, "its process lives"
os.kill(killed, signal.SIGKILL)
os.waitpid(killed, 0)
assert others() == left
wait(fork(lambda: scan(ops.min, backend="cpu")))
Path("{tmp_path}/done").touch()
assert others() == []
(CACHE / "build-of-mine").rmdir()
"""
    run(script, CXX=stuck)
    assert len(libraries(cache)) == 2


def test_what_is_unfinished_at_the_end_is_undone(run: Run) -> None:
    """The last first; other threads begin nothing then, and a child leaves it to its parent."""
    script = """
import atexit
from assocscan.caching import process_end
undone, refused = [], []

def begins_more():
    try:
        process_end.begin(lambda: "late", undone.append)
    except BackendError as error:
        refused.append(str(error))

def undo(name):
    undone.append(name)
    thread = threading.Thread(target=begins_more)
    thread.start()
    thread.join()

for name in ("a", "b", "c"):
    assert process_end.begin(lambda: name, undo) == name
process_end.forget("b")

def child():
    atexit._run_exitfuncs()
    assert undone == []
wait(fork(child))
process_end.undo_all()
assert undone == ["c", "a"] and refused == ["this process is ending"] * 2, (undone, refused)
wait(fork(begins_more))
process_end.begin(lambda: "by the thread that ends it", undone.append)
process_end.undo_all()
assert undone[2:] == ["by the thread that ends it"]
"""
    run(script)
