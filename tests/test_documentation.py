"""The documents: their links lead somewhere, and the reference has every public name."""

import doctest
import importlib
import inspect
import math
import pydoc
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

import assocscan
from assocscan import testing

BUILT = {"_build", "gallery", "_generated"}
LINK = re.compile(r"\]\((?!https?://|mailto:)([^)#\s]+)(?:#[^)]*)?\)")


def documents() -> list[Path]:
    folders = (ROOT, ROOT / "ops", ROOT / "cuda")
    found = [file for folder in folders for file in folder.glob("*.md")]
    docs = ROOT / "docs"
    found += [f for f in docs.rglob("*.md") if not BUILT & {*f.relative_to(docs).parts}]
    return sorted(found)


@pytest.mark.parametrize("document", documents(), ids=lambda f: f.relative_to(ROOT).as_posix())
def test_links_lead_to_files(document: Path) -> None:
    text = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.M | re.S)
    targets = [target for target in LINK.findall(text) if "gallery/" not in target]
    assert [t for t in targets if not (document.parent / t).exists()] == []


NAMED = re.compile(r"`((?:[\w.]+/)+\w+\.(?:cuh|h|md|py))`")
BASES = (".", "assocscan", "assocscan/engines/triton", "assocscan/nn", "cuda", "docs")


@pytest.mark.parametrize("document", documents(), ids=lambda f: f.relative_to(ROOT).as_posix())
def test_files_that_are_named_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    missing = {n for n in NAMED.findall(text) if not any((ROOT / b / n).exists() for b in BASES)}
    assert missing == set()


def test_the_reference_has_every_public_name() -> None:
    pages = "".join(f.read_text(encoding="utf-8") for f in (ROOT / "docs/reference").glob("*.md"))
    entries = set(re.findall(r"^<!-- auto\w+: ([\w.]+)", pages, re.MULTILINE))
    public = {f"assocscan.{name}" for name in assocscan.__all__ if name != "ops"}
    public |= {f"assocscan.nn.{name}" for name in assocscan.nn.__all__}
    public |= {f"assocscan.distributed.{name}" for name in assocscan.distributed.__all__}
    public |= {f"assocscan.testing.{name}" for name in testing.__all__}
    assert public - entries == set()
    # The directive makes an entry for each name of `ops.__all__`.
    assert ".. operators::" in (ROOT / "docs/reference/ops.rst").read_text(encoding="utf-8")


def test_the_reference_is_what_docstrings_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python docs/_extensions/reference_pages.py` writes it."""
    monkeypatch.syspath_prepend(ROOT / "docs/_extensions")
    pages = importlib.import_module("reference_pages").pages()
    assert len(pages) > 8
    stale = {p.name for p, text in pages.items() if p.read_text(encoding="utf-8") != text}
    assert stale == set(), "run python docs/_extensions/reference_pages.py"


def test_every_public_name_has_an_example() -> None:
    spaces = (assocscan, assocscan.distributed, assocscan.nn, testing)
    made = {f"{s.__name__}.{n}": getattr(s, n) for s in spaces for n in s.__all__ if n != "ops"}
    finder = doctest.DocTestFinder(recurse=False)
    without = {name for name, it in made.items() if not any(t.examples for t in finder.find(it))}
    assert without == set()


def test_help_of_the_package_lists_every_public_name() -> None:
    listed = set(re.findall(r"\w+", assocscan.__doc__ or ""))
    assert {*assocscan.__all__, "nn", "distributed", "testing"} <= listed


MODELS = {
    "hmm_filter": ("log_probability", "log_evidence"),
    "hmm_smoother": ("log_probability", "log_pairs"),
    "kalman_filter": ("mean", "covariance", "log_likelihood"),
    "ewm_mean": (),
    "gae": (),
    "lfilter": (),
    "linear_recurrence": (),
    "matrix_recurrence": (),
    "rts_smoother": ("mean", "covariance"),
    "selective_scan": (),
    "sosfilt": (),
    "vtrace": (),
    "viterbi": ("path", "log_probability"),
}


@pytest.mark.parametrize("name", MODELS)
def test_help_says_the_shape_of_every_tensor(name: str) -> None:
    """In a line `name: …`, of every argument that may be a tensor and every named result."""
    function = getattr(assocscan, name)
    shown = pydoc.render_doc(function, renderer=pydoc.plaintext)
    entries = re.findall(r"^ +((?:\w+, )*\w+): (.*(?:\n {9,}\S.*)*)", shown, re.MULTILINE)
    parameters = inspect.signature(function).parameters
    wanted = [p for p in parameters if "Tensor" in str(parameters[p].annotation)]
    for tensor in wanted:
        assert any(tensor in names.split(", ") and re.search(r"\[|shape", said)
                   for names, said in entries), tensor  # fmt: skip
    for result in MODELS[name]:
        said = [s for names, s in entries if result in names.split(", ")]
        assert len(said) == 1 + (result in wanted) and all("[" in s for s in said), result


@pytest.mark.parametrize("name", assocscan.ops.__all__)
def test_help_says_all_of_an_operator(name: str) -> None:
    operator = getattr(assocscan.ops, name)
    shown = pydoc.render_doc(operator, renderer=pydoc.plaintext)
    said = operator.combine.__doc__
    # One line each, in this order, and then an example that calls this operator.
    fields = re.findall(r"^ *(Inputs|Element|Outputs|Identity|Cost): \S", said, re.MULTILINE)
    assert fields == ["Inputs", "Element", "Outputs", "Identity", "Cost"]
    assert f"ops.{name}" in "".join(e.source for e in doctest.DocTestParser().get_examples(said))
    for line in said.splitlines():
        assert line.strip() in shown
    family = sys.modules[operator.combine.__module__].__doc__
    assert family.partition("\n\n")[2].strip() in "\n".join(
        line.removeprefix("    ") for line in shown.splitlines()
    )


def test_the_identity_that_is_said_is_the_operators() -> None:
    wrong = []
    for name in assocscan.ops.__all__:
        operator = getattr(assocscan.ops, name)
        if callable(operator.identity):  # of matrices and vectors: in words
            continue
        found = re.search(r"Identity: (\([^)]*\)|[^\s.;,:]+)", operator.combine.__doc__)
        text = found[1].replace("−", "-").replace("+", "").replace("∞", "math.inf")
        said = None if text == "none" else eval(text, {"math": math})
        if said != operator.identity:
            wrong.append((name, text, operator.identity))
    assert wrong == []


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any]]:
    """The names of a script of docs/figures."""
    folder = ROOT / "docs/figures"
    monkeypatch.syspath_prepend(folder)
    return lambda name: runpy.run_path(str(folder / f"{name}.py"))


Script = Callable[[str], dict[str, Any]]


def test_the_table_of_costs_is_that_of_its_runs(script: Script) -> None:
    space = script("operators_table")
    page = space["PAGE"].read_text(encoding="utf-8")
    assert space["updated"](page) == page
    for runs in (space["CPU"], space["GPU"]):
        assert {name.split(" ")[0] for name in space["read"](runs)} >= {*assocscan.ops.__all__}


def test_the_readmes_times_are_those_of_its_run(script: Script) -> None:
    space = script("speed_table")
    page = space["PAGE"].read_text(encoding="utf-8")
    assert space["updated"](page) == page


@pytest.mark.parametrize("device", ("cpu", "gpu"))
def test_the_tables_of_times_are_those_of_their_runs(device: str, script: Script) -> None:
    """Every table stands on its page, and its runs were those that the script would make."""
    space = script(f"{device}_tables")
    for path, change in space["PAGES"].items():
        page = path.read_text(encoding="utf-8")
        assert change(page) == page
    tables = importlib.import_module("tables")
    for name, block in space["BLOCKS"].items():
        begin = tables.mark(space["NAME"], name)
        assert begin in (ROOT / "docs" / block.page).read_text(encoding="utf-8")
    wanted = {name: run.said() for name, run in script(f"measure_{device}")["RUNS"].items()}
    made = {name: run["words"] for name, run in space[device.upper()].notes.items()}
    assert made.items() <= wanted.items()


def test_the_page_and_the_command_that_show_gpu_runs_are_made_of_them(script: Script) -> None:
    for path, change in script("gpu_folder")["PAGES"].items():
        text = path.read_text(encoding="utf-8")
        assert change(text) == text


def test_one_command_makes_all_figures(script: Script) -> None:
    shared = {"drawing", "tables", "shared_tables", "measuring", "compiling"}
    measured = {"redraw", "measure_cpu", "measure_gpu"}
    scripts = {path.stem for path in (ROOT / "docs/figures").glob("*.py")} - shared - measured
    assert {*script("redraw")["SCRIPTS"]} == scripts


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
