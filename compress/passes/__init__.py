"""The vocabulary of a recipe's `passes:`. A pass is one file here and one line in `PASSES`. Imports no torch."""

from compress.passes.autocast import Autocast
from compress.passes.autoround import AutoRound
from compress.passes.awq import Awq
from compress.passes.base import Pass
from compress.passes.distill import Distill
from compress.passes.equalize import Equalize
from compress.passes.fold_batchnorm import FoldBatchNorm
from compress.passes.fp8 import Fp8
from compress.passes.gptq import Gptq
from compress.passes.hqq import Hqq
from compress.passes.int8 import Int8
from compress.passes.kv_cache import KvCache
from compress.passes.prune_channels import PruneChannels
from compress.passes.prune_layers import PruneLayers
from compress.passes.qat import Qat
from compress.passes.rotate import Rotate
from compress.passes.rtn import Rtn
from compress.passes.smoothquant import SmoothQuant
from compress.passes.sparsify import Sparsify
from compress.passes.sparsify_iteratively import SparsifyIteratively
from compress.passes.tune import Tune
from compress.specs import Record

PASSES: tuple[type[Pass], ...] = (
    Autocast,
    AutoRound,
    Awq,
    Distill,
    Equalize,
    FoldBatchNorm,
    Fp8,
    Gptq,
    Hqq,
    Int8,
    KvCache,
    PruneChannels,
    PruneLayers,
    Qat,
    Rotate,
    Rtn,
    SmoothQuant,
    Sparsify,
    SparsifyIteratively,
    Tune,
)

__all__ = [
    "PASSES",
    "AutoRound",
    "Autocast",
    "Awq",
    "Distill",
    "Equalize",
    "FoldBatchNorm",
    "Fp8",
    "Gptq",
    "Hqq",
    "Int8",
    "KvCache",
    "Pass",
    "PruneChannels",
    "PruneLayers",
    "Qat",
    "Record",
    "Rotate",
    "Rtn",
    "SmoothQuant",
    "Sparsify",
    "SparsifyIteratively",
    "Tune",
]
