"""Whole blocks removed: which can go, what each is worth, the smaller model and its record, every refusal."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from architectures import MODELS, build, feeds
from places import QUICKSTART
from pydantic import ValidationError
from safetensors.torch import save_file
from streaming import TEXT, llama, model_context, texts
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import compress
from compress.blocks.activations import MicroBatch
from compress.blocks.depth import keep_blocks, numbers_of
from compress.blocks.experts import unstack_experts
from compress.blocks.sizes import Shapes, fit, shapes_from, shapes_of
from compress.errors import PassError, PlanError, SourceError
from compress.execution.passes import RunContext, _run_model_passes, not_kept
from compress.facts import BlockFacts, InputGroup, LayerFacts, ModelFacts, Removable, Structure
from compress.formats.targets import TARGETS
from compress.models.huggingface import ImageModel, TextModel
from compress.models.load import TorchModel, load_model
from compress.models.source import locate
from compress.passes import PruneLayers
from compress.passes.depth import evenly_spaced, without_blocks
from compress.planning.make_plan import make_plan
from compress.planning.sets import load_set
from compress.pruning.depth import BlockOutputs, Skipping, least_error, shorten
from compress.recipe.load import Recipe
from compress.store.cache import ResultCache
from compress.store.run_log import RunLog
from compress.timing.clock import Clock
from compress.work.contexts import ModelContext, Timing
from compress.work.prune_layers import apply_prune_layers, removable_blocks
from compress.zoo.cifar_resnet import CifarResNet
from runtime.bundle.tensors import TensorSpec

TARGET = TARGETS["onnxruntime-cpu"]
PIXELS = (TensorSpec("pixel_values", "float32", ("batch", 3, 8, 8)),)
LOGITS = (TensorSpec("logits", "float32", ("batch", 10)),)


pytestmark = pytest.mark.usefixtures("one_thread")


def conv_net(seed: int = 0, n_blocks: int = 3) -> CifarResNet:
    """Its blocks' second norms small, so that each adds a little to what goes through it."""
    torch.manual_seed(seed)
    net = CifarResNet(n_blocks)
    with torch.no_grad():
        for name, norm in net.named_modules():
            if isinstance(norm, nn.BatchNorm2d):
                norm.running_mean.normal_(0, 0.1)
                norm.weight.uniform_(0.5, 1.0).mul_(0.3 if name.endswith("bn2") else 1.0)
    return net.eval().requires_grad_(False)


def images(n: int = 32, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, 3, 8, 8)).astype(np.float32)


def loaded_images(net: nn.Module) -> TorchModel:
    names = {"pixel_values": "x"}
    return TorchModel(
        architecture="CifarResNet",
        inputs=PIXELS,
        outputs=LOGITS,
        module=net,
        parameters=names,
        task="image-classification",
    )


def loaded_text(net: Any) -> TorchModel:
    net.config.use_cache = False
    net.set_attn_implementation("eager")
    module = TextModel(net, "logits").eval().requires_grad_(False)
    inputs = tuple(TensorSpec(name, "int64", ("batch", "sequence")) for name in TEXT)
    outputs = (TensorSpec("logits", "float32", ("batch", "sequence", net.config.vocab_size)),)
    return TorchModel(
        architecture="Llama", inputs=inputs, outputs=outputs, module=module, parameters=TEXT, task="text-generation"
    )


def options(batches: Any, **more: Any) -> ModelContext:
    return model_context(batches, **more)


def image_batches(n: int = 4) -> list[dict[str, np.ndarray]]:
    return [{"pixel_values": images(16, seed)} for seed in range(n)]


def wrapped(name: str) -> nn.Module:
    """Four blocks of an architecture, as the tool holds it."""
    size = {"gpt2": "n_layer", "distilbert": "n_layers"}.get(name, "num_hidden_layers")
    arguments = {**MODELS[name][2], size: 4}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, name, (*MODELS[name][:2], arguments))
        net: Any = build(name)
    net.config.use_cache = False
    module = ImageModel(net, "logits") if name == "vit" else TextModel(net, _output(name))
    unstack_experts(module)
    return module.eval()


def _output(name: str) -> str:
    return "last_hidden_state" if "bert" in name else "logits"


# Which blocks can go


def test_residual_blocks_that_keep_the_shape_can_go() -> None:
    found = removable_blocks(conv_net(), {"x": torch.from_numpy(images(1))})
    names = [one.name for one in found]
    assert names == ["layer1.0", "layer1.1", "layer1.2", "layer2.1", "layer2.2", "layer3.1", "layer3.2"]
    assert found[0] == Removable("layer1.0", ("layer1.0.conv1", "layer1.0.conv2"), listed=False)


class Chain(nn.Module):
    """Blocks of one shape that add nothing to what they read, one that does, one called twice, one of another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU())
        self.adding, self.twice, self.wider = Adds(4, 4), Adds(4, 4), Adds(4, 8)
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.wider(self.twice(self.twice(self.adding(self.plain(x))))))


class Adds(nn.Module):
    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(n_in, n_out, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x], 1) + self.conv(x) if self.conv.out_channels != x.shape[1] else x + self.conv(x)


def test_others_cannot() -> None:
    torch.manual_seed(0)
    found = removable_blocks(Chain().eval(), {"x": torch.randn(1, 4, 3, 3)})
    assert [one.name for one in found] == ["adding"]


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "qwen2_moe", "bert", "distilbert", "vit"])
def test_transformers_models_lose_blocks_and_their_configuration_says_so(name: str) -> None:
    """Shorter, a module gives what the whole one gives without those blocks; so does the record on a whole one."""
    module, given = wrapped(name), feeds(name)
    whole, before = copy.deepcopy(module), shapes_of(module)
    blocks = removable_blocks(module, given)
    assert len(blocks) == 4 and all(one.listed for one in blocks)
    skipping = Skipping(module, [one.name for one in blocks], given)
    removed = [blocks[2].name, blocks[1].name]
    with skipping.without(removed):
        wanted = module(**given)
    assert shorten(skipping, removed, given)
    assert torch.equal(module(**given), wanted)
    assert not torch.allclose(whole(**given), wanted)
    record = shapes_from(json.loads(json.dumps(asdict(shapes_of(module).since(before)))))
    assert list(record.blocks.values()) == [(0, 3)]
    assert 2 in record.config.values()
    fit(whole, record)
    whole.load_state_dict(module.state_dict())
    assert torch.equal(whole(**given), wanted)


def test_a_pruned_decoder_reloads_with_from_pretrained(tmp_path: Path) -> None:
    """And its key-value cache still counts from 0."""
    loaded = loaded_text(llama(layers=4))
    result = apply_prune_layers(PruneLayers(keep=2, compensate=False), loaded, options(texts()))
    loaded.module.wrapped.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    ids = torch.arange(3, 11)[None]
    feeds = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(again(**feeds).logits, loaded.module(**feeds))
    assert again.config.num_hidden_layers == 2
    one_by_one = again.generate(ids, max_new_tokens=3, do_sample=False, use_cache=True, pad_token_id=0)
    assert torch.equal(
        one_by_one, again.generate(ids, max_new_tokens=3, do_sample=False, use_cache=False, pad_token_id=0)
    )
    assert not any(note.level == "warning" for note in result.notes)


class Counts(nn.Module):
    """A model whose code asks for its blocks by number."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Adds(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for number in range(3):
            x = self.blocks[number](x)
        return x


def test_code_that_counts_its_blocks_is_refused() -> None:
    torch.manual_seed(0)
    sample = {"x": torch.randn(2, 4, 3, 3)}
    module = Counts().eval().requires_grad_(False)
    skipping = Skipping(module, ["blocks.0", "blocks.1", "blocks.2"], sample)
    with pytest.raises(PassError, match="fixes how many blocks there are"):
        shorten(skipping, ["blocks.1"], sample)


# What a block is worth


def as_rows(net: nn.Module, x: np.ndarray) -> list[MicroBatch]:
    return [MicroBatch({"x": torch.from_numpy(x)}, None, len(x))]


def test_the_error_without_blocks_is_that_of_identities_in_their_places() -> None:
    """An independent form: modules replaced by hand, the squared error over the outputs' variance."""
    net, x = conv_net(), images()
    skipping = Skipping(net, ["layer1.1", "layer2.2"], {"x": torch.from_numpy(x[:1])})
    whole = net(torch.from_numpy(x)).double()
    by_hand = copy.deepcopy(net)
    by_hand.layer1[1] = nn.Identity()
    by_hand.layer2[2] = nn.Identity()
    with skipping.without(["layer1.1", "layer2.2"]):
        error = BlockOutputs(skipping.module, as_rows(net, x)).error_of(net)
        assert error == 0.0  # of a model to itself
    error = BlockOutputs(net, as_rows(net, x)).error_of(by_hand)
    differing = (by_hand(torch.from_numpy(x)).double() - whole).square().sum()
    assert error == pytest.approx(float(differing / (whole - whole.mean(0)).square().sum()), rel=1e-4)


def test_the_first_to_go_is_the_one_that_is_missed_least() -> None:
    """By trying every one; and errors of the two that go first are those of a search over all orders."""
    net, x = conv_net(), images()
    with torch.no_grad():
        net.layer2[1].bn2.weight.zero_()
        net.layer2[1].bn2.bias.zero_()  # relu(x + 0) of what a ReLU gave: nothing is lost without it
    blocks = [one.name for one in removable_blocks(net, {"x": torch.from_numpy(x[:1])})]
    skipping = Skipping(net, blocks, {"x": torch.from_numpy(x[:1])})
    whole = BlockOutputs(net, as_rows(net, x))
    removal = least_error(skipping, 3, as_rows(net, x))
    assert removal.names[0] == "layer2.1" and removal.errors[0] == 0.0
    for k in range(3):
        found = {}
        for name in (one for one in blocks if one not in removal.names[:k]):
            with skipping.without([*removal.names[:k], name]):
                found[name] = whole.error_of(net)
        assert removal.names[k] == min(found, key=found.__getitem__)
        assert removal.errors[k] == found[removal.names[k]]


def test_evenly_spaced_blocks_are_distilberts() -> None:
    assert evenly_spaced(12, 6) == (0, 2, 4, 7, 9, 11)
    assert evenly_spaced(6, 3) == (0, 2, 5)
    assert evenly_spaced(6, 1) == (0,)
    assert evenly_spaced(4, 4) == (0, 1, 2, 3)


# The pass


def test_an_idle_block_goes_and_nothing_changes() -> None:
    net = conv_net()
    with torch.no_grad():
        for block in (net.layer1[1], net.layer3[2]):
            block.bn2.weight.zero_()
            block.bn2.bias.zero_()
    x = torch.from_numpy(images())
    before = net(x)
    result = apply_prune_layers(PruneLayers(keep=5, compensate=False), loaded_images(net), options(image_batches()))
    torch.testing.assert_close(net(x), before, rtol=1e-5, atol=1e-5)  # its norms are restated, which rounds
    said = {one.layer: one.action for one in result.decisions if one.type == "block"}
    assert {name for name, action in said.items() if action == "pruned"} == {"layer1.1", "layer3.2"}
    assert result.measured["layer1.1"]["output_error"] == 0.0
    assert isinstance(net.layer1[1], nn.Identity)


@pytest.mark.slow
def test_what_is_left_is_fitted_anew() -> None:
    nets = [conv_net(), conv_net()]
    batches = [MicroBatch({"x": torch.from_numpy(one["pixel_values"])}, None, 16) for one in image_batches(8)]
    whole = BlockOutputs(conv_net(), batches)
    for net, fitted in zip(nets, (False, True), strict=True):
        config = PruneLayers(drop=0.5, compensate=fitted)
        apply_prune_layers(config, loaded_images(net), options(image_batches(8)))
    plain, better = (whole.error_of(net) for net in nets)
    assert better < 0.5 * plain


def test_the_blocks_behind_move_up_and_are_named_anew() -> None:
    loaded = loaded_text(llama(layers=4))
    config = PruneLayers(layers=(0, 3), compensate=False)
    result = apply_prune_layers(config, loaded, options(texts()))
    said = {one.layer: one for one in result.decisions}
    assert said["model.layers.1.mlp.up_proj"].reason == "was model.layers.3.mlp.up_proj"
    assert said["model.layers.1"].action == "pruned" and said["model.layers.3"].action == "kept"
    assert "model.layers.2.mlp.up_proj" not in said
    assert numbers_of(loaded.module.wrapped.model.layers) == (0, 3)


class ConvolutionCounter(Clock):
    """A clock for which each convolution takes a millisecond; a module's "graph" is their number."""

    def time(self, graphs: Any, feeds: Any, budget_s: float, backends: Sequence[str] = ()) -> list[float]:
        return [float(graph) for graph in graphs]


def count_convolutions(module: nn.Module) -> Any:
    return sum(isinstance(part, nn.Conv2d) for part in module.modules())


def test_a_speedup_takes_as_few_blocks_as_it_needs() -> None:
    """Times that are told by the number of convolutions."""
    timing = Timing(ConvolutionCounter("onnxruntime-cpu"), count_convolutions, [])
    net = conv_net()  # 19 convolutions, two in a block
    config = PruneLayers(speedup=1.4, compensate=False)
    result = apply_prune_layers(config, loaded_images(net), options(image_batches(), timing=timing))
    assert sum(isinstance(part, nn.Conv2d) for part in net.modules()) == 13
    assert "1.46 times as fast" in result.notes[0].text
    net = conv_net()
    with pytest.raises(PassError, match=r"speedup 9 is out of reach"):
        apply_prune_layers(PruneLayers(speedup=9.0), loaded_images(net), options(image_batches(), timing=timing))
    with pytest.raises(PassError, match="speedup needs a target that runs here"):
        apply_prune_layers(PruneLayers(speedup=1.4), loaded_images(net), options(image_batches()))


def test_no_calibration_data_is_refused() -> None:
    with pytest.raises(PassError, match="there is no calibration data"):
        apply_prune_layers(PruneLayers(keep=2), loaded_images(conv_net()), options(()))


# The record


def test_a_record_is_applied_once() -> None:
    """A list that a configuration has made as short already stays."""
    blocks = nn.ModuleList(Adds(4, 4) for _ in range(4))
    keep_blocks(blocks, (0, 3))
    keep_blocks(blocks, (0, 3))
    assert numbers_of(blocks) == (0, 3)
    short = nn.ModuleList(Adds(4, 4) for _ in range(2))
    keep_blocks(short, (0, 3))
    assert len(short) == 2 and numbers_of(short) == (0, 3)
    keep_blocks(blocks, (3,))
    assert numbers_of(blocks) == (3,)


def test_a_later_record_forgets_sizes_of_what_is_gone() -> None:
    early = Shapes({"layers.0.w": (2,), "layers.2.w": (2,), "head": (4,)}, {"layers.2": {"n": 2}})
    both = early.then(Shapes(blocks={"layers": (0, 1)}))
    assert both == Shapes({"layers.0.w": (2,), "head": (4,)}, blocks={"layers": (0, 1)})
    assert Shapes({"head.w": (4,)}).then(Shapes(skipped=("head",))).tensors == {}


@pytest.mark.parametrize("record", [Shapes(blocks={"nobody": (0,)}), Shapes(skipped=("nobody",))])
def test_a_record_of_another_model_is_refused(record: Shapes) -> None:
    with pytest.raises(SourceError, match="the record of shapes is of another model"):
        fit(conv_net(), record)


# The plan


def facts() -> ModelFacts:
    """Three blocks in a list, of two layers each, between an embedding and a head."""
    names = [f"layers.{i}.{part}" for i in range(3) for part in ("a", "b")]
    inner = [LayerFacts(name, "Linear", "MatMul", f"{name}.weight", (4, 4), 16) for name in names]
    ends = [
        LayerFacts("emb", "Embedding", "Gather", "emb.weight", (9, 4)),
        LayerFacts("head", "Linear", "MatMul", "emb.weight", (9, 4), 36),
    ]
    blocks = tuple(Removable(f"layers.{i}", (f"layers.{i}.a", f"layers.{i}.b"), True) for i in range(3))
    input_groups = [
        (
            InputGroup((f"layers.{i}.a",), f"layers.{i - 1}.norm", "norm"),
            InputGroup((f"layers.{i}.b",), f"layers.{i}.a", "linear"),
        )
        for i in range(3)
    ]
    structure = Structure(
        tuple(BlockFacts(f"layers.{i}", input_groups[i]) for i in range(3)), after=(InputGroup(("head",)),)
    )
    return ModelFacts("torch", "Net", "generic", (), (), (*ends, *inner), structure=structure, removable=blocks)


def test_the_facts_afterwards_have_the_names_afterwards() -> None:
    after = without_blocks(facts(), ["layers.1"])
    assert [la.name for la in after.layers] == ["emb", "head", "layers.0.a", "layers.0.b", "layers.1.a", "layers.1.b"]
    assert [la.weight for la in after.layers[:3]] == ["emb.weight", "emb.weight", "layers.0.a.weight"]
    assert after.macs == facts().macs - 32
    assert after.structure is not None and after.removable is not None
    second = after.structure.blocks[1]
    assert second.name == "layers.1"
    assert second.input_groups == (InputGroup(("layers.1.a",)), InputGroup(("layers.1.b",), "layers.1.a", "linear"))
    assert after.removable[1] == Removable("layers.1", ("layers.1.a", "layers.1.b"), True)
    skipped = replace(facts(), removable=tuple(replace(one, listed=False) for one in facts().removable or ()))
    assert [la.name for la in without_blocks(skipped, ["layers.1"]).layers][4:] == ["layers.2.a", "layers.2.b"]


def test_the_plan_says_which_blocks_go_where_it_knows() -> None:
    plan = PruneLayers(layers=(0, 2)).check(facts(), TARGET)
    said = {one.layer: (one.action, one.reason) for one in plan.decisions}
    assert said["layers.1.a"] == ("pruned", "layers.1 goes")
    assert said["layers.2.a"] == ("kept", "layers.2 stays")
    assert said["head"] == ("kept", "in no block that could go")
    assert "2 of 3 blocks stay" in plan.notes[0].text
    open_yet = PruneLayers(keep=2).check(facts(), TARGET)
    assert open_yet.decisions[-1].reason == "2 of 3 blocks stay; calibration data tell which"
    assert len(open_yet.facts.layers) == 6


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"keep": 3}, "all 3 blocks that could go would stay; keep 1 to 2 of them"),
        ({"drop": 0.1}, "all 3 blocks that could go would stay"),
        ({"layers": (0, 7)}, "layers: there is no block 7; the 3 that could go are 0 to 2"),
        ({"layers": (0, 0)}, r"layers: \[0, 0\]: name each block that stays once"),
    ],
)
def test_the_plan_refuses(config: dict[str, Any], message: str) -> None:
    assert re.search(f"^prune_layers: {message}", PruneLayers(**config).check(facts(), TARGET).problems[0])


def test_models_without_blocks_are_refused() -> None:
    one = replace(facts(), removable=(facts().removable or ())[:1])
    assert "1 blocks were found that could go" in PruneLayers(keep=1).check(one, TARGET).problems[0]
    onnx = replace(facts(), source="onnx", removable=None)
    assert "an ONNX file cannot be shortened" in PruneLayers(keep=1).check(onnx, TARGET).problems[0]


@pytest.mark.parametrize("config", [{}, {"keep": 2, "drop": 0.5}])
def test_one_budget_and_no_more(config: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="give exactly one of keep, drop, layers, speedup"):
        PruneLayers(**config)


# Through recipes


def recipe(folder: Path, passes: str) -> Recipe:
    """A small network with random weights, on noise."""
    save_file(conv_net(n_blocks=2).state_dict(), folder / "net.safetensors")
    np.savez(folder / "data.npz", image=images(48), label=np.arange(48) % 10)
    (folder / "recipe.yaml").write_text(
        f"""
version: 1
name: shallow
model:
  source: "python:compress.zoo.cifar_resnet:CifarResNet"
  args: {{n_blocks: 2}}
  weights: net.safetensors
  task: image-classification
preprocess: {{kind: tensor}}
data:
  calibration: {{source: "npz:data.npz", columns: {{pixel_values: image}}}}
  evaluation: {{source: "npz:data.npz", columns: {{pixel_values: image, label: label}}}}
passes: [{passes}]
export: [{{kind: onnx}}, {{kind: checkpoint}}]
validate: {{benchmark: {{iterations: 1, warmup: 0, processes: 1}}, steps: false}}
"""
    )
    return compress.load_recipe(folder / "recipe.yaml")


@pytest.mark.slow
def test_the_bundle_is_smaller_and_its_weights_load_again(tmp_path: Path) -> None:
    """safetensors and shapes.json: the factory takes them, and gives what the ONNX file gives; so does the cache."""
    own = recipe(tmp_path, "{kind: prune_layers, keep: 1}")
    report = compress.apply(own, tmp_path / "out", tmp_path / "cache", quiet=True)
    assert report is not None
    assert [row["action"] for row in report.layers if row["type"] == "block"].count("pruned") == 3
    files = [tmp_path / "out" / name / "model.onnx" for name in ("model", "baseline")]
    assert files[0].stat().st_size < 0.9 * files[1].stat().st_size
    spec = own.model.model_copy(update={"weights": str(tmp_path / "out/checkpoint/model.safetensors")})
    again = load_model(locate(spec, tmp_path), {"pixel_values": ((3, 8, 8), "float32")})
    x = images(3, seed=9)
    session = ort.InferenceSession(files[0], providers=["CPUExecutionProvider"])
    expected = session.run(None, {"pixel_values": x})[0]
    for loaded in (again, from_the_cache(own, tmp_path)):
        assert np.abs(loaded.module(torch.from_numpy(x)).numpy() - expected).max() < 1e-4


def from_the_cache(own: Recipe, folder: Path) -> TorchModel:
    plan = make_plan(own, folder / "cache")
    assert plan.steps[-1].cached
    sets = {name: load_set(plan.inputs, name, None) for name in plan.inputs.data}
    (folder / "log").unlink(missing_ok=True)
    ground = RunContext(plan, ResultCache(folder / "cache"), RunLog(folder / "log", quiet=True), sets)
    loaded, _ = _run_model_passes(ground, not_kept)
    return loaded


def test_a_recipe_for_a_model_without_blocks_is_refused() -> None:
    quick = QUICKSTART
    with pytest.raises(PlanError, match="1 blocks were found that could go"):
        compress.plan(compress.load_recipe(quick, ["passes=[{kind: prune_layers, keep: 1}]"]))
