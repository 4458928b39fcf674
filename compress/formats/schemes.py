"""How numbers are stored: the schemes that recipes name and checkpoints write down. No torch here.

Names are those of compressed-tensors, which vLLM and transformers read: W4A16 is 4-bit weights with 16-bit activations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

DEFAULT_GROUP_SIZE = 128
"""Of the W<bits>A16 presets, as in compressed-tensors."""
SUPER_BLOCK = 256
"""Inputs that share the half floats above the scales of llama.cpp's K formats."""
K_GROUPS = {2: (16, False), 3: (16, True), 4: (32, False), 5: (32, False), 6: (16, True)}
"""Bits of a K format -> its group size, and whether it is symmetric."""
IQ4_NUMBERS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the 16 levels of llama.cpp's IQ4 formats stand for."""

LARGEST_FLOATS = {4: 6.0, 8: 448.0}
"""Bits -> the largest number of FP4 E2M1 and FP8 E4M3."""
ScaleType = Literal["float", "half", "e4m3", "e8m0", "six-bit"]


@dataclass(frozen=True)
class WeightScheme:
    """A weight's numbers.

    `kind` "float" is FP4 E2M1 (bits 4) or FP8 E4M3 (bits 8), "table" `IQ4_NUMBERS`. `group_size`: inputs that share one
    scale; -1: one scale for each output channel; 0: one for the whole tensor. Asymmetric integers are unsigned with a
    zero point each. `scales`: how those are stored: as floats; as half floats (IQ4_NL); as E4M3 below one float for the
    tensor (NVFP4); as powers of two in eight bits (MX); as six-bit integers below a half float for some groups
    (llama.cpp's K formats and IQ4_XS). `rows`: outputs that share a group's scale.
    """

    bits: int = 4
    group_size: int = DEFAULT_GROUP_SIZE
    symmetric: bool = True
    kind: Literal["int", "float", "table"] = "int"
    scales: ScaleType = "float"
    rows: int = 1

    @property
    def block(self) -> int:
        """Return the inputs in a block of one of llama.cpp's own formats, which has its half floats; 0: it is none."""
        return {"six-bit": SUPER_BLOCK, "half": self.group_size}.get(self.scales, 0)

    @property
    def has_separate_rows(self) -> bool:
        """Return whether no two outputs share a number, so that each may be rounded by itself."""
        return self.group_size != 0 and self.rows == 1 and self.scales != "e4m3"

    @property
    def integer_range(self) -> tuple[int, int]:
        """Return the least and the greatest integer, both included; the full two's complement range if symmetric."""
        if self.symmetric:
            return -(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1
        return 0, 2**self.bits - 1


@dataclass(frozen=True)
class ActivationScheme:
    """A layer's inputs in few bits. `dynamic`: scaled at run time; otherwise by one stored scale.

    `group_size`: inputs of a token that share a scale made at run time; -1: all of them. `scales`: how such scales are
    rounded; those in E4M3 lie below one stored float (NVFP4).
    """

    kind: Literal["int", "float"] = "int"
    dynamic: bool = True
    bits: int = 8
    group_size: int = -1
    scales: ScaleType = "float"

    @property
    def has_stored_scale(self) -> bool:
        """Return whether calibration gives the layer a scale for its inputs, which a file holds."""
        return not self.dynamic or self.scales == "e4m3"

    @property
    def most(self) -> float:
        """Return the largest number that the stored scale multiplies: its type's, of NVFP4 times E4M3's for a group."""
        largest = 2.0 ** (self.bits - 1) - 1 if self.kind == "int" else LARGEST_FLOATS[self.bits]
        return largest * (LARGEST_FLOATS[8] if self.scales == "e4m3" else 1)


@dataclass(frozen=True)
class Scheme:
    """What a layer computes with. `activations` None: inputs stay in the model's float type."""

    weights: WeightScheme
    activations: ActivationScheme | None = None

    @property
    def name(self) -> str:
        """Return the usual name, without the group size: W4A16, W4A16_ASYM, W8A8, FP8_DYNAMIC, NVFP4, ..."""
        weights, inputs = self.weights, self.activations
        if weights.kind == "table":
            return "IQ4_XS" if weights.scales == "six-bit" else "IQ4_NL"
        if weights.scales == "six-bit":
            return f"Q{weights.bits}_K"
        if weights.kind == "float" and weights.scales != "float":
            family = "NVFP" if weights.scales == "e4m3" else "MXFP"
            return f"{family}{weights.bits}{'A16' if inputs is None else ''}"
        if weights.kind == "float":
            if inputs is None:
                return "W8A16_FP8"
            return "FP8_BLOCK" if weights.rows > 1 else "FP8_DYNAMIC" if inputs.dynamic else "FP8"
        read = "16" if inputs is None else f"FP{inputs.bits}" if inputs.kind == "float" else str(inputs.bits)
        name = f"W{weights.bits}A{read}"
        return name + ("" if weights.symmetric else "_ASYM") + ("_STATIC" if inputs and not inputs.dynamic else "")

    def with_bits(self, bits: int) -> Scheme:
        """Return the same scheme with weights of other bits."""
        return replace(self, weights=replace(self.weights, bits=bits))

    def with_group(self, group_size: int) -> Scheme:
        """Return the same scheme with another group size."""
        return replace(self, weights=replace(self.weights, group_size=group_size))


def _make_presets() -> dict[str, Scheme]:
    presets = {}
    for bits in range(2, 9):
        group = -1 if bits == 8 else DEFAULT_GROUP_SIZE
        presets[f"W{bits}A16"] = Scheme(WeightScheme(bits, group))
        presets[f"W{bits}A16_ASYM"] = Scheme(WeightScheme(bits, group, symmetric=False))
    int8, fp8 = WeightScheme(8, -1), WeightScheme(8, -1, kind="float")
    presets["W8A8"] = presets["INT8"] = Scheme(int8, ActivationScheme())
    presets["W8A8_STATIC"] = Scheme(int8, ActivationScheme(dynamic=False))
    presets["W4A8"] = Scheme(WeightScheme(4), ActivationScheme())
    presets["FP8_DYNAMIC"] = Scheme(fp8, ActivationScheme("float"))
    presets["FP8"] = Scheme(replace(fp8, group_size=0), ActivationScheme("float", dynamic=False))
    presets["FP8_BLOCK"] = Scheme(WeightScheme(8, 128, kind="float", rows=128), ActivationScheme("float", True, 8, 128))
    presets["W4AFP8"] = Scheme(WeightScheme(4), ActivationScheme("float"))
    nvfp4 = WeightScheme(4, 16, kind="float", scales="e4m3")
    presets["NVFP4A16"] = Scheme(nvfp4)
    presets["NVFP4"] = Scheme(nvfp4, ActivationScheme("float", True, 4, 16, "e4m3"))
    for bits in LARGEST_FLOATS:
        mx = WeightScheme(bits, 32, kind="float", scales="e8m0")
        presets[f"MXFP{bits}A16"] = Scheme(mx)
        presets[f"MXFP{bits}"] = Scheme(mx, ActivationScheme("float", True, bits, 32, "e8m0"))
    for bits, (group, symmetric) in K_GROUPS.items():
        presets[f"Q{bits}_K"] = Scheme(WeightScheme(bits, group, symmetric, scales="six-bit"))
    presets["IQ4_NL"] = Scheme(WeightScheme(4, 32, kind="table", scales="half"))
    presets["IQ4_XS"] = Scheme(WeightScheme(4, 32, kind="table", scales="six-bit"))
    return presets


BLOCK_FALLBACKS = {
    "Q2_K": Scheme(WeightScheme(4, 32)),
    "Q3_K": Scheme(WeightScheme(4, 32)),
    "Q4_K": Scheme(WeightScheme(5, 32)),
    "Q5_K": Scheme(WeightScheme(5, 32, symmetric=False)),
    "Q6_K": Scheme(WeightScheme(8, 32)),
    "IQ4_XS": Scheme(WeightScheme(4, 32, kind="table", scales="half")),
}
"""Format of 256 inputs -> what layers get whose inputs they do not divide: as llama.cpp's quantizer has it."""
BLOCK_BITS = {
    "Q2_K": 2.625, "Q3_K": 3.4375, "IQ4_XS": 4.25, "IQ4_NL": 4.5, "Q4_K": 4.5, "Q5_K": 5.5, "Q6_K": 6.5625,
}  # fmt: skip
"""llama.cpp's own formats -> what each weight takes, its share of the scales included; the fewest bits first."""
PRESETS: dict[str, Scheme] = _make_presets()
"""Name -> scheme. W8A8: weights per channel, inputs dynamic for each token; FP8: one stored scale for each tensor,
FP8_BLOCK: for each 128 x 128 weights and each 128 of a token's inputs. NVFP4 and MXFP4, MXFP8: OCP's small floats in
groups of 16 and 32, A16: inputs stay in 16 bits; W4AFP8: integers, inputs in FP8. Q4_K, IQ4_XS and their
like: llama.cpp's own formats, in blocks of 256 weights, of IQ4_NL 32."""

KvScheme = Literal["int8", "fp8"]
"""How a KV cache is stored: one scale for each layer's keys and one for its values, from calibration."""
