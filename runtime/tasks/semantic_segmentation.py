"""Images, each pixel of one class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from runtime.bundle.columns import Array, stack_rows
from runtime.bundle.tensors import TensorSpec
from runtime.encode.images import ImagePlacement, ImagePreprocess, place_image
from runtime.errors import BundleError, UsageError
from runtime.metrics.base import Columns, Flaws, Metric, Outputs, remember, share_of_sums
from runtime.tasks.base import (
    IMAGE_SIZE,
    BatchFacts,
    Task,
    Tensors,
    check_rows,
    describe_shapes,
    name_class,
    one_output,
    rename,
)

STRIP = 2**22
"""Logits that are resized at once: a whole image of 3000 x 2000 pixels and 150 classes would take 3.6 GB."""


class SemanticSegmentation(Task):
    """Choose one class for each pixel of an image, as large as it came.

    Outputs: {"classes": uint8 [N, H, W] (uint16 from 256 classes on), or where images differ in size an array of
    objects [N] that holds such maps, with `unlabelled` where preprocessing cut the pixel off, so that no model saw it;
    "score": float32 [N], the mean probability of the chosen classes over the model's own output; "n_classes": uint16
    [N]}. A model with one channel has two classes: 1 where its logit is above 0.
    """

    name = "semantic-segmentation"
    about = "one class for each pixel of an image"
    columns = ("image",)
    preprocess = "image"
    outputs = "maps"
    always = ("score", "n_classes")
    facts = (IMAGE_SIZE,)

    def read_outputs(self, outputs: Tensors, batch: BatchFacts) -> dict[str, Array]:
        """Return the maps of the one output [B, C, h, w], resized to the images' own sizes. BundleError."""
        candidates = [outputs["logits"]] if "logits" in outputs else [o for o in outputs.values() if o.ndim == 4]
        if len(candidates) != 1 or candidates[0].ndim != 4 or candidates[0].dtype.kind != "f":
            raise BundleError(
                f"a model that segments has one output [batch, classes, height, width] of logits; this model: "
                f"{describe_shapes(outputs)}; call that output 'logits'"
            )
        check_rows("logits", candidates[0], batch.n)
        spec = batch.spec
        assert isinstance(spec, ImagePreprocess)  # or it is refused before
        if spec.layout != "NCHW":
            raise BundleError(f"preprocess.layout is {spec.layout}: a model that segments has its channels first")
        logits = add_background(candidates[0].astype(np.float32, copy=False))
        sizes = [(int(height), int(width)) for height, width in batch.known[IMAGE_SIZE]]
        maps = [choose_classes(row, place_image(*size, spec)) for row, size in zip(logits, sizes, strict=True)]
        with np.errstate(over="ignore", invalid="ignore"):  # the largest class's softmax; NaN where logits are broken
            shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
            mean: Array = (1 / shifted.sum(axis=1)).mean(axis=(1, 2)).astype(np.float32)
        return {
            "classes": stack_rows(maps),
            "score": mean,
            "n_classes": np.full(batch.n, logits.shape[1], np.uint16),
        }

    def check_frozen(self, file: str, outputs: Tensors) -> None:
        """Raise BundleError, too, where the maps are missing, or are none."""
        super().check_frozen(file, outputs)
        maps = outputs.get("classes", ())
        if not len(maps) or not all(m.ndim == 2 and m.dtype.kind == "u" for m in maps):
            raise BundleError(f"{file}: holds no maps under classes, as of {self.name}; build the bundle again")

    def join_batches(self, name: str, parts: Sequence[Array]) -> Array:
        """Return one output of all samples; maps of several sizes as objects."""
        if name != "classes" or len({part.shape[1:] for part in parts}) == 1:
            return super().join_batches(name, parts)
        return stack_rows([row for part in parts for row in part])

    def predict(self, outputs: Tensors, class_names: Sequence[str]) -> list[Any] | None:
        """Return for each image {"label", "score"} of each class in it: the share of its pixels, largest first."""
        return [
            _list_shares(classes, int(n), class_names)
            for classes, n in zip(outputs["classes"], outputs["n_classes"], strict=True)
        ]

    def answers(self, outputs: Tensors, class_names: Sequence[str]) -> dict[str, Array]:
        """Return classes uint8 or uint16 [n, H, W], objects [n] for several sizes, and score float32 [n, 1]."""
        return {"classes": stack_rows(list(outputs["classes"])), "score": outputs["score"][:, None]}

    def answer_specs(self, outputs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        """Return the specs of `answers`."""
        logits = one_output(outputs, "logits")
        n_classes = logits.shape[1]
        kind = map_dtype(n_classes).name if isinstance(n_classes, int) else "uint8"
        return rename(logits, "classes", kind, "height", "width"), rename(logits, "score", "float32", 1)

    def metrics(self) -> tuple[Metric, ...]:
        """Return mean IoU and Dice over classes, pixel accuracy, and how many pixels get the baseline's class."""
        return _make_metrics()


def map_dtype(n_classes: int) -> np.dtype[Any]:
    """Return the type of maps of so many classes: its largest number stays free, for `unlabelled`."""
    return np.dtype(np.uint8 if n_classes <= np.iinfo(np.uint8).max else np.uint16)


def unlabelled(classes: Array) -> int:
    """Return the number that says "no class" in a map of labels or of answers: the largest of its type."""
    return int(np.iinfo(classes.dtype).max)


def add_background(logits: Array) -> Array:
    """Return logits [B, C, h, w]; of one channel [B, 2, h, w], zeros before it: softmax then is its sigmoid."""
    return np.concatenate([np.zeros_like(logits), logits], axis=1) if logits.shape[1] == 1 else logits


def choose_classes(logits: Array, seen: ImagePlacement) -> Array:
    """Return the class of each pixel of an image [H, W], of logits float32 [C, h, w] over what the model saw of it.

    Logits are resized bilinearly, as torch.nn.functional.interpolate does with align_corners=False, then the largest
    one is taken. Pixels that the model did not see are `unlabelled`.
    """
    n_classes, height, width = logits.shape
    rows, columns = (
        _find_neighbours(size, scale, start, window, n)
        for size, scale, start, window, n in zip(
            seen.size, seen.scale, seen.start, seen.window, (height, width), strict=True
        )
    )
    classes = np.empty(seen.size, map_dtype(n_classes))
    n_rows = max(1, STRIP // max(1, n_classes * seen.size[1]))
    for top in range(0, len(classes), n_rows):
        strip = slice(top, top + n_rows)
        resized = _blend(logits, rows[0][strip], rows[1][strip, None], axis=1)  # [C, s, w]
        classes[strip] = _blend(resized, columns[0], columns[1], axis=2).argmax(axis=0)  # of [C, s, W]
    classes[rows[2]] = classes[:, columns[2]] = unlabelled(classes)
    return classes


def _find_neighbours(size: int, scale: float, start: int, window: int, n: int) -> tuple[Array, Array, Array]:
    """Return for each pixel of a side of an image the logit before it, the next one's weight, whether it is unseen."""
    places = (np.arange(size) + 0.5) * scale - start  # in pixels of what the model saw
    at = np.clip(places * (n / window) - 0.5, 0, n - 1)
    before = np.minimum(at.astype(np.int64), max(n - 2, 0))
    return before, (at - before).astype(np.float32), (places < 0) | (places >= window)


def _blend(values: Array, before: Array, share: Array, axis: int) -> Array:
    """Return values between `before` and its next along an axis, by the next one's share."""
    first = np.take(values, before, axis)
    if not share.any():
        return first
    after = np.take(values, np.minimum(before + 1, values.shape[axis] - 1), axis)
    blended: Array = first + (after - first) * share
    return blended


def _list_shares(classes: Array, n_classes: int, class_names: Sequence[str]) -> list[dict[str, Any]]:
    counts = np.bincount(classes.reshape(-1), minlength=n_classes)[:n_classes]
    return [
        {"label": name_class(c, class_names), "score": float(counts[c] / classes.size)}
        for c in np.argsort(-counts, kind="stable")
        if counts[c]
    ]


def count_pixels(outputs: Outputs, labels: Any) -> Columns:
    """Return the pixels of each image and class that are right, that the labels have, and that were chosen.

    int64 [N, C] each. Pixels without a label count nowhere; those that the model did not see were chosen as nothing.
    `labels`: maps [N, H, W], or a list of them. UsageError where they are not the images', or of other classes.
    """
    maps, n_classes = outputs["classes"], int(outputs["n_classes"][0])
    if len(labels) != len(maps):
        raise UsageError(f"labels: {len(labels)} masks for {len(maps)} images")
    columns = [_count_one(row, *pair, n_classes) for row, pair in enumerate(zip(maps, labels, strict=True))]
    right, real, chosen = (np.stack(column) for column in zip(*columns, strict=True))
    if not real.any():
        raise UsageError("labels: no pixel has a class")
    return right, real, chosen


def class_ious(outputs: Outputs, labels: Any) -> Array:
    """Return the intersection over union of each class, float64 [C]; NaN for one that is nowhere."""
    right, real, chosen = (column.sum(axis=0) for column in count_pixels(outputs, labels))
    with np.errstate(invalid="ignore"):
        ious: Array = right / (real + chosen - right)
    return ious


def _count_one(row: int, classes: Array, mask: Any, n_classes: int) -> tuple[Array, Array, Array]:
    mask = np.asarray(mask)
    if mask.shape != classes.shape or mask.dtype.kind != "u":
        raise UsageError(f"labels: row {row} is {mask.dtype} {list(mask.shape)}, and its image {list(classes.shape)}")
    known = mask != unlabelled(mask)
    real, chosen = mask[known].astype(np.int64), classes[known].astype(np.int64)
    if real.size and real.max() >= n_classes:
        raise UsageError(f"labels: row {row} has class {real.max()}, and the model has {n_classes} classes")
    seen = chosen[chosen != unlabelled(classes)]
    counted = (real[real == chosen], real, seen)
    right, labelled, found = (np.bincount(ids, minlength=n_classes) for ids in counted)
    return right, labelled, found


def count_same_pixels(outputs: Outputs, baseline: Outputs) -> Columns:
    """Return the pixels of each image that get the baseline's class, and those it saw: int64 [N] each."""
    pairs = list(zip(outputs["classes"], baseline["classes"], strict=True))
    seen = [theirs != unlabelled(theirs) for _, theirs in pairs]
    same = [((ours == theirs) & where).sum() for (ours, theirs), where in zip(pairs, seen, strict=True)]
    return np.array(same, np.int64), np.array([where.sum() for where in seen], np.int64)


def count_baseline_pixels(outputs: Outputs, baseline: Outputs) -> Columns:
    """Return `count_pixels` with the baseline's maps as labels."""
    return count_pixels(outputs, list(baseline["classes"]))


def _average_classes(weight: float) -> dict[str, Any]:
    """Return `statistic` and `influence` of the mean over classes of right / (w * (real + chosen) + (1 - 2w) * right).

    A weight of 1 is the intersection over union, 1/2 is Dice; classes that are neither in labels nor chosen are left
    out (as scikit-learn's macro average over the labels that are there).
    """

    def whole(columns: Columns) -> Array:
        right, real, chosen = columns
        total: Array = weight * (real + chosen) + (1 - 2 * weight) * right
        return total

    def ratios(columns: Columns) -> tuple[Array, Array]:
        """Return each class's ratio, and its sum below the line, of those that are there."""
        below = whole(columns).sum(axis=0)
        return columns[0].sum(axis=0) / np.where(below > 0, below, 1), below

    def statistic(columns: Columns) -> float:
        found, below = ratios(columns)
        return float(found[below > 0].mean())

    def influence(columns: Columns) -> Array:
        found, below = ratios(columns)
        there = below > 0
        added = (columns[0] - found * whole(columns))[:, there] / below[there]  # [N, classes that are there]
        each: Array = added.mean(axis=1) * len(columns[0])
        return each

    return {"statistic": statistic, "influence": influence}


def _reach_of_classes(columns: Columns) -> float:
    """Bound the move of a mean over classes where a share of the images turns: as many pixels lost as wrongly found."""
    real = columns[1]
    there = real.any(axis=0)
    shares = real[:, there] / real[:, there].sum(axis=0)
    return float(min(2 * shares.mean(axis=1).max(), 1.0) * len(real))


def _make_metrics() -> tuple[Metric, ...]:
    # here, for where metrics are listed, tasks are asked for theirs
    count = remember(count_pixels)

    def has_flaws(columns: Columns) -> Array:
        return np.any((columns[0] < columns[1]) | (columns[0] < columns[2]), axis=1)

    flaws = Flaws(of=has_flaws, reach=_reach_of_classes)
    shared: dict[str, Any] = {
        "higher_is_better": True,
        "fits": ("maps",),
        "unit": "fraction",
        "range": (0.0, 1.0),
        "shape": "any",
        "kind": "statistic",
    }
    iou, dice = _average_classes(1.0), _average_classes(0.5)
    return (
        Metric(
            name="miou",
            against="labels",
            about="mean over classes of intersection over union, of all images' pixels that have a label",
            reduce=count,
            flaws=flaws,
            **iou,
            **shared,
        ),
        Metric(
            name="pixel_accuracy",
            against="labels",
            about="fraction of the pixels with a label whose class is right",
            reduce=count,
            **share_of_sums(_sum_classes),
            **shared,
        ),
        Metric(
            name="dice",
            against="labels",
            about="mean over classes of Dice's coefficient, the F1 of pixels",
            reduce=count,
            flaws=flaws,
            on_request=True,
            **dice,
            **shared,
        ),
        Metric(
            name="pixel_agreement",
            against="baseline",
            about="fraction of pixels to which candidate and baseline give the same class",
            reduce=count_same_pixels,
            ideal=1.0,
            **share_of_sums(),
            **shared,
        ),
        Metric(
            name="miou_baseline",
            against="baseline",
            about="mean over classes of intersection over union with the baseline's pixels",
            reduce=count_baseline_pixels,
            ideal=1.0,
            flaws=flaws,
            **iou,
            **shared,
        ),
    )


def _sum_classes(counts: Array) -> Array:
    """Return the counts of each image over all its classes, [N]; what has none is as it is."""
    total: Array = counts.reshape(len(counts), -1).sum(axis=1)
    return total
