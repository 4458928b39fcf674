"""The two ends of a served model: samples to its inputs, its outputs to answers, batch by batch.

A server runs the model between them. What both need of the bundle is its manifest, and its tokenizer for texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from runtime.bundle import read_manifest
from runtime.columns import Array
from runtime.errors import UsageError
from runtime.manifest import CLASSIFICATION, Manifest, TensorSpec
from runtime.predict import bundle_preprocessor, classify, pooled, task_outputs
from runtime.preprocess import TextPreprocess, spec_from_dict
from runtime.texts import TextEncoder

MASK = "attention_mask"
IMAGE, TEXT, TEXT_PAIR = "image", "text", "text_pair"


class Encoder:
    """Samples -> inputs. `folder` holds manifest.json, and the tokenizer where the bundle has it."""

    def __init__(self, folder: Path) -> None:
        self.manifest = read_manifest(folder)
        self.preprocessor = bundle_preprocessor(folder, self.manifest, self.manifest.artifact("candidate").inputs)

    def __call__(self, columns: Mapping[str, Array]) -> dict[str, Array]:
        """`columns`: image uint8 [n, H, W, C], or text (and text_pair), arrays [n] of str or UTF-8 bytes.

        Gives the model's inputs, and for embeddings the attention mask even where the model takes none. UsageError.
        """
        if not isinstance(self.preprocessor, TextEncoder):
            return self.preprocessor.encode(columns)
        tokens = self.preprocessor.tokenize({name: _texts(name, column) for name, column in columns.items()})
        feeds = self.preprocessor.feeds(tokens)
        return feeds if self.manifest.task in CLASSIFICATION else {MASK: tokens[MASK], **feeds}

    def respond(self, tensors: Mapping[str, Array]) -> dict[str, Array]:
        """As a server calls it: texts are arrays [n, 1] of bytes."""
        return self(tensors)


class Answers:
    """Outputs -> answers. `folder` holds manifest.json."""

    def __init__(self, folder: Path) -> None:
        self.manifest = read_manifest(folder)
        self.spec = spec_from_dict(self.manifest.preprocess)

    def __call__(self, outputs: Mapping[str, Array], mask: Array | None = None) -> dict[str, Array]:
        """What `answers_of` gives, of a model's outputs. `mask` [n, T]: for embeddings, 1 at tokens. UsageError."""
        task, given = self.manifest.task, dict(outputs)
        if task not in CLASSIFICATION and isinstance(self.spec, TextPreprocess):
            if mask is None:
                raise UsageError(f"{MASK} is missing: embeddings are pooled over tokens")
            return {"embedding": pooled(given, mask, self.spec).astype(np.float32, copy=False)}
        return answers_of(self.manifest, task_outputs(given, task, len(next(iter(given.values())))))

    def respond(self, tensors: Mapping[str, Array]) -> dict[str, Array]:
        """As a server calls it: the mask among the outputs."""
        return self({name: array for name, array in tensors.items() if name != MASK}, tensors.get(MASK))


def answers_of(manifest: Manifest, outputs: Mapping[str, Array]) -> dict[str, Array]:
    """Of a classifier label (str) [n, 1], score float32 [n, 1] and logits [n, C], where C is 1 the logits alone, for a
    single number is no choice; of texts embedding float32 [n, D].

    `outputs`: as `runtime.predict.run_samples` gives them; of another task they are the answers.
    """
    if manifest.task == "feature-extraction":
        return {"embedding": outputs["embeddings"][:, 0].astype(np.float32, copy=False)}
    if manifest.task not in CLASSIFICATION:
        return dict(outputs)
    if outputs["logits"].shape[1] == 1:
        return {"logits": outputs["logits"]}
    said = classify(outputs["logits"], manifest.class_names)
    return {
        "label": np.array([[str(one["label"])] for one in said], np.object_),
        "score": np.array([[one["score"]] for one in said], np.float32),
        "logits": outputs["logits"],
    }


def answer_specs(task: str, outputs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """What `Answers` gives of a model's `outputs`, without the batch; strings have dtype "object"."""
    if task not in CLASSIFICATION:
        return (TensorSpec("embedding", "float32", (outputs[0].shape[-1],)),)
    logits = next((spec for spec in outputs if spec.name == "logits"), outputs[0])
    choice = TensorSpec("label", "object", (1,)), TensorSpec("score", "float32", (1,))
    scores = TensorSpec("logits", "float32", (logits.shape[-1],))
    return (scores,) if logits.shape[-1] == 1 else (*choice, scores)


def _texts(name: str, column: Sequence[object] | Array) -> list[str]:
    """Strings of an array [n] or [n, 1] of str or bytes. UsageError where bytes are not UTF-8."""
    try:
        return [
            one.decode("utf-8") if isinstance(one, bytes) else str(one)
            for one in np.asarray(column, object).reshape(-1)
        ]
    except UnicodeDecodeError as error:
        raise UsageError(f"{name}: not UTF-8: {error}") from error
