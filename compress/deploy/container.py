"""A folder from which `docker build` makes an image that serves a bundle over HTTP (`runtime.serve`)."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import runtime
from compress.errors import ExportError
from runtime.backends import find_backend
from runtime.bundle import Artifact, Manifest, verify
from runtime.engine import ENGINES
from runtime.manifest import GENERATION

DOCKERFILE = """\
# docker build -t {image} . && docker run {flags}--rm -p 8000:8000 {image}
FROM python:3.12-slim
WORKDIR /srv
COPY requirements.txt .
RUN pip install --no-cache-dir -r requirements.txt
COPY runtime runtime
COPY bundle bundle
RUN python -m runtime verify bundle
USER 65534:65534
EXPOSE 8000
STOPSIGNAL SIGINT
HEALTHCHECK CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/v2/health/ready')"]
CMD ["python", "-m", "runtime", "serve", "bundle", "--host", "0.0.0.0", "--backend", "{backend}"]
"""
BACKENDS = {
    "onnxruntime-cpu": ("onnxruntime",),
    "openvino": ("openvino", "onnxruntime"),
    "onnxruntime-cuda": ("onnxruntime-gpu[cuda,cudnn]",),
    "tensorrt": ("tensorrt", "cuda-bindings", "onnxruntime"),
    "tensorrt-rtx": ("tensorrt-rtx-cu13-bindings", "tensorrt-rtx-cu13-libs", "cuda-bindings", "onnxruntime"),
}
"""Backend -> what it needs beside numpy."""
LIBRARY = {"tensorrt": ("tensorrt",), "tensorrt-rtx": ("tensorrt-rtx-cu13-bindings", "tensorrt-rtx-cu13-libs")}
"""Of these the packages that an engine must find in its own version."""
ON_A_GPU = ("onnxruntime-cuda", "tensorrt", "tensorrt-rtx")
SAMPLES = {"text": ("tokenizers",), "language": ("tokenizers", "jinja2"), "image": ("pillow",)}
"""Kind of preprocessing -> what reads its samples."""


def write_context(bundle: Path, out: Path, backend: str = "") -> Path:
    """The build context under `out`, which must not exist. BundleError, ExportError.

    Packages have the versions that are installed here, where they are.
    """
    manifest = verify(bundle)
    backend = backend or (manifest.target if manifest.target in BACKENDS else "onnxruntime-cpu")
    artifact = _runnable(manifest, backend)
    out.mkdir(parents=True)
    shutil.copytree(bundle, out / "bundle")
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    shutil.copytree(Path(runtime.__file__).parent, out / "runtime", ignore=ignored)
    (out / "requirements.txt").write_text(requirements(manifest, backend, artifact), encoding="utf-8")
    flags = "--gpus all " if backend in ON_A_GPU else ""
    text = DOCKERFILE.format(image=manifest.name.lower(), flags=flags, backend=backend)
    (out / "Dockerfile").write_text(text, encoding="utf-8")
    return out


def _runnable(manifest: Manifest, backend: str) -> Artifact:
    """What the image runs. ExportError where the backend cannot."""
    artifact, is_engine = manifest.candidate_for(backend), backend in ENGINES
    if artifact.kind == "checkpoint":
        raise ExportError(
            f"docker: the candidate is a checkpoint for {artifact.target}: serve {artifact.path} with that"
        )
    if is_engine and artifact.kind != "engine":
        raise ExportError(f"docker: the bundle has no engine for {backend}; compile it: compress compile BUNDLE")
    if manifest.task in GENERATION and not find_backend(backend).decoders:
        raise ExportError(f"docker: {backend} does not run decoders; use --backend onnxruntime-cpu")
    return artifact


def requirements(manifest: Manifest, backend: str, artifact: Artifact) -> str:
    """A line for each package; the library of an engine in the version that compiled it."""
    pins = {name: artifact.engine.version for name in LIBRARY.get(backend, ()) if artifact.engine}
    return lines(("numpy", *BACKENDS[backend], *reading_samples(manifest)), pins)


def reading_samples(manifest: Manifest) -> tuple[str, ...]:
    """Packages that turn samples into tensors."""
    return SAMPLES.get(str(manifest.preprocess["kind"]), ())


def lines(names: Sequence[str], pins: Mapping[str, str] | None = None) -> str:
    """Of a requirements.txt: each package in the version of `pins`, else the installed one, else any."""
    return "".join(
        f"{name}{f'=={version}' if (version := (pins or {}).get(name)) else _pinned(name)}\n" for name in names
    )


def _pinned(name: str) -> str:
    try:
        return f"=={metadata.version(name.partition('[')[0])}"
    except metadata.PackageNotFoundError:
        return ""
