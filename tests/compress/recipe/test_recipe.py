"""What a recipe may say, and the line that answers everything that it may not."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from recipe_strategies import ANYTHING, TEXTS, as_text
from recipe_texts import GOOD, MODEL, load, only, problems, write
from ruamel.yaml import YAML

from compress.errors import RecipeError
from compress.formats.schemes import PRESETS
from compress.passes import PASSES
from compress.passes.weight_only import WeightPass
from compress.recipe.load import load_recipe, recipe_to_yaml
from compress.recipe.remedies import REMEDIES
from compress.recipe.vocabulary import recipe_schema
from compress.specs import find_changes

# --- good recipes -----------------------------------------------------------------------------------------------------


def test_a_good_recipe_is_typed_and_frozen() -> None:
    recipe = load(GOOD)
    assert [p.kind for p in recipe.passes] == ["rtn", "int8"]
    assert type(recipe.passes[1]) is {p.model_fields["kind"].default: p for p in PASSES}["int8"]
    assert recipe.passes[1].ignore == ("re:.*head",)  # type: ignore[attr-defined]
    assert recipe.validate_.gates[0].max_drop == 0.01
    assert recipe.root == Path.cwd()
    with pytest.raises(ValueError, match="frozen"):
        recipe.name = "other"


def test_a_recipe_may_be_a_dict_and_is_refused_as_a_file_is() -> None:
    given = {"version": 1, "name": "x", "model": {"source": "onnx:m.onnx", "task": "generic"}}
    recipe = load_recipe({**given, "passes": ({"kind": "int8"},)}, ["seed=3"])
    assert (recipe.seed, recipe.root, recipe.passes[0].kind) == (3, Path.cwd(), "int8")
    assert repr(recipe) == "<Recipe x: onnx:m.onnx; int8; onnxruntime-cpu>"
    write("include: [nowhere.yaml]\n", "base.yaml")
    wrong = {**given, "passes": [{"kind": "int9"}], "sed": 1}
    for more, said in ((wrong, ["passes.0.kind: unknown pass", "sed: unknown"]), ({"include": "base.yaml"}, ["base"])):
        with pytest.raises(RecipeError) as refused:
            load_recipe({**given, **more})
        assert all(any(text in problem for problem in refused.value.problems) for text in said)


def test_a_remedy_is_a_piece_of_a_recipe() -> None:
    for name, text in REMEDIES.items():
        piece = YAML(typ="safe").load(text.replace("{backend}", "onnxruntime-cpu").replace("{layers}", "a, b"))
        if name == "slower_layers":  # of any pass
            piece = {"passes": [{"kind": "int8", **piece}]}
        if name == "odd_widths":  # beside the pass's own goal
            piece["passes"][0]["ratio"] = 0.5
        load_recipe({"version": 1, "name": "x", "model": {"source": "onnx:m.onnx", "task": "generic"}, **piece})


def fits(value: Any) -> bool:
    """Whether every integer in it has 64 bits; YAML's readers know no others."""
    if isinstance(value, dict | list):
        return all(map(fits, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, int) or -(2**63) <= value < 2**64


@settings(max_examples=15)
@given(st.dictionaries(TEXTS, ANYTHING.filter(fits), max_size=2), st.integers(1, 99), st.floats(0, 1))
@example(args={"x": None, "y": [1, {"z": "${q} 2020-01-01 010 yes"}]}, size=32, mean=0.5)
def test_resolved_yaml_reads_back_equal_and_is_stable(args: Any, size: int, mean: float) -> None:
    write(GOOD, "base.yaml")
    more = {"model": {"args": args}, "preprocess": {"kind": "image", "resize": [size, size], "mean": [mean]}}
    recipe = load(as_text({"include": "base.yaml"} | more))
    text = recipe_to_yaml(recipe)
    again = load_recipe(write(text, "elsewhere/b.yaml"))
    assert repr(again.model_dump()) == repr(recipe.model_dump())  # repr: 1, 1.0 and True are equal
    assert again.root != recipe.root
    assert recipe_to_yaml(again) == text


@pytest.mark.parametrize("scheme", [None, *PRESETS])
def test_every_scheme_in_every_pass_that_takes_one_is_written_as_it_reads(scheme: str | None) -> None:
    """And means the same: no pass asks whether a key was given."""
    kinds = [record.model_fields["kind"].default for record in PASSES if issubclass(record, WeightPass)]
    assert len(kinds) > 5
    text = "".join(f"  - {{kind: {kind}{f', scheme: {scheme}' if scheme else ''}}}\n" for kind in kinds)
    recipe = load(f"version: 1\nname: x\n{MODEL}\npasses:\n{text}")
    written = recipe_to_yaml(recipe)
    again = load(written)
    assert again == recipe and recipe_to_yaml(again) == written
    numbers = WeightPass.model_fields
    assert [find_changes(one, numbers) for one in again.passes] == [find_changes(one, numbers) for one in recipe.passes]


def test_resolved_yaml_may_leave_nulls_out_because_null_is_their_default() -> None:
    for record in (recipe_schema(), *recipe_schema()["$defs"].values()):
        for name, value in record.get("properties", {}).items():
            if {"type": "null"} in value.get("anyOf", ()):
                assert value.get("default", "none") is None, f"{record['title']}.{name}"


def test_text_that_looks_like_something_else_stays_text() -> None:
    recipe = load(GOOD + "description: 2020-01-01\n")
    assert recipe.description == "2020-01-01"
    assert load(GOOD + "description: 'on'\n").description == "on"


def test_anchors_and_merge_keys() -> None:
    recipe = load(
        GOOD.replace("name: tiny", "name: tiny\ndata:\n  train: &t {source: 'npz:a', samples: 3}")
        .replace("validate:", "  - {kind: fold_batchnorm}\nvalidate:")
        .replace("samples: 3}", "samples: 3}\n  evaluation: {<<: *t, samples: 4}\n  calibration: *t")
    )
    assert recipe.data.evaluation is not None and recipe.data.evaluation.source == "npz:a"
    assert recipe.data.evaluation.samples == 4
    assert recipe.data.calibration == recipe.data.train


# --- refusals ---------------------------------------------------------------------------------------------------------

REFUSALS = [
    # (replaced, by, the whole message)
    ("bits: 8", "bitz: 8", "a.yaml:5:17: passes.0.bitz: unknown key; did you mean 'bits'?"),
    ("name: tiny", "nmae: tiny", "a.yaml:2:1: nmae: unknown key; did you mean 'name'?"),
    ("bits: 8", "qqq: 8", "unknown key; known: kind, scheme, bits, group_size, symmetric, targets, ignore, embeddings"),
    (
        "bits: 8",
        'bits: "8"',
        "passes.0.bits: expected a whole number of at least 2 and at most 8 or a mapping, found text '8'",
    ),
    (
        "bits: 8",
        "bits: 9",
        "a.yaml:5:23: passes.0.bits: expected a whole number of at least 2 and at most 8 or a mapping, found 9",
    ),
    (
        "bits: 8",
        "bits: true",
        "passes.0.bits: expected a whole number of at least 2 and at most 8 or a mapping, found true",
    ),
    (
        "bits: 8",
        "bits: ~",
        "passes.0.bits: expected a whole number of at least 2 and at most 8 or a mapping, found nothing (null)",
    ),
    ("bits: 8", "group_size: '64'", "expected a whole number of at least -1, found text '64'; leave out the quotes"),
    ("bits: 8", "group_size: 1.5", "expected a whole number of at least -1, found 1.5"),
    ("bits: 8", "symmetric: yes", "passes.0.symmetric: expected true or false, found text 'yes'"),
    ("bits: 8", "ignore: [1]", "passes.0.ignore.0: expected text, found 1; put it in quotes"),
    ("bits: 8", "bits: .inf", "passes.0.bits: .inf is not a finite number"),
    ("kind: rtn", "kind: rnt", "a.yaml:5:12: passes.0.kind: unknown pass 'rnt'; did you mean 'rtn'?"),
    ("kind: rtn, ", "", "a.yaml:5:5: passes.0: missing key 'kind'; one of "),
    ("{kind: rtn, bits: 8}", "rtn", "a.yaml:5:5: passes.0: expected a mapping, found text 'rtn'"),
    ('["re:.*head"]', "head", "a.yaml:7:13: passes.1.ignore: expected a list of text, found text 'head'; write [head]"),
    ("re:.*head", "re:*head", "a.yaml:7:14: passes.1.ignore.0: '*head' is not a regular expression: nothing to repeat"),
    ("version: 1", "version: 2", "a.yaml:1:10: version: expected 1, found 2"),
    ("name: tiny", "name: a/b", "a.yaml:2:7: name: expected text such as resnet-edge, found text 'a/b'"),
    (MODEL, "", "a.yaml:1:1: missing key 'model' (a mapping)"),
    (", task: image-classification", "", "a.yaml:3:8: model: missing key 'task' (one of 'image-classification', "),
    ("image-classification", "image-clasification", "did you mean 'image-classification'?"),
    ("python:model.py:build", "model.py", "a.yaml:3:17: model.source: expected text such as hf:<hub id>, "),
    (
        "metric: top1",
        "metric: topp1",
        "a.yaml:10:16: validate.gates.0.metric: unknown metric 'topp1'; did you mean 'top1'?",
    ),
    (
        "max_drop: 0.01",
        "max_drop: -1",
        "a.yaml:10:32: validate.gates.0.max_drop: gate on 'top1': max_drop is -1.0, below 0",
    ),
    (", max_drop: 0.01", "", "a.yaml:10:7: validate.gates.0: gate on 'top1' has no rule: give one of max_drop, "),
    (
        "max_drop: 0.01",
        "min_speedup: 2",
        "a.yaml:10:7: validate.gates.0: gate on 'top1': min_speedup fits only latency_p50",
    ),
    (
        "max_drop: 0.01",
        "max_drop: 1",
        "a.yaml:10:7: validate.gates.0: gate on 'top1': nothing can miss max_drop 1: top1 lies between 0 and 1; 1 % is",
    ),
    (
        "validate:",
        "preprocess: {kind: image, mean: [123.7]}\nvalidate:",
        "preprocess.mean: 123.7 is subtracted from pixels that scale 0.00392 left between 0 and 1; give 0.485, or",
    ),
    ("image-classification", "feature-extraction", "metric 'top1' does not fit task feature-extraction"),
    (
        "validate:",
        "validate:\n  metrics: [topp5]",
        "a.yaml:9:13: validate.metrics.0: unknown metric 'topp5'; did you mean 'top5'?",
    ),
    (
        "validate:",
        "validate:\n  confidence: 95",
        "a.yaml:9:15: validate.confidence: confidence is 95.0: give 0.5 to less than 1",
    ),
    ("validate:", "limits: {memory_gib: 0}\nvalidate:", "expected a number of more than 0, found 0"),
    (
        "validate:",
        "preprocess: {kind: image, resize: [1, a]}\nvalidate:",
        "preprocess.resize.1: expected a whole number, found",
    ),
    (
        "validate:",
        "preprocess: {kind: image, resize: [1]}\nvalidate:",
        "preprocess.resize: expected a whole number or a list of 2 whole numbers, found a list of 1",
    ),
    (
        "validate:",
        "preprocess: {kind: qq}\nvalidate:",
        "a.yaml:8:20: preprocess.kind: unknown kind 'qq'; known: image, ",
    ),
    (
        "validate:",
        "data: {train: {source: 'npz:a', columns: {text: 1.5}}}\nvalidate:",
        "columns.text: expected text or a whole number",
    ),
    ("name: tiny", "name: tiny\nname: tiny", "a.yaml:3:1: name: key given twice; first at a.yaml:2:1"),
    ("bits: 8", "1: 8", "a.yaml:5:17: passes.0.1: key 1 is not text; put it in quotes"),
    ("bits: 8", "bits: !py 8", "a.yaml:5:23: passes.0.bits: tag '!py' is not allowed here"),
    ("bits: 8", "bits: !!int x", "a.yaml:5:23: passes.0.bits: 'x' is not of the type that its tag says"),
    ("bits: 8", "<<: [3]", "passes.0.<<: expected a mapping to merge"),
    ("name: tiny", "name: &n [*n]", "a.yaml:2:7: name.0: an alias inside the value that it stands for"),
]


@pytest.mark.parametrize(("old", "new", "message"), REFUSALS, ids=[new[:40] or old[:40] for old, new, _ in REFUSALS])
def test_refusals(old: str, new: str, message: str) -> None:
    assert old in GOOD
    found = problems(GOOD.replace(old, new, 1))
    assert any(message in line for line in found), found
    assert not any(word in line for line in found for word in ("pydantic", "Input should", "tuple[", "_type"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a.yaml:1:1: the file is empty; a recipe starts with 'version: 1'"),
        ("# only a comment\n", "a.yaml:1:1: the file is empty"),
        ("- 1\n", "a.yaml:1:1: expected a mapping at the top"),
        ("a: [1,\nb: 2", "a.yaml:2:"),
        ("a: b: c\n", "a.yaml:1:5: not YAML: mapping values are not allowed here"),
        ("a: 1\n\tb: 2\n", "a.yaml:2:1: not YAML: "),
        ("a: x\x01\n", "a.yaml:1:5: not YAML: special characters are not allowed"),
        ("a: *x\n", "a.yaml:1:4: not YAML: found undefined alias 'x'"),
        ("a: 1\n---\nb: 2\n", "a.yaml:2:1: not YAML: expected a single document in the stream"),
        ("a: " + "[" * 3000, "a.yaml:1:"),
    ],
)
def test_what_is_no_mapping_is_refused_with_its_place(text: str, message: str) -> None:
    assert only(text).startswith(message)


def test_aliases_that_expand_without_end_are_refused() -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    assert only("\n".join(lines)) == (
        "a.yaml:1:34: a4.3.3.8.8.8: more than 50000 values, with those that aliases and variables stand for: "
        "too much for a recipe"
    )


def grown(first: str, more: str) -> str:
    """Forty variables, each of which holds the one before it several times."""
    lines = [f"  v{n}: {more.replace('x', f'${{v{n - 1}}}')}" for n in range(1, 41)]
    return GOOD + "\n".join(["vars:", f"  v0: {first}", *lines]) + "\ndescription: '${v40}'\n"


@pytest.mark.parametrize(
    ("first", "more", "rule"),
    [
        ("aaaaaaaaaa", "'xx'", r"vars\.v\d\d: more than 4194304 characters"),
        ("[1, 2]", "['x', 'x']", r"vars\.v1\d\.[01]: more than 50000 values"),
        ("a", "[['x']]", r"vars\.v\d\d\.0\.0: nested more than 64 deep"),
        ("a", "{k: 'x', l: 'x'}", r"vars\.v1\d\.[kl]: more than 50000 values"),
    ],
)
def test_variables_that_grow_without_end_are_refused(first: str, more: str, rule: str) -> None:
    assert re.fullmatch(rf"a\.yaml:\d+:\d+: {rule}.*: too much for a recipe", only(grown(first, more)))


def test_a_long_chain_of_variables_is_refused() -> None:
    chain = "".join(f"  v{n}: ['${{v{n + 1}}}']\n" for n in range(400))
    assert "nested more than 64 deep" in only(f"{GOOD}vars:\n{chain}  v400: 1\n")


def test_includes_that_double_are_refused() -> None:
    for n in range(1, 27):
        write(f"include: [i{n + 1}.yaml, i{n + 1}.yaml]\n", f"i{n}.yaml")
    write("seed: 1\n", "i27.yaml")
    assert "more than 100 files to read" in only(f"include: i1.yaml\n{GOOD}")


def test_devices_pipes_folders_and_large_files_are_no_recipes() -> None:
    os.mkfifo("pipe.yaml")
    Path("folder.yaml").mkdir()
    write("#" * 2**20 + "\n", "large.yaml")
    for name in ("/dev/zero", "pipe.yaml", "folder.yaml"):
        with pytest.raises(RecipeError, match="cannot be read: a folder, pipe or device, not a file"):
            load_recipe(name)
        assert f"{name}: cannot be read: a folder" in only(f"include: {name}\n{GOOD}")
    with pytest.raises(RecipeError, match=r"large\.yaml: more than 1048576 bytes, which is too much for a recipe"):
        load_recipe("large.yaml")


def test_of_very_many_problems_the_first_are_said() -> None:
    found = problems(GOOD + "".join(f"key{n}: 1\n" for n in range(9000)))
    assert len(found) == 101
    assert found[0].startswith("a.yaml:11:1: key0: unknown key")
    assert found[-1] == "and perhaps more: reading ended at 100 problems"


def test_a_problem_is_one_printable_line_of_bounded_length() -> None:
    (found,) = problems(f'{GOOD}? "\\e[31m\\n{"k" * 100_000}"\n: 1\n')
    assert len(found) < 2100 and found.isprintable() and "\\x1b[31m\\n" in found


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        ("0x" + "f" * 5000, "a number of 5002 characters"),
        (str(2**64), f"{2**64} is not a number of 64 bits"),
        ("!!int ''", "'' is not of the type that its tag says"),
        ("!!bool 1", "'1' is not of the type that its tag says"),
        ('"\\ud83d"', "holds half of a surrogate pair, which is no letter; write \\U and eight digits"),
    ],
)
def test_scalars_that_no_recipe_can_have(value: str, rule: str) -> None:
    assert only(f"{GOOD}seed: {value}\n") == f"a.yaml:11:7: seed: {rule}"


def test_overrides_are_bounded_too() -> None:
    assert "a recipe is not nested more than 64 deep" in only(GOOD, "model.args" + ".a" * 10_000 + "=1")
    assert "nested more than 64 deep" in only(GOOD, "model.args=" + "[" * 10_000)
    assert "more than 4194304 characters" in only(GOOD, "description=" + "a" * 5_000_000)


def test_files_that_cannot_be_read() -> None:
    write(GOOD, "resnet.yaml")
    with pytest.raises(RecipeError, match=r"^resent\.yaml: no such file; did you mean 'resnet\.yaml'\?$"):
        load_recipe(Path("resent.yaml"))
    Path("latin.yaml").write_bytes(b"name: caf\xe9\n")
    with pytest.raises(RecipeError, match=r"^latin\.yaml: not UTF-8 text \(byte 9\)$"):
        load_recipe("latin.yaml")
    Path("folder.yaml").mkdir()
    with pytest.raises(RecipeError, match=r"^folder\.yaml: cannot be read: "):
        load_recipe("folder.yaml")


def test_all_problems_are_said_at_once_in_the_order_of_the_lines() -> None:
    text = (
        GOOD.replace("bits: 8", "bitz: '${nope}'").replace("top1", "top2").replace("name: tiny", "name: tiny\nname: x")
    )
    text = text.replace("max_drop: 0.01", "max_drop: '0'")
    found = problems(text)
    assert [line.split(": ")[1] for line in found] == [
        "name",
        "passes.0.bitz",
        "validate.gates.0.metric",
        "validate.gates.0.max_drop",
    ]


def misspell(key: str, how: str, at: int) -> str:
    at = 1 + at % (len(key) - 2)  # the first and the last letter stay, by which a reader knows a word
    typos = {
        "lost": key[:at] + key[at + 1 :],
        "doubled": key[:at] + key[at] + key[at:],
        "swapped": key[: at - 1] + key[at] + key[at - 1] + key[at + 1 :],
        "more": key + "s",
        "cut": key[:-1],
        "joined": key.replace("_", ""),
        "upper": key.upper(),
    }
    return typos[how]


TYPOS = st.sampled_from(["lost", "doubled", "swapped", "more", "cut", "joined", "upper"])


@settings(max_examples=6)
@given(TYPOS, st.integers(0, 20))
@example(how="swapped", at=1)
def test_every_misspelt_key_of_every_pass_is_recognised(how: str, at: int) -> None:
    for record in PASSES:
        fields = record.model_fields
        wrong = {misspell(key, how, at): key for key in fields if key != "kind" and len(key) > 3}
        wrong = {word: key for word, key in wrong.items() if word not in fields}
        lines = [f"    {word}: 1" for word in wrong]
        kind = fields["kind"].default
        if not wrong:
            continue
        found = problems("\n".join(["version: 1", "name: x", MODEL, "passes:", f"  - kind: {kind}", *lines, ""]))
        assert list(found) == [
            f"a.yaml:{line}:5: passes.0.{word}: unknown key; did you mean '{key}'?"
            for line, (word, key) in enumerate(wrong.items(), start=6)
        ]


@pytest.mark.parametrize("kind", [record.model_fields["kind"].default for record in PASSES])
def test_every_misspelt_pass_is_recognised(kind: str) -> None:
    text = f"version: 1\nname: x\n{MODEL}\npasses:\n  - kind: {kind}x\n"
    assert only(text) == f"a.yaml:5:11: passes.0.kind: unknown pass '{kind}x'; did you mean '{kind}'?"
