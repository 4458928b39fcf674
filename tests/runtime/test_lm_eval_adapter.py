"""What lm-evaluation-harness asks, against the model in float64; the harness itself is a stub here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from runtime import Bundle, open_bundle
from runtime.errors import MissingDependency, UsageError
from runtime.lm_eval_adapter import Scorer, evaluate, lm_for, main, windows

MakeBundle = Callable[..., Path]


@pytest.fixture
def bundle(make_decoder_bundle: MakeBundle) -> Iterator[Bundle]:
    with open_bundle(make_decoder_bundle(noise=0.0)) as opened:
        yield opened


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`lm_eval` with as much as the adapter uses."""
    names = ("lm_eval", "lm_eval.api", "lm_eval.api.model", "lm_eval.tasks")
    package, api, model, tasks = (ModuleType(name) for name in names)
    model.LM = type("LM", (), {})  # type: ignore[attr-defined]

    class TaskManager:
        def __init__(self, include_path: str | None) -> None:
            self.names = ["one", "two", *([] if include_path is None else [Path(include_path).name])]

        def match_tasks(self, names: list[str]) -> list[str]:
            return [name for name in names if name in self.names]

    def simple_evaluate(model: Any, tasks: list[str], limit: int | None, task_manager: TaskManager) -> dict[str, Any]:
        scores = model.loglikelihood([SimpleNamespace(args=("the cat", " sat"))])
        return {"results": {task: {"score": scores[0][0], "limit": limit} for task in tasks}}

    package.simple_evaluate = simple_evaluate  # type: ignore[attr-defined]
    tasks.TaskManager = TaskManager  # type: ignore[attr-defined]
    for name, module in zip(names, (package, api, model, tasks), strict=True):
        monkeypatch.setitem(sys.modules, name, module)
    return package


def log_probabilities(tiny: Any, ids: list[int]) -> np.ndarray:
    logits = tiny.decoder_logits(tiny.decoder_weights(), ids)
    top = logits.max(axis=1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(axis=1, keepdims=True))


def test_a_continuation_scores_as_its_tokens_after_the_context(bundle: Bundle, tiny: Any) -> None:
    scorer = Scorer(bundle, 2)
    pairs = [("the cat", " sat"), ("the cat ", "sat"), ("", "a"), ("x", bundle.generate("x", max_new_tokens=1).text)]
    found = scorer.continuations(pairs)
    assert found[0] == found[1]  # the space belongs to the continuation
    for (context, continuation), (score, greedy) in zip(pairs, found, strict=True):
        ids = [256, *scorer.encoder.tokens(context + continuation)]
        n = len(scorer.encoder.tokens(context + continuation)) - len(scorer.encoder.tokens(context.rstrip()))
        rows = log_probabilities(tiny, ids)[-n - 1 : -1]
        assert score == pytest.approx(sum(rows[i][token] for i, token in enumerate(ids[-n:])), abs=1e-4)
        assert greedy == (rows.argmax(axis=1).tolist() == ids[-n:])


def test_a_text_is_scored_in_windows_whose_tokens_are_each_predicted_once(bundle: Bundle, tiny: Any) -> None:
    scorer = Scorer(bundle)
    text = "a text that is longer than the 64 tokens that the model reads at once, by some thirty"
    ids = [256, *scorer.encoder.tokens(text)]
    first = log_probabilities(tiny, ids[:64])
    want = sum(first[i][token] for i, token in enumerate(ids[1:65]))
    last = log_probabilities(tiny, ids[-65:-1])
    n = len(ids) - 65
    want += sum(last[64 - n + i][token] for i, token in enumerate(ids[-n:]))
    assert scorer.text(text) == pytest.approx(want, abs=1e-3)
    assert scorer.text("ab") == pytest.approx(scorer.continuations([("", "ab")])[0][0], abs=1e-5)


def test_windows_are_those_of_the_harness() -> None:
    """The example in the documentation of its `LM.loglikelihood_rolling`: length 4, tokens 0 to 8."""
    found = [(told[:-1].tolist(), told[-n:].tolist()) for told, n in windows(np.arange(9), -1, 4)]
    assert found == [([-1, 0, 1, 2], [0, 1, 2, 3]), ([3, 4, 5, 6], [4, 5, 6, 7]), ([4, 5, 6, 7], [8])]
    assert list(windows(np.arange(0), -1, 4)) == []


def test_an_answer_ends_at_until_and_a_long_context_loses_its_beginning(bundle: Bundle) -> None:
    scorer = Scorer(bundle)
    whole = bundle.generate("Once", max_new_tokens=12).text
    assert scorer.answer("Once", {"max_gen_toks": 12, "until": [whole[4:6]]}) == whole[: whole.index(whole[4:6])]
    assert scorer.answer("Once", {"max_gen_toks": 12, "do_sample": False, "temperature": 1.0}) == whole
    assert scorer.answer("x" * 500, {"max_gen_toks": 4, "until": "never"}) == scorer.answer(
        "x" * 499, {"max_gen_toks": 4}
    )


def test_the_harness_model_passes_the_questions_on(bundle: Bundle, harness: ModuleType) -> None:
    model, scorer = lm_for(bundle), Scorer(bundle)
    assert model.loglikelihood([SimpleNamespace(args=("the", " cat"))]) == scorer.continuations([("the", " cat")])
    assert model.loglikelihood_rolling([SimpleNamespace(args=("ab",))]) == [scorer.text("ab")]
    assert model.generate_until([SimpleNamespace(args=("ab", {"max_gen_toks": 3}))]) == [
        scorer.answer("ab", {"max_gen_toks": 3})
    ]
    found = evaluate(bundle.root, ["one"], limit=3)
    assert found == {"one": {"score": scorer.continuations([("the cat", " sat")])[0][0], "limit": 3}}
    assert main([str(bundle.root), "--tasks", "one,two"]) == 0
    assert main([str(bundle.root), "--tasks", "own", "--include-path", "a/folder/own"]) == 0
    with pytest.raises(UsageError, match="lm-eval has no task three; give --include-path"):
        evaluate(bundle.root, ["one", "three"])


def test_what_is_refused(bundle: Bundle, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    with pytest.raises(UsageError, match="continuation '' adds no token"):
        Scorer(bundle).continuations([("ab", "")])
    with pytest.raises(UsageError, match="a continuation of 70 tokens leaves no context within 64"):
        Scorer(bundle).continuations([("ab", "x" * 70)])
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(MissingDependency, match="pip install lm-eval"):
        lm_for(bundle)
    assert main([str(bundle.root), "--tasks", "one"]) == 1
    assert "pip install lm-eval" in capsys.readouterr().err
