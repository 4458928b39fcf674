"""`include:`: other files under this one, relative to it."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from functools import reduce
from pathlib import Path as File

from compress.errors import RecipeError
from compress.recipe.budget import MOST_FILE_BYTES
from compress.recipe.places import Node, Position, RecipeFindings, did_you_mean, merge, printable
from compress.recipe.yaml_source import parse

INCLUDE = "include"


def read_with_includes(file: File, findings: RecipeFindings) -> Node:
    """Read a file and merge its mapping over those that it includes.

    Raises RecipeError if the file itself is no mapping at all.
    """
    try:
        text = read_text(file)
    except RecipeError as error:
        raise RecipeError(printable(f"{file}: {error}{_suggest_sibling(file)}")) from error
    findings.budget.spend_file(len(text))
    root = _parse_mapping(text, str(file), findings)
    if root is None:
        raise RecipeError(findings.lines())
    return _merge_includes(root, file, (file.resolve(),), findings)


def read_text(file: File) -> str:
    """Return the file's text. Raises RecipeError with the bare reason if it cannot be read."""
    try:
        if not stat.S_ISREG(file.stat().st_mode):  # before it is opened: a pipe would be waited for
            raise RecipeError("cannot be read: a folder, pipe or device, not a file")
        with file.open("rb") as opened:
            content = opened.read(MOST_FILE_BYTES + 1)
    except FileNotFoundError as error:
        raise RecipeError("no such file") from error
    except OSError as error:
        raise RecipeError(f"cannot be read: {error.strerror}") from error
    except ValueError as error:  # a zero byte in the name
        raise RecipeError("no path of a file") from error
    if len(content) > MOST_FILE_BYTES:
        raise RecipeError(f"more than {MOST_FILE_BYTES} bytes, which is too much for a recipe")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecipeError(f"not UTF-8 text (byte {error.start})") from error


def _suggest_sibling(file: File) -> str:
    if os.path.lexists(file) or "\0" in str(file):
        return ""
    return did_you_mean(file.name, (p.name for p in file.parent.glob("*.y*ml")))


def _parse_mapping(text: str, source: str, findings: RecipeFindings) -> Node | None:
    root = parse(text, source, findings)
    if root is None:
        return None
    if not isinstance(root.value, dict):
        what = "the file is empty" if root.value is None else "expected a mapping at the top"
        findings.add(root.place, (), f"{what}; a recipe starts with 'version: 1'")
        return None
    return root


def _merge_includes(root: Node, file: File, chain: tuple[File, ...], findings: RecipeFindings) -> Node:
    """Merge `root`, read from `file`, over the files that it includes; `chain`: those that led here, itself last."""
    assert isinstance(root.value, dict)
    entries = {key: node for key, node in root.value.items() if key != INCLUDE}
    bases = [_read_included(node, file, chain, findings) for node in _list_included(root, findings)]
    found = [base for base in bases if base is not None]
    return reduce(merge, [*found, replace(root, value=entries)])


def _list_included(root: Node, findings: RecipeFindings) -> list[Node]:
    """Return the nodes that name a file to include, and report those that cannot."""
    entry = root.child(INCLUDE)
    if entry is None:
        return []
    nodes = entry.value if isinstance(entry.value, list) else [entry]
    for i, node in enumerate(nodes):
        if not _is_path(node):
            path = (INCLUDE, i) if isinstance(entry.value, list) else (INCLUDE,)
            findings.add(node.place, path, "expected the path of a recipe file, without variables, or a list of them")
    return [node for node in nodes if _is_path(node)]


def _is_path(node: Node) -> bool:
    return isinstance(node.value, str) and node.value != "" and "${" not in node.value and "\0" not in node.value


def _read_included(node: Node, file: File, chain: tuple[File, ...], findings: RecipeFindings) -> Node | None:
    target = File(os.path.normpath(file.parent / str(node.value)))
    if target.resolve() in chain:
        names = " -> ".join(p.name for p in (*chain, target))
        _report_failure(node.place, f"{node.value}: files include each other in a circle: {names}", findings)
        return None
    try:
        text = read_text(target)
    except RecipeError as error:
        _report_failure(node.place, f"{node.value}: {error}: {target}{_suggest_sibling(target)}", findings)
        return None
    with findings.count(node.place, (INCLUDE,)) as budget:
        budget.spend_file(len(text))
    root = _parse_mapping(text, str(target), findings)
    if root is None:
        findings.incomplete = True
        return None
    return _merge_includes(root, target, (*chain, target.resolve()), findings)


def _report_failure(place: Position, rule: str, findings: RecipeFindings) -> None:
    findings.add(place, (INCLUDE,), rule)
    findings.incomplete = True
