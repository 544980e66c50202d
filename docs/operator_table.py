"""The table of `operators.md`: python docs/operator_table.py [device]

For each operator what a scan along axis 1 of [4, 8192, N] must move per element (each input read
once, each output written once), the time per element, and the fraction of copy: the time of
`y.copy_(x)` into a fresh tensor, moving as many bytes, divided by the scan's. float32; N is such
that some 60 MB move.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from assocscan import associative_scan, explain, ops, product, segmented

BATCH, LENGTH, BYTES, RUNS = 4, 8192, 60 << 20, 11
Draw = Callable[[tuple[int, ...]], Tensor]


def number(batch: tuple[int, ...], *element: int) -> Tensor:
    return torch.randn(*batch, *element)


def gate(batch: tuple[int, ...]) -> Tensor:
    return 0.9 + 0.1 * torch.rand(batch)


def integer(batch: tuple[int, ...]) -> Tensor:
    return torch.randint(1, 100, batch)


def flag(batch: tuple[int, ...]) -> Tensor:
    return torch.rand(batch) > 0.5


def sign(batch: tuple[int, ...]) -> Tensor:
    return torch.randint(0, 2, batch, dtype=torch.int8) * 2 - 1


def bracket(batch: tuple[int, ...]) -> Tensor:
    return torch.randint(-1, 2, batch, dtype=torch.int32)


def vector(d: int) -> Draw:
    return lambda batch: torch.nn.functional.normalize(number(batch, d), dim=-1)


def matrix(d: int) -> Draw:
    return lambda batch: number(batch, d, d) / (2 * d)


def covariance(d: int) -> Draw:
    return lambda batch: torch.eye(d).expand(*batch, d, d).contiguous()


def states(s: int) -> Draw:
    return lambda batch: torch.randint(0, s, (*batch, s), dtype=torch.int32)


def constant(draw: Draw) -> Draw:
    """One element for all."""
    return lambda batch: (lambda x: x.expand(*batch, *x.shape))(draw(())) if batch else draw(())


NUMBERS = [
    ops.sum, ops.compensated_sum, ops.max, ops.min, ops.minmax, ops.any, ops.all, ops.count,
    ops.logaddexp, ops.rotation2d, ops.mean, ops.welford, ops.online_softmax, ops.max_subarray,
    product(ops.min, ops.max, ops.mean),
]  # fmt: skip
OPERATORS = {
    **dict.fromkeys(NUMBERS, (number,)),
    ops.prod: (gate,),
    ops.argmax: (number, integer),
    ops.argmin: (number, integer),
    ops.xor: (integer,),
    ops.gcd: (integer,),
    ops.signed_log_prod: (number, sign),
    ops.signed_log_sum: (number, sign),
    ops.affine: (gate, number),
    segmented(ops.affine): ((gate, number), flag),
    ops.log_affine: (number, number),
    ops.max_affine: (number, number),
    ops.covariance: (number, number),
    ops.ema: (number, constant(gate)),
    ops.ema_variance: (number, constant(gate)),
    ops.last_valid: (number, flag),
    ops.brackets: (bracket,),
    ops.quaternion: (vector(4),),
    ops.se3: (vector(4), vector(3)),
    ops.autoregression: (constant(lambda batch: torch.tensor([0.5, 0.2])), number),
    ops.matmul: (matrix(4),),
    ops.matrix_affine: (matrix(4), vector(4)),
    ops.log_matmul: (matrix(4),),
    ops.max_matmul: (matrix(4),),
    ops.online_attention: (number, vector(16)),
    ops.scalar_kalman: (gate, number, gate, number, gate),
    ops.kalman: (matrix(2), vector(2), covariance(2), vector(2), covariance(2)),
    ops.rts: (matrix(2), vector(2), covariance(2)),
    ops.finite_state: (states(4),),
}  # fmt: skip
SIZES = {ops.matmul: "4×4", ops.matrix_affine: "4×4", ops.log_matmul: "K = 4", ops.kalman: "n = 2",
         ops.max_matmul: "K = 4", ops.autoregression: "k = 2, constant", ops.rts: "n = 2",
         ops.online_attention: "d = 16", ops.finite_state: "S = 4"}  # fmt: skip


def inputs(draws: tuple, batch: tuple[int, ...], device: str) -> object:
    xs = tuple(
        inputs(d, batch, device) if isinstance(d, tuple) else d(batch).to(device) for d in draws
    )
    return xs if len(xs) > 1 else xs[0]


def median(run: Callable[[], object], device: str) -> float:
    """Seconds."""
    if device != "cpu":
        from triton.testing import do_bench

        return float(do_bench(run, return_mode="median")) / 1e3
    run()
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def rows(device: str) -> Iterator[tuple[str, float, float, float]]:
    for op, draws in OPERATORS.items():
        small = explain(op, inputs(draws, (1, 512, 16), device), 1).bytes_moved / (512 * 16)
        lanes = max(16, int(BYTES / small / (BATCH * LENGTH)) // 16 * 16)
        xs = inputs(draws, (BATCH, LENGTH, lanes), device)
        moved = explain(op, xs, 1).bytes_moved
        elements = BATCH * LENGTH * lanes
        scan = median(lambda op=op, xs=xs: associative_scan(op, xs, 1), device)
        source = torch.ones(moved // 8, device=device)
        copy = median(lambda x=source: torch.empty_like(x).copy_(x), device)
        name = f"`{op.name}`" + (f" ({SIZES[op]})" if op in SIZES else "")
        yield name, moved / elements, scan / elements * 1e9, copy / scan


def main() -> None:
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    torch.manual_seed(0)
    print("| operator | bytes | ns | of copy |\n|---|---|---|---|")
    for name, size, nanoseconds, fraction in rows(device):
        print(f"| {name} | {size:.0f} | {nanoseconds:.3g} | {fraction:.2f} |", flush=True)


if __name__ == "__main__":
    main()
