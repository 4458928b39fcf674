"""Samples of an encoder-decoder: what its encoder reads, and the texts that its decoder writes, as tokens.

A decoder's text is its start tokens (with Whisper: language, task, no timestamps), the text's own tokens without what
the tokenizer would add, and the first of the end tokens. References are scored like that, every token after the start
tokens predicted from those before it, and answers are generated like that: one rule for calibration, training,
evaluation and generation. Rows need no padding on the left, for all begin with the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import numpy as np

from runtime.bundle.columns import Array, Columns, Encoded, Rows, take_texts
from runtime.bundle.records import PYDANTIC_CONFIG, check_file_name
from runtime.encode.language import MOST_TOKEN_ID, empty_past
from runtime.encode.split import Split, split_samples
from runtime.encode.texts import MOST_TOKENS, TextPreprocess, encode_texts
from runtime.errors import UsageError

if TYPE_CHECKING:
    from runtime.bundle.tensors import TensorSpec

DECODER_IDS, REFERENCE = "decoder_input_ids", "label"


@dataclass(frozen=True)
class TargetPreprocess:
    """The texts that a decoder writes. What is not given is what the model's own files say.

    The last eight hold for answers alone, and mean what transformers' settings of these names mean.
    """

    start_tokens: tuple[int, ...] = ()
    """Ids that every text begins with."""
    end_tokens: tuple[int, ...] = ()
    """Ids of which any ends an answer; the first ends a reference."""
    max_length: int | None = None
    """Tokens of a text, start and end included; longer references are cut, and answers end there."""
    tokenizer: str = "tokenizer.json"
    """File name inside the model's folder."""
    language: str | None = None
    """Whisper class: what is spoken, such as en; with `task` it makes the start tokens where these are not given."""
    task: Literal["transcribe", "translate"] | None = None
    """Whisper class: write what is said, or its English translation."""
    min_length: int | None = None
    no_repeat_ngram_size: int | None = None
    repetition_penalty: float | None = None
    forced_eos_token_id: int | None = None
    suppress_tokens: tuple[int, ...] | None = None
    begin_suppress_tokens: tuple[int, ...] | None = None
    bad_words_ids: tuple[tuple[int, ...], ...] | None = None

    __pydantic_config__: ClassVar[dict[str, object]] = PYDANTIC_CONFIG

    def __post_init__(self) -> None:
        check_file_name("tokenizer", self.tokenizer)
        if self.max_length is not None and not 2 <= self.max_length <= MOST_TOKENS:
            raise ValueError(f"max_length is {self.max_length}: give 2 to {MOST_TOKENS}")
        for name in ("start_tokens", "end_tokens", "suppress_tokens", "begin_suppress_tokens"):
            wrong = [token for token in getattr(self, name) or () if not 0 <= token <= MOST_TOKEN_ID]
            if wrong:
                raise ValueError(f"{name} has {wrong[0]}: give token ids, 0 to {MOST_TOKEN_ID}")
        if self.max_length is not None and len(self.start_tokens) >= self.max_length:
            raise ValueError(f"max_length {self.max_length} leaves no room after {len(self.start_tokens)} start tokens")
        for name in ("min_length", "no_repeat_ngram_size"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, below 0")
        if self.repetition_penalty is not None and not 0 < self.repetition_penalty < 1e9:
            raise ValueError(f"repetition_penalty is {self.repetition_penalty}: give a number above 0; 1 is none")
        if not all(self.bad_words_ids or ((0,),)):
            raise ValueError("bad_words_ids holds an empty sequence")

    @property
    def most_tokens(self) -> int:
        """Return `max_length`. ValueError where it was never resolved."""
        if self.max_length is None:
            raise ValueError("target.max_length is not given")
        return self.max_length


class SourceEncoder(Protocol):
    """What makes the encoder's inputs."""

    def encode(self, columns: Columns, rows: Rows = None) -> dict[str, Array]: ...


@dataclass(frozen=True)
class Seq2SeqEncoder:
    """Samples with what the encoder reads ("text", "audio", ...) and the reference "label" -> the model's inputs."""

    prefix: str
    target: TargetPreprocess
    spec: Any
    inputs: tuple[TensorSpec, ...]
    source: SourceEncoder
    tokenizer: Any
    vocab_size: int | None = None
    """Token ids from here on are refused; None: not known."""

    def encode(self, columns: Columns, rows: Rows = None) -> dict[str, Array]:
        """Return one batch with its references as decoder_input_ids (all but the last token), caches empty."""
        return self.feeds(self.source_feeds(columns, rows), self.references(columns, rows))

    def encode_with_facts(self, columns: Columns, rows: Rows, facts: tuple[str, ...]) -> Encoded:
        """Return the inputs; nothing more is known of them."""
        return self.encode(columns, rows), {}

    def split_samples(self, columns: Columns) -> Split:
        """Return the rows that the encoder reads samples as, each with its whole sample's reference. UsageError."""
        return split_samples(self.source, columns)

    def source_feeds(self, columns: Columns, rows: Rows = None) -> dict[str, Array]:
        """Return the encoder's inputs of the rows, [n, ...] each."""
        given = {name: column for name, column in columns.items() if name != REFERENCE}
        if self.prefix:
            given["text"] = [self.prefix + text for text in take_texts(given, "text", rows)]
            rows = None
        return self.source.encode(given, rows)

    def references(self, columns: Columns, rows: Rows = None) -> list[Array]:
        """Return the rows' references as the decoder reads and writes them, start and end included: int64 [t] each.

        UsageError where there are none, and for token ids beyond the vocabulary.
        """
        encoded = encode_texts(self.tokenizer, take_texts(columns, REFERENCE, rows), add_special_tokens=False)
        most = self.target.most_tokens
        found = [
            np.array([*self.target.start_tokens, *each.ids, *self.target.end_tokens[:1]][:most], np.int64)
            for each in encoded
        ]
        for row, ids in enumerate(found):
            if self.vocab_size is not None and ids.max() >= self.vocab_size:
                raise UsageError(
                    f"column '{REFERENCE}', sample {row}: token id {ids.max()} is beyond the model's vocabulary of "
                    f"{self.vocab_size} tokens: is this the model's own tokenizer?"
                )
        return found

    def predicted(self, references: Sequence[Array]) -> list[Array]:
        """Return the tokens of each reference that are predicted: those after the start tokens, at least one."""
        return [ids[len(self.target.start_tokens) :] for ids in references]

    def feeds(self, source: dict[str, Array], references: Sequence[Array]) -> dict[str, Array]:
        """Return one call's inputs: references padded on the right, which no earlier token sees; caches are empty."""
        width = max(map(len, references)) - 1
        ids = np.full((len(references), width), self.target.end_tokens[0] if self.target.end_tokens else 0, np.int64)
        for row, tokens in enumerate(references):
            ids[row, : len(tokens) - 1] = tokens[:-1]
        made = {**source, DECODER_IDS: ids}
        return {
            spec.name: made[spec.name].astype(spec.dtype, copy=False)
            if spec.name in made
            else empty_past(spec, len(references))
            for spec in self.inputs
        }

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of an answer's tokens."""
        text: str = self.tokenizer.decode([int(token) for token in ids], skip_special_tokens=True)
        return text


def split_inputs(inputs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """Return those of a model's inputs that its encoder reads. UsageError for a model that is no encoder-decoder."""
    names = [spec.name for spec in inputs]
    if DECODER_IDS not in names:
        raise UsageError(f"an encoder-decoder takes {DECODER_IDS}; this model takes {', '.join(names)}")
    return tuple(spec for spec in inputs if spec.name != DECODER_IDS and not spec.name.startswith("past_key_values."))


def source_length(source: Any) -> int | None:
    """Return how many tokens the encoder may be given at most; None where it reads no texts."""
    return source.max_length if isinstance(source, TextPreprocess) else None
