"""The package as a house: a module imports from its own floor and from those below it.

Imports inside functions count too. Two folders of one floor do not import each other.
"""

from __future__ import annotations

import ast
import collections
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from repository import ROOT, bench_modules, modules

# Lowest first; a folder named here is a floor of its own, apart from the one it lies in.
FLOORS: list[tuple[str, ...]] = [
    ("errors", "hooks"),
    ("wording", "torch_private"),
    ("caching",),
    ("torch_state", "pytrees"),
    ("testing",),
    ("program",),
    ("trace",),
    ("autodiff",),
    ("monoids",),
    ("ops",),
    ("engines.base",),
    ("engines.cpu", "engines.triton", "engines.eager", "cuda"),
    ("runtime",),
    ("api",),
    ("functional",),
    ("distributed",),
    ("nn",),
    ("torch_compile",),
    ("cli",),
]
MOST, MOST_AT_ROOT = 14, 9


MODULES = modules()
needs_checkout = pytest.mark.skipif(not MODULES, reason="not in a checkout")


def imports(name: str, path: Path) -> Iterator[tuple[str, int]]:
    """The modules of the package that a module imports, and in which line."""
    package = name.split(".") if path.name == "__init__.py" and name else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "assocscan":
                    yield alias.name.partition(".")[2], node.lineno
        elif isinstance(node, ast.ImportFrom):
            parts = (node.module or "").split(".") if node.module else []
            if node.level:
                parts = [*package[: len(package) - node.level + 1], *parts]
            elif parts[:1] != ["assocscan"]:
                continue
            else:
                parts = parts[1:]
            for alias in node.names:
                full = ".".join((*parts, alias.name))
                yield (full if full in MODULES else ".".join(parts)), node.lineno


def for_types(path: Path) -> set[int]:
    """The lines of a module that only type checkers read."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    blocks = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    return {n for node in blocks for n in range(node.lineno, (node.end_lineno or 0) + 1)}


def graph() -> dict[str, set[str]]:
    """What each module but the package itself imports when it runs, inside of functions too."""
    found: dict[str, set[str]] = {}
    for name, path in MODULES.items():
        unread = for_types(path)
        targets = {target for target, line in imports(name, path) if line not in unread}
        found[name] = {t for t in targets if t in MODULES and t and t != name}
    return found


def reached(start: str, imported: dict[str, set[str]]) -> set[str]:
    """The modules that a module imports, and that these import, and so on."""
    found: set[str] = set()
    left = {start}
    while left:
        left = set().union(*(imported[name] for name in left)) - found
        found |= left
    return found


def floor(module: str) -> tuple[int, str]:
    """The number and the name of a module's floor."""
    return max(
        ((number, name) for number, names in enumerate(FLOORS) for name in names
         if f"{module}.".startswith(f"{name}.")),
        key=lambda found: len(found[1]),
        default=(-1, ""),
    )  # fmt: skip


@needs_checkout
def test_imports_go_down() -> None:
    wrong = []
    for name, path in MODULES.items():
        here, own = floor(name)
        if name in ("", "__main__") or own == "cli" or here < 0:
            continue  # the command line uses the package as its users do
        for target, line in imports(name, path):
            there, other = floor(target)
            if not target or there > here or (there == here and other != own):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {target or 'the package'}")
    assert not wrong, "\n".join(wrong)


@needs_checkout
def test_no_module_imports_itself_by_way_of_others() -> None:
    imported = graph()
    circular = {name for name in imported if name in reached(name, imported)}
    assert not circular, "\n".join(
        f"{name} imports {', '.join(sorted(imported[name] & circular))}"
        for name in sorted(circular)
    )


def test_the_benchmarks_are_on_top() -> None:
    """Only the command line imports them, where it is asked for them."""
    assert bench_modules()
    text = re.compile(r"\b(from|import) assocscan_bench\b")
    files = MODULES.items()
    importing = {name for name, path in files if text.search(path.read_text(encoding="utf-8"))}
    assert importing == {"__main__"}


@needs_checkout
def test_every_module_has_a_floor() -> None:
    nowhere = {name for name in MODULES if name.count(".") or MODULES[name].name != "__init__.py"
               if floor(name)[0] < 0}  # fmt: skip
    assert nowhere <= {"__main__", ""}


@needs_checkout
def test_folders_can_be_read_at_a_glance() -> None:
    files = [*MODULES.values(), *bench_modules().values()]
    count = collections.Counter(path.parent for path in files)
    for folder, number in count.items():
        if folder != ROOT / "ops":
            most = MOST_AT_ROOT if folder == ROOT / "assocscan" else MOST
            assert number <= most, f"{folder.relative_to(ROOT)} holds {number} modules"
