"""The engine that a test runs on, and how many examples hypothesis draws."""

import os

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported

from processes import cache, failing, logging, run, server  # noqa: F401, fixtures
from table import ENGINES, Engine

from assocscan import api, engines
from assocscan.engines import availability, compiler

settings.register_profile("suite", deadline=None, database=None, print_blob=True)
settings.load_profile("suite")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where there is a GPU, mark the tests that run on it: `-m gpu` selects them."""
    if torch.cuda.is_available():
        for item in items:
            if isinstance(item, pytest.Function) and runs_on_gpu(item):
                item.add_marker("gpu")


def runs_on_gpu(item: pytest.Function) -> bool:
    """By the backend in its parameters, where it has one; else by the device of its module."""
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    names = [v.name if isinstance(v, Engine) else v for v in values]
    backends = [n for n in names if isinstance(n, str) and n in engines.BACKENDS]
    if backends:
        return not GPU_BACKENDS.isdisjoint(backends)
    return "cuda" in (getattr(item.module, "GPU", None), getattr(item.module, "DEVICE", None))


GPU_BACKENDS = frozenset(engines.GPU_ENGINES)


@pytest.fixture(scope="session", params=ENGINES, ids=lambda engine: engine.name)
def engine(request: pytest.FixtureRequest) -> Engine:
    chosen: Engine = request.param
    reason = availability()[chosen.name]
    if reason is not None:
        pytest.skip(reason)
    return chosen


@pytest.fixture(autouse=True)
def light_optimisation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """C++ kernels are compiled with -O1, 2.4 times faster: tests compile more than a thousand. With
    the flags of users run those marked `exhaustive`, parts of every table, or `release_flags`."""
    node = request.node
    if not any(node.get_closest_marker(name) for name in ("exhaustive", "release_flags")):
        for level in ("SHORT", "LONG"):
            monkeypatch.setattr(compiler, level, ("-O1",))


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` runs eagerly, for examples of which only the words and the numbers matter."""
    monkeypatch.setattr(engines, "why_not", lambda call, backend: "a test does without")
    monkeypatch.setattr(api, "warn_once", lambda operator, why: None)
