"""Scoring texts: the rule, against the model in float64 token by token; encoding, packing, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.backends import Session
from runtime.bundle.tensors import TensorSpec
from runtime.decode import scoring
from runtime.decode.scoring import score
from runtime.encode.language import LanguageEncoder, LanguagePreprocess, make_language_encoder
from runtime.encode.preprocess import TensorPreprocess, make_preprocessor, spec_from_dict, spec_to_dict
from runtime.errors import BundleError, UsageError
from runtime.tasks.metrics import METRICS
from runtime.tasks.predict import run_samples

BOS = 256
BOTH = pytest.mark.parametrize("shared", [False, True], ids=["plain", "shared"])


@pytest.fixture
def session(tiny: Any, tmp_path: Path) -> Session:
    opened: Session = tiny.open_onnx(tiny.decoder_model(tmp_path / "model.onnx"))
    return opened


def encoder(tiny: Any, tmp_path: Path, session: Session, vocab: int | None = 258, **spec: Any) -> LanguageEncoder:
    folder = tiny.write_byte_tokenizer(tmp_path / "tokenizer")
    made = LanguagePreprocess(**{"max_length": 16, "bos_token_id": BOS, **spec})
    return make_language_encoder(made, session.inputs, folder, vocab)


def slow_nll(logits: np.ndarray, ids: list[int]) -> float:
    """Nats of ids[1:], each by the whole softmax of the logits before it."""
    total = 0.0
    for place, token in enumerate(ids[1:]):
        row = logits[place]
        total -= row[token] - row.max() - float(np.log(sum(np.exp(x - row.max()) for x in row)))
    return total


# the rule


@BOTH
def test_sums_are_those_of_the_definition(tiny: Any, tmp_path: Path, shared: bool) -> None:
    session = tiny.open_onnx(tiny.decoder_model(tmp_path / "model.onnx", shared=shared))
    texts = ["ab", "the cat sat on the mat, long enough to be cut", "x", "é"]
    found = score(session, encoder(tiny, tmp_path, session), {"text": texts, "label": np.arange(4)}, batch_size=3)
    own = encoder(tiny, tmp_path, session)
    for row, text in enumerate(texts):
        ids = [BOS, *own.tokens(text)][:16]
        assert found["n_tokens"][row] == len(ids) - 1
        want = slow_nll(tiny.decoder_logits(tiny.decoder_weights(), ids), ids)
        assert found["nll"][row] == pytest.approx(want, abs=1e-4)
    assert found["n_tokens"].dtype == np.int64 and found["nll"].dtype == np.float64
    assert found.keys() == {"nll", "n_tokens", "part_nll", "part_n_tokens"}


def test_perplexity_is_exp_of_all_nats_over_all_tokens(tiny: Any, tmp_path: Path, session: Session) -> None:
    columns = {"text": ["ab", "longer text", "x"]}
    found = score(session, encoder(tiny, tmp_path, session), columns)
    nats = found["nll"].sum() / found["n_tokens"].sum()
    assert METRICS["nll"].compute(found, None) == pytest.approx(nats)
    assert METRICS["perplexity"].compute(found, None) == pytest.approx(np.exp(nats))
    assert nats != pytest.approx(np.mean(found["nll"] / found["n_tokens"]))


@BOTH
def test_beside_a_reference(tiny: Any, tmp_path: Path, session: Session, shared: bool) -> None:
    other = tiny.open_onnx(tiny.decoder_model(tmp_path / "other.onnx", shared=shared, noise=0.3))
    texts = ["the cat", "a dog ran far", "one"]
    own = encoder(tiny, tmp_path, session)
    found = score(other, replace(own, inputs=other.inputs), {"text": texts}, 2, session)
    alone = score(session, own, {"text": texts}, 2)
    np.testing.assert_allclose(found["reference_nll"], alone["nll"], atol=1e-9)
    weights = tiny.decoder_weights()
    noisy = {**weights, "head": weights["head"] + 0.3 * np.random.default_rng(99).normal(size=weights["head"].shape)}
    for row, text in enumerate(texts):
        ids = [BOS, *own.tokens(text)]
        p, q = (softmax(tiny.decoder_logits(w, ids)[:-1]) for w in (weights, noisy))
        assert found["kl"][row] == pytest.approx((p * np.log(p / q)).sum(), abs=1e-4)
        assert found["agree"][row] == (p.argmax(1) == q.argmax(1)).sum()


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("part", [3, 5, 64])
def test_sums_of_parts_are_those_of_their_tokens(tiny: Any, tmp_path: Path, session: Session, part: int) -> None:
    own, texts = encoder(tiny, tmp_path, session), ["the cat sat", "x", "a dog ran"]
    found = score(session, own, {"text": texts}, 2, session, part=part)
    assert found["part_nll"].shape == (3, -(-int(found["n_tokens"].max()) // part))
    for row, text in enumerate(texts):
        ids = [BOS, *own.tokens(text)]
        logits = tiny.decoder_logits(tiny.decoder_weights(), ids)
        for number, start in enumerate(range(0, len(ids) - 1, part)):
            piece = ids[start : start + part + 1]
            assert found["part_nll"][row, number] == pytest.approx(slow_nll(logits[start:], piece), abs=1e-4)
            assert found["part_n_tokens"][row, number] == found["part_agree"][row, number] == len(piece) - 1
    for name in ("nll", "n_tokens", "agree", "kl", "reference_nll"):
        np.testing.assert_allclose(found[f"part_{name}"].sum(axis=1), found[name])


def test_samples_without_a_scored_token_have_sums_of_nothing() -> None:
    with_reference = {"nll", "n_tokens", "reference_nll", "kl", "agree"}
    for reference, names in ((False, {"nll", "n_tokens"}), (True, with_reference)):
        found = scoring.sum_tokens([{}, {}], reference)
        assert found.keys() == names | {f"part_{name}" for name in names}
        assert all(not values.any() and len(values) == 2 for values in found.values())
        assert found["part_nll"].shape == (2, 1)


# identities


def test_a_model_beside_itself_differs_in_nothing(tiny: Any, tmp_path: Path, session: Session) -> None:
    own = encoder(tiny, tmp_path, session)
    found = score(session, own, {"text": tiny.stories}, 4, session)
    assert (found["kl"] == 0).all()
    assert (found["agree"] == found["n_tokens"]).all()
    assert (found["nll"] == found["reference_nll"]).all()
    baseline = {"nll": found["nll"], "n_tokens": found["n_tokens"]}
    for name in ("kl_token", "token_agreement"):
        assert METRICS[name].compute(baseline, baseline) == METRICS[name].ideal
        assert METRICS[name].compute(found, baseline) == METRICS[name].ideal


def test_logits_are_reduced_in_pieces_of_any_size() -> None:
    rng = np.random.default_rng(0)
    logits, targets = rng.normal(size=(2, 9, 258)).astype(np.float32), rng.integers(0, 258, 9)
    whole = scoring.measure_tokens(logits, targets)
    for at_once in (1, 3 * 258):
        pieces = scoring.measure_tokens(logits, targets, at_once=at_once)
        assert all(np.allclose(pieces[name], whole[name], rtol=1e-12) for name in whole)


@pytest.mark.parametrize(
    ("other", "theirs", "divergence"),
    [(-np.inf, -np.inf, "finite"), (0.0, -np.inf, "finite"), (-np.inf, 0.0, np.inf), (np.nan, 0.0, np.nan)],
    ids=["neither says it", "the reference never says it", "the model never says it", "broken"],
)
def test_tokens_that_a_model_never_says(other: float, theirs: float, divergence: Any) -> None:
    logits = np.random.default_rng(0).normal(size=(2, 3, 5)).astype(np.float32)
    logits[0, 1, 4], logits[1, 1, 4] = other, theirs
    found = scoring.measure_tokens(list(logits), np.zeros(3, np.int64))["kl"]
    assert np.isfinite(found[[0, 2]]).all()
    assert np.isfinite(found[1]) if divergence == "finite" else np.array_equal(found[1], divergence, equal_nan=True)


def test_logits_of_a_batch_have_a_bound() -> None:
    widths = [16, 5, 9, 16, 2, 40]
    batches = list(scoring.split_batches([np.zeros(width) for width in widths], 4, 258, most_bytes=4 * 258 * 32))
    assert sorted(row for batch in batches for row in batch) == list(range(6))
    assert all(len(batch) == 1 or len(batch) * max(widths[row] for row in batch) <= 32 for batch in batches)


@BOTH
def test_a_long_text_is_read_in_pieces(tiny: Any, tmp_path: Path, shared: bool) -> None:
    session = tiny.open_onnx(tiny.decoder_model(tmp_path / "model.onnx", shared=shared))
    own, rows = encoder(tiny, tmp_path, session), [np.arange(n) for n in (3, 16, 9)]
    for most in (4 * 258, 4 * 258 * 7):
        found: dict[int, list[tuple[slice, np.ndarray]]] = {}
        for row, places, (logits,) in scoring.logit_pieces([session], own, rows, 2, most_bytes=most):
            found.setdefault(row, []).append((places, logits.copy()))
        assert max(len(logits) for pieces in found.values() for _, logits in pieces) * 4 * 258 <= most
        for row, pieces in found.items():
            whole = tiny.decoder_logits(tiny.decoder_weights(), rows[row].tolist())[: len(rows[row]) - 1]
            assert [place for places, _ in pieces for place in range(len(whole))[places]] == [*range(len(whole))]
            np.testing.assert_allclose(np.concatenate([logits for _, logits in pieces]), whole, atol=1e-4)


def test_neither_the_order_nor_the_batch_size_nor_the_chunks_change_the_sums(
    tiny: Any, tmp_path: Path, session: Session
) -> None:
    own = encoder(tiny, tmp_path, session)
    found = score(session, own, {"text": tiny.stories}, 4)
    back = score(session, own, {"text": tiny.stories[::-1]}, 4)
    assert (found["nll"] == back["nll"][::-1]).all()
    for changed in (1, 100):
        np.testing.assert_allclose(score(session, own, {"text": tiny.stories}, changed)["nll"], found["nll"], atol=1e-4)


def test_tokens_score_as_their_text_does(tiny: Any, tmp_path: Path, session: Session) -> None:
    own = encoder(tiny, tmp_path, session)
    ids = own.sequences({"text": ["ab", "cde"]})
    assert (score(session, own, {"input_ids": ids})["nll"] == score(session, own, {"text": ["ab", "cde"]})["nll"]).all()
    found = run_samples(session, own, "text-generation", {"input_ids": np.array([[BOS, 3, 4]]), "label": [0]})
    assert found["n_tokens"].tolist() == [2]


def test_masked_tokens_are_neither_summed_nor_counted(tiny: Any, tmp_path: Path, session: Session) -> None:
    """A mask and what it leaves out make up the whole, also where a sample is cut; one that leaves out all gives 0."""
    own = encoder(tiny, tmp_path, session)
    ids = [*own.sequences({"text": ["abcd", "efg"]}), np.arange(20) + 60]  # the last one is cut at 16
    rng = np.random.default_rng(0)
    masks = [rng.integers(0, 2, len(row)).astype(np.uint8) for row in ids]
    masks[1][:] = 0
    found, rest, whole = (
        score(session, own, {"input_ids": ids, **more}, 4, session)
        for more in ({"loss_mask": masks}, {"loss_mask": [1 - mask for mask in masks]}, {})
    )
    for name in ("nll", "n_tokens", "agree", "reference_nll"):
        np.testing.assert_allclose(found[name] + rest[name], whole[name], rtol=1e-12)
    assert found["n_tokens"].tolist() == [np.count_nonzero(mask[1:16]) for mask in masks]
    assert found["nll"][1] == 0 and METRICS["nll"].compute(found, None) == pytest.approx(
        found["nll"].sum() / found["n_tokens"].sum()
    )


@pytest.mark.parametrize(
    ("mask", "why"),
    [
        ([1, 1], "column 'loss_mask', sample 0: give 0 or 1 for each of 3 tokens"),
        ([0, 2, 1], "column 'loss_mask', sample 0: give 0 or 1 for each of 3 tokens"),
        ([1, 0, 0], "marks no token that is predicted: there is nothing to score"),
    ],
)
def test_a_mask_that_is_none(tiny: Any, tmp_path: Path, session: Session, mask: list[int], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        score(session, encoder(tiny, tmp_path, session), {"input_ids": [[BOS, 3, 4]], "loss_mask": [mask]})


# encoding


def test_a_text_is_encoded_without_special_tokens_prefixed_and_cut(tiny: Any, tmp_path: Path, session: Session) -> None:
    own = encoder(tiny, tmp_path, session, max_length=4)
    plain = own.tokens("abcdef")
    assert [ids.tolist() for ids in own.sequences({"text": ["abcdef", "a"]})] == [[BOS, *plain[:3]], [BOS, plain[0]]]
    bare = encoder(tiny, tmp_path, session, max_length=4, bos_token_id=None)
    assert bare.sequences({"text": ["abcdef"]})[0].tolist() == plain[:4]
    feeds = own.encode({"text": ["abcdef", "a"]}, np.array([1, 0]))
    assert feeds["input_ids"].tolist() == [[BOS, plain[0], 0, 0], [BOS, *plain[:3]]]
    assert feeds["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert feeds["past_key_values.1.value"].shape == (2, 2, 0, 8)
    assert feeds.keys() == {spec.name for spec in session.inputs}


def test_positions_are_made_where_a_model_takes_them(tiny: Any, tmp_path: Path, session: Session) -> None:
    inputs = tuple(TensorSpec(name, "int64", ("b", "s")) for name in ("input_ids", "attention_mask", "position_ids"))
    own = replace(encoder(tiny, tmp_path, session), inputs=inputs)
    assert own.encode({"text": ["ab", ""]})["position_ids"].tolist() == [[0, 1, 2], [0, 0, 0]]


def test_packed_texts_are_windows_of_one_text(tiny: Any, tmp_path: Path, session: Session) -> None:
    own = encoder(tiny, tmp_path, session, pack=6)
    samples = own.samples({"text": ["abcd", "efgh", "ij"], "label": [1, 2, 3]})
    whole = own.tokens("abcd\n\nefgh\n\nij")
    assert samples["input_ids"].tolist() == [[BOS, *whole[:5]], [BOS, *whole[5:10]]]
    assert own.samples(samples) is samples
    bare = encoder(tiny, tmp_path, session, pack=6, bos_token_id=None)
    assert bare.samples({"text": ["abcd", "efgh"]})["input_ids"].tolist() == [whole[:6]]
    found = score(session, own, {"text": ["abcd", "efgh", "ij"]})
    assert found["n_tokens"].tolist() == [5, 5]
    assert (score(session, own, samples)["nll"] == found["nll"]).all()
    with pytest.raises(UsageError, match=r"3 tokens, fewer than one window of 5 \(pack: 6\)"):
        own.samples({"text": ["abc"]})
    with pytest.raises(UsageError, match="cut into windows first"):
        own.encode({"text": ["abc"]})


def test_the_spec_is_kept_in_a_manifest() -> None:
    spec = LanguagePreprocess(max_length=99, bos_token_id=1, pack=64)
    assert spec_from_dict(spec_to_dict(spec)) == spec
    assert spec_to_dict(spec)["kind"] == "language"


# refusals


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ({"max_length": 1}, "max_length is 1, below 2"),
        ({"pack": 1}, "pack is 1: give 2 to max_length, 512"),
        ({"pack": 513}, "pack is 513"),
        ({"bos_token_id": -1}, "bos_token_id is -1: give 0 to 2147483647"),
        ({"tokenizer": "a/b"}, "tokenizer is 'a/b'"),
    ],
)
def test_specs_that_are_refused(spec: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        LanguagePreprocess(**spec)


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"text": ["ab", ""]}, "sample 1 has one token, and none to predict"),
        ({"text": []}, "no samples"),
        ({"text": [3]}, "sample 0: expected a text"),
        ({"image": [1]}, "no columns"),
        (
            {"input_ids": np.array([[BOS, 300]])},
            "sample 0: token id 300 is beyond the model's vocabulary of 258 tokens",
        ),
        ({"input_ids": [np.array([1, -1])]}, "token id -1 is beyond"),
        ({"input_ids": np.zeros((2, 3))}, r"a sample is float64 \(3,\), not whole numbers"),
        ({"input_ids": [np.zeros(0, np.int64)]}, "sample 0: a text without any token"),
    ],
)
def test_samples_that_are_refused(
    tiny: Any, tmp_path: Path, session: Session, columns: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UsageError, match=problem):
        score(session, encoder(tiny, tmp_path, session), columns)


def test_models_that_are_refused(tiny: Any, tmp_path: Path, session: Session) -> None:
    own = encoder(tiny, tmp_path, session)
    hidden = tiny.open_onnx(tiny.text_model(tmp_path / "hidden.onnx"))
    with pytest.raises(BundleError, match="has an output 'logits'; this has hidden"):
        score(hidden, own, {"text": ["ab"]})
    pooled = tiny.open_onnx(tiny.text_model(tmp_path / "pooled.onnx", "logits"))
    with pytest.raises(BundleError, match="scoring needs them at every token"):
        score(pooled, own, {"input_ids": np.array([[1, 2, 3]])})
    with pytest.raises(UsageError, match="needs preprocess kind: language, not tensor"):
        score(session, make_preprocessor(TensorPreprocess(), session.inputs), {"text": ["ab"]})
    with pytest.raises(UsageError, match="batch_size is 0"):
        score(session, own, {"text": ["ab"]}, 0)
    with pytest.raises(UsageError, match="the model has no output 'best'; its outputs: logits, "):
        session.run(own.encode({"text": ["ab"]}), ("best",))


def test_inputs_that_are_refused(tiny: Any, tmp_path: Path) -> None:
    folder = tiny.write_byte_tokenizer(tmp_path)
    ids = TensorSpec("input_ids", "int64", ("b", "s"))

    def make(*inputs: TensorSpec, where: Path | None = folder) -> LanguageEncoder:
        return make_language_encoder(LanguagePreprocess(), inputs, where)

    with pytest.raises(UsageError, match="this one takes input_ids, x: export"):
        make(ids, TensorSpec("x", "float32", ("b", 3)))
    with pytest.raises(UsageError, match="input 'input_ids' has a fixed batch or length"):
        make(TensorSpec("input_ids", "int64", (1, "s")))
    with pytest.raises(UsageError, match="give the model's folder"):
        make(ids, where=None)
    past = make(ids, TensorSpec("past_key_values.0.key", "float32", ("b", "heads", "t", 8)))
    with pytest.raises(UsageError, match=r"cache input 'past_key_values.0.key' .* all sizes but one must be numbers"):
        past.encode({"text": ["ab"]})


def test_a_candidate_that_was_not_scored_beside_the_baseline_has_no_distance(tiny: Any) -> None:
    ours = {"nll": np.array([1.0, 2]), "n_tokens": np.array([3, 4])}
    with pytest.raises(UsageError, match="the outputs hold no 'kl'"):
        METRICS["kl_token"].compute(ours, {**ours, "nll": np.array([1.0, 3])})
