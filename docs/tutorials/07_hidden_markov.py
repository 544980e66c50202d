"""
Hidden Markov models: vowels, found by a machine
================================================

You get a long text in an unknown alphabet. Are there groups among its letters? In most languages
vowels and consonants take turns, more or less. A model with two hidden states should notice.

In 1913 Andrey Markov counted vowels and consonants in a poem by hand. This page lets the computer
find out which letters are which, without being told.
"""

from pydoc_data.topics import topics

import matplotlib.pyplot as plt
import torch

from assocscan import hmm_filter, hmm_smoother, viterbi

# %%
# The text
# --------
#
# It comes with Python. Only the letters are kept, no spaces. Six thousand of them are enough.

raw = "".join(topics[name] for name in sorted(topics)).lower()
alphabet = "abcdefghijklmnopqrstuvwxyz"
text = "".join(c for c in raw if c in alphabet)[20_000:26_000]
letters = torch.tensor([alphabet.index(c) for c in text])
print(text[:70])

# %%
# The model
# ---------
#
# At every letter the text is in one of two states. Three tables describe everything:
#
# - ``initial[i]``: how probable state i is at the beginning,
# - ``transition[i, j]``: how probable state j is after state i,
# - ``emission[i, c]``: how probable letter c is in state i.
#
# All are kept as logarithms. Given the tables, how probable is the text? The loop keeps, for each
# state, the probability of all text so far that ends in this state.


def evidence_loop(initial, transition, likelihood):
    message = initial + likelihood[0]
    for t in range(1, len(likelihood)):
        message = (message[:, None] + transition).logsumexp(0) + likelihood[t]
    return message.logsumexp(0)


torch.manual_seed(0)
start = torch.zeros(2, dtype=torch.float64).log_softmax(-1)
flip = torch.tensor([[0.3, 0.7], [0.7, 0.3]], dtype=torch.float64).log()
guess = torch.randn(2, 26, dtype=torch.float64).mul(0.3).log_softmax(-1)

filtered, evidence = hmm_filter(start, flip, guess[:, letters].T)
assert torch.allclose(evidence, evidence_loop(start, flip, guess[:, letters].T))
print(f"{float(-evidence) / len(text) / 0.6931:.2f} bits per letter")

# %%
# One step of the loop multiplies by a 2 × 2 matrix, in which sums of logarithms stand for products.
# Products of matrices may be bracketed as you like. So it is a scan.
#
# Learning the tables
# -------------------
#
# Make the text as probable as possible, by gradient. The letters start with random
# preferences; the states are only told to take turns more often than not.

tables = [flip.clone().requires_grad_(), guess.clone().requires_grad_()]
optimizer = torch.optim.Adam(tables, lr=0.1)
history = []
for _ in range(200):
    transition, emission = (table.log_softmax(-1) for table in tables)
    loss = -hmm_filter(start, transition, emission[:, letters].T).log_evidence / len(text)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append((emission[0] - emission[1]).detach().sigmoid())
transition, emission = (table.detach().log_softmax(-1) for table in tables)
print(f"{float(loss.detach()) / 0.6931:.2f} bits per letter")

# %%
# How does each letter choose its state? Here it is, step by step. Letters that are used fewer than
# ten times are left out.

paths = torch.stack(history)
vowel = int(paths[-1, alphabet.index("e")] < 0.5)  # the state that took the e
if vowel:
    paths = 1 - paths
common = [k for k in range(26) if int((letters == k).sum()) >= 10]

figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
ends = sorted(common, key=lambda k: float(paths[-1, k]))
for place, k in enumerate(ends):
    color = "C3" if alphabet[k] in "aeiou" else "C0"
    axes.plot(paths[:, k], color=color, linewidth=1)
    height = place / (len(ends) - 1)
    axes.plot([199, 211], [float(paths[-1, k]), height], color=color, linewidth=0.4)
    axes.text(213, height, alphabet[k], color=color, va="center", fontsize=9)
axes.set(xlabel="step of learning", ylabel="leans to the vowels' state", xlim=(0, 222))
axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %%
# The five vowels, in red, went to one side, and the y with them. The consonants went to the other.
# Nobody told the model what a vowel is. (Other stretches of text may misplace a rare letter.)

state = {alphabet[k]: float(paths[-1, k]) for k in common}
assert all(state[c] > 0.5 for c in "aeiou")
others = [state[c] for c in state if c not in "aeiouy"]
assert sum(s < 0.5 for s in others) >= 0.8 * len(others)

# %%
# Which state was it in?
# ----------------------
#
# The filter tells what the letters so far say of the state. All letters together say more. You get
# that for free: it is the gradient of the evidence. ``hmm_smoother`` gives its logarithm.

short = letters[:1000]
likelihood = emission[:, short].T.clone().requires_grad_()
filtered, evidence = hmm_filter(start, transition, likelihood)
evidence.backward()
smoothed = likelihood.grad
assert torch.allclose(smoothed.sum(-1), torch.ones(1000, dtype=torch.float64))
assert torch.allclose(smoothed[-1], filtered[-1].detach().exp())
assert torch.allclose(smoothed, hmm_smoother(start, transition, likelihood.detach()).exp())


def backward_loop(transition, likelihood):
    message, messages = torch.zeros(2, dtype=torch.float64), []
    for t in reversed(range(len(likelihood))):
        messages.insert(0, message)
        message = (transition + likelihood[t] + message).logsumexp(-1)
    return torch.stack(messages)


wanted = filtered.detach() + backward_loop(transition, likelihood.detach())
assert torch.allclose(smoothed, wanted.softmax(-1))

# %%
# The best path
# -------------
#
# ``viterbi`` gives the most probable *sequence* of states. In the loop a sum becomes a maximum, and
# it has to remember where each maximum came from.

path, log_probability = viterbi(start, transition, likelihood.detach())


def viterbi_loop(initial, transition, likelihood):
    best, came_from = initial + likelihood[0], []
    for t in range(1, len(likelihood)):
        best, where = (best[:, None] + transition).max(0)
        best = best + likelihood[t]
        came_from.append(where)
    path = [int(best.argmax())]
    for where in reversed(came_from):
        path.insert(0, int(where[path[0]]))
    return torch.tensor(path), best.max()


wanted_path, wanted_probability = viterbi_loop(start, transition, likelihood.detach())
assert torch.allclose(log_probability, wanted_probability)

# %%
# Two letters that are the same may take their states in either order, with the same probability. So
# paths are compared by what they weigh: the loop may have found the other one.


def weight(path):
    steps = transition[path[:-1], path[1:]].sum() + start[path[0]]
    return steps + likelihood.detach().gather(1, path[:, None]).sum()


assert torch.allclose(weight(path), weight(wanted_path))
print(f"{int((path != wanted_path).sum())} of {len(path)} states differ")

figure, rows = plt.subplots(3, figsize=(8, 3.2), layout="constrained")
for row, axes in enumerate(rows):
    span = slice(40 * row, 40 * row + 40)
    axes.step(range(40), smoothed[span, vowel], where="mid", color="0.6", linewidth=1)
    for t, c in enumerate(text[span]):
        chosen = int(path[span][t]) == vowel
        axes.text(t, 1.25, c, ha="center", fontweight="bold" if chosen else "normal",
                  color="C3" if chosen else "C0", family="monospace")  # fmt: skip
    axes.set(xlim=(-0.7, 39.7), ylim=(0, 1.7), xticks=[], yticks=[0, 1])
    axes.spines[["top", "right"]].set_visible(False)
rows[1].set_ylabel("probability of the vowels' state")
plt.show()

# %%
# The colours are the best path, the grey line is the smoothed probability.
