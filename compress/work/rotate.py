"""The arithmetic of `rotate`: which parameter is multiplied with what, in a module or a stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from compress.blocks.folding import norm_weight_offset
from compress.blocks.layers import is_hf_conv1d, is_layer
from compress.blocks.materialise import plain
from compress.blocks.streamed import StreamedModel
from compress.context import PassContext, PassResult
from compress.errors import PassError
from compress.facts import InputGroup, LayerDecision, Note, Residual, Structure
from compress.passes.rotate import Rotate, values
from compress.rounding.hadamard import Orthogonal, orthogonal
from compress.rounding.quantized_weight import zeros_to_keep

Edit = Callable[[Tensor], Tensor]
"""A new value of a matrix [out, in] or bias [out], from its old one."""
Edits = dict[str, list[Edit]]
Read = Callable[[str], Tensor]
Modules = Mapping[str, nn.Module]
OUTSIDE = "/"
"""Stands for what is in no block."""


def apply_rotate(config: Rotate, model: StreamedModel, context: PassContext) -> PassResult[StreamedModel]:
    """Rotate a streamed model, block by block, without data. PassError if it is quantized already."""
    from compress.blocks.stream import Stream

    if quantized := model.quantized_layers():
        raise PassError(f"rotate: {quantized[0]} is rounded already; put rotate before the pass that does it")
    modules = modules_of(model.build())
    device = torch.device(context.device)

    def read(name: str) -> Tensor:
        return model.store.read(name).to(device)

    edits, notes = edits_of(model.structure, modules, read, context.seed)
    places = _group_by_block(edits, [block.name for block in model.structure.blocks])
    stream = Stream(model, context, data=False)
    for number, block in enumerate(stream):
        names = places.pop(block.name if block.name in places else OUTSIDE, [])
        filled = []
        for name in sorted(names, key=lambda name: name in model.tied):  # a tied one gets values of its own afterwards
            old = read(name)
            filled += [name] if old.dim() > 1 and zeros_to_keep(old) is not None else []
            block.replace(name, edit_parameter(name, old, edits[name], modules))
        touched = dict.fromkeys(name.rpartition(".")[0] for name in names)
        decisions = [
            LayerDecision(name, type(modules[name]).__name__, "rotated") for name in touched if is_layer(modules[name])
        ]
        warnings = [Note("warning", f"rotate: {name} came with zeros, which are filled now") for name in filled]
        block.say(decisions=decisions, notes=[*(notes if number == 0 else []), *warnings])
    return stream.result()


def _group_by_block(edits: Edits, blocks: list[str]) -> dict[str, list[str]]:
    """Group parameters by block; those outside of blocks are one group, for the first block there holds all of them."""
    places: dict[str, list[str]] = {block: [] for block in blocks}
    for name in edits:
        places.setdefault(next((block for block in blocks if name.startswith(f"{block}.")), OUTSIDE), []).append(name)
    return places


def edits_of(structure: Structure, modules: Modules, read: Read, seed: int) -> tuple[Edits, list[Note]]:
    """Return parameter -> its edits, in order, and notes. The modules may lie on meta; `read` gives values."""
    edits: Edits = {}
    notes: list[Note] = []
    if structure.residual is not None:
        turn = orthogonal(structure.residual.width, seed)
        notes += _note_not_hadamard(turn, "the residual stream")
        _fold_norms(edits, structure.residual, modules, read)
        _turn_stream(edits, structure.residual, turn, modules)
    turns = {r.head_size: orthogonal(r.head_size, seed + 1) for r in values(structure)}
    for size, turn in turns.items():
        notes += _note_not_hadamard(turn, f"heads of {size}")
    for input_group in values(structure):
        layer = modules[input_group.layers[0]]
        shape: tuple[int, ...] = tuple(layer.weight.shape)  # type: ignore[arg-type]
        columns = shape[0] if is_hf_conv1d(layer) else shape[1]
        _turn_heads(edits, input_group, turns[input_group.head_size], columns // input_group.source_repeat, modules)
    return edits, notes


def edit_parameter(name: str, old: Tensor, todo: list[Edit], modules: Modules) -> Tensor:
    """Return the parameter's new value, in its own type. PassError where it holds NaN or infinity afterwards."""
    owner, _, leaf = name.rpartition(".")
    transposed = leaf == "weight" and is_hf_conv1d(modules[owner])  # held as [in, out]
    new = old.to(torch.float64)
    new = new.t() if transposed else new
    for edit in todo:
        new = edit(new)
    new = (new.t() if transposed else new).to(old.dtype).contiguous()
    if not bool(torch.isfinite(new).all()):
        raise PassError(f"rotate: {name} holds NaN or infinity")
    return new


def _fold_norms(edits: Edits, residual: Residual, modules: Modules, read: Read) -> None:
    """Fold each norm's scale into the layers that read it; the norm then multiplies with one."""
    for norm, layers in residual.norms:
        offset = norm_weight_offset(modules[norm])
        if offset is None:
            raise PassError(f"rotate: {norm} ({type(modules[norm]).__name__}) cannot be folded into what reads it")
        scale = read(f"{norm}.weight").to(torch.float64) + offset  # [width]
        for layer in layers:
            _add(edits, f"{layer}.weight", lambda w, scale=scale: w * scale)  # type: ignore[misc]
        _add(edits, f"{norm}.weight", lambda w, offset=offset: torch.full_like(w, 1 - offset))  # type: ignore[misc]


def _turn_stream(edits: Edits, residual: Residual, turn: Orthogonal, modules: Modules) -> None:
    """Turn x -> x Q: tables and what writes become w Q on their outputs, what reads becomes W Q on its inputs."""
    for name in (*residual.embeddings, *residual.readers):
        _add(edits, f"{name}.weight", turn.turn)
    for name in residual.writers:
        _add(edits, f"{name}.weight", lambda w: turn.turn(w.t()).t())
        if getattr(modules[name], "bias", None) is not None:
            _add(edits, f"{name}.bias", turn.turn)


def _turn_heads(edits: Edits, input_group: InputGroup, turn: Orthogonal, n_channels: int, modules: Modules) -> None:
    """Turn each head's values v -> v R; their weighted sums turn alike. The source's last outputs are values."""

    def rows(w: Tensor) -> Tensor:  # [out, ...]
        last = w[-n_channels:].reshape(-1, turn.size, *w.shape[1:])  # [heads, size, ...]
        turned = turn.turn(last.movedim(1, -1)).movedim(-1, 1).reshape(n_channels, *w.shape[1:])
        return torch.cat([w[:-n_channels], turned])

    def columns(w: Tensor) -> Tensor:
        return turn.turn(w.reshape(len(w), -1, turn.size)).reshape(w.shape)

    _add(edits, f"{input_group.source}.weight", rows)
    if getattr(modules[input_group.source], "bias", None) is not None:
        _add(edits, f"{input_group.source}.bias", rows)
    for layer in input_group.layers:
        _add(edits, f"{layer}.weight", columns)


def _note_not_hadamard(turn: Orthogonal, what: str) -> list[Note]:
    if turn.hadamard:
        return []
    text = f"rotate: no Hadamard matrix of size {turn.size} is at hand; the rotation of {what} has a random factor"
    return [Note("info", text)]


def _add(edits: Edits, name: str, edit: Edit) -> None:
    edits.setdefault(name, []).append(edit)


def modules_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules by plain name."""
    return {plain(name): part for name, part in module.named_modules()}
