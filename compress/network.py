"""No network unless the recipe asks for it. For use before transformers, datasets or huggingface_hub are imported."""

from __future__ import annotations

import os

from compress.passes import Distill
from compress.schema import Recipe

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
NO_TELEMETRY = {"HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1"}


def needs_hub(recipe: Recipe) -> bool:
    """True if the model or a data set comes from the Hugging Face hub."""
    sources = [recipe.model.source, *(part.source for spec in recipe.data.declared.values() for part in spec.parts)]
    students = [one.student for one in recipe.passes if isinstance(one, Distill)]
    sources += [student.source for student in students if student is not None and student.source is not None]
    return any(source.startswith("hf:") for source in sources)


def restrict_network(recipe: Recipe) -> None:
    """Telemetry off, and the hub out of reach of a recipe that does not name it. What the user has set stays."""
    for name, value in (NO_TELEMETRY if needs_hub(recipe) else {**NO_TELEMETRY, **OFFLINE}).items():
        os.environ.setdefault(name, value)
