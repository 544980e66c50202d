"""The cache folder: what is loaded from it, what is not, and who can read what is written there."""

import os
import stat
import sys
import tempfile
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

import assocscan
from assocscan.caching import cache_folder as disk_cache
from assocscan.caching.cache_folder import seal
from assocscan.caching.trusted_files import why_untrusted
from assocscan.cuda import compiler as cuda_compiler

pytestmark = needs_fork
needs_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away"
)
# Another user, of whom the system knows nothing. Imports first: Python may be out of his reach.
BECOME_OTHER = """
from assocscan.engines.cpu.kernel import headers
headers()
os.setgid(54321)
os.setuid(54321)
"""
COMPILES = 'wait(fork(lambda: scan(backend="cpu")))'
# A cache of one kernel, which is then replaced by a library that makes a file as soon as it is
# loaded. The seal is no secret: other users can seal what they write.
PLANT = """
from assocscan.caching.cache_folder import seal

wait(fork(lambda: scan(backend="cpu")))
library, = CACHE.iterdir()
planted = Path(os.environ["PLANTED"]).read_bytes()
library.write_bytes(planted + seal(planted))
"""
IS_NOT_LOADED = """
wait(fork(lambda: scan(ops.max)))  # also where it creates the temporary folder
assert scan() == SUM
assert not Path(os.environ["MARK"]).exists(), "the planted library was loaded"
"""


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("planted")
    mark, library = folder / "mark", folder / "planted.so"
    (folder / "planted.cpp").write_text(
        "#include <cstdio>\n"
        f'static __attribute__((constructor)) void mark() {{ std::fopen("{mark}", "w"); }}\n'
        'extern "C" int assocscan_run(const long long*) { return 0; }\n'
    )
    os.system(f"{COMPILER} -shared -fPIC -o {library} {folder}/planted.cpp")
    return {"PLANTED": library, "MARK": mark}


def is_open_to_others() -> bool:
    """Whether another user can read the package and run this Python."""
    files = (Path(assocscan.__file__).resolve(), Path(sys.executable).resolve())
    folders = {parent for file in files for parent in file.parents}
    return all(folder.stat().st_mode & stat.S_IXOTH for folder in folders)


# These tests become another user where they run as root, whom modes do not stop.
becomes_other = pytest.mark.skipif(
    os.geteuid() == 0 and not is_open_to_others(),
    reason="as root, in a folder that is closed to other users",
)


def let_pass(folder: Path) -> None:
    """Let other users reach a temporary folder."""
    for parent in folder.parents:
        if parent == Path(tempfile.gettempdir()):
            break
        parent.chmod(0o711)


@pytest.mark.slow
@needs_compiler
def test_a_planted_library_of_ones_own_is_loaded(run: Run, planted: dict[str, Path]) -> None:
    """So that the tests below cannot pass for another reason."""
    run(PLANT + "scan(); assert Path(os.environ['MARK']).exists()", **planted)
    planted["MARK"].unlink()


@pytest.mark.thinned(7)
@needs_compiler
@pytest.mark.parametrize(
    "change,words",
    [
        ("CACHE.chmod(0o777)", "all users can write"),
        ("CACHE.chmod(0o770)", "other users can write"),
        ("CACHE.parent.chmod(0o777)", "all users can write"),
        pytest.param("os.chown(CACHE, 54321, 54321)", "belongs to user 54321", marks=needs_root),
        pytest.param(
            "CACHE.rename(CACHE.with_name('other')); CACHE.symlink_to('other');"
            "CACHE.parent.chmod(0o1777); os.lchown(CACHE, 54321, 54321)",
            "belongs to user 54321",
            marks=needs_root,
        ),
    ],
)
def test_a_folder_of_others_is_not_used(
    run: Run, planted: dict[str, Path], tmp_path: Path, change: str, words: str
) -> None:
    """One warning says why; kernels go to a private folder."""
    (tmp_path / "temporary").mkdir(mode=0o700)
    script = f"""
{PLANT}
{change}
os.environ["TMPDIR"] = "{tmp_path}/temporary"
assert [scan(), scan(ops.max)] == [SUM, MAX]
assert not Path(os.environ["MARK"]).exists(), "the planted library was loaded"
assert {words!r} in only_warning() and str(CACHE) in only_warning()
folder, = Path("{tmp_path}/temporary").glob("assocscan-*")
assert str(folder) in only_warning() and folder.stat().st_mode & 0o777 == 0o700
assert len(list(folder.iterdir())) == 2
"""
    # The temporary folder lies elsewhere than the folder that all users can write to.
    run(script, ASSOCSCAN_CACHE_DIR=tmp_path / "shared/cache", **planted)


@pytest.mark.slow
@pytest.mark.thinned(7)
@needs_compiler
@pytest.mark.parametrize(
    "change",
    [
        "library.chmod(0o666)",
        "library.chmod(0o620)",
        pytest.param("os.chown(library, 54321, 54321)", marks=needs_root),
        "library.rename(CACHE.parent / 'elsewhere'); library.symlink_to('../elsewhere')",
    ],
)
def test_a_file_of_others_is_replaced(run: Run, planted: dict[str, Path], change: str) -> None:
    script = f"""
{PLANT}
{change}
assert scan() == SUM and not warned
assert not Path(os.environ["MARK"]).exists(), "the planted library was loaded"
assert library.stat().st_mode & 0o777 == 0o600 and library.owner() and not library.is_symlink()
"""
    run(script, **planted)


@pytest.mark.thinned(7)
@becomes_other
@needs_compiler
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o277, 0o777])
def test_what_is_written_is_private_whatever_the_umask(
    run: Run, tmp_path: Path, umask: int
) -> None:
    script = f"""
if os.geteuid() == 0:  # whom modes do not stop
    os.chown("{tmp_path}", 54321, 54321)
    exec({BECOME_OTHER!r})
os.umask({umask})
assert scan(backend="cpu") == SUM and not warned
"""
    tmp_path.chmod(0o700)
    let_pass(tmp_path)
    run(script, ASSOCSCAN_CACHE_DIR=tmp_path / "new/cache", TMPDIR=tmp_path)
    for folder in (tmp_path / "new", tmp_path / "new/cache"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (library,) = (tmp_path / "new/cache").iterdir()
    assert stat.S_IMODE(library.stat().st_mode) == 0o600


@pytest.mark.thinned(7)
@needs_compiler
@pytest.mark.parametrize(
    "damage",
    [
        "data[:len(data) // 2]",
        "data[:5000]",
        "data[:-1]",
        "data[:100] + bytes([data[100] ^ 1]) + data[101:]",
        "data[:-1] + bytes([data[-1] ^ 1])",
        "data + b'more'",
        "b''",
        "b'no library'",
    ],
)
def test_a_damaged_library_is_compiled_again(
    run: Run, cache: Path, logging: Path, damage: str
) -> None:
    """Silently, and once: the next process finds it whole."""
    script = f"""
{COMPILES}
library, = CACHE.iterdir()
data = library.read_bytes()
library.write_bytes({damage})
for _ in range(2):
    wait(fork(lambda: scan(backend="cpu") == SUM and not warned or os._exit(1)))
"""
    run(script, CXX=logging)
    assert compilations(logging.parent) == 2
    assert len(libraries(cache)) == 1


@pytest.mark.thinned(7)
@needs_compiler
@pytest.mark.parametrize("kind", ["folder", "full folder", "fifo", "link", "dangling link"])
def test_something_else_at_the_place_of_a_library(run: Run, cache: Path, kind: str) -> None:
    script = f"""
{COMPILES}
library, = CACHE.iterdir()
whole = library.rename(CACHE.parent / "whole")
make = {{
    "folder": library.mkdir,
    "full folder": lambda: (library / "more").mkdir(parents=True),
    "fifo": lambda: os.mkfifo(library),
    "link": lambda: library.symlink_to(whole),
    "dangling link": lambda: library.symlink_to("nowhere"),
}}
make[{kind!r}]()
assert scan(backend="cpu") == SUM and not warned
assert library.is_file() and not library.is_symlink()
"""
    run(script)
    assert len(libraries(cache)) == 1


def test_an_entry_is_synchronised_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that could not be written leaves nothing, nor does it harm what was there."""
    calls: list[str] = []
    for name in ("fsync", "replace"):
        function = getattr(os, name)

        def noted(*arguments: object, name: str = name, function: object = function) -> None:
            calls.append(name)
            function(*arguments)  # type: ignore[operator]

        monkeypatch.setattr(os, name, noted)
    entry = tmp_path / "entry"
    disk_cache.write_entry(entry, b"content")
    assert calls == ["fsync", "replace"]
    assert disk_cache.read_entry(entry) == b"content"

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        disk_cache.write_entry(entry, b"more")
    assert list(tmp_path.iterdir()) == [entry]
    assert disk_cache.read_entry(entry) == b"content"


def test_what_counts_as_an_entry(tmp_path: Path) -> None:
    entry = tmp_path / "entry"
    assert disk_cache.read_entry(entry) is None
    for content in (b"", b"x", os.urandom(1000)):
        disk_cache.write_entry(entry, content)
        assert disk_cache.read_entry(entry) == content
        data = entry.read_bytes()
        assert data == content + seal(content)
        for k in range(len(data)):
            entry.write_bytes(data[:k])
            assert disk_cache.read_entry(entry) is None
            entry.write_bytes(data[:k] + bytes([data[k] ^ 0x80]) + data[k + 1 :])
            assert disk_cache.read_entry(entry) is None


def test_which_folders_are_trusted(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    folder = tmp_path / "a/b"
    folder.mkdir(parents=True)
    folder.parent.chmod(0o755)
    folder.chmod(0o755)
    assert why_untrusted(folder) is None
    (tmp_path / "link").symlink_to("a/../a/b")
    assert why_untrusted(tmp_path / "link") is None
    folder.parent.chmod(0o777)
    for path in (folder, tmp_path / "link", tmp_path / "a/../link"):
        assert str(folder.parent) in str(why_untrusted(path))
    folder.parent.chmod(0o1777)
    assert why_untrusted(folder) is None
    folder.chmod(0o775)
    assert "0775" in str(why_untrusted(folder))
    (folder / "file").touch()
    assert "not a folder" in str(why_untrusted(folder / "file"))
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path / "loop", tmp_path / "missing"):
        with pytest.raises(OSError):
            why_untrusted(path)


@pytest.mark.slow
@needs_compiler
def test_a_folder_that_is_removed_while_it_is_used(run: Run, cache: Path, tmp_path: Path) -> None:
    """Between two kernels, and while one is compiled."""
    removing = f"""case "$*" in *--version*) ;; *)
test -e {tmp_path}/armed && rm -r {tmp_path}/armed {cache};; esac
exec {COMPILER} "$@"
"""
    script = f"""
assert scan(backend="cpu") == SUM
shutil.rmtree(CACHE)
assert scan(ops.max, backend="cpu") == MAX
assert CACHE.stat().st_mode & 0o777 == 0o700 and len(list(CACHE.iterdir())) == 1
Path("{tmp_path}/armed").touch()
assert scan(ops.min, backend="cpu") == [0] * 5
assert not Path("{tmp_path}/armed").exists()
assert scan() == SUM and not warned
"""
    run(script, CXX=write_script(tmp_path / "removing", removing))
    assert len(libraries(cache)) == 1


def test_machine_code_of_gpus_is_kept_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cubins: stored, found again, compiled again where they are damaged or of another user."""
    compiled: list[str] = []

    def compile_source(source: str, options: tuple[str, ...]) -> bytes:
        compiled.append(" ".join(o for o in options if o.startswith(("-arch", "-fmad"))))
        return f"machine code of {source}".encode()

    monkeypatch.setattr(cuda_compiler, "compile_source", compile_source)
    monkeypatch.setattr(cuda_compiler, "nvrtc_version", lambda: "13.0")
    monkeypatch.setattr(disk_cache, "chosen_folder", lambda: tmp_path / "cache")
    for damage in (lambda path: None, damaged, lambda path: path.chmod(0o666)):
        assert cuda_compiler.cubin("a", (9, 0)) == b"machine code of a"
        (path,) = (tmp_path / "cache").iterdir()
        assert path.suffix == ".cubin" and stat.S_IMODE(path.stat().st_mode) == 0o600
        damage(path)
    assert cuda_compiler.cubin("a", (9, 0)) == b"machine code of a"
    assert compiled == ["-arch=sm_90a"] * 3
    cuda_compiler.cubin("b", (9, 0))
    cuda_compiler.cubin("a", (8, 0))
    cuda_compiler.cubin("a", (8, 0), ("-fmad=false",))
    assert compiled == ["-arch=sm_90a"] * 4 + ["-arch=sm_80", "-fmad=false -arch=sm_80"]


def damaged(path: Path) -> None:
    path.write_bytes(b"N" + path.read_bytes()[1:])


@pytest.mark.slow(2)
@needs_compiler
@pytest.mark.parametrize("named", ["cache", ".", "./deep/cache"])
def test_a_relative_folder(run: Run, tmp_path: Path, named: str) -> None:
    """It is the same folder after os.chdir."""
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    elsewhere.mkdir()
    script = f"""
os.chdir("{here}")
assert scan(backend="cpu") == SUM
os.chdir("{elsewhere}")
assert scan(ops.max, backend="cpu") == MAX and not warned
"""
    run(script, ASSOCSCAN_CACHE_DIR=named)
    assert len(libraries(here / named)) == 2
    assert list(elsewhere.iterdir()) == []


@becomes_other
@needs_compiler
@needs_root
def test_no_home_and_no_entry_among_the_users(run: Run, tmp_path: Path) -> None:
    script = f"""
for name in ("ASSOCSCAN_CACHE_DIR", "HOME", "XDG_CACHE_HOME"):
    os.environ.pop(name, None)
os.chown("{tmp_path}", 54321, 54321)
{BECOME_OTHER}
assert [scan(), scan(ops.max)] == [SUM, MAX]
assert "no home folder" in only_warning()
assert scan(ops.min, backend="cpu") == [0] * 5
"""
    let_pass(tmp_path)
    run(script, TMPDIR=tmp_path)


@needs_compiler
def test_no_folder_at_all(run: Run, tmp_path: Path) -> None:
    """`auto` runs eagerly; a named backend says what was tried."""
    (tmp_path / "file").touch()
    script = """
assert [scan(), scan()] == [SUM, SUM]
message = only_warning()
assert "Not a directory" in message and "ASSOCSCAN_CACHE_DIR" in message, message
with pytest.raises(BackendError, match="no folder to compile kernels in"):
    scan(backend="cpu")
"""
    script = "tempfile._candidate_tempdir_list = lambda: ['/nonexistent']\n" + script
    run(script, ASSOCSCAN_CACHE_DIR=tmp_path / "file/cache", TMPDIR="/nonexistent")


@pytest.mark.slow
@needs_compiler
def test_a_full_disk_is_not_remembered(run: Run, cache: Path, tmp_path: Path) -> None:
    """What cannot be written to the cache folder goes to a temporary one, until it can."""
    script = """
from assocscan.caching import cache_folder as disk_cache
write = disk_cache.write_entry

def full(path, content):
    if path.parent == CACHE:
        raise OSError(28, "No space left on device", str(path))
    write(path, content)

disk_cache.write_entry = full
assert scan(backend="cpu") == SUM
assert "No space left" in only_warning()
disk_cache.write_entry = write
assert scan(ops.max, backend="cpu") == MAX and len(warned) == 1
"""
    run(script, TMPDIR=tmp_path)
    assert len(libraries(cache)) == 1
