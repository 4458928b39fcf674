"""The recipe as JSON Schema for editors: what `compress schema` prints. It takes `include`, `vars` and `${...}` too."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy

from compress.recipe.vocabulary import Schema, recipe_schema

VARIABLE: Schema = {"type": "string", "pattern": r"\$\{"}
_ANNOTATIONS = ("title", "description", "default", "examples")
_OWN: Schema = {
    "include": {
        "description": "Recipe files under this one: mappings are merged key by key, this one wins. Relative to it.",
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    },
    "vars": {
        "description": "Values for ${name}. Also: ${env:NAME}, ${env:NAME:-default}, ${package:NAME} (its folder).",
        "type": "object",
        "propertyNames": {"pattern": "^[A-Za-z_][A-Za-z0-9_-]*$"},
    },
}


def editor_schema() -> Schema:
    """Return the JSON Schema (2020-12) of a recipe file as it is written, before includes and variables are put in."""
    schema = deepcopy(recipe_schema())
    _require_kinds(schema)
    _relax_merged(schema)
    _list_metrics(schema)
    for record in (schema, *schema["$defs"].values()):
        record["properties"] = {key: _allow_variables(value) for key, value in record.get("properties", {}).items()}
    schema["properties"].update(deepcopy(_OWN))
    return {**schema, "$schema": "https://json-schema.org/draft/2020-12/schema", "title": "compress recipe"}


def _require_kinds(schema: Schema) -> None:
    """Make `kind` a required key wherever it makes a choice, although the records have a default."""
    for part in _walk_mappings(schema):
        for reference in part.get("discriminator", {}).get("mapping", {}).values():
            record = _find_definition(schema, reference)
            record["required"] = sorted({*record.get("required", ()), "kind"})


def _relax_merged(schema: Schema) -> None:
    """Require keys only in what stands in lists: an included file may give any key of a mapping."""
    required = schema.pop("required", [])
    schema["anyOf"] = [{"required": ["include"]}, {"required": required}]
    waiting = list(schema["properties"].values())
    while waiting:
        part = waiting.pop()
        if "$ref" in part:
            record = _find_definition(schema, part["$ref"])
            record.pop("required", None)
            waiting += record.get("properties", {}).values()
        waiting += part.get("anyOf", [])


def _list_metrics(schema: Schema) -> None:
    from runtime.metrics import metric_names

    names = {"type": "string", "enum": list(metric_names())}
    schema["$defs"]["Gate"]["properties"]["metric"].update(names)
    schema["$defs"]["Judgement"]["properties"]["metrics"]["items"] = names


def _allow_variables(schema: Schema) -> Schema:
    """Allow a string with a variable wherever a string would not do. A `const` tells records apart and is kept."""
    if "anyOf" in schema:
        options = [_allow_variables_inside(option) for option in schema["anyOf"]]
        closed = any(map(_is_closed, options)) and not any(option == {"type": "string"} for option in options)
        return {**schema, "anyOf": [*options, VARIABLE] if closed else options}
    if not _is_closed(schema):
        return _allow_variables_inside(schema)
    kept = {key: schema[key] for key in _ANNOTATIONS if key in schema}
    return {**kept, "anyOf": [_allow_variables_inside({k: v for k, v in schema.items() if k not in kept}), VARIABLE]}


def _allow_variables_inside(schema: Schema) -> Schema:
    """Apply `_allow_variables` to the items of a list and the values of a mapping."""
    opened: Schema = {
        key: _allow_variables(schema[key])
        for key in ("items", "additionalProperties")
        if isinstance(schema.get(key), dict)
    }
    if "prefixItems" in schema:
        opened["prefixItems"] = [_allow_variables(item) for item in schema["prefixItems"]]
    return {**schema, **opened}


def _is_closed(schema: Schema) -> bool:
    """Return whether this is a scalar or list that a text with a variable would not match."""
    limited = bool({"enum", "pattern", "maxLength", "minLength"} & schema.keys())
    scalar = schema.get("type") in ("integer", "number", "boolean", "array") or (
        schema.get("type") == "string" and limited
    )
    return scalar and "const" not in schema


def _walk_mappings(value: object) -> Iterator[Schema]:
    """Yield every mapping inside `value`, itself first."""
    if isinstance(value, dict):
        yield value
    for child in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _walk_mappings(child)


def _find_definition(schema: Schema, reference: str) -> Schema:
    definition: Schema = schema["$defs"][reference.rsplit("/", 1)[1]]
    return definition
