"""Samples drawn at random, in the form that a model reads: enough to time calls, and good for nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from compress.errors import PlanError
from compress.models.onnx_ends import onnx_io
from compress.models.preprocess import resolve_preprocess
from compress.models.source import Source, locate
from compress.planning.draft import ORDER, Draft, make_model_spec, make_recipe
from compress.planning.inputs import read_inputs
from compress.specs import ModelSpec
from runtime.bundle.tensors import TensorSpec
from runtime.encode.language import LanguagePreprocess
from runtime.encode.preprocess import AudioPreprocess, ImagePreprocess, PreprocessSpec, TextPreprocess
from runtime.tasks import find_task

N_SAMPLES = 16
"""Samples drawn for a model without data, which is timed and never judged."""
USUAL_SIDE, USUAL_SECONDS, MOST_TOKENS = 224, 2.0, 128
"""Of images and sounds whose size neither the model nor its files say; and of texts."""
REASON = "synthetic: drawn at random, to time calls with; no quality can be told from it"


def add_synthetic_set(draft: Draft, file: Path, root: Path) -> Draft:
    """Return a draft that has no data with an evaluation set of random samples, written to `file` and an ending.

    PlanError for a model whose samples cannot be drawn.
    """
    model = make_model_spec(draft.recipe, draft.task)
    declared = make_recipe(draft.recipe, root).preprocess
    source = locate(model, root)
    columns = _draw_columns(source, resolve_preprocess(source, declared))
    file.parent.mkdir(parents=True, exist_ok=True)
    if all(isinstance(values, np.ndarray) for values in columns.values()):
        kind, path = "npz", file.with_name(file.name + ".npz")
        np.savez(path, **columns)
    else:
        kind, path = "jsonl", file.with_name(file.name + ".jsonl")
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    spec = {"source": f"{kind}:{path}", "columns": {name: name for name in columns}}
    recipe = {**draft.recipe, "data": {"evaluation": spec}}
    recipe = {key: recipe[key] for key in ORDER if key in recipe}
    inputs = read_inputs(make_recipe(recipe, root))
    if inputs.problems:
        raise PlanError(inputs.problems)
    return replace(draft, recipe=recipe, reasons={**draft.reasons, "data.evaluation": REASON}, inputs=inputs)


def _draw_columns(source: Source, preprocess: PreprocessSpec) -> dict[str, Any]:
    """Draw the columns that the task's samples must have: arrays [n, ...], or lists of texts."""
    rng = np.random.default_rng(0)
    model = source.spec
    task = find_task(model.task)
    specs = onnx_io(model, source.onnx).inputs if source.onnx is not None else ()
    if isinstance(preprocess, ImagePreprocess):
        resize = preprocess.resize if isinstance(preprocess.resize, tuple) else None
        size = preprocess.letterbox or preprocess.crop or resize
        if size is None and specs:
            sides = specs[0].shape[2:4] if preprocess.layout == "NCHW" else specs[0].shape[1:3]
            size = (sides[0], sides[1]) if all(isinstance(side, int) for side in sides) else None  # type: ignore[assignment]
        if size is None:
            side = preprocess.resize if isinstance(preprocess.resize, int) else USUAL_SIDE
            size = (side, side)
        shape = (N_SAMPLES, *size) if preprocess.channels == "L" else (N_SAMPLES, *size, 3)
        return {"image": rng.integers(0, 256, shape, dtype=np.uint8)}
    if isinstance(preprocess, TextPreprocess | LanguagePreprocess) and source.folder is not None:
        n_tokens = min(preprocess.max_length, MOST_TOKENS)
        tokenizer = source.folder / preprocess.tokenizer
        return {role: _draw_texts(tokenizer, n_tokens // task.required, rng) for role in task.columns[: task.required]}
    if isinstance(preprocess, AudioPreprocess):
        n = preprocess.n_samples or int(USUAL_SECONDS * preprocess.rate)
        waves = rng.uniform(-0.5, 0.5, (N_SAMPLES, n)).astype(np.float32)
        return {"audio": waves, "rate": np.full(N_SAMPLES, preprocess.rate)}
    if source.onnx is not None and not task.columns:
        return {spec.name: _draw_tensor(spec, model, rng) for spec in specs}
    raise PlanError(f"{model.source}: samples of a {model.task} model cannot be drawn at random; give --data")


def _draw_texts(tokenizer: Path, n_tokens: int, rng: np.random.Generator) -> list[str]:
    """Draw texts of about so many tokens out of a tokenizer's vocabulary."""
    from tokenizers import Tokenizer

    loaded = Tokenizer.from_file(str(tokenizer))
    drawn = rng.integers(0, loaded.get_vocab_size(), (N_SAMPLES, n_tokens))
    return [str(loaded.decode(ids.tolist(), skip_special_tokens=True)) or "text" for ids in drawn]


def _draw_tensor(spec: TensorSpec, model: ModelSpec, rng: np.random.Generator) -> np.ndarray:
    """Draw an input [n, ...]: normal numbers; integers are zeros, which any table of embeddings has."""
    free = [size for size in spec.shape[1:] if not isinstance(size, int)]
    if free:
        raise PlanError(
            f"{model.source}: input '{spec.name}' {list(spec.shape)} is of any size; give --data, of which it is told"
        )
    shape = (N_SAMPLES, *(int(size) for size in spec.shape[1:]))
    kind = np.dtype(spec.dtype)
    return rng.standard_normal(shape).astype(kind) if kind.kind == "f" else np.zeros(shape, kind)
