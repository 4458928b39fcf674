"""What every pass is: a frozen record of its config, and `check`, which plans without weights. See `compress.work`."""

from __future__ import annotations

from typing import ClassVar, Literal

from compress.facts import ModelFacts, Note, PassPlan
from compress.formats.targets import Target
from compress.specs import Record

Stage = Literal["model", "blocks", "graph"]


class Pass(Record):
    """One step of a recipe.

    `stage` says what it works on: the torch module ("model": a `LoadedModel`), the torch module streamed block by
    block ("blocks": a `StreamedModel`), the ONNX graph ("graph": a `GraphState`). In a recipe they come in this order.
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
    uses_blocks: ClassVar[bool] = False
    """True if `check` asks for `ModelFacts.removable`."""
    lowest_opset: ClassVar[int] = 17
    """Of a graph that can hold what the pass leaves."""
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

    def train_problems(self, task: str, n_samples: int, has_labels: bool) -> list[str]:
        """Return what is wrong with the training set, for a pass that needs one."""
        return []

    def train_notes(self, facts: ModelFacts, n_samples: int) -> list[Note]:
        """Return what the plan should say of learning from so many samples."""
        return []

    def explain_refusal(self, target: Target) -> str | None:
        """Return why a further target cannot hold what this pass leaves, or None."""
        return None
