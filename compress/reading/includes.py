"""`include:`: other files under this one, relative to it."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import reduce
from pathlib import Path as File

from compress.errors import RecipeError
from compress.reading.places import Findings, Place, did_you_mean
from compress.reading.tree import Node, merge
from compress.reading.yaml_source import parse

INCLUDE = "include"


def read_with_includes(file: File, findings: Findings) -> Node:
    """The file's mapping merged over those that it includes. RecipeError if the file itself is no mapping at all."""
    try:
        text = read_text(file)
    except RecipeError as error:
        raise RecipeError(f"{file}: {error}{_sibling(file)}") from error
    root = _mapping(text, str(file), findings)
    if root is None:
        raise RecipeError(findings.lines())
    return _with_includes(root, file, (file.resolve(),), findings)


def read_text(file: File) -> str:
    """The file's text; RecipeError with the bare reason if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise RecipeError("no such file") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise RecipeError(f"cannot be read: {error.strerror}") from error


def _sibling(file: File) -> str:
    return did_you_mean(file.name, [p.name for p in file.parent.glob("*.y*ml")]) if not file.exists() else ""


def _mapping(text: str, source: str, findings: Findings) -> Node | None:
    root = parse(text, source, findings)
    if root is None:
        return None
    if not isinstance(root.value, dict):
        what = "the file is empty" if root.value is None else "expected a mapping at the top"
        findings.add(root.place, (), f"{what}; a recipe starts with 'version: 1'")
        return None
    return root


def _with_includes(root: Node, file: File, chain: tuple[File, ...], findings: Findings) -> Node:
    """`root`, read from `file`, without its `include`; `chain` is the files that led here, itself last."""
    assert isinstance(root.value, dict)
    own = {key: node for key, node in root.value.items() if key != INCLUDE}
    bases = [_included(node, file, chain, findings) for node in _named(root, findings)]
    found = [base for base in bases if base is not None]
    return reduce(merge, [*found, replace(root, value=own)])


def _named(root: Node, findings: Findings) -> list[Node]:
    """The nodes that name a file to include."""
    entry = root.child(INCLUDE)
    if entry is None:
        return []
    nodes = entry.value if isinstance(entry.value, list) else [entry]
    for i, node in enumerate(nodes):
        if not isinstance(node.value, str) or not node.value or "${" in node.value:
            path = (INCLUDE, i) if isinstance(entry.value, list) else (INCLUDE,)
            findings.add(node.place, path, "expected the path of a recipe file, without variables, or a list of them")
    return [n for n in nodes if isinstance(n.value, str) and n.value and "${" not in n.value]


def _included(node: Node, file: File, chain: tuple[File, ...], findings: Findings) -> Node | None:
    target = File(os.path.normpath(file.parent / str(node.value)))
    if target.resolve() in chain:
        names = " -> ".join(p.name for p in (*chain, target))
        _failed(node.place, f"{node.value}: files include each other in a circle: {names}", findings)
        return None
    try:
        text = read_text(target)
    except RecipeError as error:
        _failed(node.place, f"{node.value}: {error}: {target}{_sibling(target)}", findings)
        return None
    root = _mapping(text, str(target), findings)
    if root is None:
        findings.incomplete = True
        return None
    return _with_includes(root, target, (*chain, target.resolve()), findings)


def _failed(place: Place, rule: str, findings: Findings) -> None:
    findings.add(place, (INCLUDE,), rule)
    findings.incomplete = True
