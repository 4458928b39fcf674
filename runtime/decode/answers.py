"""Answers of encoder-decoders: scored against references, and generated greedily over an evaluation set.

References are read teacher-forced, all at once; answers are what the model writes by itself. With a reference model
both read the same batch, side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from runtime.backends import Feeds, Session
from runtime.bundle.columns import Array, Columns, count
from runtime.decode.generate import Answer, GeneratedText, Pieces, Request, TextStream, collect_results, generate_rows
from runtime.decode.kv_cache import EncodedDecoder
from runtime.decode.rules import find_rules
from runtime.decode.sampling import Sampling
from runtime.decode.scoring import TokenNumbers, measure_tokens, run_logits, split_batches, sum_tokens, vocab_size
from runtime.encode.preprocess import Preprocessor
from runtime.encode.seq2seq import DECODER_IDS, Seq2SeqEncoder
from runtime.encode.split import Split, split_samples
from runtime.errors import UsageError
from runtime.metrics.texts import pack_texts


@dataclass
class AnswerGenerator:
    """An encoder-decoder and what encodes its samples. Greedy answers depend on their batch by rounding alone."""

    decoder: EncodedDecoder
    encoder: Seq2SeqEncoder
    to_columns: Callable[[Any], dict[str, Any]] = dict
    """Makes columns of samples that a user has in hand."""

    def generate(self, samples: Any, request: Request) -> list[GeneratedText]:
        """Answer samples, all in one batch; errors as in `stream`."""
        return collect_results(self.stream(samples, request))

    def stream(self, samples: Any, request: Request) -> Pieces:
        """Yield (row, text) as soon as text is certain; a row's texts joined are its answer. Returns all answers.

        `samples`: what `to_columns` takes. One that is read in several parts (a recording in
        chunks) is answered part by part; the texts are joined as `join_texts` does, `max_new_tokens` are of each part,
        and a stop string ends the whole answer. UsageError, before anything runs, for samples that cannot be encoded
        and settings out of range; NonFiniteOutputs if the model gives NaN.
        """
        split = split_samples(self.encoder, self.to_columns(samples))
        firsts = np.flatnonzero(np.diff(split.samples, prepend=-1))
        pieces = self.stream_rows(split.columns, request, firsts)
        return pieces if len(firsts) == len(split.samples) else self._stream_parts(split, request, firsts, pieces)

    def _stream_parts(self, split: Split, request: Request, firsts: Array, pieces: Pieces) -> Pieces:
        """Yield and return what `stream` does, of samples in several parts. `pieces`: of the rows `firsts`.

        The parts of one number are a batch, so that a sample's texts come in their order.
        """
        texts, answers = [""] * len(firsts), [list[GeneratedText]() for _ in firsts]
        samples, number = np.arange(len(firsts)), 0
        while len(samples):
            results = yield from continue_texts(pieces, samples, texts)
            for sample, result in zip(samples, results, strict=True):
                answers[sample].append(result)
            number += 1
            ended = np.array([result.finish == "stop" for result in results])
            samples = samples[(split.rows_each[samples] > number) & ~ended]
            if len(samples):
                pieces = self.stream_rows(split.columns, request, firsts[samples] + number)
        return [join_results(parts) for parts in answers]

    def stream_rows(self, columns: Columns, request: Request, rows: Array | None = None) -> Pieces:
        """Answer some rows of columns (default: all), each in one part, as `stream` does."""
        feeds = self.encoder.source_feeds(columns, rows)
        target, n = self.encoder.target, len(next(iter(feeds.values())))
        room = target.most_tokens - len(target.start_tokens)
        n_new = min(request.max_new_tokens or room, room)
        if request.chat:
            raise UsageError("chat is of language models that continue a text; this model answers a text with another")
        penalty = request.repetition_penalty or target.repetition_penalty or 1.0
        sampling = Sampling(
            request.temperature, request.top_k or 0, request.top_p or 1.0, request.min_p or 0.0, penalty, request.seed
        )
        start = np.array(target.start_tokens, np.int64)
        answers = [Answer(start, TextStream(self.encoder.tokenizer, start.tolist(), request.stop)) for _ in range(n)]
        begin = partial(self.decoder.start, feeds, self.decoder.room(feeds, n_new))
        return generate_rows(begin, self.decoder.step, answers, n_new, target.end_tokens, sampling, find_rules(target))


def find_gap(before: str, after: str) -> str:
    """Return what stands between two texts that follow each other: a space, unless one of them has it or is empty."""
    joined = not before or not after or before[-1].isspace() or after[0].isspace()
    return "" if joined else " "


def join_texts(texts: Sequence[str]) -> str:
    """Return texts one after another, with a space between two of them."""
    whole = ""
    for text in texts:
        whole += find_gap(whole, text) + text
    return whole


def continue_texts(pieces: Pieces, samples: Array, texts: list[str]) -> Pieces:
    """Yield (sample, text) for (row, text), where each row goes on after its sample's text; return what `pieces` does.

    `samples`: the number of each row's sample. `texts`: of each sample so far, which grow.
    """
    begun = set[int]()
    while True:
        try:
            row, piece = next(pieces)
        except StopIteration as end:
            results: list[GeneratedText] = end.value
            return results
        sample = int(samples[row])
        piece = piece if sample in begun else find_gap(texts[sample], piece) + piece
        begun.add(sample)
        texts[sample] += piece
        yield sample, piece


def join_results(parts: Sequence[GeneratedText]) -> GeneratedText:
    """Return the answer to a sample of those to its parts; its length ended it where it ended any of them."""
    ends = [part.finish for part in parts]
    return GeneratedText(
        join_texts([part.text for part in parts]),
        tuple(token for part in parts for token in part.token_ids),
        "length" if "length" in ends else ends[-1],
        parts[0].prompt_tokens,
    )


def answer_encoder(encoder: Preprocessor) -> Seq2SeqEncoder:
    """Return the encoder, if it is an encoder-decoder's; UsageError otherwise."""
    if not isinstance(encoder, Seq2SeqEncoder):
        raise UsageError(f"an encoder-decoder needs preprocess kind: seq2seq, not {encoder.spec.kind}")
    return encoder


def score_answers(
    session: Session,
    encoder: Preprocessor,
    columns: Columns,
    batch_size: int = 32,
    reference_session: Session | None = None,
) -> dict[str, Array]:
    """Return for each sample, in their order, sums over its reference's predicted tokens, and the model's own answer.

    {"nll": float64 [N] cross-entropies in nats, "n_tokens": int64 [N], "answer": int32 [N, W] code points of the greedy
    answer, filled up with -1} and, with a reference model, "kl", "agree" and "reference_nll" as
    `runtime.decode.scoring.score` has them. Of a sample that is read in several parts the answers are joined; which of
    the reference's tokens are of which part is not known, so that its sums are 0, of 0 tokens. UsageError for samples
    that do not fit, BundleError for a graph that gives no logits.
    """
    if batch_size < 1:
        raise UsageError(f"batch_size is {batch_size}, below 1")
    seq2seq = answer_encoder(encoder)
    count(columns)
    by_sample = seq2seq.references(columns)
    split = split_samples(seq2seq, columns)
    sessions = [session] if reference_session is None else [session, reference_session]
    short = next((row for row, ids in enumerate(seq2seq.predicted(by_sample)) if not len(ids)), None)
    if short is not None:
        raise UsageError(f"sample {short}: its reference has no token to predict")
    measured: list[TokenNumbers] = [{}] * len(by_sample)
    generator = AnswerGenerator(EncodedDecoder(session, seq2seq.target.start_tokens), seq2seq)
    answers: list[list[str]] = [[] for _ in by_sample]
    vocab = max(map(vocab_size, sessions)) or seq2seq.vocab_size or 1
    references = [by_sample[sample] for sample in split.samples]
    for rows in split_batches(references, batch_size, vocab):  # parts of a sample keep their order: it sorts stably
        scored = [row for row in rows if split.rows_each[split.samples[row]] == 1]
        for row, logits in _score_batch(sessions, seq2seq, split.columns, references, scored):
            targets = references[row][len(seq2seq.target.start_tokens) :]
            measured[split.samples[row]] = measure_tokens(logits, targets)
        results = collect_results(generator.stream_rows(split.columns, Request(), np.array(rows)))
        for row, result in zip(rows, results, strict=True):
            answers[split.samples[row]].append(result.text)
    return {
        **sum_tokens(measured, reference_session is not None),
        "answer": pack_texts([join_texts(texts) for texts in answers]),
    }


def _score_batch(
    sessions: Sequence[Session],
    encoder: Seq2SeqEncoder,
    columns: Columns,
    references: Sequence[Array],
    rows: Sequence[int],
) -> Iterator[tuple[int, list[Array]]]:
    """Yield (row, each model's logits [t, vocab] where a token of its reference is predicted)."""
    if not rows:
        return
    source, batch = encoder.source_feeds(columns, np.array(rows)), [references[row] for row in rows]
    all_logits = [
        run_logits(session, replace(encoder, inputs=session.inputs).feeds(source, batch), DECODER_IDS)
        for session in sessions
    ]
    sizes = {logits.shape[-1] for logits in all_logits}
    if len(sizes) > 1:
        raise UsageError(f"the models' vocabularies differ: {', '.join(map(str, sorted(sizes)))} logits")
    first = len(encoder.target.start_tokens) - 1
    for place, row in enumerate(rows):
        yield row, [logits[place, first : len(references[row]) - 1] for logits in all_logits]


def repeat_tokens(feeds: Feeds, length: int) -> Feeds:
    """Return the encoder's inputs with each text's own tokens repeated or cut to `length`; other inputs as they are."""
    if "input_ids" not in feeds:
        return feeds
    ids, mask = feeds["input_ids"], feeds["attention_mask"].astype(bool)
    stretched = np.stack([np.resize(row[keep], length) for row, keep in zip(ids, mask, strict=True)])
    return {**feeds, "input_ids": stretched, "attention_mask": np.ones_like(stretched)}
