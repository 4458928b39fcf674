"""What cannot work is refused by name, at the earliest stage that can know: one message, an exit code, no traceback."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from makers import bundle_bytes, changed, write_recipe
from onnx import TensorProto, helper, numpy_helper
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from compress.cli import app
from compress.store.output import reserve_output
from runtime.bundle.format import canonical_json

Net = tuple[Path, dict[str, Any]]
RTN = {"kind": "rtn", "targets": ["Linear"]}
GENERIC: dict[str, Any] = {
    "version": 1,
    "name": "numbers",
    "model": {"source": "onnx:m.onnx", "task": "generic"},
    "data": {"calibration": {"source": "npz:d.npz"}, "evaluation": {"source": "npz:d.npz"}},
    "passes": [{"kind": "int8"}],
    "validate": {"gates": [{"metric": "cosine", "min": 0.5}]},
}


@pytest.fixture(autouse=True)
def folder(net: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the tiny model's folder, as the working directory."""
    place = tmp_path / "here"
    shutil.copytree(net[0], place)
    monkeypatch.chdir(place)
    return place


def run(command: str, recipe: dict[str, Any], *more: str) -> Result:
    """`plan` or `apply` of a recipe in the working directory; nothing may end in a traceback."""
    where = ["--out", "out/b"] if command == "apply" and "--out" not in more else []
    args = [command, str(write_recipe(Path("recipe.yaml"), recipe)), *where, *more]
    done = CliRunner().invoke(app, [*args, "--cache", "cache"])
    assert "Traceback" not in done.output and "a defect" not in done.output, done.output
    return done


def linear(weight: np.ndarray, batch: int | str = "n", op: str = "Relu", opset: int = 20) -> None:
    """m.onnx: x [batch, inputs] -> op -> matrix product -> y."""
    nodes = [helper.make_node(op, ["x"], ["r"]), helper.make_node("MatMul", ["r", "w"], ["y"])]
    shapes = {"x": [batch, weight.shape[0]], "y": [batch, weight.shape[1]]}
    values = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()}
    weights = [numpy_helper.from_array(weight.astype(np.float32), "w")]
    graph = helper.make_graph(nodes, "m", [values["x"]], [values["y"]], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10), "m.onnx")


def write_x(x: np.ndarray) -> None:
    np.savez("d.npz", x=x.astype(np.float32))


# --- the plan: exit code 2, before anything is loaded -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"passes": [{"kind": "int8", "calibratoin": "mse"}]},
            "passes.0.calibratoin: unknown key; did you mean 'calibration'?",
        ),
        ({"passes": [{"kind": "int9"}]}, "int8"),
        (
            {"passes": [{**RTN, "group_size": 96}]},
            "rtn: fc1 has 256 inputs, which group_size 96 does not divide; use group_size: 64 or 128, set indivisible: "
            "fit, or ignore it",
        ),
        (
            {"data": {"evaluation": {"source": "npz:nowhere.npz"}}},
            "data.evaluation: nowhere.npz: no such file or folder",
        ),
        (
            {"data": {"calibration": {"source": "npz:train.npz", "samples": 1000}}},
            "samples: 1000 wanted, but there are 64",
        ),
        ({"validate": {"gates": [{"metric": "topp1", "min": 0.5}]}}, "did you mean 'top1'?"),
        ({"validate": {"metrics": ["throughput_under_latency"]}}, "metric 'throughput_under_latency' needs"),
        ({"validate": {"gates": [{"metric": "size", "min_speedup": 2}]}}, "gate on 'size': min_speedup fits only"),
        (
            {"passes": [{"kind": "int8", "ignore": ["fc9"]}]},
            "int8: ignore: 'fc9' matches no layer (this model has conv, fc1, fc2",
        ),
        ({"passes": [{"kind": "int8", "targets": ["re:block"]}]}, "int8: targets: 're:block' matches no layer"),
        ({"data": {"calibration": None}}, "data: int8 needs a calibration set; add data.calibration"),
        ({"data": {"evaluation": None}}, "there is no evaluation set to judge the result on; add data.evaluation"),
        ({"data": None}, "the recipe names no data set"),
        (
            {"passes": [{"kind": "int8", "mode": "dynamic"}], "target": "tensorrt"},
            "int8: target tensorrt has no run-time",
        ),
        ({"passes": [{"kind": "autocast", "dtype": "bfloat16"}]}, "has no bfloat16 CPU kernels; use target: openvino"),
        ({"limits": {"memory_gib": 0.01}}, "are needed, 10.2 MiB are allowed"),
        ({"limits": {"disk_gib": 1e-6}}, "limits.disk_gib: about"),
        ({"export": []}, "export"),
        (
            {"export": [{"kind": "onnx", "target": "openvino"}]},
            "export: nothing is written for the recipe's own target",
        ),
        (
            {"export": [{"kind": "onnx"}, {"kind": "onnx", "target": "openvino", "opset": 19}]},
            "export.1: opset 19, but",
        ),
        ({"export": [{"kind": "onnx"}, {"kind": "onnx"}]}, "export.1: a second file for target onnxruntime-cpu"),
        ({"model": {"weights": "nowhere.safetensors"}}, "nowhere.safetensors: no such file or folder; looked for"),
        ({"model": {"source": "python:net.py:build"}}, "python:net.py:build: there is no such function"),
    ],
)
def test_a_plan_refuses(net: Net, change: dict[str, Any], said: str) -> None:
    recipe = changed(net[1], **change)
    for key in [key for key, value in recipe["data"].items() if value is None] if recipe["data"] else ():
        del recipe["data"][key]
    if recipe["data"] is None:
        del recipe["data"]
    done = run("plan", recipe)
    assert done.exit_code == 2 and said in done.stderr, done.stderr
    assert not Path("cache").exists()


def test_a_plan_says_all_problems_at_once(net: Net) -> None:
    parts: dict[str, Any] = {
        "data": {"calibration": {"source": "npz:nowhere.npz"}},
        "passes": [{"kind": "rtn", "group_size": 24, "ignore": ["fc9"]}, {"kind": "int8", "ignore": ["fc8"]}],
        "validate": {"gates": [{"metric": "top1", "min": 0.5}]},
        "limits": {"memory_gib": 0.01},
    }
    np.savez("test.npz", image=np.zeros((9, 8, 8), np.uint8))
    problems = run("plan", changed(net[1], **parts)).stderr.splitlines()
    for part in (
        "data.calibration",
        "fc1 has 256",
        "fc2 has 32",
        "'fc9'",
        "'fc8'",
        "'top1' needs labels",
        "limits.memory_gib",
    ):
        assert sum(part in line for line in problems) == 1, (part, problems)


def test_an_empty_data_file(net: Net) -> None:
    np.savez("train.npz", image=np.zeros((0, 8, 8), np.uint8), label=np.zeros(0, np.int64))
    Path("test.npz").write_bytes(b"")
    done = run("plan", net[1])
    assert done.exit_code == 2 and "train.npz: holds no samples" in done.stderr and "test.npz" in done.stderr


def test_a_fixed_batch_that_the_samples_do_not_fill() -> None:
    linear(np.eye(16), batch=8)
    write_x(np.ones((5, 16)))
    done = run("plan", GENERIC)
    assert done.exit_code == 2 and "data.calibration: 5 samples do not fill one batch of 8" in done.stderr


def test_a_gate_that_does_not_fit_the_task_or_needs_labels(net: Net) -> None:
    linear(np.eye(16))
    write_x(np.ones((20, 16)))
    done = run("plan", changed(GENERIC, validate={"gates": [{"metric": "top1", "min": 0.5}]}))
    assert done.exit_code == 2 and "metric 'top1' does not fit task generic; what fits: " in done.stderr
    np.savez("test.npz", image=np.zeros((9, 8, 8), np.uint8))
    done = run("plan", changed(net[1], validate={"gates": [{"metric": "top1", "min": 0.5}]}))
    assert (
        done.exit_code == 2 and "validate: metric 'top1' needs labels, and the evaluation set has none" in done.stderr
    )


def test_an_old_file_is_raised_to_what_a_pass_needs_or_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    linear(np.eye(32), opset=13)
    write_x(np.ones((20, 32)))
    recipe = changed(GENERIC, passes=[{"kind": "rtn", "group_size": 32}])
    assert run("plan", recipe).exit_code == 0

    class NoAdapter:
        def __init__(self, **_: Any) -> None: ...

        def __call__(self, model: Any) -> None:
            raise RuntimeError("no adapter of Relu")

    monkeypatch.setattr("onnxscript.version_converter.ConvertVersionPass", NoAdapter)
    done = run("plan", recipe)
    assert done.exit_code == 2
    assert done.stderr == (
        "passes.0: rtn needs a graph of opset 20 or later; this one has 13: export it anew with a later one (opset 13 "
        "cannot be raised to 20: no adapter of Relu)\n"
    )


# --- what only a run can see ------------------------------------------------------------------------------------------


def test_labels_out_of_range(net: Net) -> None:
    np.savez("test.npz", image=np.zeros((9, 8, 8), np.uint8), label=np.arange(9))
    done = run("apply", net[1])
    assert done.exit_code == 2 and "test.npz" in done.stderr and "label" in done.stderr


def test_nan_in_a_weight(net: Net) -> None:
    state = load_file("net.safetensors")
    state["fc1.weight"][3, 4] = float("nan")
    save_file(state, "net.safetensors")
    done = run("apply", net[1])
    assert done.exit_code == 2 and "NaN or infinity in 'fc1.weight'" in done.stderr


def test_infinity_in_the_calibration_data() -> None:
    linear(np.eye(16))
    x = np.ones((20, 16))
    x[7, 3] = np.inf
    write_x(x)
    done = run("apply", GENERIC)
    assert done.exit_code == 2 and "d.npz" in done.stderr and "row 7" in done.stderr, done.stderr


def test_a_float_model_whose_outputs_are_not_finite() -> None:
    linear(np.eye(16), op="Log")
    write_x(-np.ones((20, 16)))
    done = run("apply", GENERIC)
    assert done.exit_code == 2 and "the float model's outputs on the evaluation set are broken" in done.stderr


def test_a_cut_safetensors_file(net: Net) -> None:
    Path("net.safetensors").write_bytes(Path("net.safetensors").read_bytes()[:-100])
    done = run("plan", net[1])
    assert done.exit_code == 2 and "net.safetensors: is not a whole safetensors file" in done.stderr


@pytest.mark.parametrize("content", [b"", b"no graph", b"\x08\x0a" * 50])
def test_a_corrupt_onnx_file(content: bytes) -> None:
    Path("m.onnx").write_bytes(content)
    write_x(np.ones((5, 16)))
    done = run("plan", GENERIC)
    assert done.exit_code == 2 and "m.onnx: cannot be read as ONNX" in done.stderr


def test_a_pickle_is_not_opened(net: Net) -> None:
    torch.save({"hook": Bomb()}, "net.pt")
    done = run("plan", changed(net[1], model={"weights": "net.pt"}))
    assert done.exit_code == 2 and "net.pt: holds Python objects beside tensors, which could run code" in done.stderr
    np.savez("test.npz", image=np.array([Bomb()], dtype=object), label=np.zeros(1))
    done = run("plan", net[1])
    assert done.exit_code == 2 and "test.npz" in done.stderr
    assert not Path("exploded").exists()


class Bomb:
    """Leaves a file behind where it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, ("exploded",)


# --- the output folder ------------------------------------------------------------------------------------------------


def test_two_runs_of_one_output(net: Net) -> None:
    out = Path("out/b").resolve()
    for _ in range(2):  # a refused run leaves the lock in place
        with reserve_output(out):
            refused = [run("apply", net[1]) for _ in range(2)]
        for done in refused:
            assert (done.exit_code, done.stderr) == (
                2,
                f"{out}: another run is writing it; wait for it or choose another --out\n",
            )


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("net.py/b", "net.py: cannot be read or written: "),
        ("/proc/nobody/b", "/proc/nobody: cannot be read or written: "),
        ("net.py", "net.py: a file; --out names a folder"),
        ("mine", "mine: holds other things than a whole bundle; choose another --out or empty it"),
        (".", "here: the working directory lies in it"),
    ],
)
def test_an_output_that_cannot_be(net: Net, folder: Path, out: str, said: str) -> None:
    (folder / "mine").mkdir()
    (folder / "mine/manifest.json").write_text("{}")
    before = sorted(path.name for path in folder.rglob("*"))
    done = run("apply", net[1], "--out", out)
    assert done.exit_code == 2 and said in done.stderr, done.stderr
    assert sorted(path.name for path in folder.rglob("*") if path.name != "recipe.yaml") == before


def test_what_was_added_to_a_bundle_is_not_lost(net: Net, bundle: Path) -> None:
    shutil.copytree(bundle, "out/b")
    Path("out/b/notes.txt").write_text("mine")
    done = run("apply", net[1])
    assert done.exit_code == 2 and "a bundle to which notes.txt was added" in done.stderr


@pytest.mark.parametrize(
    "stage",
    [
        "compress.execution.cached.write_graph",
        "compress.export.bundle.write_samples",
        "runtime.report.validate.write_report",
    ],
)
def test_a_full_disk(net: Net, bundle: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device", "/some/file")

    shutil.copytree(bundle, "out/b")
    if "cached" not in stage:
        shutil.copytree(cache, "cache")
    monkeypatch.setattr(stage, full)
    done = run("apply", net[1], "--quiet")
    assert done.exit_code == 1
    assert (
        done.stderr
        == "/some/file: cannot be written: the disk is full; finished work is kept, free some space and run again\n"
    )
    assert bundle_bytes(Path("out/b")) == bundle_bytes(bundle), "the earlier bundle stays"
    assert (
        "failed: OutputError: /some/file: cannot be written: the disk is full" in Path("out/b.compress.log").read_text()
    )
    assert sorted(path.name for path in Path("out").iterdir()) == ["b", "b.compress.log"]


# --- bundles ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def broken(bundle: Path) -> Path:
    shutil.copytree(bundle, "b")
    return Path("b")


def refused(bundle: Path) -> str:
    """What `compress verify` and `python -m runtime` say; both must refuse."""
    from runtime import open_bundle
    from runtime.errors import BundleError

    done = CliRunner().invoke(app, ["verify", str(bundle)])
    assert done.exit_code == 1 and done.stdout == ""
    with pytest.raises(BundleError):
        open_bundle(bundle)
    return done.stderr


def test_one_wrong_byte_in_any_file(bundle: Path, broken: Path) -> None:
    for name in bundle_bytes(bundle):
        content = bytearray((broken / name).read_bytes())
        content[len(content) // 2] ^= 1
        (broken / name).write_bytes(content)
        assert name in refused(broken)
        shutil.copyfile(bundle / name, broken / name)
    assert CliRunner().invoke(app, ["verify", str(broken)]).exit_code == 0


def test_a_missing_and_an_added_file(broken: Path) -> None:
    (broken / "lock.json").unlink()
    (broken / "model/extra.bin").write_bytes(b"x")
    said = refused(broken)
    assert "lock.json: missing" in said and "model/extra.bin: not in the manifest; remove it" in said


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "model/../../secret", "C:\\secret"])
def test_a_path_that_leads_out(broken: Path, path: str) -> None:
    import hashlib

    Path("secret").write_text("x")
    manifest = json.loads((broken / "manifest.json").read_text())
    manifest["files"][path] = {"sha256": "0" * 64, "size_bytes": 1}
    del manifest["digest"]
    manifest["digest"] = hashlib.sha256(canonical_json(manifest)).hexdigest()
    (broken / "manifest.json").write_bytes(canonical_json(manifest))
    assert "leaves the bundle's folder" in refused(broken)


def test_a_link_that_leads_out(broken: Path) -> None:
    shutil.move(broken / "model/model.onnx", "elsewhere.onnx")
    (broken / "model/model.onnx").symlink_to(Path("elsewhere.onnx").resolve())
    assert "leads out of the bundle's folder" in refused(broken)


# --- gates that hold because a layer went back ------------------------------------------------------------------------


def two_products(outlier: float) -> None:
    """m.onnx: x [n, 16] -> first -> Relu -> second -> y. Input 0 is always 0, and first's weights for it are `outlier`:
    harmless in float, but they take all the levels that int8 has."""
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(16, 32)), rng.normal(size=(32, 8))
    first[0] = outlier
    nodes = [
        helper.make_node("MatMul", ["x", "first.weight"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("MatMul", ["b", "second.weight"], ["y"]),
    ]
    values = {
        name: helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", n]) for name, n in (("x", 16), ("y", 8))
    }
    weights = {"first.weight": first, "second.weight": second}
    arrays = [numpy_helper.from_array(array.astype(np.float32), name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "m", [values["x"]], [values["y"]], arrays)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), "m.onnx")
    x = rng.normal(size=(64, 16))
    x[:, 0] = 0
    write_x(x)


def test_the_layer_that_int8_ruins_goes_back_to_float() -> None:
    two_products(1e4)
    recipe = changed(GENERIC, validate={"gates": [{"metric": "cosine", "min": 0.99}]})
    done = run("apply", recipe, "--quiet")
    assert done.exit_code == 0, done.output
    report = json.loads(Path("out/b/report.json").read_text())
    rows = {row["layer"]: row for row in report["layers"] if row["layer"]}
    assert rows["first"]["action"] == "float32" and "restored" in rows["first"]["reason"]
    assert rows["second"]["action"] == "int8"
    assert any("back to float32 for the gates: first" in row["reason"] for row in report["layers"])


def test_no_layer_goes_back_for_a_gate_that_float_does_not_hold() -> None:
    two_products(1.0)
    gates = [{"metric": "cosine", "min": 0.99}, {"metric": "sqnr_db", "min": 500}]
    done = run("apply", changed(GENERIC, validate={"gates": gates}))
    assert done.exit_code == 3, done.output
    rows = {row["layer"]: row for row in json.loads(Path("out/b/layers.json").read_text()) if row["layer"]}
    assert {row["action"] for row in rows.values()} == {"int8"}
    assert "the float model itself does not hold sqnr_db min 500" in done.stderr
