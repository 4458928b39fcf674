"""A model that also sees as a bundle of graphs: judged on answers about images, run by the runtime alone."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from makers import QUICK, apply, plan, run_alone
from PIL import Image
from seeing import write_llava, write_mllama, write_questions, write_qwen
from test_models_that_see import EXACT, W4, metrics, nats_of_answers
from test_models_that_see import recipe as folder_recipe
from tiny_lm import language_folder, write_texts

from compress.errors import CompressError
from runtime.tasks.manifest import verify

FUSED = 2e-2
"""Of the nats of what fused kernels compute, which round their inputs."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, and questions about images."""
    return make_home(tmp_path_factory.mktemp("graphs"), write_llava)


def make_home(folder: Path, write: Callable[[Path], Path]) -> Path:
    write(folder / "lm")
    for name, n, seed in (("calibration", 6, 0), ("evaluation", 8, 1)):
        write_questions(folder, name, n, seed)
        write_texts(folder / f"{name}-texts.jsonl", n, seed)
    return folder


def recipe(passes: list[dict[str, Any]], /, texts: bool = False, **parts: Any) -> dict[str, Any]:
    benchmark = {**QUICK, "prompt_tokens": 8, "new_tokens": 4}
    del benchmark["throughput_batch_size"]
    judged = {"gates": [{"metric": "nll", "max": 20}], "benchmark": benchmark, "steps": False}
    return folder_recipe(
        passes, texts, **{"target": "onnxruntime-cpu", "export": [{"kind": "onnx"}], "validate": judged, **parts}
    )


@pytest.fixture(scope="module")
def bundle(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The language part in 4 bits; beside the graphs the folder of the same numbers."""
    export = [{"kind": "onnx"}, {"kind": "checkpoint", "target": "transformers"}]
    out = tmp_path_factory.mktemp("bundle") / "out"
    apply(recipe([{"kind": "gptq", **W4}], export=export), out, home / "cache", home)
    return out


@pytest.mark.slow
def test_what_is_judged_is_what_transformers_says(home: Path, bundle: Path) -> None:
    """The float graphs' nats of answers are the model's, and the rounded ones' those of the folder beside them."""
    assert metrics(bundle, "baseline")["nll"] == pytest.approx(nats_of_answers(home, home / "lm"), abs=EXACT)
    rounded = nats_of_answers(home, bundle / "checkpoint")
    assert metrics(bundle, "candidate")["nll"] == pytest.approx(rounded, abs=FUSED)
    assert abs(rounded - metrics(bundle, "baseline")["nll"]) > EXACT


@pytest.mark.slow
def test_the_bundle_holds_both_graphs(bundle: Path) -> None:
    manifest = verify(bundle)
    assert {"model/vision.onnx", "model/model.onnx", "baseline/vision.onnx"} <= manifest.files.keys()
    assert not (bundle / "model/genai_config.json").exists()
    for artifact in (manifest.artifact("candidate"), manifest.artifact("baseline")):
        folder = (bundle / artifact.path).parent
        assert artifact.size_bytes == sum((folder / name).stat().st_size for name in ("model.onnx", "vision.onnx"))
    assert not find_eight_bits(bundle)


def find_eight_bits(bundle: Path) -> list[str]:
    return [w.name for w in onnx.load(bundle / "model/vision.onnx").graph.initializer if w.data_type in (2, 3)]


@pytest.mark.slow
def test_what_sees_is_rounded_where_it_is_named(home: Path, tmp_path: Path) -> None:
    tower = {"kind": "rtn", "scheme": "W8A16", "group_size": 32, "targets": ["re:.*vision_tower.encoder"]}
    apply(recipe([{"kind": "rtn", **W4}, tower], texts=True), tmp_path / "out", home / "cache", home)
    assert len(find_eight_bits(tmp_path / "out")) >= 12  # six products of each of its two layers


@pytest.mark.slow
def test_an_answer_about_an_image_needs_numpy_and_onnxruntime_alone(home: Path, bundle: Path) -> None:
    """The file that is given, its pixels and a conversation in two turns: the same tokens, and others of another."""
    code = """
from PIL import Image
from runtime.__main__ import main
turns = [{"role": "user", "content": [{"type": "image", "image": sys.argv[2]}, {"type": "text", "text": "abc"}]}]
pixels = np.asarray(Image.open(sys.argv[2]).convert("RGB"))
held = [{**turns[0], "content": [{"type": "image", "image": pixels}, turns[0]["content"][1]]}]
other = [{**turns[0], "content": [{"type": "image", "image": pixels[::-1] // 2}, turns[0]["content"][1]]}]
with runtime.open_bundle(sys.argv[1]) as bundle:
    answers = [bundle.generate(each, chat=True, max_new_tokens=12) for each in (turns, held, other)]
    beside = bundle.generate([turns, "abc"], chat=True, max_new_tokens=12)
    evaluated = bundle.evaluate()["nll"]
print(json.dumps([*[answer.token_ids for answer in (*answers, *beside)], evaluated]))
"""
    named, held, other, beside, text, nll = run_alone(code, home, str(bundle), "images/evaluation-0.png")
    assert named == held == beside and len(named) > 0
    assert other != named and text != named
    assert nll == pytest.approx(metrics(bundle, "candidate")["nll"], abs=1e-6)


@pytest.mark.slow
def test_the_command_takes_images(home: Path, bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from runtime.__main__ import main

    image = str(home / "images/evaluation-0.png")
    assert main(["generate", str(bundle), "abc", "--image", image, "--max-new-tokens", "4", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert len(answer["token_ids"]) <= 4 and answer["prompt_tokens"] > 4
    assert main(["generate", str(bundle), "--interactive", "--image", image]) == 2
    assert "a PROMPT has images" in capsys.readouterr().err
    assert main(["generate", str(bundle), "<image>", "--chat"]) == 2
    assert "names 0 images" in capsys.readouterr().err


@pytest.mark.slow
def test_images_of_any_size_are_read_as_patches_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions of three axes, features behind several blocks: the nats of transformers, of images of that size.

    The weights stay in their files, as those of a model that memory does not hold.
    """
    monkeypatch.setattr("compress.planning.in_files.WHOLE_BYTES", 0)
    home, size = make_home(tmp_path / "home", write_qwen), [16, 48]
    out = tmp_path / "out"
    apply(recipe([{"kind": "rtn", **W4}], chat={"image_size": size}), out, home / "cache", home)
    for path in (home / "images").iterdir():
        resized = Image.open(path).convert("RGB").resize((size[1], size[0]), Image.Resampling.BICUBIC)
        resized.save(path)
    assert metrics(out, "baseline")["nll"] == pytest.approx(nats_of_answers(home, home / "lm"), abs=EXACT)
    code = """
from runtime.__main__ import main
turns = [{"role": "user", "content": [{"type": "image", "image": sys.argv[2]}, {"type": "text", "text": "abc"}]}]
with runtime.open_bundle(sys.argv[1]) as bundle:
    answer, other = bundle.generate([turns, "abc"], chat=True, max_new_tokens=12)
    evaluated = bundle.evaluate()["nll"]
print(json.dumps([len(answer.token_ids), answer.token_ids != other.token_ids, evaluated]))
"""
    n, differs, nll = run_alone(code, home, str(out), "images/evaluation-0.png")
    assert n > 0 and differs and nll == pytest.approx(metrics(out, "candidate")["nll"], abs=1e-6)


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "patches": (write_qwen, {}, "set chat.image_size: [32, 32]"),
    "size": (
        write_llava,
        {"chat": {"image_size": [15, 15]}},
        "export.0: its processor does more with an image of 15 x",
    ),
    "between": (write_mllama, {"texts": True}, "export.0: its processor"),
    "graph pass": (write_llava, {"passes": [{"kind": "int8"}]}, "passes.0: int8"),
    "no images": (
        language_folder,
        {"model": {"source": "dir:lm", "task": "text-generation"}, "texts": True, "chat": {"image_size": [16, 16]}},
        "chat.image_size: text-generation reads no images; leave it out",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_graph_holds_is_refused_at_the_plan(case: str, tmp_path: Path) -> None:
    write, parts, said = copy.deepcopy(REFUSED[case])
    write(tmp_path / "lm")
    for name in ("calibration", "evaluation"):
        write_questions(tmp_path, name, 4)
        write_texts(tmp_path / f"{name}-texts.jsonl", 4)
    passes = parts.pop("passes", [{"kind": "rtn", **W4}])
    values = recipe(passes, parts.pop("texts", False), **parts)
    with pytest.raises(CompressError) as error:
        plan(values, tmp_path, tmp_path / "cache")
    assert any(said in problem for problem in error.value.problems), error.value.problems
    assert any("target: transformers" in problem for problem in error.value.problems) or case in (
        "graph pass",
        "no images",
    )
