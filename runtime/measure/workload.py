"""What a benchmark runs: its settings, held against the bundle that they are for, and batches of the bundle's samples.

Batches are made of its own evaluation samples by its own preprocessing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from runtime.backends import Feeds
from runtime.bundle.columns import count
from runtime.bundle.manifest import Benchmark, Manifest, fixed_batch
from runtime.encode.preprocess import Preprocessor, PreprocessSpec, Seq2SeqPreprocess, spec_from_dict
from runtime.encode.seq2seq import source_length
from runtime.errors import UsageError
from runtime.tasks import find_task

UNUSED: Mapping[str, Mapping[str, str]] = {
    "call": dict.fromkeys(
        ("prompt_tokens", "new_tokens", "ttft_limit_ms", "tpot_limit_ms"), "it fits what generates text"
    ),
    "token": {
        "sequence_length": "use prompt_tokens",
        "latency_limit_ms": "use ttft_limit_ms and tpot_limit_ms",
        "throughput_batch_size": "",
    },
}
"""What is timed, `Task.unit` -> settings of a benchmark that do not fit it, and the way out; "": it is passed over."""
MAX_FEEDS = 32
"""Different batches that a timing goes through in turn."""
MOST_FEED_BYTES = 2**33
"""Of one batch."""


def settings_for(manifest: Manifest, threads: int | None) -> tuple[Benchmark, str | None]:
    """Return the benchmark's settings as they can be followed, and a note where a fixed batch size overrules them.

    Raises UsageError for a setting that does not fit the task, a sequence length where the samples are no texts, and
    requests that are longer than a decoder's context.
    """
    settings = manifest.judgement.benchmark
    usual = Benchmark()
    for name, way_out in UNUSED[find_task(manifest.task).unit].items():
        if way_out and getattr(settings, name) != getattr(usual, name):
            raise UsageError(f"benchmark.{name} does not fit the task {manifest.task}; {way_out}")
    if settings.sequence_length is not None and manifest.preprocess["kind"] != "text":
        raise UsageError(
            f"benchmark.sequence_length fits texts; this bundle's samples are {manifest.preprocess['kind']}s"
        )
    timed = any(artifact.kind == "onnx" for artifact in manifest.artifacts)
    if manifest.generation is not None and timed:
        spec = spec_from_dict(manifest.preprocess)
        check_room(settings, manifest.generation.context_length, spec)
    settings = replace(settings, threads=threads or settings.threads)
    fixed = bound_batch(manifest)
    if fixed is None or fixed == settings.batch_size == settings.throughput_batch_size:
        return settings, None
    note = f"The model takes batches of exactly {fixed}, so that latency and throughput were measured at that size."
    return replace(settings, batch_size=fixed, throughput_batch_size=fixed), note


def check_room(settings: Benchmark, context_length: int, spec: PreprocessSpec) -> None:
    """Raise UsageError where a request of the benchmark is longer than a decoder's context.

    Of an encoder-decoder the prompt is what its encoder reads, and the context is of the answer alone.
    """
    if isinstance(spec, Seq2SeqPreprocess):
        most = context_length - len(spec.target.start_tokens)
        if settings.new_tokens > most:
            raise UsageError(f"benchmark.new_tokens {settings.new_tokens} is more than an answer's {most} tokens")
        longest = source_length(spec.source)
        if longest is not None and settings.prompt_tokens > longest:
            raise UsageError(
                f"benchmark.prompt_tokens {settings.prompt_tokens} is more than the {longest} tokens (max_length) that "
                "the encoder is given"
            )
        return
    if settings.prompt_tokens + settings.new_tokens > context_length:
        raise UsageError(
            f"benchmark.prompt_tokens {settings.prompt_tokens} and new_tokens {settings.new_tokens} are more than the "
            f"model's context_length {context_length}"
        )


def bound_batch(manifest: Manifest) -> int | None:
    """Return the batch size that one of the bundle's models is bound to, if any."""
    return fixed_batch([spec for artifact in manifest.artifacts for spec in artifact.inputs])


def make_feeds(
    preprocessor: Preprocessor,
    columns: Mapping[str, Any],
    batch_size: int,
    seed: int,
    sequence_length: int | None,
    most: int = MAX_FEEDS,
    streams: bool = False,
) -> list[Feeds]:
    """Make up to `most` batches of `batch_size` samples, drawn in a seeded order, repeated where there are too few.

    `streams`: samples are sequences of calls, of which the first alone is taken.

    UsageError, before it is made, for a batch of more than MOST_FEED_BYTES.
    """
    n_samples = count(columns)
    order = np.random.default_rng(seed).permutation(n_samples)
    single = preprocessor.encode(columns, order[:1]).values()
    sample = [values.itemsize * sequence_length if sequence_length else values.nbytes for values in single]
    n_bytes = batch_size * sum(sample)
    if n_bytes > MOST_FEED_BYTES:
        raise UsageError(
            f"benchmark: a batch of {batch_size} samples has about {n_bytes >> 20} MiB, more than "
            f"{MOST_FEED_BYTES >> 20}: give a smaller batch_size or throughput_batch_size"
        )
    feeds: list[Feeds] = []
    for index in range(min(most, -(-n_samples // batch_size))):
        rows = np.take(order, range(index * batch_size, (index + 1) * batch_size), mode="wrap")
        batch = preprocessor.encode(columns, rows)
        if streams:
            batch = {name: values[:, :1] for name, values in batch.items()}
        feeds.append(stretch(batch, sequence_length) if sequence_length else batch)
        # 128 MiB of them; one batch is always made
        if sum(values.nbytes for feed in feeds for values in feed.values()) > 128 << 20:
            break
    return feeds


def stretch(feeds: Feeds, sequence_length: int) -> Feeds:
    """Stretch text feeds [B, T] to [B, sequence_length]: each text's own tokens, repeated or cut, without padding.

    Raises UsageError for feeds that are no text.
    """
    if "input_ids" not in feeds:
        raise UsageError(
            f"benchmark.sequence_length fits texts only; the model's inputs are {', '.join(sorted(feeds))}"
        )
    ids = feeds["input_ids"]
    mask = feeds.get("attention_mask", np.ones_like(ids)).astype(bool)
    return {
        name: np.ones((len(ids), sequence_length), values.dtype)
        if name == "attention_mask"
        else np.stack([np.resize(row[keep], sequence_length) for row, keep in zip(values, mask, strict=True)])
        for name, values in feeds.items()
    }
