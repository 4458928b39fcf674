"""A folder is rounded by the names of its tensors, without the model's class: the same bytes as with it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from makers import apply, bundle_bytes, plan
from safetensors.torch import load_file, save_file
from tiny_lm import language_folder, language_recipe
from transformers import AutoModelForCausalLM

import compress.blocks.stream
from compress.blocks.blockfiles import write_block
from compress.commands.blame import blame_bundle
from compress.commands.new import NewAnswers, format_working_recipe, make_draft
from compress.commands.quantize import quantize_model
from compress.errors import CompressError
from runtime.errors import RuntimeFailure
from runtime.tasks.manifest import verify

RTN: dict[str, Any] = {"kind": "rtn", "scheme": "W4A16", "group_size": 32}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "integers": ("llama", "transformers", RTN),
    "zero points, by hqq": ("mistral", "vllm", {"kind": "hqq", "scheme": "W4A16_ASYM", "group_size": 32}),
    "a tied table": ("qwen", "transformers", {"kind": "rtn", "bits": 8, "embeddings": "W8"}),
    "the output layer, too": ("llama", "vllm", {**RTN, "lm_head": "W8"}),
    "one scale for q, k and v": ("llama", "vllm", {"kind": "rtn", "scheme": "NVFP4A16"}),
    "experts": ("mixtral", "vllm", RTN),
    "other experts": ("qwen-moe", "transformers", {"kind": "rtn", "scheme": "FP8_DYNAMIC"}),
    "what patterns select": (
        "llama",
        "transformers",
        {**RTN, "targets": ["re:.*mlp"], "ignore": ["re:.*1.mlp.up_proj"]},
    ),
}


def shards_recipe(passes: list[dict[str, Any]], target: str = "transformers", **parts: Any) -> dict[str, Any]:
    return {
        "version": 1,
        "name": "tiny-shards",
        "model": {"source": "shards:lm", "task": "text-generation"},
        "target": target,
        "passes": passes,
        "export": [{"kind": "checkpoint", "target": target}],
        **parts,
    }


def with_class(folder: Path, passes: list[dict[str, Any]], target: str) -> dict[str, Any]:
    export = [{"kind": "checkpoint", "target": target}]
    return language_recipe(folder, passes, target=target, export=export, validate={"gates": [], "steps": False})


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


def describe(config: dict[str, Any]) -> list[Any]:
    """What a configuration says of layers, whatever the order, and of names the files' own."""
    said = config["quantization_config"]
    groups = [group | {"targets": sorted(group["targets"])} for group in said["config_groups"].values()]
    names = {name for name in said["ignore"] if not name.startswith("re:") and ".mlp.gate" not in name}
    return [said["format"], sorted(groups, key=lambda group: group["targets"]), names]


def nameless(folder: Path, **changes: Any) -> None:
    """Give the folder's model a type that no class is known for."""
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "nobody_knows", "architectures": ["NobodyKnowsForCausalLM"], **changes}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("case", CASES)
def test_the_same_bytes_as_with_the_class(case: str, tmp_path: Path) -> None:
    architecture, target, pass_ = CASES[case]
    source = language_folder(tmp_path / "lm", architecture)
    apply(with_class(tmp_path, [pass_], target), tmp_path / "class", tmp_path / "cache", tmp_path)
    theirs = tmp_path / "class/model"
    config = json.loads((source / "config.json").read_text())
    nameless(source)
    report = apply(shards_recipe([pass_], target), tmp_path / "names", tmp_path / "cache", tmp_path)
    ours = tmp_path / "names/model"
    assert_same(read_all(ours), read_all(theirs))
    written, expected = (json.loads((folder / "config.json").read_text()) for folder in (ours, theirs))
    assert describe(written) == describe(expected)
    assert written["model_type"] == "nobody_knows"
    for file in source.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            assert (ours / file.name).read_bytes() == file.read_bytes()
    assert report.verdict == "unjudged"
    errors = {row["layer"]: row["weight_error"] for row in report.layers if "weight_error" in row}
    assert errors and all(0 < error < 0.05 for error in errors.values())
    if target == "transformers" and "embeddings" not in pass_:
        (ours / "config.json").write_text(json.dumps(config | {"quantization_config": written["quantization_config"]}))
        ids = torch.tensor([[1, 5, 9, 7]])
        with torch.no_grad():
            logits = [AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32)(ids).logits for f in (ours, theirs)]
        assert torch.equal(*logits)


@pytest.mark.slow
def test_a_source_in_fp8_gives_the_same_bytes_with_and_without_the_class(tmp_path: Path) -> None:
    source = language_folder(tmp_path / "lm")
    tensors = dict[str, torch.Tensor]()
    for name, tensor in load_file(source / "model.safetensors").items():
        tensors[name] = tensor.bfloat16()
        if "_proj" in name:
            scales = tensor.float().unfold(0, 32, 32).unfold(1, 32, 32).abs().amax((2, 3)) / 448
            spread = scales.repeat_interleave(32, 0).repeat_interleave(32, 1)
            tensors[name] = (tensor.float() / spread).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scales
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | {"dtype": "bfloat16"}
    record = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}
    (source / "config.json").write_text(json.dumps(config | {"quantization_config": record}))
    some = {**RTN, "ignore": ["lm_head", "re:.*down_proj"]}  # what stays is written as floats
    apply(with_class(tmp_path, [some], "vllm"), tmp_path / "class", tmp_path / "cache", tmp_path)
    report = apply(shards_recipe([some], "vllm"), tmp_path / "names", tmp_path / "cache", tmp_path)
    ours, theirs = (read_all(tmp_path / name / "model") for name in ("names", "class"))
    assert_same(ours, theirs)
    assert ours["model.layers.0.mlp.down_proj.weight"].dtype == torch.bfloat16
    assert any("quantized already (fp8)" in str(row.get("reason")) for row in report.layers)


@pytest.mark.slow
def test_shards_a_tower_and_blocks_that_config_does_not_count(tmp_path: Path) -> None:
    """Both stay byte for byte, and nothing takes them for rounded ones; what joins is in the shards' index."""
    source = language_folder(tmp_path / "lm")
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(source / "model.safetensors").items()}
    extra = {name.replace("layers.0", "layers.2"): t.clone() for name, t in tensors.items() if "layers.0" in name}
    extra |= {f"visual.blocks.{i}.proj.weight": torch.randn(64, 64).bfloat16() for i in range(2)}
    extra |= {"visual.merger.weight": torch.randn(64, 64).half(), "visual.ids": torch.arange(5)}
    tensors |= extra
    names = sorted(tensors)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, inside in files.items():
        save_file({name: tensors[name] for name in inside}, source / file, {"format": "pt"})
    (source / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {name: file for file, inside in files.items() for name in inside}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    (source / "modeling_nobody.py").write_text("raise SystemExit")
    others = {"LICENSE.md": b"yours\n", "vocabulary.spm": b"\0\1", "tokens.tiktoken": b"x"}
    for name, content in others.items():
        (source / name).write_bytes(content)
    nameless(source)
    report = apply(shards_recipe([RTN], "vllm"), tmp_path / "out", tmp_path / "cache", tmp_path)
    written = read_all(tmp_path / "out/model")
    for name, tensor in extra.items():
        assert written[name].dtype == tensor.dtype and torch.equal(written[name], tensor), name
    assert "model.layers.1.mlp.up_proj.weight_packed" in written and "model.layers.1.mlp.up_proj.weight" not in written
    rows = {row["layer"]: row for row in report.layers}
    assert rows["visual.merger"]["reason"] == rows["model.layers.2.mlp.up_proj"]["reason"]
    assert "beside the blocks" in rows["visual.merger"]["reason"]
    ignore = json.loads((tmp_path / "out/model/config.json").read_text())["quantization_config"]["ignore"]
    assert {"visual.merger", "visual.blocks.1.proj", "model.layers.2.mlp.down_proj", "lm_head"} <= set(ignore)
    assert not (tmp_path / "out/model/modeling_nobody.py").exists()
    assert all((tmp_path / "out/model" / name).read_bytes() == content for name, content in others.items())
    verify(tmp_path / "out")


@pytest.mark.slow
def test_a_broken_run_goes_on_after_the_last_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    language_folder(tmp_path / "lm")
    apply(shards_recipe([RTN]), tmp_path / "whole", tmp_path / "one", tmp_path)
    written: list[int] = []

    def write(folder: Path, index: int, *rest: Any) -> Path:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(index)
        return write_block(folder, index, *rest)

    monkeypatch.setattr(compress.blocks.stream, "write_block", write)
    with pytest.raises(KeyboardInterrupt):
        apply(shards_recipe([RTN]), tmp_path / "again", tmp_path / "two", tmp_path)
    assert written == [0, 1]
    real = write_block
    monkeypatch.setattr(compress.blocks.stream, "write_block", lambda *given: written.append(given[1]) or real(*given))
    apply(shards_recipe([RTN]), tmp_path / "again", tmp_path / "two", tmp_path)
    assert written == [0, 1, 2, 3]  # two blocks, and what is before and behind them
    whole, again = (bundle_bytes(tmp_path / name) for name in ("whole", "again"))
    assert whole.keys() == again.keys()
    assert all(whole[name] == again[name] for name in whole if name.startswith("model/"))


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"passes": [{"kind": "gptq", "scheme": "W4A16"}]}, "passes.0: gptq has to run the model"),
    ({"passes": [{"kind": "rtn", "scheme": "FP8"}]}, "use rtn or hqq with a scheme that stores no scale of inputs"),
    (
        {"validate": {"gates": [{"metric": "nll", "max_drop": 0.1}]}},
        "validate.gates.0: nll is measured of a model that",
    ),
    ({"data": {"evaluation": {"source": "jsonl:x.jsonl"}}}, "data: a shards: source is run on no samples; leave data"),
    (
        {"target": "onnxruntime-cpu", "export": [{"kind": "onnx"}]},
        "export.0: a shards: source is written as a checkpoint",
    ),
    ({"validate": {"metrics": ["nll"]}}, "validate.metrics: a shards: source is judged on no samples"),
    ({"preprocess": {"kind": "language"}}, "preprocess: a shards: source is run on no samples"),
    ({"keep_module": True}, "keep_module: a shards: source has no module"),
    ({"passes": [{**RTN, "group_size": 48}]}, "inputs, which group_size 48 does not divide"),
    ({"passes": [{**RTN, "ignore": ["re:.*atention"]}]}, "matches no layer"),
]


@pytest.mark.parametrize(("parts", "text"), REFUSALS)
def test_refusals_at_plan(parts: dict[str, Any], text: str, tmp_path: Path) -> None:
    language_folder(tmp_path / "lm")
    nameless(tmp_path / "lm")
    with pytest.raises(CompressError) as caught:
        plan({**shards_recipe([RTN]), **parts}, tmp_path, tmp_path / "cache")
    assert any(text in problem for problem in caught.value.problems), caught.value.problems


def test_the_plan_says_sizes_memory_and_that_nobody_judges(tmp_path: Path) -> None:
    language_folder(tmp_path / "lm")
    nameless(tmp_path / "lm")
    made = plan(
        {**shards_recipe([RTN]), "validate": {"gates": [{"metric": "size_ratio", "min": 2}]}}, tmp_path, tmp_path
    )
    assert made.after.n_bytes < made.before.n_bytes / 3
    assert made.forecast.memory_bytes and made.forecast.disk_bytes
    assert any("nobody knows what rounding costs" in note.text for note in made.notes)
    assert [stage.name for stage in made.stages] == ["start", "rtn", "writing the bundle"]


def test_one_line_and_a_recipe_to_begin_with(tmp_path: Path) -> None:
    """No data is asked for, and no quality is gated."""
    language_folder(tmp_path / "lm")
    nameless(tmp_path / "lm")
    said = NewAnswers(f"shards:{tmp_path / 'lm'}", target="vllm")
    report = quantize_model(said, "FP8_DYNAMIC", tmp_path / "out", tmp_path / "cache", quiet=True)
    assert report is not None and report.verdict == "unjudged"
    text, _ = format_working_recipe(make_draft(said, tmp_path))
    recipe = yaml.safe_load(text)
    assert [gate["metric"] for gate in recipe.get("validate", {}).get("gates", [])] in ([], ["size_ratio"])
    assert plan(recipe, tmp_path, tmp_path / "cache").after.n_bytes
    with pytest.raises(CompressError, match="is run on no samples"):
        make_draft(replace(said, data={"source": "jsonl:x.jsonl"}), tmp_path)
    with pytest.raises(RuntimeFailure, match="has no evaluation set"):
        blame_bundle(tmp_path / "out")
