"""A tiny model with a chat template through the whole product: what is scored, learned, frozen, warned of, refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chats import GEMMA, LLAMA, MARKED, chat_folder, write_chats
from makers import apply, write_recipe
from tiny_lm import QUICK_DECODING, write_texts
from typer.testing import CliRunner

from compress.cli import app
from runtime.bundle.format import read_manifest, read_samples

RTN: dict[str, Any] = {"kind": "rtn", "scheme": "W4A16", "group_size": 32}
EXACT = 1e-4


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model whose template has no marks, and conversations. Not to be written to."""
    folder = tmp_path_factory.mktemp("chats")
    chat_folder(folder / "lm", LLAMA, initializer_range=0.1)
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


@pytest.mark.parametrize("max_length", [128, 48])  # 48: the last turns are cut off
def test_graph_and_torch_score_what_the_assistant_says(
    home: Path, cache: Path, tmp_path: Path, max_length: int
) -> None:
    cut = {"preprocess": {"kind": "language", "max_length": max_length}}
    graph, checkpoint = tmp_path / "graph", tmp_path / "checkpoint"
    apply(recipe([RTN], **cut), graph, cache, home)
    apply(recipe([RTN], target="transformers", export=[{"kind": "checkpoint"}], **cut), checkpoint, cache, home)
    expected, count = nll_by_hand(home, max_length)
    for bundle in (graph, checkpoint):
        assert measured(bundle)["nll"] == pytest.approx(expected, abs=EXACT)
        notes = [row["reason"] for row in json.loads((bundle / "layers.json").read_text()) if row["type"] == "note"]
        assert any(note.startswith(f"data.evaluation: {count} of ") for note in notes)
    # 4-bit products of the graph round their inputs, which torch's do not
    assert measured(graph, "candidate")["nll"] == pytest.approx(measured(checkpoint, "candidate")["nll"], abs=2e-2)


def test_a_bundle_is_judged_without_jinja_transformers_and_tokenizers(
    home: Path, cache: Path, tmp_path: Path
) -> None:
    out = tmp_path / "bundle"
    apply(recipe([RTN]), out, cache, home)
    samples = read_samples(out, read_manifest(out))
    assert sorted(samples) == ["input_ids", "loss_mask"]
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('jinja2', 'transformers', 'torch', 'compress')));"
        "from runtime.__main__ import main; sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "validate", str(out)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert measured(out)["nll"] == pytest.approx(nll_by_hand(home)[0], abs=EXACT)


def test_training_learns_the_assistants_tokens_packed_or_not(home: Path, cache: Path, tmp_path: Path) -> None:
    """The same tokens count, in fewer rows; and the first loss is what is by hand's."""
    distill = {"kind": "distill", "steps": 1, "batch_size": 12, "held_out": 0.0, "logits": None, "labels": {}}
    bundles = []
    for packing in (False, True):
        asked = recipe([distill])
        asked["data"]["train"]["packing"] = packing
        bundles.append(tmp_path / str(packing))
        apply(asked, bundles[-1], cache, home)
    for bundle in bundles:
        log = (bundle / "compress.log").read_text()
        assert "predicted tokens are the assistant's" in log


def plan(folder: Path, asked: dict[str, Any]) -> str:
    path = write_recipe(folder / "recipe.yaml", asked)
    done = CliRunner().invoke(app, ["plan", str(path), "--cache", str(folder / "cache")])
    assert "Traceback" not in done.output, done.output
    return " ".join(done.output.split())


def test_the_plan_warns_of_plain_text_and_refuses_what_cannot_be_rendered(tmp_path: Path) -> None:
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
    sequences = {"kind": "distill", "sequences": {}, "steps": 1}
    write_chats(tmp_path / "train.jsonl", 4)
    write_chats(tmp_path / "calibration.jsonl", 4)
    said = plan(tmp_path, recipe([sequences]))
    assert "distill learns from texts that the teacher goes on with" in said
