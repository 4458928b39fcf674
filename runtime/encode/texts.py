"""Texts to token ids through `tokenizers`, as a record says how, and hidden states to one embedding a text."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from runtime.bundle.columns import Array, Columns, Encoded, Rows, take, take_texts
from runtime.bundle.records import PYDANTIC_CONFIG, check_file_name
from runtime.bundle.tensors import TensorSpec
from runtime.encode.split import Split, keep_whole, repeat_samples
from runtime.errors import BundleError, MissingDependency, UsageError

WORD = re.compile(r"\S+")
FEEDS = ("input_ids", "attention_mask", "token_type_ids")
WINDOW = "window"
"""Column that says which window of a sample a row is, int64 [rows]; without it every row is the first."""
TEXTS_AT_ONCE = 256
"""Whose windows are counted together."""
MOST_TOKENS, MOST_ANSWER = 2**20, 2**10
"""Tokens that texts are filled up to; of an answer."""


@dataclass(frozen=True)
class TextPreprocess:
    """Texts to token ids, and for feature-extraction the model's hidden states to one embedding."""

    kind: Literal["text"] = "text"
    """Discriminator."""
    max_length: int = 128
    """Tokens, special ones included; longer texts are cut."""
    padding: Literal["longest", "max_length"] = "longest"
    """To the longest text of the batch, or always to `max_length`."""
    pooling: Literal["mean", "cls", "max", "none"] = "mean"
    """feature-extraction only: over the tokens that are not padding; none: the model's output is the embedding."""
    normalize: bool = True
    """feature-extraction only: divide by the L2 norm."""
    tokenizer: str = "tokenizer.json"
    """File name inside the model's folder."""
    stride: int | None = None
    """Of two texts, the second is read in windows that share so many tokens; null: longer texts are cut."""
    longest_answer: int = 30
    """question-answering only: tokens of an answer, at most."""
    no_answer: float | None = None
    """question-answering only: by how much the score of no answer must be above the best one's for none to be given;
    null: there is always one."""

    __pydantic_config__: ClassVar[dict[str, object]] = PYDANTIC_CONFIG

    def __post_init__(self) -> None:
        if self.stride is not None and not 0 <= self.stride < self.max_length:
            raise ValueError(f"stride is {self.stride}: give 0 or more, and less than max_length {self.max_length}")
        if not 1 <= self.longest_answer <= MOST_ANSWER:
            raise ValueError(f"longest_answer is {self.longest_answer}: give 1 to {MOST_ANSWER} tokens")
        if self.no_answer is not None and not math.isfinite(self.no_answer):
            raise ValueError(f"no_answer is {self.no_answer}: give a finite number")
        if self.max_length < 1:
            raise ValueError(f"max_length is {self.max_length}, below 1")
        if self.max_length > MOST_TOKENS:
            raise ValueError(f"max_length is {self.max_length}, above {MOST_TOKENS}")
        check_file_name("tokenizer", self.tokenizer)


@dataclass(frozen=True)
class Padding:
    """How shorter texts are filled up; `token_id` is None if the tokenizer's files name no padding token."""

    token_id: int | None
    type_id: int
    left: bool


@dataclass(frozen=True)
class Tokens:
    """A part of an encoding, by the names of `tokenizers`."""

    ids: list[int]
    type_ids: list[int]
    offsets: list[tuple[int, int]]
    sequence_ids: list[int | None]
    special_tokens_mask: list[int]


def _parts(encoding: Any) -> tuple[Any, ...]:
    """Return the fields of `Tokens`, of an encoding or of some."""
    return (
        encoding.ids,
        encoding.type_ids,
        encoding.offsets,
        encoding.sequence_ids,
        encoding.special_tokens_mask,
    )


@dataclass(frozen=True)
class TextEncoder:
    """Samples with the column "text", and "text_pair" where two texts are read together -> the model's inputs."""

    spec: TextPreprocess
    inputs: tuple[TensorSpec, ...]
    tokenizer: Any
    padding: Padding
    width: int | None
    """Tokens of every row where the spec or the model fixes them; None: the longest of the batch."""

    def encode(self, columns: Columns, rows: Rows = None) -> dict[str, Array]:
        """Return one batch: {input name: [n, T]} in each input's dtype, T as the spec's padding says."""
        return self.feeds(self.tokenize(columns, rows))

    def encode_with_facts(self, columns: Columns, rows: Rows, facts: tuple[str, ...]) -> Encoded:
        """Return what `encode` does, and those of `facts` that `tokenize` gives."""
        tokens = self.tokenize(columns, rows, facts)
        return self.feeds(tokens), {name: tokens[name] for name in facts}

    def feeds(self, tokens: dict[str, Array]) -> dict[str, Array]:
        """Select those of `tokenize`'s arrays that the model takes, in its dtypes."""
        return {i.name: tokens[i.name].astype(i.dtype, copy=False) for i in self.inputs}

    def tokenize(self, columns: Columns, rows: Rows = None, facts: tuple[str, ...] = ()) -> dict[str, Array]:
        """Return int64 [n, T]: input_ids, attention_mask (1 for tokens, 0 for padding) and token_type_ids.

        With `facts` also word_ids, the number of each token's word in the text (-1 for what is of none; a word is what
        stands between white space), or offsets [n, T, 2], each token's characters in the second text (-1 for others).
        """
        texts = self._take_texts(columns, rows)
        encodings = self._encode_windows(columns, rows, texts)
        width = self.width or max(1, max(len(e.ids) for e in encodings))
        if self.padding.token_id is None and any(len(e.ids) < width for e in encodings):
            raise BundleError(
                f"{self.spec.tokenizer} names no padding token, and the texts of a batch differ in length: "
                "set pad_token in tokenizer_config.json, or use batch_size 1 with padding: longest"
            )
        fills = self._fill_values() | ({"word_ids": -1} if "word_ids" in facts else {})
        tokens = {name: np.full((len(encodings), width), fill, np.int64) for name, fill in fills.items()}
        if "offsets" in facts:
            tokens["offsets"] = np.full((len(encodings), width, 2), -1, np.int64)
        for row, encoding in enumerate(encodings):
            n = len(encoding.ids)
            span = slice(width - n, width) if self.padding.left else slice(0, n)
            tokens["input_ids"][row, span] = encoding.ids
            tokens["attention_mask"][row, span] = 1
            tokens["token_type_ids"][row, span] = encoding.type_ids
            if "word_ids" in facts:
                tokens["word_ids"][row, span] = _number_words(texts[row], encoding)
            if "offsets" in facts:
                second = np.array(encoding.sequence_ids) == 1
                tokens["offsets"][row, span] = np.where(second[:, None], encoding.offsets, -1)
        return tokens

    def split_samples(self, columns: Columns) -> Split:
        """Return a row for each window of the second text, with the column WINDOW; without `stride` each sample is one.

        UsageError where the first text leaves no room for the second.
        """
        if self.spec.stride is None:
            return keep_whole(columns)
        texts = self._take_texts(columns, None)
        windows = [
            self._count_windows(f"sample {i}", encoding)
            for start in range(0, len(texts), TEXTS_AT_ONCE)
            for i, encoding in enumerate(encode_texts(self.tokenizer, texts[start : start + TEXTS_AT_ONCE]), start)
        ]
        samples = np.repeat(np.arange(len(texts)), windows)
        rows = {**repeat_samples(columns, samples), WINDOW: np.concatenate([np.arange(n) for n in windows])}
        return Split(rows, samples, np.ones(len(samples)))

    def _take_texts(self, columns: Columns, rows: Rows) -> list[Any]:
        texts: list[Any] = take_texts(columns, "text", rows)
        if "text_pair" in columns:
            return list(zip(texts, take_texts(columns, "text_pair", rows), strict=True))
        return texts

    def _encode_windows(self, columns: Columns, rows: Rows, texts: list[Any]) -> list[Any]:
        """Return the rows' encodings, each text encoded once; of a text that is read in windows the row's own."""
        if self.spec.stride is None:
            return encode_texts(self.tokenizer, texts)
        given = take(columns, WINDOW, rows) if WINDOW in columns else np.zeros(len(texts), np.int64)
        different = list(dict.fromkeys(texts))
        encodings = encode_texts(self.tokenizer, different)
        # read once: of a book each of its windows would read all of it again
        whole = {t: (Tokens(*_parts(e)), self._find_room(e)) for t, e in zip(different, encodings, strict=True)}
        return [self._cut_window(*whole[text], int(window)) for text, window in zip(texts, given, strict=True)]

    def _count_windows(self, name: str, encoding: Any) -> int:
        begin, end, room = self._find_room(encoding)
        if end - begin <= room:
            return 1
        step = room - (self.spec.stride or 0)
        if step <= 0:
            raise UsageError(
                f"{name}: the first text and special tokens take {self.spec.max_length - room} of max_length "
                f"{self.spec.max_length}, and windows of the second shall share {self.spec.stride}: give a shorter "
                "text, a larger max_length or a smaller stride"
            )
        return 1 + -(-(end - begin - room) // step)

    def _find_room(self, encoding: Any) -> tuple[int, int, int]:
        """Return where the second text's tokens begin and end, and how many there may be in a window."""
        second = np.flatnonzero(np.array(encoding.sequence_ids) == 1)
        begin, end = (int(second[0]), int(second[-1]) + 1) if second.size else (0, 0)
        return begin, end, self.spec.max_length - (len(encoding) - (end - begin))

    def _cut_window(self, whole: Tokens, places: tuple[int, int, int], window: int) -> Tokens:
        """Return one window of a whole encoding: what is around the second text, and a part of it.

        `places`: `_find_room` of it.
        """
        (begin, end, room), n = places, len(whole.ids)
        if end - begin > room:
            begin_kept = begin + window * max(room - (self.spec.stride or 0), 1)
            kept = [*range(begin), *range(begin_kept, min(begin_kept + max(room, 0), end)), *range(end, n)]
        else:
            kept = list(range(n))
        kept = kept[: self.spec.max_length]  # of a first text that is too long itself
        return Tokens(*([values[i] for i in kept] for values in _parts(whole)))

    def _fill_values(self) -> dict[str, int]:
        return dict(zip(FEEDS, (self.padding.token_id or 0, 0, self.padding.type_id), strict=True))


def make_text_encoder(spec: TextPreprocess, inputs: tuple[TensorSpec, ...], model_dir: Path | None) -> TextEncoder:
    """Read the tokenizer in `model_dir` and make the encoder.

    Truncation and padding are set from the spec, not from what the file happens to hold; the padding token and the
    sides come from tokenizer.json and tokenizer_config.json. BundleError if the tokenizer cannot be read; UsageError if
    the model takes inputs that texts do not make, or fewer tokens than max_length.
    """
    width = find_width(spec, inputs)
    if model_dir is None:
        raise UsageError("text preprocessing reads a tokenizer: give the model's folder")
    tokenizer = load_tokenizer(model_dir / spec.tokenizer)
    config = read_config(model_dir / "tokenizer_config.json")
    padding = _read_padding(tokenizer, config)
    least = tokenizer.num_special_tokens_to_add(True) + 1
    if spec.max_length < least:
        raise UsageError(
            f"max_length {spec.max_length} leaves no room for a text: the tokenizer adds {least - 1} tokens"
        )
    direction = config.get("truncation_side") or (tokenizer.truncation or {}).get("direction", "right")
    if spec.stride is None:
        tokenizer.enable_truncation(spec.max_length, strategy="longest_first", direction=direction)
    else:  # windows are cut here: the tokenizer's own way panics where the first text leaves less room than the stride
        tokenizer.no_truncation()
    tokenizer.no_padding()
    return TextEncoder(spec, inputs, tokenizer, padding, width)


def _number_words(text: str, encoding: Any) -> Array:
    """Return the number of the word in which each token begins, int64 [T]; -1 for special tokens."""
    ends = np.array([match.end() for match in WORD.finditer(text)], np.int64)
    begins = np.array([begin for begin, _ in encoding.offsets], np.int64)
    # Some tokenizers count the space before a word as the token's: it is behind the end of the word before.
    numbers = np.searchsorted(ends, begins, side="right")
    special = np.array(encoding.special_tokens_mask, bool) | (numbers >= len(ends))
    return np.where(special, -1, numbers)


def pool(hidden: Array, attention_mask: Array, spec: TextPreprocess) -> Array:
    """Return one embedding for each text: float32 [B, D] of the hidden states [B, T, D] and the mask [B, T].

    mean and max go over the tokens with mask 1, cls takes the first of them; none takes hidden [B, D] as it is. Then
    the L2 norm is divided out if the spec says so (Reimers & Gurevych 2019, Sentence-BERT, section 3).
    """
    expected = 2 if spec.pooling == "none" else 3
    if hidden.ndim != expected:
        raise UsageError(
            f"pooling: {spec.pooling} needs an output of {expected} dimensions, the model's has {hidden.shape}"
        )
    with np.errstate(over="ignore", invalid="ignore"):  # of a broken model: what is not finite is told where it is used
        return _pool_tokens(hidden.astype(np.float32, copy=False), attention_mask.astype(bool), spec)


def _pool_tokens(values: Array, mask: Array, spec: TextPreprocess) -> Array:
    if spec.pooling == "mean":
        weights = mask.astype(np.float32)[..., None]
        values = (values * weights).sum(axis=1) / np.maximum(weights.sum(axis=1), 1e-9)  # [B, D]
    elif spec.pooling == "max":
        values = np.where(mask[..., None], values, np.finfo(np.float32).min).max(axis=1)  # [B, D]
    elif spec.pooling == "cls":
        values = values[np.arange(len(values)), mask.argmax(axis=1)]  # [B, D]
    if not spec.normalize:
        return values
    norms = np.linalg.norm(values, axis=1, keepdims=True)
    if not np.isfinite(norms).all():  # squares of 1e20 overflow float32, and the embedding would become zeros
        norms = np.linalg.norm(values.astype(np.float64), axis=1, keepdims=True)
    return (values / np.maximum(norms, 1e-12)).astype(np.float32)


def find_width(spec: TextPreprocess, inputs: tuple[TensorSpec, ...]) -> int | None:
    """Return how many tokens every text is filled up to; None: to those of the longest of its batch.

    UsageError for inputs that texts do not make, and for fewer tokens than `max_length`.
    """
    names = [i.name for i in inputs]
    other = [name for name in names if name not in FEEDS]
    if other or "input_ids" not in names:
        raise UsageError(
            f"texts make {', '.join(FEEDS)}, but the model takes {', '.join(names)}: export it with those inputs"
        )
    fixed = {i.shape[1] for i in inputs if len(i.shape) == 2 and isinstance(i.shape[1], int)}
    if not fixed:
        return spec.max_length if spec.padding == "max_length" else None
    width = int(max(fixed))
    if spec.max_length > width:
        raise UsageError(
            f"max_length is {spec.max_length}, but the model takes {width} tokens: set preprocess.max_length: {width}"
        )
    return width


MOST_ADDED = 2**16
"""Whisper adds 1,609 tokens, Gemma 3 6,415; a million took the library 101 s and 3.2 GB."""


def load_tokenizer(path: Path) -> Any:
    """Load the tokenizer.json at `path`. BundleError if it cannot be read; MissingDependency without `tokenizers`."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise MissingDependency("tokenizers", "text preprocessing") from error
    try:
        text = path.read_text("utf-8")
        n_added = text.count('"single_word"')  # which each token of `added_tokens` has
        if n_added > MOST_ADDED:
            raise ValueError(f"it adds {n_added} tokens to its vocabulary, and {MOST_ADDED} are the most")
        return Tokenizer.from_str(text)
    except OSError as error:
        raise BundleError(f"{path}: the tokenizer cannot be read: {error.strerror}") from error
    except Exception as error:  # tokenizers raises Exception itself
        raise BundleError(f"{path}: not a tokenizer of the tokenizers library: {error}") from error


def encode_texts(tokenizer: Any, texts: list[Any], add_special_tokens: bool = True) -> list[Any]:
    """Return the encodings of texts, or of pairs of them.

    UsageError for a text that is no Unicode (half of a surrogate pair, as bytes of an argument that are not UTF-8
    become); BundleError where the tokenizer's own rules fail.
    """
    try:
        encodings: list[Any] = tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)
    except TypeError as error:
        raise UsageError(
            "a text is not Unicode: it holds bytes that are not UTF-8, or half a surrogate pair"
        ) from error
    except Exception as error:  # tokenizers raises Exception itself
        raise BundleError(f"the tokenizer fails on a text: {error}") from error
    return encodings


def read_config(path: Path) -> dict[str, Any]:
    """Read the JSON object in the file, empty if there is no file; BundleError for anything else."""
    if not path.exists():
        return {}
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BundleError(f"{path}: cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise BundleError(f"{path}: expected a JSON object")
    return config


def _read_padding(tokenizer: Any, config: dict[str, Any]) -> Padding:
    """Read how shorter texts are filled up.

    Token: tokenizer.json's padding section, else tokenizer_config.json. Side: config first, as in transformers.
    """
    section = tokenizer.padding
    side = config.get("padding_side") or (section or {}).get("direction", "right")
    if section is not None:
        return Padding(section["pad_id"], section["pad_type_id"], side == "left")
    token = config.get("pad_token")
    text = token.get("content") if isinstance(token, dict) else token
    return Padding(
        tokenizer.token_to_id(text) if isinstance(text, str) else None,
        config.get("pad_token_type_id", 0),
        side == "left",
    )
