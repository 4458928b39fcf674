"""What every pass is: a frozen record of its knobs with `check` (plan time, no weights) and `apply` (the work)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict

from compress.facts import ModelFacts, Note, PassPlan
from compress.targets import Target

if TYPE_CHECKING:
    from compress.context import PassContext, PassResult


def _readable(pattern: str) -> str:
    """Raises ValueError on a `re:` pattern that is no regular expression."""
    try:
        re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
    return pattern


LayerPattern = Annotated[str, AfterValidator(_readable)]
"""Selects layers: a name, a type, or `re:` and a regular expression."""


class Record(BaseModel):
    """A frozen piece of a recipe; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


def one_of(record: Record, names: Sequence[str]) -> None:
    """ValueError unless exactly one of these fields is given."""
    given = [name for name in names if getattr(record, name) is not None]
    if len(given) != 1:
        have = f"{' and '.join(given)} are given" if given else "none is given"
        raise ValueError(f"give exactly one of {', '.join(names)}; {have}")


Stage = Literal["model", "blocks", "graph"]


class Pass(Record):
    """One step of a recipe.

    `stage` says what it works on: the torch module ("model": `apply` takes and gives a `LoadedModel` whose module has
    the same parameters with other values), the torch module streamed block by block ("blocks": a `StreamedModel`) or
    the ONNX graph ("graph": a `GraphState`). In a recipe they come in this order.
    """

    stage: ClassVar[Stage] = "graph"
    needs_calibration: ClassVar[bool] = False
    needs_train: ClassVar[bool] = False
    calibration_runs: ClassVar[float] = 0.0
    """Forward passes over the calibration data that `apply` costs, its own arithmetic counted in: for the forecast."""
    uses_gates: ClassVar[bool] = False
    """True if `apply` asks `context.shortfalls`, so that its result depends on the gates and the evaluation set."""
    uses_coupling: ClassVar[bool] = False
    """True if `check` asks for `ModelFacts.prunable`."""
    uses_blocks: ClassVar[bool] = False
    """True if `check` asks for `ModelFacts.removable`."""
    lowest_opset: ClassVar[int] = 17
    """Of a graph that can hold what the pass leaves."""
    kind: str

    def stage_on(self, facts: ModelFacts) -> Stage:
        """What it works on for such a model."""
        return self.stage

    def ends_stage(self, facts: ModelFacts) -> bool:
        """True if no pass of its stage may follow: it leaves integers beside the model, which that would not keep."""
        return False

    def check(self, facts: ModelFacts, target: Target) -> PassPlan:
        """What the pass would do to such a model. Raises nothing: what is wrong goes into `problems`, naming layers."""
        raise NotImplementedError

    def train_problems(self, task: str, n_samples: int, has_labels: bool) -> list[str]:
        """What is wrong with the training set, of a pass that needs one."""
        return []

    def train_notes(self, facts: ModelFacts, n_samples: int) -> list[Note]:
        """What the plan should say of learning from so many samples."""
        return []

    def refused_by(self, target: Target) -> str | None:
        """Why a further target cannot hold what this pass leaves, or None."""
        return None

    def begin(self, model: Any, context: PassContext) -> Any:
        """What `apply` works on, of a pass over the whole torch model: the `LoadedModel`, or another in its place.

        Called again where the result is taken from the cache, so it must give the same model each time.
        """
        return model

    def apply(self, model: Any, context: PassContext) -> PassResult:
        """Do it. `model` is the stage's object and may be changed in place; the result holds the one to go on with."""
        raise NotImplementedError
