"""The claims scripts: how they refuse, how a claim is decided, and what a failing peer does. Nothing is measured."""

from __future__ import annotations

import importlib
import json
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from child_processes import run_python
from places import BENCHMARKS, ROOT

from runtime.clock.turns import Turns

ON_BENCH = (
    *("int8_cnn", "int8_encoder", "interop_optimum", "interop_transformers", "weight_only_quality"),
    *("tensorrt_rtx_build", "engine_speed", "foreign_onnx", "slow_cases", "float_formats"),
    *("interop_gguf", "interop_vllm", "interop_decoders", "blame", "goal"),
)
"""Those that measure on real models."""
SCRIPTS = (
    *ON_BENCH,
    "gptq_speed",
    "device_speed",
    "compression_memory",
    "one_billion",
    "decode",
    "kill_resume",
    "triton_server",
    "gate_confidence",
    "comparison_noise",
    "forecasts",
)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a module of benchmarks/ by its name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.fixture
def common(load: Any) -> Any:
    return load("common")


@pytest.fixture
def measuring(load: Any) -> Any:
    return load("measuring")


Call = Callable[..., tuple[object, str, str]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Run a script of benchmarks/ with these arguments; returns its exit code, and what it writes to each stream."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delenv("COMPRESS_BENCH", raising=False)

    def run(script: str, *arguments: str) -> tuple[object, str, str]:
        path = str(BENCHMARKS / f"{script}.py")
        monkeypatch.setattr(sys, "argv", [path, *arguments])
        with pytest.raises(SystemExit) as ended:
            run_path(path, run_name="__main__")
        return ended.value.code, *capsys.readouterr()

    return run


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_says_what_is_claimed(script: str, call: Call) -> None:
    code, out, _ = call(script, "--help")
    assert code == 0 and "recipes/" in out
    assert all(option in out for option in ("--bench", "--ours", "--out", "--keep"))


def test_a_script_starts_by_its_file(tmp_path: Path) -> None:
    done = run_python(BENCHMARKS / "int8_cnn.py", "--help", cwd=tmp_path)
    assert done.returncode == 0 and "--bench" in done.stdout


@pytest.mark.parametrize("script", ON_BENCH)
def test_a_bench_folder_that_is_not_there_or_lacks_files_is_refused(script: str, tmp_path: Path, call: Call) -> None:
    code, out, err = call(script)
    assert (code, out) == (2, "") and "--bench DIR or set COMPRESS_BENCH" in err
    needs = importlib.import_module(script).NEEDS
    wanted = f"error: {tmp_path}: missing: {', '.join(needs)}"
    assert call(script, "--bench", str(tmp_path)) == (2, "", f"{wanted}\n")


@pytest.mark.parametrize(
    ("rule", "value", "holds"),
    [
        ("at_least", 2.0, True),
        ("at_least", math.nextafter(2.0, 0), False),
        ("at_most", 2.0, True),
        ("at_most", math.nextafter(2.0, 3), False),
        ("at_least", None, False),
        ("at_most", None, False),
        ("at_least", math.nan, False),
        ("at_most", math.nan, False),
    ],
)
def test_a_claim_holds_up_to_its_bar_and_never_unmeasured(
    common: Any, rule: str, value: float | None, holds: bool
) -> None:
    assert getattr(common, rule)("x", value, 2.0).holds is holds


def run(common: Any, tmp_path: Path, measure: Any, *arguments: str) -> int:
    code: int = common.run_script("about", (), measure, ["--bench", str(tmp_path), *arguments])
    return code


@pytest.mark.parametrize(("values", "code"), [((1.0, 1.0), 0), ((1.0, 0.9), 1), ((), 1)])
def test_exit_code_and_the_one_line_on_stdout(
    common: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], values: tuple[float, ...], code: int
) -> None:
    def measure(asked: Any) -> Any:
        print("a library talks")
        assert asked.bench == tmp_path.resolve()
        return [common.at_least(f"c{i}", value, 1.0) for i, value in enumerate(values)], [{"model": "m"}]

    assert run(common, tmp_path, measure) == code
    said = capsys.readouterr()
    (line,) = said.out.splitlines()
    wanted = [{"name": f"c{i}", "value": v, "bar": 1.0, "holds": v >= 1} for i, v in enumerate(values)]
    assert json.loads(line) == {"claims": wanted, "rows": [{"model": "m"}]}
    assert "a library talks" in said.err
    assert said.err.count("FAILS") == sum(value < 1 for value in values)


@pytest.mark.parametrize(("error", "code"), [("RunError", 1), ("CallError", 2)])
def test_a_run_that_cannot_be_finished_claims_nothing(
    common: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], error: str, code: int
) -> None:
    def measure(asked: Any) -> Any:
        raise getattr(common, error)("the reason")

    assert run(common, tmp_path, measure) == code
    assert capsys.readouterr() == ("", "error: the reason\n")


CNN = (
    "evaluated_images",
    "top1_drop",
    "agreement",
    "size_ratio",
    "latency_p50_ratio_batch1",
    "latency_p50_ratio_batch64",
)
ENCODER = (
    "evaluated_pairs",
    "spearman_drop",
    "cosine",
    "size_mb",
    "latency_p50_ratio_onnxruntime",
    "latency_p50_ratio_openvino_fixed_shape",
)


def cnn_claims(module: Any, **change: float) -> list[Any]:
    """Every value on its bar, or changed."""
    at = {"n": 5000, "top1": 0.873, "agreement": 0.993, "size": 1000, "batch1": 2.4, "batch64": 2.5} | change
    report = {
        "n_samples": at["n"],
        "baseline": {"metrics": {"top1": 0.875}, "size_bytes": 3200},
        "candidate": {"metrics": {"top1": at["top1"], "agreement": at["agreement"]}, "size_bytes": at["size"]},
    }
    speeds = {"latency_p50_ratio_batch1": at["batch1"], "latency_p50_ratio_batch64": at["batch64"]}
    other = {"model": "ours", "backend": "openvino"} | dict.fromkeys(speeds, 9.0)
    return list(module.claims(report, [other, {"model": "ours", "backend": "onnxruntime-cpu"} | speeds]))


@pytest.mark.parametrize(
    ("change", "fails"),
    [
        ({}, None),
        ({"n": 4999}, "evaluated_images"),
        ({"top1": 0.8729}, "top1_drop"),
        ({"agreement": 0.9929}, "agreement"),
        ({"size": 1001}, "size_ratio"),
        ({"batch1": 2.39}, "latency_p50_ratio_batch1"),
        ({"batch64": 2.49}, "latency_p50_ratio_batch64"),
    ],
)
def test_claims_of_the_cnn(load: Any, change: dict[str, float], fails: str | None) -> None:
    claims = cnn_claims(load("int8_cnn"), **change)
    assert tuple(claim.name for claim in claims) == CNN
    assert [claim.name for claim in claims if not claim.holds] == [name for name in (fails,) if name]


def encoder_claims(module: Any, **change: float) -> list[Any]:
    bars = {"n": 1500, "spearman": 0.873, "cosine": 0.996, "size": 23_500_000, "onnxruntime": 2.2, "openvino": 3.3}
    at = bars | change
    report = {
        "n_samples": at["n"],
        "baseline": {"metrics": {"spearman": 0.875}, "size_bytes": 90_000_000},
        "candidate": {"metrics": {"spearman": at["spearman"], "cosine": at["cosine"]}, "size_bytes": at["size"]},
    }
    rows = [
        {"model": "ours", "backend": "onnxruntime-cpu", "latency_p50_ratio": at["onnxruntime"]},
        {"model": "ours", "backend": "openvino, fixed shape", "latency_p50_ratio": at["openvino"]},
    ]
    return list(module.claims(report, rows))


@pytest.mark.parametrize(
    ("change", "fails"),
    [
        ({}, None),
        ({"n": 1499}, "evaluated_pairs"),
        ({"spearman": 0.8729}, "spearman_drop"),
        ({"cosine": 0.9959}, "cosine"),
        ({"size": 23_500_001}, "size_mb"),
        ({"onnxruntime": 2.19}, "latency_p50_ratio_onnxruntime"),
        ({"openvino": 3.29}, "latency_p50_ratio_openvino_fixed_shape"),
    ],
)
def test_claims_of_the_encoder(load: Any, change: dict[str, float], fails: str | None) -> None:
    claims = encoder_claims(load("int8_encoder"), **change)
    assert tuple(claim.name for claim in claims) == ENCODER
    assert [claim.name for claim in claims if not claim.holds] == [name for name in (fails,) if name]


def test_a_model_that_is_better_than_float_has_no_drop(common: Any) -> None:
    report = {"baseline": {"metrics": {"top1": 0.5}}, "candidate": {"metrics": {"top1": 0.75}}}
    assert common.drop(report, "top1") == -0.25
    assert common.drop({**report, "candidate": {"metrics": {}}}, "top1") is None


def test_speed_is_the_median_of_each_rounds_ratio_to_the_first(measuring: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []

    def open_(path: Path, threads: int, options: Any) -> Any:
        opened.append((path, threads))
        return SimpleNamespace(close=lambda: None)

    seconds = np.array([[4.0, 4.0, 8.0, 8.0, 8.0], [2.0, 2.0, 4.0, 4.0, 2.0], [8.0, 8.0, 16.0, 8.0, 8.0]])
    monkeypatch.setattr(measuring, "find_backend", lambda name: SimpleNamespace(open=open_))
    monkeypatch.setattr(measuring, "time_in_turns", lambda *_, **more: Turns(seconds[..., None]))
    entries = [measuring.Entry(name, Path(name)) for name in "abc"]
    assert measuring.speedups(entries, [], 3) == [1.0, 2.0, 0.5]
    assert opened == [(Path(name), 1) for name in "abc"]


@pytest.mark.parametrize("pins", sorted((BENCHMARKS / "peers").glob("*.txt")), ids=lambda path: path.stem)
def test_a_peers_environment_names_exact_versions(pins: Path) -> None:
    lines = [line for line in pins.read_text().splitlines() if not line.startswith("#")]
    assert lines
    assert all("==" in line and "+" not in line for line in lines)


def test_forecasts_are_held_against_what_was_measured(load: Any, tmp_path: Path, monkeypatch: Any) -> None:
    forecasts, tree = load("forecasts"), load("process_tree")
    latency = {"metric": "latency_p50", "backend": "onnxruntime-cpu", "float_ms": 2.0, "compressed_ms": 1.0}
    stages = [
        {"name": "start", "seconds": 4.0, "memory_bytes": 2**20},
        {"name": "judging", "seconds": 6.0, "memory_bytes": 0},
    ]
    work = {"seconds": 10.0, "between": [5.0, 20.0], "memory_bytes": 200 * 2**20, "stages": stages}
    for name in ("quickstart", "quickstart-again"):
        (tmp_path / name).mkdir()
        log = "     1.00s  loading data: 1.0 s\n     6.00s  judging: 5.0 s\n"
        (tmp_path / name / "compress.log").write_text(log)
    sides = {"baseline": 2.2, "candidate": 1.5}
    report = {side: {"generation": {}, "latency_ms": {"p50": ms}} for side, ms in sides.items()}
    (tmp_path / "quickstart/report.json").write_text(json.dumps(report))
    run = tree.Run(0, 11.0, [(1.0, 100 * 2**20), (8.0, 300 * 2**20)])
    monkeypatch.setattr(forecasts, "plan_recipe", lambda *arguments: {"latency": latency, "forecast": work})
    monkeypatch.setattr(forecasts, "run_tree", lambda *arguments: run)
    page = tmp_path / "forecasts.md"
    shutil.copy(ROOT / "docs/reference/forecasts.md", page)
    monkeypatch.setattr(forecasts, "PAGE", page)
    call = load("common").Call(bench=Path(), ours=True, out=tmp_path, quick=True)
    claims, rows = forecasts.measure(call, shipped=True)
    assert [claim.holds for claim in claims] == [True, True, False, False, True, False]
    assert list(forecasts.to_markdown(rows))[-1] == ("| `quickstart.yaml` | 2, 2.2 ms | 1, 1.5 ms | 2.00, 1.47 |")
    assert list(forecasts.work_table(rows))[-1] == "| `quickstart.yaml` | 1.67 of 6 s | 1.67 of 6 s | 0.67 of 300 MiB |"
    found = forecasts.compare_stages(stages, tmp_path / "quickstart", run)
    lines = [stage.to_line().split() for stage in found]
    assert lines[0] == ["start", "4.0", "6.0", "s", "1", "0", "MiB"]
    assert lines[1] == ["judging", "6.0", "5.0", "s", "0", "300", "MiB"]
    assert forecasts.explain_misses(rows[0], found) == {"memory off": "memory: judging took 300 MiB, foreseen 0 MiB"}
    (row,) = [line for line in page.read_text().splitlines() if line.startswith("| `quickstart.yaml`")]
    cells = "1.67 of 6 s | 1.67 of 6 s | 0.67 of 300 MiB | 0.91 of 2.2 ms | 0.67 of 1.5 ms"
    assert row.startswith(f"| `quickstart.yaml` | {cells} | ")
    assert "memory: judging took 300 MiB, foreseen 0 MiB; compressed call: 1 ms foreseen" in row
