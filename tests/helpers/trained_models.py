"""Two tiny transformers that have learned something: a Llama that writes sentences, a BERT that tags words.

Their weights lie in trained/, in float16, because a training gives other weights on another processor.
`python tests/helpers/trained_models.py` in the repository's root trains them anew, in half a minute. Those of other
models (`learn`) lie there, too; tests that use them write them anew with TRAINED=write.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from makers import text_folder
from tiny_lm import language_folder

WEIGHTS = Path(__file__).parent / "trained"
"""Folder of the weights, NAME.safetensors."""
TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
NOUNS = ("cat", "dog", "bird", "king", "ship", "child")
VERBS = ("sees", "likes", "finds", "carries")
ADJECTIVES = ("red", "old", "small", "quiet", "brave")


def write_writer(folder: Path) -> None:
    """Write the Llama as model/, and calibration.jsonl and test.jsonl: sentences as it was trained on."""
    language_folder(folder / "model")
    _restore_weights(folder / "model", "writer")
    for name, n, seed in (("calibration", 32, 1), ("test", 60, 3)):
        _write_rows(folder / f"{name}.jsonl", [{"text": sentence} for sentence in draw_sentences(n, seed)])


def write_tagger(folder: Path) -> None:
    """Write the BERT as model/, and train.jsonl and test.jsonl: words with the names of their tags."""
    _make_tagger(folder / "model").save_pretrained(folder / "model")
    _restore_weights(folder / "model", "tagger")
    for name, n, seed in (("train", 48, 1), ("test", 80, 2)):
        rows = [
            {"tokens": [f"w{word}" for word in words], "ner_tags": [TAGS[i] for i in tag_words(words)]}
            for words in draw_words(n, seed)
        ]
        _write_rows(folder / f"{name}.jsonl", rows)


def draw_sentences(n: int, seed: int) -> list[str]:
    """Return sentences such as "the old king sees a ship"."""
    rng = np.random.default_rng(seed)

    def draw_thing() -> str:
        noun = rng.choice(NOUNS)
        return f"the {rng.choice(ADJECTIVES)} {noun}" if rng.random() < 0.5 else f"a {noun}"

    return [f"{draw_thing()} {rng.choice(VERBS)} {draw_thing()}" for _ in range(n)]


def draw_words(n: int, seed: int) -> list[list[int]]:
    """Return `n` lists of three to twelve words, each a number below 60."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 60, rng.integers(3, 13)).tolist() for _ in range(n)]


def tag_words(words: list[int]) -> list[int]:
    """Words below 15 are persons', from 15 to 29 places'; neighbours of a kind are one span."""
    kinds = [0 if word >= 30 else 1 + word // 15 for word in words]
    return [0 if kind == 0 else 2 * kind - 1 + (i > 0 and kinds[i - 1] == kind) for i, kind in enumerate(kinds)]


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def learn(model: Any, name: str, train: Callable[[], None]) -> None:
    """Give a model the weights that are kept of it. Where TRAINED is "write", `train` it and keep them first."""
    from safetensors.torch import load_file

    if os.environ.get("TRAINED") == "write":
        train()
        _keep_weights(model, name)
    model.load_state_dict(load_file(WEIGHTS / f"{name}.safetensors"))


def _keep_weights(model: Any, name: str) -> None:
    from safetensors.torch import save_file

    WEIGHTS.mkdir(exist_ok=True)
    save_file({key: value.half() for key, value in model.state_dict().items()}, WEIGHTS / f"{name}.safetensors")


def _restore_weights(folder: Path, name: str) -> None:
    """Put the trained weights, as float32, in the place of a model folder's own."""
    from safetensors.torch import load_file, save_file

    weights = {key: value.float() for key, value in load_file(WEIGHTS / f"{name}.safetensors").items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _make_tagger(folder: Path) -> Any:
    """Write the tokenizer into `folder`; return the untrained model."""
    import torch
    from transformers import BertConfig, BertForTokenClassification

    text_folder(folder, "encoder")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return BertForTokenClassification(
            BertConfig.from_pretrained(
                folder, num_hidden_layers=1, id2label=dict(enumerate(TAGS)), initializer_range=0.1
            )
        )


def _train(model: Any, draw_batch: Any, steps: int, learning_rate: float, name: str) -> None:
    """Train on `draw_batch(step)`, rows of (tokens, labels), and write the weights into trained/."""
    import torch

    optimizer = torch.optim.Adam(model.parameters(), learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps)
    for step in range(steps):
        rows = draw_batch(step)
        width = max(len(tokens) for tokens, _ in rows)
        ids = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens, _ in rows])
        labels = torch.tensor([targets + [-100] * (width - len(targets)) for _, targets in rows])
        loss = model(input_ids=ids, attention_mask=(ids != 0).long(), labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    print(f"{name}: loss {loss.item():.4f}")
    _keep_weights(model, name)


def train_writer(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    language_folder(folder)
    encode = AutoTokenizer.from_pretrained(folder).encode

    def draw_batch(step: int) -> list[tuple[list[int], list[int]]]:
        return [(encode(sentence),) * 2 for sentence in draw_sentences(16, 100 + step)]

    _train(AutoModelForCausalLM.from_pretrained(folder), draw_batch, 200, 6e-3, "writer")


def train_tagger(folder: Path) -> None:
    def draw_batch(step: int) -> list[tuple[list[int], list[int]]]:
        return [
            ([2, *(word + 4 for word in words), 3], [-100, *tag_words(words), -100])
            for words in draw_words(32, 100 + step)
        ]

    _train(_make_tagger(folder), draw_batch, 400, 5e-3, "tagger")


if __name__ == "__main__":
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as scratch:
        train_writer(Path(scratch) / "writer")
        train_tagger(Path(scratch) / "tagger")
