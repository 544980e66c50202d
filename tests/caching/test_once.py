"""`Once`: one thread makes a value, others with another key do not wait, failures are repeated."""

import os
import threading
from typing import Any

import pytest
from processes import needs_fork

from assocscan import BackendError
from assocscan.caching import load_once as once
from assocscan.caching.load_once import Once


def test_threads_with_the_same_key_wait_for_one_another() -> None:
    made: list[str] = []
    loads: Once[str, str] = Once({})
    begun, go = threading.Event(), threading.Event()

    def slow() -> str:
        begun.set()
        go.wait(20)
        made.append("slow")
        return "slow value"

    results: list[str] = []
    threads = [
        threading.Thread(target=lambda: results.append(loads.get("slow", slow))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    begun.wait(20)
    assert loads.get("other", lambda: "other value") == "other value"
    assert results == [] and made == []
    go.set()
    for thread in threads:
        thread.join()
    assert results == ["slow value"] * 4 and made == ["slow"]


def test_failures_are_repeated_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """After 30, 60, 120, … seconds, and never for more than a tenth of the time."""
    clock = [0.0]
    monkeypatch.setattr(once.time, "monotonic", lambda: clock[0])
    attempts: list[float] = []
    loads: Once[str, str] = Once({})

    def fail() -> str:
        attempts.append(clock[0])
        clock[0] += seconds
        raise BackendError(f"the disk is full at {attempts[-1]}")

    def ask() -> str:
        with pytest.raises(BackendError) as error:
            loads.get("key", fail)
        return str(error.value)

    seconds = 1.0
    while clock[0] < 300:
        assert ask() == f"the disk is full at {attempts[-1]}"
        clock[0] += 1
    assert attempts == [0.0, 31.0, 92.0, 213.0]
    seconds = 100.0
    clock[0] = 1000.0
    ask()
    clock[0] += 999
    ask()
    assert len(attempts) == 5
    clock[0] += 2
    assert loads.get("key", lambda: "mended") == "mended"
    assert loads.failed == {}


def test_an_interrupt_is_no_failure() -> None:
    loads: Once[str, str] = Once({})

    def interrupted() -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loads.get("key", interrupted)
    assert loads.get("key", lambda: "value") == "value"


@needs_fork
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_child_does_not_wait_for_its_parents_threads() -> None:
    loads: Once[str, Any] = Once({"known": "value"})
    begun, go = threading.Event(), threading.Event()

    def slow() -> str:
        begun.set()
        go.wait(20)
        return "of the parent"

    thread = threading.Thread(target=lambda: loads.get("key", slow))
    thread.start()
    begun.wait(20)
    child = os.fork()
    if child == 0:
        found = [loads.get("key", lambda: "of the child"), loads.get("known", lambda: "")]
        os._exit(0 if found == ["of the child", "value"] else 1)
    status = os.waitpid(child, 0)[1]
    go.set()
    thread.join()
    assert status == 0
    assert loads.get("key", slow) == "of the parent"
