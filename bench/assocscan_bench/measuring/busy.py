"""Whether other programs use the processor: then times say little."""

from __future__ import annotations

import os
import time
from pathlib import Path

STAT = Path("/proc/stat")
SECONDS = 0.3  # between two looks at the counters
MOST = 0.25  # of the processors, by other programs


def processors() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def counters() -> tuple[float, float] | None:
    """(busy, all) time of all processors since the system started; None where it does not say."""
    try:
        fields = STAT.read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]
    except (OSError, UnicodeDecodeError):
        return None
    times = [float(f) for f in fields]
    return sum(times) - times[3] - times[4], sum(times)  # without idle and waiting for disks


def share() -> float | None:
    """The part of the processors that is in use while this process sleeps; from the load average
    if there are no counters; None if neither is available."""
    before = counters()
    if before is None:
        try:
            return os.getloadavg()[0] / processors()
        except (AttributeError, OSError):
            return None
    time.sleep(SECONDS)
    after = counters()
    assert after is not None
    return (after[0] - before[0]) / max(after[1] - before[1], 1e-9)


def warning() -> str | None:
    """What to say of a machine that is busy; None where it is not."""
    used = share()
    if used is None or used <= MOST:
        return None
    return (
        f"other programs use {used:.0%} of the {processors()} processors: this machine is busy, "
        "and times vary. Wait until it is idle, or compare only what was timed in one run"
    )
