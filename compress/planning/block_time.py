"""How long it takes to send a model through its blocks here, and what passes do to them: counts times rates.

Each term is a method with a name; shapes and tokens come from the plan's facts, rates from `compress.planning.rates`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from compress.blocks import activations
from compress.facts import FLOAT_BYTES, ModelFacts, Reading
from compress.formats.schemes import WeightScheme
from compress.passes.base import TRIED_ROWS, BlockWorkload
from compress.passes.mixed_bits import COMPARED_TOKENS
from compress.planning.rates import Rates
from compress.quantize.awq import ROUGH
from compress.quantize.gptq import JUDGED_ROWS, Rules
from compress.quantize.gram import NARROW, ROWS, STRIPES, Compute

PASSED_OVER = 3
"""Times that a forward reads or writes each output of a layer beside the product: norms, gates, sums, rotary angles."""
PACKED = 8
"""Times that a rounded weight is read or written as float32 on its way into the block and its file."""
READ_AGAIN = 3
"""Times that a finished block's file is hashed: as it is written, as it goes into the cache, as it is taken from it."""
LEARNED_FORWARDS = 3.0
"""Of a learning step: one, and its gradients with respect to inputs and weights."""
SENT_BACK = 3.0
"""Of a forward, as gradients with respect to inputs alone are taken: there, and each block once more and back."""
TRIED_FOR_BITS = 256
"""As `compress.work.mixed_bits.TRIED_ROWS`."""
CHECKS, HELD_OUT = 5, 0.125
"""Looks at the micro-batches kept aside, the first and last included, and their part."""


@dataclass(frozen=True)
class Tokens:
    """Rows that go through a block. `n`: all; `a_sample`: of one text, which attention sees together."""

    n: int
    a_sample: int = 1


@dataclass(frozen=True)
class BlockTime:
    """The seconds of work on the blocks of a model of these facts."""

    facts: ModelFacts
    rates: Rates

    def pass_seconds(
        self,
        work: BlockWorkload,
        scheme: WeightScheme | None,
        tokens: Tokens,
        rounded: Collection[str] | None,
    ) -> float:
        """Return the seconds of a pass. `scheme`: of its weights; `rounded`: the layers it works on, None: all."""
        chosen = [layer for layer in self._list_layers() if rounded is None or layer in rounded]
        seconds = self.read_seconds(2 if work.float_forwards else 1) + self.write_seconds(chosen)
        seconds += work.forwards * self.forward_seconds(tokens, work.compute)
        seconds += work.float_forwards * self.forward_seconds(tokens)
        if work.grams:
            seconds += self.gram_seconds(tokens, work.compute, chosen)
        if work.inversions:
            seconds += self.inversion_seconds(chosen)
        if scheme is None:
            return seconds
        if work.gradient_rows:
            seconds += self.choosing_seconds(work, scheme, tokens, chosen)
        if work.searches:
            seconds += work.searches * self._count(chosen) / self._rounding_rate(scheme, work.grams)
        if work.trials:
            seconds += work.trials * self.trial_seconds(scheme, chosen)
        if work.solver_steps:
            seconds += self._count(chosen) / self.rates.solve_hqq(scheme, work.solver_steps)
        if work.sweeps is not None:
            seconds += self.column_seconds(scheme, work.sweeps, work.compute, chosen)
        if work.learning_steps:
            seconds += self.learning_seconds(work, scheme, tokens, chosen)
        if work.compared:
            some = Tokens(min(COMPARED_TOKENS, tokens.n), tokens.a_sample)
            once = self.pass_seconds(replace(work, gradient_rows=0, compared=0), scheme, some, rounded)
            answers = 2 * (self.read_seconds() + self.forward_seconds(some, work.compute) + self.head_seconds(some.n))
            seconds += work.compared * (once + answers)
        return seconds

    def read_seconds(self, times: float = 1.0) -> float:
        """Return the seconds to read the blocks' weights from their files into float32."""
        return times * self._count(self._list_layers()) / self.rates.read

    def write_seconds(self, chosen: Collection[str]) -> float:
        """Return the seconds to pack rounded weights, put them into the block, write and hash its file."""
        n = self._count(chosen)
        return n * (PACKED * FLOAT_BYTES / self.rates.touch + 1 / self.rates.write + READ_AGAIN / self.rates.hash)

    def forward_seconds(self, tokens: Tokens, compute: Compute = "float32") -> float:
        """Return the seconds of one pass of the tokens through all blocks, attention's scores included."""
        if not tokens.n:
            return 0.0
        layers = self._shapes()
        inside = [shape for name, shape in layers.items() if name in self._inside()]
        products = sum(2 * math.prod(shape) for shape in inside)
        rows, outputs = min(activations.ROWS, tokens.n), [FLOAT_BYTES * shape[0] for shape in inside]
        touched = sum(PASSED_OVER * n_bytes / self.rates.pass_over(rows * n_bytes) for n_bytes in outputs)
        cast = 0.0
        if compute == "bfloat16":  # each micro-batch casts the weights anew
            micro_batches = math.ceil(tokens.n / activations.ROWS)
            cast = micro_batches * self._count(self._inside()) * 6 / self.rates.touch
        return tokens.n * (products / self.rates.product(compute) + touched) + self.attention_seconds(tokens) + cast

    def attention_seconds(self, tokens: Tokens) -> float:
        """Return the seconds of attention, fused as passes run it, between the tokens of each text."""
        structure, shapes = self.facts.structure, self._shapes()
        assert structure is not None
        seconds = 0.0
        for reading in structure.readings:
            if reading.how == "value" and reading.head_size:
                heads = shapes[reading.layers[0]][1] // reading.head_size
                seconds += self.rates.attend(heads, reading.head_size, tokens.a_sample)
        return seconds * tokens.n / tokens.a_sample

    def gram_seconds(self, tokens: Tokens, compute: Compute, chosen: Collection[str]) -> float:
        """Return the seconds of X^T X of what each group of layers reads, and of adding the products up."""
        seconds = 0.0
        part = activations.ROWS if compute == "float32" else ROWS
        for n, _ in self._groups(chosen):
            share = 1.0 if n < NARROW else (STRIPES + 1) / (2 * STRIPES)
            seconds += 2 * share * tokens.n * n**2 / self.rates.product(compute)
            sums = 20 if compute == "float32" else 12  # bytes: a float64 total read and written, a float32 product read
            seconds += math.ceil(tokens.n / part) * share * n**2 * sums / self.rates.touch
        return seconds

    def inversion_seconds(self, chosen: Collection[str]) -> float:
        """Return the seconds to factor and invert each group's Hessian."""
        return sum(n**3 for n, _ in self._groups(chosen)) / self.rates.invert

    def column_seconds(self, scheme: WeightScheme, sweeps: int, compute: Compute, chosen: Collection[str]) -> float:
        """Return the seconds of GPTQ's loop and the sweeps behind it: columns, and products of errors with Hessians."""
        columns = self.rates.columns(scheme, Rules(sweeps=sweeps, compute=compute))
        seconds = 0.0
        for n, outputs in self._groups(chosen):
            m = sum(outputs)
            seconds += columns.seconds(n, m) + (1 + 2 * sweeps) * m * n**2 / self.rates.update(compute)
            seconds += 6 * sum(min(o, JUDGED_ROWS) for o in outputs) * n**2 / self.rates.product("float32")
            if compute == "bfloat16":  # a sweep casts the Gram matrix
                seconds += sweeps * 6 * n**2 / self.rates.touch
        return seconds

    def choosing_seconds(
        self, work: BlockWorkload, scheme: WeightScheme, tokens: Tokens, chosen: Collection[str]
    ) -> float:
        """Return the seconds of measuring what each choice of bits costs: gradients, and some rows of each weight."""
        some = Tokens(min(work.gradient_rows, tokens.n), tokens.a_sample)
        seconds = 2 * self.read_seconds() + SENT_BACK * self.forward_seconds(some, work.compute)
        seconds += 3 * self.head_seconds(some.n) + self.gram_seconds(some, work.compute, chosen)
        shapes = self._shapes()
        rows = {name: min(shapes[name][0], TRIED_FOR_BITS) for name in chosen if name in shapes}
        if work.sweeps is not None:
            columns = self.rates.columns(scheme, Rules(sweeps=work.sweeps, compute=work.compute))
            groups = [(n, [min(size, TRIED_FOR_BITS) for size in outputs]) for n, outputs in self._groups(chosen)]
            each = sum(columns.seconds(n, sum(outputs)) for n, outputs in groups)
            seconds += self.inversion_seconds(chosen)
        else:
            weights = sum(shapes[name][1] * n for name, n in rows.items())
            each = weights / self._rounding_rate(scheme, work.grams)
        measured = sum(2 * shapes[name][1] ** 2 * (shapes[name][0] + work.choices * n) for name, n in rows.items())
        return seconds + work.choices * each + measured / self.rates.product("float32")

    def trial_seconds(self, scheme: WeightScheme, chosen: Collection[str]) -> float:
        """Return the seconds of one trial of AWQ's for every group that a scale can be folded for."""
        seconds = 0.0
        for reading, (n, _) in zip(self._readings(chosen), self._groups(chosen), strict=True):
            if reading.source:
                seconds += TRIED_ROWS * n / self.rates.round(scheme, True, ROUGH)
                seconds += 4 * TRIED_ROWS * n**2 / self.rates.product("float32") + 12 * n**2 / self.rates.touch
        return seconds

    def learning_seconds(
        self, work: BlockWorkload, scheme: WeightScheme, tokens: Tokens, chosen: Collection[str]
    ) -> float:
        """Return the seconds of learned rounding: steps of tokens with gradients, and looks at what is kept aside."""
        rows = min(work.learning_rows, tokens.n) or tokens.n
        step = LEARNED_FORWARDS * self.forward_seconds(Tokens(rows, tokens.a_sample))
        look = self.forward_seconds(Tokens(max(int(HELD_OUT * tokens.n), 1), tokens.a_sample))
        if work.whole:
            step += LEARNED_FORWARDS * self.head_seconds(rows) + self.forward_seconds(Tokens(rows, tokens.a_sample))
        learned = work.learning_steps * (step + self._count(chosen) / self.rates.learn(scheme))
        return min(learned, work.max_learning_seconds) + CHECKS * look

    def head_seconds(self, rows: int) -> float:
        """Return the seconds of the products behind the blocks, of so many tokens."""
        return rows * sum(2 * math.prod(shape) for _, shape in self._late()) / self.rates.product("float32")

    def scoring_seconds(self, tokens: Tokens, rounded: Collection[str] | None) -> float:
        """Return the seconds of sending texts through the float model and the compressed one, and comparing logits."""
        chosen = [layer for layer in self._list_layers() if rounded is None or layer in rounded]
        unpacked = self._count(chosen) * PACKED * FLOAT_BYTES / self.rates.touch
        logits = max((shape[0] for _, shape in self._late()), default=0)
        late = sum(math.prod(shape) for _, shape in self._late())
        both = 2 * (self.read_seconds() + self.forward_seconds(tokens) + self.head_seconds(tokens.n))
        compared = tokens.n * logits / self.rates.compare(logits) if logits else 0.0
        return both + unpacked + 2 * late / self.rates.read + compared

    def _list_layers(self) -> list[str]:
        structure = self.facts.structure
        assert structure is not None
        return [layer for reading in structure.readings for layer in reading.layers]

    def _inside(self) -> set[str]:
        structure = self.facts.structure
        assert structure is not None
        return {layer for block in structure.blocks for layer in block.layers}

    def _shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {layer.name: layer.shape for layer in self.facts.layers}

    def _late(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return (layer, shape) of what reads what the blocks give."""
        structure, shapes = self.facts.structure, self._shapes()
        assert structure is not None
        return [(name, shapes[name]) for reading in structure.after for name in reading.layers if name in shapes]

    def _count(self, layers: Collection[str]) -> int:
        shapes = self._shapes()
        return sum(math.prod(shapes[name]) for name in layers if name in shapes)

    def _readings(self, chosen: Collection[str]) -> list[Reading]:
        structure, wanted = self.facts.structure, set(chosen)
        assert structure is not None
        return [reading for reading in structure.readings if wanted & set(reading.layers)]

    def _groups(self, chosen: Collection[str]) -> list[tuple[int, list[int]]]:
        """Return (inputs, outputs of each layer to round) of each group of layers that read one tensor."""
        shapes, wanted = self._shapes(), set(chosen)
        groups = []
        for reading in self._readings(chosen):
            found = [shapes[name] for name in reading.layers if name in wanted and name in shapes]
            groups.append((found[0][1] if found else 0, [shape[0] for shape in found]))
        return groups

    def _rounding_rate(self, scheme: WeightScheme, weighted: bool) -> float:
        if scheme.kind != "int":  # one scale from the largest, and one rounding
            return self.rates.touch / (PACKED * FLOAT_BYTES)
        return self.rates.round(scheme, weighted)
