"""Bundles of strangers: manifests and files changed and signed anew, used as a user would."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from fuzzing import COUNTS, assert_done_or_refused, corpus, fuzz
from hypothesis import given
from hypothesis import strategies as st
from shortcuts import few_rounds, without_processes
from tiny_bundles import (
    DELETE,
    KINDS,
    assert_bundle_used_or_refused,
    assert_ends_in_child,
    damaged,
    edited,
    make_bundle,
    sign,
    sign_files,
)

from runtime.encode.chat import render_chat

Edits = list[tuple[int, Any]]
Bundles = dict[str, Path]

VALUES: st.SearchStrategy[Any] = (
    st.sampled_from([DELETE, None, "", 0, -1, 1, 2, 3, 64, 1025, 2**16, 2**31, 2**63, 10**30, True, False, [], {}])
    | st.sampled_from(
        [1e308, -1.5, 0.5, 1e-300, "../x", "/etc/passwd", "a\0b", "é", "x" * 300, "model/model.onnx", "[/x]"]
    )
    | st.sampled_from(["onnx", "checkpoint", "engine", "text", "image", "tensor", "language", "generic", "kl", "auto"])
    | st.sampled_from([[[[[[]]]]], {"kind": "text"}, {"kind": "tensor"}, {"metric": "top1", "min": 0.5}, [2**40, 3]])
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=12)
)
EDITS = st.lists(st.tuples(st.integers(0, 10**4), VALUES), min_size=1, max_size=3)


@pytest.fixture(scope="session")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Bundles:
    return {kind: make_bundle(kind, tmp_path_factory.mktemp("tiny") / kind) for kind in KINDS}


@pytest.fixture(autouse=True, scope="module")
def _brief() -> Iterator[None]:
    """Judge in milliseconds: no processes for load time and memory, no more rounds than a few."""
    with without_processes(), few_rounds():
        yield


@pytest.mark.parametrize("kind", KINDS)
def test_the_bundles_are_used_without_a_refusal(bundles: Bundles, kind: str) -> None:
    """Else the others would look at refusals alone."""
    with damaged(bundles[kind]) as root:
        sign_files(root)
        assert_bundle_used_or_refused(f"whole {kind}", root)
    assert COUNTS[f"whole {kind}"] == {"done": 5}


def use_edited(pristine: Path, edits: Edits) -> None:
    """The bundle with another manifest."""
    with damaged(pristine) as root:
        sign(root, edited(json.loads((root / "manifest.json").read_text()), edits))
        assert_bundle_used_or_refused("manifests", root)


@fuzz(share=0.1, quick=20)
@given(kind=st.sampled_from(KINDS), edits=EDITS)
def test_any_manifest_is_used_or_refused(bundles: Bundles, kind: str, edits: Edits) -> None:
    assert_ends_in_child("manifests", lambda: use_edited(bundles[kind], edits))


@pytest.mark.parametrize("path", corpus("manifests"), ids=lambda path: path.name)
def test_manifests_that_broke_something_once(bundles: Bundles, path: Path) -> None:
    """Each file holds {"kind", "values"}, the second a list of [place, value]."""
    case = json.loads(path.read_text())

    def use() -> None:
        with damaged(bundles[case["kind"]]) as root:
            data = json.loads((root / "manifest.json").read_text())
            for (*outer, last), value in case["values"]:
                reduce(lambda inner, key: inner[key], outer, data)[last] = value
            sign(root, data)
            assert_bundle_used_or_refused("manifests", root)

    assert_ends_in_child("manifests", use)


# files

CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "zero", "insert", "double", "json"]),
        st.integers(0, 2**20),
        st.binary(min_size=1, max_size=8),
    ),
    min_size=1,
    max_size=4,
)
NAMES = st.sampled_from(
    [
        *("../x", "a/../../x", "/tmp/x", "c:x", "a\\b", "numpy.py", "x" * 256, "evaluation/SAMPLES.npz"),
        *("model/Model.onnx", "é/é", "model/x.so", "a\nb", "report.json", "manifest.json", "con", "x."),
    ]
) | st.text(max_size=20)
FILES = (
    *("model/model.onnx", "baseline/model.onnx", "evaluation/samples.npz", "evaluation/samples.jsonl"),
    *("evaluation/baseline_outputs.npz", "model/tokenizer.json", "model/tokenizer_config.json", "report.json"),
)


def change_bytes(data: bytes, how: str, where: int, more: bytes) -> bytes:
    """`data` with something else at a place in it."""
    at = where % (len(data) + 1)
    if how == "cut":
        return data[:at]
    if how == "zero":
        return data[:at] + bytes(len(more)) + data[at + len(more) :]
    if how == "insert":
        return data[:at] + more + data[at:]
    if how == "double":
        return data[:at] + data[at // 2 : at] + data[at:]
    if how == "json":
        return change_json(data, where, more)
    return data[:at] + more + data[at + len(more) :]


def change_json(data: bytes, where: int, more: bytes) -> bytes:
    """JSON in which one value is another; anything else as it is."""
    try:
        parsed = json.loads(data)
    except ValueError:
        return data
    values = [DELETE, None, -1, 2**40, 1e308, "x", [], {}, True, more.decode("latin-1"), [[]], {"type": "x"}]
    return json.dumps(edited({"all": parsed}, [(where, values[more[0] % len(values)])]).get("all")).encode()


def use_changed(pristine: Path, name: str, changes: list[tuple[str, int, bytes]]) -> None:
    """The bundle with another content of one of its files."""
    with damaged(pristine) as root:
        listed = [file for file in FILES if (root / file).exists()]
        file = root / (name if (root / name).exists() else listed[len(name) % len(listed)])
        data = file.read_bytes()
        for how, where, more in changes:
            data = change_bytes(data, how, where, more)
        file.write_bytes(data)
        sign_files(root)
        assert_bundle_used_or_refused("bundles", root)


@fuzz(share=0.14, quick=25)
@given(kind=st.sampled_from(KINDS), name=st.sampled_from(FILES), changes=CHANGES)
def test_any_file_is_used_or_refused(
    bundles: Bundles, kind: str, name: str, changes: list[tuple[str, int, bytes]]
) -> None:
    assert_ends_in_child("bundles", lambda: use_changed(bundles[kind], name, changes))


@pytest.mark.parametrize("path", corpus("bundles"), ids=lambda path: path.name)
def test_bundles_that_broke_something_once(bundles: Bundles, path: Path) -> None:
    """Each file holds {"kind", "name", "changes"}, bytes in hexadecimal digits."""
    case = json.loads(path.read_text())
    changes = [(how, where, bytes.fromhex(more)) for how, where, more in case["changes"]]
    assert_ends_in_child("bundles", lambda: use_changed(bundles[case["kind"]], case["name"], changes))


def use_named(pristine: Path, name: str, old: str) -> None:
    """The bundle in which a file has another name, in the manifest and, where a folder can have it, on the disk."""
    with damaged(pristine) as root:
        data = json.loads((root / "manifest.json").read_text())
        text = json.dumps(data).replace(json.dumps(old), json.dumps(name))
        place = root / name if "\0" not in name else root
        try:
            if place.resolve().is_relative_to(root.resolve()) and not place.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                (root / old).rename(place)
        except OSError:  # a name that no file can have: the manifest alone has it
            pass
        sign(root, json.loads(text))
        assert_bundle_used_or_refused("bundles", root)


@fuzz(share=0.01, quick=8)
@given(kind=st.sampled_from(KINDS), name=NAMES, old=st.sampled_from(["model/model.onnx", "recipe.yaml"]))
def test_any_name_is_used_or_refused(bundles: Bundles, kind: str, name: str, old: str) -> None:
    assert_ends_in_child("bundles", lambda: use_named(bundles[kind], name, old))


# chat templates

PIECES = st.sampled_from(
    [
        *("{{ 1/0 }}", "{% for i in range(99999) %}", "{% endfor %}", "{{ 'x' * 10**9 }}", "{{ messages }}", "{% if"),
        *("{{ messages[0].content }}", "{{ ''.__class__ }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "}}"),
        *("{{ raise_exception(1) }}", "{{ strftime_now(messages) }}", "{{ messages | tojson(indent=99999) }}", "{{"),
        *("{% set x = 'ab' %}", "{% set x = x ~ x %}", "{{ x }}", "{% include 'x' %}", "{% import 'os' as o %}"),
        *(
            "{{ 9 ** 9 ** 9 }}",
            "{{ lipsum(n=10**6) }}",
            "{{ '%99999999999d' % 1 }}",
            "{{ bos_token.format.__globals__ }}",
        ),
        *("{% generation %}", "{% endgeneration %}", "{% break %}", "{{ [1] | batch(10**9) | list }}", "{#", "\0"),
    ]
)


@fuzz(share=0.05, quick=20)
@given(source=st.lists(PIECES | st.text(max_size=8), max_size=8).map("".join))
def test_any_template_is_rendered_or_refused(tmp_path_factory: pytest.TempPathFactory, source: str) -> None:
    folder = tmp_path_factory.getbasetemp() / "template"
    folder.mkdir(exist_ok=True)
    (folder / "chat_template.jinja").write_bytes(source.encode("utf-8", "surrogatepass"))
    assert_done_or_refused("templates", lambda: render_chat(folder, [{"role": "user", "content": "hi"}]))
