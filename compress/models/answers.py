"""What an encoder-decoder's folder says of the texts that it writes. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from compress.errors import SourceError
from compress.models.source import read_object
from runtime.encode.seq2seq import TargetPreprocess

POSITIONS = ("max_target_positions", "max_position_embeddings", "n_positions")
RULES = ("min_length", "no_repeat_ngram_size", "repetition_penalty", "forced_eos_token_id", "suppress_tokens",
         "begin_suppress_tokens", "bad_words_ids")  # fmt: skip
"""Settings of generation_config.json that are followed as they are."""
NOT_FOLLOWED = {
    "num_beams": 1,
    "do_sample": False,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "sequence_bias": None,
    "exponential_decay_length_penalty": None,
    "guidance_scale": 1,
}
"""Settings that change answers and are not followed -> where they change none."""


def resolve_target(folder: Path, declared: TargetPreprocess) -> TargetPreprocess:
    """Return `declared` with what it leaves out as the folder's files have it. SourceError where they do not say it."""
    settings = read_settings(folder)
    rules = {name: _to_tuple(settings[name]) for name in RULES if settings.get(name) is not None}
    if isinstance(rules.get("forced_eos_token_id"), tuple):
        rules["forced_eos_token_id"] = rules["forced_eos_token_id"][0]
    start = declared.start_tokens or find_start_tokens(folder, settings, declared.language, declared.task)
    ends = declared.end_tokens or _to_ids(settings.get("eos_token_id"))
    if not ends:
        raise SourceError(f"{folder}: no eos_token_id in generation_config.json or config.json: give target.end_tokens")
    length = declared.max_length or _find_length(folder, settings, len(start))
    given = {field.name: value for field in fields(declared) if (value := getattr(declared, field.name)) is not None}
    try:
        return replace(declared, **{**rules, **given, "start_tokens": start, "end_tokens": ends, "max_length": length})
    except (TypeError, ValueError) as error:
        raise SourceError(f"{folder}: preprocess.target: {error}") from error


def read_settings(folder: Path) -> dict[str, Any]:
    """Return generation_config.json; without one what config.json says. Token ids are of either."""
    config, path = read_object(folder / "config.json"), folder / "generation_config.json"
    if not path.is_file():
        return config
    names = ("decoder_start_token_id", "bos_token_id", "eos_token_id", "pad_token_id")
    return {**{name: config[name] for name in names if name in config}, **_without_none(read_object(path))}


def describe_not_followed(folder: Path) -> list[str]:
    """Return a note where the folder asks for answers that are made otherwise than here, greedily."""
    settings = read_settings(folder)
    asked = [
        f"{name} {settings[name]}"
        for name, none in NOT_FOLLOWED.items()
        if settings.get(name, none) not in (none, None)
    ]
    if not asked:
        return []
    return [f"generation_config.json asks for {', '.join(asked)}: answers are generated greedily here, without it"]


def find_start_tokens(
    folder: Path, settings: Mapping[str, Any], language: str | None, task: str | None
) -> tuple[int, ...]:
    """Return the tokens that every text begins with, as transformers' `generate` has them. SourceError.

    Of Whisper's class start, language, task and no timestamps (`language` and `task` before the folder's own); of
    others the start, and a first token that is forced (mBART's language, BART's own).
    """
    first = settings.get("decoder_start_token_id", settings.get("bos_token_id"))
    if not isinstance(first, int):
        raise SourceError(f"{folder}: no decoder_start_token_id: give preprocess.target.start_tokens")
    if "no_timestamps_token_id" not in settings and "lang_to_id" not in settings:
        if language or task:
            raise SourceError(f"{folder}: generation_config.json knows no languages: give target.start_tokens instead")
        forced = settings.get("forced_bos_token_id")
        prompt = [token for _, token in settings.get("forced_decoder_ids") or ()]
        return (first, *prompt, *(() if forced is None else (forced,)))
    return _make_speech_prompt(
        folder, settings, first, language or settings.get("language"), task or settings.get("task")
    )


def _make_speech_prompt(
    folder: Path, settings: Mapping[str, Any], first: int, language: str | None, task: str | None
) -> tuple[int, ...]:
    languages, tasks = settings.get("lang_to_id") or {}, settings.get("task_to_id") or {}
    prompt = [] if language or task else [token for _, token in settings.get("forced_decoder_ids") or ()]
    if languages and not language and None in (prompt or [None])[:1]:
        known = ", ".join(name.strip("<|>") for name in list(languages)[:8])
        raise SourceError(
            f"{folder}: the model knows {len(languages)} languages: give preprocess.target.language, one of {known}"
            + (", ..." if len(languages) > 8 else "")
        )
    if language:
        name = language if language in languages else f"<|{language}|>"
        if name not in languages:
            raise SourceError(f"preprocess.target.language: {folder} has no {language}; it has {', '.join(languages)}")
        prompt = [languages[name], *([tasks[task or "transcribe"]] if (task or "transcribe") in tasks else [])]
    elif task:
        prompt = [tasks[task]] if task in tasks else []
    end = settings.get("no_timestamps_token_id")
    ids = [token for token in (first, *prompt) if token is not None]
    return (*ids, *(() if end is None or ids[-1] == end else (end,)))


def _find_length(folder: Path, settings: Mapping[str, Any], n_start: int) -> int:
    """Return the tokens of a text: what the settings say, within the decoder's positions."""
    config = read_object(folder / "config.json")
    positions = [config[name] for name in POSITIONS if isinstance(config.get(name), int)]
    stated = settings.get("max_length")
    if isinstance(settings.get("max_new_tokens"), int):
        stated = n_start + settings["max_new_tokens"]
    # 512 where neither the folder nor the recipe says
    return int(min([stated or 512, *positions[:1]]))


def _to_ids(value: Any) -> tuple[int, ...]:
    return () if value is None else tuple(value) if isinstance(value, list) else (value,)


def _to_tuple(value: Any) -> Any:
    return tuple(map(_to_tuple, value)) if isinstance(value, list) else value


def _without_none(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if value is not None}
