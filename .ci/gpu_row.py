"""The row of docs/performance/gpu-checks.md: what was checked on which GPU, and of which code.

python .ci/gpu_row.py DEPTH STATUS LOGS prints the row of a run of .ci/gpu;
python .ci/gpu_row.py --compare says whether the newest row is of the code of this checkout.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import re
import sys
from pathlib import Path

FOLDERS = ("assocscan", "cuda", "ops")
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


def hashes() -> str:
    return " ".join(tree_hash(Path(folder))[:12] for folder in FOLDERS)


def row(depth: str, status: str, logs: Path) -> str:
    import cupy
    import torch
    import triton

    counts = []
    for log in sorted(logs.glob("*.txt")):
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        last = lines[-1].strip("= ") if lines else "nothing printed"
        counts.append(f"{log.stem}: {re.sub(r' in [0-9.]+s.*', '', last)}")
    devices = torch.cuda.device_count()
    name = torch.cuda.get_device_name(0) + (f" × {devices}" if devices > 1 else "")
    versions = (
        f"torch {torch.__version__}, Triton {triton.__version__}, CuPy {cupy.__version__}, "
        f"Python {sys.version_info.major}.{sys.version_info.minor}"
    )
    result = "passed" if status == "0" else "FAILED"
    date = datetime.date.today().isoformat()
    cells = (date, depth, result, name, versions, "; ".join(counts), f"`{hashes()}`")
    return f"| {' | '.join(cells)} |"


def compare() -> str:
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| 20")]
    if not rows:
        return f"{TABLE} has no row"
    cells = [cell.strip() for cell in rows[0].strip("| ").split("|")]
    tested = cells[-1].strip("`")
    if tested == hashes():
        return f"the newest GPU check ({cells[1]}, {cells[0]}, {cells[2]}) is of this tree"
    return (
        f"the newest GPU check ({cells[1]}, {cells[0]}, {cells[2]}) is of {tested}, "
        f"this tree is {hashes()} ({' '.join(FOLDERS)})"
    )


if __name__ == "__main__":
    if sys.argv[1:] == ["--compare"]:
        print("GPU:", compare())
    else:
        print(row(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
