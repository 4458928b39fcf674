"""The keys by which a recipe says how a weight is stored: a scheme by name, or its bits, groups and symmetry."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, WithJsonSchema, model_validator

from compress.formats.schemes import PRESETS
from compress.passes.mixed_bits import Bits
from compress.specs import LayerPattern, Record
from runtime.words import did_you_mean

AUTO = "auto"
"""Of a table: the fewest bits that cost next to nothing, by what is measured."""


def _check_preset(name: str) -> str:
    """Return the scheme's name in capitals. Raises ValueError if it is unknown."""
    if name.upper() not in PRESETS:
        raise ValueError(f"there is no scheme {name!r}{did_you_mean(name, PRESETS)}; there are {', '.join(PRESETS)}")
    return name.upper()


def read_table_scheme(name: str) -> str:
    """Return a table's scheme in capitals, W4 as W4A16, or AUTO. Raises ValueError where inputs are rounded, too."""
    if name == AUTO:
        return name
    full = name.upper() if name.upper() in PRESETS else f"{name.upper()}A16"
    if full not in _TABLE_SCHEMES:
        known = ", ".join((AUTO, "W8", "W4", *_TABLE_SCHEMES))
        raise ValueError(
            f"there is no scheme {name!r} for weights alone{did_you_mean(name, _TABLE_SCHEMES)}; there are {known}"
        )
    return full


_TABLE_SCHEMES = tuple(name for name, scheme in PRESETS.items() if scheme.activations is None)
SchemeName = Annotated[str, AfterValidator(_check_preset), WithJsonSchema({"type": "string", "enum": list(PRESETS)})]
TableScheme = Annotated[
    str,
    AfterValidator(read_table_scheme),
    WithJsonSchema({"type": "string", "enum": [AUTO, "W8", "W4", *_TABLE_SCHEMES]}),
]
GroupSize = Annotated[int, Field(ge=-1)]


class WeightNumbers(Record):
    """The keys that say how a weight is stored. `scheme` may not be contradicted by the others."""

    scheme: SchemeName | None = None
    """Preset: W4A16, W4A16_ASYM, W8A8, FP8_DYNAMIC, NVFP4, ... in capitals or not. It stands for `bits`, `symmetric`,
    what becomes of inputs, and, where `group_size` is not given, the groups."""

    @model_validator(mode="after")
    def _check_scheme(self) -> WeightNumbers:
        if self.scheme is None:
            return self
        weights = PRESETS[self.scheme].weights
        size: int | None = getattr(self, "group_size", None)
        if weights.block and size not in (None, weights.group_size):
            raise ValueError(f"scheme {self.scheme} has groups of its own; leave group_size out")
        for key, value in (("bits", weights.bits), ("symmetric", weights.symmetric)):
            given = getattr(self, key)
            if given is not None and given != value:
                raise ValueError(
                    f"scheme {self.scheme} stands for {key}: {str(value).lower()}; leave one of the two out"
                )
        return self


def make_scheme_field(key: Literal["bits", "symmetric"], otherwise: int | bool) -> Any:
    """Make a field that is the scheme's number where the recipe does not give it, and `otherwise` without a scheme."""

    def choose_default(given: dict[str, Any]) -> Any:
        scheme = given["scheme"]
        return otherwise if scheme is None else getattr(PRESETS[scheme].weights, key)

    return Field(default_factory=choose_default, json_schema_extra={"default": otherwise})


class WeightOverride(WeightNumbers):
    """Other numbers for the layers that `targets` selects."""

    targets: tuple[LayerPattern, ...]
    """Layer names, `re:` patterns or types."""
    bits: Bits | None = None
    """Bits for each weight."""
    group_size: GroupSize | None = None
    """Inputs that share one scale; -1 for one scale for each output channel."""
    symmetric: bool | None = None
    """False: unsigned weights with a zero point for each group."""
