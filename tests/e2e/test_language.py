"""A tiny Llama through every pass: bundles that verify, checkpoints that load, graphs that agree."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from child_processes import run_in_process
from hosts import Host
from makers import apply, bundle_bytes, plan, write_recipe
from places import ROOT
from safetensors.torch import load_file, save_file
from shortcuts import quick_judge, quick_reader
from tiny_lm import CHARACTERS, LIKELY, language_folder, language_recipe

import runtime
from compress.execution.run import apply_recipe
from compress.recipe.load import load_recipe
from runtime.bundle.format import BuildScore
from runtime.report.report import verdict_line
from runtime.tasks.manifest import read_manifest, verify

W4: dict[str, Any] = {"scheme": "W4A16", "group_size": 32}
BOTH = [{"kind": "onnx"}, {"kind": "checkpoint"}]
CHECKPOINT: dict[str, Any] = {"export": [{"kind": "checkpoint"}], "target": "transformers"}
ROUNDED = {
    f"model.layers.{i}.{name}"
    for i in range(2)
    for name in (
        *(f"self_attn.{part}_proj" for part in "qkvo"),
        *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
    )
}
PROMPTS = ("abc", "the end of it", "q")
INT8_INPUTS = 1e-3
"""Relative: MatMulNBits rounds its inputs to int8 at accuracy_level 4, which torch, with the same weights, does not.

With exact inputs the same file is within EXACT of torch, as the first two tests show.
"""
EXACT = 1e-4


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model whose next tokens differ in likelihood; recipes stand in it."""
    folder = tmp_path_factory.mktemp("language")
    language_folder(folder / "lm", **LIKELY)
    return folder


@pytest.fixture(scope="module")
def gptq(home: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of W4A16, as a graph and as a checkpoint. Not to be written to."""
    out = tmp_path_factory.mktemp("gptq") / "tiny"
    assert apply(language_recipe(home, [{"kind": "gptq", **W4}], export=BOTH), out, cache, home).verdict == "pass"
    return out


@pytest.fixture(scope="module")
def checkpoint(gptq: Path) -> Any:
    return load_checkpoint(gptq / "checkpoint")


def load_checkpoint(folder: Path) -> Any:
    """As anyone would load it; every tensor must have found its place."""
    from transformers import AutoModelForCausalLM

    model, said = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(said.values()), said
    return model.eval()


@pytest.fixture
def exact_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions whose int4 products take float32 inputs, as torch's do."""
    import onnxruntime

    make = onnxruntime.InferenceSession

    def session(path: str, settings: Any, **more: Any) -> Any:
        settings.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
        return make(path, settings, **more)

    monkeypatch.setattr(onnxruntime, "InferenceSession", session)


def token_ids(text: str) -> list[int]:
    """By hand, what the tokenizer of `language.write_tokenizer` gives, with the first token in front."""
    return [1, *(4 if letter == " " else 5 + CHARACTERS.index(letter) for letter in text)]


def torch_nll(model: Any, home: Path) -> float:
    """Nats per token over the evaluation texts, each scored alone: what a report must say."""
    total, count = 0.0, 0
    for line in (home / "evaluation.jsonl").read_text().splitlines():
        ids = torch.tensor([token_ids(json.loads(line)["text"])])
        with torch.no_grad():
            logits = model(ids).logits.double()
        total += float(torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum"))
        count += ids.shape[1] - 1
    return total / count


def reported(bundle: Path, side: str = "candidate") -> dict[str, float]:
    metrics: dict[str, float] = json.loads((bundle / "report.json").read_text())[side]["metrics"]
    return metrics


def actions(bundle: Path) -> dict[str, str]:
    """Layer -> what was done to it at last."""
    return {row["layer"]: row["action"] for row in json.loads((bundle / "layers.json").read_text()) if row["layer"]}


def greedy(model: Any, prompt: str, n: int) -> list[int]:
    """transformers' own, without the prompt and without the token that ends it."""
    ids = torch.tensor([token_ids(prompt)])
    made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, do_sample=False)
    return [int(token) for token in made[0, ids.shape[1] :] if token != 2]


# --- one bundle, two artifacts ----------------------------------------------------------------------------------------


def test_the_graph_generates_what_transformers_makes_of_the_checkpoint(
    gptq: Path, checkpoint: Any, exact_inputs: None
) -> None:
    with runtime.open_bundle(gptq) as bundle:
        answers = bundle.generate(list(PROMPTS), max_new_tokens=16)
    assert [list(answer.token_ids) for answer in answers] == [greedy(checkpoint, prompt, 16) for prompt in PROMPTS]
    assert [answer.prompt_tokens for answer in answers] == [len(prompt) + 1 for prompt in PROMPTS]
    assert any(answer.token_ids for answer in answers)


def test_nll_is_that_of_the_checkpoint(gptq: Path, checkpoint: Any, home: Path, exact_inputs: None) -> None:
    expected = torch_nll(checkpoint, home)
    with runtime.open_bundle(gptq) as bundle:
        assert bundle.evaluate()["nll"] == pytest.approx(expected, rel=EXACT)
    assert reported(gptq)["nll"] == pytest.approx(expected, rel=INT8_INPUTS)
    assert reported(gptq, "baseline")["nll"] == pytest.approx(torch_nll(load_checkpoint(home / "lm"), home), rel=EXACT)


def test_tokens_with_int8_inputs_are_nearly_the_likeliest(gptq: Path, checkpoint: Any) -> None:
    """One that is not lies where two are as likely but for what int8 inputs change."""
    with runtime.open_bundle(gptq) as bundle:
        answers = bundle.generate(list(PROMPTS), max_new_tokens=16)
    gaps: list[float] = []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = [*token_ids(prompt), *answer.token_ids]
        with torch.no_grad():
            logits = checkpoint(torch.tensor([ids[:-1]])).logits[0, answer.prompt_tokens - 1 :]
        chosen = logits.gather(1, torch.tensor(ids[answer.prompt_tokens :])[:, None])[:, 0]
        gaps += ((logits.max(dim=1).values - chosen) / logits.std()).tolist()
    assert max(gaps) < 0.06 and np.mean(gaps) < 0.002 and np.mean(np.array(gaps) > 0) < 0.05


def test_what_the_bundle_holds(gptq: Path) -> None:
    manifest = json.loads((gptq / "manifest.json").read_text())
    candidate = next(one for one in manifest["artifacts"] if one["name"] == "candidate")
    assert candidate["cache"]["shared_buffer"] and candidate["precision"] == "int4"
    assert (gptq / "model/genai_config.json").is_file()
    assert {layer for layer, action in actions(gptq).items() if action == "w4"} == ROUNDED
    config = json.loads((gptq / "checkpoint/config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["lm_head"] and config["config_groups"]["group_0"]["weights"]["group_size"] == 32
    verify(gptq)


def test_the_command_prints_text(gptq: Path) -> None:
    command = [sys.executable, "-m", "runtime", "generate", str(gptq), "abc", "--max-new-tokens", "16"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    with runtime.open_bundle(gptq) as bundle:
        answer = bundle.generate("abc", max_new_tokens=16)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{answer.text}\n" and answer.text.strip()


def make_again(file: Path, folder: Path) -> None:
    with quick_judge(), quick_reader():
        apply_recipe(load_recipe(file), folder / "tiny", folder / "fresh", quiet=True)


def test_same_recipe_same_bytes(home: Path, gptq: Path, tmp_path: Path) -> None:
    """In another process, with nothing in its cache."""
    recipe = language_recipe(home, [{"kind": "gptq", **W4}], export=BOTH)
    file = write_recipe(home / "again.yaml", recipe)
    run_in_process(make_again, file, tmp_path)
    assert bundle_bytes(tmp_path / "tiny") == bundle_bytes(gptq)


# --- passes one after the other ---------------------------------------------------------------------------------------

COMPOSED: dict[str, tuple[Sequence[dict[str, Any]], dict[str, Any]]] = {
    "awq-gptq": ([{"kind": "awq", "round": False, **W4}, {"kind": "gptq", **W4}], CHECKPOINT),
    "rotate-gptq": ([{"kind": "rotate"}, {"kind": "gptq", **W4}], CHECKPOINT),
    "gptq-tune": ([{"kind": "gptq", **W4}, {"kind": "tune", "steps": 3}], CHECKPOINT),
    "hqq": ([{"kind": "hqq", **W4}], {"export": BOTH}),
    "autoround": ([{"kind": "autoround", "steps": 3, **W4}], CHECKPOINT),
    "smoothquant-gptq-w8a8": ([{"kind": "smoothquant"}, {"kind": "gptq", "scheme": "W8A8"}], CHECKPOINT),
    "gptq-kv": ([{"kind": "gptq", **W4}, {"kind": "kv_cache", "scheme": "int8"}], {"export": BOTH}),
}


@pytest.mark.parametrize("name", COMPOSED)
def test_passes_compose(name: str, home: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    passes, parts = COMPOSED[name]
    out = tmp_path / name
    report = apply(language_recipe(home, list(passes), **parts), out, cache, home)
    assert report.verdict == "pass", report.gates
    onnx_too = parts["export"] is BOTH
    folder = out / ("checkpoint" if onnx_too else "model")
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    weights = config["config_groups"]["group_0"]["weights"]
    assert (weights["num_bits"], weights["strategy"]) == ((8, "channel") if "w8a8" in name else (4, "group"))
    assert {layer for layer, action in actions(out).items() if action != "kept"} >= ROUNDED
    found = torch_nll(load_checkpoint(folder), home)
    assert reported(out)["nll"] == pytest.approx(found, rel=INT8_INPUTS if onnx_too else EXACT)
    assert abs(found - reported(out, "baseline")["nll"]) < 0.1
    if not onnx_too:  # the model card's own command opens it
        (command,) = re.findall(r"^python -c .*$", (out / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
        exec(shlex.split(command)[2].replace("DIR", str(out)))
        assert "generated_text" in capsys.readouterr().out
    if onnx_too:
        served(out, kv_int8="kv" in name)


def served(bundle: Path, kv_int8: bool) -> None:
    """The graph's attention is fused, over one buffer, of int8 where that was asked for; and it generates."""
    assert "plain form" not in (bundle / "compress.log").read_text()
    with runtime.open_bundle(bundle) as opened:
        cache = opened.manifest.artifact("candidate").cache
        assert cache is not None and cache.shared_buffer
        assert cache.dtype == ("int8" if kv_int8 else "float32")
        assert opened.generate("abc", max_new_tokens=4).token_ids
    operators = {node.op_type for node in onnx.load(bundle / "model/model.onnx").graph.node}
    assert "GroupQueryAttention" in operators


def test_int8_by_a_pass_over_the_graph_after_one_over_blocks(home: Path, cache: Path, tmp_path: Path) -> None:
    passes = [{"kind": "smoothquant"}, {"kind": "int8", "mode": "dynamic"}]
    apply(language_recipe(home, passes), tmp_path / "int8", cache, home)
    assert {layer for layer, action in actions(tmp_path / "int8").items() if action == "int8"} >= ROUNDED
    served(tmp_path / "int8", kv_int8=False)


def test_passes_that_change_floats_alone_change_nothing_else(home: Path, cache: Path, tmp_path: Path) -> None:
    """A rotation and scales that are folded, without rounding: the checkpoint is the float model."""
    passes = [{"kind": "rotate"}, {"kind": "awq", "round": False, **W4}]
    apply(language_recipe(home, passes, **CHECKPOINT), tmp_path / "same", cache, home)
    before, after = reported(tmp_path / "same", "baseline"), reported(tmp_path / "same")
    assert after["nll"] == pytest.approx(before["nll"], rel=1e-6) and after["kl_token"] < 1e-6
    ids = torch.tensor([token_ids("the end of it")])
    with torch.no_grad():
        logits = [load_checkpoint(folder)(ids).logits.numpy() for folder in (home / "lm", tmp_path / "same/model")]
    np.testing.assert_allclose(logits[1], logits[0], atol=1e-4)


# --- a checkpoint alone -----------------------------------------------------------------------------------------------


SCHEMES: dict[str, list[dict[str, Any]]] = {
    "W8A8": [{"kind": "rtn", "scheme": "W8A8"}],
    "W4A8": [{"kind": "rtn", "scheme": "W4A8", "group_size": 32}],
    "FP8": [{"kind": "rtn", "scheme": "FP8"}],
    "FP8_DYNAMIC and an fp8 cache": [{"kind": "rtn", "scheme": "FP8_DYNAMIC"}, {"kind": "kv_cache", "scheme": "fp8"}],
    "an int8 cache": [{"kind": "kv_cache", "scheme": "int8"}],
}


@pytest.fixture(scope="module")
def outliers(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with three channels 64 times as large between norm and projections, which read them 64 times smaller:
    the same function in float, another one where inputs are rounded."""
    folder = tmp_path_factory.mktemp("outliers")
    shutil.copytree(home / "lm", folder / "lm")
    weights = load_file(home / "lm/model.safetensors")
    factors = torch.ones(64).index_fill(0, torch.tensor([3, 17, 40]), 64.0)
    for name in weights:
        if name.endswith(("input_layernorm.weight", "post_attention_layernorm.weight")):
            weights[name] *= factors
        elif name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")):
            weights[name] /= factors
    save_file(weights, folder / "lm/model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("name", SCHEMES)
def test_a_checkpoint_is_scored_as_transformers_computes_it(
    name: str, outliers: Path, cache: Path, tmp_path: Path
) -> None:
    report = apply(language_recipe(outliers, SCHEMES[name], **CHECKPOINT), tmp_path / "b", cache, outliers)
    loss = torch_nll(load_checkpoint(tmp_path / "b/model"), outliers)
    assert reported(tmp_path / "b")["nll"] == pytest.approx(loss, abs=1e-6)  # weights alone are 3e-4 to 4e-3 away
    assert any(text.startswith("scored as transformers computes: ") for text in report.advice)


def test_a_checkpoint_alone_is_judged_by_torch_and_not_timed(
    home: Path, cache: Path, tmp_path: Path, host: Host
) -> None:
    judged = {"gates": [{"metric": "nll", "max_drop": 0.5}, {"metric": "size_ratio", "min": 1.5}]}
    recipe = language_recipe(home, [{"kind": "gptq", **W4}], **CHECKPOINT, validate=judged)
    report = apply(recipe, tmp_path / "b", cache, home)
    assert report.verdict == "pass" and [gate.holds for gate in report.gates] == [True, True]
    assert reported(tmp_path / "b")["nll"] == pytest.approx(
        torch_nll(load_checkpoint(tmp_path / "b/model"), home), rel=EXACT
    )
    assert "torch measures its quality as it is built" in (tmp_path / "b/compress.log").read_text()
    assert verdict_line(report).startswith("PASS: tiny-lm for transformers, scored by torch ")
    assert (report.backend, report.target) == ("torch", "transformers")
    assert read_manifest(tmp_path / "b").score == BuildScore(report.scored_by)
    assert "onnxruntime" not in "".join((tmp_path / f"b/report.{kind}").read_text() for kind in ("json", "md", "xml"))
    assert not list((tmp_path / "b").rglob("*.onnx"))
    host.memory_bytes = 2**14
    scarce = apply(recipe, tmp_path / "scarce", cache, home)
    assert bundle_bytes(tmp_path / "scarce") == bundle_bytes(tmp_path / "b")
    for folder, made, said in (("b", report, "are those that were judged"), ("scarce", scarce, "were not compared")):
        (text,) = json.loads((tmp_path / folder / "host.json").read_text())["notes"]
        assert said in text and text in made.advice and text in (tmp_path / folder / "compress.log").read_text()


def test_prompts_start_as_the_texts_that_were_scored(cache: Path, tmp_path: Path) -> None:
    """The recipe's first token, which is not the tokenizer's own, is that of the exported folders."""
    from transformers import AutoTokenizer

    preprocess = {"kind": "language", "max_length": 32, "bos_token_id": 3}
    language_folder(tmp_path / "lm", num_hidden_layers=1)
    recipe = language_recipe(tmp_path, [{"kind": "rtn", **W4}], export=BOTH, preprocess=preprocess)
    apply(recipe, tmp_path / "b", cache, tmp_path)
    for folder in (tmp_path / "b/model", tmp_path / "b/checkpoint"):
        assert AutoTokenizer.from_pretrained(folder).encode("ab") == [3, 5, 6]
        assert json.loads((folder / "config.json").read_text())["bos_token_id"] == 3
    assert json.loads((tmp_path / "b/model/genai_config.json").read_text())["model"]["bos_token_id"] == 3


# --- mixtures of experts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("architecture", "kind"), [("mixtral", "gptq"), ("qwen-moe", "awq")])
def test_a_mixture_is_compressed_from_its_own_files(architecture: str, kind: str, cache: Path, tmp_path: Path) -> None:
    language_folder(tmp_path / "lm", architecture)
    recipe = language_recipe(tmp_path, [{"kind": kind, **W4}], **CHECKPOINT)
    report = apply(recipe, tmp_path / "b", cache, tmp_path)
    assert report.verdict == "pass"
    log = (tmp_path / "b/compress.log").read_text()
    assert "held in memory" not in log and "does not call" not in log
    done = actions(tmp_path / "b")
    experts = [layer for layer in done if ".experts." in layer]
    assert len(experts) == 2 * 4 * 3 and {done[layer] for layer in experts} == {"w4"}
    assert reported(tmp_path / "b")["nll"] == pytest.approx(
        torch_nll(load_checkpoint(tmp_path / "b/model"), tmp_path), rel=EXACT
    )


def test_a_plan_says_that_a_graph_computes_all_experts(cache: Path, tmp_path: Path) -> None:
    """That it says what the model says: test_decoder_caches.py."""
    language_folder(tmp_path / "lm", "mixtral", num_hidden_layers=1)
    made = plan(language_recipe(tmp_path, [{"kind": "rtn", **W4}], export=BOTH), tmp_path, cache)
    assert any(note.text.startswith("an ONNX graph computes all experts for every token") for note in made.notes)
