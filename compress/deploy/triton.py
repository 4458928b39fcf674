"""A model repository for Triton Inference Server: the model, and around it what turns samples into answers.

```
<name>/                an ensemble: encode -> model -> answer; what clients call
<name>_encode/         Python backend: images or texts -> the model's inputs, by the bundle's own preprocessing
<name>_model/          ONNX Runtime or TensorRT, with dynamic batching
<name>_answer/         Python backend: outputs -> class and probability, or the pooled embedding
1/bundle/              in both: what they read (manifest, tokenizer), the runtime's own code, and requirements.txt: what
                       the server's Python must have besides
```
A model that reads tensors as they are has no ensemble: <name>/ is the model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from compress.deploy.carried import ON_A_GPU, copy_runtime, reading_samples, write_requirements
from compress.errors import ExportError
from compress.graph.specs import input_specs, output_specs
from runtime.bundle.format import FILES_OF, Artifact, Manifest, read_samples
from runtime.bundle.onnx_file import holds_float8
from runtime.bundle.tensors import State, TensorSpec
from runtime.encode.audio import AUDIO, RATE
from runtime.encode.preprocess import ImageTextPreprocess, spec_from_dict
from runtime.serving.model import IMAGE
from runtime.tasks import find_task
from runtime.tasks.base import IMAGE_SIZE, OFFSETS, TEXT, TEXT_PAIR
from runtime.tasks.manifest import verify

TYPES = {
    "float32": "TYPE_FP32", "float16": "TYPE_FP16", "float64": "TYPE_FP64", "int64": "TYPE_INT64",
    "int32": "TYPE_INT32", "int8": "TYPE_INT8", "uint8": "TYPE_UINT8", "uint16": "TYPE_UINT16", "bool": "TYPE_BOOL",
}  # fmt: skip
"""numpy's name -> Triton's."""
PLATFORMS = {"onnx": ("onnxruntime_onnx", "model.onnx"), "engine": ("tensorrt_plan", "model.plan")}
"""Kind of artifact -> Triton's platform, and the file's name in its version's folder."""
PINS = {"numpy": "1.26.4"}
WHY_PINNED = """\
For the Python of Triton's Python backend. numpy 2 changed how an array's type lies in memory, and a stub built with
pybind11 before 2.12 (servers up to 2.52) reads it wrongly and hands over wrong data; numpy 1.26 is right for every one.
"""
"""Shown by benchmarks/triton_server.py."""
ENCODED = ("image", "audio", "image-text", "text")
"""Kinds of preprocessing that need an ensemble; tensors are taken as they are."""


@dataclass(frozen=True)
class Serving:
    """How it is served. `max_batch_size`: None: what the bundle is judged with. `instances`: copies of the model.

    `queue_delay_us`: how long a request may wait for others to share its batch.
    """

    max_batch_size: int | None = None
    instances: int = 1
    queue_delay_us: int = 500
    backend: str = ""
    """Of the bundle's artifacts that one; "": its target's engine if it is there, else the ONNX file."""


def write_repository(bundle: Path, out: Path, serving: Serving) -> tuple[Path, ...]:
    """Write the repository to `out`, which must not exist; return its models' folders. ExportError, BundleError."""
    manifest = verify(bundle)
    if manifest.generates:
        raise ExportError(
            "triton: a decoder with a key-value cache is served by onnxruntime-genai or vLLM; use --to genai"
        )
    if OFFSETS in find_task(manifest.task).facts:
        raise ExportError(
            "triton: a long text is several rows of the model, and an ensemble keeps one for each sample; use "
            "`compress-run serve`"
        )
    backend = serving.backend or manifest.target
    artifact = manifest.candidate_for(backend)
    if artifact.kind == "openvino":
        artifact = manifest.graph_for(backend)  # Triton's ONNX Runtime reads the graph that the IR was made from
    if artifact.kind not in PLATFORMS:
        raise ExportError(f"triton: the {artifact.name} is a {artifact.kind}, which no backend of Triton loads")
    encoded = manifest.preprocess["kind"] in ENCODED
    free = all(spec.shape and isinstance(spec.shape[0], str) for spec in (*artifact.inputs, *artifact.outputs))
    if encoded and not free:
        raise ExportError("triton: the model has a fixed batch, which samples cannot be gathered to; export a free one")
    _check_model(bundle, artifact)
    size = _largest_batch(artifact, serving, manifest) if free else 0
    served = _Served(bundle, manifest, artifact, serving, size)
    out.mkdir(parents=True)
    if not encoded:
        return (_write_model(out / manifest.name, served),)
    names = {part: f"{manifest.name}_{part}" for part in ("encode", "model", "answer")}
    return (
        _write_ensemble(out / manifest.name, served, names),
        _write_end(out / names["encode"], served, "encode", _sample_specs(served), _encoded_specs(served)),
        _write_model(out / names["model"], served),
        _write_end(out / names["answer"], served, "answer", _answer_input_specs(served), _answer_output_specs(served)),
    )


@dataclass(frozen=True)
class _Served:
    """`batch`: the largest; 0 where the model is bound to a size of its own."""

    bundle: Path
    manifest: Manifest
    artifact: Artifact
    serving: Serving
    batch: int


def _check_model(bundle: Path, artifact: Artifact) -> None:
    """Raise ExportError for what Triton's backends cannot load, or would compute wrongly."""
    record = artifact.engine
    if record is not None and record.runtime != "tensorrt":
        raise ExportError(
            f"triton: {artifact.name} is an engine of {record.runtime}, and Triton loads those of tensorrt alone; "
            "use --backend onnxruntime-cpu, or give the recipe export: [{kind: tensorrt}]"
        )
    if record is not None and record.weights_from:
        raise ExportError(f"triton: {artifact.name} holds no weights; build it with strip_weights: false")
    if artifact.kind == "onnx" and holds_float8(str(bundle / artifact.path)):
        raise ExportError(
            f"triton: {artifact.path} computes in float8, which ONNX Runtime's optimizations there make something else "
            "of; finish the bundle's engine with `compress compile`, or use int8"
        )


def _largest_batch(artifact: Artifact, serving: Serving, manifest: Manifest) -> int:
    """Return the largest batch that is served.

    ExportError for more than the first profile of an engine takes: Triton's instances run on that one.
    """
    usual = manifest.judgement.benchmark.throughput_batch_size
    if artifact.engine is None:
        return serving.max_batch_size or usual
    most = min(artifact.engine.profiles[0][spec.name].max[0] for spec in artifact.inputs)
    asked = serving.max_batch_size or min(usual, most)
    if asked > most:
        raise ExportError(f"triton: --max-batch-size {asked}, and the engine's first profile takes {most}")
    return asked


def _write_model(folder: Path, served: _Served) -> Path:
    """Write the model itself, with dynamic batching where its batch is free."""
    platform, file = PLATFORMS[served.artifact.kind]
    version = folder / "1"
    version.mkdir(parents=True)
    source = served.bundle / served.artifact.path
    for path in FILES_OF[served.artifact.kind](source):
        shutil.copyfile(path, version / (file if path == source else path.name))
    inputs, outputs = _call_specs(served, source)
    on = served.serving.backend or served.artifact.target
    config: dict[str, Any] = {
        "name": folder.name,
        "platform": platform,
        "max_batch_size": served.batch,
        "input": [_describe_tensor(spec, served.batch) for spec in inputs],
        "output": [_describe_tensor(spec, served.batch) for spec in outputs],
        "instance_group": [
            {
                "count": served.serving.instances,
                "kind": Word("KIND_GPU" if served.artifact.kind == "engine" or on in ON_A_GPU else "KIND_CPU"),
            }
        ],
    }
    if served.artifact.states:
        config["sequence_batching"] = {"state": [_describe_state(state) for state in served.artifact.states]}
    elif served.batch > 1:
        config["dynamic_batching"] = {"max_queue_delay_microseconds": served.serving.queue_delay_us}
    if platform == "onnxruntime_onnx":
        threads = served.manifest.judgement.benchmark.threads
        config["parameters"] = [{"key": "intra_op_thread_count", "value": {"string_value": str(threads)}}]
    return _write_config(folder, config)


def _call_specs(served: _Served, file: Path) -> tuple[Sequence[TensorSpec], Sequence[TensorSpec]]:
    """Return the inputs and outputs of a request: without a batch those of the file itself, without the states."""
    artifact = served.artifact
    if served.batch or artifact.kind != "onnx":
        return artifact.inputs, artifact.outputs
    graph = ir.load(file)
    handed = {name for state in artifact.states for name in (state.input.name, state.output)}
    inputs, outputs = (
        [spec for spec in specs if spec.name not in handed] for specs in (input_specs(graph), output_specs(graph))
    )
    return inputs, outputs


def _describe_state(state: State) -> dict[str, Any]:
    """Describe what Triton keeps of a sequence of requests between them, zero at its start."""
    described = {"data_type": Word(TYPES[state.input.dtype]), "dims": list(state.shape)}
    first = {**described, "zero_data": True, "name": f"initial {state.input.name}"}
    return {"input_name": state.input.name, "output_name": state.output, **described, "initial_state": first}


def _write_end(
    folder: Path, served: _Served, part: str, given: Sequence[TensorSpec], made: Sequence[TensorSpec]
) -> Path:
    """Write one of the two ends: a model of Triton's Python backend that calls `runtime.serving.model`."""
    version = folder / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(MODEL.replace("END", ENDS[part]), encoding="utf-8")
    _copy_needed(served, version / "bundle")  # beside `1` the server warns of a version that is no number
    return _write_config(
        folder,
        {
            "name": folder.name,
            "backend": "python",
            "max_batch_size": served.batch,
            "input": [_describe_spec(spec) for spec in given],
            "output": [_describe_spec(spec) for spec in made],
            "instance_group": [{"count": served.serving.instances, "kind": Word("KIND_CPU")}],
        },
    )


def _write_ensemble(folder: Path, served: _Served, names: dict[str, str]) -> Path:
    """Write the ensemble that clients call: the three models in their order, tensors passed on from one to the next."""
    (folder / "1").mkdir(parents=True)
    samples, answers = _sample_specs(served), _answer_output_specs(served)
    # What lies between two steps has a name of its own: Triton refuses an ensemble that writes one name twice, and
    # of a classifier both the model and the answer give `logits`.
    encoded = {spec.name: f"encoded_{spec.name}" for spec in _encoded_specs(served)}
    raw = {spec.name: f"raw_{spec.name}" for spec in served.artifact.outputs}
    between = encoded | raw
    steps = [
        _describe_step(names["encode"], {spec.name: spec.name for spec in samples}, encoded),
        _describe_step(names["model"], {spec.name: encoded[spec.name] for spec in served.artifact.inputs}, raw),
        _describe_step(
            names["answer"],
            {spec.name: between[spec.name] for spec in _answer_input_specs(served)},
            {spec.name: spec.name for spec in answers},
        ),
    ]
    return _write_config(
        folder,
        {
            "name": folder.name,
            "platform": "ensemble",
            "max_batch_size": served.batch,
            "input": [_describe_spec(spec) for spec in samples],
            "output": [_describe_spec(spec) for spec in answers],
            "ensemble_scheduling": {"step": steps},
        },
    )


def _describe_step(model: str, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> dict[str, Any]:
    """Describe one step of the ensemble. `inputs` and `outputs`: the model's own name -> the ensemble's."""
    return {
        "model_name": model,
        "model_version": -1,
        "input_map": [{"key": key, "value": value} for key, value in inputs.items()],
        "output_map": [{"key": key, "value": value} for key, value in outputs.items()],
    }


def _sample_specs(served: _Served) -> tuple[TensorSpec, ...]:
    """Return the specs of what a client sends, without the batch: both texts where a classifier is judged on pairs."""
    manifest = served.manifest
    if manifest.preprocess["kind"] == "image":
        channels = {"L": 1, "RGB": 3}[str(manifest.preprocess.get("channels", "RGB"))]
        return (TensorSpec(IMAGE, "uint8", ("height", "width", channels)),)
    spec = spec_from_dict(manifest.preprocess)
    if isinstance(spec, ImageTextPreprocess):
        image = TensorSpec(IMAGE, "uint8", ("height", "width", spec.image.n_channels))
        return image, TensorSpec(TEXT, "object", (1,))
    if manifest.preprocess["kind"] == "audio":
        return (TensorSpec(AUDIO, "float32", ("samples",)), TensorSpec(RATE, "int64", (1,)))
    together = not find_task(manifest.task).facts  # two texts of one answer
    pairs = together and manifest.evaluation and TEXT_PAIR in read_samples(served.bundle, manifest)
    return tuple(TensorSpec(name, "object", (1,)) for name in ((TEXT, TEXT_PAIR) if pairs else (TEXT,)))


def _encoded_specs(served: _Served) -> tuple[TensorSpec, ...]:
    """Return the specs of what encoding gives, without the batch.

    These are the model's inputs, and the mask that embeddings are pooled with.
    """
    inputs = tuple(replace(spec, shape=spec.shape[1:]) for spec in served.artifact.inputs)
    known = {spec.name for spec in inputs}
    return (*inputs, *(spec for spec in _fact_specs(served) if spec.name not in known))


def _fact_specs(served: _Served) -> tuple[TensorSpec, ...]:
    """Return the specs of what answers are made of beside outputs."""
    facts = find_task(served.manifest.task).facts if served.manifest.preprocess["kind"] != "tensor" else ()
    return tuple(TensorSpec(name, "int64", (2,) if name == IMAGE_SIZE else ("sequence",)) for name in facts)


def _answer_input_specs(served: _Served) -> tuple[TensorSpec, ...]:
    """Return the specs of what answers are made of, without the batch."""
    outputs = tuple(replace(spec, shape=spec.shape[1:]) for spec in served.artifact.outputs)
    needed = {spec.name for spec in _fact_specs(served)}
    return (*outputs, *(spec for spec in _encoded_specs(served) if spec.name in needed))


def _answer_output_specs(served: _Served) -> tuple[TensorSpec, ...]:
    task, outputs = find_task(served.manifest.task), served.artifact.outputs
    added = task.postprocess_specs(served.manifest.postprocess, outputs[0].shape[0])
    specs = task.answer_specs((*outputs, *added))
    return tuple(replace(spec, shape=spec.shape[1:]) for spec in specs)


def _describe_tensor(spec: TensorSpec, batch: int) -> dict[str, Any]:
    """Describe an input or output in the configuration's form.

    With a batch its first size is left out, and what is one number a sample has the size 1 for Triton, which knows no
    other.
    """
    if len(spec.shape) > bool(batch):
        return _describe_spec(replace(spec, shape=spec.shape[1:]) if batch else spec)
    return {**_describe_spec(replace(spec, shape=(1,))), "reshape": {"shape": []}}


def _describe_spec(spec: TensorSpec) -> dict[str, Any]:
    dims = [size if isinstance(size, int) else -1 for size in spec.shape]
    kind = "TYPE_STRING" if spec.dtype == "object" else TYPES.get(spec.dtype)
    if kind is None:
        raise ExportError(f"triton: {spec.name} is {spec.dtype}, which Triton has no type for")
    return {"name": spec.name, "data_type": Word(kind), "dims": dims}


def _write_config(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.pbtxt").write_text(to_pbtxt(config), encoding="utf-8")
    return folder


def _copy_needed(served: _Served, folder: Path) -> None:
    """Copy what an end reads: the manifest, the files beside the candidate except weights, and the runtime's code."""
    folder.mkdir()
    shutil.copyfile(served.bundle / "manifest.json", folder / "manifest.json")
    beside = Path(served.manifest.artifact("candidate").path).parent
    for name in served.manifest.files:
        if Path(name).parent == beside and Path(name).suffix in (".json", ".txt"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(served.bundle / name, folder / name)
    write_requirements(folder, ("numpy", *reading_samples(served.manifest)), PINS, WHY_PINNED)
    copy_runtime(folder)


ENDS = {"encode": "Encoder", "answer": "Answers"}
MODEL = '''\
"""One end of a served bundle; what it does is in bundle/runtime/serving/model.py."""

import sys
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        folder = Path(args["model_repository"]) / args["model_version"] / "bundle"
        sys.path.insert(0, str(folder))
        from runtime.serving.model import END

        self.end = END(folder)

    def execute(self, requests):
        return [self._respond(request) for request in requests]

    def _respond(self, request):
        given = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        try:
            made = self.end.respond(given)
        except Exception as error:  # the server needs an answer to every request
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(f"{type(error).__name__}: {error}"))
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, np.ascontiguousarray(x)) for name, x in made.items()])
'''


@dataclass(frozen=True)
class Word:
    """The name of an enumeration's value, which stands without quotation marks."""

    name: str


def to_pbtxt(message: Mapping[str, Any]) -> str:
    """Format fields in order; a list is a repeated field (of scalars: in brackets), a mapping a message of its own."""
    return "\n".join(_format_lines(message)) + "\n"


def _format_lines(message: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    for name, value in message.items():
        for item in _split_repeated(value):
            if isinstance(item, Mapping):
                yield f"{indent}{name} {{"
                yield from _format_lines(item, indent + "  ")
                yield f"{indent}}}"
            else:
                yield f"{indent}{name}: {_format_scalar(item)}"


def _split_repeated(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)) and any(isinstance(item, Mapping) for item in value):
        return list(value)
    return [value]


def _format_scalar(value: Any) -> str:
    if isinstance(value, Word):
        return value.name
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[ {', '.join(map(_format_scalar, value))} ]"
    return json.dumps(value)
