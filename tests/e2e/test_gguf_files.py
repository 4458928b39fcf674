"""A GGUF file in a bundle: beside an ONNX graph, by itself with a verdict, refused before any work by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from makers import write_recipe
from tiny_lm import LIKELY, language_folder, language_recipe
from typer.testing import CliRunner, Result

from compress.cli import app

pytest.importorskip("gguf")
W4: dict[str, Any] = {"kind": "gptq", "scheme": "W4A16", "group_size": 32}
GGUF = {"target": "llama.cpp", "export": [{"kind": "gguf"}]}


def run(command: str, folder: Path, recipe: dict[str, Any], cache: Path) -> Result:
    file = write_recipe(folder / "recipe.yaml", recipe)
    out = ["--out", str(folder / "out"), "--quiet"] if command == "apply" else []
    done = CliRunner().invoke(app, [command, str(file), *out, "--cache", str(cache)])
    assert "Traceback" not in done.output and "a defect" not in done.output, done.output
    return done


@pytest.mark.slow
@pytest.mark.parametrize("beside", [True, False])
def test_a_file_is_listed_with_its_size_and_judged(beside: bool, cache: Path, tmp_path: Path) -> None:
    from runtime.tasks.manifest import verify

    language_folder(tmp_path / "lm", **LIKELY)
    more = {"export": [{"kind": "onnx"}, {"kind": "gguf"}]} if beside else GGUF
    done = run("apply", tmp_path, language_recipe(tmp_path, [W4], **more), cache)
    assert done.exit_code == 0, done.output
    manifest = verify(tmp_path / "out")
    artifact = manifest.artifact("gguf" if beside else "candidate")
    assert (artifact.kind, artifact.target, artifact.precision) == ("gguf", "llama.cpp", "W4A16")
    assert artifact.size_bytes == (tmp_path / "out" / artifact.path).stat().st_size
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["verdict"] == "pass" and report["candidate"]["metrics"]["nll"] > 0
    if not beside:
        assert f"llama-cli -m DIR/{artifact.path}" in (tmp_path / "out/README.md").read_text()


@pytest.mark.slow
def test_an_imatrix_is_written_and_read_and_a_mixture_keeps_to_the_bytes(cache: Path, tmp_path: Path) -> None:
    language_folder(tmp_path / "lm", **LIKELY)
    export = GGUF | {"export": [{"kind": "gguf", "imatrix": True}]}
    assert run("apply", tmp_path, language_recipe(tmp_path, [], **export), cache).exit_code == 0
    file = (tmp_path / "out/model/imatrix.gguf").rename(tmp_path / "imatrix.gguf")
    given: dict[str, Any] = {"kind": "rtn", "scheme": "IQ4_NL", "importance": file.name}
    recipe = language_recipe(tmp_path, [given], **GGUF)
    del recipe["data"]["calibration"]
    done = run("apply", tmp_path, recipe, cache)
    assert done.exit_code == 0 and "weigh alike" not in done.output, done.output
    done = run("plan", tmp_path, language_recipe(tmp_path, [{"kind": "rotate"}, given], **GGUF), cache)
    assert "is of the model as it came, and rotate changes it before" in " ".join(done.output.split())
    language_folder(tmp_path / "wide", intermediate_size=160)
    other = recipe | {"model": {"source": "dir:wide", "task": "text-generation"}}
    done = run("plan", tmp_path, other, cache)
    said = " ".join(done.output.split())
    assert done.exit_code == 2 and "blk.0.ffn_down.weight has 128 inputs, and this model's has 160" in said, said
    bits = {"size_ratio": 4.2, "choices": ["IQ4_NL", 5, 8]}
    mixed = [{"kind": "rtn", "bits": bits, "embeddings": "W4", "lm_head": "W8"}]
    done = run("apply", tmp_path, language_recipe(tmp_path, mixed, **GGUF), cache)
    assert done.exit_code == 0, done.output
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    size = (tmp_path / "out/model/model.gguf").stat().st_size
    assert 4.2 <= manifest["source_bytes"] / size < 4.3


@pytest.mark.parametrize(
    ("passes", "change", "said"),
    [
        ([W4 | {"group_size": 16}], GGUF, "kernels for group_size 32, 64, 128, 256"),
        ([{"kind": "rtn", "scheme": "FP8_DYNAMIC"}], GGUF, "use scheme: W4A16 or Q4_K"),
        ([{"kind": "gptq", "scheme": "Q4_K"}], GGUF, "has 64 inputs, which the 256 of Q4_K do not divide"),
        ([{"kind": "awq", "scheme": "Q4_K"}], GGUF, "awq: does not round to Q4_K; use gptq or rtn"),
        ([W4], {**GGUF, "target": "vllm"}, "target vllm"),
    ],
)
def test_a_plan_refuses(
    passes: list[dict[str, Any]], change: dict[str, Any], said: str, cache: Path, tmp_path: Path
) -> None:
    done = run("plan", tmp_path, language_recipe(tmp_path, passes, **change), cache)
    assert done.exit_code == 2 and said in " ".join(done.output.split()), done.output


def test_a_model_that_llama_cpp_computes_otherwise_is_refused(cache: Path, tmp_path: Path) -> None:
    language_folder(tmp_path / "lm", "llama", hidden_act="relu")
    done = run("plan", tmp_path, language_recipe(tmp_path, [W4], **GGUF), cache)
    assert done.exit_code == 2 and "export.0: models of type llama are not written as GGUF" in " ".join(
        done.output.split()
    ), done.output
