"""Every backend: the same model gives the same numbers, and what does not load or fit is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from runtime.backends import BACKENDS, Session, find_backend
from runtime.bundle.engine import ENGINES
from runtime.bundle.tensors import TensorSpec
from runtime.errors import BundleError, MissingDependency, UsageError

X = np.random.default_rng(0).normal(size=(3, 3, 4, 4)).astype(np.float32)


@pytest.fixture(params=[name for name in BACKENDS if name not in ENGINES])
def backend(request: pytest.FixtureRequest) -> str:
    reason = BACKENDS[request.param].available()
    if reason is not None:
        pytest.skip(reason)
    return str(request.param)


@pytest.fixture
def model(tmp_path: Path, tiny: Any) -> Path:
    path: Path = tiny.image_model(tmp_path / "model.onnx")
    return path


@pytest.fixture
def session(backend: str, model: Path) -> Session:
    return BACKENDS[backend].open(model, 1, {})


def test_numbers_are_those_of_numpy(session: Session, model: Path) -> None:
    weight = onnx.numpy_helper.to_array(onnx.load(model).graph.initializer[0])
    outputs = session.run({"x": X})
    np.testing.assert_allclose(
        outputs["logits"], X.mean(axis=(2, 3)) @ weight, rtol=1e-2, atol=1e-2
    )  # OpenVINO may use bf16
    assert outputs["logits"].dtype == np.float32


def test_inputs_and_outputs(session: Session, backend: str) -> None:
    free = "dim0" if backend == "openvino" else "batch"
    assert session.inputs == (TensorSpec("x", "float32", (free, 3, 4, 4)),)
    assert session.outputs == (TensorSpec("logits", "float32", (free, 5)),)


def test_outputs_may_be_kept(session: Session) -> None:
    first = session.run({"x": X})["logits"]
    copy = first.copy()
    session.run({"x": X * 2})
    np.testing.assert_array_equal(first, copy)


def test_strided_arrays_are_what_they_show(session: Session) -> None:
    np.testing.assert_array_equal(session.run({"x": X[::2]})["logits"], session.run({"x": X[::2].copy()})["logits"])


@pytest.mark.parametrize("dtype", ["float16", "float64", "int64", "int32", "uint8", "int8", "bool"])
def test_dtypes_have_numpys_names(tmp_path: Path, tiny: Any, backend: str, dtype: str) -> None:
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    x, y = (helper.make_tensor_value_info(name, kind, ["n", 2]) for name in "xy")
    path = tiny.save(tmp_path / "same.onnx", [helper.make_node("Identity", ["x"], ["y"])], [x], [y], {})
    session = BACKENDS[backend].open(path, 1, {})
    assert session.inputs[0].dtype == dtype
    values = np.array([[0, 1], [1, 0]], dtype)
    result = session.run({"x": values})["y"]
    np.testing.assert_array_equal(result, values)
    assert result.dtype == dtype


def test_threads_and_options(backend: str, model: Path) -> None:
    one, two = (BACKENDS[backend].open(model, threads, {}).run({"x": X})["logits"] for threads in (1, 2))
    np.testing.assert_allclose(one, two, rtol=1e-6)
    with pytest.raises(UsageError, match=f"{backend}: threads is 0; give 1 to 1024"):
        BACKENDS[backend].open(model, 0, {})
    with pytest.raises(UsageError, match=f"{backend}: unknown option 'speed'; known: "):
        BACKENDS[backend].open(model, 1, {"speed": 11})


def test_openvino_precision(model: Path) -> None:
    if BACKENDS["openvino"].available() is not None:
        pytest.skip("openvino is not installed")
    exact = BACKENDS["onnxruntime-cpu"].open(model, 1, {}).run({"x": X})["logits"]
    full = BACKENDS["openvino"].open(model, 1, {"precision": "f32"}).run({"x": X})["logits"]
    np.testing.assert_allclose(full, exact, rtol=1e-5, atol=1e-6)
    with pytest.raises(UsageError, match="precision is 'int8'; give f32, bf16"):
        BACKENDS["openvino"].open(model, 1, {"precision": "int8"})


@pytest.mark.parametrize("name", ["onnxruntime-cpu", "openvino"])
def test_a_signal_after_a_session_ends_the_run_in_order(name: str, model: Path) -> None:
    """And not by a segmentation fault, on a stack for signal handlers that went with a library's memory."""
    if reason := BACKENDS[name].available():
        pytest.skip(reason)
    code = f"""
import gc, signal
from pathlib import Path
from runtime.backends import BACKENDS
from runtime.processes.endings import end_command
def run():
    sessions = [BACKENDS[{name!r}].open(Path({str(model)!r}), 1, {{}}) for _ in range(2)]
    while sessions:
        sessions.pop(0).close()
        gc.collect()
    signal.raise_signal(signal.SIGTERM)
raise SystemExit(end_command(run, False))
"""
    unmapped = {"MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_TRIM_THRESHOLD_": "0"}  # freed memory is not there any more
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | unmapped, capture_output=True, text=True, check=False
    )
    assert done.returncode == 143, done.stderr


def test_wrong_feeds(session: Session) -> None:
    with pytest.raises(UsageError, match="the model takes the inputs x; given: y"):
        session.run({"y": X})
    with pytest.raises(UsageError, match="input 'x' is float64, but the model takes float32"):
        session.run({"x": X.astype(np.float64)})
    with pytest.raises(UsageError, match=r"model\.onnx"):
        session.run({"x": X[:, :2]})


def test_closed_session(session: Session) -> None:
    session.close()
    with pytest.raises(UsageError, match="the session is closed"):
        session.run({"x": X})


def test_model_that_does_not_load(tmp_path: Path, tiny: Any, backend: str) -> None:
    with pytest.raises(BundleError, match=r"no\.onnx: the model file is missing"):
        BACKENDS[backend].open(tmp_path / "no.onnx", 1, {})
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in "xy")
    path = tiny.save(tmp_path / "odd.onnx", [helper.make_node("Teleport", ["x"], ["y"])], [x], [y], {})
    with pytest.raises(
        BundleError, match=r"odd\.onnx: .* cannot load the model: .*; (upgrade onnxruntime|use the backend)"
    ):
        BACKENDS[backend].open(path, 1, {})


def test_external_data_is_read_from_the_model_folder_only(tmp_path: Path, backend: str, model: Path) -> None:
    loaded = onnx.load(model)
    tensor = loaded.graph.initializer[0]
    (tmp_path / "secret").write_bytes(tensor.raw_data)
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside/weights").write_bytes(tensor.raw_data)
    (tmp_path / "inside/link").symlink_to(tmp_path / "secret")
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    entry = tensor.external_data.add(key="location")
    path = tmp_path / "inside/model.onnx"
    for location, message in (
        ("../secret", "leaves"),
        (str(tmp_path / "secret"), "leaves"),
        ("link", "leads out of"),
        ("weights", None),
    ):
        entry.value = location
        path.write_bytes(loaded.SerializeToString())
        if message is None:
            BACKENDS[backend].open(path, 1, {}).run({"x": X})
            continue
        with pytest.raises(BundleError, match=message):
            BACKENDS[backend].open(path, 1, {})


def test_backend_that_is_not_installed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, package in (("onnxruntime-cpu", "onnxruntime"), ("openvino", "openvino")):
        monkeypatch.setitem(sys.modules, package, None)
        reason = BACKENDS[name].available()
        assert reason is not None
        assert f"pip install {package}" in reason
        with pytest.raises(MissingDependency, match=f"the backend {name} needs the package '{package}'"):
            BACKENDS[name].open(model, 1, {})


def test_unknown_backend() -> None:
    with pytest.raises(UsageError, match="unknown backend 'tpu'; known: onnxruntime-cpu, openvino"):
        find_backend("tpu")
    assert all(backend.name == name for name, backend in BACKENDS.items())


def test_a_message_that_is_no_unicode_is_told_all_the_same(tmp_path: Path, tiny: Any) -> None:
    path = tiny.image_model(tmp_path / "model.onnx")
    path.write_bytes(path.read_bytes().replace(b"Flatten", b"Fl\xd9tten"))
    with pytest.raises(BundleError, match=r"model\.onnx: ONNX Runtime .* cannot load the model"):
        tiny.open_onnx(path)


def test_threads_that_cannot_be_started_are_named(model: Path) -> None:
    """ONNX Runtime would wait for them forever."""
    code = f"""
import resource
from pathlib import Path
from runtime.backends import BACKENDS
BACKENDS["onnxruntime-cpu"].open(Path({str(model)!r}), 1, {{}}).close()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 300 * 2**20, -1))
try:
    BACKENDS["onnxruntime-cpu"].open(Path({str(model)!r}), 200, {{}})
except Exception as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.startswith("RuntimeFailure threads: 200 cannot be started here, only "), done.stderr
