"""The examples in the docstrings of the package, and the Python code of its documents."""

from __future__ import annotations

import doctest
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import operators
import pytest
import torch
from repository import ROOT

import assocscan
from assocscan.nn import Hawk

PACKAGE = Path(assocscan.__file__).parent
FILES = sorted(
    file.relative_to(PACKAGE)
    for folder in (PACKAGE, PACKAGE / "ops", PACKAGE / "cuda")
    for file in folder.rglob("*.py")
    if re.search(r"^\s*>>> ", file.read_text(encoding="utf-8"), re.MULTILINE)
)


def test_all_folders_are_searched() -> None:
    folders = {file.parts[0] for file in FILES if len(file.parts) > 1}
    assert folders >= {"nn", "functional", "api", "monoids", "cli"}
    assert {Path("api/associative_scan.py"), Path("monoids/monoid.py"), Path("nn/lru.py")} <= {
        *FILES
    }


@pytest.mark.parametrize("file", FILES, ids=str)
def test_examples(file: Path, request: pytest.FixtureRequest) -> None:
    """The examples of the layers run kernels, since some of them show which engine ran."""
    if file.parts[0] != "nn":
        request.getfixturevalue("without_kernels")
    torch.manual_seed(0)
    name = ".".join(part for part in file.with_suffix("").parts if part != "__init__")
    module = importlib.import_module(f"assocscan.{name}".rstrip("."))
    failed, attempted = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert attempted and not failed


def sequences(channels: int = 3) -> torch.Tensor:
    return torch.randn(2, 8, channels, generator=torch.Generator().manual_seed(0)).sigmoid()


# What the code of a document takes for granted: its reader's own tensors.
GIVEN: dict[str, Any] = {
    "docs/operators.md": {
        "torch": torch,
        "monoid": assocscan.monoid,
        "x": sequences(),
        "rewards": sequences(),
        "starts": sequences() > 0.5,
        "a": sequences(),
        "b": sequences(),
        "scores": sequences()[..., 0],
        "values": sequences(),
        **{name: getattr(operators, name) for name in ("Case", "together", "normal")},
        "definitions": operators.definitions,
    },
    "docs/coming_from.md": {
        **dict.fromkeys(("a", "b", "B", "C"), sequences()),
        **dict.fromkeys(("u", "delta"), sequences(4)),
        "A": -torch.ones(4, 3),
        "D": torch.ones(4),
        "ray_indices": torch.tensor([0, 0, 2, 2, 2]),
        "rays": 3,
        "starts": torch.arange(5.0),
        "ends": torch.arange(5.0) + 1,
        "density": torch.ones(5),
        "colors": torch.ones(5, 3),
    },
    "docs/distributed.md": {
        "dist": torch.distributed,
        "my_part": lambda: (sequences(), sequences()),
        "hawk": Hawk(3),
        "x": sequences(),
        "read": lambda k: torch.arange(4.0),
        "write": lambda y: None,
        "device": "cpu",
        "buffers": [torch.empty(4)] * 3,
    },
    "ops/README.md": {"monoid": assocscan.monoid},
    # These begin with their own imports and tensors.
    "README.md": {},
    "docs/guide.md": {},
    "docs/hidden_states.md": {},
    "docs/how/numbers.md": {},
    "docs/how/program.md": {},
    "docs/index.md": {},
    "docs/layers.md": {},
    "docs/nonlinear.md": {},
    "docs/packed_training.md": {},
    "docs/selective_scan.md": {},
    "docs/series.md": {},
    "docs/start/explain.md": {},
    "docs/start/first_gradient.md": {},
    "docs/start/first_scan.md": {},
    "docs/start/own_operator.md": {},
    "docs/which_function.md": {},
    "docs/windows.md": {},
}


def blocks(document: str) -> list[tuple[int, str]]:
    """The Python code of a document, without its indentation, and where it begins."""
    text = (ROOT / document).read_text(encoding="utf-8")
    found = re.finditer(r"^( *)```python\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    return [
        (text[: m.start()].count("\n") + 2, re.sub(f"^{m[1]}", "", m[2], flags=re.MULTILINE))
        for m in found
    ]


def test_all_documents_are_run() -> None:
    folders = (".", "ops", "cuda", "assocscan/cli/data")
    documents = [file for folder in folders for file in (ROOT / folder).glob("*.md")]
    documents += (ROOT / "docs").rglob("*.md")
    names = {file.relative_to(ROOT).as_posix() for file in documents}
    assert {name for name in names if blocks(name)} == GIVEN.keys()
    assert len(blocks("README.md")) >= 3


@pytest.fixture
def process_group(document: str) -> Iterator[None]:
    """A group of this process alone, for the document that takes one for granted."""
    if document != "docs/distributed.md":
        yield
        return
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("without_kernels", "process_group")
@pytest.mark.parametrize("document", GIVEN)
def test_the_code_of_documents_runs(document: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Block after block, as a reader would; sizes are smaller, and names stay as they were."""
    module = importlib.import_module("assocscan.monoids.monoid")
    # Other tests, and the demo that they import, have defined monoids of these names, and may have
    # put their own in the place of a built-in one.
    built_in = {m.name: m for m in vars(assocscan.ops).values() if isinstance(m, assocscan.Monoid)}
    monkeypatch.setattr(module, "_REGISTRY", built_in)
    space = dict(GIVEN[document], __name__=f"code of {document}")
    for line, code in blocks(document):
        code = code.replace("4, 8192, 512", "2, 16, 3")
        exec(compile("\n" * (line - 1) + code, document, "exec"), space)
    if document == "README.md":
        assert space["x"].grad.shape == (2, 16, 3)
