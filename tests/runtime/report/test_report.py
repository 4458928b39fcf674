"""The report: what it shows, that it is valid JSON and XML whatever was measured, and how it is written."""

from __future__ import annotations

import errno
import json
import math
import os
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from faults import Faults, failing

from runtime.errors import RuntimeFailure, UsageError
from runtime.judge.gates import GateResult
from runtime.report.report import (
    Report,
    Side,
    prepare_folder,
    render_json,
    render_junit,
    render_markdown,
    render_short,
    render_text,
    table_rows,
    to_dict,
    verdict_line,
    write_report,
)
from runtime.words import figure_text

GATES = (
    GateResult("top1", "max_drop 0.01", 0.001, (-0.001, 0.003), "pass", True, "drop 0.001 is at most 0.01"),
    GateResult("latency_p50", "min_speedup 3", 2.0, (1.9, 2.1), "fail", False, "2x <fast>", unit="x"),
    GateResult("kl", "max 0.1", 0.1, (0.0, 0.2), "undecided", True, "cannot tell"),
    GateResult("cosine", "min 0.9", None, None, "fail", False, "broken | outputs"),
)


MISSED = "latency_p50 2x, 3x wanted; cosine min 0.9 not measured; see why: compress why DIR"
LENIENT = GateResult("top1", "min 0.9", 0.95, (0.8, 1.0), "undecided", True, "cannot tell")
UNCLEAR = replace(LENIENT, holds=False)


@pytest.fixture
def report() -> Report:
    latency = {"p50": 2.0, "p90": 2.5, "p95": 3.0, "p99": 4.0}
    before = Side(
        metrics={"top1": 0.93},
        intervals={"top1": (0.92, 0.94)},
        latency_ms={name: 2 * value for name, value in latency.items()},
        throughput_per_s=100.0,
        throughput_batch_size=64,
        size_bytes=90_900_000,
        load_ms=200.0,
        peak_memory_bytes=150_000_000.0,
    )
    after = replace(before, metrics={"top1": 0.929, "kl": 0.01}, latency_ms=latency, size_bytes=23_300_000)
    return Report(
        verdict="fail",
        bundle="tiny",
        backend="onnxruntime-cpu",
        baseline=before,
        candidate=replace(after, intervals={"top1": (0.919, 0.939), "kl": (-math.inf, math.inf)}),
        ratios={"size": 3.9, "latency_p50": 2.0, "latency_p95": 2.0, "latency_p99": 2.0, "throughput": 1.0},
        ratio_intervals={"latency_p50": (1.9, 2.1), "latency_p95": (-math.inf, math.inf)},
        differences={"top1": {"value": -0.001, "interval": (-0.003, 0.001), "method": "Tango paired score"}},
        gates=GATES,
        advice=("The candidate is SLOWER.",),
        backends=(
            {
                "name": "a",
                "artifact": "baseline",
                "precision": "f32",
                "latency_ms": latency,
                "speedup": 1.0,
                "fastest": True,
            },
            {"name": "b", "artifact": "baseline", "precision": "bf16", "error": "cannot load"},
        ),
        environment={"cpu": "a CPU"},
    )


def test_the_table_has_a_row_for_each_thing_that_was_measured(report: Report) -> None:
    rows = {row.name: (row.before, row.after, row.change) for row in table_rows(report)}
    assert rows["size"] == ("86.7 MiB", "22.2 MiB", "3.90x")
    assert rows["top1"] == ("0.9300 [0.9200, 0.9400]", "0.9290 [0.9190, 0.9390]", "-0.0010 [-0.0030, +0.0010]")
    assert rows["kl"] == ("-", "0.0100", "")
    assert rows["latency p50"] == ("4 ms", "2 ms", "2.00x [1.90, 2.10]")
    assert rows["latency p95"] == ("6 ms", "3 ms", "2.00x")
    assert rows["throughput, batch 64"] == ("100/s", "100/s", "1.00x")
    assert list(rows) == [
        *("size", "top1", "kl", "latency p50", "latency p95", "latency p99"),
        *("throughput, batch 64", "peak memory", "load time"),
    ]


def test_what_a_gpu_takes_alone_has_a_row(report: Report) -> None:
    timed = replace(report, benchmark={**report.benchmark, "device_p50_ms": {"baseline": 3.0, "candidate": 1.5}})
    (row,) = [row for row in table_rows(timed) if row.name == "on the GPU alone"]
    assert (row.before, row.after, row.change) == ("3 ms", "1.5 ms", "2.00x")


def test_the_text_ends_with_the_verdict_after_the_gates(report: Report) -> None:
    lines = render_text(report).splitlines()
    assert lines[0].split() == ["before", "after", "change"]
    assert lines[-1] == f"FAIL: tiny on onnxruntime-cpu: {MISSED}"
    assert any(line.startswith("  holds") and "top1 max_drop 0.01" in line for line in lines)
    assert any(line.split() == ["b", "baseline", "bf16", "failed", "cannot", "load"] for line in lines)
    assert "- The candidate is SLOWER." in lines


def test_what_fell_short_and_what_comes_next_stand_last(report: Report) -> None:
    *_, failed, blank, place, verdict = render_text(report, None, Path("out/tiny"), ["bundle: out/tiny"]).splitlines()
    assert failed.startswith("  fail") and (blank, place) == ("", "bundle: out/tiny")
    assert verdict.endswith("see why: compress why out/tiny")


def test_a_terminal_gets_lines_of_its_width_and_colour(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = render_text(report, 60)
    assert "\x1b[1;31mFAIL\x1b[0m: tiny" in text and "\x1b[1;32mholds\x1b[0m" in text
    monkeypatch.setenv("NO_COLOR", "1")
    plain = render_text(report, 60).splitlines()
    assert max(map(len, plain)) <= 60 and "\x1b" not in "".join(plain)
    assert "\x1b" not in render_text(report) and max(map(len, render_text(report).splitlines())) > 60


def test_a_short_text_has_five_lines(report: Report) -> None:
    lines = render_short(report, None, Path("out/tiny"), ["bundle: out/tiny", "page: p"]).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["size", "latency p50", "top1", "bundle", "FAIL"]
    assert lines[0] == "size: 86.7 MiB -> 22.2 MiB, 3.90x"


@pytest.mark.parametrize(
    ("verdict", "gates", "said"),
    [
        ("pass", GATES[:1], "PASS: tiny on onnxruntime-cpu: its gate holds"),
        ("pass", GATES[:1] * 2, "PASS: tiny on onnxruntime-cpu: all 2 gates hold"),
        (
            "pass",
            (GATES[0], LENIENT),
            "PASS: tiny on onnxruntime-cpu: 1 of 2 gates holds; undecided, counted as a pass: top1 min 0.9",
        ),
        (
            "undecided",
            (UNCLEAR,),
            "UNDECIDED: tiny on onnxruntime-cpu: top1 0.95, at least 0.9 wanted (undecided)",
        ),
        ("fail", (), "FAIL: tiny on onnxruntime-cpu: its outputs cannot be judged"),
        ("unjudged", (), "UNJUDGED: tiny on onnxruntime-cpu: measured, held to no gates"),
    ],
)
def test_the_verdict_line(report: Report, verdict: str, gates: tuple[GateResult, ...], said: str) -> None:
    assert verdict_line(replace(report, verdict=verdict, gates=gates)) == said  # type: ignore[arg-type]


@pytest.mark.parametrize(("verdict", "code"), [("pass", 0), ("unjudged", 0), ("fail", 3), ("undecided", 3)])
def test_the_exit_code(report: Report, verdict: str, code: int) -> None:
    assert replace(report, verdict=verdict).exit_code == code  # type: ignore[arg-type]


def test_flat_numbers_have_both_sides_and_the_ratios(report: Report) -> None:
    flat = report.metrics
    assert flat["holds"] == float(report.verdict == "pass") and all(map(math.isfinite, flat.values()))
    assert flat["times/latency_p50"] == report.ratios["latency_p50"]
    assert {flat[name] for name in report.candidate.metrics} == set(report.candidate.metrics.values())
    assert all(flat[f"baseline/{name}"] == value for name, value in report.baseline.metrics.items())


@pytest.mark.filterwarnings("ignore")  # its own, of the libraries that it stands on
def test_mlflow_logs_them(report: Report, tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/runs.db")
    with mlflow.start_run() as run:
        mlflow.log_metrics(report.metrics)
    assert mlflow.get_run(run.info.run_id).data.metrics == report.metrics


def test_json_is_valid_and_has_null_for_what_has_no_value(report: Report) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    data = json.loads(render_json(report), parse_constant=refuse)
    assert data == to_dict(report)
    assert data["candidate"]["intervals"]["kl"] == [None, None]
    assert data["gates"][3]["value"] is None
    needed = {"format_version", "verdict", "bundle", "backend", "baseline", "candidate", "ratios", "gates", "layers"}
    assert needed | {"backends", "advice", "environment", "confidence"} <= data.keys()


def test_junit_has_a_case_for_each_gate(report: Report) -> None:
    suite = ElementTree.fromstring(render_junit(report))
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("4", "2", "1")
    cases = {case.get("name"): case for case in suite}
    failure = cases["latency_p50 min_speedup 3"].find("failure")
    assert failure is not None
    assert failure.get("message") == "2x <fast>"
    assert cases["kl max 0.1"].find("skipped") is not None
    assert cases["top1 max_drop 0.01"].find("failure") is None


def test_markdown_keeps_its_tables_whole(report: Report) -> None:
    text = render_markdown(report)
    assert text.startswith("# FAIL: tiny")
    assert "broken \\| outputs" in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in tables} == {5, 4, 8}


class Elements(HTMLParser):
    """The elements and texts of a fragment; fails on one that is not closed in its turn."""

    def __init__(self, fragment: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[tuple[str, ...], str]] = []
        self.feed(fragment)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attributes: object) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.found.append((tuple(self.open), data))

    def texts(self, inside: str, outside: str = "") -> list[str]:
        return [text for path, text in self.found if inside in path and outside not in path]


def test_in_a_notebook_what_gates_are_about_is_open_and_the_rest_folded(report: Report) -> None:
    drawn = Elements(report._repr_html_())
    assert drawn.texts("p")[:2] == [
        "FAIL",
        f" tiny on onnxruntime-cpu: {MISSED}",
    ]
    assert "The candidate is SLOWER." in drawn.texts("p")
    cells = drawn.texts("td", outside="details")
    assert {"size", "top1", "kl", "latency p50", "3.90x"} < set(cells)
    assert "latency p95" not in cells
    assert "latency p95" in drawn.texts("details")
    assert drawn.texts("summary") == ["5 more measurements"]
    for gate in GATES:
        assert f"{gate.metric} {gate.rule}" in cells
        assert gate.why in cells, "a text is lost or not escaped"
    assert [text for text in cells if text in ("holds", "fail", "undecided")] == ["holds", "fail", "undecided", "fail"]


def test_in_a_notebook_a_report_without_gates_shows_its_first_metric(report: Report) -> None:
    drawn = Elements(replace(report, verdict="unjudged", gates=(), advice=())._repr_html_())
    assert drawn.texts("b") == ["UNJUDGED"]
    cells = drawn.texts("td", outside="details")
    assert "top1" in cells
    assert "kl" not in cells


def test_reports_are_written_whole_and_removed(report: Report, tmp_path: Path) -> None:
    write_report(report, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json", "report.md", "report.xml"]
    assert json.loads((tmp_path / "report.json").read_text())["verdict"] == "fail"
    (tmp_path / "report.html").write_text("of an earlier judgement")
    assert "report.earlier.html" in prepare_folder(tmp_path)[0]
    assert [path.name for path in tmp_path.iterdir()] == ["report.earlier.html"], "the page is kept"
    assert prepare_folder(tmp_path) == []


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_folder_that_cannot_be_written_is_told_before_anything_runs(number: int, tmp_path: Path) -> None:
    refuse = failing(Faults((tmp_path,), at=None, number=number, lasting=True))
    said = f"cannot be written there: {os.strerror(number)}; name a folder .* --report DIR"
    with refuse, pytest.raises(UsageError, match=said):
        prepare_folder(tmp_path)


def test_a_folder_that_cannot_be_written_is_named(report: Report, tmp_path: Path) -> None:
    with pytest.raises(RuntimeFailure, match=r"cannot write .*missing.report\.json"):
        write_report(report, tmp_path / "missing")


def test_an_answers_stages_have_their_shares_and_other_percentiles_a_row(report: Report) -> None:
    stages = {"decode": 1.0, "encode": 0.001, "call": 3.0, "answer": 0.0}
    further = {"latency_percentile": 5.0, "end_to_end_p50": 4.0, "cost_per_million": 0.25, "energy": 12.0}
    more = replace(
        report,
        candidate=replace(report.candidate, further=further),
        benchmark={"latency_percentile": 99.9, "stages_p50_ms": {"baseline": stages, "candidate": stages}},
    )
    text = render_text(more)
    assert "where the time of an answer goes" in text and "3 ms (75%)" in text and "encode" not in text
    names = {row.name: row.after for row in table_rows(more)}
    assert names["latency p99.9"] == "5 ms" and names["end to end p50"] == "4 ms"
    assert names["cost of a million"] == "0.25" and names["energy of a thousand"] == "12 J"
    usual = replace(more, benchmark={"latency_percentile": 95})
    assert "latency percentile" not in render_markdown(usual) and len(table_rows(usual)) == len(table_rows(more)) - 1


@pytest.mark.parametrize(
    ("value", "ends", "text"),
    [
        (0.9937, (0.9854, 0.998), "0.9937 [0.9854, 0.9980]"),
        (5.5e-05, (4e-05, 7.1e-05), "5.5e-05 [4.0e-05, 7.1e-05]"),
        (0.0, (0.0, 0.0), "0.0000 [0.0000, 0.0000]"),
        (0.01, (-math.inf, math.inf), "0.0100"),
        (0.01, (0.0, math.inf), "0.0100"),
        (0.01, None, "0.0100"),
    ],
)
def test_a_figure_shows_what_is_known_of_it(value: float, ends: tuple[float, float] | None, text: str) -> None:
    assert figure_text(value, ends) == text
