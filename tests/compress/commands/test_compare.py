"""`compress compare`: what recipes and layers differ in, the table, the page, and what is refused."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console
from timed import as_processes
from typer.testing import CliRunner, Result

from compress.cli import app
from compress.commands.bundle_diff import RecipeChange, compare_layers, compare_recipes, measure_layers
from compress.commands.compare import compare_bundles, print_comparison
from compress.pages.page import make_environment
from runtime.bundle.format import Artifact, Judgement, Manifest, read_samples, write_outputs, write_samples
from runtime.bundle.tensors import TensorSpec
from runtime.errors import UsageError
from runtime.judge.evidence import quality_evidence
from runtime.judge.findings import Side, differences, ratio_intervals, ratios, side, tabulate_slices
from runtime.judge.samples import describe_evaluation, keep_samples
from runtime.judge.slices import find_groups
from runtime.judge.speed import size_evidence, timing_evidence
from runtime.report.pairing import compare_reports
from runtime.report.report import Report, write_report
from runtime.report.stored import read_report, read_stored_report
from runtime.tasks.manifest import read_manifest, write_bundle
from runtime.tasks.metrics import METRICS

RECIPE: dict[str, Any] = {
    "name": "net",
    "target": "onnxruntime-cpu",
    "passes": [{"kind": "gptq", "bits": 4, "ignore": ["a", "b"]}, {"kind": "int8", "alpha": 0.5}],
    "validate": {"gates": [{"metric": "top1", "max_drop": 0.01}, {"metric": "size", "max": 9}]},
}
LAYERS = [
    {"layer": "conv", "type": "Conv2d", "action": "int8", "reason": "W8A8", "sqnr_db": 40.0},
    {"layer": "fc", "type": "Linear", "action": "w4", "reason": "W4A16, group 32: costs 1e-3", "output_error": 0.01},
    {"layer": "head", "type": "Linear", "action": "kept", "reason": "ignore: head"},
    {"layer": "", "type": "note", "action": "info", "reason": "a note"},
]


@pytest.fixture
def make_bundle(tmp_path: Path) -> Callable[..., Path]:
    """A judged bundle of a made-up classifier, of which nothing can run; `wrong`: share of samples that it breaks."""

    def make(
        name: str,
        wrong: float = 0.0,
        recipe: Any = RECIPE,
        layers: Any = LAYERS,
        speed: float = 2.0,
        wrong_class: int | None = None,
        sliced: bool = False,
    ) -> Path:
        root, rng = tmp_path / name, np.random.default_rng(0)
        (root / "evaluation").mkdir(parents=True)
        (root / "recipe.yaml").write_text(json.dumps(recipe))
        logits = rng.normal(size=(300, 5))
        labels = logits.argmax(axis=1)
        broken = rng.random(300) < wrong
        if wrong_class is not None:
            broken &= labels == wrong_class
        ours = np.where(broken[:, None], -logits, logits + 0.1 * rng.normal(size=logits.shape))
        judgement = Judgement(slices=("label",) if sliced else ())
        groups = find_groups(judgement, {}, labels, "image-classification")
        seconds = np.array([[speed], [1.0]]) * rng.lognormal(sigma=0.01, size=(2, 60)) / 1000
        baseline = {"logits": logits}
        metrics = [METRICS[metric] for metric in ("top1", "agreement", "kl")]
        evidence = quality_evidence(metrics, {"logits": ours}, baseline, labels, judgement, groups)
        evidence |= {"latency_p50": timing_evidence("latency_p50", 50, as_processes(seconds), 0.95)}
        evidence |= size_evidence(4096, 1024 if not wrong else 512)
        manifest = write_bundle(root, replace(make_manifest(root, name, labels), judgement=judgement))
        evaluation = describe_evaluation(manifest)
        assert evaluation is not None
        report = Report(
            "pass",
            name,
            "onnxruntime-cpu",
            side(evidence, "baseline", None),
            side(evidence, "candidate", None),
            manifest_digest=manifest.digest,
            task=manifest.task,
            n_samples=300,
            evaluation=evaluation,
            per_sample=keep_samples({n: e.columns for n, e in evidence.items() if e.columns}, root),
            ratios=ratios(evidence),
            ratio_intervals=ratio_intervals(evidence),
            differences=differences(evidence),
            layers=tuple(layers),
            slices=tabulate_slices(evidence),
            environment={"cpu": "this", "threads": 1},
        )
        write_report(report, root)
        return root

    return make


def write_graph(file: Path, name: str, width: int) -> None:
    """x [batch, 3] -> fc -> [batch, width]."""
    weight = numpy_helper.from_array(np.zeros((3, width), np.float32), "fc.weight")
    node = helper.make_node("MatMul", ["x", "fc.weight"], ["y"])
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", k]) for n, k in (("x", 3), ("y", width))]
    onnx.save(helper.make_model(helper.make_graph([node], name, values[:1], values[1:], [weight])), file)


def make_manifest(root: Path, name: str, labels: np.ndarray) -> Manifest:
    specs = (TensorSpec("x", "float32", ("batch", 3)),)
    for folder in ("model", "baseline"):
        (root / folder).mkdir()
    write_graph(root / "model/model.onnx", name, 8)
    write_graph(root / "baseline/model.onnx", "float", 8)
    artifacts = [
        Artifact(
            which,
            f"{folder}/model.onnx",
            "onnxruntime-cpu",
            "int8",
            specs,
            specs,
            (root / f"{folder}/model.onnx").stat().st_size,
        )
        for which, folder in (("candidate", "model"), ("baseline", "baseline"))
    ]
    evaluation = write_samples(root, {"x": np.zeros((len(labels), 3), np.float32), "label": labels})
    write_outputs(root, {"logits": np.zeros((len(labels), 5), np.float32)})
    return Manifest(
        name=name,
        task="image-classification",
        target="onnxruntime-cpu",
        preprocess={"kind": "tensor"},
        artifacts=tuple(artifacts),
        evaluation=evaluation,
        judgement=Judgement(),
        created_by="compress 0.1.0",
    )


def run(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def show(paths: list[Path], width: int = 80) -> str:
    text = io.StringIO()
    print_comparison(compare_bundles(paths), Console(file=text, width=width))
    return text.getvalue()


def change(recipe: dict[str, Any], **parts: Any) -> dict[str, Any]:
    return {**json.loads(json.dumps(recipe)), **parts}


def test_the_table_says_what_is_real_and_fits_80_columns(make_bundle: Callable[..., Path]) -> None:
    old, new = make_bundle("old"), make_bundle("new", wrong=0.2, speed=3.0)
    shown = show([old, new])
    assert max(map(len, shown.splitlines()[2:14])) <= 80
    rows = {line.split()[0]: line for line in shown.splitlines() if line.strip()}
    assert rows["top1"].split()[-1] == rows["agreement"].split()[-1] == "worse"
    assert rows["size"].split()[-1] == "better" and "-50.0%" in rows["size"]
    assert re.search(r"2\.\d\dx +3\.\d\dx +1\.\d\dx \[1\.\d\d, 1\.\d\d\] +better", rows["latency_p50"])
    assert "All 4 intervals hold at once at 95 %" in shown


def test_what_nothing_changed_is_called_noise(make_bundle: Callable[..., Path]) -> None:
    shown = show([make_bundle("old"), make_bundle("new")])
    assert "no difference beyond noise, 5 within noise" in " ".join(shown.split())
    assert "recipe" not in shown and "layer" not in shown


def test_each_further_bundle_is_compared_with_the_first(make_bundle: Callable[..., Path]) -> None:
    paths = [make_bundle("old"), make_bundle("b"), make_bundle("c", wrong=0.3)]
    document = json.loads(run("compare", *paths, "--json").stdout)
    assert document["against"] == str(paths[0])
    assert [found["after"] for found in document["comparisons"]] == [str(path) for path in paths[1:]]
    verdicts = [{d["metric"]: d["verdict"] for d in found["differences"]} for found in document["comparisons"]]
    assert [of["top1"] for of in verdicts] == ["within noise", "worse"]


def test_a_class_that_alone_became_worse_is_named(make_bundle: Callable[..., Path], tmp_path: Path) -> None:
    old, new = make_bundle("a", sliced=True), make_bundle("b", wrong=0.5, wrong_class=2, sliced=True)
    (bundle,) = compare_bundles([old, new])
    assert bundle.slices is not None
    (worse,) = bundle.slices.find("worse")
    labels = read_samples(old, read_manifest(old))["label"]
    assert (worse.column, worse.value, worse.n) == ("label", "2", int((labels == 2).sum()))
    assert worse.difference.metric == "top1" and worse.difference.change.value < -0.3
    assert len(bundle.slices.slices) == 5 and len(bundle.slices.find("better")) == 0
    assert "label=2, top1" in show([old, new], 100) and "Of 5 slices 1 worse" in show([old, new], 100)
    (whole,) = compare_bundles([make_bundle("c"), make_bundle("d", wrong=0.5, wrong_class=2)])
    without = [(found.metric, found.change) for found in whole.measured.differences]
    assert [(found.metric, found.change) for found in bundle.measured.differences] == without  # not widened
    assert whole.slices is None
    page = tmp_path / "page.html"
    assert run("compare", old, new, "--html", page, "--json").exit_code == 0
    assert '<section id="slices-1">' in page.read_text() and "label=2, top1" in page.read_text()


def test_slices_need_the_bundle_that_says_which_samples_they_have(
    make_bundle: Callable[..., Path], tmp_path: Path
) -> None:
    reports = []
    for name in ("a", "b"):
        make_bundle(name, sliced=True)
        (tmp_path / f"alone-{name}").mkdir()
        for file in (tmp_path / name).glob("report.*"):
            shutil.copy(file, tmp_path / f"alone-{name}")
        reports.append(tmp_path / f"alone-{name}")
    (bundle,) = compare_bundles(reports)
    assert bundle.slices is not None and bundle.slices.slices == ()
    assert "Not compared: top1 by label: a report alone does not say" in show(reports, 200)


def test_recipes_differ_by_paths_and_passes_are_matched_by_kind(make_bundle: Callable[..., Path]) -> None:
    inserted = [{"kind": "equalize"}, {"kind": "gptq", "bits": 3, "ignore": ["a"]}, {"kind": "int8", "alpha": 0.5}]
    other = change(RECIPE, passes=inserted, seed=1, target="openvino")
    changes = compare_recipes(make_bundle("old"), make_bundle("new", recipe=other))
    assert changes == [
        RecipeChange("target", "onnxruntime-cpu", "openvino"),
        RecipeChange("passes[0]", "-", '{"kind": "equalize"}'),
        RecipeChange("passes[0].bits", "4", "3"),
        RecipeChange("passes[0].ignore", '["a", "b"]', '["a"]'),
        RecipeChange("seed", "-", "1"),
    ]
    assert "  passes[0].bits: 4 \u2192 3\n" in show([make_bundle("a"), make_bundle("b", recipe=other)])


def test_layers_that_differ_are_shown_and_others_not(make_bundle: Callable[..., Path]) -> None:
    layers = [
        {**LAYERS[0], "sqnr_db": 40.1},
        {**LAYERS[1], "action": "w3", "reason": "W3A16, group 32", "output_error": 0.04},
        {"layer": "head", "type": "Linear", "action": "int8", "reason": "W8A8"},
        {"layer": "extra", "type": "Linear", "action": "kept", "reason": "new"},
    ]
    shown = show([make_bundle("old"), make_bundle("new", layers=layers)], width=140)
    assert (
        "w4 W4A16, group 32; 96 B; output_error 0.01" in shown
        and "w3 W3A16, group 32; 96 B; output_error 0.04" in shown
    )
    assert re.search(r"head +kept ignore: head +int8 W8A8", shown) and re.search(r"extra +- +kept new", shown)
    assert not re.search(r"^conv ", shown, re.MULTILINE)
    same = Report("pass", "a", "", Side(), Side(), layers=tuple(layers))
    assert compare_layers(same, same) == []


def test_a_layer_of_another_size_differs(make_bundle: Callable[..., Path]) -> None:
    old, new = make_bundle("old"), make_bundle("new")
    reports = [read_report(folder / "report.json") for folder in (old, new)]
    sizes = [measure_layers(folder, report) for folder, report in zip((old, new), reports, strict=True)]
    assert sizes[0] == sizes[1] and sizes[0]["fc"] == 96
    (found,) = compare_layers(*reports, sizes=(sizes[0], {**sizes[1], "fc": 48}))
    assert (found.layer, found.before.size_bytes, found.after.size_bytes) == ("fc", 96, 48)


def test_the_page_shows_the_differences_and_escapes_what_bundles_say(
    make_bundle: Callable[..., Path], tmp_path: Path
) -> None:
    layers = [{**LAYERS[0], "layer": "<script>alert(1)</script>", "reason": "<b>"}]
    old, new = make_bundle("old"), make_bundle("new", wrong=0.3, layers=layers, recipe=change(RECIPE, name="<i>"))
    page = tmp_path / "page.html"
    assert run("compare", old, new, "--html", page).exit_code == 0
    text = page.read_text()
    assert "<script>" not in text and "&lt;script&gt;" in text and "<i>" not in text
    assert text.count("<svg") == 2 and "differs beyond noise" in text
    assert text.index("top1") < text.index("latency_p50, speed-up")  # what is worse comes first
    assert len(text) < 200_000


def test_the_page_of_a_report_shows_what_became_worse_since_an_earlier_one(make_bundle: Callable[..., Path]) -> None:
    old, new = (read_stored_report(make_bundle(name, wrong)) for name, wrong in (("old", 0.0), ("new", 0.3)))
    since = compare_reports([old, new])[0]
    shown = make_environment().get_template("since.html").render(report=replace(new.report, since=since))
    assert f"Since {old.name}" in shown and re.search(r"top1</th>.*worse", shown)
    assert not make_environment().get_template("since.html").render(report=new.report).strip()


def test_a_page_that_cannot_be_written_is_told(make_bundle: Callable[..., Path], tmp_path: Path) -> None:
    done = run("compare", make_bundle("old"), make_bundle("new"), "--html", tmp_path / "no/page.html")
    assert done.exit_code != 0 and "cannot be written" in done.stderr


def test_reports_alone_are_compared_without_recipes(make_bundle: Callable[..., Path], tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    for name in ("report.json", "report.samples.npz"):
        shutil.copy(make_bundle(f"old-{name}") / name, kept / name)
    shutil.copy(tmp_path / "old-report.json/report.samples.npz", kept / "report.samples.npz")
    shown = show([kept / "report.json", make_bundle("new", wrong=0.3)])
    assert "top1" in shown and "The recipes are not compared" in shown and "not paired" not in shown


def test_an_unreadable_recipe_is_a_note(make_bundle: Callable[..., Path]) -> None:
    old, new = make_bundle("old"), make_bundle("new")
    (new / "recipe.yaml").write_text("[not a mapping")
    assert "The recipes are not compared: " in show([old, new])


def test_a_bundle_and_itself_are_refused(make_bundle: Callable[..., Path]) -> None:
    old = make_bundle("old")
    with pytest.raises(UsageError, match=r"one bundle .* differs from itself by nothing but the run"):
        compare_bundles([old, make_bundle("new"), old])


def test_one_bundle_is_refused(make_bundle: Callable[..., Path]) -> None:
    done = run("compare", make_bundle("old"))
    assert done.exit_code == 2 and "give at least two bundles" in done.stderr


def test_other_samples_are_refused(make_bundle: Callable[..., Path]) -> None:
    old, new = make_bundle("old"), make_bundle("new")
    report = json.loads((new / "report.json").read_text())
    report["evaluation"]["samples"] = "other"
    (new / "report.json").write_text(json.dumps(report))
    done = run("compare", old, new)
    assert done.exit_code == 2 and "different evaluation sets, 300 samples" in done.stderr
