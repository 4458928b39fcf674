"""The plan: order, variants, limits and words, without a run."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from hosts import Host
from makers import DIGITS_RECIPE
from rich.console import Console

from compress.errors import PlaceError, PlanError, SourceError
from compress.facts import ModelFacts
from compress.passes import Int8, Pass, Rtn
from compress.planning import forecast
from compress.planning.forecast import find_timed_batch
from compress.planning.make_plan import make_plan
from compress.planning.plan import Plan
from compress.planning.sets import measure_training
from compress.planning.validation import class_problems, export_problems, order_problems
from compress.recipe.load import load_recipe
from compress.recipe.schema import Recipe
from runtime.bundle.tensors import TensorSpec
from runtime.encode.preprocess import LanguagePreprocess, TextPreprocess

RECIPE = DIGITS_RECIPE + "validate: {gates: [{metric: top1, max_drop: 0.01}]}\n"


def recipe(folder: Path, *overrides: str) -> Recipe:
    (folder / "r.yaml").write_text(RECIPE)
    return load_recipe(folder / "r.yaml", overrides)


def planned(folder: Path, *overrides: str) -> Plan:
    return make_plan(recipe(folder, *overrides), folder / "cache")


class Prune(Pass):
    """A pass over the torch model."""

    stage: ClassVar[Literal["model", "graph"]] = "model"
    kind: Literal["prune"] = "prune"


def test_model_passes_come_before_graph_passes() -> None:
    facts = ModelFacts("torch", "Net", "generic", (), (), ())
    assert order_problems((Prune(), Prune(), Rtn(), Int8()), facts) == []
    assert order_problems((Int8(), Prune()), facts) == [
        "passes.1: prune rewrites the whole torch model and must come before int8"
    ]
    assert order_problems((Prune(),), replace(facts, source="onnx")) == [
        "passes.0: prune rewrites a torch model, and an onnx: source is none"
    ]


def test_each_step_starts_where_the_last_one_ended(tmp_path: Path) -> None:
    plan = planned(tmp_path, "passes=[{kind: rtn, bits: 4, targets: [linear], group_size: 32}, {kind: int8}]")
    rtn, int8 = plan.steps[2:]
    assert plan.before.n_bytes == rtn.before_bytes > rtn.after_bytes == int8.before_bytes > int8.after_bytes
    assert plan.after.n_bytes == int8.after_bytes
    reasons = {d.layer: d.reason for d in int8.decisions if d.action == "kept"}
    assert set(reasons) == {"linear"} and reasons["linear"].startswith("already in ")


@pytest.mark.parametrize(
    "passes",
    [
        "[{kind: int8, ignore: [conv1]}]",
        "[{kind: int8, mode: dynamic}]",
        "[{kind: rtn, group_size: 32}]",
        "[{kind: smoothquant}, {kind: int8, targets: [Conv2d]}]",
        "[{kind: autocast, ignore: [linear]}]",
    ],
)
def test_every_layer_is_spoken_of_and_what_is_kept_has_a_reason(tmp_path: Path, passes: str) -> None:
    plan = planned(tmp_path, f"passes={passes}")
    names = {layer.name for layer in plan.before.layers}
    for row in plan.steps[2:]:
        assert {decision.layer for decision in row.decisions} == names
        assert all(decision.reason for decision in row.decisions if decision.action == "kept")


def test_a_further_flavour_must_hold_what_the_passes_leave(tmp_path: Path) -> None:
    both = "export=[{kind: onnx}, {kind: onnx, target: tensorrt}]"
    assert export_problems(recipe(tmp_path, both), ModelFacts("torch", "Net", "generic", (), (), ())) == []
    with pytest.raises(PlanError, match=r"export\.1: int8: target tensorrt has no run-time activation quantization"):
        planned(tmp_path, both, "passes=[{kind: int8, mode: dynamic}]")


@pytest.mark.parametrize("target", ["vllm", "llama.cpp"])
def test_a_target_of_language_models_alone_is_refused_once(tmp_path: Path, target: str) -> None:
    facts = ModelFacts("torch", "Net", "image-classification", (), (), ())
    (problem,) = export_problems(recipe(tmp_path, f"target={target}"), facts)
    assert problem.startswith(f"target: {target} serves language models from")
    assert problem.endswith("use onnxruntime-cpu or openvino")


def test_a_graph_too_old_for_a_pass(tmp_path: Path) -> None:
    rtn = "passes=[{kind: rtn, group_size: 32}]"
    with pytest.raises(PlanError, match=r"passes\.0: rtn needs a graph of opset 20 or later; this one has 18: set"):
        planned(tmp_path, rtn, "export=[{kind: onnx, opset: 18}]")
    assert planned(tmp_path, "export=[{kind: onnx, opset: 18}]").steps


def test_what_is_worth_saying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def notes(*overrides: str) -> str:
        return "\n".join(note.text for note in planned(tmp_path, *overrides).notes)

    assert notes() == "latency is not forecast, nothing was measured: COMPRESS_TIMING is off"
    assert "no gates; the verdict will be unjudged" in notes("validate.gates=[]")
    assert "come from one file" in notes("data.calibration.source=npz:${digits}/test.npz")
    assert (
        "quality is judged in onnxruntime-cpu" in notes("target=tensorrt").partition("tensorrt does not run here: ")[2]
    )
    gate, few = "validate.gates=[{metric: latency_p50, min_speedup: 1.2}]", "validate.benchmark.processes=5"
    assert "processes: 5 of them cannot decide the gate on latency_p50; give at least 6" in notes(gate, few)
    assert "cannot decide" not in notes(gate, "validate.benchmark.processes=6") + notes(few)
    memory = "validate.gates=[{metric: load_time, max: 1000}]"
    assert "the gate on load_time; give at least 12" in notes(memory, "validate.benchmark.processes=11")


def test_a_classifier_of_one_class_is_refused_with_the_tasks_that_fit() -> None:
    one, two = ((TensorSpec("logits", "float32", ("batch", n)),) for n in (1, 2))
    assert class_problems("image-classification", two) == [] == class_problems("image-regression", one)
    assert class_problems("image-classification", one) == [
        "model: has one class, and image-classification chooses among several; use task: image-regression for a number "
        "or task: image-multi-label-classification for yes or no"
    ]


def test_all_data_problems_without_any_shape(tmp_path: Path) -> None:
    with pytest.raises(SourceError) as caught:
        planned(tmp_path, "data.calibration.source=npz:a.npz", "data.evaluation.source=npz:b.npz")
    assert [problem.partition(":")[0] for problem in caught.value.problems] == ["data.calibration", "data.evaluation"]


def test_a_cache_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    with pytest.raises(PlaceError, match="cache: a file; the cache is a folder"):
        planned(tmp_path)


def test_work_beyond_this_machine_s_memory_is_warned_of(tmp_path: Path, host: Host) -> None:
    """An image of the digits is float32 [1, 8, 8]: 256 bytes."""
    n = 1 << 16
    size = f"validate.benchmark.throughput_batch_size={n}"
    plain, large = planned(tmp_path), planned(tmp_path, size)
    timed = find_timed_batch(large.inputs)
    assert timed is not None
    assert (timed.key, timed.n_samples, timed.feed_bytes) == ("throughput_batch_size", n, n * 256)
    assert timed.activation_bytes == n * large.before.peak_activation_bytes > 0
    assert max(plain.forecast.memory_bytes, timed.n_bytes) < large.forecast.memory_bytes

    def find_warning(memory_bytes: int) -> str:
        host.memory_bytes = memory_bytes
        return "".join(note.text for note in planned(tmp_path, size).notes if " are free here" in note.text)

    assert not find_warning(2 * large.forecast.memory_bytes)
    said = find_warning(large.forecast.memory_bytes - timed.n_bytes // 2)  # this process may hold more by now
    assert said.startswith("judging takes about ")
    assert said.endswith(" are free here: give validate.benchmark a smaller throughput_batch_size")
    assert find_warning(100 << 20).endswith(" are free here: take a machine with more, or make room")


def test_training_that_ends_before_it_teaches_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "find_pace", lambda: 1e9)  # multiply-adds in a second
    train = "data.train={source: 'npz:${digits}/train.npz'}"

    def find_warning(seconds: float, batch_size: int = 64) -> str:
        course = f"{{kind: distill, epochs: 1000, max_seconds: {seconds}, batch_size: {batch_size}}}"
        plan = planned(tmp_path, f"passes=[{course}]", train)
        return "".join(note.text for note in plan.notes if "teach little" in note.text)

    said = find_warning(1.0, 512)
    assert said.startswith("distill: max_seconds 1 has room for about ")
    assert said.endswith(" steps of 512 samples, which teach little: give it a smaller batch_size, or more time")
    assert not find_warning(10.0, 1) and not find_warning(1e6, 512)


def test_a_training_set_of_joined_texts_is_counted_in_windows(tmp_path: Path) -> None:
    inputs = planned(tmp_path, "data.train={source: 'npz:${digits}/train.npz'}").inputs
    data = inputs.data["train"]
    assert measure_training(inputs) == (data.n_samples, 1.0)
    joined = replace(inputs, preprocess=LanguagePreprocess(max_length=512, pack=256))
    assert measure_training(joined) == (round(data.n_bytes / 4.5 / 256), 1.0)
    assert measure_training(planned(tmp_path).inputs) == (0, 1.0)


def test_a_timed_batch_counts_what_is_timed(tmp_path: Path) -> None:
    single = find_timed_batch(planned(tmp_path, "validate.benchmark.batch_size=128").inputs)
    assert single is not None and (single.key, single.n_samples) == ("batch_size", 128)
    inputs = planned(tmp_path).inputs
    whole = find_timed_batch(inputs)
    texts = replace(inputs, preprocess=TextPreprocess(max_length=512))
    short = replace(texts, recipe=recipe(tmp_path, "validate.benchmark.sequence_length=128"))
    found = find_timed_batch(short)
    assert whole is not None and found is not None
    assert (4 * found.feed_bytes, 4 * found.activation_bytes) == (whole.feed_bytes, whole.activation_bytes)
    checkpoint = replace(inputs, recipe=recipe(tmp_path, "export=[{kind: checkpoint}]"))
    assert find_timed_batch(checkpoint) is None


def test_a_batch_that_the_judge_refuses_is_refused_in_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compress.planning.validation.MOST_FEED_BYTES", 64 * 256)
    assert planned(tmp_path)
    with pytest.raises(PlanError, match=r"validate\.benchmark\.throughput_batch_size: a batch of 65 samples has"):
        planned(tmp_path, "validate.benchmark.throughput_batch_size=65")


def test_how_it_reads(tmp_path: Path) -> None:
    plan, out = planned(tmp_path, "passes=[{kind: int8, ignore: [conv1]}]"), StringIO()
    plan.render(Console(file=out, width=200))
    text = out.getvalue()
    assert "int8: conv1 (Conv2d) stays: ignore: conv1" in text and "int8: linear (Linear) int8 W8A8" in text
    assert "x smaller); about " in text
    document: dict[str, Any] = plan.to_dict()
    assert document["size_bytes"]["before"] > 3 * document["size_bytes"]["after"]
    assert document["data"]["calibration"]["samples"] == 64 and set(document["forecast"]) == {
        "seconds",
        "between",
        "memory_bytes",
        "disk_bytes",
        "bundle_bytes",
        "stages",
    }
    stages = document["forecast"]["stages"]
    assert sum(stage["seconds"] for stage in stages) == pytest.approx(document["forecast"]["seconds"])
    assert all(stage["name"] in text for stage in stages)
