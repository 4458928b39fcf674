"""What places carry along beside the model: the runtime's own code, and the packages that it must find there."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import runtime
from runtime.manifest import Manifest

ON_A_GPU = ("onnxruntime-cuda", "tensorrt", "tensorrt-rtx")
"""Backends that need one."""
SAMPLES = {"text": ("tokenizers",), "language": ("tokenizers", "jinja2"), "image": ("pillow",)}
"""Kind of preprocessing -> what reads its samples."""


def copy_runtime(folder: Path) -> None:
    """The package `runtime` into `folder`, without what Python has compiled of it."""
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    shutil.copytree(Path(runtime.__file__).parent, folder / "runtime", ignore=ignored)


def reading_samples(manifest: Manifest) -> tuple[str, ...]:
    """Packages that turn samples into tensors."""
    return SAMPLES.get(str(manifest.preprocess["kind"]), ())


def write_requirements(folder: Path, names: Sequence[str], pins: Mapping[str, str] | None = None) -> None:
    """requirements.txt: each package in the version of `pins`, else the installed one, else any."""
    versions = {name: (pins or {}).get(name) or _installed(name) for name in names}
    lines = [f"{name}=={version}" if version else name for name, version in versions.items()]
    (folder / "requirements.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _installed(name: str) -> str:
    """Its version; "" where it is not installed. "package[extra]" is the package."""
    try:
        return metadata.version(name.partition("[")[0])
    except metadata.PackageNotFoundError:
        return ""
