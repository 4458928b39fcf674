"""The bundle's format: what is written is read again, and whatever is wrong stops the load with its name."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from onnx import TensorProto, helper

from runtime.bundle.format import (
    REMEDIES_FILE,
    Artifact,
    Benchmark,
    Gate,
    Judgement,
    canonical_json,
    inside,
    model_size,
    read_outputs,
    read_remedies,
    read_samples,
    write_samples,
)
from runtime.bundle.onnx_file import external_files
from runtime.bundle.records import from_json, to_json
from runtime.bundle.samples import digest_columns, read_jsonl, read_npz, write_jsonl, write_npz
from runtime.bundle.tensors import TensorSpec
from runtime.encode.preprocess import ImagePreprocess, spec_from_dict
from runtime.errors import BundleError, UsageError
from runtime.tasks.manifest import read_manifest, verify, write_bundle


def snapshot(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def edit_manifest(root: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest as someone would who knows how to make its digest."""
    data = json.loads((root / "manifest.json").read_text())
    change(data)
    del data["digest"]
    data["digest"] = hashlib.sha256(canonical_json(data)).hexdigest()
    (root / "manifest.json").write_bytes(canonical_json(data))


# identities


def test_written_bundle_is_read_again(image_bundle: Path, image_columns: dict[str, np.ndarray]) -> None:
    manifest = verify(image_bundle)
    assert manifest == read_manifest(image_bundle)
    assert from_json(type(manifest), json.loads(json.dumps(to_json(manifest))), "manifest") == manifest
    assert spec_from_dict(manifest.preprocess) == ImagePreprocess(mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))
    samples = read_samples(image_bundle, manifest)
    assert samples.keys() == image_columns.keys()
    for name, column in image_columns.items():
        np.testing.assert_array_equal(samples[name], column)
        assert samples[name].dtype == column.dtype
    assert read_outputs(image_bundle, manifest)["logits"].shape == (7, 5)
    assert sorted(manifest.files) == sorted(snapshot(image_bundle).keys() - {"manifest.json"})


def test_same_content_same_bytes(image_bundle: Path, tmp_path: Path, image_columns: dict[str, np.ndarray]) -> None:
    before = snapshot(image_bundle)
    manifest = read_manifest(image_bundle)
    again = tmp_path / "again"
    shutil.copytree(image_bundle / "model", again / "model")
    shutil.copytree(image_bundle / "baseline", again / "baseline")
    (again / "recipe.yaml").write_bytes(before["recipe.yaml"])
    for path in again.rglob("*"):
        os.utime(path, (1, 1))
    fortran = {name: np.asfortranarray(column) for name, column in reversed(image_columns.items())}
    write_samples(again, fortran)
    (again / "evaluation/baseline_outputs.npz").write_bytes(before["evaluation/baseline_outputs.npz"])
    write_bundle(again, replace(manifest, files={}, digest=""))
    assert snapshot(again) == before


def test_digest_of_samples_ignores_storage_but_not_values(image_columns: dict[str, np.ndarray]) -> None:
    digest = digest_columns(image_columns)
    as_lists = {"label": image_columns["label"].tolist(), "image": list(image_columns["image"])}
    assert digest_columns(as_lists) == digest
    other = image_columns["image"].copy()
    other[3, 2, 1, 0] ^= 1
    assert digest_columns({**image_columns, "image": other}) != digest
    assert digest_columns({"text": ["a", "bc"]}) != digest_columns({"text": ["ab", "c"]})


NUMBERS = st.one_of(
    npst.integer_dtypes(), npst.unsigned_integer_dtypes(), npst.floating_dtypes(), npst.boolean_dtypes()
)
SHAPES = npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
COLUMNS = st.dictionaries(
    st.sampled_from(["image", "label", "x"]),
    npst.arrays(NUMBERS, SHAPES) | st.lists(npst.arrays(NUMBERS, SHAPES), min_size=1, max_size=12),
    min_size=1,
)


@settings(max_examples=30)
@given(COLUMNS)
@example(columns={"image": [np.full((n, 3, 3), n, np.uint8) for n in range(2, 14)]})
def test_arrays_of_any_kind_come_back(tmp_path: Path, columns: dict[str, Any]) -> None:
    """In little endian, and without a time in the file; numpy reads it too."""
    write_npz(tmp_path / "a.npz", columns)
    back = read_npz(tmp_path / "a.npz")
    assert back.keys() == columns.keys()
    with zipfile.ZipFile(tmp_path / "a.npz") as archive, np.load(tmp_path / "a.npz") as numpy_reads_it_too:
        assert {entry.date_time for entry in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        for name, column in columns.items():
            entries = {name: column} if isinstance(column, np.ndarray) else {
                f"{name}[{i:07d}]": array for i, array in enumerate(column)
            }  # fmt: skip
            ours = back[name] if isinstance(column, list) else [back[name]]
            for found, (entry, array) in zip(ours, entries.items(), strict=True):
                assert found.dtype == array.dtype.newbyteorder("<") and found.shape == array.shape
                assert found.tobytes() == array.astype(found.dtype).tobytes()
                assert numpy_reads_it_too[entry].tobytes() == found.tobytes()


TEXTS = st.lists(st.text(st.characters(codec=None), max_size=6), min_size=3, max_size=3)


@given(st.dictionaries(st.sampled_from(["text", "text_pair", "tags"]), TEXTS, min_size=1))
@example(texts={"text": ["plain", "", 'quo"te\n\u2028two'], "text_pair": ["\ud800", "\0", "\\"]})
def test_texts_of_any_kind_come_back(tmp_path: Path, texts: dict[str, list[str]]) -> None:
    write_jsonl(tmp_path / "t.jsonl", texts)
    assert read_jsonl(tmp_path / "t.jsonl") == texts


SMALL, SHARES = st.integers(1, 64), st.floats(0.001, 0.999)
GATES = st.builds(Gate, st.sampled_from(["top1", "kl"]), max_drop=st.floats(0, 1)) | st.builds(
    Gate, st.just("latency_p50"), min_speedup=st.floats(0.1, 9)
)
JUDGEMENTS = st.builds(
    Judgement,
    gates=st.lists(GATES, max_size=3).map(tuple),
    confidence=st.floats(0.5, 1, exclude_max=True),
    batch_size=SMALL,
    undecided=st.sampled_from(["fail", "pass"]),
    steps=st.sampled_from(["auto", True, False]),
    seed=st.integers(0, 2**31),
    benchmark=st.builds(Benchmark, threads=SMALL, throughput_batch_size=SMALL),
)


@settings(max_examples=20)
@given(JUDGEMENTS, st.dictionaries(st.sampled_from(["x", "y"]), TEXTS, min_size=1), st.lists(st.text(max_size=4)))
def test_any_manifest_and_samples_are_read_as_they_were_written(
    image_bundle: Path, judgement: Judgement, columns: dict[str, list[str]], names: list[str]
) -> None:
    """Texts in place of the images; the models stay."""
    before = read_manifest(image_bundle)
    (image_bundle / "evaluation/samples.npz").unlink(missing_ok=True)
    evaluation = write_samples(image_bundle, columns)
    changed = replace(before, judgement=judgement, class_names=tuple(names), evaluation=evaluation, files={}, digest="")
    write_bundle(image_bundle, changed)
    manifest = verify(image_bundle)
    assert replace(manifest, files={}, digest="") == changed
    assert from_json(type(manifest), json.loads(json.dumps(to_json(manifest))), "manifest") == manifest
    assert read_samples(image_bundle, manifest) == columns


def test_measurements_are_outside_the_manifest(image_bundle: Path) -> None:
    for name in ("report.json", "report.md", "report.xml", "compress.log", "host.json"):
        (image_bundle / name).write_text("measured later")
    assert not verify(image_bundle).files.keys() & {"report.json", "compress.log"}
    (image_bundle / "model/report.json").write_text("not at the top")
    with pytest.raises(BundleError, match=r"model/report\.json: not in the manifest"):
        verify(image_bundle)


def test_flavour_is_preferred_for_its_backend(image_bundle: Path) -> None:
    manifest = read_manifest(image_bundle)
    variant = replace(manifest.artifacts[0], name="candidate-openvino")
    manifest = replace(manifest, artifacts=(*manifest.artifacts, variant))
    assert manifest.candidate_for("openvino").name == "candidate-openvino"
    assert manifest.candidate_for("onnxruntime-cpu").name == "candidate"


def test_model_size_counts_external_data(tmp_path: Path) -> None:
    weight = helper.make_tensor("w", TensorProto.FLOAT, [64, 64], np.ones(4096, np.float32))
    inner = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["z"])],
        "inner",
        [],
        [helper.make_tensor_value_info("z", 1, None)],
        [weight],
    )
    graph = helper.make_graph(
        [helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner)],
        "outer",
        [helper.make_tensor_value_info("x", 1, [1, 64]), helper.make_tensor_value_info("c", TensorProto.BOOL, [])],
        [helper.make_tensor_value_info("y", 1, None)],
    )
    path = tmp_path / "model.onnx"
    for tensor in (branch.g.initializer[0] for branch in graph.node[0].attribute):
        tensor.ClearField("float_data")
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="length", value="16384")
        tensor.external_data.add(key="location", value="weights.data")
    path.write_bytes(helper.make_model(graph).SerializeToString())
    (tmp_path / "weights.data").write_bytes(bytes(16384))
    assert external_files(path) == {"weights.data"}
    assert model_size(path) == path.stat().st_size + 16384


# refusals


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "C:/x", "C:x", "//host/x", "\\x"])
def test_path_that_leaves_the_folder(tmp_path: Path, path: str) -> None:
    with pytest.raises(BundleError, match="leaves the bundle's folder"):
        inside(tmp_path, path)


@pytest.mark.parametrize("path", ["", ".", "./a", "a//b", "a/", "a\\b", "a\0b", "a\nb", "\ud800", "x" * 256])
def test_path_that_is_not_plain(tmp_path: Path, path: str) -> None:
    with pytest.raises(BundleError, match="is not a plain relative path"):
        inside(tmp_path, path)


def test_path_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle/out").symlink_to(tmp_path)
    (tmp_path / "bundle/circle").symlink_to("circle")
    with pytest.raises(BundleError, match="leads out of the bundle's folder"):
        inside(tmp_path / "bundle", "out/secret")
    with pytest.raises(BundleError, match="cannot be followed"):
        inside(tmp_path / "bundle", "circle")


def test_every_problem_is_listed_at_once(image_bundle: Path) -> None:
    (image_bundle / "recipe.yaml").unlink()
    (image_bundle / "extra").write_text("x")
    (image_bundle / "link").symlink_to("extra")
    os.mkfifo(image_bundle / "pipe")
    model = image_bundle / "model/model.onnx"
    model.write_bytes(model.read_bytes()[:-1] + b"\0")
    baseline = image_bundle / "baseline/model.onnx"
    baseline.write_bytes(baseline.read_bytes() + b"\0")
    with pytest.raises(BundleError) as caught:
        verify(image_bundle)
    assert sorted(p.split(";")[0] for p in caught.value.problems[1:]) == sorted(
        [
            "link: a link",
            "pipe: not a regular file",
            "extra: not in the manifest",
            f"baseline/model.onnx: {baseline.stat().st_size} bytes, the manifest says {baseline.stat().st_size - 1}",
            "model/model.onnx: its sha256 is not the manifest's",
            "recipe.yaml: missing",
        ]
    )


@settings(max_examples=80)
@given(st.integers(0, 2**16), st.integers(0, 7))
def test_every_single_bit_of_the_manifest_counts(image_bundle: Path, at: int, bit: int) -> None:
    path = image_bundle / "manifest.json"
    raw = path.read_bytes()
    changed = bytearray(raw)
    changed[at % len(raw)] ^= 1 << bit
    path.write_bytes(changed)
    try:
        with pytest.raises(BundleError):
            read_manifest(image_bundle)
    finally:
        path.write_bytes(raw)  # for the next case


def test_manifest_in_other_words(image_bundle: Path) -> None:
    path = image_bundle / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text())))
    with pytest.raises(BundleError, match="its digest is not that of its content"):
        read_manifest(image_bundle)
    path.write_text('{"name": 1, "name": 2}')
    with pytest.raises(BundleError, match="'name' is there twice"):
        read_manifest(image_bundle)
    path.write_text("[" * 100_000)
    with pytest.raises(BundleError, match="manifest"):
        read_manifest(image_bundle)


ORDER = {"name": "engine", "runtime": "tensorrt", "graph": "candidate", "profiles": []}
REFUSED = [
    (lambda d: d.update(format_version=2), "format_version is 2; this version of runtime reads 1"),
    (lambda d: d.update(surprise=1), r"manifest\.surprise: unknown key; known: format_version"),
    (lambda d: d.pop("task"), r"manifest\.task: missing"),
    (lambda d: d.update(name="../../elsewhere"), r"manifest\.name: '\.\./\.\./elsewhere' is more than letters"),
    (lambda d: d.update(name="x\nRUN curl"), r"manifest\.name: .* is more than letters"),
    (lambda d: d.update(orders=[ORDER | {"runtime": "tvm"}]), r"orders: engine: there is no runtime tvm"),
    (lambda d: d.update(orders=[ORDER | {"graph": "other"}]), r"orders: engine: there is .* no other"),
    (lambda d: d.update(task="chat"), r"manifest\.task: 'chat' is not one of image-classification"),
    (lambda d: d.update(name=3), r"manifest\.name: expected a string, found a whole number"),
    (
        lambda d: d["judgement"].update(seed=True),
        r"manifest\.judgement\.seed: expected a whole number, found true or false",
    ),
    (lambda d: d["judgement"].update(gates=[{"metric": "top1"}]), r"judgement\.gates\[0\]: gate on 'top1' has no rule"),
    (lambda d: d["judgement"].update(undecided="maybe"), r"undecided: 'maybe' is not one of 'fail', 'pass'"),
    (lambda d: d["preprocess"].update(kind="sound"), r"preprocess\.kind: 'sound' is not one of image, "),
    (lambda d: d["preprocess"].update(crop=[1]), r"preprocess\.crop: expected 2 items, found 1"),
    (
        lambda d: d["preprocess"].update(resize="x"),
        r"resize: expected a whole number, found a string or preprocess\.resize: expected a list",
    ),
    (lambda d: d.update(artifacts=d["artifacts"][1:]), "names must differ and one must be 'candidate'"),
    (lambda d: d.update(artifacts=[d["artifacts"][0]] * 2), "names must differ and one must be 'candidate'"),
    (lambda d: d["artifacts"][0].update(path="../m.onnx"), r"path '\.\./m\.onnx' leaves the bundle's folder"),
    (lambda d: d["artifacts"][0].update(path="/m.onnx"), "path '/m.onnx' leaves the bundle's folder"),
    (lambda d: d["artifacts"][0].update(path="m.onnx"), "m.onnx: named in the manifest, but not among its files"),
    (lambda d: d["evaluation"].update(arrays="../a"), r"path '\.\./a' leaves the bundle's folder"),
    (
        lambda d: d["files"].update({"report.json": d["files"]["recipe.yaml"]}),
        "report.json: may not be among the manifest's files",
    ),
    (lambda d: d["files"].update({"Recipe.YAML": d["files"]["recipe.yaml"]}), "where case is not told apart"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_manifest_that_is_wrong_but_signed(
    image_bundle: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    edit_manifest(image_bundle, change)
    with pytest.raises(BundleError, match=message):
        read_manifest(image_bundle)


NO_USE = ["numpy.py", "model/Numpy.PY", "x.py.", "m.so", "m.so.1", "site.pth", "evaluation/a.pkl", "w.bin", "a.pyc"]


@pytest.mark.parametrize("name", [*NO_USE, "numpy/data.json", "model/x.dist-info/METADATA", "__pycache__/x.txt"])
def test_a_bundle_that_lists_code_is_refused(image_bundle: Path, name: str) -> None:
    manifest = read_manifest(image_bundle)
    (image_bundle / name).parent.mkdir(exist_ok=True, parents=True)
    (image_bundle / name).write_text("print('ran')")
    with pytest.raises(BundleError, match=f"{name.replace('.', '[.]')}.*no use"):
        write_bundle(image_bundle, manifest)
    with pytest.raises(BundleError, match="no use"):
        verify(image_bundle)


def test_code_under_the_name_of_a_report_is_refused(image_bundle: Path) -> None:
    (image_bundle / "report.py").write_text("print('ran')")
    with pytest.raises(BundleError, match=r"report\.py: .*no use"):
        verify(image_bundle)


def test_a_checkpoint_s_own_code_lies_beside_it_where_its_recipe_trusted_it(image_bundle: Path) -> None:
    manifest = read_manifest(image_bundle)
    folder = image_bundle / "checkpoint"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "modeling_own.py"):
        (folder / name).write_text("{}")
    checkpoint = replace(manifest.artifacts[0], name="checkpoint", path="checkpoint/config.json", kind="checkpoint")
    trusted = replace(checkpoint, size_bytes=2, remote_code=True)
    write_bundle(image_bundle, replace(manifest, artifacts=(*manifest.artifacts, trusted)))
    assert "checkpoint/modeling_own.py" in verify(image_bundle).files
    with pytest.raises(BundleError, match=r"modeling_own\.py: .*no use"):
        write_bundle(
            image_bundle, replace(manifest, artifacts=(*manifest.artifacts, replace(trusted, remote_code=False)))
        )


def test_no_bundle_there(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"manifest\.json: No such file or directory; is this a bundle's folder\?"):
        read_manifest(tmp_path)


def test_size_in_the_manifest_must_be_true(image_bundle: Path) -> None:
    edit_manifest(image_bundle, lambda d: d["artifacts"][0].update(size_bytes=1))
    with pytest.raises(BundleError, match=r"model/model\.onnx: \d+ bytes with external data, the manifest says 1"):
        verify(image_bundle)


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("../../secret", "leaves the bundle's folder"),
        ("/etc/passwd", "leaves"),
        ("no.data", "its external data is missing: no.data"),
    ],
)
def test_external_data_outside_the_model_folder(image_bundle: Path, location: str, message: str) -> None:
    path = image_bundle / "model/model.onnx"
    model = onnx.load(path)
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    path.write_bytes(model.SerializeToString())
    write_bundle(image_bundle, replace(read_manifest(image_bundle), files={}))
    with pytest.raises(BundleError, match=message):
        verify(image_bundle)


def test_model_that_is_not_onnx(image_bundle: Path) -> None:
    for content, message in (
        (b"", "the model file is empty"),
        (b"hello world", "not an ONNX model"),
        (b"\xff" * 20, "not an ONNX"),
    ):
        (image_bundle / "model/model.onnx").write_bytes(content)
        write_bundle(image_bundle, replace(read_manifest(image_bundle), files={}))
        with pytest.raises(BundleError, match=message):
            verify(image_bundle)


def test_pickles_are_never_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "evil.npz", a=np.array([{"x": 1}], dtype=object))
    with pytest.raises(BundleError, match="holds Python objects"):
        read_npz(tmp_path / "evil.npz")
    (tmp_path / "no.npz").write_bytes(b"not a zip")
    with pytest.raises(BundleError, match="cannot be read as arrays"):
        read_npz(tmp_path / "no.npz")
    (tmp_path / "no.jsonl").write_text('{"text": "a"}\n{"other": "b"}\n')
    with pytest.raises(BundleError, match="line 2 does not hold the same columns as line 1"):
        read_jsonl(tmp_path / "no.jsonl")


def test_samples_that_cannot_be_frozen(tmp_path: Path) -> None:
    for columns, message in (
        ({}, "no columns"),
        ({"x": []}, "no samples"),
        ({"x": [1, 2], "label": [1]}, "columns differ in length: x 2, label 1"),
        ({"x": np.array([None])}, "column 'x' holds object values"),
        ({"text": ["a", 3]}, "column 'text', sample 1: expected a text, found int"),
        ({"image": [np.zeros((4, 4, 3), np.float32)] * 2}, "image 0: pixels are float32"),
        ({"text": "abc"}, "column 'text' is str"),
    ):
        with pytest.raises(UsageError, match=message):
            write_samples(tmp_path, columns)


def test_an_input_called_image_that_takes_floats_is_frozen_as_it_is(tmp_path: Path) -> None:
    tensor = np.random.default_rng(0).normal(size=(2, 3, 4, 4)).astype(np.float32)
    (tmp_path / "evaluation").mkdir()
    write_samples(tmp_path, {"image": tensor})
    assert np.array_equal(read_npz(tmp_path / "evaluation/samples.npz")["image"], tensor)


def test_evaluation_set_must_be_there_and_whole(image_bundle: Path) -> None:
    manifest = read_manifest(image_bundle)
    with pytest.raises(UsageError, match="this bundle has no evaluation set"):
        read_samples(image_bundle, replace(manifest, evaluation=None))
    assert manifest.evaluation is not None
    with pytest.raises(BundleError, match="the evaluation set has 7 samples, its manifest says 8"):
        read_samples(image_bundle, replace(manifest, evaluation=replace(manifest.evaluation, n_samples=8)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Gate("top1"), "gate on 'top1' has no rule: give one of max_drop, min_retained, min, max, min_speedup"),
        (lambda: Gate("top1", max_drop=-0.1), r"max_drop is -0\.1, below 0"),
        (lambda: Gate("top1", min=float("nan")), "min is nan, not a finite number"),
        (lambda: Gate("top1", min=2, max=1), "min 2 is above max 1"),
        (lambda: Gate("latency_p50", min_speedup=0), "min_speedup is 0, not above 0"),
        (lambda: Benchmark(threads=0), "threads is 0, below 1"),
        (lambda: Benchmark(threads=10**9), "threads is 1000000000, above 1024"),
        (lambda: Benchmark(throughput_batch_size=100_000), "throughput_batch_size is 100000, above 65536"),
        (lambda: Judgement(batch_size=2**40), "batch_size is 1099511627776, above 65536"),
        (lambda: ImagePreprocess(resize=2**20), "at least 1 pixel, 16384 at most"),
        (lambda: Artifact("a", "a", "t", "p", (TensorSpec("x", "int8", (0,)),), (), 1), "its inputs have a batch of 0"),
        (lambda: Benchmark(latency_limit_ms=-1), "latency_limit_ms is -1, not a positive number"),
        (lambda: Judgement(confidence=0.0001), r"confidence is 0\.0001: give 0\.5 to less than 1, such as 0\.95"),
        (lambda: Judgement(confidence=1.0), r"confidence is 1\.0: give 0\.5"),
    ],
)
def test_records_refuse_what_cannot_be_judged(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_format_and_preprocessing_import_nothing_heavy() -> None:
    code = (
        "import sys, runtime, runtime.bundle.format, runtime.encode.preprocess, runtime.backends\n"
        "import runtime.tasks.predict\n"
        "heavy = {'onnxruntime', 'openvino', 'PIL', 'tokenizers', 'torch', 'onnx', 'yaml', 'pydantic'}\n"
        "heavy &= set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "Expecting property name"),
        ('["ignore: []"]', "must be an object of printable texts"),
        ('{"casts": 1}', "must be an object of printable texts"),
        ('{"casts": "\\u001b[2J"}', "must be an object of printable texts"),
        ('{"casts": "a", "casts": "b"}', "'casts' is there twice"),
        (json.dumps({"casts": "x" * 2**14}), "larger than 16384 bytes"),
    ],
)
def test_remedies_that_are_no_small_texts_are_refused(image_bundle: Path, content: str, said: str) -> None:
    manifest = read_manifest(image_bundle)
    assert read_remedies(image_bundle, manifest) == {}, "an older bundle has none"
    (image_bundle / REMEDIES_FILE).write_text(content)
    manifest = write_bundle(image_bundle, replace(manifest, files={}))
    with pytest.raises(BundleError, match=re.escape(said)):
        read_remedies(image_bundle, manifest)
