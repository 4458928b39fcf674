"""Write parts of the reference from the code: passes, recipe, commands, targets. None of it is committed."""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import griffe
import typer

from compress.cli import app
from compress.formats.schemes import PRESETS, Scheme
from compress.formats.targets import TARGETS
from compress.passes import PASSES, Pass
from compress.recipe.vocabulary import Schema, describe, described_schema
from runtime.__main__ import _build_parser

STAGES = {
    "model": "the whole torch model",
    "blocks": "the torch model, one block after another",
    "graph": "the ONNX graph",
}
MODELS = {
    "a torch model": SimpleNamespace(source="torch", task="image-classification"),
    "a torch decoder": SimpleNamespace(source="torch", task="text-generation"),
    "an ONNX file": SimpleNamespace(source="onnx", task="generic"),
}


def generate(name: str, root: Path) -> str:
    """Return the Markdown that stands for `<!-- generate: name -->`; `root` is the repository."""
    write = {
        "schemes": write_schemes,
        "recipe": write_recipe,
        "compress": write_compress,
        "compress-run": write_compress_run,
        "targets": write_targets,
        "manifest": write_manifest,
        "documents": write_documents,
        "recipes": lambda: write_recipes(root),
    }
    return "\n".join(write[name]()) + "\n"


def write_pass(pass_: type[Pass]) -> str:
    """Return the page of one pass: what it does, on what, and its options."""
    record = definitions()[pass_.__name__]
    lines = [f"# {find_kind(pass_)}", "", inspect.getdoc(pass_) or "", "", describe_pass(pass_), ""]
    lines += write_options(record)
    for name in reachable([pass_.__name__]):
        lines += ["", *write_record(name)]
    return "\n".join(lines) + "\n"


def find_kind(pass_: type[Pass]) -> str:
    """Return the `kind` by which recipes call a pass."""
    return str(pass_.model_fields["kind"].default)


def describe_pass(pass_: type[Pass]) -> str:
    """Return in a line what the pass works on, and which data it reads with its defaults."""
    plain = pass_.model_construct()
    stages: dict[str, list[str]] = {}
    for model, facts in MODELS.items():
        stages.setdefault(plain.stage_on(facts), []).append(model)  # type: ignore[arg-type]
    if len(stages) == 1:
        works = STAGES[next(iter(stages))]
    else:
        works = "; ".join(f"{STAGES[stage]} (of {', '.join(models)})" for stage, models in stages.items())
    data = [name for name, needed in (("calibration", plain.needs_calibration), ("train", plain.needs_train)) if needed]
    return f"Works on {works}. Data: {', '.join(f'`data.{name}`' for name in data) or 'none by default'}."


def write_schemes() -> list[str]:
    """Return the table of the presets that `scheme:` may name."""
    rows = [f"| `{name}` | {' | '.join(describe_scheme(scheme))} |" for name, scheme in PRESETS.items()]
    return ["| scheme | weights | one scale for | inputs |", "|---|---|---|---|", *rows]


def describe_scheme(scheme: Scheme) -> tuple[str, str, str]:
    """Return a scheme's weights, groups and inputs in words."""
    weights, inputs = scheme.weights, scheme.activations
    integers = f"{weights.bits} bits{'' if weights.symmetric else ', zero points'}"
    floats = {4: "FP4 (E2M1)", 8: "FP8 (E4M3)"}
    bits = floats[weights.bits] if weights.kind == "float" else integers
    if weights.block:
        below = f", below {weights.block}" if weights.block > weights.group_size else ""
        kind = "16 numbers of a table" if weights.kind == "table" else f"{weights.bits} bits"
        return f"{kind}, llama.cpp's format", f"{weights.group_size} inputs{below}", "float"
    stored = {"e4m3": ", in E4M3 below one float", "e8m0": ", a power of two"}.get(weights.scales, "")
    groups = {-1: "each output channel", 0: "the tensor"}.get(weights.group_size, f"{weights.group_size} inputs")
    groups = f"{weights.rows} x {weights.group_size} weights" if weights.rows > 1 else groups + stored
    if inputs is None:
        return bits, groups, "float"
    kind = floats[inputs.bits] if inputs.kind == "float" else f"int{inputs.bits}"
    how = "scaled for each token" if inputs.dynamic else "one stored scale"
    if inputs.group_size > 0:
        how = f"scaled for each {inputs.group_size} of a token" + (" below a stored scale" * inputs.has_stored_scale)
    return bits, groups, f"{kind}, {how}"


def write_recipe() -> list[str]:
    """Return the tables of the recipe and of its records, but for the passes."""
    schema = described_schema()
    passes = {pass_.__name__ for pass_ in PASSES}
    hidden = {*passes, *reachable(sorted(passes))}
    lines = write_options(schema)
    for name in reachable([], schema):
        if name not in hidden:
            lines += ["", *write_record(name)]
    return lines


def write_record(name: str) -> list[str]:
    """Return the section of one record of the schema."""
    record = definitions()[name]
    heading = f"## {title_of(name)} {{#{name.lower()}}}"
    return [heading, "", record.get("description", ""), "", *write_options(record)]


def write_options(record: Schema) -> list[str]:
    """Return the table of a record's keys; of records with a kind without that key."""
    rows = [
        (key, describe_value(schema), default_of(key, schema, record), cell(schema.get("description", "")))
        for key, schema in record["properties"].items()
        if key != "kind"
    ]
    if not rows:
        return ["It has no options."]
    return [
        "| option | takes | default | |",
        "|---|---|---|---|",
        *(f"| `{key}` | {takes} | {default} | {about} |" for key, takes, default, about in rows),
    ]


def describe_value(schema: Schema) -> str:
    """Return in words what a key takes, with a link where that is a record of its own."""
    names = list(references(schema))
    if any(set(PRESETS) <= set(option.get("enum", ())) for option in options_of(schema)):
        return "a [scheme](../passes.md#schemes)"
    if not names:
        words = describe([option for option in options_of(schema) if option.get("type") != "null"])
        return cell(words)
    if len(names) > 3 and set(names) <= {pass_.__name__ for pass_ in PASSES}:
        return "a list of [passes](passes.md)"
    links = ", ".join(f"[{title_of(name)}](#{name.lower()})" for name in names)
    if any(option.get("type") == "array" for option in options_of(schema)):
        return f"a list of {links}"
    others = [option for option in options_of(schema) if "$ref" not in option and "oneOf" not in option]
    plain = [describe([option]) for option in others if option.get("type") != "null"]
    return " or ".join([links, *map(cell, plain)])


def default_of(key: str, schema: Schema, record: Schema) -> str:
    """Return the default as YAML in one line, "-" where there is none, in words where the key must be given."""
    if key in record.get("required", ()):
        return "must be given"
    default = schema.get("default")
    if default is None:
        return "-"
    if isinstance(default, dict | list) and (not default or isinstance(default, dict) or len(str(default)) > 60):
        return "its own" if default else "-"
    return code(default)


def code(value: Any) -> str:
    if value == "":
        return '`""`'
    return f"`{value}`" if isinstance(value, str) else f"`{json.dumps(value)}`"


def options_of(schema: Schema) -> list[Schema]:
    """The alternatives of a key."""
    return schema.get("anyOf", [schema])


def references(schema: Any) -> Iterator[str]:
    """Names of the records that a part of the schema speaks of, each once, in their order."""
    if isinstance(schema, dict):
        if "$ref" in schema:
            yield schema["$ref"].rsplit("/", 1)[1]
        for key, value in schema.items():
            if key not in ("$ref", "mapping", "$defs"):
                yield from references(value)
    elif isinstance(schema, list):
        for item in schema:
            yield from references(item)


def reachable(names: list[str], schema: Schema | None = None) -> list[str]:
    """The records that these records, or a schema, lead to, without themselves."""
    found: dict[str, None] = {}
    waiting = list(references(schema)) if schema is not None else []
    for name in names:
        waiting += references(definitions()[name])
    while waiting:
        name = waiting.pop(0)
        if name not in found and name not in names:
            found[name] = None
            waiting += references(definitions()[name])
    return list(found)


def definitions() -> dict[str, Schema]:
    records: dict[str, Schema] = described_schema()["$defs"]
    return records


def title_of(name: str) -> str:
    """The heading of a record: its kind where it has one."""
    kind = definitions()[name]["properties"].get("kind", {}).get("const")
    return f"{name} (kind: {kind})" if kind else name


def write_compress() -> list[str]:
    """Return a section for each command of `compress`."""
    lines: list[str] = []
    for name, command in typer.main.get_command(app).commands.items():
        arguments = [p.metavar or p.name.upper() for p in command.params if p.param_type_name == "argument"]
        rows = [
            (", ".join(p.opts), p.metavar or "", f"{p.help or ''}{' Must be given.' if p.required else ''}")
            for p in command.params
            if p.param_type_name == "option"
        ]
        lines += write_command(f"compress {name}", arguments, command.help or "", rows)
    return lines


def write_compress_run() -> list[str]:
    """Return a section for each command of `compress-run`."""
    lines: list[str] = []
    for name, parser in runtime_commands().items():
        actions = [action for action in parser._actions if action.dest != "help"]
        arguments = [str(action.metavar or action.dest) for action in actions if not action.option_strings]
        rows = [
            (", ".join(action.option_strings), str(action.metavar or ""), action.help or "")
            for action in actions
            if action.option_strings
        ]
        about = parser.description or ""
        lines += write_command(f"compress-run {name}", arguments, f"{about[:1].upper()}{about[1:]}.", rows)
    return lines


def write_command(name: str, arguments: list[str], about: str, rows: list[tuple[str, str, str]]) -> list[str]:
    """Return the section of one command; `rows` are flag, value and help of its options."""
    call = " ".join([name, *arguments])
    table = [f"| `{flag}{f' {value}' if value else ''}` | {cell(text)} |" for flag, value, text in rows]
    return [f"### {name}", "", about, "", "```", call, "```", "", "| option | |", "|---|---|", *table, ""]


def list_options() -> dict[str, set[str]]:
    """Return the options of every command, `compress apply` and so on."""
    known = {
        f"compress {name}": {option for p in command.params for option in p.opts if option.startswith("-")}
        for name, command in typer.main.get_command(app).commands.items()
    }
    for name, parser in runtime_commands().items():
        known[f"compress-run {name}"] = {option for action in parser._actions for option in action.option_strings}
    return known


def runtime_commands() -> dict[str, argparse.ArgumentParser]:
    """The parsers of `compress-run`'s commands by name."""
    groups = [action for action in _build_parser()._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(groups[0].choices)


def write_targets() -> list[str]:
    """Return a section for each target: what it does with each format."""
    lines: list[str] = []
    for target in TARGETS.values():
        sizes = ", ".join(map(str, target.group_sizes)) or "any"
        reads = "ONNX graphs, or engines made of them" if target.reads == "onnx" else "checkpoints"
        lines += [f"## {target.name}", "", f"Reads {reads}. Group sizes: {sizes}.", ""]
        same: dict[tuple[str, str], list[str]] = {}
        for name, fact in target.formats.items():
            same.setdefault((fact.verdict, fact.text), []).append(f"`{name}`")
        rows = [f"| {', '.join(names)} | {verdict} | {cell(text)} |" for (verdict, text), names in same.items()]
        lines += ["| formats | verdict | |", "|---|---|---|", *rows, ""]
    return lines


MANIFEST_RECORDS = (
    "runtime.bundle.manifest.Manifest",
    "runtime.bundle.manifest.Artifact",
    "runtime.bundle.tensors.TensorSpec",
    "runtime.bundle.manifest.KvCacheSpec",
    "runtime.bundle.manifest.KeptState",
    "runtime.bundle.manifest.Generation",
    "runtime.bundle.manifest.EvaluationSet",
    "runtime.bundle.manifest.BuildScore",
    "runtime.bundle.manifest.FileRecord",
    "runtime.bundle.engine.EngineRecord",
    "runtime.bundle.engine.EngineOrder",
)


def write_manifest() -> list[str]:
    """Return for each record of manifest.json its fields, from the docstrings below them."""
    lines: list[str] = []
    for path in MANIFEST_RECORDS:
        module, _, name = path.rpartition(".")
        record = griffe.load(module)[name]
        about = record.docstring.value if record.docstring else ""
        rows = []
        for field in record.attributes.values():
            text = cell(field.docstring.value if field.docstring else "")
            rows.append(f"| `{field.name}` | `{cell(str(field.annotation))}` | {text} |")
        lines += [f"## {name}", "", about, "", "| field | type | |", "|---|---|---|", *rows, ""]
    return lines


def write_documents() -> list[str]:
    """Return the table of what `--json` prints."""
    from documents import list_documents  # the commands' own modules: seconds, for whoever wants options alone

    return list_documents()


def write_recipes(root: Path) -> list[str]:
    """Return each recipe of the repository with its text, those by use case first."""
    lines: list[str] = []
    folder = root / "recipes"
    for path in (*sorted(folder.glob("*.yaml")), *sorted(folder.glob("*/*.yaml"))):
        lines += [f"## {path.relative_to(root).as_posix()}", "", "```yaml", path.read_text().rstrip(), "```", ""]
    return lines


def cell(text: str) -> str:
    """A text as one cell of a table; outside of code `<` begins no tag."""
    parts = " ".join(text.split()).replace("|", "\\|").split("`")
    return "`".join(part if i % 2 else part.replace("<", "&lt;") for i, part in enumerate(parts))
