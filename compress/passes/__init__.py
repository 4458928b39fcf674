"""The vocabulary of a recipe's `passes:`. A pass is one file here and one line in `PASSES`. Imports no torch.

`KINDS` has those by kind, and those of installed plug-ins, which are imported when they are looked up.
"""

from typing import get_args

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
from runtime.plugins import PASS_GROUP, PluginTable

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


def accept_pass(entry: object, name: str) -> type[Pass]:
    """Return what an entry point names; ValueError if it is no record of a pass of that kind, which can be planned."""
    if not (isinstance(entry, type) and issubclass(entry, Pass)):
        raise ValueError("it is no class that derives from compress.passes.Pass")
    field = entry.model_fields["kind"]
    if get_args(field.annotation) != (name,) or field.default != name:
        raise ValueError(f"it needs the field kind: Literal['{name}'] = '{name}', as its entry point is called")
    if entry.check is Pass.check:
        raise ValueError("it has no check(facts, target) of its own, which plans what it does")
    if not entry.work:
        raise ValueError("it does not say what does its work: work: ClassVar[str] = 'package.module:function'")
    return entry


KINDS: PluginTable[type[Pass]] = PluginTable(
    PASS_GROUP, {p.model_fields["kind"].default: p for p in PASSES}, accept_pass
)

__all__ = [
    "KINDS",
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
