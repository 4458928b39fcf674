"""A trained model that finds the marked words of a text, longer than it reads at once: distilled, quantized, served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from makers import QUICK, apply, plan, serve, text_folder
from shortcuts import quick_judge
from trained_models import learn

from compress.data import load_samples
from compress.data.training import make_encoded_set
from compress.errors import SourceError
from compress.models.preprocess import resolve_preprocess
from compress.models.source import locate
from compress.specs import DataSpec, ModelSpec
from runtime import open_bundle
from runtime.bundle.tensors import TensorSpec
from runtime.encode.preprocess import TextPreprocess, make_preprocessor
from runtime.tasks.question_answering import read_answers

MARKED = 45
"""Words from here on are the answer, where they stand; one or two of them, in half of the texts."""


def draw_words(rng: np.random.Generator, n: int, answered: bool) -> tuple[list[int], tuple[int, int] | None]:
    """Return numbers of words, and the first and last that are marked."""
    words = rng.integers(10, MARKED, n).tolist()
    if not answered:
        return words, None
    first = int(rng.integers(0, n - 1))
    last = first + int(rng.integers(0, 2))
    words[first : last + 1] = rng.integers(MARKED, 60, last + 1 - first).tolist()
    return words, (first, last)


def write_rows(path: Path, n: int, seed: int) -> None:
    rng, lines = np.random.default_rng(seed), []
    for i in range(n):
        words, span = draw_words(rng, int(rng.integers(5, 40)), i % 4 != 0)
        texts = [f"w{word}" for word in words]
        answers: dict[str, list[Any]] = {"text": [], "answer_start": []}
        if span:
            answers["text"].append(" ".join(texts[span[0] : span[1] + 1]))
            answers["answer_start"].append(len(" ".join([*texts[: span[0]], ""])) if span[0] else 0)
        lines.append(json.dumps({"question": "w1 w2", "context": " ".join(texts), "answers": answers}))
    path.write_text("\n".join(lines) + "\n")


def write_reader(folder: Path) -> None:
    """Write a BERT of one layer that was trained on windows without their texts."""
    import torch
    from transformers import BertConfig, BertForQuestionAnswering

    text_folder(folder, "encoder")
    rng = np.random.default_rng(7)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = BertForQuestionAnswering(
            BertConfig.from_pretrained(folder, num_hidden_layers=1, num_labels=2, initializer_range=0.1)
        )

    def train() -> None:
        optimizer = torch.optim.Adam(model.parameters(), 5e-3)
        for step in range(150):
            n_words = int(rng.integers(3, 12))
            drawn = [draw_words(rng, n_words, step % 4 != 0) for _ in range(32)]
            ids = torch.tensor([[2, 5, 6, 3, *(word + 4 for word in words), 3] for words, _ in drawn])
            spans = torch.tensor([(0, 0) if span is None else (span[0] + 4, span[1] + 4) for _, span in drawn])
            types = (torch.arange(ids.shape[1]) >= 4).long().expand_as(ids)
            loss = model(
                input_ids=ids, token_type_ids=types, start_positions=spans[:, 0], end_positions=spans[:, 1]
            ).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    learn(model, "reader", train)
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with the model and its data, and the recipe that stands in it."""
    folder = tmp_path_factory.mktemp("reader")
    write_reader(folder / "model")
    write_rows(folder / "train.jsonl", 48, 1)
    write_rows(folder / "test.jsonl", 80, 2)
    sets = {"calibration": "train", "train": "train", "evaluation": "test"}
    distill = {"kind": "distill", "steps": 6, "batch_size": 8, "learning_rate": 1e-4, "logits": {}, "labels": {}}
    return folder, {
        "version": 1,
        "name": "answers",
        "model": {"source": "dir:model", "task": "question-answering"},
        "preprocess": {"kind": "text", "max_length": 16, "stride": 4, "no_answer": 0.0},
        "data": {name: {"source": f"jsonl:{part}.jsonl"} for name, part in sets.items()},
        "passes": [{"kind": "prune_channels", "ratio": 0.25}, distill, {"kind": "int8"}],
        "validate": {
            "gates": [{"metric": "squad_f1", "min": 0.7}, {"metric": "answer_agreement", "min": 0.7}],
            "benchmark": {**QUICK, "sequence_length": 16},
            "steps": False,
        },
    }


@pytest.mark.slow
def test_a_model_that_answers(reader: tuple[Path, dict[str, Any]], cache: Path, tmp_path: Path) -> None:
    folder, recipe = reader
    with quick_judge():
        report = apply(recipe, tmp_path / "out", cache, folder)
    baseline, candidate = report.baseline.metrics, report.candidate.metrics
    assert baseline["squad_f1"] >= baseline["squad_exact_match"] > 0.8
    assert report.verdict == "pass" and candidate["squad_f1"] > 0.8, report.gates
    context = " ".join([*["w20"] * 30, "w50", "w51", *["w21"] * 5])
    served = serve(tmp_path / "out", f"[('w1 w2', '{context}'), ('w1 w2', 'w20 w21')]", tmp_path)
    assert served["finite"] and served["shapes"]["answer"] == [2, 7]
    with open_bundle(tmp_path / "out") as bundle:
        found = bundle.predict({"question": ["w1 w2"] * 2, "context": [context, "w20 w21"]})
        assert read_answers(found) == ["w50 w51", ""]
        assert context[found.predictions[0]["begin"] :].startswith("w50 w51")


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"text": ["w3"], "answer_start": [0]}, "'w3' does not begin at character 0 of its context: there is 'w2'"),
        ({"text": ["w3"], "answer_start": []}, "1 answers and 0 of answer_start"),
        ({"text": [3]}, "expected answers"),
        ([3], "expected answers"),
    ],
)
def test_answers_that_do_not_fit(reader: tuple[Path, dict[str, Any]], cache: Path, answers: Any, message: str) -> None:
    folder, recipe = reader
    (folder / "bad.jsonl").write_text(json.dumps({"question": "w1", "context": "w2 w3", "answers": answers}) + "\n")
    with pytest.raises(Exception, match="line 1") as caught:
        plan({**recipe, "data": {**recipe["data"], "evaluation": {"source": "jsonl:bad.jsonl"}}}, folder, cache)
    assert message in str(caught.value)


def test_samples_must_have_a_context(reader: tuple[Path, dict[str, Any]], cache: Path) -> None:
    folder, recipe = reader
    (folder / "bad.jsonl").write_text('{"question": "w1", "text": "w2"}\n')
    with pytest.raises(Exception, match="no column for context"):
        plan({**recipe, "data": {**recipe["data"], "evaluation": {"source": "jsonl:bad.jsonl"}}}, folder, cache)


def test_every_form_of_answers_and_what_is_learned_of_it(reader: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """Six windows of one text, of which two hold the answer; texts without, and with an answer that is nowhere."""
    folder, _ = reader
    words = [f"w{10 + i % 30}" for i in range(40)]
    words[20] = "w50"
    context = " ".join(words)
    begin = context.index("w50")
    rows = [
        (context, {"text": ["w50", "w50"], "answer_start": [begin, begin]}),
        (context, [{"text": "w50", "answer_start": begin}]),
        (context, ["w50"]),
        (context, "w50"),
        ("w20 w21", {"text": [], "answer_start": []}),
        ("w20 w21", ["elsewhere"]),
    ]
    lines = [json.dumps({"question": "w1 w2", "context": text, "answers": answers}) for text, answers in rows]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    samples = load_samples(DataSpec(source="jsonl:a.jsonl"), tmp_path, "question-answering", (), seed=0)
    assert samples.columns["label"] == [f"{begin}\tw50\n{begin}\tw50", f"{begin}\tw50", "w50", "w50", "", "elsewhere"]
    inputs = tuple(TensorSpec(name, "int64", ("batch", "sequence")) for name in ("input_ids", "attention_mask"))
    preprocessor = make_preprocessor(TextPreprocess(max_length=16, stride=5), inputs, folder / "model")
    encoded = make_encoded_set(samples, preprocessor, "question-answering")
    targets, ids = encoded.labels, encoded.feeds(np.arange(encoded.n))["input_ids"]
    assert targets is not None and len(targets) == encoded.n == len(ids) == 4 * 6 + 2
    assert targets[-2:].tolist() == [[0, 0], [-100, -100]]
    holds = (ids[:-2] == 54).any(axis=1)
    assert holds.sum() == 4 * 2 and (targets[:-2][~holds] == 0).all()
    assert (targets[:-2][holds] == (ids[:-2][holds] == 54).argmax(axis=1)[:, None]).all()


def test_windows_are_for_answers_alone(reader: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = reader
    answers, classes = (
        ModelSpec(source=f"dir:{folder}/model", task=task) for task in ("question-answering", "text-classification")
    )
    found = resolve_preprocess(locate(answers, folder), TextPreprocess(max_length=30))
    assert isinstance(found, TextPreprocess) and found.stride == 10
    with pytest.raises(SourceError, match="stride: text-classification reads the beginning of a text alone"):
        resolve_preprocess(locate(classes, folder), TextPreprocess(max_length=30, stride=10))
