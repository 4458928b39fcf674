"""Images, each pixel of one class."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compress.tasks.base import INT8, Columns, LabelReader, MaskIds, Starter, TorchTask
from runtime.encode.images import ImagePlacement, ImagePreprocess, place_image
from runtime.errors import UsageError
from runtime.tasks.semantic_segmentation import map_dtype, unlabelled

if TYPE_CHECKING:
    from runtime.encode.preprocess import Preprocessor

NO_CLASS = -1
"""A pixel that nothing is learned of."""
BINARY = {0, 255}


def _read_masks(reader: LabelReader, column: str, raw: Sequence[Any]) -> Any:
    """Read the classes of pixels: an array [N, H, W], or a list of such maps, `unlabelled` where there is no class."""
    read = [_load_mask(reader, column, row, item) for row, item in enumerate(raw)]
    present = [np.unique(ids) for ids in read]
    if len(read) > 1 and reader.masks.ignore in BINARY and set(np.concatenate(present).tolist()) == BINARY:
        raise reader.fail(
            column,
            0,
            f"the masks hold 0 and 255 alone, and {reader.masks.ignore} is what has no class: where both are classes, "
            "add `masks: {ids: [0, 255], ignore: -1}` to the set",
        )
    dtype = map_dtype(max(_number_classes(reader, column, row, ids) for row, ids in enumerate(present)))
    masks = [_to_classes(ids, reader.masks, dtype) for ids in read]
    return np.stack(masks) if len({mask.shape for mask in masks}) == 1 else masks


def _number_classes(reader: LabelReader, column: str, row: int, ids: np.ndarray) -> int:
    """Return how many classes a mask with these ids asks for, having checked that they are the model's."""
    rule = reader.masks
    given = ids[ids != rule.ignore]
    strange = given[~np.isin(given, rule.ids)] if rule.ids else given[given < rule.first]
    if strange.size:
        known = f"{', '.join(map(str, rule.ids))}" if rule.ids else f"{rule.first} and above"
        raise reader.fail(column, row, f"pixels of {strange[0]}, and `masks` says that classes are {known}")
    checked = reader.at(np.full(len(given), row)).read_class_ids(column, _number_ids(given, rule), 0)
    return int(checked.max(initial=0)) + 1


def _to_classes(ids: np.ndarray, rule: MaskIds, dtype: np.dtype[Any]) -> np.ndarray:
    """Return the classes of ids [H, W], `unlabelled` where they are ignored."""
    ignored = ids == rule.ignore
    classes = np.full(ids.shape, np.iinfo(dtype).max, dtype)
    classes[~ignored] = _number_ids(ids[~ignored], rule)
    return classes


def _number_ids(ids: np.ndarray, rule: MaskIds) -> np.ndarray:
    """Return the numbers of the classes that ids stand for; those of `rule.ids` alone, where it has some."""
    if not rule.ids:
        return ids - rule.first
    order = np.argsort(rule.ids)
    return order[np.searchsorted(np.array(rule.ids)[order], ids)]


def _load_mask(reader: LabelReader, column: str, row: int, item: Any) -> np.ndarray:
    """Return a mask's ids, int64 [H, W], of an array, a file or a Pillow image: a palette's numbers, not colours."""
    if isinstance(item, (str, Path)):
        item = _open_mask(reader, column, row, Path(item))
    module = sys.modules.get("PIL.Image")
    if module is not None and isinstance(item, module.Image):
        if item.mode not in ("1", "L", "P", "I", "I;16"):
            problem = (
                f"a mask is grey or has a palette, this image is {item.mode}: write the number of each pixel's class"
            )
            raise reader.fail(column, row, problem)
        item = np.asarray(item)
    if not isinstance(item, np.ndarray):
        problem = f"expected a mask: an image or an array, found {type(item).__name__}"
        raise reader.fail(column, row, f"{problem}; for images without masks say `columns: {{image: image}}`")
    ids = item[..., 0] if item.ndim == 3 and item.shape[2] == 1 else item
    if ids.ndim != 2 or ids.dtype.kind not in "biu" or 0 in ids.shape:
        raise reader.fail(column, row, f"a mask is whole numbers [height, width], found {item.dtype} {item.shape}")
    return ids.astype(np.int64)


def _open_mask(reader: LabelReader, column: str, row: int, path: Path) -> Any:
    from PIL import Image

    try:
        with Image.open(path) as image:
            image.load()
            return image
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise reader.fail(column, row, f"{path} cannot be read as an image: {error}") from error


def _find_other_size(columns: Columns) -> tuple[int, str] | None:
    if "label" not in columns or "image" not in columns:
        return None
    for row, (image, mask) in enumerate(zip(columns["image"], columns["label"], strict=True)):
        if image.shape[:2] != mask.shape:
            sizes = [f"{size[0]}x{size[1]}" for size in (mask.shape, image.shape)]
            return (
                row,
                f"the mask is {sizes[0]}, its image {sizes[1]} (height x width); give a mask of the image's size",
            )
    return None


def _place_masks(columns: Columns, preprocessor: Preprocessor) -> np.ndarray | None:
    """Return the classes of the pixels that the model reads, NO_CLASS where there is none: int16 [n, H, W].

    Each takes that of the image's pixel in whose area its centre lies. UsageError where windows differ in size.
    """
    if "label" not in columns:
        return None
    spec = preprocessor.spec
    assert isinstance(spec, ImagePreprocess)  # or it is refused before
    placed = [_place_mask(mask, place_image(mask.shape[0], mask.shape[1], spec)) for mask in columns["label"]]
    if len({mask.shape for mask in placed}) > 1:
        raise UsageError("images differ in size after preprocessing: set resize [h, w] or crop")
    return np.stack(placed)


def _place_mask(mask: np.ndarray, seen: ImagePlacement) -> np.ndarray:
    places = [
        np.floor((np.arange(window) + 0.5 + start) / scale).astype(np.int64)
        for window, start, scale in zip(seen.window, seen.start, seen.scale, strict=True)
    ]
    inside = [(place >= 0) & (place < size) for place, size in zip(places, seen.size, strict=True)]
    rows, columns = (np.clip(place, 0, size - 1) for place, size in zip(places, seen.size, strict=True))
    taken = mask[rows[:, None], columns]
    known = (taken != unlabelled(mask)) & inside[0][:, None] & inside[1]
    return np.where(known, taken.astype(np.int16), NO_CLASS).astype(np.int16)


SEMANTIC_SEGMENTATION = TorchTask(
    name="semantic-segmentation",
    starter=Starter(
        "dir:model",
        """  # maskfolder: images/ and masks/, files of one name; a mask holds the number of each pixel's class, or 255
  calibration: {source: "maskfolder:train", samples: 128}
  evaluation: {source: "maskfolder:test"}
""",
        INT8,
        "    - {metric: miou, max_drop: 0.01}\n",
    ),
    loss="pixel classes",
    pipeline_tag="image-segmentation",
    auto_class="AutoModelForSemanticSegmentation",
    outputs={"logits": ("batch", "classes", "height", "width")},
    read_labels=_read_masks,
    usual_names={"label": ("annotation", "mask", "masks", "segmentation_mask")},
    find_misfit=_find_other_size,
    make_targets=_place_masks,
)
