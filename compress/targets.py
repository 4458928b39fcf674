"""What each target runtime does with each format: facts as data, which plans quote before any work is done.

Measured on ONNX Runtime 1.31, OpenVINO 2026.4 and the TensorRT-RTX 1.7 builder; `benchmarks/` holds scripts for those
of them that a README claim rests on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

TargetName = Literal["onnxruntime-cpu", "openvino", "tensorrt", "tensorrt-rtx", "onnxruntime-cuda"]
Format = Literal["int8-static", "int8-dynamic", "w8", "w4", "w4-asym", "float16", "bfloat16"]


@dataclass(frozen=True)
class FormatFact:
    """How a target takes a format. `verdict`: fast, slow (slower than float32), refused."""

    verdict: Literal["fast", "slow", "refused"]
    text: str


@dataclass(frozen=True)
class Target:
    """One runtime.

    `flavour`: the Q/DQ form it fuses. `formats`: what it does with each. `group_sizes`, `group_sizes_8bit`: those that
    its weight-only kernels have (empty: any).
    """

    name: str
    flavour: Literal["u8s8", "s8s8"]
    formats: dict[str, FormatFact] = field(default_factory=dict)
    group_sizes: tuple[int, ...] = ()
    group_sizes_8bit: tuple[int, ...] = ()
    reads: Literal["onnx", "checkpoint"] = "onnx"
    """The kind of export that it loads."""

    def fact(self, name: Format) -> FormatFact:
        return self.formats[name]


_S8S8 = "fuses symmetric int8 activations and per-channel weights, refuses zero points: the s8s8 flavour is written"
_TENSORRT_FORMATS = {
    "int8-static": FormatFact("fast", _S8S8),
    "int8-dynamic": FormatFact("refused", "has no run-time activation quantization for int8; use mode: static"),
    "w8": FormatFact("refused", "takes block-wise weights in 4 bits only; use scheme: W4A16, or int8"),
    "w4": FormatFact("fast", "int4 block-wise DequantizeLinear feeds the weight-only kernels"),
    "w4-asym": FormatFact("refused", "refuses uint4 and zero points; use scheme: W4A16"),
    "float16": FormatFact("fast", "strongly typed float16 runs on tensor cores"),
    "bfloat16": FormatFact("fast", "strongly typed bfloat16 runs on tensor cores (compute capability 8.0 and later)"),
}

TARGETS: dict[str, Target] = {
    "onnxruntime-cpu": Target(
        "onnxruntime-cpu",
        "u8s8",
        formats={
            "int8-static": FormatFact(
                "fast",
                "uint8 activations with int8 weights fuse into QLinearConv and MatMulIntegerToFloat; symmetric int8 "
                "activations (S8S8) would be slower than float32 on encoders, so the u8s8 flavour is written",
            ),
            "int8-dynamic": FormatFact(
                "fast", "matrix products fuse into DynamicQuantizeMatMul; convolutions stay float"
            ),
            "w8": FormatFact(
                "fast",
                "fuses into MatMulNBits at block size 32 and accuracy_level 4, its default for Q/DQ; "
                "level 0 would run at 0.02x; faster where few rows run at once (decoding), not where many do",
            ),
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
        group_sizes_8bit=(32,),
    ),
    "openvino": Target(
        "openvino",
        "u8s8",
        formats={
            "int8-static": FormatFact(
                "fast", "reads the same u8s8 file; convolutions, matrix products and residual adds run in int8"
            ),
            "int8-dynamic": FormatFact(
                "slow", "runs DynamicQuantizeLinear as separate operators, slower than float32; use mode: static"
            ),
            "w8": FormatFact("fast", "decompresses inside the matrix product"),
            "w4": FormatFact("fast", "decompresses inside the matrix product"),
            "w4-asym": FormatFact("fast", "decompresses inside the matrix product"),
            "float16": FormatFact(
                "fast", "stores float16 and computes in the CPU's best type (bfloat16 where it has it)"
            ),
            "bfloat16": FormatFact("fast", "computes in bfloat16 where the CPU has it (its default there)"),
        },
    ),
    "tensorrt": Target("tensorrt", "s8s8", _TENSORRT_FORMATS, (32, 64, 128), ()),
    "tensorrt-rtx": Target("tensorrt-rtx", "s8s8", _TENSORRT_FORMATS, (32, 64, 128), ()),
    "onnxruntime-cuda": Target(
        "onnxruntime-cuda",
        "s8s8",
        {
            "int8-static": FormatFact("slow", "the CUDA provider has no fused int8 convolutions; use target: tensorrt"),
            "int8-dynamic": FormatFact("slow", "the CUDA provider falls back to the CPU for DynamicQuantizeLinear"),
            "w8": FormatFact("fast", "fuses into MatMulNBits"),
            "w4": FormatFact("fast", "fuses into MatMulNBits"),
            "w4-asym": FormatFact("fast", "fuses into MatMulNBits"),
            "float16": FormatFact("fast", "runs on tensor cores"),
            "bfloat16": FormatFact("fast", "runs on tensor cores (compute capability 8.0 and later)"),
        },
        (16, 32, 64, 128, 256),
        (),
    ),
}
