"""Labelled boxes: COCO's JSON and VOC's folders as tables, and whatever way columns hold boxes brought into one form.

A cell of the column OBJECTS is {"boxes": float64 [m, 4] (x1, y1, x2, y2, pixels), "classes": m names or numbers,
"ignored": m of `runtime.boxes.match`'s COUNTED, CROWD, DIFFICULT, "areas": m, or None: those of the boxes}.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

import numpy as np

from compress.data.columns import USUAL_NAMES
from compress.data.table import Table
from compress.errors import SourceError
from compress.specs import DataSpec
from runtime.boxes.match import COUNTED, CROWD, DIFFICULT
from runtime.bundle.columns import Array
from runtime.bundle.files import sha256_of

OBJECTS = "objects"
BOXES, XYWH_BOXES = ("boxes", "bboxes_xyxy"), ("bbox", "bboxes")
"""Names of boxes: corners, and COCO's corner and size."""
CLASSES = ("classes", "category", "categories", "class", "label", "labels", "category_id", "class_labels")
CROWDS, DIFFICULTS, AREAS = ("iscrowd", "is_crowd"), ("difficult",), ("area", "areas")
ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".JPG", ".JPEG", ".PNG")


def arrange_objects(table: Table, spec: DataSpec) -> Table:
    """Return the table with its boxes in one form: a column OBJECTS, or that which the recipe names for the label.

    They stand in one column, or in one of boxes beside one of classes. A table without boxes stays as it is. Reading
    raises SourceError that names file, column, row and box.
    """
    label = spec.columns.get("label")
    named = label if isinstance(label, str) else None  # a number is of files without a header, which hold no boxes
    if named == OBJECTS and OBJECTS not in table.lengths:  # as drafts name the column that is made here
        named = None
    usual = (OBJECTS, "annotations", *USUAL_NAMES["label"])
    boxes = next((name for name in BOXES + XYWH_BOXES if name in table.lengths and named in (None, name)), None)
    source = named if named is not None else next((name for name in usual if name in table.lengths), None)
    beside = None if source == OBJECTS else boxes
    source = beside or source
    if source is None or source not in table.lengths:
        return table
    name = named or OBJECTS

    def read(column: str, rows: Array) -> Any:
        if column != name:
            return table.read(column, rows)
        return _read_objects(table, spec, source, beside is not None, rows)

    lengths = {column: n for column, n in table.lengths.items() if column not in usual}
    return replace(table, lengths=lengths | {name: table.lengths[source]}, read=read)


def _read_objects(table: Table, spec: DataSpec, source: str, beside: bool, rows: Array) -> list[dict[str, Any]]:
    """Read cells of objects: of the column `source`, or of it and those `beside` it."""
    cells, names = table.read(source, rows), table.label_names.get(source)
    if beside:
        others = [name for names in (CLASSES, CROWDS, DIFFICULTS, AREAS) for name in names if name in table.lengths]
        parts = {name: table.read(name, rows) for name in (source, *others)}
        cells = [{name: values[i] for name, values in parts.items()} for i in range(len(rows))]
        names = next((table.label_names[name] for name in others if name in table.label_names), None)
    return [
        _read_cell(cell, spec, _fail_at(table, source, int(row)), names) for cell, row in zip(cells, rows, strict=True)
    ]


def _fail_at(table: Table, column: str, row: int) -> Callable[[str], SourceError]:
    return lambda problem: SourceError(f"{table.where}: column '{column}', {table.place(row)}: {problem}")


def _read_cell(
    cell: Any, spec: DataSpec, fail: Callable[[str], SourceError], names: Sequence[str] | None
) -> dict[str, Any]:
    """Read a sample's boxes: a dict of lists, a list of dicts, or rows of numbers (class, box, ignored, area)."""
    if isinstance(cell, np.ndarray) and cell.ndim == 2 and 5 <= cell.shape[1] <= 7:
        rows = cell[cell[:, 0] >= 0].astype(np.float64)
        cell = {"boxes": rows[:, 1:5], "classes": rows[:, 0].tolist()}
        cell |= {"ignored": rows[:, 5].tolist()} if rows.shape[1] > 5 else {}
        cell |= {"area": rows[:, 6].tolist()} if rows.shape[1] > 6 else {}
    elif isinstance(cell, (list, tuple)) and all(isinstance(item, dict) for item in cell):
        keys = list(dict.fromkeys(key for item in cell for key in item))
        for number, item in enumerate(cell):
            if lacking := [key for key in keys if key not in item]:
                raise fail(f"box {number} has no '{lacking[0]}', which others have")
        cell = {key: [item[key] for item in cell] for key in keys} if keys else {"boxes": [], "classes": []}
    if not isinstance(cell, Mapping):
        raise fail(f"expected an object with {BOXES[0]} and {CLASSES[0]}, found {type(cell).__name__}")
    key, classes_key = _find_key(cell, BOXES + XYWH_BOXES), _find_key(cell, CLASSES)
    if key is None or classes_key is None:
        wanted = XYWH_BOXES[0] + " or " + BOXES[0] if key is None else " or ".join(CLASSES[:2])
        raise fail(f"has no {wanted}; it has: {', '.join(map(str, cell)) or 'nothing'}")
    classes = [value.item() if isinstance(value, np.generic) else value for value in cell[classes_key]]
    boxes = _to_corners(cell[key], spec.boxes or ("xywh" if key in XYWH_BOXES else "xyxy"), fail)
    if len(boxes) != len(classes):
        raise fail(f"{len(boxes)} boxes and {len(classes)} classes")
    kept = [place for place, value in enumerate(classes) if isinstance(value, str) or value != -1]  # -1 fills up
    if names is not None:
        classes = [names[value] if isinstance(value, int) and 0 <= value < len(names) else value for value in classes]
    ignored = list(cell.get("ignored", [COUNTED] * len(classes)))
    for flagged, value in ((CROWDS, CROWD), (DIFFICULTS, DIFFICULT)):
        if (flags := _find_key(cell, flagged)) is not None:
            ignored = [value if flag else old for flag, old in zip(cell[flags], ignored, strict=True)]
    areas_key = _find_key(cell, AREAS)
    return {
        "boxes": boxes[kept],
        "classes": [classes[place] for place in kept],
        "ignored": [ignored[place] for place in kept],
        "areas": None if areas_key is None else [float(cell[areas_key][place]) for place in kept],
    }


def _find_key(cell: Mapping[str, Any], names: Sequence[str]) -> str | None:
    return next((name for name in names if name in cell), None)


def _to_corners(given: Any, form: str, fail: Callable[[str], SourceError]) -> Array:
    """Return boxes as float64 [m, 4] corners."""
    for number, box in enumerate(given):
        fits = np.ndim(box) == 1 and len(box) == 4 and all(np.isscalar(side) for side in box)
        if not fits or not all(not isinstance(side, str) and np.isfinite(side) for side in box):
            raise fail(f"box {number} is {_show(box)}, not four numbers")
    boxes = np.array([list(box) for box in given], np.float64).reshape(-1, 4)
    first, second = boxes[:, :2], boxes[:, 2:]
    if form == "xywh":
        return np.concatenate([first, first + second], axis=1)
    if form == "cxcywh":
        return np.concatenate([first - second / 2, first + second / 2], axis=1)
    return boxes


def _show(box: Any) -> str:
    return str(box.tolist() if isinstance(box, np.ndarray) else box)[:80]


def open_coco(path: Path, images: Path) -> Table:
    """Open a COCO JSON as a table: columns image, paths inside the folder `images`, and OBJECTS. SourceError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
        listed = sorted(content["images"], key=lambda image: image["id"])
        names = {category["id"]: str(category["name"]) for category in content["categories"]}
        files = [images / image["file_name"] for image in listed]
        of_image: dict[Any, list[dict[str, Any]]] = {image["id"]: [] for image in listed}
        annotations = content["annotations"]
    except (ValueError, KeyError, TypeError) as error:
        raise SourceError(f"{path}: is not COCO's JSON of images, annotations and categories: {error!r}") from error
    for number, annotation in enumerate(annotations):
        where = f"{path}: annotations[{number}]"
        try:
            category, owner, box = annotation["category_id"], annotation["image_id"], annotation["bbox"]
        except (KeyError, TypeError) as error:
            raise SourceError(f"{where}: has no {error}") from error
        if owner not in of_image or category not in names:
            what = f"image {owner}" if owner not in of_image else f"category {category}"
            raise SourceError(f"{where}: {what} is not listed in the file")
        item = {"bbox": box, "category": names[category], "iscrowd": bool(annotation.get("iscrowd", 0))}
        of_image[owner].append(item | ({"area": annotation["area"]} if "area" in annotations[0] else {}))
    cells = [of_image[image["id"]] for image in listed]
    _check_files(path, files)
    return _make_table(str(path), files, cells.__getitem__, [path])


def open_voc(folder: Path, split: str | None) -> Table:
    """Open a VOC folder as a table: columns image and OBJECTS. SourceError.

    It has Annotations/*.xml, JPEGImages/ and, for a split, ImageSets/Main/SPLIT.txt. Corners are taken as they stand.
    """
    notes = folder / "Annotations"
    if split is None:
        stems = sorted(file.stem for file in notes.glob("*.xml"))
    else:
        listing = folder / "ImageSets" / "Main" / f"{split}.txt"
        if not listing.is_file():
            known = sorted(file.stem for file in listing.parent.glob("*.txt"))
            raise SourceError(f"{folder}: there is no {listing}; splits: {', '.join(known) or 'none'}")
        stems = [line.split()[0] for line in listing.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    if not stems:
        raise SourceError(f"{folder}: no annotations: {notes}/*.xml, or those that the split names, are needed")
    sheets = [notes / f"{stem}.xml" for stem in stems]
    _check_files(folder, sheets)
    files = [_find_image(folder, stem) for stem in stems]
    return _make_table(str(folder), files, lambda row: _read_voc(sheets[row]), sheets)


def _find_image(folder: Path, stem: str) -> Path:
    for ending in ENDINGS:
        if (path := folder / "JPEGImages" / f"{stem}{ending}").is_file():
            return path
    raise SourceError(f"{folder}: {stem} has no image: {folder / 'JPEGImages' / stem}.jpg or .png")


def _check_files(where: Path, files: Sequence[Path]) -> None:
    missing = [file for file in files if not file.is_file()]
    if missing:
        raise SourceError(
            f"{where}: there is no {missing[0]} ({len(missing)} such files); `images:` names their folder"
        )


def _make_table(where: str, files: Sequence[Path], cell: Callable[[int], Any], notes: Sequence[Path]) -> Table:
    """Make a table of images and of what `cell` gives for each row; its digest is of the images and of `notes`."""
    everything = (*notes, *files)
    digests = "".join(f"{sha256_of(file)} {file.name}\n" for file in everything)

    def read(column: str, rows: Array) -> list[Any]:
        return [str(files[row]) if column == "image" else cell(int(row)) for row in rows]

    lengths = dict.fromkeys(("image", OBJECTS), len(files))
    digest = hashlib.sha256(digests.encode()).hexdigest()
    return Table(where, lengths, read, everything, digest, place=lambda row: files[row].name)


def _read_voc(sheet: Path) -> dict[str, Any]:
    """Read a VOC annotation as a cell of OBJECTS. SourceError."""
    boxes: list[list[float]] = []
    classes: list[str] = []
    difficult: list[bool] = []
    for number, item in enumerate(_parse_xml(sheet).iter("object")):
        box, name = item.find("bndbox"), item.findtext("name")
        texts = [None if box is None else box.findtext(side) for side in ("xmin", "ymin", "xmax", "ymax")]
        try:
            boxes.append([float(text) for text in texts if text is not None])
        except ValueError as error:
            raise SourceError(f"{sheet}: box {number}: {error}") from error
        if name is None or len(boxes[-1]) != 4:
            raise SourceError(f"{sheet}: box {number} has no name, or no bndbox with xmin, ymin, xmax and ymax")
        classes.append(name.strip())
        difficult.append((item.findtext("difficult") or "0").strip() == "1")
    return {"boxes": boxes, "classes": classes, "difficult": difficult}


def _parse_xml(path: Path) -> Element:
    """Parse a file of plain elements. SourceError for another, and for one that declares a document type."""
    builder, parser = TreeBuilder(), expat.ParserCreate()

    def refuse(*declared: Any) -> None:
        raise SourceError(
            f"{path}: declares a document type, which may name other files or grow without end; remove it"
        )

    parser.StartElementHandler = builder.start
    parser.EndElementHandler = builder.end
    parser.CharacterDataHandler = builder.data
    parser.StartDoctypeDeclHandler = refuse
    parser.EntityDeclHandler = refuse
    try:
        parser.Parse(path.read_bytes(), True)
        return builder.close()
    except (expat.ExpatError, OSError, AssertionError) as error:
        raise SourceError(f"{path}: cannot be read as XML: {error}") from error
