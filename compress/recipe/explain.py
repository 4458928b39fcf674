"""pydantic's errors in the user's words: where, what was expected, what was found, what was perhaps meant."""

from __future__ import annotations

import re
from typing import Any

from pydantic import ValidationError

from compress.recipe import vocabulary
from compress.recipe.places import MOST_PROBLEMS, Node, Path, Problem, RecipeFindings, plain
from runtime.words import did_you_mean, suggest

_UNKNOWN_KEY = {"extra_forbidden", "unexpected_keyword_argument"}
OWN_KEYS = ("include", "vars")
"""Top-level keys that are used up while reading."""


def explain(error: ValidationError, root: Node, findings: RecipeFindings) -> None:
    """Add a problem for each thing that is wrong, but for paths that have one."""
    data = plain(root)
    # A default that follows from a key that is wrong is no error of its own.
    errors = [e for e in error.errors(include_url=False) if e["type"] != "default_factory_not_called"]
    problems = [_explain_error(e, root, data) for e in errors[: 2 * MOST_PROBLEMS]]
    deeper = {p.path[:n] for p in problems for n in range(len(p.path))}
    for problem in dict.fromkeys(problems):
        wrong_branch = problem.path in deeper and problem.rule.startswith("expected")
        excused = findings.incomplete and problem.rule.startswith("missing key")
        if not (wrong_branch or excused or findings.covers(problem.path)):
            findings.report(problem)


def _explain_error(error: Any, root: Node, data: Any) -> Problem:
    kind, path = error["type"], _find_path(error["loc"], root)
    node = root.find(path)
    if kind in _UNKNOWN_KEY:
        return Problem(node.key_place or node.place, path, _explain_unknown_key(path, data))
    if kind == "missing" and isinstance(error["loc"][-1], str):
        return Problem(node.place, path, _explain_missing_key(error["loc"][-1], path, data))
    if kind == "union_tag_not_found":
        known = ", ".join(vocabulary.kinds(vocabulary.at(path, data)))
        return Problem(node.place, path, f"missing key 'kind'; one of {known}")
    if kind == "union_tag_invalid":
        return _explain_unknown_kind(error, node, path, data)
    if kind == "value_error":
        # a record's own rule, placed at the first key that its message names
        message = str(error["ctx"]["error"])
        key = next((word for word in re.findall(r"\w+", message) if node.child(word)), None)
        place = node.find((key,)).place if key else node.place
        return Problem(place, (*path, key) if key else path, message)
    return Problem(node.place, path, describe_unexpected(node, vocabulary.at(path, data)))


def _find_path(loc: tuple[str | int, ...], root: Node) -> Path:
    """Return the keys of `loc` that are in the text; pydantic mixes the names of union branches in."""
    path: Path = ()
    node = root
    for key in loc:
        child = node.child(key)
        if child is not None:
            node, path = child, (*path, key)
    return path


def _explain_unknown_key(path: Path, data: Any) -> str:
    known = vocabulary.keys(vocabulary.at(path[:-1], data))
    return f"unknown key{suggest(path[-1], [*known, *OWN_KEYS] if len(path) == 1 else known)}"


def _explain_missing_key(key: str, path: Path, data: Any) -> str:
    return f"missing key '{key}' ({vocabulary.describe(vocabulary.at((*path, key), data))})"


def _explain_unknown_kind(error: Any, node: Node, path: Path, data: Any) -> Problem:
    known = vocabulary.kinds(vocabulary.at(path, data))
    tag = node.find(("kind",))
    what = "pass" if path[:1] == ("passes",) else "kind"
    return Problem(tag.place, (*path, "kind"), f"unknown {what} '{error['ctx']['tag']}'{suggest(tag.value, known)}")


def describe_unexpected(node: Node, alternatives: list[vocabulary.Schema]) -> str:
    """Return "expected ..., found ...", with the mend where it is plain."""
    value = node.value
    rule = f"expected {vocabulary.describe(alternatives)}, found {_describe_found(node)}"
    options = [str(v) for v in vocabulary.values(alternatives)]
    if isinstance(value, str) and (meant := did_you_mean(value, options)):
        return rule + meant
    if isinstance(value, str) and vocabulary.takes(alternatives, "array"):
        return f"{rule}; write [{value}]"
    if isinstance(value, str) and _is_number(value) and not vocabulary.takes(alternatives, "string"):
        return f"{rule}; leave out the quotes"
    if isinstance(value, str) and _is_number(value.rstrip().removesuffix("%")) and value.rstrip().endswith("%"):
        return f"{rule}; write {float(value.rstrip().removesuffix('%')) / 100:g}"
    if isinstance(value, (int, float)) and vocabulary.takes(alternatives, "string"):
        return f"{rule}; put it in quotes"
    return rule


def _describe_found(node: Node) -> str:
    value = node.value
    if isinstance(value, (dict, list)):
        text = "a mapping" if isinstance(value, dict) else f"a list of {len(value)}"
    elif isinstance(value, str):
        text = f"text '{value[:60]}'"
    else:
        text = "nothing (null)" if value is None else str(value).lower()
    return f"{text} (from {node.written})" if node.written else text


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", text) is not None
