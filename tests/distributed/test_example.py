"""The example that trains a Hawk model with the sequence over ranks."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from ranks import Rank, World
from repository import ROOT

EXAMPLES = ROOT / "docs" / "examples"


def check_training(world: Rank) -> None:
    sys.path.insert(0, str(EXAMPLES))  # where the script's own import looks
    import hawk_characters
    import hawk_over_ranks

    sizes = {"FEATURES": 16, "WIDTH": 16, "LENGTH": 10, "BATCH": 4}
    for name, value in sizes.items():
        setattr(hawk_characters, name, value)
    torch.manual_seed(0)
    text = hawk_characters.Text(torch.device("cpu"))
    model = hawk_over_ranks.HawkOverRanks(len(text.characters)).double()
    alone = copy.deepcopy(model)
    over_ranks = hawk_over_ranks.train(model, text, 6, world.group)
    # float64, six steps of a rate of 4e-3: rounding stays far below what a wrong gradient changes.
    assert over_ranks == pytest.approx(hawk_over_ranks.train(alone, text, 6), rel=1e-9)
    assert over_ranks[-1] < over_ranks[0]


@pytest.mark.exhaustive
@pytest.mark.skipif(not EXAMPLES.exists(), reason="not in a checkout")
def test_training_over_ranks_is_training(world: World) -> None:
    world.run(check_training, 3)
