"""What torch and a recipe's data need to know of a task beyond what the runtime does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from runtime.tasks import find_task
from runtime.tasks.base import Task

if TYPE_CHECKING:
    from runtime.encode.preprocess import Preprocessor

Columns = Mapping[str, Any]
Loss = Literal["classes", "token classes", "next tokens", "target tokens", "embeddings", "outputs"]
"""What is learned of a teacher where a recipe names no term: KL of the logits of each sample, of each token, or of each
token that is predicted (of a text that goes on, or of a reference); pooled embeddings and hidden states; the squared
error of the outputs."""
INT8 = """  - kind: int8                 # weights and activations in eight bits
    calibration: mse           # or minmax, percentile, entropy
    # ignore: ["re:.*head"]    # layers that stay float: names, types, re:patterns
"""
TEXT_DATA = """  calibration: {source: "csv:train.csv", samples: 512}
  evaluation: {source: "csv:test.csv"}
  # columns: {text: sentence, label: label} inside a set says which column is what
"""
TEXT_PASSES = "  - {kind: smoothquant}        # move activation outliers into the weights first\n" + INT8
ACCURACY_GATE = "    - {metric: top1, max_drop: 0.01}\n"


@dataclass(frozen=True)
class Starter:
    """What `compress new` writes for a task: lines of YAML."""

    source: str
    data: str
    passes: str
    gates: str
    speed: str = "latency_p50"
    """The metric whose speed-up is a gate."""


class LabelReader(Protocol):
    """What reads a file's column of labels; every error names file, column and row."""

    def fail(self, column: str, row: int, problem: str) -> Exception:
        """Return the error of a row."""
        ...

    def read_numbers(self, column: str, raw: Sequence[Any]) -> np.ndarray:
        """Return the values as finite numbers [N]; names of classes as the model's ids. SourceError."""
        ...

    def read_class_ids(self, column: str, values: np.ndarray, least: int) -> np.ndarray:
        """Return whole numbers as int64, checked: from `least` on, and classes of the model."""
        ...

    def at(self, rows: np.ndarray) -> LabelReader:
        """Return a reader of values that stand in these rows, int64 [M], for several values of one row."""
        ...

    def knows_classes(self) -> bool:
        """Return whether the number of the model's classes is known."""
        ...


def read_scores(reader: LabelReader, column: str, raw: Sequence[Any]) -> np.ndarray:
    """Read one number a sample, float64 [N]."""
    return reader.read_numbers(column, raw).astype(np.float64)


def read_classes(reader: LabelReader, column: str, raw: Sequence[Any]) -> np.ndarray:
    """Read one class a sample, by number or name, int64 [N]."""
    values = reader.read_numbers(column, raw)
    return reader.read_class_ids(column, values, 0)


def read_classes_or_scores(reader: LabelReader, column: str, raw: Sequence[Any]) -> np.ndarray:
    """Read classes, int64 [N], where all are whole numbers; else scores, float64 [N]."""
    values = reader.read_numbers(column, raw)
    if not np.array_equal(values, np.floor(values)):
        return values.astype(np.float64)
    if not reader.knows_classes():
        return values.astype(np.int64)
    return reader.read_class_ids(column, values, 0)


@dataclass(frozen=True)
class TorchTask:
    """One task, on the side that builds."""

    name: str
    """Of the runtime's task."""
    starter: Starter
    loss: Loss
    output: str | None = None
    """Field of transformers' outputs, and name of the ONNX output; None: not for Hugging Face folders."""
    axes: tuple[str, ...] = ()
    """Dimensions of the output, of which there is one, each by name; (): any outputs."""
    read_labels: Callable[[LabelReader, str, Sequence[Any]], np.ndarray] = read_classes_or_scores
    """Reads a column of labels [N, ...]."""
    usual_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Role -> further names that its column is found under where the recipe gives no `columns`."""
    needs_class_names: bool = False
    """Whether outputs and labels say nothing without the classes' names; those of the model's folder count, too."""
    make_text: Callable[[Any], Any] = lambda value: value
    """Makes a text of what a file has for one; anything else it leaves."""
    find_misfit: Callable[[Columns], tuple[int, str] | None] = lambda columns: None
    """Finds the first sample whose columns do not go together: its number among them, and why."""
    make_targets: Callable[[Columns, Preprocessor], np.ndarray | None] = lambda columns, _: columns.get("label")
    """Makes of a training set's columns the labels that outputs are compared with, [n, ...]."""
    tables: tuple[str, ...] = ()
    """Names of transformers' tables of models for this task and, of those here, none other."""
    class_arguments: Callable[[Any], dict[str, Any]] = lambda config: {}
    """Gives arguments that build a model of a transformers configuration for this task."""

    @property
    def task(self) -> Task:
        """Return the runtime's side."""
        return find_task(self.name)

    @property
    def chooses(self) -> bool:
        """Return whether the last dimension of the output is classes."""
        return "classes" in self.axes
