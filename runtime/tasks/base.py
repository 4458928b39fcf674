"""What a task answers for: the samples it reads, what a model's outputs mean, and what is answered.

`Task` is the base of all; what several tasks share follows it: those that read texts, and those that choose one class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from runtime.bundle.columns import Array, Columns
from runtime.bundle.tensors import TensorSpec
from runtime.errors import BundleError, UsageError

if TYPE_CHECKING:
    from runtime.encode.preprocess import PreprocessSpec
    from runtime.metrics.base import Metric

Tensors = Mapping[str, Array]
"""Name -> array [n, ...], one row a sample."""
TEXT, TEXT_PAIR = "text", "text_pair"
TEXT_COLUMNS = (TEXT, TEXT_PAIR)
MASK, WORDS, IMAGE_SIZE = "attention_mask", "word_ids", "image_size"
"""What encoding knows beyond a model's inputs. Of each token, int64 [n, T]: 1 (0 for padding); its word's number (-1
for none). Of each image, int64 [n, 2]: height and width as it came."""


@dataclass(frozen=True)
class BatchFacts:
    """What is known of a batch of samples beside a model's outputs."""

    n: int
    known: Tensors = field(default_factory=dict)
    """What encoding knows of the samples, by `Task.facts`; empty where samples are the inputs."""
    spec: PreprocessSpec | None = None
    """How the samples were encoded."""
    class_names: Sequence[str] = ()


class Task:
    """A task of models that are fed by the names of their inputs, and the base of every other."""

    name: str = "generic"
    about: str = "whatever takes and gives arrays; judged against what it gave before"
    columns: tuple[str, ...] = ()
    """Columns of a sample that the inputs are made of, the first one required; (): a column for each input."""
    preprocess: Literal["image", "audio", "text", "language", "seq2seq"] | None = None
    """How the samples of a model's folder are encoded; None: they are the inputs."""
    outputs: str = "tensors"
    """What the outputs are, in a word that metrics ask for: classes, embeddings, tokens, tensors, tags, ..."""
    always: tuple[str, ...] = ()
    """The outputs that there always are, numbers all: of `read_outputs`, or the sums of a model that generates."""
    generates: bool = False
    """Whether the model writes text, token by token, so that its outputs are scored and never kept."""
    encodes: bool = False
    """Whether it is an encoder-decoder, which writes by what its encoder made of the sample. Labels are references."""
    facts: tuple[str, ...] = ()
    """Which of MASK, WORDS and IMAGE_SIZE `read_outputs` needs."""

    @property
    def reads_texts(self) -> bool:
        """Return whether the model's inputs are tokens."""
        return self.preprocess in ("text", "language")

    def split_views(self, columns: Columns) -> list[dict[str, Any]]:
        """Return the column sets that are encoded one by one, without labels. UsageError."""
        return [{name: column for name, column in columns.items() if name != "label"}]

    def read_outputs(self, outputs: Tensors, batch: BatchFacts) -> dict[str, Array]:
        """Return what a model gave for a batch, under the task's own names. BundleError where it is another thing."""
        return dict(outputs)

    def read_batch(self, outputs: Tensors, batch: BatchFacts) -> dict[str, Array]:
        """Return what `read_outputs` does. BundleError, too, unless there is a value for each sample."""
        read = self.read_outputs(outputs, batch)
        for name, output in read.items():
            if not output.ndim or len(output) != batch.n:
                raise BundleError(
                    f"output '{name}' has shape {output.shape} for a batch of {batch.n}: it is not one value for each "
                    "sample"
                )
        return read

    def check_frozen(self, file: str, outputs: Tensors) -> None:
        """Raise BundleError where outputs that were read from a bundle's `file` lack some that there always are."""
        for name in self.always:
            if name not in outputs or outputs[name].dtype.kind not in "biuf":
                raise BundleError(f"{file}: holds no numbers under {name}, as of {self.name}; build the bundle again")

    def join_batches(self, name: str, parts: Sequence[Array]) -> Array:
        """Return one output of all samples, of its batches. UsageError where they do not fit together."""
        if len({part.shape[1:] for part in parts}) > 1:
            raise UsageError(
                f"output '{name}' differs in shape from batch to batch ({', '.join(str(p.shape) for p in parts[:3])}): "
                "use padding: max_length, or samples of one shape"
            )
        return np.concatenate(parts)

    def join_views(self, views: Sequence[dict[str, Array]]) -> dict[str, Array]:
        """Return the outputs over all samples, of those of each view."""
        return views[0]

    def predict(self, outputs: Tensors, class_names: Sequence[str]) -> list[Any] | None:
        """Return for each sample {"label", "score"}, or a list of them; None where outputs are all there is to say."""
        return None

    def answers(self, outputs: Tensors, class_names: Sequence[str]) -> dict[str, Array]:
        """Return what a server answers, by name; `outputs` as `read_outputs` gives them."""
        return dict(outputs)

    def answer_specs(self, outputs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        """Return the specs of `answers` for a model with such outputs; strings have dtype "object"."""
        return tuple(outputs)

    def to_columns(self, samples: Any) -> dict[str, Any]:
        """Return the samples that a user has in hand as columns. UsageError where they do not fit the task."""
        if isinstance(samples, Mapping):
            return dict(samples)
        if not self.columns:
            raise UsageError(f"a {self.name} model takes columns: give a dict with an array for each model input")
        if isinstance(samples, str | Path):
            raise UsageError("give a list of samples; for a single one: [sample]")
        return {self.columns[0]: samples}

    def metrics(self) -> tuple[Metric, ...]:
        """Return the metrics of this task alone."""
        return ()


class ReadsTexts(Task):
    """A task that reads a text, or two."""

    columns = TEXT_COLUMNS
    preprocess = "text"

    def to_columns(self, samples: Any) -> dict[str, Any]:
        """Return a list of texts, or of (text, text), as columns; columns as they are. UsageError."""
        columns = super().to_columns(samples)
        if isinstance(samples, Mapping):
            return columns
        texts = list(columns[TEXT])
        if texts and all(isinstance(text, (tuple, list)) and len(text) == 2 for text in texts):
            return {TEXT: [first for first, _ in texts], TEXT_PAIR: [second for _, second in texts]}
        return {TEXT: texts}


class Classification(Task):
    """Choose one class for each sample. Outputs: {"logits": float32 [N, C]}."""

    outputs = "classes"
    always = ("logits",)

    def read_outputs(self, outputs: Tensors, batch: BatchFacts) -> dict[str, Array]:
        """Return {"logits": float32 [n, C]}: the output of that name, else the only one [B, C]. BundleError."""
        candidates = [outputs["logits"]] if "logits" in outputs else [o for o in outputs.values() if o.ndim == 2]
        if len(candidates) != 1 or candidates[0].ndim != 2:
            raise BundleError(
                f"a classifier has one output [batch, classes]; this model: {describe_shapes(outputs)}; "
                "call that output 'logits'"
            )
        return {"logits": candidates[0].astype(np.float32, copy=False)}

    def predict(self, outputs: Tensors, class_names: Sequence[str]) -> list[Any] | None:
        """Return {"label", "score"} for each sample; None for a single column, which is a score, not a choice."""
        return classify(outputs["logits"], class_names) if outputs["logits"].shape[1] > 1 else None

    def answers(self, outputs: Tensors, class_names: Sequence[str]) -> dict[str, Array]:
        """Return label (str) [n, 1], score float32 [n, 1] and logits [n, C]; where C is 1 the logits alone."""
        predictions = self.predict(outputs, class_names)
        if predictions is None:
            return {"logits": outputs["logits"]}
        return {
            "label": np.array([[str(prediction["label"])] for prediction in predictions], np.object_),
            "score": np.array([[prediction["score"]] for prediction in predictions], np.float32),
            "logits": outputs["logits"],
        }

    def answer_specs(self, outputs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        """Return the specs of `answers`."""
        logits = one_output(outputs, "logits")
        scores = rename(logits, "logits", "float32", logits.shape[-1])
        choice = rename(logits, "label", "object", 1), rename(logits, "score", "float32", 1)
        return (scores,) if logits.shape[-1] == 1 else (*choice, scores)


def classify(logits: Array, class_names: Sequence[str]) -> list[dict[str, Any]]:
    """Return for each row of [N, C] {"label": class name (its number if it has none), "score": softmax probability}."""
    shifted = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    scores = shifted / shifted.sum(axis=1, keepdims=True)  # [N, C]
    best = logits.argmax(axis=1)
    return [
        {"label": class_names[c] if c < len(class_names) else int(c), "score": float(s[c])}
        for c, s in zip(best, scores, strict=True)
    ]


def one_output(outputs: Sequence[TensorSpec], name: str) -> TensorSpec:
    """Return the output of that name, else the first."""
    return next((spec for spec in outputs if spec.name == name), outputs[0])


def rename(spec: TensorSpec, name: str, dtype: str, *shape: int | str) -> TensorSpec:
    """Return the spec of something made of an output, in as large a batch."""
    return replace(spec, name=name, dtype=dtype, shape=(spec.shape[0], *shape))


def describe_shapes(outputs: Tensors) -> str:
    """Return names and shapes, for an error."""
    return ", ".join(f"{name} {output.shape}" for name, output in outputs.items())
