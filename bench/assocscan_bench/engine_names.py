"""The engines that a suite times one by one, under the names that `backend=` takes."""

from __future__ import annotations

from assocscan.runtime.backends import BACKENDS, GPU_ENGINES, availability

from .settings import Settings

ON_CPU = ("cpu", "eager")


def engine_names(settings: Settings) -> tuple[list[str], dict[str, str]]:
    """The engines that can run on the device, and why the others cannot. On GPUs the eager engine
    is left out: it is for what nothing else can run."""
    found: list[str] = []
    missing: dict[str, str] = {}
    reasons = availability()
    for name in BACKENDS[1:]:
        if name in GPU_ENGINES and not settings.is_gpu:
            missing[name] = "runs on GPUs only"
        elif name in ON_CPU and settings.is_gpu:
            continue
        elif reasons[name] is not None:
            missing[name] = str(reasons[name])
        else:
            found.append(name)
    return found, missing
