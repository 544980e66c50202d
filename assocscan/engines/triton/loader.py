"""Generated Triton source → its kernel, through a module that has no file.

Triton reads a function's source through `inspect`, and so do tracebacks; both ask the module's
loader. Code that is run is never read from a disk. Nothing here is imported before the first Triton
scan; Triton keeps its own cache of compiled kernels.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.abc
import importlib.util
import os
import sys
import types
from typing import Any

from ...caching.load_once import Once
from ...errors import BackendError
from .corrections import lane_promises

_LOADED: dict[str, Any] = {}
_ONCE = Once(_LOADED)
# A path beneath a file cannot exist: nothing else can be read in the place of a module.
_FOLDER = __file__
# The first line of every module. Triton's key of a kernel that it keeps on the disk has the number
# of the line where the function begins: this line keeps out what was compiled with promises.
FIRST_LINE = "# Compiled without promises about lanes (corrections/lane_promises.py).\n"


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
        with lane_promises.mended():
            return kernel[grid](*arguments, **options)
    from .corrections import interpreter as triton_interpreter

    with triton_interpreter.corrected():
        return kernel[grid](*arguments, **options)


def load(source: str) -> Any:
    """The kernel `scan` of this source. Raises BackendError where Triton cannot take it."""
    return _ONCE.get(source, lambda: _load(source))


def _load(source: str) -> Any:
    if not is_installed():
        raise BackendError("Triton is not installed (it comes with torch's CUDA wheels)")
    return module_of(source).scan


class SourceLoader(importlib.abc.InspectLoader):
    """Loads a module from text, and shows it to `inspect` and `linecache`."""

    def __init__(self, source: str, path: str) -> None:
        self.source, self.path = source, path

    def get_source(self, fullname: str) -> str:
        return self.source

    def get_code(self, fullname: str) -> types.CodeType:
        return compile(self.source, self.path, "exec", dont_inherit=True)


def module_of(source: str) -> types.ModuleType:
    """The module of a generated source."""
    source = FIRST_LINE + source
    key = hashlib.sha256(source.encode()).hexdigest()[:32]
    name, path = f"assocscan_triton_{key}", os.path.join(_FOLDER, f"{key}.py")
    loader = SourceLoader(source, path)
    spec = importlib.util.spec_from_loader(name, loader, origin=path, is_package=False)
    assert spec is not None
    spec.has_location = True  # the module has a __file__
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
