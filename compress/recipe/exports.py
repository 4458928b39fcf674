"""The vocabulary of a recipe's `export:`. The exporters themselves are in `compress.export`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from compress.facts import LOWEST_OPSET
from compress.formats.targets import TARGETS, TargetName
from compress.specs import Record
from runtime.nvidia.tensorrt_api import Compatibility

# Not in compress.formats: its import would read the plug-ins, whose own modules may be the ones that import it.
if TYPE_CHECKING:
    AnyTarget = TargetName
else:
    AnyTarget = Literal[tuple(TARGETS)]

CHECKPOINT_TARGET: TargetName = "transformers"
"""What a checkpoint is for where the recipe does not say."""
GGUF_TARGET: TargetName = "llama.cpp"
ORT_TARGET: TargetName = "onnxruntime-cpu"


class GraphExport(Record):
    """What is written from the ONNX graph."""

    opset: Annotated[int, Field(ge=LOWEST_OPSET, le=23)] = 20
    """Of a torch model's export; an onnx: source keeps its own, raised to 20 if it is older.

    A graph with an AveragePool is written as one of 18 where that is the same: ONNX Runtime is faster so."""


class OnnxExport(GraphExport):
    """An ONNX graph in the variant that `target` is fast on (default: the recipe's target)."""

    kind: Literal["onnx"] = "onnx"
    target: AnyTarget | None = None
    """The runtime that the file is for; default: the recipe's target."""


class CheckpointExport(Record):
    """A Hugging Face folder of safetensors, its quantized layers packed as inference engines read them."""

    kind: Literal["checkpoint"] = "checkpoint"
    target: AnyTarget | None = None
    """The engine that it is for; default: transformers."""
    format: Literal["compressed-tensors", "gptq", "awq"] = "compressed-tensors"
    """How quantized layers are stored; gptq holds weight-only integers of 2, 3, 4 and 8 bits, awq of 4 (AutoAWQ's gemm
    version, whatever pass rounded them), both one scheme in a model."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of everything that stays float; default: what the source checkpoint has each tensor in."""


class GgufExport(Record):
    """One GGUF file with its tokenizer, as llama.cpp and what is built on it (Ollama, LM Studio) load."""

    kind: Literal["gguf"] = "gguf"
    dtype: Literal["float32", "bfloat16", "float16"] = "float16"
    """Of matrices that stay float; vectors are float32."""
    imatrix: bool = False
    """Write imatrix.gguf beside it: how large the inputs of each matrix are on the calibration set, which
    `llama-quantize --imatrix` reads, and `importance` of `rtn`."""


Size = Annotated[int, Field(ge=0)]


class EngineExport(GraphExport):
    """An engine compiled from the ONNX graph that this runtime gets; that graph is in the bundle, too.

    Precision is what the passes wrote into the graph. Where the engine cannot be compiled, `compress compile` finishes
    the bundle on a machine where it can.
    """

    profiles: tuple[dict[str, tuple[Size, Size, Size]], ...] = ()
    """For each profile: free size of the inputs (batch, sequence, ...) -> [min, opt, max]; default: one that takes what
    the bundle is judged with, and of a decoder one to read prompts and one to decode."""
    workspace_mib: Annotated[int, Field(gt=0)] | None = None
    """The most scratch memory; default: what the device has."""
    builder_optimization_level: Annotated[int, Field(ge=0, le=5)] = 3
    """From 0 (the build is fast) to 5 (the engine is)."""
    allow_weight_streaming: bool = False
    """Weights may stay in main memory and be fetched while the engine runs."""
    strip_weights: bool = False
    """The engine holds no weights; they are put back from the ONNX file when it is opened."""
    tf32: bool = True
    """Products that are float32 in the graph may run in TF32."""


class TensorrtExport(EngineExport):
    """An engine of TensorRT 10 or 11, for the GPU of the machine that compiles it.

    What was timed is kept for the next build, beside the finished results.
    """

    kind: Literal["tensorrt"] = "tensorrt"
    version_compatible: bool = False
    """Later versions of TensorRT run it, too."""
    hardware_compatibility_level: Compatibility = "none"
    """Which other GPUs run it: those from Ampere on (ampere+), or those of the same compute capability."""


class TensorrtRtxExport(EngineExport):
    """An engine of TensorRT for RTX, compiled without a GPU for several; kernels are finished where it runs."""

    kind: Literal["tensorrt-rtx"] = "tensorrt-rtx"
    compute_capabilities: Annotated[tuple[Annotated[str, Field(pattern=r"^\d+\.\d$")], ...], Field(min_length=1)] = (
        "8.0",
        "8.6",
        "8.9",
        "12.0",
    )
    """GPUs that it is for, such as "8.6" (RTX 30) or "8.9" (RTX 40)."""


class OpenVinoExport(GraphExport):
    """OpenVINO's IR, with the tokenizer as a model: a folder that OpenVINO GenAI and optimum-intel load.

    The ONNX graph that it is made from is in the bundle, too. A decoder keeps keys and values as its state.
    """

    kind: Literal["openvino"] = "openvino"


class OrtExport(GraphExport):
    """ONNX Runtime's own format for phones, with the operators that a build for it alone must have.

    Optimized for Arm; what is tied to x86 is left out. The ONNX graph that it is made from is in the bundle, too.
    """

    kind: Literal["ort"] = "ort"


class ExecutorchExport(GraphExport):
    """ExecuTorch's .pte for XNNPACK: of the result, and of the float model that it is judged against there.

    The ONNX graph that they are made from is in the bundle, too.
    """

    kind: Literal["executorch"] = "executorch"


Engine = TensorrtExport | TensorrtRtxExport
GraphFile = OnnxExport | TensorrtExport | TensorrtRtxExport | OpenVinoExport | OrtExport | ExecutorchExport
Export = GraphFile | CheckpointExport | GgufExport
"""All of them; `kind` tells them apart."""
