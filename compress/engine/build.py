"""Compiling one engine, in a process of its own.

A broken installation may crash the process, a library takes one logger for all its life, and what a build held is given
back when it ends: three reasons why this is never done in the process that asks for it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compress.engine.layers import Outcome, layers_in_json, layers_in_log, outcomes, share_as_asked
from compress.errors import ExportError
from runtime.bundle.engine import EngineRecord, InputShapes, Profile
from runtime.bundle.files import write_whole
from runtime.bundle.records import from_json, to_json
from runtime.errors import RuntimeFailure
from runtime.nvidia import tensorrt_api as api
from runtime.nvidia.gpu import gpu_here, platform_here
from runtime.processes.isolated import last_line, start_python

TIMEOUT_S = 4 * 3600
FAILED = 1


@dataclass(frozen=True)
class Job:
    """One engine to compile. `graph`: the .onnx file; `engine`, `layers`, `record`: files to write; `cache`: the timing
    cache's file, "" for none. `asked`: product node -> precision."""

    runtime: str
    graph: str
    engine: str
    layers: str
    record: str
    cache: str
    profiles: tuple[Profile, ...]
    options: dict[str, object]
    asked: dict[str, str]


def build_engine(job: Job) -> tuple[EngineRecord, tuple[str, ...]]:
    """Compile an engine and return its record and what the user should know.

    ExportError with what the library said.
    """
    code = "from compress.engine.build import main; sys.exit(main(sys.stdin.read()))"
    try:
        done = start_python(code, given=json.dumps(to_json(job)), seconds=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise ExportError(
            f"{job.runtime}: the build took longer than {TIMEOUT_S} s; lower builder_optimization_level"
        ) from error
    if done.returncode < 0:
        message = last_line(done.stderr)
        raise ExportError(
            f"{job.runtime}: the builder crashed (signal {-done.returncode}: {message}); see `compress doctor`"
        )
    if done.returncode != 0:
        raise ExportError([f"{job.runtime}: {line}" for line in done.stderr.strip().splitlines()[-8:]] or "no word")
    answer: dict[str, Any] = json.loads(Path(job.record).read_text(encoding="utf-8"))
    return from_json(EngineRecord, answer["record"], "record"), tuple(answer["notes"])


def compile_here(job: Job) -> tuple[EngineRecord, list[str]]:
    """Compile in this process and write the engine under its name when it is whole; return its record and notes.

    RuntimeFailure with the way out.
    """
    trt = api.load(job.runtime)
    messages = api.Messages(trt)
    builder = trt.Builder(messages.logger)
    network = api.read_network(trt, builder, messages.logger, Path(job.graph))
    options = _make_options(job)
    config = api.make_config(trt, builder, options)
    free = {network.get_input(i).name for i in range(network.num_inputs) if -1 in network.get_input(i).shape}
    for profile in job.profiles:
        api.add_profile(builder, config, {name: _unpack_shapes(profile[name]) for name in profile if name in free})
    notes = [text] if (text := api.use_timing_cache(trt, config, options.timing_cache, messages)) else []
    begun = time.monotonic()
    data = builder.build_serialized_network(network, config)
    if data is None:
        raise RuntimeFailure(_list_reasons(messages))
    seconds, engine = time.monotonic() - begun, bytes(memoryview(data))
    write_whole(Path(job.engine), engine)
    if job.cache and (kept := api.timing_cache(config)):
        write_whole(Path(job.cache), kept)
    described = api.describe_engine(trt, messages, engine, options.version_compatible)
    layers = layers_in_json(described) if described else layers_in_log(text for _, text in messages.said)
    write_whole(Path(job.layers), (json.dumps([asdict(layer) for layer in layers], indent=1) + "\n").encode())
    node_outcomes = outcomes(job.asked, layers)
    gpu = gpu_here()
    return EngineRecord(
        runtime=job.runtime,
        version=str(trt.__version__),
        platform=platform_here(),
        compute_capabilities=options.compute_capabilities or ((gpu.capability,) if gpu else ()),
        profiles=job.profiles,
        version_compatible=options.version_compatible,
        hardware_compatibility_level=options.hardware_compatibility_level,
        gpu=gpu.name if gpu else "",
        build_seconds=round(seconds, 3),
        n_layers=len(layers),
        asked=_count_asked(node_outcomes),
        held=round(share_as_asked(node_outcomes), 4),
        short={
            outcome.node: f"{outcome.asked} -> {outcome.got or 'not named'}"
            for outcome in node_outcomes
            if not outcome.as_asked
        },
        inspected="inspector" if described else "log",
    ), notes


def _make_options(job: Job) -> api.BuildOptions:
    """Return the recipe's words as the library's options; a timing cache that is not there yet begins empty."""
    given = dict(job.options)
    workspace, kept = given.pop("workspace_mib", None), given.pop("timing_cache", False)
    fields = {name: value for name, value in given.items() if name in api.BuildOptions.__dataclass_fields__}
    cache = Path(job.cache) if job.cache and kept else None
    return from_json(
        api.BuildOptions,
        {**fields, "workspace_bytes": None if workspace is None else int(str(workspace)) * 2**20},
        "options",
    ).with_cache(None if cache is None else cache.read_bytes() if cache.is_file() else b"")


def _unpack_shapes(shapes: InputShapes) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    return shapes.min, shapes.opt, shapes.max


def _list_reasons(messages: api.Messages) -> list[str]:
    """Return the library's errors, each once, those of a missing driver last.

    These are logged of builds that succeed, too.
    """
    errors = list(dict.fromkeys(messages.errors()))
    return sorted(errors, key=lambda text: "cuda" in text.lower()) or [
        "the build failed, and the library did not say why"
    ]


def _count_asked(results: Sequence[Outcome]) -> dict[str, int]:
    return {
        kind: sum(outcome.asked == kind for outcome in results)
        for kind in dict.fromkeys(outcome.asked for outcome in results)
    }


def main(text: str) -> int:
    """Do the job that `text` is, JSON; the record goes to its file, errors to stderr, one a line."""
    job = from_json(Job, json.loads(text), "job")
    try:
        record, notes = compile_here(job)
    except RuntimeFailure as error:
        print("\n".join(error.problems), file=sys.stderr)
        return FAILED
    answer = {"record": to_json(record), "notes": notes}
    write_whole(Path(job.record), json.dumps(answer, indent=1).encode())
    return 0
