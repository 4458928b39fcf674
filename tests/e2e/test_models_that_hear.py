"""A model that also hears through the whole product: its language part in few bits, what hears as it was, its nats."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hearing import write_glm, write_qwen, write_qwen_asr, write_sounds, write_voxtral
from makers import apply
from safetensors.torch import load_file
from seeing import perceiving_recipe
from tiny_lm import write_texts

from compress.data.chat import ChatEncoder
from compress.data.samples import load_samples
from compress.errors import CompressError
from compress.models.find_task import find_task_of_folder
from compress.models.processor import Processor
from compress.planning.make_plan import make_plan
from compress.recipe.load import load_recipe
from compress.specs import ChatSpec, DataSpec
from runtime.errors import UsageError

W4: dict[str, Any] = {"scheme": "W4A16", "group_size": 32}
FAMILIES = {"qwen": write_qwen, "glm": write_glm, "qwen_asr": write_qwen_asr}
recipe = partial(perceiving_recipe, "audio-text-to-text")


@pytest.fixture(scope="module", params=FAMILIES)
def home(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, texts, and questions about sounds, to which tests add recipes."""
    folder = tmp_path_factory.mktemp(request.param)
    FAMILIES[request.param](folder / "lm")
    for name, n, seed in (("calibration", 4, 0), ("evaluation", 4, 1)):
        write_sounds(folder, name, n, seed)
        write_texts(folder / f"{name}-texts.jsonl", n, seed)
    return folder


def nats_of_answers(home: Path, folder: Path) -> float:
    """Nats per token of the answers and of the token that ends each, by transformers and string search alone."""
    from transformers import AutoModelForMultimodalLM, AutoProcessor

    from runtime.encode.audio import load_audio

    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForMultimodalLM.from_pretrained(folder, dtype=torch.float32).eval()
    total, count = 0.0, 0
    for line in (home / "evaluation.jsonl").read_text().splitlines():
        row = json.loads(line)
        turns = [{"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": row["text"]}]}]
        prompt = processor.tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        given = {"audio": [load_audio(home / row["audio"])[0] / np.float32(32768)], "sampling_rate": 16000}
        feeds = processor(text=[prompt + row["label"] + "<|im_end|>\n"], **given, return_tensors="pt")
        n_asked = processor(text=[prompt], **given, return_tensors="pt")["input_ids"].shape[1]
        with torch.no_grad():
            logits = model(**feeds).logits[0, :-1].double()
        nats = torch.nn.functional.cross_entropy(logits, feeds["input_ids"][0, 1:], reduction="none")
        answered = nats[n_asked - 1 : -1]  # without the line's end behind the last token
        total, count = total + float(answered.sum()), count + len(answered)
    return total / count


def metrics(bundle: Path, side: str) -> dict[str, float]:
    found: dict[str, float] = json.loads((bundle / "report.json").read_text())[side]["metrics"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "texts"), [("gptq", False), ("rtn", True)])
def test_the_language_part_alone_is_rounded_and_judged_on_answers(
    home: Path, kind: str, texts: bool, tmp_path: Path
) -> None:
    """Calibrated and judged on sounds, or on texts: every other tensor as it was, nats those of the written folder."""
    apply(recipe([{"kind": kind, **W4}], texts=texts), tmp_path / "out", tmp_path / "cache", home)
    before, after = (load_file(path / "model.safetensors") for path in (home / "lm", tmp_path / "out/model"))
    packed = {name.removesuffix("_packed") for name in after if name.endswith("_packed")}
    assert len(packed) == 14 and all("language_model" in name for name in packed)
    assert all(torch.equal(before[name], after[name]) for name in before.keys() - packed)
    for side, folder in (("baseline", home / "lm"), ("candidate", tmp_path / "out/model")):
        if not texts:
            assert metrics(tmp_path / "out", side)["nll"] == pytest.approx(nats_of_answers(home, folder), abs=1e-4)


def test_questions_and_conversations_with_sounds_are_the_same_samples(home: Path) -> None:
    rows = [json.loads(line) for line in (home / "evaluation.jsonl").read_text().splitlines()[:2]]
    chats = ChatEncoder(ChatSpec(), home / "lm", home, perceives="audio")

    def encode(rows: list[dict[str, Any]]) -> dict[str, Any]:
        (home / "given.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        spec = DataSpec(source=f"jsonl:{home / 'given.jsonl'}")
        return load_samples(spec, home, "audio-text-to-text", ("input_ids", "attention_mask"), 0, chats=chats).columns

    def converse(row: dict[str, Any], **sound: str) -> list[dict[str, Any]]:
        asked = [{"type": "audio", **sound}, {"type": "text", "text": row["text"]}]
        return [{"role": "user", "content": asked}, {"role": "assistant", "content": row["label"]}]

    asked = encode(rows)
    inside = encode([{"messages": converse(row, audio=row["audio"])} for row in rows])
    beside = encode([{"messages": converse(row), "audios": [row["audio"]]} for row in rows])
    assert {"input_ids", "loss_mask", "input_features"} <= asked.keys()
    for other in (inside, beside):
        assert other.keys() == asked.keys()
        for name, column in asked.items():
            assert all(np.array_equal(a, b) for a, b in zip(column, other[name], strict=True)), name
    for mask, row in zip(asked["loss_mask"], rows, strict=True):
        assert mask.sum() == len(row["label"]) + 1  # each letter is a token, and the one that ends the turn


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "graph": (
        {"target": "onnxruntime-cpu", "export": [{"kind": "onnx"}]},
        "a model of task audio-text-to-text is written as checkpoint, not as onnx; use target: transformers",
    ),
    "other task": (
        {"model": {"source": "dir:lm", "task": "text-generation"}},
        "give task: audio-text-to-text",
    ),
    "trained": (
        {"passes": [{"kind": "distill", "epochs": 1}]},
        "data.train: there are images or sounds, and passes that train learn from texts alone",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_is_refused_at_the_plan(home: Path, case: str, tmp_path: Path) -> None:
    parts, said = REFUSED[case]
    values = recipe([{"kind": "gptq", **W4}], **parts)
    if case == "trained":
        values["data"] = {**values["data"], "train": {"source": "jsonl:calibration.jsonl"}}
    path = home / f"{case}.yaml"
    path.write_text(json.dumps(values))
    with pytest.raises(CompressError) as error:
        make_plan(load_recipe(path), tmp_path / "cache", timed=False)
    assert any(said in problem for problem in error.value.problems), error.value.problems


def test_a_processor_that_leaves_sounds_out_is_refused(tmp_path: Path) -> None:
    write_voxtral(tmp_path / "lm")
    for name in ("calibration", "evaluation"):
        write_sounds(tmp_path, name, 2)
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe([{"kind": "rtn", **W4}])))
    with pytest.raises(CompressError, match="leaves out the sounds of a rendered text: give texts alone"):
        make_plan(load_recipe(tmp_path / "recipe.yaml"), tmp_path / "cache", timed=False)


def test_a_sound_of_which_the_beginning_alone_is_read_is_refused(home: Path) -> None:
    """Where the processor cuts it at its extractor's length, and not where it hands that pieces."""
    processor = Processor(home / "lm", kind="audio")
    sound = np.random.default_rng(0).normal(size=3 * 16000).astype(np.float32)
    whole = processor.encode("<|AUDIO|>", [sound[:16000]])
    if "qwen_asr" not in home.name and "glm" not in home.name:
        with pytest.raises(UsageError, match="reads 1 of the 3 seconds of a sound: give it in pieces"):
            processor.encode("<|AUDIO|>", [sound])
    else:
        assert len(processor.encode("<|AUDIO|>", [sound])["input_ids"]) > len(whole["input_ids"])


def test_the_folder_tells_its_task(home: Path) -> None:
    found = find_task_of_folder(home / "lm")
    assert found is not None and found[0] == "audio-text-to-text"
