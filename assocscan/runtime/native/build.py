"""Compiles the C++ runner with the system's compiler against torch's headers, or takes it from the
cache folder, and loads it as a Python module."""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch

from ...caching import cache_folder
from ...caching.trusted_files import read_regular
from ...engines.cpu.compiler import compiler_command, compiler_version, is_cut_short
from ...engines.cpu.compiler_process import run_compiler
from ...errors import BackendError

MODULE = "assocscan_runner"
HERE = Path(__file__).resolve().parent
SOURCES = ("plain.h", "program.h", "descriptions.h", "gradient.h", "runner.cpp")
# -O1 compiles in two thirds of the time of -O2, and the calls take as long.
FLAGS = ("-O1", "-std=c++20", "-fPIC", "-shared", "-w")
LIBRARIES = ("-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10", "-ldl")
SECONDS = 600.0  # until the compiler is stopped


def why_not() -> str | None:
    """The reason why the runner cannot be compiled on this machine; None if it can be tried."""
    if not sys.platform.startswith("linux") or sys.byteorder != "little":
        return f"the C++ runner has not been tried on {sys.platform}"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "the C++ runner has not been tried on free-threaded Python"
    if not compiler_command():
        return "no C++ compiler was found"
    if not any((Path(p) / "Python.h").is_file() for p in python_folders()):
        return f"Python's headers are missing in {python_folders()[0]} (Debian: python3-dev)"
    if not (torch_folder() / "include" / "torch" / "csrc").is_dir():
        return "torch's headers are missing"
    return None


def is_cached() -> bool:
    """Whether the runner was compiled before."""
    return why_not() is None and cache_folder.find(file_name()) is not None


def load() -> Any:
    """The module. Raises BackendError, with the compiler's messages, if it cannot be made."""
    reason = why_not()
    if reason is not None:
        raise BackendError(reason)
    name = file_name()
    stored = cache_folder.find(name)
    if stored is not None:
        try:
            return opened(stored)
        except ImportError:  # made by another system that shares the folder: recompile it
            pass
    with cache_folder.build_folder() as folder:
        try:
            content = compiled(folder, name)
            module = opened(folder / name)
        except (OSError, ImportError) as error:
            raise BackendError(f"it cannot be compiled or loaded: {error}") from error
    cache_folder.store(name, content)
    return module


def opened(library: Path) -> Any:
    loader = importlib.machinery.ExtensionFileLoader(MODULE, str(library))
    spec = importlib.util.spec_from_file_location(MODULE, library, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def compiled(folder: Path, name: str) -> bytes:
    """Compile to the file `name` in the folder; its content."""
    for file, text in sources().items():
        path = folder / file
        path.touch(0o600)
        path.write_text(text, encoding="utf-8")
    command = [*command_line(), str(folder / SOURCES[-1]), "-o", str(folder / name), *libraries()]
    run_compiler(command, folder, "the C++ runner", SECONDS, quiet=True)
    content = read_regular(folder / name)
    if content is None or is_cut_short(content):
        raise BackendError("the compiler ended without an error, but wrote no complete library")
    return content


def sources() -> dict[str, str]:
    return {name: (HERE / name).read_text(encoding="utf-8") for name in SOURCES}


def command_line() -> list[str]:
    includes = [str(torch_folder() / "include"),
                str(torch_folder() / "include" / "torch" / "csrc" / "api" / "include"),
                *python_folders()]  # fmt: skip
    abi = int(torch.compiled_with_cxx11_abi())
    shared_nodes = ["-DSHARED_NODES"] if torch_version() < (2, 13) else []
    return [*compiler_command(), *FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={abi}", *shared_nodes,
            *(f"-isystem{folder}" for folder in includes)]  # fmt: skip


def libraries() -> list[str]:
    return [f"-L{torch_folder() / 'lib'}", *LIBRARIES]


def file_name() -> str:
    return f"runner-{key()}.so"


def key() -> str:
    """Identifies sources, compiler, torch and Python."""
    parts = [*sources().values(), *command_line(), *libraries(), compiler_version(),
             torch.__version__, str(torch.version.git_version), sys.version,
             str(sysconfig.get_config_var("SOABI"))]  # fmt: skip
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def torch_folder() -> Path:
    return Path(torch.__file__).resolve().parent


def torch_version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def python_folders() -> list[str]:
    paths = sysconfig.get_paths()
    return list(dict.fromkeys([paths["include"], paths["platinclude"]]))
