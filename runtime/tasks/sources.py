"""Samples that a user names and does not hold: a folder of images or sounds, a .jsonl or an .npz with many samples."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runtime.bundle.manifest import Manifest
from runtime.bundle.npz import NpzError, read_arrays
from runtime.errors import UsageError
from runtime.tasks import find_task

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
AUDIO_SUFFIXES = (".wav", ".flac", ".ogg", ".mp3")
FILES = {"image": IMAGE_SUFFIXES, "audio": AUDIO_SUFFIXES}
"""What a sample is a file of -> the endings of such files."""
KINDS = ("imagefolder", "audiofolder", "jsonl", "npz")
"""What may stand before a path, as in a recipe's sources."""


def read_sources(manifest: Manifest, sources: Sequence[str | Path]) -> Any:
    """Return the samples of what is named: columns of one .jsonl or .npz, else paths, a folder's files in its place.

    None where each is a sample itself. UsageError where nothing is there, or it holds no samples.
    """
    role = str(manifest.preprocess["kind"])
    paths = [_find_path(str(source)) for source in sources]
    if len(paths) == 1 and paths[0].suffix in (".npz", ".jsonl"):
        if paths[0].exists():
            return _read_columns(manifest, paths[0])
        if role in FILES:  # else it may be a text that ends so
            raise UsageError(f"{paths[0]}: no such file")
    if role not in FILES or not any(path.is_dir() for path in paths):
        return None
    return [file for path in paths for file in (_list_files(path, role) if path.is_dir() else [str(path)])]


def _find_path(text: str) -> Path:
    kind, _, rest = text.partition(":")
    if kind in KINDS and not Path(rest).exists():
        raise UsageError(f"{text}: no such file or folder")
    return Path(rest if kind in KINDS else text)


def _list_files(folder: Path, role: str) -> list[str]:
    files = sorted(str(file) for file in folder.rglob("*") if file.suffix.lower() in FILES[role] and file.is_file())
    if not files:
        raise UsageError(f"{folder}: holds no {role} files ({', '.join(FILES[role])})")
    return files


def _read_columns(manifest: Manifest, file: Path) -> dict[str, Any]:
    """Return the columns that the task reads, of an npz all; files that a jsonl names are sought beside it, too."""
    if file.suffix == ".npz":
        try:
            return read_arrays(file)
        except NpzError as error:
            raise UsageError(f"{file}: cannot be read as arrays: {error}") from error
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise UsageError(f"{file}: is not UTF-8 text: {error}") from error
    rows = [_read_object(file, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise UsageError(f"{file}: holds no samples")
    task = find_task(manifest.task)
    wanted = task.columns or (("image",) if manifest.preprocess["kind"] == "image" else tuple(rows[0]))
    columns: dict[str, Any] = {}
    for name in dict.fromkeys((*wanted[: task.required], *(name for name in wanted if name in rows[0]))):
        missing = next((number for number, row in enumerate(rows, 1) if name not in row), None)
        if missing is not None:
            raise UsageError(f"{file}: sample {missing} has no '{name}'; it has: {', '.join(rows[missing - 1])}")
        columns[name] = [_find_file(file, row[name]) if name in FILES else row[name] for row in rows]
    return columns


def _read_object(file: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{file}: line {number}: is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise UsageError(f"{file}: line {number}: is {type(row).__name__}; each line is an object {{column: value}}")
    return row


def _find_file(file: Path, item: Any) -> Any:
    beside = file.parent / item if isinstance(item, str) else None
    return str(beside) if beside is not None and not Path(item).exists() and beside.exists() else item
