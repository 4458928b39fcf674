"""No network unless the recipe asks for it. For use before transformers, datasets or huggingface_hub are imported."""

from __future__ import annotations

import os

from compress.recipe.schema import Recipe
from runtime.processes.telemetry import turn_off_telemetry

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


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
        os.environ.setdefault(name, value)
