"""A bundle's README.md: every command in it is run, for every task."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from shortcuts import quick_judge

from compress.export.card import model_card, usage_of
from runtime.__main__ import main
from runtime.bundle.format import Artifact, Benchmark, Judgement, read_manifest, write_bundle
from runtime.encode.preprocess import TensorPreprocess
from runtime.tasks import TASKS

LOCK = {"model": {"source": "onnx:m.onnx", "digest": "abc"}}
QUICK = Judgement(benchmark=Benchmark(throughput_batch_size=2, warmup=1, iterations=10))


def commands_of(card: str) -> list[str]:
    """The lines of the card's code blocks."""
    blocks = re.findall(r"^```\n(.*?)^```$", card, re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.splitlines() if line]


def make_generic(root: Path, tiny: Any) -> Path:
    tiny.image_model(root / "model/model.onnx")
    tiny.image_model(root / "baseline/model.onnx", seed=1)
    rows = np.zeros((12, 3, 4, 4), np.float32)
    write_bundle(root, replace(tiny.stage(root, "generic", TensorPreprocess(), {"x": rows}), class_names=()))
    return root


@quick_judge()
@pytest.mark.parametrize("task", [name for name, task in TASKS.items() if not task.encodes])  # those: e2e/test_answers
def test_every_command_of_a_card_works(
    task: str,
    request: pytest.FixtureRequest,
    tiny: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    makers: dict[str, Callable[[], Path]] = {
        "image-classification": lambda: request.getfixturevalue("image_bundle"),
        "text-classification": lambda: request.getfixturevalue("make_text_bundle")(task, {"text": tiny.words}),
        "token-classification": lambda: request.getfixturevalue("make_text_bundle")(task, {"text": tiny.words}),
        "feature-extraction": lambda: request.getfixturevalue("make_text_bundle")(task, {"text": tiny.words}),
        "generic": lambda: make_generic(tmp_path / "bundle", tiny),
        "text-generation": lambda: request.getfixturevalue("make_decoder_bundle")(),
    }
    root = makers[task]()
    manifest = read_manifest(root)
    if task != "text-generation":
        manifest = write_bundle(root, replace(manifest, judgement=QUICK))
    commands = commands_of(model_card(manifest, LOCK, []))
    assert len(commands) == 2
    monkeypatch.chdir(tmp_path)
    Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save("image.png")
    np.savez("inputs.npz", x=np.zeros((2, 3, 4, 4), np.float32))
    for command in commands:
        words = shlex.split(command)
        assert words[0] == "compress-run"
        assert main([str(root) if word == "DIR" else word for word in words[1:]]) == 0, capsys.readouterr()
        assert capsys.readouterr().out


@pytest.mark.parametrize(("target", "program"), [("vllm", "vllm serve DIR/model"), ("transformers", "python -c ")])
def test_a_checkpoints_card_names_the_engine_that_opens_it(target: str, program: str, image_bundle: Path) -> None:
    artifact = Artifact("candidate", "model/config.json", target, "W4A16", (), (), 1, kind="checkpoint")
    manifest = replace(read_manifest(image_bundle), task="text-generation", artifacts=(artifact,))
    usage = usage_of(replace(manifest, preprocess={"kind": "language"}))
    assert usage.command.startswith(program) and "DIR/model" in usage.command and "predict" not in usage.command
