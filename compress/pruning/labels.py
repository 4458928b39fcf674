"""Labels on the indices of tensors, and which of them are one: removing an index removes all that carry its label."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

Labels = np.ndarray
"""int64 [size of the axis]: a label for each index."""
Axes = tuple[Labels | None, ...]
"""For each axis of a tensor its labels; None: its size is none of our business (batch, tokens, pixels, a head)."""


class Book:
    """Gives out labels and notes which are the same and which cannot be removed, and why."""

    def __init__(self) -> None:
        self.n_labels = 0
        self.pins: dict[str, list[Labels]] = {}
        self.several: list[Labels] = []
        """Units that an axis is split into, each of several rows: heads."""
        self._pairs: list[tuple[Labels, Labels]] = []

    def fresh(self, size: int) -> Labels:
        self.n_labels += size
        return np.arange(self.n_labels - size, self.n_labels)

    def join(self, one: Labels, other: Labels) -> None:
        """Note that the labels are the same unit, index by index. Of equal length."""
        if one is not other:
            self._pairs.append((one, other))

    def pin(self, labels: Labels | None, why: str) -> None:
        if labels is not None:
            self.pins.setdefault(why, []).append(labels.reshape(-1))

    def roots(self) -> np.ndarray:
        """Return int64 [n_labels]: the least label of each label's unit (connected components, by pointer jumping)."""
        parent = np.arange(self.n_labels)
        if not self._pairs:
            return parent
        both = [np.broadcast_arrays(*pair) for pair in self._pairs]
        one, other = (np.concatenate([pair[side].reshape(-1) for pair in both]) for side in (0, 1))
        while True:
            a, b = parent[one], parent[other]
            if np.array_equal(a, b):
                return parent
            np.minimum.at(parent, np.maximum(a, b), np.minimum(a, b))
            while not np.array_equal(parent[parent], parent):
                parent = parent[parent]


def reshape_labels(axes: Axes, shape: Sequence[int], new_shape: Sequence[int], book: Book, where: str) -> Axes:
    """Return the labels after a reshape, in torch's order of elements.

    A merged axis carries those of the one labelled axis in it. A labelled axis that is split keeps its labels on the
    axis they vary along; where they vary along several, one of these is the unit and the others go with it whole.
    """
    new_axes: list[Labels | None] = []
    for old, new in _match_axes(shape, new_shape):
        sizes, wanted = [shape[i] for i in old], [new_shape[i] for i in new]
        if sizes == wanted:
            new_axes += [axes[i] for i in old]
        else:
            new_axes += _split_labels(_merge_labels([axes[i] for i in old], sizes, book, where), wanted, book)
    return tuple(new_axes)


def _match_axes(shape: Sequence[int], new_shape: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Return runs of axes, before and after, that hold the same elements."""
    runs = []
    i = j = 0
    while i < len(shape) or j < len(new_shape):
        old: list[int] = []
        new: list[int] = []
        n = m = 1
        while not (old or new) or n != m:
            if (n <= m and i < len(shape)) or j == len(new_shape):
                n *= shape[i]
                old.append(i)
                i += 1
            else:
                m *= new_shape[j]
                new.append(j)
                j += 1
        runs.append((old, new))
    return runs


def _merge_labels(axes: Sequence[Labels | None], sizes: Sequence[int], book: Book, where: str) -> Labels | None:
    """Return the labels of axes laid out one within the other; None where none of them is labelled."""
    labelled = [i for i, labels in enumerate(axes) if labels is not None and sizes[i] > 1]
    if not labelled:
        return None
    for i in labelled[1:]:
        book.pin(axes[i], f"{where} lays two removable axes into one")
    kept = axes[labelled[0]]
    assert kept is not None
    column = kept.reshape([len(kept) if i == labelled[0] else 1 for i in range(len(sizes))])
    return np.broadcast_to(column, sizes).reshape(-1)


def _split_labels(labels: Labels | None, sizes: Sequence[int], book: Book) -> list[Labels | None]:
    if labels is None:
        return [None] * len(sizes)
    grid = labels.reshape(sizes)
    varying = [i for i in range(len(sizes)) if sizes[i] > 1 and (grid != np.take(grid, [0], axis=i)).any()]
    if not varying:
        return [None] * len(sizes)
    chosen = unit_axis(varying, sizes)
    lead = np.moveaxis(grid, chosen, 0).reshape(sizes[chosen], -1)  # [units, what goes with each]
    book.join(lead, lead[:, :1])
    if (lead != lead[:, :1]).any():
        book.several.append(lead[:, 0])
    return [lead[:, 0] if i == chosen else None for i in range(len(sizes))]


def unit_axis(varying: Sequence[int], sizes: Sequence[int]) -> int:
    """Return, of the axes that an axis is split into, the one whose indices are units: heads, not what is in a head.

    [3, heads, size] and [heads, 3, size] of fused projections: the longest that is not the last.
    """
    if len(varying) == 1:
        return varying[0]
    return max(varying[:-1], key=lambda i: sizes[i])


def align_labels(
    axes: Sequence[Axes], shapes: Sequence[Sequence[int]], out: Sequence[int]
) -> list[list[Labels | None]]:
    """Return for each axis of a broadcast result the labels of every operand that has that axis at full size.

    None among them: an operand of that size without labels.
    """
    by_axis: list[list[Labels | None]] = [[] for _ in out]
    for labels, shape in zip(axes, shapes, strict=True):
        offset = len(out) - len(shape)
        for i, (label, size) in enumerate(zip(labels, shape, strict=True)):
            if size == out[offset + i] and size > 1:
                by_axis[offset + i].append(label)
    return by_axis


def join_labels(options: Sequence[Labels | None], book: Book, why: str) -> Labels | None:
    """Join what meets index by index and return its labels.

    Labelled indices that meet unlabelled ones stay, and `why` says so.
    """
    labelled = [labels for labels in options if labels is not None]
    for one, other in itertools.pairwise(labelled):
        book.join(one, other)
    if labelled and len(labelled) < len(options):
        book.pin(labelled[0], why)
    return labelled[0] if labelled else None
