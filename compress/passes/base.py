"""What every pass is: a frozen record of its config, and `check`, which plans without weights. See `compress.work`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from compress.facts import LayerFacts, ModelFacts, Note, PassPlan
from compress.formats.schemes import KvScheme, WeightScheme
from compress.formats.targets import Target
from compress.passes.distill_student import Student
from compress.specs import Record

Stage = Literal["model", "blocks", "graph"]


STATE_COPIES = 4
"""In the saved state of a training run, or of learned rounding: the weights, two moments, the best."""


@dataclass(frozen=True)
class TrainingCost:
    """What training is estimated to take: time, memory at its peak, disk for the state that a killed run resumes."""

    seconds: float = 0.0
    memory_bytes: int = 0
    disk_bytes: int = 0


@dataclass(frozen=True)
class BlockWorkload:
    """What a pass does to a stream of blocks, counted; how fast each goes here is the forecast's to know.

    `forwards`: passes of the calibration tokens through all blocks, in the type `compute`; `float_forwards`: in
    float32. `grams`: X^T X of what each group of layers reads, in `compute`; `inversions`: of these, once each.
    `searches`: times that a weight's scales are searched and it is rounded to them. `trials`: scales that AWQ tries on
    `TRIED_ROWS` rows of each group's weights. `sweeps`: of coordinate descent behind GPTQ's loop; None: no such loop.
    `solver_steps`: of HQQ. `learning_steps` of `learning_rows` tokens each, for each block, or with `whole` for all
    together, `max_learning_seconds` of it at most. `gradient_rows`: tokens that first go forward and back to measure
    what each of `choices` of bits costs; `compared`: choices of all layers' bits that are then rounded to be compared.
    """

    forwards: float = 0.0
    float_forwards: float = 0.0
    compute: Literal["float32", "bfloat16"] = "float32"
    grams: bool = False
    inversions: bool = False
    searches: float = 0.0
    trials: int = 0
    sweeps: int | None = None
    solver_steps: int = 0
    learning_steps: int = 0
    learning_rows: int = 0
    whole: bool = False
    max_learning_seconds: float = math.inf
    gradient_rows: int = 0
    choices: int = 0
    compared: int = 0


@dataclass(frozen=True)
class PruningWorkload:
    """What a pass that makes a model smaller does with it, for the forecast: what stays counts, not what it finds.

    `forwards`: times that all calibration samples go through the model; `tried`: times that as many do as have
    `tried_rows` tokens together, on which blocks and widths are tried one by one. `read`: layers whose inputs'
    products are summed; `fitted`: layers that are fitted anew. `exports`: models that are written to be timed, in
    `timed` comparisons.
    """

    forwards: float = 0.0
    tried: float = 0.0
    tried_rows: int = 0
    read: tuple[LayerFacts, ...] = ()
    fitted: tuple[LayerFacts, ...] = ()
    exports: int = 0
    timed: int = 0


TRIED_ROWS = 256
"""As `compress.quantize.awq.JUDGED_ROWS`."""


class Pass(Record):
    """One pass of a recipe.

    `stage` says what it works on: the torch module ("model": a `TorchModel`), the torch module streamed block by
    block ("blocks": a `StreamedModel`), the ONNX graph ("graph": a `GraphState`). In a recipe they come in this order,
    and what the work is given beside the model follows from it (`compress.work.contexts`).
    """

    stage: ClassVar[Stage] = "graph"
    needs_calibration: ClassVar[bool] = False
    needs_train: ClassVar[bool] = False
    calibration_runs: ClassVar[float] = 0.0
    """Forward passes over the calibration data that the work costs, its own arithmetic counted in: for the forecast."""
    uses_gates: ClassVar[bool] = False
    """True if the work asks `context.shortfalls`, so that its result depends on the gates and the evaluation set."""
    uses_coupling: ClassVar[bool] = False
    """True if `check` asks for `ModelFacts.prunable`."""
    keeps_float_blocks: ClassVar[bool] = False
    """True if the work over blocks also keeps what the float model's blocks give: for the forecast."""
    uses_blocks: ClassVar[bool] = False
    """True if `check` asks for `ModelFacts.removable`."""
    lowest_opset: ClassVar[int] = 17
    """Of a graph that can hold what the pass leaves."""
    work: ClassVar[str] = ""
    """Of a pass from outside: "package.module:function", imported when it works; ours are in `compress.work.WORK`."""
    kind: str

    def stage_on(self, facts: ModelFacts) -> Stage:
        """Return the stage at which the pass works on such a model."""
        return self.stage

    def ends_stage(self, facts: ModelFacts) -> bool:
        """Return whether no pass of its stage may follow.

        Such a pass leaves integers beside the model, which a later one would not keep.
        """
        return False

    def check(self, facts: ModelFacts, target: Target) -> PassPlan:
        """Plan what the pass would do to such a model.

        Raises nothing: what is wrong goes into `problems`, naming layers.
        """
        raise NotImplementedError

    @property
    def chooses_by_time(self) -> bool:
        """Return whether the work depends on what is measured on this machine."""
        return False

    @property
    def needs_timing(self) -> bool:
        """Return whether the work keeps a budget of time, which asks for a target that is timed here."""
        return False

    @property
    def measures_time(self) -> bool:
        """Return whether the work times anything, so that nothing may compute beside it."""
        return self.chooses_by_time or self.needs_timing

    def shorten(self, share: float) -> Pass:
        """Return the pass with only this share of its training, for a cheap look; itself where it does not learn."""
        return self

    def find_student(self) -> Student | None:
        """Return the model that learns in the place of the given one; None where the given one goes on."""
        return None

    def find_cache_scheme(self) -> KvScheme | None:
        """Return how an engine is to store keys and values after the pass; None where it says nothing of them."""
        return None

    def plan_units(self, facts: ModelFacts) -> dict[str, int]:
        """Return how many units of each coupled group that is cut are to stay; under a budget, about."""
        return {}

    def estimate_training(
        self, facts: ModelFacts, n_samples: int, forward_seconds: float, filled: float = 1.0
    ) -> TrainingCost:
        """Estimate what training on `n_samples` costs.

        `forward_seconds`: of one through the model, as long as it can be; `filled`: how long a usual one is, as a part
        of that.
        """
        return TrainingCost()

    def count_block_work(self, facts: ModelFacts, sample_rows: int) -> BlockWorkload:
        """Count what the pass does to such a model block by block; `sample_rows`: tokens of a calibration sample."""
        return BlockWorkload(forwards=self.calibration_runs)

    def count_pruning(self, facts: ModelFacts) -> PruningWorkload:
        """Count what the pass does to take structure out of such a model; nothing where it takes none."""
        return PruningWorkload()

    def find_weight_scheme(self) -> WeightScheme | None:
        """Return how the pass stores weights that no override names; None where it stores none."""
        return None

    def estimate_extra_bytes(self, facts: ModelFacts) -> int:
        """Estimate the bytes that the work holds beside the blocks that are streamed to it."""
        return 0

    @property
    def rewrites_texts(self) -> bool:
        """Return whether it learns from texts that are made of the training set's, of which no loss mask is known."""
        return False

    def train_problems(self, task: str, n_samples: int, has_labels: bool) -> list[str]:
        """Return what is wrong with the training set, for a pass that needs one."""
        return []

    def train_notes(self, facts: ModelFacts, n_samples: int) -> list[Note]:
        """Return what the plan should say of learning from so many samples."""
        return []

    def explain_refusal(self, target: Target) -> str | None:
        """Return why a further target cannot hold what this pass leaves, or None."""
        return None

    def explain_capabilities(self, capabilities: Sequence[str]) -> str | None:
        """Return why GPUs of such compute capabilities cannot compute what this pass leaves, or None."""
        return None

    def explain_unjudged(self, target: str, why: str) -> str | None:
        """Return why a graph of this pass cannot be judged where its target does not work (`why`), or None."""
        return None
