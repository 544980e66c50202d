"""A small Mamba language model, and settings and text for it and for that of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from assocscan.nn import Mamba

VOCABULARY, FEATURES = 13, 12


def config(**options: Any) -> Any:
    from transformers import MambaConfig

    return MambaConfig(
        **{
            "vocab_size": VOCABULARY, "hidden_size": FEATURES, "num_hidden_layers": 2,
            "state_size": 4, "time_step_rank": 3, "conv_kernel": 3, "pad_token_id": 0,
            "bos_token_id": 0, "eos_token_id": 0, **options,
        }
    )  # fmt: skip


def counterpart(settings: Any, **options: Any) -> Mamba:
    return Mamba(
        settings.hidden_size, settings.state_size, settings.expand, settings.conv_kernel,
        settings.time_step_rank, settings.use_bias, settings.use_conv_bias, **options,
    )  # fmt: skip


class Block(nn.Module):
    """As those of transformers: y = x + mixer(norm(x))."""

    def __init__(self, settings: Any) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(settings.hidden_size, settings.layer_norm_epsilon)
        self.mixer = counterpart(settings)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.mixer(self.norm(x))[0]
        return y


class LanguageModel(nn.Module):
    """With the parameter names of transformers' `MambaForCausalLM`, and tied embeddings."""

    def __init__(self, settings: Any) -> None:
        super().__init__()
        self.backbone = nn.Module()
        self.backbone.embeddings = nn.Embedding(settings.vocab_size, settings.hidden_size)
        self.backbone.layers = nn.ModuleList(
            Block(settings) for _ in range(settings.num_hidden_layers)
        )
        self.backbone.norm_f = nn.RMSNorm(settings.hidden_size, settings.layer_norm_epsilon)
        self.lm_head = nn.Linear(settings.hidden_size, settings.vocab_size, bias=False)
        self.lm_head.weight = self.backbone.embeddings.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.backbone.embeddings(tokens)
        for layer in self.backbone.layers:
            x = layer(x)
        logits: Tensor = self.lm_head(self.backbone.norm_f(x))
        return logits


def losses(model: nn.Module, batches: list[Tensor]) -> list[float]:
    """Of some steps of Adam, each on the next batch (tokens on the device of the model)."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    found = []
    for tokens in batches:
        output = model(tokens[:, :-1])
        logits = output if isinstance(output, Tensor) else output.logits
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def text(count: int) -> list[Tensor]:
    """Batches of sequences that count up, each by its own step: what comes next can be learnt."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(count):
        start = torch.randint(0, VOCABULARY, (4, 1), generator=generator)
        step = torch.randint(1, 4, (4, 1), generator=generator)
        found.append((start + step * torch.arange(18)) % VOCABULARY)
    return found
