"""The claims scripts of engines: what a build counts as, and what a GPU check says. Nothing is compiled."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from places import BENCHMARKS

from runtime.nvidia.gpu import gpu_here

GPU = {"name": "a GPU", "capability": "8.9", "driver": "580"}
CLAIM = {"name": "int8 over float32", "value": 1.5, "bar": 1.0, "holds": True}


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a module of benchmarks/ by its name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def test_a_build_is_what_the_manifest_records_of_it(load: Any, tmp_path: Path) -> None:
    script = load("tensorrt_rtx_build")
    record = {
        "version": "1.7",
        "compute_capabilities": ["8.0", "8.6"],
        "asked": {"int8": 5},
        "held": 0.8,
        "n_layers": 9,
    }
    artifacts = [
        {"name": "baseline-tensorrt-rtx", "engine": record, "size_bytes": 1},
        {"name": "engine-tensorrt-rtx", "engine": record, "size_bytes": 2},
    ]
    (tmp_path / "manifest.json").write_text(json.dumps({"artifacts": artifacts}))
    row = script.built("net int8", tmp_path)
    assert (row["share"], row["products"], row["engine_bytes"], row["capabilities"]) == (0.8, "5 int8", 2, "8.0 8.6")
    (tmp_path / "manifest.json").write_text(json.dumps({"artifacts": []}))
    assert script.built("net int8", tmp_path)["share"] is None  # which reaches no bar


@pytest.mark.skipif(gpu_here() is not None, reason="there is a GPU: `make gpu-check` runs it all")
def test_without_a_gpu_nothing_is_checked(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "gpu_check.py"), "--out", str(tmp_path / "report")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "no GPU that the driver sees" in done.stderr
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize("code", [2, -11])
def test_tests_that_crash_are_a_failure(load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    result = tmp_path / "tests.xml"
    result.write_text("<testsuite><testcase name='of an earlier run'/></testsuite>")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: subprocess.CompletedProcess(args, code))
    (outcome,) = load("gpu_check").run_tests(result)
    assert outcome.state == "failed" and f"exit code {code}" in outcome.why


@pytest.mark.parametrize(
    ("states", "holds", "passed"),
    [
        (("passed", "skipped"), True, True),
        (("passed", "failed"), True, False),
        (("skipped",), True, False),
        (("passed",), False, False),
    ],
)
def test_a_check_passes_if_something_ran_and_nothing_failed(
    load: Any, states: tuple[str, ...], holds: bool, passed: bool
) -> None:
    script = load("gpu_check")
    check = script.Check(GPU, [], [script.Outcome(f"test {state}", state, "why") for state in states])
    check.claims = [{**CLAIM, "holds": holds}]
    assert check.passed == passed
    text = "\n".join(script.markdown(check))
    assert text.startswith(f"# GPU check: {'passed' if passed else 'FAILED'}")
    assert all(f"| test {state} | {state} | why |" in text for state in states)
    assert f"| int8 over float32 | 1.5 | 1.0 | {'yes' if holds else 'NO'} |" in text


def test_outcomes_are_read_from_pytests_own_report(load: Any) -> None:
    script = load("gpu_check")
    tree = script.ElementTree.fromstring(
        '<s><testcase name="a"/><testcase name="b"><failure message="no&#10;more"/></testcase>'
        '<testcase name="c"><skipped message="no TensorRT"/></testcase></s>'
    )
    found = [script._outcome(case) for case in tree.iter("testcase")]
    assert [(one.test, one.state, one.why) for one in found] == [
        ("a", "passed", ""),
        ("b", "failed", "no"),
        ("c", "skipped", "no TensorRT"),
    ]
