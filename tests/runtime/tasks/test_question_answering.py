"""Answers from a text: windows as `tokenizers` cuts them, the best span of all of them, SQuAD's own scores."""

from __future__ import annotations

import collections
import re
import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime import open_bundle
from runtime.encode.preprocess import TextPreprocess, make_preprocessor, split_samples
from runtime.encode.split import Split
from runtime.encode.texts import WINDOW
from runtime.errors import BundleError, UsageError
from runtime.tasks import find_task
from runtime.tasks.base import MASK, OFFSETS, BatchFacts
from runtime.tasks.metrics import METRICS
from runtime.tasks.predict import run_samples
from runtime.tasks.question_answering import NONE, find_best_spans, read_answers, read_label, score_answer, write_label

TASK = find_task("question-answering")

# ---- SQuAD's evaluate-v2.0.py, as it is published


def normalize_answer(s: str) -> str:
    def remove_articles(text: str) -> str:
        return re.sub(re.compile(r"\b(a|an|the)\b", re.UNICODE), " ", text)

    def white_space_fix(text: str) -> str:
        return " ".join(text.split())

    def remove_punc(text: str) -> str:
        exclude = set(string.punctuation)
        return "".join(ch for ch in text if ch not in exclude)

    return white_space_fix(remove_articles(remove_punc(s.lower())))


def compute_exact(a_gold: str, a_pred: str) -> int:
    return int(normalize_answer(a_gold) == normalize_answer(a_pred))


def compute_f1(a_gold: str, a_pred: str) -> float:
    gold_toks = normalize_answer(a_gold).split() if a_gold else []
    pred_toks = normalize_answer(a_pred).split() if a_pred else []
    common = collections.Counter(gold_toks) & collections.Counter(pred_toks)
    num_same = sum(common.values())
    if len(gold_toks) == 0 or len(pred_toks) == 0:
        return int(gold_toks == pred_toks)
    if num_same == 0:
        return 0
    precision = 1.0 * num_same / len(pred_toks)
    recall = 1.0 * num_same / len(gold_toks)
    return (2 * precision * recall) / (precision + recall)


def score_by_the_script(answers: list[str], a_pred: str) -> tuple[int, float]:
    gold_answers = [a for a in answers if normalize_answer(a)] or [""]
    return max(compute_exact(a, a_pred) for a in gold_answers), max(compute_f1(a, a_pred) for a in gold_answers)


def test_scores_are_the_scripts() -> None:
    rng = np.random.default_rng(0)
    words = ["the", "A", "an", "cat", "cat,", "Zürich", "U.S.", "don't", "1,000", "--", "red-hot", "ananas", "…"]

    def draw() -> str:
        return " ".join(rng.choice(words, rng.integers(0, 5)))

    for _ in range(2000):
        answers, given = [draw() for _ in range(rng.integers(0, 4))], draw()
        label = write_label([(None if rng.random() < 0.5 else 7, answer) for answer in answers])
        assert score_answer(given, label) == pytest.approx(score_by_the_script(answers, given))
    assert read_label(write_label([(3, "a\tb\n c"), (None, "d"), (0, " ")])) == [(3, "a b c"), (None, "d")]


# ---- spans and windows


def test_the_best_spans_are_those_of_a_search_through_all() -> None:
    rng = np.random.default_rng(1)
    starts, ends = rng.normal(size=(2, 6, 9)).astype(np.float32)
    allowed = rng.random((6, 9)) < 0.6
    allowed[5] = False
    scores, first, last = find_best_spans(starts, ends, allowed, 3)
    for row in range(6):
        spans = [(i, j) for i in range(9) for j in range(i, min(i + 3, 9)) if allowed[row, i] and allowed[row, j]]
        ranked = sorted(spans, key=lambda span: -(starts[row, span[0]] + ends[row, span[1]]))[:5]
        assert list(zip(first[row], last[row], strict=True))[: len(ranked)] == ranked
        assert (scores[row, len(ranked) :] == NONE).all()
    starts[0, 0] = np.nan
    assert np.isnan(find_best_spans(starts, ends, allowed | True, 3)[0][0, 0])  # and the candidate fails


def encoder(tiny: Any, folder: Path, **spec: Any) -> Any:
    session = tiny.open_onnx(tiny.span_model(folder / "model.onnx"))
    return make_preprocessor(TextPreprocess(**spec), session.inputs, tiny.write_tokenizer(folder))


@pytest.mark.parametrize("stride", [0, 2, 5])
def test_windows_are_those_of_tokenizers(tiny: Any, tmp_path: Path, stride: int) -> None:
    from tokenizers import Tokenizer

    rng, words = np.random.default_rng(2), tiny.words[4:]
    texts = [" ".join(rng.choice(words, n)) for n in rng.integers(1, 40, 12)]
    questions = [" ".join(rng.choice(words, n)) for n in rng.integers(1, 4, 12)]
    columns = {"text": questions, "text_pair": texts}
    preprocessor = encoder(tiny, tmp_path, max_length=12, stride=stride)
    split = split_samples(preprocessor, columns)
    rows, samples = split.columns, split.samples
    tokens = preprocessor.tokenize(rows, facts=(OFFSETS,))
    oracle = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    oracle.no_padding()
    oracle.enable_truncation(12, stride=stride, strategy="only_second")
    row = 0
    for sample, pair in enumerate(zip(questions, texts, strict=True)):
        whole = oracle.encode(*pair)
        for number, window in enumerate([whole, *whole.overflowing]):
            assert (samples[row], rows[WINDOW][row]) == (sample, number)
            n = len(window.ids)
            assert tokens["input_ids"][row, :n].tolist() == window.ids and tokens["attention_mask"][row].sum() == n
            wanted = [o if s == 1 else (-1, -1) for o, s in zip(window.offsets, window.sequence_ids, strict=True)]
            assert tokens[OFFSETS][row, :n].tolist() == [list(place) for place in wanted]
            row += 1
    assert row == len(samples)


def test_a_question_that_leaves_no_room(tiny: Any, tmp_path: Path) -> None:
    preprocessor = encoder(tiny, tmp_path, max_length=12, stride=3)
    columns = {"text": ["cat", "cat " * 6], "text_pair": ["mat", "mat " * 9]}
    with pytest.raises(UsageError, match="sample 1: the first text and special tokens take 9 of max_length 12"):
        split_samples(preprocessor, columns)
    assert preprocessor.encode({"text": ["cat " * 30], "text_pair": ["mat"]})["input_ids"].shape == (1, 12)
    with pytest.raises(ValueError, match="stride is 12"):
        TextPreprocess(max_length=12, stride=12)


def answer_by_hand(tiny: Any, folder: Path, columns: Any, longest: int) -> list[str]:
    """The best span of each context, by the logits of its own words: windows that overlap enough must find it."""
    session = tiny.open_onnx(folder / "model/model.onnx")
    ids = {word: i for i, word in enumerate(tiny.words)}
    found = []
    for context in columns["context"]:
        words = context.split()
        feeds = np.array([[ids[word] for word in words]] * 2)
        given = session.run({"input_ids": feeds, "attention_mask": np.ones_like(feeds)})
        scores = {
            (i, j): given["start_logits"][0, i] + given["end_logits"][0, j]
            for i in range(len(words))
            for j in range(i, min(i + longest, len(words)))
        }
        i, j = max(scores, key=lambda span: (scores[span], -span[0]))
        found.append(" ".join(words[i : j + 1]))
    return found


@pytest.mark.parametrize("batch", ["batch", 2])
def test_the_best_of_all_windows_answers(tiny: Any, tmp_path: Path, batch: int | str) -> None:
    root = tiny.span_bundle(tmp_path / "bundle", batch=batch, longest_answer=3)
    with open_bundle(root) as bundle:
        contexts = [*["the mat sat on the dog " * 4] * 2, "mat", "ran"]
        columns = {"question": ["the cat", "dog", "far", "far"], "context": contexts}
        found = bundle.predict(columns)
        assert read_answers(found) == answer_by_hand(tiny, root, columns, 3)
        begin, end = found["begin"][0, 0], found["end"][0, 0]
        assert columns["context"][0][begin:end] == read_answers(found)[0] == found.predictions[0]["label"]
        assert (found["score"][2, 1:] == NONE).all() and (np.diff(found["score"], axis=1) <= 0).all()
        pairs = list(zip(columns["question"], columns["context"], strict=True))
        again = bundle.predict(pairs[::-1], batch_size=1)  # order and batches change nothing
        assert all(np.array_equal(again[name][::-1], found[name]) for name in ("begin", "end", "score", "null_score"))


def test_no_answer_where_its_score_is_the_best(tiny: Any, tmp_path: Path) -> None:
    model = tiny.span_model(tmp_path / "model.onnx")
    tiny.write_tokenizer(tmp_path)
    session = tiny.open_onnx(model)
    columns = {"question": ["cat", "cat"], "context": ["the dog ran far " * 5, "mat"]}

    def run(no_answer: float | None) -> Any:
        spec = TextPreprocess(max_length=12, stride=2, no_answer=no_answer)
        return run_samples(session, make_preprocessor(spec, session.inputs, tmp_path), TASK.name, columns)

    found = run(None)
    margins = (found["null_score"] - found["score"][:, 0]).tolist()
    assert all(read_answers(found)) and margins[0] != margins[1]
    between = run(sum(margins) / 2)
    assert [bool(answer) for answer in read_answers(between)] == [m < sum(margins) / 2 for m in margins]


def test_no_window_hides_that_another_is_broken() -> None:
    outputs = {name: np.zeros((2, 5), np.int64) for name in ("begin", "end")}
    outputs |= {"score": np.array([[np.nan] * 5, [1.0, *[NONE] * 4]], np.float32), "null_score": np.zeros(2)}
    outputs["end"][:, 0] = 3
    columns = {"text": ["who"], "text_pair": ["cat"]}
    split = Split(columns, np.zeros(2, np.int64), np.ones(2))
    joined = TASK.join_rows(outputs, split, columns, BatchFacts(1, {}, TextPreprocess(stride=2)))
    assert np.isnan(joined["score"][0, 0])


def test_outputs_that_are_no_spans() -> None:
    facts = BatchFacts(1, {MASK: np.ones((1, 4)), OFFSETS: np.zeros((1, 4, 2))}, TextPreprocess())
    logits = np.zeros((1, 4), np.float32)
    for outputs in ({"start_logits": logits}, {"start_logits": logits, "end_logits": logits[:, :3]}):
        with pytest.raises(BundleError, match="start_logits and end_logits"):
            TASK.read_outputs(outputs, facts)


def test_metrics_of_a_bundle(tiny: Any, tmp_path: Path) -> None:
    root = tiny.span_bundle(tmp_path / "bundle")
    with open_bundle(root) as bundle:
        found = bundle.evaluate()
        assert set(found) == {"squad_exact_match", "squad_f1", "answer_agreement"}
        columns = {"question": ["the cat", "dog ran"], "context": ["the cat", "a dog ran far"]}
        outputs = bundle.predict(columns)
        outputs.predictions = None
        given = read_answers(outputs)
        wanted = [score_by_the_script(["cat"], given[0]), score_by_the_script([], given[1])]
        labels = ["4\tcat", ""]
        assert METRICS["squad_f1"].compute(outputs, labels) == pytest.approx(np.mean([f1 for _, f1 in wanted]))
        assert METRICS["squad_exact_match"].compute(outputs, labels) == np.mean([exact for exact, _ in wanted])
        with pytest.raises(UsageError, match="1 for 2 questions"):
            METRICS["squad_f1"].compute(outputs, labels[:1])
        with pytest.raises(UsageError, match="reads the column 'context'"):
            bundle.predict({"question": ["who"]})
        with pytest.raises(UsageError, match=r"a list of \(question, context\)"):
            bundle.predict(["who"])
