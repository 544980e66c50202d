"""A plugin of pytest for `.ci/gpu`, which runs many processes on one or several GPUs.

GPUS: how many GPUs there are. Each process has another of them first (`cuda:0`).
TESTS_PART: K/N, the K-th of N parts of the tests, which a hash of their names makes.
"""

from __future__ import annotations

import os
import zlib

import pytest

gpus = int(os.environ.get("GPUS", "1"))
if gpus > 1:
    first = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % gpus
    order = [(first + k) % gpus for k in range(gpus)]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, order))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part = os.environ.get("TESTS_PART", "")
    if not part:
        return
    k, n = map(int, part.split("/"))
    mine, others = [], []
    for item in items:
        (mine if zlib.crc32(item.nodeid.encode()) % n == k - 1 else others).append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = mine
