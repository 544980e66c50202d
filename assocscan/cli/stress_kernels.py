"""Small CUDA kernels for `python -m assocscan stress` (`litmus.cuh`, `hold_processors.cuh`): one
passes messages only, one holds multiprocessors."""

from __future__ import annotations

import struct

import torch

from ..cuda import launcher, workspace
from ..cuda.kernel import slot_bytes
from ..engines.base.device_properties import processors

PAIRS_SLOTS = 128 * 8


def program(template: str, words: int = 1) -> str:
    return (
        '#include "scalar.h"\n#include "device.cuh"\n#include "wait_for_slots.cuh"\n'
        f'constexpr int WORDS = {words};\n#include "{template}"\n'
    )


def message_passing(device: torch.device, words: int, launches: int) -> int:
    """The number of wrong words among all that blocks read from each other."""
    function = launcher.load(program("litmus.cuh", words), None, device)
    grid = processors(device) * function.blocks_per_processor // 2 * 2
    size = grid // 2 * PAIRS_SLOTS * slot_bytes(words)
    space = workspace.create(device, size)
    wrong = torch.zeros(4, dtype=torch.int32, device=device)
    parameters = struct.pack(
        "<5q", space.header, space.slots, wrong.data_ptr(), workspace.alarm(device), size
    )
    for _ in range(launches):
        function.launch(grid, parameters, [space.memory, wrong], True)
    return int(wrong[0])


def hold(device: torch.device, blocks: int, nanoseconds: int) -> None:
    """Start `blocks` blocks on the current stream; each occupies a multiprocessor for so many
    nanoseconds."""
    function = launcher.load(program("hold_processors.cuh"), None, device)
    function.launch(blocks, struct.pack("<q", nanoseconds), [], False)
