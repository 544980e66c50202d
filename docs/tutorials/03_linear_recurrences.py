"""
Linear recurrences and a small language model
=============================================

A memory that fades: keep a part of what you knew, add something new::

    h[t] = a[t] · h[t−1] + b[t]

This one line is a moving average, a digital filter, a bank account, and the heart of recurrent
networks such as Hawk and Mamba. It looks like a loop. It is a scan.
"""

import math
import time
from pydoc_data.topics import topics

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn import functional as F

from assocscan import associative_scan, linear_recurrence, monoid
from assocscan.cli.data import nile
from assocscan.nn import Hawk

# %%
# The loop and the scan
# ---------------------
#
# Tensors are [batch, time, channels]; the recurrence runs along axis 1.


def recurrence_loop(a, b):
    h, outputs = torch.zeros_like(b[:, 0]), []
    for t in range(b.shape[1]):
        h = a[:, t] * h + b[:, t]
        outputs.append(h)
    return torch.stack(outputs, 1)


torch.manual_seed(0)
a, b = torch.rand(4, 1000, 8), torch.randn(4, 1000, 8)
h = linear_recurrence(a, b)
assert torch.allclose(h, recurrence_loop(a, b), atol=1e-5)

# %%
# How can a loop, where each step waits for the one before, be done in parallel? Look at a step as a
# function: it takes h to a·h + b. Do two steps::
#
#     a₂ · (a₁ · h + b₁) + b₂  =  (a₂ · a₁) · h + (a₂ · b₁ + b₂)
#
# Two steps are one step with other numbers. So are a thousand. This is an operator on pairs (a, b):


@monoid(identity=(1.0, 0.0))
def two_steps(left, right):
    a1, b1 = left
    a2, b2 = right
    return a2 * a1, a2 * b1 + b2


two_steps.check((torch.tensor(0.0), torch.tensor(0.0)))
_, by_hand = associative_scan(two_steps, (a, b), axis=1)
assert torch.allclose(by_hand, h, atol=1e-5)

# %%
# It pays off in time as well.


def seconds(function, times):
    function()
    start = time.perf_counter()
    for _ in range(times):
        function()
    return (time.perf_counter() - start) / times


loop, scan = seconds(lambda: recurrence_loop(a, b), 2), seconds(lambda: linear_recurrence(a, b), 50)
print(f"loop {loop * 1e3:.1f} ms, scan {scan * 1e3:.3f} ms")

# %%
# Learning to forget
# ------------------
#
# How much of the past is worth keeping? Take a forecast that follows the Nile: each year it moves a
# part k of the way to what was measured::
#
#     m[t] = (1 − k) · m[t−1] + k · y[t]
#
# That is a linear recurrence with a = 1 − k and b = k·y. Its gradient is a scan too, so k can be
# learnt: make the forecast of each year from the years before as good as possible.

years, flow = nile()


def forecasts(k):
    level = linear_recurrence(1 - k, k * flow[1:-1], init=flow[0], axis=0)
    return torch.cat([flow[:1], level])  # for the years from 1872 on


def mean_square(k):
    return (forecasts(k) - flow[1:]).square().mean()


logit = torch.zeros((), dtype=torch.float64, requires_grad=True)
optimizer = torch.optim.Adam([logit], lr=0.1)
for _ in range(100):
    optimizer.zero_grad()
    mean_square(logit.sigmoid()).backward()
    optimizer.step()
k = logit.sigmoid().detach()

grid = torch.linspace(0.01, 1, 100, dtype=torch.float64)
losses = torch.stack([mean_square(value) for value in grid])
assert abs(k - grid[losses.argmin()]) < 0.011
print(f"best k = {float(k):.3f}; off by {float(mean_square(k)) ** 0.5:.0f} in a typical year")

figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
axes.plot(years, flow, ".", color="0.6", label="measured")
for value, color in ((0.02, "C2"), (float(k), "C1"), (0.9, "C4")):
    shown = forecasts(torch.tensor(value, dtype=torch.float64))
    style = {"linewidth": 2.0 if value == float(k) else 0.8, "color": color}
    axes.plot(years[1:], shown, label=f"forecast, k = {value:.2f}", **style)
axes.set(xlabel="year", ylabel="flow, 10⁸ m³", xlim=(1870, 1971))
axes.legend(frameon=False, fontsize=8, ncols=2)
axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %%
# With k too small the forecast sleeps through the change of 1898. With k too large it runs after
# every single year.
#
# A network of gates
# ------------------
#
# One k for all years is a rigid memory. Hawk lets every input decide how much to keep: a and b are
# computed from x, then the recurrence runs. Nothing else goes from one time to another except a
# convolution over four steps. The layer is ``assocscan.nn.Hawk``.
#
# Let us make a model of two such blocks read English, one character at a time, and guess the next.
# The text is the one that ``help()`` prints; it comes with Python.

text = "\n".join(topics[name] for name in sorted(topics))
alphabet = sorted(set(text))
number = {character: k for k, character in enumerate(alphabet)}
everything = torch.tensor([number[character] for character in text])
cut = len(everything) * 9 // 10
training, held_out = everything[:cut], everything[cut:]
print(f"{len(text)} characters, {len(alphabet)} different ones")


class Reader(nn.Module):
    """Characters [B, L] → logits of the next ones [B, L, characters], and the states."""

    def __init__(self, characters, features=64, blocks=2):
        super().__init__()
        self.embedding = nn.Embedding(characters, features)
        self.blocks = nn.ModuleList(Hawk(features, width=96, heads=4) for _ in range(blocks))
        self.head = nn.Sequential(nn.LayerNorm(features), nn.Linear(features, characters))

    def forward(self, characters, states=(None, None)):
        x, left = self.embedding(characters), []
        for block, state in zip(self.blocks, states, strict=True):
            y, state = block(x, state)
            x = x + y
            left.append(state)
        return self.head(x), left


def bits(model, characters):
    """Mean bits per character; 0 is perfect."""
    logits, _ = model(characters[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), characters[:, 1:].flatten()) / math.log(2)


# %%
# Two rulers to measure it by. A model that knows only how frequent each character is, and one that
# knows how frequent each *pair* is.

pairs = torch.ones(len(alphabet), len(alphabet)).index_put_(
    (training[:-1], training[1:]), torch.ones(()), accumulate=True
)
by_single = -(pairs.sum(0) / pairs.sum()).log2()[held_out[1:]].mean()
by_pair = -(pairs / pairs.sum(1, keepdim=True)).log2()[held_out[:-1], held_out[1:]].mean()
print(f"bits per character: single ones {by_single:.2f}, pairs {by_pair:.2f}")

# %%
# Training takes 600 steps.

STEPS, BATCH, LENGTH = 600, 8, 64
model = Reader(len(alphabet))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, STEPS, pct_start=0.1)
test = held_out[: 64 * (LENGTH + 1)].view(64, -1)
curve, tested = [], []
threads = torch.get_num_threads()
torch.set_num_threads(1)  # the model is small: a second thread would be in the way
for step in range(STEPS):
    starts = torch.randint(len(training) - LENGTH, (BATCH, 1))
    loss = bits(model, training[starts + torch.arange(LENGTH + 1)])
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    curve.append(float(loss.detach()))
    if step % 25 == 24:
        with torch.no_grad():
            tested.append((step + 1, float(bits(model, test))))
torch.set_num_threads(threads)
reached = tested[-1][1]
print(f"after {STEPS} steps: {reached:.2f} bits per held-out character")
assert reached < by_pair

figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
axes.plot(range(1, STEPS + 1), curve, color="0.75", label="training")
axes.plot(*zip(*tested, strict=True), color="C0", label="held out")
for height, name in ((by_single, "single characters"), (by_pair, "pairs of characters")):
    axes.axhline(float(height), color="0.4", linestyle="--", linewidth=0.8)
    axes.annotate(name, (STEPS, float(height)), ha="right", va="bottom", color="0.4", fontsize=8)
axes.set(xlabel="step", ylabel="bits per character", ylim=(0, None), xlim=(0, STEPS))
axes.legend(frameon=False, fontsize=8, loc="lower left")
axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %%
# It beats the pairs: it remembers more than one character. 600 steps do not make a writer of it,
# but it has learnt words.
#
# Writing
# -------
#
# To write, the model reads its own output, one character at a time. It need not read the beginning
# again: the state holds all it knows of it. ``init`` and the final state of a scan are made for
# that, and the layers pass them on.


@torch.no_grad()
def write(prompt, count):
    numbers = [number[character] for character in prompt]
    logits, states = model(torch.tensor([numbers]))
    for _ in range(count):
        odds = F.softmax(logits[0, -1] / 0.6, -1)
        numbers.append(int(torch.multinomial(odds, 1)))
        logits, states = model(torch.tensor([[numbers[-1]]]), states)
    return "".join(alphabet[k] for k in numbers)


print(write("The statement ", 160))

# %%
# In two pieces or in one, the logits are the same.

piece = test[:1]
with torch.no_grad():
    whole, _ = model(piece)
    first, states = model(piece[:, :50])
    second, _ = model(piece[:, 50:], states)
assert torch.allclose(whole, torch.cat([first, second], 1), atol=1e-4)

# %%
# A larger model, trained for two minutes, reaches 2.2 bits: see the example in :doc:`/layers`.
