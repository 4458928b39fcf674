"""`${name}`, `${env:NAME}`, `${env:NAME:-default}` and `${package:NAME}` in any string; `$${` is a plain `${`."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from compress.recipe.budget import ValueSize, check_depth
from compress.recipe.places import Node, Path, Position, RecipeFindings, Scalar, plain
from compress.recipe.yaml_source import parse_scalar
from runtime.words import did_you_mean, suggest

VARS = "vars"
_REFERENCE = re.compile(r"\$\$\{|\$\{([^{}]*)\}|\$\{")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


class Unresolved(Exception):
    """A reference that stands for nothing; the message says why."""


class AlreadyReported(Unresolved):
    """A reference to a variable whose own problem is known."""


def escape(text: str) -> str:
    """Write `text` so that reading it gives `text` back."""
    return text.replace("${", "$${")


def is_reference(text: str) -> bool:
    """Return whether all of `text` is one reference, which may stand for any value."""
    match = _REFERENCE.fullmatch(text)
    return match is not None and match[1] is not None


def names_in(text: str) -> set[str]:
    """Return the names of the variables that a text refers to."""
    return {m[1] for m in _REFERENCE.finditer(text) if m[1] and _NAME.fullmatch(m[1])}


def names_used(node: Node) -> set[str]:
    """Return every variable's name in the tree's strings."""
    if isinstance(node.value, str):
        return names_in(node.value)
    return set().union(*(names_used(child) for _, child in node.children()))


def measure(node: Node) -> ValueSize:
    """Measure how much a value takes, all that is in it counted."""
    sizes = [measure(child) for _, child in node.children()]
    return ValueSize(
        1 + sum(size.values for size in sizes),
        sum(size.characters for size in sizes) + (len(node.value) if isinstance(node.value, str) else 0),
        1 + max((size.depth for size in sizes), default=0),
    )


def substitute(root: Node, findings: RecipeFindings) -> tuple[Node, dict[str, str]]:
    """Replace every reference by what it stands for: the recipe without `vars`, and the variables that are texts."""
    assert isinstance(root.value, dict)
    rest = {key: node for key, node in root.value.items() if key != VARS}
    variables = _Variables(root.child(VARS), findings)
    variables.resolve_all()
    texts = {name: node.value for name, node in variables.done.items() if node and isinstance(node.value, str)}
    return variables.replace_references(replace(root, value=rest), ()), texts


class _Variables:
    """The values of `vars`, resolved once each, on demand."""

    def __init__(self, section: Node | None, findings: RecipeFindings) -> None:
        self.findings = findings
        self.raw: dict[str, Node] = {}
        self.done: dict[str, Node | None] = {}
        self.sizes: dict[str, ValueSize] = {}
        self.open: list[str] = []
        self.depth = 0
        """Of what is being replaced, the variables that led there counted in."""
        if section is None or section.value is None:
            return
        if not isinstance(section.value, dict):
            findings.add(section.place, (VARS,), "expected a mapping of names to values")
            return
        self.raw = section.value

    def resolve_all(self) -> None:
        for name, node in self.raw.items():
            if not _NAME.fullmatch(name):
                place = node.key_place or node.place
                self.findings.add(place, (VARS, name), "a name is letters, digits, _ and -, with a letter or _ first")
            elif name not in self.done:
                self._resolve(name)

    def _resolve(self, name: str) -> None:
        self.open.append(name)
        value = self.replace_references(self.raw[name], (VARS, name))
        self.open.pop()
        broken = any(path[:2] == (VARS, name) for path in self.findings.settled)
        self.done[name] = None if broken else value
        self.sizes[name] = measure(value)

    def replace_references(self, node: Node, path: Path) -> Node:
        """Replace the references in all strings of `node`; a string with a problem stays as it is."""
        self.depth += 1
        with self.findings.count(node.place, path):
            check_depth(self.depth)
        result = self._replace_inside(node, path)
        self.depth -= 1
        return result

    def _replace_inside(self, node: Node, path: Path) -> Node:
        if isinstance(node.value, dict):
            return replace(
                node, value={k: self.replace_references(child, (*path, k)) for k, child in node.value.items()}
            )
        if isinstance(node.value, list):
            return replace(
                node, value=[self.replace_references(child, (*path, i)) for i, child in enumerate(node.value)]
            )
        if not isinstance(node.value, str) or "${" not in node.value:
            return node
        try:
            whole = _REFERENCE.fullmatch(node.value)
            if whole and whole[1] is not None:
                value = self._find_value(whole[1], whole=True)
                with self.findings.count(node.place, path) as budget:
                    size = self.sizes.get(whole[1]) or measure(value)
                    budget.spend(size)
                    check_depth(self.depth + size.depth)
                return replace(node, value=value.value, written=node.value)
            with self.findings.count(node.place, path):
                return replace(node, value=_REFERENCE.sub(self._format_match, node.value), written=node.value)
        except AlreadyReported:
            self.findings.settled.add(path)
        except Unresolved as error:
            self.findings.add(node.place, path, str(error))
        return node

    def _format_match(self, match: re.Match[str]) -> str:
        if match[0] == "$${":
            return "${"
        if match[1] is None:
            raise Unresolved("'${' without its '}', or a reference inside a reference; write '$${' for a plain '${'")
        value = plain(self._find_value(match[1], whole=False))
        if isinstance(value, (dict, list)) or value is None:
            kind = "a mapping" if isinstance(value, dict) else "a list" if isinstance(value, list) else "nothing (null)"
            raise Unresolved(f"{match[0]} is {kind}, which cannot stand inside a text")
        word = str(value).lower() if isinstance(value, bool) else str(value)
        self.findings.budget.spend(ValueSize(0, len(word)))
        return word

    def _find_value(self, reference: str, *, whole: bool) -> Node:
        kind, colon, rest = reference.partition(":")
        if not colon:
            if reference in self.open:
                circle = " -> ".join((*self.open[self.open.index(reference) :], reference))
                raise Unresolved(f"variables that stand for each other: {circle}")
            if reference not in self.raw:
                known = did_you_mean(reference, self.raw) or f"; define it under '{VARS}:'"
                raise Unresolved(f"unknown variable '{reference}'{known}")
            if reference not in self.done:
                self._resolve(reference)
            value = self.done[reference]
            if value is None:
                raise AlreadyReported
            return value
        if kind == "env":
            return Node(_read_environment(rest, whole=whole), _NOWHERE)
        if kind == "package":
            return Node(package_folder(rest), _NOWHERE)
        raise Unresolved(f"${{{reference}}}: unknown source '{kind}:'{suggest(kind, ('env', 'package'))}")


_NOWHERE = Position("", 0, 0)


def _read_environment(text: str, *, whole: bool, environ: Mapping[str, str] = os.environ) -> Scalar:
    """Read `NAME` or `NAME:-default`; a whole value is read as a YAML scalar, a part of a text is taken as it is."""
    name, dash, default = text.partition(":-")
    value = environ.get(name) or (default if dash else None)
    if value is None:
        near = did_you_mean(name, environ)
        raise Unresolved(
            f"environment variable '{name}' is not set{near or f'; set it, or write ${{env:{name}:-default}}'}"
        )
    return parse_scalar(value) if whole else value


def package_folder(name: str) -> str:
    """Return the folder of an installed package, found without importing it. Raises Unresolved."""
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise Unresolved(f"${{package:{name}}}: write the import name of a top-level package")
    spec: Any = importlib.util.find_spec(name) if name != "__main__" else None
    if spec is None:
        raise Unresolved(f"package '{name}' is not installed here: pip install {name.replace('_', '-')}")
    folders = list(spec.submodule_search_locations or ())
    if not folders:
        raise Unresolved(f"'{name}' is a single module, not a package with a folder")
    return str(folders[0])
