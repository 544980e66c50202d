"""Texts against golden files.

After a change that is meant: ASSOCSCAN_UPDATE_GOLDEN=1 python -m pytest, and the test's file.
"""

import difflib
import os

import pytest
from repository import TESTS

GOLDEN = TESTS / "golden"
COMMAND = "ASSOCSCAN_UPDATE_GOLDEN=1 python -m pytest"


def check_golden(name: str, text: str) -> None:
    """Fail with a diff where the text is not that of the golden file; or write the file."""
    path = GOLDEN / name
    if os.environ.get("ASSOCSCAN_UPDATE_GOLDEN") == "1":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return
    known = path.read_text(encoding="utf-8") if path.exists() else ""
    if text != known:
        lines = known.splitlines(), text.splitlines()
        diff = difflib.unified_diff(*lines, f"tests/golden/{name}", "generated", lineterm="")
        test = os.environ["PYTEST_CURRENT_TEST"].partition("::")[0]
        pytest.fail("\n".join([*diff, f"If this is meant: {COMMAND} {test}"]), pytrace=False)
