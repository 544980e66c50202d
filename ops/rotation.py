"""Products of rotations of the plane and of space.

Sizes multiply: after t products of numbers rounded to size 1 the size is 1 within about t·ε;
normalise the outputs where that matters.

Source: W. R. Hamilton, "On quaternions", Philosophical Magazine 25, 1844.
"""

import torch
from torch import Tensor

from assocscan.monoids.monoid import monoid

Pair = tuple[Tensor, Tensor]


@monoid(identity=(1.0, 0.0), lift=lambda angle: (torch.cos(angle), torch.sin(angle)))
def rotation2d(left: Pair, right: Pair) -> Pair:
    """Rotations of the plane: (cos, sin)[t] of θ[0] + … + θ[t].

    Inputs: θ, a real float: an angle in radians.
    Element: (cos, sin), which a lift takes once of every angle. So no angle grows and loses digits;
        sizes drift from 1 by rounding, in float32 by up to 5e-3 in 10⁵ steps.
    Outputs: (cos, sin) of the sum of the angles.
    Identity: (1, 0).
    Cost: 6 flops, a cos and a sin; reads one number, writes two.

    >>> import math, torch
    >>> from assocscan import associative_scan, ops
    >>> cos, sin = associative_scan(ops.rotation2d, torch.full((4,), math.pi / 4))
    >>> cos
    tensor([ 0.7071,  0.0000, -0.7071, -1.0000])
    """
    (c1, s1), (c2, s2) = left, right
    return c1 * c2 - s1 * s2, c1 * s2 + s1 * c2


@monoid(element_ndim=1, identity=lambda q: torch.tensor([1.0, 0.0, 0.0, 0.0]))
def quaternion(left: Tensor, right: Tensor) -> Tensor:
    """Rotations of space: q[t] = x[0] · x[1] · … · x[t].

    Inputs: x […, 4], real floats: a quaternion with the fields (w, x, y, z).
    Element: the same quaternion, multiplied in Hamilton's way. Each is a turn in the frame that
        those before it have reached, as a gyroscope measures.
    Outputs: q […, 4].
    Identity: (1, 0, 0, 0).
    Cost: 28 flops; reads four numbers, writes four.

    For turns in a fixed frame, where the later one multiplies from the left, take
    `reversed_order(ops.quaternion)`.

    >>> import torch
    >>> from assocscan import associative_scan, ops
    >>> half = 0.5 ** 0.5
    >>> quarter = torch.tensor([half, 0.0, 0.0, half]).expand(2, 4)     # about z
    >>> associative_scan(ops.quaternion, quarter)[1].round(decimals=4)
    tensor([0., 0., 0., 1.])
    """
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
