"""Chains that may reach a goal: formats that fit the model, structures whose sizes follow from what the goal asks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from compress.facts import BlockFacts, InputGroup, LayerFacts, ModelFacts, Prunable, Removable
from compress.facts import Structure as Blocks
from compress.search.chains import (
    CACHED,
    DEPTHS,
    Ground,
    Needs,
    PrunedStructure,
    Yields,
    count_cut,
    count_left,
    design,
    find_least_bytes,
    find_smallest,
    ground_of,
    list_formats,
    list_removed,
    make_training,
    take_blocks,
    train_rounded,
)

WIDTH, N_BLOCKS = 64, 8


def ground(sets: tuple[str, ...] = ("calibration", "train", "evaluation")) -> Ground:
    """A net of eight residual blocks, each with 64 channels inside that can go."""
    layers, prunable, blocks = [], [], []
    for n in range(N_BLOCKS):
        first, second = f"blocks.{n}.up", f"blocks.{n}.down"
        for name in (first, second):
            layers.append(LayerFacts(name, "Conv2d", "Conv", f"{name}.weight", (WIDTH, WIDTH, 3, 3), 36_864 * 64))
        prunable.append(Prunable(first, "channels", WIDTH, {first: 1}, {second: 1}))
        blocks.append(Removable(f"blocks.{n}", (first, second), listed=True))
    facts = ModelFacts(
        "torch", "Net", "generic", (), (), tuple(layers), prunable=tuple(prunable), removable=tuple(blocks)
    )
    return ground_of(facts, "onnxruntime-cpu", sets)


def test_formats_are_those_that_make_this_model_smaller_and_need_no_missing_data() -> None:
    assert list(list_formats(ground())) == ["int8", "int8-equalized"]  # no matrix products: nothing in few bits
    assert list_formats(ground(("evaluation",))) == {}


def test_a_decoder_may_keep_its_keys_and_values_in_the_eight_bits_that_its_target_knows() -> None:
    layers = tuple(LayerFacts(name, "Linear", "MatMul", f"{name}.weight", (64, 64), 4096) for name in ("a.v", "o"))
    blocks = Blocks((BlockFacts("", (InputGroup(("o",), "a.v", "value"),)),))
    facts = ModelFacts("torch", "Net", "text-generation", (), (), layers, structure=blocks)
    for target, scheme in (("onnxruntime-cpu", "int8"), ("vllm", "fp8")):
        formats = list_formats(ground_of(facts, target, ("calibration", "evaluation")))
        assert formats["w4-kv8"] == [*formats["w4"], {"kind": "kv_cache", "scheme": scheme}]
        assert train_rounded(formats["w4-kv8"], 60.0)[1:] == [{"kind": "kv_cache", "scheme": scheme}]
    assert not any(name.endswith(CACHED) for name in list_formats(ground()))


def test_wide_groups_are_looked_at_where_they_make_the_model_smaller() -> None:
    def names(width: int) -> set[str]:
        layers = (LayerFacts("a", "Linear", "MatMul", "a.weight", (width, width), width**2),)
        return set(list_formats(ground_of(ModelFacts("torch", "Net", "generic", (), (), layers), "vllm", ())))

    assert {"w8", "w4", "w4-g128"} <= names(256)
    assert "w8-g128" not in names(256)
    assert not any("g128" in name for name in names(32))


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(("size", "speed"), [(1.5, 2.0), (3.0, 1.2), (2.0, 0.5), (0.5, 3.0), (0.0, 3.0), (3.0, 0.0)])
def test_a_structure_is_foreseen_to_meet_all_needs(depth: float, size: float, speed: float) -> None:
    given = ground()
    found = design(given, Needs(size, speed), depth, Yields(1, 1, 1))
    assert found is not None
    after = given.facts_after(found.passes())
    assert after.n_bytes * size <= given.facts.n_bytes * 1.001
    assert after.macs * speed <= given.facts.macs * 1.001  # as the plan foresees measured times


def test_blocks_go_where_channels_are_at_their_end() -> None:
    whole, yields = PrunedStructure(None, 0.8, 1.5), Yields()
    fewer = take_blocks(ground(), whole, Needs(1.0, 1.3), yields)
    assert fewer is not None and fewer.keep is not None and (fewer.max_params, fewer.speedup) == (0.8, 1.5)
    assert count_left(ground().facts, fewer.keep)[0] <= 1 / 1.3 < count_left(ground().facts, fewer.keep + 1)[0]
    assert take_blocks(ground(), PrunedStructure(1, 0.8, 1.5), Needs(1.0, 1.3), yields) is None
    assert PrunedStructure(6, 0.8, 1.2).asks_less(PrunedStructure(6, 0.8, 1.5))
    assert not PrunedStructure(6, 0.7, 1.2).asks_less(PrunedStructure(6, 0.8, 1.5))
    assert not PrunedStructure(7, 0.8, 1.2).asks_less(PrunedStructure(6, 0.8, 1.5))


def test_blocks_that_went_once_go_first_again() -> None:
    rows = [
        {"layer": f"blocks.{n}", "type": "block", "action": "pruned", "output_error": 1.0 - n / 10} for n in (5, 6, 7)
    ]
    rows += [
        {"layer": "blocks.0", "type": "block", "action": "kept"},
        {"layer": "up", "type": "Conv2d", "action": "pruned"},
    ]
    assert (gone := list_removed(rows)) == ("blocks.7", "blocks.6", "blocks.5")
    facts = ground().facts
    wide = tuple(
        replace(layer, shape=(4 * WIDTH, WIDTH, 3, 3)) if ".7." in layer.name else layer for layer in facts.layers
    )
    facts = replace(facts, layers=wide)
    assert count_left(facts, 7, gone)[1] == pytest.approx(7 / 11)
    assert count_left(facts, 5, gone)[1] == pytest.approx(5 / 11) == count_left(facts, 5, gone[:1])[1]


def test_structures_mix_blocks_and_channels_and_where_no_block_can_go_it_is_channels() -> None:
    found = [design(ground(), Needs(1.5, 3.0), depth, Yields()) for depth in DEPTHS]
    kept = [each.keep if each is not None and each.keep is not None else N_BLOCKS for each in found]
    assert kept == sorted(set(kept)) and kept[-1] == N_BLOCKS
    assert found[0] is not None and found[0].speedup is None  # blocks alone
    facts = ground().facts
    whole = Ground(ModelFacts(**{**vars(facts), "removable": ()}), ground().target, True, True)
    assert all(each is not None and each.keep is None for each in [design(whole, Needs(1.5, 3), 1.0, Yields())])


def test_less_gain_from_channels_cuts_more_of_them() -> None:
    slow, fast = (design(ground(), Needs(1.0, 2.0), 0.0, Yields(time_by_channels=gain)) for gain in (0.5, 1.0))
    assert slow is not None and fast is not None and slow.speedup is not None and fast.speedup is not None
    assert slow.speedup == pytest.approx(fast.speedup**2, rel=0.01)


def test_needs_that_are_met_ask_for_nothing() -> None:
    assert not Needs(1.0, 0.8).any
    assert [design(ground(), Needs(0.9, 1.0), depth, Yields()) for depth in DEPTHS] == [None] * len(DEPTHS)


def test_the_smallest_is_one_block_with_the_fewest_channels() -> None:
    cut = find_smallest(ground())
    assert [given["kind"] for given in cut] == ["prune_layers", "prune_channels"]
    least, chain = find_least_bytes(ground(), list_formats(ground()))
    assert least == pytest.approx(ground().facts.n_bytes / N_BLOCKS / 8 / 4, rel=0.02)  # a block, 8 of 64, 8 of 32 bits
    assert [given["kind"] for given in chain][-1] == "int8"


def test_a_name_says_the_structure_and_training_leaves_the_rest_to_be_found() -> None:
    assert PrunedStructure(18, 0.55, 1.25).name == "blocks18-params55-faster125"
    assert make_training("generic", 60.0)["learning_rate"] == "auto"


def test_classes_are_learned_by_the_logits_as_numbers() -> None:
    assert make_training("image-classification", 60.0)["output"] == {"loss": "mse", "pooling": "none"}
    assert "output" not in make_training("text-generation", 60.0)


def test_what_was_cut_is_read_from_a_report() -> None:
    facts, gone = ground().facts, "blocks.0"
    rows = [
        {"layer": gone, "type": "block", "action": "pruned"},
        {"layer": "blocks.1", "type": "block", "action": "kept"},
        *({"layer": f"blocks.{n}.up", "type": "Conv2d", "action": "int8", "width": 32.0} for n in range(N_BLOCKS - 1)),
    ]
    assert count_cut(facts, rows) == pytest.approx(0.5)  # of what the block that went left
    assert count_cut(facts, rows[:2]) == 1
