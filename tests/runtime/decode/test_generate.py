"""Generation against the model run anew without a cache; batches, padding, seeds, stop strings, streams, chats."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import runtime
from runtime import Bundle, open_bundle
from runtime.bundle.format import KvCacheSpec
from runtime.decode.generate import TextStream
from runtime.decode.kv_cache import Decoder
from runtime.errors import BundleError, UsageError
from runtime.tasks.manifest import read_manifest

MakeBundle = Callable[..., Path]
PROMPTS = ["Once upon a time", "x", "a dog and a cat"]
BOTH = pytest.mark.parametrize("shared", [False, True], ids=["plain", "shared"])


@pytest.fixture
def opened(make_decoder_bundle: MakeBundle) -> Callable[..., Bundle]:
    return lambda **more: open_bundle(make_decoder_bundle(**{"noise": 0.0, **more}))


def recomputed(tiny: Any, prompt: str, n: int) -> list[int]:
    """Greedy tokens from the model in float64 on the whole text each time."""
    weights, ids = tiny.decoder_weights(), [256, *byte_ids(tiny, prompt)]
    start = len(ids)
    for _ in range(n):
        ids.append(int(tiny.decoder_logits(weights, ids)[-1].argmax()))
    return ids[start:]


def byte_ids(tiny: Any, text: str) -> list[int]:
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    symbols = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return [alphabet.index(char) for word, _ in symbols for char in word]


# identities


@BOTH
def test_generation_equals_full_recomputation_without_a_cache(
    opened: Callable[..., Bundle], tiny: Any, shared: bool
) -> None:
    with opened(shared=shared) as bundle:
        for prompt in PROMPTS:
            want = recomputed(tiny, prompt, 20)
            want = want[: want.index(257)] if 257 in want else want
            assert list(bundle.generate(prompt, max_new_tokens=20).token_ids) == want


@BOTH
def test_the_logits_are_those_of_the_model_without_cache_and_padding(tiny: Any, tmp_path: Path, shared: bool) -> None:
    session = tiny.open_onnx(tiny.decoder_model(tmp_path / "model.onnx", shared=shared))
    decoder = Decoder(session, tiny.kv_cache(shared))
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 256, n) for n in (9, 1, 4)]
    logits = decoder.start(texts, 16)
    for step in range(6):
        if step:
            new = rng.integers(0, 256, 3)
            texts = [np.append(text, token) for text, token in zip(texts, new, strict=True)]
            logits = decoder.step(new)
        for row, text in enumerate(texts):
            want = tiny.decoder_logits(tiny.decoder_weights(), text)[-1]
            np.testing.assert_allclose(logits[row], want, atol=2e-5)


@BOTH
def test_a_batch_gives_what_each_prompt_gives_alone(opened: Callable[..., Bundle], shared: bool) -> None:
    with opened(shared=shared) as bundle:
        together = bundle.generate(PROMPTS, max_new_tokens=12)
        assert together == [bundle.generate(prompt, max_new_tokens=12) for prompt in PROMPTS]
        assert [result.prompt_tokens for result in together] == [17, 2, 16]


@BOTH
def test_the_cache_is_not_copied(tiny: Any, tmp_path: Path, shared: bool) -> None:
    """The past of a step is the memory that the step before gave as present."""
    session = tiny.open_onnx(tiny.decoder_model(tmp_path / "model.onnx", shared=shared))
    decoder = Decoder(session, tiny.kv_cache(shared))
    decoder.start([np.arange(5)], 12)
    presents = [present for _, present in decoder.cache.pairs()]
    names = [*presents, "logits"] if shared else ["logits", *presents]  # in the order in which they are bound
    for _ in range(3):
        given = dict(zip(names, decoder.keys._binding.get_outputs(), strict=True))
        bound = decoder.keys._binding._bound_inputs
        for past, present in decoder.cache.pairs():
            assert bound[past].data_ptr() == given[present].data_ptr()
        decoder.step(np.array([7]))
    for _ in range(4):
        decoder.step(np.array([7]))
    with pytest.raises(UsageError, match="13 tokens do not fit into a cache made for 12"):
        decoder.step(np.array([7]))


# draws


def test_the_same_seed_gives_the_same_text_and_another_seed_another(opened: Callable[..., Bundle]) -> None:
    with opened() as bundle:
        texts = [bundle.generate("Once", max_new_tokens=24, temperature=1.0, seed=s).token_ids for s in (1, 1, 2)]
        assert texts[0] == texts[1] != texts[2]
        rows = bundle.generate(["Once", "Once"], max_new_tokens=24, temperature=1.0, seed=1)
        assert rows[0].token_ids == texts[0] != rows[1].token_ids


def test_top_k_one_is_greedy(opened: Callable[..., Bundle]) -> None:
    with opened() as bundle:
        greedy = bundle.generate("Once", max_new_tokens=8)
        assert bundle.generate("Once", max_new_tokens=8, temperature=3.0, top_k=1) == greedy


def test_settings_that_are_not_given_are_the_models_own(make_decoder_bundle: MakeBundle) -> None:
    root = make_decoder_bundle()
    generation = replace(read_manifest(root).generation, top_k=1)
    with open_bundle(root) as bundle:
        greedy = bundle.generate("Once", max_new_tokens=8)
    with open_bundle(make_decoder_bundle(generation=generation)) as bundle:
        assert bundle.generate("Once", max_new_tokens=8, temperature=5.0) == greedy
        assert bundle.generate("Once", max_new_tokens=8, temperature=5.0, top_k=0) != greedy


def test_a_repetition_penalty_beyond_all_bounds_repeats_nothing(opened: Callable[..., Bundle]) -> None:
    with opened() as bundle:
        ids = bundle.generate("Once", max_new_tokens=40, repetition_penalty=1e9).token_ids
        assert len(set(ids)) == len(ids)
        assert not set(ids) & set(bundle.generator().encode("Once")[0].tolist())


# ends


def test_an_end_token_ends_a_row_and_not_the_others(make_decoder_bundle: MakeBundle) -> None:
    with open_bundle(make_decoder_bundle()) as bundle:
        free = bundle.generate(PROMPTS, max_new_tokens=10)
    last = free[0].token_ids[4]
    generation = replace(read_manifest(bundle.root).generation, eos_token_ids=(257, last))
    with open_bundle(make_decoder_bundle(generation=generation)) as bundle:
        ended = bundle.generate(PROMPTS, max_new_tokens=10)
    assert ended[0].finish == "eos"
    for one, other in zip(ended, free, strict=True):
        until = other.token_ids.index(last) if last in other.token_ids else len(other.token_ids)
        assert one.token_ids == other.token_ids[:until]


def test_a_stop_string_across_token_borders_ends_the_text_before_it(opened: Callable[..., Bundle]) -> None:
    with opened() as bundle:
        whole = bundle.generate("Once", max_new_tokens=30).text
        stop = whole[5:8]  # of three tokens
        result = bundle.generate("Once", max_new_tokens=30, stop=["never ever", stop])
        assert result.finish == "stop"
        assert result.text == whole[: whole.index(stop)]
        pieces = list(bundle.generate("Once", max_new_tokens=30, stop=[stop], stream=True))
        assert "".join(pieces) == result.text


def test_the_longest_answer_fills_the_context(opened: Callable[..., Bundle]) -> None:
    with opened() as bundle:
        result = bundle.generate("x", max_new_tokens=62)
        assert result.finish != "length" or len(result.token_ids) == 62
        assert len(bundle.generate("x" * 50).token_ids) <= 13


def test_the_streamed_pieces_joined_are_the_text(opened: Callable[..., Bundle]) -> None:
    with opened() as bundle:
        assert "".join(bundle.generate("Once", max_new_tokens=30, stream=True)) == (
            bundle.generate("Once", max_new_tokens=30).text
        )
        rows = {0: "", 1: ""}
        for row, piece in bundle.generate(PROMPTS[:2], max_new_tokens=30, stream=True):
            rows[row] += piece
        assert list(rows.values()) == [one.text for one in bundle.generate(PROMPTS[:2], max_new_tokens=30)]


# text streams


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


class Words:
    """As sentencepiece: a token brings its space, which the first of a text loses."""

    words = ["▁Once", "▁upon", "▁a", "time"]

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(self.words[i] for i in ids).replace("▁", " ").removeprefix(" ")


def test_a_stream_never_gives_half_a_character() -> None:
    text = "é🐈 end"
    stream = TextStream(Bytes(), list(b"prompt"), ())
    pieces = [stream.push(byte) for byte in text.encode()]
    assert "".join(pieces) + stream.close() == text
    assert all("\ufffd" not in piece for piece in pieces)
    assert [len(piece) for piece in pieces[:6]] == [0, 1, 0, 0, 0, 1]


def test_a_stream_that_ends_inside_a_character_shows_it_as_the_tokenizer_does() -> None:
    stream = TextStream(Bytes(), [], ())
    assert [stream.push(byte) for byte in "a🐈".encode()[:3]] == ["a", "", ""]
    assert stream.close() == b"\xf0\x9f".decode(errors="replace")


def test_a_word_after_the_prompt_keeps_its_space() -> None:
    stream = TextStream(Words(), [0], ())
    assert [stream.push(token) for token in (1, 2, 3)] == [" upon", " a", "time"]


def test_what_may_begin_a_stop_string_is_held_back_until_it_is_known() -> None:
    stream = TextStream(Bytes(), [], ["<end>"])
    assert [stream.push(byte) for byte in b"a<en b"] == ["a", "", "", "", "<en ", "b"]
    assert [stream.push(byte) for byte in b"c<end>more"] == ["c", *[""] * 9]
    assert stream.stopped and stream.text == "a<en bc" and stream.close() == ""
    late = TextStream(Bytes(), [], ["<end>"])
    assert [late.push(byte) for byte in b"a<e"] == ["a", "", ""]
    assert late.close() == "<e" and not late.stopped


# chats

CHAT = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "[{{ m.role }}]{% generation %}{{ m.content }}{% endgeneration %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def test_a_chat_is_what_the_template_makes_of_it(make_decoder_bundle: MakeBundle, tiny: Any) -> None:
    config = {"bos_token": {"content": "<s>"}, "chat_template": CHAT}
    with open_bundle(make_decoder_bundle(config=config)) as bundle:
        encoder = bundle.generator()
        ids = encoder.encode("hi", chat=True)[0].tolist()
        assert ids == [256, *byte_ids(tiny, "[user]hi\n[assistant]")]
        messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
        assert encoder.encode(messages, chat=True)[0].tolist() == [
            256,
            *byte_ids(tiny, "[system]s\n[user]hi\n[assistant]"),
        ]
        assert bundle.generate(messages, chat=True, max_new_tokens=4).prompt_tokens == len(
            "<[system]s\n[user]hi\n[assistant]"
        )
        with pytest.raises(UsageError, match="chat template refuses the messages: no tools"):
            bundle.generate([{"role": "tool", "content": ""}], chat=True)
        with pytest.raises(UsageError, match="message 0 has no role"):
            bundle.generate([{"content": "hi"}], chat=True)


def test_a_template_in_its_own_file_comes_first_and_runs_in_a_sandbox(tmp_path: Path) -> None:
    from runtime.encode.chat import render_chat

    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "from the config"}')
    messages = [{"role": "user", "content": "<b>"}]
    assert render_chat(tmp_path, messages) == "from the config"
    file = tmp_path / "chat_template.jinja"
    file.write_text("{{ messages[0] | tojson }}")
    assert render_chat(tmp_path, messages) == '{"role": "user", "content": "<b>"}'
    file.write_text("{{ messages.__class__.__mro__ }}{{ messages.append(1) }}")
    with pytest.raises(UsageError, match="chat template refuses the messages: access to attribute '__class__'"):
        render_chat(tmp_path, messages)
    file.write_text("{% for %}")
    with pytest.raises(BundleError, match="chat template cannot be read"):
        render_chat(tmp_path, messages)


ENDLESS = "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}"
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLED = "{% set x = namespace(t='ab') %}{% for i in range(60) %}{% set x.t = x.t ~ x.t %}{% endfor %}{{ x.t }}"


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ 1 / 0 }}", "fails on the messages: ZeroDivisionError: division by zero"),
        ("{{ range(10 ** 9) | list }}", "fails on the messages: OverflowError: Range too big"),
        (ENDLESS, "fails on the messages: RecursionError"),
        ("{{ 'x' * 10 ** 10 }}", "takes more than 256 MiB"),
        (DOUBLED, "takes more than 256 MiB|makes .* characters"),
        ("{{ 'x' | center(10 ** 10) }}{{ '%999999999999d' % 1 }}", "takes more than 256 MiB"),
        ("{{ 'x' * 2 ** 25 }}", "makes 33554432 characters, more than 16777216"),
    ],
)
def test_a_template_has_a_budget(template: str, problem: str, tmp_path: Path) -> None:
    from runtime.encode.chat import render_chat

    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(UsageError, match=problem):
        render_chat(tmp_path, [{"role": "user", "content": "hi"}])
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert render_chat(tmp_path, [{"role": "user", "content": "hi\n\u2028"}]) == "hi\n\u2028"


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (LOOPS, r"does not end with these messages within 0.5 s"),
        ("{{ 10 ** (10 ** 10) }}", "does not end with these messages|takes more than 256 MiB"),
    ],
)
def test_a_template_that_does_not_end_is_ended(
    template: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.encode.chat.SECONDS", 0.5)
    test_a_template_has_a_budget(template, problem, tmp_path)


@pytest.mark.parametrize(
    ("config", "template", "error"),
    [
        ({"chat_template": [{"name": [], "template": "x"}]}, None, UsageError),
        ({"chat_template": "x" * (2**20 + 1)}, None, BundleError),
        ({}, b"\xff\xfe", BundleError),
        ({}, b"{{ messages", BundleError),
    ],
)
def test_templates_that_are_none(
    config: dict[str, Any], template: bytes | None, error: type[Exception], tmp_path: Path
) -> None:
    from runtime.encode.chat import render_chat

    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (tmp_path / "chat_template.jinja").write_bytes(template)
    with pytest.raises(error, match=r"chat template|cannot be read"):
        render_chat(tmp_path, [{"role": "user", "content": "hi"}])


# refusals


@pytest.mark.parametrize(
    ("prompt", "settings", "problem"),
    [
        (
            "x" * 60,
            {"max_new_tokens": 10},
            "a prompt of 61 tokens and max_new_tokens 10 are more than .*context_length 64",
        ),
        ("x" * 80, {}, "a prompt of 81 tokens and max_new_tokens 1 are more than"),
        ("x", {"max_new_tokens": 0}, "max_new_tokens is 0: give 1 or more"),
        ("x", {"temperature": -1}, "temperature is -1: give 0"),
        ("x", {"top_p": 0.0}, "top_p is 0.0: give a number above 0"),
        ("x", {"min_p": 2.0}, "min_p is 2.0: give 0"),
        ("x", {"top_k": -1}, "top_k is -1: give 0 or more"),
        ("x", {"seed": -1}, "seed is -1"),
        ("x", {"repetition_penalty": 0.0}, "repetition_penalty is 0.0: give a number above 0"),
        ("x", {"stop": "end"}, "stop is 'end': give a list of texts"),
        ("x", {"stop": [""]}, "none of them empty"),
        ("x", {"temprature": 1}, "unknown setting 'temprature'; did you mean 'temperature'"),
        ([], {}, "no prompt"),
        ([3], {}, "a prompt is a text, not int"),
    ],
)
def test_calls_that_are_refused(opened: Callable[..., Bundle], prompt: Any, settings: Any, problem: str) -> None:
    with opened() as bundle, pytest.raises(UsageError, match=problem):
        bundle.generate(prompt, **settings)


def test_what_is_no_decoder_generates_nothing(image_bundle: Path, opened: Callable[..., Bundle], tiny: Any) -> None:
    with open_bundle(image_bundle) as bundle, pytest.raises(UsageError, match="generates no text: use predict"):
        bundle.generate("x")
    with opened() as bundle:
        with pytest.raises(UsageError, match=r"a decoder generates text: use generate\(prompt\)"):
            bundle.predict(["x"])
        with pytest.raises(BundleError, match="describes no key-value cache"):
            Decoder(bundle.session, None)
        with pytest.raises(BundleError, match=r"the graph has no past_key_values\.2\.key"):
            Decoder(bundle.session, tiny.kv_cache(layers=3))
        with pytest.raises(UsageError, match="has no chat template"):
            bundle.generate("x", chat=True)
    with pytest.raises(UsageError, match="it keeps no cache between calls"):
        Decoder(object(), KvCacheSpec(1, 1, 1))  # type: ignore[arg-type]
    assert runtime.__all__ == ["Bundle", "assert_passes", "open_bundle"]


def test_nan_is_refused_by_name(tiny: Any, make_decoder_bundle: MakeBundle) -> None:
    from runtime.metrics import NonFiniteOutputs

    root = make_decoder_bundle(noise=float("nan"))
    with open_bundle(root) as bundle, pytest.raises(NonFiniteOutputs, match="the model gives NaN after 2 tokens"):
        bundle.generate("x")
