"""`--set a.b.0.c=value`: values from the command line on top of the recipe's text, before variables are put in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from compress.recipe import vocabulary
from compress.recipe.budget import MOST_DEPTH, ValueSize
from compress.recipe.places import OVERRIDE, Node, Path, Position, Problem, RecipeFindings, join_path, plain
from compress.recipe.variables import VARS, is_reference, names_used
from compress.recipe.yaml_source import parse
from runtime.words import did_you_mean, suggest


class BadPath(Exception):
    """A path that leads nowhere; the message says where it ends and what would have gone on."""


def apply_overrides(root: Node, overrides: Sequence[str], findings: RecipeFindings) -> Node:
    """Return the tree with each `PATH=VALUE` set, left to right; VALUE is YAML.

    A bad one is a problem and changes nothing.
    """
    for text in overrides:
        key, equals, value = text.partition("=")
        place = Position(OVERRIDE + key.strip(), 1, 1)
        try:
            if not equals:
                raise BadPath("write PATH=VALUE, for example passes.0.bits=4")
            path = parse_path(key.strip(), root)
        except BadPath as error:
            findings.report(Problem(place, (), str(error)))
            continue
        with findings.count(place, path) as budget:
            budget.spend(ValueSize(len(path), len(value)))
        if (node := parse(value, place.source, findings, path)) is not None:
            root = set_value(root, path, node, place)
    return root


def parse_path(text: str, root: Node) -> Path:
    """Return `text` as keys and indices. Raises BadPath at the first key that neither recipe nor schema knows."""
    path: Path = ()
    words = text.split(".")
    if len(words) > MOST_DEPTH:
        raise BadPath(f"{len(words)} keys; a recipe is not nested more than {MOST_DEPTH} deep")
    for word in words:
        path = (*path, _parse_key(word, path, root))
    return path


def _parse_key(word: str, path: Path, root: Node) -> str | int:
    before = root.find(path)
    node = before if all(root.find(path[:n]).child(key) is not None for n, key in enumerate(path)) else None
    if node is not None and isinstance(node.value, list):
        n_items = len(node.value)
        if not (word.isascii() and word.isdecimal() and len(word) < 10):
            raise BadPath(f"{join_path(path)} is a list: expected a number, found '{word}'")
        if int(word) >= n_items:
            many = f"0 to {n_items - 1}" if n_items else "none"
            raise BadPath(f"{join_path(path)} has no item {word}; it has {n_items} ({many})")
        return int(word)
    if node is not None and isinstance(node.value, str) and is_reference(node.value):
        raise BadPath(f"{join_path(path)} is {node.value} in the recipe; set the variable instead")
    if path[:1] == (VARS,):
        return _check_variable(word, root) if len(path) == 1 else word
    alternatives = vocabulary.at(path, plain(root))
    known = vocabulary.keys(alternatives)
    if word in known or (not path and word == VARS) or _takes_any_key(alternatives):
        return word
    if vocabulary.takes(alternatives, "array"):
        raise BadPath(f"{join_path(path)} is not in the recipe: set the whole list")
    if not known:
        raise BadPath(f"{join_path(path)} has no keys: expected {vocabulary.describe(alternatives)}")
    where = f" in {join_path(path)}" if path else ""
    raise BadPath(f"unknown key '{word}'{where}{suggest(word, [*known, VARS] if not path else known)}")


def _check_variable(word: str, root: Node) -> str:
    section = root.child(VARS)
    defined = section.value if section is not None and isinstance(section.value, dict) else {}
    known = {*defined, *names_used(root)}
    if word not in known:
        raise BadPath(f"the recipe has no variable '{word}'{did_you_mean(word, known)}")
    return word


def _takes_any_key(alternatives: list[vocabulary.Schema]) -> bool:
    return any(schema == {} or schema.get("additionalProperties") not in (None, False) for schema in alternatives)


def set_value(node: Node | None, path: Path, value: Node, place: Position) -> Node:
    """Return `node` with `value` at `path`; mappings that are not there yet are made."""
    if not path:
        return replace(value, key_place=place)
    key, rest = path[0], path[1:]
    base = node if node is not None else Node({}, place, place)
    if isinstance(base.value, list) and isinstance(key, int):
        items = list(base.value)
        items[key] = set_value(items[key], rest, value, place)
        return replace(base, value=items)
    entries = dict(base.value) if isinstance(base.value, dict) else {}
    entries[str(key)] = set_value(entries.get(str(key)), rest, value, place)
    return replace(base, value=entries)
