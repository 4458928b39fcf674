"""Model cards: what a bundle is, how it was made, how to run and judge it.

The bundle's own holds nothing measured (see report.md); that of a hub's repository, in which the bundle lies, does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from jinja2 import Environment, StrictUndefined

from compress.tasks import TORCH_TASKS
from runtime.bundle.format import NO_LAYERS, Manifest
from runtime.judge.findings import Findings
from runtime.report.report import table_rows
from runtime.tasks import find_task
from runtime.tasks.base import TEXT

FOLDER = "bundle"
"""Where a bundle lies in a hub's repository: what the hub and people add beside it is not the bundle's."""
ABOUT = """\
# {{ manifest.name }}

{{ manifest.task }}, compressed for {{ manifest.target }} by {{ manifest.created_by }}. {{ holds }}

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
{% for note in notes %}{% if loop.first %}
## What to know
{% endif -%}
- {{ note }}
{% endfor %}
"""
ORIGIN = """
Made from `{{ lock.model.source }}` (sha256 {{ lock.model.digest }}).
{% if manifest.evaluation -%}
The evaluation set has {{ manifest.evaluation.n_samples }} samples.
{% endif %}"""
BUNDLE = (
    """\
---
library_name: onnx
tags: [compressed, {{ manifest.target }}]
---
"""
    + ABOUT
    + """\
## Run it, judge it again
`DIR` is this folder. {{ usage.needs }}

```
{{ usage.command }}
compress-run validate DIR
```
The package `compress-models` brings that command; `python -m runtime` is the same where the project's folder is at
hand.
{%- if usage.note %}
{{ usage.note }}
{%- endif %}
"""
    + ORIGIN
)
HUB = (
    """\
---
{{ header }}
---
"""
    + ABOUT
    + """\
{% if rows -%}
## What was measured
Verdict: {{ report.verdict }}. Times are of {{ report.environment.get("cpu") or "the processor that judged it" }}.

| | before | after | change |
|---|---|---|---|
{% for row in rows -%}
| {{ row.name }} | {{ row.before }} | {{ row.after }} | {{ row.change }} |
{% endfor %}
{% endif -%}
## Get it, run it
{{ usage.needs }} `hf` comes with `huggingface_hub`, `compress-run` with the package `compress-models`.

```
hf download {{ repo_id }} --local-dir {{ name }}
compress-run verify {{ folder }}
{{ usage.command.replace("DIR", folder) }}
{%- if judged %}
compress-run validate {{ folder }}
{%- endif %}
```
{%- if not judged %}
Its evaluation data is not here, only its digests: the model runs, and whoever has that data can judge it again.
{%- endif %}
{%- if usage.note %}
{{ usage.note }}
{%- endif %}
"""
    + ORIGIN
)


@dataclass(frozen=True)
class Usage:
    """How the candidate is run: a command that works as it stands, and what it needs."""

    command: str
    needs: str
    note: str = ""


def usage_of(manifest: Manifest) -> Usage:
    """Return how people run the bundle's candidate, by its task and by what its samples are."""
    candidate = manifest.artifact("candidate")
    if candidate.is_checkpoint:
        return _describe_checkpoint_usage(manifest, str(PurePosixPath(candidate.path).parent))
    kind = manifest.preprocess["kind"]
    if kind == "seq2seq":
        sample = "a text" if TEXT in find_task(manifest.task).columns else "recording.wav"
        return Usage(f'compress-run generate DIR "{sample}"', "The commands need numpy, onnxruntime, `tokenizers`.")
    if kind == "language":
        needs = "numpy, onnxruntime, `tokenizers` and, for `--chat`, `jinja2`"
        return Usage('compress-run generate DIR "Once upon a time"', f"The commands need {needs}.")
    if kind == "image":
        needs = "numpy, onnxruntime and `pillow`"
        return Usage("compress-run predict DIR image.png", f"The commands need {needs}; `image.png` is any picture.")
    if kind == "audio":
        needs = "numpy, onnxruntime and, for other files than 16-bit wav, `soundfile`; `soxr` for other rates"
        return Usage("compress-run predict DIR sound.wav", f"The commands need {needs}.")
    if kind == "image-text":
        return Usage(
            "compress-run predict DIR pairs.npz --output embeddings.npz",
            "The commands need numpy, onnxruntime and `tokenizers`; `pillow` where sizes are changed.",
            "`pairs.npz` holds `image`, uint8 [N, H, W, 3], and `text`, N strings.",
        )
    if kind == "text":
        task = find_task(manifest.task)
        texts = " ".join(f'"a {name}"' for name in task.columns[: task.required])
        return Usage(f"compress-run predict DIR {texts}", "The commands need numpy, onnxruntime and `tokenizers`.")
    inputs = ", ".join(f"`{spec.name}` {list(spec.shape)} {spec.dtype}" for spec in candidate.inputs)
    return Usage(
        "compress-run predict DIR inputs.npz --output outputs.npz",
        "The commands need numpy and onnxruntime.",
        f"`inputs.npz` holds an array for each input: {inputs}.",
    )


def _describe_checkpoint_usage(manifest: Manifest, folder: str) -> Usage:
    """Return how the engine that a checkpoint is for opens its folder; the report can be made again everywhere."""
    candidate = manifest.artifact("candidate")
    target = candidate.target
    sample = {"image": "image.png", "audio": "sound.wav", "language": "Once upon a time"}.get(
        str(manifest.preprocess["kind"]), "a text"
    )
    command = f"vllm serve DIR/{folder}"
    if candidate.kind == "gguf":
        command = f"llama-cli -m DIR/{candidate.path} -p '{sample}'"
    elif target != "vllm":
        perceives = TORCH_TASKS[manifest.task].perceives if manifest.task in TORCH_TASKS else ""
        given = {
            "image": "images='image.png', text='What is it?'",
            "audio": "[{'role': 'user', 'content': [{'type': 'audio', 'audio': 'sound.wav'}]}]",
        }.get(perceives, f"'{sample}'")
        name = "any-to-any" if perceives == "audio" else manifest.task  # transformers' pipeline of what hears
        call = f"pipeline('{name}', 'DIR/{folder}')({given})"
        command = f'python -c "from transformers import pipeline; print({call})"'
    return Usage(
        command,
        f"The model is a checkpoint, which {target} opens; `validate` needs numpy and onnxruntime alone.",
        "Quality was measured when the checkpoint was built; `validate` judges what was measured."
        if manifest.evaluation
        else "Nothing has run it, and nobody knows what rounding costs its answers.",
    )


def model_card(manifest: Manifest, lock: Mapping[str, Any], layers: Sequence[Mapping[str, Any]]) -> str:
    """Return the model card: Markdown with the YAML header that model hubs read."""
    holds = (
        "`report.md` holds what was\nmeasured, `recipe.yaml` what was asked for, `lock.json` every version, seed and "
        "digest that went in."
    )
    return _render(BUNDLE, manifest, lock, layers, holds=holds)


def hub_card(
    manifest: Manifest,
    lock: Mapping[str, Any],
    layers: Sequence[Mapping[str, Any]],
    report: Findings | None,
    header: str,
    repo_id: str,
    judged: bool,
) -> str:
    """Return the card of a hub's repository, in whose folder FOLDER the bundle lies.

    `header`: its YAML. `judged`: whether the evaluation data is there, so that the model can be judged again.
    """
    name = repo_id.rpartition("/")[2]
    return _render(
        HUB,
        manifest,
        lock,
        layers,
        holds=f"It lies in\n`{FOLDER}`, where `recipe.yaml` holds what was asked for, and `lock.json` every version, "
        "seed and digest that went in.",
        report=report,
        rows=[] if report is None else table_rows(report),
        header=header,
        repo_id=repo_id,
        name=name,
        folder=f"{name}/{FOLDER}",
        judged=judged,
    )


def _render(
    text: str, manifest: Manifest, lock: Mapping[str, Any], layers: Sequence[Mapping[str, Any]], **more: Any
) -> str:
    actions = Counter(str(layer["action"]) for layer in layers if layer.get("type") not in NO_LAYERS).most_common()
    notes = [str(row["reason"]) for row in layers if row.get("type") == "note" and row["action"] == "warning"]
    template = Environment(undefined=StrictUndefined, autoescape=False, keep_trailing_newline=True).from_string(text)
    return template.render(manifest=manifest, lock=lock, actions=actions, notes=notes, usage=usage_of(manifest), **more)
