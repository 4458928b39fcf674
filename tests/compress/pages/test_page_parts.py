"""What the page is made of: bytes by layer, layers in order, samples as they are shown, charts."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import save_file

from compress.execution.work_meter import WorkMeter
from compress.pages.charts import AFTER, MOST_SPOTS, Line, clean_text, draw_chart, draw_lines, tip
from compress.pages.layers import group_kept, list_measures, real_layers, worst_table
from compress.pages.report import draw_gate, make_headlines, worst_classes
from compress.pages.samples import MOST_BYTES, ShownSample, describe, show_samples
from compress.pages.sizes import PACKED, REST, SizedTensor, list_tensors, sum_formats, sum_layers
from runtime.bundle.format import Artifact, EvaluationSet, Judgement, Manifest, write_samples
from runtime.errors import BundleError
from runtime.judge.changes import ChangedSample, Changes, ConfusedPair, Confusion
from runtime.judge.gates import GateResult
from runtime.report.report import Report, Side


def save_quantized(path: Path) -> None:
    """fc: int8 behind a DequantizeLinear of its name; q and k merged into one 4-bit product; a shape."""
    weights = {
        "val_7/int8": np.zeros((8, 4), np.int8),
        "fc/scale": np.ones(4, np.float32),
        "q+k/packed": np.zeros((6, 1, 16), np.uint8),
        "q+k/scale": np.ones(6, np.float32),
        "shape": np.array([1, 8], np.int64),
    }
    nodes = [
        helper.make_node("DequantizeLinear", ["val_7/int8", "fc/scale"], ["fc/weight/float"], axis=1),
        helper.make_node("MatMul", ["x", "fc/weight/float"], ["y"], "node_y"),
        helper.make_node(
            "MatMulNBits", ["x", "q+k/packed", "q+k/scale"], ["z"], domain="com.microsoft", K=8, N=6, bits=4
        ),
    ]
    save(path, nodes, weights)


def save(path: Path, nodes: list[Any], weights: dict[str, np.ndarray]) -> None:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("x", "y")]
    stored = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", values[:1], values[1:], stored)), path)


def test_bytes_of_a_graph_go_to_the_layers_that_its_weights_are_of(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", w], [y]) for w, y in (("val_7", "y"), ("val_8", "q"), ("val_9", "k"))]
    floats = {"val_7": (8, 4), "val_8": (8, 4), "val_9": (8, 2)}
    save(tmp_path / "float.onnx", nodes, {name: np.zeros(shape, np.float32) for name, shape in floats.items()})
    save_quantized(tmp_path / "small.onnx")
    before, after = (
        list_tensors(tmp_path, Artifact(name, f"{name}.onnx", "onnxruntime-cpu", "any", (), (), 1))
        for name in ("float", "small")
    )
    assert sum_formats(before) == {"float32": 320}
    assert sum_formats(after) == {"int4": 96, "float32": 40, "int8": 32, "int64": 16}
    sizes = {s.name: s for s in sum_layers({"fc": "val_7", "attn.q": "val_8", "attn.k": "val_9"}, before, after)}
    assert {name: (s.before, s.after, s.number_format) for name, s in sizes.items()} == {
        "fc": (128, 48, "int8"),
        "attn.q": (128, 80, "int4"),  # two thirds of what was merged
        "attn.k": (64, 40, "int4"),
        REST: (0, 16, "int64"),
    }


def test_bytes_of_a_checkpoint_are_read_from_its_header(tmp_path: Path) -> None:
    tensors = {"lm.q.weight_packed": np.zeros((4, 2), np.int32), "norm.weight": np.zeros(3, np.float16)}
    save_file(tensors, tmp_path / "model.safetensors")
    artifact = Artifact("candidate", "config.json", "vllm", "W4A16", (), (), 1, kind="checkpoint")
    stored = list_tensors(tmp_path, artifact)
    assert sorted((t.name, t.number_format, t.n_bytes) for t in stored) == [
        ("lm.q.weight_packed", PACKED, 32),
        ("norm.weight", "float16", 6),
    ]
    assert [size.name for size in sum_layers({"lm.q": ""}, [], stored)] == ["lm.q", "norm"]
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 9)
    with pytest.raises(BundleError, match="its tensors cannot be listed"):
        list_tensors(tmp_path, artifact)


def test_a_removed_layer_keeps_its_place_with_nothing_after() -> None:
    (gone,) = sum_layers({"conv": ""}, [SizedTensor("conv.weight", "float32", 8)], [])
    assert (gone.before, gone.after, gone.number_format) == (8, 0, "")


ROWS = [
    {"layer": "a", "type": "Linear", "action": "int8", "sqnr_db": 20.0},
    {"layer": "b", "type": "Linear", "action": "int8", "sqnr_db": 40.0, "sensitivity": float("nan")},
    {"layer": "c", "type": "Linear", "action": "kept", "reason": "slower in int8"},
    {"layer": "", "type": "note", "action": "info", "reason": "n"},
    "no row",
]


def test_layers_come_worst_first_and_kept_ones_by_their_reason() -> None:
    layers = real_layers(ROWS)
    assert [measure.key for measure in list_measures(layers)] == ["sqnr_db"]
    heads, rows = worst_table(layers)
    assert heads[:3] == ["layer", "type", "done"] and [row[0] for row in rows] == ["a", "b"]
    assert [(group.reason, group.layers) for group in group_kept(layers)] == [("slower in int8", ("c",))]


def manifest_of(task: str, evaluation: EvaluationSet) -> Manifest:
    return Manifest(
        name="b",
        task=task,
        target="onnxruntime-cpu",
        class_names=("cat", "dog"),
        preprocess={"kind": "image"},
        artifacts=(),
        evaluation=evaluation,
        judgement=Judgement(),
        files={},
        created_by="compress",
    )


def shown(root: Path, columns: dict[str, Any], task: str, **answers: Any) -> list[ShownSample]:
    evaluation = write_samples(root, columns)
    before, after = answers.get("before"), answers.get("after")
    changes = Changes("m", 1, tuple(ChangedSample(k, before, after, {}) for k in (*range(evaluation.n_samples), 99)))
    return show_samples(root, manifest_of(task, evaluation), changes)


def test_pictures_come_with_their_classes(tmp_path: Path) -> None:
    columns = {"image": np.zeros((2, 300, 100, 3), np.uint8), "label": np.array([1, 0])}
    before = {"label": "dog", "score": 0.931}
    first, _ = shown(tmp_path, columns, "image-classification", before=before, after={"label": None})
    assert first.picture.startswith("data:image/jpeg;base64,") and first.size == (100, 300) and not first.sharp
    assert (first.truth, first.before, first.after) == ("dog", "dog 93 %", "no answer")


def test_boxes_that_were_lost_and_that_are_new_are_told_apart(tmp_path: Path) -> None:
    columns = {"image": np.zeros((1, 100, 200, 3), np.uint8)}
    boxes = {"same": [0, 0, 100, 50], "moved": [4, 0, 100, 50], "lost": [150, 0, 200, 50], "new": [0, 60, 50, 100]}
    answers = {name: {"label": name, "score": 0.9, "box": corners} for name, corners in boxes.items()}
    faint = {"label": "faint", "score": 0.1, "box": [0, 0, 9, 9]}
    (sample,) = shown(
        tmp_path,
        columns,
        "object-detection",
        before=[answers["same"], answers["lost"], faint],
        after=[answers["moved"], answers["new"]],
    )
    assert {box.title: box.of for box in sample.boxes} == {
        "same 90 %, now moved 90 %": "both",
        "lost 90 %": "before",
        "new 90 %": "after",
    }
    assert [(box.x, box.width) for box in sample.boxes if box.of == "before"] == [(0.75, 0.25)]


def test_recordings_are_cut_and_texts_stand_beside_them(tmp_path: Path) -> None:
    sound = [np.sin(np.arange(10 * 8000) / 5).astype(np.float32)]
    columns = {"audio": sound, "rate": np.array([8000]), "label": ["what was said"]}
    (sample,) = shown(tmp_path, columns, "automatic-speech-recognition", before={"label": "what"})
    assert sample.recording.startswith("data:audio/wav;base64,UklGR")
    assert sample.note == "the first 6 of 10.0 s" and sample.truth == "what was said" and sample.before == "what"


def test_what_would_make_the_page_too_large_is_left_out(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (60, 224, 224, 3), np.uint8)
    samples = shown(tmp_path, {"image": noise}, "image-classification")
    assert sum(len(sample.picture) for sample in samples) <= MOST_BYTES
    assert samples[0].picture and not samples[0].note
    assert not samples[-1].picture and samples[-1].note == "not shown: the page would grow too large"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, ""),
        ({"label": 3, "score": 0.5}, "3 50 %"),
        ({"label": "x", "score": 12.0}, "x"),
        ([{"label": "a", "score": 0.9}, {"label": "b", "score": 0.1}], "a 90 %, b 10 %"),
        ([], "nothing"),
        ("t" * 2000, "t" * 600 + "…"),
        (0.123456789, "0.12346"),
    ],
)
def test_answers_in_words(answer: Any, said: str) -> None:
    assert describe(answer) == said


def test_a_chart_has_both_widths_and_tells_names() -> None:
    def paint(axes: Any) -> None:
        for x in range(n_points):
            (point,) = axes.plot([x], [x], "o", color=AFTER)
            point.set_gid(tip("a <b> & \x00\nsecond"))

    n_points = 2
    chart = draw_chart("size & speed", paint)
    assert re.findall(r'<div class="plot (\w+)"><svg ', chart) == ["wide", "narrow"]
    text = "a &lt;b&gt; &amp; \ufffd\nsecond"
    places = re.findall(
        r'class="spot (\w+ \w+)" style="left:([\d.]+)%;top:([\d.]+)%".*?aria-label="(.*?)"', chart, re.S
    )
    assert [(opens, label) for opens, _, _, label in places] == [("right up", text), ("left down", text)] * 2
    (x0, y0), (x1, y1) = ((float(x), float(y)) for _, x, y, _ in places[:2])
    assert 0 < x0 < 30 and 70 < x1 < 100 and 70 < y0 < 100 and 0 < y1 < 30
    assert 'aria-label="size &amp; speed"' in chart and "style>" not in chart and "http" not in chart
    n_points = MOST_SPOTS + 1
    crowd = draw_chart("many", paint)
    assert "spot" not in crowd and crowd.count(f"<title>{text}</title>") == 2 * n_points


def test_losses_that_fall_far_have_plain_numbers() -> None:
    chart = draw_lines("loss", [Line("_$\\frac$", [1, 2], [100.0, 0.1]), Line("b", [1, 2], [1, 2])], "", "", log_y=True)
    assert ">100</text>" in chart and "_$\\frac$" in chart and "mathdefault" not in chart


def test_long_names_leave_room_for_the_chart() -> None:
    assert len(clean_text("n" * 500, 20)) == 21


@pytest.mark.parametrize("rule", ["min 0.9", "max_drop 0.9, worst label"])
def test_a_gate_is_drawn_with_the_side_on_which_it_holds(rule: str) -> None:
    drawn = draw_gate(GateResult("top1", rule, 0.8, (0.7, float("inf")), "fail", False, ""))
    x, width = map(float, re.search(r'<rect x="([\d.]+)" y="2" width="([\d.]+)"', drawn).groups())  # type: ignore[union-attr]
    bound = float(re.search(r'd="M([\d.]+) 1V19"', drawn)[1])  # type: ignore[index]
    assert (x == bound) == rule.startswith("min") and (x == 0) == rule.startswith("max") and width > 0
    assert draw_gate(GateResult("top1", rule, None, None, "fail", False, "")) == ""


def test_headlines_say_larger_and_slower_where_it_is() -> None:
    side = Side(latency_ms={"p50": 1.0}, size_bytes=1024)
    report = Report("pass", "b", "x", side, side, ratios={"size": 0.5, "latency_p50": 0.8})
    report = replace(report, ratio_intervals={"latency_p50": (0.5, 1.0)})
    found = [(h.value, h.label, h.interval) for h in make_headlines(report)]
    assert found == [("2.00x", "larger", ""), ("1.25x", "slower", "[1.00, 2.00]")]


def test_the_class_that_is_found_least_comes_first() -> None:
    pairs = (ConfusedPair("a", "a", 9, 9), ConfusedPair("b", "b", 8, 4), ConfusedPair("b", "a", 2, 6))
    rows = worst_classes(Confusion(2, ("a", "b"), pairs))
    assert [(row.name, row.n, row.before, row.after) for row in rows] == [("b", 10, 0.8, 0.4), ("a", 9, 1.0, 1.0)]


def test_the_peak_of_memory_is_of_what_worked_meanwhile() -> None:
    with WorkMeter() as nothing:
        pass
    with WorkMeter() as some:
        held = np.ones(32 * 2**20 // 8)
        del held
    if nothing.n_bytes is None:
        pytest.skip("the system does not say what a process holds")
    assert some.n_bytes is not None and some.n_bytes >= nothing.n_bytes
