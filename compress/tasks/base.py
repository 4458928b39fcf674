"""What torch and a recipe's data need to know of a task beyond what the runtime does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import numpy as np

from runtime.bundle.records import PYDANTIC_CONFIG
from runtime.tasks import find_task
from runtime.tasks.base import Task

if TYPE_CHECKING:
    from runtime.bundle.tensors import TensorSpec
    from runtime.encode.preprocess import Preprocessor

Columns = Mapping[str, Any]
FREE_AXES = ("batch", "sequence")
"""Dimensions of outputs that a model takes in any size."""
Loss = Literal[
    "classes",
    "token classes",
    "pixel classes",
    "label sets",
    "answer spans",
    "next tokens",
    "target tokens",
    "embeddings",
    "numbers",
    "detections",
    "outputs",
]
"""What is learned of a teacher where a recipe names no term: KL of the logits of each sample, of each token, of each
pixel, of each label on its own, of where an answer begins and ends, or of each token that is predicted (of a text that
goes on, or of a reference); pooled embeddings and hidden states; the squared error of numbers; classes and boxes of a
head; the squared error of the outputs, over their size."""
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
    model: str = ""
    """What the model's own section says beyond its source, and what follows that."""
    target: str = "onnxruntime-cpu"
    """The runtime that reads such a model."""


@dataclass(frozen=True)
class MaskIds:
    """What the numbers in masks stand for."""

    ignore: int = 255
    """Pixels of this number have no class, and are neither scored nor learned; -1: all have one."""
    first: int = 0
    """The number of the model's first class; those of the others follow."""
    ids: tuple[int, ...] = ()
    """The number of each class, in the model's order, where they do not follow one another."""

    __pydantic_config__: ClassVar[dict[str, object]] = PYDANTIC_CONFIG

    def __post_init__(self) -> None:
        if len(set(self.ids)) < len(self.ids) or self.ignore in self.ids or (self.ids and self.first):
            raise ValueError(f"ids {list(self.ids)} must differ from one another and from ignore, and go without first")


class LabelReader(Protocol):
    """What reads a file's column of labels; every error names file, column and row."""

    @property
    def masks(self) -> MaskIds:
        """Return what the numbers in masks stand for."""
        ...

    def fail(self, column: str, row: int, problem: str) -> Exception:
        """Return the error of a row."""
        ...

    def read_numbers(self, column: str, raw: Sequence[Any]) -> np.ndarray:
        """Return the values as finite numbers [N]; names of classes as the model's ids. SourceError."""
        ...

    def read_class_ids(self, column: str, values: np.ndarray, least: int) -> np.ndarray:
        """Return whole numbers as int64, checked: from `least` on, and classes of the model."""
        ...

    @property
    def class_names(self) -> tuple[str, ...]:
        """Return the names of the model's classes."""
        ...

    def at(self, rows: np.ndarray) -> LabelReader:
        """Return a reader of values that stand in these rows, int64 [M], for several values of one row."""
        ...

    def knows_classes(self) -> bool:
        """Return whether the number of the model's classes is known."""
        ...

    def count_classes(self) -> int | None:
        """Return the number of the model's classes; None where it is not known."""
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
    outputs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Every output, by its field of transformers' outputs, which is its name in ONNX, with its dimensions by name:
    "batch" and "sequence" are free, "classes" is where classes are; (): of any shape. {}: any outputs, and no Hugging
    Face folders; nor of a task whose inputs are tensors."""
    lengths: Mapping[str, str] = field(default_factory=dict)
    """Inputs [batch, length] -> the name of their length, which is free; {}: of texts "sequence", and no other is."""
    any_outputs: bool = False
    """Whether a model that is no Hugging Face folder may have any others than `outputs`."""
    read_labels: Callable[[LabelReader, str, Sequence[Any]], Any] = read_classes_or_scores
    """Reads a column of labels: an array [N, ...], or a list of N arrays or texts."""
    usual_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Role -> further names that its column is found under where the recipe gives no `columns`."""
    needs_class_names: bool = False
    """Whether outputs and labels say nothing without the classes' names; those of the model's folder count, too."""
    uses_class_names: bool = False
    """Whether labels may be written as the names of the classes that the model's folder has."""
    read_class_names: Callable[[Path], tuple[str, ...]] | None = None
    """Reads the classes' names from a model's folder, where config.json has none and outputs say nothing without."""
    auto_class: str = ""
    """The class of transformers that opens a Hugging Face folder for the task; "": the one that optimum has for it."""
    model_task: str = ""
    """The task whose models this one's are in transformers; "": it has its own."""
    pipeline_tag: str | None = None
    """What model hubs call the task; "": they have no word for it; None: what transformers calls it, `model_task`."""
    problem_type: str = ""
    """What config.json says of such a model, where transformers' class is also that of a task of single classes."""
    filler: int | None = None
    """Fills the labels of a sample up to the longest one's, [N, most, ...]; None: all are as long."""
    make_text: Callable[[Any], Any] = lambda value: value
    """Makes a text of what a file has for one; anything else it leaves."""
    find_misfit: Callable[[Columns], tuple[int, str] | None] = lambda columns: None
    """Finds the first sample whose columns do not go together: its number among them, and why."""
    make_targets: Callable[[Columns, Preprocessor], np.ndarray | None] = lambda columns, _: columns.get("label")
    """Makes of a training set's columns the labels that outputs are compared with, [n, ...]."""
    files: tuple[str, ...] = ("onnx", "openvino", "ort", "executorch", "tensorrt", "tensorrt-rtx", "checkpoint")
    """The kinds of `export` that hold such a model."""
    chats: bool = False
    """Whether a sample may be a conversation, which the model's chat template renders."""
    perceives: str = ""
    """Type of the parts of it that the model's own processor reads beside texts: image or audio; "": none."""
    tables: tuple[str, ...] = ()
    """Names of transformers' tables of models for this task and, of those here, none other."""
    class_arguments: Callable[[Any], dict[str, Any]] = lambda config: {}
    """Gives arguments that build a model of a transformers configuration for this task."""

    @property
    def task(self) -> Task:
        """Return the runtime's side."""
        return find_task(self.name)

    @property
    def hub_tag(self) -> str:
        """Return what model hubs call the task; "" where they have no word for it."""
        return self.pipeline_tag if self.pipeline_tag is not None else self.model_task or self.name

    @property
    def chooses(self) -> bool:
        """Return whether a dimension of an output is classes."""
        return any("classes" in axes for axes in self.outputs.values())

    def count_classes(self, outputs: Sequence[TensorSpec]) -> int | None:
        """Return how many classes a model with these outputs has; None: it does not say, or the task has none.

        One channel of pixels tells two classes apart.
        """
        for name, axes in self.outputs.items():
            fitting = [out for out in outputs if out.name == name] or [o for o in outputs if len(o.shape) == len(axes)]
            if "classes" in axes and fitting:
                size = fitting[0].shape[axes.index("classes")]
                lone = size == 1 and self.loss == "pixel classes"
                return (2 if lone else size) if isinstance(size, int) else None
        return None

    def describe_outputs(self) -> str:
        """Return the outputs that a model must have, in words for an error."""
        named = [f"[{', '.join(axes)}]" for axes in self.outputs.values()]
        if len(named) == 1:
            return f"one output {named[0]}"
        return "the outputs " + " and ".join(f"{name} {axes}" for name, axes in zip(self.outputs, named, strict=True))
