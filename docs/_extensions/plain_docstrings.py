"""Docstrings in this package are plain text; this makes reStructuredText of them for autodoc.

What is understood:

- a paragraph that begins with `>>>` is a doctest, up to the next empty line;
- an indented paragraph is a formula or a table, shown as it stands;
- lines `name: text` with their indented continuations are a list of names, or of the fields of an
  operator (`Inputs: …`);
- `Raises:` above indented lines is such a list with a heading;
- all else is text, in which only backticks mean something.
"""

from __future__ import annotations

import re
from typing import Any

SECTION = re.compile(r"^(Raises|Returns|Arguments|Inputs|Outputs):$")
ENTRY = re.compile(r"^([A-Za-z_][\w.*]*(?:, [A-Za-z_][\w.*]*)*): (.*)$")
HEADINGS = {"Identity", "Note", "Source"}  # these begin a sentence, not an entry
FIELDS = {"Inputs", "Element", "Outputs", "Identity", "Cost"}  # of an operator, in this order
CODE = re.compile(r"`+[^`]+`+")
SPECIAL = re.compile(r"([\\*|_])")


def text(line: str) -> str:
    """A line in which only backticks have a meaning; they become literals."""
    parts, end = [], 0
    for found in CODE.finditer(line):
        parts.append(SPECIAL.sub(r"\\\1", line[end : found.start()]))
        # An escaped space on either side: a literal may touch letters.
        parts.append(f"\\ ``{found[0].strip('`')}``\\ ")
        end = found.end()
    return "".join(parts) + SPECIAL.sub(r"\\\1", line[end:])


def paragraphs(lines: list[str]) -> list[list[str]]:
    """The lines between empty lines."""
    found: list[list[str]] = [[]]
    for line in lines:
        if line.strip():
            found[-1].append(line.rstrip())
        elif found[-1]:
            found.append([])
    return [lines for lines in found if lines]


def indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def entries(lines: list[str]) -> list[str] | None:
    """A list of names, or None where the lines are not one."""
    result: list[str] = []
    joined: list[tuple[str, str]] = []
    for line in lines:
        found = ENTRY.match(line)
        if found and (found[1] not in HEADINGS or joined):
            joined.append((found[1], found[2]))
        elif joined and line.startswith(" "):
            name, said = joined[-1]
            joined[-1] = name, f"{said} {line.strip()}"
        else:
            return None
    for name, said in joined:
        shown = f"**{name}**" if name in FIELDS else f"``{name}``"
        result.append(f"- {shown}: {text(said)}")
    return [*result, ""]


def dedented(lines: list[str]) -> list[str]:
    least = min(indent(line) for line in lines)
    return [line[least:] for line in lines]


def literal(lines: list[str]) -> list[str]:
    return ["::", "", *(f"    {line}" for line in lines), ""]


def converted(lines: list[str]) -> list[str]:
    """reStructuredText of a docstring's lines."""
    result: list[str] = []
    for block in paragraphs(lines):
        if block[0].lstrip().startswith(">>> "):
            result += [*dedented(block), ""]
        elif SECTION.match(block[0]):
            inside = dedented(block[1:]) if block[1:] else []
            result += [f"**{block[0][:-1]}**", ""]
            result += entries(inside) or [*map(text, inside), ""]
        elif all(line.startswith(" ") for line in block):
            result += literal(dedented(block))
        elif (listed := entries(block)) is not None:
            result += listed
        else:
            result += prose(block)
    return result


def prose(block: list[str]) -> list[str]:
    """Text, in which indented lines stand as they are, and lines with a dash are a list."""
    result: list[str] = []
    run: list[str] = []

    def finish() -> None:
        if run:
            result.extend([text(" ".join(part.strip() for part in run)), ""])
            run.clear()

    k = 0
    while k < len(block):
        line = block[k]
        if line.startswith("- "):
            finish()
            item = [line[2:]]
            while k + 1 < len(block) and block[k + 1].startswith("  "):
                k += 1
                item.append(block[k].strip())
            result += [f"- {text(' '.join(item))}", ""]
        elif line.startswith(" "):
            finish()
            shown = [line]
            while k + 1 < len(block) and block[k + 1].startswith(" "):
                k += 1
                shown.append(block[k])
            result += literal(dedented(shown))
        else:
            run.append(line)
        k += 1
    finish()
    return result


def process(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = converted(lines)


def setup(app: Any) -> dict[str, bool]:
    app.setup_extension("sphinx.ext.autodoc")
    app.connect("autodoc-process-docstring", process)
    return {"parallel_read_safe": True}
