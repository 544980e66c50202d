"""
LRU and S5: memories that turn
==============================

A number that shrinks by a factor every step is a memory that fades. Make the factor complex, and
the memory turns as it fades: it swings. A few swings of different speeds describe a wave, and many
waves describe almost anything.

That is the idea of the LRU and of S5, two recurrent layers. This page builds the idea up and lets
both forecast the sunspots of three years ahead.
"""

import math

import matplotlib.pyplot as plt
import torch
from torch import nn

from assocscan import associative_scan, linear_recurrence, matrix_recurrence, ops
from assocscan.cli.data import sunspots
from assocscan.nn import LRU, S5

# %%
# Turning and fading
# ------------------
#
# Take h[t] = λ h[t−1] + b[t] with a complex λ. Its size says how fast the memory fades, its angle
# how far it turns in a step. Give it one kick and watch.

steps = torch.arange(120.0)
kick = (steps == 0).to(torch.complex64)
shapes = {"|λ| = 0.98, 24 steps a turn": (0.98, 24), "|λ| = 0.93, 60 steps": (0.93, 60),
          "|λ| = 0.995, 40 steps": (0.995, 40)}  # fmt: skip

figure, axes = plt.subplots(figsize=(8, 2.8), layout="constrained")
for name, (size, period) in shapes.items():
    factor = size * torch.exp(torch.tensor(1j * math.tau / period))
    h = linear_recurrence(factor, kick, axis=0)
    assert torch.allclose(h, factor**steps, atol=1e-4)
    axes.plot(steps, h.real, label=name)
axes.set(xlabel="step", ylabel="real part of h", xlim=(0, 119))
axes.legend(frameon=False, fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, 1.15))
axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %%
# Who dislikes complex numbers may take 2 × 2 matrices: multiplying by λ turns and shrinks the
# plane. ``matrix_recurrence`` does that. The result is the same, but a complex number is half the
# memory and a third of the work.

torch.manual_seed(0)
b = torch.randn(1, 500, dtype=torch.complex64)
factor = 0.98 * torch.exp(torch.tensor(0.3j))
as_matrix = torch.stack([factor.real, -factor.imag, factor.imag, factor.real]).view(2, 2)
complex_h = linear_recurrence(factor, b)
matrix_h = matrix_recurrence(as_matrix, torch.view_as_real(b))
assert torch.allclose(torch.view_as_real(complex_h), matrix_h, atol=1e-4)

# %%
# The layers
# ----------
#
# The LRU is three steps. A matrix B spreads the input over many complex numbers. Each of them runs
# its own recurrence, with its own λ. A matrix C mixes their real parts back together. Everything is
# learnt, the λ too, in a form that keeps their size below 1.
#
# S5 does the same. It differs in how λ is made: from a continuous system and a step of time, with a
# start that is known to remember well. The steps set how long it remembers. By default that is
# hundreds of positions; here the steps are larger, for a memory of years.

lru, x = LRU(features=8, states=16), torch.randn(2, 300, 8)
y, state = lru(x)

with torch.no_grad():
    h, outputs = None, []
    for t in range(300):
        output, h = lru.step(x[:, t], h)
        outputs.append(output)
assert torch.allclose(torch.stack(outputs, 1), y, atol=1e-4)
assert torch.allclose(h, state, atol=1e-4)

# %%
# The loop of ``step`` and the scan agree. Train with the scan, and use ``step`` where values come
# one by one.
#
# Forecasting the sun
# -------------------
#
# The mean number of sunspots of every three months; its root, because large numbers scatter more.
# The question: what will it be twelve quarters later? The years to 1908 are there to learn from,
# those to 1958 tell when to stop, and the rest is the exam.

years, spots = sunspots()
years = years.view(-1, 3).mean(-1)
series = spots.view(-1, 3).mean(-1).float().sqrt()
AHEAD, LEARN, STOP = 12, 640, 840
middle, width = series[:LEARN].mean(), series[:LEARN].std()
series = (series - middle) / width


class Forecaster(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.before = nn.Linear(1, 16)
        self.layer = layer
        self.after = nn.Sequential(nn.GELU(), nn.Linear(16, 1))

    def forward(self, x):
        y, _ = self.layer(self.before(x[None, :, None]))
        return self.after(y)[0, :, 0]


def train(layer, rounds=150):
    """Keep the forecasts of the round that was best on the years to 1958."""
    model, best = Forecaster(layer), (math.inf, None)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    for _ in range(rounds):
        forecast = model(series[:-AHEAD])
        square = (forecast - series[AHEAD:]).square()
        score = float(square[LEARN - AHEAD : STOP - AHEAD].detach().mean())
        if score < best[0]:
            best = score, forecast.detach()
        optimizer.zero_grad()
        square[40 : LEARN - AHEAD].mean().backward()
        optimizer.step()
    return best[1]


def exam(forecast):
    """The typical error from 1959 on."""
    return float((forecast - series[AHEAD:])[STOP - AHEAD :].square().mean().sqrt())


torch.manual_seed(0)
threads = torch.get_num_threads()
torch.set_num_threads(1)  # the models are small: a second thread would be in the way
forecasts = {"LRU": train(LRU(16, 16)), "S5": train(S5(16, 16, min_step=0.02, max_step=0.5))}
torch.set_num_threads(threads)

errors = {name: exam(forecast) for name, forecast in forecasts.items()}
errors["the mean, always"] = exam(torch.zeros(len(series) - AHEAD))
errors["as now"] = exam(series[:-AHEAD])
for name, error in errors.items():
    print(f"{name:17} {error:.2f}")

assert errors["LRU"] < 0.8 * errors["the mean, always"]

when = years[AHEAD:]
figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
axes.plot(when, (series[AHEAD:] * width + middle).square(), color="0.6", label="measured")
for name, color in (("LRU", "C0"), ("S5", "C1")):
    shown = (forecasts[name] * width + middle).clamp(min=0).square()
    axes.plot(when, shown, color=color, linewidth=1.2, label=f"{name}, three years before")
axes.axvline(1959, color="0.3", linewidth=0.8, linestyle="--")
axes.text(1960, 240, "the exam", color="0.3")
axes.set(xlabel="year", ylabel="sunspots", xlim=(1900, 2009), ylim=(0, 260))
axes.legend(frameon=False, fontsize=8, loc="upper left")
axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %%
# "As now" is worse than no forecast at all: three years on, the cycle has turned. A memory that
# swings knows that. (Two small models on one series prove nothing about the two layers.)
#
# Where swings are not enough
# ---------------------------
#
# Three cups, a ball under one. Every move swaps two cups. Where is the ball? The order of the moves
# matters, so that no set of separate swings can follow it: multiplying numbers forgets the order. A
# matrix does not. Each swap is a matrix, and the product of all so far is where everything is.

swaps = torch.tensor([[1, 0, 2], [0, 2, 1], [2, 1, 0]])
moves = torch.randint(3, (200,))
matrices = torch.eye(3)[swaps][moves]  # [time, 3, 3]

cups = associative_scan(ops.matmul, matrices)


def cups_loop(moves):
    order, orders = torch.arange(3), []
    for move in moves:
        order = order[swaps[move]]
        orders.append(order)
    return torch.stack(orders)


assert torch.equal(cups.argmax(-1), cups_loop(moves))
print("after 200 moves:", cups[-1].argmax(-1).tolist())

# %%
# ``assocscan.nn.MatrixLRU`` is a layer with such states: the input chooses the matrices.
