"""
Reading a file in parallel: a state machine as a scan
=====================================================

A comma ends a field of a CSV file, unless it stands in quotes. Whether it does depends on all that
came before, back to the beginning of the file. So a reader must go one character at a time.

Must it? This page reads a CSV file all at once, and then its numbers too.
"""

import csv
import io
from importlib.resources import files
from pydoc_data.topics import topics

import matplotlib.pyplot as plt
import torch

from assocscan import associative_scan, cumsum, ops, reduce, segmented, with_lower
from assocscan.cli.data import sunspots

# %%
# The machine
# -----------
#
# Three states are enough. In state 0 we are outside of quotes, in state 1 inside. Inside, a quote
# may be the end, or the first of two that stand for one: that is state 2. The next character
# decides.
#
# A table says what follows each state (across) on each kind of character (down).

OUTSIDE, INSIDE, QUOTE = 0, 1, 2
OTHER, MARK, COMMA, NEWLINE = 0, 1, 2, 3
follows = torch.tensor(
    [
        [OUTSIDE, INSIDE, OUTSIDE],  # any other character
        [INSIDE, QUOTE, INSIDE],  # "
        [OUTSIDE, INSIDE, OUTSIDE],  # ,
        [OUTSIDE, INSIDE, OUTSIDE],  # end of line
    ]
)
kind_of = torch.zeros(256, dtype=torch.int64)
kind_of[ord('"')], kind_of[ord(",")], kind_of[ord("\n")] = MARK, COMMA, NEWLINE


def as_bytes(text):
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


def states_loop(kinds):
    state, states = OUTSIDE, []
    for kind in kinds.tolist():
        state = int(follows[kind, state])
        states.append(state)
    return states


# %%
# The trick: do not ask in which state we are. Ask what a character does to *every* state. A quote
# takes (0, 1, 2) to (1, 2, 1). Such a row of the table is a function, and functions can be joined:
# first the left one, then the right one. Joining is associative, and that is all a scan needs.
#
# ``ops.finite_state`` joins them. Its input is the row of each character.

text = 'Nile,"Aswan, Egypt","he said ""wet"""\n'
kinds = kind_of[as_bytes(text)]
maps = associative_scan(ops.finite_state, follows[kinds])
states = maps[:, OUTSIDE]  # of a machine that starts outside
assert states.tolist() == states_loop(kinds)

figure, axes = plt.subplots(figsize=(8, 1.9), layout="constrained")
colors = torch.tensor([[0.9, 0.9, 0.9], [0.6, 0.78, 0.9], [1.0, 0.75, 0.45]])
axes.imshow(colors[maps.T], aspect="auto")
for t, c in enumerate(text.rstrip("\n")):
    axes.text(t, -0.9, c, ha="center", va="center", family="monospace", fontsize=9)
axes.text(-0.7, -0.9, "text", ha="right", va="center", fontsize=9)
axes.set(xticks=[], yticks=range(3), yticklabels=["outside", "inside", "quote"])
axes.set(ylabel="if it starts", xlim=(-0.5, len(text) - 1.5))
axes.tick_params(length=0)
axes.spines[:].set_visible(False)
for name, color in zip(("outside", "inside", "quote"), colors.tolist(), strict=True):
    axes.plot([], [], "s", color=color, label=name)
axes.legend(frameon=False, fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.02))
plt.show()

# %%
# Every line of the picture is one column of the scan: what the machine does if it starts outside,
# or inside, or at a quote. A piece of the file can so be read before it is known how it begins.
#
# Fields
# ------
#
# Now a real file. Each row has the name of a page of Python's manual and a piece of its text, full
# of commas, quotes and line ends.

rows = [[name, topics[name][:300]] for name in sorted(topics)]
file = io.StringIO()
csv.writer(file, lineterminator="\n").writerows(rows)
data = as_bytes(file.getvalue())
kinds = kind_of[data]
states = associative_scan(ops.finite_state, follows[kinds])[:, OUTSIDE]
assert states.tolist() == states_loop(kinds)

# %%
# A comma or a line end outside of quotes ends a field. ``nonzero`` lists the places.

ends_field = (states == OUTSIDE) & ((kinds == COMMA) | (kinds == NEWLINE))
ends = ends_field.nonzero().flatten()
begins = torch.cat([torch.zeros(1, dtype=torch.int64), ends[:-1] + 1])
print(f"{len(data)} characters, {int((kinds == COMMA).sum())} commas, {len(ends)} fields")

raw = bytes(data.tolist())
fields = [raw[b:e].decode() for b, e in zip(begins.tolist(), ends.tolist(), strict=True)]
fields = [f[1:-1].replace('""', '"') if f.startswith('"') else f for f in fields]
wanted = [cell for row in csv.reader(io.StringIO(file.getvalue())) for cell in row]
assert fields == wanted == [cell for row in rows for cell in row]

# %%
# In which row and column does a character stand? Line ends before it, and commas since the last
# one.

new_line = (states == OUTSIDE) & (kinds == NEWLINE)
row = cumsum(new_line.long(), inclusive=False)
starts_line = torch.cat([torch.ones(1, dtype=torch.bool), new_line[:-1]])
comma = ((states == OUTSIDE) & (kinds == COMMA)).long()
column = associative_scan(segmented(ops.sum), (comma, starts_line))
assert int(row[-1]) == len(rows) - 1 and int(column.max()) == 1

# %%
# Numbers
# -------
#
# Reading a number is a recurrence: ten times what we had, plus the digit. Each number begins anew.
# Here is the file of sunspots that comes with the package, all 3120 rows of it.

sheet = files("assocscan.cli.data").joinpath("sunspots.csv").read_text().split("\n", 1)[1]
data = as_bytes(sheet)
is_digit = (data >= ord("0")) & (data <= ord("9"))
ends_field = (data == ord(",")) | (data == ord("\n"))
begins_field = torch.cat([torch.ones(1, dtype=torch.bool), ends_field[:-1]])

ten = torch.where(is_digit, 10, 1)  # a point changes nothing
digit = torch.where(is_digit, data - ord("0"), 0)
read = segmented(with_lower(ops.affine, lambda state: state[1]))
number = associative_scan(read, ((ten, digit), begins_field))

# %%
# The point is missing still. Count the digits since the point, and divide.

is_point = data == ord(".")
behind = associative_scan(segmented(ops.any), (is_point, begins_field))
places = associative_scan(segmented(ops.sum), ((behind & is_digit).long(), begins_field))
value = number.double() / 10.0**places

at_end = torch.cat([ends_field[1:], torch.zeros(1, dtype=torch.bool)])
cells = value[at_end].view(-1, 3)
years, spots = sunspots()
assert torch.equal(cells[:, 2], spots)
assert torch.allclose(cells[:, 0] + (cells[:, 1] - 0.5) / 12, years)
print(cells[:3].tolist())

# %%
# UTF-8
# -----
#
# The same works for any machine with few states. A character in UTF-8 has one to four bytes; the
# state is how many are still to come, and 4 is an error, from which nothing leads back.

BROKEN = 4
lead = torch.full((256,), 4)  # kind of byte: how it may begin or continue
lead[0x00:0x80], lead[0xC2:0xE0], lead[0xE0:0xF0], lead[0xF0:0xF5] = 0, 1, 2, 3
lead[0x80:0xC0] = 5
table = torch.full((6, 5), BROKEN)
table[0:4, 0] = torch.arange(4)  # a first byte, where one is due
table[5, 1:4] = torch.arange(3)  # a continuation, where one is due


def is_utf8(data):
    end = reduce(ops.finite_state, table[lead[data]])
    return int(end[0]) == 0


good = as_bytes("Größe, naïve, Ωμέγα, 水, 🌊")
assert is_utf8(good)
assert not is_utf8(good[:-1])  # the wave is cut off
assert not is_utf8(good[good != 0xC3])  # continuations without a beginning
first_bytes = (good & 0xC0) != 0x80
print(f"{len(good)} bytes, {int(first_bytes.sum())} characters")
assert int(first_bytes.sum()) == len("Größe, naïve, Ωμέγα, 水, 🌊")

# %%
# (A strict reader also refuses a few rare sequences, such as halves of pairs of UTF-16. That takes
# four more states and nothing else.)
