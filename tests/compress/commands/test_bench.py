"""`compress bench`: rows whatever becomes of them, the same command going on, winners by the rule that is stated."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from makers import image_recipe, text_folder, write_texts
from sample_projects import write_image_files
from shortcuts import quick_run, without_processes

from compress.commands import bench as benching
from compress.commands.bench import Reach, bench_model, find_usual_length, write_page
from compress.commands.bench_rows import BenchRow, BenchTable, list_cells, render_table, to_dict
from compress.commands.bench_work import WORK
from compress.commands.new import NewAnswers, make_draft
from compress.errors import OutputError
from compress.recipe.load import load_recipe
from compress.search.workers import InThisProcess, TrialAnswer, TrialOrder
from runtime.backends import BACKENDS
from runtime.judge.findings import Side
from runtime.report.report import Report
from runtime.report.report import to_dict as report_to_dict

__all__ = ["quick_run"]
Spoil = Callable[[TrialOrder], TrialAnswer | None]
PASS = TrialAnswer("done")


def name_format(order: TrialOrder) -> str:
    return load_recipe(order.recipe).name.partition("-")[2]


def is_searched(order: TrialOrder) -> bool:
    return any(getattr(pass_, "placement", "") == "fastest" for pass_ in load_recipe(order.recipe).passes)


def pass_on(order: TrialOrder) -> TrialAnswer:
    return PASS


class Builders(InThisProcess):
    """Works in this process unless `spoil` gives another answer to a build; `built`: the rows that were asked for."""

    work = WORK

    def __init__(self) -> None:
        self.spoil: Spoil = pass_on
        self.built: list[str] = []

    def __enter__(self) -> Builders:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def build(self, orders: Sequence[TrialOrder], deadline: float | None) -> list[TrialAnswer | None]:
        (order,) = orders
        if self.spoil is pass_on and is_searched(order):  # whether a tiny model's int8 gains enough is chance
            return [TrialAnswer("failed", "not searched")]
        self.built.append(name_format(order))
        answer = self.spoil(order)
        return super().build(orders, None) if answer is PASS else [answer]

    def judge(self, order: TrialOrder, deadline: float | None) -> TrialAnswer | None:
        return TrialAnswer("done", "casts") if order.do == "explain" else super().judge(order, None)


@pytest.fixture(autouse=True)
def builders(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Builders]:
    """One backend or those asked for, three formats, short rounds, no processes."""
    builders = Builders()
    backends = {name: BACKENDS[name] for name in getattr(request, "param", ("onnxruntime-cpu",))}
    monkeypatch.setattr(benching, "BACKENDS", backends)
    monkeypatch.setattr(benching, "FORMATS", {"int8-static": "INT8", "float16": "FP16", "bfloat16": "BF16"})
    monkeypatch.setattr(benching, "start_workers", lambda *_: builders)
    monkeypatch.setattr("compress.commands.bench_work.LATENCY_S", 0.1)
    with without_processes():
        yield builders


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    image_recipe(folder)
    (folder / "onnx").mkdir()
    write_image_files(folder / "onnx")
    return folder


@pytest.fixture
def said(place: Path, monkeypatch: pytest.MonkeyPatch) -> NewAnswers:
    monkeypatch.chdir(place)
    return NewAnswers("net.py:make", "net.safetensors", None, "{kind: image, channels: L}", "test.npz")


def run(said: NewAnswers, out: Path, budget_s: float = 100.0) -> BenchTable:
    return bench_model(said, out, budget_s, out.parent / "cache", lambda text: None)


def states(table: BenchTable) -> dict[str, str]:
    return {row.format: row.state for row in table.rows}


DONE = {"float32": "measured", "int8-static": "measured", "float16": "not built", "bfloat16": "not possible"}


@pytest.mark.slow
@pytest.mark.usefixtures("quick_run")
def test_a_table_its_files_and_the_same_command_again(said: NewAnswers, tmp_path: Path, builders: Builders) -> None:
    out = tmp_path / "out"
    table = run(said, out)
    assert states(table) == DONE
    assert builders.built == ["float32", "int8-static"]
    plain, int8, slow, refused = table.rows
    assert plain.quality["top1"] == plain.quality["agreement"] == 1.0 and plain.keeps
    assert int8.size_bytes is not None and plain.size_bytes is not None and int8.size_bytes < plain.size_bytes
    assert int8.latency_ms and int8.throughput_per_s and int8.peak_memory_bytes is not None
    assert "slower than float32" in slow.why and "no bfloat16 CPU kernels" in refused.why
    assert table.bounds == ("top1 max_drop 0.17",), "what so few samples can decide"
    assert json.loads((out / "bench.json").read_text()) == to_dict(table)
    winner = table.find(table.fastest)
    assert winner is not None
    assert tuple(pass_.kind for pass_ in load_recipe(out / "recipe.yaml").passes) == winner.passes
    assert "not measured" in render_table(table) and "onnxruntime-cpu" in write_page(table, out).read_text()
    placed = out / "study/bundles/0009/by a run that was killed before the record"
    placed.mkdir(parents=True)
    again = run(said, out)
    assert len(builders.built) == 2 and again.rows == table.rows and not placed.exists()
    other = replace(said, preprocess="{kind: image, channels: L, scale: 0.01}")
    assert run(other, out).question != table.question and len(builders.built) == 4


@pytest.mark.slow
@pytest.mark.usefixtures("quick_run")
def test_what_fails_or_is_late_is_a_row_and_late_ones_are_tried_again(
    said: NewAnswers, tmp_path: Path, builders: Builders
) -> None:
    out = tmp_path / "out"

    def spoil(order: TrialOrder) -> TrialAnswer | None:
        return (
            None
            if load_recipe(order.recipe).name.endswith("int8-static")
            else TrialAnswer("failed", "the disk is full\nfurther lines")
        )

    builders.spoil = spoil
    table = run(said, out)
    assert states(table) == {**DONE, "float32": "failed", "int8-static": "late"}
    assert table.rows[0].why == "the disk is full" and table.fastest == "" and table.recipe == ""
    assert any("the same command goes on" in note for note in table.notes)
    builders.spoil = pass_on
    assert states(run(said, out)) == {**DONE, "float32": "failed"}
    assert states(run(said, tmp_path / "none", budget_s=1e-9)) == {**DONE, "float32": "late", "int8-static": "late"}


def test_an_interrupted_row_is_not_counted_as_a_crash(said: NewAnswers, tmp_path: Path, builders: Builders) -> None:
    def interrupt(order: TrialOrder) -> TrialAnswer | None:
        raise KeyboardInterrupt

    builders.spoil = interrupt
    with pytest.raises(KeyboardInterrupt):
        run(said, tmp_path / "out")
    assert json.loads((tmp_path / "out/bench.json").read_text())["rows"] == []


def fake(latency_ms: float, speedup: float) -> TrialAnswer:
    """The answer of a process that built and measured a row."""
    report = Report(
        "unjudged",
        "net",
        "onnxruntime-cpu",
        Side(),
        Side(latency_ms={"p50": latency_ms}, size_bytes=10),
        ratios={"latency_p50": speedup},
        ratio_intervals={"latency_p50": (speedup, float("inf"))},
    )
    stages = {"plan": 1.0, "build": 2.0, "quality": 3.0, "timing": 4.0}
    return TrialAnswer("done", report=report_to_dict(report), stages=stages)


@pytest.mark.parametrize(("searched_ms", "placement"), [(2.0, "searched"), (9.0, "usual")])
def test_int8_that_gains_little_is_built_once_more_where_its_layers_gain(
    said: NewAnswers, tmp_path: Path, builders: Builders, searched_ms: float, placement: str
) -> None:
    def spoil(order: TrialOrder) -> TrialAnswer:
        (Path(order.out)).mkdir()
        if name_format(order) == "float32":
            return fake(4.0, 1.0)
        if is_searched(order):
            assert order.judging_s == 7.0
            return fake(searched_ms, 4.0 / searched_ms)
        return fake(5.0, 0.8)

    builders.spoil = spoil
    row = run(said, tmp_path / "out").rows[1]
    assert (row.placement, row.latency_ms) == (placement, min(searched_ms, 5.0))
    assert row.why == ("" if placement == "searched" else "casts")
    assert ("placement: auto" in (tmp_path / "out/recipe.yaml").read_text()) is False
    assert run(said, tmp_path / "out").rows[1] == row and len(builders.built) == 3


@pytest.mark.parametrize("builders", [("onnxruntime-cpu", "openvino")], indirect=True)
def test_the_fastest_of_all_backends_are_timed_together_and_their_times_stay(
    said: NewAnswers, tmp_path: Path, builders: Builders, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(order: TrialOrder) -> TrialAnswer:
        Path(order.out).mkdir()
        return fake(4.0, 1.0) if name_format(order) == "float32" else fake(2.0, 2.0)

    builders.spoil = spoil
    times = [3.0, 1.0, 5.0, 6.0]
    monkeypatch.setattr(benching, "time_finalists", lambda bundles: times[: len(bundles)])
    table = run(said, tmp_path / "out")
    assert table.fastest == "openvino-int8-static" and table.smallest == "onnxruntime-cpu-float32"
    assert [(row.latency_ms, row.final) for row in table.rows if row.state == "measured"] == [
        (4.0, False), (4.0, False), (3.0, True), (1.0, True), (5.0, True), (6.0, True)
    ]  # fmt: skip
    assert len(list((tmp_path / "out/study/bundles").iterdir())) == 2
    times[:] = [1.5, 5.0]
    assert run(said, tmp_path / "out").find("onnxruntime-cpu-int8-static") == table.rows[2]


def test_what_gains_nothing_is_known_before_it_is_built() -> None:
    little = Reach(1, 58, 0.001, 0.0001, "few products").explain_little()
    assert "nearly the float32 model: it reaches 1 of 58 layers, 0.1% of" in little and "few products" in little
    assert Reach(9, 9, 1.0, 1.0).explain_little() == ""


def test_calls_are_timed_at_the_usual_length_of_the_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text_folder(tmp_path / "classifier", "classifier")
    write_texts(tmp_path / "texts.jsonl", 50)
    length = find_usual_length(make_draft(NewAnswers("classifier", data="texts.jsonl"), Path()))
    assert length is not None and length > 2


@pytest.mark.slow
def test_without_data_times_alone_are_known(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    table = run(NewAnswers("onnx/model.onnx"), tmp_path / "out")
    assert table.synthetic and states(table) == DONE
    int8 = table.rows[1]
    assert int8.latency_ms and int8.quality == {} and int8.keeps is None
    assert any("give --data" in note for note in table.notes)
    recipe = load_recipe(tmp_path / "out/recipe.yaml")
    assert recipe.data.evaluation is None and recipe.data.calibration is None


def test_a_folder_of_somebody_else_is_left_alone(said: NewAnswers, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match=r"holds notes.txt, which is not of a bench"):
        run(said, tmp_path)


def row(format_: str, **known: Any) -> BenchRow:
    usual: dict[str, Any] = {"size_bytes": 100, "latency_ms": 10.0, "speedup": 1.0, "keeps": True}
    return BenchRow("onnxruntime-cpu", format_, "measured", **{**usual, **known})


def make_table(*rows: BenchRow) -> BenchTable:
    table = BenchTable("m", "generic", "q", False, ("sqnr_db min 25",), "latency_p50", "cpu", 1, rows)
    return table.with_winners()


def test_the_winner_is_the_fastest_that_keeps_the_bounds_and_the_smallest() -> None:
    lossy = row("int8-static", latency_ms=2.0, size_bytes=20, keeps=False)
    broken = row("float16", latency_ms=1.0, size_bytes=10, keeps=None, broken="outputs are NaN")
    table = make_table(
        row("float32"), lossy, broken, row("w8", latency_ms=8.0, size_bytes=60), row("w4", size_bytes=50)
    )
    assert (table.fastest, table.smallest) == ("onnxruntime-cpu-w8", "onnxruntime-cpu-w4")
    text = render_table(table)
    assert "keep sqnr_db min 25" in text and "loses too much" in text and "outputs are NaN" in text
    assert "nothing that was measured is faster than float32" in render_table(make_table(row("float32"), lossy))


def test_rows_timed_together_at_the_end_decide_among_themselves() -> None:
    alone, first = row("w8", latency_ms=1.0), row("w4", latency_ms=3.0, final=True)
    assert make_table(row("float32", latency_ms=4.0, final=True), first, alone).fastest == first.name


def test_slower_rows_say_so() -> None:
    slow = row("float16", speedup=0.5, speedup_interval=(0.4, 0.6), why="96 casts take 3 ms")
    assert list_cells(slow)[-1] == "slower than float32: 96 casts take 3 ms"
    assert list_cells(slow)[5] == "0.50x [0.40, 0.60]"
    assert list_cells(row("w8", speedup=0.9))[-1] == "slower than float32"
    assert list_cells(row("float32", speedup=0.9))[-1] == ""
