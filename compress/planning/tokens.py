"""What a model that writes text reads of a set: its tokens checked and packed, which of them count, and how it ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from compress.data.chat import are_chats, cut_windows, pack_rows, perceived_columns
from compress.data.samples import Samples, samples_of
from compress.errors import SourceError, place_errors
from compress.facts import Note
from compress.models.language import read_generation
from compress.planning.input_checks import TEXTS_ALONE
from compress.planning.inputs import Inputs
from compress.tasks import find_torch_task
from runtime.bundle.columns import Columns, take
from runtime.bundle.manifest import Generation
from runtime.decode.answers import answer_encoder
from runtime.decode.scoring import count_targets, language_encoder
from runtime.encode.language import IDS, LOSS_MASK, LanguageEncoder, LanguagePreprocess, make_language_encoder
from runtime.encode.preprocess import Seq2SeqPreprocess, make_preprocessor, split_samples
from runtime.errors import UsageError
from runtime.tasks.metrics import METRICS

WHOSE_WORDS = "which words of its reference are of which part is not known"
"""Of a sample that is read in several parts."""


def generation_of(inputs: Inputs) -> Generation | None:
    """Return what generating text needs to know; None for another task, or a source without a folder of its own."""
    if inputs.preprocess.kind not in CHECKS or inputs.source.folder is None:
        return None
    generation = read_generation(inputs.source.folder, _count_vocabulary(inputs))
    if not isinstance(inputs.preprocess, Seq2SeqPreprocess):
        return generation
    target = inputs.preprocess.target
    return replace(generation, context_length=target.most_tokens, eos_token_ids=target.end_tokens)


def _check_references(samples: Samples, name: str, inputs: Inputs) -> Samples:
    """Return what an encoder-decoder reads as it is. SourceError for references with tokens that it does not know."""
    encoder = make_preprocessor(inputs.preprocess, inputs.facts.inputs, inputs.tokenizer, _count_vocabulary(inputs))
    encoded = answer_encoder(encoder)
    with place_errors(f"data.{name}"):
        encoded.references(samples.columns)
        split = split_samples(encoded, samples.columns)
    if name == "evaluation" and (split.rows_each > 1).all():
        wanted = dict.fromkeys(
            (*inputs.recipe.validate_.metrics, *(gate.metric for gate in inputs.recipe.validate_.gates))
        )
        of_tokens = [name for name in wanted if name in METRICS and METRICS[name].shape == "tokens"]
        if of_tokens:
            raise SourceError(
                f"validate: {', '.join(of_tokens)}: all samples of data.evaluation are longer than the model reads at "
                f"once, and of such a sample {WHOSE_WORDS}; judge the texts (wer, cer, chrf), or add shorter samples"
            )
    return samples


def _check_texts(samples: Samples, name: str, inputs: Inputs) -> Samples:
    """Return texts as they are, or packed where the recipe says so.

    Raises SourceError for tokens that the model does not know, and where none counts.
    """
    assert isinstance(inputs.preprocess, LanguagePreprocess)
    vocab_size = _count_vocabulary(inputs)
    encoder = make_language_encoder(inputs.preprocess, inputs.facts.inputs, inputs.tokenizer, vocab_size)
    with place_errors(f"data.{name}"):
        _check_perceived(samples.columns, name, inputs)
        columns = _pack_samples(encoder, samples.columns, name, inputs)
        sequences, masks = encoder.sequences(columns), encoder.loss_masks(columns)
        if max(map(len, sequences)) < 2:
            raise UsageError("no text has two tokens: there is nothing to predict")
        if name != "calibration" and not count_targets(sequences, masks).any():
            raise UsageError(
                f"the assistant says nothing in the first {inputs.preprocess.max_length} tokens of any conversation: "
                "give others, a larger preprocess.max_length, or chat.loss_on: all"
            )
    return samples if columns is samples.columns else samples_of(dict(columns))


CHECKS: Mapping[str, Callable[[Samples, str, Inputs], Samples]] = {
    "language": _check_texts,
    "seq2seq": _check_references,
}
"""Kind of preprocessing of models that write text -> what gives a set's samples as they are read; `name`: the set's."""


def _count_vocabulary(inputs: Inputs) -> int:
    vocab_size = inputs.facts.outputs[0].shape[-1]
    assert isinstance(vocab_size, int)
    return vocab_size


def _check_perceived(columns: Columns, name: str, inputs: Inputs) -> None:
    """Raise UsageError for images or sounds where only texts can be, and for a conversation cut with them."""
    if not (seen := perceived_columns(columns)):
        return
    spec = inputs.preprocess
    assert isinstance(spec, LanguagePreprocess)
    if name == "train" and any(pass_.needs_train for pass_ in inputs.recipe.passes):
        raise UsageError(TEXTS_ALONE)
    if spec.pack is not None or inputs.recipe.data.declared[name].packing:
        raise UsageError("samples with images or sounds cannot share a row: leave out packing, and preprocess.pack")
    for row, ids in enumerate(columns[IDS]):
        if len(ids) > spec.max_length and any(np.size(column[row]) for column in seen.values()):
            raise UsageError(
                f"sample {row} has {len(ids)} tokens with those of its images or sounds, more than "
                f"preprocess.max_length ({spec.max_length}): raise that, or give smaller or shorter ones"
            )


def _pack_samples(encoder: LanguageEncoder, columns: Columns, name: str, inputs: Inputs) -> Columns:
    """Return windows of all samples joined (`preprocess.pack`), rows of several (the set's `packing`), or the samples.

    Conversations are token ids already, which both join as they join texts; what counts of them stays what it was.
    """
    chats = are_chats(inputs.data[name].columns)
    if encoder.spec.pack is not None and chats:
        whole = columns[IDS]
        return cut_windows(whole, columns.get(LOSS_MASK) or _mark_all(whole), encoder.spec.pack)
    if encoder.spec.pack is not None or not inputs.recipe.data.declared[name].packing:
        return encoder.samples(columns)
    sequences = encoder.sequences(columns)
    generation = None if chats else generation_of(inputs)  # a template ends what it writes itself
    ends = generation.eos_token_ids if generation is not None else ()
    masks = encoder.loss_masks(columns) or _mark_all(sequences)
    return pack_rows(sequences, masks, encoder.spec.max_length, ends[0] if ends else None)


def _mark_all(sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [np.ones(len(ids), np.uint8) for ids in sequences]


def leave_out_unlearnable(samples: Samples, inputs: Inputs) -> tuple[Samples, Note | None]:
    """Return the samples of the training set that can be learned from, and a note of those that are left out.

    An encoder-decoder learns a reference along what it belongs to: a sample that is read in several parts has none for
    each. Of a conversation the assistant's part is learned, which may be none. SourceError where all are such.
    """
    if LOSS_MASK in samples.columns:
        learned, way_out = _count_predicted(samples, inputs)[1] > 0, "give others"
        text = "in {} of {} conversations the assistant says nothing within max_length, and they are not learned from"
    elif isinstance(inputs.preprocess, Seq2SeqPreprocess):
        encoder = make_preprocessor(inputs.preprocess, inputs.facts.inputs, inputs.tokenizer)
        learned, way_out = split_samples(encoder, samples.columns).rows_each == 1, "cut them, with their references"
        text = f"{{}} of {{}} samples are longer than the model reads at once and are not learned from: {WHOSE_WORDS}"
    else:
        return samples, None
    if learned.all():
        return samples, None
    text = f"data.train: {text.format(np.count_nonzero(~learned), samples.n)}"
    if not learned.any():
        raise SourceError(f"{text}; {way_out}")
    columns = {name: take(samples.columns, name, np.flatnonzero(learned)) for name in samples.columns}
    return samples_of(columns), Note("warning", text)


def _count_predicted(samples: Samples, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """Return how many tokens of each text are predicted, and how many of these count, int64 [N] each."""
    encoder = language_encoder(make_preprocessor(inputs.preprocess, inputs.facts.inputs, inputs.tokenizer))
    sequences = encoder.sequences(samples.columns)
    return count_targets(sequences, None), count_targets(sequences, encoder.loss_masks(samples.columns))


def describe_counted(samples: Samples, name: str, inputs: Inputs) -> Note | None:
    """Return a note of how many of a set's tokens are the assistant's, and count; None where all tokens do."""
    chats = find_torch_task(inputs.recipe.model.task).chats and are_chats(inputs.data[name].columns)
    if not chats or inputs.recipe.chat.loss_on == "all":
        return None
    predicted, counted = (part.sum() for part in _count_predicted(samples, inputs))
    text = f"{counted} of {predicted} predicted tokens are the assistant's, and these alone count"
    return Note("info", f"data.{name}: {text}")
