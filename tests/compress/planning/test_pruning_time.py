"""What a forecast counts of a pass that takes structure out: what it tries, what it fits, what it times."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import pytest

from compress.facts import LayerFacts, ModelFacts, Prunable, Removable
from compress.passes.base import PruningWorkload
from compress.passes.prune_channels import PruneChannels
from compress.passes.prune_layers import PruneLayers
from compress.planning.pruning_time import FEWEST_ROWS, IN_TORCH, PruningTime

BLOCKS = tuple(Removable(f"block.{k}", (f"block.{k}.conv",), listed=True) for k in range(8))
CONV = LayerFacts("conv", "Conv2d", "Conv", "conv.weight", (16, 16, 3, 3), macs=16 * 16 * 9 * 1024)
LAYERS = tuple(replace(CONV, name=f"block.{k}.conv", weight=f"block.{k}.conv.weight") for k in range(8))


@dataclass(frozen=True)
class Paces:
    """As `compress.planning.rates.Rates`."""

    touch: float = 1e9

    def product(self, compute: str) -> float:
        return 1e9


def describe(**changes: Any) -> ModelFacts:
    return ModelFacts("torch", "Small", "generic", (), (), LAYERS, **changes)


def foresee(work: PruningWorkload, n_samples: int = 64, **changes: Any) -> float:
    given: dict[str, Any] = {"sample_rows": 1, "forward": 0.01, "export": 5.0, "calls": (0.01, 0.005)} | changes
    return PruningTime(cast(Any, Paces()), n_samples, **given).pass_seconds(work)


def count_layers(**knobs: Any) -> PruningWorkload:
    facts = describe(removable=BLOCKS)
    return PruneLayers(**knobs).count_pruning(facts)


def test_blocks_are_tried_the_oftener_the_more_go() -> None:
    assert count_layers(keep=7).tried < count_layers(keep=3).tried
    assert count_layers(choose="uniform", keep=3).tried == count_layers(layers=(0, 1, 2)).tried
    assert count_layers(keep=3, compensate=False).fitted == ()
    assert len(count_layers(keep=3).fitted) == 3


def test_a_measured_speed_up_ranks_all_and_exports_the_whole_model_once() -> None:
    work = count_layers(speedup=1.6)
    assert work.tried > count_layers(keep=3).tried
    assert (work.timed, work.exports) == (4, 5)
    assert count_layers(keep=3).exports == 0


def test_channels_are_read_fitted_and_timed_as_the_knobs_say() -> None:
    group = Prunable("block.0.conv", "channels", 16, {"block.0.conv": 1}, {"block.1.conv": 1})
    facts = describe(prunable=(group,))
    fitted = PruneChannels(ratio=0.5).count_pruning(facts)
    assert [layer.name for layer in fitted.read] == ["block.1.conv"]
    assert fitted.fitted == LAYERS
    by_norm = PruneChannels(ratio=0.5, importance="l2", compensate=False).count_pruning(facts)
    assert by_norm.read == by_norm.fitted == ()
    assert PruneChannels(speedup=1.5).count_pruning(facts).exports > by_norm.exports == 0


def test_forwards_count_samples_and_tries_no_more_than_their_rows() -> None:
    assert foresee(PruningWorkload(forwards=2)) == pytest.approx(2 * 64 * 0.01 * IN_TORCH)
    few = PruningWorkload(tried=10, tried_rows=16 * 256)
    assert foresee(few) == pytest.approx(10 * 16 * 0.01 * IN_TORCH)
    assert foresee(few, sample_rows=512) == pytest.approx(10 * 8 * 0.01 * IN_TORCH)
    assert foresee(few, n_samples=4) == pytest.approx(10 * 4 * 0.01 * IN_TORCH)


def test_a_fit_takes_no_more_rows_than_it_needs() -> None:
    work = PruningWorkload(fitted=(CONV,))
    enough = FEWEST_ROWS // 1024
    assert foresee(work, enough // 2) < foresee(work, enough) == foresee(work, 10 * enough)
    assert foresee(PruningWorkload(read=(CONV,))) < foresee(work)
    assert foresee(PruningWorkload(fitted=(replace(CONV, shape=(16, 1, 3, 3)),))) < foresee(work)
