"""What a detector's outputs mean: what the recipe states, completed by their names and shapes. No torch here."""

from __future__ import annotations

from collections.abc import Sequence

from compress.errors import SourceError
from compress.models.preprocess import find_class_names
from compress.models.source import Source
from runtime.bundle.detections import Detections, complete_detections
from runtime.bundle.tensors import TensorSpec
from runtime.errors import UsageError
from runtime.tasks import find_task


def read_detections(source: Source, outputs: Sequence[TensorSpec]) -> Detections | None:
    """Return how detections are read from a model with these outputs; None where the task finds no boxes.

    SourceError where they do not say what they mean, and the recipe does not either.
    """
    if find_task(source.task).outputs != "boxes":
        return None
    try:
        return complete_detections(source.spec.detections or Detections(), outputs, find_class_names(source))
    except UsageError as error:
        raise SourceError([f"model.{problem}" for problem in error.problems]) from error
