"""Chains of rigid motions of space."""

import torch
from torch import Tensor

from assocscan.monoids.monoid import monoid
from assocscan.ops.rotation import quaternion

Pair = tuple[Tensor, Tensor]


def _cross(a: Tensor, b: Tensor) -> Tensor:
    (a1, a2, a3), (b1, b2, b3) = a.unbind(), b.unbind()
    return torch.stack([a2 * b3 - a3 * b2, a3 * b1 - a1 * b3, a1 * b2 - a2 * b1])


def _turn(q: Tensor, v: Tensor) -> Tensor:
    """q v q*, times the square of the size of q, so that it is exactly a product in q."""
    w, u = q[0], q[1:]
    return (w * w - (u * u).sum()) * v + 2 * (u * v).sum() * u + 2 * w * _cross(u, v)


@monoid(
    element_ndim=(1, 1),
    identity=lambda q, p: (torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(p)),
)
def se3(left: Pair, right: Pair) -> Pair:
    """Chain of rigid motions: T[t] = x[0] · x[1] · … · x[t], with T = (q, p): v ↦ q v q* + p.

    Inputs: (q […, 4], p […, 3]), real floats: a unit quaternion with the fields (w, x, y, z), and a
        translation.
    Element: the same motion. (q₁, p₁) ∘ (q₂, p₂) = (q₁ q₂, p₁ + q₁ p₂ q₁*).
    Outputs: (q, p) of the whole chain.
    Identity: ((1, 0, 0, 0), (0, 0, 0)).
    Cost: 28 flops for the rotation and 32 for the translation; reads 7 numbers, writes 7.

    Each motion is one in the frame that those before it have reached, as in odometry or along the
    joints of an arm.

    Source: R. M. Murray, Z. Li, S. S. Sastry, "A Mathematical Introduction to Robotic
    Manipulation", 1994, chapter 2.

    >>> import torch
    >>> from assocscan import associative_scan, ops
    >>> half = 0.5 ** 0.5
    >>> q = torch.tensor([half, 0.0, 0.0, half]).expand(4, 4)           # a quarter turn about z
    >>> p = torch.tensor([1.0, 0.0, 0.0]).expand(4, 3)                  # after a step ahead
    >>> associative_scan(ops.se3, (q, p))[1].round(decimals=3) + 0.0
    tensor([[1., 0., 0.],
            [1., 1., 0.],
            [0., 1., 0.],
            [0., 0., 0.]])
    """
    (q1, p1), (q2, p2) = left, right
    return quaternion.combine(q1, q2), p1 + _turn(q1, p2)
