"""What pruning refuses at plan time beside budgets and patterns: heads in groups, zeros, models that no run shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from compress.errors import SourceError
from compress.facts import LayerFacts, ModelFacts, Prunable
from compress.formats.targets import TARGETS
from compress.models.facts import model_facts
from compress.models.source import locate
from compress.passes import PruneChannels
from compress.specs import ModelSpec

CPU = TARGETS["onnxruntime-cpu"]


def attention(queries: int) -> ModelFacts:
    """Two key-value heads of 8, each with so many query heads; a feed-forward of 48 neurons."""
    sizes = {"q": (16 * queries, 32), "k": (16, 32), "v": (16, 32), "o": (32, 16 * queries), "up": (48, 32)}
    sizes["down"] = (32, 48)
    layers = tuple(LayerFacts(name, "Linear", "MatMul", f"{name}.weight", sizes[name], 1000) for name in sizes)
    heads = Prunable("q", "heads", 2, {"q": 8 * queries, "k": 8, "v": 8}, {"o": 8 * queries})
    neurons = Prunable("up", "neurons", 48, {"up": 1}, {"down": 1})
    return ModelFacts("torch", "M", "text-generation", (), (), layers, prunable=(heads, neurons))


def test_heads_that_share_a_key_value_head_go_together_or_not_at_all() -> None:
    """A quarter of eight query heads would be two, but they hang on two key-value heads, of which no quarter can go."""
    (problem,) = PruneChannels(ratio=0.25).check(attention(4), CPU).problems
    assert problem == (
        "prune_channels: ratio 0.25 takes no head of q: a key-value head goes with the 4 query heads that share it, "
        "and one of 2 is the least; use a ratio of 0.5 or more, or leave heads out of dimensions"
    )
    for passing in (PruneChannels(ratio=0.5), PruneChannels(ratio=0.25, dimensions=("neurons",))):
        assert passing.check(attention(4), CPU).problems == ()
    assert PruneChannels(ratio=0.25).check(attention(1), CPU).problems == ()  # each has its own: as wide as it was
    assert PruneChannels(max_flops=0.9).check(attention(4), CPU).problems == ()  # a budget may leave heads whole


def test_zeros_are_not_filled_by_compensation() -> None:
    sparse = attention(1).with_zeros(["up"])
    (problem,) = PruneChannels(ratio=0.5).check(sparse, CPU).problems
    assert problem == (
        "prune_channels: up is sparse, and compensation would fill its zeros; put prune_channels before the pass that "
        "makes it sparse, or set compensate: false"
    )
    assert PruneChannels(ratio=0.5, compensate=False).check(sparse, CPU).problems == ()


MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.b(torch.vmap(self.a)(x))

class Sized(Model):
    def forward(self, x):
        y = self.a(x)
        return self.b(y * {8: 1.0}[y.shape[1]])

class Sparse(Model):
    def forward(self, x):
        return self.b(self.a(x).to_sparse().to_dense())
"""


def facts_of(folder: Path, name: str, coupling: bool) -> ModelFacts:
    (folder / "model.py").write_text(MODEL)
    spec = ModelSpec(source=f"python:{folder}/model.py:{name}", task="generic")
    return model_facts(locate(spec, folder), {"x": ((6,), "float32")}, coupling)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "Sized",
            r"cannot be traced for pruning: KeyError: 7 .*model\.py:16: return self\.b\(y .*; write ",
        ),
        ("Sparse", r"forward fails on x \[1, 6\] float32: .*model\.py:20: return self\.b\(self\.a\(x\)\.to_sparse\(\)"),
    ],
)
def test_a_model_that_no_run_shows_names_the_line_and_the_way_out(tmp_path: Path, name: str, message: str) -> None:
    """The line is the model's own, though torch or the recorder of the run raised further down."""
    with pytest.raises(SourceError, match=message):
        facts_of(tmp_path, name, coupling=True)


def test_only_pruning_needs_a_run_that_shows_all(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, "Sized", coupling=False)
    assert [layer.name for layer in facts.layers] == ["a", "b"] and facts.prunable is None


def test_a_layer_inside_vmap_is_seen(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, "Model", coupling=True)
    assert facts.prunable == (Prunable("a", "neurons", 8, {"a": 1}, {"b": 1}),)
    assert [layer.macs for layer in facts.layers] == [48, 24]
