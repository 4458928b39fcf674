"""Calibration data on its way through the blocks: micro-batches, and tensors held in memory or on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

Feeds = Mapping[str, np.ndarray]
ROWS = 4096
"""Tokens that go through a block at once, at most, unless one sample has more."""
MASK = "attention_mask"
_ROWS: ContextVar[Tensor | None] = ContextVar("rows", default=None)


@contextmanager
def running(rows: Tensor | None) -> Iterator[None]:
    """Let modules know while the context is open which tokens run: `rows` [B, T], False at padding; None: all are some.

    For those that see tokens in another shape than the samples': experts, to which they are routed, and attention.
    """
    token = _ROWS.set(rows)
    try:
        yield
    finally:
        _ROWS.reset(token)


def running_rows() -> Tensor | None:
    """Return what `running` was last given, and is still open."""
    return _ROWS.get()


@dataclass(frozen=True)
class MicroBatch:
    """Samples of equal shape. `feeds`: by parameter of forward. `rows`: [B, T], False at padding; None without."""

    feeds: dict[str, Tensor]
    rows: Tensor | None
    n_rows: int

    def on(self, device: torch.device) -> MicroBatch:
        """Return the same samples on a device."""
        feeds = {name: values.to(device) for name, values in self.feeds.items()}
        return replace(self, feeds=feeds, rows=None if self.rows is None else self.rows.to(device))

    @property
    def first(self) -> dict[str, Tensor]:
        """Return the feeds of one sample; those of all samples where they have no batch dimension in common."""
        alike = len({len(values) for values in self.feeds.values()}) == 1
        return {name: values[:1] if alike else values for name, values in self.feeds.items()}


def micro_batches(
    batches: Iterable[Feeds], parameters: Mapping[str, str], rows: int | None = None
) -> Iterator[MicroBatch]:
    """Yield feeds (by input name) in order as micro-batches: neighbours of equal shape together, large ones in pieces.

    `rows`: tokens in one micro-batch, at most, unless one sample has more; None: `ROWS`.
    """
    most = ROWS if rows is None else rows
    waiting: list[Feeds] = []
    for feeds in (
        piece
        for batch in batches
        for piece in _split_feeds({name: batch[name] for name in with_others(parameters, batch)}, most)
    ):
        if waiting and (_sample_shapes(feeds) != _sample_shapes(waiting[0]) or count_rows([*waiting, feeds]) > most):
            yield _concat_feeds(waiting, parameters)
            waiting = []
        waiting.append(feeds)
    if waiting:
        yield _concat_feeds(waiting, parameters)


def with_others(parameters: Mapping[str, str], feeds: Collection[str]) -> Mapping[str, str]:
    """Return `parameters`, with what feeds bring beside them, by its own name.

    Places in each sample, of rows that hold several; of images what the model's processor made of them.
    """
    return {**parameters, **{name: name for name in feeds if name not in parameters}}


def _split_feeds(feeds: Feeds, rows: int) -> Iterator[Feeds]:
    n = {len(values) for values in feeds.values()}
    most = max(1, rows // _count_rows_per_sample(feeds))
    if len(n) != 1:  # no common batch dimension
        yield feeds
        return
    for start in range(0, n.pop(), most):
        yield {name: values[start : start + most] for name, values in feeds.items()}


def _count_rows_per_sample(feeds: Feeds) -> int:
    first = next(iter(feeds.values()))
    # A sample that is not a row of tokens (an image) counts as 256.
    return first.shape[1] if first.ndim == 2 and first.dtype.kind in "iu" else 256


def count_rows(many: Sequence[Feeds]) -> int:
    """Return how many rows of hidden states the samples become, tokens that are padding among them."""
    return sum(len(next(iter(feeds.values()))) * _count_rows_per_sample(feeds) for feeds in many)


def _sample_shapes(feeds: Feeds) -> dict[str, tuple[int, ...]]:
    return {name: values.shape[1:] for name, values in feeds.items()}


def _concat_feeds(many: list[Feeds], parameters: Mapping[str, str]) -> MicroBatch:
    feeds = {
        parameter: torch.from_numpy(np.concatenate([feeds[name] for feeds in many]))
        for name, parameter in with_others(parameters, many[0]).items()
    }
    mask = feeds.get(parameters.get(MASK, MASK))
    rows = mask.bool() if mask is not None and mask.dim() == 2 and not bool(mask.all()) else None
    return MicroBatch(feeds, rows, int(rows.sum()) if rows is not None else count_rows(many))


class HeldTensor:
    """A tensor on its device, in main memory, or in a file that goes with it; `get()` gives it on its device."""

    def __init__(self, tensor: Tensor, holder: Holder, path: Path | None, stays: bool) -> None:
        self._holder, self._path, self._device = holder, path, tensor.device
        self._room = tensor.nbytes if stays and tensor.device.type != "cpu" else 0
        self._tensor = None if path is not None else tensor if stays else tensor.cpu()
        if path is not None:
            torch.save(tensor.cpu().contiguous(), path)

    def get(self) -> Tensor:
        if self._path is None:
            assert self._tensor is not None
            return self._tensor.to(self._device)
        return torch.load(self._path, weights_only=True).to(self._device)

    def __del__(self) -> None:
        self._holder.room += self._room
        if self._path is not None:
            self._path.unlink(missing_ok=True)


class LeafTensor(HeldTensor):
    """A held tensor that is given out as the leaf of a graph, with respect to which there is a gradient."""

    def __init__(self, held: HeldTensor) -> None:
        self.held = held
        self.leaf: Tensor | None = None

    def get(self) -> Tensor:
        self.leaf = self.held.get().detach().requires_grad_()
        return self.leaf

    def take_gradient(self) -> Tensor | None:
        """Return the gradient of what was last given out, and let go of both; None where nothing came back."""
        gradient = None if self.leaf is None else self.leaf.grad
        self.leaf = None
        return gradient

    def __del__(self) -> None:
        """Do nothing: what is held goes with its own object."""


class Holder:
    """Makes tensors that are held. `folder`: where their files go; None: they stay in memory.

    `room`: bytes of a GPU's memory in which they stay; what is beyond goes to main memory.
    """

    def __init__(self, folder: Path | None, room: int = 0) -> None:
        self._folder, self.room = folder, room
        self._count = 0

    def hold(self, tensor: Tensor) -> HeldTensor:
        self._count += 1
        path = None if self._folder is None else self._folder / f"activation-{self._count}.pt"
        stays = path is None and (tensor.device.type == "cpu" or tensor.nbytes <= self.room)
        if stays and tensor.device.type != "cpu":
            self.room -= tensor.nbytes
        return HeldTensor(tensor, self, path, stays)


class Interned:
    """Keeps one of tensors that are equal: masks and rotary tables of many blocks and micro-batches."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], Tensor] = {}
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._seen:
            data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
            key = (tensor.shape, tensor.stride(), tensor.dtype, hashlib.sha256(data.data).digest())
            self._seen[id(tensor)] = (tensor, self._kept.setdefault(key, tensor.detach()))
        return self._seen[id(tensor)][1]

    def forget(self) -> None:
        """Drop the references to tensors that were not kept; to be called between micro-batches."""
        self._seen.clear()


def map_tensors(value: Any, change: Callable[[Any], Any], kind: type = Tensor) -> Any:
    """Return `value` with `change` applied to every tensor in its tuples, lists and dicts; other objects stay.

    `kind`: what is changed in the place of tensors.
    """
    if isinstance(value, kind):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(map_tensors(item, change, kind) for item in value)
    if type(value) is dict:
        return {key: map_tensors(item, change, kind) for key, item in value.items()}
    return value
