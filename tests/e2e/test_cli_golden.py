"""Every command on a real bundle, by its exit code and the words that matter."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from makers import changed, write_recipe
from places import ROOT
from typer.testing import CliRunner, Result

from compress.cli import app
from compress.planning.make_plan import make_plan
from compress.recipe.load import load_recipe
from runtime.__main__ import main

Net = tuple[Path, dict[str, Any]]
QUICKSTART = str(ROOT / "recipes/quickstart.yaml")


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def test_verify(quickstart: tuple[Path, str]) -> None:
    done = run("verify", quickstart[0])
    assert done.exit_code == 0 and "all 9 files are as the manifest says" in done.stdout


def test_inspect(quickstart: tuple[Path, str]) -> None:
    done = run("inspect", quickstart[0])
    assert done.exit_code == 0 and "quickstart-digits" in done.stdout and "7 int8" in done.stdout


def test_compare_with_itself(quickstart: tuple[Path, str]) -> None:
    done = run("compare", quickstart[0], quickstart[0])
    assert done.exit_code == 2 and "one bundle" in done.stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"evaluation": {"source": "npz:train.npz"}}}, "--baseline: .* different evaluation sets"),
        ({"validate": {"metrics": ["agreement"]}}, "has top1, which this judgement leaves out"),
    ],
)
def test_an_earlier_report_that_says_nothing_is_refused_before_the_work(
    net: Net, bundle: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    recipe = write_recipe(net[0] / f"{tmp_path.name}.yaml", changed(net[1], **changes))
    done = run("apply", recipe, "--out", tmp_path / "out", "--cache", tmp_path / "cache", "--baseline", bundle)
    assert done.exit_code == 2 and re.search(message, done.stderr), done.stderr
    assert not (tmp_path / "out").exists() and not [*(tmp_path / "cache").glob("*/graph.onnx")]


def test_the_runtime_judges_it_again(
    quickstart: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = tmp_path / "q"
    shutil.copytree(quickstart[0], bundle)
    for name in ("report.json", "report.md", "report.xml", "compress.log"):
        (bundle / name).unlink()
    assert main(["validate", str(bundle), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "pass" and (bundle / "report.json").is_file()


def test_check(net: Net, tmp_path: Path) -> None:
    done = run("check", write_recipe(tmp_path / "r.yaml", net[1]))
    assert done.exit_code == 0 and "bias_correction: true" in done.stdout


def test_plan_names_every_layer_and_reads_no_weight(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("weights were read")

    for name in ("compress.models.weights.read_state", "safetensors.torch.load_file", "torch.load"):
        monkeypatch.setattr(name, refuse)
    done = run("plan", QUICKSTART, "--json", "--cache", tmp_path, "--set", "passes=[{kind: int8, ignore: [conv1]}]")
    assert done.exit_code == 0, done.stderr
    plan = json.loads(done.stdout)
    assert [row["name"] for row in plan["steps"]][:2] == ["export to float ONNX", "baseline outputs"]
    assert not any(row["cached"] for row in plan["steps"])
    layers = {row["layer"]: row for row in plan["steps"][-1]["layers"]}
    assert len(layers) == 7 and layers["linear"]["action"] == "int8"
    assert (layers["conv1"]["action"], layers["conv1"]["reason"]) == ("kept", "ignore: conv1")
    assert not list(tmp_path.iterdir())


def test_plan_shows_what_is_done_already(quickstart: tuple[Path, str]) -> None:
    cache = quickstart[0].parents[1] / "cache"
    shown = run("plan", QUICKSTART, "--cache", cache)
    n_rows = 2 + len(load_recipe(QUICKSTART).passes)
    assert shown.exit_code == 0 and shown.stdout.count("cached") == n_rows
    other = json.loads(
        run(
            "plan", QUICKSTART, "--cache", cache, "--json", "--set", "passes=[{kind: int8, calibration: minmax}]"
        ).stdout
    )
    assert [row["cached"] for row in other["steps"]] == [True, True, False]
    html = make_plan(load_recipe(QUICKSTART), cache)._repr_html_()
    assert (html.count("<tr>"), html.count("cached")) == (
        n_rows + 3,
        n_rows,
    )  # header, start and judging beside the work


def test_apply_as_json_prints_one_document(net: Net, cache: Path, tmp_path: Path) -> None:
    recipe = write_recipe(net[0] / "json.yaml", net[1])
    done = run("apply", recipe, "--out", tmp_path / "b", "--cache", cache, "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["verdict"] == "pass" and "bundle:" not in done.stdout


def gated(net: Net, tmp_path: Path, cache: Path, gate: dict[str, Any]) -> tuple[Result, dict[str, Any]]:
    recipe = changed(
        net[1], validate={"gates": [gate]}, passes=[{"kind": "rtn", "group_size": 32, "targets": ["Linear"]}]
    )
    done = run("apply", write_recipe(net[0] / "gated.yaml", recipe), "--out", tmp_path / "b", "--cache", cache)
    report: dict[str, Any] = json.loads((tmp_path / "b/report.json").read_text())
    return done, report


def test_a_gate_that_fails_ends_with_3_and_the_bundle_is_there(net: Net, cache: Path, tmp_path: Path) -> None:
    done, report = gated(net, tmp_path, cache, {"metric": "size_ratio", "min": 100})
    assert done.exit_code == 3 and "FAIL" in done.stdout
    *before, verdict = done.stdout.splitlines()
    assert f"bundle: {tmp_path / 'b'}" in before
    assert verdict.startswith("FAIL: ") and verdict.endswith(f"see why: compress blame {tmp_path / 'b'}")
    assert report["verdict"] == "fail" and run("verify", tmp_path / "b").exit_code == 0


@pytest.mark.parametrize(("undecided", "code"), [("fail", 3), ("pass", 0)])
def test_too_few_samples_decide_nothing(net: Net, cache: Path, tmp_path: Path, undecided: str, code: int) -> None:
    done, report = gated(net, tmp_path, cache, {"metric": "top1", "max_drop": 0.001, "undecided": undecided})
    assert done.exit_code == code
    assert report["gates"][0]["verdict"] == "undecided"
    assert report["verdict"] == ("undecided" if code else "pass")
