"""The stream: what it hands out block by block is what the whole model computes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from streaming import W4, bert, context, gpt2, llama, nearest, streamed, texts, together
from torch import Tensor, nn

from compress.blocks.block import BlockWork
from compress.blocks.materialise import copy_without_weights, memory_store
from compress.blocks.stream import Stream
from compress.blocks.streamed import StreamedModel
from compress.errors import PassError
from compress.facts import BlockFacts, InputGroup, LayerDecision, Note, Structure
from compress.models.open_streamed import open_streamed_model
from compress.models.source import locate
from compress.specs import ModelSpec
from compress.structure.find import find_structure

MODELS: list[Callable[[], nn.Module]] = [llama, bert, gpt2]


pytestmark = pytest.mark.usefixtures("one_thread")


def plain_output(net: nn.Module, batches: list[dict[str, np.ndarray]]) -> Tensor:
    with torch.no_grad():
        out = net(**together(batches))
    return out[0]


def rows_read(net: nn.Module, layer: str, batches: list[dict[str, np.ndarray]]) -> Tensor:
    """What a layer of the plain model reads, the rows of padding left out."""
    found: list[Tensor] = []
    handle = net.get_submodule(layer).register_forward_pre_hook(lambda module, args: found.append(args[0]))
    plain_output(net, batches)
    handle.remove()
    return found[0].reshape(-1, found[0].shape[-1])[together(batches)["attention_mask"].bool().reshape(-1)]


def round_all(block: BlockWork) -> Callable[[InputGroup], None]:
    def act(input_group: InputGroup) -> None:
        for layer in input_group.layers:
            block.put(layer, nearest(block.matrix(layer)), W4)

    return act


def nothing(*_: Any) -> None:
    pass


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("lockstep", [False, True])
def test_a_stream_that_changes_nothing_is_the_forward_pass(make: Callable[[], nn.Module], lockstep: bool) -> None:
    """Bit for bit, block after block."""
    net, batches = make(), texts()
    model = streamed(net)
    blocks = [net.get_submodule(block.name) for block in model.structure.blocks]
    wanted: list[Tensor] = []
    handles = [
        block.register_forward_hook(lambda m, args, out: wanted.append(out[0] if type(out) is tuple else out))
        for block in blocks
    ]
    whole = plain_output(net, batches)
    for handle in handles:
        handle.remove()
    stream = Stream(model, context(batches), float_too=True)
    last = None
    for block in stream:
        assert len(block.calls) == 1 and block.calls[0].n_rows == 5 * 12 - 4
        if lockstep:
            block.lockstep(nothing, nothing)
        if block.name != "after":
            last = next(block.outputs())
            assert torch.equal(last, wanted[block.index]) and torch.equal(block.float_outputs(0), wanted[block.index])
        else:
            assert torch.equal(block.forward(0), whole) and torch.equal(block.float_outputs(0), whole)
    assert torch.equal(wanted[-1], last) if last is not None else False
    after = stream.result().model
    assert after.quantized_layers() == () and after.store.names() == model.store.names()
    assert all(torch.equal(after.store.read(name), model.store.read(name)) for name in model.store.names())


@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize("rows", [4096, 24, 12])
def test_visits_see_what_each_layer_reads(lockstep: bool, rows: int) -> None:
    """Whatever the size of the micro-batches; padding is left out."""
    net, batches = llama(), texts()
    model, seen = streamed(net), dict[str, list[Tensor]]()
    stream = Stream(model, context(batches), rows=rows)
    for block in stream:
        assert len(block.calls) == {4096: 1, 24: 3, 12: 5}[rows]

        def visit(input_group: InputGroup, x: Tensor) -> None:
            seen.setdefault(input_group.layers[0], []).append(x)

        if lockstep:
            block.lockstep(visit, nothing)
        else:
            block.collect(visit)
    assert list(seen) == [input_group.layers[0] for input_group in model.structure.input_groups]
    for layer, found in seen.items():
        assert torch.allclose(torch.cat(found), rows_read(net, layer, batches), atol=1e-6), layer


@pytest.mark.parametrize("make", MODELS)
def test_lockstep_goes_on_through_what_was_put(make: Callable[[], nn.Module]) -> None:
    """Each layer reads what the rounded layers before it give: as if it were measured on the half rounded model."""
    net, batches = make(), texts(padded=False)
    seen: dict[str, Tensor] = {}
    stream = Stream(streamed(net), context(batches))
    for block in stream:
        rounding = round_all(block)

        def act(
            input_group: InputGroup, rounding: Callable[[InputGroup], None] = rounding, block: BlockWork = block
        ) -> None:
            plain = rows_read(net, input_group.layers[0], batches)
            assert torch.allclose(seen[input_group.layers[0]], plain, atol=1e-5)
            rounding(input_group)
            for layer in input_group.layers:  # the plain model is rounded along
                weight = block.layers[layer].weight.detach().clone()  # type: ignore[union-attr, operator]
                net.get_submodule(layer).weight = nn.Parameter(weight)

        block.lockstep(lambda input_group, x: seen.update({input_group.layers[0]: x}), act)
        fresh = [block.forward(i) for i in range(len(block.calls))]
        if block.name != "after":
            assert all(torch.equal(a, b) for a, b in zip(fresh, block.outputs(), strict=True))
    result = stream.result()
    with torch.no_grad():
        out = result.model.materialise()(**together(batches))
    assert torch.allclose(out, plain_output(net, batches), atol=1e-5)
    assert set(result.model.quantized_layers()) == {
        layer for input_group in result.model.structure.input_groups for layer in input_group.layers
    }


def test_collect_then_round_gives_the_next_block_what_is_left() -> None:
    net, batches = llama(), texts()
    model = streamed(net)
    stream = Stream(model, context(batches), input_groups_outside=False)
    for block in stream:
        assert block.name != "after"
        block.collect(nothing)
        for input_group in block.input_groups:
            round_all(block)(input_group)
    after = stream.result().model
    second = Stream(after, context(batches))
    for block in second:
        if block.name == "after":
            with torch.no_grad():
                assert torch.equal(block.forward(0), after.materialise()(**together(batches)))
        assert set(block.quantized) == (set() if block.name == "after" else set(block.layers))
        assert all(weight.bits == 4 for weight in block.quantized.values())


def test_collect_of_one_reading_stops_there() -> None:
    stream = Stream(streamed(llama()), context(texts()))
    block = next(iter(stream))
    ran: list[str] = []
    for name, layer in block.layers.items():
        layer.register_forward_hook(lambda m, args, out, name=name: ran.append(name.rpartition(".")[2]))
    seen: list[InputGroup] = []
    block.collect(lambda input_group, x: seen.append(input_group), block.input_groups[1::-1])
    assert ran == ["q_proj", "k_proj", "v_proj"] and seen == list(block.input_groups[:2])


@pytest.mark.parametrize("late", [True, False])
def test_what_changes_after_a_lockstep_costs_a_forward_and_is_seen(late: bool) -> None:
    """Also when the lockstep itself changes a layer that has run: a norm before the input group."""
    stream = Stream(streamed(llama()), context(texts()))
    norm = "model.layers.0.input_layernorm.weight"
    blocks = iter(stream)
    block = next(blocks)

    def act(input_group: InputGroup) -> None:
        if not late and input_group is block.input_groups[2]:
            block.replace(norm, torch.full((32,), 2.0))

    block.lockstep(nothing, act)
    if late:
        block.replace(norm, torch.full((32,), 2.0))
    left = block.forward(0)
    assert torch.equal(next(blocks).calls[0].args[0], left)


def test_the_float_path_does_not_see_what_was_rounded() -> None:
    """In this pass or an earlier one; `float_matrix` gives what was rounded."""
    net, batches = llama(), texts()
    model = streamed(net)
    for again in range(2):
        stream = Stream(model, context(batches), float_too=True)
        for block in stream:
            wanted = plain_block_outputs(net, batches)
            if block.name == "after":
                assert torch.equal(block.float_outputs(0), plain_output(net, batches))
                continue
            assert torch.equal(block.float_outputs(0), wanted[block.index])
            assert torch.equal(block.forward(0), wanted[0]) == (block.index == 0 and not again)
            for layer in block.layers:
                assert torch.equal(block.float_matrix(layer), net.get_submodule(layer).weight)  # type: ignore[arg-type]
            block.lockstep(nothing, round_all(block))
        model = stream.result().model


def plain_block_outputs(net: nn.Module, batches: list[dict[str, np.ndarray]]) -> list[Tensor]:
    found: list[Tensor] = []
    handles = [
        block.register_forward_hook(lambda m, args, out: found.append(out))
        for block in net.get_submodule("model.layers")  # type: ignore[union-attr]
    ]
    plain_output(net, batches)
    for handle in handles:
        handle.remove()
    return found


def test_a_model_without_a_chain_is_one_block() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval().requires_grad_(False)
    structure = Structure((BlockFacts("", (InputGroup(("0",)), InputGroup(("2",)))),))
    batches = [{"x": np.random.default_rng(k).normal(size=(3, 8)).astype(np.float32)} for k in range(4)]
    model = StreamedModel(lambda: copy_without_weights(net), memory_store(net), structure, {"x": "input"})
    stream = Stream(model, context(batches), float_too=True)
    x = torch.from_numpy(np.concatenate([one["x"] for one in batches]))
    for block in stream:
        assert block.name == "" and set(block.layers) == {"0", "2"} and torch.equal(block.forward(0), net(x))
        block.lockstep(nothing, round_all_w8(block))
        assert torch.equal(block.float_outputs(0), net(x)) and not torch.equal(block.forward(0), net(x))
    after = stream.result().model
    assert after.quantized_layers() == ("0", "2")
    assert torch.equal(after.store.read("0.bias"), net[0].bias)


def round_all_w8(block: BlockWork) -> Callable[[InputGroup], None]:
    from compress.formats.schemes import PRESETS

    def act(input_group: InputGroup) -> None:
        for layer in input_group.layers:
            block.put(layer, nearest(block.matrix(layer), PRESETS["W8A16"]), PRESETS["W8A16"], activation_scale=0.5)

    return act


class Routed(nn.Module):
    """A block of which each token takes one of three experts; the third none."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 2)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x).argmax(-1)
        out = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            if bool((chosen == k).any()):
                out[chosen == k] = expert(x[chosen == k])
        return x + out


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Routed() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_experts_without_tokens_take_part_in_lockstep() -> None:
    torch.manual_seed(1)
    net = Mixture().eval().requires_grad_(False)
    names = [f"layers.{k}" for k in range(2)]
    structure = Structure(
        tuple(
            BlockFacts(
                name, (InputGroup((f"{name}.router",)), *(InputGroup((f"{name}.experts.{e}",)) for e in range(3)))
            )
            for name in names
        )
    )
    batches = [{"x": np.random.default_rng(k).normal(size=(1, 2, 8)).astype(np.float32)} for k in range(6)]
    model = StreamedModel(lambda: copy_without_weights(net), memory_store(net), structure, {"x": "x"})
    stream = Stream(model, context(batches), float_too=True, rows=1)
    for block in stream:
        rows: dict[str, int] = {}
        acted: list[str] = []

        def visit(input_group: InputGroup, x: Tensor, rows: dict[str, int] = rows) -> None:
            rows[input_group.layers[0]] = rows.get(input_group.layers[0], 0) + len(x)

        block.lockstep(visit, lambda input_group, acted=acted: acted.append(input_group.layers[0]))  # type: ignore[misc]
        layers = [input_group.layers[0] for input_group in block.input_groups]
        assert acted == layers and rows[layers[0]] == 12 and layers[3] not in rows
        assert rows[layers[1]] + rows[layers[2]] == 12
        assert all(torch.equal(out, block.float_outputs(i)) for i, out in enumerate(block.outputs()))


class Choosing(nn.Module):
    """A block that chooses channels, or reads those that the block before chose, and hands on them and nothing else."""

    def __init__(self, chooses: bool) -> None:
        super().__init__()
        self.scores = nn.Linear(8, 8) if chooses else None
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, chosen: Tensor | None) -> tuple[Tensor, Tensor, None]:
        if self.scores is not None:
            chosen = self.scores(x).topk(4).indices
        assert chosen is not None
        kept = torch.zeros_like(x).scatter(-1, chosen, 1.0)
        return x + self.outer(torch.relu(self.inner(x * kept))), chosen, None


class Chosen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Choosing(k in (0, 3)) for k in range(5))

    def forward(self, x: Tensor) -> Tensor:
        chosen = None
        for layer in self.layers:
            x, chosen, more = layer(x, chosen=chosen)
        return x if more is None else more


@pytest.mark.parametrize("offload", [False, True])
def test_what_a_block_hands_on_beside_its_hidden_state_reaches_the_next(offload: bool) -> None:
    """As the rounded blocks give it, and on the float path as the float ones do."""
    torch.manual_seed(0)
    net = Chosen().eval().requires_grad_(False)
    structure = find_structure(net, {"x": torch.zeros(2, 5, 8)})
    assert [block.name for block in structure.blocks] == [f"layers.{k}" for k in range(5)]
    batches = [{"x": np.random.default_rng(k).normal(size=(1, 5, 8)).astype(np.float32)} for k in range(3)]
    model = StreamedModel(lambda: copy_without_weights(net), memory_store(net), structure, {"x": "x"})
    stream = Stream(model, context(batches), float_too=True, rows=1, offload=offload)
    for block in stream:
        block.lockstep(nothing, round_all_w8(block) if block.index % 2 else nothing)
        left, floats = [block.forward(i) for i in range(3)], [block.float_outputs(i) for i in range(3)]
    rounded = stream.result().model.materialise()
    for i, batch in enumerate(batches):
        x = torch.from_numpy(batch["x"])
        assert torch.equal(floats[i], net(x)) and torch.equal(left[i], rounded(x)) and not torch.equal(left[i], net(x))


def test_readings_in_another_order_are_refused() -> None:
    model = streamed(llama())
    block = model.structure.blocks[0]
    turned = BlockFacts(block.name, block.input_groups[::-1])
    stream = Stream(streamed(llama(), structure=Structure((turned, *model.structure.blocks[1:]))), context(texts()))
    with pytest.raises(PassError, match="the first runs after the second"):
        next(iter(stream)).lockstep(nothing, nothing)


def test_without_data_the_weights_alone() -> None:
    """Steps for what is outside of the blocks come too, and tied weights are untied by a value of their own."""
    model = streamed(llama(layers=3, tied=True))
    stream = Stream(model, context(), data=False)
    names = []
    for block in stream:
        names.append(block.name)
        if block.name == "before":
            assert list(block.layers) == ["model.embed_tokens"]
            block.replace("model.embed_tokens.weight", torch.zeros(64, 32))
            block.replace("model.norm.weight", torch.full((32,), 3.0))
        elif block.name == "after":
            assert not block.matrix("lm_head").any()  # still tied
            block.replace("lm_head.weight", torch.ones(64, 32))
        else:
            block.put_kv(f"{block.name}.self_attn", 0.5, 0.25)
            block.say([LayerDecision(block.name, "Linear", "kept")], [Note("info", block.name)], {block.name: {"x": 1}})
    assert names == ["before", *(f"model.layers.{k}" for k in range(3)), "after"]
    assert dict(model.tied) == {"lm_head.weight": "model.embed_tokens.weight"}
    result = stream.result()
    after = result.model
    assert not after.tied and not after.store.read("model.embed_tokens.weight").any()
    assert bool((after.store.read("lm_head.weight") == 1).all())
    assert after.kv_scales == {f"model.layers.{k}.self_attn": (0.5, 0.25) for k in range(3)}
    module = after.materialise()
    assert module.wrapped.lm_head.weight is not module.wrapped.model.embed_tokens.weight  # type: ignore[union-attr]
    assert [note.text for note in result.notes] == [d.layer for d in result.decisions] == names[1:-1]
    assert result.measured["model.layers.1"]["x"] == 1 and result.measured["model.layers.1"]["peak_rss_mib"] > 0
    assert len(stream.timings) == 5


def test_rounding_a_tied_head_leaves_the_embeddings_alone() -> None:
    net, batches = llama(tied=True), texts()
    stream = Stream(streamed(net), context(batches))
    for block in stream:
        if block.name == "after":
            block.lockstep(nothing, round_all(block))
            left = block.forward(0)
    after = stream.result().model
    assert after.quantized_layers() == ("lm_head",)
    assert torch.equal(after.store.read("model.embed_tokens.weight"), net.get_parameter("model.embed_tokens.weight"))
    assert torch.equal(after.materialise()(**together(batches)), left)


def test_activations_on_disk_and_products_in_bfloat16(tmp_path: Path) -> None:
    net, batches = llama(), texts()
    plain, on_disk, coarse = (
        [
            (block.forward(0), [p.name for p in (tmp_path / "w").rglob("activation-*")])
            for block in Stream(streamed(net), context(batches, tmp_path / "w" if k == 1 else None), **how)  # type: ignore[arg-type]
        ]
        for k, how in enumerate([{}, {"offload": True}, {"compute": "bfloat16"}])
    )
    for (a, _), (b, files), (c, _) in zip(plain, on_disk, coarse, strict=True):
        assert torch.equal(a, b) and files
        assert c.dtype == torch.float32 and float((a - c).abs().max()) < 0.1 * float(a.abs().max())
        assert not torch.equal(a, c)
    assert not list((tmp_path / "w").rglob("activation-*"))


def test_bfloat16_stays_out_of_visits_and_acts() -> None:
    stream = Stream(streamed(llama()), context(texts()), compute="bfloat16")
    seen = []

    def act(*_: Any) -> None:
        seen.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)

    for block in stream:
        block.lockstep(act, act)
        block.collect(act)
    assert set(seen) == {torch.float32}


def test_one_block_at_a_time_and_no_cycles() -> None:
    """With the garbage collector off: what a block held is gone when the next one comes."""
    alive: list[weakref.ref[Any]] = []

    def visit(input_group: InputGroup, x: Tensor) -> None:
        alive.append(weakref.ref(x))

    gc.collect()
    gc.disable()
    try:
        for block in Stream(streamed(llama(layers=5)), context(texts()), float_too=True):
            assert not [ref for ref in alive if ref() is not None]
            block.lockstep(visit, round_all(block))
            block.collect(visit)
            alive += map(weakref.ref, block.changes.quantized.values())
            alive += [weakref.ref(values) for values in block.module.parameters() if values.device.type != "meta"]
            alive += [weakref.ref(block.float_outputs(0))] if block.name == "after" else []
    finally:
        gc.enable()
    assert len(alive) > 100


def test_the_last_word_on_a_weight_counts() -> None:
    """Rounded, then given float values again, in the same pass or a later one; or the other way round."""
    layer, other = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.gate_proj"
    model = streamed(llama())
    for block in (first := Stream(model, context(), data=False)):
        if block.name == "model.layers.0":
            halves = 0.5 * block.matrix(layer)
            block.put(layer, nearest(block.matrix(layer)), W4, activation_scale=1.0)
            block.replace(f"{layer}.weight", halves)
            block.replace(f"{other}.weight", halves)
            block.put(other, nearest(block.matrix(other)), W4)
            assert torch.equal(block.float_matrix(other), halves) and set(block.quantized) == {other}
    model = first.result().model
    assert model.quantized_layers() == (other,) and set(model.schemes) == {other} and not model.activation_scales
    assert torch.equal(model.store.read(f"{layer}.weight"), halves)
    assert torch.equal(model.store.read_float(f"{other}.weight"), halves)
    assert not torch.equal(model.store.read(f"{other}.weight"), halves)
    for block in (second := Stream(model, context(), data=False)):
        if block.name == "model.layers.0":
            assert set(block.quantized) == {other} and torch.equal(block.float_matrix(other), halves)
            block.replace(f"{other}.weight", halves)
            assert not block.quantized
    model = second.result().model
    assert not model.quantized_layers() and not model.schemes
    assert torch.equal(model.store.read(f"{other}.weight"), halves)


def test_padding_on_the_left_leaves_no_nan(tmp_path: Path) -> None:
    """Rows of padding that see nothing at all, with fused attention, as a model from a folder has it."""
    net = llama()
    net.save_pretrained(tmp_path)  # type: ignore[operator]
    spec = ModelSpec(source=f"dir:{tmp_path}", task="text-generation")
    feeds: Any = dict.fromkeys(("input_ids", "attention_mask"), ((12,), "int64"))
    batches = texts(2, padded=False)
    batches[1]["attention_mask"][0, :5] = 0
    stream = Stream(open_streamed_model(locate(spec, tmp_path), feeds, streamed(net).structure), context(batches))
    for block in stream:
        block.lockstep(nothing, nothing)
        assert all(bool(torch.isfinite(out).all()) for out in block.outputs())
        if block.name == "after":
            wanted = plain_output(net, batches)
            assert torch.allclose(block.forward(0)[1, 5:], wanted[1, 5:], atol=1e-5)


def test_refusals() -> None:
    model = streamed(llama())
    with pytest.raises(PassError, match="there is no calibration data; give the recipe a calibration set"):
        next(iter(Stream(model, context())))
    stream = Stream(model, context(texts()))
    with pytest.raises(RuntimeError, match="was not worked through"):
        stream.result()
    blocks = iter(stream)
    block = next(blocks)
    layer = "model.layers.0.mlp.up_proj"
    with pytest.raises(PassError, match="the float outputs were not asked for"):
        block.float_outputs(0)
    with pytest.raises(KeyError, match=r"has no parameter 'model\.norm\.weight'"):
        block.replace("model.norm.weight", torch.ones(32))
    with pytest.raises(ValueError, match=rf"{layer}\.weight: is \[48, 32\], its replacement is \[2, 2\]"):
        block.replace(f"{layer}.weight", torch.ones(2, 2))
    with pytest.raises(ValueError, match=rf"{layer}: is \[48, 32\], what was put is \[32, 48\]"):
        block.put(layer, nearest(torch.ones(32, 48)), W4)
    next(blocks)
    with pytest.raises(RuntimeError, match="the block is closed"):
        block.forward(0)


class Wayward(nn.Module):
    """Blocks between which something happens, or of which one is not run."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for k, layer in enumerate(self.layers):
            if self.how == "skips" and k == 1:
                continue
            x = layer(x) * (2 if self.how == "doubles" else 1)
            if self.how == "adds" and k < 2:
                x = x + torch.arange(4.0) * (k + 1)
        return self.layers[0](x) if self.how == "returns" else x


def stream_of(how: str) -> tuple[nn.Module, Stream]:
    net = Wayward(how).eval().requires_grad_(False)
    names = [f"layers.{k}" for k in range(3)]
    structure = Structure(tuple(BlockFacts(name, (InputGroup((f"{name}.0",)),)) for name in names))
    model = StreamedModel(lambda: copy_without_weights(net), memory_store(net), structure, {"x": "x"})
    return net, Stream(model, context([{"x": np.ones((2, 4), np.float32)}]), float_too=True)


def test_what_is_added_between_blocks_is_added_in_a_stream() -> None:
    """As features of images are, behind the first blocks of some models that see."""
    net, stream = stream_of("adds")
    for block in stream:
        last = next(block.outputs())
        assert torch.equal(last, block.float_outputs(0))
    assert torch.equal(last, net(torch.ones(2, 4)))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("doubles", "layers.1: does not read what layers.0 gives as it is"),
        ("skips", "layers.2: .*order|layers.2: the model's forward does not run it"),
    ],
)
def test_chains_that_are_none(how: str, message: str) -> None:
    _, stream = stream_of(how)
    with pytest.raises(PassError, match=message):
        next(iter(stream))


def test_a_process_that_holds_more_than_is_allowed_stops_between_blocks(tmp_path: Path) -> None:
    from dataclasses import replace

    model = streamed(llama())
    tight = replace(context(work=tmp_path), memory_mib=1.0)
    with pytest.raises(
        PassError, match=r"MiB are held after this block and limits\.memory_gib allows 1; finished blocks"
    ):
        list(Stream(model, tight, data=False))
    assert list(tmp_path.glob("block-00000.json")), "what was finished is kept"
