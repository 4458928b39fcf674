"""A bundle's folder as paths and bytes: which names are allowed, what lies there, and its hashes."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath, PureWindowsPath

from runtime.bundle.onnx_file import external_files
from runtime.errors import BundleError, RuntimeFailure

MAX_NAME_BYTES = 255
PYTHON = (".py", ".pyc", ".pyo", ".pyw", ".pyd", ".pth", ".egg", ".egg-link")
"""Ends of names that Python imports or obeys."""
PICKLES = (".pkl", ".pickle", ".dill", ".joblib", ".pt", ".ckpt", ".bin")
"""Ends of names under which Python objects are kept, which run code when they are loaded."""
PROGRAMS = (".so", ".dll", ".dylib", ".exe", ".com", ".bat", ".cmd", ".ps1", ".sh", ".jar")
CODE_FOLDERS = ("__pycache__", ".dist-info", ".egg-info")


def code_problem(name: str) -> str:
    """Return why a bundle may not hold a file of this relative name: something would run it; "" where nothing would.

    The ends of names count in any case, and without the dots and blanks that Windows cuts off.
    """
    *folders, file = (part.lower().rstrip(". ") for part in name.split("/"))
    if any(folder.endswith(CODE_FOLDERS) for folder in folders):
        return f"{name}: a folder that Python reads modules from; a bundle has no use for it"
    if file.endswith((*PYTHON, *PICKLES, *PROGRAMS)) or ".so." in file:
        return f"{name}: a file that could be run as a program; a bundle has no use for it"
    return ""


def inside(root: Path, relative: str) -> Path:
    """Return root / relative; BundleError for a path that is absolute, holds '..', or leads out of `root` by a link."""
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


@contextmanager
def name_file(root: Path, kind: type[RuntimeFailure] = BundleError) -> Iterator[None]:
    """Turn file-system errors in the context into errors that name the file, or `root` where they name none."""
    try:
        yield
    except OSError as error:
        raise kind(f"{error.filename or root}: {error.strerror or error}") from error


def write_whole(path: Path, data: bytes) -> None:
    """Write `data` under another name first, so that no half of it ever stands under `path`, also after a crash."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(data)
        put_in_place(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def put_in_place(draft: Path, path: Path) -> None:
    """Give a finished file its name: its bytes are on the disk before, the name is afterwards."""
    sync(draft)
    os.replace(draft, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that cannot, as some of FUSE: nothing more can be done
            raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Wait until everything under a folder, and the folder, is on the disk, as `sync` does."""
    for place, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync(Path(place, name))
        sync(Path(place))


def model_files(model: Path) -> tuple[Path, ...]:
    """Return the .onnx file, that of its encoder or of what sees for it, and the external data that they name.

    BundleError if one is missing or outside the model's folder: the names come from a file that we do not trust.
    """
    if not model.is_file():
        raise BundleError(f"{model}: the model file is missing")
    graphs = (model, *(other for other in (find_encoder(model), find_vision(model)) if other is not None))
    data = [inside(model.parent, name) for name in sorted({name for graph in graphs for name in external_files(graph)})]
    missing = [path.name for path in data if not path.is_file()]
    if missing:
        raise BundleError(f"{model}: its external data is missing: {', '.join(missing)}")
    return (*graphs, *data)


ENCODER = "encoder.onnx"
"""Name of an encoder-decoder's encoder, beside its decoder, which a bundle lists as the model."""


def find_encoder(model: Path) -> Path | None:
    """Return the encoder that lies beside the .onnx file of an encoder-decoder's decoder; None of any other model."""
    encoder = model.with_name(ENCODER)
    return encoder if model != encoder and encoder.is_file() else None


VISION = "vision.onnx"
"""Name of what makes features of one image, beside a decoder that also sees."""


def find_vision(model: Path) -> Path | None:
    """Return what sees for the decoder in that .onnx file, and lies beside it; None of any other model."""
    vision = model.with_name(VISION)
    return vision if model != vision and vision.is_file() else None


def single_file(path: Path) -> tuple[Path, ...]:
    """Return the one file of an engine or of a GGUF model. BundleError if it is missing."""
    if not path.is_file():
        raise BundleError(f"{path}: the file is missing")
    return (path,)


def ir_files(xml: Path) -> tuple[Path, ...]:
    """Return an OpenVINO IR's .xml and the .bin beside it, its weights. BundleError if one is missing."""
    weights = xml.with_suffix(".bin")
    missing = [path.name for path in (xml, weights) if not path.is_file()]
    if missing:
        raise BundleError(f"{xml}: a file of the IR is missing: {', '.join(missing)}")
    return xml, weights


def model_size(model: Path) -> int:
    """Return the bytes of an .onnx file with its external data; errors as in `model_files`."""
    return sum(file.stat().st_size for file in model_files(model))


def checkpoint_files(config: Path) -> tuple[Path, ...]:
    """Return the safetensors files beside a checkpoint's config.json.

    BundleError if there is none, or one is missing that model.safetensors.index.json names.
    """
    if not config.is_file():
        raise BundleError(f"{config}: the checkpoint's config is missing")
    shards = tuple(sorted(config.parent.glob("*.safetensors")))
    index = config.parent / "model.safetensors.index.json"
    missing = sorted(_read_index(index) - {shard.name for shard in shards}) if index.is_file() else []
    if missing or not shards:
        raise BundleError(f"{config.parent}: shard missing: {', '.join(missing) or 'there is no .safetensors file'}")
    return shards


def _read_index(index: Path) -> set[str]:
    try:
        return set(map(str, json.loads(index.read_text("utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BundleError(f"{index}: not the index of a checkpoint: {error}") from error


def checkpoint_size(config: Path) -> int:
    """Return the bytes of a checkpoint's tensors; errors as in `checkpoint_files`."""
    return sum(file.stat().st_size for file in checkpoint_files(config))


def regular_files(root: Path) -> tuple[dict[str, Path], list[str]]:
    """Return each regular file under `root` by relative name, and a problem for all that is no file or folder."""
    files: dict[str, Path] = {}
    problems: list[str] = []

    def report(error: OSError) -> None:
        problems.append(f"{Path(error.filename).relative_to(root).as_posix()}: cannot be read: {error.strerror}")

    for folder, subfolders, names in os.walk(root, onerror=report):
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
    """Return the sha256 of the file's bytes, as 64 hexadecimal digits. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_name(part: str) -> bool:
    return "\0" not in part and len(part.encode("utf-8", "surrogatepass")) <= MAX_NAME_BYTES and part.isprintable()
