"""What the words of the command line mean; each function raises ArgumentTypeError for others."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys

import torch

from assocscan.errors import AssocScanError
from assocscan.monoids.monoid import Monoid, monoids
from assocscan.program.dtypes import SCALAR_DTYPES
from assocscan.runtime.backends import BACKENDS

from .settings import PASSES, short
from .suites import SUITES, peers_of

Unknown = argparse.ArgumentTypeError


def known_suite(name: str) -> str:
    if name not in SUITES:
        raise Unknown(f"unknown suite {name!r}: choose from {', '.join(SUITES)}")
    return name


def usable_device(name: str) -> str:
    """The name itself; an error where torch has no such device here."""
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise Unknown(f"device {name!r}: {reason}") from error
    return name


def known_peers(names: str) -> tuple[str, ...]:
    """The names between commas."""
    if names == "none":
        return ()
    found = tuple(name.strip() for name in names.split(",") if name.strip())
    for name in found:
        known = peers_of(SUITES)
        if name not in known:
            raise Unknown(f"unknown peer {name!r}: choose from {', '.join(known)}")
    return found


def positive(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise Unknown(f"{text.strip()!r} is no size: expected a whole number from 1")
    return int(text)


def milliseconds(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise Unknown(f"{text!r} is no time: expected milliseconds, a whole number from 1")
    return int(text)


def shape(text: str) -> tuple[int, ...]:
    """B,L,D or B,L,D,N: batch, length of the axis, width, and states for each of the width."""
    sizes = tuple(positive(part) for part in text.split(","))
    if len(sizes) not in (3, 4):
        raise Unknown(
            f"{text!r} has {len(sizes)} sizes: expected B,L,D, such as 8,1024,1536, or B,L,D,N"
        )
    return sizes


def lengths(text: str) -> tuple[int, ...]:
    return tuple(positive(part) for part in text.split(","))


def dtypes(text: str) -> tuple[torch.dtype, ...]:
    """Names of torch's dtypes of floats between commas."""
    known = {short(d): d for d in SCALAR_DTYPES if d.is_floating_point or d.is_complex}
    found = [part.strip().removeprefix("torch.") for part in text.split(",")]
    for name in found:
        if name not in known:
            raise Unknown(f"unknown dtype {name!r}: choose from {', '.join(known)}")
    return tuple(known[name] for name in found)


def known_pass(name: str) -> str:
    if name not in PASSES:
        raise Unknown(f"unknown pass {name!r}: choose from {', '.join(PASSES)}")
    return name


def known_backend(name: str) -> str:
    if name not in BACKENDS:
        raise Unknown(f"unknown backend {name!r}: choose from {', '.join(BACKENDS)}")
    return name


def operator(name: str) -> Monoid:
    """A registered operator; or `module:name`, an attribute of a module that can be imported from
    the working directory or from where Python finds modules."""
    if ":" not in name:
        known = monoids()
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.0)
            raise Unknown(
                f"no operator is registered as {name!r}; did you mean {near[0]!r}? One of your own "
                "is module:name"
            )
        return known[name]
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module)
    except (ImportError, ValueError, AssocScanError) as error:
        raise Unknown(f"module {module!r} cannot be imported: {error}") from error
    try:
        for part in attribute.split("."):
            found = getattr(found, part)
    except AttributeError:
        raise Unknown(f"module {module!r} has no attribute {attribute!r}") from None
    if not isinstance(found, Monoid):
        raise Unknown(
            f"{name} is of type {type(found).__name__}, expected a Monoid: put "
            "@assocscan.monoid(identity=...) on the function"
        )
    return found
