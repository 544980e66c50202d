"""
Your own operator
=================

What is the longest dry spell? How deep was the worst fall? Is every bracket closed? Each of these
is a loop that keeps a few numbers and changes them at every step. Loops like that are slow in
Python, and a GPU cannot run them in parallel at all.

Most of them are scans in disguise. This page shows how to find the scan, in three examples, and how
to check that you found it.
"""

import inspect

import matplotlib.pyplot as plt
import torch

import assocscan
from assocscan import MonoidError, associative_scan, monoid
from assocscan.cli.data import nile, sunspots

# %%
# The longest run
# ---------------
#
# A month is quiet if fewer than 20 sunspots were counted. What is the longest run of quiet months?
# Here is the loop.


def longest_run_loop(quiet):
    run = longest = 0
    for q in quiet.tolist():
        run = run + 1 if q else 0
        longest = max(longest, run)
    return longest


years, spots = sunspots()
quiet = spots < 20
print(longest_run_loop(quiet), "months")

# %%
# To do it in parallel, cut the series in two and give each half to a friend. Each may tell you only
# a few numbers about their half. Which numbers do you need?
#
# The longest run of each half is not enough: a run may cross the cut. Such a run is made of the
# quiet months that *end* the left half and of those that *begin* the right one. So ask for these
# too. And the run that begins a half may be the whole of it, so ask for the length.
#
# Four numbers: length, run at the beginning, run at the end, longest. They are called the
# **element**. Now write down how to join two.


@monoid(
    identity=(0, 0, 0, 0), lift=lambda q: (torch.ones_like(q, dtype=torch.int64), *[q.long()] * 3)
)
def longest_run(left, right):
    length1, begin1, end1, longest1 = left
    length2, begin2, end2, longest2 = right
    begin = torch.where(begin1 == length1, length1 + begin2, begin1)
    end = torch.where(end2 == length2, length2 + end1, end2)
    longest = torch.maximum(torch.maximum(longest1, longest2), end1 + begin2)
    return length1 + length2, begin, end, longest


# %%
# ``left`` is the earlier stretch, ``right`` the later one. Two more things are said beside the
# function:
#
# - ``lift`` makes an element of one input. One quiet month is a run of length 1, any other of 0.
# - ``identity`` is the element of an empty stretch. Joined with another it changes nothing.
#
# That is all. The scan joins months to stretches and stretches to longer ones, in parallel.

length, begin, end, longest = associative_scan(longest_run, quiet)
print(int(longest[-1]), "months")
assert int(longest[-1]) == longest_run_loop(quiet)
assert all(int(longest[t]) == longest_run_loop(quiet[: t + 1]) for t in range(0, 3120, 311))

# %%
# A scan gives the answer for every beginning of the series, not for the whole alone. ``end`` is the
# run that every month stands in: here it is drawn below the sunspots.

figure, (above, below) = plt.subplots(
    2, figsize=(8, 4), sharex=True, layout="constrained", height_ratios=(2, 1)
)
above.plot(years, spots, color="0.6", linewidth=0.6)
above.axhline(20, color="C3", linewidth=0.8)
above.set(ylabel="sunspots", ylim=(0, None), xlim=(1749, 2009))
below.fill_between(years, end, color="C0", linewidth=0, label="months of quiet so far")
below.plot(years, longest, color="C3", linewidth=1, label="longest until then")
below.set(xlabel="year", ylabel="months", ylim=(0, None))
below.legend(frameon=False, loc="center right", fontsize=8)
for axes in (above, below):
    axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %%
# The longest run ended in 1813. Astronomers call those decades of weak cycles the Dalton minimum.
#
# Check it
# --------
#
# A scan may cut the series anywhere. It is right only if the cuts do not matter, that is, if
# joining is *associative*: (a ∘ b) ∘ c is a ∘ (b ∘ c). You need not prove that. ``check`` tries it
# on many elements, and tries the identity as well. ``samples`` are the elements to try: here those
# of the first months, of which some are long and some are short.

longest_run.check(torch.tensor(True), samples=associative_scan(longest_run, quiet[:300]))

# %%
# What does it say of a mistake? A popular one is the mean of two means. It looks harmless.


@monoid
def mean_of_means(left, right):
    return (left + right) / 2


try:
    mean_of_means.check(torch.tensor(0.0))
except MonoidError as error:
    print(error)
else:
    raise AssertionError("check found nothing")

# %%
# The remedy is the same as above: ask what the past must tell the future. A mean alone does not say
# how many numbers it stands for. With a sum and a count the operator is right. ``lower`` divides
# them at the end: it makes the output of the element, as ``lift`` makes the element of the input.


@monoid(
    identity=(0.0, 0.0),
    lift=lambda x: (x, torch.ones_like(x)),
    lower=lambda state: state[0] / state[1],
)
def running_mean(left, right):
    return left[0] + right[0], left[1] + right[1]


running_mean.check(torch.tensor(0.0))
_, flow = nile()
means = associative_scan(running_mean, flow)
assert torch.allclose(means, torch.stack([flow[: t + 1].mean() for t in range(100)]))

# %%
# The deepest fall
# ----------------
#
# Somebody buys at one time and sells later. What is the worst that could have happened? That is the
# largest fall from an earlier value to a later one; in finance it is called the drawdown.
#
# Cut the series again. The worst fall lies in the left half, or in the right half, or it leads from
# the peak of the left half to the trough of the right one. So the element is: highest, lowest,
# worst fall.


@monoid(
    identity=(-torch.inf, torch.inf, 0.0),
    lift=lambda x: (x, x, torch.zeros_like(x)),
    lower=lambda state: state[2],
)
def worst_fall(left, right):
    high1, low1, fall1 = left
    high2, low2, fall2 = right
    fall = torch.maximum(torch.maximum(fall1, fall2), high1 - low2)
    return torch.maximum(high1, high2), torch.minimum(low1, low2), fall


worst_fall.check(torch.tensor(0.0))


def worst_fall_loop(x):
    high, fall = x[0], 0.0
    for value in x:
        high = max(high, value)
        fall = max(fall, high - value)
    return fall


falls = associative_scan(worst_fall, flow)
assert float(falls[-1]) == worst_fall_loop(flow.tolist())
print(f"the Nile fell by up to {float(falls[-1]):.0f} · 10⁸ m³")

# %%
# The gradient comes with it. It says which years the answer hangs on: the peak and the trough, and
# no other.

leaf = flow.clone().requires_grad_()
associative_scan(worst_fall, leaf)[-1].backward()
first, last = leaf.grad.nonzero().flatten().tolist()
years_of_nile, _ = nile()
print(f"from {int(years_of_nile[first])} to {int(years_of_nile[last])}")
assert leaf.grad[first] == 1 and leaf.grad[last] == -1
assert (flow[first] - flow[last]).item() == falls[-1].item()

# %%
# Brackets
# --------
#
# The last example is about text. Is ``(a(b))`` balanced? A counter answers that: up at every
# opening bracket, down at every closing one, never below 0. "Never below" is what makes it more
# than a sum.
#
# Cut the text in two, and remove all matching pairs from each half. What can remain? Only something
# like ``)))((``: closing brackets, then opening ones. Two numbers describe it. Joining two halves
# lets the opening brackets of the left one match the closing ones of the right.


@monoid(identity=(0, 0), lift=lambda x: ((x < 0).to(x.dtype), (x > 0).to(x.dtype)))
def matching(left, right):
    closing1, opening1 = left
    closing2, opening2 = right
    pairs = torch.minimum(opening1, closing2)
    return closing1 + closing2 - pairs, opening1 + opening2 - pairs


matching.check(torch.tensor(0), samples=(torch.arange(50) % 7, torch.arange(50) % 5))

# %%
# Without ``samples``, ``check`` draws inputs and lifts them, which are single brackets here. The
# samples are longer texts, of up to six closing and four opening brackets.
#
# Some real text is at hand: the source of the scan itself.

text = inspect.getsource(assocscan.associative_scan)
x = torch.tensor([text.count("(", t, t + 1) - text.count(")", t, t + 1) for t in range(len(text))])
closing, depth = associative_scan(matching, x)


def depths_loop(x):
    depth, unmatched, depths = 0, 0, []
    for step in x.tolist():
        if step < 0 and depth == 0:
            unmatched += 1
        else:
            depth += step
        depths.append(depth)
    return depths, unmatched


wanted, unmatched = depths_loop(x)
assert depth.tolist() == wanted and int(closing[-1]) == unmatched
print(
    f"{len(text)} characters, {int(depth.max())} deep,", "balanced" if unmatched == 0 else "broken"
)

broken = torch.tensor([1, -1, -1, 1, 1, -1])  # ())(()
closing, depth = associative_scan(matching, broken)
assert (depth.tolist(), int(closing[-1])) == depths_loop(broken)

# %%
# How to find one for your problem
# --------------------------------
#
# 1. Write the loop first, and keep it: it is your test.
# 2. Cut the input in two. Ask what the left half must tell about itself so that the right half can
#    go on. Ask the same of the right half. These numbers are the element.
# 3. Write how two elements join. If something is missing there, add it to the element and repeat.
# 4. The element of one input is ``lift``. The element of nothing is ``identity``. What you wanted
#    to know is ``lower``.
# 5. Run ``check``, and compare with the loop.
#
# There is a way that always ends in something right. A loop turns one state into the next, so every
# input *is* a function from state to state, and functions can be joined: do the left one, then the
# right one. Composition is always associative. The question is only whether the composed function
# can be written down in a few numbers. For ``h → a·h + b`` it can: two numbers, however long the
# series is. The next page is about those.
