"""`rotate`: orthogonal matrices, their fast products, and models that compute what they did once they are turned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import architectures
import pytest
import torch
from streaming import context, llama, nearest, streamed, texts, together
from torch import Tensor, nn

from compress.blocks.experts import unstack_experts
from compress.blocks.materialise import copy_without_weights, memory_store
from compress.blocks.stream import Stream
from compress.blocks.streamed import StreamedModel
from compress.errors import PassError
from compress.facts import BlockFacts, InputGroup, LayerFacts, ModelFacts, Structure
from compress.formats.schemes import PRESETS
from compress.formats.targets import TARGETS
from compress.passes.rotate import Rotate
from compress.rounding.hadamard import orthogonal, paley
from compress.structure.find import find_structure
from compress.work import apply_pass

CPU = TARGETS["onnxruntime-cpu"]
PLAIN = ["llama", "qwen2", "qwen3", "mistral", "gemma", "phi3", "mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"]
HEADS_ONLY = ["gemma2", "gpt2", "opt", "bert", "vit"]


@pytest.mark.parametrize("size", [1, 2, 8, 12, 20, 28, 36, 40, 44, 60, 64, 80, 96, 288])
def test_hadamard_matrices_of_many_sizes(size: int) -> None:
    turn = orthogonal(size, seed=1)
    matrix = turn.matrix()
    assert turn.hadamard
    torch.testing.assert_close(matrix @ matrix.t(), torch.eye(size, dtype=torch.float64))
    torch.testing.assert_close(matrix.abs(), torch.full_like(matrix, size**-0.5))


@pytest.mark.parametrize("size", [3, 6, 30, 100, 172])
def test_other_sizes_get_a_random_factor(size: int) -> None:
    turn = orthogonal(size)
    matrix = turn.matrix()
    assert not turn.hadamard
    torch.testing.assert_close(matrix @ matrix.t(), torch.eye(size, dtype=torch.float64))


def test_the_fast_product_is_that_with_the_matrix() -> None:
    turn = orthogonal(48, seed=3)
    sylvester = torch.tensor([[1.0]], dtype=torch.float64)
    for _ in range(turn.power):
        sylvester = torch.cat([torch.cat([sylvester, sylvester], 1), torch.cat([sylvester, -sylvester], 1)])
    slow = turn.signs.diag() @ torch.kron(turn.core, sylvester) / 48**0.5
    x = torch.randn(2, 5, 48, dtype=torch.float64)
    torch.testing.assert_close(turn.turn(x), x @ slow)
    assert turn.turn(x.float()).dtype == torch.float32


def test_rotations_are_the_same_for_the_same_seed() -> None:
    assert torch.equal(orthogonal(24, 5).matrix(), orthogonal(24, 5).matrix())
    assert not torch.equal(orthogonal(24, 5).matrix(), orthogonal(24, 6).matrix())
    assert paley(10) is None


def turn(module: nn.Module, structure: Structure) -> tuple[nn.Module, list[str]]:
    """(a module with the turned weights, what was noted) of a module whose weights lie in memory."""
    inputs = {name: name for name in ("input_ids", "attention_mask", "pixel_values")}
    template, store = copy_without_weights(module), memory_store(module)
    model = StreamedModel(lambda: copy_without_weights(template), store, structure, inputs, type(module).__name__)
    result = apply_pass(Rotate(), model, context())
    return result.model.materialise(), [note.text for note in result.notes]


def without_heads(found: Structure) -> Structure:
    """The structure with nothing of heads that could be turned."""
    blocks = [replace(b, input_groups=tuple(g for g in b.input_groups if g.how != "value")) for b in found.blocks]
    return replace(found, blocks=tuple(blocks))


def rotated(
    name: str, change: Callable[[Structure], Structure] = lambda s: s
) -> tuple[nn.Module, nn.Module, Structure]:
    """(as it was, turned, its structure); both checked to give the same."""
    module = architectures.build(name).float()  # as files give weights to a stream
    unstack_experts(module)
    structure = change(find_structure(module, architectures.feeds(name)))
    turned, notes = turn(module, structure)
    assert notes == []
    before, after = architectures.run(module, name), architectures.run(turned, name)
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)  # norms compute in float32
    return module, turned, structure


@pytest.mark.parametrize("name", PLAIN)
def test_a_turned_model_computes_what_it_did(name: str) -> None:
    module, turned, structure = rotated(name)
    assert structure.residual is not None
    for layer in (*structure.residual.writers, *structure.residual.readers):
        old, new = module.get_submodule(layer).weight, turned.get_submodule(layer).weight
        assert not torch.allclose(old, new)


@pytest.mark.parametrize("name", HEADS_ONLY)
def test_heads_turn_where_the_stream_cannot(name: str) -> None:
    module, turned, structure = rotated(name)
    assert structure.residual is None
    input_group = next(input_group for input_group in structure.input_groups if input_group.how == "value")
    assert not torch.allclose(
        module.get_submodule(input_group.source).weight, turned.get_submodule(input_group.source).weight
    )


def test_only_the_stream_or_only_the_heads() -> None:
    module, turned, _ = rotated("llama", without_heads)
    value = "model.layers.0.self_attn.v_proj.weight"
    q = orthogonal(32, context().seed)
    scale = module.get_parameter("model.layers.0.input_layernorm.weight")
    torch.testing.assert_close(turned.get_parameter(value), module.get_parameter(value) * scale @ q.matrix().float())
    table = "model.embed_tokens.weight"
    torch.testing.assert_close(turned.get_parameter(table), module.get_parameter(table) @ q.matrix().float())
    module, turned, _ = rotated("llama", lambda found: replace(found, residual=None))
    torch.testing.assert_close(turned.get_parameter(table), module.get_parameter(table))
    r = orthogonal(8, context().seed + 1).matrix().float()
    torch.testing.assert_close(turned.get_parameter(value), torch.block_diag(r, r).t() @ module.get_parameter(value))


def test_norms_are_left_at_one() -> None:
    _, turned, structure = rotated("llama")
    assert structure.residual is not None
    assert all(bool((turned.get_submodule(norm).weight == 1).all()) for norm, _ in structure.residual.norms)
    _, turned, structure = rotated("gemma")
    assert structure.residual is not None
    assert all(bool((turned.get_submodule(norm).weight == 0).all()) for norm, _ in structure.residual.norms)


def test_outliers_of_the_stream_are_spread() -> None:
    module = architectures.build("llama")
    table = module.get_parameter("model.embed_tokens.weight")
    table[:, 3] *= 50
    turned, _ = turn(module, find_structure(module, architectures.feeds("llama")))
    new = turned.get_parameter("model.embed_tokens.weight")
    assert new.abs().max() / new.std() < 0.5 * table.abs().max() / table.std()


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_in_files_is_turned(tied: bool, tmp_path: Path) -> None:
    net = llama(tied=tied)
    model = streamed(net, tmp_path / "model")
    feeds = together(texts())
    with torch.no_grad():
        before: Tensor = model.materialise()(**feeds)
    result = apply_pass(Rotate(), model, context())
    with torch.no_grad():
        after = result.model.materialise()(**feeds)
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
    assert not result.model.tied
    assert {d.layer for d in result.decisions} >= {"lm_head", "model.embed_tokens", "model.layers.1.mlp.down_proj"}


def test_widths_without_a_hadamard_matrix_are_told() -> None:
    module = architectures.build("llama")
    structure = find_structure(module, architectures.feeds("llama"))
    assert structure.residual is not None
    empty = replace(structure.residual, width=6, embeddings=(), writers=(), readers=(), norms=())
    _, notes = turn(module, without_heads(replace(structure, residual=empty)))
    assert notes == [
        "rotate: no Hadamard matrix of size 6 is at hand; the rotation of the residual stream has a random factor"
    ]


def test_a_rounded_model_is_not_turned() -> None:
    model = streamed(llama())
    stream = Stream(model, context(), data=False)
    for block in stream:
        for layer in block.layers:
            if layer.endswith("up_proj"):
                block.put(layer, nearest(block.matrix(layer)), PRESETS["W4A16"].with_group(16))
    with pytest.raises(PassError, match="up_proj is rounded already; put rotate before the pass that does it"):
        apply_pass(Rotate(), stream.result().model, context())


def facts(structure: Structure | None, tied: bool = True, bits: float = 32) -> ModelFacts:
    layers = (
        LayerFacts("embed", "Embedding", "Gather", "embed.weight", (100, 8)),
        LayerFacts("v", "Linear", "MatMul", "v.weight", (8, 8)),
        LayerFacts("o", "Linear", "MatMul", "o.weight", (8, 8), bits=bits),
        LayerFacts("head", "Linear", "MatMul", "embed.weight" if tied else "head.weight", (100, 8)),
    )
    return ModelFacts("torch", "M", "generic", (), (), layers, structure=structure)


def structure(tied: bool = False) -> Structure:
    found = find_structure(architectures.build("llama"), architectures.feeds("llama")).residual
    assert found is not None
    input_groups = (InputGroup(("v",), "n", "norm"), InputGroup(("o",), "v", "value", 1, 4))
    residual = replace(found, width=8, embeddings=("embed",), writers=("o",), readers=("v", "head"), norms=())
    return Structure((BlockFacts("b", input_groups),), residual=residual)


def test_the_plan_says_that_a_tied_head_gets_its_own_weight() -> None:
    before = facts(structure())
    plan = Rotate().check(before, CPU)
    assert plan.problems == ()
    assert plan.facts.n_bytes - before.n_bytes == 3200
    assert "head shares its weight with an embedding and gets one of its own: 3.1 KiB more" in plan.notes[0].text
    assert {d.layer: d.reason for d in plan.decisions} == {
        "embed": "what it writes to the stream",
        "v": "what it reads of the stream and its values, head by head",
        "o": "what it writes to the stream and what it reads of each head",
        "head": "what it reads of the stream",
    }
    assert Rotate().check(facts(structure(), tied=False), CPU).notes == ()
    plan = Rotate().check(facts(replace(structure(), residual=None, notes=("because",))), CPU)
    assert plan.facts.n_bytes == before.n_bytes
    assert [note.text for note in plan.notes] == ["rotate: the residual stream cannot be rotated (because)"]
    (note,) = Rotate().check(facts(without_heads(structure()), tied=False), CPU).notes
    assert note.level == "warning" and "heads cannot be rotated: no layer reads attention's weighted sums" in note.text


@pytest.mark.parametrize(
    ("found", "bits", "problem"),
    [
        (None, 32, "works on torch models; an ONNX file has no blocks to rotate"),
        ("none", 32, "the residual stream cannot be rotated (because)"),
        ("none", 32, "heads cannot be rotated"),
        ("plain", 4, "o is rounded already; put rotate before the pass that does it"),
    ],
)
def test_what_cannot_be_turned_is_refused(found: str | None, bits: int, problem: str) -> None:
    structures = {"plain": structure(), "none": Structure((BlockFacts("b", ()),), notes=("because",)), None: None}
    plan = Rotate().check(facts(structures[found], bits=bits), CPU)
    assert any(problem in text for text in plan.problems), plan.problems


def test_zeros_are_not_filled_unseen() -> None:
    """A recipe that makes them first is refused; those that a model came with are told."""
    sparse = facts(structure()).with_zeros(["o"])
    (problem,) = Rotate().check(sparse, CPU).problems
    assert problem == (
        "rotate: o is sparse, and a rotation fills its zeros; put rotate before the pass that makes it sparse, "
        "or leave it out"
    )
    module = llama().requires_grad_(False)
    first = module.model.layers[0].mlp.up_proj.weight
    first.masked_fill_(torch.arange(first.numel()).reshape(first.shape) % 2 == 0, 0.0)
    result = apply_pass(Rotate(), streamed(module), context())
    warned = [note.text for note in result.notes if note.level == "warning"]
    assert warned == ["rotate: model.layers.0.mlp.up_proj.weight came with zeros, which are filled now"]
