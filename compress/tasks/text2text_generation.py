"""Texts, each to another, by an encoder and a decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from compress.tasks.base import INT8, Columns, LabelReader, Starter, TorchTask
from runtime.encode.seq2seq import DECODER_IDS, Seq2SeqEncoder

if TYPE_CHECKING:
    from runtime.encode.preprocess import Preprocessor

UNPREDICTED = -100
"""Fills rows of target tokens up to the longest text's."""
LENGTHS = {DECODER_IDS: "sequence", "input_ids": "source", "attention_mask": "source"}
REFERENCES = ("reference", "target_text", "summary", "translation", "answer", "transcription", "sentence")


def read_references(reader: LabelReader, column: str, raw: Sequence[Any]) -> Any:
    """Read one text a sample: a list of N str."""
    for row, text in enumerate(raw):
        if not isinstance(text, str):
            raise reader.fail(column, row, f"expected a reference text, found {type(text).__name__}")
    return [str(text) for text in raw]


def number_targets(columns: Columns, preprocessor: Preprocessor) -> np.ndarray | None:
    """Return the token that the decoder should give at each of its places, int64 [n, most tokens]; else UNPREDICTED."""
    assert isinstance(preprocessor, Seq2SeqEncoder)
    if "label" not in columns:
        return None
    references, first = preprocessor.references(columns), len(preprocessor.target.start_tokens)
    targets = np.full((len(references), max(map(len, references)) - 1), UNPREDICTED, np.int64)
    for row, ids in enumerate(references):
        targets[row, first - 1 : len(ids) - 1] = ids[first:]
    return targets


TEXT2TEXT_GENERATION = TorchTask(
    name="text2text-generation",
    starter=Starter(
        "dir:model",
        """  # text: what the encoder reads; label: the reference, a text
  calibration: {source: "jsonl:train.jsonl", samples: 256}
  evaluation: {source: "jsonl:test.jsonl", samples: 200}
""",
        INT8,
        "    - {metric: chrf, max_drop: 1.0}         # or exact_match, rouge_l, nll\n",
    ),
    loss="target tokens",
    auto_class="AutoModelForSeq2SeqLM",
    outputs={"logits": ("batch", "sequence", "width")},
    lengths=LENGTHS,
    read_labels=read_references,
    usual_names={"text": ("source", "document", "article", "question", "input"), "label": REFERENCES},
    make_targets=number_targets,
    files=("onnx",),
    tables=("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",),
)
