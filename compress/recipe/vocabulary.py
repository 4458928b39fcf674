"""The recipe's JSON Schema: looked up at a path (the keys, the values, both in words), and whole, for editors."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from typing import Any

from compress.recipe.places import Path
from compress.recipe.search import find_direction

Schema = dict[str, Any]
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


@cache
def recipe_schema() -> Schema:
    """Return the JSON Schema of a resolved recipe, as pydantic writes it. Not to be changed in place."""
    from compress.recipe.schema import Recipe

    # without the fields' texts, whose reading takes seconds: an error in a recipe is said at once
    return Recipe.model_json_schema(by_alias=True)


@cache
def described_schema() -> Schema:
    """Return the same with each field's text as its description. Not to be changed in place."""
    from compress.recipe.field_texts import DescribedSchema
    from compress.recipe.schema import Recipe

    return Recipe.model_json_schema(by_alias=True, schema_generator=DescribedSchema)


def at(path: Path, data: Any) -> list[Schema]:
    """Return the schema's alternatives for the value at `path`; `data`: the recipe, which tells a pass by its kind."""
    found = list(_expand(recipe_schema(), data))
    for key in path:
        data = _follow_data(data, key)
        found = [leaf for schema in found for child in _follow_key(schema, key) for leaf in _expand(child, data)]
    return found


def keys(alternatives: list[Schema]) -> list[str]:
    """Return the keys that a mapping may have here."""
    return list(dict.fromkeys(key for schema in alternatives for key in schema.get("properties", ())))


def kinds(alternatives: list[Schema]) -> list[str]:
    """Return the values of `kind` among the alternatives."""
    return [schema["properties"]["kind"]["const"] for schema in alternatives if "kind" in schema.get("properties", {})]


def values(alternatives: list[Schema]) -> list[Any]:
    """Return the values that are listed one by one."""
    return [v for schema in alternatives for v in schema.get("enum", [schema["const"]] if "const" in schema else [])]


def takes(alternatives: list[Schema], kind: str) -> bool:
    """Return whether one of the alternatives is of that JSON type: "string", "array", ..."""
    return any(schema.get("type") == kind for schema in alternatives)


def describe(alternatives: list[Schema]) -> str:
    """Describe the alternatives: "a whole number of at least 1", "'static' or 'dynamic'", "a list of text"."""
    literals = [v for schema in alternatives for v in values([schema])]
    words = [" or ".join(map(_format_literal, literals))] if 0 < len(literals) < 3 else []
    words = [f"one of {', '.join(map(_format_literal, literals))}"] if len(literals) > 2 else words
    words += [
        _describe_type(schema) for schema in alternatives if not values([schema]) and schema.get("type") != "null"
    ]
    return " or ".join(dict.fromkeys(words)) or "something else"


def _expand(schema: Schema, data: Any) -> Iterator[Schema]:
    """Yield the schema without references and choices; of several kinds only the one that `data` names, if it does."""
    if "$ref" in schema:
        yield from _expand(recipe_schema()["$defs"][schema["$ref"].rsplit("/", 1)[1]], data)
    elif "oneOf" in schema:
        kind = str(data.get("kind")) if isinstance(data, dict) else ""
        chosen = schema["discriminator"]["mapping"].get(kind) if "discriminator" in schema else None
        for option in [{"$ref": chosen}] if chosen else schema["oneOf"]:
            yield from _expand(option, data)
    elif "anyOf" in schema:
        for option in schema["anyOf"]:
            yield from _expand({**{k: schema[k] for k in ("examples",) if k in schema}, **option}, data)
    else:
        yield schema


def _follow_key(schema: Schema, key: str | int) -> Iterator[Schema]:
    if isinstance(key, int):
        fixed = schema.get("prefixItems", [])
        if key < len(fixed):
            yield fixed[key]
        elif "items" in schema:
            yield schema["items"]
    elif key in schema.get("properties", {}):
        yield schema["properties"][key]
    elif isinstance(schema.get("additionalProperties"), dict):
        yield schema["additionalProperties"]
    elif schema.get("additionalProperties") is True or schema == {}:
        yield {}


def _follow_data(data: Any, key: str | int) -> Any:
    if isinstance(data, dict) and isinstance(key, str):
        return data.get(key)
    return data[key] if isinstance(data, list) and isinstance(key, int) and key < len(data) else None


def _format_literal(value: Any) -> str:
    return f"'{value}'" if isinstance(value, str) else str(value).lower()


def _describe_type(schema: Schema) -> str:
    kind = schema.get("type")
    if kind in ("integer", "number"):
        bounds = [f"{words} {schema[key]:g}" for key, words in _BOUNDS.items() if key in schema]
        number = "a whole number" if kind == "integer" else "a number"
        return f"{number} of {' and '.join(bounds)}" if bounds else number
    if kind == "array":
        fixed = schema.get("prefixItems")
        item = describe(list(_expand((fixed or [schema.get("items", {})])[0], None)))
        many = _PLURAL.get(item)
        return "a list" + (f" of {len(fixed)}" if fixed else " of" if many else "") + (f" {many}" if many else "")
    if kind == "string":
        if "examples" in schema:
            return "text such as " + ", ".join(schema["examples"])
        if schema.get("maxLength") == 1:
            return "one character"
        return f"text that matches {schema['pattern']}" if "pattern" in schema else "text"
    return {"boolean": "true or false", "object": "a mapping"}.get(str(kind), "any value")


_BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "more than",
    "maximum": "at most",
    "exclusiveMaximum": "less than",
}


_PLURAL = {"a whole number": "whole numbers", "a number": "numbers", "text": "text", "a mapping": "mappings"}


def editor_schema() -> Schema:
    """Return the JSON Schema (2020-12) of a recipe file as it is written, before includes and variables are put in."""
    schema = deepcopy(described_schema())
    _require_kinds(schema)
    _relax_merged(schema)
    _list_metrics(schema)
    _describe_spaces(schema)
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
    from runtime.tasks.metrics import metric_names

    own = {"type": "string", "pattern": r"^python:.+\.py:\w+$", "examples": ["python:metrics.py:cost"]}
    names = {"anyOf": [{"type": "string", "enum": list(metric_names())}, own]}
    metric = schema["$defs"]["Gate"]["properties"]["metric"]
    metric.pop("type")
    metric.update(names)
    schema["$defs"]["Judgement"]["properties"]["metrics"]["items"] = names


def _describe_spaces(schema: Schema) -> None:
    """List the goals, and let passes be completed where chains or passes are a choice by name."""
    from runtime.tasks.metrics import metric_names

    search, whole = schema["$defs"]["Search"]["properties"], schema["$defs"]["Space"]
    goals = [f"{direction} {name}" for name in metric_names() if (direction := find_direction(name))]
    own = {"type": "string", "pattern": r"^(minimize|maximize) python:.+\.py:\w+$"}
    search["goals"]["items"] = {"anyOf": [{"type": "string", "enum": goals}, own]}
    one = {"anyOf": [schema["properties"]["passes"]["items"], {"type": "null"}]}
    search["space"]["properties"] = {"passes": _name_options(whole, {"type": "array", "items": one})}
    search["space"]["patternProperties"] = {r"^passes\.(.+\.)?\d+$": _name_options(whole, one)}


def _name_options(space: Schema, option: Schema) -> Schema:
    """Return the schema of a space whose choice, by name or in a list, is among such values."""
    choice = {"anyOf": [{"type": "array", "items": option}, {"type": "object", "additionalProperties": option}]}
    about = {"description": space["properties"]["choice"]["description"]}
    return {**space, "properties": {**space["properties"], "choice": {**about, **choice}}}


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
