"""Hugging Face folders: the class for the task, wrapped to take encoded inputs by name and give one tensor."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from compress.errors import SourceError
from compress.models.pruned import NOTE, fit_record, load_recorded, recorded_store
from compress.models.source import Source
from compress.models.weights import safetensors_shapes
from compress.schema import ModelSpec

OUTPUTS = {
    "image-classification": "logits",
    "text-classification": "logits",
    "feature-extraction": "last_hidden_state",
    "text-generation": "logits",
}


class TextModel(nn.Module):
    """input_ids, attention_mask (, token_type_ids), int64 [B, T] -> logits [B, C], [B, T, V], or states [B, T, D]."""

    def __init__(self, wrapped: nn.Module, output: str) -> None:
        super().__init__()
        self.wrapped = wrapped
        self.output = output

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        feeds = {"input_ids": input_ids, "attention_mask": attention_mask}
        if token_type_ids is not None:
            feeds["token_type_ids"] = token_type_ids
        return self.wrapped(**feeds, return_dict=True)[self.output]


class ImageModel(nn.Module):
    """pixel_values float32 [B, C, H, W] -> logits [B, C]."""

    def __init__(self, wrapped: nn.Module, output: str) -> None:
        super().__init__()
        self.wrapped = wrapped
        self.output = output

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.wrapped(pixel_values=pixel_values, return_dict=True)[self.output]


def build_on_meta(spec: ModelSpec, source: Source) -> tuple[nn.Module, list[str]]:
    """The wrapped model on the meta device, its weights' names and shapes checked but not read; and notes."""
    if source.config:
        return _configured_on_meta(spec, source), []
    if source.shapes is not None:
        with torch.device("meta"):
            module = build_untrained(spec, source)
        recorded_store(module, source)
        return module, [NOTE]
    return _from_pretrained(spec, source, device_map="meta")


def _configured_on_meta(spec: ModelSpec, source: Source) -> nn.Module:
    """What `source.config` makes of the model. SourceError where its numbers do not go together."""
    try:
        with torch.device("meta"):
            return build_untrained(spec, source)
    except (ValueError, TypeError, RuntimeError, ZeroDivisionError) as error:
        said = ", ".join(f"{key} {value}" for key, value in source.config.items())
        raise SourceError(f"{spec.source}: cannot be built with {said}: {error}") from error


def build_untrained(spec: ModelSpec, source: Source) -> nn.Module:
    """The wrapped model with random weights, on the CPU unless torch has another default: for a look at a forward pass
    that a meta device cannot do."""
    auto, config, kwargs = _auto_class(spec, source)
    with torch.random.fork_rng(devices=[]), quiet():
        module = _wrap(spec, auto.from_config(config, trust_remote_code=spec.trust_remote_code, **kwargs))
    fit_record(module, source.shapes)
    return module


def load_trained(spec: ModelSpec, source: Source) -> nn.Module:
    """The wrapped model on the CPU in float32 with its weights."""
    if source.shapes is not None:
        module = build_untrained(spec, source)
        load_recorded(module, source)
        return module
    return _from_pretrained(spec, source)[0]


def input_names(spec: ModelSpec, model: nn.Module, config: Any) -> tuple[str, ...]:
    """The inputs to feed, in the order of the wrapper's forward."""
    if spec.task == "image-classification":
        return ("pixel_values",)
    takes = inspect.signature(model.forward).parameters
    has_types = "token_type_ids" in takes and (getattr(config, "type_vocab_size", 0) or 0) > 1
    return ("input_ids", "attention_mask", *(["token_type_ids"] if has_types else []))


def class_names(config: Any) -> tuple[str, ...]:
    """The config's class names; none if they are the placeholders LABEL_0, LABEL_1, ..."""
    labels = getattr(config, "id2label", None) or {}
    names = tuple(str(labels[i]) for i in sorted(labels))
    return () if all(name == f"LABEL_{i}" for i, name in enumerate(names)) else names


def _from_pretrained(spec: ModelSpec, source: Source, **placement: Any) -> tuple[nn.Module, list[str]]:
    auto, config, kwargs = _auto_class(spec, source)
    for path in source.weights:
        if path.suffix == ".safetensors":
            safetensors_shapes(path)  # a damaged file is named here
    try:
        with quiet(), torch.random.fork_rng(devices=[]):
            model, info = auto.from_pretrained(
                source.folder,
                config=config,
                trust_remote_code=spec.trust_remote_code,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are reported below, all at once
                **kwargs,
                **placement,
            )
    except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
        raise SourceError(f"{spec.source}: cannot be loaded as {auto.__name__}: {error}") from error
    return _wrap(spec, model), _check_loaded(spec, source, info)


def _check_loaded(spec: ModelSpec, source: Source, info: dict[str, Any]) -> list[str]:
    missing, unexpected = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    problems = [f"{spec.source}: the weights lack '{name}', which a {spec.task} model needs" for name in missing]
    problems += [
        f"{spec.source}: '{name}' is {list(have)} in the weights, {list(want)} in the model that config.json describes"
        for name, have, want in sorted(info["mismatched_keys"])
    ]
    if problems:
        raise SourceError(problems)
    return [f"weights that a {spec.task} model does not use: {', '.join(unexpected)}"] if unexpected else []


def _auto_class(spec: ModelSpec, source: Source) -> tuple[Any, Any, dict[str, Any]]:
    if spec.task not in OUTPUTS:
        raise SourceError(
            f"{spec.source}: task {spec.task} is for python: and onnx: sources; give one of {', '.join(OUTPUTS)}"
        )
    from optimum.exporters.tasks import TasksManager

    config = load_config(spec, source)
    kwargs: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    if spec.task == "feature-extraction" and _has_optional_pooler(config):
        kwargs["add_pooling_layer"] = False
    return TasksManager.get_model_class_for_task(spec.task, model_type=config.model_type), config, kwargs


def load_config(spec: ModelSpec, source: Source) -> Any:
    """The folder's transformers configuration, with `source.config`'s changes."""
    from transformers import AutoConfig

    assert source.folder is not None
    try:
        config = AutoConfig.from_pretrained(
            source.folder, trust_remote_code=spec.trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise SourceError(f"{spec.source}: config.json cannot be used: {error}") from error
    for key, value in source.config.items():
        setattr(config, key, value)
    return config


def _has_optional_pooler(config: Any) -> bool:
    from transformers import MODEL_MAPPING

    found = MODEL_MAPPING.get(type(config), ())
    classes = found if isinstance(found, tuple) else (found,)
    return any(cls is not None and "add_pooling_layer" in inspect.signature(cls).parameters for cls in classes)


def _wrap(spec: ModelSpec, model: nn.Module) -> nn.Module:
    if spec.task == "text-generation":
        model.config.use_cache = False  # type: ignore[union-attr]
    wrapper = ImageModel if spec.task == "image-classification" else TextModel
    return wrapper(model, OUTPUTS[spec.task]).eval()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bars or load reports from transformers: what matters of them becomes an error or a note."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
