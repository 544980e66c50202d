"""Headers that kernels in C++ and kernels in CUDA share: scalar functions with torch's meaning."""

from __future__ import annotations

from importlib.resources import files


def headers_of(package: str, suffix: str) -> dict[str, str]:
    """The handwritten headers in a package's folder, by file name."""
    found = [f for f in files(package).iterdir() if f.name.endswith(suffix)]
    return {f.name: f.read_text(encoding="utf-8") for f in found}


def shared_headers() -> dict[str, str]:
    return headers_of(__name__, ".h")
