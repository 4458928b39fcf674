"""What the weight-rounding passes share: which layers, which numbers in which groups, what the target says of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import model_validator

from compress.errors import PassError
from compress.facts import (
    SMALL_TABLE,
    LayerDecision,
    LayerFacts,
    ModelFacts,
    Note,
    PassPlan,
    Structure,
    assign_roles,
    describe_groups,
    find_uncalled,
    group_names,
    matches,
)
from compress.formats.schemes import BLOCK_FALLBACKS, PRESETS, Scheme, WeightScheme
from compress.formats.targets import Format, Target
from compress.passes.base import DataSize, Pass, PassCost, Stage
from compress.passes.choosing import choose_layers, list_some, pattern_problems, target_word, tell_float_share
from compress.passes.int8 import Int8
from compress.passes.layer_schemes import (
    count_stored_bits,
    describe_scheme,
    explain_misfit,
    find_width,
    fit_group_size,
    format_of,
)
from compress.passes.mixed_bits import (
    MEASURED_TOKENS,
    Allocation,
    BitBudget,
    Bits,
    Choice,
    ChosenBits,
    find_allocation,
    plan_mixed_bits,
)
from compress.passes.weight_numbers import (
    AUTO,
    GroupSize,
    TableScheme,
    WeightNumbers,
    WeightOverride,
    make_scheme_field,
    read_table_scheme,
)
from compress.specs import LayerPattern
from runtime.tasks import find_task

if TYPE_CHECKING:
    from compress.rounding.state import GraphState

TABLE_KEYS = {"table": "embeddings", "head": "lm_head", "tied": "embeddings"}
"""Role of a layer -> the key that rounds it."""
MUCH = 0.25
"""Of what is left, from which tables that stay float are told: of Qwen2.5-Coder-0.5B in 4 bits they are 83 %; of the
weights to round, from which narrow layers are no exception but a group size that does not suit the model."""
NARROW = "fewer inputs than a group, or a single output"
IDLE = "no forward pass calls it"
UNPACKABLE = "its engine reads it as floats alone"
LOWEST_OPSET = 20
"""Of a graph that can take 4-bit and block-wise weights, which opset 21 has, without being converted."""
GROUP_SIZE = 32
"""Where neither the recipe nor a scheme gives one: every target has kernels for it."""


class WeightPass(WeightNumbers, Pass):
    """Weights of matrix products in few bits; a pass says how each weight is rounded."""

    lowest_opset: ClassVar[int] = LOWEST_OPSET
    takes_block_formats: ClassVar[bool] = False
    """Whether it rounds to the numbers of llama.cpp's own formats."""
    takes_mixed_bits: ClassVar[bool] = False
    """Whether it chooses the bits of each layer under a budget."""

    # The scheme's numbers are filled in, not looked up later: what is written out then says what is done.
    bits: Bits | BitBudget = make_scheme_field("bits", 4)
    """Bits for each weight; not given: the scheme's, or 4 without a scheme. `{average: 3.0, choices: [2, 3, 4]}`: those
    of each layer are chosen by what they cost the model's outputs (`gptq`, `rtn`, and `tune` where it rounds). In the
    place of `average`: `size_ratio`, `speedup`."""
    group_size: GroupSize | None = None
    """Inputs that share one scale; -1 for one scale for each output channel. Not given: the scheme's, as
    compressed-tensors has it (W4A16: 128, W8A16 and W8A8: -1), or 32 without a scheme."""
    symmetric: bool = make_scheme_field("symmetric", True)
    """False: unsigned weights with a zero point for each group; not given: the scheme's, or true without a scheme."""
    targets: tuple[LayerPattern, ...] = ()
    """Layers to round, by name, `re:` pattern or type; empty: every matrix product. Those that no call reaches, as
    towers that texts do not, are taken where a name or a pattern selects them, by a pass that needs no data."""
    ignore: tuple[LayerPattern, ...] = ("lm_head",)
    """Layers that stay float. `lm_head` given as a key takes the output layer all the same."""
    embeddings: TableScheme | None = None
    """Tables of embeddings: W8, W4, or another scheme's name for weights alone, in the pass's groups; rounded to the
    nearest. auto: 4 bits where the model loses next to nothing by them, else 8 (6 beside llama.cpp's K formats). Not
    given: float. Small ones (positions, token types) stay float."""
    lm_head: TableScheme | None = None
    """The output layer, whatever its name, likewise, by the pass's own method on its own inputs. Where it shares its
    weight with the embeddings there is one table, and either key is for both."""
    overrides: tuple[WeightOverride, ...] = ()
    """Exceptions for some of the layers; where several select a layer, later ones win key by key."""
    indivisible: Literal["keep_narrow", "refuse", "fit"] = "keep_narrow"
    """What becomes of a layer whose inputs `group_size` does not divide. keep_narrow: an error in the plan, but those
    with fewer inputs than a group, and those with a single output, stay float; refuse: an error for these, too, and for
    what the engine reads as floats alone (experts in one tensor), which stays float otherwise; fit: the nearest group
    size that divides them and that the target takes, else one scale for each output channel, named in the report."""

    @model_validator(mode="after")
    def _check_mixed_bits(self) -> WeightPass:
        if isinstance(self.bits, BitBudget) and not self.takes_mixed_bits:
            raise ValueError(f"bits are not chosen by {self.kind}; give a number, or use gptq, rtn or tune")
        return self

    def stage_on(self, facts: ModelFacts) -> Stage:
        return "blocks" if facts.source == "torch" else "graph"

    def unfit(self, layer: LayerFacts) -> str | None:
        """Return why this layer cannot be taken, or None."""
        if layer.custom:
            return f"a subclass of {layer.type} with a forward of its own, for which engines have no layer"
        if layer.role == "router":
            return "its largest outputs choose what runs (a router)"
        if layer.role == "beside":
            return "beside the blocks that config.json counts (a tower, or next-token predictors)"
        if layer.role == "idle" and not any(matches(pattern, layer.name) for pattern in self.targets):
            return IDLE
        if self.embeddings is not None and layer.type == "Embedding" and not layer.role:
            return f"stays float: smaller than a {1 / SMALL_TABLE:.0f}th of the largest table"
        if layer.op not in ("MatMul", "Gemm"):
            return "not a matrix product"
        return NARROW if self.indivisible == "keep_narrow" and self._is_narrow(layer) else None

    def _is_narrow(self, layer: LayerFacts) -> bool:
        return layer.shape[0] == 1 or layer.shape[1] < self.find_scheme(layer).weights.group_size

    def table_scheme(self, layer: LayerFacts) -> str | None:
        """Return the scheme that `embeddings` or `lm_head` asks for a layer; None: it is no table, or neither does."""
        keys = {"table": self.embeddings, "head": self.lm_head, "tied": self.lm_head or self.embeddings}
        asked = keys.get(layer.role)
        return self.table_choices[-1] if asked == AUTO else asked

    @property
    def open_tables(self) -> tuple[str, ...]:
        """Return the keys of tables whose bits are still to be chosen."""
        return tuple(key for key in dict.fromkeys(TABLE_KEYS.values()) if getattr(self, key) == AUTO)

    @property
    def table_choices(self) -> tuple[str, str]:
        """Return the schemes of which `auto` takes one, the fewer bits first; as long as none is taken the last holds.

        ONNX Runtime looks up no fewer than four.
        """
        return ("Q4_K", "Q6_K") if self.base().weights.block else ("W4A16", "W8A16")

    @property
    def uses_gates(self) -> bool:  # type: ignore[override]
        """Return whether bits of tables are still to be chosen: by a part of what the gates allow to lose."""
        return bool(self.open_tables)

    @property
    def takes_tables(self) -> bool:
        """Return whether the recipe asks for embeddings or the output layer in few bits."""
        return self.embeddings is not None or self.lm_head is not None

    def choose_layers(
        self, layers: Sequence[LayerFacts], target: Target
    ) -> tuple[list[LayerFacts], list[LayerDecision]]:
        """Choose the layers to round, and give a decision for each of the others."""

        def unfit(layer: LayerFacts) -> str | None:
            keeps = layer.unpackable and target.needs_floats and self.indivisible != "refuse"
            return self.unfit(layer) or (UNPACKABLE if keeps else None)

        tables = [layer for layer in layers if self.table_scheme(layer)]
        others = [layer for layer in layers if not self.table_scheme(layer)]
        ignore = [pattern for pattern in self.ignore if pattern != "lm_head"]  # the default: the key goes before it
        taken, kept = choose_layers(others, self.targets, self.ignore, unfit)
        more_taken, more_kept = choose_layers(tables, (), ignore, lambda layer: None)
        return _in_order(layers, [*taken, *more_taken]), [*kept, *more_kept]

    def setting(self, layer: LayerFacts, target: Target) -> Scheme:
        """Return the scheme that one layer gets: groups fitted to its inputs with `indivisible: fit`."""
        scheme = self.find_scheme(layer)
        if self.indivisible != "fit" or scheme.weights.group_size < 1 or scheme.weights.kind == "float":
            return scheme
        if block := scheme.weights.block:
            return BLOCK_FALLBACKS.get(scheme.name, scheme) if layer.shape[1] % block else scheme
        size = fit_group_size(scheme.weights.group_size, layer.shape[1], target.kernels(scheme.weights.bits))
        return scheme.with_group(size)

    def find_scheme(self, layer: LayerFacts) -> Scheme:
        """Return the scheme that the recipe asks for, whether the layer can have it or not."""
        name = self.table_scheme(layer)
        scheme = self.base() if name is None else self._make_table_scheme(name)
        if name is None and isinstance(self.bits, BitBudget):
            scheme = self._make_scheme(self.bits.find(layer.name))
        for override in self.overrides:
            if any(matches(p, layer.name, layer.type, layer.op, layer.alias) for p in override.targets):
                scheme = self._apply_override(scheme, override)
        return scheme

    def base(self) -> Scheme:
        """Return the scheme for a layer without an override."""
        if self.scheme is not None:
            scheme = PRESETS[self.scheme]
            return scheme if self.group_size is None else scheme.with_group(self.group_size)
        return self._make_scheme(self.bits.nominal if isinstance(self.bits, BitBudget) else self.bits)

    def _make_scheme(self, choice: Choice) -> Scheme:
        """Return the scheme of a choice of bits, or of one of llama.cpp's formats."""
        if isinstance(choice, str):
            return PRESETS[choice]
        return Scheme(WeightScheme(choice, GROUP_SIZE if self.group_size is None else self.group_size, self.symmetric))

    @property
    def budget(self) -> BitBudget | None:
        """Return the budget under which bits are still to be chosen; None where they are known."""
        return self.bits if isinstance(self.bits, BitBudget) and not isinstance(self.bits, ChosenBits) else None

    def with_bits(self, bits: Choice | BitBudget) -> Self:
        """Return the same pass with other bits, or with one of llama.cpp's formats."""
        if isinstance(bits, str):
            weights = PRESETS[bits].weights
            numbers = {"bits": weights.bits, "symmetric": weights.symmetric, "group_size": None}
            return self.model_copy(update={"scheme": bits, **numbers})
        return self.model_copy(update={"bits": bits})

    def find_allocation(self, taken: Sequence[LayerFacts], structure: Structure, target: Target) -> Allocation:
        """Return what is to be chosen, under a budget of bits, for the layers that the pass takes.

        Those that no forward calls are left out: nothing can be measured of them.
        """
        idle = find_uncalled(taken, structure)
        taken = [layer for layer in taken if layer not in idle]
        tables = [layer.name for layer in taken if self.table_scheme(layer)]
        fixing = [o for o in self.overrides if o.bits is not None or o.scheme is not None]
        given = {
            layer.name: self.find_scheme(layer).weights.bits
            for layer in taken
            if layer.name in tables
            or any(matches(p, layer.name, layer.type, layer.op) for o in fixing for p in o.targets)
        }
        return find_allocation(taken, given, tables, structure, target)

    def _make_table_scheme(self, name: str) -> Scheme:
        """Return a table's scheme in the pass's groups; a format whose scales are its own keeps its groups."""
        scheme, base = PRESETS[name], self.base().weights
        size = GROUP_SIZE if base.block else base.group_size
        return scheme.with_group(size or -1) if scheme.weights.scales == "float" else scheme

    def _apply_override(self, scheme: Scheme, override: WeightOverride) -> Scheme:
        if override.scheme is not None:
            scheme = PRESETS[override.scheme]
        given = {
            key: value for key in ("bits", "group_size", "symmetric") if (value := getattr(override, key)) is not None
        }
        if given and scheme.weights.block and override.scheme is None:  # whose numbers are its own
            scheme = Scheme(WeightScheme(group_size=GROUP_SIZE))
        return replace(scheme, weights=replace(scheme.weights, **given)) if given else scheme

    def check(self, facts: ModelFacts, target: Target) -> PassPlan:
        if self.budget is not None:
            return plan_mixed_bits(
                self.kind,
                self.budget,
                facts,
                target,
                lambda bits: self.with_bits(bits)._plan_layers(facts, target),
                lambda taken, structure: self.find_allocation(taken, structure, target),
            )
        return self._offer_tables(self._plan_layers(facts, target), facts, target)

    def _plan_layers(self, facts: ModelFacts, target: Target) -> PassPlan:
        """Return the plan with bits that are given for each layer."""
        taken, kept = self.choose_layers(facts.layers, target)
        if self.needs_calibration and facts.structure is not None:
            idle = find_uncalled(taken, facts.structure)
            taken = [layer for layer in taken if layer not in idle]
            kept += [LayerDecision(layer.name, layer.type, "kept", IDLE) for layer in idle]
        kept_narrow = {decision.layer for decision in kept if decision.reason == NARROW}
        thin = [layer for layer in facts.layers if layer.name in kept_narrow and layer.shape[0] > 1]
        if sum(layer.n_weights for layer in thin) > MUCH * sum(layer.n_weights for layer in (*taken, *thin)):
            taken = _in_order(facts.layers, [*taken, *thin])
            kept = [decision for decision in kept if decision.layer not in {layer.name for layer in thin}]
        problems = pattern_problems(facts.layers, self.kind, self._collect_patterns())
        if not taken:
            rounded = next((layer for layer in facts.layers if layer.bits < 16), None)
            before = f"; {rounded.name} is in {rounded.bits:g} bits already" if rounded is not None else _tell_why(kept)
            if any(decision.reason == UNPACKABLE for decision in kept):
                before = f": {target.name} reads those that the model has as floats alone; use target: vllm"
            problems.append(f"{self.kind}: no matrix product is left to round{before}")
        settings = {layer.name: self.setting(layer, target) for layer in taken}
        notes, more = self._ask_target(taken, settings, target)
        notes += self._tell_open_tables()
        reached = [decision for decision in kept if decision.reason != IDLE]
        notes += tell_float_share(self.kind, facts, reached, self.unfit, ("int8", Int8().unfit))
        if narrow := [decision.layer for decision in kept if decision.reason == NARROW]:
            notes.append(Note("info", f"{self.kind}: {list_some(narrow)} stay float: {NARROW}"))
        if idle_names := [decision.layer for decision in kept if decision.reason == IDLE]:
            notes.append(self._tell_idle(idle_names, facts))
        if floats := [decision.layer for decision in kept if decision.reason == UNPACKABLE]:
            why = "experts in one tensor, or weights that the model's own code sets as it loads, or reads by itself"
            said = f"{target.name} reads them as floats alone ({why}); target: vllm packs them"
            notes.append(Note("warning", f"{self.kind}: {len(floats)} layers ({list_some(floats)}) stay float: {said}"))
        problems += more
        formats = sorted({s.name for s in settings.values() if s.weights.block})
        if formats and not self.takes_block_formats:
            problems.append(f"{self.kind}: does not round to {formats[0]}; use gptq or rtn")
        problems += [
            text
            for layer in taken
            if (text := explain_misfit(self.kind, layer, settings[layer.name], target, self.ways))
        ]
        problems += [*self._graph_problems(facts, settings), *self._table_problems(facts, settings)]
        if self.open_tables and target.reads == "checkpoint":
            way = f"what {target.name} takes of tables depends on their bits; give a scheme, or leave it out"
            problems.append(f"{self.kind}: {self.open_tables[0]}: auto: {way}")
        notes += [Note("warning", text) for layer in taken if (text := self.fit_remark(layer, target))]
        decisions = [self.decision(layer, target) for layer in taken]
        decodes = find_task(facts.task).generates
        widths = {
            layer.name: find_width(settings[layer.name].weights, target, decodes, layer.is_table) for layer in taken
        }
        after = facts.with_bits(
            {layer.name: count_stored_bits(settings[layer.name], layer, widths[layer.name]) for layer in taken}
        )
        after = self._untie(after, settings)
        return PassPlan(after, (*decisions, *kept), tuple(notes), tuple(problems), settings)

    def _offer_tables(self, plan: PassPlan, facts: ModelFacts, target: Target) -> PassPlan:
        """Return the plan with the keys that would round tables, where as floats they are much of what is left.

        The target takes them in few bits. Readers of checkpoints take them beside other bits in part alone, which is
        the export's to say.
        """
        after = plan.facts
        tables = [layer for layer in after.distinct_layers() if layer.role in TABLE_KEYS and layer.bits >= 16]
        share = sum(layer.n_bytes for layer in tables) / max(after.n_bytes, 1)
        if plan.problems or self.takes_tables or share < MUCH or target.reads == "checkpoint":
            return plan
        offers = choose_table_schemes((TABLE_KEYS[layer.role] for layer in tables), target)
        if self.needs_calibration and {*map(read_table_scheme, offers.values())} == {self.table_choices[-1]}:
            offers = dict.fromkeys(offers, AUTO)
        schemes = {key: read_table_scheme(name) for key, name in offers.items()}
        smaller = self.model_copy(update=schemes)._plan_layers(facts, target)
        if smaller.problems:
            return plan
        names, given = " and ".join(layer.name for layer in tables), ", ".join(f"{k}: {v}" for k, v in offers.items())
        better, as_is = (facts.n_bytes / model.n_bytes for model in (smaller.facts, after))
        text = (
            f"{self.kind}: {names} stay float, {share:.0%} of the bytes that are left: `{given}` makes the weights "
            f"{better:.1f}x smaller, not {as_is:.1f}x"
        )
        return replace(plan, notes=(*plan.notes, Note("info", text)), offers=offers)

    def _untie(self, facts: ModelFacts, settings: Mapping[str, Scheme]) -> ModelFacts:
        """Give layers that are rounded apart from the embeddings whose weight they shared one of their own."""
        layers = self.untie_layers(facts.layers, settings)
        return facts if layers == facts.layers else replace(facts, layers=assign_roles(layers, facts.structure))

    def untie_layers(self, layers: Sequence[LayerFacts], rounded: Collection[str]) -> tuple[LayerFacts, ...]:
        """Return the layers, those that are `rounded` apart from a table that they shared with weights of their own."""
        return tuple(
            replace(layer, weight=f"{layer.name}.weight")
            if layer.role == "tied" and layer.name in rounded and not self.table_scheme(layer)
            else layer
            for layer in layers
        )

    @property
    def time_budget(self) -> Literal["graph", "module"] | None:
        return None if self.budget is None or self.budget.speedup is None else "graph"

    @property
    def ways(self) -> str:
        """Say what can be done, besides another size, for a layer that the group size does not divide."""
        return "or ignore it" if self.indivisible == "fit" else "set indivisible: fit, or ignore it"

    def decision(self, layer: LayerFacts, target: Target) -> LayerDecision:
        scheme = self.setting(layer, target)
        weights = scheme.weights
        plain = weights.kind == "int" and weights.scales == "float" and scheme.activations is None
        action = f"w{weights.bits}" if plain else scheme.name.lower()
        reason = describe_scheme(scheme)
        if (wanted := self.find_scheme(layer)).name != scheme.name:
            reason += f": {layer.shape[1]} inputs, which the {wanted.weights.block} of {wanted.name} do not divide"
        elif (size := wanted.weights.group_size) != weights.group_size:
            reason += f": {layer.shape[1]} inputs, which {size} does not divide"
        if isinstance(self.bits, BitBudget) and (why := self.bits.explain(layer.name)):
            reason += f": {why}"
        if layer.role == "tied" and self.table_scheme(layer):
            reason += ", one table for embeddings and output layer"
        return LayerDecision(layer.name, layer.type, action, reason)

    def fit_remark(self, layer: LayerFacts, target: Target) -> str | None:
        """Return a sentence for a layer that gets other groups than the recipe asks for, or None."""
        asked, given = self.find_scheme(layer), self.setting(layer, target)
        wanted, size = asked.weights.group_size, given.weights.group_size
        if asked.name != given.name:
            inputs = f"{layer.shape[1]} inputs, which the {asked.weights.block} of {asked.name} do not divide"
            return f"{self.kind}: {layer.name} has {inputs}: {describe_scheme(given)}"
        if wanted == size:
            return None
        how = f"group_size {size}" if size > 0 else "one scale for each output channel"
        text = (
            f"{self.kind}: {layer.name} has {layer.shape[1]} inputs, which group_size {wanted} does not divide: {how}"
        )
        kernels = target.kernels(self.find_scheme(layer).weights.bits)
        return text if not kernels or size in kernels else f"{text}, slower than float32 on {target.name}"

    def schemes(self) -> list[Scheme]:
        """Return all schemes that the recipe asks for."""
        asked = [name for name in (self.embeddings, self.lm_head) if name is not None]
        names = [each for name in asked for each in (self.table_choices if name == AUTO else (name,))]
        tables = list(map(self._make_table_scheme, names))
        bases = [self.base()]
        if isinstance(self.bits, BitBudget):
            bases = [self._make_scheme(choice) for choice in self.bits.choices]
        return [*bases, *tables, *(self._apply_override(base, o) for base in bases for o in self.overrides)]

    def estimate_cost(self, facts: ModelFacts, data: DataSize) -> PassCost:
        cost = super().estimate_cost(facts, data)
        if self.budget is None:
            return cost
        tried = 1 + len(self.budget.choices)  # each choice of bits is rounded and measured
        return replace(cost, forwards=tried * cost.forwards, gradient_tokens=MEASURED_TOKENS)

    @property
    def formats(self) -> tuple[Format, ...]:
        return tuple(dict.fromkeys(map(format_of, self.schemes())))

    def graph_layers(self, model: GraphState, target: Target) -> tuple[list[LayerFacts], list[LayerDecision]]:
        """Choose the layers of a graph to round, and give a decision for each of the others.

        Raises PassError if its opset is too low.
        """
        opset = model.model.opset_imports[""]
        if opset < LOWEST_OPSET:
            raise PassError(
                f"{self.kind}: block-wise weights need a graph of opset {LOWEST_OPSET} or later, "
                f"and this one has {opset}"
            )
        return self.choose_layers(model.facts(), target)

    def _collect_patterns(self) -> dict[str, Sequence[str]]:
        """Return the patterns that must select something: all but `lm_head`, which is ignored wherever there is one."""
        overrides = {f"overrides.{i}.targets": o.targets for i, o in enumerate(self.overrides)}
        return {"targets": self.targets, "ignore": [p for p in self.ignore if p != "lm_head"], **overrides}

    def _tell_idle(self, names: Sequence[str], facts: ModelFacts) -> Note:
        """Return a note on layers that nothing calls, with a pass that takes them where they are much of the model."""
        others = [layer.name for layer in facts.layers if layer.role != "idle" and layer.type != "Embedding"]
        why = "no text reaches them" if find_task(facts.task).reads_texts else "no call reaches them"
        groups = group_names(names, others)
        said = f"{self.kind}: {describe_groups(groups)} stay as they are: {why}"
        n_bytes = sum(layer.n_bytes for layer in facts.distinct_layers() if layer.name in names)
        if n_bytes > MUCH * facts.n_bytes:
            targets = ", ".join(f'"re:{name}.*"' if len(members) > 1 else name for name, members in groups.items())
            size = self.base().weights.group_size
            form = f"scheme: W8A16, group_size: {size if size > 0 else GROUP_SIZE}, indivisible: fit"
            way = f"{{kind: rtn, {form}, targets: [{targets}]}} beside makes them smaller"
            said += f"; they are {n_bytes / facts.n_bytes:.0%} of the weights' bytes: {way}"
        return Note("info", said)

    def _ask_target(
        self, taken: Sequence[LayerFacts], settings: dict[str, Scheme], target: Target
    ) -> tuple[list[Note], list[str]]:
        notes, problems = [], []
        for name in sorted({format_of(settings[layer.name]) for layer in taken}):
            some, more = target_word(target, name, self.kind)
            notes += some
            problems += more
        return notes, problems

    def _tell_open_tables(self) -> Iterator[Note]:
        """Yield what a plan says of tables whose bits are still to be chosen."""
        if self.open_tables:
            keys, (fewer, more) = " and ".join(self.open_tables), self.table_choices
            yield Note("info", f"{self.kind}: {keys}: {fewer} or {more}, by what they cost; sizes are of {more}")

    def _table_problems(self, facts: ModelFacts, settings: Mapping[str, Scheme]) -> list[str]:
        """Report keys for tables that the model lacks, and layers of one table that are to differ."""
        if not self.takes_tables:
            return []
        if self.stage_on(facts) == "graph":
            return [f"{self.kind}: embeddings and lm_head need a torch model; of an onnx: source ignore: [] takes all"]
        problems = []
        for key, roles, what in (
            ("embeddings", ("table", "tied"), "table of embeddings"),
            ("lm_head", ("head", "tied"), "output layer behind its blocks"),
        ):
            found = [layer for layer in facts.layers if layer.role in roles]
            if getattr(self, key) is None or any(layer.name in settings for layer in found):
                continue
            why = f"{found[0].name} is ignored, or in few bits already" if found else f"this model has no {what}"
            problems.append(f"{self.kind}: {key}: {why}; leave it out")
        return [*problems, *self._shared_problems(facts.layers, settings)]

    def _shared_problems(self, layers: Sequence[LayerFacts], settings: Mapping[str, Scheme]) -> Iterator[str]:
        """Yield a sentence on each table whose layers would not be stored alike."""
        shared: dict[str, list[LayerFacts]] = {}
        for layer in layers:
            if self.table_scheme(layer):
                shared.setdefault(layer.weight, []).append(layer)
        for members in shared.values():
            wanted = [describe_scheme(settings[m.name]) if m.name in settings else "float" for m in members]
            if members[0].role == "tied" and self.embeddings and self.lm_head and self.embeddings != self.lm_head:
                wanted = [self.embeddings if m.type == "Embedding" else self.lm_head for m in members]
            if len(set(wanted)) > 1:
                asked = ", ".join(f"{m.name}: {scheme}" for m, scheme in zip(members, wanted, strict=True))
                yield (
                    f"{self.kind}: one table, stored once, cannot be {asked}; give embeddings and lm_head the same, or "
                    "neither, and ignore: [] for an output layer of its own beside float embeddings"
                )

    def _graph_problems(self, facts: ModelFacts, settings: dict[str, Scheme]) -> list[str]:
        """Report schemes that a pass on an ONNX graph does not have: it has 4 and 8 bits, and float inputs."""
        if self.stage_on(facts) != "graph":
            return []
        odd = {
            scheme.name
            for scheme in settings.values()
            if scheme.activations
            or scheme.weights.kind == "float"
            or scheme.weights.scales != "float"
            or scheme.weights.bits not in (4, 8)
        }
        return [
            f"{self.kind}: {name} needs a torch model; weights of an onnx: source get 4 or 8 bits (W4A16, W8A16)"
            for name in sorted(odd)
        ]


def _tell_why(kept: Sequence[LayerDecision]) -> str:
    """Return why most layers were not taken, as the end of a sentence; "" where the recipe itself left them out."""
    asked = ("ignore: ", "not among targets")
    told = [each.reason for each in kept if each.type != "Embedding" and not each.reason.startswith(asked)]
    reasons = Counter(told)
    return "".join(f": {n} are none, as {reason}" for reason, n in reasons.most_common(1))


def _in_order(layers: Sequence[LayerFacts], chosen: Sequence[LayerFacts]) -> list[LayerFacts]:
    names = {layer.name for layer in chosen}
    return [layer for layer in layers if layer.name in names]


def with_problems(plan: PassPlan, texts: Sequence[str]) -> PassPlan:
    """Return the same plan with more problems."""
    return replace(plan, problems=(*plan.problems, *texts))


def choose_table_schemes(keys: Iterable[str], target: Target) -> dict[str, str]:
    """Return key -> the scheme in which tables lose nothing: 8 bits, in GGUF files the 6 of its super-blocks.

    Of Qwen2.5-Coder-0.5B, to the nearest in groups of 128, on 4,096 tokens of WikiText-2: embeddings cost 0.0001 nats
    in 8 bits and 0.004 in 4, the output layer 0.0005 and 0.042 (0.028 in groups of 32).
    """
    return dict.fromkeys(keys, "Q6_K" if target.reads == "gguf" else "W8")
