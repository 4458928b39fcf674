"""A folder from which `docker build` makes an image that serves a bundle over HTTP (`runtime.serving`)."""

from __future__ import annotations

import shutil
from pathlib import Path

from compress.deploy.carried import ON_A_GPU, copy_runtime, reading_samples, write_requirements
from compress.errors import ExportError
from runtime.backends import find_backend
from runtime.bundle.engine import ENGINES
from runtime.bundle.format import Artifact, Manifest, verify

DOCKERFILE = """\
# docker build -t {image} . && docker run {flags}--rm --stop-timeout 30 -p 8000:8000 {image}
FROM python:3.12-slim
WORKDIR /srv
COPY requirements.txt .
RUN pip install --no-cache-dir -r requirements.txt
COPY runtime runtime
COPY bundle bundle
RUN python -m runtime verify bundle
USER 65534:65534
EXPOSE 8000
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
HTTP = ("starlette", "uvicorn", "h11")
"""What `runtime.serving` needs."""


def write_context(bundle: Path, out: Path, backend: str = "") -> Path:
    """Write the build context to `out`, which must not exist, and return its path. Raises BundleError, ExportError.

    Packages have the versions that are installed here, where they are; an engine's library the one that compiled it.
    """
    manifest = verify(bundle)
    backend = backend or (manifest.target if manifest.target in BACKENDS else "onnxruntime-cpu")
    if backend not in BACKENDS:
        raise ExportError(
            f"docker: {backend} is a plug-in's backend, and what an image needs for it is not known; use --backend "
            "onnxruntime-cpu, and change the Dockerfile"
        )
    artifact = _choose_artifact(manifest, backend)
    out.mkdir(parents=True)
    shutil.copytree(bundle, out / "bundle")
    copy_runtime(out)
    pins = {name: artifact.engine.version for name in LIBRARY.get(backend, ()) if artifact.engine}
    write_requirements(out, ("numpy", *BACKENDS[backend], *reading_samples(manifest), *HTTP), pins)
    flags = "--gpus all " if backend in ON_A_GPU else ""
    text = DOCKERFILE.format(image=manifest.name.lower(), flags=flags, backend=backend)
    (out / "Dockerfile").write_text(text, encoding="utf-8")
    return out


def _choose_artifact(manifest: Manifest, backend: str) -> Artifact:
    """Return the artifact that the image runs. ExportError where the backend cannot run it."""
    artifact, is_engine = manifest.candidate_for(backend), backend in ENGINES
    if artifact.kind == "checkpoint":
        raise ExportError(
            f"docker: the candidate is a checkpoint for {artifact.target}: serve {artifact.path} with that"
        )
    if is_engine and artifact.kind != "engine":
        raise ExportError(f"docker: the bundle has no engine for {backend}; compile it: compress compile BUNDLE")
    if manifest.generates and not find_backend(backend).decoders:
        raise ExportError(f"docker: {backend} does not run decoders; use --backend onnxruntime-cpu")
    return artifact
