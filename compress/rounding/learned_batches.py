"""What is learned from: a block's outputs against the float block's, a model's logits or hidden states. Torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from compress.rounding.grid import power_of_two
from compress.rounding.outputs import first_output

MASK = "attention_mask"
NEXT_TOKENS = "next tokens"
"""Beside a sample's feeds, and no parameter's name: the token to be learned at each place, or `UNLEARNED`."""
UNLEARNED = -1
Feeds = Mapping[str, Tensor]
Loss = Literal["kl", "hidden"]
Number = int | tuple[int, int]
"""Of a batch, or of a batch and a part of it."""
CACHE_BYTES = 1 << 30
"""Bytes of a teacher's outputs that are kept; those beyond are computed again each time."""


@dataclass(frozen=True)
class BlockBatch:
    """A micro-batch of a block: relative squared error of its output. `rows`: [B, T], False at padding, or None."""

    forward: Callable[[], Tensor]
    target: Callable[[], Tensor]
    rows: Tensor | None
    n_rows: int

    def loss(self) -> Tensor:
        return relative_error(_select_rows(self.forward(), self.rows), _select_rows(self.target(), self.rows))


@dataclass(frozen=True)
class JoinedBatches:
    """Micro-batches that one step is taken on: the mean of their losses, each counted by its rows.

    `frugal`: what the gradients of one need is computed again when its turn comes, so that no two are held at once.
    """

    loss_batches: Sequence[BlockBatch | OutputBatch]
    part: float = 1.0
    frugal: bool = False

    @property
    def n_rows(self) -> int:
        return sum(batch.n_rows for batch in self.loss_batches)

    def loss(self) -> Tensor:
        losses = [
            checkpoint(batch.loss, use_reentrant=False) if self.frugal else batch.loss() for batch in self.loss_batches
        ]
        weighted = [loss * batch.n_rows for loss, batch in zip(losses, self.loss_batches, strict=True)]
        return torch.stack(weighted).sum() / self.n_rows


def _call(function: Callable[[], Tensor]) -> Tensor:
    return function()


def together(
    loss_batches: Sequence[BlockBatch], rows: int, part: float = 1.0, frugal: bool = False
) -> list[JoinedBatches]:
    """Bundle batches in their order, as many as have no more than `rows` rows, but one at least."""
    bundles: list[list[BlockBatch]] = []
    for batch in loss_batches:
        if not bundles or sum(bundled.n_rows for bundled in bundles[-1]) + batch.n_rows > rows:
            bundles.append([])
        bundles[-1].append(batch)
    return [JoinedBatches(bundle, part, frugal) for bundle in bundles]


@dataclass
class FloatTeacher:
    """The float model. What it gives is kept as long as there is room: `left` bytes.

    `kind` "kl": its outputs are logits, kept as probabilities; "hidden": hidden states. `text_share`: of logits for
    tokens, the part of the probabilities that goes to the token that comes next in the text, as `mark_next_tokens` put
    it beside the feeds.
    """

    module: nn.Module
    kind: Loss
    text_share: float = 0.0
    left: int = CACHE_BYTES
    kept: dict[Number, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def target(self, number: Number, feeds: Feeds, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the target of a batch: (states [n, width], nothing), or (probabilities, each row's entropy [n])."""
        if number in self.kept:
            return self.kept[number]
        with torch.no_grad():
            out = _select_rows(first_output(self.module(**_select_inputs(feeds))), rows).float()
            target = soften_logits(out) if self.kind == "kl" else (out, out.new_zeros(0))
            if self.text_share:
                following = feeds[NEXT_TOKENS]
                target = _add_next_tokens(*target, following[slice(None) if rows is None else rows], self.text_share)
        if (n_bytes := target[0].numel() * target[0].element_size()) <= self.left:
            self.left -= n_bytes
            self.kept[number] = target
        return target


@dataclass(frozen=True)
class OutputBatch:
    """A batch of feeds, by parameter of forward: the module's output against the teacher's."""

    module: nn.Module
    teacher: FloatTeacher
    feeds: Feeds
    number: Number
    n_rows: int
    part: float = 1.0

    def loss(self) -> Tensor:
        """Return the KL divergence from the teacher, nats for a row, or the relative squared error."""
        device = next(self.module.parameters()).device
        feeds = {name: tensor.to(device) for name, tensor in self.feeds.items()}
        rows = _get_mask(feeds)
        target, entropies = self.teacher.target(self.number, feeds, rows)
        out = _select_rows(first_output(self.module(**_select_inputs(feeds))), rows)
        return divergence(out, target, entropies) if self.teacher.kind == "kl" else relative_error(out, target)


def output_batches(
    module: nn.Module,
    teacher: FloatTeacher,
    batches: Sequence[Feeds],
    first: int = 0,
    rank: int = 0,
    size: int = 1,
    rows: int | None = None,
) -> Sequence[OutputBatch | JoinedBatches]:
    """Return what is learned of each batch of samples, numbered from `first` on (the teacher knows them by number).

    Of `size` processes that of number `rank` gets every `size`-th sample of each batch. `rows`: tokens that go through
    the modules at once, at most, unless one sample has more; None: the batch.
    """
    loss_batches = [_make_batch(module, teacher, feeds, first + i, rank, size) for i, feeds in enumerate(batches)]
    return (
        loss_batches if rows is None else [_split_batch(batch, first + i, rows) for i, batch in enumerate(loss_batches)]
    )


def _split_batch(batch: OutputBatch, number: int, rows: int) -> JoinedBatches:
    """Return the batch as several of fewer samples, which are learned from together."""
    n = len(next(iter(batch.feeds.values())))
    at_once = max(1, rows * n // max(batch.n_rows, 1))
    parts = []
    for k, start in enumerate(range(0, n, at_once)):
        feeds = {name: tensor[start : start + at_once] for name, tensor in batch.feeds.items()}
        parts.append(replace(batch, feeds=feeds, number=(number, k), n_rows=_count_rows(feeds)))
    return JoinedBatches(parts, batch.part, frugal=True)


def _make_batch(
    module: nn.Module, teacher: FloatTeacher, feeds: Feeds, number: int, rank: int, size: int
) -> OutputBatch:
    if size == 1:
        return OutputBatch(module, teacher, feeds, number, _count_rows(feeds))
    share = {name: tensor[rank::size] for name, tensor in feeds.items()}
    if not len(next(iter(share.values()))):  # fewer samples than processes: one that counts nothing
        return OutputBatch(module, teacher, {name: tensor[:1] for name, tensor in feeds.items()}, number, 0, 0.0)
    return OutputBatch(module, teacher, share, number, _count_rows(share), _count_rows(share) / _count_rows(feeds))


def relative_error(out: Tensor, target: Tensor) -> Tensor:
    """Return the sum of squared differences over the target's sum of squares."""
    if not target.numel():
        return out.float().sum()
    # Squares of outputs above 1e19 are none in float32. Tiny ones stay: beside them any step of a bias is infinite.
    power = power_of_two(target.abs().amax()).clamp_min(1)
    return ((out.float() - target) / power).square().sum() / (target / power).square().sum().clamp_min(1e-30)


def soften_logits(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return (probabilities [n, classes], each row's entropy [n], nats) of logits, as `divergence` takes them."""
    probabilities = logits.softmax(-1)
    return probabilities, _compute_cross_entropies(logits, probabilities)[0]


def mark_next_tokens(sample: Feeds, ids: str, counted: np.ndarray | None = None) -> dict[str, Tensor]:
    """Return a sample [1, T] with the token that follows each place beside it, under `NEXT_TOKENS`: int64 [1, T].

    `ids`: the parameter that takes the tokens. `counted`: bool [t], t <= T, the tokens that are learned (of a chat the
    assistant's); None: all. `UNLEARNED` where the following token is padding, does not count, or is none.
    """
    tokens, rows = sample[ids].long(), _get_mask(sample)
    there = torch.ones_like(tokens, dtype=torch.bool) if rows is None else rows
    learned = there[:, 1:] & there[:, :-1]  # [1, T - 1]
    if counted is not None:
        chosen = torch.from_numpy(np.asarray(counted, bool))
        learned &= nn.functional.pad(chosen, (0, tokens.shape[1] - len(chosen)))[None, 1:]
    following = tokens[:, 1:].masked_fill(~learned, UNLEARNED)
    return {**sample, NEXT_TOKENS: nn.functional.pad(following, (0, 1), value=UNLEARNED)}


def _add_next_tokens(
    probabilities: Tensor, entropies: Tensor, following: Tensor, share: float
) -> tuple[Tensor, Tensor]:
    """Return probabilities [n, tokens] of which `share` is the text's own next token, where one is learned.

    `following`: int64, n in all, or `UNLEARNED`. The entropies are such that the loss is (1 - share) times the
    divergence from the float model, and share times the cross entropy of the text.
    """
    following = following.reshape(-1)  # [n]
    shares = share * (following != UNLEARNED).float()
    mixed = probabilities * (1 - shares)[:, None]
    return mixed.scatter_add_(1, following.clamp_min(0)[:, None], shares[:, None]), entropies * (1 - shares)


def divergence(logits: Tensor, probabilities: Tensor, entropies: Tensor) -> Tensor:
    """Return the mean KL divergence, nats, of logits [n, classes] from `probabilities` that have `entropies`."""
    return _Divergence.apply(logits.float(), probabilities, entropies)


def arrange_batches(samples: Sequence[Feeds], batch_size: int) -> list[dict[str, Tensor]]:
    """Arrange samples [1, ...] in batches with little padding: sorted by length, padded on the right with zeros.

    Only inputs of the attention mask's shape have their padding taken off and put on; samples without a mask share a
    batch where all their shapes are equal.
    """
    stripped = sorted((_strip_padding(sample) for sample in samples), key=length)
    batches: list[list[dict[str, Tensor]]] = []
    for sample in stripped:
        last = batches[-1] if batches else None
        if last is None or len(last) == batch_size or not _can_share_batch(sample, last[0]):
            batches.append(last := [])
        last.append(sample)
    return [_join_samples(batch) for batch in batches]


def length(sample: Feeds) -> int:
    """Return the tokens of a sample [1, ...]: those of its mask, or the elements of its first input."""
    rows = _get_mask(sample)
    return next(iter(sample.values())).numel() if rows is None else int(rows.sum())


class _Divergence(torch.autograd.Function):
    """Its gradient is worked out with the value, so that few passes go over the classes."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, probabilities: Tensor, entropies: Tensor) -> Tensor:
        crosses, total = _compute_cross_entropies(logits, probabilities)
        n = max(len(logits), 1)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward((logits - total[:, None]).exp_().sub_(probabilities).div_(n))
        return ((crosses - entropies).sum(dtype=torch.float64) / n).float()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.saved_tensors[0] * gradient, None, None


def _compute_cross_entropies(logits: Tensor, probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """Return (each row's cross entropy [n], logarithm of its sum of exponentials [n])."""
    total = torch.logsumexp(logits, -1)
    return total - torch.linalg.vecdot(probabilities, logits), total


def _get_mask(feeds: Feeds) -> Tensor | None:
    mask = feeds.get(MASK)
    return mask.bool() if mask is not None and mask.dim() == 2 else None


def _select_inputs(feeds: Feeds) -> dict[str, Tensor]:
    """Return what a module is called with: all but what is learned from."""
    return {name: tensor for name, tensor in feeds.items() if name != NEXT_TOKENS}


def _count_rows(feeds: Feeds) -> int:
    """Count the tokens, or the samples where there is no mask."""
    rows = _get_mask(feeds)
    return len(next(iter(feeds.values()))) if rows is None else int(rows.sum())


def _select_rows(out: Tensor, rows: Tensor | None) -> Tensor:
    """Return `out` as [n, width], rows of padding left out where it still has the samples' shape."""
    if rows is not None and out.dim() > 2 and out.shape[: rows.dim()] == rows.shape:
        return out[rows]
    return out.reshape(-1, out.shape[-1])


def _strip_padding(sample: Feeds) -> dict[str, Tensor]:
    mask = _get_mask(sample)
    if mask is None:
        return dict(sample)
    return {name: value[:, mask[0]] if value.shape == mask.shape else value for name, value in sample.items()}


def _can_share_batch(sample: Feeds, other: Feeds) -> bool:
    """Return whether two samples can share a batch: shapes equal but for the length that a mask tells."""
    return _get_mask(sample) is not None or all(sample[name].shape == other[name].shape for name in sample)


def _join_samples(batch: Sequence[Feeds]) -> dict[str, Tensor]:
    if _get_mask(batch[0]) is None:
        return {name: torch.cat([sample[name] for sample in batch]) for name in batch[0]}
    longest = max(sample[MASK].shape[1] for sample in batch)

    def pad_input(sample: Feeds, name: str) -> Tensor:
        if sample[name].shape != sample[MASK].shape:
            return sample[name]
        return nn.functional.pad(sample[name], (0, longest - sample[MASK].shape[1]))

    return {name: torch.cat([pad_input(sample, name) for sample in batch]) for name in batch[0]}
