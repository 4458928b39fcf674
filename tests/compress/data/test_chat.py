"""Conversations to tokens: whose they are, by the template's marks and without, packed and cut, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chats import CHATML, GEMMA, LLAMA, MARKED, MISTRAL, REASONING, REWRITING, TURNS, write_chat_tokenizer

from compress.data.chat import ChatEncoder, cut_windows, find_places, pack_rows, read_tools, read_turns
from compress.data.inspect import inspect_data
from compress.data.samples import load_samples
from compress.errors import SourceError
from compress.specs import ChatSpec, DataSpec, MessageKeys
from runtime.encode.chat import take_parts
from runtime.errors import UsageError

KEYS = MessageKeys()
LAST_AS_IT_IS = REASONING.replace(
    "m.content", "(m.content | upper if m.role != 'user' and not loop.last else m.content)"
)


def encoder(folder: Path, written: Any, **chat: Any) -> ChatEncoder:
    write_chat_tokenizer(folder, written)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return ChatEncoder(ChatSpec(**chat), folder, folder)


def parts(chats: ChatEncoder, turns: Any, tools: Any = None) -> list[str]:
    """What the mask marks, each piece that hangs together as text."""
    ids, mask = chats.encode(turns, tools)
    pieces = np.split(np.arange(len(ids)), np.flatnonzero(np.diff(mask)) + 1)
    return [chats.tokenizer.decode(ids[piece]) for piece in pieces if mask[piece[0]]]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (LLAMA, ["a cat<|eot_id|>", "two dogs<|eot_id|>"]),
        (CHATML, ["a cat<|im_end|>", "two dogs<|im_end|>"]),
        (MARKED, ["a cat<|im_end|>", "two dogs<|im_end|>"]),
        (MISTRAL, [" a cat</s>", " two dogs</s>"]),
        (GEMMA, ["a cat<end_of_turn>", "two dogs<end_of_turn>"]),
        (REASONING, ["a cat<|im_end|>", "(thinks)\n\ntwo dogs<|im_end|>"]),
    ],
    ids=["llama", "chatml", "marked", "mistral", "gemma", "reasoning"],
)
def test_what_the_assistant_says_is_marked_with_the_token_that_ends_it(
    tmp_path: Path, template: str, said: list[str]
) -> None:
    chats = encoder(tmp_path, template)
    assert parts(chats, TURNS) == said
    ids, _ = chats.encode(TURNS)
    assert ids.tolist() == chats.tokenizer.apply_chat_template(TURNS)["input_ids"]
    assert np.count_nonzero(ids == 1) == (1 if "bos_token" in template else 0)  # never a second one


def test_prefixes_find_what_the_marks_say(tmp_path: Path) -> None:
    marked = encoder(tmp_path, MARKED)
    by_marks = marked.encode(TURNS)
    transformers = marked.tokenizer.apply_chat_template(TURNS, return_dict=True, return_assistant_tokens_mask=True)
    assert by_marks[1].tolist() == transformers["assistant_masks"]
    plain = encoder(tmp_path, MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", ""))
    for one, other in zip(by_marks, plain.encode(TURNS), strict=True):
        np.testing.assert_array_equal(one, other)


def test_letters_of_several_bytes_belong_to_the_turn_that_has_them(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "\u00fc\u4f60"}, {"role": "assistant", "content": "\u597d\U0001f600"}]
    assert parts(encoder(tmp_path, LLAMA), turns) == ["\u597d\U0001f600<|eot_id|>"]


def test_a_tools_schema_and_a_call_reach_the_template(tmp_path: Path) -> None:
    call = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
    turns = [TURNS[0], {"role": "assistant", "tool_calls": call}, {"role": "tool", "content": "7"}, TURNS[1]]
    chats = encoder(tmp_path, CHATML)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    said = parts(chats, read_turns(turns, KEYS), read_tools(json.dumps(tools)))
    assert said == ["call " + json.dumps(call) + "<|im_end|>", "a cat<|im_end|>"]
    assert "Tools: " + json.dumps(tools) in chats.tokenizer.decode(chats.encode(turns, tools)[0])


def test_arguments_and_names_choose_the_template(tmp_path: Path) -> None:
    named = [{"name": "default", "template": LLAMA}, {"name": "short", "template": CHATML}]
    assert parts(encoder(tmp_path, named, template="short"), TURNS[:2]) == ["a cat<|im_end|>"]
    with pytest.raises(SourceError, match=r"the model has no 'long'; it has: default, short"):
        encoder(tmp_path, named, template="long").encode(TURNS)
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ bos_token + name + m.content }}{% endfor %}")
    own = encoder(tmp_path, None, template="own.jinja", arguments={"name": "N"}, loss_on="all")
    ids, mask = own.encode(TURNS[:2])
    assert own.tokenizer.decode(ids) == "<s>Nwhat is it<s>Na cat"
    assert mask.all()
    with pytest.raises(ValueError, match="arguments: tools is set as conversations are read; leave it out"):
        ChatSpec(arguments={"tools": []})


@pytest.mark.parametrize(
    ("template", "turns", "why"),
    [
        (REWRITING, TURNS, "message 1: the chat template writes what is before it in another way once more follows"),
        (LLAMA, TURNS[1:], "the assistant speaks first"),
        (GEMMA, [{"role": "system", "content": "be kind"}, *TURNS], r"\(TemplateError: System role not supported\)"),
        (LAST_AS_IT_IS, TURNS, "message 1: the chat template writes the assistant's turn in another way once more"),
    ],
)
def test_what_cannot_be_told_is_refused(tmp_path: Path, template: str, turns: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        encoder(tmp_path, template).encode(turns)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ([], "the conversation is empty: leave it out"),
        ("[not", "the conversation: a text that is not JSON"),
        ({"role": "user"}, "a conversation is a list of {role, content}, and this is dict"),
        ({"role": ["user"], "content": []}, "the lists of role, content differ in length"),
        (["hello"], "message 0 is str, not an object of role and content"),
        ([{"from": "human", "value": "x"}], "message 0 has no text 'role'; it has: from, value; name the keys"),
        ([{"role": "human", "content": "x"}], "message 0 has role 'human', not one of system, developer, user"),
        ([{"role": "user", "content": None}], r"message 0 \(user\) has no 'content'"),
    ],
)
def test_a_conversation_that_is_none(value: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        read_turns(value, KEYS)


def test_other_spellings_are_read_where_the_set_says_so(tmp_path: Path) -> None:
    chats = encoder(tmp_path, LLAMA)
    rows = [[{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"conversations": row}) + "\n" for row in rows))
    keys = MessageKeys(role="from", content="value", roles={"human": "user", "gpt": "assistant"})
    spec = DataSpec(source="jsonl:d.jsonl", columns={"messages": "conversations"}, messages=keys)
    samples = load_samples(spec, tmp_path, "text-generation", (), 0, chats=chats)
    ids, mask = samples.columns["input_ids"][0], samples.columns["loss_mask"][0]
    assert chats.tokenizer.decode(ids[mask.astype(bool)]) == "yes<|eot_id|>"


def test_a_list_for_each_key_is_read_as_messages() -> None:
    assert read_turns({"role": ["user", "assistant"], "content": ["a", "b"]}, KEYS) == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]


def test_every_file_gives_the_same_tokens(tmp_path: Path) -> None:
    from datasets import Dataset

    chats = encoder(tmp_path, CHATML)
    call = [TURNS[0], {"role": "assistant", "tool_calls": [{"name": "f"}]}, TURNS[2], TURNS[3]]
    rows = [{"messages": TURNS}, {"messages": call}]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Dataset.from_list(rows).to_parquet(tmp_path / "d.parquet")  # fills keys that a turn lacks with None
    quoted = (json.dumps(row["messages"]).replace('"', '""') for row in rows)
    (tmp_path / "d.csv").write_text("messages\n" + "".join(f'"{text}"\n' for text in quoted))
    loaded = [
        load_samples(DataSpec(source=source), tmp_path, "text-generation", (), 0, chats=chats)
        for source in ("jsonl:d.jsonl", "parquet:d.parquet", "csv:d.csv")
    ]
    assert len({samples.digest for samples in loaded}) == 1


def test_errors_name_file_and_row_and_the_first_row_is_read_by_the_plan(tmp_path: Path) -> None:
    chats = encoder(tmp_path, GEMMA)
    system = {"messages": [{"role": "system", "content": "be kind"}, *TURNS]}
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps({"messages": TURNS, "text": "rendered"}) + "\n" + json.dumps(system) + "\n")
    facts = inspect_data(DataSpec(source="jsonl:d.jsonl"), tmp_path, "text-generation", (), chats=chats)
    assert facts.columns == {"messages": "messages"}  # the text beside them is passed over
    with pytest.raises(SourceError, match=r"d\.jsonl: column 'messages', line 2: the chat template fails"):
        load_samples(DataSpec(source="jsonl:d.jsonl"), tmp_path, "text-generation", (), 0, chats=chats)
    path.write_text(json.dumps(system) + "\n")
    with pytest.raises(SourceError, match=r"column 'messages', line 1: .* System role not supported"):
        inspect_data(DataSpec(source="jsonl:d.jsonl"), tmp_path, "text-generation", (), chats=chats)
    plain = encoder(tmp_path, None)
    with pytest.raises(SourceError, match="the model has no chat template, which a column of messages needs"):
        inspect_data(DataSpec(source="jsonl:d.jsonl"), tmp_path, "text-generation", (), chats=plain)
    both = DataSpec(source="jsonl:d.jsonl", columns={"messages": "messages", "text": "messages"})
    with pytest.raises(SourceError, match="text and messages are both given; give one of them"):
        inspect_data(both, tmp_path, "text-generation", (), chats=chats)


@pytest.mark.parametrize("separator", [None, 2])
def test_packed_rows_hold_every_sample_and_count_what_counted(separator: int | None) -> None:
    rng = np.random.default_rng(0)
    sequences = [rng.integers(10, 99, size) for size in rng.integers(2, 20, 60)]
    masks = [rng.integers(0, 2, len(ids)).astype(np.uint8) for ids in sequences]
    packed = pack_rows(sequences, masks, 32, separator)
    rows, kept = packed["input_ids"], packed["loss_mask"]
    assert max(map(len, rows)) <= 32
    assert [len(ids) for ids in rows] == [len(mask) for mask in kept]
    text = " ".join(" ".join(map(str, ids)) for ids in rows)
    assert all(" ".join(map(str, ids)) in text for ids in sequences)
    gaps = 0 if separator is None else len(sequences) - len(rows)
    assert sum(map(len, rows)) == sum(map(len, sequences)) + gaps
    counted = np.concatenate([ids[mask == 1] for ids, mask in zip(rows, kept, strict=True)])
    expected = np.concatenate([ids[1:][mask[1:] == 1] for ids, mask in zip(sequences, masks, strict=True)])
    assert sorted(counted.tolist()) == sorted(expected.tolist())
    assert len(rows) <= -(-sum(map(len, sequences)) // 32) + 2  # nearly no room is left


def test_windows_cut_ids_and_mask_alike() -> None:
    sequences = [np.arange(10, 15), np.arange(20, 24)]
    masks = [np.array([1, 0, 1, 1, 0], np.uint8), np.array([1, 1, 0, 1], np.uint8)]
    windows = cut_windows(sequences, masks, 4)
    assert windows["input_ids"].tolist() == [[10, 11, 12, 13], [14, 20, 21, 22]]
    assert windows["loss_mask"].tolist() == [[0, 0, 1, 1], [0, 0, 1, 0]]
    with pytest.raises(UsageError, match="the conversations give 9 tokens, fewer than one window of 10"):
        cut_windows(sequences, masks, 10)


@pytest.mark.parametrize(
    ("short", "long", "places"),
    [
        ("ab", "ab", [0, 1]),
        ("aIb", "aIIIb", [0, 1, 4]),
        ("aIbIc", "aXIIXbXIXc", [0, 2, 5, 7, 9]),
        ("aa", "aaXaa", [0, 1]),
        ("abc", "xyz", [-1, -1, -1]),
    ],
)
def test_tokens_are_found_again_beside_those_of_images(short: str, long: str, places: list[int]) -> None:
    found = find_places(*(np.array([ord(letter) for letter in text]) for text in (short, long)))
    assert found.tolist() == places


def test_images_of_a_conversation_are_taken_in_order() -> None:
    content = [{"type": "image", "path": "a.png", "text": None}, {"type": "text", "text": "b", "image": None}]
    turns = [{"role": "user", "content": [{"type": "image"}, *content]}, {"role": "assistant", "content": "c"}]
    taken, images = take_parts(turns, ["z.png"])
    assert images == ["z.png", "a.png"]
    assert taken[0]["content"] == [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "b"}]
    with pytest.raises(UsageError, match="names more images than there are"):
        take_parts(turns)
    with pytest.raises(UsageError, match="2 images are not named in the conversation"):
        take_parts(turns[1:], ["y.png", "z.png"])
