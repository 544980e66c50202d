"""
Kalman filter and smoother on the Nile
======================================

Somebody measured the Nile every year from 1871 to 1970. The numbers jump about, for two reasons:
the measurement of a single year is noisy, and the river itself changes slowly. How much water did
it carry *really*?

The Kalman filter answers with what was known at the time, the smoother with what is known now.
Both look like loops over the years. Both are scans.
"""

import matplotlib.pyplot as plt
import torch

from assocscan import kalman_filter, rts_smoother
from assocscan.cli.data import nile

years, flow = nile()

# %%
# The model
# ---------
#
# The true level x wanders: each year it changes by a random step of variance Q. What is measured is
# the level and an error of variance R::
#
#     x[t] = x[t−1] + q[t],    y[t] = x[t] + r[t]
#
# The general model has matrices before the x: F x and H x. Here both are 1. Here is the filter as a
# loop. It predicts, then it corrects the prediction by a part of the error: the gain.


def filter_loop(y, Q, R, mean, variance):
    means, variances = [], []
    for t, measured in enumerate(y):
        if t > 0:
            variance = variance + Q  # a year has passed
        gain = variance / (variance + R)
        mean = mean + gain * (measured - mean)
        variance = (1 - gain) * variance
        means.append(mean), variances.append(variance)
    return torch.tensor(means), torch.tensor(variances)


# %%
# ``kalman_filter`` takes the matrices and what is known before the first measurement: nothing,
# which is a very large variance.


def matrix(value):
    return torch.as_tensor(value, dtype=torch.float64).reshape(1, 1)


one, start, vague = matrix(1.0), torch.zeros(1, dtype=torch.float64), matrix(1e7)
y = flow[:, None]  # [time, measurements]

mean, covariance, log_likelihood = kalman_filter(
    y, one, one, matrix(1000.0), matrix(10000.0), start, vague
)
wanted_mean, wanted_variance = filter_loop(flow, 1000.0, 10000.0, 0.0, 1e7)
assert torch.allclose(mean[:, 0], wanted_mean.double(), rtol=1e-5)
assert torch.allclose(covariance[:, 0, 0], wanted_variance.double(), rtol=1e-5)
print(f"log-likelihood {float(log_likelihood):.2f}")

# %%
# How can this be a scan? A year takes one bell curve to another. Two years in a row do that as
# well, and what they do together can be written down in five numbers. (For larger models these are
# three matrices and two vectors.) That is the element of ``ops.kalman``.
#
# How noisy is the river?
# -----------------------
#
# Q = 1000 and R = 10000 were guesses. The filter says how probable the measurements are under a
# guess, and its gradient says how to make a better one. So let it search. Variances are positive:
# search their logarithms.

logs = torch.tensor([1000.0, 10000.0], dtype=torch.float64).log().requires_grad_()
search = torch.optim.LBFGS([logs], max_iter=50, line_search_fn="strong_wolfe")


def surprise():
    search.zero_grad()
    Q, R = logs.exp().view(2, 1, 1)
    loss = -kalman_filter(y, one, one, Q, R, start, vague).log_likelihood
    loss.backward()
    return loss


search.step(surprise)
Q, R = logs.detach().exp().tolist()
print(f"Q = {Q:.0f}, R = {R:.0f}")

# %%
# The textbook on these models, by Durbin and Koopman, finds 1469.1 and 15099 for the same data.

assert abs(Q / 1469.1 - 1) < 0.01 and abs(R / 15099 - 1) < 0.01

# %%
# Then and now
# ------------
#
# The filter knows the past only. The smoother walks back from the end and adds what later years
# tell about earlier ones. It needs nothing but the results of the filter.

model = one, one, matrix(Q), matrix(R), start, vague
filtered = kalman_filter(y, *model)
smoothed = rts_smoother(filtered.mean, filtered.covariance, one, matrix(Q))


def smoother_loop(means, variances, Q):
    mean, variance = means[-1], variances[-1]
    smooth = [(mean, variance)]
    for t in reversed(range(len(means) - 1)):
        gain = variances[t] / (variances[t] + Q)
        mean = means[t] + gain * (mean - means[t])
        variance = variances[t] + gain**2 * (variance - variances[t] - Q)
        smooth.insert(0, (mean, variance))
    return torch.tensor(smooth, dtype=torch.float64).T


wanted = smoother_loop(filtered.mean[:, 0].tolist(), filtered.covariance[:, 0, 0].tolist(), Q)
assert torch.allclose(smoothed.mean[:, 0], wanted[0])
assert torch.allclose(smoothed.covariance[:, 0, 0], wanted[1])


def draw(axes, result, color, name):
    middle, spread = result.mean[:, 0], 1.645 * result.covariance[:, 0, 0].sqrt()
    axes.fill_between(years, middle - spread, middle + spread, color=color, alpha=0.2, linewidth=0)
    axes.plot(years, middle, color=color, label=name)
    axes.set(xlim=(1870, 1971), ylim=(400, 1400), ylabel="flow, 10⁸ m³")
    axes.legend(frameon=False, fontsize=8, loc="upper right")
    axes.spines[["top", "right"]].set_visible(False)


figure, rows = plt.subplots(2, figsize=(8, 5), sharex=True, layout="constrained")
for axes, result, color, name in (
    (rows[0], filtered, "C1", "filter: from the years until then"),
    (rows[1], smoothed, "C0", "smoother: from all years"),
):
    axes.plot(years, flow, ".", color="0.6")
    draw(axes, result, color, name)
rows[1].set(xlabel="year")
plt.show()

# %%
# The bands hold the level with a probability of 90 %. The smoother's is narrower everywhere but in
# the last year, where there is nothing more to know.

assert bool((smoothed.covariance[:-1] < filtered.covariance[:-1]).all())
assert torch.equal(smoothed.mean[-1], filtered.mean[-1])

# %%
# Lost years
# ----------
#
# Tear out some pages of the book: 1891 to 1910, and 1931 to 1950. A year that was not measured is
# NaN.

torn = flow.clone()
torn[20:40] = torn[60:80] = torch.nan
guessed = kalman_filter(torn[:, None], *model)
restored = rts_smoother(guessed.mean, guessed.covariance, one, matrix(Q))

hidden = torn.isnan()
off = (flow - restored.mean[:, 0])[hidden]
spread = (restored.covariance[:, 0, 0] + R).sqrt()[hidden]
inside = float((off.abs() < 1.645 * spread).double().mean())
print(f"{inside:.0%} of the hidden years lie where 90 % should")
assert 0.75 < inside <= 1.0

figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
axes.plot(years[~hidden], flow[~hidden], ".", color="0.4", label="measured")
axes.plot(years[hidden], flow[hidden], "x", color="0.7", markersize=4, label="hidden from it")
draw(axes, restored, "C0", "smoother")
axes.set(xlabel="year")
plt.show()

# %%
# When did the river change?
# --------------------------
#
# Something happened about 1900. Was it a slow drift, or one step? And in which year?
#
# Take a model with two states, the level and the size of one step, neither of which wanders. Before
# the year of the step the measurement is the level. From that year on it is the level plus the
# step: H is (1, 0) first, then (1, 1). Which year fits best? Try them all: a batch of models, one
# call.

candidates = years[1:]
after = (years >= candidates[:, None]).double()  # [candidates, time]
H = torch.stack([torch.ones_like(after), after], -1).unsqueeze(-2)
print(tuple(H.shape))

still, eye = torch.zeros(2, 2, dtype=torch.float64), torch.eye(2, dtype=torch.float64)
stepped = kalman_filter(
    y.expand(len(candidates), -1, -1), eye, H, still, matrix(R), start.expand(2), 1e7 * eye
)
weight = stepped.log_likelihood.softmax(0)
best = int(weight.argmax())
print(f"{int(candidates[best])}, with {float(weight[best]):.0%} of the probability")
assert candidates[best] == 1899

# %%
# The level never changes here but for the step, so that each model is an ordinary fit of two means.
# A plain sum checks it.

level, step = stepped.mean[best, -1]
assert torch.allclose(level, flow[years < 1899].mean(), rtol=1e-3)
assert torch.allclose(level + step, flow[years >= 1899].mean(), rtol=1e-3)

figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
axes.plot(years, flow, ".", color="0.6")
axes.step(years, torch.where(years < 1899, level, level + step), where="mid", color="C3")
axes.set(xlabel="year", ylabel="flow, 10⁸ m³", xlim=(1870, 1971), ylim=(0, 1450))
axes.spines[["top"]].set_visible(False)
odds = axes.twinx()
odds.bar(candidates, weight, color="C0", width=0.9)
odds.set(ylim=(0, 3), yticks=[0, 0.5, 1])
odds.set_ylabel("probability of a step here", color="C0", fontsize=8)
odds.spines[["top"]].set_visible(False)
plt.show()

# %%
# It was one step, in 1899. In that year work on the first dam at Aswan began. Whether it was the
# dam or the weather, no filter can say.
