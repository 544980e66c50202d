"""The filter and the smoother of hidden Markov models with many states, in float64.

An element of the filter's scan is a K×K matrix. Kernels of matrices of more than 8×8 would take
minutes to compile, and the eager engine takes K³ exponentials, and as much memory, for each step.
Here the predictions of all steps are an operation of its own, with its own derivative
(`predictions`); everything around it is a torch operation for all steps at once.

β[t, i] = p(y[t+1], … | z[t] = i), which smoothing needs besides, is a prediction too, up to a
constant for each t: that of the reversed series, with the matrices of transitions transposed.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...ops.semiring import log_sum
from ...torch_state import without_autocast
from ..operands import are_memory
from .predictions import Predictions

MOST_IN_KERNELS = 8


def has_many_states(likelihood: Tensor) -> bool:
    """Whether kernels of a scan would take minutes to compile."""
    return likelihood.shape[-1] > MOST_IN_KERNELS


def can_run_here(*tensors: Tensor, deterministic: bool | None) -> bool:
    """Whether the functions here may take these tensors: they are memory of a device with float64,
    whose values can be looked at. Products on a GPU are not known to be deterministic."""
    if not are_memory(*tensors) or not tensors[0].numel():
        return False
    if tensors[0].is_cuda:
        if deterministic is None:
            deterministic = torch.are_deterministic_algorithms_enabled()
        return not deterministic and not torch.cuda.is_current_stream_capturing()
    return tensors[0].device.type == "cpu"


def filtered(initial: Tensor, transition: Tensor, likelihood: Tensor) -> tuple[Tensor, Tensor]:
    """log p(z[t] | y[0 … t]) [..., T, K] and log p(y) [...], in float64. initial [..., K],
    transition [K, K] or [..., 1 or T, K, K], likelihood [..., T, K], of any float dtype."""
    weights, high = relative(likelihood.double())
    joint = (initial.double() + weights[..., 0, :]).unsqueeze(-2)
    if likelihood.shape[-2] > 1:
        moves, later = of_steps(transition), weights[..., 1:, :]
        with without_autocast(likelihood.device.type):
            ahead = Predictions.apply(joint.squeeze(-2), moves, later)
        joint = torch.cat((joint, ahead + later), -2)
    else:
        joint = joint + unread(transition)
    total = log_sum(joint, -1).unsqueeze(-1)
    evidence = (total + high).squeeze(-1).sum(-1)
    # Also its derivative is that of a constant.
    evidence = torch.where(evidence == -math.inf, -math.inf, evidence)
    return joint - total, evidence


def smoothed_many(
    initial: Tensor, transition: Tensor, likelihood: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """log p(z[t] | y), log p(z[t] | y[0 … t]) and log p(y[t+1], … | z[t]), the last one up to a
    constant for each t; all [..., T, K] in float64. Arguments as those of `filtered`."""
    ahead, _ = filtered(initial, transition, likelihood)
    weights, _ = relative(likelihood.double())
    after = torch.zeros_like(weights[..., :1, :])
    if likelihood.shape[-2] > 1:
        back, moves = weights.flip(-2), of_steps(transition).mT.flip(-3)
        with without_autocast(likelihood.device.type):
            found = Predictions.apply(back[..., 0, :], moves, back[..., 1:, :])
        after = torch.cat((found.flip(-2), after), -2)
    both = ahead + after
    return both - log_sum(both, -1).unsqueeze(-1), ahead, after


def relative(likelihood: Tensor) -> tuple[Tensor, Tensor]:
    """The likelihoods of a step, and what was subtracted: the greatest of them, if it is finite."""
    high = likelihood.detach().amax(-1, keepdim=True)
    high = torch.where(high.isinf(), 0.0, high)
    return likelihood - high, high


def unread(transition: Tensor) -> Tensor:
    """0, of which the transition takes part in derivatives though it leads nowhere."""
    return transition[..., :0].double().sum()


def of_steps(transition: Tensor) -> Tensor:
    """The transitions to all steps but the first, [..., 1 or T − 1, K, K] in float64; 1 where it is
    the same for all of them."""
    if transition.dim() == 2:
        return transition.double().unsqueeze(0)
    if transition.shape[-3] == 1:
        return transition.double()
    if transition.stride(-3) == 0 and not transition.requires_grad:
        return transition[..., :1, :, :].double()
    return transition[..., 1:, :, :].double()
