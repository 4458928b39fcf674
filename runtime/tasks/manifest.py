"""A bundle's manifest, read and written, with what its task and its samples' encoding ask of it."""

from __future__ import annotations

from pathlib import Path

from runtime.bundle.format import load_manifest, seal_bundle, verify_files
from runtime.bundle.manifest import Manifest
from runtime.bundle.records import from_json
from runtime.encode.images import ImagePreprocess
from runtime.encode.preprocess import spec_from_dict
from runtime.errors import UsageError
from runtime.tasks import TASKS


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of the bundle in the folder `path`; errors as of `runtime.bundle.format.load_manifest`."""
    return load_manifest(path, check_manifest)


def verify(path: Path) -> Manifest:
    """Read the manifest and hold every file against it; errors as of `runtime.bundle.format.verify_files`."""
    return verify_files(path, check_manifest)


def write_bundle(staging: Path, manifest: Manifest) -> Manifest:
    """Make the files under `staging` a bundle; errors as of `runtime.bundle.format.seal_bundle`."""
    return seal_bundle(staging, manifest, check_manifest)


def check_manifest(manifest: Manifest) -> None:
    """Raise ValueError where the samples' encoding, the task, or what it asks of the manifest are not as they must."""
    spec_from_dict(manifest.preprocess)
    if manifest.images is not None:
        from_json(ImagePreprocess, manifest.images.preprocess, "manifest.images.preprocess")
    if manifest.task not in TASKS:
        raise ValueError(f"manifest.task: {manifest.task!r} is not one of {', '.join(TASKS)}")
    try:
        TASKS[manifest.task].check_postprocess(manifest.postprocess)
    except UsageError as error:
        raise ValueError(f"manifest.{error}") from error
    if TASKS[manifest.task].generates != manifest.generates:
        is_there = "is there" if manifest.generates else "missing"
        raise ValueError(f"manifest.generation: {is_there}, and the task is {manifest.task}")
