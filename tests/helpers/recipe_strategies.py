"""Recipes for hypothesis: records from the recipe's own JSON Schema, so that a new pass is in them at once; texts."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

from hypothesis import strategies as st

from compress.recipe.variables import escape
from compress.recipe.vocabulary import recipe_schema
from runtime.tasks.metrics import metric_names

TRAPS = (
    "", " ", "on", "yes", "null", "~", "true", "1", "1e3", "0x1f", "0o7", "1_000", ".inf", ".nan", "=", "<<", "- a",
    "a: b", "a #b", "#", "&a", "*a", "!t", "%", "@", "`", "|", ">", "?", "---", "...", "2020-01-01", "12:30:00", "${",
    "${x}", "$${x}", "$$${", " a", "a ", "\ta", "a\n", "\n\na", " a\n b\n\n", "a\r\nb", "\x00", "\x1b", "\x7f", "\x85",
    "\u2028", "\ufeffa", "\ufffe", "'", '"', "\\", "\\u0041", "é", "日本", "😀", "a" * 300, "a b " * 80, "[", "{}", ",",
)  # fmt: skip
"""Texts that YAML reads as something else where they are not quoted well."""
TEXTS = st.sampled_from(TRAPS) | st.text(max_size=12)
NUMBERS = (0.1, 1e-7, 1e-300, 1e22, 1e308, 5.0, -0.0, 0.30000000000000004, 1 / 3)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(NUMBERS) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
METRIC = st.sampled_from(sorted(metric_names()))
METRICS = {"metric": METRIC, "metrics": st.lists(METRIC, max_size=2)}
"""The schema says text; only names of metrics come further."""


def values(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Make JSON values that the schema allows; rules between keys, which it does not know, may still refuse them."""
    if "$ref" in schema:
        return _defined(schema["$ref"].rsplit("/", 1)[1])
    for several in ("oneOf", "anyOf"):
        if several in schema:
            return st.one_of([values(option) for option in schema[several]])
    if "const" in schema or "enum" in schema:
        return st.sampled_from(schema.get("enum", [schema.get("const")]))
    kinds = {"integer": _integers, "number": _numbers, "string": _strings, "array": _lists, "object": _mappings}
    if "type" not in schema:
        return ANYTHING
    fixed = {"boolean": st.booleans(), "null": st.none()}
    return fixed[schema["type"]] if schema["type"] in fixed else kinds[schema["type"]](schema)


@cache
def _defined(name: str) -> st.SearchStrategy[Any]:
    return st.deferred(lambda: values(recipe_schema()["$defs"][name]))


def _integers(schema: dict[str, Any]) -> st.SearchStrategy[int]:
    low = schema.get("minimum", schema.get("exclusiveMinimum", -3) + 1)
    return st.integers(low, schema.get("maximum", low + 300)) | st.integers(low, schema.get("maximum"))


def _numbers(schema: dict[str, Any]) -> st.SearchStrategy[float]:
    low, high = (schema.get(key, schema.get(f"exclusive{key.title()}")) for key in ("minimum", "maximum"))
    bounds = {"min_value": low, "max_value": high, "allow_nan": False, "allow_infinity": False}
    floats = st.floats(
        **bounds, exclude_min="exclusiveMinimum" in schema, exclude_max="exclusiveMaximum" in schema
    ) | st.sampled_from([n for n in (*NUMBERS, 5, 1) if (low is None or n > low) and (high is None or n < high)] or [0])
    return floats


def _strings(schema: dict[str, Any]) -> st.SearchStrategy[str]:
    if "pattern" in schema:
        return st.from_regex(schema["pattern"], fullmatch=True)
    most = schema.get("maxLength")
    texts = st.text(min_size=schema.get("minLength", 0), max_size=most or 12)
    return texts if most else TEXTS | texts


def _lists(schema: dict[str, Any]) -> st.SearchStrategy[list[Any]]:
    if "prefixItems" in schema:
        return st.tuples(*map(values, schema["prefixItems"])).map(list)
    least = schema.get("minItems", 0)
    return st.lists(values(schema.get("items", {})), min_size=least, max_size=schema.get("maxItems", least + 2))


def _mappings(schema: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    if "properties" not in schema:
        more = schema.get("additionalProperties")
        return st.dictionaries(TEXTS, values(more if isinstance(more, dict) else {}), max_size=3)
    made = {key: METRICS[key] if key in METRICS else values(item) for key, item in schema["properties"].items()}
    needed = {*schema.get("required", ()), *({"kind"} & made.keys())}
    needs = {key: made[key] for key in made if key in needed}
    may = {key: made[key] for key in made if key not in needed}
    some = st.lists(st.sampled_from(sorted(may)), max_size=5, unique=True) if may else st.just([])
    return some.flatmap(lambda keys: st.fixed_dictionaries({**needs, **{key: may[key] for key in keys}}))


def as_text(data: Any) -> str:
    """The data as JSON that YAML reads alike: a letter beyond 16 bits is not written as two, as JSON has it."""
    ascii_only = json.dumps(_escaped(data))
    pair = re.compile(r"\\u(d[89ab][0-9a-f]{2})\\u(d[c-f][0-9a-f]{2})")
    return pair.sub(lambda m: f"\\U{ord(json.loads(chr(34) + m[0] + chr(34))):08x}", ascii_only)


def _escaped(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _escaped(item) for key, item in data.items()}
    if isinstance(data, list):
        return [_escaped(item) for item in data]
    return escape(data) if isinstance(data, str) else data


GROWTH = {
    "text": ("'{}'", "".join, ("${{v{}}}",)),
    "list": ("[{}]", ", ".join, ("'${{v{}}}'", "*a{}")),
    "mapping": ("{{k: 1, <<: [{}]}}", ", ".join, ("*a{}",)),
    "mixed": ("{{k: [{}]}}", ", ".join, ("'${{v{}}}'", "*a{}", "{{<<: *a{}}}")),
}
"""What variables are, how a value is made of several others, and how each of them is named."""


@st.composite
def growing(draw: st.DrawFn) -> str:
    """A recipe whose variables, aliases and merge keys stand for one another, many times over."""
    whole, join, forms = GROWTH[draw(st.sampled_from(sorted(GROWTH)))]
    lines = [f"  v0: &a0 {whole.format('x' * draw(st.integers(1, 100)) if join == ''.join else '{a: 1}')}"]
    for n in range(1, draw(st.integers(2, 40))):
        names = draw(
            st.lists(st.tuples(st.sampled_from(forms), st.integers(max(0, n - 2), n - 1)), min_size=1, max_size=4)
        )
        lines.append(f"  v{n}: &a{n} {whole.format(join(form.format(other) for form, other in names))}")
    model = f"model: {{source: 'python:a:b', task: generic, args: {{a: '${{v{len(lines) - 1}}}'}}}}"
    return "\n".join(["version: 1", "name: x", model, "vars:", *lines, ""])


TOKENS = re.compile(rb"[A-Za-z_]+|\d+|\s+|.", re.DOTALL)
WORDS = (
    *(b"- |: |[|]|{|}|&a |*a|<<: *a|!!int |!x |>-|? |#|'|null|~|1e999|-1|0|.nan|true|@|`|%|,".split(b"|")),
    *(b"${ ${x} ${vars} ${env:HOME} ${package:numpy} $${ include: vars: quickstart.yaml /dev/zero . ..".split()),
    *(b"\n", b"\n  ", b"\t", b'"', b"|\n", b"---\n", b"...\n", b"%YAML 1.1\n", b"9" * 30, b"9" * 5000, b"[" * 2000),
    *(b"\xff", b"\x00", b"\xef\xbb\xbf", b"\xc2\x85", b"\xed\xa0\x80", b'"\\ud800"'),
)
"""Tokens that mean something to YAML or to recipes, and bytes that mean nothing to either."""


@st.composite
def mutated(draw: st.DrawFn, texts: list[bytes]) -> bytes:
    """One of the texts with a few of its tokens lost, doubled, moved, replaced, or with single bytes changed."""
    parts = TOKENS.findall(draw(st.sampled_from(texts)))
    for _ in range(draw(st.integers(1, 4))):
        at, other = (draw(st.integers(0, len(parts))) for _ in range(2))
        least, most = min(at, other), min(max(at, other), min(at, other) + 30)
        what = draw(st.sampled_from(("lose", "double", "move", "word", "bytes", "cut")))
        span = parts[least:most]
        if what == "lose":
            parts[least:most] = []
        elif what == "double":
            parts[least:least] = span
        elif what == "move":
            parts[least:most] = []
            parts[other:other] = span
        elif what == "word":
            parts[at : at + draw(st.integers(0, 1))] = [draw(st.sampled_from(WORDS))]
        elif what == "bytes":
            parts[at : at + 1] = [draw(st.binary(max_size=3))]
        elif draw(st.integers(0, 5)) == 0:  # rarely: little is left to be wrong
            parts[at:] = []
    return b"".join(parts)
