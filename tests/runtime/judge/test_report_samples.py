"""What a report keeps of single samples: the same numbers come back, no file grows without bound, none is mixed up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from runtime.errors import UsageError
from runtime.judge.samples import SAMPLES_FILE, KeptColumn, keep_samples, read_kept_samples

RNG = np.random.default_rng(0)
COLUMNS = {
    "top1": (RNG.integers(0, 2, 50).astype(np.float64),),
    "kl": (RNG.random(50),),
    "f1": (RNG.integers(-1, 300, 50), RNG.integers(0, 9, 50)),
    "map": (RNG.random((50, 3)).astype(np.float32), RNG.random((50, 4)) > 0.5),
    "nll": (RNG.random(50), RNG.integers(1, 70_000, 50)),
}


def test_columns_come_back_as_they_were(tmp_path: Path) -> None:
    kept = keep_samples(COLUMNS, tmp_path)
    again = read_kept_samples(tmp_path / SAMPLES_FILE, kept)
    assert again.keys() == COLUMNS.keys() and not kept.left_out
    for name, columns in COLUMNS.items():
        for column, other in zip(columns, again[name], strict=True):
            assert column.dtype == other.dtype
            np.testing.assert_array_equal(column, other)


def test_what_metrics_share_is_stored_once(tmp_path: Path) -> None:
    kept = keep_samples({"nll": COLUMNS["nll"], "perplexity": COLUMNS["nll"]}, tmp_path)
    assert kept.columns["nll"] == kept.columns["perplexity"]
    assert (tmp_path / SAMPLES_FILE).stat().st_size < 50 * 12 + 1000


def test_beyond_the_bound_metrics_are_left_out_by_name(tmp_path: Path) -> None:
    kept = keep_samples(COLUMNS, tmp_path, most_bytes=600)
    assert kept.left_out == ("map", "nll") and list(kept.columns) == ["top1", "kl", "f1"]


def test_a_file_of_another_report_is_refused(tmp_path: Path) -> None:
    kept = keep_samples(COLUMNS, tmp_path)
    keep_samples({"kl": COLUMNS["kl"]}, tmp_path)
    with pytest.raises(UsageError, match=r"is not the one that report\.json beside it was written with"):
        read_kept_samples(tmp_path / SAMPLES_FILE, kept)


@pytest.mark.parametrize("column", [KeptColumn("column999", "float64"), KeptColumn("column000", "object")])
def test_columns_that_are_none_are_refused(tmp_path: Path, column: KeptColumn) -> None:
    kept = replace(keep_samples(COLUMNS, tmp_path), columns={"kl": (column,)})
    with pytest.raises(UsageError, match=r"cannot be read as the columns of report\.json"):
        read_kept_samples(tmp_path / SAMPLES_FILE, kept)
