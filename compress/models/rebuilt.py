"""A torch model made of an ONNX file, for the passes that prune and train. Results are still judged by the file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir
import torch
from torch import Tensor, nn

from compress.blocks.forward import name_outputs
from compress.errors import SourceError
from compress.facts import SampleShapes
from compress.graph.rebuild import RebuildError, rebuild
from runtime.bundle.manifest import fixed_batch
from runtime.bundle.tensors import TensorSpec

FREE_BATCH = 61
"""Samples that a graph with a free batch is tried on, without values: a size that no other axis has."""
CLOSE = 1e-4
"""Of the largest output: by how much samples may come out otherwise together than alone, in a graph whose batch is
freed. A bound above float32's rounding, not measured."""


@dataclass(frozen=True)
class RebuiltModel:
    """`parameters`: the graph's input -> the parameter of forward. `inputs`: what the module takes, its batch free
    where it can be. `bound_to`: samples at once that the graph is bound to; None where it takes any number.
    """

    module: nn.Module
    parameters: Mapping[str, str]
    inputs: tuple[TensorSpec, ...]
    bound_to: int | None = None


class InBatches(nn.Module):
    """Feeds a module that takes `size` samples at once with any number of them; the last ones are filled up."""

    def __init__(self, wrapped: nn.Module, size: int) -> None:
        super().__init__()
        self.wrapped, self.size = wrapped, size

    def forward(self, **feeds: Tensor) -> dict[str, Tensor]:
        """Return the outputs [n, ...] by name for feeds [n, ...] by parameter of the module's forward."""
        n = len(next(iter(feeds.values())))
        if n == self.size:
            return name_outputs(self.wrapped(**feeds))
        rows = (torch.arange(n + -n % self.size) % n).split(self.size)
        batches = [{name: x[some.to(x.device)] for name, x in feeds.items()} for some in rows]
        parts = [name_outputs(self.wrapped(**batch)) for batch in batches]
        return {name: torch.cat([part[name] for part in parts])[:n] for name in parts[0]}


def rebuild_onnx(model: ir.Model, specs: tuple[TensorSpec, ...], feeds: SampleShapes) -> RebuiltModel:
    """Rebuild a cleaned graph with these inputs as a torch module. `feeds`: of one sample, by input, without the batch.

    A fixed batch is made free where the samples of two batches come out together as they do alone. Raises SourceError
    that names what stands in the way: operators, nodes, weights that are not float32.
    """
    shapes = {spec.name: (_shape_of(spec, feeds), getattr(torch, spec.dtype)) for spec in specs}
    try:
        made = rebuild(model, shapes)
    except RebuildError as error:
        raise SourceError(f"no torch module can be made of its graph: {error}") from error
    batch = fixed_batch(specs)
    if batch is None:
        return RebuiltModel(made.module, made.parameters, specs)
    if not _takes_any_batch(made.module, {made.parameters[name]: shape for name, shape in shapes.items()}, batch):
        return RebuiltModel(InBatches(made.module, batch), made.parameters, specs, batch)
    free = tuple(TensorSpec(spec.name, spec.dtype, ("batch", *spec.shape[1:])) for spec in specs)
    return RebuiltModel(made.module, made.parameters, free)


def _shape_of(spec: TensorSpec, feeds: SampleShapes) -> tuple[int, ...]:
    """Return the shape of an input, batch included."""
    if not spec.shape:
        return ()
    first = spec.shape[0]
    return (FREE_BATCH if isinstance(first, str) else first, *feeds[spec.name][0])


def _takes_any_batch(module: nn.Module, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]], batch: int) -> bool:
    """Return whether two batches of random samples come out of the module together as each does alone."""
    draw = torch.Generator().manual_seed(0)
    feeds = {
        name: torch.randn((2 * batch, *shape[1:]), generator=draw, dtype=dtype)
        if dtype.is_floating_point
        else torch.randint(0, 2, (2 * batch, *shape[1:]), generator=draw).to(dtype)
        for name, (shape, dtype) in shapes.items()
    }
    halves = [{name: x[:batch] for name, x in feeds.items()}, {name: x[batch:] for name, x in feeds.items()}]
    with torch.no_grad():
        alone = [name_outputs(module(**half)) for half in halves]
        try:
            together = name_outputs(module(**feeds))
        except (RuntimeError, ValueError, IndexError, TypeError):  # sizes that the file fixes: the answer
            return False
    return all(_are_close(out, torch.cat([part[name] for part in alone])) for name, out in together.items())


def _are_close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    largest = float(other.abs().max()) if other.numel() else 0.0
    return bool(((one - other).abs() <= CLOSE * max(largest, 1e-12)).all())
