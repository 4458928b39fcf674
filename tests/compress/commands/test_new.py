"""`compress new` and `compress quantize`: recipes that work as they are written, of a model, its data and answers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from makers import image_recipe, text_folder, write_texts
from PIL import Image
from sample_projects import write_image_files
from typer.testing import CliRunner

from compress.cli import app
from compress.commands import quantize as quantizing
from compress.commands.new import NewAnswers, write_recipe
from compress.commands.quantize import quantize_model
from compress.errors import CompressError
from compress.planning.draft import Draft, draft_recipe
from compress.planning.make_plan import make_plan
from compress.planning.usual import choose_gates, choose_passes, find_scheme
from compress.recipe.load import load_recipe
from compress.recipe.schema import Recipe
from runtime.errors import UsageError

IMAGES = "{kind: image, channels: L}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("new")
    image_recipe(folder)
    text_folder(folder / "classifier", "classifier")
    write_texts(folder / "texts.jsonl", 50)
    (folder / "onnx").mkdir()
    write_image_files(folder / "onnx")
    return folder


@pytest.fixture(autouse=True)
def _inside(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)


def test_the_recipe_of_a_model_works_as_it_is_written(place: Path, tmp_path: Path) -> None:
    for number, flags in enumerate(
        (
            ["--model", "net.py:make", "--weights", "net.safetensors", "--data", "test.npz", "--preprocess", IMAGES],
            ["--model", "classifier", "--data", "texts.jsonl"],
            ["--model", "classifier", "--data", "texts.jsonl", "--target", "openvino"],
        )
    ):
        out = tmp_path / f"{number}.yaml"
        done = CliRunner().invoke(app, ["new", *flags, "--out", str(out)])
        assert done.exit_code == 0, done.output
        assert CliRunner().invoke(app, ["check", str(out)]).exit_code == 0
        recipe = load_recipe(out)
        assert recipe.data.train is None  # nothing here learns from it
        assert [gate.metric for gate in recipe.validate_.gates] == ["top1", "latency_p50", "size_ratio"]
        plan = make_plan(recipe.at_root(place), tmp_path / "cache", timed=False)
        assert plan.after.n_bytes < plan.before.n_bytes
    assert "task: text-classification   # found in config.json: BertForSequenceClassification" in out.read_text()


def test_the_order_of_an_image_folders_classes_is_written(place: Path) -> None:
    for name in ("dog", "cat", "bird"):
        (place / "im" / name).mkdir(parents=True)
        for number in range(6):
            Image.fromarray(np.full((8, 8), 25 * number, np.uint8)).save(place / "im" / name / f"{number}.png")
    flags = [
        "--model",
        "net.py:make",
        "--weights",
        "net.safetensors",
        "--data",
        "imagefolder:im",
        "--preprocess",
        IMAGES,
    ]
    done = CliRunner().invoke(app, ["new", *flags, "--task", "image-classification", "--out", str(place / "im.yaml")])
    assert done.exit_code == 0, done.output
    line = next(line for line in (place / "im.yaml").read_text().splitlines() if "class_names" in line)
    assert line == "  class_names: [bird, cat, dog]   # the data's order; write that of the model's outputs"


def test_without_data_the_recipe_says_what_is_missing(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["new", "--model", "classifier", "--out", str(tmp_path / "r.yaml")])
    assert done.exit_code == 0 and "note: no --data: the recipe has no sets yet" in done.output
    assert CliRunner().invoke(app, ["check", str(tmp_path / "r.yaml")]).exit_code == 0


def test_templates_are_still_written_and_flags_of_a_model_need_one(tmp_path: Path) -> None:
    lines = write_recipe(tmp_path / "r.yaml", NewAnswers(task="object-detection"), "onnx:a.onnx")
    assert len(lines) == 1 and load_recipe(tmp_path / "r.yaml").model.source == "onnx:a.onnx"
    with pytest.raises(CompressError, match="--data is of a model that is there: give --model"):
        write_recipe(tmp_path / "s.yaml", NewAnswers(data="texts.jsonl"))
    with pytest.raises(CompressError, match="--source is put into a template"):
        write_recipe(tmp_path / "s.yaml", NewAnswers(model="classifier"), "dir:x")


def asker(*answers: str) -> tuple[Callable[[str, str], str], list[tuple[str, str]]]:
    """What answers in turn ("": the default), and what it was asked, with the defaults."""
    asked: list[tuple[str, str]] = []
    left = list(answers)

    def ask(question: str, usual: str) -> str:
        asked.append((question.partition(" ")[0], usual))
        return left.pop(0) or usual

    return ask, asked


def test_a_terminal_is_asked_with_what_was_found_as_defaults(tmp_path: Path) -> None:
    ask, asked = asker("classifier", "texts.jsonl", "", "openvino", "")
    write_recipe(tmp_path / "r.yaml", NewAnswers(), ask=ask)
    found = [("Model", ""), ("Data", ""), ("Task", "text-classification"), ("Target", "onnxruntime-cpu"), ("Goal,", "")]
    assert asked == found
    assert load_recipe(tmp_path / "r.yaml").target == "openvino"
    ask, asked = asker("", "")
    write_recipe(tmp_path / "s.yaml", NewAnswers(), ask=ask)
    assert asked == [("Model", ""), ("Task", "image-classification")]


def test_no_question_is_asked_without_a_terminal(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["new", "--out", str(tmp_path / "r.yaml")], input="")
    assert done.exit_code == 0 and "Model" not in done.output


def chain(scheme: str, target: str, made: Draft, has_data: bool = True) -> list[str]:
    assert made.inputs is not None
    passes = choose_passes(find_scheme(scheme, target), target, made.inputs.facts, has_data).passes
    return [" ".join(str(values.get(key, "")) for key in ("kind", "scheme", "mode")).strip() for values in passes]


def test_the_usual_chains() -> None:
    texts = draft_recipe("classifier", root=Path(), data="texts.jsonl")
    images = {"kind": "image", "channels": "L"}
    net = draft_recipe("net.py:make", root=Path(), data="test.npz", preprocess=images, weights="net.safetensors")
    assert chain("w4a16", "onnxruntime-cpu", texts) == ["gptq W4A16"]
    assert chain("W4A16", "onnxruntime-cpu", texts, False) == ["hqq W4A16"]
    assert chain("W8A16", "onnxruntime-cpu", texts, False) == ["rtn W8A16"]
    assert chain("W8A8", "onnxruntime-cpu", texts) == ["smoothquant", "int8"]
    assert chain("INT8", "onnxruntime-cpu", net) == ["smoothquant", "int8"]
    assert chain("W8A8", "vllm", texts) == ["smoothquant", "gptq W8A8"]
    assert chain("W8A8", "vllm", texts, False) == ["rtn W8A8"]
    assert chain("int8-dynamic", "onnxruntime-cpu", texts) == ["int8  dynamic"]
    assert chain("FP16", "openvino", texts) == ["autocast"]
    assert chain("Q4_K", "llama.cpp", texts) == ["gptq Q4_K"]
    with pytest.raises(CompressError, match=r"int8 is measured on samples: give --data|smoothquant is measured on"):
        chain("INT8", "onnxruntime-cpu", texts, False)


def test_an_unknown_scheme_lists_all_and_names_the_nearest() -> None:
    with pytest.raises(CompressError) as caught:
        find_scheme("W4B16", "onnxruntime-cpu")
    assert "did you mean 'W4A16'" in str(caught.value) and "INT8_DYNAMIC" in str(caught.value)
    assert caught.value.exit_code == 2
    with pytest.raises(CompressError, match="unknown scheme"):
        find_scheme("INT8_DYNAMIC", "vllm")  # of graphs alone


def test_gates_fit_the_labels() -> None:
    assert choose_gates("text-classification", has_labels=True) == [{"metric": "top1", "max_drop": 0.01}]
    assert choose_gates("text-classification", has_labels=False) == [{"metric": "agreement", "min": 0.98}]
    for n, drop, agreeing in ((381, 0.01, 0.98), (380, 0.02, 0.98), (96, 0.04, 0.96), (3, 0.57, 0.29)):
        (gate,) = choose_gates("text-classification", has_labels=True, n_samples=n)
        (near,) = choose_gates("text-classification", has_labels=False, n_samples=n)
        assert (gate["max_drop"], near["min"]) == (drop, agreeing)
    assert choose_gates("generic", has_labels=False) == [{"metric": "sqnr_db", "min": 25}]


def test_quantize_writes_the_recipe_that_it_applies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    applied: list[tuple[Recipe, Path]] = []
    monkeypatch.setattr(quantizing, "apply_recipe", lambda recipe, out, cache, quiet: applied.append((recipe, out)))
    out, model = tmp_path / "b", os.path.abspath("classifier")
    said = NewAnswers(model=model, data=os.path.abspath("texts.jsonl"))
    quantize_model(said, "W8A16", out)
    recipe = load_recipe(tmp_path / "b.yaml")
    assert applied == [(recipe, out)] and [pass_.kind for pass_ in recipe.passes] == ["gptq"]
    assert [gate.metric for gate in recipe.validate_.gates] == ["top1"]
    quantize_model(NewAnswers(model=model), "W4A16", out)
    recipe = load_recipe(tmp_path / "b.yaml")
    assert applied[1:] == [(recipe, out)] and recipe.validate_.gates == ()
    text = (tmp_path / "b.yaml").read_text()
    assert "judged on synthetic inputs" in text.partition("\n")[0] and "hqq" in text
    (tmp_path / "c.yaml").write_text("mine")
    with pytest.raises(UsageError, match="it is another file"):
        quantize_model(said, "W8A16", tmp_path / "c")
