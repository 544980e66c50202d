"""Hooks and fixtures of all tests: which cases run, the engine that a test runs on, and how many
examples hypothesis draws."""

import os
import sys
import zlib
from collections.abc import Iterator

import pytest
import thinning
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported

from processes import cache, failing, logging, run, server  # noqa: F401, fixtures
from ranks import world  # noqa: F401, a fixture
from repository import BENCH
from table import ENGINES, Engine

from assocscan.api import associative_scan as api
from assocscan.engines.cpu import compiler
from assocscan.runtime import backends as engines
from assocscan.runtime.backends import availability
from assocscan.runtime.native import runner

sys.path.append(str(BENCH))

# The tests run with the runner in C++, from the start; .ci/run has more of them run without it.
os.environ.setdefault(runner.VARIABLE, "wait")
runner.start(is_first=True)
settings.register_profile("suite", deadline=None, database=None, print_blob=True)
settings.load_profile("suite")


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `thinned` and `slow` leave to the exhaustive run, and what runs on a GPU if there
    is one."""
    for item in items:
        if isinstance(item, pytest.Function) and is_left_out(item):
            item.add_marker("exhaustive")
    # Each engine has at least one case of each test; all run the same, for their names lack it.
    cases: dict[tuple[str, str, int], dict[str, list[pytest.Item]]] = {}
    for item in items:
        marker = item.get_closest_marker("thinned")
        left = item.get_closest_marker("exhaustive") is None
        if marker is not None and left and isinstance(item, pytest.Function):
            test, backends = item.nodeid.partition("[")[0], backends_of(item)
            group = cases.setdefault((test, ",".join(backends), marker.args[0]), {})
            group.setdefault(name_without(backends, item), []).append(item)
    for (_, _, n), group in cases.items():
        kept = thinning.kept(group, thinning.more(torch.cuda.is_available()) * n)
        for item in (item for name in group if name not in kept for item in group[name]):
            item.add_marker("exhaustive")
    if torch.cuda.is_available():
        for item in items:
            if isinstance(item, pytest.Function) and runs_on_gpu(item):
                item.add_marker("gpu")
    else:
        leave_slow_ones(items)
        leave_to_hand(items)


def leave_slow_ones(items: list[pytest.Item]) -> None:
    """`slow` tests are exhaustive, but for one in n cases of those marked slow(n)."""
    cases: dict[tuple[str, int], dict[str, pytest.Item]] = {}
    for item in items:
        marker = item.get_closest_marker("slow")
        if marker is None or item.get_closest_marker("exhaustive") is not None:
            continue
        if marker.args:
            test = item.nodeid.partition("[")[0]
            cases.setdefault((test, marker.args[0]), {})[item.nodeid] = item
        else:
            item.add_marker("exhaustive")
    for (_, n), group in cases.items():
        for name in group.keys() - thinning.kept(group, n):
            group[name].add_marker("exhaustive")


def leave_to_hand(items: list[pytest.Item]) -> None:
    """Mark the exhaustive cases that CI leaves out. Of a test of which no case runs by default it
    keeps one at least."""
    cases: dict[tuple[str, bool], dict[str, pytest.Item]] = {}
    runs_by_default = set()
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        test = item.nodeid.partition("[")[0]
        if "exhaustive" in marks and "by_hand" not in marks and isinstance(item, pytest.Function):
            interpreted = "triton" in backends_of(item)
            cases.setdefault((test, interpreted), {})[item.nodeid] = item
        elif not marks & {"exhaustive", "by_hand"}:
            runs_by_default.add(test)
    for (test, interpreted), group in cases.items():
        n = thinning.INTERPRETED_IN_CI if interpreted else thinning.IN_CI
        kept = thinning.kept(group, n, at_least=int(test not in runs_by_default))
        for name in group.keys() - kept:
            group[name].add_marker("by_hand")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """A module's own random tensors are the same whatever was imported before it."""
    torch.manual_seed(zlib.crc32(collector.nodeid.encode()))
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test's random tensors follow its name, not the tests that its process ran before."""
    torch.manual_seed(zlib.crc32(item.nodeid.encode()))


def pytest_make_parametrize_id(val: object) -> str | None:
    return thinning.case_name(val)


def name_without(backends: list[str], item: pytest.Function) -> str:
    """The test's own name with that of the case, in which the backends are left out."""
    case = item.callspec.id if hasattr(item, "callspec") else ""
    words = [word for word in case.split("-") if word not in backends]
    return "-".join([item.originalname, *words])


def backends_of(item: pytest.Function) -> list[str]:
    """The backends among its parameters."""
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    names = [v.name if isinstance(v, Engine) else v for v in values]
    return [n for n in names if isinstance(n, str) and n in engines.BACKENDS]


def runs_on_gpu(item: pytest.Function) -> bool:
    """By the backend in its parameters, where it has one; else by the device of its module."""
    backends = backends_of(item)
    if backends:
        return not GPU_BACKENDS.isdisjoint(backends)
    return "cuda" in (getattr(item.module, "GPU", None), getattr(item.module, "DEVICE", None))


GPU_BACKENDS = frozenset(engines.GPU_ENGINES)
RELEASED_OF = 4  # one in so many of the exhaustive cases compiles C++ with the flags of users


def is_left_out(item: pytest.Function) -> bool:
    """Interpreted multi-pass scans run triton's kernels once more; test_triton.py has their own."""
    own = item.module.__name__.endswith("test_triton")
    return "multipass" in backends_of(item) and not own and not torch.cuda.is_available()


@pytest.fixture(scope="session", params=ENGINES, ids=lambda engine: engine.name)
def engine(request: pytest.FixtureRequest) -> Engine:
    chosen: Engine = request.param
    reason = availability()[chosen.name]
    if reason is not None:
        pytest.skip(reason)
    return chosen


@pytest.fixture(autouse=True)
def light_optimisation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """C++ kernels are compiled with -O0, in 0.20 seconds in place of 1.15: tests compile thousands.
    With the flags of users run those marked `release_flags`, and about one in four of those marked
    `exhaustive`, by a hash of the name: parts of every table, but none of slow tests and filters.
    """
    node = request.node
    released = node.get_closest_marker("release_flags") is not None
    # Of many kernels, or of filters of high order: minutes with these flags.
    is_long = node.get_closest_marker("slow") is not None or "filt" in node.path.name
    if node.get_closest_marker("exhaustive") is not None and not is_long:
        released |= thinning.place(node.nodeid) < 1 / RELEASED_OF
    if not released:
        for level in ("SHORT", "LONG", "LONG_FOR_FEW"):
            monkeypatch.setattr(compiler, level, ("-O0",))


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` runs eagerly, for examples of which only the words and the numbers matter."""
    monkeypatch.setattr(engines, "why_not", lambda call, backend: "a test does without")
    monkeypatch.setattr(api, "warn_once", lambda operator, why: None)
