"""Conversations to the token ids that an instruct model reads, and which of them are the assistant's.

A conversation is rendered with the model's own chat template, by transformers, in jinja2's sandbox. What the assistant
says is found by the template's `{% generation %}` marks. Without them it is found by prefixes: the conversation up to
an assistant's turn, rendered with the generation prompt, must begin the whole rendering, and what the turn adds to it
is the assistant's. Whatever cannot be found so is an error, and never guessed.

A model that also sees or hears reads images or sounds where a conversation names them: its own processor makes of each
as many tokens as the model has features of it, and what else the model reads.
"""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_left, insort
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compress.errors import SourceError
from compress.specs import TEMPLATE_FILE, ChatSpec, MessageKeys
from compress.store.paths import resolve_path
from runtime.bundle.columns import Array
from runtime.encode.chat import ASSISTANT, AUDIO, IMAGE, TEXT, Turns, split_contents
from runtime.encode.language import IDS, LOSS_MASK, POSITIONS
from runtime.errors import UsageError

if TYPE_CHECKING:
    from compress.models.processor import Processor

MESSAGES, TOOLS = "messages", "tools"
"""Roles of columns: the turns of each conversation, and the functions that its assistant may call."""
LABEL = "label"
"""Role of a column: the answer to what is asked in TEXT about an IMAGE or an AUDIO. Beside MESSAGES, those of each."""
ROLES = ("system", "developer", "user", ASSISTANT, "tool")
MARKS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
"""Around what the assistant says, in a template."""
NO_MASK = "the assistant's tokens cannot be told from the others"
WAYS = (
    "give chat.template a .jinja file with {% generation %} around what the assistant says, or chat.loss_on: all to "
    "count every token"
)


def are_chats(roles: Collection[str]) -> bool:
    """Return whether samples with these roles are conversations: messages, or a question about an image or a sound."""
    return any(role in roles for role in (MESSAGES, IMAGE, AUDIO))


def perceived_columns(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a processor made of images or sounds: all columns beside tokens, texts and labels."""
    own = (IDS, LOSS_MASK, POSITIONS, TEXT, LABEL)
    return {name: column for name, column in columns.items() if name not in own}


def read_turns(value: Any, keys: MessageKeys) -> Turns:
    """Return a conversation in the form that templates read, of a list of objects, or the JSON of one.

    UsageError for one without turns, and for a turn without a known role or without anything said.
    """
    value = _parse_json(value, "the conversation")
    if isinstance(value, Mapping) and isinstance(value.get(keys.role), list):  # a list for each key, as hubs have some
        lists = {key: said for key, said in value.items() if isinstance(said, list)}
        if len({len(said) for said in lists.values()}) > 1:
            raise UsageError(f"the lists of {', '.join(lists)} differ in length: give one entry a message in each")
        value = [dict(zip(lists, turn, strict=True)) for turn in zip(*lists.values(), strict=True)]
    if not isinstance(value, (list, tuple, np.ndarray)):
        raise UsageError(f"a conversation is a list of {{role, content}}, and this is {type(value).__name__}")
    if not len(value):
        raise UsageError("the conversation is empty: leave it out")
    return [_read_turn(turn, i, keys) for i, turn in enumerate(value)]


def _read_turn(turn: Any, i: int, keys: MessageKeys) -> dict[str, Any]:
    if not isinstance(turn, Mapping):
        raise UsageError(f"message {i} is {type(turn).__name__}, not an object of {keys.role} and {keys.content}")
    if not isinstance(turn.get(keys.role), str):
        raise UsageError(
            f"message {i} has no text '{keys.role}'; it has: {', '.join(turn) or 'nothing'}; name the keys, such as "
            "`messages: {role: from, content: value}` in the set"
        )
    role = keys.roles.get(turn[keys.role], turn[keys.role])
    if role not in (*ROLES, *keys.roles.values()):
        raise UsageError(
            f"message {i} has role '{role}', not one of {', '.join(ROLES)}: say what it is, such as "
            f"`messages: {{roles: {{{role}: user}}}}` in the set"
        )
    # what parquet fills in where a turn lacks what another has; templates ask whether a key is there
    others = {k: v for k, v in turn.items() if k not in (keys.role, keys.content) and v is not None}
    content = turn.get(keys.content)
    if content is None and not others:
        raise UsageError(f"message {i} ({role}) has no '{keys.content}'; leave the message out, or give its text")
    return {"role": role, **({} if content is None else {"content": content}), **others}


def read_tools(value: Any) -> list[dict[str, Any]] | None:
    """Return functions as JSON schemas, of a list of them, or the JSON of one; None of nothing. UsageError."""
    value = _parse_json(value, "tools") if value else None
    if value is None or not len(value):
        return None
    if not isinstance(value, (list, tuple, np.ndarray)) or not all(isinstance(tool, Mapping) for tool in value):
        raise UsageError(f"tools are a list of JSON schemas, and this is {type(value).__name__}")
    return [dict(tool) for tool in value]


def _parse_json(value: Any, what: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise UsageError(f"{what}: a text that is not JSON: {error}") from error


@dataclass(frozen=True)
class ChatEncoder:
    """Renders and encodes conversations for one model. `folder`: the model's; None: it has none of its own.

    `perceives`: the type of parts that its own processor reads, image or audio.
    """

    chat: ChatSpec
    folder: Path | None
    root: Path
    trust_remote_code: bool = False
    perceives: str = ""

    @cached_property
    def processor(self) -> Processor:
        """Return what reads images or sounds. SourceError where the model has no folder."""
        from compress.models.processor import Processor

        if self.folder is None:
            raise SourceError(
                "what is no text is read by the model's own processor, and this model has no folder with one"
            )
        return Processor(self.folder, self.trust_remote_code, self.perceives, self.chat.image_size)

    @cached_property
    def tokenizer(self) -> Any:
        """Return the tokenizer that transformers makes of the folder. SourceError."""
        from transformers import AutoTokenizer

        from compress.models.huggingface import quiet

        if self.folder is None:
            raise SourceError("a column of messages needs a chat template, and this model has no folder with one")
        try:
            with quiet():
                tokenizer = AutoTokenizer.from_pretrained(
                    self.folder, local_files_only=True, trust_remote_code=self.trust_remote_code, use_fast=True
                )
        except Exception as error:  # the tokenizers library raises Exception itself
            raise SourceError(f"{self.folder}: transformers cannot build its tokenizer: {error}") from error
        if not tokenizer.is_fast:
            raise SourceError(f"{self.folder}: its tokenizer does not say where tokens stand; a tokenizer.json does")
        return tokenizer

    @cached_property
    def templates(self) -> dict[str, str]:
        """Return the templates that there are, by name; a recipe's file is "default". SourceError where none is."""
        named = self.chat.template
        if named is not None and named.endswith(TEMPLATE_FILE):
            path = resolve_path(self.root, named)
            try:
                return {"default": path.read_text(encoding="utf-8")}
            except (OSError, UnicodeDecodeError) as error:
                raise SourceError(f"chat.template: {path}: cannot be read: {error}") from error
        own = self.tokenizer.chat_template
        if own is None and self.perceives:  # older folders have it in a file that a processor alone reads
            own = self.processor.auto_processor.chat_template
        if own is None:
            raise SourceError(
                f"{self.folder}: the model has no chat template, which a column of messages needs: give chat.template "
                "a .jinja file, or the texts themselves in a column of text"
            )
        templates = own if isinstance(own, dict) else {"default": own}
        if named is not None and named not in templates:
            raise SourceError(f"chat.template: the model has no '{named}'; it has: {', '.join(templates)}")
        return {"default": templates[named]} if named is not None else templates

    @cached_property
    def digest(self) -> str:
        """Return the sha256 over the templates and what the recipe says of them. SourceError as in `templates`."""
        said: list[Any] = [self.chat.model_dump(mode="json", exclude={"template"}), self.templates]
        if self.perceives and self.folder is not None:
            said += [path.read_text(encoding="utf-8") for path in sorted(self.folder.glob("*processor_config.json"))]
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()

    @cached_property
    def ends(self) -> tuple[str, ...]:
        """Return the special tokens, one of which ends a turn."""
        added = self.tokenizer.added_tokens_decoder.values()
        return tuple({*self.tokenizer.all_special_tokens, *(token.content for token in added if token.special)})

    def encode(self, turns: Turns, tools: list[dict[str, Any]] | None = None) -> tuple[Array, Array]:
        """Return a conversation's token ids, int64 [t], nothing added to its rendering, and their loss mask, uint8 [t].

        UsageError where the template fails on it, and where the assistant's part cannot be told.
        """
        template, turns = self._choose_template(tools), self._split_contents(turns)
        if self.chat.loss_on == "all":
            ids = np.array(self.tokenizer(self._render(turns, tools), add_special_tokens=False)["input_ids"], np.int64)
            return ids, np.ones(len(ids), np.uint8)
        if MARKS.search(template):
            encoded = self._apply(turns, tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
            return np.array(encoded["input_ids"], np.int64), np.array(encoded["assistant_masks"], np.uint8)
        text = self._render(turns, tools)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        places = np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2)  # [t, 2], characters of `text`
        mask = np.zeros(len(places), bool)
        for start, end in self._find_spans(turns, tools, text):
            mask |= (places[:, 0] < end) & (places[:, 1] > start)  # every token that has a character of it
        return np.array(encoded["input_ids"], np.int64), mask.astype(np.uint8)

    def add_parts(
        self, turns: Turns, tools: list[dict[str, Any]] | None, parts: Sequence[Array]
    ) -> tuple[Array, Array, dict[str, Array]]:
        """Return what `encode` does of a conversation with images or sounds, and what else the model reads.

        `parts`: images, uint8 [H, W(, C)], or waveforms, float32 [T] at the processor's rate. Tokens that stand for
        them do not count. UsageError as in `encode`, and where the processor fails.
        """
        ids, mask = self.encode(turns, tools)
        seen = self.processor.encode(self._render(self._split_contents(turns), tools), parts)
        whole = seen.pop(IDS)
        places = find_places(ids, whole)
        counts, kept = np.zeros(len(whole), np.uint8), places >= 0
        counts[places[kept]] = mask[kept]
        if self.chat.loss_on == "all":
            counts[np.isin(whole, np.delete(whole, places[kept]))] = 0
        elif counts.sum() != mask.sum():
            raise UsageError(f"the processor writes what is said in another way than the chat template, so {NO_MASK}")
        return whole, counts, seen

    def render_prompt(self, turns: Turns) -> str:
        """Render turns as text, ending where the assistant begins to speak. UsageError."""
        return self._render(self._split_contents(turns), None, prompt=True)

    @cached_property
    def takes_parts(self) -> bool:
        """Return whether the template reads contents that are lists of parts; some read no other."""
        word = "xylophone"
        try:
            text = self._render([{"role": "user", "content": [{"type": TEXT, TEXT: word}]}], None)
        except UsageError:
            return False
        return word in text and f"'{TEXT}': '{word}" not in text

    def _split_contents(self, turns: Turns) -> Turns:
        """Return turns with contents that are lists of parts, where the template reads such."""
        return split_contents(turns) if self.perceives and self.takes_parts else turns

    def _choose_template(self, tools: Any) -> str:
        """Return the template as transformers chooses it. UsageError where there is no default."""
        name = "tool_use" if tools and "tool_use" in self.templates else "default"
        if name not in self.templates:
            raise UsageError(
                f"the model has several chat templates and no default: say chat.template: {' or '.join(self.templates)}"
            )
        return self.templates[name]

    def _render(self, turns: Turns, tools: Any, prompt: bool = False) -> str:
        """Render turns as text; `prompt`: ending where the assistant begins to speak. UsageError."""
        text: str = self._apply(turns, tools, tokenize=False, add_generation_prompt=prompt)
        return text

    def _apply(self, turns: Turns, tools: Any, **how: Any) -> Any:
        template = self._choose_template(tools)
        try:
            return self.tokenizer.apply_chat_template(
                turns, tools=tools, chat_template=template, **{**self.chat.arguments, **how}
            )
        except Exception as error:  # whatever the template does, it is the template that failed
            said = f"{type(error).__name__}: {str(error)[:300]}"
            raise UsageError(
                f"the chat template fails on this conversation ({said}): change or leave out the conversation, or give "
                "chat.template another"
            ) from error

    def _find_spans(self, turns: Turns, tools: Any, text: str) -> list[tuple[int, int]]:
        """Return (first character, the one behind the last) of each assistant's turn in the whole rendering `text`.

        The end is that of the token which ends the turn. UsageError where a turn is not an addition to what is before.
        """
        spans = []
        for k, turn in enumerate(turns):
            if turn["role"] == ASSISTANT:
                start = self._find_start(turns[:k], tools, text, k)
                spans.append((start, self._find_end(turns[: k + 1], tools, text, start, k)))
        return spans

    def _find_start(self, before: Turns, tools: Any, text: str, k: int) -> int:
        if not before:
            raise UsageError(
                f"the assistant speaks first, and where nothing is before {NO_MASK}: put a user's or a system's "
                f"message there, or {WAYS}"
            )
        prompt = self._render(before, tools, prompt=True)
        if not text.startswith(prompt):
            raise UsageError(
                f"message {k}: the chat template writes what is before it in another way once more follows, so "
                f"{NO_MASK}: {WAYS}"
            )
        return len(prompt)

    def _find_end(self, until: Turns, tools: Any, text: str, start: int, k: int) -> int:
        """Return where the turn that begins at `start` ends.

        Some templates write the last turn in another way than one before it (with its reasoning): of such a one the
        content must stand at `start` word for word, and the token that ends the turn behind it.
        """
        rendered = self._render(until, tools)
        if len(rendered) >= start and text.startswith(rendered):
            said = rendered[start:].rstrip()  # what a template puts behind the end's token is not the assistant's
            return start + len(said) if said.endswith(self.ends) else len(rendered)
        content = until[-1].get("content")
        if isinstance(content, list):
            content = "".join(part.get(TEXT, "") for part in content if isinstance(part, Mapping))
        words = content.strip() if isinstance(content, str) else ""
        behind = text[start + len(words) :]
        end = next((token for token in sorted(self.ends, key=len, reverse=True) if behind.startswith(token)), "")
        if not words or not text.startswith(words, start) or not end:
            raise UsageError(
                f"message {k}: the chat template writes the assistant's turn in another way once more follows, so "
                f"{NO_MASK}: {WAYS}"
            )
        return start + len(words) + len(end)


def find_places(short: Array, long: Array) -> Array:
    """Return where each token of a row stands in another that has more, int64 [t]; -1: nowhere.

    What begins and ends both stands there; between, the longest pieces that are alike go together.
    """
    n = min(len(short), len(long))
    first = int(np.argmin(np.append(short[:n] == long[:n], False)))
    last = int(np.argmin(np.append(short[::-1][: n - first] == long[::-1][: n - first], False)))
    places = np.full(len(short), -1, np.int64)
    places[:first] = np.arange(first)
    places[len(short) - last :] = np.arange(len(long) - last, len(long))
    middle, wider = short[first : len(short) - last].tolist(), long[first : len(long) - last].tolist()
    for start, place, size in SequenceMatcher(None, middle, wider, autojunk=False).get_matching_blocks():
        places[first + start : first + start + size] = np.arange(first + place, first + place + size)
    return places


def pack_rows(
    sequences: Sequence[Array], masks: Sequence[Array], longest: int, separator: int | None
) -> dict[str, list[Array]]:
    """Return several short samples in one row: {"input_ids", "position_ids": int64 [t] each, "loss_mask": uint8 [t]}.

    No row is longer than `longest`; the longest samples come first, each into the fullest row that has room (best fit).
    `separator`: a token that is put between two samples. Neither it nor a sample's first token counts, so that no token
    is learned, or scored, that was not before. Positions begin anew with each sample; a separator ends one.
    """
    gap = 0 if separator is None else 1
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, row), the fullest row first
    for sample in sorted(range(len(sequences)), key=lambda i: (-len(sequences[i]), i)):
        length = len(sequences[sample])
        place = bisect_left(room, (length + gap, 0))
        free, row = room.pop(place) if place < len(room) else (longest + gap, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(sample)
        insort(room, (free - length - gap, row))
    between = np.array([] if separator is None else [separator], np.int64)
    packed = [_join_samples([sequences[i] for i in row], [masks[i] for i in row], between) for row in rows]
    columns = {"input_ids": [ids for ids, _ in packed], "loss_mask": [mask for _, mask in packed]}
    return columns | {POSITIONS: [_count_anew([len(sequences[i]) for i in row], gap) for row in rows]}


def _count_anew(lengths: Sequence[int], gap: int) -> Array:
    """Return the positions in a row of samples of these lengths, int64 [t], a separator of `gap` tokens between two."""
    *first, last = lengths
    return np.concatenate([np.arange(length) for length in (*(length + gap for length in first), last)])


def cut_windows(sequences: Sequence[Array], masks: Sequence[Array], size: int) -> dict[str, Array]:
    """Return all samples joined and cut into windows: {"input_ids": int64 [N, size], "loss_mask": uint8 [N, size]}.

    What does not fill the last window is left out. UsageError where not one is filled.
    """
    ids, mask = _join_samples(sequences, masks, np.array([], np.int64))
    n = len(ids) // size
    if not n:
        raise UsageError(f"the conversations give {len(ids)} tokens, fewer than one window of {size}: give more")
    return {"input_ids": ids[: n * size].reshape(n, size), "loss_mask": mask[: n * size].reshape(n, size)}


def _join_samples(sequences: Sequence[Array], masks: Sequence[Array], between: Array) -> tuple[Array, Array]:
    ids, counted = [sequences[0]], [_skip_first(masks[0])]
    for sequence, mask in zip(sequences[1:], masks[1:], strict=True):
        ids += [between, sequence]
        counted += [np.zeros(len(between), np.uint8), _skip_first(mask)]
    return np.concatenate(ids).astype(np.int64), np.concatenate(counted)


def _skip_first(mask: Array) -> Array:
    """Return the mask without its first token, which in a row of its own nothing predicts."""
    kept = mask.astype(np.uint8)
    kept[:1] = 0
    return kept
