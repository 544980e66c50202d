"""A character-level Hawk language model, trained on the language reference that Python ships.

    python docs/examples/hawk_characters.py

The text is `pydoc_data.topics`, which `help("if")` prints from, some 460 000 characters of which
the last tenth is held out. The model is Hawk's: blocks of a gated linear recurrence and of an MLP,
each behind a normalisation, with residuals. The script writes its loss curve as CSV (and as PNG
where matplotlib is installed) and then continues a prompt, one character at a time, each from the
state that the one before left. S. De et al., "Griffin", arXiv 2402.19427.
"""

from __future__ import annotations

import argparse
import csv
import math
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from assocscan.nn import Hawk, NormLinearGELU
from assocscan.nn.hawk import HawkState

FEATURES, WIDTH, HEADS, BLOCKS = 96, 128, 4, 2
BATCH, LENGTH = 16, 128
PEAK_RATE, WARMUP = 4e-3, 30
EVERY = 25  # steps between two points of the curve


class HawkModel(nn.Module):
    """Characters [B, L] → logits of the next character [B, L, characters], and the states."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, FEATURES)
        self.mixers = nn.ModuleList(Hawk(FEATURES, WIDTH, HEADS) for _ in range(BLOCKS))
        self.mlps = nn.ModuleList(
            nn.Sequential(
                NormLinearGELU(FEATURES, 3 * FEATURES, approximate="tanh"),
                nn.Linear(3 * FEATURES, FEATURES),
            )
            for _ in range(BLOCKS)
        )
        self.norm = nn.LayerNorm(FEATURES)
        self.head = nn.Linear(FEATURES, characters)

    def forward(
        self, characters: Tensor, states: list[HawkState] | None = None
    ) -> tuple[Tensor, list[HawkState]]:
        x, left = self.embedding(characters), []
        for k, (mixer, mlp) in enumerate(zip(self.mixers, self.mlps, strict=True)):
            y, state = mixer(x, None if states is None else states[k])
            left.append(state)
            x = x + y
            x = x + mlp(x)
        return self.head(self.norm(x)), left


class Text:
    """The text as numbers, split into a part to learn from and one to test on."""

    def __init__(self, device: torch.device) -> None:
        text = "\n".join(topics[name] for name in sorted(topics))
        self.characters = sorted(set(text))
        number = {c: k for k, c in enumerate(self.characters)}
        everything = torch.tensor([number[c] for c in text], device=device)
        cut = len(everything) * 9 // 10
        self.training, self.held_out = everything[:cut], everything[cut:]

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Random stretches of the training part, and the same one character on."""
        last = len(self.training) - LENGTH - 1
        starts = torch.randint(last, (BATCH, 1), generator=generator).to(self.training.device)
        places = starts + torch.arange(LENGTH + 1, device=starts.device)
        stretch = self.training[places]
        return stretch[:, :-1], stretch[:, 1:]

    def decode(self, numbers: list[int]) -> str:
        return "".join(self.characters[n] for n in numbers)

    def unigram_bits(self) -> float:
        """Bits per held-out character of a model that knows frequencies only."""
        counts = torch.bincount(self.training, minlength=len(self.characters)) + 1.0
        return float(-(counts / counts.sum()).log2()[self.held_out].mean())


def bits(model: HawkModel, characters: Tensor, targets: Tensor) -> Tensor:
    """Mean bits per character."""
    logits, _ = model(characters)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / math.log(2)


@torch.no_grad()
def held_out_bits(model: HawkModel, text: Text, stretches: int = 32) -> float:
    """Bits per character on the start of the held-out part."""
    block = text.held_out[: stretches * LENGTH + 1]
    return float(bits(model, block[:-1].view(stretches, -1), block[1:].view(stretches, -1)))


def train(model: HawkModel, text: Text, steps: int) -> list[tuple[int, float, float]]:
    """(step, training bits, held-out bits), averaged over the steps since the last."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda s: min((s + 1) / WARMUP, 0.5 + 0.5 * math.cos(math.pi * min(s / steps, 1.0))),
    )
    curve, recent, start = [], [], time.perf_counter()
    for step in range(1, steps + 1):
        loss = bits(model, *text.batch(generator))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        recent.append(loss.detach())
        if step % EVERY == 0 or step == steps:
            point = step, float(torch.stack(recent).mean()), held_out_bits(model, text)
            curve.append(point)
            recent.clear()
            seconds = time.perf_counter() - start
            print("step {:5}  training {:.3f}  held out {:.3f} bits".format(*point), end="")
            print(f"  {seconds:6.1f} s", flush=True)
    return curve


@torch.no_grad()
def continued(model: HawkModel, text: Text, prompt: str, count: int) -> str:
    """The prompt and `count` characters drawn after it, each from the state before it."""
    device = text.training.device
    generator = torch.Generator().manual_seed(2)
    numbers = [text.characters.index(c) for c in prompt]
    logits, states = model(torch.tensor([numbers], device=device))
    for _ in range(count):
        odds = F.softmax(logits[0, -1].float().cpu() / 0.7, -1)
        numbers.append(int(torch.multinomial(odds, 1, generator=generator)))
        logits, states = model(torch.tensor([[numbers[-1]]], device=device), states)
    return text.decode(numbers)


def save(folder: Path, curve: list[tuple[int, float, float]], unigram: float) -> None:
    """The curve as CSV, and as PNG where matplotlib is installed."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "hawk_characters.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "training_bits", "held_out_bits"])
        writer.writerows([step, f"{a:.4f}", f"{b:.4f}"] for step, a, b in curve)
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(4.5, 3), layout="constrained")
    steps = [point[0] for point in curve]
    axis.plot(steps, [point[1] for point in curve], label="training")
    axis.plot(steps, [point[2] for point in curve], label="held out")
    axis.axhline(unigram, color="0.6", linestyle="--", linewidth=1)
    axis.annotate("frequencies of characters", (steps[-1], unigram), ha="right", va="bottom",
                  fontsize=7, color="0.4")  # fmt: skip
    axis.set(xlabel="step", ylabel="bits per character", ylim=(0, None))
    axis.legend(frameon=False, fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(folder / "hawk_characters.png", dpi=160)
    plt.close(figure)


def main(argv: list[str] | None = None) -> float:
    """Train, save the curve, continue a prompt; return the held-out bits per character."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    device = torch.device(options.device)
    text = Text(device)
    model = HawkModel(len(text.characters)).to(device)
    unigram = text.unigram_bits()
    size = sum(p.numel() for p in model.parameters())
    print(f"{len(text.training)} characters, {size} parameters, by frequencies {unigram:.3f} bits")
    curve = train(model, text, options.steps)
    save(options.out, curve, unigram)
    print(continued(model, text, "The class statement ", 300))
    return curve[-1][2]


if __name__ == "__main__":
    main()
