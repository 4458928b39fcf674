"""What is usual where a user says nothing: the passes that make a scheme, the gates of a task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import TypeAdapter
from ruamel.yaml import YAML

from compress.errors import PlanError, RecipeError
from compress.facts import ModelFacts
from compress.formats.schemes import PRESETS
from compress.formats.targets import TARGETS, Format, Target
from compress.passes import KINDS, Pass
from compress.passes.weight_only import GROUP_SIZE
from compress.tasks import TORCH_TASKS
from runtime.bundle.format import Gate, Judgement
from runtime.errors import UsageError
from runtime.judge.evidence import count_least_samples
from runtime.judge.gates import check_gates
from runtime.tasks import find_task
from runtime.tasks.metrics import METRICS
from runtime.words import did_you_mean

PassMapping = dict[str, Any]
GRAPH_SCHEMES: dict[str, Format] = {
    "FP16": "float16",
    "BF16": "bfloat16",
    "INT8": "int8-static",
    "INT8_DYNAMIC": "int8-dynamic",
    "FP8": "fp8-static",
}
"""Schemes of ONNX graphs, which passes of their own make; INT8 and FP8 are presets of checkpoints, too."""
EIGHT_BITS = ("INT8", "W8A8", "W8A8_STATIC")
"""Presets that are `int8` on a target that reads graphs."""
NEAR = 0.98
"""Of the float model's outputs: cosine, or samples of the same answer, where a task's own gate cannot be asked."""


@dataclass(frozen=True)
class UsualPasses:
    """Passes as a recipe has them, and what a user should know of the choice."""

    passes: tuple[PassMapping, ...]
    notes: tuple[str, ...] = ()


def find_scheme(name: str, target: str) -> str:
    """Return a scheme's name in capitals. RecipeError lists them all, the nearest first."""
    graphs = list(GRAPH_SCHEMES) if TARGETS[target].reads == "onnx" else []
    known = list(dict.fromkeys([*graphs, *PRESETS]))
    full = name.upper().replace("-", "_")
    if full not in known:
        what = f"unknown scheme{did_you_mean(full, known)}" if name else "say what the numbers become, such as INT8"
        raise RecipeError(f"--scheme {name}: {what}; there are {', '.join(known)}")
    return full


def usual_scheme(target: str, task: str) -> str:
    """Return the scheme that a model of the task usually gets on a target."""
    if TARGETS[target].reads == "gguf":
        return "Q4_K"
    return "W4A16" if find_task(task).generates or TARGETS[target].reads != "onnx" else "INT8"


def choose_passes(
    scheme: str, target: str, facts: ModelFacts, has_data: bool, ignore: Sequence[str] = ()
) -> UsualPasses:
    """Return the usual chain of a scheme (`find_scheme`): the first that the model and the target take.

    Integers of weights: `gptq` with calibration data; without it `hqq` up to 4 bits, else `rtn`. Weights and inputs in
    eight bits: on graphs `int8`, behind `smoothquant` where a model is matrix products alone, in checkpoints
    `smoothquant` and `gptq`. Floats: `autocast`, `fp8`, or `gptq`, else `rtn`. `ignore`: layers that stay as they are.
    PlanError says why nothing fits.
    """
    problems: list[str] = []
    wanting: list[str] = []
    for chain in _list_chains(scheme, TARGETS[target], facts):
        candidate = _leave_out(chain, ignore)
        needing = [parse_pass(p).kind for p in candidate.passes if parse_pass(p).needs_calibration]
        if needing and not has_data:
            wanting.append(f"{scheme} by {needing[0]} is measured on samples: give --data")
            continue
        found = find_pass_problems(candidate.passes, facts, TARGETS[target])
        if not found:
            without = f"no --data, so that {describe_passes(candidate.passes)} rounds by the weights alone"
            taken = _take_offers(candidate, facts, TARGETS[target])
            return replace(taken, notes=(*taken.notes, *((without,) if wanting else ())))
        problems += found
    raise PlanError(list(dict.fromkeys(problems or wanting))[:1])


def _leave_out(chain: UsualPasses, ignore: Sequence[str]) -> UsualPasses:
    """Return the chain with layers that none of its passes touches."""
    left = {"ignore": list(ignore)} if ignore else {}
    return replace(chain, passes=tuple(v | (left if hasattr(parse_pass(v), "ignore") else {}) for v in chain.passes))


def _take_offers(chain: UsualPasses, facts: ModelFacts, target: Target) -> UsualPasses:
    """Return the chain with what its passes offer, such as embeddings and output layer in few bits."""
    passes, notes = [], list(chain.notes)
    for values in chain.passes:
        planned = parse_pass(values).check(facts, target)
        passes.append({**values, **planned.offers})
        notes += [f"{key}: {value}" for key, value in planned.offers.items()]
        facts = planned.facts
    return UsualPasses(tuple(passes), tuple(notes))


def describe_passes(passes: Sequence[PassMapping]) -> str:
    """Return the kinds of the passes, as in a sentence."""
    return " and ".join(str(values["kind"]) for values in passes)


def parse_pass(values: Mapping[str, Any]) -> Pass:
    """Return the record of a pass."""
    return TypeAdapter(KINDS[values["kind"]]).validate_python(dict(values), strict=False)


def drop_unused_sets(recipe: Mapping[str, Any], passes: Sequence[PassMapping]) -> dict[str, Any]:
    """Return a drafted recipe without a training set that no pass learns from: a run would load it for nothing."""
    learns = any(parse_pass(values).needs_train for values in passes)
    if learns or "data" not in recipe:
        return dict(recipe)
    return {**recipe, "data": {name: spec for name, spec in recipe["data"].items() if name != "train"}}


def find_pass_problems(passes: Sequence[Mapping[str, Any]], facts: ModelFacts, target: Target) -> list[str]:
    """Return what is wrong with passes in a row, on what each leaves."""
    problems: list[str] = []
    for values in passes:
        record = parse_pass(values)
        planned = record.check(facts, target)
        problems += planned.problems
        if record.stage_on(facts) == "blocks" and facts.source == "onnx":
            problems.append(f"{record.kind}: rewrites a torch model, and an onnx: source is none")
        facts = planned.facts
    return problems


def _list_chains(scheme: str, target: Target, facts: ModelFacts) -> Iterator[UsualPasses]:
    """Yield chains, the best first; not all fit every model."""
    if target.reads == "onnx" and (scheme in GRAPH_SCHEMES or scheme in EIGHT_BITS):
        yield from _list_graph_chains(scheme, facts)
        return
    preset = PRESETS[scheme]
    weights = preset.weights
    numbers: PassMapping = {"scheme": scheme, "indivisible": "fit"}
    kernels = target.kernels(weights.bits)
    if weights.kind == "int" and weights.scales == "float" and kernels and weights.group_size not in kernels:
        numbers["group_size"] = GROUP_SIZE
    if scheme in EIGHT_BITS:
        yield UsualPasses(({"kind": "smoothquant"}, {"kind": "gptq", **numbers}))
    yield UsualPasses(({"kind": "gptq", **numbers},))
    # up to 4 bits `hqq` keeps more than `rtn`, where there is no data
    if weights.bits <= 4 and weights.kind == "int" and weights.scales == "float":
        yield UsualPasses(({"kind": "hqq", **numbers},))
    yield UsualPasses(({"kind": "rtn", **numbers},))


def _list_graph_chains(scheme: str, facts: ModelFacts) -> Iterator[UsualPasses]:
    if scheme in ("FP16", "BF16"):
        yield UsualPasses(({"kind": "autocast", "dtype": GRAPH_SCHEMES[scheme]},))
    elif scheme == "FP8":
        yield UsualPasses(({"kind": "fp8"},))
    elif scheme == "INT8_DYNAMIC":
        yield UsualPasses(({"kind": "int8", "mode": "dynamic"},))
    else:
        convolved = sum(layer.macs for layer in facts.layers if layer.op == "Conv")
        if convolved < sum(layer.macs for layer in facts.layers) / 2:  # outliers stand in what matrix products read
            yield UsualPasses(({"kind": "smoothquant"}, {"kind": "int8"}))
        yield UsualPasses(({"kind": "int8"},))


def choose_gates(
    task: str, has_labels: bool, speed: bool = False, n_samples: int | None = None
) -> list[dict[str, Any]]:
    """Return the gates that are usual for a task: its own, where the data allows; else nearness to the float model.

    `speed`: with what a recipe to start from asks of speed and size. `n_samples`: of the evaluation set, which has
    to be able to decide them. None: not known yet.
    """
    starter = TORCH_TASKS[task].starter
    gates = [gate for gate in _read_lines(starter.gates) if _fits(gate, task, has_labels)]
    if not gates:
        close = [m.name for m in METRICS.values() if m.against == "baseline" and m.ideal == 1.0 and m.higher_is_better]
        near: list[dict[str, Any]] = [{"metric": name, "min": NEAR} for name in close]
        gates = [gate for gate in near if _fits(gate, task, has_labels)][:1]
    of_cost: list[dict[str, Any]] = [
        {"metric": find_task(task).latency, "min_speedup": 1.2},
        {"metric": "size_ratio", "min": 2},
    ]
    return [*(_ease(gate, n_samples) for gate in gates), *(of_cost if speed else [])]


def _read_lines(text: str) -> list[dict[str, Any]]:
    return YAML(typ="safe", pure=True).load(text) or []


def _fits(gate: Mapping[str, Any], task: str, has_labels: bool) -> bool:
    try:
        check_gates(Judgement(gates=(Gate(**gate),)), task, has_labels)
    except UsageError:
        return False
    return True


def _ease(gate: Mapping[str, Any], n_samples: int | None) -> dict[str, Any]:
    """Return the gate with the tightest bound, in steps of a hundredth, that so many samples can decide."""
    eased = dict(gate)
    if n_samples is None or METRICS[gate["metric"]].kind != "proportion":
        return eased
    (rule,) = set(gate) & {"max_drop", "min"}
    while n_samples < count_least_samples(Gate(**eased), Judgement().confidence):
        eased[rule] = round(eased[rule] + (0.01 if rule == "max_drop" else -0.01), 2)
    return eased
