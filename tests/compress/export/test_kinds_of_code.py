"""Models whose code keeps, counts or computes what an exporter stumbles over: exported, or refused in a sentence."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from makers import plan
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

from compress.blocks.parametrized import fold_computed, list_computed, without_computed
from compress.blocks.untouched import leave_untouched
from compress.errors import NotExportable, PlanError
from compress.export.onnx import export_float
from compress.export.parity import check_parity
from compress.graph.layers import find_layers
from compress.models.load import TorchModel, load_torch_model
from compress.models.meta import open_on_meta
from compress.models.source import locate
from compress.specs import ModelSpec
from compress.structure.dataflow import record
from runtime.bundle.tensors import TensorSpec

WIDTH = 6


@lru_cache
def make_positions(n: int) -> Tensor:
    return torch.arange(n, dtype=torch.float32) / n


class Cached(nn.Module):
    """Positions behind a cache of a function, of a method, and in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.table: Tensor | None = None
        self.tables: dict[int, Tensor] = {}

    @staticmethod
    @lru_cache
    def make_scale(n: int) -> Tensor:
        return torch.full((n,), 2.0)

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.ones(WIDTH)
        self.tables.setdefault(0, torch.ones(WIDTH))
        return self.fc(x + make_positions(WIDTH)) * self.make_scale(WIDTH) + self.table + self.tables[0]


class Counting(nn.Module):
    """The size of a batch as `len` gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.fc = nn.Parameter(torch.randn(1, WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) + self.query.repeat(len(x), 1)


class OneLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)


class Checking(OneLayer):
    """Whether all, or some, of the values are positive."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        every, some = torch._is_all_true(y > 0), torch._is_any_true(y > 0)
        return y + every.float() + 2 * some.float()


class Fixing(OneLayer):
    """Code that takes the batch for a number."""

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) + torch.tensor(np.ones(int(x.shape[0]), np.float32))[:, None]


class Choosing(OneLayer):
    """Code that branches on values."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        return y if float(y.sum()) > 0 else -y


class Projected(nn.Module):
    """A recurrent layer that the exporter writes as nothing loads: two ways, with a projection."""

    def __init__(self, **more: Any) -> None:
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, 8, proj_size=4, batch_first=True, **{"num_layers": 2, "bidirectional": True, **more})

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x[:, None].expand(-1, 5, -1))[0]


def loaded(module: nn.Module) -> TorchModel:
    spec = TensorSpec("x", "float32", ("batch", WIDTH))
    torch.manual_seed(0)
    return TorchModel(
        architecture=type(module).__name__,
        inputs=(spec,),
        outputs=(TensorSpec("output", "float32", ("batch", WIDTH)),),
        module=module.eval().requires_grad_(False),
        parameters={"x": "x"},
    )


def batch(n: int) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(n).normal(size=(n, WIDTH)).astype(np.float32)}


def one_way() -> nn.Module:
    return Projected(num_layers=1, bidirectional=False)


@pytest.mark.parametrize("kind", [Cached, Counting, Checking])
def test_what_the_code_keeps_or_counts_is_exported_with_parity_at_every_size(kind: Any) -> None:
    model = loaded(kind())
    graph = export_float(model, batch(4), 20)
    assert check_parity(model, graph, [batch(2), batch(5), batch(1)]) < 1e-5


def test_a_run_without_values_leaves_none_behind() -> None:
    module = Cached().eval()
    before = dict(vars(module))
    record(module, {"x": torch.zeros(1, WIDTH)})
    with leave_untouched(module), torch.device("meta"):
        module.table = torch.zeros(3)
    assert vars(module).keys() == before.keys() and module.table is None
    assert type(make_positions(WIDTH)) is Tensor and type(Cached.make_scale(WIDTH)) is Tensor


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Fixing, "axis 0 of x for a number, 4: no graph of it reads another size"),
        (Choosing, r"torch.onnx.export failed: .*test_kinds_of_code.py:\d+: return y if float"),
        (Projected, "ONNX Runtime does not run the exported graph"),
        (one_way, "ONNX Runtime does not run the exported graph"),
    ],
)
def test_what_cannot_be_exported_is_said_in_one_sentence(
    kind: Any, text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(NotExportable, match=text) as raised:
        export_float(loaded(kind()), batch(4), 20)
    said = str(raised.value)
    assert "\n" not in said and "\x1b" not in said and "or give the model as an ONNX file" in said
    assert capfd.readouterr() == ("", "")


CODE = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self): super().__init__(); self.fc = nn.Linear(6, 4)
    def forward(self, x):
        y = self.fc(x)
        return y if float(y.sum()) > 0 else -y
def build(): return Net()
"""


@pytest.mark.parametrize("target", ["onnxruntime-cpu", "tensorrt"])
def test_the_plan_refuses_what_cannot_be_exported(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPRESS_TIMING", "on")
    (tmp_path / "net.py").write_text(CODE)
    np.savez(tmp_path / "data.npz", x=batch(8)["x"])
    recipe = {
        "version": 1,
        "name": "branches",
        "model": {"source": "python:net.py:build", "task": "generic"},
        "data": {"evaluation": {"source": "npz:data.npz"}, "calibration": {"source": "npz:data.npz"}},
        "target": target,
        "passes": [{"kind": "int8", "placement": "auto"}],
    }
    with pytest.raises(PlanError, match=r"Net: torch\.onnx\.export failed"):
        plan(recipe, tmp_path, tmp_path / "cache")


def orthogonal(layer: nn.Module) -> nn.Module:
    return parametrizations.orthogonal(layer, use_trivialization=False)


class Layers(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def doubled(layer: nn.Module) -> nn.Module:
    return parametrize.register_parametrization(layer, "weight", Doubled())


COMPUTED: dict[str, Any] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": orthogonal,
    "own": doubled,
    "old weight_norm": weight_norm,
    "old spectral_norm": spectral_norm,
    "mask": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
}


def computed(name: str) -> nn.Module:
    torch.manual_seed(0)
    return Layers(COMPUTED[name](nn.Linear(WIDTH, WIDTH)), nn.ReLU(), COMPUTED[name](nn.Linear(WIDTH, 4))).eval()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", COMPUTED)
def test_weights_that_are_computed_become_parameters_of_the_same_values(name: str) -> None:
    module, x = computed(name), torch.randn(3, WIDTH)
    expected = module(x).detach()
    assert list_computed(module) == ["0.weight", "2.weight"]
    assert fold_computed(module) == ["0.weight", "2.weight"] and list_computed(module) == []
    torch.testing.assert_close(module(x), expected)
    assert {name for name, _ in module.named_parameters()} == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert type(module[0]) is nn.Linear and without_computed(module) is module


def test_weights_that_share_what_they_are_computed_from_stay_right() -> None:
    one, two = nn.Linear(4, 4), nn.Linear(4, 4)
    two.weight = one.weight
    module = nn.Sequential(doubled(one), doubled(two))
    x = torch.randn(2, 4)
    expected = module(x).detach()
    fold_computed(module)
    torch.testing.assert_close(module(x), expected)


@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm"])
def test_a_graph_holds_such_a_weight_itself(name: str) -> None:
    model = loaded(computed(name))
    graph = export_float(model, batch(3), 20)
    assert [layer.shape for layer in find_layers(graph)] == [(WIDTH, WIDTH), (4, WIDTH)]
    assert list_computed(model.module), "the module is as it was"
    assert model.module(torch.randn(3, WIDTH)).shape == (3, 4), "and runs"


NORMED = """
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
def build():
    torch.manual_seed(0)
    return nn.Sequential(weight_norm(nn.Linear(6, 16)), nn.ReLU(), weight_norm(nn.Linear(16, 4)))
"""


@pytest.mark.parametrize("how", ["none", "as built", "folded"])
def test_a_factory_s_model_has_them_whatever_its_file_holds(how: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    (tmp_path / "net.py").write_text(NORMED)
    namespace: dict[str, Any] = {}
    exec(NORMED, namespace)
    module = namespace["build"]().eval()
    with torch.no_grad():
        module[0].bias.add_(1.0 if how != "none" else 0.0)
    expected = module(torch.ones(1, 6))
    if how == "folded":
        fold_computed(module)
    save_file({name: t.contiguous() for name, t in module.state_dict().items()}, tmp_path / "net.safetensors")
    weights = None if how == "none" else "net.safetensors"
    spec = ModelSpec(source="python:net.py:build", weights=weights, task="generic")
    model = load_torch_model(locate(spec, tmp_path), {"input": ((6,), "float32")})
    torch.testing.assert_close(model.module(torch.ones(1, 6)), expected)
    assert not list_computed(model.module)
    opened = open_on_meta(locate(spec, tmp_path))
    said = [note for note in opened.notes if "computed from other parameters" in note]
    assert len(said) == (how != "folded") and all("2 weights" in note and ": 0, 2" in note for note in said)
