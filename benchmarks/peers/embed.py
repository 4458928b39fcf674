"""Texts to embeddings without our runtime: FOLDER TEXTS OUT MAX_LENGTH LOADER.

The tokenizer is transformers' AutoTokenizer on the folder as it is. LOADER is "optimum" (ORTModelForFeatureExtraction
on the folder) or "onnxruntime" (a plain session on its model.onnx). Each text runs alone, so that no padding changes
what int8 rounds. TEXTS: a JSON list; OUT: .npy, float32 [N, D], mean over the tokens, divided by the L2 norm.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

Run = Callable[[dict[str, np.ndarray]], np.ndarray]
"""{input: [1, T]} -> last_hidden_state [1, T, D]."""


def optimum(folder: str) -> Run:
    from optimum.onnxruntime import ORTModelForFeatureExtraction

    model = ORTModelForFeatureExtraction.from_pretrained(folder)

    def run(tokens: dict[str, np.ndarray]) -> np.ndarray:
        hidden: np.ndarray = model(**tokens).last_hidden_state
        return hidden

    return run


def onnxruntime(folder: str) -> Run:
    from onnxruntime import InferenceSession

    session = InferenceSession(str(Path(folder) / "model.onnx"), providers=["CPUExecutionProvider"])
    names = {entry.name for entry in session.get_inputs()}

    def run(tokens: dict[str, np.ndarray]) -> np.ndarray:
        feeds = {name: values for name, values in tokens.items() if name in names}
        hidden: np.ndarray = session.run(["last_hidden_state"], feeds)[0]
        return hidden

    return run


def embed(tokenizer: Any, run: Run, text: str, max_length: int) -> np.ndarray:
    """float32 [D]."""
    tokens = tokenizer([text], truncation=True, max_length=max_length, return_tensors="np")
    hidden, mask = run(dict(tokens))[0], tokens["attention_mask"][0][:, None]  # [T, D], [T, 1]
    mean = (hidden * mask).sum(axis=0) / mask.sum()
    return np.asarray(mean / np.linalg.norm(mean), dtype=np.float32)


def main(folder: str, texts: str, out: str, max_length: str, loader: str) -> None:
    run = {"optimum": optimum, "onnxruntime": onnxruntime}[loader](folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    given = json.loads(Path(texts).read_text(encoding="utf-8"))
    np.save(out, np.stack([embed(tokenizer, run, text, int(max_length)) for text in given]))


if __name__ == "__main__":
    main(*sys.argv[1:])
