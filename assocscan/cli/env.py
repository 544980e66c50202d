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
# Fractions of a copy's speed by the faster of Triton and multi-pass, and by `auto` with CuPy, of
# `python -m assocscan bench engines` (docs/benchmarks): group, shape, without, with.
MEASURED_WITH = "one H100 80GB, 2026-11-27"
WITH_CUPY = (
    ("sum, float32", "33554432", 0.62, 0.97),
    ("sum, bfloat16", "4 x 8192 x 512", 0.81, 0.95),
    ("recurrence, float32", "8 x 8192 x 1536", 0.97, 0.98),
    ("recurrence, bfloat16", "8 x 8192 x 1536", 0.90, 0.96),
    ("recurrence, float32", "1 x 65536 x 1024", 0.95, 0.97),
    ("recurrence, bfloat16", "1 x 65536 x 1024", 0.56, 0.92),
    ("recurrence, complex64", "8 x 8192 x 768", 0.85, 0.98),
    ("backward, float32", "8 x 8192 x 1536", 0.68, 0.92),
    ("backward, bfloat16", "12288 x 8192", 0.99, 0.94),
)


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
    if torch.cuda.is_available() and availability()["cuda"] is not None:
        print("\n".join(cupy_lines()))
    return 0


def cupy_lines() -> list[str]:
    """What the CUDA engine, which needs CuPy, brings on an NVIDIA GPU."""
    lines = [
        "with CuPy  the CUDA engine would run (GPUs of compute capability 8.0 and newer)",
        f"  {f'of the speed of a copy, {MEASURED_WITH}':48}{'without':>8}{'with':>7}",
    ]
    lines += [f"  {group:24}{shape:24}{a:8.2f}{b:7.2f}" for group, shape, a, b in WITH_CUPY]
    return lines


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
