"""The text beneath each field of a record, put into the JSON Schema.

Pydantic reads these texts as a record is defined (`use_attribute_docstrings`), which is a quarter of what importing the
recipe takes, in every command; here they are read when a schema is asked for.
"""

from __future__ import annotations

import ast
import inspect
import linecache
from functools import cache
from itertools import pairwise
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema


class DescribedSchema(GenerateJsonSchema):
    """Writes the text beneath a field as its description."""

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        return _describe_fields(super().model_schema(schema), schema["cls"])

    def dataclass_schema(self, schema: core_schema.DataclassSchema) -> JsonSchemaValue:
        return _describe_fields(super().dataclass_schema(schema), schema["cls"])


def _describe_fields(json_schema: JsonSchemaValue, record: type) -> JsonSchemaValue:
    fields: dict[str, Any] = getattr(record, "model_fields", {})
    for name, text in read_field_texts(record).items():
        alias = getattr(fields.get(name), "alias", None) or name
        if alias in json_schema.get("properties", {}):
            json_schema["properties"][alias].setdefault("description", text)
    return json_schema


@cache
def read_field_texts(record: type) -> dict[str, str]:
    """Return field name -> the text beneath it, of a record and what it inherits."""
    texts: dict[str, str] = {}
    for base in reversed(record.__mro__):
        try:
            file = inspect.getfile(base)
        except (OSError, TypeError):  # built in, or not from a file
            continue
        definition = _find_classes(file).get(base.__qualname__)
        if definition is None:
            continue
        own = [node.target.id for node in definition.body if _names_field(node)]  # type: ignore[attr-defined]
        texts = {name: text for name, text in texts.items() if name not in own}
        for node, below in pairwise(definition.body):
            if _names_field(node) and (text := _read_text(below)) is not None:
                texts[node.target.id] = inspect.cleandoc(text)  # type: ignore[attr-defined]
    return texts


@cache
def _find_classes(file: str) -> dict[str, ast.ClassDef]:
    """Return qualified name -> definition of a file's classes. `inspect.getsource` parses the file for each of them."""
    found: dict[str, ast.ClassDef] = {}

    def visit(node: ast.AST, within: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                found[within + child.name] = child
                visit(child, f"{within}{child.name}.")
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                visit(child, f"{within}{child.name}.<locals>.")
            elif isinstance(child, ast.stmt):
                visit(child, within)

    visit(ast.parse("".join(linecache.getlines(file))), "")
    return found


def _read_text(node: ast.stmt) -> str | None:
    value = node.value if isinstance(node, ast.Expr) else None
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


def _names_field(node: ast.stmt) -> bool:
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
