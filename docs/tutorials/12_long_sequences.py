"""
Long sequences: chunks and streams
==================================

A sequence may be too long for the memory. Or it has no end: it comes from a sensor, or from a user
who is typing. Or several machines hold a part of it each.

In all three cases the sequence comes in chunks, and the answer should be the same as in one piece.
A scan makes that easy: everything a chunk has to tell the next one is a single element.
"""

import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch

from assocscan import associative_scan, linear_recurrence, monoid, ops, product, reduce
from assocscan.cli.data import sunspots

# %%
# The carry
# ---------
#
# ``return_final=True`` also returns the element of all that was read. ``init`` starts with it.

years, spots = sunspots()
running = product(ops.welford, ops.max)

first, carry = associative_scan(running, spots[:1000], return_final=True)
second, carry = associative_scan(running, spots[1000:], init=carry, return_final=True)

(mean, variance), high = associative_scan(running, spots)
(mean2, variance2), high2 = second
assert torch.allclose(mean2, mean[1000:]) and torch.equal(high2, high[1000:])
assert torch.allclose(variance2, variance[1000:])

# %%
# The carry is small: count, mean and squared distances, and the maximum. It can be saved, sent, or
# kept for tomorrow.

print(carry)

# %%
# A file larger than the memory
# -----------------------------
#
# Here are ten million steps of a random walk, in a file. (Imagine a hundred times as many.) They
# are mapped, not read, and only one chunk is in memory at a time.


@monoid(
    identity=(-torch.inf, torch.inf, 0.0),
    lift=lambda x: (x, x, torch.zeros_like(x)),
    lower=lambda state: state[2],
)
def largest_fall(left, right):
    high1, low1, fall1 = left
    high2, low2, fall2 = right
    fall = torch.maximum(torch.maximum(fall1, fall2), high1 - low2)
    return torch.maximum(high1, high2), torch.minimum(low1, low2), fall


def chunks(path, size):
    numbers = np.memmap(path, dtype=np.float32, mode="r")
    for start in range(0, len(numbers), size):
        yield torch.from_numpy(np.array(numbers[start : start + size]))


generator = np.random.default_rng(0)
walk = np.cumsum(generator.standard_normal(10_000_000), dtype=np.float64).astype(np.float32)

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "walk.bin"
    walk.tofile(path)
    carry, falls = None, []
    for chunk in chunks(path, 1_000_000):
        fall, carry = associative_scan(largest_fall, chunk, init=carry, return_final=True)
        falls.append(fall[-1])

print([round(float(fall)) for fall in falls])
wanted = float((np.maximum.accumulate(walk) - walk).max())
assert float(falls[-1]) == wanted

# %%
# Only the last entry of each chunk was needed here. Then ``reduce`` does the same, and writes
# nothing else.

whole = torch.from_numpy(walk)
assert float(reduce(largest_fall, whole)) == wanted

# %%
# All chunks at once
# ------------------
#
# A stream goes from chunk to chunk. If all chunks are there, on four machines, say, nobody should
# wait. Three rounds do it:
#
# 1. Each machine joins its own chunk to one element.
# 2. These four elements are scanned: what came *before* each chunk?
# 3. Each machine scans its chunk, and starts with that.

x = whole[:10_000].diff(prepend=torch.zeros(1)).view(4, 2500)
totals = reduce(ops.sum, x, axis=1)
before = associative_scan(ops.sum, totals, inclusive=False)
alone = associative_scan(ops.sum, x, axis=1)
together = associative_scan(ops.sum, x, axis=1, init=before)
assert torch.allclose(together.flatten(), x.flatten().cumsum(0), atol=1e-2)

figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), sharey=True, layout="constrained")
for k in range(4):
    place = torch.arange(2500) + 2500 * k
    left.plot(place, alone[k], color=f"C{k}", linewidth=0.8)
    left.plot(place[-1], totals[k], "o", color=f"C{k}")
    right.plot(place, together[k], color=f"C{k}", linewidth=0.8)
    right.plot(place[0], before[k], "s", color=f"C{k}")
left.set(title="round 1: each alone", xlabel="step", xlim=(0, 10_100))
right.set(title="rounds 2 and 3: from what came before", xlabel="step", xlim=(-100, 10_100))
for axes in (left, right):
    axes.title.set_fontsize(9)
    axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %%
# This is also what happens inside: threads, blocks of a GPU and machines all work in this way. You
# need it only where the chunks are on different machines.
#
# Gradients across chunks
# -----------------------
#
# The carry is differentiable. Two chunks with a carry have the same gradients as the whole.

torch.manual_seed(0)
a = (0.9 + 0.1 * torch.rand(1, 400, 3, dtype=torch.float64)).requires_grad_()
b = torch.randn(1, 400, 3, dtype=torch.float64, requires_grad=True)
weights = torch.randn(1, 400, 3, dtype=torch.float64)


def gradients(size, cut):
    carry, loss = None, 0.0
    for s in range(0, 400, size):
        part = slice(s, s + size)
        h, carry = linear_recurrence(a[:, part], b[:, part], init=carry, return_final=True)
        loss = loss + (weights[:, part] * h).sum()
        if cut:
            carry = carry.detach()
    return torch.autograd.grad(loss, b)[0]


exact = gradients(400, cut=False)
assert torch.allclose(gradients(50, cut=False), exact)

# %%
# But then all chunks stay in memory until the backward pass. Those who train on endless streams cut
# the gradient at each chunk: ``carry.detach()``. The outputs are still exact; the gradients are
# not. How far off are they? That depends on how long the memory of the recurrence is, against the
# chunk.

sizes = [5, 10, 20, 40, 50, 80, 100, 200]
errors = [float((gradients(size, cut=True) - exact).norm() / exact.norm()) for size in sizes]
print([round(error, 2) for error in errors])
assert errors == sorted(errors, reverse=True)

figure, axes = plt.subplots(figsize=(5, 3), layout="constrained")
axes.semilogx(sizes, errors, "o-")
axes.set(xlabel="length of a chunk", ylabel="relative error of the gradient", ylim=(0, 1))
axes.set_xticks(sizes, [str(size) for size in sizes])
axes.minorticks_off()
axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %%
# Here a memory fades to a third within about twenty steps. Even chunks of 200 are off by a fifth:
# the last steps before each cut lose all that they do after it.
#
# One step at a time
# ------------------
#
# The smallest chunk has length 1. For that no scan is needed: a monoid is also an ordinary function
# of two elements.

state = ops.affine.identity_like((a[0, 0], b[0, 0]))
with torch.no_grad():
    for t in range(400):
        state = ops.affine(state, (a[0, t], b[0, t]))
    h = linear_recurrence(a, b)
assert torch.allclose(state[1], h[0, -1])
