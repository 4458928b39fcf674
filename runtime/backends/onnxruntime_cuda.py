"""ONNX Runtime on an NVIDIA GPU; inputs and outputs stay in device memory of their own between calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np

from runtime.backends.base import Backend, Feeds, Options, Session, check_call, check_feeds, check_open, choose_outputs
from runtime.backends.onnxruntime_cpu import (
    DeviceValue,
    OnnxRuntimeSession,
    failures,
    onnxruntime_library,
    open_handle,
    session_options,
)
from runtime.bundle.columns import Array
from runtime.errors import BundleError, RuntimeFailure
from runtime.nvidia.gpu import NO_GPU, gpu_here
from runtime.processes.isolated import trouble

PROVIDER = "CUDAExecutionProvider"


@dataclass
class CudaSession(OnnxRuntimeSession):
    """An ONNX Runtime session whose inputs are copied into buffers on the GPU that stay where they are."""

    buffers: dict[str, DeviceValue] = field(default_factory=dict)
    device: ClassVar[str] = "cuda"

    def run(self, feeds: Feeds, outputs: Sequence[str] | None = None) -> Feeds:
        handle = check_open(self.path, self.handle)
        check_feeds(self.inputs, feeds)
        names = choose_outputs(self.outputs, outputs)
        try:
            binding = handle.io_binding()
            for name, array in feeds.items():
                binding.bind_ortvalue_input(name, self._fill_buffer(name, np.asarray(array, order="C")))
            for name in names:
                binding.bind_output(name, "cuda")
            handle.run_with_iobinding(binding)
            results = binding.copy_outputs_to_cpu()
        except failures() as error:
            raise BundleError(f"{self.path}: ONNX Runtime could not run the model on the GPU: {error}") from error
        return dict(zip(names, results, strict=True))

    def _fill_buffer(self, name: str, array: Array) -> DeviceValue:
        import onnxruntime

        kept = self.buffers.get(name)
        if kept is not None and tuple(kept.shape()) == array.shape:
            kept.update_inplace(array)
        else:
            kept = self.buffers[name] = onnxruntime.OrtValue.ortvalue_from_numpy(array, "cuda", 0)
        return kept

    def close(self) -> None:
        self.buffers.clear()
        super().close()


def open_session(path: Path, threads: int, options: Options) -> Session:
    """Load on the GPU; RuntimeFailure where ONNX Runtime would go to the CPU instead, which it does without a word."""
    check_call("onnxruntime-cuda", threads, options)
    onnxruntime_library().preload_dlls()  # CUDA and cuDNN, where pip installed them
    handle, inputs, outputs = open_handle(path, session_options(threads), [PROVIDER, "CPUExecutionProvider"])
    if handle.get_providers()[0] != PROVIDER:
        raise RuntimeFailure(f"{path}: ONNX Runtime could not use the GPU and went to the CPU; see `compress doctor`")
    return CudaSession(path, inputs, outputs, handle)


def why_unavailable() -> str | None:
    """Return that there is no GPU, or no build of ONNX Runtime for it; None where there are both."""
    if gpu_here() is None:
        return NO_GPU
    problem = trouble(f"import onnxruntime as o, sys; sys.exit({PROVIDER!r} not in o.get_available_providers())")
    if not problem:
        return None
    why = problem if not problem.startswith("exit code") else "the installed onnxruntime is built for CPUs alone"
    return f"{why}: pip uninstall -y onnxruntime && pip install onnxruntime-gpu"


BACKEND = Backend("onnxruntime-cuda", why_unavailable, open_session, onnxruntime_library, decoders=True, on_gpu=True)
