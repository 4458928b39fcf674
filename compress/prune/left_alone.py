"""Layers that compensation does not fit, each with the reason."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from compress.blocks.materialise import plain
from compress.blocks.trace import TRANSPOSED, is_layer
from compress.prune.layers import is_matrix_layer, n_features, read_weight
from compress.prune.statistics import MAX_FEATURES

MAX_OUTPUTS = 16384
"""Of a layer that is fitted: the head of a large vocabulary would take gigabytes."""


def explain_left_alone(module: nn.Module, called_once: Collection[str]) -> dict[str, str]:
    """Return layer -> why it stays as it is, of all but tables. `called_once`: those that one forward calls once."""
    holders: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        holders.setdefault(id(parameter), []).append(plain(name).rpartition(".")[0])
    layers = {plain(name): part for name, part in module.named_modules() if is_layer(part)}
    why = {
        name: _explain_exclusion(
            layer, [other for other in holders[id(layer.weight)] if other != name], name in called_once
        )
        for name, layer in layers.items()
        if is_matrix_layer(layer) or isinstance(layer, TRANSPOSED)
    }
    return {name: reason for name, reason in why.items() if reason}


def _explain_exclusion(layer: nn.Module, sharing: list[str], called_once: bool) -> str:
    """Return why a layer cannot be fitted; "" for one that can."""
    if not is_matrix_layer(layer):
        return "it is a transposed convolution"
    if sharing:
        return f"it shares its weight with {', '.join(sharing)}"
    if (n := len(read_weight(layer).flatten(0, 1))) > MAX_OUTPUTS:
        return f"it has {n} outputs, and more than {MAX_OUTPUTS} are not fitted"
    if (n := n_features(layer)) > MAX_FEATURES:
        return f"one output sees {n} features, and more than {MAX_FEATURES} are not fitted"
    return "" if called_once else "one forward does not call it exactly once"
