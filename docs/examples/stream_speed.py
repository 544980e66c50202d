"""`assocscan.stream` against the speed of the link between host and GPU, both directions at once.

    python docs/examples/stream_speed.py --gib 64 --mib 256

One buffer of pinned memory is scanned again and again, as chunks of `--mib`, until `--gib` have
passed; the results go to two other ones. The link alone copies as much both ways at the same time.
Without a GPU there is no link: it prints the time of the scans.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator, Sequence

import torch

import assocscan

MIB = 1 << 20


def streamed(chunk: torch.Tensor, count: int, device: str) -> tuple[float, torch.Tensor]:
    """Seconds for `count` times this chunk, and the carry that leaves the last one."""
    buffers = [torch.empty_like(chunk, pin_memory=chunk.is_pinned()) for _ in range(2)]
    where = device if device == "cuda" else None
    scans = assocscan.stream(
        "sum", itertools.repeat(chunk, count), device=where, out=itertools.cycle(buffers)
    )
    last = chunk
    start = time.perf_counter()
    for y in scans:
        last = y
    seconds = time.perf_counter() - start
    return seconds, last[-1].clone()


def link(chunk: torch.Tensor, count: int) -> float:
    """Seconds for `count` copies of the chunk in each direction, both at once."""
    back = torch.empty_like(chunk, pin_memory=True)
    inward, outward = (torch.empty_like(chunk, device="cuda") for _ in range(2))
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        with torch.cuda.stream(streams[0]):
            inward.copy_(chunk, non_blocking=True)
        with torch.cuda.stream(streams[1]):
            back.copy_(outward, non_blocking=True)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def rounds(gib: float, mib: float) -> Iterator[int]:
    """A few chunks to prepare the scan, then all."""
    yield 3
    yield max(1, round(gib * 1024 / mib))


def main(arguments: Sequence[str] | None = None) -> float:
    """The fraction of the link's speed; without a GPU, the bytes per second of the scans."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=64.0)
    parser.add_argument("--mib", type=float, default=256.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args(arguments)
    on_gpu = given.device == "cuda"
    size = round(given.mib * MIB / 4 / 256)
    chunk = torch.ones(size, 256)
    chunk = chunk.pin_memory() if on_gpu else chunk
    for count in rounds(given.gib, given.mib):
        seconds, total = streamed(chunk, count, given.device)
        if count * size < 1 << 24:  # beyond it float32 does not count ones
            assert total.unique().tolist() == [count * size]
    moved = count * chunk.nbytes
    print(
        f"stream: {moved / 2**30:.1f} GiB in {seconds:.2f} s, {2 * moved / seconds / 1e9:.1f} GB/s"
    )
    if not on_gpu:
        return moved / seconds
    alone = link(chunk, count)
    print(f"link:   {2 * moved / alone / 1e9:.1f} GB/s; stream reaches {alone / seconds:.2f} of it")
    return alone / seconds


if __name__ == "__main__":
    main()
