"""Texts to a language model's tokens, one text alone: no special tokens but the first, cut at `max_length`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from runtime.records import PYDANTIC_CONFIG


@dataclass(frozen=True)
class LanguagePreprocess:
    """Texts to token ids for a language model."""

    kind: Literal["language"] = "language"
    """Discriminator."""
    max_length: int = 512
    """Tokens, the first one included; longer texts are cut."""
    bos_token_id: int | None = None
    """Put before every text; null: nothing is."""
    tokenizer: str = "tokenizer.json"
    """File name inside the model's folder."""

    __pydantic_config__: ClassVar[dict[str, object]] = PYDANTIC_CONFIG
