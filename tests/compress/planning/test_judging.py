"""What a recipe says of its judgement: named sets, slices, postprocess, metrics of its own; each refusal once."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from compress.errors import CompressError, PlanError
from compress.execution.own_metrics import compute_values
from compress.execution.run import apply_recipe
from compress.planning.cache_keys import cache_keys
from compress.planning.inputs import read_inputs
from compress.planning.make_plan import make_plan
from compress.planning.own_metrics import own_metric_problems
from compress.planning.sets import load_set
from compress.recipe.load import load_recipe, recipe_to_yaml
from compress.recipe.portable import make_portable
from compress.recipe.schema import Recipe
from runtime import open_bundle
from runtime.bundle.format import read_samples, read_slices
from runtime.judge.recorded import value_columns
from runtime.report.validate import validate
from runtime.tasks.manifest import read_manifest

RECIPE = """\
version: 1
name: digits
vars: {digits: "${package:compress}/zoo/digits"}
model:
  source: "python:compress.zoo.digits_resnet:digits_resnet"
  weights: "${digits}/digits_resnet.safetensors"
  task: image-classification
preprocess: {kind: image, channels: L, mean: [0.305], std: [0.376]}
data:
  calibration: {source: "npz:${digits}/train.npz", samples: 64}
  evaluation: {source: "npz:test.npz"}
passes: [{kind: int8}]
validate: {benchmark: {iterations: 1, warmup: 0, processes: 1}}
"""
METRICS = '''
import numpy as np


def cost(outputs, labels):
    """Five for a 9 that is missed, one for any other error."""
    wrong = outputs["logits"].argmax(1) != labels
    return np.where(wrong, np.where(labels == 9, 5.0, 1.0), 0.0)


cost.higher_is_better = False
cost.unit = "points"


def balanced(outputs, labels):
    right = outputs["logits"].argmax(1) == labels
    return np.mean([right[labels == label].mean() for label in np.unique(labels)])


def broken(outputs, labels):
    return float("nan")


def table(outputs, labels):
    return np.zeros((3, 2))


def alone(outputs):
    return 0.0
'''
NAMED = "data={calibration: {source: 'npz:${digits}/train.npz', samples: 64}, evaluation: "
SETS = NAMED + "{day: {source: npz:test.npz, samples: 90}, night: {source: npz:test.npz, samples: 60, skip: 90}}}"
OWN = "python:metrics.py:"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A recipe, 200 digits with the weather and a number each, and a file of metrics."""
    import compress

    images = np.load(Path(compress.__file__).parent / "zoo/digits/test.npz")
    rows = slice(0, 200)
    weather = np.array(["rain", "sun", "sun", "snow"] * 50)
    np.savez(
        tmp_path / "test.npz",
        image=images["image"][rows],
        label=images["label"][rows],
        weather=np.unique(weather, return_inverse=True)[1],
        where=np.zeros((200, 2)),
    )
    (tmp_path / "metrics.py").write_text(METRICS)
    (tmp_path / "r.yaml").write_text(RECIPE)
    return tmp_path


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all that run a recipe: the float model and its outputs are the same."""
    return tmp_path_factory.mktemp("cache")


def read(folder: Path, *overrides: str) -> Recipe:
    return load_recipe(folder / "r.yaml", overrides)


def test_named_sets_are_one_set_whose_samples_know_their_name(folder: Path) -> None:
    recipe = read(folder, SETS, "validate.slices=[weather, label]")
    inputs = read_inputs(recipe, folder / "cache")
    samples = load_set(inputs, "evaluation", 10)
    assert (inputs.data["evaluation"].n_samples, samples.n) == (150, 150)
    assert samples.slices["set"] == ["day"] * 90 + ["night"] * 60
    assert set(samples.slices["weather"]) == {"0", "1", "2"}
    assert samples.columns.keys() == {"image", "label"}, "what slices is no input"
    (folder / "again.yaml").write_text(recipe_to_yaml(recipe))
    assert load_recipe(folder / "again.yaml") == recipe


def test_columns_may_say_where_a_slice_lies(folder: Path) -> None:
    recipe = read(folder, "data.evaluation.columns={sky: weather}", "validate.slices=[sky]")
    samples = load_set(read_inputs(recipe, folder / "cache"), "evaluation", 10)
    assert list(samples.slices) == ["sky"] and samples.columns.keys() == {"image", "label"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.evaluation={day: {sauce: npz:x}}"], "data.evaluation.day.sauce: unknown key; did you mean 'source'"),
        (["data.evaluation={da y: {source: npz:x}}"], "'da y' names a set: use letters, digits"),
        (["validate.slices=[wether]"], "there is no column 'wether' .for slice wether.; did you mean 'weather'"),
        (["validate.slices=[where]"], "slice 'where' is ndarray: give a text or a number for each sample"),
        (["validate.gates=[{metric: top1, min: 0.5, worst: set}]"], "no slices by 'set': data.evaluation is one set"),
        (["validate.gates=[{metric: top1, min: 0.5, worst: weather}]"], "'weather' is not among validate.slices"),
        ([SETS, "validate.slices=[set]"], "'set' is the named evaluation sets', always there"),
        (["validate.gates=[{metric: top1, min: 0.5, worst: a, slice: b=c}]"], "worst and slice are given; give one"),
        (["validate.gates=[{metric: top1, min: 0.5, slice: night}]"], "write COLUMN=VALUE, such as label=cat"),
        (["validate.gates=[{metric: top1, min_retained: 0}]"], "min_retained is 0.0, not above 0"),
        (["postprocess={threshold: 0.3}"], "postprocess.threshold: image-classification takes top_k, reject_below"),
        (["postprocess={top_k: 11}"], "postprocess.top_k is 11, and the model has 10 classes"),
        (["postprocess={reject_below: 1.5}"], "reject_below is 1.5, not between 0 and 1"),
        (["validate.metrics=[coverage]"], "'coverage' needs postprocess: {reject_below: ...}"),
        ([f"validate.metrics=['{OWN}cots']"], "metrics.py has no function 'cots'; did you mean 'cost'"),
        ([f"validate.metrics=['{OWN}alone']"], "alone must take two arguments, the outputs by name and the labels"),
        (["validate.metrics=['python:gone.py:cost']"], "gone.py: no such file or folder"),
        (["validate.metrics=['python:metrics:cost']"], "write python:FILE.py:FUNCTION"),
        ([f"validate.gates=[{{metric: '{OWN}cost', min_speedup: 2}}]"], "min_speedup is of times; use min_retained"),
    ],
)
def test_what_cannot_be_judged_is_refused_before_any_work(folder: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(CompressError, match=message.replace("(", r"\(").replace("[", r"\[")) as caught:
        make_plan(read(folder, *overrides), folder / "cache")
    assert caught.value.exit_code == 2


def test_two_files_of_one_name_are_refused(folder: Path) -> None:
    (folder / "other").mkdir()
    (folder / "other/metrics.py").write_text(METRICS)
    with pytest.raises(PlanError, match="has the same name and function, and a bundle names no folders"):
        make_plan(read(folder, f"validate.metrics=['{OWN}cost', 'python:other/metrics.py:cost']"), folder / "cache")


def test_a_file_that_is_no_python_is_refused_and_none_is_run(folder: Path) -> None:
    (folder / "metrics.py").write_text("raise SystemExit('it was run')\n\ndef cost(outputs, labels): return 0.0\n")
    assert make_plan(read(folder, f"validate.metrics=['{OWN}cost']"), folder / "cache")
    (folder / "metrics.py").write_text("from elsewhere import *\n")  # which may have it
    assert not own_metric_problems(read(folder, f"validate.metrics=['{OWN}cost']"))
    (folder / "metrics.py").write_text("def cost(outputs, labels:")
    with pytest.raises(PlanError, match="is not Python"):
        make_plan(read(folder, f"validate.metrics=['{OWN}cost']"), folder / "cache")


@pytest.mark.parametrize(
    ("function", "message"),
    [("broken", "gave NaN or infinity; give finite"), ("table", r"shape \[3, 2\] for 200 samples; give one number")],
)
def test_a_metric_that_gives_no_numbers_ends_the_build_before_its_passes(
    folder: Path, cache: Path, function: str, message: str
) -> None:
    recipe = read(folder, f"validate.metrics=['{OWN}{function}']", "passes=[]")
    with pytest.raises(PlanError, match=message):
        apply_recipe(recipe, folder / "out", cache, quiet=True)


def test_one_number_has_no_slices(folder: Path, cache: Path) -> None:
    gate = f"validate.gates=[{{metric: '{OWN}balanced', min: 0.5, worst: label}}]"
    recipe = read(folder, gate, "validate.slices=[label]", "passes=[]")
    with pytest.raises(PlanError, match="balanced gives one number for all samples, and none for a slice"):
        apply_recipe(recipe, folder / "out", cache, quiet=True)


def test_a_key_of_what_looks_at_gates_knows_the_metrics_code(folder: Path) -> None:
    gated = [f"validate.gates=[{{metric: '{OWN}cost', max_drop: 0.5}}]", "passes=[{kind: int8}]"]
    inputs = read_inputs(read(folder, *gated), folder / "cache")
    before = cache_keys(inputs)
    (folder / "metrics.py").write_text(METRICS + "\n")
    after = cache_keys(inputs)
    assert before.baseline == after.baseline
    assert before.passes != after.passes


def test_folders_of_this_machine_stay_out_of_the_bundles_recipe(folder: Path) -> None:
    recipe = read(folder, f"validate.metrics=['python:{folder}/metrics.py:cost']")
    text = recipe_to_yaml(recipe, make_portable(recipe))
    assert "python:${metrics}/metrics.py:cost" in text and str(folder) not in text


def test_the_interval_of_one_number_is_the_jackknifes(folder: Path) -> None:
    """Of a mean, left-out groups of one sample give back the samples themselves."""
    values = np.random.default_rng(0).normal(size=80)
    found, per_sample = compute_values("m", lambda outputs, labels: outputs["y"].mean(), {"y": values}, None)
    assert not per_sample
    pseudo, whole = value_columns(found, per_sample=False)
    np.testing.assert_allclose(np.sort(pseudo), np.sort(values), atol=1e-9)
    assert whole[0] == values.mean()


def test_labels_of_several_shapes_reach_a_metric() -> None:
    masks = [np.zeros((2, 3)), np.ones((4, 4))]
    found, _ = compute_values("m", lambda outputs, labels: sum(map(np.sum, labels)), {"y": np.zeros(2)}, masks)
    assert found[0] == 16 and sorted(found[1:]) == [0, 16]


def test_a_metric_cannot_change_what_it_is_given() -> None:
    def spoil(outputs: dict[str, np.ndarray], labels: np.ndarray) -> float:
        outputs["y"][0] = 9
        return 0.0

    with pytest.raises(PlanError, match="failed: ValueError: assignment destination is read-only"):
        compute_values("m", spoil, {"y": np.zeros(3)}, None)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_run")
def test_a_bundle_with_all_of_it(folder: Path, cache: Path) -> None:
    """Built, judged again where no metric's code is, and predicting as it was judged."""
    recipe = read(
        folder,
        SETS,
        "postprocess={top_k: 2, reject_below: 0.9}",
        f"validate.metrics=[top1, ece, coverage, accuracy_answered, '{OWN}cost', '{OWN}balanced']",
        "validate.slices=[label, weather]",
        f"validate.gates=[{{metric: '{OWN}cost', max: 0.5, worst: set}}, {{metric: top1, min_retained: 0.8}}, "
        "{metric: accuracy_answered, min: 0.9}]",
    )
    report = apply_recipe(recipe, folder / "out", cache, quiet=True)
    assert report is not None and report.verdict == "pass"
    manifest = read_manifest(folder / "out")
    assert [record.name for record in manifest.recorded] == [f"{OWN}cost", f"{OWN}balanced"]
    assert [(r.higher_is_better, r.unit, r.per_sample) for r in manifest.recorded] == [
        (False, "points", True),
        (True, "", False),
    ]
    lock = json.loads((folder / "out/lock.json").read_text())
    assert lock["metrics"][f"{OWN}cost"] == manifest.recorded[0].sha256
    assert lock["data"]["evaluation"]["source"] == {"day": "npz:test.npz", "night": "npz:test.npz"}
    assert set(read_slices(folder / "out", manifest)) == {"set", "weather"}

    (folder / "metrics.py").unlink()
    again = validate(folder / "out", ["onnxruntime-cpu"])
    for name in (f"{OWN}cost", f"{OWN}balanced"):
        assert again.candidate.metrics[name] == report.candidate.metrics[name]
    text = (folder / "out/report.md").read_text()
    assert f"{OWN}cost (computed when the bundle was built)" in text
    assert again.gates[0].why.endswith("computed when the bundle was built")

    columns = read_samples(folder / "out", manifest)
    with open_bundle(folder / "out") as bundle:
        outputs = bundle.predict(columns["image"])
    answered = outputs["answered"]
    assert answered.mean() == report.candidate.metrics["coverage"]
    hits = [
        str(label) in [str(one["label"]) for one in row]
        for row, label in zip(outputs.predictions, columns["label"], strict=True)
    ]
    assert np.mean(np.array(hits)[answered]) == report.candidate.metrics["accuracy_answered"]
    assert all(row[0]["label"] is None for row in np.array(outputs.predictions, object)[~answered])


LANGUAGE = """\
version: 1
name: words
model: {source: "dir:model", task: text-generation}
data:
  evaluation: {short: {source: "jsonl:short.jsonl"}, long: {source: "jsonl:long.jsonl"}}
passes: [{kind: rtn, group_size: 32}]
validate:
  metrics: [nll, "python:metrics.py:worst_text"]
  gates: [{metric: nll, min_retained: 0.5, worst: set}, {metric: "python:metrics.py:worst_text", max: 99}]
  benchmark: {prompt_tokens: 4, new_tokens: 2, iterations: 1, warmup: 0, processes: 1}
"""


@pytest.mark.slow
@pytest.mark.usefixtures("quick_run")
def test_a_language_model_on_two_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tiny_lm import language_folder, write_texts

    language_folder(tmp_path / "model", num_hidden_layers=1)
    write_texts(tmp_path / "short.jsonl", 60, length=10)
    write_texts(tmp_path / "long.jsonl", 55, seed=1, length=30)
    (tmp_path / "metrics.py").write_text(
        "def worst_text(outputs, labels):\n    return (outputs['nll'] / outputs['n_tokens']).max()\n"
        "worst_text.higher_is_better = False\n"
    )
    (tmp_path / "r.yaml").write_text(LANGUAGE)
    report = apply_recipe(load_recipe(tmp_path / "r.yaml"), tmp_path / "out", tmp_path / "cache", quiet=True)
    assert report is not None
    (table,) = [table for table in report.slices if table.metric == "nll"]
    assert {name: value.n for name, value in table.values.items()} == {"short": 60, "long": 55}
    assert report.gates[0].rule == "min_retained 0.5, worst set"
    assert report.confusion is None
    (tmp_path / "r.yaml").write_text(LANGUAGE + "preprocess: {kind: language, max_length: 16, pack: 12}\n")
    with pytest.raises(PlanError, match=r"data\.evaluation: preprocess\.pack joins all texts"):
        make_plan(load_recipe(tmp_path / "r.yaml"), tmp_path / "cache")
