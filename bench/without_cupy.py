"""What a GPU without CuPy does: python bench/without_cupy.py [--case TEXT] [--compile K/N]

The scans of docs/performance/triton.md with CuPy hidden from the import system, so that `auto`
takes Triton and the multi-pass engine: every result beside float64 and bitwise beside a second
call, then the time of a copy of the same bytes over the time of the scan, and the limit to reach.
`--compile K/N` runs each N-th case once: in several processes, it fills Triton's cache of kernels.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass

sys.modules["cupy"] = None  # type: ignore[assignment]  # find_spec("cupy") is None

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import assocscan  # noqa: E402
from assocscan.engines.triton import tiles  # noqa: E402

RUNS, FLUSHED, SLEEP = 11, 256 << 20, 8_000_000  # SLEEP: clocks that hide the host's time
FEW = 6  # chains of a dimension that are compared


@dataclass(frozen=True)
class Case:
    """kind: recurrence, cumsum or backward (of the recurrence). limits: float32 and bfloat16."""

    kind: str
    shape: tuple[int, ...]
    axis: int
    limits: tuple[float, ...]
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)

    @property
    def arrays(self) -> int:
        return {"recurrence": 3, "cumsum": 2, "backward": 5}[self.kind]


CASES = [
    Case("recurrence", (8, 8192, 1536), 1, (0.95, 0.88)),
    Case("recurrence", (8, 1024, 1536), 1, (0.90, 0.80)),
    Case("recurrence", (4, 2048, 512), 1, (0.80, 0.65)),
    Case("recurrence", (4, 131072, 512), 1, (0.90, 0.60)),
    Case("recurrence", (1, 65536, 1024), 1, (0.75, 0.55)),
    Case("recurrence", (1, 1 << 20, 64), 1, (0.57, 0.52)),
    Case("cumsum", (4, 8192, 512), 1, (0.90, 0.80)),
    Case("cumsum", (8, 8192, 1536), 1, (0.90, 0.80)),
    Case("backward", (12288, 8192), 1, (0.92, 0.85)),
    Case("backward", (12288, 1024), 1, (0.85, 0.75)),
    Case("backward", (8, 8192, 1536), 1, (0.92, 0.88)),
    Case("backward", (8, 1024, 1536), 1, (0.85, 0.75)),
    Case("backward", (1, 65536, 1024), 1, (0.58, 0.55)),
    Case("recurrence", (64, 1 << 20), 1, (0.65, 0.58)),
    Case("recurrence", (8, 8192, 768), 1, (0.80,), (torch.complex64,)),
]


def inputs(case: Case, dtype: torch.dtype) -> list[Tensor]:
    """a, b and the cotangent; for cumsum one input. Decays lie in (−1, 1), negative ones too."""
    generator = torch.Generator("cuda").manual_seed(3407)

    def drawn() -> Tensor:
        parts = 2 if dtype.is_complex else 1
        found = torch.rand((*case.shape, parts), generator=generator, device="cuda")
        found = found.mul_(1.9).sub_(0.9)
        return torch.view_as_complex(found) / 2 if dtype.is_complex else found[..., 0].to(dtype)

    return [drawn() for _ in range(case.arrays - 1 if case.kind != "backward" else 3)]


def call_of(case: Case, xs: list[Tensor], backend: str) -> Callable[[], tuple[Tensor, ...]]:
    if case.kind == "cumsum":
        return lambda: (assocscan.cumsum(xs[0], axis=case.axis, backend=backend),)
    if case.kind == "recurrence":
        a, b = xs
        return lambda: (assocscan.linear_recurrence(a, b, axis=case.axis, backend=backend),)
    a, b = (x.detach().requires_grad_() for x in xs[:2])
    h = assocscan.linear_recurrence(a, b, axis=case.axis, backend=backend)
    return lambda: torch.autograd.grad(h, (a, b), xs[2], retain_graph=True)


def few(case: Case, x: Tensor) -> Tensor:
    """Some chains of it, [steps, chains], in float64."""
    x = x.movedim(case.axis, 0)
    for d in range(1, x.dim()):
        if x.shape[d] > FEW:
            at = torch.linspace(0, x.shape[d] - 1, FEW, device=x.device).round().long()
            x = x.index_select(d, at)
    wide = torch.complex128 if x.is_complex() else torch.float64
    return x.reshape(x.shape[0], -1).to(wide)


def recurrence(a: Tensor, b: Tensor) -> Tensor:
    """By doubling, in float64."""
    a, b, step = a.clone(), b.clone(), 1
    while step < len(b):
        b[step:] = b[step:] + a[step:] * b[:-step]
        a[step:] = a[step:] * a[:-step]
        step *= 2
    return b


def expected(case: Case, xs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    picked = [few(case, x) for x in xs]
    if case.kind == "cumsum":
        return [picked[0].cumsum(0)]
    a, b = picked[:2]
    h = recurrence(a, b)
    if case.kind == "recurrence":
        return [h]
    later = torch.cat([a[1:], torch.zeros_like(a[:1])])
    db = recurrence(later.flip(0), picked[2].flip(0)).flip(0)
    # The backward pass reads h as it was stored.
    before = torch.cat([torch.zeros_like(h[:1]), h[:-1].to(dtype).to(h.dtype)])
    return [db * before, db]


def error(case: Case, found: tuple[Tensor, ...], wanted: list[Tensor]) -> float:
    return max(
        float((few(case, f) - w).abs().max() / w.abs().max())
        for f, w in zip(found, wanted, strict=True)
    )


def times(calls: list[Callable[[], object]], runs: int = RUNS) -> list[float]:
    """Medians in microseconds, the calls by turns; the host and the L2 cache are hidden."""
    flush = torch.empty(FLUSHED, dtype=torch.uint8, device="cuda")
    found: list[list[float]] = [[] for _ in calls]
    for _ in range(runs):
        for k, call in enumerate(calls):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            torch.cuda._sleep(SLEEP)
            begin.record()
            kept = call()
            end.record()
            torch.cuda.synchronize()
            del kept
            found[k].append(begin.elapsed_time(end) * 1e3)
    return [statistics.median(each) for each in found]


def copy_of(count: int) -> Callable[[], object]:
    """A copy that moves `count` bytes, read and written."""
    source = torch.ones(count // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


class Kernels:
    """The tiles that are chosen while it lasts."""

    def __enter__(self) -> list[str]:
        self.choose, found = tiles.choose, []
        from assocscan.engines.triton import prepare

        def choose(op, shape, interpreted):  # type: ignore[no-untyped-def]
            t = self.choose(op, shape, interpreted)
            ahead = "p" if t.prefetch else f"s{t.stages}" if t.stages else ""
            found.append(f"{t.chains}x{t.segments}x{t.items}w{t.warps}{ahead}")
            return t

        prepare.choose, self.prepare = choose, prepare
        return found

    def __exit__(self, *error: object) -> None:
        self.prepare.choose = self.choose


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", default="")
    parser.add_argument("--compile", default="", metavar="K/N")
    parser.add_argument("--backend", default="auto")
    given = parser.parse_args()
    chosen = [(c, d, n) for c in CASES for d, n in zip(c.dtypes, c.limits, strict=True)]
    chosen = [each for each in chosen if given.case in f"{each[0].kind} {each[0].shape} {each[1]}"]
    if given.compile:
        k, n = map(int, given.compile.split("/"))
        for case, dtype, _ in chosen[k::n]:
            call_of(case, inputs(case, dtype), given.backend)()
        return 0
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    failed = 0
    for case, dtype, limit in chosen:
        xs = inputs(case, dtype)
        with Kernels() as kernels:
            call = call_of(case, xs, given.backend)
            found = call()
        wrong = error(case, found, expected(case, xs, dtype))
        again = all(map(torch.equal, found, call()))
        most = {torch.bfloat16: 2e-2}.get(dtype, 2e-5)
        del found
        count = case.arrays * xs[0].nbytes
        copy, scan = times([copy_of(count), call])
        verdict = "OK" if copy / scan >= limit else "below"
        if not wrong <= most or not again:
            verdict = "WRONG" if again else "NOT REPRODUCIBLE"
        failed += verdict != "OK"
        name = f"{case.kind} {case.shape} {str(dtype).removeprefix('torch.')}"
        print(f"{name:42} {scan:8.1f} us  {copy / scan:5.3f} of copy, limit {limit:.2f} {verdict:6}"
              f" error {wrong:.1e}  {' '.join(dict.fromkeys(kernels))}", flush=True)  # fmt: skip
        del xs, call
        torch.cuda.empty_cache()
    print(f"{failed} of {len(chosen)} below their limit")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
