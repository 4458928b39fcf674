"""Claim about `compress apply`: ended at any instant and called again, it ends with the same bytes and leaves nothing.

Three recipes: recipes/quickstart.yaml (int8 of a CNN), a random Llama of 4 layers through `gptq` to a checkpoint (as in
recipes/claims/tinystories-w4-gptq.yaml), and the CNN pruned, trained and rounded. Each goes once without a break; then
runs are ended at random instants (three of four by SIGKILL, the fourth by SIGTERM) and called again: 100 in all. No
hashed file of a bundle differs, no finished pass is done again, of the blocks that were finished at most one is, no
temporary file is left, and nothing stands beside the bundle.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
from common import (
    GATE_FELL_SHORT,
    ROOT,
    Call,
    Claim,
    Measured,
    Row,
    RunError,
    apply_command,
    at_least,
    at_most,
    run_script,
    say,
)
from language import QUICK, random_tokens, write_random_llama
from random_models import write_recipe

from compress.store.cache import PARTIAL, RECORD
from runtime.bundle.format import is_hashed

NEEDS = ()
LAYERS, VOCABULARY = 4, 512
SHAPE = QUICK | {"num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}
SAMPLES, TOKENS = 32, 128
GROUP = 32
KILLS = 100
QUICK_KILLS = 3
SEED = 0
TERMINATED = 4
"""Every so many-th run is ended by SIGTERM, the others by SIGKILL."""
SHORT = ("validate.benchmark={warmup: 1, iterations: 10, throughput_batch_size: 2}", "validate.gates=[]")
TRAINING = (
    "data.train={source: 'npz:${digits}/train.npz', samples: 512}",
    "passes=[{kind: prune_channels, ratio: 0.25}, {kind: distill, steps: 60, batch_size: 32}, {kind: int8}]",
)


@dataclass(frozen=True)
class Subject:
    """A recipe with its `--set`s; `seconds` and `digests` are those of a run without a break."""

    name: str
    recipe: Path
    sets: tuple[str, ...]
    seconds: float = 0.0
    digests: Mapping[str, str] | None = None


def measure(call: Call) -> Measured:
    subjects = [run_whole(subject, call) for subject in make_subjects(call.out)]
    rng = np.random.default_rng(SEED)
    rows: list[Row] = []
    for number in range(QUICK_KILLS if call.quick else KILLS):
        subject = subjects[number % len(subjects)]
        rows.append(end_and_resume(subject, number, float(rng.uniform(0, 1)) * subject.seconds, call))
        say(str(rows[-1]))
    return claims(rows), rows


def make_subjects(out: Path) -> list[Subject]:
    quickstart = ROOT / "recipes" / "quickstart.yaml"
    model = write_random_llama(out / "model", SHAPE)
    tokens = random_tokens(SAMPLES + 1, TOKENS, VOCABULARY)
    llama = write_recipe(out, model, tokens[:SAMPLES], tokens[SAMPLES:], GROUP)
    return [
        Subject("digits", quickstart, SHORT),
        Subject("decoder", llama, ()),
        Subject("training", quickstart, (*SHORT, *TRAINING)),
    ]


def run_whole(subject: Subject, call: Call) -> Subject:
    """Run a subject without a break, and note what it took and gave."""
    bundle = call.out / f"{subject.name}-whole" / "bundle"
    start = time.perf_counter()
    finish(subject, bundle, call.out / f"{subject.name}-whole-cache", make_temporary(call, subject.name))
    return Subject(subject.name, subject.recipe, subject.sets, time.perf_counter() - start, digests(bundle))


def end_and_resume(subject: Subject, number: int, after: float, call: Call) -> Row:
    """End a run after so many seconds, with a cache and temporary folder of its own, and call it again.

    A run that ends by itself before is made anew and ended in half the time.
    """
    place, cache = call.out / f"ended-{number}", call.out / f"cache-{number}"
    temporary = make_temporary(call, str(number))
    by = signal.SIGTERM if number % TERMINATED == TERMINATED - 1 else signal.SIGKILL
    command = apply_command(subject.recipe, subject.sets, place / "bundle", cache)
    while not run_for(command, after, by, temporary):
        shutil.rmtree(place)
        shutil.rmtree(cache)
        after /= 2
    row: Row = {"model": subject.name, "ended_by": by.name, "after_s": round(after, 2)}
    if by is signal.SIGTERM:
        row["left_at_the_end"] = left_over(temporary, place)
    finished, blocks = finished_results(cache), finished_blocks(cache)
    finish(subject, place / "bundle", cache, temporary)
    row |= {
        "different_files": different(subject.digests or {}, digests(place / "bundle")),
        "steps_again": len(finished - finished_results(cache)),
        "blocks_again": len(blocks - inodes(cache)),
        "left": left_over(temporary, place),
    }
    shutil.rmtree(place)
    shutil.rmtree(cache)
    return row


def make_temporary(call: Call, name: str) -> Path:
    folder = call.out / f"tmp-{name}"
    folder.mkdir()
    return folder


def finish(subject: Subject, bundle: Path, cache: Path, temporary: Path) -> None:
    """Call a subject and let it end. RunError where it fails."""
    command = apply_command(subject.recipe, subject.sets, bundle, cache)
    environment = os.environ | {"TMPDIR": str(temporary)}
    code = subprocess.run(command, cwd=ROOT, stdout=sys.stderr, env=environment, check=False).returncode
    if code not in (0, GATE_FELL_SHORT):
        raise RunError(f"compress apply {subject.recipe.name} ended with exit code {code}")


def run_for(
    command: Sequence[str], seconds: float, by: signal.Signals = signal.SIGKILL, temporary: Path | None = None
) -> bool:
    """Return True if the process was still running after `seconds`, and was ended, by SIGKILL with all its children."""
    environment = os.environ | ({"TMPDIR": str(temporary)} if temporary else {})
    child = subprocess.Popen(command, cwd=ROOT, stdout=sys.stderr, start_new_session=True, env=environment)
    try:
        code = child.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, by) if by is signal.SIGKILL else child.send_signal(by)
        child.wait()
        say(f"{by.name} after {seconds:.1f} s")
        return True
    if code not in (0, GATE_FELL_SHORT):
        raise RunError(f"compress apply ended with exit code {code}")
    return False


def finished_results(cache: Path) -> set[tuple[str, int]]:
    """(key, inode of its record) of every result that the cache holds whole."""
    return {(record.parent.name, record.stat().st_ino) for record in cache.glob(f"*/{RECORD}")}


def finished_blocks(cache: Path) -> set[int]:
    """Inodes of the tensors that unfinished work has kept, but for the newest: it may have been at work."""
    files = sorted(cache.glob(f"{PARTIAL}*/*.safetensors"), key=lambda file: file.stat().st_mtime_ns)
    return {file.stat().st_ino for file in files[:-1]}


def inodes(folder: Path) -> set[int]:
    return {file.stat().st_ino for file in folder.rglob("*") if file.is_file()}


def left_over(temporary: Path, place: Path) -> list[str]:
    """Names in the temporary folder, and of what stands beside the bundle but for the logs of runs that failed."""
    beside = [path.name for path in place.iterdir()] if place.is_dir() else []
    others = [name for name in beside if name != "bundle" and not name.endswith(".compress.log")]
    return sorted([path.name for path in temporary.iterdir()] + others)


def digests(bundle: Path) -> dict[str, str]:
    """Hashed file -> SHA-256, manifest and all."""
    return {name: sha256(path.read_bytes()).hexdigest() for name, path in _files(bundle)}


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and (is_hashed(name) or name == "manifest.json"):
            yield name, path


def different(a: Mapping[str, str], b: Mapping[str, str]) -> list[str]:
    """Files that only one of them has, or that differ."""
    return sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))


def claims(rows: Sequence[Row], wanted: int = KILLS) -> list[Claim]:
    return [
        at_least("runs_ended_and_resumed", len(rows), wanted),
        at_most("files_that_differ", sum(len(row["different_files"]) for row in rows), 0),
        at_most("finished_steps_done_again", sum(row["steps_again"] for row in rows), 0),
        at_most("finished_blocks_done_again_in_one_run", max(row["blocks_again"] for row in rows), 1),
        at_most("left_after_sigterm", sum(len(row.get("left_at_the_end", ())) for row in rows), 0),
        at_most("left_after_resuming", sum(len(row["left"]) for row in rows), 0),
    ]


if __name__ == "__main__":
    raise SystemExit(run_script(__doc__, NEEDS, measure))
