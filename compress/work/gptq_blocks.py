"""The steps of the `gptq` pass on a torch model: each block's forward stops before each reading while it is rounded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from torch import Tensor

from compress.blocks.sharing import sum_over_processes
from compress.blocks.step import BlockStep
from compress.blocks.stream import Stream
from compress.blocks.streamed import StreamedModel
from compress.context import PassContext, PassResult
from compress.errors import PassError
from compress.facts import Reading
from compress.formats.schemes import Scheme
from compress.formats.targets import Target
from compress.passes.gptq import Gptq
from compress.quantize.gptq import Hessian, Rules, gptq_round_together, invert_hessian
from compress.quantize.gram import Gram
from compress.work.block_layers import InputRanges, StepLayers, matrix, may_be_negative, nearest, remark, step_layers

T = TypeVar("T")


def gptq_blocks(knobs: Gptq, model: StreamedModel, context: PassContext) -> PassResult:
    """Round a streamed model. Raises PassError naming the layer."""
    stream = Stream(model, context, compute=knobs.compute)
    for step in stream:
        work = _BlockRounding(knobs, step, step_layers(knobs, step, context.target), context.target)
        if knobs.sequential and work.layers.schemes:
            step.lockstep(work.visit, work.act)
        elif work.layers.schemes:
            step.collect(work.visit, [reading for reading in step.readings if work.layers.of(reading.layers)])
            for reading in step.readings:
                work.act(reading)
        work.finish()
    return stream.result()


def gptq_rules(knobs: Gptq, scheme: Scheme, target: Target) -> Rules:
    return Rules(may_be_negative(scheme, target), knobs.sweeps, knobs.block_size, knobs.compute)


def hessian_remarks(layers: Sequence[str], hessian: Hessian, damp_percent: float) -> list[str]:
    """Return what the user should know of the Hessian of what `layers` read."""
    names, remarks = ", ".join(layers), []
    if hessian.damp_percent > damp_percent:
        remarks.append(
            f"gptq: {names}: the Hessian could not be inverted until damp_percent was {hessian.damp_percent:g}"
        )
    if hessian.dead.any():
        n_dead, n = int(hessian.dead.sum()), len(hessian.dead)
        remarks.append(f"gptq: {names}: {n_dead} of {n} inputs were zero on all calibration data")
    return remarks


class _BlockRounding:
    """GPTQ on one block: a Gram matrix for each reading while it is needed, and the layers that are left to report."""

    def __init__(self, knobs: Gptq, step: BlockStep, layers: StepLayers, target: Target) -> None:
        self.knobs, self.step, self.layers, self.target = knobs, step, layers, target
        self.grams: dict[Reading, Gram] = {}
        self.inputs = InputRanges.of(layers.schemes)
        self.left = list(layers.schemes)

    def visit(self, reading: Reading, rows: Tensor) -> None:
        names = self.layers.of(reading.layers)
        if names:
            gram = self.grams.setdefault(reading, Gram(rows.shape[1], self.knobs.compute))
            gram.add(rows)
            self._name_errors(names, partial(self.inputs.see, names, rows))

    def act(self, reading: Reading) -> None:
        """Round the reading's layers, those of one scheme together."""
        names = self.layers.of(reading.layers)
        if not names:
            return
        width = self.layers.facts[names[0]].shape[1]
        gram, n_rows = self.grams.pop(reading, Gram(width)).mean(sum_over_processes)
        if not n_rows:
            return  # `finish` rounds them to the nearest
        hessian = self._name_errors(names, partial(invert_hessian, gram, self.knobs.damp_percent, self.knobs.actorder))
        remark(self.knobs, self.step, hessian_remarks(names, hessian, self.knobs.damp_percent))
        by_scheme: dict[Scheme, list[str]] = {}
        for name in names:
            by_scheme.setdefault(self.layers.schemes[name], []).append(name)
        for scheme, members in by_scheme.items():
            self._round(members, scheme, hessian)

    def _round(self, names: list[str], scheme: Scheme, hessian: Hessian) -> None:
        weights = [matrix(self.knobs, self.step, name) for name in names]
        rules = gptq_rules(self.knobs, scheme, self.target)
        round_all = partial(gptq_round_together, weights, hessian, scheme.weights, rules)
        for name, rounded in zip(names, self._name_errors(names, round_all), strict=True):
            self.step.put(name, rounded.weight, scheme, self._name_errors([name], partial(self.inputs.scale, name)))
            errors = {"output_error": rounded.error, "output_error_rtn": rounded.nearest_error}
            self.step.say(measured={name: errors})
            self.left.remove(name)

    def finish(self) -> None:
        """Round layers that no calibration row reached (an expert that no token chose) to the nearest."""
        knobs, step, target = self.knobs, self.step, self.target
        texts = [f"gptq: {name}: no calibration data reaches it; rounded to the nearest" for name in self.left]
        facts = self.layers.facts.values()
        remark(knobs, step, [*texts, *(text for layer in facts if (text := knobs.fit_remark(layer, target)))])
        for name in self.left:
            scheme = self.layers.schemes[name]
            scale = self._name_errors([name], partial(self.inputs.scale, name))
            step.put(name, nearest(matrix(knobs, step, name), scheme, target), scheme, scale)
        step.say(decisions=[*(knobs.decision(layer, target) for layer in facts), *self.layers.kept])

    def _name_errors(self, names: Sequence[str], do: Callable[[], T]) -> T:
        """Return `do()`; its errors get the layers' names."""
        try:
            return do()
        except ValueError as error:
            raise PassError(f"gptq: {', '.join(names)}: {error}") from error
