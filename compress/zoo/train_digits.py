"""Train the zoo's digits network: `python -m compress.zoo.train_digits [FOLDER]`.

Writes digits_resnet.safetensors, train.npz and test.npz: `image` uint8 [N, 8, 8] (scikit-learn's 0..16 stretched to
0..255) and `label` int64 [N]. Seed, split and number of threads are fixed, so that the same torch on the same kind of
CPU writes the same bytes. Takes about half a minute.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from compress.zoo.digits_resnet import DIGITS, MEAN, STD, DigitsResNet, digits_resnet

Split = dict[str, Any]
"""`image` and `label` arrays."""


def digits_splits() -> tuple[Split, Split]:
    """Split scikit-learn's 1,797 digits into 1,000 for training and 797 for the test, every class in proportion."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    image = np.rint(digits.images * (255 / 16)).astype(np.uint8)  # [1797, 8, 8]
    label = digits.target.astype(np.int64)
    train, test = train_test_split(np.arange(len(label)), test_size=797, stratify=label, random_state=0)
    return {"image": image[train], "label": label[train]}, {"image": image[test], "label": label[test]}


def normalize_images(image: np.ndarray) -> Tensor:
    """Return the network's input, float32 [N, 1, 8, 8], of images uint8 [N, 8, 8]."""
    return (torch.from_numpy(image)[:, None].float() / 255 - MEAN) / STD


def shift_digits(x: Tensor, generator: torch.Generator) -> Tensor:
    """Move each image [1, 8, 8] of the batch by -1, 0 or 1 pixel along both axes; background comes in at the edge."""
    dy, dx = torch.randint(0, 3, (2, len(x)), generator=generator)
    padded = F.pad(x, (1, 1, 1, 1), value=-MEAN / STD)  # [N, 1, 10, 10]
    return torch.stack([p[:, i : i + 8, j : j + 8] for p, i, j in zip(padded, dy.tolist(), dx.tolist(), strict=True)])


def train(data: Split, epochs: int = 30, batch_size: int = 50, seed: int = 0) -> DigitsResNet:
    """Return a trained network in eval mode. The caller's random state and thread count are left as they were."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums in a fixed order
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return _fit(digits_resnet(), data, epochs, batch_size, torch.Generator().manual_seed(seed))
    finally:
        torch.set_num_threads(n_threads)


def _fit(model: DigitsResNet, data: Split, epochs: int, batch_size: int, generator: torch.Generator) -> DigitsResNet:
    x, y = normalize_images(data["image"]), torch.from_numpy(data["label"])
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    n_steps = epochs * -(-len(y) // batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=n_steps)
    model.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(y), generator=generator).split(batch_size):
            loss = F.cross_entropy(model(shift_digits(x[rows], generator)), y[rows], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def accuracy(model: DigitsResNet, data: Split) -> float:
    """Return the fraction of images whose label has the largest logit."""
    with torch.inference_mode():
        return float(
            (model(normalize_images(data["image"])).argmax(1) == torch.from_numpy(data["label"])).float().mean()
        )


def main(folder: Path = DIGITS) -> None:
    """Train, write the three files and print the accuracies."""
    folder.mkdir(parents=True, exist_ok=True)
    train_set, test_set = digits_splits()
    model = train(train_set)
    np.savez(folder / "train.npz", **train_set)  # not compressed: zlib's bytes change with its version
    np.savez(folder / "test.npz", allow_pickle=False, **test_set)
    save_file(model.state_dict(), folder / "digits_resnet.safetensors")
    print(f"accuracy: train {accuracy(model, train_set):.4f}, test {accuracy(model, test_set):.4f}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
