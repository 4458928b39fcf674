"""Layers that compensation leaves as they are: each is named with its reason, in the pass's report too."""

from __future__ import annotations

import copy

import numpy as np
import torch
from streaming import model_context
from torch import Tensor, nn

from compress.models.load import TorchModel
from compress.passes import PruneChannels
from compress.pruning.compensate import MAX_OUTPUTS, compensate, explain_left_alone
from compress.pruning.points import find_points
from compress.work import apply_pass
from runtime.bundle.tensors import TensorSpec


class Uneven(nn.Module):
    """A table that a head is tied to, a layer called twice, one never called, one too tall; three that are fitted."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(20, 6), nn.Linear(6, 20, bias=False)
        self.head.weight = self.table.weight
        self.up, self.down = nn.Linear(6, 32), nn.Linear(32, 6)
        self.twice, self.idle = nn.Linear(6, 6), nn.Linear(6, 6)
        self.across, self.tall = nn.ConvTranspose1d(6, 6, 1), nn.Linear(6, MAX_OUTPUTS + 1, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        x = x + self.down(self.up(x).relu())
        x = self.twice(self.twice(x))
        x = self.across(x.movedim(1, 2)).movedim(1, 2)
        return self.head(x + self.tall(x).mean(-1, keepdim=True))


WHY = {
    "head": "it shares its weight with table",
    "twice": "one forward does not call it exactly once",
    "idle": "one forward does not call it exactly once",
    "tall": f"it has {MAX_OUTPUTS + 1} outputs, and more than {MAX_OUTPUTS} are not fitted",
}


def uneven() -> nn.Module:
    torch.manual_seed(0)
    return Uneven().eval().requires_grad_(False)


def test_each_layer_that_is_not_fitted_has_its_reason() -> None:
    """The three others are fitted."""
    module = uneven()
    module.up, module.down = nn.Linear(6, 20), nn.Linear(20, 6)
    module.requires_grad_(False)
    batches = [{"ids": torch.randint(0, 20, (8, 5))} for _ in range(4)]
    left = explain_left_alone(module, {point.layer for point in find_points(module, batches[0])})
    assert left == WHY
    student = copy.deepcopy(module)
    student.up.weight.mul_(0.5)
    fitted = {one.layer for one in compensate(student, module, batches, {})}
    assert fitted == {"up", "down", "across"}
    for name in left:
        assert torch.equal(student.get_submodule(name).weight, module.get_submodule(name).weight)


def test_the_report_names_them() -> None:
    """Beside what was decided of each; without compensation nothing is said of it."""
    rows = np.random.default_rng(0).integers(0, 20, (16, 5))
    spec = TensorSpec("ids", "int64", ("batch", 5))
    batches = [{"ids": rows[i : i + 4]} for i in range(0, 16, 4)]
    given = model_context(batches)
    for on in (True, False):
        module = uneven()
        loaded = TorchModel(architecture="Uneven", inputs=(spec,), outputs=(), module=module, parameters={"ids": "ids"})
        result = apply_pass(PruneChannels(ratio=0.5, compensate=on, importance="l2"), loaded, given)
        said = {decision.layer: decision.reason for decision in result.decisions}
        assert said["up"] == "16 of 32 neurons stay"
        assert {name: reason.partition("; not fitted: ")[2] for name, reason in said.items() if "fitted" in reason} == (
            WHY if on else {}
        )
