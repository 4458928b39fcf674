"""Answers of encoder-decoders: scored against references, and generated greedily over an evaluation set.

References are read teacher-forced, all at once; answers are what the model writes by itself. With a reference model
both read the same batch, side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from runtime.backends import Feeds, Session
from runtime.bundle.columns import Array, Columns, count
from runtime.decode.generate import Answer, Pieces, Request, Result, TextStream, collect_results, generate_rows
from runtime.decode.kv_cache import EncodedDecoder
from runtime.decode.rules import find_rules
from runtime.decode.sampling import Sampling
from runtime.decode.scoring import reduce_sample, run_logits, split_batches, vocab_size
from runtime.encode.preprocess import Preprocessor
from runtime.encode.seq2seq import DECODER_IDS, Seq2SeqEncoder
from runtime.errors import UsageError
from runtime.metrics.texts import pack_texts
from runtime.tasks.base import Task


@dataclass
class AnswerGenerator:
    """An encoder-decoder and what encodes its samples. Greedy answers depend on their batch by rounding alone."""

    decoder: EncodedDecoder
    encoder: Seq2SeqEncoder
    task: Task

    def generate(self, samples: Any, request: Request) -> list[Result]:
        """Answer samples, all in one batch; errors as in `stream`."""
        return collect_results(self.stream(samples, request))

    def stream(self, samples: Any, request: Request) -> Pieces:
        """Yield (row, text) as soon as text is certain; a row's texts joined are its answer. Returns the `Result`s.

        `samples`: a list of what the task's model reads, or columns. UsageError, before anything runs, for samples that
        cannot be encoded and settings out of range; NonFiniteOutputs if the model gives NaN.
        """
        return self.stream_rows(self.task.to_columns(samples), request)

    def stream_rows(self, columns: Columns, request: Request, rows: Array | None = None) -> Pieces:
        """Answer some rows of columns (default: all), as `stream` does."""
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
    `runtime.decode.scoring.score` has them. UsageError for samples that do not fit, BundleError for a graph that gives
    no logits.
    """
    if batch_size < 1:
        raise UsageError(f"batch_size is {batch_size}, below 1")
    seq2seq = answer_encoder(encoder)
    count(columns)
    references = seq2seq.references(columns)
    sessions = [session] if reference_session is None else [session, reference_session]
    names = ("nll", "kl", "reference_nll")[: 1 if reference_session is None else 3]
    sums: dict[str, Array] = {name: np.zeros(len(references)) for name in names}
    sums |= {"n_tokens": np.array([len(ids) for ids in seq2seq.predicted(references)], np.int64)}
    sums |= {"agree": np.zeros(len(references), np.int64)} if reference_session is not None else {}
    short = np.flatnonzero(sums["n_tokens"] < 1)
    if short.size:
        raise UsageError(f"sample {short[0]}: its reference has no token to predict")
    generator = AnswerGenerator(EncodedDecoder(session, seq2seq.target.start_tokens), seq2seq, Task())
    answers = [""] * len(references)
    vocab = max(map(vocab_size, sessions)) or seq2seq.vocab_size or 1
    for rows in split_batches(references, batch_size, vocab):
        for row, logits in _score_batch(sessions, seq2seq, columns, references, rows):
            targets = references[row][len(seq2seq.target.start_tokens) :]
            for name, value in reduce_sample(logits, targets).items():
                sums[name][row] = value
        results = collect_results(generator.stream_rows(columns, Request(), np.array(rows)))
        for row, result in zip(rows, results, strict=True):
            answers[row] = result.text
    return {**sums, "answer": pack_texts(answers)}


def _score_batch(
    sessions: Sequence[Session],
    encoder: Seq2SeqEncoder,
    columns: Columns,
    references: Sequence[Array],
    rows: Sequence[int],
) -> Iterator[tuple[int, list[Array]]]:
    """Yield (sample, each model's logits [t, vocab] where a token of its reference is predicted)."""
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
