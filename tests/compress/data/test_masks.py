"""Masks: every source gives the same classes, and each mask that does not fit is named with what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from compress.data import inspect_data, load_samples
from compress.data.training import make_encoded_set
from compress.errors import SourceError
from compress.specs import DataSpec
from runtime.bundle.tensors import TensorSpec
from runtime.encode.preprocess import ImagePreprocess, make_preprocessor

TASK = "semantic-segmentation"
RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (3, 6, 5, 3), dtype=np.uint8)
MASKS = RNG.integers(0, 3, (3, 6, 5), dtype=np.uint8)
MASKS[:, 0] = 255


def load(source: str, root: Path, n_classes: int | None = 3, **spec: Any) -> dict[str, Any]:
    return load_samples(DataSpec(source=source, **spec), root, TASK, (), seed=0, n_classes=n_classes).columns


def palette(mask: np.ndarray) -> Image.Image:
    image = Image.fromarray(mask).convert("L").copy()
    coloured = Image.new("P", image.size)
    coloured.putpalette([7, 200, 9] * 256)
    coloured.putdata(mask.reshape(-1).tolist())
    return coloured


def write_folder(folder: Path, names: tuple[str, str] = ("images", "masks"), masks: Any = MASKS) -> Path:
    for name in names:
        (folder / name / "town").mkdir(parents=True)
    for i, (image, mask) in enumerate(zip(IMAGES, masks, strict=True)):
        Image.fromarray(image).save(folder / names[0] / f"town/{i}.png")
        written = mask if isinstance(mask, Image.Image) else palette(mask) if i else Image.fromarray(mask)
        written.save(folder / names[1] / f"town/{i}.png")
    return folder


def test_every_source_gives_the_same(tmp_path: Path) -> None:
    write_folder(tmp_path / "folder")
    write_folder(tmp_path / "split/train", ("image", "annotations"))
    write_folder(tmp_path / "ade", ("images/val", "annotations/val"))
    np.savez(tmp_path / "a.npz", image=IMAGES, mask=MASKS)
    from datasets import Dataset, Features
    from datasets import Image as Feature

    rows = {"image": [Image.fromarray(i) for i in IMAGES], "annotation": [palette(m) for m in MASKS]}
    data = Dataset.from_dict(rows, Features({"image": Feature(), "annotation": Feature()}))
    data.to_parquet(str(tmp_path / "a.parquet"))
    found = [
        load("npz:a.npz", tmp_path),
        load("maskfolder:folder", tmp_path),
        load("maskfolder:split", tmp_path, split="train"),
        load("maskfolder:ade", tmp_path, split="val"),
        load("parquet:a.parquet", tmp_path),
    ]
    for columns in found:
        assert np.array_equal(columns["image"], IMAGES)
        assert columns["label"].dtype == np.uint8 and np.array_equal(columns["label"], MASKS)
    facts = inspect_data(DataSpec(source="maskfolder:folder"), tmp_path, TASK, ())
    assert (facts.n_rows, facts.shapes["label"]) == (3, ((6, 5), "uint8"))


@pytest.mark.parametrize(
    ("masks", "ids", "wanted"),
    [
        ([[0, 1, 2]], {"first": 1, "ignore": 0}, [[255, 0, 1]]),  # ADE20K
        ([[0, 255, 0]], {"ids": (0, 255), "ignore": -1}, [[0, 1, 0]]),
        ([[30, 10, 7]], {"ids": (30, 10), "ignore": 7}, [[0, 1, 255]]),
        ([[0, 1, 255]], {}, [[0, 1, 255]]),
        ([[0, 299, 255]], {"ignore": 255}, [[0, 299, 65535]]),
    ],
)
def test_what_numbers_stand_for(tmp_path: Path, masks: Any, ids: Any, wanted: Any) -> None:
    mask = np.array([masks] * 3, np.uint16)
    np.savez(tmp_path / "a.npz", image=np.zeros((3, 1, 3, 3), np.uint8), mask=mask)
    found = load("npz:a.npz", tmp_path, 300, masks=ids)["label"]
    assert found[0].tolist() == wanted


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (np.full((6, 5), 3, np.uint8), r"masks/town/1.png: label 3 is not in 0..2, the model's classes"),
        (np.zeros((5, 6), np.uint8), r"masks/town/1.png: the mask is 5x6, its image 6x5"),
        (Image.fromarray(IMAGES[0]), r"masks/town/1.png: a mask is grey or has a palette, this image is RGB"),
    ],
)
def test_masks_that_do_not_fit(tmp_path: Path, mask: Any, message: str) -> None:
    write_folder(tmp_path / "a", masks=[MASKS[0], mask, MASKS[2]])
    with pytest.raises(SourceError, match=message):
        load("maskfolder:a", tmp_path)


def test_folders_that_do_not_fit(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a")
    (folder / "masks/town/2.png").unlink()
    with pytest.raises(SourceError, match=r"images/town/2 has no file of its name in .*masks \(1 such files\)"):
        load("maskfolder:a", tmp_path)
    (folder / "images/town/0.jpg").write_bytes(b"x")
    with pytest.raises(SourceError, match="the same name but for its ending"):
        load("maskfolder:a", tmp_path)
    (folder / "image").mkdir()
    with pytest.raises(SourceError, match="it has images and image"):
        load("maskfolder:a", tmp_path)
    with pytest.raises(SourceError, match="day/images/, images/day/"):
        load("maskfolder:a", tmp_path, split="day")


@pytest.mark.parametrize(
    ("masks", "spec", "message"),
    [
        (np.array([0, 255], np.uint8), {}, "0 and 255 alone, and 255 is what has no class"),
        (np.array([0, 2], np.uint8), {"ids": (0, 1)}, "pixels of 2, and `masks` says that classes are 0, 1"),
        (np.array([0.0, 1.0]), {}, "whole numbers"),
    ],
)
def test_numbers_that_say_nothing(tmp_path: Path, masks: Any, spec: Any, message: str) -> None:
    np.savez(tmp_path / "a.npz", image=np.zeros((3, 1, 2, 3), np.uint8), mask=np.array([[masks]] * 3))
    with pytest.raises(SourceError, match=message):
        load("npz:a.npz", tmp_path, masks=spec)
    with pytest.raises(ValueError, match="must differ"):
        DataSpec(source="npz:a.npz", masks={"ids": (0, 255)})


def test_what_is_learned_lies_where_the_model_looks(tmp_path: Path) -> None:
    """An image whose grey is its mask: what the model reads and what it shall say are the same."""
    greys = np.repeat(np.repeat(RNG.integers(0, 3, (2, 6, 8), dtype=np.uint8), 2, 1), 2, 2)  # 12 x 16
    np.savez(tmp_path / "a.npz", image=greys[..., None].repeat(3, -1), mask=greys)
    samples = load_samples(DataSpec(source="npz:a.npz"), tmp_path, TASK, (), seed=0, n_classes=3)
    spec = ImagePreprocess(resize=6, crop=(8, 4), scale=1.0, resample="nearest")
    encoded = make_encoded_set(
        samples, make_preprocessor(spec, (TensorSpec("x", "float32", ("batch", 3, 8, 4)),)), TASK
    )
    targets = encoded.labels
    assert targets is not None and targets.shape == (2, 8, 4)
    assert (targets[:, [0, -1]] == -1).all()  # black that was added: of no class
    assert np.array_equal(encoded.feeds(np.arange(2))["x"][:, 0, 1:-1], targets[:, 1:-1])
