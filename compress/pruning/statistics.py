"""Sums over calibration rows from which least squares of a layer follow: what it reads, against what it should give."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compress.blocks.forward import remove_hooks_on_exit
from compress.blocks.lockstep import layer_input
from compress.errors import PassError
from compress.pruning.layers import input_rows, layers_of, n_features, n_groups, n_rows

Batch = Mapping[str, Tensor]
"""What one call of forward is given, by parameter."""
MAX_FEATURES = 12288
"""One float64 matrix of so many features squared is 1.2 GB; a layer with more is refused."""
GRAM_BYTES = 2**31
"""Most that the Gram matrices held at once may take; with more, several forward passes are made."""
ROWS_AT_ONCE = 8192
"""Products in float32 of so many rows are summed in float64: their rounding stays near 1e-6 of the diagonal."""


@dataclass(eq=False)
class Sums:
    """Sums over rows x [features] and y [outputs] of each group, float64; `n` rows. Sums of two sets add up.

    `xx` [groups, features, features], `x` [groups, features], `xy` [groups, features, outputs], `y` and `yy`
    [groups, outputs]. Each x is counted from `shift` [groups, features], the mean of the first rows: features that vary
    little against their mean (behind a ReLU6 that is open, of a channel that is dead) would drown in rounding.
    """

    n: int
    shift: Tensor
    xx: Tensor
    x: Tensor
    xy: Tensor
    y: Tensor
    yy: Tensor

    @classmethod
    def empty(cls, groups: int, features: int, outputs: int) -> Sums:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(groups, *shape, dtype=torch.float64)

        sums = zeros(features, features), zeros(features), zeros(features, outputs), zeros(outputs), zeros(outputs)
        return cls(0, zeros(features), *sums)

    def add(self, x: Tensor, y: Tensor | None = None) -> None:
        """Add rows `x` [groups, n, features] and `y` [groups, n, outputs]; without y the sums that hold it stay."""
        if not self.n and x.shape[1]:
            self.shift = x.double().mean(1).float().double()
        self.n += x.shape[1]
        for some in self._split_rows(x):
            self.xx += some.mT @ some
            self.x += some.sum(1, dtype=torch.float64)
        if y is not None:
            self.aim(x, y)

    def without_targets(self) -> Sums:
        """Return the same rows, as yet without their targets, which `aim` gives again."""
        targets = (torch.zeros_like(total) for total in (self.xy, self.y, self.yy))
        return Sums(self.n, self.shift, self.xx, self.x, *targets)

    def aim(self, x: Tensor, y: Tensor) -> None:
        """Add new targets for rows that were added before."""
        for some, targets in zip(self._split_rows(x), y.split(ROWS_AT_ONCE, 1), strict=True):
            self.xy += some.mT @ targets.float()
        self.y += y.sum(1, dtype=torch.float64)
        self.yy += y.double().square().sum(1)

    def _split_rows(self, x: Tensor) -> Iterator[Tensor]:
        """Yield rows [groups, at most ROWS_AT_ONCE, features], float32, counted from `shift`."""
        for part in x.split(ROWS_AT_ONCE, 1):
            yield part.float() - self.shift.float()[:, None]

    def __add__(self, other: Sums) -> Sums:
        other = other.recentre(self.shift)
        return Sums(
            self.n + other.n,
            self.shift,
            self.xx + other.xx,
            self.x + other.x,
            self.xy + other.xy,
            self.y + other.y,
            self.yy + other.yy,
        )

    def recentre(self, shift: Tensor) -> Sums:
        """Return the sums of the same rows, counted from another shift [groups, features]."""
        by = self.shift - shift
        crossed = self.x[:, :, None] * by[:, None, :]
        xx = self.xx + crossed + crossed.mT + self.n * by[:, :, None] * by[:, None, :]
        xy = self.xy + by[:, :, None] * self.y[:, None, :]
        return Sums(self.n, shift, xx, self.x + self.n * by, xy, self.y, self.yy)

    @property
    def mean(self) -> Tensor:
        """Return the features' means, [groups, features]; zeros without rows."""
        return self.shift + self.x / max(self.n, 1)

    def without_means(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return per row and without the means, which a free bias takes up: xx, xy and yy.

        A feature whose variance is within the rounding of its square is constant: it has none, nor anything in common.
        """
        n = max(self.n, 1)
        mean, target = self.x / n, self.y / n
        xx = self.xx / n - mean[:, :, None] * mean[:, None, :]
        # less is the rounding of float32 in what computed the feature
        varies = xx.diagonal(dim1=1, dim2=2) > 1e-11 * self.mean.square()
        xx = xx * (varies[:, :, None] & varies[:, None, :])
        xy = (self.xy / n - mean[:, :, None] * target[:, None, :]) * varies[:, :, None]
        return xx, xy, self.yy / n - target.square()

    def plain(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return xx, xy and yy per row, means left in: for a layer that can have no bias."""
        n, sums = max(self.n, 1), self.recentre(torch.zeros_like(self.shift))
        return sums.xx / n, sums.xy / n, self.yy / n


def choose_rows(layer: nn.Module, x: Tensor, out: Tensor, batch: Batch, limit: int, seed: int) -> Tensor:
    """Choose at random at most `limit` rows of one call to learn from, int64: without padding (`attention_mask` 0).

    The same for two models whose outputs have the same shape but for the channels.
    """
    total = n_rows(layer, out)
    mask = batch.get("attention_mask")
    if mask is not None and mask.dim() == 2 and x.shape[:2] == mask.shape and total == mask.numel():
        rows = mask.reshape(-1).nonzero()[:, 0]
    else:
        rows = torch.arange(total)
    if len(rows) <= limit:
        return rows
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:limit]].sort().values


def rows_per_batch(layer: nn.Module, n_batches: int, rows_per_feature: int) -> int:
    """Return how many rows to take of each batch.

    All batches together give `rows_per_feature` rows for each feature, and never fewer than 65536.
    """
    return -(-max(rows_per_feature * n_features(layer), 65536) // max(n_batches, 1))


def check_width(name: str, layer: nn.Module) -> None:
    """Raise PassError for a layer that sees too much for a Gram matrix of it all."""
    if n_features(layer) > MAX_FEATURES:
        raise PassError(
            f"{name}: one output sees {n_features(layer)} features, and their Gram matrix takes "
            f"{n_features(layer) ** 2 * 8 / 2**30:.1f} GiB; more than {MAX_FEATURES} are not fitted. Ignore what feeds "
            "this layer, or choose importance: l2 with compensate: false"
        )


def gram_bytes(layer: nn.Module) -> int:
    """Return the bytes that the Gram matrix of a layer's inputs takes."""
    return 8 * n_groups(layer) * n_features(layer) ** 2


def gather_inputs(
    module: nn.Module, names: Sequence[str], batches: Sequence[Batch], rows_per_feature: int = 128, seed: int = 0
) -> dict[str, Sums]:
    """Sum what the named layers read (without targets), over all calls and batches, in one forward pass of each.

    All Gram matrices are held at once (`gram_bytes`). PassError: a layer too wide, or one never called.
    """
    layers = layers_of(module)
    for name in names:
        check_width(name, layers[name])
    gathered = {name: Sums.empty(n_groups(layers[name]), n_features(layers[name]), 0) for name in names}
    for number, batch in enumerate(batches):
        with _collect_inputs(layers, gathered, batch, len(batches), rows_per_feature, seed + number), torch.no_grad():
            module(**batch)
    silent = [name for name, sums in gathered.items() if sums.n == 0]
    if silent:
        raise PassError(f"{silent[0]}: the calibration data never reaches this layer; it cannot be measured")
    return gathered


@contextmanager
def _collect_inputs(
    layers: Mapping[str, nn.Module], sums: Mapping[str, Sums], batch: Batch, n_batches: int, per_feature: int, seed: int
) -> Iterator[None]:
    """Add what the layers read to their sums while the context is open."""
    calls = itertools.count()

    def hook(layer_sums: Sums, limit: int) -> Any:
        def add_rows(layer: nn.Module, args: Any, kwargs: Any, out: Tensor) -> None:
            x = layer_input(args, kwargs)
            layer_sums.add(input_rows(layer, x, choose_rows(layer, x, out, batch, limit, seed + 1009 * next(calls))))

        return add_rows

    handles = [
        layers[name].register_forward_hook(
            hook(layer_sums, rows_per_batch(layers[name], n_batches, per_feature)), with_kwargs=True
        )
        for name, layer_sums in sums.items()
    ]
    with remove_hooks_on_exit(handles):
        yield
