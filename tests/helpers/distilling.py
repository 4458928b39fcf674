"""Small models to distill, training sets in memory, and a training run for processes that are killed or share it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from compress.blocks.sharing import share
from compress.context import Feeds, Redraw
from compress.distill.batch import Batch
from compress.distill.schedule import TrainingSchedule
from compress.distill.train import Dataset, TrainOptions, train
from compress.distill.training_log import TrainLog
from runtime.progress import Progress, no_progress


class ConvNet(nn.Module):
    """float32 [b, 3, 8, 8] -> logits [b, 4]; two convolutions with batch norm, dropout, a linear layer."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, stride=2), nn.BatchNorm2d(width)
        self.drop, self.fc = nn.Dropout(0.2), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu())).relu()
        return self.fc(self.drop(x.mean((2, 3))))


@dataclass(frozen=True)
class Arrays:
    """A `TrainSet` of arrays."""

    columns: Feeds
    labels: np.ndarray | None = None
    redraw: Redraw | None = None

    @property
    def n(self) -> int:
        return len(next(iter(self.columns.values())))

    def feeds(self, rows: np.ndarray) -> Feeds:
        found = {name: values[rows] for name, values in self.columns.items()}
        if "attention_mask" not in found:
            return found
        width = found["attention_mask"].sum(1).max()
        return {name: values[:, :width] for name, values in found.items()}

    def loss_masks(self, rows: np.ndarray) -> None:
        """All tokens are learned."""


def conv_net(seed: int = 0, width: int = 8) -> ConvNet:
    """With running statistics of the images, and logits that differ."""
    torch.manual_seed(seed)
    net = ConvNet(width)
    with torch.no_grad():
        net.fc.weight *= 8
        for norm in (net.bn1, net.bn2):
            norm.momentum = 1.0
        net.train()(torch.from_numpy(images(64, seed=5).columns["pixel_values"]))
        for norm in (net.bn1, net.bn2):
            norm.momentum = 0.1
    return net.eval().requires_grad_(False)


def images(n: int = 48, seed: int = 0) -> Arrays:
    """Noise, with a colour for each class."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 4, n)
    colours = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1], [-1, -1, -1]])[labels][:, :, None, None]
    noise = random.normal(size=(n, 3, 8, 8))
    return Arrays({"pixel_values": (noise + 0.3 * colours).astype(np.float32)}, labels)


def noisy(net: Any, scale: float = 0.3, seed: int = 1) -> Any:
    """The same net with its matrices and kernels shaken."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.dim() > 1:
                parameter.add_(scale * parameter.std() * torch.randn_like(parameter))
    return net


SCHEDULE = TrainingSchedule(
    steps=12, batch_size=8, learning_rate=0.01, held_out=0.25, evaluate_every=4, warmup=2, save_seconds=0.0
)


def label_dataset(net: nn.Module, data: Arrays, noise: float = 0.1) -> Dataset:
    """Cross-entropy on the labels; images changed by noise, which is drawn anew each time."""

    def batch(rows: np.ndarray, random: np.random.Generator | None) -> Batch:
        x = data.feeds(rows)["pixel_values"]
        x = x if random is None else x + random.normal(size=x.shape).astype(np.float32) * np.float32(noise)
        assert data.labels is not None
        return Batch(rows, {"x": torch.from_numpy(x)}, torch.ones(len(rows)), torch.from_numpy(data.labels[rows]))

    def loss(one: Batch) -> Tensor:
        assert one.labels is not None
        each = nn.functional.cross_entropy(net(**one.feeds).float(), one.labels, reduction="none")
        return (each * one.weights).sum() / one.weights.sum()

    return Dataset(data.n, batch, loss)


def quiet(work: Path | None = None, **more: Any) -> TrainOptions:
    return replace(TrainOptions("test", lambda text: None, no_progress, work), **more)


def taught(schedule: TrainingSchedule = SCHEDULE, work: Path | None = None, **more: Any) -> tuple[ConvNet, TrainLog]:
    """A net trained on labels, and what happened."""
    net = conv_net().requires_grad_(True)
    return net, train(net, label_dataset(net, images()), schedule, quiet(work, **more))


class Interrupted(Exception):
    """A run ends here."""


def broken_off(*at: int) -> Progress:
    """Progress of loops over numbers that end before these, before each of them once."""
    left = list(at)

    def progress(items: Sequence[Any], text: str, /, most_s: float | None = None) -> Iterator[Any]:
        for item in items:
            if item in left:
                left.remove(item)
                raise Interrupted
            yield item

    return progress


SHARED = replace(SCHEDULE, batch_size=12, optimizer="sgd", learning_rate=0.1)


def train_and_save(out: Path, steps: int, changes: dict[str, Any]) -> list[str]:
    """Train by `SHARED` with its state in `out`; return the log's lines. To be the only work of its process.

    Leaves there, by this process's rank, RANK.safetensors and RANK.json: [curve, looks, samples that it trained on].
    """
    lines: list[str] = []
    seen = 0

    def count(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        nonlocal seen
        seen += len(result) if torch.is_grad_enabled() and isinstance(module, ConvNet) else 0

    torch.nn.modules.module.register_module_forward_hook(count, with_kwargs=True)
    net, log = taught(replace(SHARED, steps=steps, **changes), out, log=lines.append)
    rank = share().rank
    save_file(net.state_dict(), out / f"{rank}.safetensors")
    (out / f"{rank}.json").write_text(json.dumps([log.curve, log.evaluations, seen]))
    return lines
