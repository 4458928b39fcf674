"""What each target runtime does with each format: facts as data, which plans quote before any work is done.

Measured on ONNX Runtime 1.31, OpenVINO 2026.4 and the TensorRT-RTX 1.7 builder; `benchmarks/` holds scripts for those
of them that a README claim rests on.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from runtime.plugins import BACKEND_GROUP, PluginTable, check_entry

TargetName = Literal[
    "onnxruntime-cpu", "openvino", "executorch", "tensorrt", "tensorrt-rtx", "onnxruntime-cuda",
    "vllm", "transformers", "llama.cpp",
]  # fmt: skip
WeightFormat = Literal[
    "w2", "w3", "w4", "w5", "w6", "w7", "w8",
    "w2-asym", "w3-asym", "w4-asym", "w5-asym", "w6-asym", "w7-asym", "w8-asym",
]  # fmt: skip
"""Integers with one scale for each group or channel (and zero points: -asym); activations stay float."""
Format = Literal[
    "int8-static", "int8-dynamic", "float16", "bfloat16", WeightFormat,
    "w8a8", "w8a8-static", "w4a8", "fp8", "fp8-dynamic", "kv-int8", "kv-fp8", "fp8-static",
    "fp8-block", "w4afp8", "nvfp4", "nvfp4a16", "mxfp4", "mxfp4a16", "mxfp8", "mxfp8a16",
    "q2-k", "q3-k", "q4-k", "q5-k", "q6-k", "iq4-nl", "iq4-xs",
]  # fmt: skip
"""int8-static, int8-dynamic, fp8-static: of the graph passes `int8` and `fp8`. w8a8 and what follows: schemes as
compressed-tensors names them (w8a8: inputs dynamic for each token), and those of a KV cache. q4-k and its like: of
llama.cpp."""


@dataclass(frozen=True)
class FormatFact:
    """How a target takes a format. `verdict`: fast, plain (as fast as float), slow (slower), refused."""

    verdict: Literal["fast", "plain", "slow", "refused"]
    text: str


@dataclass(frozen=True)
class Target:
    """One runtime.

    `variant`: the Q/DQ form it fuses. `formats`: what it does with each. `group_sizes`, `group_sizes_8bit`: those that
    its weight-only kernels have, for up to 4 bits and for more (empty: any; -1: per channel).
    """

    name: str
    variant: Literal["u8s8", "s8s8"]
    formats: dict[str, FormatFact] = field(default_factory=dict)
    group_sizes: tuple[int, ...] = ()
    group_sizes_8bit: tuple[int, ...] = ()
    reads: Literal["onnx", "checkpoint", "gguf"] = "onnx"
    """The kind of export that it loads."""
    negative_scales: bool = True
    """A weight's scale may be negative."""
    cpu_operators: bool = False
    """It has ONNX Runtime's operators for CPUs, into which its graphs are rewritten."""
    needs_floats: bool = False
    """It cannot read in few bits what is `unpackable` (see `LayerFacts`)."""

    def fact(self, name: Format) -> FormatFact:
        return self.formats[name]

    def kernels(self, bits: int) -> tuple[int, ...]:
        """Return the group sizes that kernels for weights of so many bits have; empty: any."""
        return self.group_sizes if bits <= 4 else self.group_sizes_8bit


FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("query", "key", "value"), ("w1", "w3"))
"""Layers of one parent that vLLM runs as one, where they read the same tensor."""
KERNEL_BLOCKS: dict[Literal["u8s8", "s8s8"], tuple[int, ...]] = {
    "u8s8": (256, 128, 64, 32, 16),
    "s8s8": (128, 64, 32),
}
"""Blocks of weights that each variant's runtimes multiply by without unpacking them first."""
TWO_BIT_BLOCKS = (32, 64, 128)
"""Those that have a fast kernel; at 16 and 256 MatMulNBits unpacks its weights to float32 at every call."""
BLOCK_FORMATS = ("q2-k", "q3-k", "q4-k", "q5-k", "q6-k", "iq4-nl", "iq4-xs")
_NO_BLOCK_FORMATS: dict[str, FormatFact] = dict.fromkeys(
    BLOCK_FORMATS, FormatFact("refused", "has no such weights; use scheme: W4A16, or target: llama.cpp")
)


def _repeat_fact(fact: FormatFact, *bits: int) -> dict[str, FormatFact]:
    """Repeat one fact for symmetric and asymmetric weights of some widths."""
    return {f"w{b}{kind}": fact for b in bits for kind in ("", "-asym")}


_AS_INT4 = FormatFact("fast", "ONNX has no such type: stored in 4 bits, a file as large and as fast as with W4A16")
_AS_INT2 = FormatFact(
    "fast",
    "a decoder's products are stored in 2 bits (MatMulNBits); everything else in 4, for ONNX itself has no type of 2",
)
_AS_INT8 = FormatFact("fast", "ONNX has no such type: stored in 8 bits, a file as large and as fast as with W8A16")
_NO_INT8_SCHEME = FormatFact("refused", "takes 8-bit activations from the graph; use kind: int8, or target: vllm")
_NO_FP8 = FormatFact("refused", "gets no FP8 graphs; use target: vllm, or kind: int8")
_NO_FP8_PRODUCTS = FormatFact("refused", "has no kernels of float8 products; use kind: int8, or target: tensorrt")
_NO_KV_CACHE = FormatFact("refused", "gets graphs with a float KV cache; use target: vllm")
_NO_FLOAT_FORMAT = FormatFact(
    "refused", "gets no graphs with FP4, MX or FP8 in blocks; use target: vllm, or scheme: W4A16"
)
_FLOAT_FORMATS = ("fp8-block", "w4afp8", "nvfp4", "nvfp4a16", "mxfp4", "mxfp4a16", "mxfp8", "mxfp8a16")
_CHECKPOINTS_ONLY = {
    **dict.fromkeys(_FLOAT_FORMATS, _NO_FLOAT_FORMAT),
    "w8a8": _NO_INT8_SCHEME,
    "w8a8-static": _NO_INT8_SCHEME,
    "w4a8": FormatFact("refused", "has no kernel of 4-bit weights with 8-bit activations; use scheme: W4A16"),
    "fp8": _NO_FP8,
    "fp8-dynamic": _NO_FP8,
    "fp8-static": _NO_FP8_PRODUCTS,
    "kv-int8": _NO_KV_CACHE,
    "kv-fp8": _NO_KV_CACHE,
    **_NO_BLOCK_FORMATS,
}
_ONNX_WIDTHS = {**_repeat_fact(_AS_INT4, 2, 3), **_repeat_fact(_AS_INT8, 5, 6, 7), **_CHECKPOINTS_ONLY}


_CPU_8BIT = FormatFact(
    "fast",
    "fuses into MatMulNBits at block size 32 and accuracy_level 4, its default for Q/DQ; "
    "level 0 would run at 0.02x; faster where few rows run at once (decoding), not where many do",
)
_S8S8 = "fuses symmetric int8 activations and per-channel weights, refuses zero points: the s8s8 flavour is written"
_TENSORRT_8BIT = FormatFact("refused", "takes block-wise weights in 4 bits only; use scheme: W4A16, or int8")
_TENSORRT_ASYM = FormatFact("refused", "refuses uint4 and zero points; use scheme: W4A16")
_TENSORRT_MX = FormatFact(
    "plain",
    "takes it by operators of its own; for compute capability 12.0 it unpacks both factors and multiplies floats: a "
    "smaller file, no faster (its documentation has products of MXFP8 for 10.0, not tried)",
)
_TENSORRT_FP8 = FormatFact(
    "fast", "products in float8 with one scale for each tensor, compute capability 8.9 and later"
)
_TENSORRT_FORMATS = {
    **_CHECKPOINTS_ONLY,
    # Tried in the builder of TensorRT-RTX 1.7.1 for compute capability 12.0: of NVFP4 its log has products of FP4, of
    # MXFP8 products of floats. ONNX Runtime 1.31 has CPU kernels of neither.
    "nvfp4": FormatFact(
        "fast",
        "products in FP4 with E4M3 scales, inputs scaled as they run by an operator of its own, compute capability "
        "10.0 and later",
    ),
    "nvfp4a16": FormatFact(
        "fast",
        "takes FP4 with E4M3 scales from the graph (DequantizeLinear of opset 23), compute capability 10.0 and later",
    ),
    "mxfp8": _TENSORRT_MX,
    "mxfp8a16": _TENSORRT_MX,
    "fp8": _TENSORRT_FP8,
    "fp8-static": _TENSORRT_FP8,
    "fp8-dynamic": FormatFact("refused", "scales no token by itself; use scheme: FP8, or target: vllm"),
    "fp8-block": FormatFact("refused", "ONNX has no blocks of two dimensions; use scheme: FP8 or MXFP8"),
    **dict.fromkeys(
        ("mxfp4", "mxfp4a16"), FormatFact("refused", "has E8M0 scales for FP8 alone; use scheme: NVFP4 or NVFP4A16")
    ),
    "w4afp8": FormatFact("refused", "multiplies int4 by float inputs alone; use scheme: W4A16 or NVFP4"),
    "w2": _AS_INT4,
    "w3": _AS_INT4,
    **_repeat_fact(_TENSORRT_8BIT, 5, 6, 7, 8),
    "w2-asym": _TENSORRT_ASYM,
    "w3-asym": _TENSORRT_ASYM,
    "int8-static": FormatFact("fast", _S8S8),
    "int8-dynamic": FormatFact("refused", "has no run-time activation quantization for int8; use mode: static"),
    "w4": FormatFact("fast", "int4 block-wise DequantizeLinear feeds the weight-only kernels"),
    "w4-asym": _TENSORRT_ASYM,
    "float16": FormatFact("fast", "strongly typed float16 runs on tensor cores"),
    "bfloat16": FormatFact("fast", "strongly typed bfloat16 runs on tensor cores (compute capability 8.0 and later)"),
}
_NO_PTE = FormatFact("refused", "is written in float32 and int8 alone; use kind: int8, or target: onnxruntime-cpu")
_NO_VLLM_KERNEL = "has kernels for weights of 4 and 8 bits; use scheme: W4A16 or W8A16, or target: transformers"
_NO_GRAPH = FormatFact("refused", "reads checkpoints, not graphs; use rtn or gptq with scheme: W8A8, or an ONNX target")
_NO_GRAPH_IN_GGUF = FormatFact("refused", "reads GGUF files, not graphs; use gptq with scheme: Q4_K, or an ONNX target")
_DECOMPRESSED = FormatFact("plain", "decompresses the weights when it loads them: a smaller file, the speed of float")
_ROUNDED_INPUTS = FormatFact(
    "slow", "decompresses the weights when it loads them, and rounds inputs in float: a smaller file, slower than float"
)
_NO_ROUNDED_INPUTS = FormatFact(
    "refused", "rounds inputs in its own way, beside weights alone; use scheme: W4A16 or Q4_K"
)
_NO_WIDE_OFFSETS = FormatFact("refused", "has no offsets beside more than 5 bits; use symmetric: true")
_ROUNDED_CACHE = FormatFact(
    "slow", "rounds keys and values by the stored scales and keeps them in float: a little slower"
)


def _fact_of_more_bits(bits: int) -> FormatFact:
    """Return the fact of a width that llama.cpp stores in more bits."""
    return FormatFact("plain", f"GGUF has no such type: stored in {bits} bits, a file as large as with W{bits}A16")


_OWN: dict[str, Target] = {
    "onnxruntime-cpu": Target(
        "onnxruntime-cpu",
        "u8s8",
        formats={
            **_ONNX_WIDTHS,
            "int8-static": FormatFact(
                "fast",
                "on x86 ONNX Runtime is fastest with uint8 activations and int8 weights, and on Arm it has kernels for "
                "them, too; the file is written so (u8s8)",
            ),
            "int8-dynamic": FormatFact(
                "fast", "matrix products fuse into DynamicQuantizeMatMul; convolutions stay float"
            ),
            **_repeat_fact(_AS_INT2, 2),
            **_repeat_fact(_CPU_8BIT, 8),
            "kv-int8": FormatFact("fast", "GroupQueryAttention keeps keys and values in int8"),
            "w4": FormatFact(
                "fast",
                "fuses into MatMulNBits at accuracy_level 4, its default for Q/DQ; level 0 would gain nothing; "
                "faster where few rows run at once (decoding), smaller but little faster where many do",
            ),
            "w4-asym": FormatFact(
                "fast",
                "fuses into MatMulNBits with zero points at accuracy_level 4; faster where few rows run at once "
                "(decoding), smaller but little faster where many do",
            ),
            "float16": FormatFact(
                "slow", "has few float16 CPU kernels and casts around the rest: smaller, but slower than float32"
            ),
            "bfloat16": FormatFact(
                "refused", "has no bfloat16 CPU kernels; use target: openvino, or float16 for size alone"
            ),
        },
        group_sizes=(16, 32, 64, 128, 256),
        group_sizes_8bit=(16, 32, 64, 128, 256),
        cpu_operators=True,
    ),
    "openvino": Target(
        "openvino",
        "u8s8",
        formats={
            **_ONNX_WIDTHS,
            "int8-static": FormatFact(
                "fast", "reads the same u8s8 file; convolutions, matrix products and residual adds run in int8"
            ),
            "int8-dynamic": FormatFact(
                "slow", "runs DynamicQuantizeLinear as separate operators, slower than float32; use mode: static"
            ),
            **_repeat_fact(FormatFact("fast", "decompresses inside the matrix product"), 4, 8),
            "float16": FormatFact(
                "fast", "stores float16 and computes in the CPU's best type (bfloat16 where it has it)"
            ),
            "bfloat16": FormatFact("fast", "computes in bfloat16 where the CPU has it (its default there)"),
        },
    ),
    "executorch": Target(
        "executorch",
        "u8s8",
        formats={
            **dict.fromkeys(get_args(Format), _NO_PTE),
            "int8-static": FormatFact(
                "fast",
                "XNNPACK computes in int8 between the pairs; a layer whose output stays float scales each row of its "
                "input as it runs, and products of two activations stay float",
            ),
            "int8-dynamic": FormatFact(
                "fast", "matrix products scale each row of their input as they run; convolutions stay float"
            ),
        },
    ),
    "tensorrt": Target("tensorrt", "s8s8", _TENSORRT_FORMATS, (32, 64, 128), (), negative_scales=False),
    "tensorrt-rtx": Target("tensorrt-rtx", "s8s8", _TENSORRT_FORMATS, (32, 64, 128), (), negative_scales=False),
    "onnxruntime-cuda": Target(
        "onnxruntime-cuda",
        "s8s8",
        {
            **_ONNX_WIDTHS,
            "int8-static": FormatFact("slow", "the CUDA provider has no fused int8 convolutions; use target: tensorrt"),
            "int8-dynamic": FormatFact("slow", "the CUDA provider falls back to the CPU for DynamicQuantizeLinear"),
            **_repeat_fact(FormatFact("fast", "fuses into MatMulNBits"), 4, 8),
            "float16": FormatFact("fast", "runs on tensor cores"),
            "bfloat16": FormatFact("fast", "runs on tensor cores (compute capability 8.0 and later)"),
        },
        (16, 32, 64, 128, 256),
        (),
    ),
    "vllm": Target(
        "vllm",
        "s8s8",
        {
            **_repeat_fact(FormatFact("refused", _NO_VLLM_KERNEL), 2, 3, 5, 6, 7),
            **_NO_BLOCK_FORMATS,
            "w4": FormatFact("fast", "runs in its Marlin kernels"),
            "w8": FormatFact("fast", "runs in its Marlin kernels"),
            "w4-asym": FormatFact("fast", "runs in its Marlin kernels, zero points packed"),
            "w8-asym": FormatFact("fast", "runs in its kernels that take 8-bit zero points (Hopper and later)"),
            "w8a8": FormatFact("fast", "runs in int8 with inputs scaled for each token"),
            "w8a8-static": FormatFact("fast", "runs in int8 with stored input scales"),
            "w4a8": FormatFact("slow", "has kernels for it on CPUs alone; on a GPU use scheme: W4A16 or W8A8"),
            "fp8": FormatFact("fast", "runs in FP8 from compute capability 8.9 on, weight-only before"),
            "fp8-dynamic": FormatFact("fast", "runs in FP8 from compute capability 8.9 on, weight-only before"),
            # As vLLM 0.32 chooses kernels (model_executor/kernels/linear); CPUs with AMX have that of FP8_BLOCK.
            "fp8-block": FormatFact(
                "fast", "runs in FP8 from compute capability 8.9 on, weight-only before, and on CPUs that have AMX"
            ),
            "w4afp8": FormatFact("fast", "has kernels for it on compute capability 9.0 alone, in groups of 128"),
            "nvfp4": FormatFact(
                "fast", "computes in FP4 from compute capability 10.0 on; before, from 7.5 on, the inputs stay float"
            ),
            "nvfp4a16": FormatFact("fast", "runs in its Marlin kernels from compute capability 7.5 on"),
            "mxfp4": FormatFact(
                "fast", "computes in FP4 from compute capability 10.0 on; before, from 7.5 on, the inputs stay float"
            ),
            "mxfp4a16": FormatFact("fast", "runs in its Marlin kernels from compute capability 7.5 on"),
            "mxfp8": FormatFact(
                "fast", "computes in FP8 from compute capability 10.0 on; before, from 7.5 on, the inputs stay float"
            ),
            "mxfp8a16": FormatFact(
                "fast", "runs it as MXFP8: from compute capability 10.0 on inputs are rounded, too; not before"
            ),
            "kv-int8": FormatFact("refused", "has no int8 KV cache; use scheme: fp8"),
            "kv-fp8": FormatFact(
                "fast",
                "keeps keys and values in FP8 with the stored scales; attention kernels that read queries in FP8, too "
                "(FlashAttention 3), lose more than is scored",
            ),
            "int8-static": _NO_GRAPH,
            "fp8-static": _NO_GRAPH,
            "int8-dynamic": _NO_GRAPH,
            "float16": _NO_GRAPH,
            "bfloat16": _NO_GRAPH,
        },
        (32, 64, 128, -1),
        (32, 64, 128, -1),
        reads="checkpoint",
    ),
    "transformers": Target(
        "transformers",
        "s8s8",
        {
            **_repeat_fact(_DECOMPRESSED, *range(2, 9)),
            **_NO_BLOCK_FORMATS,
            **dict.fromkeys(("w8a8", "w8a8-static", "w4a8", "fp8", "fp8-dynamic"), _ROUNDED_INPUTS),
            **dict.fromkeys(("fp8-block", "w4afp8", "nvfp4", "mxfp4", "mxfp8"), _ROUNDED_INPUTS),
            **dict.fromkeys(("nvfp4a16", "mxfp4a16", "mxfp8a16"), _DECOMPRESSED),
            "kv-int8": _ROUNDED_CACHE,
            "kv-fp8": _ROUNDED_CACHE,
            "int8-static": _NO_GRAPH,
            "fp8-static": _NO_GRAPH,
            "int8-dynamic": _NO_GRAPH,
            "float16": _NO_GRAPH,
            "bfloat16": _NO_GRAPH,
        },
        reads="checkpoint",
        needs_floats=True,
    ),
    "llama.cpp": Target(
        "llama.cpp",
        "s8s8",
        {
            **_repeat_fact(_fact_of_more_bits(4), 2, 3),
            **_repeat_fact(FormatFact("fast", "read as Q4_0, or Q4_1 with zero points"), 4),
            **_repeat_fact(FormatFact("fast", "read as Q5_0, or Q5_1 with zero points"), 5),
            **_repeat_fact(_fact_of_more_bits(8), 6, 7),
            **_repeat_fact(FormatFact("fast", "read as Q8_0"), 8),
            **{f"w{bits}-asym": _NO_WIDE_OFFSETS for bits in (6, 7, 8)},
            **dict.fromkeys(BLOCK_FORMATS, FormatFact("fast", "its own format")),
            **dict.fromkeys(("w8a8", "w8a8-static", "w4a8", "fp8", "fp8-dynamic"), _NO_ROUNDED_INPUTS),
            **dict.fromkeys(
                _FLOAT_FORMATS, FormatFact("refused", "is not written with FP4, MX or FP8; use scheme: Q4_K or W4A16")
            ),
            **dict.fromkeys(
                ("kv-int8", "kv-fp8"), FormatFact("refused", "stores no scales of a cache; use its --cache-type-k")
            ),
            **dict.fromkeys(("int8-static", "fp8-static", "int8-dynamic", "float16", "bfloat16"), _NO_GRAPH_IN_GGUF),
        },
        (32, 64, 128, 256),
        (32, 64, 128, 256),
        reads="gguf",
    ),
}


def refusal(target: Target, format_name: Format, kind: str) -> str | None:
    """Return why the target cannot hold a format that a pass of this kind leaves, or None."""
    fact = target.fact(format_name)
    return f"{kind}: target {target.name} {fact.text}" if fact.verdict == "refused" else None


FIRST_CAPABILITY: dict[Format, float] = {
    "fp8-static": 8.9, "nvfp4": 10.0, "nvfp4a16": 10.0, "mxfp8": 8.9, "mxfp8a16": 8.9,
}  # fmt: skip
"""Formats of graphs -> the first compute capability for which TensorRT compiles them."""
NOT_ON_CPUS: frozenset[Format] = frozenset({"bfloat16", "nvfp4", "nvfp4a16", "mxfp8", "mxfp8a16"})
"""Formats of graphs for which ONNX Runtime has no kernels on CPUs."""


def accept_target(entry: object, name: str) -> Target:
    """Return the target of a backend from outside: as that for which it is planned. ValueError where it names none."""
    from runtime.backends.base import Backend

    planned_as = check_entry(entry, name, Backend).planned_as
    if planned_as not in _OWN:
        raise ValueError(f"planned_as is '{planned_as}', and must be a target: one of {', '.join(_OWN)}")
    return replace(_OWN[planned_as], name=name)


TARGETS: PluginTable[Target] = PluginTable(BACKEND_GROUP, _OWN, accept_target)
"""Name -> target; a backend that an installed distribution adds is one, too."""
