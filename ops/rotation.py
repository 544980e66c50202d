"""Products of rotations of the plane and of space.

    rotation2d:  (cos, sin)[t] of θ[0] + … + θ[t]              identity (1, 0)
    quaternion:  q[t] = x[0] · x[1] · … · x[t]                 identity 1

The input of rotation2d is an angle in radians, whose cosine and sine a lift takes once; the element
is (cos, sin), a complex number of size 1, so that no angle ever grows and loses digits. The element
of quaternion is a leaf […, 4] with the fields (w, x, y, z), multiplied in Hamilton's way: each is a
turn in the frame that those before it have reached, as a gyroscope measures. For turns in a fixed
frame, where the later one multiplies from the left, take `reversed_order(ops.quaternion)`.

Sizes multiply: after t products of numbers rounded to size 1 the size is 1 within about t·ε;
normalise the outputs where that matters.

Cost per element: rotation2d 6 flops and a cos and a sin, reads one number and writes two;
quaternion 28 flops, reads and writes four.

Source: W. R. Hamilton, "On quaternions", Philosophical Magazine 25, 1844.

>>> import math, torch
>>> from assocscan import associative_scan, ops
>>> cos, sin = associative_scan(ops.rotation2d, torch.full((4,), math.pi / 4))
>>> cos
tensor([ 0.7071,  0.0000, -0.7071, -1.0000])
>>> half = 0.5 ** 0.5
>>> quarter = torch.tensor([half, 0.0, 0.0, half]).expand(2, 4)     # about z
>>> associative_scan(ops.quaternion, quarter)[1].round(decimals=4)
tensor([0., 0., 0., 1.])
"""

import torch
from torch import Tensor

from assocscan.monoids.monoid import monoid

Pair = tuple[Tensor, Tensor]


@monoid(identity=(1.0, 0.0), lift=lambda angle: (torch.cos(angle), torch.sin(angle)))
def rotation2d(left: Pair, right: Pair) -> Pair:
    """The turn by both angles."""
    (c1, s1), (c2, s2) = left, right
    return c1 * c2 - s1 * s2, c1 * s2 + s1 * c2


@monoid(element_ndim=1, identity=lambda q: torch.tensor([1.0, 0.0, 0.0, 0.0]))
def quaternion(left: Tensor, right: Tensor) -> Tensor:
    """Hamilton's product."""
    a, b, c, d = left.unbind()
    w, x, y, z = right.unbind()
    return torch.stack(
        [
            a * w - b * x - c * y - d * z,
            a * x + b * w + c * z - d * y,
            a * y - b * z + c * w + d * x,
            a * z + b * y - c * x + d * w,
        ]
    )
