"""The few calls of the CUDA runtime that a backend needs: device memory, a stream, events, a captured graph.

They are made through NVIDIA's own `cuda-bindings`; every error it reports is raised as RuntimeFailure with its name.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from runtime.errors import MissingDependency, RuntimeFailure

Array = np.ndarray[Any, np.dtype[Any]]


def load() -> Any:
    """Return the module of the CUDA runtime. MissingDependency."""
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise MissingDependency("cuda-bindings", "running engines on a GPU") from error
    return runtime


class Device:
    """One stream of the first GPU and the memory that calls on it use. `api`: the CUDA runtime's module."""

    def __init__(self, api: Any) -> None:
        self.api = api
        self.stream = self._check_result(api.cudaStreamCreate())
        self.begin, self.end = (self._check_result(api.cudaEventCreate()) for _ in range(2))
        self.buffers: dict[str, tuple[int, int]] = {}

    def buffer(self, name: str, n_bytes: int) -> int:
        """Return the address of at least so much device memory; it stays where it is until more is asked for."""
        address, size = self.buffers.get(name, (0, 0))
        if size < max(n_bytes, 1):
            if address:
                del self.buffers[name]  # first: what is freed may not stand there if the next call fails
                self._check_result(self.api.cudaFree(address))
            size = max(n_bytes, 2 * size, 1)
            self.buffers[name] = (self._check_result(self.api.cudaMalloc(size)), size)
        return self.buffers[name][0]

    def exchange(self, first: str, second: str) -> None:
        """Swap the memory of two names; both have had some."""
        self.buffers[first], self.buffers[second] = self.buffers[second], self.buffers[first]

    def copy_in(self, address: int, array: Array) -> None:
        """Copy from a contiguous array, in the stream."""
        kind = self.api.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._check_result(self.api.cudaMemcpyAsync(address, array.ctypes.data, array.nbytes, kind, self.stream))

    def copy_out(self, array: Array, address: int) -> None:
        """Copy into a contiguous array, in the stream; it is there after `wait`."""
        kind = self.api.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._check_result(self.api.cudaMemcpyAsync(array.ctypes.data, address, array.nbytes, kind, self.stream))

    def mark(self, event: Any) -> None:
        """Note the time at which the stream gets here."""
        self._check_result(self.api.cudaEventRecord(event, self.stream))

    def elapsed_ms(self) -> float:
        """Return the milliseconds between the two marks; the stream must have been waited for."""
        return float(self._check_result(self.api.cudaEventElapsedTime(self.begin, self.end)))

    def wait(self) -> None:
        self._check_result(self.api.cudaStreamSynchronize(self.stream))

    def capture(self) -> None:
        """Record calls in the stream from here on, instead of running them."""
        mode = self.api.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._check_result(self.api.cudaStreamBeginCapture(self.stream, mode))

    def end_capture(self) -> Any:
        """Return what was recorded, to be run again and again by `launch`, and given back by `forget`."""
        graph = self._check_result(self.api.cudaStreamEndCapture(self.stream))
        try:
            return self._check_result(self.api.cudaGraphInstantiate(graph, 0))
        finally:
            self.api.cudaGraphDestroy(graph)

    def abandon(self) -> None:
        """End a recording that failed, so that the stream runs calls again."""
        _, graph = self.api.cudaStreamEndCapture(self.stream)
        if graph:
            self.api.cudaGraphDestroy(graph)

    def launch(self, graph: Any) -> None:
        self._check_result(self.api.cudaGraphLaunch(graph, self.stream))

    def forget(self, graph: Any) -> None:
        self._check_result(self.api.cudaGraphExecDestroy(graph))

    def close(self) -> None:
        """Give all of it back, and then raise the first error if there was one."""
        results = [self.api.cudaFree(address) for address, _ in self.buffers.values()]
        self.buffers.clear()
        results += [self.api.cudaEventDestroy(event) for event in (self.begin, self.end)]
        results.append(self.api.cudaStreamDestroy(self.stream))
        for result in results:
            self._check_result(result)

    def _check_result(self, result: tuple[Any, ...]) -> Any:
        """Return what a call gave beside its error code."""
        code, *values = result
        if int(code) != 0:
            raise RuntimeFailure(f"CUDA: {getattr(code, 'name', code)}; see `nvidia-smi`, and what else uses the GPU")
        return values[0] if len(values) == 1 else tuple(values)
