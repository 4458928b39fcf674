"""`augment: auto` and `precision: auto`: what the teacher goes on recognising, and what it answers fast in.

An image changed at random teaches only while the teacher still knows what it sees: a mirrored digit does not.
So each change is tried on the teacher alone, and kept where it gives nearly all images the class that it gave before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from compress.blocks.sharing import from_main
from compress.context import PassContext, TrainSet
from compress.distill.datasets import is_channels_first, shift_images
from compress.distill.schedule import Precision
from compress.facts import Note
from compress.models.load import TorchModel
from compress.passes.training import Augmentation, LearningPass
from compress.rounding.outputs import first_output
from compress.tasks import find_torch_task
from compress.work.settled import Settled, keep, recall
from compress.work.training import batches_of
from runtime.clock.turns import time_in_turns

BATCH = 64
GAIN = 0.9
"""Of the float32 time, that bfloat16 must stay below. A processor's flags tell nothing: a training step of ResNet-56
takes 1.4 times as long in it on a Xeon that has AVX512-BF16 and no AMX."""
TIMED_S, MOST_TIMED_S = 0.2, 2.0
"""Seconds of one answer from which on no more rows are added to a batch, and of all that are timed."""
FILE = "precision.json"
"""In a pass's folder of unfinished work: what was chosen, so that a killed run goes on in it."""
Pass = TypeVar("Pass", bound=LearningPass)
Change = Callable[[np.ndarray, np.random.Generator], np.ndarray]


def settle_changes(
    config: Pass, loaded: TorchModel, teacher: nn.Module, trainset: TrainSet, context: PassContext
) -> tuple[Pass, Settled]:
    """Return the pass with the changes of images and the precision that were left to it; else as it is.

    Images that can be blended are to be, until the schedule's length is known (`settle_schedule`).
    """
    found: dict[str, Any] = {}
    begun = time.monotonic()
    if config.augment == "auto":
        found["augment"] = _find_changes(loaded, teacher, trainset, context.seed)
    if config.precision == "auto":
        found["precision"] = _find_precision(config, loaded, teacher, trainset, context)
    if not found:
        return config, Settled()
    note = Note("info", f"{config.kind}: found: {', '.join(f'{key} {_describe(v)}' for key, v in found.items())}")
    context.log(note.text)
    fields = {key: v.model_dump() if isinstance(v, Augmentation) else v for key, v in found.items()}
    return config.settle(from_main(time.monotonic() - begun), **found), Settled(fields, (note,))


def _find_precision(
    config: LearningPass, loaded: TorchModel, teacher: nn.Module, trainset: TrainSet, context: PassContext
) -> Precision:
    """Return bfloat16 where the device has it, and a CPU answers a batch sooner in it; else float32."""
    if context.device.startswith("cuda"):
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    record = recall(context, FILE)
    if record is None:
        batch_of, most = batches_of(config, trainset, loaded), min(config.batch_size, trainset.n)
        ratio = _time_bfloat16(teacher, lambda n: batch_of(np.arange(n), None).feeds, most)
        record = from_main({"precision": "bfloat16" if ratio < GAIN else "float32"})
        keep(context, FILE, record)
    precision: Precision = record["precision"]
    return precision


@torch.no_grad()
def _time_bfloat16(module: nn.Module, make_feeds: Callable[[int], Mapping[str, Tensor]], most: int) -> float:
    """Return the time of an answer in bfloat16 over that in float32, of as many rows as take a while, or `most`."""

    def answer(feeds: Mapping[str, Tensor], reduced: bool) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=reduced):
            module(**feeds)

    n_rows, seconds = 1, 0.0
    while True:
        feeds = make_feeds(n_rows)
        answer(feeds, False)  # the first of a shape finds its kernels
        begun = time.perf_counter()
        answer(feeds, False)
        seconds = time.perf_counter() - begun
        if seconds > TIMED_S or n_rows == most:
            break
        n_rows = min(2 * n_rows, most)
    answer(feeds, True)
    begun = time.perf_counter()
    answer(feeds, True)
    # Where it is emulated, once tells, though a neighbour's work may double a time: on an EPYC with AVX2 alone, turns
    # of a net of depthwise blocks took 41 s of a training of 60.
    if (once := (time.perf_counter() - begun) / seconds) > 2 / GAIN:
        return once
    calls = [lambda _: answer(feeds, False), lambda _: answer(feeds, True)]
    turns = time_in_turns(calls, 10, budget_s=MOST_TIMED_S, one_thread=torch.get_num_threads() == 1)
    before, after = turns.typical_ms
    return after / before


def _describe(value: Any) -> str:
    if not isinstance(value, Augmentation):
        return str(value)
    parts = [*(["flip"] if value.flip else []), *([f"crop {value.crop}"] if value.crop else [])]
    return " ".join(parts) or "none"  # whether images are blended, the schedule's length decides


def _find_changes(loaded: TorchModel, teacher: nn.Module, trainset: TrainSet, seed: int) -> Augmentation:
    """Return the changes that leave nearly all images their class; none where the task has no classes of images."""
    task = find_torch_task(loaded.task)
    feeds = trainset.feeds(np.arange(min(512, trainset.n)))
    images = next(iter(feeds.values()))
    if task.loss != "classes" or len(feeds) != 1 or images.ndim != 4 or not {1, 3} & {images.shape[1], images.shape[3]}:
        return Augmentation()
    (name,) = feeds

    def give_classes(changed: np.ndarray) -> np.ndarray:
        return _find_classes(teacher, {loaded.parameters.get(name, name): changed})

    before = give_classes(images)

    def bears(change: Change) -> bool:
        after = give_classes(change(images, np.random.default_rng(seed)))
        return float((after == before).mean()) >= 0.9

    side = min(images.shape[2:] if is_channels_first(images.shape) else images.shape[1:3])
    # by so small a part of the shorter side: the largest of them that the teacher bears
    shifts = [side // part for part in (8, 16, 32) if side // part > 0]
    crop = next((n for n in shifts if bears(partial(_shift, n))), 0)
    # Beta's alpha of 1 where images are blended: what a blend is, the teacher says.
    return Augmentation(flip=bears(_mirror_all), crop=crop, mixup=1.0)


def _shift(padding: int, images: np.ndarray, random: np.random.Generator) -> np.ndarray:
    return shift_images(images, padding, random)


def _mirror_all(images: np.ndarray, random: np.random.Generator) -> np.ndarray:
    return np.flip(images, axis=-1 if is_channels_first(images.shape) else -2)


def _find_classes(teacher: nn.Module, feeds: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return int64 [n], the class that the teacher gives each image."""
    (name, images), found = next(iter(feeds.items())), []
    device = next((p.device for p in teacher.parameters()), torch.device("cpu"))
    with torch.no_grad():
        for start in range(0, len(images), BATCH):
            batch = torch.from_numpy(np.ascontiguousarray(images[start : start + BATCH])).to(device)
            logits: Tensor = first_output(teacher(**{name: batch}))
            found.append(logits.argmax(-1).cpu().numpy())
    return np.concatenate(found)
