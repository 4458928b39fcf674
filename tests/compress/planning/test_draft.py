"""Recipes drafted from a model and data: what is found, how one set is divided, which flag an error names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from makers import image_recipe, text_folder, write_texts
from model_specs import changed_config
from sample_projects import write_image_files
from seeing import write_questions, write_qwen

from compress.data.samples import load_samples, overlap
from compress.errors import CompressError, RecipeError
from compress.models.find_task import find_task_of_folder
from compress.planning.draft import Draft, draft_recipe, name_recipe
from compress.specs import DataSpec

IMAGES = {"kind": "image", "channels": "L"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A factory with its weights and npz files, an ONNX file, two folders of text models, texts."""
    folder = tmp_path_factory.mktemp("draft")
    image_recipe(folder)
    (folder / "sets").mkdir()
    for name in ("train", "test"):
        (folder / "sets" / f"{name}.npz").write_bytes((folder / f"{name}.npz").read_bytes())
    (folder / "onnx").mkdir()
    write_image_files(folder / "onnx")
    text_folder(folder / "classifier", "classifier")
    text_folder(folder / "encoder", "encoder")
    write_texts(folder / "texts.jsonl", 50)
    (folder / "net.pt2").touch()
    return folder


def draft(place: Path, source: str, **given: Any) -> Draft:
    return draft_recipe(source, root=place, **given)


def refuse(place: Path, source: str, **given: Any) -> str:
    with pytest.raises(CompressError) as caught:
        draft(place, source, **given)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_a_folder_says_its_task_and_one_set_is_divided(place: Path) -> None:
    made = draft(place, "classifier", data="texts.jsonl")
    assert made.recipe["model"] == {"source": "dir:classifier", "task": "text-classification"}
    assert made.reasons["model.task"] == "found in config.json: BertForSequenceClassification"
    assert made.has_labels
    data = made.recipe["data"]
    assert list(data) == ["calibration", "train", "evaluation"]
    assert all(spec["columns"] == {"text": "text", "label": "label"} for spec in data.values())
    samples = {
        name: load_samples(DataSpec(**spec), place, made.task, (), seed=0, n_classes=3) for name, spec in data.items()
    }
    assert (samples["evaluation"].n, samples["train"].n, samples["calibration"].n) == (10, 40, 40)
    assert (
        overlap(samples["train"], samples["evaluation"]) == overlap(samples["calibration"], samples["evaluation"]) == 0
    )
    made.make_recipe(place, passes=[{"kind": "int8"}])


def test_a_part_of_a_set_is_divided_inside(place: Path) -> None:
    made = draft(place, "classifier", data="{source: texts.jsonl, skip: 10, samples: 20}")
    ranges = {name: (spec["skip"], spec["samples"]) for name, spec in made.recipe["data"].items()}
    assert ranges == {"calibration": (14, 16), "train": (14, 16), "evaluation": (10, 4)}


def test_no_more_is_calibrated_with_than_it_takes(place: Path) -> None:
    write_texts(place / "many.jsonl", 600)
    made = draft(place, "classifier", calibration="many.jsonl", evaluation="texts.jsonl")
    assert made.recipe["data"]["calibration"]["samples"] == made.n_samples["calibration"] == 512
    assert made.reasons["data.calibration"] == "of 600; more: write another `samples`"
    wanted = draft(place, "classifier", calibration="{source: many.jsonl, samples: 580}", evaluation="texts.jsonl")
    assert wanted.n_samples["calibration"] == 580


def test_what_config_json_says_beyond_the_class(place: Path, tmp_path: Path) -> None:
    labels: dict[str, Any] = {"id2label": {"0": "score"}, "label2id": {"score": 0}}
    cases = {
        "text-multi-label-classification": {"problem_type": "multi_label_classification"},
        "text-regression": labels,
        "token-classification": {"architectures": ["BertForTokenClassification"]},
        "question-answering": {"architectures": ["BertForQuestionAnswering"]},
    }
    for task, changes in cases.items():
        found = find_task_of_folder(changed_config(place / "classifier", tmp_path / task, **changes))
        assert found is not None and found[0] == task
    nobody = changed_config(place / "classifier", tmp_path / "nobody", architectures=["BertForPreTraining"])
    assert "give FILE.py:FUNCTION with --task generic, " in refuse(place, str(nobody))
    sentences = changed_config(place / "encoder", tmp_path / "sentences", architectures=["BertForMaskedLM"])
    (sentences / "modules.json").write_text("[]")
    assert draft(place, str(sentences)).task == "feature-extraction"


def test_a_factory_is_told_by_its_data(place: Path) -> None:
    made = draft(place, "net.py:make", weights="net.safetensors", data="sets", preprocess=IMAGES, name="mine")
    assert made.recipe["name"] == "mine"
    assert made.task == "image-classification"
    data = made.recipe["data"]
    assert (data["train"]["source"], data["evaluation"]["source"]) == ("npz:sets/train.npz", "npz:sets/test.npz")
    assert data["calibration"]["samples"] == made.n_samples["train"] == 64


def test_arrays_that_are_inputs_need_no_preprocess(place: Path) -> None:
    images = np.load(place / "test.npz")
    np.savez(place / "ready.npz", image=images["image"][:, None].astype(np.float32) / 255, label=images["label"])
    made = draft(place, "net.py:make", weights="net.safetensors", data="ready.npz")
    assert made.recipe["preprocess"] == {"kind": "tensor"} and made.task == "image-classification"


def test_an_onnx_file_is_generic_until_data_tells_more(place: Path) -> None:
    assert draft(place, "onnx/model.onnx").recipe["model"] == {"source": "onnx:onnx/model.onnx", "task": "generic"}
    images = np.random.default_rng(0).integers(0, 256, (12, 32, 32, 3), dtype=np.uint8)
    np.savez(place / "pictures.npz", image=images, label=np.arange(12) % 10)
    made = draft(place, "onnx", evaluation="pictures.npz", preprocess={"kind": "image"})
    assert made.task == "image-classification" and made.recipe["data"].keys() == {"evaluation"}


def test_targets_that_read_other_files_get_their_export(place: Path) -> None:
    exports = {
        target: draft(place, "classifier", target=target).recipe.get("export")
        for target in ("openvino", "vllm", "transformers", "llama.cpp", "tensorrt-rtx")
    }
    assert exports == {
        "openvino": None,
        "vllm": [{"kind": "checkpoint", "target": "vllm"}],
        "transformers": [{"kind": "checkpoint"}],
        "llama.cpp": [{"kind": "gguf"}],
        "tensorrt-rtx": [{"kind": "tensorrt-rtx"}],
    }


def test_images_of_any_size_are_brought_to_one_for_a_graph_alone(tmp_path: Path) -> None:
    write_qwen(tmp_path / "lm")
    write_questions(tmp_path, "questions", 8)
    drafts = {
        target: draft_recipe("lm", data="questions.jsonl", target=target, root=tmp_path)
        for target in (None, "vllm", "onnxruntime-cpu")
    }
    assert "chat" not in drafts[None].recipe and "chat" not in drafts["vllm"].recipe
    graph = drafts["onnxruntime-cpu"]
    assert graph.recipe["chat"] == {"image_size": [32, 32]} and "chat.image_size" in graph.reasons
    assert graph.inputs is not None and graph.inputs.sight is not None


def test_one_column_that_can_be_meant_is_named(place: Path) -> None:
    rows = [{"review": f"w{n} w{n + 1}", "label": n % 3} for n in range(10)]
    (place / "reviews.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = draft(place, "classifier", data="reviews.jsonl")
    assert made.recipe["data"]["evaluation"]["columns"] == {"text": "review", "label": "label"}


@pytest.mark.parametrize(
    ("source", "given", "text"),
    [
        ("net.py:make", {"data": "sets"}, "--preprocess: python:net.py:make does not say how its inputs are made"),
        ("net.py:make", {}, "a factory does not say what its model reads; give --data, and --task"),
        ("net.py", {}, "name its factory: net.py:FACTORY"),
        ("net.safetensors", {}, "weights alone are no model"),
        ("net.pt2", {}, "torch.onnx.export(torch.export.load('net.pt2')).save('model.onnx')"),
        ("nowhere/model.onnx", {}, "no such file or folder"),
        ("sets", {}, "holds neither config.json nor one .onnx file"),
        ("classifier", {"task": "text-clasification"}, "--task text-clasification: unknown task; did you mean 'text-"),
        ("classifier", {"target": "tensort"}, "--target tensort: unknown target; did you mean 'tensorrt'"),
        ("classifier", {"data": "lost.jsonl"}, "--data: lost.jsonl: no such file or folder"),
        ("classifier", {"train": "{source: texts.jsonl, sample: 3}"}, "--train: sample: Extra inputs"),
        ("classifier", {"data": "{source: texts.jsonl, columns: {text: body}}"}, "there is no column 'body'"),
        ("classifier", {"data": "{source: texts.jsonl, samples: 1}"}, "1 sample cannot be divided"),
        (
            "classifier",
            {"data": "texts.jsonl", "train": "texts.jsonl", "evaluation": "texts.jsonl"},
            "--data is where --train and --evaluation are found",
        ),
    ],
)
def test_what_cannot_be_found_is_named_by_its_flag(place: Path, source: str, given: dict[str, Any], text: str) -> None:
    assert text in refuse(place, source, **given)


def test_no_task_fits(place: Path) -> None:
    np.savez(place / "odd.npz", other=np.zeros((4, 2), np.float32))
    text = refuse(place, "net.py:make", weights="net.safetensors", data="odd.npz")
    assert text.startswith(
        "python:net.py:make: its task cannot be told from the model and the data; give --task\ngeneric:"
    )


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "digits").mkdir()
    monkeypatch.chdir(tmp_path / "digits")
    names = {
        "hf:org/Some Model": "Some-Model",
        "python:pkg.zoo:resnet56": "resnet56",
        "onnx:a/version-slim-320.onnx": "version-slim-320",
        "onnx:faces/model.onnx": "faces",
        "dir:minilm/model": "minilm",
        "python:model.py:build": "digits",
        "python:small_cnn.py:make_model": "small_cnn",
        "hf:...": "model",
    }
    assert {source: name_recipe(source) for source in names} == names


def test_a_draft_without_data_has_none(place: Path) -> None:
    made = draft(place, "encoder")
    assert made.inputs is None and "data" not in made.recipe and not made.has_labels
    with pytest.raises(RecipeError, match="--preprocess"):
        draft(place, "encoder", preprocess={"kind": "text", "max_length": -1})
