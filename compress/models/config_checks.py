"""What a config.json may say, looked at before anything is built of it: numbers, and the task that its model has."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from compress.errors import SourceError
from compress.models.source import Source, read_object
from compress.models.weights import safetensors_shapes
from runtime.tasks import find_task

COUNTS = re.compile(r"layer|block|depth|expert|stage|labels|group", re.IGNORECASE)
"""Keys of what a model has many of; its code, and its configuration's, goes through them one by one."""
LAYERS = re.compile(r"^(n|num)_.*layers?$|^layers$")
POSITIONS = re.compile(r"position|n_ctx|max_seq|max_length", re.IGNORECASE)
MOST_COUNTED, MOST_POSITIONS, LARGEST = 10_000, 2**27, 2**63 - 1
"""A table of positions takes 8 bytes for each; no size is larger than what 64 bits hold."""
SPARE_PARAMETERS = 1000
"""Of a module, over twice the tensors of its files: a head or pooler that is built anew, tensors stored for several."""
REASON_CHARACTERS = 400


def check_numbers(source: Source) -> None:
    """Raise SourceError that names each number of config.json that the weights cannot fill, or no model has."""
    assert source.folder is not None
    path = source.folder / "config.json"
    record = read_object(path)
    n_tensors = count_tensors(source)
    most = MOST_COUNTED if n_tensors is None else max(MOST_COUNTED, n_tensors)
    problems = [f"{path}: {problem}" for problem in _find_number_problems(record, most, n_tensors)]
    if problems:
        raise SourceError(problems)


def _find_number_problems(
    record: Mapping[str, Any], most: int, n_tensors: int | None, inside: str = ""
) -> Iterator[str]:
    for key, value in record.items():
        name = f"{inside}{key}"
        if isinstance(value, dict):
            yield from _find_number_problems(value, most, n_tensors, f"{name}.")
        if type(value) is not int:
            continue
        if value < 0 and LAYERS.search(key):
            yield f"{name} is {value}; a model has no fewer than 0"
        elif not -LARGEST <= value <= LARGEST:
            yield f"{name} has {len(str(abs(value)))} digits; no size of a model has"
        elif COUNTS.search(key) and value > most:
            held = "" if n_tensors is None else f", and the weights hold {n_tensors} tensors"
            yield f"{name} is {value}{held}; copy or download it again"
        elif POSITIONS.search(key) and value > MOST_POSITIONS:
            yield f"{name} is {value}; a model has at most {MOST_POSITIONS} positions here"


def count_tensors(source: Source) -> int | None:
    """Return how many tensors a folder's safetensors files hold by their headers; None of other files. SourceError."""
    if not source.weights or any(path.suffix != ".safetensors" for path in source.weights):
        return None
    return sum(len(safetensors_shapes(path)) for path in source.weights)


@contextmanager
def limit_parameters(source: Source) -> Iterator[None]:
    """Refuse to build modules of far more parameters than the files hold while the context is open. ValueError."""
    n_tensors = count_tensors(source)
    if n_tensors is None:
        yield
        return
    most, made, register = 2 * n_tensors + SPARE_PARAMETERS, 0, nn.Module.register_parameter

    def count_and_register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal made
        made += parameter is not None
        if made > most:
            raise ValueError(
                f"config.json describes a model of more than {most} parameters, and the weights hold {n_tensors}"
            )
        register(module, name, parameter)

    nn.Module.register_parameter = count_and_register  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def check_task(where: str, task: str, config: Any, auto: Any) -> None:
    """Raise SourceError where a model of this configuration has no such task, or would lose a part of itself for it.

    `auto`: transformers' class for the task.
    """
    kind = type(config).__name__
    tasks = _find_tasks(config.model_type)
    is_for = f"; transformers has it for {', '.join(tasks)}, not supported here yet" if tasks else ""
    if find_task(task).generates and getattr(config, "is_encoder_decoder", False):
        raise SourceError(
            f"{where}: {config.model_type} has an encoder, whose output its decoder reads: as a {task} model "
            f"it would be compressed without it{is_for}"
        )
    mapping = getattr(auto, "_model_mapping", None)
    remote = getattr(config, "auto_map", None)
    if mapping is not None and type(config) not in mapping and not remote:
        raise SourceError(f"{where}: transformers has no {task} model for {kind} ({config.model_type}){is_for}")


SEQUENCE_TASKS = {
    "automatic-speech-recognition": ("MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES", "MODEL_FOR_CTC_MAPPING_NAMES"),
    "text2text-generation": ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",),
    "image-text-to-text": ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",),
    "text-to-speech": ("MODEL_FOR_TEXT_TO_SPECTROGRAM_MAPPING_NAMES", "MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING_NAMES"),
}
"""Tasks that are not supported here -> the tables of transformers that name their models."""


def _find_tasks(model_type: str) -> list[str]:
    from transformers.models.auto import modeling_auto

    return [
        task
        for task, tables in SEQUENCE_TASKS.items()
        if any(model_type in getattr(modeling_auto, table, {}) for table in tables)
    ]


def shorten_reason(error: BaseException) -> str:
    """Return what a library says in one line of at most REASON_CHARACTERS."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= REASON_CHARACTERS else text[:REASON_CHARACTERS].rsplit(" ", 1)[0] + " ..."
