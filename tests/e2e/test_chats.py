"""A tiny model with a chat template through the whole product: what is scored, learned, frozen, warned of, refused."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chats import GEMMA, LLAMA, chat_folder, write_chats
from makers import apply, write_recipe
from tiny_lm import QUICK_DECODING, write_texts
from typer.testing import CliRunner

from compress.cli import app
from compress.models.huggingface import TextModel
from compress.planning.inputs import read_inputs
from compress.planning.sets import load_set
from compress.recipe.load import load_recipe
from compress.work import tune as work_of_tune
from runtime.bundle.format import read_samples
from runtime.tasks.manifest import read_manifest

RTN: dict[str, Any] = {"kind": "rtn", "scheme": "W4A16", "group_size": 32}
EXACT = 1e-4
CUT: dict[str, Any] = {"preprocess": {"kind": "language", "max_length": 48}}
"""The last turn of most conversations is cut off."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model whose template has no marks, and conversations. Not to be written to."""
    folder = tmp_path_factory.mktemp("chats")
    chat_folder(folder / "lm", LLAMA, initializer_range=0.1, num_hidden_layers=1)
    write_chats(folder / "calibration.jsonl", 6)
    write_chats(folder / "evaluation.jsonl", 12, seed=1)
    write_chats(folder / "train.jsonl", 12, seed=2)
    return folder


def recipe(passes: list[dict[str, Any]], **parts: Any) -> dict[str, Any]:
    data = {name: {"source": f"jsonl:{name}.jsonl"} for name in ("calibration", "evaluation", "train")}
    judged = {"gates": [{"metric": "nll", "max": 20}], "benchmark": QUICK_DECODING, "steps": False}
    model = {"source": "dir:lm", "task": "text-generation"}
    return {"version": 1, "name": "c", "model": model, "data": data, "passes": passes, "validate": judged, **parts}


def nll_by_hand(home: Path, max_length: int = 128) -> tuple[float, int]:
    """Nats per token of the assistant's words and the token that ends each, by torch and string search alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(home / "lm")
    model = AutoModelForCausalLM.from_pretrained(home / "lm", dtype=torch.float32).eval()
    total, count = 0.0, 0
    for line in (home / "evaluation.jsonl").read_text().splitlines():
        ids: list[int] = []
        said: list[bool] = []
        for k, turn in enumerate(json.loads(line)["messages"]):
            head = ("<s>" if not k else "") + f"<|start_header_id|>{turn['role']}<|end_header_id|>\n\n"
            for text, counts in ((head, False), (turn["content"] + "<|eot_id|>", turn["role"] == "assistant")):
                tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
                ids, said = ids + tokens, said + [counts] * len(tokens)
        row, kept = torch.tensor([ids[:max_length]]), torch.tensor(said[:max_length])[1:]
        with torch.no_grad():
            logits = model(row).logits.double()[0, :-1]
        nats = torch.nn.functional.cross_entropy(logits, row[0, 1:], reduction="none")
        total, count = total + float(nats[kept].sum()), count + int(kept.sum())
    return total / count, count


def measured(bundle: Path, side: str = "baseline") -> dict[str, float]:
    metrics: dict[str, float] = json.loads((bundle / "report.json").read_text())[side]["metrics"]
    return metrics


@pytest.fixture(scope="module")
def graph(home: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with an ONNX file. Not to be written to."""
    out = tmp_path_factory.mktemp("graph") / "graph"
    apply(recipe([RTN], **CUT), out, cache, home)
    return out


def test_graph_and_torch_score_what_the_assistant_says(home: Path, graph: Path, cache: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    apply(recipe([RTN], target="transformers", export=[{"kind": "checkpoint"}], **CUT), checkpoint, cache, home)
    expected, count, whole = (*nll_by_hand(home, 48), nll_by_hand(home)[1])
    assert 0 < count < whole
    for bundle in (graph, checkpoint):
        assert measured(bundle)["nll"] == pytest.approx(expected, abs=EXACT)
        notes = [row["reason"] for row in json.loads((bundle / "layers.json").read_text()) if row["type"] == "note"]
        assert any(note.startswith(f"data.evaluation: {count} of ") for note in notes)
    # 4-bit products of the graph round their inputs, which torch's do not
    assert measured(graph, "candidate")["nll"] == pytest.approx(measured(checkpoint, "candidate")["nll"], abs=2e-2)


def test_a_bundle_is_judged_without_jinja_and_transformers(graph: Path) -> None:
    assert sorted(read_samples(graph, read_manifest(graph))) == ["input_ids", "loss_mask"]
    code = (
        "import json, sys; sys.modules.update(dict.fromkeys(('jinja2', 'transformers', 'torch', 'compress')))\n"
        "import runtime\n"
        "with runtime.open_bundle(sys.argv[1]) as bundle: print(json.dumps(bundle.evaluate()))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(graph)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["nll"] == pytest.approx(measured(graph, "candidate")["nll"], abs=1e-6)


def plan(folder: Path, asked: dict[str, Any]) -> str:
    path = write_recipe(folder / "recipe.yaml", asked)
    done = CliRunner().invoke(app, ["plan", str(path), "--cache", str(folder / "cache")])
    assert "Traceback" not in done.output, done.output
    return " ".join(done.output.split())


def test_the_plan_warns_of_plain_text_packs_and_refuses_what_cannot_be_rendered(tmp_path: Path) -> None:
    chat_folder(tmp_path / "lm", GEMMA)
    write_texts(tmp_path / "calibration.jsonl", 8)
    write_chats(tmp_path / "evaluation.jsonl", 4)
    asked = recipe([RTN | {"kind": "gptq"}])
    del asked["data"]["train"]
    assert "data.calibration: plain text, and the model has a chat template" in plan(tmp_path, asked)
    turns = [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]
    (tmp_path / "calibration.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    assert "column 'messages', line 1: the chat template fails on this conversation" in plan(tmp_path, asked)
    assert "packing: each sample is judged alone" in plan(
        tmp_path, {**asked, "data": {"evaluation": {"source": "jsonl:evaluation.jsonl", "packing": True}}}
    )
    packed = {**recipe([]), "data": {"evaluation": {"source": "jsonl:evaluation.jsonl"}}}
    packed["data"]["calibration"] = {"source": "jsonl:texts.jsonl", "packing": True}
    write_texts(tmp_path / "texts.jsonl", 8)
    inputs = read_inputs(load_recipe(write_recipe(tmp_path / "packed.yaml", packed)), tmp_path / "cache")
    rows = load_set(inputs, "calibration", None).columns["input_ids"]
    assert 1 < len(rows) < 8
    assert [np.count_nonzero(ids == 2) for ids in rows] == [np.count_nonzero(ids == 1) - 1 for ids in rows]
    windows = {**recipe([]), "data": {"evaluation": {"source": "jsonl:evaluation.jsonl"}}}
    windows["preprocess"] = {"kind": "language", "max_length": 16, "pack": 16}
    inputs = read_inputs(load_recipe(write_recipe(tmp_path / "windows.yaml", windows)), tmp_path / "cache")
    assert inputs.chats is not None
    cut = load_set(inputs, "evaluation", None).columns
    rows = [json.loads(line)["messages"] for line in (tmp_path / "evaluation.jsonl").read_text().splitlines()]
    whole = [np.concatenate(parts) for parts in zip(*map(inputs.chats.encode, rows), strict=True)]
    for name, values in zip(("input_ids", "loss_mask"), whole, strict=True):
        np.testing.assert_array_equal(cut[name].ravel(), values[: len(values) // 16 * 16])
    sequences = {"kind": "distill", "sequences": {}, "steps": 1}
    write_chats(tmp_path / "train.jsonl", 4)
    write_chats(tmp_path / "calibration.jsonl", 4)
    said = plan(tmp_path, recipe([sequences]))
    assert "distill learns from texts that the teacher goes on with" in said


def test_the_plan_says_where_the_samples_of_a_row_are_not_read_apart(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = recipe([RTN | {"kind": "gptq"}])
    asked["data"]["calibration"]["packing"] = True
    loaded = load_recipe(write_recipe(home / "across.yaml", asked))
    facts = read_inputs(loaded, tmp_path).facts
    assert facts.reads_apart and not any("packing" in note for note in facts.notes)
    monkeypatch.setattr("compress.planning.inputs.reads_samples_apart", lambda module: False)
    facts = read_inputs(loaded, tmp_path).facts
    assert not facts.reads_apart
    assert any("data.calibration: packing: this model attends across" in note for note in facts.notes)


def test_packed_conversations_are_learned_and_calibrated_on_apart(
    home: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What training and passes over blocks call the model with: positions that begin anew, and whose tokens count."""
    seen: dict[str, list[Any]] = {"positions": [], "masks": []}
    forward, learn = TextModel.forward, work_of_tune.mark_next_tokens

    @functools.wraps(forward)
    def watch_forward(self: TextModel, *args: Any, **feeds: Any) -> Any:
        seen["positions"].append(feeds.get("position_ids"))  # of each call, None where a row holds one sample
        return forward(self, *args, **feeds)

    def watch_learning(sample: Any, ids: str, counted: Any) -> Any:
        seen["masks"].append(counted)
        return learn(sample, ids, counted)

    monkeypatch.setattr(TextModel, "forward", watch_forward)
    monkeypatch.setattr(work_of_tune, "mark_next_tokens", watch_learning)
    passes = [
        {"kind": "distill", "steps": 1, "batch_size": 2},
        {"kind": "gptq", "scheme": "W4A16", "group_size": 32},
        {"kind": "tune", "steps": 1, "text_share": 0.3},
    ]
    asked = recipe(passes, target="transformers", export=[{"kind": "checkpoint"}])
    for name in ("calibration", "train"):
        asked["data"][name]["packing"] = True
    apply(asked, tmp_path / "packed", cache, home)
    rows = [values for values in seen["positions"] if isinstance(values, torch.Tensor) and values.device.type == "cpu"]
    assert any(bool((values.diff() < 0).any()) for values in rows)
    assert seen["masks"] and all(0 < mask.sum() < len(mask) for mask in seen["masks"])
