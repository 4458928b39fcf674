"""The steps of the `awq` pass: gather what each reading of a block reads, search and fold its scales, then round."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from compress.blocks.folding import tie_scales
from compress.blocks.sharing import summed
from compress.blocks.step import BlockStep
from compress.blocks.stream import Stream
from compress.blocks.streamed import StreamedModel
from compress.context import PassContext, PassResult
from compress.errors import PassError
from compress.facts import Reading
from compress.passes.blockwork import StepLayers, fold_into, matrix, may_be_negative, nearest, remark, step_layers
from compress.quantize.awq import Scaling, search_scales
from compress.quantize.gram import Compute, Gram
from compress.targets import Target

if TYPE_CHECKING:
    from compress.passes.awq import Awq


def apply_awq(knobs: Awq, model: StreamedModel, context: PassContext) -> PassResult:
    """Scale, and perhaps round, a streamed model. Raises PassError naming the layer."""
    stream = Stream(model, context, compute=knobs.compute)
    for step in stream:
        _Work(knobs, step, step_layers(knobs, step, context.target), context.target).run()
    return stream.result()


class _Seen:
    """Of what one reading reads: the Gram matrix and the sum of magnitudes."""

    def __init__(self, width: int, compute: Compute) -> None:
        self.gram, self.magnitude = Gram(width, compute), torch.zeros(width, dtype=torch.float64)

    def add(self, rows: Tensor) -> None:
        self.gram.add(rows)
        self.magnitude += rows.abs().sum(0, dtype=torch.float64)


class _Work:
    """One step."""

    def __init__(self, knobs: Awq, step: BlockStep, layers: StepLayers, target: Target) -> None:
        self.knobs, self.step, self.layers, self.target = knobs, step, layers, target
        self.seen: dict[Reading, _Seen] = {}
        self.importance: dict[str, Tensor] = {}
        self.how: dict[str, str] = {}

    def run(self) -> None:
        readings = [reading for reading in self.step.readings if self.layers.of(reading.layers)]
        if readings:
            self.step.collect(self._visit, readings)
        for reading in readings:
            self._scale(reading)
        if self.knobs.round:
            self._round()
        self._say()

    def _visit(self, reading: Reading, rows: Tensor) -> None:
        self.seen.setdefault(reading, _Seen(rows.shape[1], self.knobs.compute)).add(rows)

    def _scale(self, reading: Reading) -> None:
        names = self.layers.of(reading.layers)
        width = self.layers.facts[names[0]].shape[1]
        seen = self.seen.pop(reading, None) or _Seen(width, self.knobs.compute)
        gram, n_rows = seen.gram.mean(summed)
        magnitude = summed(seen.magnitude).float() / max(n_rows, 1)
        if not torch.isfinite(gram).all():
            raise PassError(f"awq: {', '.join(names)}: NaN or Inf among its inputs on the calibration data")
        obstacle = self._obstacle(reading, n_rows)
        if obstacle is None:
            found = self._searched(reading, names, gram, magnitude)
            how = "left alone: no scale lowers the error"
            if found.scales is not None:
                fold_into(self.step, reading, found.scales)
                gram = gram / torch.outer(found.scales, found.scales)
                how = f"exponent {found.alpha:g}, folded into {reading.source.rpartition('.')[2]}"
            errors = {"error_before": found.error_before, "error_after": found.error_after}
            self.step.say(measured=dict.fromkeys(names, errors))
        self.how |= dict.fromkeys(names, obstacle or how)
        if n_rows:
            self.importance |= dict.fromkeys(names, gram.diagonal() + 1e-3 * gram.diagonal().mean().clamp_min(1e-30))

    def _obstacle(self, reading: Reading, n_rows: int) -> str | None:
        """Why no scale is searched for."""
        if not n_rows:
            return "not scaled: no calibration data reaches it"
        if not reading.source:
            return "not scaled: no module before it can take a scale exactly"
        fixed = [name for name in (*reading.layers, reading.source) if name in self.step.quantized]
        return f"not scaled: {fixed[0]} is rounded already" if fixed else None

    def _searched(self, reading: Reading, names: list[str], gram: Tensor, magnitude: Tensor) -> Scaling:
        weights = [matrix(self.knobs, self.step, name) for name in names]
        schemes = [self.layers.schemes[name] for name in names]
        signed = all(may_be_negative(scheme, self.target) for scheme in schemes)
        tied = partial(tie_scales, reading)
        try:
            return search_scales(weights, [s.weights for s in schemes], gram, magnitude, tied, signed, self.knobs.steps)
        except ValueError as error:
            raise PassError(f"awq: {', '.join(names)}: {error}") from error

    def _round(self) -> None:
        for name, scheme in self.layers.schemes.items():
            weight = matrix(self.knobs, self.step, name)
            try:
                self.step.put(name, nearest(weight, scheme, self.target, self.importance.get(name)), scheme)
            except ValueError as error:
                raise PassError(f"awq: {name}: {error}") from error

    def _say(self) -> None:
        knobs, target = self.knobs, self.target
        starved = [name for name in self.layers.schemes if name not in self.importance]
        verb = "rounded to the nearest, not scaled" if knobs.round else "not scaled"
        texts = [f"awq: {name}: no calibration data reaches it; {verb}" for name in starved]
        facts = self.layers.facts.values()
        remark(knobs, self.step, [*texts, *(text for one in facts if (text := knobs.fit_remark(one, target)))])
        told = []
        for one in facts:
            found = knobs.decision(one, target)
            how = self.how.get(one.name, "not scaled: nothing reads it in a forward pass")
            action = found.action if knobs.round or not how.startswith(("not", "left")) else "kept"
            told.append(replace(found, action=action, reason=f"{found.reason}; {how}"))
        self.step.say(decisions=[*told, *self.layers.kept])
