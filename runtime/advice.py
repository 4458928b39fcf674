"""What the numbers mean for the user: is it slower and why, and is there a faster way to run the same model?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from runtime.evidence import Evidence
from runtime.onnx_graph import GraphFacts

VNNI = ("avx512_vnni", "avx_vnni", "amx_int8")
"""Any of these x86 instruction sets makes int8 products fast."""
FIXED_COST_MS = 0.2
"""Calls shorter than this are mostly the runtime's own cost."""
NOISY = 3.0
"""p99 over p50 from which a machine counts as busy."""
WORTHWHILE = 1.05
"""Speed-ups below this are not worth a sentence."""


def advise(
    evidence: Mapping[str, Evidence],
    backend: str,
    environment: Mapping[str, Any],
    graph: GraphFacts,
    rows: Sequence[Mapping[str, Any]],
    notes: Sequence[str],
) -> list[str]:
    """Sentences, the most important first."""
    said = slower(evidence, backend, environment, graph)
    return said + larger(evidence) + list(notes) + faster_elsewhere(rows) + noisy(evidence, environment)


def slower(
    evidence: Mapping[str, Evidence], backend: str, environment: Mapping[str, Any], graph: GraphFacts
) -> list[str]:
    """Says so where the candidate is not faster at `latency_p50`, with the reasons that can be seen; else nothing."""
    latency = evidence["latency_p50"]
    speedup, before = latency.speedup, latency.baseline
    if speedup is None or before is None or speedup.low > 1:
        return []
    times = f"{latency.candidate.value:.3g} ms against {before.value:.3g} ms on {backend}"
    if speedup.high >= 1:
        sure = f"interval {speedup.low:.2f}x to {speedup.high:.2f}x"
        return [f"The candidate is not measurably faster than the baseline: {times}, {speedup.value:.2f}x ({sure})."]
    why = reasons(latency.candidate.value, backend, environment, graph) or ["no reason for it can be seen from here"]
    return [f"The candidate is SLOWER than the baseline: {times}, {speedup.value:.2f}x. {_sentence('; '.join(why))}"]


def larger(evidence: Mapping[str, Evidence]) -> list[str]:
    """Says so where the candidate's files are not smaller; else nothing."""
    size = evidence["size"]
    if size.baseline is None or size.candidate.value < size.baseline.value:
        return []
    return [
        f"The candidate is NOT SMALLER than the baseline: {size.candidate.value:.0f} bytes against "
        f"{size.baseline.value:.0f}. The weights are too few for what their scales and operators add."
    ]


def reasons(latency_ms: float, backend: str, environment: Mapping[str, Any], graph: GraphFacts) -> list[str]:
    """What about the graph and the machine is known to make a quantized model slow."""
    found = []
    flags = environment.get("cpu_flags", [])
    quantized = graph.count("QuantizeLinear", "DynamicQuantizeLinear")
    x86 = "avx2" in flags
    if graph.activations.get("int8") and x86 and backend == "onnxruntime-cpu":
        found.append(
            f"{graph.activations['int8']} activations are signed int8, for which onnxruntime has slow kernels on x86"
            ": build for target onnxruntime-cpu, which makes them unsigned"
        )
    if quantized and x86 and not any(flag in flags for flag in VNNI):
        found.append("this CPU has no VNNI or AMX, so int8 products gain little here")
    products = graph.count("MatMul", "Gemm", "Conv")
    pairs = graph.count("QuantizeLinear", "DequantizeLinear")
    if quantized and pairs > 4 * max(products, 1):
        found.append(
            f"{pairs} quantize and dequantize nodes stand around {products} products; those that do not fuse cost time"
        )
    if pairs and not quantized and not graph.count("MatMulInteger"):
        found.append(
            "only the weights are in fewer bits, which saves memory traffic when a call has few rows (tokens) and "
            "costs time when it has many; the int8 pass makes the products themselves faster"
        )
    if not pairs and not quantized and backend == "onnxruntime-cpu" and (casts := graph.count("Cast")) > 1:
        found.append(
            f"{casts} casts stand between float types: onnxruntime has few half-precision kernels for CPUs and "
            "computes the rest in float32; half precision pays on a GPU or, as bf16, in openvino"
        )
    if latency_ms < FIXED_COST_MS:
        found.append("a call is so short that its fixed cost dominates: compare throughput at a larger batch")
    return found


def faster_elsewhere(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where another way to run it beats the candidate on its own backend; `rows` are `alternatives.compare`'s."""
    timed = [row for row in rows if "latency_ms" in row]
    if len(timed) < 3 or timed[1] is not rows[1]:
        return []
    ours, best = timed[1], max(timed, key=lambda row: float(row["speedup"]))
    said = []
    for row in timed:
        if (
            row["artifact"] == "baseline"
            and row["precision"] == "bf16"
            and row["speedup"] > WORTHWHILE * max(ours["speedup"], rows[0]["speedup"])
        ):
            said.append(
                f"{row['name']} runs the float model in bf16 {row['speedup']:.2f}x as fast as {rows[0]['name']} runs it"
                f" in {rows[0]['precision']}, faster than the {ours['precision']} candidate"
                f" ({ours['speedup']:.2f}x on {ours['name']}): consider it before quantization{_closeness(row)}."
            )
    if best is not ours and best["artifact"] != "baseline" and best["speedup"] > WORTHWHILE * ours["speedup"]:
        said.append(
            f"{best['name']} is the fastest way to run the candidate here: {best['speedup']:.2f}x,"
            f" against {ours['speedup']:.2f}x on {ours['name']}{_closeness(best)}."
        )
    return said


def _closeness(row: Mapping[str, Any]) -> str:
    fidelity = row.get("fidelity", {})
    said = [f"{name} {fidelity[name]:.4f}" for name in ("agreement", "cosine") if name in fidelity]
    return f" (to the baseline on {fidelity['n_samples']} samples: {', '.join(said)})" if said else ""


def noisy(evidence: Mapping[str, Evidence], environment: Mapping[str, Any]) -> list[str]:
    """Warns where the machine had other work, or p99 is far above p50: then no latency here is worth much."""
    said = []
    load, cores = environment.get("load_average"), environment.get("cores")
    if load is not None and cores is not None and load > cores:
        said.append(f"The machine was busy: load average {load:g} on {cores} cores. Measure again when it is idle.")
    p50, p99 = evidence["latency_p50"], evidence["latency_p99"]
    sides = [(p50.candidate, p99.candidate), *([(p50.baseline, p99.baseline)] if p50.baseline and p99.baseline else [])]
    spread = max(late.value / usual.value for usual, late in sides)
    if spread >= NOISY:
        said.append(f"Timings varied much (p99 is {spread:.1f}x p50): other work, or inputs of very different sizes.")
    return said


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."
