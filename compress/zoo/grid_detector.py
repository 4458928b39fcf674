"""A small anchor-free detector of plain convolutions, and its training: for tests and the benchmark of detection.

Every cell of one grid says how likely each class is, and how far the sides of the object around it are, as FCOS does
(Tian et al. 2019, arXiv:1904.01355); scores learn the overlap of their own box (Li et al. 2020, arXiv:2006.04388).
The grid has a cell in 8 x 8 pixels, and sees what two coarser levels saw. `OneToOneDetector` ends in boxes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

STRIDE = 8


class ConvBlock(nn.Sequential):
    """A 3 x 3 convolution, batch norm and ReLU."""

    def __init__(self, n_in: int, n_out: int, stride: int = 1) -> None:
        super().__init__(nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False), nn.BatchNorm2d(n_out), nn.ReLU())


class GridDetector(nn.Module):
    """float32 [B, 3, H, W] -> {"boxes": [B, A, 4] left, top, right, bottom in strides, "scores": [B, A, C] logits}.

    H and W are multiples of 32; A = H / 8 * W / 8.
    """

    def __init__(self, n_classes: int, width: int = 16, depth: int = 2) -> None:
        super().__init__()
        w = width
        self.stem = nn.Sequential(
            ConvBlock(3, w, 2), ConvBlock(w, 2 * w, 2), *(ConvBlock(2 * w, 2 * w) for _ in range(depth - 1))
        )
        self.fine = nn.Sequential(ConvBlock(2 * w, 4 * w, 2), *(ConvBlock(4 * w, 4 * w) for _ in range(depth - 1)))
        self.middle = nn.Sequential(ConvBlock(4 * w, 8 * w, 2), *(ConvBlock(8 * w, 8 * w) for _ in range(depth - 1)))
        self.coarse = nn.Sequential(ConvBlock(8 * w, 8 * w, 2), *(ConvBlock(8 * w, 8 * w) for _ in range(depth - 1)))
        self.down = nn.ModuleList([ConvBlock(8 * w, 8 * w), ConvBlock(8 * w, 4 * w)])
        self.merge = nn.ModuleList([ConvBlock(16 * w, 8 * w), ConvBlock(8 * w, 4 * w)])
        self.score_branch, self.box_branch = ConvBlock(4 * w, 4 * w), ConvBlock(4 * w, 4 * w)
        self.score_head, self.box_head = nn.Conv2d(4 * w, n_classes, 1), nn.Conv2d(4 * w, 4, 1)
        nn.init.constant_(self.score_head.bias, -4.0)  # type: ignore[arg-type]  # objects are rare

    def forward(self, image: Tensor) -> Any:
        return self.read_heads(self.read_grid(image))

    def read_grid(self, image: Tensor) -> Tensor:
        """Return what the heads read, [B, 4w, H / 8, W / 8]."""
        fine = self.fine(self.stem(image))
        middle = self.middle(fine)
        x = F.interpolate(self.down[0](self.coarse(middle)), scale_factor=2.0)
        x = self.merge[0](torch.cat([x, middle], 1))
        x = F.interpolate(self.down[1](x), scale_factor=2.0)
        merged: Tensor = self.merge[1](torch.cat([x, fine], 1))
        return merged

    def read_heads(self, x: Tensor) -> dict[str, Tensor]:
        boxes = F.softplus(self.box_head(self.box_branch(x)))
        scores = self.score_head(self.score_branch(x))
        return {"boxes": boxes.flatten(2).transpose(1, 2), "scores": scores.flatten(2).transpose(1, 2)}


class OneToOneDetector(GridDetector):
    """float32 [B, 3, H, W] -> [B, `most`, 6]: x1, y1, x2, y2 in pixels, score, class; best first, nothing to suppress.

    A second branch of scores learns one cell for each object, as YOLOv10's one-to-one head (Wang et al. 2024,
    arXiv:2405.14458); the first, of all cells around it, is for training alone. In training mode the outputs are those
    of `GridDetector` and "once", [B, A, C].
    """

    def __init__(self, n_classes: int, width: int = 16, depth: int = 2, most: int = 100) -> None:
        super().__init__(n_classes, width, depth)
        head = nn.Conv2d(4 * width, n_classes, 1)
        nn.init.constant_(head.bias, -5.0)  # type: ignore[arg-type]
        self.once = nn.Sequential(ConvBlock(4 * width, 4 * width), ConvBlock(4 * width, 4 * width), head)
        self.most = most

    def forward(self, image: Tensor) -> Any:
        x = self.read_grid(image)
        once = self.once(x).flatten(2).transpose(1, 2)
        if self.training:
            return self.read_heads(x) | {"once": once}
        sides = F.softplus(self.box_head(self.box_branch(x))).flatten(2).transpose(1, 2)
        corners = find_corners(place_centres(*image.shape[2:]).to(image.device), sides)
        scores, places = once.sigmoid().flatten(1).topk(self.most)  # of all cells and classes
        cells, classes = places // once.shape[2], places % once.shape[2]
        boxes = corners.gather(1, cells[..., None].expand(-1, -1, 4))
        return torch.cat([boxes, scores[..., None], classes[..., None].float()], -1)


def grid_detector(n_classes: int, width: int = 16, depth: int = 2) -> GridDetector:
    """Return the detector with random weights; a recipe's factory."""
    return GridDetector(n_classes, width, depth)


def one_to_one_detector(n_classes: int, width: int = 16, depth: int = 2, most: int = 100) -> OneToOneDetector:
    """Return the detector that ends in boxes, with random weights; a recipe's factory."""
    return OneToOneDetector(n_classes, width, depth, most)


def place_centres(height: int, width: int) -> Tensor:
    """Return the centres of the cells (x, y) in pixels, float32 [A, 2]."""
    y, x = torch.meshgrid(torch.arange(height // STRIDE), torch.arange(width // STRIDE), indexing="ij")
    return (torch.stack([x, y], -1).reshape(-1, 2) + 0.5) * STRIDE


def find_corners(centres: Tensor, sides: Tensor) -> Tensor:
    """Return boxes [B, A, 4] of corners in pixels, of distances in strides from the centres [A, 2] to the sides."""
    return torch.cat([centres - sides[..., :2] * STRIDE, centres + sides[..., 2:] * STRIDE], -1)


def find_near_cells(centres: Tensor, labels: Tensor) -> Tensor:
    """Return which cells may learn which objects, bool [B, A, m]: inside of them, and near their centre.

    `labels` [B, m, >= 5]: class (-1: none) and corners in pixels of the input.
    """
    boxes, there = labels[..., 1:5], labels[..., 0] >= 0
    middle = (boxes[..., :2] + boxes[..., 2:]) / 2
    sides = torch.cat(
        [centres[None, :, None] - boxes[:, None, :, :2], boxes[:, None, :, 2:] - centres[None, :, None]], -1
    )
    # cells whose centre is within 1.5 strides of an object's learn it
    near = (centres[None, :, None] - middle[:, None]).abs().amax(-1) < 1.5 * STRIDE
    return near & (sides.amin(-1) > 0) & there[:, None]


def assign_cells(centres: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each cell the class that it learns, int64 [B, A], -1 for none, and the box, [B, A, 4] corners.

    Of several objects the smallest.
    """
    boxes, fits = labels[..., 1:5], find_near_cells(centres, labels)
    area = (boxes[..., 2:] - boxes[..., :2]).prod(-1)[:, None].expand(fits.shape)
    smallest = torch.where(fits, area, torch.inf).min(-1)
    chosen = smallest.indices  # [B, A]
    classes = torch.where(smallest.values.isfinite(), labels[..., 0].gather(1, chosen).long(), -1)
    return classes, boxes.gather(1, chosen[..., None].expand(-1, -1, 4))


def assign_once(scores: Tensor, found: Tensor, centres: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each cell the class that it learns, int64 [B, A], -1 for none, and its overlap, [B, A]: one an object.

    Of the cells near an object that whose score and box (logits [B, A, C], corners [B, A, 4]) fit it best: score ** 0.5
    * overlap ** 6, as in YOLOv10.
    """
    iou = compute_overlaps(found[:, :, None], labels[:, None, :, 1:5])[0]  # [B, A, m]
    numbers = labels[..., 0].clamp_min(0).long()
    likely = scores.sigmoid().gather(2, numbers[:, None].expand(iou.shape))
    near = find_near_cells(centres, labels)
    best = torch.where(near, likely.sqrt() * iou**6, -1.0).argmax(1)  # [B, m]
    image, number = torch.nonzero(near.any(1), as_tuple=True)
    cell = best[image, number]
    classes, overlaps = torch.full(scores.shape[:2], -1), torch.zeros(scores.shape[:2])
    classes[image, cell], overlaps[image, cell] = numbers[image, number], iou[image, cell, number]
    return classes, overlaps


def compute_overlaps(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the overlap of pairs of boxes [..., 4], and its generalised form (arXiv:1902.09630): [...] each."""
    shared = (torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])).clamp_min(0).prod(-1)
    union = (a[..., 2:] - a[..., :2]).prod(-1) + (b[..., 2:] - b[..., :2]).prod(-1) - shared
    hull = (torch.maximum(a[..., 2:], b[..., 2:]) - torch.minimum(a[..., :2], b[..., :2])).prod(-1)
    iou = shared / union.clamp_min(1e-9)
    return iou, iou - (hull - union) / hull.clamp_min(1e-9)


def detection_loss(outputs: dict[str, Tensor], centres: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of a batch: scores towards the overlap of their own box, boxes by generalised overlap."""
    classes, real = assign_cells(centres, labels)
    cells = classes >= 0
    found = find_corners(centres, outputs["boxes"])
    iou, generalised = compute_overlaps(found[cells], real[cells])
    loss = score_loss(outputs["scores"], classes, iou) + 2.0 * (1 - generalised).sum() / cells.sum().clamp_min(1)
    if "once" in outputs:
        classes, overlaps = assign_once(outputs["once"].detach(), found.detach(), centres, labels)
        loss = loss + score_loss(outputs["once"], classes, overlaps[classes >= 0])
    return loss


def score_loss(scores: Tensor, classes: Tensor, iou: Tensor) -> Tensor:
    """Return the loss of logits [B, A, C], of which those of `classes` [B, A] learn their overlap [n], others 0."""
    cells = classes >= 0
    target = torch.zeros_like(scores)
    target[cells, classes[cells]] = iou.detach().clamp(0, 1)
    gap = (scores.sigmoid().detach() - target).abs().square()
    losses = F.binary_cross_entropy_with_logits(scores, target, reduction="none") * gap
    return losses.sum() / cells.sum().clamp_min(1)


DrawBatch = Callable[[np.random.Generator], tuple[Tensor, Tensor]]
"""Gives images as the model reads them, [B, 3, H, W], and labels [B, m, >= 5] in pixels of these."""


def train_detector(
    model: GridDetector, draw_batch: DrawBatch, steps: int, learning_rate: float, seed: int = 0
) -> Iterator[float]:
    """Train in place with AdamW, the rate rising and falling once; yield each step's loss. Left in eval mode."""
    rng = np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps, pct_start=0.15)
    model.train()
    for _ in range(steps):
        images, labels = draw_batch(rng)
        loss = detection_loss(model(images), place_centres(*images.shape[2:]), labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        schedule.step()
        yield float(loss.detach())
    model.eval()
