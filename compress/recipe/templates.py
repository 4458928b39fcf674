"""Recipes to start from: what `compress new` writes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compress.errors import OutputError, RecipeError
from compress.formats.targets import TARGETS
from compress.recipe.examples import SCHEMA
from compress.recipe.variables import escape
from compress.specs import MODEL_SOURCES, OF_FOLDERS
from compress.tasks import TORCH_TASKS
from compress.tasks.base import Starter
from runtime.errors import UsageError
from runtime.tasks import find_task
from runtime.words import suggest


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
    reads = TARGETS[parts.target].reads
    export = "" if reads == "onnx" else f"export: [{{kind: {reads}}}]\n"
    speed = f"    - {{metric: {find_task(task).latency}, min_speedup: 1.2}}\n" if reads == "onnx" else ""
    return f"""\
# With schema.json an editor completes keys and marks wrong ones; `compress schema --out schema.json` writes it anew.
# Relative paths are looked for in the working directory, then in this file's folder.
version: 1
name: my-model
model:
  source: {json.dumps(source)}
  task: {task}
{weights}{parts.model}{_format_preprocess(task, source, parts)}data:
{parts.data}target: {parts.target}        # the runtime that the result is made for
passes:
{parts.passes}{export}validate:
  gates:                       # all must hold, with confidence; otherwise the exit code is 3
{parts.gates}{speed}    - {{metric: size_ratio, min: 2}}
"""


def _format_preprocess(task: str, source: str, parts: Starter) -> str:
    """Return the line that says how inputs are made, of a source that has no files which say it."""
    kind = find_task(task).preprocess
    if kind in (None, "seq2seq") or source.startswith(OF_FOLDERS) or "preprocess:" in parts.model:
        return ""
    said, note = USUAL_PREPROCESS.get(str(kind), ("{kind: tensor}", "the data holds the model's inputs ready"))
    return f"preprocess: {said}   # TODO: {note}\n"


USUAL_PREPROCESS = {
    "image": ("{kind: image, mean: [0.485, 0.456, 0.406], std: [0.229, 0.224, 0.225]}", "as in the model's training"),
    "audio": ("{kind: audio, rate: 16000}", "as in the model's training"),
}
"""Kind -> the line that many trainings need, and what to make of it."""


def format_draft(
    recipe: Mapping[str, Any],
    reasons: Mapping[str, str],
    passes: Sequence[Mapping[str, Any]] = (),
    gates: Sequence[Mapping[str, Any]] = (),
    benchmark: Mapping[str, Any] | None = None,
    head: Sequence[str] = (),
) -> str:
    """Return a drafted recipe with its passes and gates as YAML, one line for each set, pass and gate.

    `reasons`: dotted key -> the comment behind its line. `head`: lines of comment above it.
    """
    parts = [f"# {line}" for line in head]
    for key, value in recipe.items():
        if key == "preprocess" or not isinstance(value, (Mapping, list)):
            parts.append(f"{key}: {_format_value(value)}{_format_reason(reasons, key)}")
            continue
        parts.append(f"{key}:")
        if isinstance(value, list):
            parts += [f"  - {_format_value(item)}" for item in value]
        else:
            parts += [f"  {k}: {_format_value(v)}{_format_reason(reasons, f'{key}.{k}')}" for k, v in value.items()]
        if key == "model" and "preprocess" in reasons and "preprocess" not in recipe:
            parts.append(f"# preprocess: {reasons['preprocess']}")
    parts += ["passes:", *(f"  - {_format_value(values)}" for values in passes)] if passes else []
    if gates or benchmark:
        parts.append("validate:")
    if gates:
        parts.append("  gates:   # all must hold, with confidence; otherwise the exit code is 3")
        parts += [f"    - {_format_value(gate)}" for gate in gates]
    parts += [f"  benchmark: {_format_value(benchmark)}"] if benchmark else []
    return "\n".join(parts) + "\n"


def _format_reason(reasons: Mapping[str, str], key: str) -> str:
    return f"   # {reasons[key]}" if key in reasons else ""


def _format_value(value: Any) -> str:
    """Return a value as YAML on one line: JSON, but for keys and words that need no quotes."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_format_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_format_value, value)) + "]"
    if isinstance(value, str):
        plain = re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", value) and value.lower() not in WORDS_OF_YAML
        return value if plain else json.dumps(escape(value), ensure_ascii=False)
    return json.dumps(value)


WORDS_OF_YAML = ("true", "false", "null", "yes", "no", "on", "off", "y", "n")
"""Which would read back as something else than text."""


def write_with_schema(file: Path, text: str) -> None:
    """Write a recipe to `file`, and the schema that its first line names beside it, where none is there.

    Raises as `write_new`.
    """
    write_new(file, f"# yaml-language-server: $schema=./{SCHEMA.name}\n{text}")
    if not (beside := file.parent / SCHEMA.name).exists():
        write_new(beside, SCHEMA.read_text(encoding="utf-8"))


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
