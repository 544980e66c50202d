"""The reference as Markdown that can be read where it is stored, and as autodoc on the site.

A page of `docs/reference` has, for each name, a part between two marks:

    <!-- autofunction: assocscan.cumsum -->
    …
    <!-- end -->

What stands in between is written by this file from the docstring:

    python docs/_extensions/reference_pages.py

When the site is built, such a part becomes the directive that its first mark names, with options
such as `:members:` behind the name.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

from operator_files import families
from plain_docstrings import ENTRY, HEADINGS, SECTION, dedented, paragraphs

FOLDER = Path(__file__).resolve().parents[1] / "reference"
PART = re.compile(r"<!-- (auto\w+): ([\w.]+)(.*?) -->\n(.*?)<!-- end -->", re.DOTALL)
OPTION = re.compile(r":([\w-]+):([^:]*)")
CALLS = ("forward", "step")
MOST = 100  # characters of a signature on one line
# On the index, a link to what the site has not.
FOR_FILES = "; the same [as text](operators.md)"


def written(page: str) -> str:
    """A page whose parts are as the docstrings say."""

    def part(found: re.Match[str]) -> str:
        kind, name, options, _ = found.groups()
        given = {key: value.strip() for key, value in OPTION.findall(options)}
        lines = [f"<!-- {kind}: {name}{options} -->", "", *described(name, given), "<!-- end -->"]
        return "\n".join(lines)

    return PART.sub(part, page)


def as_directives(page: str) -> str:
    """A page for the site: its parts as directives of autodoc."""

    def part(found: re.Match[str]) -> str:
        kind, name, options, _ = found.groups()
        module = name.rpartition(".")[0]
        lines = ["```{eval-rst}", f".. py:currentmodule:: {module}", "", f".. {kind}:: {name}"]
        lines += [f"   :{key}: {value.strip()}" for key, value in OPTION.findall(options)]
        return "\n".join([*lines, "```"])

    return PART.sub(part, page)


def found_at(name: str) -> Any:
    """What a dotted name means."""
    module, _, rest = name.partition(".")
    value: Any = importlib.import_module(module)
    for part in rest.split("."):
        if not hasattr(value, part):
            value = importlib.import_module(f"{value.__name__}.{part}")
        else:
            value = getattr(value, part)
    return value


def described(name: str, options: dict[str, str]) -> list[str]:
    """Heading, signature and docstring of a name; and of the members that `options` ask for."""
    value, short = found_at(name), name.rpartition(".")[2]
    lines = [f"## {short}", "", *signature_of(value, short), *markdown(inspect.getdoc(value) or "")]
    for member in members(value, options):
        own = getattr(value, member)
        lines += [f"### {short}.{member}", "", *signature_of(own, member)]
        lines += markdown(inspect.getdoc(own) or "")
    return lines


def members(value: Any, options: dict[str, str]) -> list[str]:
    """The methods that are shown with a class: the calls of a layer, which it may inherit, then
    the others in the order of its source."""
    wanted = [n.strip() for n in options.get("special-members", "").split(",") if n.strip()]
    if options.get("members"):
        return [*wanted, *(n.strip() for n in options["members"].split(","))]
    if "members" not in options:
        return wanted
    own = [n for n, f in vars(value).items() if inspect.isfunction(f) and not n.startswith("_")]
    own.sort(key=lambda n: n not in CALLS)
    return [*wanted, *(n for n in own if inspect.getdoc(getattr(value, n)))]


def signature_of(value: Any, short: str) -> list[str]:
    """The call as code, without types: the docstring says what is taken and returned."""
    if not callable(value):
        return []
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return []
    if inspect.isclass(value) and issubclass(value, (BaseException, tuple)):
        return []
    parts, has_star = [], False
    for p in signature.parameters.values():
        if p.name in ("self", "surplus", "unknown"):
            continue
        if p.kind is p.KEYWORD_ONLY and not has_star:
            parts.append("*")
            has_star = True
        prefix = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        has_star |= prefix == "*"
        default = "" if p.default is p.empty else f"={shown(p.default)}"
        parts.append(f"{prefix}{p.name}{default}")
    call = f"{short}({', '.join(parts)})"
    if len(call) > MOST:
        call = f"{short}(\n" + "".join(f"    {part},\n" for part in parts) + ")"
    return ["```py", *call.splitlines(), "```", ""]


def shown(default: Any) -> str:
    """A default as a caller would write it."""
    if inspect.isfunction(default) or inspect.isclass(default):
        return str(default.__name__)
    text = repr(default)
    return text if "<" not in text else "…"


def markdown(said: str) -> list[str]:
    """The Markdown of a docstring (its form: `plain_docstrings`)."""
    lines: list[str] = []
    for block in paragraphs(said.splitlines()):
        if block[0].lstrip().startswith(">>> "):
            lines += ["```pycon", *dedented(block), "```", ""]
        elif SECTION.match(block[0]):
            inside = dedented(block[1:]) if block[1:] else []
            lines += [f"**{block[0][:-1]}**", "", *(items(inside) or [*inside, ""])]
        elif all(line.startswith(" ") for line in block):
            lines += ["```text", *dedented(block), "```", ""]
        else:
            lines += items(block) or prose(block)
    return lines


def items(block: list[str]) -> list[str] | None:
    """A list of names; None where the lines are not one."""
    found: list[str] = []
    for line in block:
        entry = ENTRY.match(line)
        if entry and (entry[1] not in HEADINGS or found):
            found.append(f"- `{entry[1]}`: {entry[2]}")
        elif found and line.startswith(" "):
            found.append(f"  {line.strip()}")
        else:
            return None
    return [*found, ""]


def prose(block: list[str]) -> list[str]:
    """Text, in which indented lines stand as they are, but for those of a list."""
    lines: list[str] = []
    in_list = False
    for line in block:
        in_list = line.startswith("- ") or (in_list and line.startswith("  "))
        is_code = line.startswith(" ") and not in_list
        was_code = bool(lines) and lines[-1].startswith("    ")
        if lines and is_code != was_code:
            lines.append("")
        lines.append(f"    {line.strip()}" if is_code and not was_code else line)
    return [*lines, ""]


def operators() -> str:
    """The page of all operators of `assocscan.ops`, file by file."""
    lines = [OF_OPERATORS, *overview(), ""]
    for module, names in families().items():
        said = importlib.import_module(f"assocscan.ops.{module}").__doc__ or ""
        lines += [f"## {', '.join(names)}", "", *markdown(inspect.cleandoc(said))]
        for name in names:
            made = found_at(f"assocscan.ops.{name}")
            lines += [f"### ops.{name}", ""]
            if not hasattr(made, "combine"):
                lines += signature_of(made, name)
            lines += markdown(inspect.getdoc(getattr(made, "combine", made)) or "")
    return "\n".join(lines).rstrip() + "\n"


OF_OPERATORS = """# Operators of `assocscan.ops`

Written by `docs/_extensions/reference_pages.py`. An element is what a scan combines: a lift makes
it of the inputs, and a lower makes the outputs of it. […, d] is a leaf whose last dimension belongs
to one element. [Operators](../operators.md) says how to combine them, and how fast they are.
"""


def overview() -> list[str]:
    """A table of all operators: the first lines of their docstrings."""
    lines = ["| operator | what it gives |", "|---|---|"]
    for name in sorted(name for names in families().values() for name in names):
        made = found_at(f"assocscan.ops.{name}")
        doc = inspect.getdoc(getattr(made, "combine", made)) or ""
        first = doc.partition("\n\n")[0].replace("\n", " ").replace("|", "\\|")
        lines.append(f"| [`{name}`](#ops{name.lower()}) | {first} |")
    return lines


def pages() -> dict[Path, str]:
    """The pages that this file writes, with their texts."""
    found = {p: written(p.read_text(encoding="utf-8")) for p in sorted(FOLDER.glob("*.md"))}
    return {**found, FOLDER / "operators.md": operators()}


def read_source(app: Any, name: str, source: list[str]) -> None:
    source[0] = as_directives(source[0]).replace(FOR_FILES, "")


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", read_source)
    return {"parallel_read_safe": True}


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
