"""Names of operators: which are accepted, and how they stand in text that is read as code.

A name is data. It is shown in messages as it is, and written into generated sources, and into the
graphs of torch, always through `escaped`: torch's own code generators put the strings of a graph
between quotes without escaping them.
"""

from __future__ import annotations

import hashlib
import unicodedata
from typing import Any
from urllib.parse import quote, unquote_to_bytes

from ..errors import MonoidError

MAX_LENGTH = 200
# Control characters (C0, DEL, C1), surrogates, and the two separators that end a line.
REFUSED = ("Cc", "Cs", "Zl", "Zp")
# Beside letters, digits and _.-~ of ASCII. No quote, backslash, slash, question mark, asterisk or
# brace: nothing that ends a string or a comment, continues a line, or begins a trigraph.
SAFE = " ()<>[],:;=+&|@#!"


def checked(name: Any, what: str = "the name of a monoid") -> str:
    """The name as a plain string. Raises MonoidError for what cannot be one."""
    wrong = why_not(name)
    if wrong is not None:
        raise MonoidError(
            f"{what} {wrong}; a name has 1 to {MAX_LENGTH} characters, none of them a control "
            "character, a line break or a lone surrogate"
        )
    return str.__str__(name)


def why_not(name: Any) -> str | None:
    """What is wrong with a name; None for a good one."""
    if not isinstance(name, str):
        return f"is {ascii_start(name)}, of type {type(name).__name__}, expected a string"
    name = str.__str__(name)
    if not name:
        return "is empty"
    if len(name) > MAX_LENGTH:
        return f"has {len(name)} characters ({ascii_start(name)})"
    if not name.isprintable():  # which spaces other than " ", and formatting characters, are not
        for place, character in enumerate(name):
            if unicodedata.category(character) in REFUSED:
                return f"is {name!a}, whose character {place} is U+{ord(character):04X}"
    return None


def ascii_start(value: Any) -> str:
    shown = ascii(value)
    return shown if len(shown) <= 60 else f"{shown[:60]}…"


def composed(name: str) -> str:
    """A name made of others; one that has grown too long is cut in the middle, and has a hash of
    the whole there, so that it still differs from other long ones."""
    if len(name) <= MAX_LENGTH:
        return name
    mark = f"…{hashlib.sha256(name.encode(errors='surrogatepass')).hexdigest()[:8]}…"
    rest = MAX_LENGTH - len(mark)
    return name[: rest // 2] + mark + name[-(rest - rest // 2) :]


def escaped(name: str) -> str:
    """The name in ASCII, for comments and strings of any language: whatever could mean something
    there as %XX, the bytes of its UTF-8."""
    return quote(name, safe=SAFE, errors="surrogatepass")


def unescaped(text: str) -> str:
    """The name that `escaped` wrote. Raises MonoidError for what it cannot have written."""
    try:
        name = checked(unquote_to_bytes(text).decode())
    except UnicodeError:
        name = ""
    if escaped(name) != text or not name:
        raise MonoidError(f"{ascii_start(text)} is not the written form of a name")
    return name
