"""A layer that one pass has rounded is left as it is by the passes after it, as the plan says."""

from __future__ import annotations

import graphs
import numpy as np
import pytest
from graphs import context, written

from compress.passes import Equalize, Int8, Rtn, SmoothQuant
from compress.rounding.state import GraphState
from compress.work import apply_pass


@pytest.mark.parametrize("layer", ["up", "down", "query"])
def test_smoothing_leaves_rounded_layers(layer: str) -> None:
    feeds = graphs.tokens()
    rounded = apply_pass(Rtn(targets=(layer,)), GraphState(graphs.transformer(outlier=20.0)), context([])).model
    result = apply_pass(SmoothQuant(alpha=0.5), rounded, context(feeds))
    decided = {decision.layer: decision for decision in result.decisions}
    assert (decided[layer].action, decided[layer].reason) == ("kept", "already in 4 bits")
    np.testing.assert_allclose(written(result.model, feeds), written(rounded, feeds), rtol=1e-4, atol=1e-4)


def test_equalization_leaves_rounded_layers() -> None:
    feeds = graphs.images()
    for name in (layer.name for layer in GraphState(graphs.residual_cnn()).facts()):
        rounded = apply_pass(
            Int8(targets=(name,), bias_correction=False), GraphState(graphs.residual_cnn()), context(feeds)
        ).model
        result = apply_pass(Equalize(), rounded, context(feeds))
        assert {d.layer: d.action for d in result.decisions}[name] == "kept"
