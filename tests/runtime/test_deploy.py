"""A build context for Docker and a folder for onnxruntime-genai, and what is refused on the way to any place."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from compress.deploy.places import Place, deploy, find_place
from compress.deploy.triton import Serving, Word, to_pbtxt
from compress.errors import ExportError, PlaceError
from runtime.bundle.engine import EngineRecord, InputShapes
from runtime.errors import UsageError
from runtime.tasks.manifest import verify, write_bundle


def instructions(dockerfile: str) -> list[tuple[str, list[str]]]:
    """(instruction, arguments), as Docker reads them: JSON or words."""
    lines = [line.partition(" ") for line in dockerfile.splitlines() if line and not line.startswith("#")]
    return [(word, json.loads(rest) if rest.startswith("[") else shlex.split(rest)) for word, _, rest in lines]


def test_a_context_holds_all_that_its_dockerfile_copies(image_bundle: Path, tmp_path: Path) -> None:
    out = deploy(image_bundle, "docker", tmp_path / "image", Serving())
    found = instructions((out / "Dockerfile").read_text(encoding="utf-8"))
    copied = [arguments[0] for word, arguments in found if word == "COPY"]
    assert copied == ["requirements.txt", "runtime", "bundle"] and all((out / name).exists() for name in copied)
    assert ("USER", ["65534:65534"]) in found
    command = dict(found)["CMD"]
    assert command[:4] == ["python", "-m", "runtime", "serve"] and command[-1] == "onnxruntime-cpu"
    names = [line.partition("==")[0] for line in (out / "requirements.txt").read_text(encoding="utf-8").splitlines()]
    assert names == ["numpy", "onnxruntime", "pillow", "starlette", "uvicorn", "h11"]
    verify(out / "bundle")
    assert (out / "runtime" / "serving" / "server.py").is_file()


def with_engine(bundle: Path, runtime: str, **record: Any) -> Path:
    """The bundle with an engine of its candidate, which no library compiled."""
    manifest = verify(bundle)
    candidate = manifest.artifact("candidate")
    (bundle / "model/model.engine").write_bytes(b"engine")
    shapes = {spec.name: InputShapes(*((n, *spec.shape[1:]) for n in (1, 4, 8))) for spec in candidate.inputs}  # type: ignore[arg-type]
    engine = EngineRecord(runtime, "10.16.1.11", "linux-x86_64", ("8.6",), (shapes,), **record)
    made = replace(
        candidate,
        name=f"engine-{runtime}",
        path="model/model.engine",
        target=runtime,
        size_bytes=6,
        kind="engine",
        engine=engine,
    )
    write_bundle(bundle, replace(manifest, target=runtime, artifacts=(*manifest.artifacts, made)))
    return bundle


def test_a_gpu_gets_its_own_packages(image_bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="the bundle has no engine for tensorrt; compile it: compress compile"):
        deploy(image_bundle, "docker", tmp_path / "image", Serving(backend="tensorrt"))
    out = deploy(with_engine(image_bundle, "tensorrt"), "docker", tmp_path / "image", Serving())
    assert "tensorrt==10.16.1.11" in (out / "requirements.txt").read_text(encoding="utf-8").split("\n")
    assert "--gpus all" in (out / "Dockerfile").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("runtime", "record", "serving", "said"),
    [
        ("tensorrt-rtx", {}, Serving(), "an engine of tensorrt-rtx, and Triton loads those of tensorrt alone"),
        ("tensorrt", {"weights_from": "model/model.onnx"}, Serving(), "holds no weights; build it with strip_weights"),
        ("tensorrt", {}, Serving(max_batch_size=9), "--max-batch-size 9, and the engine's first profile takes 8"),
    ],
)
def test_engines_that_triton_cannot_run(
    image_bundle: Path, tmp_path: Path, runtime: str, record: dict[str, Any], serving: Serving, said: str
) -> None:
    with pytest.raises(ExportError, match=said):
        deploy(with_engine(image_bundle, runtime, **record), "triton", tmp_path / "models", serving)


def test_refusals(image_bundle: Path, make_decoder_bundle: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(PlaceError, match="is there already; choose another --out"):
        deploy(image_bundle, "docker", tmp_path / "there", Serving())
    with pytest.raises(ExportError, match=r"no genai_config\.json: onnxruntime-genai runs decoders"):
        deploy(image_bundle, "genai", tmp_path / "genai", Serving())
    for place in get_args(Place):
        with pytest.raises(UsageError, match="unknown backend 'onnx'; known: onnxruntime-cpu, openvino"):
            deploy(image_bundle, place, tmp_path / "image", Serving(backend="onnx"))
    with pytest.raises(PlaceError, match="lies in the bundle, whose files may not change"):
        deploy(image_bundle, "docker", image_bundle / "image", Serving())
    with pytest.raises(PlaceError, match="--instances: --to docker takes no such option"):
        deploy(image_bundle, "docker", tmp_path / "image", Serving(instances=2))
    with pytest.raises(ExportError, match="is a decoder for onnxruntime-cpu, whose attention OpenVINO does not run"):
        deploy(make_decoder_bundle(shared=True), "docker", tmp_path / "image", Serving(backend="openvino"))
    with pytest.raises(PlaceError, match="--to heroku: known: triton, docker, genai"):
        find_place("heroku")
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name or path.name == "genai"] == []


def test_text_form_of_protocol_buffers() -> None:
    message = {
        "a": 'x"y',
        "b": 1,
        "c": True,
        "d": [1, -1],
        "e": Word("KIND"),
        "f": [{"g": 1}, {"g": 2}],
        "h": {"i": []},
    }
    assert to_pbtxt(message).splitlines() == [
        'a: "x\\"y"',
        "b: 1",
        "c: true",
        "d: [ 1, -1 ]",
        "e: KIND",
        "f {",
        "  g: 1",
        "}",
        "f {",
        "  g: 2",
        "}",
        "h {",
        "  i: [  ]",
        "}",
    ]
