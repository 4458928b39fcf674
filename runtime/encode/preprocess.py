"""The ONE implementation of preprocessing: calibration, evaluation and serving all call it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, cast

import numpy as np

from runtime.bundle.columns import Array, Columns, Encoded, Rows, take
from runtime.bundle.records import PYDANTIC_CONFIG, from_json, to_json
from runtime.encode.audio import AudioPreprocess, make_audio_encoder
from runtime.encode.images import ImagePreprocess, make_image_encoder
from runtime.encode.language import LanguageEncoder, LanguagePreprocess, make_language_encoder
from runtime.encode.pairs import ImageTextPreprocess, make_image_text_encoder
from runtime.encode.seq2seq import Seq2SeqEncoder, TargetPreprocess, split_inputs
from runtime.encode.split import split_samples
from runtime.encode.texts import TextPreprocess, load_tokenizer, make_text_encoder, pool
from runtime.errors import UsageError

if TYPE_CHECKING:
    from runtime.bundle.tensors import TensorSpec

__all__ = [
    "AudioPreprocess",
    "ImagePreprocess",
    "ImageTextPreprocess",
    "LanguageEncoder",
    "LanguagePreprocess",
    "PreprocessSpec",
    "Preprocessor",
    "Seq2SeqEncoder",
    "Seq2SeqPreprocess",
    "TargetPreprocess",
    "TensorPreprocess",
    "TextPreprocess",
    "make_preprocessor",
    "pool",
    "spec_from_dict",
    "spec_to_dict",
    "split_samples",
]


@dataclass(frozen=True)
class TensorPreprocess:
    """Arrays that are the model's inputs already, one column for each input name."""

    kind: Literal["tensor"] = "tensor"
    """Discriminator."""

    __pydantic_config__: ClassVar[dict[str, object]] = PYDANTIC_CONFIG


SourceSpec = TextPreprocess | AudioPreprocess | TensorPreprocess


@dataclass(frozen=True)
class Seq2SeqPreprocess:
    """What an encoder reads, and the texts that its decoder writes."""

    kind: Literal["seq2seq"] = "seq2seq"
    """Discriminator."""
    source: SourceSpec | None = None
    """How the encoder's inputs are made; a recipe that does not say means what the model's files say."""
    target: TargetPreprocess = field(default_factory=TargetPreprocess)
    """How the decoder's texts are made; what is not given is read from the model's files."""
    prefix: str = ""
    """Put before each text that the encoder reads, such as `summarize: `."""

    __pydantic_config__: ClassVar[dict[str, object]] = PYDANTIC_CONFIG

    def __post_init__(self) -> None:
        if self.prefix and self.source is not None and not isinstance(self.source, TextPreprocess):
            raise ValueError(f"prefix is put before texts, and the encoder reads kind: {self.source.kind}")


PreprocessSpec = (
    ImagePreprocess
    | AudioPreprocess
    | ImageTextPreprocess
    | TextPreprocess
    | LanguagePreprocess
    | TensorPreprocess
    | Seq2SeqPreprocess
)

_KINDS: dict[str, type[PreprocessSpec]] = {
    "image": ImagePreprocess,
    "audio": AudioPreprocess,
    "image-text": ImageTextPreprocess,
    "text": TextPreprocess,
    "tensor": TensorPreprocess,
    "language": LanguagePreprocess,
    "seq2seq": Seq2SeqPreprocess,
}


def spec_to_dict(spec: PreprocessSpec) -> dict[str, Any]:
    """Return the spec as JSON can hold it."""
    return cast(dict[str, Any], to_json(spec))


def spec_from_dict(data: Mapping[str, Any]) -> PreprocessSpec:
    """Read what `spec_to_dict` made; ValueError, naming the key, for anything else."""
    kind = data.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"preprocess.kind: {kind!r} is not one of {', '.join(_KINDS)}")
    return from_json(_KINDS[kind], dict(data), "preprocess")


class Preprocessor(Protocol):
    """Samples to a model's inputs, one batch at a time."""

    @property
    def spec(self) -> PreprocessSpec: ...

    def encode(self, columns: Columns, rows: Rows = None) -> dict[str, Array]:
        """Return the rows (default: all) as {input name: array} in the inputs' dtypes; UsageError if they misfit."""
        ...

    def encode_with_facts(self, columns: Columns, rows: Rows, facts: tuple[str, ...]) -> Encoded:
        """Return what `encode` does, and beside it those of `facts` (`runtime.tasks.Task.facts`) that are known."""
        ...


def make_preprocessor(
    spec: PreprocessSpec,
    inputs: tuple[TensorSpec, ...],
    model_dir: Path | None = None,
    vocab_size: int | None = None,
) -> Preprocessor:
    """Make what feeds a model that has `inputs`; `model_dir` holds the tokenizer where the spec is for text.

    With `vocab_size` a language model's encoder refuses token ids beyond it. UsageError if the spec cannot make these
    inputs; BundleError if the tokenizer cannot be read.
    """
    if isinstance(spec, ImagePreprocess):
        return make_image_encoder(spec, inputs)
    if isinstance(spec, AudioPreprocess):
        return make_audio_encoder(spec, inputs)
    if isinstance(spec, ImageTextPreprocess):
        return make_image_text_encoder(spec, inputs, model_dir)
    if isinstance(spec, TextPreprocess):
        return make_text_encoder(spec, inputs, model_dir)
    if isinstance(spec, LanguagePreprocess):
        return make_language_encoder(spec, inputs, model_dir, vocab_size)
    if isinstance(spec, Seq2SeqPreprocess):
        return _make_seq2seq_encoder(spec, inputs, model_dir, vocab_size)
    return TensorEncoder(spec, inputs)


def _make_seq2seq_encoder(
    spec: Seq2SeqPreprocess, inputs: tuple[TensorSpec, ...], model_dir: Path | None, vocab_size: int | None
) -> Seq2SeqEncoder:
    if model_dir is None:
        raise UsageError("seq2seq preprocessing reads a tokenizer: give the model's folder")
    if spec.source is None:
        raise UsageError("preprocess.source is missing: say how the encoder's inputs are made")
    source = make_preprocessor(spec.source, split_inputs(inputs), model_dir)
    tokenizer = load_tokenizer(model_dir / spec.target.tokenizer)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return Seq2SeqEncoder(spec.prefix, spec.target, spec, inputs, source, tokenizer, vocab_size)


@dataclass(frozen=True)
class TensorEncoder:
    """Samples with one column for each model input; other columns (label) are passed over."""

    spec: TensorPreprocess
    inputs: tuple[TensorSpec, ...]

    def encode(self, columns: Columns, rows: Rows = None) -> dict[str, Array]:
        """Return one batch: the columns in the inputs' dtypes; UsageError where a dtype or a shape does not fit."""
        return {i.name: _to_tensor(i, take(columns, i.name, rows)) for i in self.inputs}

    def encode_with_facts(self, columns: Columns, rows: Rows, facts: tuple[str, ...]) -> Encoded:
        """Return the inputs; nothing more is known of them."""
        return self.encode(columns, rows), {}


def _to_tensor(spec: TensorSpec, column: Any) -> Array:
    values = np.asarray(column)
    if values.dtype.kind not in "biuf" or not np.can_cast(values.dtype, spec.dtype, "same_kind"):
        raise UsageError(f"column '{spec.name}' holds {values.dtype}, but the model's input is {spec.dtype}")
    fits = len(values.shape) == len(spec.shape) and all(
        have == want for have, want in zip(values.shape[1:], spec.shape[1:], strict=True) if isinstance(want, int)
    )
    if not fits:
        raise UsageError(f"column '{spec.name}' has shape {values.shape}, but the model's input is {spec.shape}")
    return np.ascontiguousarray(values, dtype=spec.dtype)
