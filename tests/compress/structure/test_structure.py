"""What one run shows of a model: blocks, input groups, where scales fold; on real architectures and home-made ones."""

from __future__ import annotations

from pathlib import Path

import architectures
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from compress.blocks.folding import fold_scales, norm_weight_offset, source_scales, tie_scales
from compress.facts import InputGroup, Structure
from compress.models.facts import model_facts
from compress.models.source import locate
from compress.specs import ModelSpec
from compress.structure.dataflow import record
from compress.structure.find import find_structure, one_block
from compress.structure.removable import find_removable
from compress.structure.sources import n_inputs

FAMILIES = {
    "llama": ("model.layers", ["norm", "value", "norm", "linear"]),
    "qwen2": ("model.layers", ["norm", "value", "norm", "linear"]),
    "qwen3": ("model.layers", ["norm", "value", "norm", "linear"]),
    "mistral": ("model.layers", ["norm", "value", "norm", "linear"]),
    "gemma": ("model.layers", ["norm", "value", "norm", "linear"]),
    "gemma2": ("model.layers", ["norm", "value", "norm", "linear"]),
    "gemma3": ("model.layers", ["norm", "value", "norm", "linear"]),
    "phi": ("model.layers", ["norm", "value", ""]),
    "phi3": ("model.layers", ["norm", "value", "norm", "linear"]),
    "gpt2": ("transformer.h", ["norm", "value", "norm", ""]),
    "neox": ("gpt_neox.layers", ["norm", "", "norm", ""]),
    "opt": ("model.decoder.layers", ["norm", "value", "norm", "linear"]),
    "bert": ("encoder.layer", ["", "value", "", ""]),
    "distilbert": ("transformer.layer", ["", "value", "", ""]),
    "vit": ("vit.layers", ["norm", "value", "norm", ""]),
}


def structure_of(name: str, module: nn.Module) -> Structure:
    return find_structure(module, architectures.feeds(name))


@pytest.mark.parametrize("name", FAMILIES)
def test_blocks_and_sources_of_the_usual_architectures(name: str) -> None:
    blocks, sources = FAMILIES[name]
    found = structure_of(name, architectures.build(name))
    assert [block.name for block in found.blocks] == [f"{blocks}.0", f"{blocks}.1"]
    for block in found.blocks:
        assert [input_group.how for input_group in block.input_groups] == sources
        assert all(bool(input_group.source) == bool(input_group.how) for input_group in block.input_groups)


@pytest.mark.parametrize(
    ("name", "attention"),
    [*((name, "eager") for name in FAMILIES), *((name, "sdpa") for name in ("llama", "phi3", "gpt2", "bert", "vit"))],
)
def test_folding_random_scales_changes_nothing(name: str, attention: str) -> None:
    module = architectures.build(name, attention)
    before = architectures.run(module, name)
    generator = torch.Generator().manual_seed(2)
    for input_group in structure_of(name, module).input_groups:
        if input_group.source:
            weight = module.get_submodule(input_group.layers[0]).weight.clone()
            scales = torch.rand(n_inputs(module.get_submodule(input_group.layers[0])), generator=generator) * 3 + 0.2
            fold_scales(input_group, tie_scales(input_group, scales.double()), module.get_submodule)
            assert not torch.allclose(module.get_submodule(input_group.layers[0]).weight, weight)
    tolerance = 1e-5 if "gemma" in name else 1e-12  # Gemma's norms compute in float32
    torch.testing.assert_close(architectures.run(module, name), before, rtol=tolerance, atol=tolerance)


def test_llama_in_full() -> None:
    module = architectures.build("llama")
    found = structure_of("llama", module)
    attention, mlp = "model.layers.1.self_attn", "model.layers.1.mlp"
    assert found.blocks[1].input_groups == (
        InputGroup(
            (f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"),
            "model.layers.1.input_layernorm",
            "norm",
        ),
        InputGroup((f"{attention}.o_proj",), f"{attention}.v_proj", "value", 2, 8),
        InputGroup((f"{mlp}.gate_proj", f"{mlp}.up_proj"), "model.layers.1.post_attention_layernorm", "norm"),
        InputGroup((f"{mlp}.down_proj",), f"{mlp}.up_proj", "linear"),
    )
    assert found.before == () and found.after == (InputGroup(("lm_head",), "model.norm", "norm"),)
    assert found.notes == ()
    assert found.residual is not None
    assert found.residual.embeddings == ("model.embed_tokens",)
    assert found.residual.writers == tuple(
        f"model.layers.{k}.{name}" for k in (0, 1) for name in ("self_attn.o_proj", "mlp.down_proj")
    )
    assert found.residual.readers[-1] == "lm_head" and len(found.residual.readers) == 11
    assert found.residual.norms[-1] == ("model.norm", ("lm_head",))


def test_a_tied_head_takes_no_scale() -> None:
    found = structure_of("llama", architectures.build("llama", tie_word_embeddings=True))
    assert found.after == (InputGroup(("lm_head",)),)
    assert found.residual is not None


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("gemma2", "post_attention_layernorm (Gemma2RMSNorm) normalises what is written to it (a post-norm)"),
        ("phi", "is a LayerNorm: one that subtracts the mean or has a bias cannot be folded"),
        ("bert", "embeddings.LayerNorm (LayerNorm) normalises what is written to it (a post-norm)"),
    ],
)
def test_why_a_stream_is_not_plain(name: str, why: str) -> None:
    found = structure_of(name, architectures.build(name))
    assert found.residual is None
    assert any(why in note for note in found.notes), found.notes


def test_values_are_not_needed() -> None:
    module = architectures.build("qwen2").float()
    real = find_structure(module, architectures.feeds("qwen2"), compute=True)
    feeds = {name: tensor.to("meta") for name, tensor in architectures.feeds("qwen2").items()}
    assert find_structure(module.to("meta"), feeds) == real


class Attention(nn.Module):
    """Fused q, k, v, taken apart the way timm does it."""

    def __init__(self, gated: bool = False) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)
        self.gate = nn.Linear(16, 16) if gated else None

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, t, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        out = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, 16)
        return self.proj(out if self.gate is None else out * torch.sigmoid(self.gate(x)))


class Block(nn.Module):
    def __init__(self, act: nn.Module, gated: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(16), nn.RMSNorm(16)
        self.attn = Attention(gated)
        self.mlp = nn.Sequential(nn.Linear(16, 32), act, nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Wide(Block):
    """Another class in the same chain."""


class Home(nn.Module):
    def __init__(self, blocks: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 16)
        self.blocks = blocks
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)))


def home(*blocks: nn.Module) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Home(nn.Sequential(*blocks)).double().eval(), {"x": torch.randn(2, 5, 4, dtype=torch.float64)}


def folded(module: nn.Module, feeds: dict[str, Tensor]) -> Structure:
    """Its structure, checked by folding whatever can be."""
    found = find_structure(module, feeds)
    with torch.no_grad():
        before = module(**feeds)
    for input_group in found.input_groups:
        if input_group.source:
            scales = torch.rand(n_inputs(module.get_submodule(input_group.layers[0]))).double() + 0.3
            fold_scales(input_group, tie_scales(input_group, scales), module.get_submodule)
    with torch.no_grad():
        torch.testing.assert_close(module(**feeds), before, rtol=1e-10, atol=1e-12)
    return found


def test_a_home_made_model_with_blocks_of_two_classes() -> None:
    found = folded(*home(Block(nn.ReLU(inplace=True)), Wide(nn.GELU()), Block(nn.SiLU())))
    assert [block.name for block in found.blocks] == ["blocks.0", "blocks.1", "blocks.2"]
    assert [input_group.how for input_group in found.blocks[0].input_groups] == ["norm", "value", "norm", "linear"]
    assert [input_group.how for input_group in found.blocks[1].input_groups] == ["norm", "value", "norm", ""]
    assert found.before == (InputGroup(("stem",)),) and found.after == (InputGroup(("head",)),)


def test_a_gated_value_takes_scales_but_no_rotation() -> None:
    found = folded(*home(Block(nn.ReLU(), gated=True), Block(nn.ReLU(), gated=True)))
    assert found.blocks[0].input_groups[0].layers == ("blocks.0.attn.qkv", "blocks.0.attn.gate")
    assert found.blocks[0].input_groups[1].how == "linear"


def test_no_chain_is_one_block() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    found = find_structure(module, {"input": torch.zeros(2, 4)})
    assert [block.name for block in found.blocks] == [""]
    assert found.blocks[0].input_groups == (InputGroup(("0",)), InputGroup(("2",), "0", "linear"))
    assert found.notes == ("no chain of blocks was found: the model is one block",)


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(nn.ReLU()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[0](x)
        return self.layers[2](self.layers[1](first)) + first


def test_a_skip_over_blocks_is_no_chain() -> None:
    found = find_structure(Skipping(), {"x": torch.zeros(2, 5, 16)})
    assert [block.name for block in found.blocks] == [""]
    assert found.notes == ("no chain of blocks: the model reads what layers.0 computed inside; the model is one block",)


class Shift(nn.Module):
    """A block whose shift its caller hands on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.shift = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, shift: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return x + self.inner(x if shift is None else x + shift), self.shift(x)


class Shifting(nn.Module):
    """`far`: a block reads the shift of one that is not the one before it."""

    def __init__(self, far: bool) -> None:
        super().__init__()
        self.far, self.layers = far, nn.ModuleList(Shift() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x, first = self.layers[0](x)
        x, second = self.layers[1](x, first)
        result: Tensor = self.layers[2](x, first if self.far else second)[0]
        return result


def test_a_block_may_read_more_of_the_one_before_alone() -> None:
    feeds = {"x": torch.zeros(2, 5, 16)}
    module = Shifting(far=False)
    found = find_structure(module, feeds)
    assert [block.name for block in found.blocks] == ["layers.0", "layers.1", "layers.2"]
    assert find_removable(record(module, feeds), found) == ()
    assert find_structure(Shifting(far=True), feeds).notes == (
        "no chain of blocks: layers.2 reads what layers.0 computed inside; the model is one block",
    )


class Odd(nn.Module):
    """Things that look as if a scale could be folded."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other = nn.LayerNorm(8), nn.LayerNorm(8)
        self.a, self.b, self.c, self.d, self.e = (nn.Linear(8, 8) for _ in range(5))
        self.d.weight = self.e.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        z = self.a(y) + y.sum(-1, keepdim=True)  # the norm's output is used elsewhere, too
        z = self.c(functional.relu(self.b(z)) + 1)  # not homogeneous
        return self.d(self.other(z)) + self.e(x)  # a shared weight


def test_what_cannot_be_folded_has_no_source() -> None:
    module = Odd()
    found = find_structure(module, {"x": torch.zeros(2, 3, 8)})
    assert all(input_group.source == "" for input_group in found.input_groups)
    assert [input_group.layers for input_group in found.input_groups] == [("a",), ("b",), ("c",), ("d",), ("e",)]


def test_memory_written_to_is_another_tensor() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            z = self.b(y)
            y[:, :2] += 1
            return z + self.c(y)

    found = find_structure(Writes(), {"x": torch.zeros(2, 4)})
    assert [input_group.layers for input_group in found.input_groups] == [("a",), ("b",), ("c",)]
    assert all(input_group.source == "" for input_group in found.input_groups)


@pytest.mark.parametrize(
    ("norm", "offset"),
    [
        (nn.LayerNorm(6), 0.0),
        (nn.RMSNorm(6), 0.0),
        (nn.LayerNorm(6, bias=False), 0.0),
        (nn.RMSNorm(6, elementwise_affine=False), None),
        (nn.PReLU(6), None),
        (nn.Linear(6, 6), None),
    ],
)
def test_norm_weight_offset(norm: nn.Module, offset: float | None) -> None:
    assert norm_weight_offset(norm.to("meta")) == offset


def test_gemmas_norms_add_one() -> None:
    norm = architectures.build("gemma").get_submodule("model.norm")
    assert norm_weight_offset(norm) == 1.0


def test_tied_scales_are_equal_among_the_heads_of_a_value() -> None:
    input_group = InputGroup(("o",), "v", "value", 2, 2)
    scales = torch.tensor([1.0, 2.0, 4.0, 8.0, 1.0, 1.0, 1.0, 4.0])
    tied = tie_scales(input_group, scales)
    torch.testing.assert_close(tied, torch.tensor([2.0, 4.0, 2.0, 4.0, 1.0, 2.0, 1.0, 2.0]))
    torch.testing.assert_close(source_scales(input_group, tied), torch.tensor([2.0, 4.0, 1.0, 2.0]))


@pytest.mark.parametrize(
    ("input_group", "scales", "message"),
    [
        (InputGroup(("a",)), [1.0], "reading a: no module before it can take a scale exactly; leave it as it is"),
        (InputGroup(("a",), "n", "norm"), [1.0, 0.0], "reading a: scales must be positive and finite"),
        (InputGroup(("a",), "v", "value", 2, 1), [1.0, 2.0], "reading a: scales differ among the query heads"),
        (InputGroup(("a",), "v", "value", 2, 2), [1.0, 2.0], "2 scales do not fit 2 heads of 2"),
    ],
)
def test_scales_that_cannot_be_folded_are_refused(input_group: InputGroup, scales: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fold_scales(input_group, torch.tensor(scales), lambda name: nn.LayerNorm(2))


FACTORY = """
from torch import nn
import torch

class Picky(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.a(x)
        return self.b(y if float(y.sum()) < 1e9 else -y)

def picky():
    return Picky()

def network():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 2))
"""


def test_facts_hold_the_structure(tmp_path: Path) -> None:
    (tmp_path / "made.py").write_text(FACTORY)
    picky = ModelSpec(source="python:made.py:picky", task="generic")
    facts = model_facts(locate(picky, tmp_path), {"x": ((4,), "float32")})
    assert facts.structure is not None and facts.structure.blocks[0].layers == ("a", "b")
    network = ModelSpec(source="python:made.py:network", task="image-classification")
    facts = model_facts(locate(network, tmp_path), {"pixel_values": ((3, 8, 8), "float32")})
    assert facts.structure is not None and facts.structure.blocks[0].input_groups == (InputGroup(("2",)),)


def test_one_block_for_what_cannot_be_run() -> None:
    found = one_block(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "why")
    assert found.blocks[0].input_groups == (InputGroup(("0",)), InputGroup(("1",))) and found.notes == ("why",)
