"""What a plan measures of models that are made like the recipe's: their speed, and what making them held."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

GAINS = 1.1
"""Times as fast as float; what gains less is compressed for size, and the plan says so."""
FLOAT_ELSEWHERE = "target: openvino, float file in "


@dataclass(frozen=True)
class LatencyForecast:
    """Milliseconds of a call (of a decoder: of a further token) before and after, on `backend`.

    `parts`: what the second does not hold, in words. `in_float`: layers that a pass puts into eight bits and that are
    computed in float because they are faster so. `others`: what else was timed, where the recipe gains little: in words
    -> milliseconds. `held_bytes`: what the process held at most by then, as the run will. `denormal`: weights of an
    ONNX file below the least normal number, which are zero in the result; `flushed_ms`: a call of the float model with
    zeros in their place. `first_ms`: of a decoder, what its first token takes before and after, behind a prompt as it
    will be judged; () for others. `blocks`: of how many blocks the models were from which it was foretold; (): of all.
    """

    metric: str
    backend: str
    float_ms: float
    compressed_ms: float
    parts: tuple[str, ...] = ()
    in_float: tuple[str, ...] = ()
    others: Mapping[str, float] = field(default_factory=dict)
    held_bytes: int = 0
    denormal: int = 0
    flushed_ms: float = 0.0
    first_ms: tuple[float, ...] = ()
    blocks: tuple[int, ...] = ()

    def describe_denormals(self) -> str:
        """Say what of the gain is that of zeros in the place of denormal weights; "" where they slow nothing down."""
        # What gains less from zeros in the place of denormal weights may be the clock: densenet121 has four of them
        # among 8 million, and 60.54 ms became 60.35.
        if not self.denormal or (theirs := self.float_ms / self.flushed_ms) < 1.05:
            return ""
        return (
            f"{self.denormal} weights are denormal numbers (below 1.2e-38), with which CPUs compute slowly, and are "
            f"zero in the result: of the {self.speedup:.2f}x foreseen {theirs:.2f}x come from these zeros alone "
            f"({self.float_ms:.4g} ms as the file came, {self.flushed_ms:.4g} ms with zeros), and "
            f"{self.flushed_ms / self.compressed_ms:.2f}x remain"
        )

    def describe_unrounded(self) -> str:
        """Say what is left of the gain beside the float model in another runtime; "" where that is no faster."""
        for name, ms in self.others.items():
            gain = self.base_ms / ms
            if name.startswith(FLOAT_ELSEWHERE) and GAINS <= gain < self.speedup:
                return f"{name} is {gain:.2f}x as fast as here: beside that this recipe is {self.speedup / gain:.2f}x"
        return ""

    @property
    def base_ms(self) -> float:
        """Return the float model's milliseconds beside `others`, in whose rounds it was timed again."""
        return self.others.get("float", self.float_ms)

    @property
    def speedup(self) -> float:
        return self.float_ms / self.compressed_ms
