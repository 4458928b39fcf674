"""A trained model that tags words: distilled, quantized, judged by spans, run where there is no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from makers import QUICK, apply, changed, plan, serve, text_folder

from runtime import open_bundle

NAMES = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")


def tag(words: list[int]) -> list[int]:
    """Words below 15 are persons', from 15 to 29 places'; neighbours of a kind are one span."""
    kinds = [0 if word >= 30 else 1 + word // 15 for word in words]
    return [0 if kind == 0 else 2 * kind - 1 + (i > 0 and kinds[i - 1] == kind) for i, kind in enumerate(kinds)]


def draw(n: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 60, rng.integers(3, 13)).tolist() for _ in range(n)]


@pytest.fixture(scope="module")
def tagger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model, trained, and sets whose tags are names, listed with their words."""
    import torch
    from transformers import BertConfig, BertForTokenClassification

    root = tmp_path_factory.mktemp("tagger")
    text_folder(root / "model", "encoder")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = BertConfig.from_pretrained(root / "model", id2label=dict(enumerate(NAMES)), initializer_range=0.1)
        model = BertForTokenClassification(config)
        optimizer = torch.optim.Adam(model.parameters(), 5e-3)
        for step in range(150):
            texts = draw(32, 100 + step)
            ids, labels = torch.zeros(32, 14, dtype=torch.long), torch.full((32, 14), -100)
            for row, words in enumerate(texts):
                ids[row, : len(words) + 2] = torch.tensor([2, *(word + 4 for word in words), 3])
                labels[row, 1 : len(words) + 1] = torch.tensor(tag(words))
            model(input_ids=ids, attention_mask=(ids != 0).long(), labels=labels).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    model.save_pretrained(root / "model")
    for name, n, seed in (("train", 48, 1), ("test", 80, 2)):
        rows = [
            {"tokens": [f"w{word}" for word in words], "ner_tags": [NAMES[i] for i in tag(words)]}
            for words in draw(n, seed)
        ]
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


RECIPE: dict[str, Any] = {
    "version": 1,
    "name": "tags",
    "model": {"source": "dir:model", "task": "token-classification"},
    "data": {
        "calibration": {"source": "jsonl:train.jsonl"},
        "train": {"source": "jsonl:train.jsonl"},
        "evaluation": {"source": "jsonl:test.jsonl"},
    },
    "passes": [
        {
            "kind": "distill",
            "steps": 6,
            "batch_size": 8,
            "learning_rate": 1e-4,
            "logits": {},
            "labels": {"weight": 0.1},
        },
        {"kind": "smoothquant"},
        {"kind": "int8"},
    ],
    "validate": {"gates": [{"metric": "span_f1", "min": 0.6}], "benchmark": {**QUICK, "sequence_length": 16}},
}


def test_a_model_that_tags_words(tagger: Path, cache: Path, tmp_path: Path) -> None:
    report = apply(RECIPE, tmp_path / "b", cache, tagger)
    assert report.verdict == "pass", report
    assert report.baseline.metrics["span_f1"] > 0.85 and report.candidate.metrics["word_agreement"] > 0.95
    served = serve(tmp_path / "b", "['w1 w2 w40', 'w20 w3']", tmp_path)
    assert served["finite"]
    with open_bundle(tmp_path / "b") as bundle:
        found = bundle.predict([["w1", "w2", "w40"], ["w20", "w3"]])["prediction"]
    assert [[word["label"] for word in text] for text in found] == [["B-PER", "I-PER", "O"], ["B-LOC", "B-PER"]]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"tokens": ["w1", "w2"], "ner_tags": ["O"]}, "1 tags for 2 words"),
        ({"tokens": ["w1"], "ner_tags": ["B-ORG"]}, "neither a number nor one of the class names"),
        ({"tokens": ["w1"], "ner_tags": [7]}, "label 7 is not in 0..4, the model's classes"),
        ({"tokens": ["w1"], "ner_tags": 1}, "expected a list of tags"),
        ({"tokens": ["w 1"], "ner_tags": ["O"]}, "expected a text, found list"),
    ],
)
def test_tags_that_do_not_fit(tagger: Path, cache: Path, tmp_path: Path, row: dict[str, Any], message: str) -> None:
    (tagger / "bad.jsonl").write_text(json.dumps(row) + "\n")
    recipe = changed(RECIPE, data={"evaluation": {"source": "jsonl:bad.jsonl"}})
    with pytest.raises(Exception, match=r"row 0|line 1") as caught:
        plan(recipe, tagger, cache)
    assert message in str(caught.value)


def test_classes_must_have_names(tagger: Path, cache: Path, tmp_path: Path) -> None:
    recipe = changed(RECIPE, model={"source": "dir:nameless"})
    config = json.loads((tagger / "model/config.json").read_text())
    for file in (tagger / "model").iterdir():
        (tagger / "nameless").mkdir(exist_ok=True)
        (tagger / "nameless" / file.name).write_bytes(file.read_bytes())
    config["id2label"] = {str(i): f"LABEL_{i}" for i in range(5)}
    (tagger / "nameless/config.json").write_text(json.dumps(config))
    with pytest.raises(Exception, match="class_names: token-classification needs them"):
        plan(recipe, tagger, cache)
