"""What was measured, as CSV and JSON, with the device and the versions it was measured on."""

from __future__ import annotations

import csv
import datetime
import json
import platform
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from assocscan import __version__
from assocscan.cli.env import CUPY_DISTRIBUTIONS, installed_version
from assocscan.runtime.native import runner as native

from ..settings import Settings
from ..suites import SUITES, peers_of


@dataclass(frozen=True)
class Record:
    """One contender on one case.

    Times in milliseconds, the median with the quantiles at 0.2 and 0.8; spread: their distance
    over the median, copy_spread: that of the copy. memory: the most bytes that were allocated
    during a call, less those before it; of_exponentials: the least time in which the device takes
    the case's exponentials, over the median (both on GPUs, where the case asks for them). limit:
    what is nearest of memory, FP32 and special functions, and of_limit: the least time that it
    allows, over the median (on GPUs, of cases that count what they compute). error:
    the distance from the reference; of cases that compare errors the median over the seeds, with
    the least and the largest. A note says why there are no times, or why the result is wrong.
    """

    suite: str
    group: str
    x_name: str
    x: float
    shape: str
    dtype: str
    contender: str
    ms: float | None = None
    ms_low: float | None = None
    ms_high: float | None = None
    bytes: int = 0
    copy_ms: float | None = None
    of_copy: float | None = None
    spread: float | None = None
    copy_spread: float | None = None
    memory: int | None = None
    of_exponentials: float | None = None
    limit: str = ""
    of_limit: float | None = None
    error: float | None = None
    error_low: float | None = None
    error_high: float | None = None
    is_wrong: bool = False
    kind: str = ""
    note: str = ""

    @property
    def is_measured(self) -> bool:
        return self.ms is not None or self.error is not None


def environment(settings: Settings) -> dict[str, Any]:
    """The device, the date and the versions."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": device_name(settings.device),
        "quick": settings.quick,
        "repeat": settings.repeat,
        "threads": torch.get_num_threads(),
        "runner": "C++" if native.module is not None else "Python",
        "python": platform.python_version(),
        "assocscan": __version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": installed_version("triton"),
        "cupy": installed_version(*CUPY_DISTRIBUTIONS),
        "peers": {
            name: installed_version(*peer.distributions)
            for name, peer in peers_of(SUITES).items()
            if peer.distributions
        },
    }


def origin(where: dict[str, Any]) -> str:
    """Of `environment`, what the title of a figure says: device, torch, threads and day."""
    threads = where["threads"]
    return (
        f"{where['device']}, torch {where['torch']}, {threads} thread{'s' * (threads != 1)}, "
        f"{where['date'][:10]}"
    )


def device_name(device: torch.device) -> str:
    """The model of the GPU or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    models = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
    return models[0] if models else platform.processor() or platform.machine()


def write(folder: Path, suite: str, records: list[Record], where: dict[str, Any]) -> list[Path]:
    """`<suite>.csv` and `<suite>.json` in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    table, tree = folder / f"{suite}.csv", folder / f"{suite}.json"
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Record)])
        writer.writeheader()
        writer.writerows(asdict(r) for r in records)
    content = {"environment": where, "records": [asdict(r) for r in records]}
    tree.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return [table, tree]
