"""A model cut before its weights are read: whether a configuration can say what pruning will leave."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from compress.blocks.experts import unstack_experts
from compress.blocks.sizes import shapes_of, transformers_config
from compress.facts import SampleShapes
from compress.models.facts import short_feeds, zeros
from compress.models.feeds import parameters
from compress.models.meta import module_on_meta
from compress.models.source import locate
from compress.prune.configuration import fit_config
from compress.prune.coupling import find_coupling
from compress.prune.shrink import remove_all
from compress.prune.surgery import remove
from compress.specs import ModelSpec


def explain_unsaid_sizes(spec: ModelSpec, root: Path, feeds_shapes: SampleShapes, units: Mapping[str, int]) -> str:
    """Return why no config.json says the sizes of the model once so many `units` of each dimension are left, by name.

    "" where one does, where the model has none, and where only its values show what can be cut.
    """
    source = locate(spec, root)
    if source.kind != "huggingface" or source.shapes is not None:
        return ""
    module, _ = module_on_meta(spec, source, root)
    unstack_experts(module)
    if transformers_config(module) is None:
        return ""
    names = parameters(spec, source, module)
    feeds = short_feeds(spec, {names[name]: feeds_shapes[name] for name in names})
    try:
        coupling = find_coupling(module, zeros(feeds, "cpu"))
    except RuntimeError:  # its forward looks at values
        return ""
    built, dimensions = shapes_of(module), [dimension for dimension in coupling.dimensions if dimension.name in units]
    remove_all(module, dimensions, [np.arange(units[dimension.name]) for dimension in dimensions], remove)
    return fit_config(getattr(module, "wrapped", module), built)
