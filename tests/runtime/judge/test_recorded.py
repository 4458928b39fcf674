"""Values of a recipe's own metrics as a bundle has them: intervals, and files that are not what the manifest says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.bundle.format import Gate, Judgement, Manifest, RecordedMetric, read_recorded, write_recorded
from runtime.errors import BundleError
from runtime.judge.recorded import recorded_evidence
from runtime.tasks.manifest import write_bundle

NAME = "python:metrics.py:cost"
RECORD = RecordedMetric(NAME, "0" * 64, higher_is_better=False, unit="points")


@pytest.fixture
def manifest(tmp_path: Path, tiny: Any) -> Manifest:
    """Of 60 images and one metric."""
    for name in ("model", "baseline"):
        tiny.image_model(tmp_path / name / "model.onnx")
    columns = {"image": np.zeros((60, 4, 4, 3), np.uint8), "label": np.arange(60) % 5}
    staged = tiny.stage(tmp_path, "image-classification", tiny.image_spec, columns)
    staged = replace(staged, recorded=(RECORD,), judgement=Judgement(gates=(Gate(NAME, max_drop=0.1),)))
    write_recorded(tmp_path, [np.zeros(60)], [np.zeros(60)])
    return write_bundle(tmp_path, staged)


def test_values_come_back(tmp_path: Path, manifest: Manifest) -> None:
    ((before, after),) = read_recorded(tmp_path, manifest)
    np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize(
    ("baseline", "candidate", "record"),
    [
        ([], [], RECORD),
        ([np.zeros(59)], [np.zeros(59)], RECORD),
        ([np.zeros(60, int)], [np.zeros(60)], RECORD),
        ([np.zeros((60, 2))], [np.zeros((60, 2))], RECORD),
        ([np.zeros(1)], [np.zeros(1)], replace(RECORD, per_sample=False)),
        ([np.zeros(9)], [np.zeros(8)], replace(RECORD, per_sample=False)),
    ],
)
def test_values_that_are_not_what_the_manifest_says_are_refused(
    tmp_path: Path, manifest: Manifest, baseline: list[Any], candidate: list[Any], record: RecordedMetric
) -> None:
    write_recorded(tmp_path, baseline, candidate)
    with pytest.raises(BundleError, match=r"does not hold both sides|is not what its manifest says"):
        read_recorded(tmp_path, replace(manifest, recorded=(record,)))


def test_a_gate_on_a_metric_that_nothing_was_recorded_of_is_refused(manifest: Manifest) -> None:
    with pytest.raises(BundleError, match="nothing was recorded of it; build it again"):
        recorded_evidence(replace(manifest, recorded=()), [], {})


def test_a_cost_that_no_sample_showed_may_still_be_there(manifest: Manifest) -> None:
    """Of 60 samples one costs 5: no sample of either model but that one differs, and its number bounds the mean."""
    values = np.where(np.arange(60) == 7, 5.0, 0.0)
    found = recorded_evidence(manifest, [(values, values)], {})[NAME]
    assert found.recorded and not found.higher_is_better
    assert found.candidate.low == 0.0 and 0.2 < found.candidate.high < 0.6
    assert found.difference is not None
    assert found.difference.low < 0 < found.difference.high


def test_zeros_and_ones_are_a_proportion(manifest: Manifest) -> None:
    values = (np.arange(60) < 54).astype(float)
    assert recorded_evidence(manifest, [(values, values)], {})[NAME].candidate.method == "Clopper-Pearson"
