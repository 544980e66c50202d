"""A Hawk language model trained with the sequence over the ranks of a process group.

    torchrun --nproc-per-node 2 docs/examples/hawk_over_ranks.py

The model and the text are those of `hawk_characters.py`. Every rank has all parameters and, of each
stretch of text, a consecutive part: the recurrences and the convolutions carry on where the rank
before ended. The gradients of the parameters are summed over the ranks. The script trains the same
model once more on rank 0 alone, from the same numbers, and prints both losses.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
from typing import Any

import torch
import torch.distributed as dist
from hawk_characters import LENGTH, PEAK_RATE, HawkModel, Text
from torch import Tensor, nn
from torch.nn import functional as F


class HawkOverRanks(HawkModel):
    """`HawkModel` whose characters [B, L of this rank] are this rank's part of a sequence."""

    def logits(self, characters: Tensor, group: Any) -> Tensor:
        """The logits of the next character, at the positions of this rank."""
        x = self.embedding(characters)
        for mixer, mlp in zip(self.mixers, self.mlps, strict=True):
            x = x + mixer(x, group=group)[0]
            x = x + mlp(x)
        return self.head(self.norm(x))


def train(model: HawkOverRanks, text: Text, steps: int, group: Any = None) -> list[float]:
    """The loss of every step, in bits per character of the whole sequence.

    group: of the ranks over which sequences are cut; None: one process has the whole.
    """
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE)
    losses = []
    for _ in range(steps):
        characters, targets = text.batch(generator)  # the same on every rank
        count = targets.numel()
        if group is not None:
            characters, targets = (
                t.tensor_split(dist.get_world_size(group), 1)[dist.get_rank(group)]
                for t in (characters, targets)
            )
        logits = model.logits(characters, group)
        # This rank's share of the mean: the shares of all ranks add up to the loss.
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / count
        optimizer.zero_grad()
        loss.backward()
        total = loss.detach()
        if group is not None:
            for t in (total, *(p.grad for p in model.parameters())):
                dist.all_reduce(t, group=group)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(total) / math.log(2))
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    torch.manual_seed(0)
    text = Text(device)
    model = HawkOverRanks(len(text.characters)).to(device)
    alone = copy.deepcopy(model)
    over_ranks = train(model, text, options.steps, dist.group.WORLD)
    if dist.get_rank() == 0:
        print(f"{LENGTH} characters over {dist.get_world_size()} ranks")
        one_process = train(alone, text, options.steps)
        for step in range(0, options.steps, max(options.steps // 6, 1)):
            print(f"step {step:4}  over ranks {over_ranks[step]:.5f}  "
                  f"one process {one_process[step]:.5f} bits")  # fmt: skip
        print(f"last       over ranks {over_ranks[-1]:.5f}  one process {one_process[-1]:.5f} bits")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
