"""The benchmark: what is fed, in which order it is timed, what is recorded; never how long anything took."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from shortcuts import few_rounds, without_processes
from tensorrt_fakes import pretend_machine

from runtime.backends import BACKENDS
from runtime.bundle.engine import EngineRecord
from runtime.bundle.format import Benchmark, Gate, Judgement
from runtime.bundle.tensors import TensorSpec
from runtime.clock.machine import cpu_info, environment
from runtime.encode.preprocess import TensorPreprocess, make_preprocessor
from runtime.errors import BundleError, RuntimeFailure, UsageError
from runtime.judge.alternatives import available_others
from runtime.judge.speed import speed_evidence
from runtime.measure.benchmark import (
    SHOWN,
    BenchmarkResult,
    backend_of,
    benchmark,
    choose_backend,
    count_processes,
    graph_backend,
    settings_for,
)
from runtime.measure.workload import make_feeds, stretch
from runtime.metrics import MEASURED
from runtime.nvidia.gpu import Gpu
from runtime.tasks.manifest import read_manifest, write_bundle

FAST = Benchmark(batch_size=2, throughput_batch_size=4, warmup=1, iterations=12)


def rewrite(root: Path, benchmark: Benchmark, **more: Any) -> Path:
    """The bundle with another benchmark in its judgement."""
    manifest = read_manifest(root)
    write_bundle(root, replace(manifest, judgement=Judgement(benchmark=benchmark), **more))
    return root


class JouleARead:
    """Counts a joule each time it is read."""

    def __init__(self) -> None:
        self.total = 0.0

    def joules(self) -> float:
        self.total += 1
        return self.total


# feeds


@pytest.fixture
def rows() -> Any:
    return make_preprocessor(TensorPreprocess(), (TensorSpec("x", "float32", ("batch", 1)),), None)


def columns(n: int) -> dict[str, Any]:
    return {"x": np.arange(n, dtype=np.float32)[:, None], "label": np.zeros(n, int)}


def test_feeds_go_through_all_samples_once_in_batches(rows: Any) -> None:
    feeds = make_feeds(rows, columns(12), 4, seed=0, sequence_length=None)
    assert [feed["x"].shape for feed in feeds] == [(4, 1)] * 3
    assert sorted(np.concatenate([feed["x"] for feed in feeds]).ravel()) == list(range(12))


def test_feeds_repeat_samples_where_there_are_too_few(rows: Any) -> None:
    (feed,) = make_feeds(rows, columns(3), 8, seed=0, sequence_length=None)
    assert feed["x"].shape == (8, 1)
    assert set(feed["x"].ravel()) == {0, 1, 2}


def test_a_batch_that_no_memory_holds_is_refused_before_it_is_made(rows: Any) -> None:
    with pytest.raises(UsageError, match=r"a batch of 65536 samples has about .* MiB, more than 8192"):
        make_feeds(rows, columns(3), 2**16, seed=0, sequence_length=2**20)


def test_feeds_are_the_same_for_the_same_seed(rows: Any) -> None:
    def drawn(seed: int) -> list[float]:
        return [float(x) for feed in make_feeds(rows, columns(50), 5, seed, None) for x in feed["x"].ravel()]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_stretched_texts_have_the_length_their_own_tokens_and_no_padding() -> None:
    ids = np.array([[2, 7, 3, 0, 0], [2, 5, 6, 8, 3]])
    feeds = stretch({"input_ids": ids, "attention_mask": (ids > 0).astype(np.int64), "token_type_ids": ids * 0}, 8)
    assert feeds["input_ids"].tolist() == [[2, 7, 3, 2, 7, 3, 2, 7], [2, 5, 6, 8, 3, 2, 5, 6]]
    assert feeds["attention_mask"].tolist() == [[1] * 8] * 2
    assert feeds["token_type_ids"].tolist() == [[0] * 8] * 2
    assert (
        stretch({"input_ids": ids, "attention_mask": (ids > 0).astype(np.int32)}, 2)["attention_mask"].dtype == np.int32
    )


def test_only_texts_can_be_stretched() -> None:
    with pytest.raises(UsageError, match="sequence_length fits texts only; the model's inputs are x"):
        stretch({"x": np.zeros((1, 2))}, 4)


# processes


@pytest.mark.parametrize(
    ("gates", "confidence", "count"),
    [
        ((), 0.95, 6),
        ((Gate("top1", max_drop=0.01), Gate("size_ratio", min=2.0)), 0.95, 6),
        ((Gate("latency_p95", max=5.0),), 0.95, 9),
        ((Gate("tpot", min_speedup=1.5),), 0.99, 12),
        ((Gate("peak_memory", max=1e9),), 0.95, 12),
    ],
)
def test_as_many_processes_as_an_interval_needs(gates: tuple[Gate, ...], confidence: float, count: int) -> None:
    assert count_processes(Judgement(gates=gates, confidence=confidence)) == count
    asked = Judgement(gates=gates, confidence=confidence, benchmark=Benchmark(processes=3))
    assert count_processes(asked) == 3


# a bundle


@pytest.mark.slow
def test_a_bundle_is_measured_and_nothing_is_written(image_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rewrite(image_bundle, replace(FAST, latency_limit_ms=1e6, price_per_hour=3.6))
    before = sorted(image_bundle.rglob("*"))
    monkeypatch.setattr("runtime.measure.process.find_meter", lambda backend: JouleARead())
    with without_processes(), few_rounds():
        result = benchmark(image_bundle, threads=1)
    assert sorted(image_bundle.rglob("*")) == before
    assert result.calls is not None and result.calls.shape[:2] == (6, 2)
    assert result.limited is not None and (result.limited > 0).all()
    found = speed_evidence(result, Judgement())
    assert set(found) == {name for name, metric in MEASURED.items() if not metric.of_decoders}
    assert all(e.candidate.value > 0 or e.name == "peak_memory" for e in found.values())
    assert found["energy"].candidate.value == pytest.approx(1000 / 4)  # of a thousand samples, four a call
    million = 1e6 / found["throughput"].candidate.value  # seconds
    assert found["cost_per_million"].candidate.value == pytest.approx(million * 3.6 / 3600, rel=0.05), (
        "medians of six processes each"
    )
    assert result.answers is not None and result.answers.shape[:2] == (SHOWN, 2) and result.answers.shape[3] == 4
    assert (result.answers > 0).all()
    assert found["end_to_end_p50"].candidate.value > 1000 * float(np.median(result.answers[:, 1, :, 2]))
    assert [len(probe.load_ms) for probe in result.probes] == [3, 3], "each process opened one of them first"


@pytest.mark.slow
def test_fresh_processes_find_what_this_one_would(image_bundle: Path) -> None:
    result = benchmark(rewrite(image_bundle, replace(FAST, processes=2)))
    assert result.calls is not None and result.calls.shape[:2] == (2, 2) and (result.calls > 0).all()
    assert all(probe.peak_memory_bytes[0] >= 0 and probe.load_ms[0] > 0 for probe in result.probes)
    found = speed_evidence(result, Judgement())["latency_p50"]
    assert found.candidate.lacking == "at least 6 would be needed" and found.counted == "fresh processes"


@pytest.mark.usefixtures("judge_here")
def test_a_limit_that_nothing_keeps_gives_no_batch(image_bundle: Path) -> None:
    result = benchmark(rewrite(image_bundle, replace(FAST, latency_limit_ms=1e-6)))
    assert result.limited is not None and not result.limited.any()
    assert speed_evidence(result, Judgement())["throughput_under_latency"].candidate.value == 0


@pytest.mark.usefixtures("judge_here")
def test_texts_of_a_given_length_are_measured(make_text_bundle: Callable[..., Path]) -> None:
    columns = {"text": ["the cat sat", "dog ran far on the mat"], "text_pair": ["dog", "cat"]}
    root = make_text_bundle("feature-extraction", columns, max_length=16)
    result = benchmark(rewrite(root, replace(FAST, sequence_length=32)))
    assert isinstance(result, BenchmarkResult)
    assert result.settings.sequence_length == 32


def test_a_fixed_batch_overrules_the_settings_and_says_so(image_bundle: Path) -> None:
    manifest = read_manifest(image_bundle)
    fixed = TensorSpec("x", "float32", (3, 3, 4, 4))
    artifacts = tuple(replace(artifact, inputs=(fixed,)) for artifact in manifest.artifacts)
    settings, note = settings_for(replace(manifest, artifacts=artifacts), threads=2)
    assert (settings.batch_size, settings.throughput_batch_size, settings.threads) == (3, 3, 2)
    assert note is not None
    assert "batches of exactly 3" in note
    assert settings_for(manifest, None) == (manifest.judgement.benchmark, None)


# refusals


def test_a_sequence_length_without_texts_is_refused(image_bundle: Path) -> None:
    with pytest.raises(UsageError, match="sequence_length fits texts; this bundle's samples are images"):
        benchmark(rewrite(image_bundle, replace(FAST, sequence_length=8)))


def test_an_unknown_backend_is_refused(image_bundle: Path) -> None:
    with pytest.raises(UsageError, match="unknown backend 'onnx'"):
        benchmark(image_bundle, "onnx")


def test_a_bundle_without_baseline_is_refused(image_bundle: Path) -> None:
    manifest = read_manifest(image_bundle)
    write_bundle(image_bundle, replace(manifest, artifacts=(manifest.artifact("candidate"),)))
    with pytest.raises(BundleError, match="no artifact 'baseline' to compare with; it has candidate"):
        benchmark(image_bundle)


def test_a_target_that_cannot_run_here_is_measured_elsewhere_and_says_so() -> None:
    chosen, note = choose_backend(SimpleNamespace(target="tensorrt", generates=False))
    assert chosen == "onnxruntime-cpu"
    assert note is not None
    assert "made for tensorrt, but it runs on onnxruntime-cpu here" in note
    assert choose_backend(SimpleNamespace(target="onnxruntime-cpu", generates=False)) == ("onnxruntime-cpu", None)


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine where TensorRT 10 works on a GPU of compute capability 8.6."""
    monkeypatch.setitem(BACKENDS.own, "tensorrt", replace(BACKENDS["tensorrt"], available=lambda: None))
    pretend_machine(monkeypatch, SimpleNamespace(__version__="10.16"), Gpu("a GPU", "8.6", "580"))


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize(
    ("capability", "why"),
    [("8.6", None), ("", "the candidate has not been compiled for it"), ("9.0", "it is for compute capability 9.0")],
)
def test_engines_that_are_missing_or_of_another_gpu_leave_the_judging_to_the_graph(
    image_bundle: Path, capability: str, why: str | None
) -> None:
    manifest = replace(read_manifest(image_bundle), target="tensorrt")
    record = EngineRecord("tensorrt", "10.16", "linux-x86_64", (capability,), ())
    engines = [
        replace(manifest.artifact(graph), name=name, kind="engine", engine=record)
        for name, graph in (("engine-tensorrt", "candidate"), ("baseline-tensorrt", "baseline"))
    ]
    manifest = replace(manifest, artifacts=(*manifest.artifacts, *(engines if capability else ())))
    assert graph_backend(SimpleNamespace(target="tensorrt", generates=False)) == "onnxruntime-cpu"
    assert ("tensorrt" in available_others(manifest, "onnxruntime-cpu")) == (why is None)
    if why is None:
        assert backend_of(manifest, None) == backend_of(manifest, "tensorrt") == ("tensorrt", None)
        return
    chosen, note = backend_of(manifest, None)
    assert chosen == "onnxruntime-cpu" and note is not None and why in note
    with pytest.raises(RuntimeFailure, match=f"backend 'tensorrt': .*{why}"):
        backend_of(manifest, "tensorrt")


# where it was measured


def test_the_environment_names_the_machine() -> None:
    found = environment(3)
    assert found["threads"] == 3
    assert found["cores"] >= 1
    assert {"numpy", "onnxruntime"} <= found["versions"].keys()
    assert found["python"] == sys.version.split()[0]


def test_cpu_flags_are_read_where_the_system_lists_them(tmp_path: Path) -> None:
    listed = tmp_path / "cpuinfo"
    listed.write_text(
        "processor\t: 0\nmodel name\t: A CPU: 2 GHz\nflags\t\t: fpu avx2 avx512_vnni sse\n\nmodel name : B\n"
    )
    assert cpu_info(listed) == ("A CPU: 2 GHz", ["avx2", "avx512_vnni"])
    listed.write_text("Features : fp asimddp i8mm\n")
    assert cpu_info(listed) == (os.uname().machine, ["asimddp", "i8mm"])
    assert cpu_info(tmp_path / "none")[1] == []
