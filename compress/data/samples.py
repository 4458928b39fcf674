"""Samples in memory: which rows are drawn, their contents checked, and digests that identify them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from compress.data.boxes import arrange_objects, open_coco, open_voc
from compress.data.chat import LABEL, ChatEncoder
from compress.data.columns import ColumnReader, resolve_roles, resolve_slices, same_roles
from compress.data.live import check_held, draw_held
from compress.data.table import Table, check_path, open_table
from compress.errors import SourceError
from compress.specs import DataSpec
from compress.store.paths import resolve_path
from compress.tasks import find_torch_task
from runtime.bundle.columns import Array, take
from runtime.bundle.samples import digest_columns, digest_rows
from runtime.judge.slices import SET
from runtime.tasks import find_task


@dataclass(frozen=True)
class Samples:
    """`columns` by role, all of length `n`.

    "image": uint8 [N, H, W(, C)], or a list of such images where sizes differ; "text", "text_pair": list[str];
    conversations: "input_ids" and "loss_mask", a list of arrays [t] each; model inputs: [N, ...]; "label": int64 [N]
    classes or float64 [N] scores. `digest`: sha256 over all columns in order, as the bundle's evaluation set has it.
    `row_digests`: one for each sample, over its inputs only. `slices`: column -> a text for each sample, by which
    samples are told apart and which no model reads; "set": its evaluation set's name.
    """

    columns: dict[str, Any]
    n: int
    digest: str
    row_digests: tuple[str, ...]
    slices: dict[str, list[str]] = field(default_factory=dict)
    redraw: Callable[[Array, int], dict[str, Any]] | None = field(default=None, compare=False, repr=False)
    """Of a set that a program holds and that draws at random: numbers of samples, a seed -> their columns anew."""


def load_samples(
    spec: DataSpec,
    root: Path,
    task: str,
    input_names: Sequence[str],
    seed: int,
    n_classes: int | None = None,
    class_names: Sequence[str] = (),
    images: bool = False,
    slices: Sequence[str] = (),
    set_names: Sequence[str] = (),
    chats: ChatEncoder | None = None,
) -> Samples:
    """Load and check the samples of `spec`. Labels that are names are mapped through `class_names`.

    `images`: the model's preprocessing makes its input of images, whatever the task. `slices`: columns to read beside.
    `set_names`: of each of the spec's parts, the evaluation set that it is of. `chats`: encodes conversations.

    With `shuffle`, rows come in the order drawn by the spec's seed (or else `seed`); two specs on one file with one
    seed and `skip` ranges that do not meet share no row. A whole set keeps the file's order.
    Raises SourceError naming file, column, row and rule.
    """
    parts = []
    sliced: dict[str, list[str]] = {name: [] for name in slices if name != LABEL}
    for number, part in enumerate(spec.parts):
        table = open_source(part, root, task)
        roles = resolve_roles(part, table, task, input_names, images, slices)
        rows = draw_rows(part, table, n_rows(table, roles), seed)
        about = n_classes, tuple(class_names), images, part.masks, part.messages, chats
        reader = ColumnReader(table, rows, find_torch_task(task), *about)
        parts.append(reader.read_all(roles))
        for name, column in resolve_slices(part, table, slices).items():
            sliced[name] += reader.read_slice(name, column)
        if set_names:
            sliced[SET] = [*sliced.get(SET, []), *[set_names[number]] * len(rows)]
    same_roles([(part.source, columns) for part, columns in zip(spec.parts, parts, strict=True)])
    filler = find_torch_task(task).filler
    if filler is not None and LABEL in parts[0]:
        labels = _fill_up([part[LABEL] for part in parts], filler)
        parts = [{**part, LABEL: label} for part, label in zip(parts, labels, strict=True)]
    samples = samples_of(
        parts[0] if len(parts) == 1 else {role: _concat_columns([p[role] for p in parts]) for role in parts[0]}
    )
    if spec.redraw is None:
        return replace(samples, slices=sliced)

    def redraw(chosen: Array, seed: int) -> dict[str, Any]:
        columns = draw_held(str(spec.redraw), rows[chosen], seed)
        drawn = replace(table, read=lambda column, places: take(columns, column, places))
        return replace(reader, table=drawn, rows=np.arange(len(chosen))).read_all(roles)

    return replace(samples, slices=sliced, redraw=redraw)


def open_source(spec: DataSpec, root: Path, task: str) -> Table:
    """Open a source as a table, boxes in one form where the task finds them. SourceError."""
    if spec.redraw is not None:
        check_held(spec.redraw)
    kind, _, rest = spec.source.partition(":")
    if kind in ("coco", "voc"):
        path = check_path(spec.source, resolve_path(root, rest), folder=kind == "voc")
        images = path.parent if spec.images is None else resolve_path(root, spec.images)
        table = open_voc(path, spec.split) if kind == "voc" else open_coco(path, images)
    else:
        table = open_table(spec, root)
    return arrange_objects(table, spec) if find_task(task).outputs == "boxes" else table


def _fill_up(pieces: Sequence[Array], filler: int) -> list[Array]:
    """Fill labels [N, most, ...] of several files up to the longest of all."""
    most = max(piece.shape[1] for piece in pieces)
    widths = [(0, 0), (0, 0), (0, 0)]
    return [
        np.pad(piece, [(0, 0), (0, most - piece.shape[1]), *widths[: piece.ndim - 2]], constant_values=filler)
        for piece in pieces
    ]


def _concat_columns(pieces: Sequence[Any]) -> Any:
    """Concatenate one column of several files: an array where all have rows of one shape and type, else a list."""
    arrays = [piece for piece in pieces if isinstance(piece, np.ndarray)]
    if len(arrays) == len(pieces) and len({(array.shape[1:], array.dtype) for array in arrays}) == 1:
        return np.concatenate(arrays)
    return [value for piece in pieces for value in piece]


def samples_of(columns: dict[str, Any]) -> Samples:
    """Make samples of columns of one length, with their digests."""
    n = len(next(iter(columns.values())))
    inputs = {role: column for role, column in columns.items() if role != "label"}
    return Samples(columns, n, digest_columns(columns), digest_rows(inputs))


def overlap(a: Samples, b: Samples) -> int:
    """Count the samples of `b` that stand in `a` too, by the contents of their inputs."""
    known = set(a.row_digests)
    return sum(digest in known for digest in b.row_digests)


def n_rows(table: Table, roles: dict[str, str]) -> int:
    """Return the number of rows of the columns in use; SourceError if there are none."""
    n = min(table.lengths[column] for column in roles.values())
    if n == 0:
        raise SourceError(f"{table.where}: holds no samples")
    return n


def draw_rows(spec: DataSpec, table: Table, n: int, seed: int) -> Array:
    """Draw row numbers int64 [samples] out of `n`; SourceError if the spec asks for more than there are."""
    available = n - spec.skip
    if available <= 0:
        raise SourceError(f"{table.where}: skip: {spec.skip} passes over all {n} rows; skip fewer")
    n_samples = available if spec.samples is None else spec.samples
    if n_samples > available:
        after = f" after skip: {spec.skip}" if spec.skip else ""
        raise SourceError(
            f"{table.where}: samples: {n_samples} wanted, but there are {available} of {n} rows{after}; ask for fewer"
        )
    if spec.shuffle and n_samples < n:
        order = np.random.default_rng(seed if spec.seed is None else spec.seed).permutation(n)
    else:
        order = np.arange(n)
    return order[spec.skip : spec.skip + n_samples]
