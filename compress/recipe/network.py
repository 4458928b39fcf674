"""No network unless the recipe asks for it. For use before transformers, datasets or huggingface_hub are imported."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from compress.recipe.schema import Recipe
from runtime.errors import UsageError
from runtime.processes.telemetry import turn_off_telemetry

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
SET_HERE: set[str] = set()
"""Which of these this process set, for a recipe that needs no hub; the others are the user's word."""


def needs_hub(recipe: Recipe) -> bool:
    """Return whether the model or a data set comes from the Hugging Face hub."""
    sources = [recipe.model.source, *(part.source for spec in recipe.data.declared.values() for part in spec.parts)]
    students = [pass_.find_student() for pass_ in recipe.passes]
    sources += [student.source for student in students if student is not None and student.source is not None]
    return any(source.startswith("hf:") for source in sources)


def restrict_network(recipe: Recipe) -> None:
    """Put the hub out of reach of a recipe that does not name it, and telemetry off. What the user has set stays."""
    turn_off_telemetry()
    for name, value in ({} if needs_hub(recipe) else OFFLINE).items():
        if name not in os.environ:
            os.environ[name] = value
            SET_HERE.add(name)


@contextmanager
def reach_hub() -> Iterator[None]:
    """Let this process reach the hub while the context is open; UsageError where the user has put it out of reach."""
    from huggingface_hub import constants

    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        value = os.environ.get(name, "")
        if value.upper() in constants.ENV_VARS_TRUE_VALUES and name not in SET_HERE:
            raise UsageError(f"{name}={value} is set, so nothing is sent to the hub; unset it")
    offline, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, False  # read once, when the library was imported
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = offline
