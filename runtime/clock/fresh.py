"""Run a measurement in several fresh processes: memory layout and clock are drawn anew with each."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from runtime import errors
from runtime.bundle.columns import Array
from runtime.bundle.npz import read_arrays
from runtime.errors import RuntimeFailure
from runtime.processes.isolated import last_line, start_python

TIMEOUT_S = 3600
CHILD = "import importlib; importlib.import_module('runtime.clock.fresh').work(*sys.argv[1:])"
ARRAYS = "arrays.npz"
Answer = tuple[dict[str, Any], dict[str, Array]]
"""What a process found: JSON values, and arrays by name."""


def run_fresh(function: str, task: Mapping[str, Any], what: str) -> Answer:
    """Call `function` ("module:name") with the task in a process of its own; return what it found.

    `what`: names the measurement in errors. Raises the RuntimeFailure that the function raised, MemoryError, and
    RuntimeFailure where the process ended otherwise.
    """
    with tempfile.TemporaryDirectory(prefix="fresh.") as folder:
        try:
            done = start_python(CHILD, function, json.dumps(task), folder, seconds=TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise RuntimeFailure(f"{what} took longer than {TIMEOUT_S} s") from error
        if done.returncode != 0:
            how = f"was ended by signal {-done.returncode}" if done.returncode < 0 else last_line(done.stderr)
            raise RuntimeFailure(f"{what} failed in a process of its own: {how}")
        record = json.loads(done.stdout.splitlines()[-1])
        if "error" in record:
            _raise(record)
        return record, read_arrays(Path(folder) / ARRAYS)


def _raise(record: Mapping[str, Any]) -> None:
    if record["error"] == "MemoryError":
        raise MemoryError(record["problems"][0])
    raise getattr(errors, record["error"])(record["problems"])


def work(function: str, task: str, folder: str) -> None:
    """Do one task here: its arrays into the folder, its JSON line to stdout; an error for people goes there, too."""
    import importlib

    module, _, name = function.partition(":")
    try:
        record, arrays = getattr(importlib.import_module(module), name)(json.loads(task))
    except MemoryError as error:
        record, arrays = {"error": "MemoryError", "problems": [str(error)]}, {}
    except RuntimeFailure as error:
        kind = next(c.__name__ for c in type(error).__mro__ if getattr(errors, c.__name__, None) is c)
        record, arrays = {"error": kind, "problems": list(getattr(error, "problems", None) or [str(error)])}, {}
    np.savez(Path(folder) / ARRAYS, allow_pickle=False, **arrays)
    print(json.dumps(record))


def write_batches(path: Path, parts: Mapping[str, Sequence[Mapping[str, Array]]]) -> None:
    """Write batches of feeds, by the name of the part of the measurement that reads them, for the processes."""
    arrays = {}
    for part, batches in parts.items():
        for turn, batch in enumerate(batches):
            for place, (name, values) in enumerate(batch.items()):
                arrays[f"{part}.{turn}.{place}.values"] = values
                arrays[f"{part}.{turn}.{place}.name"] = np.frombuffer(name.encode(), np.uint8)
    np.savez(path, allow_pickle=False, **arrays)


def read_batches(path: Path) -> dict[str, list[dict[str, Array]]]:
    """Read what `write_batches` wrote."""
    arrays = read_arrays(path)
    parts: dict[str, list[dict[str, Array]]] = {}
    for key in (key for key in arrays if key.endswith(".values")):
        part, turn, place, _ = key.rsplit(".", 3)
        batches = parts.setdefault(part, [])
        batches.extend({} for _ in range(int(turn) + 1 - len(batches)))
        batches[int(turn)][arrays[f"{part}.{turn}.{place}.name"].tobytes().decode()] = arrays[key]
    return parts
