"""What is known of a recipe's model before its weights are read."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from compress.blocks.experts import Experts, first_expert_only, unstack_experts
from compress.blocks.forward import name_outputs, run
from compress.blocks.layers import LAYER_OPS, Work, has_own_forward, is_layer, layer_type, weight_shape
from compress.blocks.materialise import plain
from compress.blocks.parametrized import fold_computed
from compress.blocks.sizes import transformers_config
from compress.errors import SourceError
from compress.facts import (
    FLOAT_BYTES,
    LayerFacts,
    ModelFacts,
    SampleShapes,
    Structure,
    assign_roles,
    describe_groups,
    group_names,
)
from compress.models import factory, huggingface
from compress.models.batch_axis import Arrays, draw_sample, find_batch_axis
from compress.models.checkpoint import expert_parts, find_unread_tensors
from compress.models.checkpoint_names import find_unpackable
from compress.models.feeds import check_feeds, input_specs, output_specs, parameters
from compress.models.meta import OpenedModel, open_on_meta
from compress.models.onnx_facts import onnx_facts
from compress.models.onnx_graph import open_onnx
from compress.models.packed import quantization_of
from compress.models.rebuilt import rebuild_onnx
from compress.models.source import Source
from compress.pruning.coupling import coupling_of
from compress.pruning.dimensions import Coupling
from compress.pruning.trials import settle_sizes
from compress.specs import ModelSpec
from compress.structure.alike import cut_chain
from compress.structure.dataflow import DataFlow, count_work, record, spread_over_experts
from compress.structure.find import N_TOKENS, find_structure, one_block, structure_of
from compress.structure.removable import find_removable
from compress.tasks import find_torch_task
from runtime.tasks import find_task
from runtime.words import size_text

MOST_NAMED = 6
DECLARED = re.compile(r"layer|block|module|depth")
"""Keys of config.json that count blocks, those of next-token predictors among them."""
OURS, TORCHS = Path(__file__).parents[1], Path(torch.__file__).parent


@dataclass
class ModelRun:
    """A torch model run by shapes, once for whoever asks first. SourceError: it cannot be run.

    `feeds`: one sample, by parameter of forward. `notes`: on how it was run.
    """

    source: Source
    module: nn.Module
    feeds: SampleShapes
    notes: list[str] = field(default_factory=list)

    @cached_property
    def flow(self) -> DataFlow:
        """Return the run, of a mixture's first experts alone; with values where the model's code looks at them."""
        try:
            return self._record()
        except factory.USER_ERRORS as error:
            first = _first_line(error)
        try:
            flow = _run_untrained(self.source, self.feeds)
        except factory.USER_ERRORS as error:
            _check_channels(self.source, self.feeds, error)
            raise forward_failure(self.source.spec, self.feeds, error) from error
        self.notes.append(f"the forward pass needs values ({first}); it was run on the CPU")
        return flow

    def _record(self) -> DataFlow:
        with first_expert_only():
            return record(self.module, zeros(self.feeds))

    @cached_property
    def outcome(self) -> tuple[DataFlow, Work, Structure]:
        """Return a run, what layers multiply, and how the model is built: by its first blocks where they tell all."""
        wrapped: Any = getattr(self.module, "wrapped", None)
        language = wrapped.get_decoder() if find_torch_task(self.source.task).perceives else None
        with cut_chain(self.module, within=language) as cut:
            if cut is not None:
                with contextlib.suppress(*factory.USER_ERRORS):
                    flow = self._record()
                    structure = cut.extend(structure_of(flow))
                    if structure is not None:
                        return flow, cut.spread(spread_over_experts(count_work(flow), flow)), structure
        flow = self.flow
        try:
            structure = structure_of(flow)
        except factory.USER_ERRORS as error:
            structure = one_block(self.module, f"no blocks were found: {_first_line(error)}")
        return flow, spread_over_experts(count_work(flow), flow), structure

    @cached_property
    def coupling(self) -> Coupling:
        """Return what can be pruned: of a mixture by a run of all experts."""
        flow, feeds = self.flow, zeros(short_feeds(self.source.spec, self.feeds))
        try:
            if any(isinstance(part, Experts) for part in flow.modules.values()):
                flow = record(flow.module, feeds, flow.computed)
            return settle_sizes(coupling_of(flow), flow.module, feeds, flow.computed)
        except factory.USER_ERRORS as error:
            raise SourceError(f"{self.source.name}: cannot be traced for pruning: {last_line(error)}") from error

    def describe(self, coupling: bool, blocks: bool) -> dict[str, Any]:
        """Return the fields of a model's facts that a run shows; `coupling`, `blocks`: as for `model_facts`."""
        flow, work, structure = self.outcome
        structure = replace(structure, unpackable=find_unpackable(self.module))
        layers = assign_roles(_describe_layers(self.module, work), structure)
        return {
            "layers": layers,
            "other_bytes": count_other_bytes(self.module, layers),
            "peak_activation_bytes": flow.peak_bytes,
            "structure": structure,
            "prunable": self.coupling.facts if coupling else None,
            "unprunable": self.coupling.kept if coupling else {},
            "removable": find_removable(self.flow, structure) if blocks else None,
            "notes": (*self.notes, *_make_layer_notes(layers, work, find_torch_task(self.source.task).perceives)),
        }


def model_facts(source: Source, feeds_shapes: SampleShapes, coupling: bool = False, blocks: bool = False) -> ModelFacts:
    """Return layers, shapes, work and memory for one sample of a recipe's model.

    `feeds_shapes`: by input. `coupling`: with the units that can be pruned. `blocks`: with the blocks that can go.

    Weight files are only looked at: names and shapes must fit the module. A torch model is built on the meta device and
    run on tensors that hold no values; where that cannot be done it is built untrained on the CPU, and `notes` says so.
    `peak_activation_bytes` is that of torch's eager order; `operators` are aten's for torch, ONNX's for ONNX.
    Raises SourceError.
    """
    return look_at_model(open_on_meta(source), feeds_shapes, coupling, blocks)[0]


def look_at_model(
    opened: OpenedModel, feeds_shapes: SampleShapes, coupling: bool = False, blocks: bool = False
) -> tuple[ModelFacts, ModelRun | None]:
    """Return the facts of a model that is built already, and its run, if it is a torch model; as `model_facts`.

    Stacked experts become layers in it.
    """
    source, module, notes = opened.source, opened.module, opened.notes
    if source.onnx is not None:
        return onnx_facts(source.onnx, source.task, feeds_shapes, source.spec.inputs, source.spec.state), None
    assert module is not None
    parts = expert_parts(module)
    unstack_experts(module)
    unread: dict[str, int] = {}
    if source.kind == "huggingface" and not source.config and not quantization_of(source.folder):
        unread = find_unread_tensors(source.weights, module, parts)
        _refuse_lost_blocks(source.spec, module, unread)
    if unread:  # more than transformers tells, which is silent on next-token blocks of some families
        notes = (*(note for note in notes if not note.startswith(huggingface.UNUSED)), describe_unread(unread))
    names = parameters(source, module)
    check_feeds(source.spec, names, feeds_shapes)
    run = ModelRun(source, module, {names[name]: feeds_shapes[name] for name in names})
    (flow, work, _), shown = run.outcome, run.describe(coupling, blocks)
    n_bytes = sum(path.stat().st_size for path in source.weights) - sum(unread.values())
    # of larger weights (1 GiB) no model is built for the plan: it is run once it is loaded
    if source.kind == "python" and n_bytes <= 2**30:
        check_batch(source.spec, _build_untrained(source), run.feeds)
    found = name_outputs(flow.result).items()
    outputs = {name: (tuple(out.shape), str(out.dtype).removeprefix("torch.")) for name, out in found}
    facts = ModelFacts(
        source="torch",
        architecture=architecture(module),
        task=source.task,
        inputs=input_specs(source.spec, names, feeds_shapes),
        outputs=output_specs(source.spec, outputs),
        float_bytes=find_float_bytes(n_bytes, shown["other_bytes"], shown["layers"]),
        unread=unread,
        operators=tuple(sorted({op.name for op in flow.ops})),
        **{**shown, "notes": (*notes, *shown["notes"])},
    )
    outside = _count_outside(module)
    if find_torch_task(source.task).perceives:  # what is of a tower is told with its layers
        outside = {
            name: n_bytes
            for name, n_bytes in outside.items()
            if any(layer.startswith(f"{name.rpartition('.')[0]}.") for layer in work)
        }
    return facts.keep_worth_naming(outside), run


def rebuilt_facts(
    facts: ModelFacts,
    source: Source,
    feeds_shapes: SampleShapes,
    layers: bool = True,
    coupling: bool = False,
    blocks: bool = False,
) -> ModelFacts:
    """Return an ONNX file's facts with what the torch module shows that can be rebuilt from it, or why none can be.

    `layers`: as the module has them, and what is known of a torch model alone; without it, the graph's. `coupling`,
    `blocks`: as for `model_facts`.
    """
    assert source.onnx is not None
    try:
        rebuilt = rebuild_onnx(open_onnx(source.onnx, source.spec.inputs).model, facts.inputs, feeds_shapes)
    except SourceError as error:
        return replace(facts, not_rebuilt="; ".join(error.problems))
    notes = facts.notes
    if rebuilt.bound_to is not None:
        notes += (
            f"the graph is bound to batches of {rebuilt.bound_to}, and its torch module reads larger ones in parts of "
            "that size: batch norms learn from few samples at once (freeze_batchnorm leaves them as they are)",
        )
    if not layers:
        return replace(facts, rebuilt=True, notes=notes)
    feeds = {rebuilt.parameters[name]: feeds_shapes[name] for name in rebuilt.parameters}
    shown = ModelRun(source, rebuilt.module, feeds).describe(coupling, blocks)
    return replace(facts, rebuilt=True, opset=None, **{**shown, "notes": (*notes, *shown["notes"])})


def architecture(module: nn.Module) -> str:
    """Return the class name of the module, or of what it wraps."""
    return type(getattr(module, "wrapped", module)).__name__


def zeros(feeds: SampleShapes) -> dict[str, Tensor]:
    """Return one sample of zeros, [1, ...], for each input."""
    return {name: torch.zeros((1, *shape), dtype=getattr(torch, dtype)) for name, (shape, dtype) in feeds.items()}


def _run_untrained(source: Source, feeds: SampleShapes) -> DataFlow:
    with first_expert_only():
        return record(_build_untrained(source), zeros(feeds), compute=True)


def _check_channels(source: Source, feeds: SampleShapes, error: BaseException) -> None:
    """Raise SourceError of a model that takes grey images and gets coloured ones, or the other way round.

    Channels come first or last.
    """
    images = find_task(source.task).preprocess in ("image", "image-text")
    for name, (shape, dtype) in feeds.items():
        for axis in (0, -1) if images and len(shape) == 3 else ():
            if (n := 4 - shape[axis]) in (1, 3):
                sizes = list(shape)
                sizes[axis] = n
                with contextlib.suppress(*factory.USER_ERRORS):
                    _run_untrained(source, {**feeds, name: (tuple(sizes), dtype)})
                    raise SourceError(
                        f"preprocess.channels: {source.name} takes images with {n} of them, and gets {4 - n}: set "
                        f"channels: {'RGB' if n == 3 else 'L'}"
                    ) from error


def forward_failure(spec: ModelSpec, feeds: SampleShapes, error: BaseException) -> SourceError:
    """Return the error of a model that does not run on such inputs, with the line of its own code.

    Of one that also sees or hears without that line: it mostly asks for an image or a sound.
    """
    if find_torch_task(spec.task).perceives:
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return SourceError(
            f"{spec.source}: does not run on texts alone, by which its language part is found ({why}); give its "
            "language model as a folder of its own"
        )
    shapes = ", ".join(f"{name} {[1, *shape]} {dtype}" for name, (shape, dtype) in feeds.items())
    text = f"{type(error).__name__}: {error}{user_line(error)}"
    return SourceError(f"{spec.source}: forward fails on {shapes}: {text}")


def check_batch(spec: ModelSpec, module: nn.Module, feeds: SampleShapes) -> None:
    """Raise SourceError where a module's answer for a sample is another beside other samples, or no row is a sample's.

    `feeds`: of one sample, by parameter of forward.
    """

    def compute(given: Arrays) -> Arrays:
        tensors = {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in given.items()}
        return {name: out.numpy() for name, out in run(module, tensors).items()}

    for number in (1, 0):
        samples = [draw_sample(feeds, number, seed) for seed in range(2)]
        with contextlib.suppress(*factory.USER_ERRORS, AssertionError):  # of numbers that it does not take
            compute({name: values[None] for name, values in samples[0].items()})
            axis = find_batch_axis(compute, samples, None, factory.USER_ERRORS)
            break
    else:
        return
    if axis.problem:
        raise SourceError(f"{spec.source}: {axis.problem}")
    if not axis.together and not (axis.rowless and find_task(spec.task).outputs == "boxes"):  # a row for each box
        if axis.rowless:
            raise SourceError(
                f"{spec.source}: output '{axis.rowless[0]}' has no row for each sample; return it as [batch, ...]"
            )
        raise SourceError(
            f"{spec.source}: its answer for a sample is another beside other samples; compute each sample by "
            "itself, or export the model with a batch of 1 and give that file (source: onnx:...)"
        )


def structure_of_module(spec: ModelSpec, module: nn.Module, feeds: SampleShapes) -> Structure:
    """Return how a module that holds its values is built; `feeds`: by parameter of forward."""
    feeds = short_feeds(spec, feeds)
    try:
        structure = find_structure(module, zeros(feeds))
    except factory.USER_ERRORS:  # its forward looks at values
        structure = find_structure(module, zeros(feeds), compute=True)
    return replace(structure, unpackable=find_unpackable(module))


def short_feeds(spec: ModelSpec, feeds: SampleShapes) -> SampleShapes:
    """Shorten texts to N_TOKENS tokens, which show as much; other feeds stay."""
    if find_task(spec.task).preprocess not in ("text", "language", "seq2seq"):
        return feeds
    return {  # what is no row of tokens, as Whisper's features, has to stay as long as it is
        name: ((min(N_TOKENS, *shape),) if len(shape) == 1 else shape, dtype) for name, (shape, dtype) in feeds.items()
    }


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def last_line(error: BaseException) -> str:
    """Return what went wrong, the line of the user's code at which it did, and the way out."""
    text = f"{type(error).__name__}: {_first_line(error)}{user_line(error)}"
    return f"{text}; write that line with plain operators of torch, or leave out the passes that remove something"


def user_line(error: BaseException) -> str:
    """Return " (file:line: code)" of the model's own code, neither torch's nor ours; "" where there is none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_machinery(Path(frame.filename))]
    return f" ({frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line})" if frames else ""


def _is_machinery(path: Path) -> bool:
    """Return whether a file is torch's code, or ours but for the zoo, which holds models."""
    if path.is_relative_to(OURS):
        return not path.is_relative_to(OURS / "zoo")
    return path.is_relative_to(TORCHS) or not path.is_absolute()


def _build_untrained(source: Source) -> nn.Module:
    if source.kind == "huggingface":
        module = huggingface.build_untrained(source)
    else:
        with torch.random.fork_rng(devices=[]):
            module = factory.build(source)
        fold_computed(module)
    unstack_experts(module)
    return module


def _describe_layers(module: nn.Module, work: Work) -> tuple[LayerFacts, ...]:
    """Describe the layers in the module's order; tied weights share the name of the first parameter that holds them."""
    owners: dict[int, str] = {}
    layers = []
    for name, layer in module.named_modules():
        if is_layer(layer):
            weight = plain(f"{name}.weight")
            if "weight" in layer._parameters:  # one that is computed is another object at each look
                weight = owners.setdefault(id(layer.weight), weight)
            macs, op = work.get(plain(name), (0, LAYER_OPS[layer_type(layer)]))
            about = (plain(name), layer_type(layer), op, weight, weight_shape(layer), macs)
            layers.append(LayerFacts(*about, custom=has_own_forward(layer)))
    return tuple(layers)


def find_float_bytes(n_bytes: int, other_bytes: int, layers: Sequence[LayerFacts]) -> int:
    """Return the bytes of a number where files of `n_bytes` hold a model's floats: 2 or 4; 4 where there are none."""
    n_floats = other_bytes // FLOAT_BYTES + sum({layer.weight: layer.n_weights for layer in layers}.values())
    return 2 if 0 < n_bytes < 3 * n_floats else FLOAT_BYTES


def _refuse_lost_blocks(spec: ModelSpec, module: nn.Module, unread: Collection[str]) -> None:
    """Raise SourceError where the files hold more of the model's own blocks than config.json says.

    But for as many as the configuration declares in a number of its own, such as num_nextn_predict_layers.
    """
    config = transformers_config(module)
    if config is None:
        return
    numbers = {key: value for key, value in config.to_dict().items() if type(value) is int and DECLARED.search(key)}
    prefix = getattr(getattr(module, "wrapped", module), "base_model_prefix", "")
    for path, part in module.named_modules():
        if not isinstance(part, nn.ModuleList):
            continue
        name = plain(path).partition(".")[2].removeprefix(f"{prefix}.")  # without the wrapper's
        pattern = re.compile(rf"(?:{re.escape(prefix)}\.)?{re.escape(name)}\.(\d+)\.")
        found = {int(match[1]) for tensor in unread if (match := pattern.match(tensor))}
        surplus = sum(number >= len(part) for number in found)
        if surplus and surplus not in (number for number in numbers.values() if number != len(part)):
            raise SourceError(
                f"{spec.source}: config.json describes {len(part)} blocks {name}, and the weights hold "
                f"{len(part) + surplus}: without the last ones it is another model; mend config.json, or remove them"
            )


def describe_unread(unread: Mapping[str, int]) -> str:
    """Say which tensors of the source's files are no part of the model, by the modules that they are of."""
    kinds = Counter(".".join(name.split(".")[:3] if ".layers." in name else name.split(".")[:1]) for name in unread)
    named = [f"{n} of {kind}" for kind, n in kinds.most_common()] if len(unread) > MOST_NAMED else list(unread)
    some = ", ".join(named[:MOST_NAMED])
    more = f" and {len(named) - MOST_NAMED} groups more" if len(named) > MOST_NAMED else ""
    return (
        f"left out: the source's files hold tensors that are no part of this model ({some}{more}; "
        f"{size_text(sum(unread.values()))}); a checkpoint of the same sizes keeps them as they are, no other file does"
    )


def count_other_bytes(module: nn.Module, layers: Sequence[LayerFacts]) -> int:
    """Return the float32 bytes of parameters and stored buffers outside the layers."""
    tensors = {id(tensor): tensor for tensor in module.state_dict(keep_vars=True).values()}
    total = sum(tensor.numel() for tensor in tensors.values() if tensor.is_floating_point())
    in_layers = sum({layer.weight: layer.n_weights for layer in layers}.values())
    return 4 * (total - in_layers)


def _count_outside(module: nn.Module) -> dict[str, int]:
    """Return the float32 bytes of each module's own parameters, of those that are no layers: recurrent ones, norms."""
    parts: dict[str, int] = {}
    for name, part in module.named_modules():
        numbers = sum(parameter.numel() for parameter in part.parameters(recurse=False))
        if numbers and not is_layer(part):
            parts[plain(name) or type(part).__name__] = FLOAT_BYTES * numbers
    return parts


def _make_layer_notes(layers: tuple[LayerFacts, ...], work: Work, perceives: str = "") -> list[str]:
    """Return notes on tied weights, and on layers that the forward pass does not call.

    `perceives`: as of the task; those of towers, which texts do not reach, are told where a pass leaves them.
    """
    names: dict[str, list[str]] = {}
    for layer in layers:
        names.setdefault(layer.weight, []).append(layer.name)
    notes = [f"tied weights: {', '.join(tied)} share {weight}" for weight, tied in names.items() if len(tied) > 1]
    towers = [layer.name for layer in layers if perceives and (layer.role == "idle" or layer.type == "Embedding")]
    idle = [layer.name for layer in layers if layer.name not in (*work, *towers)]
    some = describe_groups(group_names(idle, [layer.name for layer in layers if layer.name in work]))
    return [*notes, *([f"the forward pass does not call {some} as a module"] if idle else [])]
