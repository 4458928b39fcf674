"""Gates while passes run: what counts as short, and what is only told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from compress.execution.quality import shortfall_finder
from compress.planning.inputs import Inputs
from runtime.bundle.format import Gate, Judgement


@pytest.mark.parametrize(
    ("noise", "least", "short", "told"),
    [
        (0.01, 0.9, False, False),  # holds
        (0.01, 0.99999999, False, True),  # too near the bound for 64 samples
        (5.0, 0.9, True, False),  # fails
    ],
)
def test_what_samples_cannot_decide_is_told_once_and_is_not_short(
    noise: float, least: float, short: bool, told: bool
) -> None:
    rng = np.random.default_rng(0)
    baseline = {"y": rng.normal(size=(64, 8))}
    outputs = {"y": baseline["y"] + noise * rng.lognormal(0, 2, (64, 1)) * rng.normal(size=(64, 8))}
    judgement = Judgement(gates=(Gate("cosine", min=least),))
    model = SimpleNamespace(task="generic", generates=False)
    inputs = cast(
        Inputs,
        SimpleNamespace(recipe=SimpleNamespace(model=model, validate_=judgement, own_metrics=()), class_names=()),
    )
    lines: list[str] = []
    columns: dict[str, Any] = {"x": rng.normal(size=(64, 4))}
    find = shortfall_finder(inputs, columns, baseline, lambda graph: outputs, lines.append)
    assert find is not None
    for _ in range(2):
        assert bool(find(cast(Any, None))) == short
    assert len(lines) == told and all("is not decided, and no layer stays float for it" in line for line in lines)
