"""Generate text after a prompt: one call for the prompts, then one for each further token of all of them.

A prompt is encoded as an evaluation text is (`runtime.encode.language`), a chat as its template says, with nothing
added; images in it are read as the model's own processor reads them. Text comes out as tokens do: never half a
character, never what belongs to a stop string.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal

import numpy as np

from runtime.bundle.columns import Array
from runtime.bundle.manifest import Generation, PromptImages
from runtime.bundle.records import from_json
from runtime.decode.kv_cache import Decoder
from runtime.decode.rules import NO_RULES, Rules
from runtime.decode.sampling import Sampling, choose
from runtime.encode.chat import check_messages, place_images, render_chat, split_contents, take_parts
from runtime.encode.images import ImagePreprocess, batch_pixels, normalize_pixels, order_pixels
from runtime.encode.language import LanguageEncoder
from runtime.errors import UsageError
from runtime.metrics import NonFiniteOutputs

USUAL_NEW_TOKENS = 128
Pieces = abc.Generator[tuple[int, str], None, "list[GeneratedText]"]
"""(row, text) as it comes; the return value is the results."""
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer makes of bytes that are no whole character (yet)."""


@dataclass(frozen=True)
class GeneratedText:
    """One answer."""

    text: str
    """Without special tokens, and without the stop string that ended it."""
    token_ids: tuple[int, ...]
    """All that were generated, but for the token that ended it."""
    finish: Literal["eos", "stop", "length"]
    """What ended it: the model, a stop string, or `max_new_tokens`."""
    prompt_tokens: int


NUMBERS: dict[str, type] = {
    "max_new_tokens": Integral, "temperature": Real, "top_k": Integral, "top_p": Real, "min_p": Real,
    "repetition_penalty": Real, "seed": Integral,
}  # fmt: skip
"""Settings of a request that are numbers, whole ones or any."""


@dataclass(frozen=True)
class Request:
    """What is asked for. None: what the model's makers say, `Generation`; tokens: as many as fit, at most 128."""

    max_new_tokens: int | None = None
    temperature: float = 0.0
    """0: greedy."""
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop: Sequence[str] = ()
    seed: int = 0
    chat: bool = False
    """A prompt is what a user says, or a list of messages, put into the model's chat template."""

    def __post_init__(self) -> None:
        for name in NUMBERS:
            value, optional = getattr(self, name), getattr(type(self), name) is None
            if not (value is None and optional) and (not isinstance(value, NUMBERS[name]) or isinstance(value, bool)):
                raise UsageError(f"{name} is {value!r}: give a number{'' if NUMBERS[name] is Real else ', whole'}")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise UsageError(f"max_new_tokens is {self.max_new_tokens}: give 1 or more")
        if (
            not isinstance(self.stop, Sequence)
            or isinstance(self.stop, str)
            or not all(isinstance(text, str) and text for text in self.stop)
        ):
            raise UsageError(f"stop is {self.stop!r}: give a list of texts, none of them empty")

    def sampling(self, defaults: Generation) -> Sampling:
        """Return the settings, with the model's own where none were given; UsageError for one out of its range."""

        def resolve(name: str) -> Any:
            value = getattr(self, name)
            return getattr(defaults, name) if value is None else value

        return Sampling(
            self.temperature,
            resolve("top_k"),
            resolve("top_p"),
            resolve("min_p"),
            resolve("repetition_penalty"),
            self.seed,
        )


@dataclass
class Generator:
    """A decoder with its tokenizer. Greedy answers do not depend on the batch they are in, but for rounding."""

    decoder: Decoder
    encoder: LanguageEncoder
    settings: Generation
    model_dir: Path
    images: PromptImages | None = None
    """How images come into a chat's prompt; None: the model sees none."""

    def generate(self, prompts: Sequence[Any], request: Request) -> list[GeneratedText]:
        """Answer each prompt, all in one batch; errors as in `stream`."""
        return collect_results(self.stream(prompts, request))

    def continue_tokens(self, ids: Sequence[Array], request: Request) -> list[GeneratedText]:
        """Answer prompts that are tokens already, int64 [t] each, as `generate` does."""
        return collect_results(self._generate_pieces([(prompt, []) for prompt in ids], request))

    def stream(self, prompts: Sequence[Any], request: Request) -> Pieces:
        """Yield (row, text) as soon as text is certain; a row's texts joined are its answer. Returns all answers.

        UsageError, before anything runs, for no prompt, one without tokens or with ids beyond the vocabulary, one that
        leaves no room for the answer, and settings out of range; NonFiniteOutputs if the model gives NaN.
        """
        read = [self.encode(prompt, request.chat) for prompt in prompts]
        if not read:
            raise UsageError("no prompt: give at least one text")
        return self._generate_pieces(read, request)

    def encode(self, prompt: Any, chat: bool = False) -> tuple[Array, list[Array]]:
        """Return a prompt's tokens, int64 [t], and the pixels of its images: of a text, or with `chat` of what a user
        says or a list of messages, whose parts may be images: {"type": "image", "image": path, array or Pillow image}.
        """
        if not chat:
            if not isinstance(prompt, str):
                raise UsageError(f"a prompt is a text, not {type(prompt).__name__}; messages need chat")
            return self.encoder.prompt(prompt), []
        messages = check_messages([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
        if self.images is None:
            text, pixels = render_chat(self.model_dir, messages), list[Array]()
        else:
            turns, given = take_parts(messages)
            text = place_images(render_chat(self.model_dir, split_contents(turns)), len(given), self.images)
            pixels = [self._read_image(image, self.images) for image in given]
        return self.encoder.check_ids(np.array(self.encoder.tokens(text), np.int64), "the prompt"), pixels

    def _read_image(self, image: Any, images: PromptImages) -> Array:
        """Return an image's pixels as the model's processor makes them."""
        spec = from_json(ImagePreprocess, images.preprocess, "images.preprocess")
        pixels = normalize_pixels(batch_pixels([image], spec), spec)
        return pixels if images.order is None else order_pixels(pixels, images.order)

    def _generate_pieces(self, read: Sequence[tuple[Array, list[Array]]], request: Request) -> Pieces:
        """Generate after prompts that are read: tokens and pixels of each."""
        ids, sampling = [prompt for prompt, _ in read], request.sampling(self.settings)
        longest, limit = max(map(len, ids)), self.settings.context_length
        n_new = request.max_new_tokens or max(1, min(USUAL_NEW_TOKENS, limit - longest))
        if longest + n_new > limit:
            raise UsageError(
                f"a prompt of {longest} tokens and max_new_tokens {n_new} are more than the model's context_length "
                f"{limit}: shorten the prompt, or ask for fewer tokens"
            )
        rows = [Answer(prompt, TextStream(self.encoder.tokenizer, prompt.tolist(), request.stop)) for prompt in ids]
        features = self.decoder.look([image for _, pixels in read for image in pixels])
        start = partial(self.decoder.start, ids, self.decoder.room(ids, n_new), features)
        return generate_rows(start, self.decoder.step, rows, n_new, self.settings.eos_token_ids, sampling)


def generate_rows(
    start: Callable[[], Array],
    step: Callable[[Array], Array],
    rows: Sequence[Answer],
    n_new: int,
    ends: Sequence[int],
    sampling: Sampling,
    rules: Rules = NO_RULES,
) -> Pieces:
    """Generate at most `n_new` tokens of each row, as `Generator.stream` yields and returns them.

    `start` gives the logits [n, vocab] after the prompts, `step` those after one more token of each. `ends`: tokens of
    which any ends an answer. `rules`: which tokens may come.
    """
    draws = [sampling.stream(row) for row in range(len(rows))]
    logits = start()
    for count in range(n_new):
        if count:
            logits = step(np.array([row.last for row in rows], np.int64))
        for number, row in enumerate(rows):
            if row.finish is None:
                allowed = rules.apply(logits[number], row.prompt, row.made, ends)
                piece = row.take(_choose_token(allowed, row, sampling, draws[number]), ends)
                if piece:
                    yield number, piece
        if all(row.finish for row in rows):
            break
    for number, row in enumerate(rows):
        if row.finish is None and (rest := row.end("length")):
            yield number, rest
    return [row.result() for row in rows]


def collect_results(pieces: Pieces) -> list[GeneratedText]:
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            results: list[GeneratedText] = end.value
            return results


def _choose_token(logits: Array, row: Answer, sampling: Sampling, draws: np.random.Generator) -> int:
    if np.isnan(logits).any():
        raise NonFiniteOutputs(f"the model gives NaN after {len(row.prompt) + len(row.made)} tokens")
    seen = np.concatenate([row.prompt, row.made]) if sampling.repetition_penalty != 1 else row.prompt
    return choose(logits, seen.astype(np.int64), sampling, draws)


@dataclass
class Answer:
    """One answer while it is made."""

    prompt: Array
    text: TextStream
    made: list[int] = field(default_factory=list)
    finish: Literal["eos", "stop", "length"] | None = None

    @property
    def last(self) -> int:
        """Return the token that the decoder reads next; an answer that has ended goes on with its last, unread."""
        return self.made[-1] if self.made else int(self.prompt[-1])

    def take(self, token: int, eos: Sequence[int]) -> str:
        """Add a token to the answer, and return the text that is certain after it."""
        if token in eos:
            return self.end("eos")
        self.made.append(token)
        piece = self.text.push(token)
        if self.text.stopped:
            self.finish = "stop"
        return piece

    def end(self, why: Literal["eos", "length"]) -> str:
        """End the answer, and return the text that was held back; it may still hold a stop string."""
        rest = self.text.close()
        self.finish = "stop" if self.text.stopped else why
        return rest

    def result(self) -> GeneratedText:
        """Return the answer as it stands."""
        return GeneratedText(self.text.text, tuple(self.made), self.finish or "length", len(self.prompt))


class TextStream:
    """One answer. `push` gives the text that is certain after a token, `close` what was still held back.

    Tokens are decoded together with those before them, and their text is what that adds. It is held back while it ends
    in an unfinished character, or while it could be the beginning of a stop string. At a stop string the text ends
    before it, and `stopped` is true.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        # whether a token begins with a space can depend on those before it
        self._ids = [int(token) for token in prompt[-6:]]
        self._shown, self._decoded = 0, len(self._ids)
        self._held = ""
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Add a token, and return the text that is certain now; nothing after `stopped`."""
        self._ids.append(token)
        return self._release_text(self._decode_new_text(False), False)

    def close(self) -> str:
        """Return the rest of the text, an unfinished character as the tokenizer shows it."""
        return self._release_text(self._decode_new_text(True), True)

    def _decode_new_text(self, at_end: bool) -> str:
        before = self._decode_ids(self._ids[self._shown : self._decoded])
        now = self._decode_ids(self._ids[self._shown :])
        if len(now) <= len(before) or (now.endswith(UNFINISHED) and not at_end):
            return ""
        self._shown, self._decoded = self._decoded, len(self._ids)
        return now[len(before) :]

    def _decode_ids(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def _release_text(self, new: str, at_end: bool) -> str:
        if self.stopped:
            return ""
        text = self._held + new
        places = [place for place in (text.find(stop) for stop in self._stop) if place >= 0]
        self.stopped = bool(places)
        keep = 0 if at_end else _count_stop_prefix(text, self._stop)
        piece = text[: min(places)] if places else text[: len(text) - keep]
        self._held = "" if places else text[len(text) - keep :]
        self.text += piece
        return piece


def _count_stop_prefix(text: str, stops: Sequence[str]) -> int:
    """Return how many characters at the end of `text` could begin one of the stop strings."""
    longest = max(map(len, stops), default=1)
    return next(
        (n for n in range(min(len(text), longest - 1), 0, -1) if any(s.startswith(text[-n:]) for s in stops)), 0
    )
