"""LayerNorm → Linear → GELU as one matrix product, in Triton.

    y = GELU(x̂ Wᵀ + b),   x̂ = (x − mean) · rstd · γ + β,   mean and rstd of each row of x

A program owns a block of rows and walks tiles of columns. Where it normalises itself (NORMALIZE),
it first reads its rows once for their statistics and then normalises each tile of x on its way to
the product, in registers: x̂ never touches memory. Otherwise x̂ was written by `normalize_kernel`,
and the product takes both operands from shared memory, as fast as a matrix product can. Which form
is faster depends on shape and dtype: see `tiles`.

Folding the normalisation through the product instead, y = rstd (x (γW)ᵀ − mean Σγ W) + …, would
keep x raw without any pass over it, but rounds γW, needs a pass over W at every change of it, and
cancels where the mean exceeds the deviation: not done.

Statistics are merged tile by tile as in T. F. Chan, G. H. Golub, R. J. LeVeque, "Updating formulae
and a pairwise algorithm for computing sample variances", COMPSTAT 1982: no difference of large
numbers is ever formed. Sums are float32 whatever the dtype.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Triton's key of a kernel that it keeps has the line where the function begins. This comment moved
# the lines when kernels came to be compiled without promises about lanes (`lane_promises`).


@triton.jit
def row_statistics(x, rows, K, stride, eps, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr):
    """mean and 1 / √(variance + eps) of each row, [BLOCK_M] float32."""
    mean = tl.zeros([BLOCK_M], tl.float32)
    squares = tl.zeros([BLOCK_M], tl.float32)
    pointers = x + rows.to(tl.int64)[:, None] * stride
    for start in range(0, K, BLOCK_S):
        columns = start + tl.arange(0, BLOCK_S)
        inside = (columns < K)[None, :]
        tile = tl.load(pointers + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        before = start * 1.0
        count = tl.minimum(K - start, BLOCK_S) * 1.0
        tile_mean = tl.sum(tile, 1) / count
        deviation = tl.where(inside, tile - tile_mean[:, None], 0.0)
        delta = tile_mean - mean
        mean += delta * (count / (before + count))
        squares += tl.sum(deviation * deviation, 1) + delta * delta * (
            before * count / (before + count)
        )
    variance = squares / K
    return mean, 1.0 / tl.sqrt_rn(variance + eps)


@triton.jit
def normalized(tile, mean, rstd, gamma, beta, columns, K, AFFINE: tl.constexpr):
    """x̂ in float32; 0 beyond column K."""
    inside = columns < K
    tile = (tile.to(tl.float32) - mean[:, None]) * rstd[:, None]
    if AFFINE:
        scale = tl.load(gamma + columns, mask=inside, other=0.0).to(tl.float32)
        shift = tl.load(beta + columns, mask=inside, other=0.0).to(tl.float32)
        tile = tile * scale[None, :] + shift[None, :]
    return tl.where(inside[None, :], tile, 0.0)


@triton.jit
def phi_below(size):
    """Φ(−size) for size ≥ 0, to 5e-5 of itself: far below the rounding to 16 bits.

    Two to the power of a polynomial, the minimax fit of log2 Φ(−size) on [0, 6], which goes on to
    fall beyond it, to −127 at 14. A third of the instructions of erf.
    """
    q = 2.29900634e-05 * size - 0.000611100055
    q = q * size + 0.00719556585
    q = q * size - 0.0511853397
    q = q * size - 0.461271912
    q = q * size - 1.15017426
    q = q * size - 1.00006473
    return tl.exp2(q)


@triton.jit
def gelu(z, TANH: tl.constexpr, NARROW: tl.constexpr):
    """z Φ(z), exact or by the tanh formula. NARROW: for results of 16 bits."""
    if TANH:
        u = 1.5957691216057308 * (z + 0.044715 * z * z * z)  # 2 √(2/π) (z + …)
        return z / (1.0 + tl.exp(-u))
    elif NARROW:
        # max(z, 0) − |z| Φ(−|z|); the second is 0 from 14 on, infinity included.
        size = tl.minimum(tl.abs(z), 14.0, propagate_nan=tl.PropagateNan.ALL)
        return tl.maximum(z, 0.0) - size * phi_below(size)
    else:
        return 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))


@triton.jit
def write_tile(
    out, tile, top, left, M, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """A tile of an [M, N] tensor, by its descriptor or its pointer."""
    if DESCRIPTORS:
        out.store([top, left], tile)
    else:
        rows, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
        corner = out + top.to(tl.int64) * N + left
        inside = (top + rows < M)[:, None] & (left + columns < N)[None, :]
        tl.store(corner + rows[:, None] * N + columns[None, :], tile, mask=inside)


@triton.jit
def norm_linear_gelu_kernel(
    x, gamma, beta, weight, bias, y, z, M, N, K, x_stride, w_stride, splits, eps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_S: tl.constexpr,
    NORMALIZE: tl.constexpr, DESCRIPTORS: tl.constexpr, AFFINE: tl.constexpr, BIAS: tl.constexpr,
    SAVE: tl.constexpr, TANH: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
    FLATTEN: tl.constexpr, STORES: tl.constexpr,
):  # fmt: skip
    """Tiles of y, and of z where SAVE.

    NORMALIZE: the program has block of rows pid / splits, and every splits-th tile of it. Else it
    has every programs-th tile of all, those of a block of rows side by side. x and weight are
    tensor descriptors where DESCRIPTORS, else pointers to rows of K numbers.
    """
    pid = tl.program_id(0)
    across = tl.cdiv(N, BLOCK_N)
    dtype = y.dtype if STORES else y.dtype.element_ty
    NARROW: tl.constexpr = dtype.primitive_bitwidth == 16
    if NORMALIZE:
        step = splits
        first = pid // splits * across + pid % splits
        last = pid // splits * across + across
        rows = pid // splits * BLOCK_M + tl.arange(0, BLOCK_M)
        mean, rstd = row_statistics(x, tl.minimum(rows, M - 1), K, x_stride, eps, BLOCK_M, BLOCK_S)
    else:
        step = tl.num_programs(0)
        first = pid
        last = tl.cdiv(M, BLOCK_M) * across
    for tile in tl.range(first, last, step, flatten=FLATTEN):
        top, left = tile // across * BLOCK_M, tile % across * BLOCK_N
        # Places inside a tile fit 32 bits; 64-bit ones would take twice the registers.
        rows, outputs = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if not DESCRIPTORS:  # what lies outside reads the last row
            x_rows = x + top.to(tl.int64) * x_stride
            x_rows += tl.minimum(rows, M - 1 - top)[:, None] * x_stride
            w_rows = weight + left.to(tl.int64) * w_stride
            w_rows += tl.minimum(outputs, N - 1 - left)[None, :] * w_stride
        for start in range(0, K, BLOCK_K):
            columns = start + tl.arange(0, BLOCK_K)
            if DESCRIPTORS:
                a = x.load([top, start])
                b = weight.load([left, start]).T
            elif EVEN_K:
                a = tl.load(x_rows + columns[None, :])
                b = tl.load(w_rows + columns[:, None])
            else:
                a = tl.load(x_rows + columns[None, :], mask=(columns < K)[None, :], other=0.0)
                b = tl.load(w_rows + columns[:, None], mask=(columns < K)[:, None], other=0.0)
            if NORMALIZE:
                a = normalized(a, mean, rstd, gamma, beta, columns, K, AFFINE).to(dtype)
            # For tf32x3, Triton adds each block of three products in float32: tensor cores truncate
            # what they accumulate, which over all of K would cost four bits.
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
        if BIAS:
            terms = tl.load(bias + left + outputs, mask=left + outputs < N, other=0.0)
            acc += terms.to(tl.float32)[None, :]
        if SAVE:
            rounded = acc.to(dtype)
            write_tile(z, rounded, top, left, M, N, BLOCK_M, BLOCK_N, STORES)
            acc = rounded.to(tl.float32)  # what backward will see
        result = gelu(acc, TANH, NARROW).to(dtype)
        write_tile(y, result, top, left, M, N, BLOCK_M, BLOCK_N, STORES)


@triton.jit
def normalize_kernel(
    x, gamma, beta, out, mean_out, rstd_out, M, K, x_stride, eps,
    BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, AFFINE: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """x̂ [M, K] in the dtype of `out`, and the statistics of each row where SAVE."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    in_rows = rows < M
    sources = tl.minimum(rows, M - 1)
    mean, rstd = row_statistics(x, sources, K, x_stride, eps, BLOCK_M, BLOCK_S)
    if SAVE:
        tl.store(mean_out + rows, mean, mask=in_rows)
        tl.store(rstd_out + rows, rstd, mask=in_rows)
    pointers = x + sources.to(tl.int64)[:, None] * x_stride
    for start in range(0, K, BLOCK_S):
        columns = start + tl.arange(0, BLOCK_S)
        inside = (columns < K)[None, :]
        tile = tl.load(pointers + columns[None, :], mask=inside, other=0.0)
        tile = normalized(tile, mean, rstd, gamma, beta, columns, K, AFFINE)
        places = out + rows.to(tl.int64)[:, None] * K + columns[None, :]
        tl.store(places, tile.to(out.dtype.element_ty), mask=in_rows[:, None] & inside)
