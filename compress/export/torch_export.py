"""torch.onnx.export, called in one way: no progress or warnings on the user's terminal, errors as ours."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import onnx_ir as ir
import torch
from torch import nn

from compress.errors import ExportError


def export_program(
    module: nn.Module,
    name: str,
    kwargs: Mapping[str, Any],
    input_names: Sequence[str],
    output_names: Sequence[str],
    dynamic_shapes: Mapping[str, Any],
    opset: int,
) -> ir.Model:
    """Export the module as a graph. Raises ExportError with what the exporter said of `name`."""
    with _silence_exporter():
        try:
            program = torch.onnx.export(
                module,
                (),
                kwargs=dict(kwargs),
                dynamo=True,
                input_names=list(input_names),
                output_names=list(output_names),
                dynamic_shapes=dict(dynamic_shapes),
                opset_version=opset,
                verbose=False,
            )
        except (RuntimeError, ValueError, TypeError, torch.onnx.OnnxExporterError) as error:
            raise ExportError(f"{name}: torch.onnx.export failed: {first_lines(error)}") from error
    assert program is not None
    return program.model


def first_lines(error: Exception, most: int = 6) -> str:
    """Return what an error says, on one line of bounded length."""
    lines = [line.strip() for line in str(error).splitlines()]
    return " | ".join(line for line in lines if line[:1] not in ("", "=", "-"))[: most * 160]


@contextmanager
def _silence_exporter() -> Iterator[None]:
    """Hide the exporter's progress and warnings about optional packages while the context is open."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
