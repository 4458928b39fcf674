"""Texts, each to one embedding."""

from __future__ import annotations

import inspect
from typing import Any

from compress.tasks.base import TEXT_DATA, TEXT_PASSES, Starter, TorchTask, read_scores


def _leave_pooler_out(config: Any) -> dict[str, Any]:
    from transformers import MODEL_MAPPING

    mapped = MODEL_MAPPING.get(type(config), ())
    classes = mapped if isinstance(mapped, tuple) else (mapped,)
    optional = any(cls is not None and "add_pooling_layer" in inspect.signature(cls).parameters for cls in classes)
    return {"add_pooling_layer": False} if optional else {}


FEATURE_EXTRACTION = TorchTask(
    name="feature-extraction",
    starter=Starter(
        "dir:model",
        TEXT_DATA,
        TEXT_PASSES,
        "    - {metric: cosine, min: 0.98}           # to the baseline's; with text_pair and label: spearman\n",
    ),
    loss="embeddings",
    auto_class="AutoModel",
    outputs={"last_hidden_state": ("batch", "sequence", "width")},
    read_labels=read_scores,
    class_arguments=_leave_pooler_out,
)
