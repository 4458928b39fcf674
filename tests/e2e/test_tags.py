"""A trained model that tags words: distilled, quantized, judged by spans, run where there is no torch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from exchanges import assert_no_exchange_passes, copy_baseline
from golden import RECORDS
from makers import serve
from trained_models import write_tagger

from compress.planning.make_plan import make_plan
from compress.recipe.load import load_recipe
from runtime import open_bundle

RECIPE = RECORDS / "recipes/tags-distill-int8.yaml"


@pytest.fixture(scope="module")
def tagger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model and its data; recipes stand in it."""
    folder = tmp_path_factory.mktemp("tagger")
    write_tagger(folder)
    return folder


def plan(folder: Path, cache: Path, *overrides: str) -> None:
    make_plan(load_recipe(shutil.copy(RECIPE, folder), overrides), cache)


def test_a_model_that_tags_words(tags_bundle: Path, tmp_path: Path) -> None:
    """Its numbers are in tests/golden."""
    served = serve(tags_bundle, "['w1 w2 w40', 'w20 w3']", tmp_path)
    assert served["finite"]
    with open_bundle(tags_bundle) as bundle:
        found = bundle.predict([["w1", "w2", "w40"], ["w20", "w3"]])["prediction"]
    assert [[word["label"] for word in text] for text in found] == [["B-PER", "I-PER", "O"], ["B-LOC", "B-PER"]]


def test_no_bundle_of_which_a_part_was_exchanged_passes(tags_bundle: Path, tmp_path: Path) -> None:
    copy_baseline(tags_bundle, tmp_path / "whole")
    assert_no_exchange_passes(tmp_path / "whole", tmp_path)


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
    with pytest.raises(Exception, match=r"row 0|line 1") as caught:
        plan(tagger, cache, "data.evaluation.source=jsonl:bad.jsonl")
    assert message in str(caught.value)


def test_classes_must_have_names(tagger: Path, cache: Path, tmp_path: Path) -> None:
    config = json.loads((tagger / "model/config.json").read_text())
    for file in (tagger / "model").iterdir():
        (tagger / "nameless").mkdir(exist_ok=True)
        (tagger / "nameless" / file.name).write_bytes(file.read_bytes())
    config["id2label"] = {str(i): f"LABEL_{i}" for i in range(5)}
    (tagger / "nameless/config.json").write_text(json.dumps(config))
    with pytest.raises(Exception, match="class_names: token-classification needs them"):
        plan(tagger, cache, "model.source=dir:nameless")
