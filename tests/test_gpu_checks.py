"""CI fails where kernels changed after the newest check on a GPU (`.ci/gpu_row.py`)."""

from __future__ import annotations

import importlib.util
from types import ModuleType, SimpleNamespace

import gpu_processes
import pytest
from repository import ROOT

FILE = ROOT / ".ci" / "gpu_row.py"
pytestmark = pytest.mark.skipif(not FILE.exists(), reason="not in a checkout")

TREE = dict(zip(("assocscan", "cuda", "ops", "assocscan/engines/triton", "assocscan/runtime"),
                "abcde", strict=True))  # fmt: skip


@pytest.fixture(scope="module")
def gpu_row() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_row", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(hashes: str, result: str = "passed", day: int = 25) -> str:
    return f"| 2026-11-{day} | quick | {result} | a GPU | versions | 9 passed | `{hashes}` |"


def again(files: str, result: str = "passed", hashes: str = "a b c d e") -> str:
    return row(hashes, result).replace("quick", f"quick, again {files}")


def failed_in(files: str) -> str:
    return row("a b c d e", "FAILED").replace("quick", f"quick; failed in {files}")


def part(k: int, n: int) -> str:
    return row("a b c d e").replace("quick", f"quick, part {k}/{n} of the tests")


@pytest.mark.parametrize(
    "rows, passes",
    [
        ([row("a b c d e")], True),
        ([row("x b x d e")], True),
        ([row("a x c d e")], False),
        ([row("a b c x e")], False),
        ([row("a b c d x")], False),
        ([row("a b c d e", "FAILED")], False),
        ([row("x x x x x"), row("x b x d e", day=24)], True),
        ([row("a b c")], True),
        ([row("x b c")], False),
        ([], False),
        ([part(1, 2)], False),
        ([part(1, 2), part(1, 2), part(2, 3)], False),
        ([part(1, 2), row("a b x d e"), part(2, 2)], True),
        ([failed_in("tests/test_a.py")], False),
        ([again("tests/test_a.py")], False),
        ([again("tests/test_a.py"), failed_in("tests/test_a.py")], True),
        ([again("tests/test_b.py"), failed_in("tests/test_a.py")], False),
        ([again("tests/test_a.py", "FAILED"), failed_in("tests/test_a.py")], False),
        ([again("tests/test_a.py", hashes="a x c d e"), failed_in("tests/test_a.py")], False),
        ([again("tests/test_a.py"), failed_in("tests/test_a.py tests/test_b.py")], False),
        ([again("tests/b.py tests/a.py"), failed_in("tests/a.py tests/b.py")], True),
        ([again("tests/test_a.py"), row("a b c d e", "FAILED")], False),
    ],
)
def test_a_row_names_the_kernels_of_this_tree(
    gpu_row: ModuleType, rows: list[str], passes: bool
) -> None:
    lines = [
        "# Checks",
        "",
        "| date | check |",
        "|---|---|",
        *rows,
        "",
        "2026-11-25, quick: words.",
    ]
    assert gpu_row.compare(lines, TREE)[0] is passes


def test_files_that_failed_are_named(
    gpu_row: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Where nothing but tests failed, and all came to their end."""
    logs = tmp_path_factory.mktemp("logs")
    lines = ["FAILED tests/a/test_b.py::test_c[x] - see tests/test_z.py", "ERROR tests/a/test_b.py"]
    found, ended = "\n".join(lines), "\n2 failed, 7 passed in 3.2s\n"
    (logs / "tests.txt").write_text(found + ended)
    (logs / "host.txt").write_text("2 passed, 10 deselected\n")
    assert gpu_row.files_that_failed(logs) == ["tests/a/test_b.py"]
    (logs / "tests.txt").write_text(found + "\n!!! KeyboardInterrupt !!!\n")
    assert gpu_row.files_that_failed(logs) == []
    (logs / "tests.txt").write_text(found + ended)
    (logs / "host.txt").write_text("1 failed, 1 passed\n")
    assert gpu_row.files_that_failed(logs) == []


def test_what_changed_is_said(gpu_row: ModuleType) -> None:
    said = gpu_row.compare([row("x b c d y")], TREE)[1]
    assert "assocscan, assocscan/runtime changed" in said and ".ci/gpu quick" in said


def test_the_hashes_are_of_what_the_folders_hold(gpu_row: ModuleType) -> None:
    assert tuple(gpu_row.FOLDERS) == tuple(TREE)
    here = {folder: gpu_row.tree_hash(ROOT / folder) for folder in TREE}
    assert len(set(here.values())) == len(TREE)


def test_a_hash_changes_with_content_names_and_modes(
    gpu_row: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """That of git: `printf hello > a; git add a; git write-tree`."""
    folder = tmp_path_factory.mktemp("tree")
    (folder / "a").write_text("hello")
    assert gpu_row.tree_hash(folder) == "8917ce3833750c0f424a16966ef3391aafe880c1"
    (folder / "a").chmod(0o755)
    assert gpu_row.tree_hash(folder) != "8917ce3833750c0f424a16966ef3391aafe880c1"


def test_parts_of_the_tests_are_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test is in exactly one of the parts that `tests:K/N` picks; without K/N all run."""
    names = [f"tests/test_a.py::test_b[{k}]" for k in range(100)]

    def picked(part: str) -> list[str]:
        monkeypatch.setenv("TESTS_PART", part)
        items = [SimpleNamespace(nodeid=name) for name in names]
        gone: list[SimpleNamespace] = []
        hook = SimpleNamespace(pytest_deselected=lambda items: gone.extend(items))
        gpu_processes.pytest_collection_modifyitems(SimpleNamespace(hook=hook), items)  # type: ignore
        assert len(items) + len(gone) == len(names)
        return [item.nodeid for item in items]

    parts = [picked(f"{k}/3") for k in (1, 2, 3)]
    assert sorted(name for part in parts for name in part) == sorted(names)
    assert min(map(len, parts)) > 20
    assert picked("") == names
