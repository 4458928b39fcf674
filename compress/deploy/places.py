"""Take a bundle to a place: each has the function that writes its folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal, get_args

from compress.deploy.carried import ON_A_GPU, copy_runtime, reading_samples, write_requirements
from compress.deploy.triton import Serving, write_repository
from compress.errors import ExportError, PlaceError
from compress.store.durable import blame
from compress.store.output import publish, reserve_output
from runtime.backends import find_backend
from runtime.bundle.engine import ENGINES
from runtime.bundle.format import Artifact, Manifest
from runtime.measure.benchmark import can_run
from runtime.tasks.manifest import verify

Place = Literal["triton", "docker", "genai"]
OPTIONS = {"backend": "--backend", "max_batch_size": "--max-batch-size", "instances": "--instances"}
TAKEN: dict[Place, tuple[str, ...]] = {"triton": tuple(OPTIONS), "docker": ("backend",), "genai": ()}
GENAI_CONFIG = "genai_config.json"
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
PACKAGES = {
    "onnxruntime-cpu": ("onnxruntime",),
    "openvino": ("openvino", "onnxruntime"),
    "executorch": ("executorch", "torch", "onnxruntime"),
    "onnxruntime-cuda": ("onnxruntime-gpu[cuda,cudnn]",),
    "tensorrt": ("tensorrt", "cuda-bindings", "onnxruntime"),
    "tensorrt-rtx": ("tensorrt-rtx-cu13-bindings", "tensorrt-rtx-cu13-libs", "cuda-bindings", "onnxruntime"),
}
"""Backend -> what it needs beside numpy."""
ENGINE_LIBRARIES = {"tensorrt": ("tensorrt",), "tensorrt-rtx": ("tensorrt-rtx-cu13-bindings", "tensorrt-rtx-cu13-libs")}
"""Of these the packages that an engine must find in its own version."""
HTTP = ("starlette", "uvicorn", "h11")
"""What `runtime.serving` needs."""


def find_place(name: str) -> Place:
    """Return `name` as a place. PlaceError for a place that there is not."""
    if name not in get_args(Place):
        raise PlaceError(f"--to {name}: known: {', '.join(get_args(Place))}")
    place: Place = name  # type: ignore[assignment]
    return place


def deploy(bundle: Path, place: Place, out: Path, serving: Serving) -> Path:
    """Write what `place` reads to `out`, whole or not at all. PlaceError where something stands there."""
    if out.exists():
        raise PlaceError(f"{out}: is there already; choose another --out, or remove it")
    if out.resolve().is_relative_to(bundle.resolve()):
        raise PlaceError(f"{out}: lies in the bundle, whose files may not change; choose another --out")
    if serving.backend:
        find_backend(serving.backend)
    usual = Serving()
    for name, flag in OPTIONS.items():
        if getattr(serving, name) != getattr(usual, name) and name not in TAKEN[place]:
            raise PlaceError(f"{flag}: --to {place} takes no such option; leave it out")
    with reserve_output(out.resolve()) as staging:
        staging.rmdir()  # each of these makes its folder
        with blame(out):
            if place == "triton":
                write_repository(bundle, staging, serving)
            elif place == "docker":
                _write_docker_context(bundle, staging, serving.backend)
            else:
                _write_genai_folder(bundle, staging)
        publish(staging, out.resolve())
    return out


def _write_genai_folder(bundle: Path, out: Path) -> Path:
    """Write model, tokenizer and configuration to `out`, which must not exist. ExportError if the bundle has none."""
    manifest = verify(bundle)
    folders = sorted({Path(name).parent for name in manifest.files if Path(name).name == GENAI_CONFIG})
    if not folders:
        raise ExportError(
            f"{bundle}: no {GENAI_CONFIG}: onnxruntime-genai runs decoders that were made for onnxruntime-cpu, with "
            "their keys and values in one buffer"
        )
    out.mkdir(parents=True)
    for name in manifest.files:
        if Path(name).is_relative_to(folders[0]):
            target = out / Path(name).relative_to(folders[0])
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(bundle / name, target)
    return out


def _write_docker_context(bundle: Path, out: Path, backend: str = "") -> Path:
    """Write the build context to `out`, which must not exist, and return its path. Raises BundleError, ExportError.

    Packages have the versions that are installed here, where they are; an engine's library the one that compiled it.
    """
    manifest = verify(bundle)
    backend = backend or (manifest.target if manifest.target in PACKAGES else "onnxruntime-cpu")
    if backend not in PACKAGES:
        raise ExportError(
            f"docker: {backend} is a plug-in's backend, and what an image needs for it is not known; use --backend "
            "onnxruntime-cpu, and change the Dockerfile"
        )
    artifact = _choose_artifact(manifest, backend)
    out.mkdir(parents=True)
    shutil.copytree(bundle, out / "bundle")
    copy_runtime(out)
    pins = {name: artifact.engine.version for name in ENGINE_LIBRARIES.get(backend, ()) if artifact.engine}
    write_requirements(out, ("numpy", *PACKAGES[backend], *reading_samples(manifest), *HTTP), pins)
    flags = "--gpus all " if backend in ON_A_GPU else ""
    text = DOCKERFILE.format(image=manifest.name.lower(), flags=flags, backend=backend)
    (out / "Dockerfile").write_text(text, encoding="utf-8")
    return out


def _choose_artifact(manifest: Manifest, backend: str) -> Artifact:
    """Return the artifact that the image runs. ExportError where the backend cannot run it."""
    artifact, is_engine = manifest.candidate_for(backend), backend in ENGINES
    if artifact.is_checkpoint:
        raise ExportError(
            f"docker: the candidate is a checkpoint for {artifact.target}: serve {artifact.path} with that"
        )
    if is_engine and artifact.kind != "engine":
        raise ExportError(f"docker: the bundle has no engine for {backend}; compile it: compress compile BUNDLE")
    if not can_run(backend, manifest):
        raise ExportError(f"docker: {backend} does not run decoders; use --backend onnxruntime-cpu")
    if backend == "openvino" and artifact.cache is not None and artifact.cache.buffers():
        raise ExportError(
            f"docker: {artifact.path} is a decoder for onnxruntime-cpu, whose attention OpenVINO does not run; add "
            "{kind: openvino} to the recipe's export, or use --backend onnxruntime-cpu"
        )
    return artifact
