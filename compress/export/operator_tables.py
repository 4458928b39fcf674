"""What torch makes of its list of operators, anew in each export: two thirds of the time that a small model's takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from functools import cache
from importlib import import_module
from typing import Any


@contextmanager
def keep_operator_tables() -> Iterator[None]:
    """Let an export list torch's operators once, and take the translations to ONNX that an earlier one looked up.

    Of a model of three layers that took 1.4 of 2.0 s: operators are listed 54 times, twice for each namespace.
    """
    # torch's own names, which another version may do without: an export then takes its time
    operators = _find("torch._export.utils", "_materialize_cpp_cia_ops")
    registry = _find("torch.onnx._internal.exporter._registration", "ONNXRegistry")
    with ExitStack() as stack:
        if operators is not None:
            stack.enter_context(_exchange(*operators, cache(getattr(*operators))))
        if registry is not None and hasattr(getattr(*registry), "from_torchlib"):
            table_of = getattr(*registry)
            look_up = _keep_translations(table_of)

            def copy_translations(*args: Any, **kwargs: Any) -> Any:
                table = copy(look_up(*args, **kwargs))
                # an export adds its own
                table.functions = {operator: [*ways] for operator, ways in table.functions.items()}
                return table

            stack.enter_context(_exchange(table_of, "from_torchlib", staticmethod(copy_translations)))
        yield


def _find(module: str, name: str) -> tuple[Any, str] | None:
    """Return the module and the name; None where this torch has no such module, or nothing of that name in it."""
    try:
        home = import_module(module)
    except ModuleNotFoundError:
        return None
    return (home, name) if hasattr(home, name) else None


@cache
def _keep_translations(registry: Any) -> Any:
    """Return the registry's function from an opset to its table, which remembers them."""
    return cache(registry.from_torchlib)


@contextmanager
def _exchange(home: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(home)[name]
    setattr(home, name, value)
    try:
        yield
    finally:
        setattr(home, name, before)
