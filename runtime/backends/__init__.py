"""The runtimes that can run a bundle, listed once; installed plug-ins add to them.

`open_artifact` opens a model of a bundle on one: the one place that knows what an engine needs beside its own file.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from runtime.backends import executorch, onnxruntime_cpu, onnxruntime_cuda, openvino, tensorrt
from runtime.backends.base import (
    STATES,
    Backend,
    DeviceTimed,
    EncoderDecoderSession,
    Feeds,
    Options,
    Resident,
    SeeingSession,
    Session,
    Stateful,
    no_features,
    open_model,
    write_states,
)
from runtime.backends.tensorrt import HOST_CODE, WEIGHTS, check_engine
from runtime.bundle.files import inside, model_files
from runtime.bundle.manifest import Artifact
from runtime.errors import UsageError
from runtime.plugins import BACKEND_GROUP, PluginTable, check_entry

__all__ = [
    "BACKENDS",
    "Backend",
    "DeviceTimed",
    "EncoderDecoderSession",
    "Feeds",
    "Resident",
    "SeeingSession",
    "Session",
    "Stateful",
    "find_backend",
    "no_features",
    "open_artifact",
    "open_model",
    "open_options",
]

_LISTED = (
    onnxruntime_cpu.BACKEND,
    openvino.BACKEND,
    onnxruntime_cuda.BACKEND,
    tensorrt.TENSORRT,
    tensorrt.TENSORRT_RTX,
    executorch.BACKEND,
)
BACKENDS: PluginTable[Backend] = PluginTable(
    BACKEND_GROUP, {backend.name: backend for backend in _LISTED}, partial(check_entry, kind=Backend)
)


def find_backend(name: str) -> Backend:
    """Return the backend called `name`; UsageError lists the known ones."""
    if name not in BACKENDS:
        raise UsageError(f"unknown backend '{name}'; known: {', '.join(BACKENDS)}")
    return BACKENDS[name]


def open_artifact(
    root: Path, artifact: Artifact, backend: str, threads: int, options: Options | None = None
) -> Session:
    """Open a session of one of the bundle's models. BundleError where its engine cannot run on this machine."""
    path = inside(root, artifact.path)
    if artifact.engine is not None:
        check_engine(path, artifact.engine)
    return open_model(find_backend(backend), path, threads, open_options(root, artifact, options))


def open_options(root: Path, artifact: Artifact, options: Options | None = None) -> Options:
    """Return the backend's options, with what an engine needs: the file that has its weights, leave for its own code.

    BundleError for a file that is not whole, or that reads others outside of its folder.
    """
    given, record = dict(options or {}), artifact.engine
    if artifact.states:
        given[STATES] = write_states(artifact.states)
    if record is not None and record.weights_from:
        given[WEIGHTS] = str(model_files(inside(root, record.weights_from))[0])
    if record is not None and record.version_compatible:
        given[HOST_CODE] = True
    return given
