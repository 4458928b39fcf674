"""Recipes to start from: what `compress new` writes."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from compress.errors import OutputError, RecipeError
from compress.recipe.places import suggest
from compress.specs import MODEL_SOURCES, Task
from runtime.errors import UsageError


@dataclass(frozen=True)
class _Starter:
    """What differs from task to task."""

    source: str
    data: str
    passes: str
    gates: str
    speed: str = "latency_p50"
    """The metric whose speed-up is a gate."""


_INT8 = """  - kind: int8                 # weights and activations in eight bits
    calibration: mse           # or minmax, percentile, entropy
    # ignore: ["re:.*head"]    # layers that stay float: names, types, re:patterns
"""
_TEXT_DATA = """  calibration: {source: "csv:train.csv", samples: 512}
  evaluation: {source: "csv:test.csv"}
  # columns: {text: sentence, label: label} inside a set says which column is what
"""
_TEXT_PASSES = "  - {kind: smoothquant}        # move activation outliers into the weights first\n" + _INT8

_STARTERS = {
    "image-classification": _Starter(
        "python:model.py:build",
        """  # npz: arrays image and label; imagefolder: one folder for each class
  calibration: {source: "npz:train.npz", samples: 512}
  evaluation: {source: "npz:test.npz"}
""",
        "  - {kind: fold_batchnorm}     # into the convolutions; exact\n" + _INT8,
        "    - {metric: top1, max_drop: 0.01}\n",
    ),
    "text-classification": _Starter("dir:model", _TEXT_DATA, _TEXT_PASSES, "    - {metric: top1, max_drop: 0.01}\n"),
    "feature-extraction": _Starter(
        "dir:model",
        _TEXT_DATA,
        _TEXT_PASSES,
        "    - {metric: cosine, min: 0.98}           # to the baseline's; with text_pair and label: spearman\n",
    ),
    "text-generation": _Starter(
        "dir:model",
        """  # each text alone, or with `preprocess: {kind: language, pack: 512}` windows of the texts joined
  calibration: {source: "jsonl:train.jsonl", samples: 256}
  evaluation: {source: "jsonl:test.jsonl", samples: 200}
""",
        "  - {kind: gptq, scheme: W4A16, group_size: 32}   # lm_head stays float; awq before it is a normal thing\n",
        "    - {metric: nll, max_drop: 0.05}         # nats per token\n",
        "tpot",
    ),
    "generic": _Starter(
        "onnx:model.onnx",
        """  # npz: one array for each input of the model, by its name
  calibration: {source: "npz:train.npz", samples: 512}
  evaluation: {source: "npz:test.npz"}
""",
        _INT8,
        "    - {metric: sqnr_db, min: 25}            # against the baseline's outputs\n",
    ),
}


def starter(task: str, source: str | None = None) -> str:
    """Return a commented recipe for `task`, with the model `source` or a made-up one.

    Raises RecipeError if either is none.
    """
    if task not in get_args(Task):
        raise RecipeError(f"--task {task}: unknown task{suggest(task, get_args(Task))}")
    parts = _STARTERS[task]
    source = source or parts.source
    kinds = [example.partition(":")[0] for example in MODEL_SOURCES]
    if not re.match(rf"({'|'.join(kinds)}):.", source):
        raise RecipeError(f"--source {source}: expected {', '.join(MODEL_SOURCES)}")
    return _format_recipe(task, source, parts)


def _format_recipe(task: str, source: str, parts: _Starter) -> str:
    weights = "  # weights: model.safetensors\n" if source.startswith("python:") else ""
    return f"""\
# yaml-language-server: $schema=./schema.json
# `compress schema --out schema.json` writes that schema: with it an editor completes keys and marks wrong ones.
# Relative paths are looked for in the working directory, then in this file's folder.
version: 1
name: my-model
model:
  source: {json.dumps(source)}
  task: {task}
{weights}data:
{parts.data}target: onnxruntime-cpu        # the runtime that the result is made for
passes:
{parts.passes}validate:
  gates:                       # all must hold, with confidence; otherwise the exit code is 3
{parts.gates}    - {{metric: {parts.speed}, min_speedup: 1.2}}
    - {{metric: size_ratio, min: 2}}
"""


def write_new(file: Path, text: str, *, replace: bool = False) -> None:
    """Write `text` to `file`.

    Raises OutputError if that fails, UsageError if the file exists and is not to be replaced.
    """
    try:
        with file.open("w" if replace else "x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError as error:
        raise UsageError(f"{file}: exists already; remove it or give another --out") from error
    except OSError as error:
        raise OutputError(f"{file}: cannot be written: {error.strerror}") from error
