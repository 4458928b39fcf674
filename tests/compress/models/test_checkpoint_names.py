"""Tensors of files that transformers takes apart as it loads them."""

from __future__ import annotations

from typing import Any

import pytest
from streaming import llama
from torch import nn
from transformers import conversion_mapping
from transformers.core_model_loading import Chunk, WeightConverter

from compress.models.checkpoint_names import find_taken_apart, find_unpackable


def take_apart(monkeypatch: pytest.MonkeyPatch, source: str, *targets: str) -> nn.Module:
    """A Llama with a tower, of which files hold `source` and the module `targets`."""
    model = llama()
    model.tower = nn.ModuleDict({name: nn.Linear(8, 8, bias=False) for name in ("query", "key")})
    converter = WeightConverter([source], list(targets), operations=[Chunk(dim=0)])
    mapping: Any = lambda model, **how: [converter]  # noqa: E731
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", mapping)
    return model


def test_both_sides_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = take_apart(monkeypatch, "tower.both.weight", "tower.query.weight", "tower.key.weight")
    names = list(model.state_dict())
    found = find_taken_apart(model, ["tower.both.weight", "lm_head.weight"], names)
    assert found == {"tower.both.weight": ("tower.query.weight", "tower.key.weight")}


def test_transformers_loads_nothing_packed_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """But where layers of such names are packed: it then takes what is stored of them apart, too."""
    model = take_apart(monkeypatch, "tower.both.weight", "tower.query.weight", "tower.key.weight")
    assert "model.layers.0.self_attn.q_proj" in find_unpackable(model)
    model = take_apart(monkeypatch, "qk_proj.weight", "q_proj.weight", "k_proj.weight")
    assert find_unpackable(model) == ()
