"""The runtimes that can run a bundle, listed once."""

from __future__ import annotations

from runtime.backends import onnxruntime_cpu, openvino
from runtime.backends.base import Backend, Feeds, Session
from runtime.errors import UsageError

__all__ = ["BACKENDS", "Backend", "Feeds", "Session", "find_backend"]

BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (onnxruntime_cpu.BACKEND, openvino.BACKEND)}


def find_backend(name: str) -> Backend:
    """The backend called `name`; UsageError lists the known ones."""
    if name not in BACKENDS:
        raise UsageError(f"unknown backend '{name}'; known: {', '.join(BACKENDS)}")
    return BACKENDS[name]
