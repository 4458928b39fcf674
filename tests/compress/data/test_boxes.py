"""Labelled boxes of every format come out the same, and what does not fit is named with file, row and box."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from compress.data import load_samples
from compress.errors import SourceError
from compress.specs import DataSpec
from runtime.boxes.match import CROWD, DIFFICULT

NAMES = ("cat", "dog")
LABELS = np.array(
    [
        [[1, 2, 3, 12, 9, 0, 60], [0, 0, 0, 40, 30, 0, 1200]],
        [[-1, 0, 0, 0, 0, 0, 0], [-1, 0, 0, 0, 0, 0, 0]],
        [[0, 5, 5, 15, 25, 0, 200], [-1, 0, 0, 0, 0, 0, 0]],
    ]
)
"""Of three images of 30 x 40."""
CORNERS = [[[2, 3, 12, 9], [0, 0, 40, 30]], [], [[5, 5, 15, 25]]]
XYWH = [[[2, 3, 10, 6], [0, 0, 40, 30]], [], [[5, 5, 10, 20]]]
WORDS = [["dog", "cat"], [], ["Cat"]]
NUMBERS = [[1, 0], [], [0]]


@pytest.fixture
def images(tmp_path: Path) -> list[str]:
    names = [f"{i}.png" for i in range(3)]
    (tmp_path / "JPEGImages").mkdir()
    for name in names:
        Image.fromarray(np.full((30, 40, 3), 90, np.uint8)).save(tmp_path / name)
        Image.fromarray(np.full((30, 40, 3), 90, np.uint8)).save(tmp_path / "JPEGImages" / name)
    return names


def read(folder: Path, source: str, **more: Any) -> np.ndarray:
    kind, _, rest = source.partition(":")
    spec = DataSpec(source=f"{kind}:{folder / rest}", **more)
    columns = load_samples(spec, folder, "object-detection", ("x",), 0, None, NAMES).columns
    assert len(columns["image"]) == len(columns["label"])
    labels: np.ndarray = columns["label"]
    return labels


def write_rows(path: Path, images: list[str], **columns: Any) -> None:
    rows = [{name: values[i] for name, values in columns.items()} for i in range(len(images))]
    path.write_text("".join(json.dumps({"image": name, **row}) + "\n" for name, row in zip(images, rows, strict=True)))


def write_coco(path: Path, images: list[str], **first: Any) -> None:
    annotations = [
        {"id": 10 * i + k, "image_id": 7 + i, "category_id": {"cat": 17, "dog": 3}[word.lower()], "bbox": box}
        for i in range(3)
        for k, (word, box) in enumerate(zip(WORDS[i], XYWH[i], strict=True))
    ]
    annotations[0] |= first
    listed = [{"id": 7 + i, "file_name": name, "height": 30, "width": 40} for i, name in enumerate(images)]
    categories = [{"id": 3, "name": "dog"}, {"id": 17, "name": "cat"}]
    path.write_text(json.dumps({"images": listed, "annotations": annotations, "categories": categories}))


def write_voc(folder: Path, images: list[str], more: str = "") -> None:
    (folder / "Annotations").mkdir()
    for i, name in enumerate(images):
        objects = "".join(
            f"<object><name>{word}</name>{more}<bndbox><xmin>{box[0]}</xmin><ymin>{box[1]}</ymin><xmax>{box[2]}</xmax>"
            f"<ymax>{box[3]}</ymax></bndbox></object>"
            for word, box in zip(WORDS[i], CORNERS[i], strict=True)
        )
        (folder / "Annotations" / f"{Path(name).stem}.xml").write_text(f"<annotation>{objects}</annotation>")


def test_columns_of_jsonl(tmp_path: Path, images: list[str]) -> None:
    objects = [{"bbox": box, "category": words} for box, words in zip(XYWH, WORDS, strict=True)]
    write_rows(tmp_path / "objects.jsonl", images, objects=objects)
    write_rows(tmp_path / "corners.jsonl", images, boxes=CORNERS, classes=NUMBERS)
    write_rows(tmp_path / "named.jsonl", images, things=objects)
    middles = [[[x + w / 2, y + h / 2, w, h] for x, y, w, h in boxes] for boxes in XYWH]
    write_rows(tmp_path / "middles.jsonl", images, bbox=middles, category=WORDS)
    one_by_one = [
        [{"bbox": b, "category": w} for b, w in zip(boxes, words, strict=True)]
        for boxes, words in zip(XYWH, WORDS, strict=True)
    ]
    write_rows(tmp_path / "items.jsonl", images, objects=one_by_one)
    assert np.array_equal(read(tmp_path, "jsonl:objects.jsonl"), LABELS)
    assert np.array_equal(read(tmp_path, "jsonl:corners.jsonl"), LABELS)
    assert np.array_equal(read(tmp_path, "jsonl:items.jsonl"), LABELS)
    assert np.array_equal(read(tmp_path, "jsonl:middles.jsonl", boxes="cxcywh"), LABELS)
    assert np.array_equal(read(tmp_path, "jsonl:named.jsonl", columns={"image": "image", "label": "things"}), LABELS)


def test_coco(tmp_path: Path, images: list[str]) -> None:
    write_coco(tmp_path / "plain.json", images)
    assert np.array_equal(read(tmp_path, "coco:plain.json"), LABELS)
    (tmp_path / "labels").mkdir()
    write_coco(tmp_path / "labels/crowd.json", images, iscrowd=1)
    crowd = LABELS.copy()
    crowd[0, 0, 5] = CROWD
    assert np.array_equal(read(tmp_path, "coco:labels/crowd.json", images=str(tmp_path)), crowd)


def test_voc(tmp_path: Path, images: list[str]) -> None:
    write_voc(tmp_path, images, "<difficult>1</difficult>")
    hard = np.where(LABELS[..., :1] >= 0, LABELS + DIFFICULT * (np.arange(7) == 5), LABELS)
    assert np.array_equal(read(tmp_path, "voc:."), hard)
    (tmp_path / "ImageSets/Main").mkdir(parents=True)
    (tmp_path / "ImageSets/Main/val.txt").write_text("2\n0 1\n")
    assert np.array_equal(read(tmp_path, "voc:.", split="val"), hard[[2, 0]])
    with pytest.raises(SourceError, match="splits: val"):
        read(tmp_path, "voc:.", split="test")


def test_arrays(tmp_path: Path) -> None:
    image = np.zeros((3, 30, 40, 3), np.uint8)
    np.savez(tmp_path / "label.npz", image=image, label=LABELS)
    np.savez(tmp_path / "short.npz", image=image, label=LABELS[..., :5])
    np.savez(tmp_path / "apart.npz", image=image, boxes=LABELS[..., 1:5], classes=LABELS[..., 0].astype(int))
    for name in ("label", "short", "apart"):
        assert np.array_equal(read(tmp_path, f"npz:{name}.npz"), LABELS), name


def test_sets_of_several_files(tmp_path: Path, images: list[str]) -> None:
    write_rows(tmp_path / "one.jsonl", images[:1], boxes=CORNERS, classes=NUMBERS)
    write_rows(tmp_path / "two.jsonl", images[1:], boxes=CORNERS[1:], classes=NUMBERS[1:])
    labels = read(tmp_path, "jsonl:one.jsonl", also=(DataSpec(source=f"jsonl:{tmp_path / 'two.jsonl'}"),))
    there = LABELS[..., 0] >= 0
    assert np.array_equal(labels[there], LABELS[there])
    assert (labels[~there, 0] == -1).all()


def test_class_ids_that_a_data_set_names(tmp_path: Path) -> None:
    from datasets import ClassLabel, Dataset, Features, List, Value
    from datasets import Image as ImageFeature

    numbers = [[0, 1], [], [1]]  # the file's order is not the model's
    objects = [{"bbox": box, "category": ids} for box, ids in zip(XYWH, numbers, strict=True)]
    features = Features(
        {
            "image": ImageFeature(),
            "objects": {"bbox": List(List(Value("float32"))), "category": List(ClassLabel(names=["dog", "cat"]))},
        }
    )
    image = Image.fromarray(np.zeros((30, 40, 3), np.uint8))
    Dataset.from_dict({"image": [image] * 3, "objects": objects}, features=features).to_parquet(tmp_path / "a.parquet")
    assert np.array_equal(read(tmp_path, "parquet:a.parquet"), LABELS)


@pytest.mark.parametrize(
    ("box", "word", "message"),
    [
        ([2, 3, 43, 6], "cat", r"box 1 \(x1, y1, x2, y2\) \[2.0, 3.0, 45.0, 9.0\] is outside its image of 40x30"),
        ([40, 3, 0.5, 6], "cat", r"box 1 \(x1, y1, x2, y2\) \[40.0, 3.0, 40.5, 9.0\] is outside its image of 40x30"),
        ([2, 3, 0, 6], "cat", r"box 1 \(x1, y1, x2, y2\) \[2.0, 3.0, 2.0, 9.0\] is empty"),
        ([2, 3, 10, 6], "cow", r"box 1: class 'cow' is none of the model's 2 \(cat, dog\)"),
        ([2, 3, 10, 6], 2, "box 1: class 2 is none of the model's 2"),
        ([2, 3, 10], "cat", r"box 1 is \[2, 3, 10\], not four numbers"),
        ([2, 3, float("nan"), 6], "cat", "box 1 is .*, not four numbers"),
    ],
)
def test_a_box_that_does_not_fit(tmp_path: Path, images: list[str], box: list[float], word: Any, message: str) -> None:
    good = {"bbox": [[0, 0, 9, 9]], "category": ["dog"]}
    objects = [good, good, {"bbox": [*good["bbox"], box], "category": ["dog", word]}]
    write_rows(tmp_path / "bad.jsonl", images, objects=objects)
    with pytest.raises(SourceError, match=rf"bad.jsonl: column 'objects', line 3: {message}"):
        read(tmp_path, "jsonl:bad.jsonl")


def test_a_box_is_cut_off_where_rounding_put_it_outside(tmp_path: Path, images: list[str]) -> None:
    write_rows(tmp_path / "a.jsonl", images[:1], objects=[{"bbox": [[-0.4, 20, 10, 10.6]], "category": ["dog"]}])
    assert read(tmp_path, "jsonl:a.jsonl")[0, 0, 1:5].tolist() == pytest.approx([0, 20, 9.6, 30])


def test_files_that_are_not_what_they_are_called(tmp_path: Path, images: list[str]) -> None:
    write_coco(tmp_path / "stray.json", images, category_id=99)
    with pytest.raises(SourceError, match=r"annotations\[0\]: category 99 is not listed"):
        read(tmp_path, "coco:stray.json")
    write_voc(tmp_path, images)
    bomb = '<!DOCTYPE a [<!ENTITY x "xxxx">]><annotation>&x;</annotation>'
    (tmp_path / "Annotations/1.xml").write_text(bomb)
    with pytest.raises(SourceError, match=r"1\.xml: declares a document type"):
        read(tmp_path, "voc:.")
    (tmp_path / "Annotations/1.xml").write_text("<annotation>")
    with pytest.raises(SourceError, match=r"1\.xml: cannot be read as XML"):
        read(tmp_path, "voc:.")
    (tmp_path / "JPEGImages/2.png").unlink()
    with pytest.raises(SourceError, match="2 has no image"):
        read(tmp_path, "voc:.")
