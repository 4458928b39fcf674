"""A tiny detector that has learned bright squares and bars on noise, and such images.

Its weights lie in trained/, in float16, because a training gives other weights on another processor.
`python tests/helpers/detecting.py` in the repository's root trains it anew, in half a minute.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

WEIGHTS = Path(__file__).parent / "trained" / "detector.safetensors"
CLASSES = ("square", "bar")
SIDE = 64
SIZE = {"n_classes": 2, "width": 4, "depth": 1}
Drawn = tuple[np.ndarray, list[list[float]]]
"""An image uint8 [H, W, 3], and [class, x1, y1, x2, y2] of each object."""


def draw_images(n: int, seed: int, height: int = SIDE, width: int = SIDE) -> list[Drawn]:
    """Return n images with one to three objects that do not touch, each as a `Drawn`."""
    rng = np.random.default_rng(seed)
    drawn: list[Drawn] = []
    for _ in range(n):
        image = rng.integers(0, 90, (height, width, 3), dtype=np.uint8)
        objects: list[list[float]] = []
        taken = np.zeros((height, width), bool)
        for _ in range(rng.integers(1, 4)):
            number, side = int(rng.integers(0, 2)), int(rng.integers(10, 20))
            h, w = (side, side) if number == 0 else (side // 2, side + 8)
            y, x = int(rng.integers(0, height - h)), int(rng.integers(0, width - w))
            if taken[max(y - 2, 0) : y + h + 2, max(x - 2, 0) : x + w + 2].any():
                continue
            taken[y : y + h, x : x + w] = True
            image[y : y + h, x : x + w] = rng.integers(150, 256, (h, w, 3), dtype=np.uint8)
            objects.append([number, x, y, x + w, y + h])
        drawn.append((image, objects))
    return drawn


def make_labels(drawn: list[Drawn]) -> np.ndarray:
    """Return the objects as float64 [N, m, 7]."""
    labels = np.zeros((len(drawn), max(len(objects) for _, objects in drawn), 7))
    labels[..., 0] = -1
    for row, (_, objects) in enumerate(drawn):
        for place, (number, x1, y1, x2, y2) in enumerate(objects):
            labels[row, place] = [number, x1, y1, x2, y2, 0, (x2 - x1) * (y2 - y1)]
    return labels


def write_detector(folder: Path, n: int = 60) -> dict[str, Any]:
    """Write the weights, train.npz and test.npz; return the model, its preprocessing and its data for a recipe."""
    from safetensors.torch import load_file, save_file

    save_file({key: value.float() for key, value in load_file(WEIGHTS).items()}, folder / "detector.safetensors")
    for name, seed in (("train", 1), ("test", 2)):
        drawn = draw_images(n, seed)
        np.savez(folder / f"{name}.npz", image=np.stack([image for image, _ in drawn]), label=make_labels(drawn))
    return {
        "model": {
            "source": "python:compress.zoo.grid_detector:grid_detector",
            "args": SIZE,
            "weights": "detector.safetensors",
            "task": "object-detection",
            "class_names": list(CLASSES),
            "detections": {
                "boxes": "ltrb",
                "scores": "sigmoid",
                "priors": {"strides": [8]},
                "score_threshold": 0.1,
                "most": 20,
            },
        },
        "preprocess": {"kind": "image"},
        "data": {name: {"source": f"npz:{file}.npz"} for name, file in SETS},
    }


SETS = (("calibration", "train"), ("train", "train"), ("evaluation", "test"))


def train() -> None:
    import torch
    from safetensors.torch import save_file

    from compress.zoo.grid_detector import grid_detector, train_detector

    torch.manual_seed(0)
    model = grid_detector(**SIZE)

    def draw_batch(rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = draw_images(16, int(rng.integers(1000, 2**31)))
        images = torch.from_numpy(np.stack([image for image, _ in drawn])).permute(0, 3, 1, 2).float() / 255
        return images, torch.from_numpy(make_labels(drawn)).float()

    losses = list(train_detector(model, draw_batch, 1200, 5e-3))
    print(f"loss {np.mean(losses[:20]):.3f} -> {np.mean(losses[-20:]):.3f}")
    weights = {key: value.half() if value.is_floating_point() else value for key, value in model.state_dict().items()}
    save_file(weights, WEIGHTS)


if __name__ == "__main__":
    train()
