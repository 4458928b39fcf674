"""Whatever a layer keeps between calls: the model's own logits from a graph, or a refusal that names the way out."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from decoder_graphs import VOCABULARY, build, kinds
from tiny_decoders import CONFIGS, REFUSED, make
from torch import Tensor, nn
from torch.nn import functional

from compress.blocks.experts import unstack_experts
from compress.errors import ExportError, NotExportable
from compress.export.decoder import export_decoder, find_states
from compress.export.onnx import finish, save_graph
from compress.export.recurrence import KERNELS, OPERATOR, exchange_recurrences
from compress.export.rotations import RealRotations
from compress.formats.targets import TARGETS
from compress.graph.specs import cache_of, past_name
from compress.rounding.state import GraphState
from runtime.backends import Session, find_backend
from runtime.decode.kv_cache import Decoder
from runtime.decode.scoring import logit_pieces
from runtime.encode.language import LanguageEncoder, LanguagePreprocess

N_GREEDY = 8
ALWAYS = ("qwen3_5_text", "lfm2", "mimo_v2_flash", "mamba2")
"""Between them: a recurrence beside keys, a convolution, values unlike keys, a window, experts, and no keys at all."""


def last_logits(module: nn.Module, row: list[int]) -> np.ndarray:
    """Logits after a text that is read in one call, without a cache."""
    with torch.no_grad():
        result: np.ndarray = module(input_ids=torch.tensor([row]), use_cache=False).logits[0, -1].numpy()
    return result


BUFFERS = {"qwen3_5_text": [1], "lfm2": [1], "mimo_v2_flash": [], "mamba2": []}
"""Layers whose keys and values have one buffer, beside those that keep something else."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", kinds([kind for kind in CONFIGS if kind not in REFUSED], ALWAYS))
def test_a_graph_says_what_the_model_says(kind: str, tmp_path: Path) -> None:
    reference = make(kind)
    module = copy.deepcopy(reference)
    unstack_experts(module)
    graph, _ = finish(GraphState(export_decoder(module)), TARGETS["onnxruntime-cpu"])
    save_graph(graph, tmp_path / "model.onnx")
    session, cache = find_backend("onnxruntime-cpu").open(tmp_path / "model.onnx", 1, {}), cache_of(graph)
    assert cache is not None
    buffers = [past_name(layer, part) for layer in BUFFERS.get(kind, ()) for part in ("key", "value")]
    assert kind not in BUFFERS or cache.buffers() == tuple(buffers)
    decoder = Decoder(session, cache)
    rng = np.random.default_rng(0)
    rows = [rng.integers(3, VOCABULARY, n).tolist() for n in (9, 5, 14)]  # the shorter ones get padding on the left
    got = decoder.start([np.array(row) for row in rows], 14 + N_GREEDY)
    for step in range(N_GREEDY):
        expected = np.stack([last_logits(reference, row) for row in rows])
        assert np.abs(got - expected).max() < 1e-4 * np.abs(expected).max()
        tokens = expected.argmax(axis=1)
        assert got.argmax(axis=1).tolist() == tokens.tolist()
        for row, token in zip(rows, tokens, strict=True):
            row.append(int(token))
        if step < N_GREEDY - 1:
            got = decoder.step(tokens)
    check_pieces(session, reference, rows[0])


def check_pieces(session: Session, reference: nn.Module, row: list[int]) -> None:
    """A text that is judged in pieces has the logits of the whole."""
    encoder = LanguageEncoder(LanguagePreprocess(), session.inputs, None, VOCABULARY)
    pieces = logit_pieces([session], encoder, [np.array(row)], 1, most_bytes=4 * VOCABULARY * 6)
    found = [logits.copy() for _, _, (logits,) in pieces]
    with torch.no_grad():
        whole = reference(input_ids=torch.tensor([row[:-1]]), use_cache=False).logits[0].numpy()
    assert len(found) == 3 and np.abs(np.concatenate(found) - whole).max() < 1e-4 * np.abs(whole).max()


@pytest.mark.parametrize(
    ("kind", "shown"),
    {
        "mimo_v2_flash": "0.key [2, 0, 16], 0.value [2, 0, 8], 1.key [4, 0, 16], 1.value [4, 0, 8]",
        "lfm2": "0.conv_state [32, 3], 1.key [2, 0, 8], 1.value [2, 0, 8]",
        "gemma4_text": "0.key [2, 0, 16], 0.value [2, 0, 16], 1.key [2, 0, 32], 1.value [2, 0, 32]",
        "deepseek_v32": "0.key [1, 0, 32], 0.value [1, 0, 8], 0.indexer_key [0, 16]",
        "falcon_h1": "0.key [2, 0, 8], 0.value [2, 0, 8], 0.conv_state [128, 4], 0.recurrent_state [4, 16, 16]",
    }.items(),
)
def test_states_are_found_by_running_the_model(kind: str, shown: str) -> None:
    module = copy.deepcopy(make(kind))
    unstack_experts(module)
    cache = find_states(module)
    assert ", ".join(f"{each.layer}.{each.kind} {list(each.shape)}" for each in cache.states) == shown
    assert cache.recurrent == ("recurrent" in shown)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("minimax", "MiniMaxForCausalLM: keeps a MiniMaxCache, whose tensors no call can be given"),
        ("recurrent_gemma", "RecurrentGemmaForCausalLM: keeps a NoneType"),
        ("rwkv", "RwkvForCausalLM: its forward pass takes no past_key_values"),
    ],
)
def test_what_no_graph_holds_is_refused_by_shapes_alone(kind: str, said: str) -> None:
    module = copy.deepcopy(make(kind))
    unstack_experts(module)
    with pytest.raises(NotExportable, match=rf"{said}.*; use target: transformers"):
        find_states(module)


def test_a_table_of_all_positions_that_is_read_whole_is_no_other_way() -> None:
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY, "window_size": 8}
    net = build(transformers.GPTNeoConfig(**sizes, attention_types=[[["global", "local"], 1]]))
    assert len(find_states(net).states) == 4


class Chooses(nn.Module):
    """Runs an expert for each that a token has chosen, and leaves the tokens of the last one as they are."""

    def forward(self, x: Tensor) -> Tensor:
        for expert in x.argmax(-1).unique():
            x = x if int(expert) == 31 else 2 * x
        return x


def test_code_that_branches_by_what_it_computes_is_refused_by_shapes_alone() -> None:
    module = copy.deepcopy(make("lfm2"))
    module.model.layers[0].feed_forward = Chooses()
    with pytest.raises(NotExportable, match=r"this way or that by what it computes.*; use target: transformers"):
        find_states(module)


def test_complex_numbers_are_pairs() -> None:
    """What code does with those by which it turns keys, and what comes of it."""
    rng = torch.Generator().manual_seed(0)
    angles, keys = torch.randn(2, 3, 4, generator=rng), torch.randn(2, 5, 3, 8, generator=rng)

    def turn() -> torch.Tensor:
        turns: Any = torch.polar(torch.ones_like(angles), angles) * 0.5
        turns = (turns.unsqueeze(1)[:, :, :2] * torch.ones(4)).to(keys.device)
        numbers = torch.view_as_complex(keys.reshape(*keys.shape[:-1], -1, 2))[..., :2, :]
        assert turns.shape == (2, 1, 2, 4)
        return torch.view_as_real(numbers * turns).flatten(3)

    expected = turn()
    with RealRotations():
        torch.testing.assert_close(turn(), expected)


class Odd(nn.Module):
    """A decoder of one layer whose `keep` says what its cache has after a call."""

    def __init__(self, keep: Any) -> None:
        super().__init__()
        self.keep, self.table = keep, nn.Embedding(9, 8)
        self.config = SimpleNamespace(max_position_embeddings=4096)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, past_key_values: Any = None, **_: Any
    ) -> object:
        from transformers import DynamicCache

        hidden = self.table(input_ids)
        cache = DynamicCache() if past_key_values is None else past_key_values
        self.keep(cache, hidden)
        return SimpleNamespace(logits=hidden, past_key_values=cache)


def walk(cache: Any, hidden: torch.Tensor) -> None:
    for token in hidden.split(1, dim=1):
        cache.update(token[:, None], token[:, None], 0)


def walk_by_chunks(cache: Any, hidden: torch.Tensor) -> None:
    for chunk in hidden.split(64, dim=1):
        cache.update(chunk[:, None], chunk[:, None], 0)


def turn_when_long(cache: Any, hidden: torch.Tensor) -> None:
    keys = hidden if hidden.shape[1] <= 2000 else hidden.flip(1)
    cache.update(keys[:, None], hidden[:, None], 0)


def count(cache: Any, hidden: torch.Tensor) -> None:
    keep_all(cache, hidden)
    cache.layers[0].n_read = cache.get_seq_length()


def keep_twice(cache: Any, hidden: torch.Tensor) -> None:
    cache.update(hidden.repeat(1, 2, 1)[:, None], hidden.repeat(1, 2, 1)[:, None], 0)


def keep_without_rows(cache: Any, hidden: torch.Tensor) -> None:
    cache.update(hidden[:1, None], hidden[:1, None], 0)


def place_by_count(cache: Any, hidden: torch.Tensor) -> None:
    rows = functional.embedding(torch.arange(hidden.shape[1]), hidden.new_ones(2048, 8))
    cache.update((hidden + rows)[:, None], hidden[:, None], 0)


def place_by_index(cache: Any, hidden: torch.Tensor) -> None:
    rows = nn.Parameter(hidden.new_ones(2048, 8))[torch.arange(hidden.shape[1])]
    cache.update((hidden + rows)[:, None], hidden[:, None], 0)


def keep_all(cache: Any, hidden: torch.Tensor) -> None:
    cache.update(hidden[:, None], hidden[:, None], 0)


def look(cache: Any, hidden: torch.Tensor) -> None:
    keep_all(cache, hidden * hidden.sum().item())


def choose(cache: Any, hidden: torch.Tensor) -> None:
    if hidden.sum() > 0:
        keep_all(cache, hidden)


@pytest.mark.parametrize(
    ("keep", "said"),
    [
        (walk, "its code takes other steps with long texts"),
        (walk_by_chunks, "its code takes other steps with long texts"),
        (turn_when_long, "its code takes other steps with long texts"),
        (count, "layer 0 keeps a DynamicLayer that counts its tokens in n_read"),
        (place_by_count, "it counts positions without the mask"),
        (place_by_index, "it counts positions without the mask"),
        (choose, "its code goes this way or that by what it computes"),
        (keep_twice, "layer 0 keeps keys, which grows by something else than each token"),
        (keep_without_rows, r"layer 0 keeps keys \(1, 1, 4, 8\), which is no row for each text"),
    ],
)
def test_a_cache_that_no_graph_can_follow_is_refused(keep: Any, said: str) -> None:
    with pytest.raises(NotExportable, match=f"Odd: {said}"):
        find_states(Odd(keep))


class Widens(Odd):
    """Takes it for granted that an image of four columns came first."""

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, past_key_values: Any = None, **more: Any
    ) -> object:
        if past_key_values is not None:
            seen = attention_mask.new_ones(len(input_ids), 4).bool()
            attention_mask = torch.cat([seen, attention_mask.bool()], dim=-1)
        return super().forward(input_ids, attention_mask, past_key_values, **more)


def test_a_mask_that_is_widened_is_refused() -> None:
    assert [each.kind for each in find_states(Odd(keep_all)).states] == ["key", "value"]
    with pytest.raises(NotExportable, match="Widens: it widens the mask by columns of which its cache holds nothing"):
        find_states(Widens(keep_all))


def test_code_that_looks_at_values_is_run_where_there_are_some() -> None:
    module = Odd(look)
    nn.init.ones_(module.table.weight)
    with pytest.raises(ExportError, match="Odd: does not run with a cache") as raised:
        find_states(module)
    assert not isinstance(raised.value, NotExportable), "the plan cannot know"
    assert [each.kind for each in find_states(module, run=True).states] == ["key", "value"]


def by_steps(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, decay: np.ndarray, state: np.ndarray, beta: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """The recurrence as it is written, token by token."""
    outputs = []
    for t in range(query.shape[1]):
        kept = decay[:, t, :, None, None] if decay.ndim == 3 else decay[:, t, :, :, None]
        state = state * np.exp(kept)
        new = value[:, t]
        if beta is not None:
            new = beta[:, t, :, None] * (new - np.einsum("bhkv,bhk->bhv", state, key[:, t]))
        state = state + key[:, t, :, :, None] * new[:, :, None]
        outputs.append(np.einsum("bhkv,bhk->bhv", state, query[:, t]))
    return np.stack(outputs, axis=1), state


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("by_delta", [False, True])
def test_the_operator_is_the_recurrence(by_channel: bool, by_delta: bool) -> None:
    import onnxruntime
    from onnx import TensorProto, helper

    rng = np.random.default_rng(0)
    b, t, h, k, v = 2, 7, 3, 4, 5
    query, key = (rng.standard_normal((b, t, h, k)).astype(np.float32) / 2 for _ in range(2))
    value, state = rng.standard_normal((b, t, h, v)), rng.standard_normal((b, h, k, v))
    decay = -rng.random((b, t, h, k) if by_channel else (b, t, h))
    beta = rng.random((b, t, h)) if by_delta else None
    given = [query.reshape(b, t, -1), key.reshape(b, t, -1), value.reshape(b, t, -1), state, decay.reshape(b, t, -1)]
    feeds = {f"x{i}": x.astype(np.float32) for i, x in enumerate([*given, *([beta] if by_delta else [])])}
    rule = "gated_delta" if by_delta else "gated"
    node = helper.make_node(
        OPERATOR,
        list(feeds),
        ["y", "z"],
        domain="com.microsoft",
        q_num_heads=h,
        kv_num_heads=h,
        update_rule=rule,
        scale=1.0,
    )
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, x.shape) for name, x in feeds.items()]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "yz"]
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], "g", inputs, outputs), opset_imports=imports, ir_version=10)
    got, last = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
    expected, kept = by_steps(query, key, value, decay, state, beta)
    np.testing.assert_allclose(got.reshape(b, t, h, v), expected, atol=1e-5)
    np.testing.assert_allclose(last, kept, atol=1e-5)


def test_every_kernel_that_is_exchanged_is_one_of_transformers_and_comes_back() -> None:
    import sys

    found = set()
    for kind in ("qwen3_5_text", "kimi_linear", "mamba2", "jamba"):
        module = make(kind)
        file = sys.modules[type(module).__module__]
        before = dict(vars(file))
        with exchange_recurrences(module):
            found |= {value.func for name, value in vars(file).items() if value is not before[name]}
        assert vars(file) == before
    assert found == set(KERNELS.values())
