"""What people get wrong: each wrong input is refused with its place, its value and the way out, and exit code 2."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import graphs
import makers
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from typer.testing import CliRunner

from compress.cli import app
from compress.data.find_sets import parse_mapping
from compress.errors import CompressError
from compress.models.weights import check_shapes
from compress.planning.draft import make_recipe, name_recipe
from compress.planning.usual import find_scheme
from compress.recipe.goal import read_goals
from runtime.errors import UsageError
from runtime.tasks import find_task
from runtime.tasks.metrics import check_name

RECIPE = """\
version: 1
name: tiny
model: {source: "python:model.py:build", task: image-classification}
preprocess: {kind: image, mean: [0.5], std: [0.25]}
passes:
  - {kind: int8}
validate:
  gates:
    - {metric: top1, max_drop: 0.01}
"""


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refuse(*args: str) -> str:
    done = CliRunner().invoke(app, list(args))
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    return done.stderr


@pytest.mark.parametrize(
    ("old", "new", "place", "said"),
    [
        ("passes:", "pases:", "5:1: pases", "unknown key; did you mean 'passes'?"),
        ("kind: int8", "kind: int9", "6:12: passes.0.kind", "unknown pass 'int9'; did you mean 'int8'?"),
        ("kind: int8", "kind: quantize", "passes.0.kind", "unknown pass 'quantize'; did you mean 'int8'?"),
        ("kind: int8", "kind: prune", "passes.0.kind", "did you mean 'prune_channels' or 'prune_layers'?"),
        (
            "kind: int8",
            "kind: gptq, scheme: INT4",
            "passes.0.scheme",
            "there is no scheme 'INT4'; did you mean 'W4A16'?",
        ),
        ("kind: int8", "kind: rtn, scheme: int8 weights-only", "passes.0.scheme", "did you mean 'W8A16'?"),
        ("mean:", "maen:", "4:27: preprocess.maen", "unknown key; did you mean 'mean'?"),
        ("[0.5]", "[123.7]", "preprocess.mean", "give 0.485, or scale: 1"),
        ("top1,", "accuracy,", "9:16: validate.gates.0.metric", "unknown metric 'accuracy'; did you mean 'top1'?"),
        ("top1,", "f1,", "validate.gates.0.metric", "did you mean 'f1_macro'?"),
        ("max_drop: 0.01", "max_drop: 1", "validate.gates.0", "1 % is 0.01"),
        ("max_drop: 0.01", "max_drop: 1%", "validate.gates.0.max_drop", "found text '1%'; write 0.01"),
        ("max_drop: 0.01", "max_drop: '0.01'", "validate.gates.0.max_drop", "leave out the quotes"),
        ("image-classification", "classification", "model.task", "did you mean 'image-classification' or 'text-"),
        ("image-classification", "generic", "validate.gates.0", "top1"),
        ("preprocess: {kind: image, mean: [0.5], std: [0.25]}\n", "", "preprocess", "add `preprocess: {kind: image"),
    ],
)
def test_a_recipe_is_refused_where_it_is_wrong(old: str, new: str, place: str, said: str) -> None:
    assert old in RECIPE
    Path("r.yaml").write_text(RECIPE.replace(old, new))
    (line,) = refuse("check", "r.yaml").splitlines()
    assert line.startswith("r.yaml:") and place in line and said in line


def test_other_tasks_get_other_metrics() -> None:
    for task, metric in (("object-detection", "map"), ("semantic-segmentation", "pixel_accuracy")):
        Path("r.yaml").write_text(RECIPE.replace("top1,", "accuracy,").replace("image-classification", task))
        assert f"unknown metric 'accuracy'; did you mean '{metric}'?" in refuse("check", "r.yaml")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("model.onnx", b"\x08\x09\xff\xfe", "a model, not a recipe; write one for it: compress new --model model.onnx"),
        ("recipe.yaml", b"version: \xff", "recipe.yaml: not UTF-8 text (byte 9)"),
        ("recipe.yaml", b"", "the file is empty; a recipe starts with 'version: 1'"),
    ],
)
def test_what_is_no_recipe_is_named(name: str, content: bytes, said: str) -> None:
    Path(name).write_bytes(content)
    assert said in refuse("check", name)


@pytest.mark.parametrize(
    ("args", "place", "said"),
    [
        (["new", "--task", "classification"], "--task classification", "did you mean 'image-classification' or 'text"),
        (["new", "--task", "detection"], "--task detection", "did you mean 'object-detection'?"),
        (["new", "--source", "model.py"], "--source model.py", "expected hf:<hub id>, "),
        (["new", "--data", "x.csv"], "--data", "give --model, too"),
        (["new", "--model", "nowhere.onnx"], "nowhere.onnx: no such file or folder", "a model is hf:"),
        (["sweep", "r.yaml", "--budget", "soon"], "--budget soon", "as in 45m, 2h or 1h30m"),
    ],
)
def test_a_call_is_refused_by_its_flag(args: list[str], place: str, said: str) -> None:
    Path("r.yaml").write_text(RECIPE)
    error = refuse(*args)
    assert place in error and said in error and "Traceback" not in error


@pytest.mark.parametrize(
    ("flag", "text", "said"),
    [
        ("--preprocess", "kind: image, mean: [0.3", "write '{kind: image, mean: [0.3, 0.3, 0.3]}'"),
        ("--preprocess", "image", "--preprocess image: not a mapping; write '{kind: image"),
        ("--data", "{source: x", "write '{source: FILE, columns: {text: 1}}'"),
    ],
)
def test_a_mapping_that_is_none_is_answered_with_one_that_is(flag: str, text: str, said: str) -> None:
    with pytest.raises(CompressError) as refused:
        parse_mapping(text, flag)
    (problem,) = refused.value.problems
    assert problem.startswith(flag) and said in problem and refused.value.exit_code == 2


def test_a_flags_mapping_is_refused_as_a_recipes_is() -> None:
    model = {"source": "python:m.py:f", "task": "image-classification"}
    with pytest.raises(CompressError) as refused:
        make_recipe({"version": 1, "name": "x", "model": model, "preprocess": {"kind": "image", "maen": [0]}}, Path())
    assert refused.value.problems == ("--preprocess.maen: unknown key; did you mean 'mean'?",)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("INT4", "--scheme INT4: unknown scheme; did you mean 'W4A16'?; there are FP16"),
        ("int8 weights-only", "did you mean 'W8A16'?"),
        ("", "say what the numbers become, such as INT8; there are"),
    ],
)
def test_a_scheme_is_answered_with_ours(name: str, said: str) -> None:
    with pytest.raises(CompressError) as refused:
        find_scheme(name, "onnxruntime-cpu")
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("goal", "said"),
    [
        ("accuracy drop <= 0.01", "there is no metric 'accuracy'; did you mean 'top1'"),
        ("latency >= 2x", "there is no metric 'latency'; did you mean 'latency_p50'?"),
        ("smaller", "write a metric, >= or <=, and a number: size >= 6x"),
    ],
)
def test_a_goal_is_answered_with_ours(goal: str, said: str) -> None:
    with pytest.raises(ValueError, match="metric") as refused:
        read_goals([goal])
    assert str(refused.value).startswith(f"'{goal}'") and said in str(refused.value)


def test_the_runtime_answers_with_ours() -> None:
    with pytest.raises(UsageError, match="unknown metric 'accuracy'; did you mean 'top1'"):
        check_name("accuracy")
    with pytest.raises(UsageError, match="unknown task 'ner'; did you mean 'token-classification'"):
        find_task("ner")


def test_a_factory_called_like_any_other_names_no_recipe() -> None:
    assert name_recipe("python:digits/model.py:build") == "digits"


def save_images(folder: Path, sizes: list[tuple[int, int]]) -> None:
    for number, size in enumerate(sizes):
        place = folder / f"{number % 3}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full(size, 20 * number, np.uint8)).save(place / f"{number}.png")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"preprocess": {"channels": "RGB"}}, ["preprocess.channels: ", "python:net.py:make", "set channels: L"]),
        (
            {"data": {"evaluation": {"source": "imagefolder:mixed"}}},
            ["data.evaluation: ", "mixed/1/4.png: images are 9x8 after", "set preprocess.resize: [8, 8]"],
        ),
        ({"passes": [{"kind": "int8"}, {"kind": "prune_channels", "ratio": 0.5}]}, ["must come before int8"]),
        ({"passes": [{"kind": "int8"}, {"kind": "rtn"}]}, ["passes.1: rtn", "must come before int8"]),
        ({"passes": [{"kind": "int8"}, {"kind": "equalize"}]}, ["must come before the pass that rounds conv"]),
        ({"passes": [{"kind": "int8"}, {"kind": "smoothquant"}]}, ["must come before the pass that rounds conv"]),
        (
            {"model": {"weights": "nets.safetensors"}},
            ["model.weights: nets.safetensors: no such file", "did you mean 'net.safetensors'?"],
        ),
        ({"model": {"weights": "x.pt"}}, ["model.weights: x.pt: no such file", "; there is net.safetensors, other.s"]),
        ({"model": {"weights": "pickled.pth"}}, ["pickled.pth: holds Python objects", "safetensors.torch.save_file("]),
        (
            {"model": {"weights": "other.safetensors"}},
            ["other.safetensors: none of 37 names fit: weights of another model? it has 'b0', 'b1' and 35 more, the"],
        ),
        ({"model": {"source": "onnx:far.onnx", "weights": None}}, ["far.onnx.data is missing; copy it beside"]),
    ],
)
def test_a_plan_says_each_cause_once(changes: dict[str, Any], said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPRESS_TIMING", "off")
    recipe = makers.changed(makers.image_recipe(Path()), **changes)
    save_images(Path("mixed"), [(8, 8)] * 4 + [(9, 8)] * 2)
    save_file({f"b{i}": torch.zeros(2) for i in range(37)}, "other.safetensors")
    torch.save(torch.nn.Linear(1, 1), "pickled.pth")
    if recipe["model"]["weights"] is None:
        del recipe["model"]["weights"]
        far = {"save_as_external_data": True, "location": "far.onnx.data", "size_threshold": 0}
        onnx.save(ir.to_proto(graphs.one_layer()), "far.onnx", **far)
        Path("far.onnx.data").unlink()
    makers.write_recipe(Path("r.yaml"), recipe)
    (line,) = refuse("plan", "r.yaml", "--cache", "cache").splitlines()
    assert all(part in line for part in said), line


def test_files_whose_names_hardly_fit_are_another_model_s() -> None:
    shapes = {"weight": (1, 1), **{f"b{i}": (2,) for i in range(3)}}
    with pytest.raises(CompressError, match="1 of 4 names fit: weights of another model"):
        check_shapes(torch.nn.Linear(1, 1), shapes, "w.safetensors")


@pytest.mark.parametrize("task", ["token-classification", "image-classification"])
def test_a_task_that_config_json_denies(task: str) -> None:
    makers.text_folder(Path("lm"), "classifier")
    error = refuse("new", "--model", "lm", "--task", task)
    assert (
        f"--task {task}: config.json of dir:lm names BertForSequenceClassification" in error and "leave it out" in error
    )


def test_a_target_that_is_not_installed_is_told_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    recipe = makers.changed(makers.image_recipe(Path()), target="openvino")
    notes = [note.text for note in makers.plan(recipe, Path(), Path("cache")).notes]
    assert any("openvino does not run here: " in text and "pip install openvino" in text for text in notes)


def test_calls_without_what_they_need_are_given_an_example() -> None:
    Path("m.onnx").write_bytes(ir.to_proto(graphs.one_layer()).SerializeToString())
    assert "--scheme : say what the numbers become, such as INT8" in refuse("quantize", "m.onnx")
    assert "--goal '': write what is to be reached, as in size >= 6x" in refuse("auto", "m.onnx")
