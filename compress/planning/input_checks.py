"""Look at the values of a recipe's model and data as far as a plan can: weights, labels, tokens, headers of images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from compress.blocks.layers import is_layer
from compress.blocks.materialise import plain
from compress.data.columns import CheckSize
from compress.data.inspect import DataFacts, check_values
from compress.errors import SourceError
from compress.facts import ModelFacts
from compress.models.meta import OpenedModel
from compress.models.onnx_ends import find_alike, onnx_io
from compress.models.packed import quantization_of
from compress.models.preprocess import shifts_masks
from compress.models.source import Source, list_weight_files
from compress.models.weights import check_finite_file
from compress.recipe.schema import Recipe
from compress.store.digests import READ_AT_ONCE_BYTES, identify_file
from compress.tasks import find_torch_task
from compress.tasks.base import MaskIds
from runtime.bundle.columns import Columns, count, take
from runtime.bundle.tensors import TensorSpec
from runtime.encode.images import ImageEncoder, ImagePreprocess, make_image_encoder, place_image
from runtime.encode.preprocess import (
    AudioPreprocess,
    ImageTextPreprocess,
    PreprocessSpec,
    make_preprocessor,
    split_samples,
)
from runtime.encode.texts import FEEDS
from runtime.errors import UsageError
from runtime.tasks.predict import encoding_views
from runtime.words import size_text

TEXTS_ALONE = (
    "there are images or sounds, and passes that train learn from texts alone: leave them out, or calibrate with them"
)
MOST_ENCODED = 4096
"""Texts of a set whose token ids a plan looks at, in half a second."""
ENCODED_AT_ONCE = 32
"""Of them, in one call of the tokenizer."""


def suggest_states(opened: OpenedModel, problems: Sequence[str]) -> list[str]:
    """Return what a recipe may say of inputs that an output is like, where something is wrong with the data."""
    if opened.source.onnx is None or not problems:
        return []
    ends = onnx_io(opened.source.spec, opened.source.onnx)
    like = {spec.name: find_alike(spec, ends.outputs) for spec in ends.inputs if len(ends.inputs) > 1}
    return [
        f"model: input '{name}' is of the shape of output '{output}'; if the next call reads there what a call gives, "
        f"say model.state: {{{output}: {name}}}"
        for name, output in like.items()
        if output
    ]


def check_weights(opened: OpenedModel, unread: Mapping[str, int]) -> list[str]:
    """Raise SourceError for NaN or infinity in a torch model's files; return what is too large to be looked at.

    An ONNX file is looked at where one sample is run. `unread`: tensors that are no part of the model.
    """
    files = list_weight_files(opened.source) if opened.module is not None else []
    n_bytes = sum(path.stat().st_size for path in files)
    if n_bytes > READ_AT_ONCE_BYTES:
        return [f"the values of the weights ({size_text(n_bytes)})"]
    assert opened.module is not None or not files
    buffers = tuple(plain(name) for name, _ in opened.module.named_buffers()) if opened.module is not None else ()
    for path in files:
        _check_file(path, identify_file(path), tuple(unread), buffers)
    return []


@lru_cache(maxsize=64)
def _check_file(path: Path, marks: str, unread: tuple[str, ...], buffers: tuple[str, ...]) -> None:
    check_finite_file(path, unread, buffers)


def check_token_ids(
    module: torch.nn.Module | None,
    task: str,
    preprocess: PreprocessSpec,
    specs: tuple[TensorSpec, ...],
    tokenizer: Path | None,
    columns: Columns,
) -> list[str]:
    """Raise SourceError for a text with a token that the model's table has no row for; return what was passed over."""
    wrapped = getattr(module, "wrapped", None)
    if (
        preprocess.kind != "text"
        or "text" not in columns
        or wrapped is None
        or not hasattr(wrapped, "get_input_embeddings")
    ):
        return []
    n_rows = getattr(wrapped.get_input_embeddings(), "num_embeddings", None)
    encoder = make_preprocessor(preprocess, specs, tokenizer)
    for view in encoding_views(task, columns):
        for start in range(0, min(count(view), MOST_ENCODED), ENCODED_AT_ONCE):
            rows = np.arange(start, min(start + ENCODED_AT_ONCE, count(view)))
            part = split_samples(encoder, {name: take(view, name, rows) for name in view}).columns
            largest = int(encoder.encode(part)["input_ids"].max())
            if n_rows is not None and largest >= n_rows:
                raise SourceError(
                    f"token id {largest}, in a text of samples {start} to {rows[-1]}, is beyond the model's "
                    f"vocabulary of {n_rows} tokens: is this the model's own tokenizer?"
                )
    return [f"the tokens of texts after the first {MOST_ENCODED}"] if count(columns) > MOST_ENCODED else []


def check_samples(
    task: str,
    data: Mapping[str, DataFacts],
    facts: ModelFacts,
    look: Callable[[Columns], list[str]],
    preprocess: PreprocessSpec,
    problems: list[str],
) -> list[str]:
    """Look at the values of all sets: add what is wrong to `problems`, and return what was not looked at.

    What a language model reads is looked at where its tokens are counted, but for what it learns from.
    """
    torch_task, passed_over = find_torch_task(task), []
    if torch_task.task.generates:
        return ["the texts of data.train"] if "train" in data else []
    n_classes = torch_task.count_classes(facts.outputs)
    for name, found in data.items():
        try:
            check_size = _make_size_check(preprocess, facts.inputs)
            passed_over += [f"{what} of data.{name}" for what in check_values(found, n_classes, look, check_size)]
        except (SourceError, UsageError) as error:
            problems += [f"data.{name}: {problem}" for problem in error.problems]
    return passed_over


def make_image_part(preprocess: PreprocessSpec, inputs: tuple[TensorSpec, ...]) -> ImageEncoder | None:
    """Make what feeds the input that reads images; None where none does. UsageError where it cannot be fed."""
    spec = preprocess.image if isinstance(preprocess, ImageTextPreprocess) else preprocess
    if not isinstance(spec, ImagePreprocess):
        return None
    return make_image_encoder(spec, tuple(value for value in inputs if value.name not in FEEDS))


def _make_size_check(preprocess: PreprocessSpec, inputs: tuple[TensorSpec, ...]) -> CheckSize:
    """Return what raises UsageError where an image, preprocessed, is not of the size that the model takes, or that
    the first image has."""
    encoder, seen = make_image_part(preprocess, inputs), list[tuple[int, int]]()

    def check(size: tuple[int, int]) -> None:
        if encoder is None:
            return
        window = place_image(*size, encoder.spec).window
        encoder.check_size(window)
        if not seen:
            seen.append(window)
        if window != seen[0]:
            shown = [f"{height}x{width}" for height, width in (window, seen[0])]
            raise UsageError(
                f"the image is {shown[0]} after preprocessing, and the first {shown[1]} (height x width): set "
                f"preprocess.resize: {list(seen[0])}, or crop"
            )

    return check


def describe_quantized(source: Source) -> str:
    """Return that the weights of a folder are quantized already, and by what method; "" where they are not."""
    record = quantization_of(source.folder)
    method = record.get("quant_method", "of no known method")
    return f"{source.name}: its weights are quantized already ({method})" if record else ""


def note_unpacked(opened: OpenedModel) -> list[str]:
    """Return a note where the weights of a folder are quantized already, and are read as floats.

    SourceError where they stay packed: there is nothing that a pass could round.
    """
    what = describe_quantized(opened.source) if opened.source.kind == "huggingface" else ""
    if not what or opened.module is None:
        return []
    packed = [name for name, layer in opened.module.named_modules() if is_layer(layer) and not _has_floats(layer)]
    if packed:
        more = f" and {len(packed) - 1} layers more" if len(packed) > 1 else ""
        raise SourceError(f"{what}, and {plain(packed[0])}{more} stay packed; give the float model that it was made of")
    return [f"{what}; they are read as floats, and a pass would round them a second time: better give the float model"]


def _has_floats(layer: torch.nn.Module) -> bool:
    """Return whether a layer holds its weight as floats that can be computed with, not as codes of 8 bits or fewer."""
    weight = getattr(layer, "weight", None)
    return isinstance(weight, torch.Tensor) and weight.is_floating_point() and weight.element_size() > 1


def explain_between(facts: ModelFacts) -> list[str]:
    """Return why a model reads no images or sounds: they go through blocks that texts do not come to."""
    blocks = facts.structure.blocks if facts.structure is not None else ()
    parents = {f"{block.name.rpartition('.')[0]}." for block in blocks if block.name}
    between = [layer.name for layer in facts.layers if layer.role == "idle" and layer.name.startswith(tuple(parents))]
    if not between:
        return []
    text = (
        f"images or sounds go through layers between the blocks that texts do not come to ({between[0]}), and no pass "
        "takes them"
    )
    return [f"data: {text}: give texts alone"]


def find_rate_problems(preprocess: PreprocessSpec, data: Mapping[str, DataFacts]) -> list[str]:
    """Return a problem for each set whose first audio has another rate than the model takes, unless it is changed."""
    if not isinstance(preprocess, AudioPreprocess) or preprocess.resample:
        return []
    return [
        f"data.{name}: {facts.source}: audio of {facts.rate} samples a second, and the model takes {preprocess.rate}: "
        "set resample: true in preprocess, or change the files"
        for name, facts in data.items()
        if facts.rate not in (None, preprocess.rate)
    ]


def note_masks(recipe: Recipe, data: Mapping[str, DataFacts], folder: Path | None) -> list[str]:
    """Return a note for each set whose masks are read as they are, where the model's folder says otherwise."""
    if find_torch_task(recipe.model.task).loss != "pixel classes" or not shifts_masks(folder):
        return []
    return [
        f"data.{name}: the model's preprocessor_config.json says do_reduce_labels: 1 is the first class in its masks, "
        "and 0 none; if these are so, add `masks: {first: 1, ignore: 0}`"
        for name, facts in data.items()
        if facts.has_labels and recipe.data.declared[name].masks == MaskIds()
    ]


def note_packing(recipe: Recipe) -> list[str]:
    """Return a note for each set whose samples share rows, where the model reads a row as one text."""
    return [
        f"data.{name}: packing: this model attends across the samples of a row: transformers makes it no mask by their "
        "positions"
        for name, declared in recipe.data.declared.items()
        if declared.packing
    ]
