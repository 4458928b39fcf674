"""Which chains of passes may reach a goal: formats alone, and smaller structures that are trained and then rounded.

Passes are plain mappings here, as `search.space` has them. Nothing is tuned to a model: a chain is offered where the
passes' own checks take it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from compress.facts import ModelFacts
from compress.formats.schemes import KvScheme
from compress.formats.targets import TARGETS, Target
from compress.passes import Pass
from compress.passes.depth import evenly_spaced, without_blocks
from compress.passes.prune_channels import PruneChannels, count_cost, shrunk
from compress.planning.usual import find_pass_problems, parse_pass
from compress.tasks import find_torch_task

Passes = list[dict[str, Any]]
FEWER_BITS = {"onnx": (8, 4), "checkpoint": (8, 4, 3, 2), "gguf": (8, 4, 3, 2)}
"""By what the target reads: ONNX stores nothing in less than four bits."""
CACHED = "-kv8"
"""Behind a format's name: with a decoder's keys and values in eight bits, too."""
GROUP, WIDE_GROUP = 32, 128
"""Inputs that share a scale in few bits: what every target has kernels for, and what is smaller and faster still.
Qwen2.5-Coder 0.5B in W4, tables in W8: 4.6 and 5.2 times smaller, 3.4 and 4.6 times as fast, +0.045 and +0.073 nats."""
WIDE = f"-g{WIDE_GROUP}"
"""In a format's name: with the wide group."""
DEPTHS = (1.0, 0.7, 0.4, 0.0)
"""How much of the time that goes is taken out as whole blocks, the rest as channels: the surest first, as a block takes
all of its time with it."""
LOGITS = {"output": {"loss": "mse", "pooling": "none"}}
"""What classes are learned by: the logits as numbers (Kim et al. 2021, arXiv:2105.08919). Half of ResNet-56's blocks,
three epochs: top-1 91.2 %, 90.4 % by their divergence at temperature 4."""
MOST_EPOCHS = 100.0
"""Of a training that its time ends."""
LEAST_GAIN = 1.02
"""What a cut must gain to be made."""


@dataclass(frozen=True)
class Ground:
    """What chains are made for. `facts`: of the float model, with what can be cut where a torch module can be."""

    facts: ModelFacts
    target: Target
    has_calibration: bool
    has_train: bool

    def explain_misfit(self, passes: Passes) -> str:
        """Return why the model cannot take these passes; "" where it can."""
        for pass_ in map(parse_pass, passes):
            if pass_.needs_calibration and not self.has_calibration:
                return f"{pass_.kind} needs data.calibration"
            if pass_.needs_train and not self.has_train:
                return f"{pass_.kind} needs data.train"
        return next(iter(find_pass_problems(passes, self.facts, self.target)), "")

    def facts_after(self, passes: Passes) -> ModelFacts:
        """Return the model's facts once passes that fit have done their work."""
        facts = self.facts
        for given in passes:
            facts = parse_pass(given).check(facts, self.target).facts
        return facts


def list_formats(ground: Ground) -> dict[str, Passes]:
    """Return the formats that the model and the target take and that make it smaller, by name: nothing is trained."""
    rounding = "gptq" if ground.has_calibration else "rtn"
    found: dict[str, Passes] = {
        "int8": [{"kind": "int8"}],
        "int8-smooth": [{"kind": "smoothquant"}, {"kind": "int8"}],
        "int8-equalized": [{"kind": "equalize"}, {"kind": "int8"}],
        "int8-dynamic": [{"kind": "int8", "mode": "dynamic"}],
    }
    for bits in FEWER_BITS[ground.target.reads]:
        for group, wide in ((GROUP, ""), *([(WIDE_GROUP, WIDE)] if bits <= 4 else [])):
            weights = {"kind": rounding, "bits": bits, "group_size": group, "indivisible": "fit"}
            found[f"w{bits}{wide}"] = [weights]
            # Tables of 8 and 4 bits every target looks up.
            for tables in (n for n in (8, 4) if n >= bits):
                kept = {"embeddings": f"W{tables}", "lm_head": f"W{tables}"}
                found[f"w{bits}{wide}-tables{tables}"] = [weights | kept]
    sizes = {n: foresee_size(ground, passes) for n, passes in found.items() if not ground.explain_misfit(passes)}
    # what makes a model no smaller than that, or than a narrow group does, is not worth a look
    smaller = {
        name: found[name]
        for name, size in sizes.items()
        if size >= 1.1 and (WIDE not in name or size >= LEAST_GAIN * sizes.get(name.replace(WIDE, ""), 0))
    }
    return smaller | _list_cached(ground, smaller)


def _list_cached(ground: Ground, formats: Mapping[str, Passes]) -> dict[str, Passes]:
    """Return the formats of a decoder with its keys and values in the eight bits that the target keeps them in."""
    chains = {
        f"{name}{CACHED}": [[*passes, {"kind": "kv_cache", "scheme": scheme}] for scheme in get_args(KvScheme)]
        for name, passes in formats.items()
    }
    fit = {name: [chain for chain in each if not ground.explain_misfit(chain)] for name, each in chains.items()}
    return {name: each[0] for name, each in fit.items() if each}


@dataclass(frozen=True)
class PrunedStructure:
    """A smaller model of the same kind: fewer blocks, then fewer channels, neurons and heads in those that stay.

    `keep`: blocks that stay; None: all. `max_params`: the share of what is then left that may stay; None: any.
    `speedup`: how many times faster that is to become, measured in the numbers `timed_in`; None: no faster.
    """

    keep: int | None = None
    max_params: float | None = None
    speedup: float | None = None
    timed_in: str = "float32"

    @property
    def name(self) -> str:
        parts = [
            "" if self.keep is None else f"blocks{self.keep}",
            "" if self.max_params is None else f"params{100 * self.max_params:.0f}",
            "" if self.speedup is None else f"faster{100 * self.speedup:.0f}",
        ]
        return "-".join(filter(None, parts))

    def asks_less(self, other: PrunedStructure) -> bool:
        """Return whether it has the same blocks as another, and asks no more of its channels."""
        fewer = (self.max_params or 1) < (other.max_params or 1) or (self.speedup or 1) > (other.speedup or 1)
        return self.keep == other.keep and not fewer

    def passes(self) -> Passes:
        given: dict[str, Any] = {} if self.max_params is None else {"max_params": self.max_params}
        given |= {} if self.speedup is None else {"speedup": self.speedup, "timed_in": self.timed_in}
        given |= {"or_nearest": True} if given else {}
        return [
            *([{"kind": "prune_layers", "keep": self.keep}] if self.keep is not None else []),
            *([{"kind": "prune_channels", **given}] if given else []),
        ]


@dataclass(frozen=True)
class Needs:
    """How many times smaller and faster a model must become, beyond what its format gives; 1 or less: not at all."""

    size: float
    speed: float

    @property
    def any(self) -> bool:
        return self.size > LEAST_GAIN or self.speed > LEAST_GAIN


@dataclass(frozen=True)
class Yields:
    """By which power of a share, as the plan counts it, what is measured falls: 1 where it falls as the share does.

    `time_by_blocks`: of the multiply-accumulates, where whole blocks go; `time_by_channels`: of the time that their
    pass measures; `weights_by_blocks`: of the weights. `removed`: blocks in the order in which they go, as far as a
    structure that was tried has shown it: of nine, the five that a network could spare held two thirds of its weights.
    """

    time_by_blocks: float = 1.0
    time_by_channels: float = 1.0
    weights_by_blocks: float = 1.0
    removed: tuple[str, ...] = ()


def design(
    ground: Ground, needs: Needs, depth: float, yields: Yields, timed_in: str = "float32"
) -> PrunedStructure | None:
    """Return a structure that is foreseen to meet the needs; None where nothing can be cut.

    `depth`: the part of the time to go (of the weights, where no time is to be gained) that goes as whole blocks.
    """
    keep, faster, smaller = _choose_blocks(ground.facts, needs, depth, yields) if depth else (None, 1.0, 1.0)
    rest = needs.speed / faster
    speedup = round(rest ** (1 / yields.time_by_channels), 3) if rest > LEAST_GAIN else None
    params = max(round(smaller / needs.size, 3), 0.001) if needs.size > LEAST_GAIN * smaller else None
    found = PrunedStructure(keep, params, speedup, timed_in)
    return None if not found.passes() or ground.explain_misfit(found.passes()) else found


def take_blocks(ground: Ground, structure: PrunedStructure, left: Needs, yields: Yields) -> PrunedStructure | None:
    """Return the structure with so many blocks fewer that what is `left` is met; None where no block can go."""
    faster_now, smaller_now = _foresee_gains(ground.facts, structure.keep, yields)
    for keep in range((structure.keep or len(ground.facts.removable or ())) - 1, 0, -1):
        faster, smaller = _foresee_gains(ground.facts, keep, yields)
        if (faster >= left.speed * faster_now and smaller >= left.size * smaller_now) or keep == 1:
            return replace(structure, keep=keep)
    return None


def _choose_blocks(facts: ModelFacts, needs: Needs, depth: float, yields: Yields) -> tuple[int | None, float, float]:
    """Return how many blocks stay so that those that go give their part of what is needed, and what that gives.

    That is: how many times faster and smaller. None, 1 and 1 where no block can go, or none has to.
    """
    fast = needs.speed > LEAST_GAIN
    wanted = (needs.speed if fast else needs.size) ** depth
    blocks = facts.removable or ()
    if wanted <= LEAST_GAIN:
        return None, 1.0, 1.0
    for keep in range(len(blocks) - 1, 0, -1):
        faster, smaller = _foresee_gains(facts, keep, yields)
        if (faster if fast else smaller) >= wanted or keep == 1:
            return keep, faster, smaller
    return None, 1.0, 1.0


def _foresee_gains(facts: ModelFacts, keep: int | None, yields: Yields) -> tuple[float, float]:
    """Return how many times faster and smaller a model is foreseen to be with so many blocks."""
    macs, weights = count_left(facts, keep, yields.removed)
    return macs**-yields.time_by_blocks, weights**-yields.weights_by_blocks


def count_left(facts: ModelFacts, keep: int | None, removed: Sequence[str] = ()) -> tuple[float, float]:
    """Return the shares of multiply-accumulates and weights that are left with so many blocks.

    `removed`: those that go first, in their order; those that stay of the others are evenly spaced.
    """
    blocks = facts.removable or ()
    if keep is None:
        return 1.0, 1.0
    first = removed[: len(blocks) - keep]
    rest = [block.name for block in blocks if block.name not in first]
    stay = evenly_spaced(len(rest), keep)
    after = without_blocks(facts, [*first, *(name for n, name in enumerate(rest) if n not in stay)])
    return after.macs / max(facts.macs, 1), _count_weights(after) / _count_weights(facts)


def count_cut(facts: ModelFacts, rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the share of the weights that stayed where channels were cut, of the blocks that were kept.

    `rows`: the layers of a report, which say which blocks went and how many units of each dimension stayed.
    """
    removed = list_removed(rows)
    whole = without_blocks(facts, removed) if removed else facts
    widths = {row["layer"]: int(row["width"]) for row in rows if "width" in row}
    groups = [group for group in whole.prunable or () if group.name in widths]
    return _count_weights(shrunk(whole, groups, widths)) / _count_weights(whole)


def list_removed(rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the blocks that went, the first one first, of the rows of a report: each adds to the outputs' error."""
    removed = [row for row in rows if row["type"] == "block" and row["action"] == "pruned"]
    return tuple(row["layer"] for row in sorted(removed, key=lambda row: row.get("output_error", 0.0)))


def _count_weights(facts: ModelFacts) -> float:
    return count_cost("max_params", facts)


def find_smallest(ground: Ground) -> Passes:
    """Return the passes that leave the least of the model's structure that can be left; [] where nothing can go."""
    found: Passes = []
    if len(ground.facts.removable or ()) > 1 and not ground.explain_misfit(PrunedStructure(keep=1).passes()):
        found = PrunedStructure(keep=1).passes()
    left = Ground(ground.facts_after(found), ground.target, ground.has_calibration, ground.has_train)
    if left.facts.prunable:
        probe = PruneChannels(max_flops=0.5)
        types = {layer.name: layer.type for layer in left.facts.layers}
        share = probe.least_share(left.facts, [g for g in left.facts.prunable if probe.takes(g, types)])
        cut = [{"kind": "prune_channels", "max_flops": min(share * 1.001, 0.999)}]
        found = found if left.explain_misfit(cut) else [*found, *cut]
    return found


def make_training(task: str, seconds: float) -> dict[str, Any]:
    """Return the pass that teaches a smaller model what the float model gives, in so many seconds.

    All else it finds by itself.
    """
    return {
        "kind": "distill",
        **(LOGITS if find_torch_task(task).loss == "classes" else {}),
        "epochs": MOST_EPOCHS,
        "learning_rate": "auto",
        "optimizer": "auto",
        "precision": "auto",
        "augment": "auto",
        "ema_decay": "auto",
        "max_seconds": round(seconds, 1),
    }


def find_numbers(passes: Passes) -> str:
    """Return the numbers in which a format's layers compute, as `prune_channels` times them."""
    static = any(given["kind"] == "int8" and given.get("mode") != "dynamic" for given in passes)
    return "int8" if static else "float32"


def train_rounded(format_passes: Passes, seconds: float) -> Passes:
    """Return the passes that train the model with its numbers rounded as a format rounds them; [] where none does."""
    kinds = {given["kind"]: given for given in format_passes}
    if "int8" in kinds and kinds["int8"].get("mode") != "dynamic":
        found = {"learning_rate": "auto", "augment": "auto"}
        return [{"kind": "qat", "scheme": "W8A8", **found, "epochs": MOST_EPOCHS, "max_seconds": round(seconds, 1)}]
    weights = next((given for given in format_passes if "bits" in given), None)
    if weights is None:
        return []
    kept = {key: value for key, value in weights.items() if key != "kind"}
    training = {"kind": "qat", **kept, "epochs": MOST_EPOCHS, "max_seconds": round(seconds, 1)}
    return [training, *([kinds["kv_cache"]] if "kv_cache" in kinds else [])]


def foresee_size(ground: Ground, passes: Passes) -> float:
    """Return how many times smaller the weights become."""
    return ground.facts.n_bytes / max(ground.facts_after(passes).n_bytes, 1)


def find_least_bytes(ground: Ground, formats: Mapping[str, Passes]) -> tuple[float, Passes]:
    """Return the fewest bytes of weights that are foreseen, and the chain that leaves them."""
    structure = find_smallest(ground) if ground.has_train else []
    chains: list[Passes] = [[*cut, *passes] for cut in ([], structure) for passes in formats.values()]
    sized = [(ground.facts_after(chain).n_bytes, chain) for chain in chains if not ground.explain_misfit(chain)]
    return min(sized, key=lambda pair: pair[0], default=(ground.facts.n_bytes, []))


def probes() -> tuple[Pass, ...]:
    """Return passes that ask for all that a plan can find out of a model's structure."""
    return (PruneChannels(ratio=0.5), parse_pass({"kind": "prune_layers", "drop": 0.5}))


def ground_of(facts: ModelFacts, target: str, sets: Sequence[str]) -> Ground:
    return Ground(facts, TARGETS[target], "calibration" in sets, "train" in sets)
