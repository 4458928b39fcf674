"""Recipes to start from: what `compress new` writes."""

from __future__ import annotations

import json
import re
from pathlib import Path

from compress.errors import OutputError, RecipeError
from compress.recipe.places import suggest
from compress.specs import MODEL_SOURCES
from compress.tasks import TORCH_TASKS
from compress.tasks.base import Starter
from runtime.errors import UsageError


def starter(task: str | None = None, source: str | None = None) -> str:
    """Return a commented recipe for `task` (default: the first), with the model `source` or a made-up one.

    Raises RecipeError if either is none.
    """
    task = next(iter(TORCH_TASKS)) if task is None else task
    if task not in TORCH_TASKS:
        raise RecipeError(f"--task {task}: unknown task{suggest(task, TORCH_TASKS)}")
    parts = TORCH_TASKS[task].starter
    source = source or parts.source
    kinds = [example.partition(":")[0] for example in MODEL_SOURCES]
    if not re.match(rf"({'|'.join(kinds)}):.", source):
        raise RecipeError(f"--source {source}: expected {', '.join(MODEL_SOURCES)}")
    return _format_recipe(task, source, parts)


def _format_recipe(task: str, source: str, parts: Starter) -> str:
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
{weights}{parts.model}data:
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
