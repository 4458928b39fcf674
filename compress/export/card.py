"""The bundle's model card: what it is, how it was made, how to run and judge it. Nothing measured: see report.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment, StrictUndefined

from compress.inspect import NO_LAYERS
from runtime.bundle import Manifest

TEMPLATE = """\
---
library_name: onnx
tags: [compressed, {{ manifest.target }}]
---
# {{ manifest.name }}

{{ manifest.task }}, compressed for {{ manifest.target }} by {{ manifest.created_by }}. `report.md` holds what was
measured, `recipe.yaml` what was asked for, `lock.json` every version, seed and digest that went in.

| model | file | weights | bytes |
|---|---|---|---|
{% for a in manifest.artifacts -%}
| {{ a.name }} | `{{ a.path }}` | {{ a.precision }} | {{ a.size_bytes }} |
{% endfor %}
## What was done
{% for action, count in actions -%}
- {{ count }} layers: {{ action }}
{% endfor %}
`layers.json` names each one, with the reason.

## Run it, judge it again
Needs numpy and onnxruntime (and `tokenizers` for text, `pillow` for image files).

```
python -m runtime predict {{ manifest.name }} INPUT
python -m runtime validate {{ manifest.name }}
```

Made from `{{ lock.model.source }}` (sha256 {{ lock.model.digest }}).
The evaluation set has {{ manifest.evaluation.n_samples }} samples.
"""


def model_card(manifest: Manifest, lock: Mapping[str, Any], layers: Sequence[Mapping[str, Any]]) -> str:
    """Markdown with the YAML header that model hubs read."""
    actions = Counter(str(layer["action"]) for layer in layers if layer.get("type") not in NO_LAYERS).most_common()
    template = Environment(undefined=StrictUndefined, autoescape=False, keep_trailing_newline=True).from_string(
        TEMPLATE
    )
    return template.render(manifest=manifest, lock=lock, actions=actions)
