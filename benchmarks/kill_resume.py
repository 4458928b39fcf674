"""Claim about `compress apply`: killed at any instant and called again, it ends with the same bytes.

A random Llama of 8 layers goes through `gptq` (4 bits in groups of 32, as in recipes/tinystories-w4-gptq.yaml) to a
checkpoint: once without a break, then ten times killed (SIGKILL) at a random instant and called again. No file of the
checkpoint differs.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
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
    apply_recipe,
    at_least,
    at_most,
    run_script,
    say,
)
from language import QUICK, random_tokens, write_random_llama
from random_models import write_recipe
from subjects import checkpoint_of

NEEDS = ()
LAYERS, VOCABULARY = 8, 512
SHAPE = QUICK | {"num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}
SAMPLES, TOKENS = 64, 256
GROUP = 32
KILLS = 10


def measure(call: Call) -> Measured:
    recipe = make_recipe(call.out)
    start = time.perf_counter()
    whole = call.out / "whole"
    apply_recipe(recipe, (), whole, call.out / "cache-whole")
    seconds = time.perf_counter() - start
    wanted = digests(checkpoint_of(whole))
    rows: list[Row] = []
    for number, share in enumerate(np.random.default_rng().uniform(0, 1, 2 if call.quick else KILLS)):
        rows.append(kill_and_resume(recipe, number, float(share) * seconds, wanted, call))
    return claims(rows), rows


def make_recipe(out: Path) -> Path:
    model = write_random_llama(out / "model", SHAPE)
    tokens = random_tokens(SAMPLES + 1, TOKENS, VOCABULARY)
    return write_recipe(out, model, tokens[:SAMPLES], tokens[SAMPLES:], GROUP)


def kill_and_resume(recipe: Path, number: int, after: float, wanted: dict[str, str], call: Call) -> Row:
    """Killed after so many seconds, with a cache of its own, and called again: which files differ.

    A call that ends before is made anew and killed in half the time.
    """
    bundle, cache = call.out / f"killed-{number}", call.out / f"cache-{number}"
    while not run_for(apply_command(recipe, (), bundle, cache), after):
        shutil.rmtree(bundle)
        shutil.rmtree(cache)
        after /= 2
    row: Row = {"model": "ours", "killed_after_s": after}
    apply_recipe(recipe, (), bundle, cache)
    return row | {"different_files": different(wanted, digests(checkpoint_of(bundle)))}


def run_for(command: Sequence[str], seconds: float) -> bool:
    """True if the process was still running after `seconds`, and was killed with all its children."""
    child = subprocess.Popen(command, cwd=ROOT, stdout=sys.stderr, start_new_session=True)
    try:
        code = child.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        say(f"killed after {seconds:.1f} s")
        return True
    if code not in (0, GATE_FELL_SHORT):
        raise RunError(f"compress apply ended with exit code {code}")
    return False


def digests(folder: Path) -> dict[str, str]:
    """File -> SHA-256."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def different(a: dict[str, str], b: dict[str, str]) -> list[str]:
    """Files that only one of them has, or that differ."""
    return sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))


def claims(rows: Sequence[Row]) -> list[Claim]:
    return [
        at_least("runs_killed_and_resumed", len(rows), KILLS),
        at_most("files_that_differ", sum(len(row["different_files"]) for row in rows), 0),
    ]


if __name__ == "__main__":
    raise SystemExit(run_script(__doc__, NEEDS, measure))
