"""
Softmax and statistics in one pass
==================================

A stream of numbers goes by, and you see each of them once. What are their mean, their spread, their
extremes, so far? And what is their softmax, which needs the largest number before it can begin?

Each of these is a small operator. One scan over the data computes all of them, for every time at
once.
"""

import matplotlib.pyplot as plt
import torch

from assocscan import associative_scan, monoid, ops, product, reduce, with_lift, with_lower
from assocscan.cli.data import sunspots

# %%
# Several things at once
# ----------------------
#
# ``product`` puts operators side by side. Each sees the same input, which is read once.

years, spots = sunspots()
low, high, (mean, variance) = associative_scan(product(ops.min, ops.max, ops.welford), spots)
print(f"{len(spots)} months: from {low[-1]:.0f} to {high[-1]:.0f}, mean {mean[-1]:.1f}")

for t in (0, 1, 100, 3119):
    seen = spots[: t + 1]
    assert low[t] == seen.min() and high[t] == seen.max()
    assert torch.allclose(mean[t], seen.mean())
    assert torch.allclose(variance[t], seen.var(correction=0), atol=1e-9)

# %%
# The variance, done right
# ------------------------
#
# Schoolbooks say: the variance is the mean of the squares less the square of the mean. Both can be
# added up in one pass. But try it on numbers that are large and close together.

generator = torch.Generator().manual_seed(0)
noise = torch.randn(10_000, generator=generator)
x = 5000 + noise
exact = x.double().var(correction=0)
schoolbook = reduce(ops.mean, x * x) - reduce(ops.mean, x) ** 2
careful = reduce(ops.welford, x)[1]
print(f"exact {exact:.4f}, schoolbook {schoolbook:.4f}, welford {careful:.4f}")
assert abs(careful - exact) < 1e-3 < abs(schoolbook - exact)

# %%
# The squares are about 25 million. Of their seven digits nothing is left for a variance of 1.
# ``ops.welford`` never squares a large number. Its element is count, mean, and the sum of squared
# distances *from that mean*. Here is how to join two of them: the distance between the two means is
# what is missing.


@monoid(identity=(0.0, 0.0, 0.0), lift=lambda x: (torch.ones_like(x), x, torch.zeros_like(x)))
def spread(left, right):
    n1, mean1, squares1 = left
    n2, mean2, squares2 = right
    n = n1 + n2
    share = n2 / torch.clamp(n, min=1.0)
    distance = mean2 - mean1
    return n, mean1 + distance * share, squares1 + squares2 + distance**2 * n1 * share


n, _, squares = reduce(spread, x)
assert torch.allclose(squares / n, careful, rtol=1e-3)

# %%
# ``reduce`` is the last entry of a scan. Nothing else is written to memory.
#
# Statistics that forget
# ----------------------
#
# A mean over 260 years changes no more. To follow what goes on, let old numbers fade: each month
# multiplies all earlier weights by 0.99. ``ops.ema_variance`` gives mean and variance with such
# weights.

decay = torch.full((), 0.99, dtype=spots.dtype).expand(len(spots))
fading_mean, fading_variance = associative_scan(ops.ema_variance, (spots, decay))

weights = 0.99 ** torch.arange(3119, -1, -1, dtype=spots.dtype)
weights /= weights.sum()
assert torch.allclose(fading_mean[-1], weights @ spots)
assert torch.allclose(fading_variance[-1], weights @ (spots - fading_mean[-1]) ** 2)

figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
axes.plot(years, spots, color="0.8", linewidth=0.5)
deviation = fading_variance.sqrt()
axes.fill_between(
    years, (fading_mean - deviation).clamp(min=0), fading_mean + deviation, color="C0", alpha=0.2,
    linewidth=0,
)  # fmt: skip
axes.plot(years, fading_mean, color="C0", label="fading mean ± deviation")
axes.plot(years, mean, color="C3", linewidth=1, label="mean of all so far")
axes.plot(years, high, color="C2", linewidth=1, label="highest so far")
axes.set(xlabel="year", ylabel="sunspots", xlim=(1749, 2009), ylim=(0, None))
axes.legend(frameon=False, fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, 1.15))
axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %%
# Change what goes in and what comes out
# --------------------------------------
#
# The root mean square is a mean, of squares, under a root. No new operator is needed: ``with_lift``
# changes what enters, ``with_lower`` what leaves. Both run inside the same pass.

root_mean_square = with_lower(with_lift(ops.mean, torch.square), torch.sqrt)
assert torch.allclose(reduce(root_mean_square, spots), spots.square().mean().sqrt())

# %%
# Softmax in one pass
# -------------------
#
# A softmax divides exp(x) by the sum of all of them. exp(1000) is infinite, so one subtracts the
# largest x first. That makes three passes: find the largest, sum, divide. Can the first two be one?
#
# Cut the numbers in two. Each half gives its largest number m, and the sum s of exp(x − m). To join
# them take the larger m, and scale the other sum down to it.


@monoid(identity=(-torch.inf, 0.0), lift=lambda x: (x, torch.ones_like(x)))
def softmax_sum(left, right):
    m1, s1 = left
    m2, s2 = right
    m = torch.maximum(m1, m2)
    return m, s1 * torch.exp(m1 - m) + s2 * torch.exp(m2 - m)


scores = torch.tensor([1000.0, 1001.0, 999.0])
m, s = reduce(softmax_sum, scores)
print(torch.exp(scores - m) / s)
assert torch.allclose(torch.exp(scores - m) / s, scores.softmax(0))

# %%
# This is the trick inside FlashAttention. The ready-made ``ops.online_softmax`` also takes −∞,
# which stands for masked scores.
#
# Attention over a stream
# -----------------------
#
# Attention is a mean of values v, weighted by a softmax of scores. So carry a third thing along:
# the weighted sum. ``ops.online_attention`` does, and returns the mean.
#
# The scan gives the attention of one query over all *beginnings* of a stream, which is how the
# answer changes as more is read.

length, width = 256, 8
keys = torch.randn(length, width, generator=generator)
values = torch.randn(length, width, generator=generator)
query = 2 * torch.randn(width, generator=generator)
scores = keys @ query / width**0.5
answers = associative_scan(ops.online_attention, (scores, values))

for t in (0, 17, 255):
    wanted = scores[: t + 1].softmax(0) @ values[: t + 1]
    assert torch.allclose(answers[t], wanted, atol=1e-5)

# %%
# The stream may come in pieces. ``return_final=True`` also returns the element of what was read;
# ``init`` starts from it. Masked scores weigh nothing.

first, carry = associative_scan(
    ops.online_attention, (scores[:100], values[:100]), return_final=True
)
second = associative_scan(ops.online_attention, (scores[100:], values[100:]), init=carry)
assert torch.allclose(torch.cat([first, second]), answers, atol=1e-5)

hidden = scores.clone()
hidden[10:20] = -torch.inf
kept = torch.cat([torch.arange(10), torch.arange(20, length)])
masked = reduce(ops.online_attention, (hidden, values))
assert torch.allclose(masked, scores[kept].softmax(0) @ values[kept], atol=1e-5)

figure, (above, below) = plt.subplots(
    2, figsize=(8, 4), sharex=True, layout="constrained", height_ratios=(1, 2)
)
above.vlines(range(length), scores.min() - 0.5, scores, color="0.7", linewidth=1)
top = torch.cummax(scores, 0)
records = top.indices.unique()
above.plot(records, scores[records], "o", color="C3", markersize=4, label="largest so far")
above.set(ylabel="score")
above.legend(frameon=False, fontsize=8, loc="lower right")
below.plot(answers[:, :4], linewidth=1.2)
for record in records.tolist():
    below.axvline(record, color="C3", linewidth=0.5)
below.set(xlabel="keys read", ylabel="answer (4 of 8 numbers)", xlim=(0, length))
for axes in (above, below):
    axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %%
# Early on a new record moves the answer a lot. It settles as more is read.
