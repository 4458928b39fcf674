"""The runtimes that can run a bundle, listed once; installed plug-ins add to them."""

from __future__ import annotations

from functools import partial

from runtime.backends import onnxruntime_cpu, onnxruntime_cuda, openvino, tensorrt
from runtime.backends.base import Backend, DeviceTimed, Feeds, Resident, Session
from runtime.errors import UsageError
from runtime.plugins import BACKEND_GROUP, PluginTable, check_entry

__all__ = ["BACKENDS", "Backend", "DeviceTimed", "Feeds", "Resident", "Session", "find_backend"]

_LISTED = (
    onnxruntime_cpu.BACKEND,
    openvino.BACKEND,
    onnxruntime_cuda.BACKEND,
    tensorrt.TENSORRT,
    tensorrt.TENSORRT_RTX,
)
BACKENDS: PluginTable[Backend] = PluginTable(
    BACKEND_GROUP, {backend.name: backend for backend in _LISTED}, partial(check_entry, kind=Backend)
)


def find_backend(name: str) -> Backend:
    """Return the backend called `name`; UsageError lists the known ones."""
    if name not in BACKENDS:
        raise UsageError(f"unknown backend '{name}'; known: {', '.join(BACKENDS)}")
    return BACKENDS[name]
