"""Headers that kernels in C++ and kernels in CUDA share: scalar functions with torch's meaning."""

from __future__ import annotations

import functools
from importlib.resources import files


@functools.cache
def headers_of(package: str, suffix: str) -> dict[str, str]:
    """The handwritten headers in a package's folder, by file name. They are read once: a process
    that has become another user need not be able to read the package."""
    found = [f for f in files(package).iterdir() if f.name.endswith(suffix)]
    return {f.name: f.read_text(encoding="utf-8") for f in found}


def shared_headers() -> dict[str, str]:
    return headers_of(__name__, ".h")
