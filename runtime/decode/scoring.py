"""A language model over evaluation texts: each token's cross-entropy, and how far it is from a reference model's.

Batches are sorted by length and reduced at once: the logits of a batch, [n, t, vocab], are never kept. A text whose
logits are too many is read in pieces, each upon what the model keeps of those before. With a reference both models read
the same piece, side by side.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from runtime.backends import Feeds, SeeingSession, Session, no_features
from runtime.backends.onnxruntime_cpu import OnnxRuntimeSession
from runtime.bundle.columns import Array, Columns, count
from runtime.bundle.manifest import find_cache
from runtime.clock.machine import count_cores
from runtime.encode.language import IDS, LOSS_MASK, MASK, POSITIONS, LanguageEncoder
from runtime.encode.preprocess import Preprocessor
from runtime.errors import BundleError, UsageError
from runtime.metrics.language import PART, PARTS
from runtime.progress import Progress, no_progress

LOGITS_BYTES = 128 << 20
"""Of one model's at once. Of Qwen2.5-Coder 0.5B 512 tokens in 2 pieces take 0.97 of the time of one, in 4 1.05."""
REDUCED_AT_ONCE = 1 << 20
"""Logits whose exponentials are taken at once."""
REFERENCE = "reference_"
"""In the name of a sum of the reference's."""
TokenNumbers = dict[str, Array]
"""What `score` sums up, by name, of each counted token of a sample [t]."""
Recall = Callable[[int, slice], Array]
"""What a model has made of samples that it has read: the logits [places, vocab] after these tokens of a sample."""


def score(
    session: Session,
    encoder: Preprocessor,
    columns: Columns,
    batch_size: int = 32,
    reference: Session | Recall | None = None,
    progress: Progress = no_progress,
    part: int = PART,
) -> dict[str, Array]:
    """Return sums over each sample's predicted tokens, in the samples' order.

    {"nll": float64 [N] cross-entropies in nats, "n_tokens": int64 [N]} and, with a reference, which reads beside the
    model or has read, {"kl": float64 [N] KL(reference || model) in nats, "agree": int64 [N] tokens for which both find
    the same one most likely, "reference_nll": float64 [N]}; each also of parts of `part` tokens, "part_nll" [N, P], 0
    where a sample has no more. Samples are what `LanguageEncoder.samples` makes of the columns; where these have a
    "loss_mask", only the tokens that it marks are summed and counted. The result does not depend on the samples' order.
    Of a model that also sees, a column of its pixels' name holds those of each sample's images.
    UsageError for samples that do not fit, a sample of one token, and models whose vocabularies differ; BundleError for
    a graph without logits [batch, sequence, vocab].
    """
    language = language_encoder(encoder)
    samples = language.samples(columns)
    count({name: column for name, column in samples.items() if name in ("text", IDS, LOSS_MASK)})
    sequences, masks = language.sequences(samples), language.loss_masks(samples)
    short = next((row for row, ids in enumerate(sequences) if len(ids) < 2), None)
    if short is not None:
        raise UsageError(f"sample {short} has one token, and none to predict: leave it out, or join texts with pack")
    targets = count_targets(sequences, masks)
    if not targets.any():
        raise UsageError(f"column '{LOSS_MASK}' marks no token that is predicted: there is nothing to score")
    sessions = [session] if reference is None or callable(reference) else [session, reference]
    pieces: list[list[TokenNumbers]] = [[] for _ in sequences]
    for row, places, logits in logit_pieces(sessions, language, sequences, batch_size, progress, columns=samples):
        counted = None if masks is None else masks[row][1:][places]
        if callable(reference):
            logits = [*logits, reference(row, places)]
        pieces[row].append(measure_tokens(logits, sequences[row][1:][places], counted))
    return sum_tokens([_join_numbers(of_row) for of_row in pieces], reference is not None, part)


def sum_tokens(rows: Sequence[TokenNumbers], with_reference: bool, part: int = PART) -> dict[str, Array]:
    """Return `score`'s sums of samples of which `measure_tokens` gave the numbers; {}: no token of it is scored."""
    n_tokens = np.array([len(row["nll"]) if row else 0 for row in rows], np.int64)
    n_parts = max(-(-int(n_tokens.max(initial=0)) // part), 1)
    held, by_part = np.arange(n_parts * part) < n_tokens[:, None], (len(rows), n_parts, part)
    sums = {"n_tokens": n_tokens, f"{PARTS}n_tokens": held.reshape(by_part).sum(axis=2)}
    names = ("nll", f"{REFERENCE}nll", "kl", "agree") if with_reference else ("nll",)
    for name in names:
        dtype = np.int64 if name == "agree" else np.float64
        values = np.zeros(held.shape, dtype)
        values[held] = np.concatenate([np.zeros(0, dtype), *(row[name] for row in rows if row)])
        sums[name] = np.array([row[name].sum() if row else 0 for row in rows], dtype)
        sums[f"{PARTS}{name}"] = values.reshape(by_part).sum(axis=2)
    return sums


def split_sides(sums: Mapping[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return (the reference's, the model's own) of the sums that `score` gives with a reference."""
    own = {name: values for name, values in sums.items() if REFERENCE not in name}
    reference = {name.replace(REFERENCE, ""): values for name, values in sums.items() if REFERENCE in name}
    return {**reference, **{name: own[name] for name in own if name.endswith("n_tokens")}}, own


def count_targets(sequences: Sequence[Array], masks: Sequence[Array] | None) -> Array:
    """Count the predicted tokens of each sample, int64 [N]: all but the first, or those of them that its mask marks."""
    if masks is None:
        return np.array([len(ids) - 1 for ids in sequences], np.int64)
    return np.array([np.count_nonzero(mask[1:]) for mask in masks], np.int64)


def language_encoder(encoder: Preprocessor) -> LanguageEncoder:
    """Return the encoder, if it is a language model's; UsageError otherwise."""
    if not isinstance(encoder, LanguageEncoder):
        raise UsageError(f"text-generation needs preprocess kind: language, not {encoder.spec.kind}")
    return encoder


def logit_pieces(
    sessions: Sequence[Session],
    encoder: LanguageEncoder,
    sequences: Sequence[Array],
    batch_size: int,
    progress: Progress = no_progress,
    most_bytes: int = LOGITS_BYTES,
    columns: Columns | None = None,
) -> Iterator[tuple[int, slice, list[Array]]]:
    """Yield (sample, places, each model's logits [places, vocab] after these of its tokens), longest samples first.

    Places of a sample come in order; the last token is only predicted: the models do not read it. Logits last until the
    next. `columns`: of the samples, where there may be images; a text with some is read whole.
    """
    if batch_size < 1:
        raise UsageError(f"batch_size is {batch_size}, below 1")
    readers = [_Reader(session, replace(encoder, inputs=session.inputs), columns or {}) for session in sessions]
    vocab = max(vocab_size(session) for session in sessions) or encoder.vocab_size or 1
    batches = list(split_batches(sequences, batch_size, vocab, most_bytes))
    for number in progress(range(len(batches)), "batches of texts"):
        rows = batches[number]
        batch = [sequences[row][:-1] for row in rows]
        n_bytes = 4 * len(batch) * len(batch[0]) * vocab  # of several rows no more than `most_bytes`
        whole = not all(reader.past for reader in readers) or any(reader.find_images(rows) for reader in readers)
        for places in cut_evenly(len(batch[0]), 1 if whole else -(-n_bytes // most_bytes)):
            all_logits = [reader.read(batch, places, rows) for reader in readers]
            sizes = {logits.shape[-1] for logits in all_logits}
            if len(sizes) > 1:
                raise UsageError(f"the models' vocabularies differ: {', '.join(map(str, sorted(sizes)))} logits")
            for row, tokens, *of_row in zip(rows, batch, *all_logits, strict=True):
                own = slice(places.start, min(places.stop, len(tokens)))
                yield row, own, [logits[: own.stop - own.start] for logits in of_row]


def cut_evenly(n: int, n_pieces: int) -> list[slice]:
    """Return `n` places as pieces, none longer than another by more than one."""
    ends = [n * piece // n_pieces for piece in range(n_pieces + 1)]
    return [slice(start, stop) for start, stop in itertools.pairwise(ends)]


class _Reader:
    """A session that reads batches of texts: whole, or a text in pieces where its graph gives what it keeps."""

    def __init__(self, session: Session, encoder: LanguageEncoder, columns: Columns) -> None:
        self._seeing = session if isinstance(session, SeeingSession) else None
        if self._seeing is None and no_features(session.inputs):
            raise UsageError("the decoder reads features of images, and was opened without what sees for it")
        session = session.decoder if isinstance(session, SeeingSession) else session
        self._session, self._encoder = session, encoder
        self._pixels = columns.get(self._seeing.pixels.name, ()) if self._seeing is not None else ()
        outputs = {spec.name: spec for spec in session.outputs}
        pairs = _find_pairs(session) if isinstance(session, OnnxRuntimeSession) and vocab_size(session) else ()
        self.past = dict(pairs) if all(present in outputs for _, present in pairs) else {}
        """Input -> the output that a further piece of a text reads there; empty: texts are read whole."""
        self._kept: Feeds = {}
        self._room = np.zeros(0, outputs["logits"].dtype) if self.past else None

    def find_images(self, rows: Sequence[int]) -> list[Array]:
        """Return the pixels of these samples' images."""
        known = [np.asarray(self._pixels[row]) for row in rows] if len(self._pixels) else []
        return [pixels for pixels in known if pixels.size]

    def read(self, batch: Sequence[Array], places: slice, rows: Sequence[int]) -> Array:
        """Return the logits [n, places, vocab] of these places of samples `rows`; those before have been read."""
        feeds, session = self._encoder.feeds(batch), self._session
        if self._seeing is not None:
            feeds |= self._seeing.look(self.find_images(rows))
        if self._room is None or not isinstance(session, OnnxRuntimeSession):
            return run_logits(session, feeds)
        ends = places.stop == feeds[IDS].shape[1]
        seen = {IDS: places, POSITIONS: places, MASK: slice(places.stop)}
        piece = {name: feeds[name][:, span] for name, span in seen.items() if name in feeds}
        shape = (*piece[IDS].shape, vocab_size(session))
        if len(self._room) < math.prod(shape):
            self._room = np.empty(math.prod(shape), self._room.dtype)
        logits = self._room[: math.prod(shape)].reshape(shape)
        given = session.run_into(feeds | piece | self._kept, {"logits": logits}, () if ends else [*self.past.values()])
        self._kept = {} if ends else {past: given[present] for past, present in self.past.items()}
        return logits


def _find_pairs(session: Session) -> tuple[tuple[str, str], ...]:
    cache = find_cache(session.inputs)
    return () if cache is None else cache.pairs()


def measure_tokens(
    logits: Sequence[Array], targets: Array, counted: Array | None = None, at_once: int = REDUCED_AT_ONCE
) -> TokenNumbers:
    """Return what `score` sums up, of each counted token of one sample.

    `logits`: [t, vocab] of the model (and the reference); `targets`: the tokens that came, [t]; `counted`: which of
    them count, bool [t]; None: all.
    """
    if counted is not None and not counted.all():
        logits, targets = [model_logits[counted] for model_logits in logits], targets[counted]
    step = max(1, at_once // logits[0].shape[-1])
    pieces = [slice(start, start + step) for start in range(0, max(len(targets), 1), step)]  # one for no tokens

    def measure(piece: slice) -> TokenNumbers:
        return _measure_piece([model_logits[piece] for model_logits in logits], targets[piece])

    if len(pieces) == 1:  # a thread takes longer to start than a small model's logits to be read
        return measure(pieces[0])
    with ThreadPoolExecutor(count_cores()) as pool:  # nothing else computes meanwhile
        return _join_numbers(list(pool.map(measure, pieces)))


def _join_numbers(pieces: Sequence[TokenNumbers]) -> TokenNumbers:
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}


def _measure_piece(logits: Sequence[Array], targets: Array) -> TokenNumbers:
    with np.errstate(invalid="ignore", over="ignore"):  # NaN and infinity are told of where the sums are judged
        (own, _, log_own), *reference = (_exponentiate(model_logits) for model_logits in logits)
        found = {"nll": log_own - _pick_tokens(own, targets)}
        for theirs, weights, log_theirs in reference:
            apart = np.matmul(weights[:, None], (theirs - own)[..., None])[:, 0, 0]  # [t]
            if not np.isfinite(apart).all():  # a token that neither model ever says is nothing to both
                apart = np.where(weights > 0, weights * (theirs - own), 0 * weights).sum(axis=-1)
            divergence = apart / np.exp(log_theirs) - log_theirs + log_own
            found["reference_nll"] = log_theirs - _pick_tokens(theirs, targets)
            found["kl"] = np.maximum(divergence, 0.0)  # rounding can leave -1e-7
            found["agree"] = (theirs.argmax(axis=-1) == own.argmax(axis=-1)).astype(np.int64)
    return found


def _exponentiate(logits: Array) -> tuple[Array, Array, Array]:
    """Return logits [t, vocab] beneath their largest, the exponentials of those, and the log of their sums [t].

    float32, in a quarter of the time that float64 takes, and float64: nats are right to a millionth.
    """
    beneath = logits.astype(np.float32, copy=False) - logits.max(axis=-1, keepdims=True)
    weights = np.exp(beneath)
    return beneath, weights, np.log(weights.sum(axis=-1).astype(np.float64))


def _pick_tokens(values: Array, tokens: Array) -> Array:
    result: Array = np.take_along_axis(values, tokens[:, None], axis=-1)[:, 0].astype(np.float64)  # [t]
    return result


def split_batches(
    sequences: Sequence[Array], batch_size: int, vocab: int, most_bytes: int = LOGITS_BYTES
) -> Iterator[list[int]]:
    """Yield batches of samples, longest first and equal ones together: independent of the samples' order."""
    order = sorted(range(len(sequences)), key=lambda row: (-len(sequences[row]), sequences[row].tolist()))
    start = 0
    while start < len(order):
        width = len(sequences[order[start]])
        size = max(1, min(batch_size, most_bytes // (4 * width * vocab)))
        yield order[start : start + size]
        start += size


def vocab_size(session: Session) -> int:
    """Return the size of the vocabulary that the graph says; 0 where it does not."""
    last = next((spec.shape[-1] for spec in session.outputs if spec.name == "logits" and spec.shape), 0)
    return last if isinstance(last, int) else 0


def run_logits(session: Session, feeds: dict[str, Array], tokens: str = "input_ids") -> Array:
    """Return the logits of one call, float [n, t, vocab], at the input `tokens`; no other output is asked for."""
    if "logits" not in {spec.name for spec in session.outputs}:
        names = ", ".join(spec.name for spec in session.outputs)
        raise BundleError(f"a language model has an output 'logits'; this has {names}")
    logits = session.run(feeds, ("logits",))["logits"]
    if logits.ndim != 3 or logits.shape[:2] != feeds[tokens].shape:
        raise BundleError(
            f"logits have shape {logits.shape} for tokens {feeds[tokens].shape}; scoring needs them at every token"
        )
    return logits
