"""action.yml and .ci/gitlab.yml: what a pull request sees of a model as good as before, a worse one, an unclear one."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml
from ci_jobs import Job, run_action, run_gitlab
from places import BENCHMARKS, ROOT
from sample_projects import write_image_files
from shortcuts import quick_check, quick_judge
from tiny_bundles import load_tiny, make_bundle

import runtime
from runtime.bundle.format import Benchmark, Gate, Judgement
from runtime.judge.findings import Side, ratio_intervals, ratios
from runtime.judge.gates import judge as decide
from runtime.judge.gates import overall
from runtime.judge.samples import EvaluatedOn
from runtime.judge.speed import timing_evidence
from runtime.report.pairing import compare_reports
from runtime.report.report import Report
from runtime.report.stored import StoredReport
from runtime.report.validate import MEDIANS
from runtime.tasks.manifest import write_bundle

PAGE = ROOT / "docs/howto/ci.md"
ONE_PROCESS = Benchmark(2, 4, 1, 3, processes=1)
"""One tells no speed apart, so that no verdict here hangs on how busy this machine is."""
RunJob = Callable[..., Job]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bundles whose labels are what the float model says: `good` says so, too, `worse` does not.

    Of `unclear` the gate asks more than 200 samples can tell.
    """
    folder, tiny = tmp_path_factory.mktemp("bundles"), load_tiny()
    images = np.random.default_rng(0).integers(0, 256, (200, 4, 4, 3), np.uint8)
    for name, seed, drop in (("good", 1, 0.05), ("worse", 2, 0.05), ("unclear", 1, 0.01)):
        root = folder / name
        for model, of in (("model", seed), ("baseline", 1)):
            tiny.image_model(root / model / "model.onnx", seed=of)
        means = images.astype(float).mean(axis=(1, 2)) / 255
        weight = np.random.default_rng(1).normal(size=(3, 5))
        labels = (((means - tiny.IMAGE.mean) / tiny.IMAGE.std) @ weight).argmax(axis=1)
        manifest = tiny.stage(root, "image-classification", tiny.IMAGE, {"image": images, "label": labels})
        gates = (Gate("top1", max_drop=drop), Gate("size_ratio", min=0.5))
        write_bundle(root, replace(manifest, judgement=Judgement(gates, benchmark=ONE_PROCESS)))
    return folder


@pytest.fixture(params=[run_action, run_gitlab], ids=["github", "gitlab"])
def judge(request: pytest.FixtureRequest, tmp_path: Path, bundles: Path) -> RunJob:
    """Judge a bundle beside `good`, in a pull request, on either of the two."""

    def run(name: str, undecided: str = "", **more: Any) -> Job:
        if (bundles / name).is_dir():
            shutil.copytree(bundles / name, tmp_path / "bundles/model")
        given = {"undecided": undecided} if request.param is run_action else {"UNDECIDED": undecided, "API_TOKEN": "s"}
        return request.param(tmp_path, given, base=bundles / "good", **more)

    return run


@pytest.fixture
def judged_here() -> Iterator[None]:
    with quick_judge():
        yield


def list_failures(job: Job) -> list[str]:
    cases = ElementTree.parse(job.results / "report.xml").iter("testcase")
    return [case.get("name", "") for case in cases if case.find("failure") is not None]


@pytest.mark.slow
def test_a_good_change_passes_and_the_comment_says_so(judge: RunJob) -> None:
    job = judge("good")
    assert job.code == 0, job.text
    assert job.comment.startswith("<!-- compress-results -->\n# PASS: tiny on onnxruntime-cpu: all 2 gates hold; ")
    assert "no regression beyond noise since compress-results/base" in job.comment
    assert not list_failures(job) and "::notice::" not in job.text
    assert (job.results / "bundle/manifest.json").is_file() and (job.results / "base/report.json").is_file()
    assert any("pip install" in line and line.endswith("[text,image,audio]") for line in job.asked)


@pytest.mark.slow
def test_a_regression_fails_with_3_and_is_named(judge: RunJob) -> None:
    job = judge("worse")
    assert job.code == 3, job.text
    assert "# FAIL: tiny" in job.comment and "top1 became worse: 1.0000 before, " in job.comment
    assert {"top1 max_drop 0.05", "top1 no worse than compress-results/base"} <= set(list_failures(job))
    report = json.loads((job.results / "report.json").read_text())
    assert {found["metric"] for found in report["since"]["differences"]} >= {"top1", "size", "latency_p50"}


@pytest.mark.slow
@pytest.mark.parametrize(("undecided", "code"), [("", 3), ("pass", 0)])
def test_what_is_undecided_is_said_and_decided_by_the_recipe_or_the_job(
    judge: RunJob, undecided: str, code: int
) -> None:
    job = judge("unclear", undecided)
    assert job.code == code, job.text
    heading = job.comment.splitlines()[1]
    assert "top1 max_drop 0.01" in heading if undecided else heading.startswith("# UNDECIDED: tiny")
    assert list_failures(job) == ([] if undecided else ["top1 max_drop 0.01"])
    if job.asked[0].startswith("python"):  # GitLab has no such lines
        assert (f"::{'warning' if undecided else 'error'}::{heading.removeprefix('# ')}") in job.text


@pytest.mark.slow
def test_what_cannot_be_judged_is_said_in_the_comment(judge: RunJob) -> None:
    job = judge("nothing")
    assert job.code == 1, job.text
    assert "# NOT JUDGED: exit code 1" in job.comment and "bundles/model" in job.comment
    assert not (job.results / "bundle").exists()


@pytest.mark.slow
def test_the_action_writes_the_summary_and_changes_its_earlier_comment(tmp_path: Path, bundles: Path) -> None:
    shutil.copytree(bundles / "good", tmp_path / "bundles/model")
    (tmp_path / "places").mkdir()
    (tmp_path / "places/earlier.txt").write_text("77\n")
    job = run_action(tmp_path, {"largest-mib": "-1", "base": "none"})
    assert job.code == 0, job.text
    assert job.summary.startswith("# PASS") and job.summary in job.comment
    assert "> No bundle in none: held against its gates alone" in job.summary
    assert "> The bundle of 0 MiB is not kept" in job.summary and not (job.results / "bundle").exists()
    assert [line for line in job.asked if "PATCH repos/me/models/issues/comments/77" in line]
    assert not [line for line in job.asked if line.startswith("gh run")]
    assert job.uses["Upload"]["path"] == "compress-results" and "Take up finished work" not in job.uses


@pytest.mark.slow
def test_the_template_fetches_the_target_branch_s_bundle_and_changes_its_earlier_note(
    tmp_path: Path, bundles: Path
) -> None:
    shutil.copytree(bundles / "good", tmp_path / "bundles/model")
    (tmp_path / "places").mkdir()
    notes = [{"id": 4, "body": "Nice!"}, {"id": 5, "body": "<!-- compress-results -->\n# FAIL"}]
    (tmp_path / "places/earlier.txt").write_text(json.dumps(notes))
    job = run_gitlab(tmp_path, {"API_TOKEN": "s"}, base=bundles / "good")
    assert job.code == 0, job.text
    fetched, _, changed = (line for line in job.asked if line.startswith("curl "))
    assert "PRIVATE-TOKEN: s" in fetched and fetched.endswith("/projects/3/jobs/artifacts/release%2F2/download")
    assert "--request PUT " in changed and changed.endswith("/projects/3/merge_requests/12/notes/5")


@pytest.mark.slow
def test_a_comment_that_is_not_allowed_changes_nothing_else(tmp_path: Path, bundles: Path) -> None:
    shutil.copytree(bundles / "good", tmp_path / "bundles/model")
    (tmp_path / "places").mkdir()
    (tmp_path / "places/forbidden").touch()
    job = run_action(tmp_path, {})
    assert (
        job.code == 0 and "::notice::no bundle of main" in job.text and "::notice::no comment was written" in job.text
    )


RECIPE = """
version: 1
name: network
model: {source: "onnx:model.onnx", task: image-classification}
preprocess: {kind: image}
data: {evaluation: {source: "npz:test.npz", samples: 64}}
target: onnxruntime-cpu
passes: [{kind: rtn, bits: 8}]
validate:
  gates: [{metric: size_ratio, min: 2}]
  benchmark: {iterations: 3, warmup: 1, processes: 1}
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("jq") is None, reason="GitHub's machines have jq")
def test_a_recipe_is_built_and_its_work_is_kept_by_its_keys(tmp_path: Path) -> None:
    write_image_files(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    job = run_action(tmp_path, {"recipe": "recipe.yaml", "undecided": "pass"}, pull=None)
    assert job.code == 0, job.text
    assert job.summary.startswith("# PASS: network") and (job.results / "report.html").is_file()
    assert any("pip install" in line and line.endswith("[build]") for line in job.asked)
    assert "compress apply recipe.yaml --out bundles/model --short --set validate.undecided=pass" in job.asked
    assert not any(line.startswith(("gh", "compress-run")) for line in job.asked)
    steps = json.loads((tmp_path / "temporary/plan.json").read_text())["steps"]
    key = hashlib.sha256("".join(f"{step['key']}\n" for step in steps).encode()).hexdigest()[:32]
    assert job.uses["Take up finished work"]["key"] == f"compress-Linux-{key}"
    assert job.uses["Keep finished work"]["key"] == f"compress-Linux-{key}"
    assert job.uses["Keep finished work"]["path"] == str(tmp_path / "temporary/compress-cache")


@pytest.mark.slow
def test_a_wrong_recipe_fails_with_2_and_the_summary_says_why(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("bits:", "bitz:"))
    job = run_action(tmp_path, {"recipe": "recipe.yaml"})
    assert job.code == 2, job.text
    assert "# NOT JUDGED: exit code 2" in job.summary and "recipe.yaml:8:" in job.summary and "'bits'" in job.summary
    assert "Keep finished work" not in job.uses


@pytest.mark.slow
def test_the_keys_change_with_recipe_weights_data_and_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from compress.planning.make_plan import make_plan
    from compress.recipe.load import load_recipe

    write_image_files(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE)

    def key(*overrides: str) -> tuple[str, ...]:
        return tuple(step.key for step in make_plan(load_recipe(tmp_path / "recipe.yaml", overrides), tmp_path).steps)

    with quick_check():
        found = [key(), key("passes.0.group_size=16"), key("data.evaluation.samples=32")]
        assert key() == found[0]
        write_image_files(tmp_path)  # np.savez and the weights are as they were
        assert key() == found[0]
        weights = (tmp_path / "model.onnx").read_bytes()
        (tmp_path / "model.onnx").write_bytes(weights[:-400] + bytes(4) + weights[-396:])
        found.append(key())
        monkeypatch.setattr("compress.store.cache.code_version", lambda: "another")
        found.append(key())
    assert len(set(found)) == len(found)


@pytest.mark.usefixtures("judged_here")
def test_assert_passes_returns_the_report(bundles: Path, tmp_path: Path) -> None:
    report = runtime.assert_passes(bundles / "good", report_folder=tmp_path)
    assert report.verdict == "pass" and (tmp_path / "report.md").is_file()
    assert (
        runtime.assert_passes(bundles / "good", baseline=tmp_path, report_folder=tmp_path / "again").since is not None
    )


@pytest.mark.usefixtures("judged_here")
def test_assert_passes_fails_with_the_verdict_and_the_gates_that_fell_short(bundles: Path, tmp_path: Path) -> None:
    runtime.assert_passes(bundles / "good", report_folder=tmp_path / "good")
    with pytest.raises(AssertionError) as failed:
        runtime.assert_passes(bundles / "worse", baseline=tmp_path / "good", report_folder=tmp_path / "worse")
    verdict, gate, *regressions = str(failed.value).splitlines()
    assert verdict.startswith("FAIL: tiny on onnxruntime-cpu: top1 drop ") and "at most 0.05 wanted" in verdict
    assert gate.startswith("  fail top1 max_drop 0.05: drop ") and "95% interval" in gate
    assert regressions[0].startswith("  top1 became worse: 1.0000 before, ")


@pytest.mark.usefixtures("judged_here")
def test_assert_passes_says_what_is_undecided(bundles: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"UNDECIDED: tiny .* at most 0\.01 wanted"):
        runtime.assert_passes(bundles / "unclear", report_folder=tmp_path)
    with pytest.warns(UserWarning, match=r"undecided top1 max_drop 0\.01: .* would be needed; counted as a pass"):
        assert runtime.assert_passes(bundles / "unclear", undecided="pass", report_folder=tmp_path).verdict == "pass"


@pytest.mark.usefixtures("judged_here")
def test_assert_passes_refuses_a_bundle_that_cannot_fall_short(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="has no gates, so that nothing can fall short"):
        runtime.assert_passes(make_bundle("image", tmp_path / "tiny"))


BUILDS = 50
SPEEDUP = 1.5
RUN_TO_RUN = 0.01
"""Of a speed-up, what all processes of one run share: the standard deviation of its logarithm."""


def judge_times(rng: np.random.Generator, speedup: float, gates: tuple[Gate, ...]) -> StoredReport:
    """Judge simulated times of a busy shared machine, as `validate` judges those that it takes."""
    simulated = importlib.import_module("simulated_times")
    busy = simulated.Machine(0.01, far=0.1, jump=0.3, noise=0.1, spikes=0.1, pace=0.3)
    evidence = {}
    for name in ("latency_p50", "throughput"):
        seconds = busy.times(rng, 9)  # [processes, models, rounds, calls]: as many as `validate` starts for such a gate
        seconds[:, 1] *= simulated.FASTER / speedup * np.exp(RUN_TO_RUN * rng.normal())
        to_unit = {"latency_p50": lambda s: 1000 * s, "throughput": lambda s: 64 / s}[name]
        evidence[name] = timing_evidence(name, 50, seconds, 0.95, to_unit)
    decided = decide(Judgement(gates), evidence)
    report = Report(overall(decided), "model", "onnxruntime-cpu", Side(), Side(), gates=decided)
    timed = {"ratios": ratios(evidence), "ratio_intervals": ratio_intervals(evidence)}
    return StoredReport("model", replace(report, **timed, evaluation=EvaluatedOn("", ("",))))


def count_red(speedup: float, *gates: Gate) -> int:
    """Count the builds that fail, each judged after its base, which is SPEEDUP times as fast as the float model."""
    red = 0
    for build in range(BUILDS):
        rng = np.random.default_rng((build, 9))
        base, head = judge_times(rng, SPEEDUP, gates), judge_times(rng, speedup, gates)
        (found,) = compare_reports([base, head], MEDIANS)
        red += bool(head.report.exit_code or found.find("worse"))
    return red


def test_a_shared_runner_s_noise_makes_no_build_red_and_hides_no_slower_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    blocks = re.findall(r"```yaml\n(validate:.*?)```", PAGE.read_text(), re.DOTALL)
    (shown,) = (gate for gate in yaml.safe_load(blocks[0])["validate"]["gates"] if "min_speedup" in gate)
    gate = Gate(**shown)
    rows = {
        "no change, `undecided: pass`": count_red(SPEEDUP, gate),
        "no change, undecided counts as a failure": count_red(SPEEDUP, replace(gate, undecided="fail")),
        "a tenth slower": count_red(0.9 * SPEEDUP, gate),
        "a fifth slower": count_red(0.8 * SPEEDUP, gate),
    }
    assert rows["no change, `undecided: pass`"] <= 1 and rows["a fifth slower"] >= 45
    for name, red in rows.items():
        assert f"| {name} | {red} |" in PAGE.read_text()
