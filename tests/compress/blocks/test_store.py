"""The store and the models over it: what is in the files is what the modules get."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from streaming import W4, bert, context, gpt2, llama, nearest, streamed, sum_grams, texts, together
from torch import nn
from transformers import AutoModel, BertConfig, BertForSequenceClassification, Qwen3MoeConfig, Qwen3MoeForCausalLM

from compress.blocks.materialise import copy_without_weights, empty_weights, memory_store, tied_names
from compress.blocks.store import Packed, WeightStore
from compress.blocks.stream import Stream
from compress.blocks.streamed import StreamedModel
from compress.errors import SourceError
from compress.facts import BlockFacts, InputGroup, Structure
from compress.formats.schemes import PRESETS
from compress.models.open_streamed import open_streamed_model
from compress.models.source import locate
from compress.rounding.quantized_weight import QuantizedWeight
from compress.specs import ModelSpec
from compress.structure.find import find_structure

FEEDS: Any = {"input_ids": ((12,), "int64"), "attention_mask": ((12,), "int64"), "token_type_ids": ((12,), "int64")}
ONE = Structure((BlockFacts("", ()),))


def load(folder: Path, task: str = "text-generation", **more: Any) -> StreamedModel:
    return open_streamed_model(locate(ModelSpec(source=f"dir:{folder}", task=task, **more), Path()), FEEDS, ONE)  # type: ignore[arg-type]


def save(net: nn.Module, folder: Path, size: str = "20kB") -> Path:
    net.save_pretrained(folder, max_shard_size=size)  # type: ignore[operator]
    return folder


@pytest.mark.parametrize("size", ["20kB", "1GB"])
@pytest.mark.parametrize("tied", [True, False])
def test_shards_are_read_as_the_model_has_them(size: str, tied: bool, tmp_path: Path) -> None:
    net = llama(tied=tied)
    model = load(save(net, tmp_path, size))
    assert (len(list(tmp_path.glob("*.safetensors"))) > 3) == (size == "20kB")
    assert not model.notes and model.folder == tmp_path and model.architecture == "LlamaForCausalLM"
    assert all(parameter.device.type == "meta" for parameter in model.build().parameters())
    state = net.state_dict()
    assert set(model.store.names()) == set(state) and len(model.tied) == tied
    for name, tensor in state.items():
        assert model.store.shape(name) == tuple(tensor.shape)
        assert torch.equal(model.store.read(name), tensor) and torch.equal(model.store.read_float(name), tensor)
    module, batches = model.materialise(), texts()
    head, table = (module.get_parameter(f"wrapped.{name}.weight") for name in ("lm_head", "model.embed_tokens"))
    assert (head is table) == tied
    with torch.no_grad():
        wanted, out = net(**together(batches)).logits, module(**together(batches))
    assert torch.allclose(out, wanted, atol=1e-6)


def test_half_precision_is_read_as_float32(tmp_path: Path) -> None:
    net, name = llama().to(torch.bfloat16), "model.layers.0.mlp.up_proj.weight"
    read = load(save(net, tmp_path)).store.read(name)
    assert read.dtype == torch.float32 and torch.equal(read, net.get_parameter(name).float())


def test_prefixes_come_and_go(tmp_path: Path) -> None:
    """The base model of a checkpoint with a head, and a head's model of what BertModel saved."""
    torch.manual_seed(0)
    config = BertConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=64)
    net = BertForSequenceClassification(config).eval()
    base = load(save(net, tmp_path / "a"), "feature-extraction")
    assert not base.notes and "encoder.layer.0.output.dense.weight" in base.store
    weight = net.get_parameter("bert.encoder.layer.0.output.dense.weight")
    assert torch.equal(base.store.read("encoder.layer.0.output.dense.weight"), weight)
    whole = load(tmp_path / "a", "text-classification")
    assert torch.equal(whole.store.read("bert.encoder.layer.0.output.dense.weight"), weight)


@pytest.mark.parametrize("make", [llama, bert, gpt2])
def test_memory_and_files_are_the_same_store(make: Any, tmp_path: Path) -> None:
    in_memory, on_disk = streamed(make()).store, streamed(make(), tmp_path).store
    assert set(in_memory.names()) == set(on_disk.names()) and in_memory.tied == on_disk.tied
    for name in in_memory.names():
        assert torch.equal(in_memory.read(name), on_disk.read(name)) and in_memory.shape(name) == on_disk.shape(name)


def experts_model() -> nn.Module:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        vocab_size=64,
        decoder_sparse_step=1,
    )
    return Qwen3MoeForCausalLM(config).eval()


@pytest.mark.parametrize("stacked", [False, True])
def test_experts_become_layers(stacked: bool, tmp_path: Path) -> None:
    """From a checkpoint that names them one by one, and from one that holds them in stacks."""
    net, batches = experts_model(), texts()
    save(net, tmp_path, "1GB")
    if stacked:
        save_file({name: t.clone() for name, t in net.state_dict().items()}, tmp_path / "model.safetensors")
    model = load(tmp_path)
    assert not model.notes and "model.layers.1.mlp.experts.3.down_proj.weight" in model.store
    with torch.no_grad():
        assert torch.allclose(model.materialise()(**together(batches)), net(**together(batches)).logits, atol=1e-5)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    assert model.store.shape(name) == tuple(model.store.read(name).shape) == (16, 32)
    assert torch.equal(model.store.read(name), net.get_parameter("model.layers.1.mlp.experts.gate_up_proj")[3, 16:])


def test_experts_are_worked_on_one_by_one(tmp_path: Path) -> None:
    net, batches = experts_model(), texts()
    model = load(save(net, tmp_path))
    probe = {name: tensor[:2, :8].to("meta") for name, tensor in together(batches).items()}
    model = StreamedModel(model.build, model.store, find_structure(model.build().to("meta"), probe), model.parameters)
    rows: dict[str, int] = {}

    def visit(input_group: InputGroup, x: torch.Tensor) -> None:
        rows[input_group.layers[0]] = rows.get(input_group.layers[0], 0) + len(x)

    for block in (stream := Stream(model, context(batches), float_too=True)):
        block.lockstep(visit, lambda input_group: None)
        assert all(torch.equal(a, block.float_outputs(i)) for i, a in enumerate(block.outputs()))
    experts = [n for layer, n in rows.items() if "layers.1.mlp.experts" in layer and layer.endswith("gate_proj")]
    assert sum(experts) == 2 * (5 * 12 - 4)  # two experts for each token, none for padding
    assert not stream.result().model.quantized_layers()


@pytest.mark.parametrize("make", [llama, gpt2, experts_model])
@pytest.mark.parametrize("lockstep", [False, True])
def test_padding_counts_in_no_gram_matrix(make: Any, lockstep: bool, tmp_path: Path) -> None:
    """Padded texts give the X^T X of the same texts without padding, for every layer, experts' included."""
    padded = texts(6)
    for batch in padded:
        batch["input_ids"][batch["attention_mask"] == 0] = 63
    alone = [{k: v[:, batch["attention_mask"][0] == 1] for k, v in batch.items()} for batch in padded]
    net = make()
    with torch.no_grad():
        net.get_input_embeddings().weight[63] *= 100  # would be seen
    model = load(save(net, tmp_path))
    probe = {name: tensor[:2, :8].to("meta") for name, tensor in together(padded).items()}
    model = StreamedModel(model.build, model.store, find_structure(model.build().to("meta"), probe), model.parameters)
    found, wanted = (sum_grams(model, batches, lockstep) for batches in (padded, alone))
    assert found.keys() == wanted.keys() and len(found) > 3
    for layer, gram in wanted.items():
        torch.testing.assert_close(found[layer], gram, rtol=1e-4, atol=1e-4 * float(gram.abs().max()), msg=layer)


FACTORY = """
import torch
from torch import nn

def make():
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    return net

def computes():
    net = make()
    net.register_buffer("norm", net[0].weight.norm())
    return net

def looks():
    net = make()
    assert float(net[0].weight.detach().sum()) != 0
    return net
"""


@pytest.mark.parametrize(
    ("factory", "weights", "note"),
    [
        ("make", "w.safetensors", None),
        ("make", "w.pt", "w.pt is no safetensors file"),
        ("make", None, "the factory itself gives the trained model"),
        ("looks", "w.safetensors", "the factory cannot build without weights"),
        ("computes", None, "the factory itself gives"),
    ],
)
def test_factories(factory: str, weights: str | None, note: str | None, tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(FACTORY)
    names: dict[str, Any] = {}
    exec(FACTORY, names)
    net = names[factory]().eval()
    torch.save(net.state_dict(), tmp_path / "w.pt")
    save_file(net.state_dict(), tmp_path / "w.safetensors")
    spec = ModelSpec(source=f"python:{tmp_path}/m.py:{factory}", task="generic", weights=weights)
    model = open_streamed_model(locate(spec, tmp_path), {"input": ((8,), "float32")}, ONE)
    assert (note is None and not model.notes) or (note is not None and note in model.notes[0])
    x = torch.randn(3, 8)
    with torch.no_grad():
        assert torch.equal(model.materialise()(x), net(x))
    assert all(parameter.device.type == "meta" for parameter in model.build().parameters())


def test_quantized_weights_come_back_as_they_were_put() -> None:
    """Symmetric and not, FP8, and transposed for GPT-2's Conv1D."""
    net, rng = gpt2(), np.random.default_rng(0)
    wanted: dict[str, QuantizedWeight] = {}
    stream = Stream(streamed(net), context(), data=False)
    for block in stream:
        for k, layer in enumerate(name for name in block.layers if ".h." in name):
            matrix = block.matrix(layer)
            if k % 3 == 0:
                weight, scheme = nearest(matrix), W4
            elif k % 3 == 1:
                scheme = PRESETS["W3A16_ASYM"].with_group(8)
                weight = nearest(matrix, scheme)
            else:
                scheme = PRESETS["FP8"]
                values = rng.normal(size=matrix.shape).astype(ml_dtypes.float8_e4m3fn)
                weight = QuantizedWeight(values, np.full((len(values), 1), -0.5, np.float32), None, 8, 0)
            block.put(layer, weight, scheme)
            assert np.array_equal(block.matrix(layer).numpy(), weight.dequantize())
            wanted[layer] = weight
    model = stream.result().model
    assert model.quantized_layers() == tuple(wanted)
    for layer, weight in wanted.items():
        found = model.store.quantized(layer)
        assert found is not None and (found.bits, found.group_size) == (weight.bits, weight.group_size)
        assert found.values.dtype == weight.values.dtype and np.array_equal(found.values, weight.values)
        assert np.array_equal(found.scales, weight.scales)
        assert (found.zero_points is None) == (weight.zero_points is None)
        name = f"{layer}.weight"
        assert np.array_equal(model.store.read(name).numpy().T, weight.dequantize())
        assert model.store.shape(name) == tuple(net.get_parameter(name).shape)
        assert torch.equal(model.store.read_float(name), net.get_parameter(name))
    assert model.store.quantized("transformer.wte") is None and model.store.quantized("nothing") is None


def test_a_missing_shard(tmp_path: Path) -> None:
    save(llama(), tmp_path)
    path = sorted(tmp_path.glob("*.safetensors"))[1]
    path.unlink()
    with pytest.raises(SourceError, match=re.escape(path.name)):
        load(tmp_path)


def test_an_index_that_promises_too_much(tmp_path: Path) -> None:
    save(llama(), tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    stored = json.loads(index.read_text())
    first = next(iter(stored["weight_map"].values()))
    index.write_text(json.dumps({**stored, "weight_map": {**stored["weight_map"], "more": first}}))
    with pytest.raises(SourceError, match=re.escape(first)):
        load(tmp_path)
    index.write_text("{}")
    with pytest.raises(SourceError, match="index"):
        load(tmp_path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    path = save(llama(), tmp_path, "1GB") / "model.safetensors"
    state = load_file(path)
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, path, {"format": "pt"})
    with pytest.raises(SourceError, match=r"the weights lack 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        load(tmp_path)


def test_another_shape_is_named(tmp_path: Path) -> None:
    path = save(llama(), tmp_path, "1GB") / "model.safetensors"
    state = load_file(path)
    state["model.layers.1.mlp.up_proj.weight"] = torch.ones(4, 4)
    save_file(state, path, {"format": "pt"})
    with pytest.raises(SourceError, match=r"up_proj\.weight' is \[4, 4\] in the file, \[48, 32\] in the model"):
        load(tmp_path)


def test_nan_in_one_layer_and_a_damaged_file(tmp_path: Path) -> None:
    path = save(llama(), tmp_path, "1GB") / "model.safetensors"
    state = load_file(path)
    state["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    save_file(state, path, {"format": "pt"})
    model = load(tmp_path)
    names = []
    with pytest.raises(SourceError, match=rf"NaN or infinity in 'model\.layers\.1\.mlp\.up_proj\.weight' \({path}\)"):  # noqa: PT012
        for block in Stream(model_with_blocks(model), context(texts())):
            names.append(block.name)
    assert names == ["model.layers.0"]
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(SourceError, match=rf"{path}: '.*' cannot be read: .*copy or download the file again"):
        model.store.read("model.layers.0.mlp.up_proj.weight")
    shutil.rmtree(tmp_path)
    with pytest.raises(SourceError, match="cannot be read"):
        model.store.read("model.layers.0.mlp.up_proj.weight")


def model_with_blocks(model: StreamedModel) -> StreamedModel:
    return StreamedModel(model.build, model.store, streamed(llama()).structure, model.parameters)


def test_unknown_names() -> None:
    store = streamed(llama()).store
    assert "nothing" not in store and "lm_head.weight" in store
    with pytest.raises(KeyError, match="the model has no tensor 'nothing'"):
        store.read("nothing")


def test_emptied_modules_keep_their_ties_and_buffers() -> None:
    net = llama(tied=True)
    copy = copy_without_weights(net)
    assert tied_names(copy) == tied_names(net) == {"lm_head.weight": "model.embed_tokens.weight"}
    buffers = dict(copy.named_buffers())
    assert buffers and all(torch.equal(buffer, buffers[name]) for name, buffer in net.named_buffers())
    with empty_weights():
        first = nn.Linear(3, 3)
        second = nn.Linear(3, 3)
        second.weight = first.weight
        norm = nn.BatchNorm1d(3)
    assert first.weight.device.type == "meta" and second.weight is first.weight
    assert norm.running_mean is not None and norm.running_mean.device.type == "cpu"
    assert nn.Linear(2, 2).weight.device.type == "cpu"


def test_a_store_reads_copies() -> None:
    """Changing what was read changes nothing that is stored."""
    net = nn.Linear(2, 2)
    store = memory_store(net)
    store.read("weight").zero_()
    assert net.weight.any() and isinstance(store, WeightStore) and Packed is not None


def test_an_automodel_reads_what_the_store_reads(tmp_path: Path) -> None:
    net = bert()
    model = load(save(net, tmp_path), "feature-extraction")
    other = AutoModel.from_pretrained(tmp_path, add_pooling_layer=False)
    assert all(torch.equal(model.store.read(name), tensor) for name, tensor in other.state_dict().items())


def test_a_checkpoint_without_counters_of_batch_norms_is_held_in_memory(tmp_path: Path) -> None:
    from model_specs import DIGITS_FEEDS, DIGITS_SPEC

    from compress.models.open_streamed import open_streamed_model
    from compress.structure.find import one_block
    from compress.zoo.digits_resnet import digits_resnet

    state = load_file(str(DIGITS_SPEC.weights))
    kept = {name: values for name, values in state.items() if not name.endswith("num_batches_tracked")}
    save_file(kept, tmp_path / "lean.safetensors")
    spec = DIGITS_SPEC.model_copy(update={"weights": str(tmp_path / "lean.safetensors")})
    opened = open_streamed_model(locate(spec, tmp_path), DIGITS_FEEDS, one_block(digits_resnet(), "whole"))
    assert all(name in opened.store for name in digits_resnet().state_dict())
    assert "num_batches_tracked" in opened.notes[0]
