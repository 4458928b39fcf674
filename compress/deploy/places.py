"""Where a bundle can be taken, each with the function that writes its folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal, get_args

from compress.deploy.container import write_context
from compress.deploy.genai import write_folder
from compress.deploy.triton import Serving, write_repository
from compress.errors import OutputError, PlaceError
from compress.output import explained
from runtime.backends import find_backend

Place = Literal["triton", "docker", "genai"]
OPTIONS = {"backend": "--backend", "max_batch_size": "--max-batch-size", "instances": "--instances"}
TAKEN: dict[Place, tuple[str, ...]] = {"triton": tuple(OPTIONS), "docker": ("backend",), "genai": ()}


def known_place(name: str) -> Place:
    """PlaceError for a place that there is not."""
    if name not in get_args(Place):
        raise PlaceError(f"--to {name}: known: {', '.join(get_args(Place))}")
    found: Place = name  # type: ignore[assignment]
    return found


def _check_taken(place: Place, serving: Serving) -> None:
    """PlaceError for an option that the place has no use for."""
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
    _check_taken(place, serving)
    draft = out.with_name(f".{out.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        with explained(out, OutputError):
            if place == "triton":
                write_repository(bundle, draft, serving)
            elif place == "docker":
                write_context(bundle, draft, serving.backend)
            else:
                write_folder(bundle, draft)
            draft.rename(out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return out
