"""``python -m assocscan env``: what was found on this machine."""

import importlib.metadata
import platform
import shlex

import torch

from assocscan import __version__
from assocscan.caching.cache_folder import chosen_folder, why_unusable
from assocscan.engines.cpu.compiler import compiler_command, compiler_version, why_unavailable
from assocscan.errors import BackendError
from assocscan.runtime.backends import availability
from assocscan.runtime.native import runner

CUPY_DISTRIBUTIONS = ("cupy-cuda13x", "cupy-cuda12x", "cupy")


def run() -> int:
    """Print versions, compiler, cache folder, devices and engines."""
    facts = {
        "assocscan": __version__,
        "python": platform.python_version(),
        "torch": f"{torch.__version__} (CUDA {torch.version.cuda or 'none'})",
        "triton": installed_version("triton"),
        "cupy": installed_version(*CUPY_DISTRIBUTIONS),
        "compiler": compiler_line(),
        "runner": runner_line(),
        "cache": cache_line(),
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


def compiler_line() -> str:
    """Path and version line of the C++ compiler that the CPU engine uses."""
    return why_unavailable() or f"{shlex.join(compiler_command())}, {compiler_version()}"


def runner_line() -> str:
    """Whether repeated calls run in C++, or the reason why they do not."""
    try:
        if runner.mode() == "python":
            return f"Python ({runner.VARIABLE}=python)"
    except BackendError as error:
        return f"Python: {error}"
    if runner.module is None and runner.why_not is None:
        runner.load()
    if runner.module is not None:
        return "C++"
    return f"Python: {' '.join(str(runner.why_not).split())}"


def cache_line() -> str:
    """Path of the cache folder; or why another is used."""
    reason = why_unusable()
    if reason is None:
        return str(chosen_folder())
    try:
        named = f"{chosen_folder()} cannot be used: "
    except OSError:
        named = ""
    return f"a temporary folder in every process ({named}{reason})"


def device_names() -> list[str]:
    gpus = [
        f"cuda:{index} {torch.cuda.get_device_name(index)}"
        for index in range(torch.cuda.device_count())
    ]
    return ["cpu", *gpus]
