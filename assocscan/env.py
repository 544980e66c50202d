"""``python -m assocscan env``: what was found on this machine."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path

import torch

from assocscan import __version__
from assocscan.engines import availability

CUPY_DISTRIBUTIONS = ("cupy-cuda13x", "cupy-cuda12x", "cupy")


def run() -> int:
    """Print versions, compiler, cache folder, devices and engines."""
    facts = {
        "assocscan": __version__,
        "python": platform.python_version(),
        "torch": f"{torch.__version__} (CUDA {torch.version.cuda or 'none'})",
        "triton": installed_version("triton"),
        "cupy": installed_version(*CUPY_DISTRIBUTIONS),
        "compiler": compiler(),
        "cache": cache_folder(),
        "threads": str(torch.get_num_threads()),
        "devices": ", ".join(device_names()),
    }
    for name, value in facts.items():
        print(f"{name:11}{value}")
    print("engines")
    for name, reason in availability().items():
        print(f"  {name:11}{'available' if reason is None else f'no: {reason}'}")
    return 0


def installed_version(*distributions: str) -> str:
    """The version of the first one installed, found without importing it."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "not installed"


def compiler() -> str:
    """Path and version line of the C++ compiler."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        return f"none of {', '.join(names)} found"
    result = subprocess.run([path, "--version"], capture_output=True, text=True)
    words = (result.stdout or result.stderr).strip() or f"exit status {result.returncode}"
    return f"{path}, {words.splitlines()[0]}"


def cache_folder() -> str:
    """Where compiled kernels are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return os.environ.get("ASSOCSCAN_CACHE_DIR") or str(Path(base) / "assocscan")


def device_names() -> list[str]:
    gpus = [
        f"cuda:{index} {torch.cuda.get_device_name(index)}"
        for index in range(torch.cuda.device_count())
    ]
    return ["cpu", *gpus]
