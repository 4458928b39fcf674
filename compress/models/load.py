"""The model itself, with its weights, checked and ready to export."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch
from torch import nn

from compress.blocks.experts import unstack_experts
from compress.blocks.forward import run
from compress.blocks.parametrized import fold_computed
from compress.blocks.rounded import RoundedLayers
from compress.blocks.sizes import AS_BUILT, Shapes, read_shapes_record
from compress.errors import SourceError
from compress.facts import SampleShapes
from compress.graph.cleanup import CleanUp
from compress.models import factory, huggingface
from compress.models.detections import read_detections
from compress.models.facts import architecture, check_batch, forward_failure, zeros
from compress.models.feeds import check_feeds, input_specs, output_specs, parameters
from compress.models.onnx_ends import read_ends
from compress.models.onnx_graph import check_finite_onnx, open_onnx
from compress.models.rebuilt import rebuild_onnx
from compress.models.source import Source, read_shared
from compress.models.weights import check_finite, load_state
from compress.tasks import find_torch_task
from runtime.bundle.detections import Detections
from runtime.bundle.tensors import TensorSpec
from runtime.tasks.base import Task


@dataclass(frozen=True, kw_only=True)
class SourceModel:
    """What a model to compress is, whatever its form.

    `inputs` and `outputs` name dynamic dimensions "batch" and "sequence". `folder` holds the config and tokenizer files
    that travel into the bundle.
    """

    architecture: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    folder: Path | None = None
    class_names: tuple[str, ...] = ()
    task: str = Task.name

    @property
    def input_names(self) -> tuple[str, ...]:
        return tuple(spec.name for spec in self.inputs)

    @property
    def output_names(self) -> tuple[str, ...]:
        return tuple(spec.name for spec in self.outputs)


@dataclass(frozen=True, kw_only=True)
class TorchModel(SourceModel):
    """A torch model, whole in memory: `module` in eval mode, float32, on the CPU.

    `parameters`: input name -> the parameter of `module.forward` that takes it. `shapes`: how the module's sizes differ
    from those that its code, or config.json, builds. `rounded`: the integers of layers that a pass left in few bits;
    the module holds what they stand for. `detections`: what a detector's outputs mean.
    """

    module: nn.Module
    parameters: Mapping[str, str]
    shapes: Shapes = AS_BUILT
    rounded: RoundedLayers = field(default_factory=dict)
    detections: Detections | None = None


@dataclass(frozen=True, kw_only=True)
class OnnxModel(SourceModel):
    """A model that came as an ONNX file. `graph`: cleaned, as `clean_up` lists it.

    `shared`: what the file reads beside `inputs`, the same for all samples, which the graph holds as constants.
    """

    path: Path
    graph: ir.Model
    clean_up: CleanUp
    shared: Mapping[str, np.ndarray] = field(default_factory=dict)


def load_model(source: Source, feeds_shapes: SampleShapes) -> TorchModel | OnnxModel:
    """Load a recipe's model with its weights. `feeds_shapes`: by input name, as for `model_facts`. SourceError."""
    if source.onnx is None:
        return load_torch_model(source, feeds_shapes)
    return _load_onnx(source, source.onnx, feeds_shapes)


def load_torch_model(source: Source, feeds_shapes: SampleShapes) -> TorchModel:
    """Load a torch model with its weights; of an ONNX file, the module that is rebuilt from its graph.

    Only safetensors and pickles of plain tensors are read. The global random state is left as it was.
    Raises SourceError: a damaged file, tensors missing, left over or of another shape, NaN in a weight.
    """
    if source.onnx is not None:
        file = _load_onnx(source, source.onnx, feeds_shapes)
        check_feeds(source.spec, {name: name for name in file.input_names}, feeds_shapes)
        rebuilt = rebuild_onnx(file.graph, file.inputs, feeds_shapes)
        return TorchModel(
            architecture=file.architecture,
            inputs=rebuilt.inputs,
            outputs=file.outputs,
            module=rebuilt.module,
            parameters=rebuilt.parameters,
            folder=file.folder,
            class_names=file.class_names,
            task=file.task,
            detections=read_detections(source, file.outputs),
        )
    module = _load_trained(source).float().eval().requires_grad_(False)
    check_finite(module, source.name)
    loaded = _describe_model(source, module, feeds_shapes)
    if source.kind == "python":
        check_batch(source.spec, module, {loaded.parameters[name]: feeds_shapes[name] for name in loaded.parameters})
    return loaded


def build_torch_model(source: Source, feeds_shapes: SampleShapes) -> TorchModel:
    """Build a torch model with random weights; none are read. Otherwise as `load_torch_model`."""
    if source.kind == "huggingface":
        module = huggingface.build_untrained(source)
    else:
        with torch.random.fork_rng(devices=[]):
            module = factory.build(source)
        fold_computed(module)
    return _describe_model(source, module.float().eval().requires_grad_(False), feeds_shapes)


def build_as_given(source: Source) -> nn.Module:
    """Return the user's own module of a torch source, in eval mode, with whatever weights its code gives it.

    SourceError: it cannot be built, or is an ONNX file, which no class stands behind.
    """
    if source.onnx is not None:
        raise SourceError(f"{source.name}: is an ONNX file, and no torch class stands behind it")
    if source.kind == "huggingface":
        wrapped = huggingface.build_untrained(source).wrapped
        assert isinstance(wrapped, nn.Module)
        return wrapped
    with torch.random.fork_rng(devices=[]):
        return factory.build(replace(source, weights=(), shapes=None))


def _describe_model(source: Source, module: nn.Module, feeds_shapes: SampleShapes) -> TorchModel:
    unstack_experts(module)
    names = parameters(source, module)
    check_feeds(source.spec, names, feeds_shapes)
    feeds = {names[name]: feeds_shapes[name] for name in names}
    try:
        outputs = run(module, zeros(feeds))
    except factory.USER_ERRORS as error:
        raise forward_failure(source.spec, feeds, error) from error
    shapes = {name: (tuple(out.shape), str(out.dtype).removeprefix("torch.")) for name, out in outputs.items()}
    specs = output_specs(source.spec, shapes)
    return TorchModel(
        architecture=architecture(module),
        inputs=input_specs(source.spec, names, feeds_shapes),
        outputs=specs,
        module=module,
        parameters=names,
        folder=source.folder,
        class_names=source.spec.class_names or _read_class_names(source),
        task=source.task,
        detections=read_detections(source, specs),
        shapes=read_shapes_record(source.shapes),
    )


def _load_trained(source: Source) -> nn.Module:
    if source.kind == "huggingface":
        return huggingface.load_trained(source)
    with torch.random.fork_rng(devices=[]):
        module = factory.build(source)
    if source.weights:
        load_state(module, source.weights[0])
    fold_computed(module)
    return module


def _read_class_names(source: Source) -> tuple[str, ...]:
    task = find_torch_task(source.task)
    if task.read_class_names is not None and source.folder is not None:
        return task.read_class_names(source.folder)
    if source.kind != "huggingface" or not (task.chooses or task.needs_class_names):
        return ()
    return huggingface.class_names(huggingface.load_config(source))


def _load_onnx(source: Source, path: Path, feeds_shapes: SampleShapes) -> OnnxModel:
    opened = open_onnx(path, source.spec.inputs)
    ends = read_ends(path, source.task, feeds_shapes, source.spec.inputs, source.spec.state)
    ends.fix_batch(opened.model)
    ir.external_data.load_to_model(opened.model)  # a session made of bytes finds no files
    check_finite_onnx(opened.model, path)
    return OnnxModel(
        architecture=opened.model.graph.name or path.stem,
        inputs=ends.inputs,
        outputs=ends.outputs,
        path=path,
        graph=opened.model,
        clean_up=opened.clean_up,
        shared=read_shared(path, source.spec.inputs),
        folder=source.folder,
        class_names=source.spec.class_names,
        task=source.task,
    )
