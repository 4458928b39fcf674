"""The vocabulary of a recipe's `passes:`. A pass is one file here and one line in `PASSES`. Imports no torch."""

from compress.passes.autocast import Autocast
from compress.passes.base import Pass, Record
from compress.passes.equalize import Equalize
from compress.passes.fold_batchnorm import FoldBatchNorm
from compress.passes.gptq import Gptq
from compress.passes.int8 import Int8
from compress.passes.rtn import Rtn
from compress.passes.smoothquant import SmoothQuant

PASSES: tuple[type[Pass], ...] = (Autocast, Equalize, FoldBatchNorm, Gptq, Int8, Rtn, SmoothQuant)

__all__ = ["PASSES", "Autocast", "Equalize", "FoldBatchNorm", "Gptq", "Int8", "Pass", "Record", "Rtn", "SmoothQuant"]
