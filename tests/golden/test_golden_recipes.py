"""Six recipes of different kinds through the command line: their numbers are those that were recorded.

GOLDEN=write records them anew, in the .json files beside this one; `git diff` then shows what moved.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from golden import NOISE, RECORDS, apply_golden, list_changes, list_numbers, saturates
from trained_models import write_writer


def check(name: str, bundle: Path) -> None:
    """Compare a bundle's numbers with NAME.json, or write that file if GOLDEN=write."""
    numbers, record = list_numbers(bundle), RECORDS / f"{name}.json"
    if os.environ.get("GOLDEN") == "write":
        assert not saturates(bundle), "this processor has no VNNI: record on one that has it"
        record.write_text(json.dumps(numbers, indent=1) + "\n")
        pytest.skip(f"wrote {record}")
    changes = list_changes(json.loads(record.read_text()), numbers, NOISE if saturates(bundle) else ())
    assert not changes, f"{name}: numbers moved (GOLDEN=write records them anew)\n  " + "\n  ".join(changes)


def test_quickstart(quickstart: tuple[Path, str]) -> None:
    """recipes/quickstart.yaml as it is shipped."""
    check("quickstart", quickstart[0])


def test_an_onnx_file_in_int8(quickstart: tuple[Path, str], tmp_path: Path) -> None:
    shutil.copy(quickstart[0] / "baseline/model.onnx", tmp_path)
    check("onnx-file-int8", apply_golden("onnx-file-int8", tmp_path))


def test_channels_pruned_then_distilled(tmp_path: Path) -> None:
    check("prune-distill", apply_golden("prune-distill", tmp_path))


def test_a_tagger_distilled_then_in_int8(tags_bundle: Path) -> None:
    check("tags-distill-int8", tags_bundle)


@pytest.mark.parametrize("name", ["language-w4-gptq", "language-w8a8-smoothquant"])
def test_a_checkpoint_of_a_language_model(name: str, tmp_path: Path) -> None:
    write_writer(tmp_path)
    check(name, apply_golden(name, tmp_path))


def test_every_recipe_is_run_and_every_record_read() -> None:
    recipes = {path.stem for path in (RECORDS / "recipes").glob("*.yaml")}
    assert {path.stem for path in RECORDS.glob("*.json")} == recipes | {"quickstart"}


def test_a_failure_says_which_number_moved_from_what_to_what() -> None:
    before = {
        "samples": 797,
        "verdict": "pass",
        "candidate.top1": 0.99,
        "fc.sqnr_db": 40.0,
        "layers kept": 1,
        "gone": 2,
    }
    after = {"samples": 797, "verdict": "fail", "candidate.top1": 0.97, "fc.sqnr_db": 40.1, "layers kept": 2, "new": 3}
    assert list_changes(before, after) == [
        "verdict: pass -> fail",
        "candidate.top1: 0.99 -> 0.97 (by -0.02; 0.0019 is allowed)",
        "layers kept: 1 -> 2 (by +1; 0 is allowed)",
        "gone: 2 -> nothing",
        "new: nothing -> 3",
    ]
    assert not list_changes({"samples": 9, "fc.sqnr_db": 43.0}, {"samples": 9, "fc.sqnr_db": 31.2}, NOISE)
