"""How each pass does its work: one file of the pass's name, found by `WORK`.

A function takes the pass's record, the model in the form that its stage works on (`TorchModel`, `StreamedModel`,
`GraphState`), and the context of that stage; it may change the model in place, and gives a `PassResult` with the model
to go on with, in the same form. It raises PassError, naming layers.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

from compress.blocks.streamed import StreamedModel
from compress.context import PassContext, PassResult
from compress.facts import ModelFacts
from compress.models.load import TorchModel
from compress.passes import KINDS, Pass
from compress.passes.weight_only import WeightPass
from compress.rounding.state import GraphState
from compress.work.contexts import ModelContext
from runtime.plugins import PASS_GROUP, find_plugin

Form = TypeVar("Form", TorchModel, StreamedModel, GraphState)
"""A model at the stage of the pass: the torch module, its blocks left in their files, the ONNX graph."""
WORK: dict[str, str] = {
    "autocast": "compress.work.autocast:apply_autocast",
    "autoround": "compress.work.autoround:apply_autoround",
    "awq": "compress.work.awq:apply_awq",
    "distill": "compress.work.distill:apply_distill",
    "equalize": "compress.work.equalize:apply_equalize",
    "fold_batchnorm": "compress.work.fold_batchnorm:apply_fold_batchnorm",
    "fp8": "compress.work.eight_bit:apply_eight_bit",
    "gptq": "compress.work.gptq:apply_gptq",
    "hqq": "compress.work.hqq:apply_hqq",
    "int8": "compress.work.eight_bit:apply_eight_bit",
    "kv_cache": "compress.work.kv_cache:apply_kv_cache",
    "prune_channels": "compress.work.prune_channels:apply_prune_channels",
    "prune_layers": "compress.work.prune_layers:apply_prune_layers",
    "qat": "compress.work.qat:apply_qat",
    "rotate": "compress.work.rotate:apply_rotate",
    "rtn": "compress.work.rtn:apply_rtn",
    "smoothquant": "compress.work.smoothquant:apply_smoothquant",
    "sparsify": "compress.work.sparsify:apply_sparsify",
    "sparsify_iteratively": "compress.work.sparsify_iteratively:apply_sparsify_iteratively",
    "tune": "compress.work.tune:apply_tune",
}
"""Kind of pass -> its function, imported when it is first asked for: most need torch."""
TABLES = "compress.work.settle_tables:settle_tables"
"""What chooses the bits of tables that a pass of any kind leaves open."""
BEGINNINGS: dict[str, str] = {"distill": "compress.work.distill:begin_distill"}
"""Kind of pass over the whole torch model -> what makes the model that it works on, where that is not the given one."""

TWINS: dict[str, str] = {
    "autocast": "compress.work.autocast:foresee_autocast",
    "distill": "compress.work.distill:foresee_distill",
    "fold_batchnorm": "compress.work.fold_batchnorm:foresee_fold_batchnorm",
    "int8": "compress.work.eight_bit:foresee_eight_bit",
    "prune_channels": "compress.work.prune_channels:foresee_prune_channels",
    "prune_layers": "compress.work.prune_layers:foresee_prune_layers",
    "smoothquant": "compress.work.smoothquant:foresee_smoothquant",
}
"""Kind of pass -> (record, model, its facts, context) -> a model as fast as what the pass will leave, made without
data. Passes that round weights alone say how in their plan; the others change values and no speed, but for those in
UNFORESEEN and those from outside."""
UNFORESEEN = {"kv_cache"}


def find_work(kind: str) -> Callable[..., Any]:
    """Return the function that does the work of passes of a kind. PluginError where one from outside has none."""
    plugin = None if kind in WORK else find_plugin(PASS_GROUP, kind)
    work: Callable[..., Any] = (
        _import_function(WORK[kind]) if plugin is None else plugin.import_object(KINDS[kind].work)
    )
    return work


def apply_pass(config: Pass, model: Form, context: PassContext) -> PassResult[Form]:
    """Do what a pass says to a model in the form of its stage; the model may be changed in place. Raises PassError."""
    settled = None
    if isinstance(config, WeightPass) and isinstance(model, StreamedModel) and config.open_tables:
        config, settled = _import_function(TABLES)(config, model, context)
    result: PassResult[Form] = find_work(config.kind)(config, model, context)
    return result if settled is None else settled.add_to(result)


def begin_pass(config: Pass, model: TorchModel, context: ModelContext) -> TorchModel:
    """Return what a pass over the whole torch model works on: the `TorchModel`, or another in its place.

    Called again where the result is taken from the cache, so it gives the same model each time. Raises PassError.
    """
    if config.kind not in BEGINNINGS:
        return model
    begun: TorchModel = _import_function(BEGINNINGS[config.kind])(config, model, context)
    return begun


def foresee_pass(config: Pass, model: Form, facts: ModelFacts, context: PassContext) -> tuple[Form, bool]:
    """Return a model as fast as what the pass will leave, the given one changed in place, and whether that is known."""
    if config.kind in TWINS:
        return _import_function(TWINS[config.kind])(config, model, facts, context), True
    return model, config.kind in WORK and config.kind not in UNFORESEEN


def _import_function(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
