"""What tests of `bench` share: cases that another process can make, and what is printed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch

from assocscan import ops
from assocscan_bench.cases import PEER, Case, Contender, contender
from assocscan_bench.measuring.checks import scan_check
from assocscan_bench.output import report
from assocscan_bench.output.records import Record

ENDS = 8  # the length at which the process ends


def case(length: int, ending: str = "exit") -> Case:
    """A sum: by torch, and by contenders in processes of their own."""
    x = torch.arange(length, dtype=torch.float32)

    def ends() -> Any:
        if length == ENDS and ending == "exit":
            os._exit(9)
        if length == ENDS:
            raise RuntimeError("no such kernel\nand more")
        print("text for people")
        return x.cumsum(0)

    contenders: dict[str, Contender] = {
        "here": contender(lambda: x.cumsum(0)),
        "apart": Contender(lambda: ends, PEER, apart=True),
        "apart, wrong": Contender(lambda: wrong(x), PEER, apart=True),
    }
    check = scan_check(ops.sum, x, 0)
    return Case("group", "L", length, (length,), torch.float32, 8 * length, contenders, check)


def wrong(x: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: x.cumsum(0) + 1000


def slow_case(seconds: float) -> Case:
    """A case that takes long to make."""
    time.sleep(seconds)
    return case(4)


def error_case(length: int) -> Case:
    """The process of the call, as an error of each seed."""
    contenders = {"apart": Contender(lambda: lambda: [float(os.getpid())] * 3, apart=True)}
    return Case("group", "L", length, (length,), torch.float32, 0, contenders, errors=True)


def printed(records: list[Record]) -> str:
    """What the command prints of a suite, but for its name and the speed-ups."""
    return "\n".join([*report.rows(records), report.notes(records).rstrip("\n")])
