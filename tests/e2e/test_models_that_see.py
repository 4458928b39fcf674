"""A model that also sees through the whole product: its language part in few bits, what sees as it was, its nats."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from makers import apply
from safetensors.torch import load_file
from seeing import perceiving_recipe, write_llava, write_mllama, write_questions, write_qwen
from tiny_lm import write_texts

from compress.data.chat import ChatEncoder
from compress.data.samples import load_samples
from compress.errors import CompressError
from compress.models.processor import without_films
from compress.planning.make_plan import make_plan
from compress.recipe.load import load_recipe
from compress.specs import ChatSpec, DataSpec

W4: dict[str, Any] = {"scheme": "W4A16", "group_size": 32}
FAMILIES = {"llava": write_llava, "qwen": write_qwen}
EXACT = 1e-4
recipe = partial(perceiving_recipe, "image-text-to-text")


@pytest.fixture(scope="module", params=FAMILIES)
def home(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, texts, and questions about images, to which tests add recipes."""
    folder = tmp_path_factory.mktemp(request.param)
    FAMILIES[request.param](folder / "lm")
    for name, n, seed in (("calibration", 6, 0), ("evaluation", 8, 1)):
        write_questions(folder, name, n, seed)
        write_texts(folder / f"{name}-texts.jsonl", n, seed)
    return folder


def load(folder: Path) -> tuple[Any, Any]:
    """The model and the processor as transformers gives them of a folder."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    with without_films():
        processor = AutoProcessor.from_pretrained(folder)
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval(), processor


def nats_of_answers(home: Path, folder: Path) -> float:
    """Nats per token of the answers and of the token that ends each, by transformers and string search alone."""
    from PIL import Image

    model, processor = load(folder)
    total, count = 0.0, 0
    for line in (home / "evaluation.jsonl").read_text().splitlines():
        row = json.loads(line)
        asked = [{"type": "image"}, {"type": "text", "text": row["text"]}]
        turns = [{"role": "user", "content": asked}]
        prompt = processor.apply_chat_template(turns, add_generation_prompt=True)
        image = Image.open(home / row["image"]).convert("RGB")
        with without_films():
            feeds = processor(text=[prompt + row["label"] + "<|im_end|>\n"], images=[[image]], return_tensors="pt")
            n_asked = processor(text=[prompt], images=[[image]], return_tensors="pt")["input_ids"].shape[1]
        with torch.no_grad():
            logits = model(**feeds).logits[0, :-1].double()
        nats = torch.nn.functional.cross_entropy(logits, feeds["input_ids"][0, 1:], reduction="none")
        answered = nats[n_asked - 1 : -1]  # without the line's end behind the last token
        total, count = total + float(answered.sum()), count + len(answered)
    return total / count


def metrics(bundle: Path, side: str) -> dict[str, float]:
    found: dict[str, float] = json.loads((bundle / "report.json").read_text())[side]["metrics"]
    return found


def check_whole(source: Path, written: Path, rounded: set[str]) -> None:
    """Every file and tensor is there, and all but the rounded weights as they were."""
    assert {path.name for path in source.iterdir()} <= {path.name for path in written.iterdir()}
    before, after = (load_file(folder / "model.safetensors") for folder in (source, written))
    packed = {name.removesuffix("_packed") for name in after if name.endswith("_packed")}
    assert set(before) == {name for name in after if not name.startswith(tuple(packed))} | packed
    assert packed == rounded
    for name in before.keys() - packed:
        assert torch.equal(before[name], after[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rtn", "gptq", "awq", "hqq"])
def test_texts_are_enough(home: Path, kind: str, tmp_path: Path) -> None:
    apply(recipe([{"kind": kind, **W4}], texts=True), tmp_path / "out", tmp_path / "cache", home)
    config = json.loads((home / "lm/config.json").read_text())["text_config"]
    source = load_file(home / "lm/model.safetensors")
    rounded = {name for name in source if "language_model" in name and name.endswith("proj.weight")}
    assert len(rounded) == 7 * config["num_hidden_layers"]
    check = check_whole if kind != "awq" else lambda *_: None  # which folds scales into norms
    check(home / "lm", tmp_path / "out/model", rounded)
    told = json.loads((tmp_path / "out/host.json").read_text())["notes"]
    assert any("on 4 samples are those that were judged" in text for text in told), told
    assert metrics(tmp_path / "out", "candidate")["nll"] > 0


@pytest.mark.slow
def test_answers_about_images_are_what_is_judged(home: Path, tmp_path: Path) -> None:
    """Calibrated and judged on images: the float model's nats and those of the folder that was written."""
    apply(recipe([{"kind": "gptq", **W4}]), tmp_path / "out", tmp_path / "cache", home)
    for side, folder in (("baseline", home / "lm"), ("candidate", tmp_path / "out/model")):
        assert metrics(tmp_path / "out", side)["nll"] == pytest.approx(nats_of_answers(home, folder), abs=EXACT)


@pytest.mark.slow
def test_a_tower_is_rounded_where_it_is_named(home: Path, tmp_path: Path) -> None:
    tower = "model.vision_tower.encoder" if "llava" in home.name else "model.visual.blocks"
    passes = [{"kind": "rtn", **W4}, {"kind": "rtn", "scheme": "W8A16", "targets": [f"re:{tower}"]}]
    parts = {"target": "vllm", "export": [{"kind": "checkpoint", "target": "vllm"}]}
    apply(recipe(passes, texts=True, **parts), tmp_path / "out", tmp_path / "cache", home)
    packed = [name for name in load_file(tmp_path / "out/model/model.safetensors") if name.endswith("_packed")]
    assert sum("vision" in name or "visual" in name for name in packed) >= 8
    assert metrics(tmp_path / "out", "candidate")["nll"] == pytest.approx(
        metrics(tmp_path / "out", "baseline")["nll"], abs=0.5
    )


def encode(home: Path, rows: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    """The samples that rows of a jsonl beside the images give."""
    (home / "given.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    chats = ChatEncoder(ChatSpec(), home / "lm", home, perceives="image")
    spec = DataSpec(source=f"jsonl:{home / 'given.jsonl'}")
    return load_samples(spec, home, "image-text-to-text", ("input_ids", "attention_mask"), 0, chats=chats).columns


def test_questions_and_conversations_with_images_are_the_same_samples(home: Path, tmp_path: Path) -> None:
    """An image beside its question, in a message, and in a column of its own; and a conversation without one."""
    rows = [json.loads(line) for line in (home / "evaluation.jsonl").read_text().splitlines()[:3]]

    def converse(row: dict[str, Any], **image: str) -> list[dict[str, Any]]:
        asked = [{"type": "image", **image}, {"type": "text", "text": row["text"]}]
        return [{"role": "user", "content": asked}, {"role": "assistant", "content": row["label"]}]

    asked = encode(home, rows, tmp_path)
    inside = encode(home, [{"messages": converse(row, path=row["image"])} for row in rows], tmp_path)
    beside = encode(home, [{"messages": converse(row), "images": [row["image"]]} for row in rows], tmp_path)
    texts = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}], "images": []}]
    mixed = encode(home, [{"messages": converse(rows[0]), "images": [rows[0]["image"]]}, *texts], tmp_path)
    assert {"input_ids", "loss_mask", "pixel_values"} <= asked.keys()
    for other in (inside, beside):
        assert other.keys() == asked.keys()
        for name, column in asked.items():
            assert all(np.array_equal(a, b) for a, b in zip(column, other[name], strict=True)), name
    for ids, mask, row in zip(asked["input_ids"], asked["loss_mask"], rows, strict=True):
        assert mask.sum() == len(row["label"]) + 1  # each letter is a token, and the one that ends the turn
        assert len(ids) > len(row["label"] + row["text"])
    assert mixed["pixel_values"][1].size == 0 and mixed["loss_mask"][1].sum() == 3


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "graph": (
        {"target": "openvino", "export": [{"kind": "onnx"}]},
        "openvino is not given the graphs of a model that also sees; use target: onnxruntime-cpu, or target: transf",
    ),
    "cut": (
        {"preprocess": {"kind": "language", "max_length": 16}},
        "tokens with those of its images or sounds, more than",
    ),
    "packed": (
        {"preprocess": {"kind": "language", "max_length": 128, "pack": 64}},
        "samples with images or sounds cannot share a row",
    ),
    "trained": (
        {"train": "calibration", "passes": [{"kind": "distill", "epochs": 1}]},
        "data.train: there are images or sounds, and passes that train learn from texts alone",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_is_refused_at_the_plan(home: Path, case: str, tmp_path: Path) -> None:
    parts, said = REFUSED[case]
    values = recipe([{"kind": "gptq", **W4}], **parts)
    if named := values.pop("train", None):
        values["data"] = {**values["data"], "train": {"source": f"jsonl:{named}.jsonl"}}
    path = home / f"{case}.yaml"
    path.write_text(json.dumps(values))
    with pytest.raises(CompressError) as error:
        make_plan(load_recipe(path), tmp_path / "cache", timed=False)
    assert any(said in problem for problem in error.value.problems), error.value.problems


def test_a_text_task_says_which_task_the_folder_has(home: Path, tmp_path: Path) -> None:
    values = recipe([{"kind": "gptq", **W4}], texts=True, model={"source": "dir:lm", "task": "text-generation"})
    path = home / "text.yaml"
    path.write_text(json.dumps(values))
    with pytest.raises(CompressError, match="give task: image-text-to-text"):
        make_plan(load_recipe(path), tmp_path / "cache", timed=False)


def test_images_that_go_through_blocks_of_their_own_are_refused(tmp_path: Path) -> None:
    """Texts alone are taken: the blocks that they do not come to stay as they are."""
    write_mllama(tmp_path / "lm")
    for name in ("calibration", "evaluation"):
        write_questions(tmp_path, name, 4)
        write_texts(tmp_path / f"{name}-texts.jsonl", 4)
    for texts in (True, False):
        (tmp_path / "recipe.yaml").write_text(json.dumps(recipe([{"kind": "gptq", **W4}], texts=texts)))
        if texts:
            plan = make_plan(load_recipe(tmp_path / "recipe.yaml"), tmp_path / "cache", timed=False)
            kept = [row for row in plan.steps[-1].decisions if row.action == "kept"]
            assert any("layers.1.cross_attn" in row.layer for row in kept)
            continue
        with pytest.raises(CompressError, match="images or sounds go through layers between the blocks that texts"):
            make_plan(load_recipe(tmp_path / "recipe.yaml"), tmp_path / "cache", timed=False)
