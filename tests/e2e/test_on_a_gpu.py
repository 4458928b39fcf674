"""What needs an NVIDIA GPU: engines that run, kept timing caches, refitted weights, CUDA graphs, ONNX Runtime on CUDA.

Skipped where there is none; `make gpu-check` runs them and the benchmarks of engines, and writes one report.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from makers import apply, changed, cli
from tiny_lm import QUICK_DECODING, language_folder, language_recipe

from compress.commands.parity import bundle_parity
from runtime import open_bundle
from runtime.backends import BACKENDS, find_backend
from runtime.bundle.engine import ENGINES
from runtime.decode.kv_cache import Decoder
from runtime.nvidia.gpu import gpu_here
from runtime.tasks.manifest import verify

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(gpu_here() is None, reason="there is no NVIDIA GPU that the driver sees"),
]
PASSES: dict[str, list[Any]] = {
    "float32": [],
    "float16": [{"kind": "autocast"}],
    "int8": [{"kind": "int8", "restore": {"max_layers": 0}}],
}
Net = tuple[Path, dict[str, Any]]


def needs(backend: str) -> None:
    why = BACKENDS[backend].available()
    if why is not None:
        pytest.skip(f"{backend}: {why}")


def engine_recipe(net: Net, runtime: str, passes: str, **options: Any) -> dict[str, Any]:
    gates = [{"metric": "top1", "max_drop": 0.5}, {"metric": "latency_p50", "min_speedup": 0.01}]
    export = engine_export(runtime, **options)
    return changed(net[1], target=runtime, export=[export], passes=PASSES[passes], validate={"gates": gates})


def engine_export(runtime: str, **options: Any) -> dict[str, Any]:
    gpu = gpu_here()
    assert gpu is not None
    here = {"compute_capabilities": [gpu.capability]} if runtime == "tensorrt-rtx" else {}
    return {"kind": runtime, **options, **here}


@pytest.mark.parametrize("runtime", ENGINES)
@pytest.mark.parametrize("passes", list(PASSES))
def test_an_engine_runs_is_judged_and_gives_what_its_graph_gives(
    net: Net, cache: Path, tmp_path: Path, runtime: str, passes: str
) -> None:
    needs(runtime)
    report = apply(engine_recipe(net, runtime, passes), tmp_path / "b", cache, net[0])
    assert report.backend == runtime and report.verdict == "pass"
    assert report.benchmark["device_p50_ms"]["candidate"] > 0
    found = bundle_parity(tmp_path / "b", runtime)
    assert found.holds, found
    record = verify(tmp_path / "b").artifact(f"engine-{runtime}").engine
    assert record is not None and record.gpu and record.inspected == "inspector"


@pytest.mark.parametrize("runtime", ENGINES)
def test_a_captured_graph_gives_the_same_as_single_launches(
    net: Net, cache: Path, tmp_path: Path, runtime: str
) -> None:
    needs(runtime)
    apply(engine_recipe(net, runtime, "float32"), tmp_path / "b", cache, net[0])
    engine = tmp_path / "b" / verify(tmp_path / "b").artifact(f"engine-{runtime}").path
    sessions = [find_backend(runtime).open(engine, 1, {"cuda_graph": wanted}) for wanted in (False, True)]
    (spec,) = sessions[0].inputs
    random = np.random.default_rng(0)
    for batch in (1, 4, 1, 1):
        feeds = {spec.name: random.normal(size=(batch, *spec.shape[1:])).astype(np.float32)}
        one, other = (session.run(feeds) for session in sessions)
        assert all(np.array_equal(one[name], other[name]) for name in one)
    for session in sessions:
        session.close()


@pytest.mark.parametrize("runtime", ENGINES)
def test_an_engine_without_weights_gets_them_back(net: Net, cache: Path, tmp_path: Path, runtime: str) -> None:
    needs(runtime)
    whole = apply(engine_recipe(net, runtime, "float32"), tmp_path / "a", cache, net[0])
    stripped = apply(engine_recipe(net, runtime, "float32", strip_weights=True), tmp_path / "b", cache, net[0])
    assert stripped.candidate.metrics == whole.candidate.metrics


def test_a_corrupt_timing_cache_is_made_anew(net: Net, tmp_path: Path) -> None:
    needs("tensorrt")
    recipe = engine_recipe(net, "tensorrt", "float32")
    apply(recipe, tmp_path / "a", tmp_path / "cache", net[0])
    (kept,) = (tmp_path / "cache").rglob("*.timing")
    kept.write_bytes(b"not a timing cache")
    report = apply(recipe, tmp_path / "b", tmp_path / "cache", net[0])
    assert any("timing cache" in text for text in report.advice) and kept.stat().st_size > 100


@pytest.mark.parametrize("runtime", ENGINES)
def test_a_bundle_is_finished_here(
    net: Net, cache: Path, tmp_path: Path, runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs(runtime)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("compress.engine.compile._explain_library_trouble", lambda name: f"{name} is not installed")
        apply(engine_recipe(net, runtime, "int8"), tmp_path / "b", cache, net[0])
    done = cli(["compile", str(tmp_path / "b"), "--json"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["backend"] == runtime


@pytest.mark.parametrize("backend", [*ENGINES, "onnxruntime-cuda"])
def test_a_decoder_keeps_its_cache_on_the_gpu(cache: Path, tmp_path: Path, backend: str) -> None:
    needs(backend)
    language_folder(tmp_path / "lm")
    judged = {"gates": [{"metric": "nll", "max_drop": 0.05}], "benchmark": QUICK_DECODING}
    export = [engine_export(backend)] if backend in ENGINES else [{"kind": "onnx", "target": backend}]
    recipe = language_recipe(tmp_path, [{"kind": "autocast"}], target=backend, export=export, validate=judged)
    report = apply(recipe, tmp_path / "b", cache, tmp_path)
    assert report.backend == backend and report.verdict == "pass" and report.candidate.generation["decode_rate"] > 0
    if backend in ENGINES:
        found = bundle_parity(tmp_path / "b", backend)
        assert found.holds, found
    with open_bundle(tmp_path / "b", backend) as ours, open_bundle(tmp_path / "b") as reference:
        prompts = [np.array([1, 5, 9, 2]), np.array([3])]
        sides = [Decoder(one.session, one.manifest.candidate_for(one.backend).cache) for one in (ours, reference)]
        got, expected = ([side.start(prompts, 8), side.step(np.array([4, 7]))] for side in sides)
        np.testing.assert_allclose(got, expected, atol=5e-2)


def test_onnxruntime_on_cuda(bundle: Path) -> None:
    needs("onnxruntime-cuda")
    done = cli(["bench", str(bundle), "--backend", "onnxruntime-cuda", "--json"], bundle.parent)
    assert done.returncode == 0, done.stderr
