"""A tokenizer.json as GGUF stores it: tokens, merges or scores, and the name of how texts are split before.

llama.cpp has two forms that decoders use: "gpt2" (byte-level BPE with merges, split by regular expressions that it
knows by a name, `tokenizer.ggml.pre`) and "llama" (SentencePiece: whichever neighbours make the token of best score are
joined). Its converter finds the name by hashes of known models' answers; here it is found by the regular expressions
themselves, so that any model with one of them is written. What llama.cpp would split otherwise is refused, or told.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACE = "\u2581"
GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_DEEPSEEK_WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_WORDS = rf"{_ENDINGS}|{_BEFORE}\p{{L}}+|\p{{N}}{{1,3}}|{_LINES}"
PRE_TOKENIZERS: dict[tuple[tuple[str, ...], bool], str] = {
    ((GPT2_WORDS,), False): "gpt-2",
    ((r"\p{N}", GPT2_WORDS), False): "smollm",
    ((_LLAMA3_WORDS,), True): "llama-bpe",
    ((_LLAMA3_WORDS,), False): "dbrx",
    ((rf"{_ENDINGS}|{_BEFORE}\p{{L}}+|\p{{N}}|{_LINES}",), False): "qwen2",
    (
        (rf"{_ENDINGS}|{_BEFORE}[\p{{L}}\p{{M}}]+|\p{{N}}|" + _LINES.replace(r"\p{L}\p{N}", r"\p{L}\p{M}\p{N}"),),
        False,
    ): ("qwen35"),
    ((rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}|{_PATHS}",), True): "tekken",
    (
        (
            rf"{_BEFORE}{_UPPER}*{_LOWER}+{_ENDINGS}?|{_BEFORE}{_UPPER}+{_LOWER}*{_ENDINGS}?"
            rf"|\p{{N}}{{1,3}}|{_PATHS}",
        ),
        False,
    ): "gpt-4o",
    ((r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK_WORDS), False): "deepseek-v3",
    ((r"\p{N}{1,3}", rf"{_ENDINGS}|{_BEFORE}\p{{L}}+|\p{{N}}+|{_LINES}"), True): "minicpm5",
}
"""(Regular expressions in their order, whether whole words skip the merges) -> the name that llama.cpp has for both.

From `llm_tokenizer_bpe` of its src/llama-vocab.cpp, which notes the original expression beside each of its own.
"""


@dataclass(frozen=True)
class Vocabulary:
    """`values`: GGUF's keys ("tokenizer.ggml.model", ...) -> text, number, or list of one kind. `notes`: to be told."""

    values: dict[str, Any]
    notes: tuple[str, ...] = ()


def read_vocabulary(folder: Path, n_rows: int, config: Mapping[str, Any]) -> Vocabulary:
    """Translate the tokenizer of a Hugging Face folder, for embeddings of `n_rows` tokens.

    `config`: config.json, for special tokens that the tokenizer does not name. Raises ValueError, which says what
    llama.cpp has no form for.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError("has no tokenizer.json; save it with AutoTokenizer.from_pretrained(...).save_pretrained(...)")
    record, settings = _read_json(path), _read_json(folder / "tokenizer_config.json")
    model = record["model"]
    if model.get("type", "BPE") != "BPE":
        raise ValueError(f"its tokenizer is {model.get('type')}; llama.cpp's decoders are written with BPE ones")
    steps = _flatten(record.get("pre_tokenizer"), "pretokenizers")
    normalizers = _flatten(record.get("normalizer"), "normalizers")
    tokens, types = _list_tokens(record, n_rows)
    values: dict[str, Any] = {"tokenizer.ggml.tokens": tokens}
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    if any(step["type"] == "ByteLevel" for step in steps):
        notes = _check_byte_normalizers(normalizers)
        values |= {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": find_pre_tokenizer(steps, bool(model.get("ignore_merges"))),
            "tokenizer.ggml.merges": [" ".join(part.replace(" ", "\u0120") for part in merge) for merge in merges],
        }
    else:
        prefixed = _check_spaces(normalizers, steps)
        types = [_byte_type(token, kind) for token, kind in zip(tokens, types, strict=True)]
        scores = _score_tokens(tokens, merges)
        notes = _describe_pieces(tokens, types, merges)
        values |= {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.pre": "default",
            "tokenizer.ggml.scores": scores,
            "tokenizer.ggml.add_space_prefix": prefixed,
            "tokenizer.ggml.remove_extra_whitespaces": False,
        }
    if (unknown := model.get("unk_token")) in tokens:
        types[tokens.index(unknown)] = UNKNOWN
    values["tokenizer.ggml.token_type"] = types
    values |= _find_special(folder, settings, config, tokens) | _find_added(path, tokens)
    if template := _read_template(folder, settings):
        values["tokenizer.chat_template"] = template
    return Vocabulary(values, tuple(notes))


def find_pre_tokenizer(steps: Sequence[Mapping[str, Any]], ignore_merges: bool) -> str:
    """Return the name under which llama.cpp splits as these pre-tokenizers do. ValueError where it has none."""
    expressions: list[str] = []
    for step in steps:
        if step["type"] == "Split":
            pattern = step["pattern"]
            expressions.append(_unify(pattern["Regex"]) if "Regex" in pattern else re.escape(pattern["String"]))
        elif step["type"] == "Digits":
            expressions.append(r"\p{N}" if step.get("individual_digits") else r"\p{N}+")
        elif step["type"] == "ByteLevel":
            if step.get("add_prefix_space"):
                raise ValueError(
                    "its tokenizer puts a space before each text, which llama.cpp's byte-level ones do not"
                )
            expressions += [GPT2_WORDS] if step.get("use_regex", True) else []
        else:
            expressions.append(step["type"])
    known = {key[0] for key in PRE_TOKENIZERS}
    name = PRE_TOKENIZERS.get((tuple(expressions), ignore_merges))
    # Where no word of the vocabulary is out of the merges' reach, skipping them changes nothing.
    if name is None and tuple(expressions) in known:
        name = PRE_TOKENIZERS[tuple(expressions), not ignore_merges]
    if name is None:
        raise ValueError(
            f"its tokenizer splits texts by {' then '.join(expressions)!r}, which llama.cpp has no name for"
        )
    return name


def _unify(expression: str) -> str:
    """Return one spelling of expressions that match the same."""
    text = expression.replace("\r", r"\r").replace("\n", r"\n")
    text = text.replace("'(?i:[sdmt]|ll|ve|re)", _ENDINGS).replace("?+", "?").replace("++", "+")
    return text.replace(r"\p{N}{1}", r"\p{N}")


def _flatten(step: Mapping[str, Any] | None, inner: str) -> list[Mapping[str, Any]]:
    if step is None:
        return []
    if step["type"] == "Sequence":
        return [leaf for part in step[inner] for leaf in _flatten(part, inner)]
    return [step]


def _list_tokens(record: Mapping[str, Any], n_rows: int) -> tuple[list[str], list[int]]:
    """Return the text and the type of every row of the embeddings; rows without a token are unused."""
    by_id = {index: token for token, index in record["model"]["vocab"].items()}
    types = dict.fromkeys(by_id, NORMAL)
    for added in record.get("added_tokens", ()):
        index, text = added["id"], added["content"]
        types[index] = CONTROL if added.get("special") else USER_DEFINED
        by_id[index] = text if added.get("special") else text.replace(SPACE, " ")
    if max(by_id, default=0) >= n_rows:
        raise ValueError(f"its tokenizer has a token {max(by_id)}, and the embeddings have {n_rows} rows")
    return [by_id.get(i, f"[PAD{i}]") for i in range(n_rows)], [types.get(i, UNUSED) for i in range(n_rows)]


def _check_byte_normalizers(normalizers: Sequence[Mapping[str, Any]]) -> list[str]:
    kinds = [step["type"] for step in normalizers]
    if odd := [kind for kind in kinds if kind != "NFC"]:
        raise ValueError(f"its tokenizer normalizes texts by {odd[0]}, which llama.cpp does not")
    return ["llama.cpp does not compose characters (NFC) before it splits them"] if kinds else []


def _check_spaces(normalizers: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether texts get a space in front. ValueError where they are changed otherwise than SentencePiece's."""
    prefixed, replaced = False, False
    for step in normalizers:
        if step["type"] == "Prepend" and step["prepend"] == SPACE:
            prefixed = True
        elif step["type"] == "Replace" and step["pattern"] == {"String": " "} and step["content"] == SPACE:
            replaced = True
        else:
            raise ValueError(f"its tokenizer normalizes texts by {step['type']}, which llama.cpp does not")
    for step in steps:
        if step["type"] == "Metaspace" and step.get("replacement", SPACE) == SPACE:
            prefixed, replaced = prefixed or step.get("prepend_scheme", "always") != "never", True
        elif step["type"] != "Split" or step["pattern"] != {"String": " "}:  # no space is left to split by (Gemma)
            raise ValueError(f"its tokenizer splits texts by {step['type']}, which llama.cpp's SentencePiece does not")
    if not replaced:
        raise ValueError("its tokenizer is neither byte-level nor SentencePiece's, and llama.cpp has no other BPE")
    return prefixed


def _byte_type(token: str, kind: int) -> int:
    return BYTE if kind != UNUSED and re.fullmatch("<0x[0-9A-F]{2}>", token) else kind


def _score_tokens(tokens: Sequence[str], merges: Sequence[tuple[str, ...]]) -> list[float]:
    """Return a score for each token: the earlier the merges make it, the higher; those that none makes come last."""
    first: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        first.setdefault("".join(merge), rank)
    return [-float(first.get(token, len(merges))) for token in tokens]


def _describe_pieces(tokens: Sequence[str], types: Sequence[int], merges: Sequence[tuple[str, ...]]) -> list[str]:
    """Return notes where SentencePiece's way of joining neighbours differs from these merges', or has no bytes."""
    notes = []
    known, pairs = {token for token, kind in zip(tokens, types, strict=True) if kind == NORMAL}, set(merges)
    apart = sum(
        (token[:i], token[i:]) not in pairs
        for token in known
        for i in range(1, len(token))
        if token[:i] in known and token[i:] in known
    )
    order = ["".join(merge) for merge in merges]
    mixed = len({token for token, before in zip(order, ["", *order], strict=False) if token != before}) < sum(
        token != before for token, before in zip(order, ["", *order], strict=False)
    )
    if apart or mixed:
        text = (
            f"llama.cpp joins {apart} pairs of tokens that the tokenizer's merges leave apart"
            if apart
            else ("llama.cpp joins tokens in another order than the tokenizer's merges")
        )
        notes.append(f"{text}: some texts may become other tokens there")
    if sum(kind == BYTE for kind in types) < 256:
        notes.append("the tokenizer has no token for each byte: llama.cpp ends at texts with characters that it lacks")
    return notes


def _find_special(
    folder: Path, settings: Mapping[str, Any], config: Mapping[str, Any], tokens: Sequence[str]
) -> dict[str, int]:
    """Return the ids of special tokens, by their GGUF key."""
    found: dict[str, int] = {}
    ends = _read_json(folder / "generation_config.json").get("eos_token_id", config.get("eos_token_id"))
    ends = [ends] if isinstance(ends, int) else list(ends or ())
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = settings.get(f"{name}_token")
        text = token["content"] if isinstance(token, Mapping) else token
        index = tokens.index(text) if text in tokens else config.get(f"{name}_token_id")
        index = index[0] if isinstance(index, list) else index
        if index is not None:
            found[f"tokenizer.ggml.{key}_token_id"] = index
    others = [end for end in ends if end != found.get("tokenizer.ggml.eos_token_id")]
    if others:
        found["tokenizer.ggml.eot_token_id"] = others[0]
    return found


def _find_added(path: Path, tokens: Sequence[str]) -> dict[str, bool]:
    """Return whether a text gets a special token before and after it, which the tokenizer is asked."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    plain, full = (tokenizer.encode("a", add_special_tokens=added).ids for added in (False, True))
    start = next((i for i in range(len(full)) if full[i : i + len(plain)] == plain), 0)
    return {
        "tokenizer.ggml.add_bos_token": start > 0,
        "tokenizer.ggml.add_eos_token": len(full) > start + len(plain),
    }


def _read_template(folder: Path, settings: Mapping[str, Any]) -> str:
    file, template = folder / "chat_template.jinja", settings.get("chat_template")
    if file.is_file():
        return file.read_text(encoding="utf-8")
    if isinstance(template, list):
        template = next((entry["template"] for entry in template if entry["name"] == "default"), None)
    return template or ""


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
