"""The README as a package index shows it: its links and figures lead to the repository.

python .ci/absolute_links.py README.md https://HOST/OWNER/NAME REVISION rewrites the file in place.
The workflow calls it before it builds the packages, with the address and the tag that it runs for:
an index shows the README of a package by itself, without the files beside it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def absolute(text: str, folder: Path, repository: str, revision: str) -> str:
    """The text, in which links relative to `folder` are those of the repository's pages."""

    def target(found: re.Match[str]) -> str:
        mark, words, path, heading = found.groups()
        if not (folder / path).exists():
            raise SystemExit(f"{path}: no such file")
        # A page about a file will not do as a figure.
        kind = "raw" if mark else "tree" if (folder / path).is_dir() else "blob"
        return f"{mark}[{words}]({repository.rstrip('/')}/{kind}/{revision}/{path}{heading or ''})"

    parts = FENCE.split(text)
    parts[::2] = [LINK.sub(target, part) for part in parts[::2]]
    return "".join(parts)


if __name__ == "__main__":
    file = Path(sys.argv[1])
    text = file.read_text(encoding="utf-8")
    file.write_text(absolute(text, file.parent, *sys.argv[2:]), encoding="utf-8")
