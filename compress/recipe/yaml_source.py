"""A recipe's files to a tree with positions: the file itself over those that it includes, each path relative to it.

Plain YAML values only: a key twice, a foreign tag or a loop of aliases is a problem.
"""

from __future__ import annotations

import io
import json
import math
import os
import stat
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path as File
from typing import Any, cast

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer
from ruamel.yaml.error import MantissaNoDotYAML1_1Warning, MarkedYAMLError, ReusedAnchorWarning, YAMLError
from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from compress.errors import RecipeError
from compress.recipe.budget import MOST_DEPTH, MOST_FILE_BYTES, MOST_VALUES, ValueSize, check_depth
from compress.recipe.places import Node, Path, Position, Problem, RecipeFindings, Scalar, merge, printable
from runtime.words import did_you_mean

INCLUDE = "include"
IN_PYTHON = "recipe"
"""The place of what stands in no file."""
TAG = "tag:yaml.org,2002:"
INTEGERS = range(-(2**63), 2**64)


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


def read_mapping(given: Mapping[str, Any], findings: RecipeFindings) -> Node:
    """Merge a recipe that was written in Python over the files that it includes, sought in the working directory."""
    root = make_node(json.loads(json.dumps(given, default=str)))
    return _merge_includes(root, File(IN_PYTHON), (), findings)


def make_node(value: Any) -> Node:
    """Return JSON values as a recipe's tree, which stands in no file."""
    if isinstance(value, dict):
        return Node({key: make_node(item) for key, item in value.items()}, Position(IN_PYTHON, 0, 0))
    return Node([make_node(item) for item in value] if isinstance(value, list) else value, Position(IN_PYTHON, 0, 0))


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
        raise RecipeError(_explain_binary(file, error.start)) from error


def _explain_binary(file: File, byte: int) -> str:
    if file.suffix.lower() in (".onnx", ".safetensors", ".pt", ".pth", ".gguf"):
        return f"a model, not a recipe; write one for it: compress new --model {file}"
    return f"not UTF-8 text (byte {byte})"


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


def parse(text: str, source: str, findings: RecipeFindings, path: Path = ()) -> Node | None:
    """Parse `text` into a tree, which stands at `path` of the recipe; an empty text is null.

    What is wrong goes into `findings`; the result is None if no tree could be made at all.
    """
    yaml: Any = YAML(typ="safe", pure=True)
    yaml.Composer = partial(_Composer, source=source, findings=findings)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ReusedAnchorWarning)
            warnings.simplefilter("ignore", MantissaNoDotYAML1_1Warning)
            root = yaml.compose(io.StringIO(text))
            return (
                _TreeBuilder(yaml, source, findings).build(root, path) if root else Node(None, Position(source, 1, 1))
            )
    except YAMLError as error:
        findings.report(_explain_syntax(error, text, source))
    return None


class _Composer(Composer):
    """ruamel's, which ends where a text holds more than a recipe can, before all of it is in memory."""

    def __init__(self, loader: Any = None, *, source: str, findings: RecipeFindings) -> None:
        super().__init__(loader)
        self.source, self.findings, self.n_nodes, self.n_open = source, findings, 0, 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.n_nodes += 1
        self.n_open += 1
        if self.n_nodes > MOST_VALUES or self.n_open > MOST_DEPTH:
            mark = self.parser.peek_event().start_mark
            with self.findings.count(Position(self.source, mark.line + 1, mark.column + 1), ()) as budget:
                budget.spend(ValueSize(self.n_nodes))
                check_depth(self.n_open)
        node = super().compose_node(parent, index)
        self.n_open -= 1
        return node


def parse_scalar(text: str) -> Scalar:
    """Read `text` as a plain YAML scalar: "4" is 4, "true" is True; "a: b", "[1]" and ".inf" stay text."""
    yaml = YAML(typ="safe", pure=True)
    tag = str(yaml.resolver.resolve(ScalarNode, text, (True, False)))
    try:
        return _convert_scalar(yaml, ScalarNode(tag, text))
    except BadScalar:
        return text


def _explain_syntax(error: YAMLError, text: str, source: str) -> Problem:
    if isinstance(error, ReaderError):
        before = text[: error.position]
        place = Position(source, before.count("\n") + 1, len(before) - before.rfind("\n"))
        return Problem(place, (), f"not YAML: {error.reason}")
    if not isinstance(error, MarkedYAMLError):
        return Problem(Position(source, 1, 1), (), f"not YAML: {error}")
    mark = error.problem_mark or error.context_mark
    rule = ", ".join(part for part in (error.context, error.problem) if part)
    return Problem(Position(source, mark.line + 1, mark.column + 1), (), f"not YAML: {rule}")


class BadScalar(Exception):
    """A value that no recipe can have; the message says why."""


def _convert_scalar(yaml: YAML, node: ScalarNode) -> Scalar:
    """Return the value of a scalar by its tag; dates are text. Raises BadScalar."""
    constructor: Any = yaml.constructor
    makers = {
        TAG + "int": constructor.construct_yaml_int,
        TAG + "float": constructor.construct_yaml_float,
        TAG + "bool": constructor.construct_yaml_bool,
        TAG + "null": lambda node: None,
    }
    maker = makers.get(str(node.tag))
    text = str(node.value)
    if maker is None:
        if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):  # "\ud800": JSON's habit
            raise BadScalar("holds half of a surrogate pair, which is no letter; write \\U and eight digits")
        return text
    if len(text) > 400 and node.tag != TAG + "null":
        raise BadScalar(f"a number of {len(text)} characters")
    try:
        value: Scalar = maker(node)
    except (ValueError, KeyError, IndexError, OverflowError) as error:  # !!int abc, !!bool 1, !!int ''
        raise BadScalar(f"'{text}' is not of the type that its tag says") from error
    if isinstance(value, float) and not math.isfinite(value):
        raise BadScalar(f"{text} is not a finite number")
    if isinstance(value, int) and value not in INTEGERS:
        raise BadScalar(f"{text} is not a number of 64 bits")
    return value


class _TreeBuilder:
    """One text's nodes to ours."""

    def __init__(self, yaml: YAML, source: str, findings: RecipeFindings) -> None:
        self.yaml, self.source, self.findings = yaml, source, findings
        self.open: set[int] = set()

    def build(self, node: Any, path: Path) -> Node:
        place = self._find_place(node)
        with self.findings.count(place, path) as budget:
            budget.spend(ValueSize())
            check_depth(len(self.open))
        if id(node) in self.open:
            self.findings.add(place, path, "an alias inside the value that it stands for")
            return Node(None, place)
        self.open.add(id(node))
        value = self._build_value(node, path)
        self.open.remove(id(node))
        return Node(value, place)

    def _build_value(self, node: Any, path: Path) -> Scalar | dict[str, Node] | list[Node]:
        if isinstance(node, MappingNode) and node.tag == TAG + "map":
            items: dict[str, Node] = {}
            inherited: list[Node] = []
            for key, item in node.value:
                if key.tag == TAG + "merge":
                    inherited += self._build_inherited(item, path)
                    continue
                name = self._read_key(key, path)
                if name is None:
                    continue
                if name in items:
                    first = items[name].key_place
                    self.findings.add(self._find_place(key), (*path, name), f"key given twice; first at {first}")
                    continue
                items[name] = replace(self.build(item, (*path, name)), key_place=self._find_place(key))
            for source in inherited:  # `<<:` gives the keys which the mapping itself does not
                items = {**cast(dict[str, Node], source.value), **items}
            return items
        if isinstance(node, SequenceNode) and node.tag == TAG + "seq":
            return [self.build(item, (*path, i)) for i, item in enumerate(node.value)]
        if isinstance(node, ScalarNode) and str(node.tag) in {TAG + t for t in _SCALAR_TAGS}:
            return self._build_scalar(node, path)
        self.findings.add(self._find_place(node), path, f"tag '{str(node.tag).replace(TAG, '!!')}' is not allowed here")
        return None

    def _build_scalar(self, node: ScalarNode, path: Path) -> Scalar:
        try:
            return _convert_scalar(self.yaml, node)
        except BadScalar as error:
            self.findings.add(self._find_place(node), path, str(error))
            return None

    def _build_inherited(self, node: Any, path: Path) -> list[Node]:
        sources = node.value if isinstance(node, SequenceNode) else [node]
        nodes = [self.build(source, path) for source in sources]
        for wrong in (n for n in nodes if not isinstance(n.value, dict)):
            self.findings.add(wrong.place, (*path, "<<"), "expected a mapping to merge")
        return [n for n in nodes if isinstance(n.value, dict)]

    def _read_key(self, key: Any, path: Path) -> str | None:
        if isinstance(key, ScalarNode) and key.tag in (TAG + "str", TAG + "timestamp"):
            return str(self._build_scalar(key, path))
        text = key.value if isinstance(key, ScalarNode) else "a list or mapping"
        self.findings.add(self._find_place(key), (*path, str(text)), f"key {text} is not text; put it in quotes")
        return None

    def _find_place(self, node: Any) -> Position:
        return Position(self.source, node.start_mark.line + 1, node.start_mark.column + 1)


_SCALAR_TAGS = ("str", "int", "float", "bool", "null", "timestamp", "value")
