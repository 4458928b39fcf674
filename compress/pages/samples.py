"""The samples that changed their answer, as a page shows them: small pictures, texts, recordings, boxes.

What is shown is bounded: pictures by their edge, recordings by their seconds, all of it by `MOST_BYTES`.
"""

from __future__ import annotations

import io
import wave
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from PIL import Image

from runtime.bundle.format import Manifest, find_left_out, read_samples
from runtime.encode.audio import AUDIO, RATE
from runtime.judge.changes import ChangedSample, Changes, shorten
from runtime.tasks import find_task
from runtime.tasks.base import name_class

MOST_BYTES = 700_000
"""Of all pictures and recordings of a page, in base64."""
EDGE = 224
"""Pixels of a picture's longer side."""
SECONDS = 6.0
"""Of a recording that is played."""
LEAST_SCORE, SAME_OVERLAP = 0.3, 0.5
"""Of boxes: the score of those that are drawn, and the overlap from which two are the same."""
MOST_CHARACTERS = 600
MOST_LABELS = 12
"""Labels of an answer that are written out."""
LABEL = "label"


@dataclass(frozen=True)
class Box:
    """A box in shares of the picture's width and height, 0 to 1. `of`: both, before alone, after alone, or truth."""

    of: str
    x: float
    y: float
    width: float
    height: float
    title: str


@dataclass
class ShownSample:
    """A sample as the page shows it."""

    number: int
    picture: str = ""
    """A data: address."""
    sharp: bool = False
    """Whether the picture has few pixels, so that they are shown as squares."""
    size: tuple[int, int] = (1, 1)
    """Width and height of the picture, for boxes."""
    recording: str = ""
    texts: list[tuple[str, str]] = field(default_factory=list)
    """(column, text)."""
    boxes: list[Box] = field(default_factory=list)
    truth: str = ""
    before: str = ""
    after: str = ""
    values: list[tuple[str, float | None, float]] = field(default_factory=list)
    """(metric, baseline, candidate)."""
    note: str = ""


def show_samples(root: Path, manifest: Manifest, changes: Changes) -> list[ShownSample]:
    """Return the changed samples of the bundle in `root`, those of the report in its order. Raises BundleError."""
    if not changes.samples or manifest.evaluation is None or find_left_out(root, manifest):
        return []
    columns = read_samples(root, manifest)
    left = MOST_BYTES
    shown = []
    for change in changes.samples:
        if not 0 <= change.sample < manifest.evaluation.n_samples:
            continue  # a report that somebody changed
        sample = _show(change, columns, manifest)
        size = len(sample.picture) + len(sample.recording)
        if size > left:
            sample.picture, sample.recording, sample.boxes = "", "", []
            sample.note = "not shown: the page would grow too large"
        else:
            left -= size
        shown.append(sample)
    return shown


def _show(change: ChangedSample, columns: Mapping[str, Any], manifest: Manifest) -> ShownSample:
    row = change.sample
    sample = ShownSample(row, before=describe(change.baseline), after=describe(change.candidate))
    sample.values = [(name, before, after) for name, (before, after) in change.values.items()]
    for name, column in columns.items():
        value = column[row]
        if name == "image" and isinstance(value, np.ndarray) and value.dtype == np.uint8:
            _show_picture(sample, value)
        elif name == AUDIO:
            _show_recording(sample, value, columns.get(RATE), row)
        elif isinstance(value, str) and name != LABEL:
            sample.texts.append((name, _cut(value)))
    if LABEL in columns:
        sample.truth = _describe_truth(columns[LABEL], row, manifest)
    if sample.picture:
        sample.boxes = [
            *_truth_boxes(columns.get(LABEL), row, manifest, sample.size),
            *_compare_boxes(change, sample.size),
        ]
    return sample


def describe(answer: Any) -> str:
    """Return a model's answer as `Task.predict` gives it in a few words: "cat 93 %", "cat 93 %, dog 4 %", a text."""
    if answer is None:
        return ""
    if isinstance(answer, Mapping):
        label, score = answer.get("label"), answer.get("score")
        name = "no answer" if label is None else str(label)
        return _cut(f"{name} {100 * score:.0f} %" if _is_share(score) else name)
    if isinstance(answer, (list, tuple)):
        parts = [describe(item) for item in answer[:MOST_LABELS]]
        rest = f" and {len(answer) - MOST_LABELS} more" if len(answer) > MOST_LABELS else ""
        return (", ".join(parts) or "nothing") + rest
    return _cut(f"{answer:.5g}" if isinstance(answer, float) else str(answer))


def _is_share(score: Any) -> TypeGuard[float]:
    return isinstance(score, (int, float)) and not isinstance(score, bool) and 0 <= score <= 1


def _cut(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else text[:MOST_CHARACTERS] + "…"


def _describe_truth(labels: Any, row: int, manifest: Manifest) -> str:
    """Return the label of a sample in words; "" of what is no class, number or text (maps, boxes)."""
    classes = find_task(manifest.task).find_classes(labels)
    if classes is not None:
        return str(name_class(int(classes[row]), manifest.class_names))
    label = labels[row]
    if isinstance(label, str):
        return _cut(label)
    array = np.asarray(label)
    if array.dtype.kind not in "biuf" or array.size > MOST_LABELS or array.ndim > 1:
        return ""
    return describe(shorten(array.reshape(-1).tolist() if array.ndim else float(array)))


def _show_picture(sample: ShownSample, pixels: np.ndarray) -> None:
    """Add a picture of uint8 pixels [H, W] or [H, W, C]."""
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[..., 0]
    if pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] not in (3, 4)) or not pixels.size:
        return
    image = Image.fromarray(np.ascontiguousarray(pixels))
    sample.size = image.size
    sample.sharp = max(image.size) <= EDGE // 2
    image.thumbnail((EDGE, EDGE))
    lossless = sample.sharp or image.mode == "RGBA"
    file = io.BytesIO()
    image.save(file, "PNG" if lossless else "JPEG", optimize=True)
    sample.picture = _address("image/png" if lossless else "image/jpeg", file.getvalue())


def _show_recording(sample: ShownSample, waveform: Any, rates: Any, row: int) -> None:
    """Add the first seconds of a recording as 16-bit wav. `waveform`: int16, or floats of -1 to 1, [T] or [T, C]."""
    signal = np.asarray(waveform)
    if signal.dtype.kind not in "if" or not signal.size or rates is None:
        return
    rate = int(rates[row])
    signal = signal if signal.ndim == 1 else signal.mean(axis=1)
    seconds, signal = len(signal) / rate, signal[: int(SECONDS * rate)]
    if waveform.dtype.kind == "f":
        signal = 32767 * np.clip(signal, -1, 1)
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(rate)
        writer.writeframes(signal.astype("<i2").tobytes())
    sample.recording = _address("audio/wav", file.getvalue())
    sample.note = f"the first {SECONDS:g} of {seconds:.1f} s" if seconds > SECONDS else f"{seconds:.1f} s"


def _address(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{b64encode(content).decode()}"


def _compare_boxes(change: ChangedSample, size: tuple[int, int]) -> list[Box]:
    """Return the boxes that both models find, and those that one alone does; of those that are sure enough."""
    before, after = (_list_boxes(answer, size) for answer in (change.baseline, change.candidate))
    boxes = []
    for box in before:
        partner = max(after, key=lambda other: _overlap(box, other), default=box)
        if _overlap(box, partner) >= SAME_OVERLAP and partner in after:
            after.remove(partner)
            boxes.append(replace(box, of="both", title=f"{box.title}, now {partner.title}"))
        else:
            boxes.append(replace(box, of="before"))
    return [*boxes, *(replace(box, of="after") for box in after)]


def _list_boxes(answer: Any, size: tuple[int, int]) -> list[Box]:
    """Return the boxes of a detector's answer, whose corners are in the picture's pixels."""
    found = []
    for item in answer if isinstance(answer, list) else ():
        corners, score = (item.get("box"), item.get("score")) if isinstance(item, Mapping) else (None, None)
        if not _is_share(score) or score < LEAST_SCORE or not isinstance(corners, list) or len(corners) != 4:
            continue
        if all(isinstance(edge, (int, float)) for edge in corners):
            found.append(_make_box("", corners, size, describe(item)))
    return found


def _overlap(a: Box, b: Box) -> float:
    """Return the intersection of two boxes over their union."""
    width = min(a.x + a.width, b.x + b.width) - max(a.x, b.x)
    height = min(a.y + a.height, b.y + b.height) - max(a.y, b.y)
    both = max(width, 0.0) * max(height, 0.0)
    return both / max(a.width * a.height + b.width * b.height - both, 1e-12)


def _truth_boxes(labels: Any, row: int, manifest: Manifest, size: tuple[int, int]) -> list[Box]:
    """Return the boxes of a label float64 [m, 7]: class (-1 for none), x1, y1, x2, y2, ignored, area."""
    label = None if labels is None or manifest.detections is None else np.asarray(labels[row])
    if label is None or label.ndim != 2 or label.shape[1] < 5:
        return []
    boxes = [numbers for numbers in label.tolist() if numbers[0] >= 0]
    return [_make_box("truth", b[1:5], size, str(name_class(int(b[0]), manifest.class_names))) for b in boxes]


def _make_box(of: str, corners: Sequence[float], size: tuple[int, int], title: str) -> Box:
    left, top, right, bottom = (
        min(max(edge / side, 0.0), 1.0) for edge, side in zip(corners, (*size, *size), strict=True)
    )
    return Box(of, left, top, right - left, bottom - top, title)
