"""Take a bundle to a place: each has the function that writes its folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal, get_args

from compress.deploy.container import write_context
from compress.deploy.triton import Serving, write_repository
from compress.errors import ExportError, PlaceError
from compress.store.durable import blame
from compress.store.output import publish, reserve_output
from runtime.backends import find_backend
from runtime.bundle.format import verify

Place = Literal["triton", "docker", "genai"]
OPTIONS = {"backend": "--backend", "max_batch_size": "--max-batch-size", "instances": "--instances"}
TAKEN: dict[Place, tuple[str, ...]] = {"triton": tuple(OPTIONS), "docker": ("backend",), "genai": ()}
GENAI_CONFIG = "genai_config.json"


def find_place(name: str) -> Place:
    """Return `name` as a place. PlaceError for a place that there is not."""
    if name not in get_args(Place):
        raise PlaceError(f"--to {name}: known: {', '.join(get_args(Place))}")
    place: Place = name  # type: ignore[assignment]
    return place


def _check_options(place: Place, serving: Serving) -> None:
    """Raise PlaceError for an option that the place has no use for."""
    usual = Serving()
    for name, flag in OPTIONS.items():
        if getattr(serving, name) != getattr(usual, name) and name not in TAKEN[place]:
            raise PlaceError(f"{flag}: --to {place} takes no such option; leave it out")


def deploy(bundle: Path, place: Place, out: Path, serving: Serving) -> Path:
    """Write what `place` reads to `out`, whole or not at all. PlaceError where something stands there."""
    if out.exists():
        raise PlaceError(f"{out}: is there already; choose another --out, or remove it")
    if out.resolve().is_relative_to(bundle.resolve()):
        raise PlaceError(f"{out}: lies in the bundle, whose files may not change; choose another --out")
    if serving.backend:
        find_backend(serving.backend)
    _check_options(place, serving)
    with reserve_output(out.resolve()) as staging:
        staging.rmdir()  # each of these makes its folder
        with blame(out):
            if place == "triton":
                write_repository(bundle, staging, serving)
            elif place == "docker":
                write_context(bundle, staging, serving.backend)
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
