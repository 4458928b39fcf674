"""A bundle's folder as paths and bytes: which names are allowed, what lies there, and its hashes."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path, PurePosixPath, PureWindowsPath

from runtime.errors import BundleError
from runtime.onnx_file import external_files

MAX_NAME_BYTES = 255


def inside(root: Path, relative: str) -> Path:
    """root / relative; BundleError if `relative` is absolute, holds '..', or leads out of `root` through a link."""
    windows, posix = PureWindowsPath(relative), PurePosixPath(relative)
    if windows.drive or windows.root or posix.is_absolute() or ".." in posix.parts:
        raise BundleError(f"path '{relative}' leaves the bundle's folder")
    if str(posix) != relative or relative == "." or "\\" in relative or not all(map(_is_name, posix.parts)):
        raise BundleError(f"path {relative!r} is not a plain relative path with '/' between its parts")
    path = root / relative
    try:
        target = path.resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise BundleError(f"path '{relative}' cannot be followed: {error}") from error
    if not target.is_relative_to(root.resolve()):
        raise BundleError(f"path '{relative}' leads out of the bundle's folder, to {target}")
    return path


def write_whole(path: Path, data: bytes) -> None:
    """Write `data` under another name first, so that no half of it ever stands under `path`."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(data)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def model_files(model: Path) -> tuple[Path, ...]:
    """The .onnx file and the files of external data that it names.

    BundleError if one is missing or outside the model's folder: the names come from a file that we do not trust.
    """
    if not model.is_file():
        raise BundleError(f"{model}: the model file is missing")
    data = [inside(model.parent, location) for location in sorted(external_files(model))]
    missing = [path.name for path in data if not path.is_file()]
    if missing:
        raise BundleError(f"{model}: its external data is missing: {', '.join(missing)}")
    return (model, *data)


def engine_files(engine: Path) -> tuple[Path, ...]:
    """The engine's own file. BundleError if it is missing."""
    if not engine.is_file():
        raise BundleError(f"{engine}: the engine's file is missing")
    return (engine,)


def model_size(model: Path) -> int:
    """Bytes of an .onnx file with its external data; errors as in `model_files`."""
    return sum(file.stat().st_size for file in model_files(model))


def checkpoint_files(config: Path) -> tuple[Path, ...]:
    """The safetensors files beside a checkpoint's config.json.

    BundleError if there is none, or one is missing that model.safetensors.index.json names.
    """
    if not config.is_file():
        raise BundleError(f"{config}: the checkpoint's config is missing")
    shards = tuple(sorted(config.parent.glob("*.safetensors")))
    index = config.parent / "model.safetensors.index.json"
    missing = sorted(_indexed(index) - {shard.name for shard in shards}) if index.is_file() else []
    if missing or not shards:
        raise BundleError(f"{config.parent}: shard missing: {', '.join(missing) or 'there is no .safetensors file'}")
    return shards


def _indexed(index: Path) -> set[str]:
    try:
        return set(map(str, json.loads(index.read_text("utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BundleError(f"{index}: not the index of a checkpoint: {error}") from error


def checkpoint_size(config: Path) -> int:
    """Bytes of a checkpoint's tensors; errors as in `checkpoint_files`."""
    return sum(file.stat().st_size for file in checkpoint_files(config))


def regular_files(root: Path) -> tuple[dict[str, Path], list[str]]:
    """Every regular file under `root` by its relative name, and a problem for each thing that is no file or folder."""
    files: dict[str, Path] = {}
    problems: list[str] = []
    for folder, subfolders, names in os.walk(root):
        for path in (Path(folder, name) for name in sorted([*subfolders, *names])):
            name = path.relative_to(root).as_posix()
            if path.is_symlink():
                problems.append(f"{name}: a link; a bundle holds regular files only")
            elif path.is_file():
                files[name] = path
            elif not path.is_dir():
                problems.append(f"{name}: not a regular file")
    return files, problems


def sha256_of(path: Path) -> str:
    """Of the file's bytes, as 64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_name(part: str) -> bool:
    return "\0" not in part and len(part.encode("utf-8", "surrogatepass")) <= MAX_NAME_BYTES and part.isprintable()
