"""A benchmark's settings, held against the bundle that they are for."""

from __future__ import annotations

from dataclasses import replace

from runtime.bundle.manifest import Benchmark, Manifest, fixed_batch
from runtime.errors import UsageError

OF_DECODERS = ("prompt_tokens", "new_tokens", "ttft_limit_ms", "tpot_limit_ms", "price_per_hour")
"""Settings of a benchmark that fit what generates text alone."""
NOT_OF_DECODERS = {"sequence_length": "prompt_tokens", "latency_limit_ms": "ttft_limit_ms and tpot_limit_ms"}
"""Settings that do not fit it, and what to use; throughput_batch_size is passed over."""


def settings_for(manifest: Manifest, threads: int | None) -> tuple[Benchmark, str | None]:
    """Return the benchmark's settings as they can be followed, and a note where a fixed batch size overrules them.

    Raises UsageError for a setting that does not fit the task, a sequence length where the samples are no texts, and
    requests that are longer than a decoder's context.
    """
    settings = manifest.judgement.benchmark
    _check_settings(settings, manifest)
    settings = replace(settings, threads=threads or settings.threads)
    fixed = bound_batch(manifest)
    if fixed is None or fixed == settings.batch_size == settings.throughput_batch_size:
        return settings, None
    note = f"The model takes batches of exactly {fixed}, so that latency and throughput were measured at that size."
    return replace(settings, batch_size=fixed, throughput_batch_size=fixed), note


def _check_settings(settings: Benchmark, manifest: Manifest) -> None:
    usual, of_decoders = Benchmark(), manifest.generates
    misfits = NOT_OF_DECODERS if of_decoders else OF_DECODERS
    given = [name for name in misfits if getattr(settings, name) != getattr(usual, name)]
    if given:
        way_out = f"use {NOT_OF_DECODERS[given[0]]}" if of_decoders else "it fits what generates text"
        raise UsageError(f"benchmark.{given[0]} does not fit the task {manifest.task}; {way_out}")
    if settings.sequence_length is not None and manifest.preprocess["kind"] != "text":
        raise UsageError(
            f"benchmark.sequence_length fits texts; this bundle's samples are {manifest.preprocess['kind']}s"
        )
    timed = any(artifact.kind == "onnx" for artifact in manifest.artifacts)
    if manifest.generation is not None and timed:
        check_room(settings, manifest.generation.context_length)


def check_room(settings: Benchmark, context_length: int) -> None:
    """Raise UsageError where a request of the benchmark is longer than a decoder's context."""
    if settings.prompt_tokens + settings.new_tokens > context_length:
        raise UsageError(
            f"benchmark.prompt_tokens {settings.prompt_tokens} and new_tokens {settings.new_tokens} are more than the "
            f"model's context_length {context_length}"
        )


def bound_batch(manifest: Manifest) -> int | None:
    """Return the batch size that one of the bundle's models is bound to, if any."""
    return fixed_batch([spec for artifact in manifest.artifacts for spec in artifact.inputs])
