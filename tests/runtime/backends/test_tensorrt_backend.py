"""Engines on a stand-in for a GPU: buffers, profiles, captured graphs, and every refusal before the library tries."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorrt_fakes import RECORDED, Doubling, HostCuda, Library, load_engine, pretend_machine

from runtime.backends import open_options, tensorrt
from runtime.bundle.engine import EngineRecord, Here, InputShapes, why_not_here
from runtime.bundle.manifest import Artifact
from runtime.clock.turns import MIN_ROUNDS, make_call
from runtime.errors import BundleError, RuntimeFailure, UsageError
from runtime.measure.process import time_on_device
from runtime.nvidia import cuda, tensorrt_api
from runtime.nvidia.gpu import Gpu

RECORD = EngineRecord(
    runtime="tensorrt",
    version="10.16.1.11",
    platform="linux-x86_64",
    compute_capabilities=("8.6",),
    profiles=({"x": InputShapes((1, 3), (4, 3), (8, 3))},),
)
HERE = Here("10.16.1.11", "linux-x86_64", "8.6")


@pytest.fixture(params=RECORDED, ids=lambda path: path.stem)
def stand_in(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """(how an engine is opened, the engine, the CUDA runtime) of each recorded version."""
    library, host = Library(request.param), HostCuda()
    engine = Doubling(library.names, library.module, host)
    load_engine(monkeypatch, library, host, engine)
    path = tmp_path / "model.engine"
    path.write_bytes(b"engine")
    return lambda **options: tensorrt.TENSORRT.open(path, 1, options), engine, host


def artifact_of(record: EngineRecord) -> Artifact:
    return Artifact("engine", "model/model.engine", "tensorrt", "float32", (), (), 1, kind="engine", engine=record)


def rows(n: int, start: float = 0.0) -> dict[str, np.ndarray]:
    return {"x": np.arange(3 * n, dtype=np.float32).reshape(n, 3) + np.float32(start)}


def test_runs_in_the_profile_that_takes_the_shapes(stand_in: Any) -> None:
    opened, engine, host = stand_in
    session = opened()
    for n in (2, 12, 5, 16):
        feeds = rows(n)
        assert np.array_equal(session.run(feeds)["y"], 2 * feeds["x"])
        assert engine.active == (0 if n <= 8 else 1)
    assert session.device_ms == 1.5
    with pytest.raises(UsageError, match=r"no profile of the engine takes .*17, 3.*; it has x \[1, 3\] to \[8, 3\]"):
        session.run(rows(17))
    session.close()
    assert host.memory == {}
    with pytest.raises(UsageError, match="the session is closed"):
        session.run(rows(1))


def test_buffers_stay_while_they_are_large_enough(stand_in: Any) -> None:
    opened, _, host = stand_in
    session = opened()
    for n in (8, 2, 8):
        session.run(rows(n))
    assert host.calls.count("cudaMalloc") == 2  # x and y, once each


def test_a_captured_graph_is_launched_again_with_new_values(stand_in: Any) -> None:
    opened, engine, host = stand_in
    session = opened(cuda_graph=True)
    for start in (0.0, 5.0, 9.0):
        feeds = rows(4, start)
        assert np.array_equal(session.run(feeds)["y"], 2 * feeds["x"])
    assert host.calls.count("cudaGraphLaunch") == 3 and engine.runs == 4
    feeds = rows(6)
    assert np.array_equal(session.run(feeds)["y"], 2 * feeds["x"])
    assert engine.runs == 6 and host.calls.count("cudaGraphExecDestroy") == 1
    session.close()
    assert host.calls.count("cudaGraphExecDestroy") == host.calls.count("cudaGraphDestroy") == 2


def test_a_recording_that_fails_is_ended(stand_in: Any) -> None:
    opened, engine, host = stand_in
    session = opened(cuda_graph=True)
    runs = iter([True, False])
    engine.execute_async_v3 = lambda stream: next(runs)
    with pytest.raises(RuntimeFailure, match="the engine refused the call"):
        session.run(rows(4))
    assert host.recording is None


def test_options_of_the_build_that_opening_must_know(stand_in: Any) -> None:
    opened, engine, _ = stand_in
    opened()
    assert not engine.host_code
    opened(host_code=True, weight_streaming_budget_mib=0)
    assert engine.host_code and engine.budget == 0
    with pytest.raises(UsageError, match="weight_streaming_budget: 1048576 bytes, and the engine can stream 0"):
        opened(weight_streaming_budget_mib=1)
    engine.create_execution_context = lambda: None
    with pytest.raises(RuntimeFailure, match="found no room on the GPU: no reason given"):
        opened()


def test_refusals_of_an_open_engine(stand_in: Any, tmp_path: Path) -> None:
    opened, engine, _ = stand_in
    with pytest.raises(UsageError, match="unknown option 'streams'; known: cuda_graph"):
        opened(streams=2)
    session = opened()
    with pytest.raises(UsageError, match="the model takes the inputs x"):
        session.run({"z": rows(1)["x"]})
    engine.execute_async_v3 = lambda stream: False
    with pytest.raises(RuntimeFailure, match="the engine refused the call: no reason given"):
        session.run(rows(1))
    broken = tmp_path / "broken.engine"
    broken.write_bytes(b"")
    with pytest.raises(BundleError, match="cannot load the engine: no reason given; compile it here"):
        tensorrt.TENSORRT.open(broken, 1, {})


def test_an_engine_without_weights_gets_those_of_the_file_that_the_bundle_names(
    stand_in: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened, _, _ = stand_in
    given: list[Path] = []
    monkeypatch.setattr(tensorrt_api, "refit", lambda trt, messages, engine, path: given.append(path))
    record = replace(RECORD, weights_from="model/model.onnx", version_compatible=True)
    with pytest.raises(BundleError, match="the model file is missing"):
        open_options(tmp_path, replace(artifact_of(record)))
    (tmp_path / "model").mkdir()
    (tmp_path / "model/model.onnx").write_bytes(b"\x08\x0a")
    artifact = artifact_of(record)
    assert open_options(tmp_path, artifact)["host_code"] is True
    opened(**open_options(tmp_path, artifact))
    opened(**open_options(tmp_path, replace(artifact, engine=RECORD)))
    assert given == [tmp_path / "model/model.onnx"]
    with pytest.raises(BundleError, match="leaves the bundle's folder"):
        open_options(tmp_path, replace(artifact, engine=replace(record, weights_from="../model.onnx")))


def test_times_of_the_gpu_alone_where_all_models_run_on_it(stand_in: Any) -> None:
    opened, _, _ = stand_in
    session, feeds = opened(), [rows(2), rows(3)]
    call = make_call(session, feeds)
    times = time_on_device([session, session], [call, call])
    assert times is not None
    assert times.shape == (2, MIN_ROUNDS) and np.allclose(times, 0.0015)
    elsewhere = type("OnTheCpu", (), {"run": lambda self, feeds: feeds})()
    assert time_on_device([session, elsewhere], [call, call]) is None


def test_an_error_of_cuda_is_raised_by_its_name() -> None:
    device = cuda.Device(HostCuda())
    code = type("Code", (int,), {"name": "cudaErrorMemoryAllocation"})(2)
    device.api = type("Full", (), {"cudaMalloc": lambda self, size: (code, 0)})()
    with pytest.raises(RuntimeFailure, match="cudaErrorMemoryAllocation"):
        device.buffer("x", 10)


def test_a_buffer_that_could_not_grow_is_gone() -> None:
    host = HostCuda()
    device = cuda.Device(host)
    device.buffer("x", 10)
    allocate, host.cudaMalloc = host.cudaMalloc, lambda size: (2, 0)  # type: ignore[method-assign]
    with pytest.raises(RuntimeFailure, match="CUDA: 2"):
        device.buffer("x", 1000)
    host.cudaMalloc = allocate  # type: ignore[method-assign]
    assert device.buffer("x", 1) in host.memory
    device.close()
    assert host.memory == {}


@pytest.mark.parametrize(
    ("here", "said"),
    [
        (HERE, None),
        (Here("10.16.1.12", "linux-x86_64", "8.6"), r"compiled by tensorrt 10\.16\.1\.11, and 10\.16\.1\.12 is here"),
        (Here("10.16.1.11", "windows-amd64", "8.6"), "compiled for linux-x86_64, and this is windows-amd64"),
        (Here("10.16.1.11", "linux-x86_64", "8.9"), r"for compute capability 8\.6, and this GPU has 8\.9"),
    ],
)
def test_an_engine_of_another_machine(here: Here, said: str | None) -> None:
    problems = why_not_here(RECORD, here)
    assert bool(problems) == (said is not None)
    if said is not None:
        assert re.search(said, problems[0])
        assert "compile it here: compress compile BUNDLE" in problems[0]


def test_engines_that_run_on_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    newer = replace(HERE, version="10.17.0", capability="9.0")
    assert len(why_not_here(RECORD, newer)) == 2
    kind = replace(RECORD, version_compatible=True, hardware_compatibility_level="ampere+")
    assert why_not_here(kind, newer) == []
    assert len(why_not_here(kind, replace(newer, version="11.0", capability="7.5"))) == 2
    pretend_machine(monkeypatch, Library(RECORDED[0]).module, Gpu("RTX 2080", "7.5", "580"))
    with pytest.raises(BundleError, match=r"model\.engine: it is for compute capability 8\.6, and this GPU has 7\.5"):
        tensorrt.check_engine(tmp_path / "model.engine", RECORD)
