"""What cannot work with a language model is refused by name, and by the plan wherever a plan can know."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hosts import Host
from makers import changed, write_recipe
from safetensors.torch import load_file, save_file
from tiny_decoders import tiny_folder
from tiny_lm import language_folder, language_recipe, write_texts
from typer.testing import CliRunner, Result

from compress.cli import app

GPTQ: dict[str, Any] = {"kind": "gptq", "scheme": "W4A16", "group_size": 32}
CHECKPOINT = [{"kind": "checkpoint"}]
VLLM: dict[str, Any] = {"target": "vllm", "export": [{"kind": "checkpoint", "target": "vllm"}]}
TRANSFORMERS: dict[str, Any] = {"target": "transformers", "export": CHECKPOINT}
ATTENTION = "model.layers.0.self_attn"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with tiny models and texts, and a recipe about one of them. Not to be written to."""
    folder = tmp_path_factory.mktemp("models")
    language_folder(folder / "odd", intermediate_size=172)
    language_folder(folder / "small", vocab_size=20)
    return folder, language_recipe(folder, [GPTQ])


@pytest.fixture
def recipe(models: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The recipe, in a copy of its folder, which is the working directory."""
    shutil.copytree(models[0], tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return models[1]


def run(command: str, recipe: dict[str, Any], *more: str) -> Result:
    """`plan` or `apply` of a recipe in the working directory; nothing may end in a traceback."""
    where = ["--out", "out/b", "--quiet"] if command == "apply" else []
    args = [command, str(write_recipe(Path("recipe.yaml"), recipe)), *where, *more]
    done = CliRunner().invoke(app, [*args, "--cache", "cache"])
    assert "Traceback" not in done.output and "a defect" not in done.output, done.output
    return done


# --- the plan ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"passes": [{**GPTQ, "damp_precent": 0.1}]},
            "passes.0.damp_precent: unknown key; did you mean 'damp_percent'?",
        ),
        (
            {"passes": [{**GPTQ, "group_size": 96}]},
            f"passes.0: gptq: {ATTENTION}.q_proj has 64 inputs, which group_size 96 does not divide; use group_size: ",
        ),
        (
            {"model": {"source": "dir:odd"}},
            "passes.0: gptq: model.layers.1.mlp.down_proj has 172 inputs, which group_size 32 does not divide; "
            "set indivisible: fit, or ignore it",
        ),
        (
            {"model": {"source": "dir:odd"}, **TRANSFORMERS},
            "passes.0: gptq: model.layers.1.mlp.down_proj has 172 inputs, which group_size 32 does not divide; "
            "use group_size: 4 or 43, set indivisible: fit, or ignore it",
        ),
        (
            {**VLLM, "passes": [{**GPTQ, "scheme": "W3A16"}]},
            "passes.0: gptq: target vllm has kernels for weights of 4 and 8 bits; use scheme: W4A16 or W8A16",
        ),
        (
            {"passes": [{"kind": "rtn", "scheme": "FP8"}]},
            "passes.0: rtn: target onnxruntime-cpu gets no FP8 graphs; use target: vllm",
        ),
        ({"passes": [{**GPTQ, "ignore": ["Linear"]}]}, "passes.0: gptq: no matrix product is left to round"),
        (
            {**VLLM, "passes": [{**GPTQ, "overrides": [{"targets": ["re:.*q_proj"], "group_size": 64}]}]},
            f"export.0: {ATTENTION}: vLLM runs these layers as one, with one scheme (q_proj: W4A16, group 64; "
            "k_proj, v_proj: W4A16, group 32); give them the same",
        ),
        (
            {"passes": [GPTQ, GPTQ]},
            f"passes.1: gptq: no matrix product is left to round; {ATTENTION}.q_proj is in 5 bits already",
        ),
        ({"passes": [GPTQ, {"kind": "rotate"}]}, f"passes.1: rotate: {ATTENTION}.q_proj is rounded already"),
        ({"limits": {"memory_gib": 0.01}}, "limits.memory_gib: about "),
        (
            {"validate": {"benchmark": {"prompt_tokens": 100, "new_tokens": 29}}},
            "validate.benchmark.prompt_tokens 100 and new_tokens 29 are more than the model's context_length 128",
        ),
        (
            {**TRANSFORMERS, "validate": {"gates": [{"metric": "tpot", "min_speedup": 1.5}]}},
            "validate.gates.0: tpot is not measured of a checkpoint, which nothing here runs; leave the gate out",
        ),
        (
            {"preprocess": {"kind": "language", "max_length": 128, "pack": 200}},
            "preprocess.pack: pack is 200: give 2 to max_length, 128",
        ),
        (
            {"preprocess": {"kind": "language", "max_length": 200, "pack": 200}},
            "preprocess: max_length 200 is more than the model's 128 positions",
        ),
        ({"data": {"calibration": {"source": "jsonl:calibration.jsonl", "samples": 17}}}, "samples: 17 wanted"),
        ({"data": {"evaluation": {"source": "jsonl:evaluation.jsonl"}}}, "data: gptq needs a calibration set"),
    ],
)
def test_a_plan_refuses(recipe: dict[str, Any], change: dict[str, Any], said: str) -> None:
    asked = changed(recipe, **change)
    if "data" in change:
        asked["data"] = {**change["data"], "evaluation": recipe["data"]["evaluation"]}
    done = run("plan", asked)
    assert done.exit_code == 2 and said in done.stderr, done.stderr


def test_groups_that_are_fitted_are_reported(recipe: dict[str, Any]) -> None:
    passes = [{**GPTQ, "indivisible": "fit"}]
    done = run("plan", changed(recipe, model={"source": "dir:odd"}, passes=passes), "--json")
    assert done.exit_code == 0, done.stderr
    assert "down_proj has 172 inputs, which group_size 32 does not divide" in done.stdout
    done = run("apply", changed(recipe, model={"source": "dir:odd"}, passes=passes, **TRANSFORMERS))
    assert done.exit_code == 0, done.output
    rows = {row["layer"]: row for row in json.loads(Path("out/b/layers.json").read_text()) if row["layer"]}
    assert rows["model.layers.0.mlp.down_proj"]["reason"] == "W4A16, group 43: 172 inputs, which 32 does not divide"
    assert rows["model.layers.0.mlp.up_proj"]["reason"] == "W4A16, group 32"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "calibration.jsonl is empty (0 bytes)"),
        ("\n", "calibration.jsonl: holds no samples"),
        ('{"text": ""}\n', "no text has two tokens: there is nothing to predict"),
    ],
)
def test_an_empty_data_file(recipe: dict[str, Any], content: str, said: str) -> None:
    Path("calibration.jsonl").write_text(content)
    done = run("plan", recipe)
    assert done.exit_code == 2 and done.stderr.startswith("data.calibration: ") and said in done.stderr, done.output


def test_a_calibration_set_shorter_than_one_window(recipe: dict[str, Any]) -> None:
    write_texts(Path("calibration.jsonl"), 4)
    done = run("plan", changed(recipe, preprocess={"kind": "language", "max_length": 128, "pack": 128}))
    assert (done.exit_code, done.stderr) == (
        2,
        "data.calibration: the texts give 65 tokens, fewer than one window of 127 (pack: 128): give more text, or a "
        "smaller pack\n",
    )


def test_tokens_beyond_the_vocabulary(recipe: dict[str, Any]) -> None:
    done = run("plan", changed(recipe, model={"source": "dir:small"}))
    assert done.exit_code == 2 and (
        "data.calibration: column 'text', sample 0: token id 30 is beyond the model's vocabulary of 20 tokens: is this "
        "the model's own tokenizer?" in done.stderr
    ), done.output


def test_a_missing_shard(recipe: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained("lm").save_pretrained("shards", max_shard_size="100KB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(f"lm/{name}", f"shards/{name}")
    gone = sorted(Path("shards").glob("*.safetensors"))[1]
    gone.unlink()
    done = run("plan", changed(recipe, model={"source": "dir:shards"}))
    assert done.exit_code == 2, done.output
    assert f"shards: shards are missing: {gone.name}; copy or download them again" in done.stderr


@pytest.mark.parametrize("parts", [{}, TRANSFORMERS], ids=["onnx", "checkpoint"])
def test_nan_in_a_weight(recipe: dict[str, Any], parts: dict[str, Any]) -> None:
    state = load_file("lm/model.safetensors")
    state["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    save_file(state, "lm/model.safetensors", metadata={"format": "pt"})
    done = run("apply", changed(recipe, **parts))
    assert done.exit_code == 2 and "NaN or infinity in '" in done.stderr, done.output
    assert "model.layers.1.mlp.up_proj.weight'" in done.stderr and "the weights are not usable" in done.stderr


def test_not_enough_disk(recipe: dict[str, Any], host: Host) -> None:
    host.disk_bytes = 1000
    done = run("plan", recipe)
    assert done.exit_code == 2 and "MiB are needed and 1000 B are free; make room" in done.stderr


def test_a_pass_over_blocks_of_a_graph(recipe: dict[str, Any]) -> None:
    weight = onnx.numpy_helper.from_array(np.eye(64, dtype=np.float32), "w")
    values = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", 64]) for name in ("x", "y")]
    node = onnx.helper.make_node("MatMul", ["x", "w"], ["y"])
    graph = onnx.helper.make_graph([node], "m", [values[0]], [values[1]], [weight])
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10), "m.onnx")
    np.savez("d.npz", x=np.ones((20, 64), np.float32))
    data = {"calibration": {"source": "npz:d.npz"}, "evaluation": {"source": "npz:d.npz"}}
    asked = {"version": 1, "name": "graph", "model": {"source": "onnx:m.onnx", "task": "generic"}, "data": data}
    for kind in ("awq", "hqq", "autoround", "tune", "rotate", "kv_cache"):
        done = run("plan", {**asked, "passes": [{"kind": kind}]})
        assert done.exit_code == 2 and f"{kind} rewrites a torch model, and an onnx: source is none" in done.stderr


def test_resuming_with_another_recipe_says_so(recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from compress.blocks import stream

    write, interrupts = stream.write_block, [KeyboardInterrupt]

    def interrupted(folder: Path, index: int, *args: Any) -> Path:
        if index and interrupts:
            raise interrupts.pop()
        return write(folder, index, *args)

    asked = changed(recipe, **TRANSFORMERS)
    monkeypatch.setattr(stream, "write_block", interrupted)
    assert run("apply", asked).exit_code == 130
    done = run("apply", changed(asked, passes=[{**GPTQ, "damp_percent": 0.02}]))
    assert done.exit_code == 0, done.output
    log = Path("out/b/compress.log").read_text()
    assert "tiny-lm: passes.0: the recipe, its model, its data or the code has changed since a run that did not" in log
    assert "so this pass starts afresh" in log and "going on after them" not in log
    assert not list(Path("cache").glob("partial-*"))


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("qwen3_5_text", {"target": "openvino"}, "export.0: its recurrence is written as an operator of ONNX Runtime"),
        (
            "mimo_v2_flash",
            {"passes": [GPTQ, {"kind": "kv_cache", "scheme": "int8"}]},
            "passes.1: kv_cache: an ONNX graph keeps 8-bit keys and values where all layers keep them alike, and layer",
        ),
    ],
)
def test_what_a_layer_keeps_is_held_against_the_target(
    recipe: dict[str, Any], kind: str, change: dict[str, Any], said: str
) -> None:
    tiny_folder(kind, Path(kind))
    done = run("plan", changed(recipe, model={"source": f"dir:{kind}", "task": "text-generation"}, **change))
    assert done.exit_code == 2 and said in done.stderr, done.output


def test_a_model_of_which_no_graph_is_made_is_refused_by_the_plan(recipe: dict[str, Any]) -> None:
    tiny_folder("minimax", Path("loop"))
    asked = changed(recipe, model={"source": "dir:loop", "task": "text-generation"})
    done = run("plan", asked)
    assert done.exit_code == 2 and "export.0: MiniMaxForCausalLM: keeps a MiniMaxCache" in done.stderr
    assert "use target: transformers" in done.stderr
    assert run("plan", changed(asked, **TRANSFORMERS)).exit_code == 0, "the way out is one"
