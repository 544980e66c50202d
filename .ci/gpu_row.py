"""The row of docs/performance/gpu-checks.md: what was checked on which GPU, and of which code.

python .ci/gpu_row.py DEPTH STATUS LOGS prints the row of a run of .ci/gpu;
python .ci/gpu_row.py --compare says of what code the newest row is, and fails where no check that
passed had the code in KERNELS that this checkout has;
python .ci/gpu_row.py --hash PATH ... prints a hash of these folders and files.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib
import os
import re
import sys
from pathlib import Path

FOLDERS = ("assocscan", "cuda", "ops", "assocscan/engines/triton", "assocscan/runtime")
KERNELS = ("cuda", "assocscan/engines/triton", "assocscan/runtime")  # a change of these needs a GPU
TABLE = Path("docs/performance/gpu-checks.md")


def tree_hash(folder: Path) -> str:
    """What `git rev-parse HEAD:folder` prints once the folder is committed; needs no repository."""
    entries = []
    for path in folder.iterdir():
        if path.name == "__pycache__" or path.suffix in (".pyc", ".so"):
            continue
        if path.is_symlink():
            mode, digest = "120000", object_hash("blob", os.readlink(path).encode())
        elif path.is_dir():
            mode, digest = "40000", tree_hash(path)
            if digest == object_hash("tree", b""):
                continue  # git has no empty folders
        else:
            mode = "100755" if os.access(path, os.X_OK) else "100644"
            digest = object_hash("blob", path.read_bytes())
        order = path.name + ("/" if mode == "40000" else "")
        entries.append((order.encode(), f"{mode} {path.name}\0".encode() + bytes.fromhex(digest)))
    return object_hash("tree", b"".join(entry for _, entry in sorted(entries)))


def object_hash(kind: str, content: bytes) -> str:
    return hashlib.sha1(f"{kind} {len(content)}\0".encode() + content).hexdigest()


def hashes() -> dict[str, str]:
    return {folder: tree_hash(Path(folder))[:12] for folder in FOLDERS}


def row(depth: str, status: str, logs: Path) -> str:
    import torch

    counts = []
    for log in sorted(logs.glob("*.txt")):
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        last = lines[-1].strip("= ") if lines else "nothing printed"
        counts.append(f"{log.stem}: {re.sub(r' in [0-9.]+s.*', '', last)}")
    devices = torch.cuda.device_count()
    name = torch.cuda.get_device_name(0) + (f" × {devices}" if devices > 1 else "")
    versions = (
        f"torch {torch.__version__}, Triton {version('triton')}, CuPy {version('cupy')}, "
        f"Python {sys.version_info.major}.{sys.version_info.minor}"
    )
    result = "passed" if status == "0" else "FAILED"
    failed = files_that_failed(logs) if status != "0" else []
    if failed:
        depth += f"; failed in {' '.join(failed)}"
    date = datetime.date.today().isoformat()
    code = f"`{' '.join(hashes().values())}`"
    cells = (date, depth, result, name, versions, "; ".join(counts), code)
    return f"| {' | '.join(cells)} |"


def files_that_failed(logs: Path) -> list[str]:
    """The files of the tests that failed, where nothing else did and all came to their end."""
    texts = {log.stem: log.read_text(errors="replace") for log in logs.glob("*.txt")}
    tests = texts.pop("tests", "")
    others = any(re.search(r"[1-9]\d* (failed|error)", text) for text in texts.values())
    if others or " failed, " not in tests[-500:]:
        return []
    return sorted(set(re.findall(r"^(?:FAILED|ERROR) (tests/\S+?\.py)", tests, re.MULTILINE)))


def version(module: str) -> str:
    try:
        return str(importlib.import_module(module).__version__)
    except ImportError:
        return "none"


def compare(lines: list[str], tree: dict[str, str]) -> tuple[bool, str]:
    """Whether a check that passed, of those in the table, had the kernels of this tree; and what
    to print. Checks of K/N of the tests count together, once there are all N. One whose
    tests failed in some files counts once the tests of these files passed, again. Rows before
    2026-11-25 list three folders only; such a row counts if all three are equal to those of this
    tree."""
    rows = [
        [cell.strip() for cell in line.strip("| ").split("|")]
        for line in lines
        if line.startswith("| 20")
    ]
    if not rows:
        return False, f"{TABLE} has no row"
    of = [dict(zip(FOLDERS, cells[-1].strip("`").split(), strict=False)) for cells in rows]
    newest = f"the newest GPU check ({rows[0][1]}, {rows[0][0]}, {rows[0][2]})"
    changed = [folder for folder in of[0] if of[0][folder] != tree[folder]]
    said = f"{newest} is of this tree"
    if changed:
        said = f"{newest} is of another tree: {', '.join(changed)} changed since then"
    parts: set[tuple[str, str]] = set()  # K and N of checks of a part of the tests
    again: set[str] = set()  # files whose tests passed again
    checks = []
    for cells, checked in zip(rows, of, strict=True):
        needed = KERNELS if checked.keys() >= {*KERNELS} else checked
        if all(checked[folder] == tree[folder] for folder in needed):
            found = re.search(r", again (tests/\S+(?: tests/\S+)*)$", cells[1])
            if found is None:
                checks.append(cells)
            elif cells[2] == "passed":
                again.update(found[1].split())
    for cells in checks:
        failed = re.search(r"; failed in (.+)$", cells[1])
        if cells[2] != "passed" and not (failed and again.issuperset(failed[1].split())):
            continue
        part = re.search(r"part (\d+)/(\d+) of the tests", cells[1])
        parts |= {part.groups()} if part else {("1", "1")}
    if any(all((str(k), n) in parts for k in range(1, int(n) + 1)) for _, n in parts):
        return True, said
    return False, f"{said}; no check that passed is of its {', '.join(KERNELS)}: run .ci/gpu quick"


if __name__ == "__main__":
    if sys.argv[1:] == ["--compare"]:
        passed, said = compare(TABLE.read_text(encoding="utf-8").splitlines(), hashes())
        print("GPU:", said)
        sys.exit(not passed)
    if sys.argv[1:2] == ["--hash"]:
        found = [
            tree_hash(path) if path.is_dir() else object_hash("blob", path.read_bytes())
            for path in map(Path, sys.argv[2:])
        ]
        print(object_hash("blob", "".join(found).encode())[:16])
    else:
        print(row(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
