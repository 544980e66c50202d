"""Calls of the fused LayerNorm → Linear → GELU as programs of the C++ runner.

At a few hundred rows a call takes the time of its Python code. So a call that was made before is
given to the runner (`runtime/native`): allocations and launches, where a gradient is needed with
torch's LayerNorm in place of ours, and an autograd node whose backward is torch's operations, the
ones that backward of the unfused layer runs. What the runner leaves to Python is done by `backward`
here, and by the functions that are given with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...caching.bounded import Calls
from ...engines.base.commands import (
    Allocate,
    CallTorch,
    Description,
    SlotArgument,
    device_number,
)
from ...engines.base.scan_spec import MaybeTensor
from ...runtime.native import runner
from .checks import Operands
from .launch import (
    Kind,
    kinds_of,
    normal_step,
    precision,
    product_step,
    tile_for,
)
from .tiles import Tile

aten = torch.ops.aten
NODE = "NormLinearGELUBackward"
NAMES = Operands._fields
Unfused = Callable[..., Tensor]


class Layer(NamedTuple):
    """What is computed: all of a call but its tensors."""

    eps: float
    approximate: str
    tile: Tile | None
    unfused: Unfused  # the same by torch's operations


class Commands:
    """A list of commands in the making; a tensor is known by its slot."""

    def __init__(self, given: int, device: torch.device) -> None:
        self.slots = self.given = given
        self.device = device
        self.made: list[Description] = []
        self.calls: list[CallTorch] = []

    def slot(self) -> int:
        self.slots += 1
        return self.slots - 1

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        strides = torch.empty(tuple(shape), device="meta").stride()
        slot = self.slot()
        made = Allocate(slot, tuple(shape), strides, dtype, self.device)
        self.made.append(made.described(()))
        return slot

    def torch(self, function: Any, *arguments: Any, results: int = 1) -> Any:
        """Call a function of `torch.ops.aten`; arguments as in `CallTorch`."""
        slots = tuple([self.slot() for _ in range(results)])
        call = CallTorch(function, arguments, slots)
        self.made.append(call.described(()))
        self.calls.append(call)
        found = tuple([SlotArgument(slot) for slot in slots])
        return found[0] if results == 1 else found

    def program(self, results: Sequence[int]) -> Any:
        return runner.module.program(
            self.slots, self.given, device_number(self.device), (), tuple(self.made),
            tuple(results),
        )  # fmt: skip


def is_simple(tensors: Operands) -> bool:
    """Whether the kernels take the tensors as they lie: one dtype, aligned, in order."""
    x, gamma, beta, weight, bias = tensors
    if any(t is not None and t.dtype != x.dtype for t in tensors):
        return False
    if any(kind is not None and not kind[1] for kind in kinds_of(tensors)):
        return False
    vectors = all(t is None or t.is_contiguous() for t in (gamma, beta, bias))
    return vectors and weight.stride(1) == 1 and x.is_contiguous()


def tell(function: Calls, layer: Layer, tensors: Operands) -> None:
    """Have the runner answer such calls from now on, if it can."""
    if not is_simple(tensors):
        return
    given = [t for t in tensors if t is not None]
    slots: dict[str, int] = {}
    for name, t in zip(NAMES, tensors, strict=True):
        if t is not None:
            slots[name] = len(slots)
    x, weight = tensors.x, tensors.weight
    needed = {name for name, t in zip(NAMES, tensors, strict=True)
              if t is not None and t.requires_grad and torch.is_grad_enabled()}  # fmt: skip
    rows = x.shape[:-1]
    M, N, K = math.prod(rows), *weight.shape
    tile = layer.tile or tile_for(M, x.dtype.itemsize, x.device)
    tanh = layer.approximate == "tanh"
    commands = Commands(len(given), x.device)
    aligned: Kind = (x.dtype, True)

    def kinds(*names: str | None) -> tuple[Kind, ...]:
        return tuple([aligned if name in slots else None for name in names])

    gradient = None
    results: list[int] = []
    if needed or tile.staged:
        if needed:
            tile = tile._replace(staged=True)
            weights = [SlotArgument(slots[n]) if n in slots else None for n in ("gamma", "beta")]
            states = commands.torch(
                aten.native_layer_norm.default,
                SlotArgument(0),
                (K,),
                *weights,
                float(layer.eps),
                results=3,
            )
            slots |= {n: s.slot for n, s in zip(("normal", "mean", "rstd"), states, strict=True)}
        else:
            slots["normal"] = commands.allocate((M, K), x.dtype)
            step = normal_step(
                x.device, kinds("x", "gamma", "beta", "normal", None, None), M, K, K, layer.eps
            )
            order = [slots.get(n) for n in ("x", "gamma", "beta", "normal")]
            commands.made.append(step.described([*order, None, None], x.device))
        operands: tuple[str | None, ...] = ("normal", None, None, "weight", "bias", "y")
        eps = 0.0
    else:
        operands, eps = ("x", "gamma", "beta", "weight", "bias", "y"), layer.eps
    slots["y"] = commands.allocate((*rows, N), x.dtype)
    if needed:
        slots["z"] = commands.allocate((*rows, N), x.dtype)
    operands = (*operands, "z" if needed else None)
    step = product_step(
        tile, x.device, kinds(*operands), M, N, K, K, weight.stride(0), eps, tanh,
        precision(x.dtype),
    )  # fmt: skip
    order = [None if n is None else slots.get(n) for n in operands]
    commands.made.append(step.described(order, x.device))
    results = [slots["y"]]
    if needed:
        kept = states_of(needed)
        results += [slots[name] for name in kept]
        hidden = tuple(range(1, len(results)))
        present = tuple([name for name in NAMES if name in slots])
        recording = Recording(layer, present, (*present, *kept))
        gradient = (recording, backward, (True,) * len(given), hidden, hidden, NODE)
    arguments = tuple(given), 0, False, True, None, False, "auto", None
    runner.insert_call(function, arguments, commands.program(results), gradient, 0, (0,))


def states_of(needed: set[str]) -> list[str]:
    """What the gradients of these tensors read beside the tensors."""
    kept = ["z"]
    if "weight" in needed:
        kept.append("normal")
    if needed & {"x", "gamma", "beta"}:
        kept += ["mean", "rstd"]
    return kept


class Recording(NamedTuple):
    """What the nodes of one call share.

    tensors: which of NAMES there are. saved: what a node keeps, these first.
    """

    layer: Layer
    tensors: tuple[str, ...]
    saved: tuple[str, ...]


def backward(
    recording: Recording,
    gradient: Any,
    saved: tuple[MaybeTensor, ...],
    needed: tuple[bool, ...],
    cotangents: tuple[MaybeTensor, ...],
) -> tuple[MaybeTensor, ...]:
    """The gradient of each tensor. The runner gets the same as a program, unless there are
    gradients of gradients to come.

    gradient: what the runner's nodes of one call share.
    """
    cotangent = cotangents[0]
    assert cotangent is not None
    wanted = [name for name, n in zip(recording.tensors, needed, strict=True) if n]
    if torch.is_grad_enabled():
        found = differentiable(recording, saved, wanted, cotangent)
        return tuple([found.get(name) for name in recording.tensors])
    tensors = dict(zip(recording.saved, saved, strict=True))
    given = (*saved, *cotangents)
    commands, results = commands_of(recording, tensors, wanted, len(given))
    number_of = {name: n for n, name in enumerate(results)}
    order = [number_of.get(name) for name in recording.tensors]
    if runner.module is not None:
        program = commands.program(tuple(results.values()))
        runner.insert_backward(gradient, needed, given, program, order)
    table, slots = run(commands, given), list(results.values())
    return tuple([None if k is None else table[slots[k]] for k in order])


def commands_of(
    recording: Recording, tensors: dict[str, MaybeTensor], wanted: Sequence[str], given: int
) -> tuple[Commands, dict[str, int]]:  # fmt: skip
    """Backward, and the slots of the gradients; the given tensors are the saved ones, then the
    cotangents. The operations are those that autograd runs for the unfused layer."""
    x, weight = tensors["x"], tensors["weight"]
    assert x is not None and weight is not None
    shape, (N, K) = tuple(x.shape), weight.shape
    at = {name: SlotArgument(k) for k, name in enumerate(recording.saved)}
    commands = Commands(given, x.device)
    found: dict[str, int] = {}
    dz = commands.torch(
        aten.gelu_backward.default,
        SlotArgument(len(recording.saved)),
        at["z"],
        recording.layer.approximate,
    )
    if len(shape) != 2:
        dz = commands.torch(aten.reshape.default, dz, (-1, N))
    of_norm = [name in wanted for name in ("x", "gamma", "beta")]
    if any(of_norm):
        dx = commands.torch(aten.mm.default, dz, at["weight"])
        if len(shape) != 2:
            dx = commands.torch(aten.reshape.default, dx, shape)
        results = commands.torch(
            aten.native_layer_norm_backward.default, dx, at["x"], (K,), at["mean"], at["rstd"],
            at.get("gamma"), at.get("beta"), tuple(of_norm), results=3,
        )  # fmt: skip
        for name, slot, is_wanted in zip(("x", "gamma", "beta"), results, of_norm, strict=True):
            if is_wanted:
                found[name] = slot.slot
    if "weight" in wanted:
        normal = at["normal"]
        if len(shape) != 2:
            normal = commands.torch(aten.reshape.default, normal, (-1, K))
        turned = commands.torch(aten.t.default, dz)
        found["weight"] = commands.torch(aten.mm.default, turned, normal).slot
    if "bias" in wanted:
        found["bias"] = commands.torch(aten.sum.dim_IntList, dz, (0,), False).slot
    return commands, found


def run(commands: Commands, given: Sequence[MaybeTensor]) -> list[Any]:
    """The table of slots after the commands, which call torch alone."""
    table: list[Any] = [*given, *[None] * (commands.slots - len(given))]
    for call in commands.calls:
        call.bind()(table)
    return table


def differentiable(
    recording: Recording, saved: Sequence[MaybeTensor], wanted: Sequence[str], cotangent: Tensor
) -> dict[str, MaybeTensor]:
    """The gradients that are wanted, with derivatives: from the unfused layer, computed again.

    Each tensor takes part as a view of its own: what one of them was made of does not count.
    """
    tensors = dict(zip(recording.tensors, saved, strict=False))
    views = {name: t.view_as(t) for name, t in tensors.items() if t is not None}
    layer = recording.layer
    operands = Operands(
        views["x"], views.get("gamma"), views.get("beta"), views["weight"], views.get("bias")
    )
    y = layer.unfused(operands, layer.eps, layer.approximate)
    found = torch.autograd.grad(y, [views[n] for n in wanted], cotangent, create_graph=True)
    return dict(zip(wanted, found, strict=True))
