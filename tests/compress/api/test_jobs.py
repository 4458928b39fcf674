"""A model and data that a program holds become a judged bundle, its recipe, and the compressed module."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from makers import text_folder
from shortcuts import quick_judge
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import compress
from compress.errors import PlaceError, PlanError, RecipeError, SourceError
from compress.search.workers import start_workers
from runtime.errors import UsageError


class Net(nn.Module):
    """float32 [N, 3, 8, 8] -> [N, 4]."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.head = nn.Linear(width, 4)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.second(torch.relu(self.first(image)))).mean((2, 3)))


@pytest.fixture(scope="module")
def net() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Net()


@pytest.fixture(scope="module")
def loader(net: nn.Module) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        images = torch.randn(160, 3, 8, 8)
    with torch.no_grad():
        return DataLoader(TensorDataset(images, net(images).argmax(1)), 16)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMPRESS_CACHE", str(tmp_path / "cache"))
    with quick_judge():
        yield tmp_path


def test_quantize(net: nn.Module, loader: Any, place: Path) -> None:
    net.train()
    result = compress.quantize(net, "INT8", calibration_dataset=loader, num_calibration_samples=64, quiet=True)
    assert net.training and all(p.requires_grad for p in net.parameters())
    assert result.verdict in ("pass", "fail", "undecided") and result.report.bundle == "net-int8"
    assert result.folder == Path("bundles/net-int8") and "PASS" in result._repr_html_().upper() + "PASS"
    images = loader.dataset.tensors[0][:5].numpy()
    assert result.bundle.predict({"pixel_values": images})["logits"].shape == (5, 4)
    recipe = compress.load_recipe(place / "bundles/net-int8.yaml")
    assert recipe.model.source.startswith("live:Net-") and recipe.model.task == "image-classification"
    assert not recipe.keep_module
    with pytest.raises(UsageError, match=r"keeps no torch module; its recipe says so by keep_module: true"):
        result.torch()
    assert result.save("elsewhere") == place / "elsewhere" and (place / "elsewhere/manifest.json").is_file()
    with pytest.raises(PlaceError):
        result.save("bundles")


def test_the_recipe_that_is_left_gives_the_same_again(net: nn.Module, loader: Any, place: Path) -> None:
    first = compress.quantize(net, "INT8", calibration_dataset=loader, output_dir="a", quiet=True)
    again = compress.apply("a.yaml", "b", quiet=True, model=net)
    digests = [
        json.loads((Path(folder) / "manifest.json").read_text())["files"]["model/model.onnx"]["sha256"]
        for folder in (first.folder, again.folder)
    ]
    assert digests[0] == digests[1]
    assert compress.plan("a.yaml", model=Net(16)).before.layers[0].shape[0] == 16
    with pytest.raises(SourceError, match=r"forward"):
        compress.plan("a.yaml", model=nn.Linear(3, 2))


def test_prune_and_take_the_module(net: nn.Module, loader: Any) -> None:
    result = compress.prune(net, max_params=0.6, train_dataset=loader, max_seconds=1, quiet=True)
    smaller = result.torch()
    assert sum(p.numel() for p in smaller.parameters()) <= 0.61 * sum(p.numel() for p in net.parameters())
    images = loader.dataset.tensors[0]
    with torch.no_grad():
        np.testing.assert_allclose(
            result.bundle.predict({"pixel_values": images.numpy()})["logits"], smaller(images).numpy(), atol=1e-4
        )
    again = compress.load_torch(result.folder, Net)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), smaller.parameters(), strict=True))
    with pytest.raises(SourceError, match="is of another model"):
        compress.load_torch(result.folder, lambda: nn.Linear(2, 2))
    weights = result.folder / "module/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    with pytest.raises(UsageError, match="is not as it was written"):
        compress.load_torch(result.folder, Net)


def test_a_result_goes_on_into_a_scheme(net: nn.Module, loader: Any, place: Path) -> None:
    first = compress.prune(net, max_params=0.6, train_dataset=loader, max_seconds=1, quiet=True)
    both = compress.quantize(first, "INT8", quiet=True)
    assert both.folder == Path("bundles/net-pruned-int8") and both.bundle.manifest.name == "net-pruned-int8"
    assert [pass_.kind for pass_ in both.recipe.passes] == ["prune_channels", "distill", "int8"]
    assert both.baseline.size_bytes == first.baseline.size_bytes and both.ratios["size"] > first.ratios["size"]
    again = compress.load_recipe(place / "bundles/net-pruned-int8.yaml")
    assert again.passes == both.recipe.passes
    with pytest.raises(RecipeError, match="eval_dataset: a result that is gone on with has its own data"):
        compress.quantize(first, "INT8", eval_dataset=loader)
    table = compress.tabulate({"pruned": first, "both": both}, {"both": "always"})
    assert [row.name for row in table.rows] == ["float", "pruned", "both"] and table.metric == "top1"
    assert table.rows[2].size_bytes == both.candidate.size_bytes and table.rows[2].when == "always"
    assert table.rows[1].ms == pytest.approx(first.baseline.latency_ms["p50"] / first.ratios["latency_p50"])
    assert "take it when" in repr(table) and "<td>both</td>" in table._repr_html_()
    with pytest.raises(UsageError, match="pruned: map was not measured; its report has top1"):
        compress.tabulate({"pruned": first}, metric="map")
    with pytest.raises(UsageError, match="no result"):
        compress.tabulate({})


class Shifted(Dataset[Any]):
    """Images that come with other noise each time; counts how often one is asked for."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.images, self.labels, self.n_asked = images, labels, 0

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, place: int) -> Any:
        self.n_asked += 1
        return self.images[place] + 0.1 * torch.randn(3, 8, 8), self.labels[place]


def test_augmented_samples_are_drawn_in_each_epoch(
    net: nn.Module, loader: Any, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = Shifted(*loader.dataset.tensors)
    result = compress.prune(net, max_params=0.6, train_dataset=DataLoader(given, 16), max_seconds=2, quiet=True)
    data = result.recipe.data
    assert data.train is not None and str(data.train.redraw).startswith("Shifted-")
    assert data.calibration is not None and data.calibration.redraw is None
    assert given.n_asked > 2 * len(given) + 64, "more than one pass"
    assert f"redraw: {data.train.redraw}" in (result.folder / "recipe.yaml").read_text()
    monkeypatch.setattr("compress.data.live._HELD", {})
    with pytest.raises(PlanError, match=r"data.train: redraw: .* was given as an object, .* again as train_dataset"):
        compress.plan(result.recipe)
    again = compress.load_recipe(place / "bundles/net-pruned.yaml", ["data.train.redraw=null"])
    assert compress.plan(again).stages


def test_rounded_weights_are_in_the_module(net: nn.Module, loader: Any) -> None:
    recipe = {
        "version": 1,
        "name": "qat",
        "model": {"source": "python:left:out", "task": "image-classification"},
        "preprocess": {"kind": "tensor"},
        "data": {name: {"source": "npz:x.npz", "columns": {"pixel_values": "x"}} for name in ("evaluation", "train")},
        "passes": [{"kind": "qat", "scheme": "W4A16", "group_size": 32, "steps": 2, "batch_size": 8, "held_out": 0}],
        "keep_module": True,
    }
    images, labels = loader.dataset.tensors
    np.savez("x.npz", x=images.numpy(), label=labels.numpy())
    result = compress.apply(recipe, quiet=True, model=net)
    weight = result.torch().get_parameter("head.weight")
    assert all(len(torch.unique(row)) <= 16 for row in weight)


def test_a_transformers_model_with_its_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = text_folder(tmp_path / "classifier", "classifier")
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    texts = [(f"w{i} w{i + 1} w{i % 7}", i % 3) for i in range(50)]
    result = compress.quantize(model, "INT8", processing_class=tokenizer, calibration_dataset=texts, quiet=True)
    assert result.bundle.predict(["w1 w2"])["prediction"][0]["label"] in ("bad", "fair", "good")
    recipe = compress.load_recipe(f"{result.folder}.yaml")
    assert recipe.model.source.startswith("dir:") and recipe.model.task == "text-classification"
    with pytest.raises(SourceError, match="processing_class: a transformers model is judged on texts"):
        compress.quantize(model, "INT8", calibration_dataset=texts, output_dir="other")


def test_a_graph_in_memory(loader: Any) -> None:
    import onnx

    result = compress.quantize(Net(8), "INT8", calibration_dataset=loader, quiet=True, output_dir="first")
    graph = onnx.load(result.folder / "baseline/model.onnx")
    images, labels = loader.dataset.tensors
    again = compress.quantize(
        graph, "INT8", calibration_dataset={"pixel_values": images, "labels": labels}, quiet=True, output_dir="second"
    )
    assert again.report.candidate.size_bytes == pytest.approx(result.report.candidate.size_bytes, rel=0.1)


def test_a_goal_is_reached_in_this_process(loader: Any) -> None:
    net = Net(64)
    result = compress.auto(net, "size >= 2x", calibration_dataset=loader, budget_seconds=120, quiet=True)
    assert result.study is not None and result.study.best is not None and result.folder.is_dir()
    assert result.report.ratios["size"] >= 2


def test_every_format_is_measured_in_this_process(net: nn.Module, loader: Any, place: Path) -> None:
    table = compress.bench(net, calibration_dataset=loader, budget_seconds=15, quiet=True)
    states = {(row.backend, row.format): row.state for row in table.rows}
    assert states["onnxruntime-cpu", "int8-static"] == "measured"
    assert (place / "bundles/net-bench/bench.json").is_file()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda net, data: compress.prune(net, train_dataset=data), "say how much goes"),
        (lambda net, data: compress.prune(net, speedup=2, max_params=0.5, train_dataset=data), "say how much goes"),
        (lambda net, data: compress.prune(net, speedup=2, task="image-classification"), "give data"),
        (lambda net, data: compress.auto(net, "size >= 2x", task="image-classification"), "give data"),
        (lambda net, data: compress.quantize(net, "INT5", calibration_dataset=data), "unknown scheme"),
        (lambda net, data: compress.quantize(3, "INT8"), "a int is no model"),
    ],
    ids=range(6),
)
def test_wrong_calls(call: Any, says: str, net: nn.Module, loader: Any) -> None:
    with pytest.raises((RecipeError, SourceError, PlanError), match=says):
        call(net, loader)


def test_without_data_what_needs_none_is_done(net: nn.Module) -> None:
    result = compress.quantize(net, "W8A16", example_inputs=torch.randn(4, 3, 8, 8), task="generic", quiet=True)
    assert result.bundle.predict({"image": np.zeros((1, 3, 8, 8), np.float32)})
    with pytest.raises(SourceError, match="example_inputs: 2, and the model reads image"):
        compress.quantize(net, "W8A16", example_inputs=(1, 2))


def test_errors_name_arguments(net: nn.Module, loader: Any) -> None:
    with pytest.raises(RecipeError, match=r"^scheme INT5: unknown scheme"):
        compress.quantize(net, "INT5", calibration_dataset=loader)
    with pytest.raises((RecipeError, PlanError, SourceError), match="give calibration_dataset, and task"):
        compress.quantize(net)


def test_the_arguments_are_shown_and_others_refused(net: nn.Module) -> None:
    shown = inspect.signature(compress.quantize).parameters
    assert shown["calibration_dataset"].default is None and shown["num_calibration_samples"].default == 512
    with pytest.raises(TypeError, match=r"no argument 'calibration_data'; did you mean 'calibration_dataset'\?"):
        compress.quantize(net, calibration_data=[])  # type: ignore[call-arg]


def test_other_processes_do_not_have_the_model(tmp_path: Path) -> None:
    held = "live:Net-0"
    with pytest.raises(UsageError, match="given as an object"), start_workers(held, 2, None, tmp_path / "log"):
        pass
    with start_workers(held, 1, None, tmp_path / "log") as workers:
        assert type(workers).__name__ == "InThisProcess"


def test_every_public_name_is_there() -> None:
    assert all(getattr(compress, name) is not None and name in dir(compress) for name in compress.__all__)
