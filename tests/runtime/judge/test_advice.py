"""Advice: slower candidates are told first, with reasons that can be seen in the graph and the machine."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from timed import as_processes

from runtime.bundle.onnx_file import GraphFacts, graph_facts
from runtime.judge.advice import (
    Subject,
    advise,
    asks_why,
    disagreeing,
    explain_time_around_call,
    faster_elsewhere,
    larger,
    less_exact,
    noisy,
    reason_not_smaller,
    reasons,
    slower,
    slower_otherwise,
)
from runtime.judge.causes import Cause
from runtime.judge.evidence import Evidence
from runtime.judge.speed import size_evidence, timing_evidence
from runtime.judge.why import Explanation, SideTime
from runtime.words import interval_words


def qdq_model(path: Path, zero_point: Any) -> Path:
    """x -> Q -> DQ -> MatMul, with a zero point of the given dtype."""
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        helper.make_node("MatMul", ["d", "w"], ["y"]),
    ]
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", 2]) for n in "xy"]
    weights = {"s": np.float32(0.1), "z": zero_point, "w": np.eye(2, dtype=np.float32)}
    tensors = [onnx.numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "g", info[:1], info[1:], tensors)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), path)
    return path


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_graph_facts_are_those_of_onnx(tmp_path: Path, dtype: Any) -> None:
    path = qdq_model(tmp_path / "model.onnx", dtype(0))
    facts = graph_facts(path)
    assert facts.activations == {np.dtype(dtype).name: 1}
    wanted: dict[str, int] = {}
    for node in onnx.load(path).graph.node:
        wanted[node.op_type] = wanted.get(node.op_type, 0) + 1
    assert facts.operators == wanted
    assert facts.count("MatMul", "Conv") == 1


def test_what_a_runtime_computes_once_as_it_loads_a_graph_is_no_cost(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Cast", ["q"], ["c"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["c", "s"], ["w"]),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", 2]) for n in "xy"]
    weights = {"q": np.eye(2, dtype=np.int8), "s": np.float32(0.1)}
    tensors = [onnx.numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()]
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", info[:1], info[1:], tensors)), tmp_path / "m.onnx")
    assert graph_facts(tmp_path / "m.onnx").operators == {"MatMul": 1}


def latency(before_ms: float, after_ms: float) -> dict[str, Evidence]:
    seconds = np.array([[before_ms], [after_ms]]) / 1000 * np.linspace(0.99, 1.01, 40)
    processes = as_processes(seconds)
    return {name: timing_evidence(name, p, processes, 0.95) for name, p in (("latency_p50", 50), ("latency_p99", 99))}


X86 = {"cpu_flags": ["avx2"]}
PLAIN = GraphFacts({"MatMul": 9}, {})
SIGNED = GraphFacts({"QuantizeLinear": 9, "MatMul": 9}, {"int8": 9})


def on(backend: str, environment: dict[str, Any], graph: GraphFacts) -> Subject:
    """A bundle that is made for the backend which runs it."""
    return Subject(backend, backend, environment, graph)


SLOW_LAYERS = Cause("casts", "9 casts take 1 of 3 ms", "they are slow", "keep float32", "", 1.0, 1.5)


def explained(*causes: Cause) -> Explanation:
    """A profile's record with these causes."""
    side = SideTime(3.0, 2.9, 9, (), 20.0)
    return Explanation("onnxruntime-cpu", "call", side, side, {"float32": 100.0}, (), {}, causes)


def test_a_slower_candidate_is_told_first_with_what_its_profile_shows() -> None:
    subject = replace(on("onnxruntime-cpu", X86, SIGNED), explanation=explained(SLOW_LAYERS))
    first, second = slower(latency(2, 3), subject)
    assert first == "The candidate is SLOWER than the baseline: 3 ms against 2 ms on onnxruntime-cpu, 0.67x."
    assert second == "9 casts take 1 of 3 ms: they are slow. Keep float32 (about 1.50x)."


def test_a_faster_candidate_whose_first_token_comes_later_is_told() -> None:
    late = timing_evidence("ttft", 50, as_processes(np.array([[0.1], [0.11]]) * np.linspace(0.99, 1.01, 40)), 0.95)
    found = latency(100, 50) | {"ttft": late}
    said = advise(found | size_evidence(10, 5), on("onnxruntime-cpu", {}, PLAIN), [], [], "")
    assert said == ["The first token comes SLOWER than with the baseline: 110 ms against 100 ms, 0.91x."]
    assert slower_otherwise(latency(100, 50) | {"ttft": latency(100, 50)["latency_p50"]}) == []


def test_a_candidate_that_is_less_fast_than_was_forecast_is_told_with_what_its_profile_shows() -> None:
    subject = replace(on("onnxruntime-cpu", X86, SIGNED), explanation=explained(SLOW_LAYERS), forecast=2.5)
    assert asks_why(latency(3, 2), 2.5) and not asks_why(latency(3, 2), 1.6) and not asks_why(latency(3, 2), None)
    first, second = slower(latency(3, 2), subject)
    assert (
        "1.50x as fast" in first
        and "less than the 2.50x that the plan forecast" in first
        and second.startswith("9 casts")
    )
    assert slower(latency(3, 2), replace(subject, forecast=1.6)) == []


@pytest.mark.parametrize(("after", "told"), [(99, False), (100, True), (120, True)])
def test_a_candidate_that_is_not_smaller_is_told(after: int, told: bool) -> None:
    said = larger(size_evidence(100, after), "its scales take room")
    assert bool(said) == told
    assert all(text.startswith(f"The candidate is NOT SMALLER than the baseline: {after} bytes") for text in said)


def test_a_bundle_for_an_engine_is_not_called_slow_where_another_backend_stands_in() -> None:
    evidence = latency(2, 3) | size_evidence(100, 50)
    subject = Subject("onnxruntime-cpu", "tensorrt", X86, SIGNED, speed_counts=False)
    rows = [row("onnxruntime-cpu", "baseline", "float32", 1.0), row("onnxruntime-cpu", "candidate", "int8", 0.5)]
    said = advise(
        evidence, subject, [*rows, row("openvino", "baseline", "bf16", 3.0)], ["It was made for tensorrt."], ""
    )
    assert said == [
        "It was made for tensorrt.",
        "Its times here (3 ms against 2 ms) are those of onnxruntime-cpu: "
        "they say nothing about its speed on tensorrt, which it is made for.",
    ]


@pytest.mark.parametrize(
    ("precision", "layers", "reason"),
    [
        (
            "int8",
            [{"action": "int8", "history": ["sparsify: sparse 0.5"]}],
            "too few for what their scales and operators",
        ),
        (
            "float32",
            [{"action": "sparse", "history": ["sparsify: sparse 50% by magnitude"]}],
            "zeros are stored as any",
        ),
        (
            "as it was",
            [{"action": "distilled", "history": ["sparsify: sparse 2:4", "distill: distilled"]}],
            "zeros are",
        ),
        ("float32", [{"action": "kept", "history": ["sparsify: kept not selected"]}], "no pass left fewer weights"),
        ("float32", [], "no pass left fewer weights"),
    ],
)
def test_the_reason_why_files_are_no_smaller_is_what_was_done(
    precision: str, layers: list[dict[str, Any]], reason: str
) -> None:
    assert reason in reason_not_smaller(precision, layers)


def test_an_unknown_interval_is_told_in_words() -> None:
    few = np.array([[2.0], [2.0]]) / 1000 * np.linspace(0.99, 1.01, 5)
    evidence = {"latency_p50": timing_evidence("latency_p50", 50, as_processes(few, n=3), 0.95)}
    (said,) = slower(evidence, on("onnxruntime-cpu", X86, PLAIN))
    assert said.endswith("2 ms against 2 ms on onnxruntime-cpu, 1.00x (interval unknown).")
    assert (
        interval_words(-math.inf, 2.0) == "at most 2" and interval_words(1.0, math.inf, ".1f", "x") == "at least 1.0x"
    )


def test_a_reason_that_cannot_be_seen_is_not_invented() -> None:
    assert slower(latency(2, 3), on("onnxruntime-cpu", X86, PLAIN))[1:] == ["No reason for it can be seen from here."]


def test_no_difference_is_told_and_a_faster_candidate_is_not() -> None:
    (said,) = slower(latency(2, 2), on("onnxruntime-cpu", X86, PLAIN))
    assert "not measurably faster" in said
    assert slower(latency(3, 2), on("onnxruntime-cpu", X86, PLAIN)) == []


def test_a_call_too_short_to_gain_is_a_reason_where_the_profile_shows_no_other() -> None:
    subject = on("openvino", X86, PLAIN)
    assert reasons(0.01, subject) == [
        "A call is so short that its fixed cost dominates: compare throughput at a larger batch."
    ]
    assert reasons(0.01, replace(subject, explanation=explained(SLOW_LAYERS))) == [SLOW_LAYERS.sentence]
    assert reasons(5.0, subject) == []


def test_that_products_may_saturate_is_told_where_they_do() -> None:
    unsigned = GraphFacts({"QuantizeLinear": 9, "MatMul": 9}, {"uint8": 9})
    (said,) = less_exact(on("onnxruntime-cpu", X86, unsigned))
    assert "which may saturate" in said and "weight_bits: 7" in said
    assert less_exact(replace(on("onnxruntime-cpu", X86, unsigned), narrow=True)) == []
    assert less_exact(on("onnxruntime-cpu", {"cpu_flags": ["avx2", "avx_vnni"]}, unsigned)) == []
    assert less_exact(on("onnxruntime-cpu", {}, unsigned)) == []
    assert less_exact(on("openvino", X86, unsigned)) == less_exact(on("onnxruntime-cpu", X86, PLAIN)) == []


def test_a_busy_machine_is_told() -> None:
    assert noisy(latency(3, 2), {"load_average": 1.5, "cores": 2}) == []
    assert noisy(latency(3, 2), {"load_average": None, "cores": 2}) == []
    (said,) = noisy(latency(3, 2), {"load_average": 4.0, "cores": 2})
    assert "load average 4 on 2 cores" in said
    (said,) = noisy(latency(3, 2), {"load_average": 4.0, "cores": 2, "taken": 0.43})
    assert said.startswith("Other work had the processor for 43% of the time")
    assert noisy(latency(3, 2), {"load_average": 4.0, "cores": 2, "taken": 0.01}) == []
    late = timing_evidence("latency_p99", 99, as_processes(np.full((2, 20), 0.1)), 0.95)
    (said,) = noisy({**latency(3, 2), "latency_p99": late}, {})
    assert "p99 is 50.0x p50" in said


def test_a_ratio_that_is_not_that_of_the_times_beside_it_is_explained() -> None:
    before = np.array([9.5] * 11 + [1.0] * 9)
    rounds = np.array([before, np.concatenate([before[:9] / 1.04, [6.8] * 2, before[11:] / 1.04])]) / 1000
    evidence = {"latency_p50": timing_evidence("latency_p50", 50, as_processes(rounds), 0.95)}
    (said,) = disagreeing(evidence)
    assert said.startswith(
        "latency_p50: the machine's speed changed during the run: 1.04x is from calls timed side by side"
    )
    assert disagreeing(latency(3, 2)) == []


def row(name: str, artifact: str, precision: str, speedup: float) -> dict[str, Any]:
    fidelity = {"n_samples": 9, "agreement": 0.99}
    timed = {"latency_ms": {"p50": 1.0}, "speedup": speedup, "fidelity": fidelity, "fastest": False}
    return {"name": name, "artifact": artifact, "precision": precision, **timed}


def test_plain_bf16_that_beats_the_candidate_is_recommended() -> None:
    main = [row("onnxruntime-cpu", "baseline", "float32", 1.0), row("onnxruntime-cpu", "candidate", "int8", 1.3)]
    (said,) = faster_elsewhere([*main, row("openvino", "baseline", "bf16", 1.9)])
    assert said.startswith("openvino runs the float model in bf16 1.90x as fast as onnxruntime-cpu runs it in float32")
    assert "faster than the int8 candidate (1.30x on onnxruntime-cpu)" in said
    assert "agreement 0.9900" in said
    assert faster_elsewhere([*main, row("openvino", "baseline", "bf16", 1.2)]) == []
    (said,) = faster_elsewhere([*main, row("openvino", "candidate", "int8", 2.5)])
    assert said.startswith("openvino is the fastest way to run the candidate here: 2.50x")
    assert faster_elsewhere(main) == []


def test_bf16_that_gains_nothing_over_float_is_not_recommended() -> None:
    slow = [row("onnxruntime-cpu", "baseline", "float32", 1.0), row("onnxruntime-cpu", "candidate", "int8", 0.5)]
    assert faster_elsewhere([*slow, row("openvino", "baseline", "bf16", 1.0)]) == []


def test_it_says_where_a_faster_model_gains_little() -> None:
    stages = {"decode": 6.0, "encode": 1.0, "call": 2.0, "answer": 1.0}
    subject = Subject("onnxruntime-cpu", "onnxruntime-cpu", {}, GraphFacts({}, {}), True, stages)
    (sentence,) = explain_time_around_call(subject)
    assert "call is 20 % of the 10 ms" in sentence and "decode is 60 %" in sentence and "only 1.25x" in sentence
    swift = {**stages, "decode": 0.1, "call": 20.0}
    assert explain_time_around_call(replace(subject, stages_ms=swift)) == []
