"""The same three jobs in our lines and in those of others: what a person writes, how long it takes, what is then known.

A CNN in int8 (NNCF), a decoder in 4 bits (llm-compressor), a CNN 1.4 times as fast (Torch-Pruning), each beginning with
a model and its data in the program. The scripts are in `api_lines/`; a line counts between their two marks unless it is
blank. Claim of each job: ours are fewer. Seconds are of the whole process, imports and reading included, and of ours
with the judging of both models: by the clock, and of the processor, which other work beside it moves less.
1.4 times is of the time for ours, and of multiplications for Torch-Pruning, which knows no times; both train for a
minute. NNCF's kernels are compiled by a run before the timed one. No recipe of recipes/ is used.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from common import (
    HERE,
    ROOT,
    Call,
    Claim,
    Measured,
    Row,
    RunError,
    at_most,
    peer_environment,
    peer_python,
    run_script,
    say,
)

SCRIPTS = HERE / "api_lines"
MARK, KNOWN = "# ---\n", "known: "
JOBS = {
    "int8": ("NNCF", "int8_nncf.py", "nncf_torch"),
    "four_bits": ("llm-compressor", "four_bits_llmcompressor.py", "llmcompressor"),
    "prune": ("Torch-Pruning", "prune_torchpruning.py", "torchpruning"),
}
"""Job -> the peer's name, script and environment; ours is `<job>_ours.py`, in this one."""
NEEDS = (
    *("models/cifar10-resnet56/model.safetensors", "models/tinystories656k-hf"),
    *("data/cifar10/train.npz", "data/cifar10/test.npz", "data/tinystories/stories.jsonl"),
)


def measure(call: Call) -> Measured:
    claims: list[Claim] = []
    rows: list[Row] = []
    for job in call.choose(JOBS, quick=1):
        name, script, venv = JOBS[job]
        ours = run_lines(job, "compress", f"{job}_ours.py", Path(sys.executable), call)
        rows.append(ours)
        if call.ours:
            continue
        try:
            if job == "int8":
                run_lines(job, f"{name}, first", script, peer_python(venv), call)
            theirs = run_lines(job, name, script, peer_python(venv), call)
        except RunError as error:
            say(f"{name}: {error}")
            theirs = {"job": job, "tool": name, "lines": count_lines(script), "failed": str(error)}
        rows.append(theirs)
        claims.append(at_most(f"{job}_lines", ours["lines"], theirs["lines"] - 1))
    return claims, rows


def count_lines(script: str) -> int:
    """Return how many lines a person writes."""
    text = (SCRIPTS / script).read_text(encoding="utf-8").split(MARK)[1]
    return sum(bool(line.strip()) for line in text.splitlines())


def run_lines(job: str, tool: str, script: str, python: Path, call: Call) -> Row:
    """Run a script in a folder of its own, and return what it took and told. RunError."""
    folder = call.out / Path(script).stem
    folder.mkdir(exist_ok=True)
    say(f"{job}: {tool}")
    # NNCF compiles its kernels as they are first used, gives up after a minute, and waits for ever on the lock that a
    # killed run left.
    kernels = {"NNCF_EXTENSION_LOAD_TIMEOUT": "0", "TORCH_EXTENSIONS_DIR": str(call.out / "kernels")}
    given = {"BENCH": str(call.bench), "NETWORK": str(ROOT / "compress/zoo/cifar_resnet.py"), **kernels}
    path = [str(SCRIPTS), *([str(ROOT)] if python == Path(sys.executable) else [])]
    environment = {**peer_environment(), **given, "PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1"}
    begun, used = time.perf_counter(), count_processor_seconds()
    done = subprocess.run(
        [str(python), str(SCRIPTS / script)], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    took = {"seconds": time.perf_counter() - begun, "processor_seconds": count_processor_seconds() - used}
    if done.returncode:
        told = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise RunError(f"{script} ended with exit code {done.returncode}: {told}")
    known = next(line.removeprefix(KNOWN) for line in done.stdout.splitlines() if line.startswith(KNOWN))
    rounded = {name: round(seconds, 1) for name, seconds in took.items()}
    return {"job": job, "tool": tool, "lines": count_lines(script), **rounded, "known": known}


def count_processor_seconds() -> float:
    """Return the processor's seconds of all processes that this one started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    raise SystemExit(run_script(__doc__, NEEDS, measure))
