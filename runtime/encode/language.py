"""Texts to the token ids of a language model: one rule for calibration, evaluation and generation.

A text is encoded without the special tokens that a tokenizer would add, prefixed with the beginning-of-sequence token
if there is one, and cut at `max_length`. Each sample is then scored alone: every token but the first is predicted from
those before it. With `pack` the texts are first joined into one and cut into windows, as perplexity on running text
(WikiText) is measured; the windows are then samples like any other.

Samples that are token ids already (chats, rendered where the bundle was built) may say which of their tokens count, in
the column "loss_mask": those of the assistant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from runtime.bundle.columns import Array, Columns, Encoded, Rows, take, take_texts
from runtime.bundle.manifest import IMAGE_FEATURES
from runtime.bundle.records import PYDANTIC_CONFIG, check_file_name
from runtime.encode.texts import encode_texts, load_tokenizer
from runtime.errors import UsageError

if TYPE_CHECKING:
    from runtime.bundle.tensors import TensorSpec

FEEDS = ("input_ids", "attention_mask", "position_ids")
CACHE = "past_key_values."
"""How the names begin of inputs that are what a decoder keeps of earlier tokens."""
FEATURES = IMAGE_FEATURES.partition("{")[0]
"""And of those that are features of images."""
IDS, LOSS_MASK, POSITIONS = "input_ids", "loss_mask", "position_ids"
"""Columns of samples that are tokens already: their ids; 1 for each token whose prediction counts, else 0; and, of rows
that hold several samples, each token's place in its own."""
MASK = "attention_mask"
TEXT_SEPARATOR = "\n\n"
"""Between texts that are packed."""


MOST_TOKEN_ID = 2**31 - 1
"""No vocabulary is larger, and an id beyond int64 is no number for a model."""


@dataclass(frozen=True)
class LanguagePreprocess:
    """Texts to a language model's token ids."""

    kind: Literal["language"] = "language"
    """Discriminator."""
    max_length: int = 512
    """Tokens, the first one included; longer texts are cut."""
    bos_token_id: int | None = None
    """Put before each text and each window; none: nothing is."""
    tokenizer: str = "tokenizer.json"
    """File name inside the model's folder."""
    pack: int | None = None
    """Join all texts with a blank line between them and cut windows of this many tokens, the first one included; what
    does not fill the last window is left out."""

    __pydantic_config__: ClassVar[dict[str, object]] = PYDANTIC_CONFIG

    def __post_init__(self) -> None:
        if self.max_length < 2:
            raise ValueError(f"max_length is {self.max_length}, below 2: the first token is not predicted")
        if self.pack is not None and not 2 <= self.pack <= self.max_length:
            raise ValueError(f"pack is {self.pack}: give 2 to max_length, {self.max_length}")
        if self.bos_token_id is not None and not 0 <= self.bos_token_id <= MOST_TOKEN_ID:
            raise ValueError(f"bos_token_id is {self.bos_token_id}: give 0 to {MOST_TOKEN_ID}")
        check_file_name("tokenizer", self.tokenizer)


@dataclass(frozen=True)
class LanguageEncoder:
    """Samples with the column "text", or with "input_ids" where they are tokens already -> a decoder's inputs."""

    spec: LanguagePreprocess
    inputs: tuple[TensorSpec, ...]
    tokenizer: Any
    vocab_size: int | None = None
    """Token ids from here on are refused; None: not known."""

    def encode(self, columns: Columns, rows: Rows = None) -> dict[str, Array]:
        """Return one batch for the first call of a decoder, texts padded on the right: `feeds` of `sequences`."""
        return self.feeds(self.sequences(columns, rows))

    def encode_with_facts(self, columns: Columns, rows: Rows, facts: tuple[str, ...]) -> Encoded:
        """Return the inputs; a model that generates needs no more."""
        return self.encode(columns, rows), {}

    def samples(self, columns: Columns) -> Columns:
        """Return the columns as they are scored: with `pack` windows, {"input_ids": int64 [N, pack]}, else as given.

        Windows have no labels. UsageError where the texts do not fill one window.
        """
        if self.spec.pack is None or "input_ids" in columns:
            return columns
        size = self.spec.pack - len(self._first_tokens())
        ids = np.array(self.tokens(TEXT_SEPARATOR.join(take_texts(columns, "text"))), np.int64)
        n_windows = len(ids) // size
        if not n_windows:
            raise UsageError(
                f"the texts give {len(ids)} tokens, fewer than one window of {size} (pack: {self.spec.pack}): "
                "give more text, or a smaller pack"
            )
        windows = ids[: n_windows * size].reshape(n_windows, size)  # [N, size]
        first = np.tile(np.array(self._first_tokens(), np.int64), (n_windows, 1))  # [N, 0 or 1]
        packed = {"input_ids": np.concatenate([first, windows], axis=1)}
        self._check_ids(list(packed["input_ids"]), "packed texts")
        return packed

    def sequences(self, columns: Columns, rows: Rows = None) -> list[Array]:
        """Return the rows' token ids as the model reads them, int64 [t] each.

        UsageError for a text without any token, for ids beyond the vocabulary, and for texts that must be packed first.
        """
        if "input_ids" in columns:
            token_ids = [np.asarray(ids) for ids in take(columns, "input_ids", rows)]
            wrong = next((ids for ids in token_ids if ids.ndim != 1 or ids.dtype.kind not in "iu"), None)
            if wrong is not None:
                raise UsageError(f"column 'input_ids': a sample is {wrong.dtype} {wrong.shape}, not whole numbers [t]")
            name = "input_ids"
        else:
            if self.spec.pack is not None:
                raise UsageError(
                    f"texts that are packed (pack: {self.spec.pack}) are cut into windows first: `samples`"
                )
            name = "text"
            texts = take_texts(columns, name, rows)
            encoded = encode_texts(self.tokenizer, texts, add_special_tokens=False)
            token_ids = [np.array([*self._first_tokens(), *encoding.ids], np.int64) for encoding in encoded]
        cut = [ids[: self.spec.max_length].astype(np.int64, copy=False) for ids in token_ids]
        self._check_ids(cut, f"column '{name}'")
        return cut

    def loss_masks(self, columns: Columns, rows: Rows = None) -> list[Array] | None:
        """Return which of the rows' tokens count as predicted, bool [t] each, cut as `sequences` cuts them.

        None where all do. UsageError for a mask that is no 0 or 1 for each token of its sample.
        """
        if LOSS_MASK not in columns:
            return None
        masks = [np.asarray(mask) for mask in take(columns, LOSS_MASK, rows)]
        for row, (mask, ids) in enumerate(zip(masks, take(columns, IDS, rows), strict=True)):
            if mask.shape != np.shape(ids) or mask.dtype.kind not in "biu" or not np.isin(mask, (0, 1)).all():
                raise UsageError(f"column '{LOSS_MASK}', sample {row}: give 0 or 1 for each of {len(ids)} tokens")
        return [mask[: self.spec.max_length].astype(bool) for mask in masks]

    def tokens(self, text: str) -> list[int]:
        """Return one text's ids, nothing added and nothing cut."""
        ids: list[int] = encode_texts(self.tokenizer, [text], add_special_tokens=False)[0].ids
        return ids

    def prompt(self, text: str) -> Array:
        """Return one text's ids as a prompt, int64 [t]: with the first token, uncut. UsageError as in `sequences`."""
        return self.check_ids(np.array([*self._first_tokens(), *self.tokens(text)], np.int64), "the prompt")

    def check_ids(self, ids: Array, what: str) -> Array:
        """Return `ids`, int64 [t], if the model can read them; UsageError as in `sequences`."""
        self._check_ids([ids], what)
        return ids

    def feeds(self, sequences: Sequence[Array]) -> dict[str, Array]:
        """Return token ids, int64 [t] each, as one batch: [n, T], padded on the right with mask 0; caches are empty.

        There are no images; whoever has some puts their features in place of the empty ones.
        """
        width = max(map(len, sequences))
        ids = np.zeros((len(sequences), width), np.int64)
        mask = np.zeros((len(sequences), width), np.int64)
        for row, tokens in enumerate(sequences):
            ids[row, : len(tokens)] = tokens
            mask[row, : len(tokens)] = 1
        made = {"input_ids": ids, "attention_mask": mask, "position_ids": positions(mask)}
        return {
            spec.name: made[spec.name].astype(spec.dtype, copy=False)
            if spec.name in made
            else empty_past(spec, len(sequences))
            for spec in self.inputs
        }

    def _first_tokens(self) -> tuple[int, ...]:
        return () if self.spec.bos_token_id is None else (self.spec.bos_token_id,)

    def _check_ids(self, sequences: Sequence[Array], what: str) -> None:
        for row, ids in enumerate(sequences):
            place = what if what == "the prompt" else f"{what}, sample {row}"
            if not len(ids):
                raise UsageError(f"{place}: a text without any token; leave it out")
            if ids.min() < 0 or (self.vocab_size is not None and ids.max() >= self.vocab_size):
                beyond = int(ids.min() if ids.min() < 0 else ids.max())
                size = "" if self.vocab_size is None else f" of {self.vocab_size} tokens"
                raise UsageError(
                    f"{place}: token id {beyond} is beyond the model's vocabulary{size}: "
                    "is this the model's own tokenizer?"
                )


def make_language_encoder(
    spec: LanguagePreprocess, inputs: tuple[TensorSpec, ...], model_dir: Path | None, vocab_size: int | None = None
) -> LanguageEncoder:
    """Read the tokenizer in `model_dir` and make the encoder.

    BundleError if the tokenizer cannot be read; UsageError for inputs that do not fit.
    """
    names = [i.name for i in inputs]
    other = [i.name for i in inputs if i.name not in FEEDS and not i.name.startswith((CACHE, FEATURES))]
    if other or "input_ids" not in names:
        raise UsageError(
            f"a language model takes {', '.join(FEEDS)} and caches, {CACHE}...; this one takes "
            f"{', '.join(names)}: export it with those inputs"
        )
    fixed = [i.name for i in inputs if any(isinstance(size, int) for size in i.shape[: 2 if i.name in FEEDS else 1])]
    if fixed:
        raise UsageError(f"input '{fixed[0]}' has a fixed batch or length: export a language model with both free")
    if model_dir is None:
        raise UsageError("language preprocessing reads a tokenizer: give the model's folder")
    tokenizer = load_tokenizer(model_dir / spec.tokenizer)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return LanguageEncoder(spec, inputs, tokenizer, vocab_size)


def positions(mask: Array) -> Array:
    """Return int64 [n, T] of a mask [n, T]: each token's place among its row's tokens, 0 before the first."""
    result: Array = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
    return result


def empty_past(spec: TensorSpec, n_rows: int) -> Array:
    """Return a cache input before any token: nothing along the axis that grows, zeros where sizes are fixed.

    Of images' features no rows.
    """
    if spec.name.startswith(FEATURES):
        n_rows = 0
    if sum(isinstance(size, str) for size in spec.shape[1:]) > 1:
        raise UsageError(f"cache input '{spec.name}' {spec.shape}: all sizes but one must be numbers")
    return np.zeros((n_rows, *(size if isinstance(size, int) else 0 for size in spec.shape[1:])), spec.dtype)
