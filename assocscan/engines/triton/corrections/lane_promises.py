"""Mends what Triton before 3.8 compiles of vectors of integers.

LLVM joins integer instructions into one on `<2 x i32>`, and a lane of it that nobody reads may hold
anything. `shl nuw nsw <2 x i32> %thread, <i32 31, i32 2>` breaks in its first lane the promise not
to overflow (`nuw`), which is allowed where only the second is read. Triton 3.6 keeps both lanes in
a register of 64 bits. Relying on the promise, it does not cut off the first one's overflow, which
falls into the second: an address, in the gradient of a selective scan of four states, whose threads
then read one another's inputs. Without the promises the same text gives right code.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Iterator
from typing import Any

# An instruction on integer vectors, up to its promises.
PROMISES = re.compile(
    r"^(\s*%\S+ = (?:add|sub|mul|shl|lshr|ashr|udiv|sdiv|or|trunc|zext|uitofp) )"
    r"(?:(?:nuw|nsw|exact|disjoint|nneg) )+(?=<)",
    re.MULTILINE,
)
FIRST_RIGHT = (3, 8)  # the first version of Triton whose code is right
# `active`: whether this thread compiles one of this package's kernels.
_THREAD = threading.local()


def without_promises(llvm: str) -> str:
    """LLVM's text of a kernel, in which no instruction on integer vectors promises anything."""
    return PROMISES.sub(r"\1", llvm)


@functools.cache
def is_needed() -> bool:
    """Whether the Triton that is installed compiles such vectors wrongly."""
    import triton

    version = tuple(int(n) for n in re.findall(r"\d+", triton.__version__)[:2])
    return version < FIRST_RIGHT and hasattr(triton.knobs.runtime, "add_stages_inspection_hook")


@contextlib.contextmanager
def mended() -> Iterator[None]:
    """What this thread compiles in here has no promises."""
    if not is_needed():
        yield
        return
    _install()
    before, _THREAD.active = getattr(_THREAD, "active", False), True
    try:
        yield
    finally:
        _THREAD.active = before


def _install() -> None:
    """Triton asks `hook` for the stages of each compilation, which may be anybody's: it changes
    only those inside `mended`, and asks the hook that was there before."""
    from triton import knobs

    earlier = knobs.runtime.add_stages_inspection_hook
    if getattr(earlier, "mends_lanes", False):
        return

    def hook(*arguments: Any) -> Any:
        known = earlier(*arguments) if earlier is not None else ("", "")
        if arguments and getattr(_THREAD, "active", False):
            stages = arguments[1]
            if "ptx" in stages:
                made = stages["llir"]
                stages["llir"] = lambda *given: without_promises(made(*given))
        return known

    hook.mends_lanes = True  # type: ignore[attr-defined]
    knobs.runtime.add_stages_inspection_hook = hook
