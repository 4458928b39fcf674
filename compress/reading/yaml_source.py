"""YAML to a tree with positions. Plain values only: a key twice, a foreign tag or a loop of aliases is a problem."""

from __future__ import annotations

import io
import math
import warnings
from dataclasses import replace
from typing import Any, cast

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, ReusedAnchorWarning, YAMLError
from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from compress.reading.places import Findings, Path, Place, Problem
from compress.reading.tree import Node, Scalar

TAG = "tag:yaml.org,2002:"
MOST_VALUES = 100_000
"""Aliases of aliases can stand for billions of values; a recipe has a few hundred."""


def parse(text: str, source: str, findings: Findings, path: Path = ()) -> Node | None:
    """The tree that `text` describes, which stands at `path` of the recipe; an empty text is null.

    What is wrong goes into `findings`; the result is None if no tree could be made at all.
    """
    yaml = YAML(typ="safe", pure=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ReusedAnchorWarning)
            root = yaml.compose(io.StringIO(text))
        return _Builder(yaml, source, findings).build(root, path) if root else Node(None, Place(source, 1, 1))
    except YAMLError as error:
        findings.problems.append(_syntax_problem(error, text, source))
    except RecursionError:
        findings.add(Place(source, 1, 1), path, "nested too deeply for a recipe")
    except _TooManyValues:
        findings.add(Place(source, 1, 1), path, f"its aliases expand to more than {MOST_VALUES} values")
    return None


def parse_scalar(text: str) -> Scalar:
    """What `text` is as a plain YAML scalar: "4" is 4, "true" is True; "a: b", "[1]" and ".inf" stay text."""
    yaml = YAML(typ="safe", pure=True)
    tag = str(yaml.resolver.resolve(ScalarNode, text, (True, False)))
    value = _scalar(yaml, ScalarNode(tag, text))
    return text if isinstance(value, float) and not math.isfinite(value) else value


def _syntax_problem(error: YAMLError, text: str, source: str) -> Problem:
    if isinstance(error, ReaderError):
        before = text[: error.position]
        place = Place(source, before.count("\n") + 1, len(before) - before.rfind("\n"))
        return Problem(place, (), f"not YAML: {error.reason}")
    if not isinstance(error, MarkedYAMLError):
        return Problem(Place(source, 1, 1), (), f"not YAML: {error}")
    mark = error.problem_mark or error.context_mark
    rule = ", ".join(part for part in (error.context, error.problem) if part)
    return Problem(Place(source, mark.line + 1, mark.column + 1), (), f"not YAML: {rule}")


def _scalar(yaml: YAML, node: ScalarNode) -> Scalar:
    """The value of a scalar by its tag; dates are text."""
    constructor: Any = yaml.constructor
    makers = {
        TAG + "int": constructor.construct_yaml_int,
        TAG + "float": constructor.construct_yaml_float,
        TAG + "bool": constructor.construct_yaml_bool,
        TAG + "null": lambda node: None,
    }
    maker = makers.get(str(node.tag), lambda node: str(node.value))
    value: Scalar = maker(node)
    return value


class _TooManyValues(Exception):
    """More values than a recipe can have."""


class _Builder:
    """One text's nodes to ours."""

    def __init__(self, yaml: YAML, source: str, findings: Findings) -> None:
        self.yaml, self.source, self.findings = yaml, source, findings
        self.n_values = 0
        self.open: set[int] = set()

    def build(self, node: Any, path: Path) -> Node:
        self.n_values += 1
        if self.n_values > MOST_VALUES:
            raise _TooManyValues
        place = self._place(node)
        if id(node) in self.open:
            self.findings.add(place, path, "an alias inside the value that it stands for")
            return Node(None, place)
        self.open.add(id(node))
        value = self._value(node, path)
        self.open.remove(id(node))
        return Node(value, place)

    def _value(self, node: Any, path: Path) -> Scalar | dict[str, Node] | list[Node]:
        if isinstance(node, MappingNode) and node.tag == TAG + "map":
            return self._mapping(node, path)
        if isinstance(node, SequenceNode) and node.tag == TAG + "seq":
            return [self.build(item, (*path, i)) for i, item in enumerate(node.value)]
        if isinstance(node, ScalarNode) and str(node.tag) in {TAG + t for t in _SCALAR_TAGS}:
            return self._checked_scalar(node, path)
        self.findings.add(self._place(node), path, f"tag '{str(node.tag).replace(TAG, '!!')}' is not allowed here")
        return None

    def _checked_scalar(self, node: ScalarNode, path: Path) -> Scalar:
        try:
            value = _scalar(self.yaml, node)
        except (ValueError, KeyError):  # !!int abc
            self.findings.add(self._place(node), path, f"'{node.value}' is not of the type that its tag says")
            return None
        if isinstance(value, float) and not math.isfinite(value):
            self.findings.add(self._place(node), path, f"{node.value} is not a finite number")
        return value

    def _mapping(self, node: MappingNode, path: Path) -> dict[str, Node]:
        items: dict[str, Node] = {}
        inherited: list[Node] = []
        for key, item in node.value:
            if key.tag == TAG + "merge":
                inherited += self._inherited(item, path)
                continue
            name = self._key(key, path)
            if name is None:
                continue
            if name in items:
                first = items[name].key_place
                self.findings.add(self._place(key), (*path, name), f"key given twice; first at {first}")
                continue
            items[name] = replace(self.build(item, (*path, name)), key_place=self._place(key))
        for source in inherited:  # `<<:` gives the keys which the mapping itself does not
            items = {**cast(dict[str, Node], source.value), **items}
        return items

    def _inherited(self, node: Any, path: Path) -> list[Node]:
        sources = node.value if isinstance(node, SequenceNode) else [node]
        nodes = [self.build(source, path) for source in sources]
        for wrong in (n for n in nodes if not isinstance(n.value, dict)):
            self.findings.add(wrong.place, (*path, "<<"), "expected a mapping to merge")
        return [n for n in nodes if isinstance(n.value, dict)]

    def _key(self, key: Any, path: Path) -> str | None:
        if isinstance(key, ScalarNode) and key.tag in (TAG + "str", TAG + "timestamp"):
            return str(key.value)
        text = key.value if isinstance(key, ScalarNode) else "a list or mapping"
        self.findings.add(self._place(key), (*path, str(text)), f"key {text} is not text; put it in quotes")
        return None

    def _place(self, node: Any) -> Place:
        return Place(self.source, node.start_mark.line + 1, node.start_mark.column + 1)


_SCALAR_TAGS = ("str", "int", "float", "bool", "null", "timestamp", "value")
