"""What places carry along beside the model: the runtime's own code, and the packages that it must find there."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import runtime
from runtime.bundle.manifest import Manifest

ON_A_GPU = ("onnxruntime-cuda", "tensorrt", "tensorrt-rtx")
"""Backends that need one."""
SAMPLES = {
    "text": ("tokenizers",),
    "language": ("tokenizers", "jinja2"),
    "seq2seq": ("tokenizers",),
    "image": ("pillow",),
    "audio": ("soundfile", "soxr"),
    "image-text": ("pillow", "tokenizers"),
}
"""Kind of preprocessing -> what reads its samples."""


def copy_runtime(folder: Path) -> None:
    """Copy the package `runtime` into `folder`, without what Python has compiled of it."""
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    shutil.copytree(Path(runtime.__file__).parent, folder / "runtime", ignore=ignored)


def reading_samples(manifest: Manifest) -> tuple[str, ...]:
    """Return the packages that turn samples into tensors."""
    source = manifest.preprocess.get("source")  # of an encoder-decoder: what its encoder reads
    further = SAMPLES.get(str(source.get("kind")), ()) if isinstance(source, dict) else ()
    images = SAMPLES["image"] if manifest.images is not None else ()
    return tuple(dict.fromkeys((*SAMPLES.get(str(manifest.preprocess["kind"]), ()), *further, *images)))


def write_requirements(
    folder: Path, names: Sequence[str], pins: Mapping[str, str] | None = None, comment: str = ""
) -> None:
    """Write requirements.txt, with the lines of `comment` above the packages.

    Each package has the version of `pins`, else the installed one, else any.
    """
    versions = {name: (pins or {}).get(name) or _installed_version(name) for name in names}
    lines = [f"# {line}" for line in comment.splitlines()]
    lines += [f"{name}=={version}" if version else name for name, version in versions.items()]
    (folder / "requirements.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _installed_version(name: str) -> str:
    """Return a package's version, or "" where it is not installed. "package[extra]" is the package."""
    try:
        return metadata.version(name.partition("[")[0])
    except metadata.PackageNotFoundError:
        return ""
