"""
Resets and packed sequences
===========================

Sequences come in different lengths: sentences, games, orders of a customer. Padding them to the
longest wastes time and memory. Put them back to back in one long tensor instead, and tell the scan
where each one begins.

There are two ways to tell it. A *reset* is a flag at every step. *Offsets* are the places of the
cuts. This page shows both on the cycles of the sun.
"""

import matplotlib.pyplot as plt
import torch

from assocscan import associative_scan, cumsum, ops, product, reduce, segmented, with_lower
from assocscan.cli.data import sunspots

# %%
# Where are the cuts?
# -------------------
#
# The number of sunspots rises and falls in about eleven years. A cycle begins where they are
# fewest. To find such months, smooth the series over a year, and take each month that is the lowest
# for four years around it.

years, spots = sunspots()


def around(x, months):
    """[L, 2·months + 1]: every value with its neighbours, the edges repeated."""
    padded = torch.cat([x[:1].expand(months), x, x[-1:].expand(months)])
    return padded.unfold(0, 2 * months + 1, 1)


smooth = around(spots, 6).mean(-1)
smooth = smooth + 1e-6 * torch.arange(len(smooth))  # the first of months that tie
is_start = smooth == around(smooth, 48).amin(-1)
is_start[:1] = is_start[-48:] = False
starts = is_start.nonzero().flatten()
print([round(float(years[t]), 1) for t in starts])

# %%
# What lies before the first start and after the last is not a whole cycle. Leave it out.

first, last = int(starts[0]), int(starts[-1])
years, spots, reset = years[first:last], spots[first:last], is_start[first:last]
lengths = starts.diff()
print(f"{len(lengths)} cycles of {int(lengths.min())} to {int(lengths.max())} months")

# %%
# Resets
# ------
#
# ``segmented`` makes a new operator of an old one. It takes a flag beside the input. Where the flag
# is true, the scan forgets all before and starts anew with that input.

in_cycle = associative_scan(segmented(ops.sum), (spots, reset))
assert torch.equal(in_cycle, cumsum(spots, reset=reset))  # the sum has a function of its own


def loop(x, reset):
    total, outputs = 0.0, []
    for value, starts_here in zip(x.tolist(), reset.tolist(), strict=True):
        total = value if starts_here else total + value
        outputs.append(total)
    return torch.tensor(outputs, dtype=x.dtype)


assert torch.allclose(in_cycle, loop(spots, reset))

# %%
# It works with every operator, also with several at once, and with your own.

highest, mean = associative_scan(segmented(product(ops.max, ops.mean)), (spots, reset))
assert highest[0] == spots[0] and highest[-1] == spots[-int(lengths[-1]) :].max()

# %%
# Why is this still a scan? The flag is a part of the element: "there was a reset in this stretch".
# If there was one in the right stretch, the left one does not matter; otherwise join them as
# before.
#
# Offsets
# -------
#
# ``offsets`` holds the places of the cuts, the beginning and the end included. (Other libraries
# call it ``cu_seqlens``.) One cycle is then a sequence of its own, and there is no flag to read.

offsets = torch.cat([starts[:1] * 0, lengths.cumsum(0)])
print(offsets[:4], "…", int(offsets[-1]), len(spots))

packed = associative_scan(ops.sum, spots, offsets=offsets)
assert torch.allclose(packed, in_cycle)

# %%
# All else is as if each cycle were scanned alone: from the end, too.

to_come = associative_scan(ops.sum, spots, reverse=True, offsets=offsets)
parts = spots.split(lengths.tolist())
assert torch.allclose(to_come, torch.cat([part.flip(0).cumsum(0).flip(0) for part in parts]))

# %%
# Here every cycle starts at month 0. The sums are drawn in the colour of their century. A cycle
# that starts fast has more to come: that is the plot on the right.

month = associative_scan(ops.sum, torch.ones_like(spots), offsets=offsets) - 1
totals = reduce(ops.sum, spots, offsets=offsets)

figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.6), layout="constrained")
for k, (x, y) in enumerate(
    zip(month.split(lengths.tolist()), packed.split(lengths.tolist()), strict=True)
):
    century = int(years[offsets[k]]) // 100
    left.plot(x / 12, y, color=f"C{century - 17}", linewidth=1)
for century in (17, 18, 19):
    left.plot([], [], color=f"C{century - 17}", label=f"from {century}00 on")
left.set(
    xlabel="years since the cycle began", ylabel="sunspots so far", xlim=(0, None), ylim=(0, None)
)
left.legend(frameon=False, fontsize=8)
early = packed[offsets[:-1] + 36]
rest = totals - early
right.plot(early, rest, "o", color="C0")
right.set(xlabel="sum of the first three years", ylabel="sum of the years after")
right.set(xlim=(0, None), ylim=(0, None))
for axes in (left, right):
    axes.spines[["top", "right"]].set_visible(False)
plt.show()

correlation = float(torch.corrcoef(torch.stack([early, rest]))[0, 1])
print(f"correlation {correlation:.2f}")
assert correlation > 0.5

# %%
# One number per sequence
# -----------------------
#
# ``reduce`` gives the last entry of each sequence: as many as there are cycles.

mean, variance = reduce(ops.welford, spots, offsets=offsets)
assert mean.shape == lengths.shape
assert torch.allclose(mean, torch.stack([part.mean() for part in parts]))
assert torch.allclose(variance, torch.stack([part.var(correction=0) for part in parts]))

# %%
# A sequence may be empty. Its result is the identity, or what you pass as ``init``.

some = torch.tensor([0, 2, 2, 5])
print(reduce(ops.sum, torch.ones(5), offsets=some))

# %%
# A packed recurrence
# -------------------
#
# Recurrent layers need the same. ``init`` then has a state for every sequence, and so has what
# comes out at the end. ``with_lower`` keeps h and drops the product of the a, which nobody asked
# for.

recurrence = with_lower(ops.affine, lambda state: state[1])
generator = torch.Generator().manual_seed(0)
length, channels = len(spots), 4
a = torch.rand(length, channels, generator=generator)
b = torch.randn(length, channels, generator=generator)
state = torch.randn(len(lengths), channels, generator=generator)

h, (_, final) = associative_scan(
    recurrence, (a, b), offsets=offsets, init=(torch.ones_like(state), state), return_final=True
)
for k, (start, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
    wanted = state[k]
    for t in range(start, end):
        wanted = a[t] * wanted + b[t]
    assert torch.allclose(h[end - 1], wanted, atol=1e-5) and torch.allclose(
        final[k], wanted, atol=1e-5
    )

# %%
# Nothing leaks across a cut, gradients neither. Ask the last month of the third cycle what it
# depends on: only on its own cycle.

b.requires_grad_()
h = associative_scan(recurrence, (torch.full_like(a, 0.999), b), offsets=offsets)
h[offsets[3] - 1].sum().backward()
touched = b.grad[:, 0].nonzero().flatten()
assert touched.tolist() == list(range(int(offsets[2]), int(offsets[3])))

# %%
# Which of the two?
# -----------------
#
# Take offsets where you have them: they are a few numbers. Take ``segmented`` where the resets come
# with the data, such as the end of an episode, or where every row of a batch has its own.

batch = spots[:2400].view(4, 600)
flags = torch.rand(4, 600, generator=generator) < 0.01
rows = associative_scan(segmented(ops.sum), (batch, flags), axis=1)
assert torch.allclose(rows, torch.stack([loop(x, r) for x, r in zip(batch, flags, strict=True)]))
print(f"{int(flags.sum())} resets in 4 rows")
