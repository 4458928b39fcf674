"""The claims scripts: how they refuse, how a claim is decided, and what a failing peer does. Nothing is measured."""

from __future__ import annotations

import importlib
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
from child_processes import run_python
from places import BENCHMARKS

from runtime.nvidia.gpu import gpu_here

GPU = {"name": "a GPU", "capability": "8.9", "driver": "580"}
CLAIM = {"name": "int8 over float32", "value": 1.5, "bar": 1.0, "holds": True}
SCRIPTS = {path.stem: path.read_text() for path in sorted(BENCHMARKS.glob("*.py")) if path.stem != "common"}
MEASURING = [name for name, text in SCRIPTS.items() if "run_script(" in text]
ON_BENCH = [name for name in MEASURING if re.search(r"^NEEDS = \([^)]", SCRIPTS[name], re.MULTILINE)]
"""Those that measure on real models."""


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a module of benchmarks/ by its name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.fixture
def common(load: Any) -> Any:
    return load("common")


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


@pytest.mark.parametrize("script", [name for name in MEASURING if name not in ON_BENCH])
def test_a_script_has_the_options_of_all(script: str, call: Call) -> None:
    code, out, _ = call(script, "--help")
    assert code == 0
    assert all(option in out for option in ("--bench", "--ours", "--out", "--keep"))


def test_a_script_starts_by_its_file(tmp_path: Path) -> None:
    done = run_python(BENCHMARKS / "int8_cnn.py", "--help", cwd=tmp_path)
    assert done.returncode == 0 and "--bench" in done.stdout


@pytest.mark.parametrize("script", ON_BENCH)
def test_a_bench_folder_that_lacks_files_is_refused(script: str, tmp_path: Path, call: Call) -> None:
    code, out, err = call(script, "--bench", str(tmp_path))
    needs = importlib.import_module(script).NEEDS
    assert (code, out, err) == (2, "", f"error: {tmp_path}: missing: {', '.join(needs)}\n")


def test_without_a_bench_folder_the_way_out_is_told(call: Call) -> None:
    code, out, err = call(ON_BENCH[0])
    assert (code, out) == (2, "") and "--bench DIR or set COMPRESS_BENCH" in err


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


@pytest.mark.parametrize("pins", sorted((BENCHMARKS / "peers").glob("*.txt")), ids=lambda path: path.stem)
def test_a_peers_environment_names_exact_versions(pins: Path) -> None:
    lines = [line for line in pins.read_text().splitlines() if not line.startswith("#")]
    assert lines
    assert all("==" in line and "+" not in line for line in lines)


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
