"""report.json read back: what was written, what an older version wrote, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from runtime.errors import UsageError
from runtime.judge.changes import ChangedSample, Changes
from runtime.judge.findings import FORMAT_VERSION, Change, PassRow, PassTable
from runtime.judge.gates import GateResult
from runtime.report.report import Report, Side, render_json, to_dict
from runtime.report.stored import read_report

REPORT = Report(
    verdict="fail",
    bundle="b",
    backend="onnxruntime-cpu",
    baseline=Side(metrics={"top1": 0.5}, latency_ms={"p50": 1.0}),
    candidate=Side(metrics={"top1": math.nan}, intervals={"top1": (0.1, math.inf)}),
    differences={"top1": {"value": -0.1, "interval": (-math.inf, 0.1), "method": "m"}},
    distributions={"latency": {"baseline": (1.0, 2.0), "candidate": (0.5, 1.0)}},
    changes=Changes("agreement", 1, (ChangedSample(3, {"label": "a"}, {"label": "b"}, {"agreement": (None, 0.0)}),)),
    gates=(GateResult("top1", "min 0.9", None, None, "fail", False, "broken"),),
    steps=PassTable((PassRow("int8", 1.0, changes={"top1": Change(-0.1, (-0.2, 0.0))}),), "tpot", (), "cpu", "d"),
)


def write(folder: Path, data: Any) -> Path:
    file = folder / "report.json"
    file.write_text(data if isinstance(data, str) else json.dumps(data))
    return file


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    read = read_report(write(tmp_path, render_json(REPORT)))
    assert to_dict(read) == to_dict(REPORT)
    assert math.isnan(read.candidate.metrics["top1"]) and math.isnan(read.differences["top1"]["interval"][0])
    assert read.gates == REPORT.gates and read.changes == REPORT.changes and read.steps == REPORT.steps


def test_what_another_version_lacks_or_adds_does_no_harm(tmp_path: Path) -> None:
    data = to_dict(REPORT)
    for name in ("distributions", "changes", "steps", "format_version"):
        del data[name]
    read = read_report(write(tmp_path, {**data, "of_a_later_version": 1}))
    assert (read.distributions, read.changes, read.steps) == ({}, None, None)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("{", "no report of a judgement"),
        ("[]", "expected an object"),
        ({**to_dict(REPORT), "candidate": 3}, "report.json.candidate: expected an object"),
        ({**to_dict(REPORT), "verdict": "great"}, "is not one of"),
        ({**to_dict(REPORT), "differences": {"top1": {}}}, r"differences\['top1'\].interval"),
        ({**to_dict(REPORT), "format_version": FORMAT_VERSION + 1}, "is of format 2, and .* reads up to 1; update it"),
    ],
)
def test_what_is_no_report_of_this_format_is_refused(data: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        read_report(write(tmp_path, data))
