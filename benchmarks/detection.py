"""Claims of benchmarks/detection.yaml, a detector of blood cells, pruned, distilled, in int8; and of one-to-one heads.

BCCD, its own splits: a small anchor-free detector learns on trainval (292 images, at most 15 minutes on two cores; its
weights stay in benchmarks/.trained/), and is judged on test (72 images). Against ONNX Runtime on the float model, one
CPU thread: the median call at batch 1 at least 3 times as fast, the file at least 4 times smaller, AP50 lower by at
most 0.02; and mean average precision, of both models, as pycocotools has it, to 1e-6. Distilling is bounded to 10
minutes by the recipe. There is no peer: no other tool chains these. Recipes of other claims lie in recipes/claims/.

benchmarks/detection_one_to_one.yaml: a smaller one that ends in boxes, nothing suppressed (YOLOv10's one-to-one head),
of three seeds, each trained for some nine minutes on one core. `{kind: int8}` alone loses at most 0.01 AP50, and 0.02
F1 at the float model's own threshold (`f1_at`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import HERE, Call, Claim, Measured, Row, at_least, at_most, drop, run_recipe, run_script, say, size_ratio
from measuring import ONNXRUNTIME, Entry, Judged, Timing, compare, find_row, open_judged, run_model
from torch import Tensor
from torch.nn import functional as F
from training import find_trained

NEEDS = ("data/bccd/Annotations", "data/bccd/JPEGImages", "data/bccd/ImageSets/Main/trainval.txt")
CLASSES = ("RBC", "WBC", "Platelets")
SIZE, LEARNING_RATE, MOST_SECONDS = (192, 256), 3e-3, 900
TIMINGS = {"latency_p50_ratio_batch1": Timing(1, 300), "latency_p50_ratio_batch8": Timing(8, 60)}
QUICK = ("passes.1.epochs=2", "passes.1.max_seconds=60", "validate.benchmark.iterations=20")
METRICS = ("map", "ap50", "ap75", "f1_at", "box_recall", "box_agreement")


@dataclass(frozen=True)
class Detector:
    """A detector that is trained here: its recipe and factory, and how it learns."""

    recipe: Path
    factory: str
    width: int
    depth: int
    steps: int
    batch: int
    threads: int = 1
    seed: int = 0


PRUNED = "pruned"
DETECTORS = {
    PRUNED: Detector(HERE / "detection.yaml", "grid_detector", 16, 2, 2200, 16, threads=2),
    **{
        f"one-to-one-{seed}": Detector(
            HERE / "detection_one_to_one.yaml", "one_to_one_detector", 8, 1, 2600, 8, seed=seed
        )
        for seed in range(3)
    },
}


def measure(call: Call) -> Measured:
    for split in ("trainval", "test"):
        write_set(call.bench / "data/bccd", split, call.out)
    claims: list[Claim] = []
    rows: list[Row] = []
    for name in call.choose(DETECTORS, quick=2):
        found, measured = (measure_pruned if name == PRUNED else measure_one_to_one)(call, name, DETECTORS[name])
        claims += found
        rows += measured
    return claims, rows


def measure_pruned(call: Call, name: str, detector: Detector) -> Measured:
    seconds = make_weights(call, name, detector)
    sets = (f"vars.work={call.out}", f"vars.weights={name}.safetensors", *(QUICK if call.quick else ()))
    bundle, report = run_recipe(detector.recipe, call, name, sets)
    judged = open_judged(bundle)
    entries = [Entry("float", judged.float_model), Entry("ours", judged.model_for(ONNXRUNTIME))]
    rows = compare(judged, entries, METRICS, TIMINGS)
    gaps = [abs(find_row(rows, entry.model)["map"] - ask_pycocotools(judged, entry)) for entry in entries]
    ours = find_row(rows, "ours")
    claims = [
        at_least("evaluated_images", report["n_samples"], 72),
        at_most("training_seconds", seconds, MOST_SECONDS),
        at_least("float_ap50", rows[0]["ap50"], 0.75),
        at_most("map_gap_to_pycocotools", max(gaps), 1e-6),
        at_most("ap50_drop", drop(report, "ap50"), 0.02),
        at_least("size_ratio", size_ratio(report), 4.0),
        at_least("latency_p50_ratio_batch1", ours.get("latency_p50_ratio_batch1"), 3.0),
    ]
    return claims, rows


def measure_one_to_one(call: Call, name: str, detector: Detector) -> Measured:
    seconds = make_weights(call, name, detector)
    sets = (f"vars.work={call.out}", f"vars.weights={name}.safetensors")
    bundle, report = run_recipe(detector.recipe, call, name, sets)
    judged = open_judged(bundle)
    entries = [Entry(f"{name}: float", judged.float_model), Entry(f"{name}: int8", judged.model_for(ONNXRUNTIME))]
    rows = compare(judged, entries, METRICS, {"latency_p50_ratio_batch1": TIMINGS["latency_p50_ratio_batch1"]})
    claims = [
        at_most(f"{name}: training_seconds", seconds, MOST_SECONDS),
        at_least(f"{name}: float_ap50", rows[0]["ap50"], 0.6),
        at_most(f"{name}: ap50_drop", drop(report, "ap50"), 0.01),
        at_most(f"{name}: f1_at_drop", drop(report, "f1_at"), 0.02),
    ]
    return claims, rows


def write_set(folder: Path, split: str, out: Path) -> None:
    """Write a split as SPLIT.jsonl. Two of BCCD's boxes are points, and are left out."""
    from compress.data.boxes import OBJECTS, open_voc

    table = open_voc(folder, split)
    rows = np.arange(table.lengths["image"])
    lines, left_out = [], 0
    for image, cell in zip(table.read("image", rows), table.read(OBJECTS, rows), strict=True):
        whole = [x2 > x1 and y2 > y1 for x1, y1, x2, y2 in cell["boxes"]]
        left_out += whole.count(False)
        parts = {key: [one for one, kept in zip(cell[key], whole, strict=True) if kept] for key in cell}
        lines.append(json.dumps({"image": image, "objects": parts}))
    say(f"{split}: {len(lines)} images, {left_out} empty boxes left out")
    (out / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def make_weights(call: Call, name: str, detector: Detector) -> float:
    """Put the trained weights into the work folder; the seconds that training took."""
    import compress.zoo.grid_detector as zoo

    if call.quick:
        detector = replace(detector, steps=40)
    settings = (SIZE, LEARNING_RATE, *astuple(detector)[1:])
    code = (zoo, train, read_set, change_images)
    listed = call.out / "trainval.jsonl"
    return find_trained("detection", settings, code, lambda: train(listed, detector), call.out / f"{name}.safetensors")


def train(listed: Path, detector: Detector) -> Any:
    """Train the detector on the images of a jsonl file; it ends in time on a slower machine, too, with a claim lost."""
    import compress.zoo.grid_detector as zoo

    torch.manual_seed(detector.seed)
    torch.set_num_threads(detector.threads)
    images, labels = read_set(listed)
    model = getattr(zoo, detector.factory)(len(CLASSES), detector.width, detector.depth).to(
        memory_format=torch.channels_last
    )

    def draw_batch(rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        rows = torch.from_numpy(rng.integers(0, len(images), detector.batch))
        changed, kept = change_images(images[rows].float() / 255, labels[rows], rng)
        return changed.contiguous(memory_format=torch.channels_last), kept

    losses = []
    for loss in zoo.train_detector(model, draw_batch, detector.steps, LEARNING_RATE, detector.seed):
        losses.append(loss)
        if len(losses) % 100 == 0:
            say(f"step {len(losses)} of {detector.steps}: loss {np.mean(losses[-100:]):.3f}")
    return model


def read_set(listed: Path) -> tuple[Tensor, Tensor]:
    """Images as the model reads them, uint8 [N, 3, H, W], and labels [N, m, 7] in their pixels."""
    from compress.data import load_samples
    from compress.specs import DataSpec
    from runtime.encode.images import ImagePreprocess, image_pixels

    spec = DataSpec(source=f"jsonl:{listed}")
    columns = load_samples(spec, listed.parent, "object-detection", ("image",), 0, None, CLASSES).columns
    labels = columns["label"].copy()
    for row, image in enumerate(columns["image"]):
        labels[row, :, 1:5] *= np.tile([SIZE[1] / image.shape[1], SIZE[0] / image.shape[0]], 2)
    pixels = np.stack([image_pixels(image, ImagePreprocess(resize=SIZE)) for image in columns["image"]])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(labels).float()


def change_images(images: Tensor, labels: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Flip, enlarge, shift and brighten a batch at random; objects that are mostly outside are not learned."""
    n, size = len(images), torch.tensor([SIZE[1], SIZE[0]])
    scale = torch.from_numpy(rng.uniform(0.8, 1.3, (n, 1)) * rng.choice([-1.0, 1.0], (n, 2))).float()
    shift = torch.from_numpy(rng.uniform(-0.2, 0.2, (n, 2))).float()
    matrix = torch.zeros(n, 2, 3)  # what a pixel x from -1 to 1 shows: x / scale + shift
    matrix[:, [0, 1], [0, 1]], matrix[:, :, 2] = 1 / scale, shift
    grid = F.affine_grid(matrix, list(images.shape), align_corners=False)
    changed = F.grid_sample(images, grid, padding_mode="reflection", align_corners=False)
    light = torch.from_numpy(rng.uniform(0.75, 1.25, (n, 3, 1, 1))).float()
    corners = labels[..., 1:5].unflatten(-1, (2, 2)) / size * 2 - 1  # [n, m, corner, x y]
    moved = ((corners - shift[:, None, None]) * scale[:, None, None] + 1) / 2 * size
    low, high = moved.amin(2), moved.amax(2)
    inside = torch.cat([low.clamp_min(0), torch.minimum(high, size)], -1)
    share = (inside[..., 2:] - inside[..., :2]).clamp_min(0).prod(-1) / (high - low).prod(-1).clamp_min(1e-6)
    labels = torch.cat([torch.where(share > 0.4, labels[..., 0], -1.0)[..., None], inside, labels[..., 5:]], -1)
    return (changed * light).clamp(0, 1), labels


def ask_pycocotools(judged: Judged, entry: Entry) -> float:
    """The mean average precision of a model over the frozen samples, by pycocotools."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    outputs = run_model(judged, entry)
    found = [
        box | {"score": box.pop("extra")} for box in list_boxes(outputs["classes"], outputs["boxes"], outputs["scores"])
    ]
    labels = judged.columns["label"]
    real = list_boxes(labels[..., 0], labels[..., 1:5], labels[..., 6])
    coco = COCO()
    coco.dataset = {
        "info": {},
        "images": [{"id": row} for row in range(len(labels))],
        "categories": [{"id": number} for number in range(len(CLASSES))],
        "annotations": [box | {"area": box.pop("extra"), "iscrowd": 0, "id": i + 1} for i, box in enumerate(real)],
    }
    coco.createIndex()
    judge = COCOeval(coco, coco.loadRes(found), "bbox")
    judge.evaluate()
    judge.accumulate()
    judge.summarize()
    return float(judge.stats[0])


def list_boxes(classes: Any, boxes: Any, extra: Any) -> list[dict[str, Any]]:
    """Boxes [N, m, 4] of corners as COCO lists them, with a number more of each."""
    return list(_iterate_boxes(classes, boxes.astype(np.float64), extra))


def _iterate_boxes(classes: Any, boxes: Any, extra: Any) -> Iterator[dict[str, Any]]:
    for row, place in np.argwhere(classes >= 0):
        x1, y1, x2, y2 = boxes[row, place].tolist()
        box = {"image_id": int(row), "category_id": int(classes[row, place]), "bbox": [x1, y1, x2 - x1, y2 - y1]}
        yield box | {"extra": float(extra[row, place])}


if __name__ == "__main__":
    raise SystemExit(run_script(__doc__, NEEDS, measure))
