"""
Discounted returns and GAE: learning to balance a pole
======================================================

A reward comes late. The pole falls now because of a push two seconds ago. Reinforcement learning
has to carry rewards back to the actions that earned them. It does that with a sum from the end, in
which later rewards count less, and which stops where an episode ends.

That is a scan in reverse, with resets. This page uses it to teach a program to balance a pole.
"""

import math

import matplotlib.pyplot as plt
import torch
from torch import nn

from assocscan import discounted_returns, gae

# %%
# Returns
# -------
#
# The return of a step is its reward, plus a bit less than the return of the next step. ``done``
# says that an episode ends with this step: nothing comes back across it.

rewards = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 1.0])
done = torch.tensor([False, False, True, False, False, False])
print(discounted_returns(rewards, 0.5, done))

# %%
# The last episode was cut off while it ran. What it would still have earned can only be guessed.
# Pass the guess as ``bootstrap``.

later = torch.tensor(8.0)
print(discounted_returns(rewards, 0.5, done, bootstrap=later))


def returns_loop(rewards, discount, done, bootstrap):
    outputs, after = [], bootstrap
    for t in reversed(range(len(rewards))):
        after = rewards[t] + discount * torch.where(done[t], 0.0, after)
        outputs.insert(0, after)
    return torch.stack(outputs)


assert torch.allclose(
    discounted_returns(rewards, 0.5, done, later), returns_loop(rewards, 0.5, done, later)
)

# %%
# Often it is a time limit that cuts an episode, and the next one follows in the same row. Say so
# with ``truncated``, and pass the values of the states after the cuts as ``next_values``. They are
# read there alone. ``gae`` takes both as well, and so does ``vtrace``, for steps that an older
# policy took.

truncated = torch.tensor([False, False, False, False, True, False])
after_the_cut = torch.full((6,), 4.0)
with_cut = discounted_returns(
    rewards, 0.5, done, later, truncated=truncated, next_values=after_the_cut
)
assert torch.allclose(with_cut[3:5], returns_loop(rewards[3:5], 0.5, done[3:5], torch.tensor(4.0)))

# %%
# The pole
# --------
#
# A pole stands on a cart. Push the cart left or right, fifty times a second, so that the pole stays
# up. This is the cart-pole of Barto, Sutton and Anderson (1983), for many carts at once. A state is
# four numbers: place, speed, angle, and speed of the angle.


def push(state, right):
    """The next state, and where it is over: more than 12 degrees, or off the track."""
    _, speed, angle, turning = state.unbind(-1)
    sine, cosine = angle.sin(), angle.cos()
    force = torch.where(right, 10.0, -10.0)
    pull = (force + 0.05 * turning**2 * sine) / 1.1
    turn = (9.8 * sine - cosine * pull) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
    speed_up = pull - 0.05 * turn * cosine / 1.1
    change = torch.stack([speed, speed_up, turning, turn], -1)
    state = state + 0.02 * change
    over = (state[..., 0].abs() > 2.4) | (state[..., 2].abs() > 12 * math.pi / 180)
    return state, over


def fresh(carts):
    return 0.1 * torch.rand(carts, 4) - 0.05


# %%
# One small network looks at the state and gives two things: how much it wants to push right, and
# what it expects to earn from here on.


class Player(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.heads = nn.Linear(64, 2)
        nn.init.zeros_(self.heads.weight)

    def forward(self, state):
        wish, value = self.heads(self.body(state)).unbind(-1)
        return wish, 10 * value


@torch.no_grad()
def play(player, state, steps):
    """States [steps, carts, 4], pushes and ends [steps, carts], and the state after."""
    states, pushes, ends = [], [], []
    for _ in range(steps):
        right = torch.rand(len(state)) < player(state)[0].sigmoid()
        states.append(state), pushes.append(right)
        state, over = push(state, right)
        ends.append(over)
        state = torch.where(over[:, None], fresh(len(state)), state)
    return torch.stack(states), torch.stack(pushes), torch.stack(ends), state


# %%
# At first it pushes at random. Every step earns 1. The return of a step counts, roughly, how many
# steps are still to come; at the end of an episode it drops to 1 and the next one starts.

torch.manual_seed(0)
states, pushes, ends, _ = play(Player(), fresh(1), 150)
ones = torch.ones(150, 1)
returns = discounted_returns(ones, 0.99, ends, axis=0)

figure, (above, below) = plt.subplots(2, figsize=(8, 3.6), sharex=True, layout="constrained")
above.plot(states[:, 0, 2] * 180 / math.pi, color="C0")
above.set(ylabel="angle, degrees")
below.plot(returns[:, 0], color="C3")
below.set(xlabel="step", ylabel="return", xlim=(0, 150), ylim=(0, None))
for axes in (above, below):
    for t in ends[:, 0].nonzero().flatten().tolist():
        axes.axvline(t + 0.5, color="0.8", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
plt.show()

assert bool((returns[ends] == 1).all())

# %%
# Advantages
# ----------
#
# Was a push a good one? Compare what came with what was expected. The *surprise* of one step is ::
#
#     δ[t] = r[t] + γ · V[t+1] − V[t]
#
# One step sees only one reward; all steps to the end see a lot of chance. Generalised advantage
# estimation goes between: it adds up the surprises to come, each counting γλ times as much as the
# one before::
#
#     A[t] = δ[t] + γ · λ · A[t+1]
#
# With λ = 0 it believes the expectations, with λ = 1 only the rewards.


def gae_loop(rewards, values, bootstrap, discount, decay, done):
    outputs, after, value_after = [], torch.zeros_like(bootstrap), bootstrap
    for t in reversed(range(len(rewards))):
        going_on = 1.0 - done[t].float()
        surprise = rewards[t] + discount * going_on * value_after - values[t]
        after = surprise + discount * decay * going_on * after
        value_after = values[t]
        outputs.insert(0, after)
    return torch.stack(outputs)


shape = 200, 16
rewards, values, bootstrap = torch.randn(shape), torch.randn(shape), torch.randn(16)
done = torch.rand(shape) < 0.05
advantages = gae(rewards, values, bootstrap, 0.99, 0.95, done, axis=0)
wanted = gae_loop(rewards, values, bootstrap, 0.99, 0.95, done)
assert torch.allclose(advantages, wanted, atol=1e-4)

# %%
# With λ = 1 an advantage is a return less what was expected.

all_the_way = gae(rewards, values, bootstrap, 0.99, 1.0, done, axis=0)
returns = discounted_returns(rewards, 0.99, done, bootstrap, axis=0)
assert torch.allclose(all_the_way + values, returns, atol=1e-4)

# %%
# Learning
# --------
#
# Play 32 steps on 64 carts. Make pushes with a positive advantage more likely, the others less, and
# pull the expectations towards what came. Then play on.


def learn(decay, rounds=150, carts=64, steps=32):
    torch.manual_seed(1)
    player, state, lengths = Player(), fresh(carts), []
    optimizer = torch.optim.Adam(player.parameters(), lr=3e-3)
    for _ in range(rounds):
        states, pushes, ends, state = play(player, state, steps)
        wish, value = player(states)
        with torch.no_grad():
            expected = player(state)[1]
            rewards = torch.ones_like(value)
            advantage = gae(rewards, value, expected, 0.99, decay, ends, axis=0)
        target = advantage + value.detach()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
        likely = -nn.functional.binary_cross_entropy_with_logits(
            wish, pushes.float(), reduction="none"
        )
        surprise = ((value - target) / 10).square().mean()
        loss = -(advantage * likely).mean() + 0.5 * surprise
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(player.parameters(), 0.5)
        optimizer.step()
        lengths.append(carts * steps / max(int(ends.sum()), 1))
    return torch.tensor(lengths)


threads = torch.get_num_threads()
torch.set_num_threads(1)  # the network is small: a second thread would be in the way
curves = {decay: learn(decay) for decay in (0.0, 0.95, 1.0)}
torch.set_num_threads(threads)

for decay, lengths in curves.items():
    print(f"λ = {decay}: from {lengths[:5].mean():.0f} to {lengths[-20:].median():.0f} steps")

figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
for decay, lengths in curves.items():
    axes.semilogy(lengths, label=f"λ = {decay}")
axes.set(xlabel="round", ylabel="steps that a pole stands", xlim=(0, 150))
axes.legend(frameon=False, fontsize=8)
axes.spines[["top", "right"]].set_visible(False)
plt.show()

assert curves[0.95][-20:].median() > 5 * curves[0.95][:5].mean()

# %%
# A round has 2048 steps, so that more cannot be measured. With λ = 0 it believes expectations that
# are still wrong, and learns little. This is one run of each; another seed gives other curves.
