"""What a recipe may say at a path, looked up in its JSON Schema: the keys, the values, and both in words."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from compress.recipe.places import Path

Schema = dict[str, Any]


@cache
def recipe_schema() -> Schema:
    """Return the JSON Schema of a resolved recipe, as pydantic writes it. Not to be changed in place."""
    from compress.recipe.schema import Recipe

    return Recipe.model_json_schema(by_alias=True)


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
        chosen = schema["discriminator"]["mapping"].get(_read_kind(data)) if "discriminator" in schema else None
        for option in [{"$ref": chosen}] if chosen else schema["oneOf"]:
            yield from _expand(option, data)
    elif "anyOf" in schema:
        for option in schema["anyOf"]:
            yield from _expand({**{k: schema[k] for k in ("examples",) if k in schema}, **option}, data)
    else:
        yield schema


def _read_kind(data: Any) -> str:
    return str(data.get("kind")) if isinstance(data, dict) else ""


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
        return ("a whole number" if kind == "integer" else "a number") + _describe_bounds(schema)
    if kind == "array":
        return _describe_list(schema)
    if kind == "string":
        return _describe_text(schema)
    return {"boolean": "true or false", "object": "a mapping"}.get(str(kind), "any value")


_BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "more than",
    "maximum": "at most",
    "exclusiveMaximum": "less than",
}


def _describe_bounds(schema: Schema) -> str:
    bounds = [f"{words} {schema[key]:g}" for key, words in _BOUNDS.items() if key in schema]
    return f" of {' and '.join(bounds)}" if bounds else ""


_PLURAL = {"a whole number": "whole numbers", "a number": "numbers", "text": "text", "a mapping": "mappings"}


def _describe_list(schema: Schema) -> str:
    fixed = schema.get("prefixItems")
    item = describe(list(_expand((fixed or [schema.get("items", {})])[0], None)))
    many = _PLURAL.get(item)
    return "a list" + (f" of {len(fixed)}" if fixed else " of" if many else "") + (f" {many}" if many else "")


def _describe_text(schema: Schema) -> str:
    if "examples" in schema:
        return "text such as " + ", ".join(schema["examples"])
    if schema.get("maxLength") == 1:
        return "one character"
    return f"text that matches {schema['pattern']}" if "pattern" in schema else "text"
