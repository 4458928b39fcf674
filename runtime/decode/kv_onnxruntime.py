"""A decoder's cache inside ONNX Runtime: no copy of it passes through numpy.

A plain graph gives keys and values of all tokens so far as new tensors, which are bound as the next call's past as they
are. A graph with `shared_buffer` writes into one buffer for each layer, made once and bound as past and as present.
"""

from __future__ import annotations

import numpy as np

from runtime.backends import Feeds
from runtime.backends.base import check_open
from runtime.backends.onnxruntime_cpu import Binding, DeviceValue, OnnxRuntimeSession, failures
from runtime.bundle.columns import Array
from runtime.bundle.manifest import KvCache
from runtime.bundle.tensors import TensorSpec
from runtime.errors import BundleError, UsageError


class BoundKeys:
    """`runtime.decode.kv_cache.Keys` of a session of ONNX Runtime, on its device."""

    _binding: Binding
    """Of the batch that `begin` began."""

    def __init__(self, session: OnnxRuntimeSession, cache: KvCache) -> None:
        self._session, self._cache = session, cache
        self._inputs = {spec.name: spec for spec in session.inputs}
        self._single: Array | None = None
        """Memory for the logits of single tokens, once a call has shown their size."""

    def begin(self, n_rows: int, capacity: int) -> None:
        """Begin a batch, nothing read yet. UsageError where a buffer of fixed length has less room than `capacity`."""
        self._binding, self._single = check_open(self._session.path, self._session.handle).io_binding(), None
        for past, present in self._cache.pairs():
            length = self._past_length(self._inputs[past], capacity)
            shape = (n_rows, self._cache.n_heads, length, self._cache.head_size)
            buffer = _make_value(np.zeros(shape, self._inputs[past].dtype), self._session.device)
            self._binding.bind_ortvalue_input(past, buffer)
            if self._cache.shared_buffer:
                self._binding.bind_ortvalue_output(present, buffer)

    def call(self, feeds: Feeds) -> Array:
        """Run one call; return the logits [n, t, vocab], which the next call may overwrite. BundleError."""
        binding, logits = self._binding, self._single
        for name, array in feeds.items():
            binding.bind_cpu_input(name, array)
        if logits is None:
            binding.bind_output("logits")
        else:
            binding.bind_ortvalue_output("logits", _make_value(logits, "cpu"))
        if not self._cache.shared_buffer:
            for _, present in self._cache.pairs():
                binding.bind_output(present, self._session.device)
        try:
            check_open(self._session.path, self._session.handle).run_with_iobinding(binding)
        except failures() as error:
            raise BundleError(f"{self._session.path}: ONNX Runtime could not run the decoder: {error}") from error
        return self._collect_logits(logits)

    def _collect_logits(self, logits: Array | None) -> Array:
        """Return the logits of the call that was made; a plain graph's present becomes its past."""
        if self._cache.shared_buffer and logits is not None:
            return logits
        values = dict(zip(self._bound_outputs(), self._binding.get_outputs(), strict=True))
        if not self._cache.shared_buffer:
            for past, present in self._cache.pairs():
                self._binding.bind_ortvalue_input(past, values[present])
        if logits is None:
            logits = values["logits"].numpy()
            self._single = np.empty((logits.shape[0], 1, logits.shape[2]), logits.dtype)
        return logits

    def _bound_outputs(self) -> list[str]:
        """Return the names of the outputs, in the order in which they were first bound."""
        presents = [present for _, present in self._cache.pairs()]
        return [*presents, "logits"] if self._cache.shared_buffer else ["logits", *presents]

    def _past_length(self, spec: TensorSpec, capacity: int) -> int:
        """Return the length of the past at the start: 0, or the whole buffer where past and present share it."""
        if not self._cache.shared_buffer:
            return 0
        fixed = spec.shape[2]
        if isinstance(fixed, int) and capacity > fixed:
            raise UsageError(f"{capacity} tokens do not fit into the graph's cache of {fixed}")
        return fixed if isinstance(fixed, int) else capacity


def _make_value(array: Array, device: str) -> DeviceValue:
    """Return the array as a tensor on a device: on the CPU its own memory, which is kept alive."""
    from onnxruntime import OrtValue

    value: DeviceValue = OrtValue.ortvalue_from_numpy(array, device)
    return value
