"""The documents: their links lead somewhere, and the reference has every public name."""

import re
from pathlib import Path

import pytest
from repository import ROOT

import assocscan

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


def test_the_reference_has_every_public_name() -> None:
    pages = "".join(f.read_text(encoding="utf-8") for f in (ROOT / "docs/reference").glob("*.md"))
    entries = set(re.findall(r"^\.\. auto\w+:: ([\w.]+)", pages, re.MULTILINE))
    public = {f"assocscan.{name}" for name in assocscan.__all__ if name != "ops"}
    public |= {f"assocscan.nn.{name}" for name in assocscan.nn.__all__}
    assert public - entries == set()
    # The directive makes an entry for each name of `ops.__all__`.
    assert ".. operators::" in (ROOT / "docs/reference/ops.rst").read_text(encoding="utf-8")


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
