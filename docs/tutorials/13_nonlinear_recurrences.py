"""
Steps that cannot be combined: gates, seasons, spikes
=====================================================

A scan works because two steps can be combined into one. Many useful steps cannot. A memory that
decides what to forget by looking at what it holds is one; so is a neuron that fires.

``nonlinear_recurrence`` runs such steps. You write one step in Python. It is compiled to a loop,
and so is its gradient. This page trains three of them.
"""

import math

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn import functional as F

from assocscan import linear_recurrence, nonlinear_recurrence
from assocscan.nn import RGLRU, DiagonalGRU

# %%
# One step
# --------
#
# A population grows, and the more it has grown, the less is left to eat. This is the logistic map.
# The new value is not linear in the old one, and no operator combines two years into one. So there
# is nothing to scan, but there is a loop.


def grow(h, food, rate):
    return rate * h * (1 - h) + food


food = torch.zeros(1, 40)
rates = torch.tensor([[2.6], [3.2], [3.9]])  # one chain each: settles, alternates, chaos
h = nonlinear_recurrence(grow, food.expand(3, 40), 0.3, params=rates[:, 0])


def grow_loop(rate):
    h, values = torch.tensor(0.3), []
    for _ in range(40):
        h = grow(h, 0.0, rate)
        values.append(h)
    return torch.stack(values)


assert torch.allclose(h[:2], torch.stack([grow_loop(rate) for rate in rates[:2, 0]]), atol=1e-5)

figure, axes = plt.subplots(figsize=(8, 2.6), layout="constrained")
for values, rate in zip(h, rates[:, 0].tolist(), strict=True):
    axes.plot(values, marker=".", linewidth=0.8, label=f"rate {rate:.1f}")
axes.set(xlabel="year", ylabel="population", xlim=(0, 39), ylim=(0, 1.05))
axes.legend(frameon=False, fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, 1.18))
axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %%
# The third chain is left out of the comparison. In chaos a rounding in the eighth digit is as large
# as the population after some thirty years, in any loop.
#
# A memory that flips
# -------------------
#
# Bits come in, one at a time. After each, say whether the number of ones so far is odd. One bit of
# memory is enough, but it has to be turned over by every one: the new value depends on the input
# *and* on the old value, and it must not fade. (Who knows the rule takes a scan, ``ops.xor``. Here
# a layer has to find it.)
#
# ``RGLRU`` chooses by the input how much of its memory it keeps. The factor is between 0 and 1: it
# can keep or forget, but not turn over. ``DiagonalGRU`` sees its own memory in its gates.


class Parity(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.before = nn.Linear(1, 16)
        self.layer = layer
        self.after = nn.Linear(16, 1)

    def forward(self, bits):
        y, _ = self.layer(self.before(bits[..., None]))
        return self.after(y)[..., 0]


def sample(count, length):
    bits = torch.randint(2, (count, length)).float()
    return bits, bits.cumsum(1) % 2


def train(layer, rounds=400):
    model, losses = Parity(layer), []
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(rounds):
        bits, odd = sample(64, 24)
        loss = F.binary_cross_entropy_with_logits(model(bits), odd)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return model, losses


threads = torch.get_num_threads()
torch.set_num_threads(1)  # the models are small: a second thread would be in the way
torch.manual_seed(0)
trained = {"DiagonalGRU": train(DiagonalGRU(16)), "RGLRU": train(RGLRU(16))}
torch.set_num_threads(threads)

bits, odd = sample(32, 1000)
with torch.no_grad():
    right = {
        name: ((model(bits) > 0) == (odd > 0.5)).float().mean(0)
        for name, (model, _) in trained.items()
    }
for name, share in right.items():
    print(f"{name:12} {share.mean():6.1%} right over 1000 bits, trained on 24")

# %%
# The GRU has learnt a rule, not the 24 bits: it holds over a thousand. The linear layer can add up
# and fade, and ends with guessing.

assert right["DiagonalGRU"].mean() > 0.99
assert right["RGLRU"][200:].mean() < 0.7

figure, (left, middle) = plt.subplots(1, 2, figsize=(8, 2.8), layout="constrained")
for name, (_, losses) in trained.items():
    left.plot(losses, linewidth=0.8, label=name)
    middle.plot(right[name].view(-1, 10).mean(1), linewidth=1, label=name)
left.axhline(math.log(2), color="0.6", linewidth=0.8, linestyle="--")
left.set(xlabel="round", ylabel="loss (dashed: guessing)", ylim=(0, 0.8))
middle.set(xlabel="tens of bits", ylabel="share that is right", ylim=(0.4, 1.02))
middle.legend(frameon=False, fontsize=8, loc="center right")
for axes in (left, middle):
    axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %%
# Seasons that multiply
# ---------------------
#
# A shop sells more in its fourth quarter: not by an amount, by a factor. The method of Holt and
# Winters follows a level, a trend, and one factor for each quarter. Each is an average of what it
# was and of what the new number says. The number is *divided* by the factor, and by the level, to
# say it: that is what makes the step nonlinear.
#
# The state is a level, a trend and four factors: six numbers. Up to eight are allowed.


def holt_winters(state, x, weights):
    level, trend, s1, s2, s3, s4 = state  # s1 is the factor of the quarter that comes
    a, b, c = weights
    new_level = a * x / s1 + (1 - a) * (level + trend)
    new_trend = b * (new_level - level) + (1 - b) * trend
    new_factor = c * x / new_level + (1 - c) * s1
    return new_level, new_trend, s2, s3, s4, new_factor


def expected(state):
    """What the next quarter should bring, written at every step."""
    level, trend, s1, *_ = state
    return (level + trend) * s1


# %%
# Forty quarters of 200 shops, made up: growth, a season of its own for each, and noise.

torch.manual_seed(0)
quarters = torch.arange(40)
growth = 100 * (1 + 0.02 * torch.rand(200, 1) * quarters)
seasons = 1 + 0.2 * torch.randn(200, 4).clamp(-2, 2)
sales = growth * seasons[:, quarters % 4] * (1 + 0.05 * torch.randn(200, 40))

first = sales[:, :4]
level = first.mean(1)
start = (level, 0.0, *(first / level[:, None]).unbind(1))


def forecasts(logits):
    weights = torch.sigmoid(logits).unbind()
    return nonlinear_recurrence(holt_winters, sales[:, 4:], start, params=weights, lower=expected)


def error(forecast):
    """The mean of |forecast − sales| / sales, of each next quarter."""
    return ((forecast[:, :-1] - sales[:, 5:]) / sales[:, 5:]).abs().mean()


logits = torch.zeros(3, requires_grad=True)
optimizer = torch.optim.Adam([logits], lr=0.1)
for _ in range(100):
    optimizer.zero_grad()
    loss = error(forecasts(logits))
    loss.backward()
    optimizer.step()

with torch.no_grad():
    forecast = forecasts(logits)
    fitted, as_now = error(forecast), error(sales[:, 4:])
    last_year = ((sales[:, 1:-4] - sales[:, 5:]) / sales[:, 5:]).abs().mean()
print("weights of level, trend, season:", [round(w, 2) for w in torch.sigmoid(logits).tolist()])
print(f"error {fitted:.1%}; as last quarter {as_now:.1%}; as last year {last_year:.1%}")
assert fitted < 0.9 * last_year < 0.9 * as_now

figure, axes = plt.subplots(figsize=(8, 2.6), layout="constrained")
axes.plot(quarters, sales[3], color="0.6", marker=".", label="sales of a shop")
axes.plot(quarters[5:], forecast[3, :-1], linewidth=1, label="expected a quarter before")
axes.set(xlabel="quarter", xlim=(0, 39))
axes.legend(frameon=False, fontsize=8, loc="upper left")
axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %%
# The three weights are ``params``: the same at every step, and their gradients are sums over all
# steps of all shops.
#
# A neuron that fires
# -------------------
#
# A voltage leaks away, and input adds to it. Where it passes 1, the neuron fires and the voltage
# drops by 1. To fire or not is a jump, and the derivative of a jump is zero where it exists. With
# it nothing could be trained.
#
# The usual way out is a *surrogate*: compute the jump, but differentiate a smooth curve. Within a
# step this is one line. ``detach`` has no derivative, so that only ``soft`` is differentiated; in
# the value ``soft`` cancels.


def fires(state, current):
    voltage = 0.9 * state[0] + current
    soft = torch.sigmoid(5 * (voltage - 1))
    hard = (voltage > 1).to(voltage.dtype)
    spike = soft + (hard - soft).detach()
    return voltage - spike, spike


def spikes_of(current):
    return nonlinear_recurrence(fires, current, (0.0, 0.0), lower=lambda state: state[1])


# %%
# The value is the jump, and the gradient is autograd's of the same loop. (A
# ``torch.autograd.Function`` in the step works too, but its backward cannot be compiled.)

current = torch.rand(2, 30, requires_grad=True)
spikes = spikes_of(current)
assert ((spikes - spikes.round()).abs() < 1e-6).all() and 0 < spikes.mean() < 1

state, loop = (torch.zeros(2), torch.zeros(2)), []
for t in range(30):
    state = fires(state, current[:, t])
    loop.append(state[1])
weight = torch.randn(2, 30)
gradients = [
    torch.autograd.grad((y * weight).sum(), current)[0] for y in (spikes, torch.stack(loop, 1))
]
assert torch.allclose(*gradients, atol=1e-5) and gradients[0].abs().max() > 0

# %%
# Now train it. Sixty inputs fire at random, and always in the same way. The neuron adds them up
# with weights, and is to fire at six moments of our choice. Spikes are compared after a leaky sum,
# which makes a spike that comes a little late a small mistake.

torch.manual_seed(2)
inputs = (torch.rand(1, 200, 60) < 0.05).float()
moments = torch.tensor([20, 55, 80, 120, 150, 185])
wanted = torch.zeros(1, 200).index_fill(1, moments, 1.0)
neuron = nn.Linear(60, 1)
optimizer = torch.optim.Adam(neuron.parameters(), lr=0.02)


def smooth(spikes):
    return linear_recurrence(torch.tensor(0.8), spikes)


before = spikes_of(neuron(inputs)[..., 0]).detach()
for _ in range(300):
    spikes = spikes_of(neuron(inputs)[..., 0])
    loss = (smooth(spikes) - smooth(wanted)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

with torch.no_grad():
    spikes = spikes_of(neuron(inputs)[..., 0])
fired = spikes[0].round().nonzero().flatten().tolist()
print("wanted", moments.tolist(), "fired", fired)
missed = sum(min(abs(t - f) for f in fired or [999]) > 2 for t in moments.tolist())
assert missed <= 1 and len(fired) <= 8

figure, axes = plt.subplots(figsize=(8, 1.8), layout="constrained")
for row, (name, train_of) in enumerate(
    {"wanted": wanted, "trained": spikes, "before": before}.items()
):
    times = train_of[0].round().nonzero().flatten()
    axes.vlines(times, -row - 0.35, -row + 0.35, color=f"C{row}")
    axes.text(-3, -row, name, ha="right", va="center", fontsize=9)
axes.set(xlabel="step", xlim=(0, 199), ylim=(-2.5, 0.5), yticks=[])
axes.spines[["top", "right", "left"]].set_visible(False)
plt.show()

# %%
# :doc:`When your step is not associative </nonlinear>` has the options, the limits, and what else
# there is for loops.
