"""Which tokens may come next in an answer, as the generation_config.json of encoder-decoders says it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from runtime.bundle.columns import Array
from runtime.encode.seq2seq import TargetPreprocess


@dataclass(frozen=True)
class Rules:
    """What is forbidden or forced; the defaults are nothing. Lengths count the start tokens, as transformers does."""

    suppress: tuple[int, ...] = ()
    """Never."""
    begin_suppress: tuple[int, ...] = ()
    """Not as the first token after the start tokens."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences that never come whole."""
    min_length: int = 0
    """No end before so many tokens."""
    no_repeat_ngram_size: int = 0
    """No sequence of so many tokens comes twice; 0: any may."""
    forced_end: int | None = None
    """The token that comes last of `max_length`."""
    max_length: int = 0
    """Tokens of a text, start tokens included; only for `forced_end`."""

    def apply(self, logits: Array, prompt: Array, made: Sequence[int], ends: Sequence[int]) -> Array:
        """Return the logits, float32 [vocab], of tokens that may not come set to -inf; of one answer, `made` so far.

        `prompt`: its start tokens, int64 [t]. `ends`: the tokens that end an answer.
        """
        if self == NO_RULES:
            return logits
        length = len(prompt) + len(made)
        if self.forced_end is not None and length == self.max_length - 1:
            forced = np.full_like(logits, -np.inf)
            forced[self.forced_end] = 0
            return forced
        banned = [*self.suppress, *(self.begin_suppress if not made else ())]
        banned += ends if length < self.min_length else ()
        if self.bad_words or self.no_repeat_ngram_size:
            seen = [*prompt.tolist(), *made]
            banned += find_bad_words(seen, self.bad_words, ends) + find_repeats(seen, self.no_repeat_ngram_size)
        allowed = logits.copy()
        allowed[[token for token in banned if token < len(allowed)]] = -np.inf
        return allowed


NO_RULES = Rules()


def find_rules(target: TargetPreprocess) -> Rules:
    """Return the rules that a model's answers follow."""
    return Rules(
        target.suppress_tokens or (),
        target.begin_suppress_tokens or (),
        target.bad_words_ids or (),
        target.min_length or 0,
        target.no_repeat_ngram_size or 0,
        target.forced_eos_token_id,
        target.max_length or 0,
    )


def find_repeats(seen: Sequence[int], size: int) -> list[int]:
    """Return the tokens that would complete a sequence of `size` tokens that is among `seen` already."""
    if not size or len(seen) < size:
        return []
    last = tuple(seen[len(seen) - size + 1 :])
    return [seen[i + size - 1] for i in range(len(seen) - size + 1) if tuple(seen[i : i + size - 1]) == last]


def find_bad_words(seen: Sequence[int], words: Sequence[Sequence[int]], ends: Sequence[int]) -> list[int]:
    """Return the tokens that would complete one of the sequences; an end alone is none, as in transformers."""
    return [
        word[-1]
        for word in words
        if not (len(word) == 1 and word[0] in ends) and tuple(seen[len(seen) - len(word) + 1 :]) == tuple(word[:-1])
    ]
