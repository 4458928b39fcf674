"""Load time and peak memory of one model, in a process of its own.

The process imports the backend's library first, so that what is counted is the model and not the library.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from runtime.backends import BACKENDS, Session, open_model
from runtime.backends.base import Options
from runtime.bundle.manifest import KvCacheSpec
from runtime.bundle.npz import read_arrays
from runtime.bundle.records import from_json, to_json
from runtime.errors import RuntimeFailure
from runtime.processes.isolated import start_python

RUNS = 3
"""Calls after which memory is read: the first allocates, the next may still grow the arena."""
TIMEOUT_S = 1800


@dataclass(frozen=True)
class Probe:
    """What each of several fresh processes saw."""

    load_ms: tuple[float, ...]
    peak_memory_bytes: tuple[float, ...]


def probe(
    backend: str,
    path: Path,
    threads: int,
    feeds: Mapping[str, np.ndarray],
    options: Options,
    cache: KvCacheSpec | None = None,
    new_tokens: int = 0,
    repeats: int = 3,
    start_tokens: Sequence[int] = (),
) -> Probe:
    """Open the model and run it on `feeds` in `repeats` fresh processes. Raises RuntimeFailure with their error.

    With a `cache` it is a decoder that continues `feeds["prompts"]`, int64 [n, t], by `new_tokens`; with `start_tokens`
    an encoder-decoder that writes as many to what `feeds` give its encoder.
    """
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "feeds.npz"
        np.savez(saved, **feeds)  # type: ignore[arg-type]
        task = {
            "backend": backend,
            "path": str(path),
            "threads": threads,
            "options": dict(options),
            "feeds": str(saved),
            "cache": to_json(cache),
            "new_tokens": new_tokens,
            "start_tokens": list(start_tokens),
        }
        seen = [_run_fresh_process(json.dumps(task), path) for _ in range(repeats)]
    return Probe(tuple(s["load_ms"] for s in seen), tuple(s["peak_memory_bytes"] for s in seen))


def _run_fresh_process(task: str, path: Path) -> dict[str, float]:
    try:
        done = start_python("from runtime.measure.probe import main; main(sys.argv[1])", task, seconds=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise RuntimeFailure(f"{path}: measuring load time and memory took longer than {TIMEOUT_S} s") from error
    if done.returncode != 0:
        raise RuntimeFailure(f"{path}: measuring load time and memory failed: {done.stderr.strip()[-500:]}")
    seen: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seen


def peak_memory_bytes() -> int:
    """Return the most resident memory this process has had: VmHWM on Linux, ru_maxrss elsewhere."""
    status = Path("/proc/self/status")
    if status.exists():
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        return int(lines["VmHWM"].split()[0]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main(task: str) -> None:
    """Measure here and print one JSON line."""
    order = json.loads(task)
    backend = BACKENDS[order["backend"]]
    backend.library()
    feeds = read_arrays(Path(order["feeds"]))
    bare = peak_memory_bytes()
    start = time.perf_counter()
    session = open_model(backend, Path(order["path"]), order["threads"], order["options"])
    load_ms = 1000 * (time.perf_counter() - start)
    if order["start_tokens"]:
        _run_answers(session, order["start_tokens"], feeds, order["new_tokens"])
    elif order["cache"] is not None:
        _run_requests(
            session, from_json(KvCacheSpec, order["cache"], "cache"), list(feeds["prompts"]), order["new_tokens"]
        )
    else:
        for _ in range(RUNS):
            session.run(feeds)
    print(json.dumps({"load_ms": load_ms, "peak_memory_bytes": max(peak_memory_bytes() - bare, 0)}))


def _run_requests(session: Session, cache: KvCacheSpec, prompts: list[np.ndarray], new_tokens: int) -> None:
    from runtime.decode.kv_cache import Decoder
    from runtime.measure.timing import run_request

    decoder = Decoder(session, cache)
    for _ in range(RUNS - 1):  # a request is many calls
        run_request(decoder, prompts, new_tokens)


def _run_answers(session: Session, start_tokens: Sequence[int], feeds: dict[str, np.ndarray], new_tokens: int) -> None:
    from runtime.decode.kv_cache import EncodedDecoder
    from runtime.measure.timing import run_request

    decoder = EncodedDecoder(session, start_tokens)
    for _ in range(RUNS - 1):
        run_request(decoder, feeds, new_tokens)
