"""What a task answers for: the samples it reads, what a model's outputs mean, and what is answered.

`Task` is the base of all; what several tasks share follows it: those that read texts, write some, or choose one class.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from runtime.bundle.columns import Array, Columns, count
from runtime.bundle.tensors import TensorSpec
from runtime.encode.audio import AUDIO_COLUMNS, LongerAudio
from runtime.encode.split import Split
from runtime.errors import BundleError, UsageError
from runtime.metrics.base import Metric

if TYPE_CHECKING:
    from runtime.bundle.detections import Detections
    from runtime.bundle.manifest import Postprocess
    from runtime.encode.preprocess import PreprocessSpec
Tensors = Mapping[str, Array]
"""Name -> array [n, ...], one row a sample."""
TEXT, TEXT_PAIR = "text", "text_pair"
TEXT_COLUMNS = (TEXT, TEXT_PAIR)
MASK, WORDS, IMAGE_SIZE, OFFSETS = "attention_mask", "word_ids", "image_size", "offsets"
"""What encoding knows beyond a model's inputs. Of each token, int64 [n, T]: 1 (0 for padding); its word's number (-1
for none). Of each image, int64 [n, 2]: height and width as it came. Of each token, int64 [n, T, 2]: its first character
in the second text, and the one behind its last (-1 for tokens that are not of it)."""


@dataclass(frozen=True)
class BatchFacts:
    """What is known of a batch of samples beside a model's outputs."""

    n: int = 0
    known: Tensors = field(default_factory=dict)
    """What encoding knows of the samples, by `Task.facts`; empty where samples are the inputs."""
    spec: PreprocessSpec | None = None
    """How the samples were encoded."""
    class_names: Sequence[str] = ()
    detections: Detections | None = None
    """What a detector's outputs mean."""
    postprocess: Postprocess | None = None
    """How answers are chosen; None: as the task has it."""


class Task:
    """A task of models that are fed by the names of their inputs, and the base of every other."""

    name: str = "generic"
    about: str = "whatever takes and gives arrays; judged against what it gave before"
    columns: tuple[str, ...] = ()
    """Columns of a sample that the inputs are made of; (): a column for each input."""
    required: int = 1
    """How many of `columns`, from the first on, a sample must have."""
    preprocess: Literal["image", "audio", "image-text", "text", "language", "seq2seq"] | None = None
    """How the samples of a model's folder are encoded; None: they are the inputs."""
    outputs: str = "tensors"
    """What the outputs are, in a word that metrics ask for: classes, embeddings, tokens, tensors, tags, ..."""
    always: tuple[str, ...] = ()
    """The outputs that there always are, numbers all: of `read_outputs`, or the sums of a model that generates."""
    leaping: tuple[str, ...] = ()
    """Outputs whose rows a rounding rearranges: neighbours of equal score change places."""
    generates: bool = False
    """Whether the model writes text, token by token, so that its outputs are scored and never kept."""
    encodes: bool = False
    """Whether it is an encoder-decoder, which writes by what its encoder made of the sample. Labels are references."""
    latency: Literal["latency_p50", "tpot"] = "latency_p50"
    """The metric that says how fast a model is: milliseconds of a call, or of a token."""
    facts: tuple[str, ...] = ()
    """Which of MASK, WORDS, IMAGE_SIZE and OFFSETS `read_outputs` needs."""
    longer_audio: LongerAudio = "cut"
    """How recordings that are longer than the model reads are read, where nothing is said; cut: in no other way."""
    postprocess_fields: tuple[str, ...] = ()
    """The fields of `Postprocess` that it takes; `read_outputs` finds them in its `BatchFacts`."""

    @property
    def unit(self) -> Literal["call", "token"]:
        """Return what is timed of a model: a call, which answers a batch, or each token of an answer."""
        return "token" if self.generates else "call"

    @property
    def decoder_only(self) -> bool:
        """Return whether the model writes text by its prompt alone."""
        return self.generates and not self.encodes

    @property
    def reads_texts(self) -> bool:
        """Return whether the model's inputs are tokens."""
        return self.preprocess in ("text", "language")

    @property
    def takes_tensors(self) -> bool:
        """Return whether a sample may be the model's inputs themselves, made elsewhere."""
        return not self.facts and not self.generates

    def split_views(self, columns: Columns) -> list[dict[str, Any]]:
        """Return the column sets that are encoded one by one, without labels. UsageError."""
        return [{name: column for name, column in columns.items() if name != "label"}]

    def read_outputs(self, outputs: Tensors, batch: BatchFacts) -> dict[str, Array]:
        """Return what a model gave for a batch, under the task's own names. BundleError where it is another thing."""
        return dict(outputs)

    def read_batch(self, outputs: Tensors, batch: BatchFacts) -> dict[str, Array]:
        """Return what `read_outputs` does. BundleError, too, unless there is a value for each sample.

        What a model gives for one sample may have no axis for it: it gets one.
        """
        if batch.n == 1 and self.outputs != "boxes":
            outputs = {name: x if x.shape[:1] == (1,) else np.asarray(x)[None] for name, x in outputs.items()}
        read = self.read_outputs(outputs, batch)
        for name, output in read.items():
            check_rows(name, output, batch.n)
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

    def join_rows(
        self, outputs: dict[str, Array], split: Split, columns: Columns, facts: BatchFacts
    ) -> dict[str, Array]:
        """Return the outputs of each sample, of those of the rows that it was encoded as.

        `columns`: the view that was split; `facts`: what is known of every batch. UsageError where a task that has one
        row a sample gets several.
        """
        if len(split.samples) != count(columns):
            raise UsageError(
                f"preprocess: {self.name} reads a sample in one piece: leave out stride of texts, and say longer: cut "
                "of recordings"
            )
        return outputs

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

    def find_classes(self, labels: Any) -> Array | None:
        """Return the class of each sample, integers [N]; None where labels are no classes (texts, maps, numbers)."""
        if len(labels) and (isinstance(labels[0], str) or np.ndim(labels[0])):
            return None  # lists of these may be long, or differ in shape
        given = np.asarray(labels)
        return given if given.dtype.kind in "iu" else None

    def postprocess_specs(self, how: Postprocess | None, batch: int | str) -> tuple[TensorSpec, ...]:
        """Return the specs of what `read_outputs` adds where answers are chosen so."""
        return ()

    def check_postprocess(self, how: Postprocess | None, n_classes: int | None = None) -> None:
        """Raise UsageError for a field that the task does not take, or that does not fit the number of classes."""
        extra = [name for name in (how.set_fields if how else ()) if name not in self.postprocess_fields]
        if extra:
            takes = ", ".join(self.postprocess_fields) or "none of its fields"
            raise UsageError([f"postprocess.{name}: {self.name} takes {takes}" for name in extra])
        if how and how.top_k is not None and n_classes is not None and how.top_k > n_classes:
            raise UsageError(f"postprocess.top_k is {how.top_k}, and the model has {n_classes} classes")


class ReadsImages(Task):
    """A task that reads an image."""

    columns = ("image",)
    preprocess = "image"


class ReadsAudio(Task):
    """A task that reads a sound."""

    columns = AUDIO_COLUMNS
    preprocess = "audio"


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


class WritesText(Task):
    """A task of models that write text, token by token: it is scored as it comes."""

    generates = True
    latency = "tpot"

    def answer_specs(self, outputs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        """Return the spec of the text that is written."""
        return (TensorSpec("text_output", "object", (1,)),)


class Classification(Task):
    """Choose one class for each sample. Outputs: {"logits": float32 [N, C]}.

    With `postprocess` also {"top": int64 [N, k], the likeliest classes; "answered": bool [N], whether the likeliest is
    likely enough}.
    """

    outputs = "classes"
    always = ("logits",)
    postprocess_fields = ("top_k", "reject_below")

    def read_outputs(self, outputs: Tensors, batch: BatchFacts) -> dict[str, Array]:
        """Return {"logits": float32 [n, C]}: the output of that name, else the only one [B, C]. BundleError."""
        candidates = [outputs["logits"]] if "logits" in outputs else [o for o in outputs.values() if o.ndim == 2]
        if len(candidates) != 1 or candidates[0].ndim != 2:
            raise BundleError(
                f"a classifier has one output [batch, classes]; this model: {describe_shapes(outputs)}; "
                "call that output 'logits'"
            )
        return choose_classes(candidates[0].astype(np.float32, copy=False), batch.postprocess)

    def predict(self, outputs: Tensors, class_names: Sequence[str]) -> list[Any] | None:
        """Return {"label", "score"} for each sample; None for a single column, which is a score, not a choice.

        Of several answers a list of them, the likeliest first. The label of a rejected sample is None.
        """
        if outputs["logits"].shape[1] <= 1:
            return None
        return classify(outputs["logits"], class_names, outputs.get("top"), outputs.get("answered"))

    def answers(self, outputs: Tensors, class_names: Sequence[str]) -> dict[str, Array]:
        """Return label (str) [n, k], score float32 [n, k] and logits [n, C]; where C is 1 the logits alone.

        k is 1 without `top_k`. The labels of a rejected sample are ""; "answered", bool [n, 1], is there where any are.
        """
        predictions = self.predict(outputs, class_names)
        if predictions is None:
            return {"logits": outputs["logits"]}
        rows = [row if isinstance(row, list) else [row] for row in predictions]
        chosen = {} if "answered" not in outputs else {"answered": outputs["answered"][:, None]}
        labels = [["" if one["label"] is None else str(one["label"]) for one in row] for row in rows]
        return {
            "label": np.array(labels, np.object_),
            "score": np.array([[one["score"] for one in row] for row in rows], np.float32),
            **chosen,
            "logits": outputs["logits"],
        }

    def answer_specs(self, outputs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        """Return the specs of `answers`; `outputs`: those of the model, then `postprocess_specs`."""
        logits = one_output(outputs, "logits")
        scores = rename(logits, "logits", "float32", logits.shape[-1])
        added = {spec.name: spec for spec in outputs if spec.name in ("top", "answered")}
        width = added["top"].shape[-1] if "top" in added else 1
        choice = rename(logits, "label", "object", width), rename(logits, "score", "float32", width)
        flag = (rename(logits, "answered", "bool", 1),) if "answered" in added else ()
        return (scores,) if logits.shape[-1] == 1 else (*choice, *flag, scores)

    def postprocess_specs(self, how: Postprocess | None, batch: int | str) -> tuple[TensorSpec, ...]:
        """Return the specs of "top" and "answered", where they are added."""
        if how is None:
            return ()
        top = (TensorSpec("top", "int64", (batch, how.top_k)),) if how.top_k is not None else ()
        return (*top, *((TensorSpec("answered", "bool", (batch,)),) if how.reject_below is not None else ()))

    def check_postprocess(self, how: Postprocess | None, n_classes: int | None = None) -> None:
        """Raise UsageError, too, for a model of a single output, which chooses no class."""
        super().check_postprocess(how, n_classes)
        if how and how.set_fields and n_classes == 1:
            raise UsageError(
                f"postprocess.{how.set_fields[0]}: the model has one output, which is a score: no class is chosen"
            )


def name_class(number: int, class_names: Sequence[str]) -> str | int:
    """Return the name of a class, its number where it has none."""
    return class_names[number] if 0 <= number < len(class_names) else int(number)


def name_classes(classes: Iterable[int], class_names: Sequence[str]) -> dict[int, str]:
    """Return class number -> its name, in order; its number where it has none or shares it: "cat (3)"."""
    known = {c: str(name_class(c, class_names)) for c in sorted(classes)}
    times = Counter(known.values())
    return {c: f"{name} ({c})" if times[name] > 1 else name for c, name in known.items()}


def softmax(logits: Array) -> Array:
    """Return probabilities over the last axis, float64."""
    shifted = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    scores: Array = shifted / shifted.sum(axis=-1, keepdims=True)
    return scores


def choose_classes(logits: Array, how: Postprocess | None) -> dict[str, Array]:
    """Return the outputs of `Classification`, of logits float32 [N, C]."""
    chosen = {"logits": logits}
    if how is not None and how.top_k is not None:
        chosen["top"] = rank_classes(logits, how.top_k)
    if how is not None and how.reject_below is not None:
        chosen["answered"] = softmax(logits).max(axis=1) >= how.reject_below
    return chosen


def rank_classes(logits: Array, k: int) -> Array:
    """Return the k likeliest classes of each row of [N, C], int64 [N, k]; of equal ones the lower number first."""
    return np.argsort(-logits, axis=1, kind="stable")[:, :k].astype(np.int64)


def mark_chosen(scores: Array, how: Postprocess | None, threshold: float = 0.5) -> Array:
    """Return which labels of several a sample gets, bool [N, C], of scores [N, C] between 0 and 1.

    Those of at least `how.threshold` (default: `threshold`); with `how.top_k` no more than so many, the best ones.
    """
    least = threshold if how is None or how.threshold is None else how.threshold
    chosen = scores >= least
    if how is not None and how.top_k is not None:
        kept = np.zeros_like(chosen)
        np.put_along_axis(kept, rank_classes(scores, how.top_k), True, axis=1)
        chosen &= kept
    marked: Array = chosen
    return marked


def classify(
    logits: Array, class_names: Sequence[str], top: Array | None = None, answered: Array | None = None
) -> list[Any]:
    """Return for each row of [N, C] {"label": class name (its number if it has none), "score": softmax probability}.

    `top`, int64 [N, k]: a list of these classes instead. `answered`, bool [N]: where False a label is None.
    """
    scores = softmax(logits)  # [N, C]
    best = logits.argmax(axis=1)[:, None] if top is None else top
    rows = [
        [{"label": None if silent else name_class(c, class_names), "score": float(scores[i, c])} for c in best[i]]
        for i, silent in enumerate(np.zeros(len(logits), bool) if answered is None else ~answered)
    ]
    return [row[0] for row in rows] if top is None else list(rows)


def one_output(outputs: Sequence[TensorSpec], name: str) -> TensorSpec:
    """Return the output of that name, else the first."""
    return next((spec for spec in outputs if spec.name == name), outputs[0])


def rename(spec: TensorSpec, name: str, dtype: str, *shape: int | str) -> TensorSpec:
    """Return the spec of something made of an output, in as large a batch."""
    return replace(spec, name=name, dtype=dtype, shape=(spec.shape[0], *shape))


def check_rows(name: str, output: Array, n: int) -> None:
    """Raise BundleError unless an output has a row for each of `n` samples."""
    if not output.ndim or len(output) != n:
        way_out = "; export the model with a free batch" if output.ndim else ""
        raise BundleError(
            f"output '{name}' has shape {output.shape} for a batch of {n}: it is not one value for each sample{way_out}"
        )


def describe_shapes(outputs: Tensors) -> str:
    """Return names and shapes, for an error."""
    return ", ".join(f"{name} {output.shape}" for name, output in outputs.items())
