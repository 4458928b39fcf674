"""Bits under a budget: what each choice costs the model's outputs, measured; then the programme that chooses.

The cost of rounding a group of layers is the Kullback-Leibler divergence of the model's outputs that it leads to, to
second order: with gradients g of log p(y) with respect to a layer's outputs, y drawn from the model's own predictions,
E[(g . dW x)^2] / 2 is that divergence (its Fisher matrix in the layer's outputs). Errors of two outputs, and at two
tokens, are taken as independent, so that two sums are enough: X^T X of what a layer reads and g^2 of each output. dW is
what the pass's own rounding leaves. Of an output that is no logits the cost is its squared error over its energy, by
gradients of random sums of it. On a small decoder the predicted nats were within a fifth of those measured with one
group rounded at a time, and chose what the measured ones would have chosen; relative output errors did not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from compress.blocks.backward import BackwardBlock, first_micro_batches, send_back
from compress.blocks.forward import remove_hooks_on_exit
from compress.blocks.lockstep import layer_input
from compress.blocks.sharing import from_main, main_process, sum_over_processes
from compress.blocks.stream_memory import SCORED_ROWS
from compress.blocks.streamed import StreamedModel
from compress.blocks.work import AFTER, BEFORE
from compress.context import PassContext
from compress.errors import PassError
from compress.facts import InputGroup, LayerFacts, Note
from compress.formats.schemes import Scheme
from compress.passes.mixed_bits import MEASURED_TOKENS, Allocation, BitBudget, Choice, count_choice_bits, name_choice
from compress.passes.weight_only import WeightPass
from compress.rounding.allocate import OutOfReach
from compress.rounding.budgets import BudgetMissed, Prices, choose_measured
from compress.rounding.gram import Gram, shrink_correlations
from compress.rounding.outputs import gives_logits
from compress.rounding.products import Compute
from compress.rounding.quantized_weight import ROWS, QuantizedWeight
from compress.work.bit_budgets import price_bits
from compress.work.block_layers import list_layers, matrix, name_errors
from compress.work.confirm_bits import BEYOND_NOISE, BitsComparison, RoundModel, compare_rounded, take_over
from compress.work.settled import Settled, keep, recall

FILE, COMPARED = "costs.json", "compared.json"
"""In a pass's folder of unfinished work: what was measured, so that a killed run chooses the same without measuring."""
TRIED_ROWS = 256
"""Rows of a weight, evenly spaced, that are rounded at each choice of bits."""
ALIKE = 1.1
"""Times the least predicted loss, up to which a choice without fewer bits than all could have is taken at once. Of
Qwen2.5-Coder 0.5B at the bytes of Q4_K_M it is 1.03, the prediction is right within a third, and to round and compare
two such models took 12 of 27 minutes."""
NATS, ENERGY = "nats", "parts of the outputs' energy"
"""What costs are told in: of logits, and of other outputs."""
RoundRows = Callable[[Tensor, Scheme], QuantizedWeight]
MakeRounding = Callable[[Tensor], RoundRows]
"""Takes X^T X / n of what layers read; gives a function that rounds rows of their weights as the pass does."""
Pass = TypeVar("Pass", bound=WeightPass)


@dataclass(frozen=True)
class Costs:
    """`by_layer`: layer -> what it costs at each of `choices` of bits, in `unit` for each row of the model's output."""

    choices: tuple[Choice, ...]
    unit: str
    by_layer: Mapping[str, tuple[float, ...]]


def settle_bits(
    config: Pass,
    model: StreamedModel,
    context: PassContext,
    make_rounding: MakeRounding,
    round_model: RoundModel[Pass],
    compute: Compute = "float32",
) -> tuple[Pass, Settled]:
    """Return the pass with the bits of each layer chosen, where it asks for a budget; else as it is.

    A choice that gives a group fewer bits than all could have is confirmed: see `compare_rounded`. What is measured is
    kept in `context.work`. PassError: no data, a layer whose numbers are broken, layers that no gradient reaches, or a
    budget that cannot be kept.
    """
    budget = config.budget
    if budget is None:
        return config, Settled()
    taken, _ = config.choose_layers(list_layers(model), context.target)
    allocation = config.find_allocation(taken, model.structure, context.target)
    if allocation.split or allocation.explain_unreachable(budget):
        raise PassError(f"{config.kind}: {allocation.explain_unreachable(budget) or 'bits: overrides split a group'}")
    # first, for it may show that the budget is out of reach, and costs less than what is measured next
    prices = price_bits(config, budget, allocation, taken, model, context) if main_process() else None
    free = {name for group in allocation.groups for name in group}
    layers = {layer.name: layer for layer in taken if layer.name in free}
    costs = _recall_costs(context, budget)
    if costs is None:
        costs = _measure(config, budget, layers, model, context, make_rounding, compute)
        keep(context, FILE, asdict(costs))
    if unseen := [group for group in allocation.groups if not any(name in costs.by_layer for name in group)]:
        way = "give them bits under overrides, or ignore them"
        texts = [f"{', '.join(group)}: no gradient of the model's first output comes back to them" for group in unseen]
        raise PassError([f"{config.kind}: {text}, so that no bits can be chosen; {way}" for text in texts])
    programme = None if prices is None else _Programme(config.kind, budget, allocation, costs, prices, context.log)
    choices: list[_Choice] = from_main(programme and programme.find_choices())
    reasons = {name: _explain(costs, name) for name in layers}
    if len(choices) > 1:
        bold, careful = (config.with_bits(budget.choose(choice.bits, reasons)) for choice in choices)
        comparison = _recall_comparison(context, choices)
        if comparison is None:
            context.log(f"{config.kind}: two choices of bits are rounded to be compared")
            comparison = compare_rounded((bold, careful), round_model, model, context, compute)
            keep(context, COMPARED, {"bits": [choice.bits for choice in choices], **asdict(comparison)})
        take_over(context.work, comparison.best)
        choices = [_confirm(choices, comparison, costs.unit)]
    bits, text = choices[0].bits, choices[0].text
    context.log(f"{config.kind}: {text}")
    notes = (Note("info", f"{config.kind}: {text}"),)
    measured = {name: _tell(costs, name, bits[name]) for name in layers}
    return config.with_bits(budget.choose(bits, reasons)), Settled(notes=notes, measured=measured)


@dataclass(frozen=True)
class _Choice:
    """What each layer gets, and what was chosen in a sentence. `least`: what every group has at least."""

    bits: dict[str, Choice]
    text: str
    least: Choice


@dataclass(frozen=True)
class _Programme:
    """What is chosen from, and under what: finds the choices of least predicted loss."""

    kind: str
    budget: BitBudget
    allocation: Allocation
    costs: Costs
    prices: Prices
    log: Callable[[str], None]

    @cached_property
    def table(self) -> list[list[float]]:
        """Return what each group loses at each choice."""
        by_layer, n_choices = self.costs.by_layer, len(self.costs.choices)
        return [
            [sum(by_layer[name][k] for name in group if name in by_layer) for k in range(n_choices)]
            for group in self.allocation.groups
        ]

    def find_choices(self) -> list[_Choice]:
        """Return the best choice; where it takes a group below what all could have, also the best that does not."""
        try:
            best = choose_measured(self.table, self.prices, self._say)
        except (OutOfReach, BudgetMissed) as error:
            text = f"{self.kind}: bits: {self.budget.describe()} was not reached ({error}); ask for less"
            raise PassError(text) from error
        choices = [self._describe(best.numbers, best.text)]
        equal = max(filter(self._is_kept, range(len(self.costs.choices))), default=0)
        if min(best.numbers) >= equal:
            return choices
        try:
            careful = choose_measured([row[equal:] for row in self.table], _leave_out(self.prices, equal), self._say)
        except (OutOfReach, BudgetMissed):  # as it is counted or timed, not even equal bits keep the budget
            return choices
        numbers = [k + equal for k in careful.numbers]
        apart = self._predict(numbers) > ALIKE * self._predict(best.numbers)
        return [*(choices if apart else []), self._describe(numbers, careful.text)]

    def _describe(self, numbers: Sequence[int], measured: str) -> _Choice:
        """Return a choice with its sentence. `measured`: what it was counted or timed to come to."""
        chosen = [self.costs.choices[k] for k in numbers]
        groups, sizes = self.allocation.groups, self.allocation.sizes
        used = sum(count_choice_bits(n) * size for n, size in zip(chosen, sizes, strict=True))
        used += self.allocation.fixed_bits
        counts = ", ".join(f"{chosen.count(n)} of {name_choice(n)}" for n in self.costs.choices if n in chosen)
        text = f"{measured}; " if measured else ""
        text += f"{used / self.allocation.n_weights:.3f} bits on average: groups of layers: {counts}; "
        text += f"predicted loss {self._predict(numbers):.4g} {self.costs.unit}"
        nominal = self.costs.choices.index(self.budget.nominal)
        if self._is_kept(nominal):
            text += (
                f", {sum(row[nominal] for row in self.table):.4g} with {name_choice(self.budget.nominal)} everywhere"
            )
        bits = {name: n for group, n in zip(groups, chosen, strict=True) for name in group}
        return _Choice(bits, text, self.costs.choices[min(numbers)])

    def _predict(self, numbers: Sequence[int]) -> float:
        """Return what is lost at each group's choice, by the sum of what each costs alone."""
        return sum(row[k] for row, k in zip(self.table, numbers, strict=True))

    def _is_kept(self, number: int) -> bool:
        """Return whether the budget is kept with that choice for every group."""
        return sum(row[number] for row in self.prices.table) <= self.prices.budget

    def _say(self, text: str) -> None:
        self.log(f"{self.kind}: {text}")


def _leave_out(prices: Prices, n_choices: int) -> Prices:
    """Return prices of the other choices than the first ones."""
    measure = prices.measure
    return replace(
        prices,
        table=[row[n_choices:] for row in prices.table],
        measure=None if measure is None else lambda numbers: measure([k + n_choices for k in numbers]),
        cheapest_over=None,
    )


def _confirm(choices: Sequence[_Choice], comparison: BitsComparison, unit: str) -> _Choice:
    """Return the choice that loses less with all layers rounded."""
    best, ways = choices[comparison.best], [f"with {name_choice(choice.least)} and more" for choice in choices]
    pairs = [f"{lost:.4g} {way}" for lost, way in zip(comparison.outputs, ways, strict=True)]
    text = f"{best.text}; with all layers rounded: {', '.join(pairs)} ({unit})"
    if comparison.texts:
        pairs = [f"{nats:.4f} {way}" for nats, way in zip(comparison.texts, ways, strict=True)]
        noise = BEYOND_NOISE * comparison.noise
        text += f", and of the texts' own tokens {', '.join(pairs)} (nats each; up to {noise:.2g} apart is noise)"
    return replace(best, text=text)


def _recall_comparison(context: PassContext, choices: Sequence[_Choice]) -> BitsComparison | None:
    """Return what a killed run measured of the same choices; None where it did not."""
    record = recall(context, COMPARED)
    if record is None or record["bits"] != [choice.bits for choice in choices]:
        return None
    return BitsComparison.from_record(record)


def _tell(costs: Costs, layer: str, choice: Choice) -> dict[str, float]:
    """Return the numbers of one layer for the report."""
    row = costs.by_layer.get(layer, (0.0,) * len(costs.choices))
    names = [name_choice(each).replace(" ", "_") for each in costs.choices]
    at_each = {f"sensitivity_{name}": cost for name, cost in zip(names, row, strict=True)}
    return {"bits": count_choice_bits(choice), "sensitivity": row[costs.choices.index(choice)], **at_each}


def _explain(costs: Costs, layer: str) -> str:
    """Return why a layer has its bits: what it costs at each choice."""
    if layer not in costs.by_layer:
        return "no gradient reaches it"
    row = zip(costs.choices, costs.by_layer[layer], strict=True)
    return "costs " + ", ".join(f"{cost:.2g} at {name_choice(n)}" for n, cost in row) + f", in {costs.unit}"


def _recall_costs(context: PassContext, budget: BitBudget) -> Costs | None:
    """Return what a killed run measured; None where nothing whole is there, or of other choices."""
    record = recall(context, FILE)
    if record is None or tuple(record["choices"]) != budget.ordered:
        return None
    by_layer = {name: tuple(row) for name, row in record["by_layer"].items()}
    return Costs(tuple(record["choices"]), record["unit"], by_layer)


def _measure(
    config: WeightPass,
    budget: BitBudget,
    layers: Mapping[str, LayerFacts],
    model: StreamedModel,
    context: PassContext,
    make_rounding: MakeRounding,
    compute: Compute,
) -> Costs:
    """Send gradients back through the model and round each layer at each choice."""
    choices = budget.ordered
    batches = first_micro_batches(model, context, MEASURED_TOKENS, SCORED_ROWS)
    if not batches:
        raise PassError(f"{config.kind}: there is no calibration data; give the recipe a calibration set")
    drawing = _Drawing(context.seed, gives_logits(model.build()))
    by_layer: dict[str, tuple[float, ...]] = {}
    with closing(send_back(model, context, batches, drawing.draw, compute)) as blocks:
        for _ in context.progress(_list_parts(model), f"{config.kind}: cost of bits"):
            block = next(blocks)
            seen = _Measured(block, layers, compute)
            with seen.watch():
                block.run(seen.begin)
            rows = int(sum_over_processes(torch.tensor(drawing.n_rows)))
            for input_group, names in seen.input_groups.items():
                gram, n_seen = seen.grams[input_group].mean(sum_over_processes)
                gram = shrink_correlations(gram, n_seen)
                with name_errors(config.kind, names):
                    rounding = make_rounding(gram) if n_seen else None
                if rounding is None:
                    continue
                squares = {name: sum_over_processes(seen.squares[name]) / rows for name in names}
                tried = {
                    name: _Tried.take(matrix(config, block.work, name), gram, squares[name])
                    for name in names
                    if squares[name].any()
                }
                costs: dict[str, list[float]] = {name: [] for name in tried}
                for bits in choices:
                    trial = config.with_bits(bits)
                    schemes = {name: trial.setting(layers[name], context.target) for name in tried}
                    for name, cost in _try_schemes(tried, schemes, gram, rounding).items():
                        costs[name].append(cost)
                by_layer |= {name: tuple(row) for name, row in costs.items()}
    unit = NATS if drawing.logits else ENERGY
    return Costs(choices, unit, {name: by_layer[name] for name in layers if name in by_layer})


@dataclass(frozen=True, eq=False)
class _Tried:
    """Rows of a weight that are rounded: [n, in], what each output's error weighs [n], and for how much they stand."""

    rows: Tensor
    squares: Tensor
    factor: float

    @classmethod
    def take(cls, weight: Tensor, gram: Tensor, squares: Tensor) -> _Tried:
        """Take evenly spaced rows; they stand for all by their part of what leaving the weight out would cost."""
        stride = -(-len(weight) // TRIED_ROWS)
        energies = sum(
            float((_energy(part, gram) * weights).sum())
            for part, weights in zip(weight.split(ROWS), squares.split(ROWS), strict=True)
        )
        rows, weights = weight[::stride].float(), squares[::stride]
        part = float((_energy(rows, gram) * weights).sum())
        return cls(rows, weights, energies / part if part > 0 else 0.0)


def _energy(rows: Tensor, gram: Tensor) -> Tensor:
    """Return E (w . x)^2 of each row w [n, in] for inputs with this Gram matrix, float64 [n]."""
    rows = rows.float()
    return (rows @ gram * rows).sum(1, dtype=torch.float64)


def _try_schemes(
    tried: Mapping[str, _Tried], schemes: Mapping[str, Scheme], gram: Tensor, rounding: RoundRows
) -> dict[str, float]:
    """Return what rounding each layer to its scheme costs; those of one scheme are rounded together."""
    costs: dict[str, float] = {}
    for scheme in dict.fromkeys(schemes.values()):
        names = [name for name in tried if schemes[name] == scheme]
        rows = torch.cat([tried[name].rows for name in names])
        left = torch.from_numpy(rounding(rows, scheme).dequantize()).to(rows.device) - rows
        parts = _energy(left, gram).split([len(tried[name].rows) for name in names])
        for name, errors in zip(names, parts, strict=True):
            costs[name] = 0.5 * tried[name].factor * float((tried[name].squares * errors).sum())
    return costs


@dataclass
class _Drawing:
    """Gradients of log p(y) with respect to the model's output, y drawn from the model. `n_rows`: seen so far."""

    seed: int
    logits: bool
    n_rows: int = 0

    def draw(self, number: int, out: Tensor, rows: Tensor | None) -> Tensor:
        """Return the gradient for micro-batch `number`, of the output's shape; zeros at padding."""
        # drawn on the host, so that they are the same wherever the model runs
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        flat = out.reshape(-1, out.shape[-1])
        if self.logits:
            gradient = flat.softmax(-1)
            at = torch.rand(len(flat), 1, generator=generator).to(out.device)
            drawn = torch.searchsorted(gradient.cumsum(-1), at).clamp_max(flat.shape[-1] - 1)
            gradient = gradient.scatter_add(1, drawn, torch.full_like(at, -1.0))
        else:
            noise = torch.randn(flat.shape, generator=generator).to(out.device)
            gradient = noise * (2 / flat.square().sum(-1).mean().clamp_min(1e-30)).sqrt()
        if rows is not None and rows.numel() == len(flat):
            gradient = gradient * rows.reshape(-1, 1)
            self.n_rows += int(rows.sum())
        else:
            self.n_rows += len(flat)
        return gradient.reshape(out.shape)


class _Measured:
    """Of the layers of one part: X^T X of what they read, and the sum of g^2 of each of their outputs."""

    def __init__(self, block: BackwardBlock, layers: Mapping[str, LayerFacts], compute: Compute) -> None:
        self.block, self.number = block.work, 0
        known = self.block.layers
        self.input_groups: dict[InputGroup, list[str]] = {}
        for input_group in self.block.input_groups:
            if names := [name for name in input_group.layers if name in layers and name in known]:
                self.input_groups[input_group] = names
        device = self.block.part.device
        self.grams = {
            input_group: Gram(layers[names[0]].shape[1], compute, device)
            for input_group, names in self.input_groups.items()
        }
        self.squares = {
            name: torch.zeros(layers[name].shape[0], dtype=torch.float64, device=device)
            for names in self.input_groups.values()
            for name in names
        }

    def begin(self, number: int) -> None:
        """Note which micro-batch comes next."""
        self.number = number

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Gather while the context is open."""
        handles: list[Any] = []
        for input_group, names in self.input_groups.items():
            for name in names:
                hook = self._make_hook(name, self.grams[input_group] if name == names[0] else None)
                handles.append(self.block.layers[name].register_forward_hook(hook, with_kwargs=True))
        with remove_hooks_on_exit(handles):
            yield

    def _make_hook(self, name: str, gram: Gram | None) -> Callable[..., Tensor]:
        def square(gradient: Tensor) -> None:
            self.squares[name] += gradient.reshape(-1, gradient.shape[-1]).square().sum(0, dtype=torch.float64)

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tensor:
            if gram is not None:
                gram.add(self.block.drop_padding(layer_input(args, kwargs).detach(), self.number))
            if not out.requires_grad:  # nothing before it needs a gradient
                out = out.detach().requires_grad_()
            out.register_hook(square)
            return out

        return hook


def _list_parts(model: StreamedModel) -> Sequence[str]:
    """Return what gradients come through: the blocks, and what is around them."""
    names = [block.name for block in model.structure.blocks]
    return names if names == [""] else [AFTER, *names, *([BEFORE] if model.structure.before else [])]
