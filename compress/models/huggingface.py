"""Hugging Face folders: the class for the task, wrapped to take encoded inputs by name and give the task's outputs.

What a config.json says is looked at before anything is built of it: its numbers, and the task that its model has.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compress.blocks.sizes import UNFIT_NUMBERS, rebuild_config
from compress.errors import SourceError
from compress.models.packed import SCALED, has_small_floats, loads_as_floats, quantization_of
from compress.models.preprocess import reads_audio_mask, reads_token_mask
from compress.models.pruned import NOTE, fit_record, load_recorded, open_recorded_store
from compress.models.source import Source, read_object
from compress.models.weights import safetensors_shapes
from compress.specs import ModelSpec
from compress.tasks import TORCH_TASKS, find_torch_task
from runtime.encode.seq2seq import DECODER_IDS
from runtime.tasks import find_task

DECODED = "weights in the GPTQ format are read as the floats that they stand for"
COUNTS = re.compile(r"layer|block|depth|expert|stage|labels|group", re.IGNORECASE)
"""Keys of what a model has many of; its code, and its configuration's, goes through them one by one."""
LAYERS = re.compile(r"^(n|num)_.*layers?$|^layers$")
POSITIONS = re.compile(r"position|n_ctx|max_seq|max_length", re.IGNORECASE)
MOST_COUNTED, MOST_POSITIONS, LARGEST = 10_000, 2**27, 2**63 - 1
"""A table of positions takes 8 bytes for each; no size is larger than what 64 bits hold."""
REASON_CHARACTERS = 400


Given = Tensor | dict[str, Tensor]
"""The output of a task that has one, or several by name."""


UNUSED = "weights that"
"""How the note begins on tensors that transformers has no use for."""


class TextModel(nn.Module):
    """input_ids, attention_mask (, token_type_ids), int64 [B, T] -> the task's outputs: logits, states, spans.

    With `position_ids` that begin anew in a row, its samples are read apart (see `reads_samples_apart`), and padding is
    on the right.
    """

    def __init__(self, wrapped: nn.Module, *outputs: str) -> None:
        super().__init__()
        self.wrapped = wrapped
        self.outputs = outputs

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Given:
        feeds = {"input_ids": input_ids}
        if position_ids is None:
            feeds["attention_mask"] = attention_mask
        else:  # beside a mask transformers does not look for samples in the positions
            feeds["position_ids"] = position_ids
        if token_type_ids is not None:
            feeds["token_type_ids"] = token_type_ids
        return select_outputs(self.wrapped(**feeds, return_dict=True), self.outputs)


class PerceivingModel(TextModel):
    """input_ids, attention_mask int64 [B, T], and what its processor made of images or sounds -> logits [B, T, V]."""

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor | None = None, **perceived: Tensor
    ) -> Given:
        masked = {"attention_mask": attention_mask} if position_ids is None else {"position_ids": position_ids}
        return select_outputs(self.wrapped(input_ids=input_ids, **masked, **perceived, return_dict=True), self.outputs)


def reads_samples_apart(module: nn.Module | None) -> bool:
    """Return whether a text model on the meta device attends in a row of several samples within each of them alone.

    transformers makes such a mask where it finds that positions begin anew (`find_packed_sequence_indices`), in models
    that give it their positions: whether this one does is seen by running it. What convolves along the tokens, as
    recurrent layers do, mixes samples whatever the mask.
    """
    from transformers import masking_utils

    if not isinstance(module, TextModel) or not hasattr(masking_utils, "find_packed_sequence_indices"):
        return False
    if any(isinstance(part, nn.Conv1d) for part in module.modules()):
        return False

    class Found(Exception):
        pass

    def find(position_ids: Tensor) -> Tensor:
        raise Found

    known = masking_utils.find_packed_sequence_indices
    ids = torch.zeros((1, 4), dtype=torch.int64, device="meta")
    try:
        masking_utils.find_packed_sequence_indices = find
        module(ids, ids, position_ids=ids)
    except Found:
        return True
    except Exception:  # noqa: BLE001  (a forward that takes no positions, or no meta tensors)
        return False
    finally:
        masking_utils.find_packed_sequence_indices = known
    return False


class ImageModel(nn.Module):
    """pixel_values float32 [B, C, H, W] -> the task's outputs: logits [B, C] and the like."""

    def __init__(self, wrapped: nn.Module, *outputs: str) -> None:
        super().__init__()
        self.wrapped = wrapped
        self.outputs = outputs

    def forward(self, pixel_values: Tensor) -> Given:
        return select_outputs(self.wrapped(pixel_values=pixel_values, return_dict=True), self.outputs)


def select_outputs(given: Mapping[str, Tensor], names: tuple[str, ...]) -> Given:
    """Return the field of transformers' outputs of that name; of several a dict of them, in their order."""
    return given[names[0]] if len(names) == 1 else {name: given[name] for name in names}


class EncoderDecoderModel(nn.Module):
    """source int64 [B, S] or features, decoder_input_ids [B, T] (, attention_mask [B, S]) -> logits [B, T, V]."""

    def __init__(self, wrapped: nn.Module, output: str) -> None:
        super().__init__()
        self.wrapped = wrapped
        self.output = output

    def forward(self, source: Tensor, decoder_input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        feeds = {str(self.wrapped.main_input_name): source, DECODER_IDS: decoder_input_ids}
        if attention_mask is not None:
            feeds["attention_mask"] = attention_mask
        return self.wrapped(**feeds, use_cache=False, return_dict=True)[self.output]


class AudioModel(nn.Module):
    """sound float32 [B, T], [B, bins, T] or [B, T, bins] (, attention_mask int64 [B, T]) -> logits [B, C]."""

    def __init__(self, wrapped: nn.Module, *outputs: str) -> None:
        super().__init__()
        self.wrapped = wrapped
        self.outputs = outputs

    def forward(self, sound: Tensor, attention_mask: Tensor | None = None) -> Given:
        feeds = {str(self.wrapped.main_input_name): sound}
        if attention_mask is not None:
            feeds["attention_mask"] = attention_mask
        return select_outputs(self.wrapped(**feeds, return_dict=True), self.outputs)


class ImageTextModel(nn.Module):
    """pixel_values float32 [B, C, H, W], input_ids (, attention_mask) int64 [B, T] -> embeddings of both, [B, D]."""

    def __init__(self, wrapped: nn.Module, *outputs: str) -> None:
        super().__init__()
        self.wrapped = wrapped
        self.outputs = outputs

    def forward(self, pixel_values: Tensor, input_ids: Tensor, attention_mask: Tensor | None = None) -> Given:
        feeds = {"pixel_values": pixel_values, "input_ids": input_ids}
        if attention_mask is not None:
            feeds["attention_mask"] = attention_mask
        return select_outputs(self.wrapped(**feeds, return_dict=True), self.outputs)


def build_on_meta(source: Source, alone: bool = False) -> tuple[nn.Module, list[str]]:
    """Return the wrapped model on the meta device, weights' names and shapes checked but not read, and notes.

    `alone`: as of `load_trained`.
    """
    if source.config:
        with torch.device("meta"):
            return build_untrained(source), []
    if alone or reads_alone(source):
        with torch.device("meta"):
            module = build_untrained(source)
        open_recorded_store(module, source)
        return module, [NOTE if source.shapes is not None else DECODED]
    return read_pretrained(source, device_map="meta")


def build_untrained(source: Source, drawn: bool = True) -> nn.Module:
    """Return the wrapped model with random weights, for a look at a forward pass that a meta device cannot do.

    It is on the CPU unless torch has another default device. `drawn`: False leaves weights as the memory was, for
    whoever replaces them: to draw the tables of 151,936 words takes seconds.
    """
    from transformers.initialization import no_init_weights

    auto, config, kwargs = _choose_class(source)
    leave = contextlib.nullcontext() if drawn else no_init_weights()
    try:
        with torch.random.fork_rng(devices=[]), quiet(), _limit_parameters(source), leave:
            model = auto.from_config(config, trust_remote_code=source.spec.trust_remote_code, **kwargs)
    except (*UNFIT_NUMBERS, OSError, ImportError) as error:
        sizes = ", ".join(f"{key} {value}" for key, value in source.config.items())
        raise SourceError(
            f"{source.name}: cannot be built as {auto.__name__}{sizes and f' with {sizes}'}: {_shorten_reason(error)}"
        ) from error
    module = _wrap_model(source.spec, model)
    fit_record(module, source.shapes)
    return module


def reads_alone(source: Source) -> bool:
    """Return whether only we can read a folder on a CPU, not transformers: pruned sizes, GPTQ, AWQ, FP8, FP4."""
    method = quantization_of(source.folder).get("quant_method")
    return source.shapes is not None or method in ("gptq", "awq", *SCALED)


def load_trained(source: Source, alone: bool = False) -> nn.Module:
    """Return the wrapped model on the CPU in float32, with its weights. `alone`: without transformers' reader."""
    if alone or reads_alone(source):
        module = build_untrained(source)
        load_recorded(module, source)
        return module
    return read_pretrained(source)[0]


def input_names(spec: ModelSpec, model: nn.Module, config: Any, folder: Path | None = None) -> tuple[str, ...]:
    """Return the inputs to feed, in the order of the wrapper's forward. `folder`: the model's, of audio."""
    kind = find_task(spec.task).preprocess
    if kind == "image":
        return ("pixel_values",)
    if kind == "seq2seq":
        main = str(getattr(model, "main_input_name", "input_ids"))
        return (main, DECODER_IDS, *(("attention_mask",) if main == "input_ids" else ()))
    takes = inspect.signature(model.forward).parameters
    if kind == "image-text":
        masked = "attention_mask" in takes and (folder is None or reads_token_mask(folder))
        return ("pixel_values", "input_ids", *(["attention_mask"] if masked else []))
    if kind == "audio":
        masked = "attention_mask" in takes and folder is not None and reads_audio_mask(folder)
        return (str(model.main_input_name), *(["attention_mask"] if masked else []))
    has_types = "token_type_ids" in takes and (getattr(config, "type_vocab_size", 0) or 0) > 1
    return ("input_ids", "attention_mask", *(["token_type_ids"] if has_types else []))


def class_names(config: Any) -> tuple[str, ...]:
    """Return the config's class names; none if they are the placeholders LABEL_0, LABEL_1, ..."""
    labels = getattr(config, "id2label", None) or {}
    names = tuple(str(labels[i]) for i in sorted(labels))
    return () if all(name == f"LABEL_{i}" for i, name in enumerate(names)) else names


def read_pretrained(source: Source, surplus: Collection[str] = (), **placement: Any) -> tuple[nn.Module, list[str]]:
    """Return the wrapped model as transformers reads it, and a note of tensors that it has no use for. SourceError.

    `surplus`: tensors, by the files' names, that the note does not name.
    """
    auto, config, kwargs = _choose_class(source)
    for path in source.weights:
        if path.suffix == ".safetensors":
            safetensors_shapes(path)  # a damaged file is named here
    if loads_as_floats(quantization_of(source.folder)):
        from transformers import CompressedTensorsConfig

        kwargs["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    try:
        with quiet(), torch.random.fork_rng(devices=[]), _limit_parameters(source):
            model, info = auto.from_pretrained(
                source.folder,
                config=config,
                trust_remote_code=source.spec.trust_remote_code,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are reported below, all at once
                **kwargs,
                **placement,
            )
    except (*UNFIT_NUMBERS, OSError, ImportError) as error:
        raise SourceError(f"{source.name}: cannot be loaded as {auto.__name__}: {_shorten_reason(error)}") from error
    if has_small_floats(quantization_of(source.folder)) and not placement:
        _unpack_as_float32(model)
    return _wrap_model(source.spec, model), _check_loaded(source, info, surplus)


def _unpack_as_float32(model: Any) -> None:
    """Unpack a compressed model now, into float32.

    Its first forward would do it, but into bfloat16, and stop: "expected m1 and m2 to have the same dtype".
    """
    from compressed_tensors.compressors.base import decompress_module

    for part in model.modules():
        decompress_module(part)  # of each alone: the library's loop over a model also takes parameters out of its hands
        weight = part._parameters.get("weight")
        if weight is not None and weight.dtype == torch.bfloat16:
            part.weight = nn.Parameter(weight.detach().float(), requires_grad=False)
    model.hf_quantizer.compressor.remove_decompression_hook(model)


def _check_loaded(source: Source, info: dict[str, Any], surplus: Collection[str]) -> list[str]:
    ends = {_last_words(name) for name in surplus}  # transformers gives some another beginning
    missing = sorted(info["missing_keys"])
    unexpected = sorted(name for name in info["unexpected_keys"] if _last_words(name) not in ends)
    problems = [f"{source.name}: the weights lack '{name}', which a {source.task} model needs" for name in missing]
    problems += [
        f"{source.name}: '{name}' is {list(have)} in the weights, {list(want)} in the model that config.json describes"
        for name, have, want in sorted(info["mismatched_keys"])
    ]
    if problems:
        raise SourceError(problems)
    return [f"{UNUSED} a {source.task} model does not use: {', '.join(unexpected)}"] if unexpected else []


def _last_words(name: str) -> tuple[str, ...]:
    return tuple(name.split(".")[-3:])


def _find_auto_class(task: str, model_type: str) -> Any:
    """Return the class of transformers for a task: the one that it names, else optimum's for that type of model."""
    import transformers

    if named := find_torch_task(task).auto_class:
        return getattr(transformers, named)
    from optimum.exporters.tasks import TasksManager  # half a second of imports

    return TasksManager.get_model_class_for_task(task, model_type=model_type)


def _choose_class(source: Source) -> tuple[Any, Any, dict[str, Any]]:
    task = find_torch_task(source.task)
    if not task.outputs or task.task.preprocess is None:
        known = [name for name, other in TORCH_TASKS.items() if other.outputs and other.task.preprocess]
        raise SourceError(
            f"{source.name}: task {source.task} is for python: and onnx: sources; give one of {', '.join(known)}"
        )
    config = load_config(source)
    kwargs = {"dtype": torch.float32, "attn_implementation": "eager", **task.class_arguments(config)}
    auto = _find_auto_class(task.model_task or source.task, config.model_type)
    _check_task(source.name, source.task, config, auto)
    return auto, config, kwargs


def make_shallow(source: Source, n_blocks: int, n: int) -> Source | None:
    """Return the source of an untrained model with `n` of `n_blocks` blocks; None where config.json counts none.

    Lists with an entry for each block keep their first.
    """
    known = load_config(source).to_dict()
    counts = {key for key, value in known.items() if "layer" in key and type(value) is int and value == n_blocks}
    lists = {key: value[:n] for key, value in known.items() if isinstance(value, list) and len(value) == n_blocks}
    return replace(source, config={**dict.fromkeys(counts, n), **lists}) if counts else None


def load_config(source: Source) -> Any:
    """Return the folder's transformers configuration, with `source.config`'s changes. SourceError: unusable."""
    from transformers import AutoConfig

    assert source.folder is not None
    _check_numbers(source)
    try:
        config = AutoConfig.from_pretrained(
            source.folder, trust_remote_code=source.spec.trust_remote_code, local_files_only=True
        )
    except (*UNFIT_NUMBERS, OSError, ImportError) as error:
        raise SourceError(f"{source.name}: config.json cannot be used: {_shorten_reason(error)}") from error
    try:
        for key, value in source.config.items():
            setattr(config, key, value)
        rebuild_config(config, {})  # numbers that go together are checked only as a configuration is built
    except UNFIT_NUMBERS as error:
        changes = ", ".join(f"{key} {value}" for key, value in source.config.items())
        raise SourceError(f"{source.name}: config.json cannot have {changes}: {_shorten_reason(error)}") from error
    return config


def _wrap_model(spec: ModelSpec, model: nn.Module) -> nn.Module:
    task = find_torch_task(spec.task)
    if task.task.generates:
        model.config.use_cache = False  # type: ignore[union-attr]
    wrappers: dict[Any, type[nn.Module]] = {
        "image": ImageModel,
        "audio": AudioModel,
        "image-text": ImageTextModel,
        "seq2seq": EncoderDecoderModel,
    }
    texts = PerceivingModel if task.perceives else TextModel
    return wrappers.get(task.task.preprocess, texts)(model, *task.outputs).eval()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' progress bars and load reports while the context is open; errors and notes replace them."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # compressed-tensors has bars of its own
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _check_numbers(source: Source) -> None:
    """Raise SourceError that names each number of config.json that the weights cannot fill, or no model has."""
    assert source.folder is not None
    path = source.folder / "config.json"
    record = read_object(path)
    n_tensors = _count_tensors(source)
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


def _count_tensors(source: Source) -> int | None:
    """Return how many tensors a folder's safetensors files hold by their headers; None of other files. SourceError."""
    if not source.weights or any(path.suffix != ".safetensors" for path in source.weights):
        return None
    return sum(len(safetensors_shapes(path)) for path in source.weights)


@contextlib.contextmanager
def _limit_parameters(source: Source) -> Iterator[None]:
    """Refuse to build modules of far more parameters than the files hold while the context is open. ValueError."""
    n_tensors = _count_tensors(source)
    if n_tensors is None:
        yield
        return
    # to spare: a head or pooler that is built anew, tensors stored for several
    most, made, register = 2 * n_tensors + 1000, 0, nn.Module.register_parameter

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


def _check_task(where: str, task: str, config: Any, auto: Any) -> None:
    """Raise SourceError where a model of this configuration has no such task, or would lose a part of itself for it.

    `auto`: transformers' class for the task.
    """
    kind = type(config).__name__
    encodes = bool(getattr(config, "is_encoder_decoder", False))
    tables = {name: other.tables for name, other in TORCH_TASKS.items() if find_task(name).encodes == encodes}
    known = _find_tasks(tables, config.model_type)
    # the table of models that hear names those that see, too: the first, narrower one tells
    several = [name for name in known if find_torch_task(name).perceives][1:]
    known = [name for name in known if name not in several]
    elsewhere = _find_tasks(OTHER_TASKS, config.model_type)
    is_for = f"; transformers has it for {', '.join(elsewhere)}, not supported here yet" if elsewhere else ""
    is_for = f"; give task: {' or '.join(known)}" if known and task not in known else is_for
    if find_task(task).decoder_only and encodes:
        raise SourceError(
            f"{where}: {config.model_type} has an encoder, whose output its decoder reads: for task {task} "
            f"it would be compressed without it{is_for or OWN_PARTS}"
        )
    if find_task(task).encodes and not encodes:
        raise SourceError(f"{where}: {config.model_type} is no encoder-decoder, which task {task} is for" + is_for)
    mapping = getattr(auto, "_model_mapping", None)
    remote = getattr(config, "auto_map", None)
    problem = getattr(config, "problem_type", None)
    if find_torch_task(task).loss == "classes" and problem in {t.problem_type for t in TORCH_TASKS.values()} - {""}:
        fitting = [n for n, t in TORCH_TASKS.items() if t.problem_type == problem and t.model_task == task]
        way = f"use task: {fitting[0]}" if fitting else f"no task here answers so; {task} chooses one class"
        raise SourceError(f"{where}: config.json has problem_type {problem}: {way}")
    if mapping is not None and type(config) not in mapping and not remote:
        raise SourceError(f"{where}: transformers has no {task} model for {kind} ({config.model_type}){is_for}")


OWN_PARTS = "; give its encoder and its decoder as models of their own, by python: sources"
OTHER_TASKS = {
    "text-to-speech": ("MODEL_FOR_TEXT_TO_SPECTROGRAM_MAPPING_NAMES", "MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING_NAMES"),
}
"""Tasks that are not supported here -> the tables of transformers that name their models."""


def _find_tasks(tables: Mapping[str, tuple[str, ...]], model_type: str) -> list[str]:
    """Return the tasks of which a table of transformers names the model."""
    from transformers.models.auto import modeling_auto

    return [
        task for task, names in tables.items() if any(model_type in getattr(modeling_auto, name, {}) for name in names)
    ]


def _shorten_reason(error: BaseException) -> str:
    """Return what a library says in one line of at most REASON_CHARACTERS."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= REASON_CHARACTERS else text[:REASON_CHARACTERS].rsplit(" ", 1)[0] + " ..."
