"""A decoder's graph run token by token, its cache kept inside ONNX Runtime: no copy of it passes through numpy.

A plain graph gives keys and values of all tokens so far as new tensors, which are bound as the next call's past as they
are. A graph with `shared_buffer` writes into one buffer for each layer, made once and bound as past and as present.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from runtime.backends import Session
from runtime.backends.onnxruntime_cpu import OnnxRuntimeSession, failures
from runtime.columns import Array
from runtime.errors import BundleError, UsageError
from runtime.language import positions
from runtime.manifest import KvCache, TensorSpec


class Decoder:
    """One batch of texts at a time: `start` reads the prompts, `step` one further token of each.

    Both give the logits of the next token, float32 [n, vocab]. BundleError for a graph that does not have the cache
    that `cache` describes, or that fails; UsageError for another backend's session, or a text that outgrows its buffer.
    """

    def __init__(self, session: Session, cache: KvCache | None) -> None:
        if not isinstance(session, OnnxRuntimeSession):
            raise UsageError("text is generated on the backend onnxruntime-cpu alone: its cache stays in ONNX Runtime")
        if cache is None:
            raise BundleError(f"{session.path}: its manifest describes no key-value cache; build the bundle again")
        self._path, self._handle, self.cache = session.path, session.handle, cache
        self._inputs = {spec.name: spec for spec in session.inputs}
        self._outputs = {spec.name: spec for spec in session.outputs}
        wanted = {"input_ids", "attention_mask", "logits"} | {name for pair in cache.pairs() for name in pair}
        missing = sorted(wanted - self._inputs.keys() - self._outputs.keys())
        if missing:
            raise BundleError(f"{self._path}: the graph has no {missing[0]}, which its cache in the manifest names")
        self._binding: Any = None

    @property
    def n_tokens(self) -> int:
        """Columns that the cache holds so far, padding included."""
        return self._total

    def start(self, prompts: Sequence[Array], capacity: int) -> Array:
        """Read prompts, int64 [t] each, into a new cache with room for `capacity` tokens a row."""
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
        self._binding = self._handle.io_binding()
        self._bind_empty_cache(len(prompts))
        logits = self._run(ids, positions(self._mask[:, :width]), None)
        last = lengths - 1 if self.cache.shared_buffer else np.full(len(prompts), width - 1)
        self._logits = self._logits_buffer(logits)
        result: Array = logits[np.arange(len(prompts)), last].astype(np.float32)
        return result

    def step(self, tokens: Array) -> Array:
        """Read one more token of every text, int64 [n]."""
        self._check_room(self._total + 1)
        self._total += 1
        self._lengths = self._lengths + 1
        if self.cache.shared_buffer:
            self._mask[np.arange(len(tokens)), self._lengths - 1] = 1
        result: Array = self._run(tokens[:, None], self._lengths[:, None] - 1, self._logits)[:, -1].astype(np.float32)
        return result

    def _check_room(self, n_tokens: int) -> None:
        if n_tokens > self._capacity:
            raise UsageError(f"{n_tokens} tokens do not fit into a cache made for {self._capacity}")

    def _run(self, ids: Array, position_ids: Array, logits: Array | None) -> Array:
        """One call on ids [n, t]; the logits [n, t, vocab], in the buffer `logits` if there is one."""
        mask = np.ascontiguousarray(self._mask[:, : self._total])
        feeds = {"input_ids": ids, "attention_mask": mask, "position_ids": position_ids}
        binding = self._binding
        for name in feeds.keys() & self._inputs.keys():
            binding.bind_cpu_input(name, np.ascontiguousarray(feeds[name], self._inputs[name].dtype))
        if logits is None:
            binding.bind_output("logits")
        else:
            binding.bind_ortvalue_output("logits", _value(logits))
        if not self.cache.shared_buffer:
            for _, present in self.cache.pairs():
                binding.bind_output(present)
        try:
            self._handle.run_with_iobinding(binding)
        except failures() as error:
            raise BundleError(f"{self._path}: ONNX Runtime could not run the decoder: {error}") from error
        return self._collect() if logits is None else self._collect(logits)

    def _collect(self, logits: Array | None = None) -> Array:
        """The logits of the call that was made; a plain graph's present becomes its past."""
        if self.cache.shared_buffer and logits is not None:
            return logits
        values = dict(zip(self._bound_outputs(), self._binding.get_outputs(), strict=True))
        if not self.cache.shared_buffer:
            for past, present in self.cache.pairs():
                self._binding.bind_ortvalue_input(past, values[present])
        result: Array = values["logits"].numpy() if logits is None else logits
        return result

    def _bound_outputs(self) -> list[str]:
        """In the order in which they were first bound."""
        presents = [present for _, present in self.cache.pairs()]
        return [*presents, "logits"] if self.cache.shared_buffer else ["logits", *presents]

    def _bind_empty_cache(self, n_rows: int) -> None:
        for past, present in self.cache.pairs():
            shape = (n_rows, self.cache.n_heads, self._length(self._inputs[past]), self.cache.head_size)
            buffer = _value(np.zeros(shape, self._inputs[past].dtype))
            self._binding.bind_ortvalue_input(past, buffer)
            if self.cache.shared_buffer:
                self._binding.bind_ortvalue_output(present, buffer)

    def _length(self, spec: TensorSpec) -> int:
        """Of the past at the start: nothing, or the whole buffer where past and present share it."""
        if not self.cache.shared_buffer:
            return 0
        fixed = spec.shape[2]
        if isinstance(fixed, int) and self._capacity > fixed:
            raise UsageError(f"{self._capacity} tokens do not fit into the graph's cache of {fixed}")
        return fixed if isinstance(fixed, int) else self._capacity

    def _logits_buffer(self, seen: Array) -> Array:
        """Memory for the logits of single tokens, in the dtype of those `seen` [n, t, vocab]."""
        return np.empty((seen.shape[0], 1, seen.shape[2]), seen.dtype)


def _value(array: Array) -> Any:
    """The array's own memory as ONNX Runtime's tensor, which keeps it alive."""
    from onnxruntime import OrtValue

    return OrtValue.ortvalue_from_numpy(array)
