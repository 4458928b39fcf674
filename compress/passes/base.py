"""What every pass is: a frozen record of its knobs with `check` (plan time, no weights) and `apply` (the work)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from compress.facts import ModelFacts, PassPlan
from compress.targets import Target

if TYPE_CHECKING:
    from compress.passes.context import PassContext, PassResult


class Record(BaseModel):
    """A frozen piece of a recipe; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


class Pass(Record):
    """One step of a recipe.

    `stage` says what it rewrites: the torch module ("model") or the ONNX graph ("graph"). Model passes come before
    graph passes in a recipe, because the export stands between them.
    """

    stage: ClassVar[Literal["model", "graph"]] = "graph"
    needs_calibration: ClassVar[bool] = False
    kind: str

    def check(self, facts: ModelFacts, target: Target) -> PassPlan:
        """What the pass would do to a model like this. Raises nothing: what is wrong goes into `problems`, naming layers."""
        raise NotImplementedError

    def refused_by(self, target: Target) -> str | None:
        """Why a further target cannot hold what this pass leaves, or None."""
        return None

    def apply(self, model: Any, context: PassContext) -> PassResult:
        """Do it. `model` is the stage's object and may be changed in place; the result holds the one to go on with."""
        raise NotImplementedError
