"""
Volume rendering over packed rays
=================================

Look through fog at a lamp. Each bit of fog on the way takes some light away and adds some of its
own. What reaches your eye is a product along the ray, and a sum.

This is how radiance fields make pictures. Every ray has a different number of samples, and some
have none at all. This page packs them into one tensor and renders a picture with one scan. Then it
goes the other way: from pictures back to the fog.
"""

import math

import matplotlib.pyplot as plt
import torch
from torch.nn import functional as F

from assocscan import associative_scan, monoid, reduce

# %%
# Two panes of glass
# ------------------
#
# A pane lets a part t of the light through, and adds a colour c of its own. Put two panes behind
# each other. The light of the far one must pass the near one::
#
#     t = t₁ · t₂,    c = c₁ + t₁ · c₂
#
# So two panes are one pane, and a row of panes is a scan. A sample on a ray has a density and a
# colour. ``lift`` makes a pane of it: the longer and denser, the less light passes.


def pane(thickness, color):
    passes = torch.exp(-thickness)
    return passes, (1 - passes) * color


@monoid(identity=(1.0, torch.zeros(3)), element_ndim=(0, 1), lift=pane)
def behind(near, far):
    t1, c1 = near
    t2, c2 = far
    return t1 * t2, c1 + t1 * c2


behind.check((torch.tensor(0.0), torch.zeros(3)))

# %%
# A scene
# -------
#
# Three soft balls inside a sphere of radius 1. ``scene`` gives the density and the colour at any
# points [N, 3].

centers = torch.tensor([[0.35, 0.0, 0.1], [-0.3, 0.3, -0.1], [-0.1, -0.4, 0.0]])
radii = torch.tensor([0.32, 0.28, 0.22])
paints = torch.tensor([[0.9, 0.3, 0.2], [0.2, 0.6, 0.9], [0.95, 0.8, 0.2]])


def scene(points):
    distance = torch.cdist(points, centers)
    soft = torch.sigmoid((radii - distance) * 40)  # [N, balls]
    density = 12 * soft.sum(-1)
    color = soft @ paints / soft.sum(-1, keepdim=True).clamp(min=1e-6)
    return density, color


# %%
# Rays
# ----
#
# A camera looks at the sphere from some angle. Only the part of a ray that is inside the sphere
# gets samples. Rays that miss the sphere get none.

STEP = 0.04


def rays(angle, size):
    """Origins and directions [size², 3] of a camera at distance 2.5."""
    eye = 2.5 * torch.tensor([math.sin(angle), 0.3, math.cos(angle)])
    ahead = F.normalize(-eye, dim=0)
    right = F.normalize(torch.linalg.cross(ahead, torch.tensor([0.0, 1.0, 0.0])), dim=0)
    up = torch.linalg.cross(right, ahead)
    grid = torch.linspace(-0.45, 0.45, size)
    y, x = torch.meshgrid(-grid, grid, indexing="ij")
    toward = ahead + x.reshape(-1, 1) * right + y.reshape(-1, 1) * up
    return eye.expand_as(toward), F.normalize(toward, dim=-1)


def samples(origins, directions):
    """Points [N, 3] of all rays back to back, and the offsets [rays + 1]."""
    nearest = -(origins * directions).sum(-1)
    half = (1 - (origins + nearest[:, None] * directions).square().sum(-1)).clamp(min=0).sqrt()
    counts = (2 * half / STEP).ceil().long()
    offsets = F.pad(counts.cumsum(0), (1, 0))
    ray = torch.repeat_interleave(torch.arange(len(counts)), counts)
    place = torch.arange(int(offsets[-1])) - offsets[ray]
    depth = nearest[ray] - half[ray] + (place + 0.5) * STEP
    return origins[ray] + depth[:, None] * directions[ray], offsets


size = 128
points, offsets = samples(*rays(0.5, size))
counts = offsets.diff()
padded = len(counts) * int(counts.max())
print(f"{len(counts)} rays, {int((counts == 0).sum())} of them empty; {len(points)} samples")
print(f"padded to the longest ray it would be {padded}")

# %%
# The picture
# -----------
#
# One ``reduce`` with offsets. An empty ray gives the identity: all light passes, no colour. What
# passes to the end falls on a white wall.


def render(field, points, offsets):
    density, color = field(points)
    passes, color = reduce(behind, (density * STEP, color), offsets=offsets)
    return color + passes[:, None]


picture = render(scene, points, offsets)

# %%
# Check a few rays against a loop.

density, color = scene(points)


def ray_loop(k):
    passes, total = 1.0, torch.zeros(3)
    for t in range(int(offsets[k]), int(offsets[k + 1])):
        part = 1 - math.exp(-float(density[t]) * STEP)
        total = total + passes * part * color[t]
        passes *= 1 - part
    return total + passes


for k in (0, size * size // 2 + size // 2, size * 40 + 50, size * 90 + 60):
    assert torch.allclose(picture[k], ray_loop(k), atol=1e-5)
assert torch.equal(picture[0], torch.ones(3))

# %%
# How far away is it?
# -------------------
#
# Each sample's share of the picture is what it hides, times what passes all samples *before* it.
# That is an exclusive scan. The mean depth follows from the shares.

passes, _ = associative_scan(behind, (density * STEP, color), inclusive=False, offsets=offsets)
share = passes * (1 - torch.exp(-density * STEP))
ray = torch.repeat_interleave(torch.arange(len(counts)), counts)
hidden = torch.zeros(len(counts)).index_add(0, ray, share)
by_shares = (1 - hidden[:, None]).expand(-1, 3).index_add(0, ray, share[:, None] * color)
assert torch.allclose(by_shares, picture, atol=1e-4)

eye = rays(0.5, size)[0][0]
distance = (points - eye).norm(dim=-1)
depth = torch.zeros(len(counts)).index_add(0, ray, share * distance) / hidden
depth[hidden < 0.5] = torch.nan

figure, axes = plt.subplots(1, 3, figsize=(8, 2.8), layout="constrained")
axes[0].imshow(picture.view(size, size, 3).clamp(0, 1))
axes[0].set_title("picture", fontsize=9)
axes[1].imshow(depth.view(size, size), cmap="viridis_r")
axes[1].set_title("depth", fontsize=9)
axes[2].imshow(counts.view(size, size), cmap="gray")
axes[2].set_title("samples on each ray", fontsize=9)
for panel in axes:
    panel.set_axis_off()
plt.show()

# %%
# From pictures back to the fog
# -----------------------------
#
# Now forget the balls. Keep eight small pictures of them, taken from around. Begin with an empty
# grid of 20³ points, each with a density and a colour, and change it until its pictures look the
# same. The gradient of the scan does the work.

SMALL = 40
angles = [k * math.tau / 8 for k in range(8)]
views = [samples(*rays(angle, SMALL)) for angle in angles]
truth = [render(scene, *view) for view in views]

torch.manual_seed(0)
grid = torch.zeros(1, 4, 20, 20, 20)
grid[:, 0] = -3.0
grid.requires_grad_()


def learnt(points):
    found = F.grid_sample(grid, points.view(1, -1, 1, 1, 3), align_corners=True)
    found = found.view(4, -1)
    return F.softplus(found[0]) * 4, found[1:].T.sigmoid()


optimizer = torch.optim.Adam([grid], lr=0.3)
for step in range(120):
    k = step % 8
    loss = (render(learnt, *views[k]) - truth[k]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

# %%
# How does it look from an angle that it never saw?

unseen = samples(*rays(0.4, 96))
with torch.no_grad():
    wanted, got = render(scene, *unseen), render(learnt, *unseen)
error = (wanted - got).square().mean()
print(f"PSNR {-10 * float(error.log10()):.1f} dB")

figure, axes = plt.subplots(1, 3, figsize=(8, 2.9), layout="constrained")
for panel, image, name in (
    (axes[0], truth[0].view(SMALL, SMALL, 3), "one of eight pictures"),
    (axes[1], got.view(96, 96, 3), "learnt, from a new angle"),
    (axes[2], wanted.view(96, 96, 3), "truth"),
):
    panel.imshow(image.clamp(0, 1))
    panel.set_title(name, fontsize=9)
    panel.set_axis_off()
plt.show()

assert error < 0.01
