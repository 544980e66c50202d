"""
Cumulative sums, and what they are good for
===========================================

A river fills a reservoir. Every year water comes in, every year the same amount is let out.
How large must the reservoir be, so that it never overflows and never runs dry?

That is a question about cumulative sums. Harold Hurst asked it about the Nile in 1951. At the
end of this page you will have answered it, with the measurements that he used.
"""

import matplotlib.pyplot as plt
import torch

from assocscan import associative_scan, cummax, cummin, cumprod, cumsum, logcumsumexp, ops
from assocscan.cli.data import nile, sunspots

# %%
# Four sums of the same numbers
# -----------------------------
#
# A cumulative sum adds up everything so far.

x = torch.tensor([3, 1, 4, 1, 5])
print(cumsum(x))

# %%
# With ``inclusive=False`` an entry does not count itself. The first sum is then empty: it is 0.

print(cumsum(x, inclusive=False))

# %%
# With ``reverse=True`` the sum starts at the other end: everything from here on.

print(cumsum(x, reverse=True))

# %%
# Both together: everything after this one.

print(cumsum(x, reverse=True, inclusive=False))

# %%
# torch has the first of the four. Loops say what all of them are.

values = x.tolist()
assert cumsum(x).tolist() == [sum(values[: t + 1]) for t in range(5)]
assert cumsum(x, inclusive=False).tolist() == [sum(values[:t]) for t in range(5)]
assert cumsum(x, reverse=True).tolist() == [sum(values[t:]) for t in range(5)]
assert cumsum(x, reverse=True, inclusive=False).tolist() == [sum(values[t + 1 :]) for t in range(5)]

# %%
# A tensor with more dimensions is summed along one of them. ``axis`` says which; here it is the
# last one if you say nothing.

table = torch.arange(6.0).view(2, 3)
assert torch.equal(cumsum(table, axis=0), torch.cumsum(table, 0))
assert torch.equal(cumsum(table), torch.cumsum(table, -1))

# %%
# Where does each piece start?
# ----------------------------
#
# Four sentences lie in one long tensor, back to back. You know how long each is. The exclusive sum
# of the lengths says where each one starts.

lengths = torch.tensor([3, 2, 4, 2])
starts = cumsum(lengths, inclusive=False)
print(starts)

words = "the cat sat birds sang and then it rained we left".split()
pieces = [words[s : s + n] for s, n in zip(starts.tolist(), lengths.tolist(), strict=True)]
assert [word for piece in pieces for word in piece] == words
print(pieces)

# %%
# Averages over a moving window
# -----------------------------
#
# The sum of the last twelve months is a difference of two cumulative sums: all up to now, less all
# up to a year ago. Two additions per month, however wide the window is.
#
# Here are 260 years of sunspots, counted every month. The thin line is one month, the thick one is
# the mean of 13 months.

years, spots = sunspots()
window = 13
total = cumsum(spots)
before = torch.cat([torch.zeros(1, dtype=spots.dtype), total[:-window]])
smooth = (total[window - 1 :] - before) / window

assert torch.allclose(smooth, spots.unfold(0, window, 1).mean(-1))

figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
axes.plot(years, spots, color="0.75", linewidth=0.5, label="one month")
axes.plot(years[window // 2 : -(window // 2)], smooth, color="C1", label="mean of 13 months")
axes.set(xlabel="year", ylabel="sunspots", xlim=(1749, 2009), ylim=(0, None))
axes.legend(frameon=False)
axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %%
# Hurst's reservoir
# -----------------
#
# These are the yearly flows of the Nile at Aswan from 1871 to 1970, in 10⁸ m³. Let out the mean
# every year. What is then in the reservoir is the cumulative sum of the flow less the mean.

years, flow = nile()
stored = cumsum(flow - flow.mean())

# %%
# The reservoir must hold the distance from the lowest level to the highest. Hurst called that
# distance the range.

needed = float(stored.max() - stored.min())
print(f"{needed / 10:.0f} km³, or {needed / float(flow.mean()):.1f} years of water")

# %%
# Would less be enough if the years came in another order? Shuffle them and see. A cumulative sum
# along the last axis does a thousand shuffles at once.

generator = torch.Generator().manual_seed(0)
orders = torch.rand(1000, 100, generator=generator).argsort(-1)
shuffled = cumsum((flow - flow.mean())[orders])
ranges = shuffled.amax(-1) - shuffled.amin(-1)
typical = float(ranges.median())
print(
    f"shuffled years need {typical / 10:.0f} km³; {int((ranges > needed).sum())} in 1000 need more"
)
assert needed > 2 * typical

# %%
# That was Hurst's discovery: wet years follow wet years and dry ones follow dry ones, and a
# reservoir must be far larger than chance says. The picture shows why: up to 1898 the river brought
# more than its mean, and less after it.

figure, axes = plt.subplots(figsize=(8, 3.5), layout="constrained")
axes.plot(years, shuffled[:60].T / 10, color="0.85", linewidth=0.6)
axes.plot(years, stored / 10, color="C0", linewidth=2)
peak, trough = int(stored.argmax()), int(stored.argmin())
axes.annotate(f"{int(years[peak])}", (years[peak], stored[peak] / 10), ha="left", va="bottom")
axes.annotate("the years as they came", (1905, 450), color="C0")
axes.annotate("60 shuffles of them", (1945, -190), color="0.5")
axes.set(xlabel="year", ylabel="stored, km³", xlim=(1871, 1970))
axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %%
# Other things to accumulate
# --------------------------
#
# A maximum can be accumulated like a sum. ``cummax`` says also where it was met: the years of
# record floods, and with ``cummin`` those of record droughts.

floods, flood_at = cummax(flow)
droughts, drought_at = cummin(flow)
print("floods  ", [int(years[t]) for t in flood_at.unique()])
print("droughts", [int(years[t]) for t in drought_at.unique()])

wanted = torch.cummax(flow, 0)
assert torch.equal(floods, wanted.values) and torch.equal(flood_at, wanted.indices)

# %%
# A product too: money at interest, say. Reversed, it tells what a coin paid in each year is worth
# at the end.

interest = torch.tensor([0.02, 0.05, -0.10, 0.03])
print(cumprod(1 + interest))
print(cumprod(1 + interest, reverse=True))
assert torch.allclose(cumprod(1 + interest), torch.cumprod(1 + interest, 0))

# %%
# Probabilities are often kept as logarithms, because they are too small for a float. Adding them up
# is ``logcumsumexp``.

tiny = torch.tensor([-1000.0, -1001.0, -999.0])
print(logcumsumexp(tiny))
assert torch.allclose(logcumsumexp(tiny), torch.logcumsumexp(tiny, 0))

# %%
# Rounding
# --------
#
# A float32 has seven digits. Add a million small numbers, and the last of them lose theirs.
# ``ops.compensated_sum`` keeps what rounding cut off in a second number, and adds it back.

tenths = torch.full((1_000_000,), 0.1)
exact = torch.cumsum(tenths.double(), 0)
plain = cumsum(tenths)
careful = associative_scan(ops.compensated_sum, tenths)
error = [float((y.double() - exact).abs().max()) for y in (plain, careful)]
print(f"plain {error[0]:.2g}, compensated {error[1]:.2g}, of {float(exact[-1]):.0f}")
assert error[1] < error[0] / 10

# %%
# Gradients
# ---------
#
# Raise one number and all sums after it rise. So the gradient of a cumulative sum is a cumulative
# sum from the other end.

x = torch.randn(8, dtype=torch.float64, generator=generator, requires_grad=True)
weights = torch.randn(8, dtype=torch.float64, generator=generator)
(weights * cumsum(x)).sum().backward()
assert torch.allclose(x.grad, cumsum(weights, reverse=True))

# %%
# Everything on this page was one function, ``associative_scan``, with different ways to combine two
# numbers. The next page shows how to write your own.
