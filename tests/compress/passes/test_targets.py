"""Targets are data: every format has a fact, and every fact that a user must know reaches the plan."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import graphs
import pytest
from graphs import facts_of

from compress.facts import BlockFacts, InputGroup, PassPlan, Structure
from compress.formats.schemes import BLOCK_BITS
from compress.formats.targets import TARGETS, Format, Target, TargetName
from compress.passes import Autocast, Fp8, Int8, Pass, Rtn
from compress.passes.kv_cache import KvCache

ONE_BLOCK = Structure((BlockFacts("", (InputGroup(("projection",), "value", "value", 1, 8),)),))
SMALL = ("FP8_BLOCK", "W4AFP8", "NVFP4", "NVFP4A16", "MXFP4", "MXFP4A16", "MXFP8", "MXFP8A16")
PASS_FOR: dict[str, Pass] = {
    "int8-static": Int8(),
    "int8-dynamic": Int8(mode="dynamic"),
    "float16": Autocast(),
    "bfloat16": Autocast(dtype="bfloat16"),
    "w8a8": Rtn(scheme="W8A8"),
    "w8a8-static": Rtn(scheme="W8A8_STATIC"),
    "w4a8": Rtn(scheme="W4A8", group_size=32),
    "fp8": Rtn(scheme="FP8"),
    "fp8-dynamic": Rtn(scheme="FP8_DYNAMIC"),
    "fp8-static": Fp8(),
    **{name.lower().replace("_", "-"): Rtn(scheme=name) for name in SMALL},
    "kv-int8": KvCache(scheme="int8"),
    "kv-fp8": KvCache(),
    **{f"w{bits}": Rtn(bits=bits) for bits in range(2, 9)},
    **{f"w{bits}-asym": Rtn(bits=bits, symmetric=False) for bits in range(2, 9)},
    **{name.lower().replace("_", "-"): Rtn(scheme=name) for name in BLOCK_BITS},
}
EVERY = [(name, one) for name in TARGETS for one in get_args(Format)]


def plan(target: Target, one: str) -> PassPlan:
    facts = replace(facts_of(graphs.transformer()), source="torch", task="text-generation", structure=ONE_BLOCK)
    wide = tuple(replace(layer, shape=tuple(8 * size for size in layer.shape)) for layer in facts.layers)
    facts = replace(facts, layers=wide)  # which blocks of 128 and 256 divide
    return PASS_FOR[one].check(facts, target)


def test_keys_and_values_are_a_decoder_s() -> None:
    facts = replace(facts_of(graphs.transformer()), source="torch", structure=ONE_BLOCK)
    found = KvCache().check(replace(facts, task="text-classification"), TARGETS["vllm"])
    assert any("text-classification keeps no keys and values" in problem for problem in found.problems)


def test_the_names_are_the_recipe_s() -> None:
    assert set(TARGETS) == set(get_args(TargetName))
    assert all(target.name == name for name, target in TARGETS.items())
    assert set(PASS_FOR) == set(get_args(Format))


@pytest.mark.parametrize("name", TARGETS)
def test_every_format_has_a_fact(name: str) -> None:
    assert set(TARGETS[name].formats) == set(get_args(Format))
    assert all(fact.text for fact in TARGETS[name].formats.values())


@pytest.mark.parametrize(("name", "one"), EVERY)
def test_every_fact_reaches_the_plan(name: str, one: str) -> None:
    target = TARGETS[name]
    fact, found = target.formats[one], plan(target, one)
    in_notes = [note for note in found.notes if fact.text in note.text]
    in_problems = [problem for problem in found.problems if fact.text in problem]
    if fact.verdict == "refused":
        assert len(in_problems) == 1
        assert not in_notes
        assert in_problems[0].startswith(f"{PASS_FOR[one].kind}: target {name} ")
        assert PASS_FOR[one].explain_refusal(target) == in_problems[0]
    else:
        assert not found.problems
        assert PASS_FOR[one].explain_refusal(target) is None
        assert [note.level for note in in_notes] == ["slow" if fact.verdict == "slow" else "info"]
        assert in_notes[0].text.startswith(f"{name}: {one}: ")


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_refused_or_slow_says_what_to_do_or_why(name: str) -> None:
    for fact in TARGETS[name].formats.values():
        if fact.verdict == "refused":
            assert "use " in fact.text or "reads checkpoints" in fact.text
        if fact.verdict == "slow":
            assert "slow" in fact.text or "use " in fact.text or "falls back" in fact.text


def test_tensorrt_gets_symmetric_integers_and_cpus_get_zero_points() -> None:
    variants = {name: target.variant for name, target in TARGETS.items()}
    assert {variants["onnxruntime-cpu"], variants["openvino"]} == {"u8s8"}
    assert {variants["tensorrt"], variants["tensorrt-rtx"]} == {"s8s8"}
