"""Run a decoder's graph token by token; what its layers keep stays where the backend computes.

In ONNX Runtime no copy of the cache passes through numpy: keys and values of all tokens so far, and the states of
convolutions and recurrences, are given as new tensors, which are bound as the next call's past as they are; where past
and present share a buffer, it is made once and bound as both. In an engine's device memory, what a call gives as
present, the next reads as past. In OpenVINO they are the model's state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from runtime.backends import EncoderDecoderSession, Feeds, Resident, SeeingSession, Session, Stateful, no_features
from runtime.backends.base import check_open
from runtime.backends.onnxruntime_cpu import Binding, DeviceValue, OnnxRuntimeSession, failures, make_value
from runtime.bundle.columns import Array
from runtime.bundle.manifest import LOGITS_TO_KEEP, SELF_PAST, SELF_PRESENT, KvCacheSpec, find_cache
from runtime.bundle.tensors import TensorSpec
from runtime.encode.language import positions
from runtime.encode.seq2seq import DECODER_IDS
from runtime.errors import BundleError, UsageError


class Keys(Protocol):
    """The keys and values of one batch between the calls that read it."""

    def begin(self, n_rows: int, capacity: int, given: Feeds | None = None) -> None:
        """Begin a batch with nothing read yet, and room for `capacity` tokens a row. UsageError where there is less.

        `given`: inputs that stay as they are for all calls of the batch.
        """
        ...

    def call(self, feeds: Feeds, n_logits: int = 0) -> Array:
        """Run one call on all inputs but the past, C-contiguous; return logits [n, t, vocab], kept until the next.

        `n_logits`: of how many of the last tokens they are wanted; 0: of all. There may be more.
        """
        ...


class Decoder:
    """One batch of texts at a time: `start` reads the prompts, `step` one further token of each.

    Both give the logits of the next token, float32 [n, vocab]. Of a model that also sees, `look` gives what `start`
    reads in the places of images. BundleError for a graph that does not have the cache that `cache` describes, or that
    fails; UsageError for a backend that keeps none, or a text that outgrows its buffer.
    """

    def __init__(self, session: Session, cache: KvCacheSpec | None) -> None:
        self._seeing = session if isinstance(session, SeeingSession) else None
        session = session.decoder if isinstance(session, SeeingSession) else session
        if not isinstance(session, (OnnxRuntimeSession, Resident, Stateful)):
            raise UsageError("text is not generated on this backend: it keeps no cache between calls")
        if cache is None:
            raise BundleError(f"{session.path}: its manifest describes no key-value cache; build the bundle again")
        self.cache = cache
        self._inputs = {spec.name: spec for spec in session.inputs}
        self._no_features = no_features(session.inputs)
        wanted = {"input_ids", "attention_mask", "logits"}
        if not isinstance(session, Stateful):
            wanted |= {name for pair in cache.pairs() for name in pair}
        missing = sorted(wanted - self._inputs.keys() - {spec.name for spec in session.outputs})
        if missing:
            raise BundleError(f"{session.path}: the graph has no {missing[0]}, which its cache in the manifest names")
        self.keys = _make_keys(session, cache)

    @property
    def n_tokens(self) -> int:
        """Return how many columns the cache holds so far, padding included."""
        return self._total

    def room(self, prompts: Sequence[Array], n_new: int) -> int:
        """Return the capacity that prompts and answers of `n_new` tokens take."""
        return max(map(len, prompts)) + n_new

    def look(self, images: Sequence[Array]) -> Feeds:
        """Return the features of images, pixels of one each. UsageError for images where the model sees none."""
        if self._seeing is None:
            if images:
                raise UsageError("the model reads texts alone, and there are images")
            return {}
        return self._seeing.look(images)

    def start(self, prompts: Sequence[Array], capacity: int, features: Feeds | None = None) -> Array:
        """Read prompts, int64 [t] each, into a new cache with room for `capacity` tokens a row.

        `features`: of the prompts' images, in their order, as `look` gives them.
        """
        lengths = np.array([len(prompt) for prompt in prompts])
        self._total = width = int(lengths.max())
        self._lengths, self._capacity = lengths, capacity
        self._check_room(width)
        ids = np.zeros((len(prompts), width), np.int64)
        self._mask = np.zeros((len(prompts), capacity), np.int64)
        for row, prompt in enumerate(prompts):
            span = slice(0, len(prompt)) if self.cache.shared_buffer else slice(width - len(prompt), width)
            ids[row, span] = prompt
            self._mask[row, span] = 1
        if not self.cache.shared_buffer:
            self._mask[:, width:] = 1
        self.keys.begin(len(prompts), capacity)
        last = lengths - 1 if self.cache.shared_buffer else np.full(len(prompts), width - 1)
        logits = self._run(ids, positions(self._mask[:, :width]), width - int(last.min()), features)
        result: Array = logits[np.arange(len(prompts)), last - width].astype(np.float32)
        return result

    def step(self, tokens: Array) -> Array:
        """Read one more token of every text, int64 [n]."""
        self._check_room(self._total + 1)
        self._total += 1
        self._lengths = self._lengths + 1
        if self.cache.shared_buffer:
            self._mask[np.arange(len(tokens)), self._lengths - 1] = 1
        result: Array = self._run(tokens[:, None], self._lengths[:, None] - 1)[:, -1].astype(np.float32)
        return result

    def _check_room(self, n_tokens: int) -> None:
        if n_tokens > self._capacity:
            raise UsageError(f"{n_tokens} tokens do not fit into a cache made for {self._capacity}")

    def _run(self, ids: Array, position_ids: Array, n_logits: int = 0, features: Feeds | None = None) -> Array:
        """Run one call on ids [n, t]; return the logits of the last tokens [n, `n_logits` or more, vocab]."""
        feeds = {"input_ids": ids, "attention_mask": self._mask[:, : self._total], "position_ids": position_ids}
        feeds |= features or self._no_features
        given = feeds.keys() & self._inputs.keys()
        given_feeds = {name: np.ascontiguousarray(feeds[name], self._inputs[name].dtype) for name in given}
        return self.keys.call(given_feeds, n_logits)


class EncodedDecoder:
    """A batch of an encoder-decoder: `start` encodes and reads the first tokens, `step` one further token of each text.

    All texts begin with the same tokens, so that no row is padded. Both give the logits of the next token, float32
    [n, vocab]. Errors as of `Decoder`.
    """

    def __init__(self, session: Session, start_tokens: Sequence[int]) -> None:
        if not isinstance(session, EncoderDecoderSession) or not isinstance(
            session.decoder, (OnnxRuntimeSession, Stateful)
        ):
            raise UsageError("text of an encoder-decoder is generated on ONNX Runtime or OpenVINO, from its two files")
        self._session, self._start = session, np.array(start_tokens, np.int64)
        names = {spec.name: spec for spec in session.decoder.inputs}
        cache = find_cache(_list_inputs(session.decoder), SELF_PAST, SELF_PRESENT)
        if cache is None or DECODER_IDS not in names or len(session.cross) != len(cache.pairs()):
            raise BundleError(f"{session.path}: the decoder's graph has no {DECODER_IDS}, or no cache of its own")
        self.cache, self.keys = cache, _make_keys(session.decoder, cache)

    def room(self, prompts: Feeds, n_new: int) -> int:
        """Return the tokens that answers of `n_new` take."""
        return len(self._start) + n_new

    def start(self, prompts: Feeds, capacity: int) -> Array:
        """Encode what `prompts`, the encoder's inputs, hold, and read the start tokens into a new cache."""
        n_rows = len(next(iter(prompts.values())))
        given = {name: np.ascontiguousarray(values) for name, values in self._session.encode(prompts).items()}
        self.keys.begin(n_rows, capacity, given)
        self._total, self._capacity = 0, capacity
        return self._run(np.tile(self._start, (n_rows, 1)))

    def step(self, tokens: Array) -> Array:
        """Read one more token of every text, int64 [n]."""
        return self._run(tokens[:, None])

    def _run(self, ids: Array) -> Array:
        self._total += ids.shape[1]
        if self._total > self._capacity:
            raise UsageError(f"{self._total} tokens do not fit into a cache made for {self._capacity}")
        logits = self.keys.call({DECODER_IDS: np.ascontiguousarray(ids)})
        result: Array = logits[:, -1].astype(np.float32)
        return result


def _list_inputs(session: Session) -> tuple[TensorSpec, ...]:
    """Return a decoder's inputs, those too that its session keeps as state."""
    return (*session.inputs, *(session.past if isinstance(session, Stateful) else ()))


def _make_keys(session: OnnxRuntimeSession | Resident | Stateful, cache: KvCacheSpec) -> Keys:
    if isinstance(session, OnnxRuntimeSession):
        return BoundKeys(session, cache)
    if isinstance(session, Stateful):
        return StateKeys(session)
    return ResidentKeys(session, cache)


class BoundKeys:
    """Keep `Keys` of a session of ONNX Runtime, on its device."""

    _binding: Binding
    """Of the batch that `begin` began."""

    def __init__(self, session: OnnxRuntimeSession, cache: KvCacheSpec) -> None:
        self._session, self._cache = session, cache
        shared = set(cache.buffers())
        self._buffers = [pair for pair in cache.pairs() if pair[0] in shared]
        self._given = [pair for pair in cache.pairs() if pair[0] not in shared]
        """Pasts that are the presents of the call before."""
        self._inputs = {spec.name: spec for spec in session.inputs}
        self._keeps = session.takes(LOGITS_TO_KEEP)
        self._single: Array | None = None
        """Memory for the logits of single tokens, once a call has shown their size."""

    def begin(self, n_rows: int, capacity: int, given: Feeds | None = None) -> None:
        """Begin a batch, nothing read yet. UsageError where a buffer of fixed length has less room than `capacity`."""
        self._binding, self._single = check_open(self._session.path, self._session.handle).io_binding(), None
        for name, array in (given or {}).items():
            self._binding.bind_ortvalue_input(name, make_value(array, self._session.device))
        empty, whole = (self._cache.shapes(n_rows, length) for length in (0, self._buffer_length(capacity)))
        for past, _ in self._given:
            self._binding.bind_ortvalue_input(past, self._make_zeros(past, empty[past]))
        for past, present in self._buffers:
            buffer = self._make_zeros(past, whole[past])
            self._binding.bind_ortvalue_input(past, buffer)
            self._binding.bind_ortvalue_output(present, buffer)

    def _make_zeros(self, past: str, shape: tuple[int, ...]) -> DeviceValue:
        return make_value(np.zeros(shape, self._inputs[past].dtype), self._session.device)

    def call(self, feeds: Feeds, n_logits: int = 0) -> Array:
        """Run one call; return the logits [n, t, vocab], which the next call may overwrite. BundleError."""
        binding, logits = self._binding, self._single
        for name, array in feeds.items():
            binding.bind_cpu_input(name, array)
        if self._keeps:
            binding.bind_ortvalue_input(LOGITS_TO_KEEP, make_value(np.array([n_logits]), "cpu"))
        if logits is None:
            binding.bind_output("logits")
        else:
            binding.bind_ortvalue_output("logits", make_value(logits, "cpu"))
        for _, present in self._given:
            binding.bind_output(present, self._session.device)
        try:
            check_open(self._session.path, self._session.handle).run_with_iobinding(binding)
        except failures() as error:
            raise BundleError(f"{self._session.path}: ONNX Runtime could not run the decoder: {error}") from error
        return self._collect_logits(logits)

    def _collect_logits(self, logits: Array | None) -> Array:
        """Return the logits of the call that was made; presents become the next one's pasts."""
        if not self._given and logits is not None:
            return logits
        names = [*(present for _, present in self._buffers), "logits", *(present for _, present in self._given)]
        values = dict(zip(names, self._binding.get_outputs(), strict=True))  # in the order in which they were bound
        for past, present in self._given:
            self._binding.bind_ortvalue_input(past, values[present])
        if logits is None:
            logits = values["logits"].numpy()
            self._single = np.empty((logits.shape[0], 1, logits.shape[2]), logits.dtype)
        return logits

    def _buffer_length(self, capacity: int) -> int:
        """Return the tokens that a buffer takes: `capacity`, or what the graph says."""
        sizes = [self._inputs[past].shape[2] for past, _ in self._buffers]
        fixed = next((size for size in sizes if isinstance(size, int)), capacity)
        if capacity > fixed:
            raise UsageError(f"{capacity} tokens do not fit into the graph's cache of {fixed}")
        return fixed


class StateKeys:
    """Keep `Keys` of a session that has them as its state."""

    def __init__(self, session: Stateful) -> None:
        self._state, self._given = session.make_state(), Feeds()

    def begin(self, n_rows: int, capacity: int, given: Feeds | None = None) -> None:
        """Begin a batch with nothing read yet; the state grows by what each call reads."""
        self._state.reset()
        self._given = dict(given or {})

    def call(self, feeds: Feeds, n_logits: int = 0) -> Array:
        """Run one call; return logits [n, t, vocab]. UsageError for inputs that do not fit the model."""
        return self._state.run({**self._given, **feeds})["logits"]


class ResidentKeys:
    """Keep `Keys` of a session that leaves tensors on its device."""

    def __init__(self, session: Resident, cache: KvCacheSpec) -> None:
        if fixed := cache.fixed():
            # an engine's memory is not zeroed before a text, and what grows reads none of it
            raise UsageError(f"an engine begins no text with zeros, which {fixed[0]} needs: run it in ONNX Runtime")
        self._session, self._cache = session, cache

    def begin(self, n_rows: int, capacity: int, given: Feeds | None = None) -> None:
        """Begin a batch with nothing read yet. UsageError where the engine takes less than `capacity`."""
        if given:
            raise UsageError("an engine keeps nothing that an encoder gives: run encoder-decoders in ONNX Runtime")
        past, empty = next(iter(self._cache.shapes(n_rows, 0).items()))
        most = self._session.largest(past)[empty.index(0)] + 1  # the past that the last token reads is one shorter
        if capacity > most:
            raise UsageError(f"{capacity} tokens do not fit into the engine's profiles, which take {most}")
        self._session.keeper = self
        self._rows, self._read = n_rows, 0

    def call(self, feeds: Feeds, n_logits: int = 0) -> Array:
        """Run one call; return logits [n, t, vocab]. UsageError where no profile takes the shapes, RuntimeFailure."""
        if self._session.keeper is not self:
            raise UsageError(
                "another text has been begun in this session, whose keys are there now; open the bundle twice"
            )
        logits = self._session.resume(feeds, self._cache.shapes(self._rows, self._read), ["logits"])["logits"]
        for past, present in self._cache.pairs():
            self._session.exchange(past, present)
        self._read += feeds["input_ids"].shape[1]
        return logits
