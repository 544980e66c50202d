"""Generated Triton source → its kernel, through a file in the cache folder.

Triton reads a function's source from its file, and tracebacks show it. Nothing here is imported
before the first Triton scan; Triton keeps its own cache of compiled kernels.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from ..errors import BackendError
from ..locks import ForkSafeLock
from .compiler import cache_folder

_LOCK = ForkSafeLock()
_LOADED: dict[str, Any] = {}


@functools.cache
def is_installed() -> bool:
    """Whether Triton can be imported; found without importing it."""
    return importlib.util.find_spec("triton") is not None


def is_interpreting() -> bool:
    """Whether Triton kernels run in its interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> Any:
    """Run a kernel through Triton's launcher, which compiles it at first; the compiled kernel, or
    None from the interpreter."""
    if not is_interpreting():
        return kernel[grid](*arguments, **options)
    from . import triton_interpreter

    with triton_interpreter.corrected():
        return kernel[grid](*arguments, **options)


def load(source: str) -> Any:
    """The kernel `scan` of this source. Raises BackendError where Triton cannot take it."""
    known = _LOADED.get(source)
    if known is not None:
        return known
    with _LOCK:
        if source not in _LOADED:
            _LOADED[source] = _load(source)
        return _LOADED[source]


def _load(source: str) -> Any:
    if not is_installed():
        raise BackendError("Triton is not installed (it comes with torch's CUDA wheels)")
    key = hashlib.sha256(source.encode()).hexdigest()[:32]
    name = f"assocscan_triton_{key}"
    spec = importlib.util.spec_from_file_location(name, write(source, key))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module.scan


def write(source: str, key: str) -> Path:
    """The file of this source, written whole under another name first."""
    folder = cache_folder() / "triton"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{key}.py"
    if not path.exists() or path.read_text(encoding="utf-8") != source:
        handle, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(source)
        os.replace(temporary, path)
    return path
