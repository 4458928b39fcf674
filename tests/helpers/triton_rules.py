"""What Triton checks before it loads a repository, read with its own schema: the rules of its core's
`model_config_utils.cc` (ValidateEnsembleSchedulingConfig) and `ensemble_utils.cc` (ValidateEnsembleConfig).

A model that breaks one is never READY. `benchmarks/triton_server.py` asks a real server.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

Configs = Mapping[str, Any]
"""Model -> its ModelConfig message."""


def read_repository(repository: Path) -> dict[str, Any]:
    """The models of a repository. ParseError where Triton's schema does not know a field or a value."""
    return {
        folder.name: text_format.Parse((folder / "config.pbtxt").read_text("utf-8"), model_config_pb2.ModelConfig())
        for folder in sorted(repository.iterdir())
    }


def find_problems(repository: Path, configs: Configs) -> list[str]:
    """Why Triton would refuse a model of the repository; empty where it would load them all."""
    problems = [f"{name}: config is named {config.name}" for name, config in configs.items() if config.name != name]
    problems += [f"{name}: no version" for name in configs if not (repository / name / "1").is_dir()]
    for name, config in configs.items():
        problems += [f"{name}: {spec.name} has no dims" for spec in (*config.input, *config.output) if not spec.dims]
        if config.platform == "ensemble":
            problems += [*_data_flow(config), *_mappings(config, configs)]
    return problems


def _data_flow(ensemble: Any) -> Iterator[str]:
    """Each ensemble tensor is written once, before it is read, and used."""
    inputs, outputs = ({spec.name for spec in specs} for specs in (ensemble.input, ensemble.output))
    steps = ensemble.ensemble_scheduling.step
    if not steps or ensemble.instance_group:
        yield "an ensemble has steps, and no instances"
    written: set[str] = set()
    for step in steps:
        if not (step.model_name and step.input_map and step.output_map):
            yield f"step {step.model_name}: names a model, inputs and outputs"
        for tensor in step.output_map.values():
            if tensor in written:
                yield f"ensemble tensor '{tensor}' can appear in an output map only once"
            written.add(tensor)
    read = {tensor for step in steps for tensor in step.input_map.values()}
    ready, waiting = set(inputs), list(steps)
    while runnable := [step for step in waiting if set(step.input_map.values()) <= ready]:
        ready |= {tensor for step in runnable for tensor in step.output_map.values()}
        waiting = [step for step in waiting if step not in runnable]
    yield from (f"ensemble input '{name}' is not used" for name in sorted(inputs - read))
    yield from (f"output '{name}' is not written" for name in sorted(outputs - (ready & (written | inputs))))
    yield from (f"ensemble tensor '{name}' is unused" for name in sorted((written - read - outputs) | (read - ready)))


def _mappings(ensemble: Any, configs: Configs) -> Iterator[str]:
    """Every input of a step's model is fed, maps name what there is, and what meets has one type and fitting sizes."""
    known = {spec.name: spec for spec in (*ensemble.input, *ensemble.output)}
    for step in ensemble.ensemble_scheduling.step:
        if step.model_name not in configs:
            yield f"there is no model {step.model_name}"
            continue
        model = configs[step.model_name]
        if 0 < model.max_batch_size < ensemble.max_batch_size:
            yield f"{step.model_name} only allows maximum batch size to be {model.max_batch_size}"
        for kind, specs, tensors in (("input", model.input, step.input_map), ("output", model.output, step.output_map)):
            names = {spec.name for spec in specs}
            yield from (f"{step.model_name} has no {kind} {name}" for name in sorted(tensors.keys() - names))
            for spec in specs:
                if spec.name in tensors:
                    yield from _compare(tensors[spec.name], known.setdefault(tensors[spec.name], spec), spec)
                elif kind == "input" and not spec.optional:
                    yield f"input {spec.name} of {step.model_name} is not mapped to any ensemble tensors"


def _compare(tensor: str, one: Any, other: Any) -> Iterator[str]:
    if one.data_type != other.data_type:
        yield f"{tensor}: inconsistent data type"
    fits = len(one.dims) == len(other.dims) and all(
        -1 in sizes or sizes[0] == sizes[1] for sizes in zip(one.dims, other.dims, strict=True)
    )
    if not fits:
        yield f"{tensor}: inconsistent shape"
