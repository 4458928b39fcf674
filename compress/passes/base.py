"""What every pass is: a frozen record of its config, and `check`, which plans without weights. See `compress.work`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from compress.facts import ModelFacts, Note, PassPlan
from compress.formats.targets import Format, Target, refusal
from compress.passes.distill_student import Student
from compress.specs import Record

Stage = Literal["model", "blocks", "graph"]


STATE_COPIES = 4
"""In the saved state of a training run, or of learned rounding: the weights, two moments, the best."""


@dataclass(frozen=True)
class DataSize:
    """How much data a pass sees: samples for calibration and training.

    `sample_rows`: tokens of a calibration sample, 1 where it is no text; `filled`: how long a usual sample of training
    is, as a part of the longest. `found`: the model as the passes before leave it; None: as it came. `free_bytes`: of
    memory, which samples that are learned from together may take; None: as many as they are.
    """

    calibration: int = 0
    train: int = 0
    sample_rows: int = 1
    filled: float = 1.0
    found: ModelFacts | None = None
    free_bytes: int | None = None


@dataclass(frozen=True)
class PassCost:
    """What the work of a pass is estimated to take.

    `forwards`: forward passes of one sample in whose time it is done, to an order of magnitude. `memory_bytes`: beside
    the model, or the blocks that are streamed to it. `disk_bytes`: of the state that a killed run goes on from.
    `gradient_tokens`: that first go forward and back, with all blocks' activations. `float_blocks`: outputs of the
    float model's blocks are kept, too.
    """

    forwards: float = 0.0
    memory_bytes: int = 0
    disk_bytes: int = 0
    gradient_tokens: int = 0
    float_blocks: bool = False


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
    """Forward passes over the calibration data in whose time the work is done, to an order of magnitude."""
    uses_gates: ClassVar[bool] = False
    """True if the work asks `context.shortfalls`, so that its result depends on the gates and the evaluation set."""
    uses_coupling: ClassVar[bool] = False
    """True if `check` asks for `ModelFacts.prunable`."""
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

    def check(self, facts: ModelFacts, target: Target) -> PassPlan:
        """Plan what the pass would do to such a model.

        Raises nothing: what is wrong goes into `problems`, naming layers.
        """
        raise NotImplementedError

    @property
    def needs_forward(self) -> bool:
        """Return whether the work runs the model, or asks how it is built; else weights are all that it looks at."""
        return True

    @property
    def importance_file(self) -> str:
        """Return the file of an importance matrix that the work reads; "" where it reads none."""
        return ""

    @property
    def chooses_by_time(self) -> bool:
        """Return whether the work depends on what is measured on this machine."""
        return False

    @property
    def time_budget(self) -> Literal["graph", "module"] | None:
        """Return what has a budget of time: the graph, for which a target must be timed here, or the module."""
        return None

    @property
    def measures_time(self) -> bool:
        """Return whether the work times anything, so that nothing may compute beside it."""
        return self.chooses_by_time or self.time_budget is not None

    def shorten(self, share: float) -> Pass:
        """Return the pass with only this share of its training, for a cheap look; itself where it does not learn."""
        return self

    def find_student(self) -> Student | None:
        """Return the model that learns in the place of the given one; None where the given one goes on."""
        return None

    def estimate_cost(self, facts: ModelFacts, data: DataSize) -> PassCost:
        """Estimate what the work on such a model takes."""
        return PassCost(self.calibration_runs * data.calibration)

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

    def time_notes(self, n_samples: int, shares: tuple[float, float]) -> list[Note]:
        """Return what the plan should say where the seconds that a pass may take are over before its work is.

        `n_samples`: of the training set; `shares`: of the work that fits into them, at least and at most.
        """
        return []

    @property
    def formats(self) -> tuple[Format, ...]:
        """Return how numbers are stored that the pass rounds."""
        return ()

    def explain_refusal(self, target: Target) -> str | None:
        """Return why a further target cannot hold what this pass leaves, or None."""
        return next((text for name in self.formats if (text := refusal(target, name, self.kind))), None)
