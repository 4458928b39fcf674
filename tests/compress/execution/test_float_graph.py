"""A float graph is exported once for all that it is made of, and compared with torch on the samples of each run."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from makers import changed, image_recipe, plan
from torch import nn

from compress.execution import cached
from compress.execution.cached import GRAPH, FloatModel, float_model
from compress.export import onnx
from compress.graph import files, run
from compress.models.load import TorchModel
from compress.store.cache import ResultCache
from runtime.bundle.tensors import TensorSpec

Export = Callable[..., FloatModel]


class Scale(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor([factor]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The factor of each module that is exported."""
    made: list[float] = []

    def count(loaded: TorchModel, *arguments: Any) -> Any:
        made.append(float(loaded.module.factor.detach()))  # type: ignore[arg-type]
        return export_model(loaded, *arguments)

    export_model = cached.export_model
    monkeypatch.setattr(cached, "export_model", count)
    return made


@pytest.fixture
def export(tmp_path: Path) -> Export:
    """Take the float graph of `Scale` from one cache, under a run's key, compared on samples [n, length]."""
    x, y = (TensorSpec(name, "float32", ("batch", "length")) for name in "xy")

    def run(key: str, samples: np.ndarray, factor: float = 2.0, told: Callable[[], None] = lambda: None) -> FloatModel:
        loaded = TorchModel(
            architecture="Scale", inputs=(x,), outputs=(y,), module=Scale(factor).eval(), parameters={"x": "x"}
        )
        batches: Any = lambda specs: [{"x": samples}]  # noqa: E731
        return float_model(ResultCache(tmp_path), key, "made of", lambda: loaded, batches, 21, on_reuse=told)

    return run


def draw(n: int, length: int) -> np.ndarray:
    return np.random.default_rng(n).standard_normal((n, length)).astype(np.float32)


def factor_of(model: FloatModel) -> float:
    (value,) = model.state.model.graph.initializers.values()
    assert value.const_value is not None
    return float(value.const_value.numpy().item())


def test_other_samples_are_compared_with_the_graph_that_is_there(
    export: Export, exports: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[int] = []

    def check(loaded: TorchModel, graph: Any, batches: list[dict[str, np.ndarray]]) -> float | None:
        compared.append(len(batches[-1]["x"]))
        return check_parity(loaded, graph, batches)

    check_parity = cached.check_parity
    monkeypatch.setattr(cached, "check_parity", check)
    told: list[str] = []
    for n in (5, 3, 3):
        found = export(f"{n} samples", draw(n, 4), told=lambda: told.append("reused"))
        assert factor_of(found) == 2.0 and found.parity is not None
    assert (exports, compared, told) == ([2.0], [5, 3], ["reused"])


def test_an_example_of_another_size_is_another_graph(export: Export, exports: list[float]) -> None:
    for length in (4, 5):
        export(f"length {length}", draw(2, length))
    assert exports == [2.0, 2.0]


def test_a_graph_that_is_not_the_model_is_not_served(export: Export, exports: list[float]) -> None:
    """As one would be whose key lacks what decides its values: here there are other weights under the same."""
    assert factor_of(export("a", draw(2, 4))) == 2.0
    assert factor_of(export("b", draw(3, 4), factor=3.0)) == 3.0
    assert exports == [2.0, 3.0]


def test_weights_beside_the_graph_are_read_by_each_run(
    export: Export, exports: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of more than 2 GiB: onnx reads no weights from a file that has two names. What is left of them may be less."""
    with monkeypatch.context() as patch:
        for module in (files, run):
            patch.setattr(module, "IN_MEMORY", 0)
        patch.setattr(ir, "save", functools.partial(ir.save, size_threshold_bytes=0))
        for key in ("a", "b", "a"):
            found = export(key, draw(2, 4))
            assert factor_of(found) == 2.0
    assert exports == [2.0] and [path.name for path in tmp_path.rglob("*.data")] == [f"{GRAPH}.data"]
    onnx.save_graph(found.state.model, tmp_path / "elsewhere/model.onnx")
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["model.onnx"]


def test_a_graph_that_is_gone_is_made_again(export: Export, exports: list[float], tmp_path: Path) -> None:
    export("a", draw(2, 4))
    (graph,) = tmp_path.rglob(GRAPH)
    shutil.rmtree(graph.parent)
    assert factor_of(export("a", draw(2, 4))) == 2.0
    assert exports == [2.0, 2.0]


def test_what_keys_hold(tmp_path: Path) -> None:
    """A graph does not depend on samples, nor the float model's outputs on those that a graph was compared on."""
    recipe = image_recipe(tmp_path)
    first = plan(recipe, tmp_path, tmp_path).keys

    def compare(**parts: Any) -> tuple[bool, bool, bool]:
        """Return whether results of the changed recipe are those of the first: the graph, its comparison, outputs."""
        keys = plan(changed(recipe, **parts), tmp_path, tmp_path).keys
        graphs = {each.made_of[each.float_graph] for each in (first, keys)}
        return len(graphs) == 1, keys.float_graph == first.float_graph, keys.baseline == first.baseline

    evaluation = recipe["data"]["evaluation"]
    assert compare(passes=[{"kind": "prune_channels", "ratio": 0.25}]) == (True, True, True)
    assert compare(data={"calibration": {"source": "npz:test.npz"}, "evaluation": evaluation}) == (True, False, True)
    assert compare(data={"evaluation": {**evaluation, "samples": 50}}) == (True, True, False)
    assert compare(preprocess={"mean": [0.5], "std": [0.5]}) == (True, False, False)
    assert compare(export=[{"kind": "onnx", "opset": 22}]) == (False, False, False)
    image_recipe(tmp_path, seed=1)  # other weights
    assert compare() == (False, False, False)
