"""The two ends of a served model: samples to its inputs, its outputs to answers, batch by batch.

A server runs the model between them. What both need of the bundle is its manifest, and its tokenizer for texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from runtime.bundle.columns import Array
from runtime.bundle.format import read_manifest
from runtime.bundle.manifest import CLASSIFICATION, Manifest
from runtime.bundle.tensors import TensorSpec
from runtime.encode.preprocess import TextPreprocess, spec_from_dict
from runtime.encode.texts import TextEncoder
from runtime.errors import UsageError
from runtime.tasks.predict import bundle_preprocessor, classify, pool_outputs, task_outputs

MASK = "attention_mask"
IMAGE, TEXT, TEXT_PAIR = "image", "text", "text_pair"


class Encoder:
    """Samples -> inputs. `folder` holds manifest.json, and the tokenizer where the bundle has it."""

    def __init__(self, folder: Path) -> None:
        self.manifest = read_manifest(folder)
        self.preprocessor = bundle_preprocessor(folder, self.manifest, self.manifest.artifact("candidate").inputs)

    def __call__(self, columns: Mapping[str, Array]) -> dict[str, Array]:
        """Encode `columns`: image uint8 [n, H, W, C], or text (and text_pair), arrays [n] of str or UTF-8 bytes.

        Gives the model's inputs, and for embeddings the attention mask even where the model takes none. UsageError.
        """
        if not isinstance(self.preprocessor, TextEncoder):
            return self.preprocessor.encode(columns)
        tokens = self.preprocessor.tokenize({name: _decode_texts(name, column) for name, column in columns.items()})
        feeds = self.preprocessor.feeds(tokens)
        return feeds if self.manifest.task in CLASSIFICATION else {MASK: tokens[MASK], **feeds}

    def respond(self, tensors: Mapping[str, Array]) -> dict[str, Array]:
        """Encode as a server asks: texts are arrays [n, 1] of bytes."""
        return self(tensors)


class Answers:
    """Outputs -> answers. `folder` holds manifest.json."""

    def __init__(self, folder: Path) -> None:
        self.manifest = read_manifest(folder)
        self.spec = spec_from_dict(self.manifest.preprocess)

    def __call__(self, outputs: Mapping[str, Array], mask: Array | None = None) -> dict[str, Array]:
        """Return what `answers_of` gives, of a model's outputs. UsageError.

        `mask` [n, T]: for embeddings, 1 at tokens.
        """
        task, given = self.manifest.task, dict(outputs)
        if task not in CLASSIFICATION and isinstance(self.spec, TextPreprocess):
            if mask is None:
                raise UsageError(f"{MASK} is missing: embeddings are pooled over tokens")
            return {"embedding": pool_outputs(given, mask, self.spec).astype(np.float32, copy=False)}
        return answers_of(self.manifest, task_outputs(given, task, len(next(iter(given.values())))))

    def respond(self, tensors: Mapping[str, Array]) -> dict[str, Array]:
        """Answer as a server asks: the mask among the outputs."""
        return self({name: array for name, array in tensors.items() if name != MASK}, tensors.get(MASK))


def answers_of(manifest: Manifest, outputs: Mapping[str, Array]) -> dict[str, Array]:
    """Return the answers to a task's samples, by name.

    A classifier answers label (str) [n, 1], score float32 [n, 1] and logits [n, C]; where C is 1 the logits alone, for
    a single number is no choice. Texts get embedding float32 [n, D]. `outputs`: as `runtime.tasks.predict.run_samples`
    gives them; those of another task are the answers.
    """
    if manifest.task == "feature-extraction":
        return {"embedding": outputs["embeddings"][:, 0].astype(np.float32, copy=False)}
    if manifest.task not in CLASSIFICATION:
        return dict(outputs)
    if outputs["logits"].shape[1] == 1:
        return {"logits": outputs["logits"]}
    predictions = classify(outputs["logits"], manifest.class_names)
    return {
        "label": np.array([[str(prediction["label"])] for prediction in predictions], np.object_),
        "score": np.array([[prediction["score"]] for prediction in predictions], np.float32),
        "logits": outputs["logits"],
    }


def answer_specs(task: str, outputs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Return what `Answers` gives of a model's `outputs`, without the batch; strings have dtype "object"."""
    if task not in CLASSIFICATION:
        return (TensorSpec("embedding", "float32", (outputs[0].shape[-1],)),)
    logits = next((spec for spec in outputs if spec.name == "logits"), outputs[0])
    choice = TensorSpec("label", "object", (1,)), TensorSpec("score", "float32", (1,))
    scores = TensorSpec("logits", "float32", (logits.shape[-1],))
    return (scores,) if logits.shape[-1] == 1 else (*choice, scores)


def _decode_texts(name: str, column: Sequence[object] | Array) -> list[str]:
    """Return the strings of an array [n] or [n, 1] of str or bytes. UsageError where bytes are not UTF-8."""
    try:
        return [
            item.decode("utf-8") if isinstance(item, bytes) else str(item)
            for item in np.asarray(column, object).reshape(-1)
        ]
    except UnicodeDecodeError as error:
        raise UsageError(f"{name}: not UTF-8: {error}") from error
