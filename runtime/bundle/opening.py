"""A model of a bundle as a session: the one place that knows what an engine needs beside its own file."""

from __future__ import annotations

from pathlib import Path

from runtime.backends import Session, find_backend
from runtime.backends.base import Options
from runtime.backends.tensorrt import HOST_CODE, WEIGHTS, check_engine
from runtime.bundle.files import inside, model_files
from runtime.bundle.manifest import Artifact


def open_artifact(
    root: Path, artifact: Artifact, backend: str, threads: int, options: Options | None = None
) -> Session:
    """Open a session of one of the bundle's models. BundleError where its engine cannot run on this machine."""
    path = inside(root, artifact.path)
    if artifact.engine is not None:
        check_engine(path, artifact.engine)
    return find_backend(backend).open(path, threads, open_options(root, artifact, options))


def open_options(root: Path, artifact: Artifact, options: Options | None = None) -> Options:
    """Return the backend's options, with what an engine needs: the file that has its weights, leave for its own code.

    BundleError for a file that is not whole, or that reads others outside of its folder.
    """
    given, record = dict(options or {}), artifact.engine
    if record is not None and record.weights_from:
        given[WEIGHTS] = str(model_files(inside(root, record.weights_from))[0])
    if record is not None and record.version_compatible:
        given[HOST_CODE] = True
    return given
