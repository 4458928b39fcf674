"""An ONNX file alone, pruned, distilled and rounded: one recipe, judged by the file as it came."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from makers import QUICK
from safetensors.torch import load_file

import compress
from compress.errors import ExportError, PlanError
from compress.recipe.schema import Recipe
from compress.zoo.digits_resnet import DIGITS, MEAN, STD, digits_resnet
from runtime.tasks.manifest import verify

pytestmark = pytest.mark.slow
TRAIN, TEST = f"npz:{DIGITS / 'train.npz'}", f"npz:{DIGITS / 'test.npz'}"
QAT = {"kind": "qat", "scheme": "W8A8", "steps": 2}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits' network as older exporters wrote it: opset 11, a batch of 1, batch norms folded."""
    path = tmp_path_factory.mktemp("onnx") / "digits.onnx"
    module = digits_resnet().eval()
    module.load_state_dict(load_file(DIGITS / "digits_resnet.safetensors"))
    image = torch.zeros(1, 1, 8, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, (image,), path, input_names=["image"], dynamo=False, opset_version=11)
    return path


def recipe(file: Path, *passes: dict[str, Any]) -> Recipe:
    text = json.dumps(
        {
            "version": 1,
            "name": "theirs",
            "model": {"source": f"onnx:{file}", "task": "image-classification"},
            "preprocess": {"kind": "image", "channels": "L", "mean": [MEAN], "std": [STD]},
            "data": {
                "calibration": {"source": TRAIN, "samples": 64},
                "train": {"source": TRAIN},
                "evaluation": {"source": TEST, "samples": 200},
            },
            "passes": list(passes),
            "validate": {
                "benchmark": QUICK,
                "steps": False,
                "gates": [{"metric": "agreement", "min": 0.9}],
            },
        }
    )
    path = file.with_suffix(".yaml")
    path.write_text(text)
    return compress.load_recipe(path)


def test_a_file_is_pruned_distilled_and_rounded_in_one_recipe(file: Path, tmp_path: Path) -> None:
    passes = ({"kind": "prune_channels", "ratio": 0.4}, {"kind": "distill", "steps": 6}, {"kind": "int8"})
    report = compress.apply(recipe(file, *passes), tmp_path / "out", tmp_path / "cache", quiet=True)
    assert report.verdict == "pass"
    assert report.baseline.size_bytes > 4.5 * report.candidate.size_bytes
    notes = [str(row.get("reason", row)) for row in report.layers]
    assert any("rebuilt from the ONNX file differs from it by" in note for note in notes)
    verify(tmp_path / "out")
    written = [ir.load(tmp_path / "out" / folder / "model.onnx") for folder in ("baseline", "model")]
    assert [list(graph.graph.inputs[0].shape) for graph in written] == [[1, 1, 8, 8]] * 2  # as theirs is called


def test_its_own_graph_is_trained_for_int8(file: Path, tmp_path: Path) -> None:
    report = compress.apply(recipe(file, QAT), tmp_path / "out", tmp_path / "cache", quiet=True)
    assert report.verdict == "pass" and {row["action"] for row in report.layers if "history" in row} == {"int8"}


def test_a_module_that_computes_something_else_is_refused_before_any_training(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from compress.graph.operators import OPERATORS

    relu = OPERATORS["Relu"]
    monkeypatch.setitem(OPERATORS, "Relu", lambda node: lambda x: relu(node)(x) * np.float32(1.01))
    wrong = recipe(file, {"kind": "prune_channels", "ratio": 0.4})
    with pytest.raises(ExportError, match=r"parity: torch and ONNX differ by .* the first layer to differ is "):
        compress.apply(wrong, tmp_path / "out", tmp_path / "cache", quiet=True)


def test_passes_over_blocks_stay_refused(file: Path) -> None:
    with pytest.raises(PlanError, match=r"passes\.0: sparsify rewrites a torch model, and an onnx: source is none"):
        compress.plan(recipe(file, {"kind": "sparsify", "sparsity": 0.5}))
