"""The claims scripts about language models: scores, errors and ratios by hand, and which values decide which claim."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from places import BENCHMARKS


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a module of benchmarks/ by its name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.fixture
def common(load: Any) -> Any:
    return load("common")


class Fixed(torch.nn.Module):
    """A language model that predicts the same distribution everywhere."""

    def __init__(self, probabilities: list[float]) -> None:
        super().__init__()
        self.logits = torch.tensor(probabilities).log()

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        assert not use_cache
        return type("Output", (), {"logits": self.logits.expand(*input_ids.shape, -1)})


def test_nats_are_those_of_all_predicted_tokens_over_their_number(load: Any) -> None:
    model = Fixed([0.5, 0.25, 0.25])
    stories = [[1, 0, 0], [1, 2]]  # the first token of each is not predicted
    expected = -(2 * math.log(0.5) + math.log(0.25)) / 3
    assert load("language").nats_per_token(model, stories) == pytest.approx(expected, rel=1e-6)


def test_outliers_change_no_logit_of_a_float_model(load: Any, tmp_path: Path) -> None:
    language = load("language")
    shape = language.QUICK | {"num_hidden_layers": 2, "vocab_size": 64}
    plain = language.load_causal(language.write_random_llama(tmp_path / "m", shape))
    moved = language.load_causal(language.write_outliers(tmp_path / "m", tmp_path / "o"))
    seen: list[float] = []
    for model in (plain, moved):
        norm = model.model.layers[1].post_attention_layernorm
        norm.register_forward_hook(lambda module, args, out: seen.append(float(out.abs().max())))
    ids = torch.from_numpy(language.random_tokens(2, 8, 64))
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, moved(ids).logits, rtol=0, atol=1e-6)
    assert seen[1] > 16 * seen[0]


def test_a_random_llama_has_a_tokenizer_whose_words_are_its_tokens(load: Any, tmp_path: Path) -> None:
    language = load("language")
    folder = language.write_random_llama(tmp_path / "m", language.QUICK | {"num_hidden_layers": 1, "vocab_size": 64})
    assert language.encode_stories(folder, ["w5 w63 w3", "never"]) == [[1, 5, 63, 3], [1, 0]]
    tokens = language.random_tokens(4, 8, 64)
    assert tokens.shape == (4, 8)
    assert tokens.min() >= 3
    assert tokens.max() < 64
    model = language.load_causal(folder)
    assert language.nats_per_token(model, tokens.tolist()) == pytest.approx(math.log(64), rel=0.02)


def test_weights_of_a_file_take_the_place_of_a_models_own(load: Any, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    layer = torch.nn.Linear(2, 2)
    save_file({"weight": torch.ones(2, 2)}, tmp_path / "w.safetensors")
    changed = load("language").with_weights(layer, tmp_path / "w.safetensors")
    assert changed is layer
    assert torch.equal(layer.weight.detach(), torch.ones(2, 2))
    save_file({"other": torch.ones(2, 2)}, tmp_path / "w.safetensors")
    with pytest.raises(KeyError, match="other"):
        load("language").with_weights(layer, tmp_path / "w.safetensors")


def test_mean_cosine_of_unit_rows(load: Any) -> None:
    a = np.array([[1, 0], [0, 1]], np.float32)
    b = np.array([[1, 0], [1, 0]], np.float32)
    assert load("embeddings").mean_cosine(a, b) == 0.5


def test_sentences_of_both_columns_once_each(load: Any, tmp_path: Path) -> None:
    rows = ["\t".join(["c", "f", "y", "0", "5.0", a, b]) for a, b in (("one", "two"), ("two", "three"))]
    (tmp_path / "s.csv").write_text("\n".join(rows) + "\n")
    assert load("embeddings").read_sentences(tmp_path / "s.csv") == ["one", "two", "three"]


def test_rows_of_one_length_hold_the_tokens_in_their_order(load: Any) -> None:
    batches = [{"input_ids": np.array([[1, 2, 3]])}, {"input_ids": np.array([[4, 5, 6, 7]])}]
    rows = load("subjects").equal_rows(batches, 3)
    assert [row["input_ids"].tolist() for row in rows] == [[[1, 2, 3]], [[4, 5, 6]]]


def test_time_of_passes_is_read_from_the_log(common: Any, tmp_path: Path) -> None:
    lines = ("0.10s  loading data: 0.0 s", "4.20s  gptq: 3.5 s", "12.00s  tune: 7.25 s", "13.00s  gptq: note 1 s")
    (tmp_path / "compress.log").write_text("".join(f"{line:>40}\n" for line in lines))
    assert common.pass_seconds(tmp_path, ("gptq",)) == 3.5
    assert common.pass_seconds(tmp_path, ("gptq", "tune")) == 10.75
    assert common.pass_seconds(tmp_path, ("gptq", "awq")) is None


def test_a_child_is_run_with_its_environment_and_its_own_peak_is_measured(common: Any) -> None:
    """Not that of this process, which ru_maxrss begins with: torch alone takes more."""
    code = "import os, sys; held = bytearray(200 << 20); sys.exit(int(os.environ['CODE']))"
    exit_code, peak = common.run_child([sys.executable, "-c", code], {"CODE": "7"})
    assert exit_code == 7
    assert 200 << 20 < peak < 230 << 20


def test_a_job_goes_to_a_peer_and_its_result_comes_back(
    common: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "import json, sys; job = json.load(open(sys.argv[1])); print('talk')\n"
    script += "json.dump({'twice': 2 * job['n'], 'of': job['folder']}, open(job['result'], 'w'))"
    (tmp_path / "peer.py").write_text(script)
    peer = common.Peer("peer", str(tmp_path / "peer.py"))
    answer = common.run_job(peer, {"n": 4, "folder": tmp_path}, tmp_path, "a-name")
    assert answer == {"twice": 8, "of": str(tmp_path)}
    assert (tmp_path / "a-name.log").read_text() == "talk\n"
    (tmp_path / "peer.py").write_text("raise SystemExit('no accelerator')")
    with pytest.raises(common.RunError, match="no accelerator"):
        common.run_job(peer, {}, tmp_path, "a-name")


def test_a_peer_that_fails_has_a_row_with_the_reason(
    load: Any, common: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subjects = load("subjects")

    def fails(*_: Any) -> Any:
        raise common.RunError("dies on a CPU")

    monkeypatch.setattr(subjects, "run_job", fails)
    subject = subjects.Subject("m", tmp_path, "text-generation", "nats", [], lambda folder: None, lambda model: 1.0)
    row = subjects.llmcompressor_row(subject, "awq", 3, 32, common.Call(tmp_path, False, tmp_path))
    assert row == {
        "model": "m",
        "made_by": "llm-compressor awq",
        "bits": 3,
        "group_size": 32,
        "failed": "dies on a CPU",
    }


def quality_rows(module: Any, **change: float) -> list[dict[str, Any]]:
    """Every value on its bar, or changed; "gptq3" is nats of ours gptq at 3 bits."""
    at: dict[str, float] = {f"gptq{bits}": bar for bits, bar in module.GPTQ_BARS.items()}
    at |= {f"best{bits}": bar for bits, bar in module.BEST_BARS.items()} | {"rtn3": 3.7, "awq3": 3.6, "seconds": 30.0}
    at["mixed"] = module.MIXED_BAR
    at |= {"whole": at["gptq4"] + module.WHOLE_NATS - 1e-6, "ratio": module.WHOLE_RATIO}
    at |= {"w4g128": 0.98, "w3g128": 0.90, "w3g64": 0.92} | change
    rows = []
    for bits in (4, 3, 2):
        size = {"model": module.STORIES_MODEL, "bits": bits, "group_size": 32}
        rows.append(size | {"made_by": "ours gptq", "nats": at[f"gptq{bits}"]})
        rows.append(size | {"made_by": "ours best", "nats": at[f"best{bits}"], "seconds": at["seconds"]})
        rows.append(size | {"made_by": "auto-round", "nats": 9.0, "seconds": 30.0})
        rows += [size | {"made_by": f"ours {kind}", "nats": at.get(f"{kind}{bits}", 9.0)} for kind in ("rtn", "awq")]
    whole = {"made_by": "ours gptq whole", "nats": at["whole"], "times_smaller": at["ratio"]}
    rows.append({"model": module.STORIES_MODEL, "bits": 4, "group_size": 32} | whole)
    rows.append(
        {"model": module.STORIES_MODEL, "bits": 3, "group_size": 32, "made_by": "ours mixed", "nats": at["mixed"]}
    )
    for bits, group in module.MINILM_BARS:
        size = {"model": "minilm", "bits": bits, "group_size": group}
        rows.append(size | {"made_by": "ours gptq", "cosine": at[f"w{bits}g{group}"]})
        theirs = {(4, 128): 0.98, (3, 128): 0.90, (3, 64): 0.92}[bits, group]
        rows.append(size | {"made_by": "llm-compressor gptq", "cosine": theirs})
    return rows


@pytest.mark.parametrize(
    ("change", "fails"),
    [
        ({}, []),
        ({"gptq4": 3.385}, ["gptq_w4_nats"]),
        ({"whole": 3.415}, ["whole_w4_more_nats"]),
        ({"ratio": 5.4}, ["whole_w4_times_smaller"]),
        ({"gptq2": 4.21}, ["gptq_w2_nats"]),
        ({"best3": 3.413}, ["best_w3_nats"]),
        ({"mixed": 3.401}, ["mixed_w3_nats"]),
        ({"seconds": 30.1}, ["best_w4_seconds", "best_w3_seconds", "best_w2_seconds"]),
        ({"awq3": 3.71}, ["awq_w3_nats"]),
        ({"w3g64": 0.919}, ["minilm_w3_g64_cosine"]),
    ],
)
def test_claims_of_weight_only_quality(load: Any, change: dict[str, float], fails: list[str]) -> None:
    module = load("weight_only_quality")
    claims = module.claims(quality_rows(module, **change), [])
    assert [claim.name for claim in claims if not claim.holds] == fails


def test_a_row_that_failed_or_is_missing_proves_nothing(load: Any) -> None:
    module = load("weight_only_quality")
    claims = module.claims([], None)
    assert not any(claim.holds for claim in claims)
    assert {claim.bar for claim in claims if "minilm" in claim.name} == {0.977, 0.894, 0.915}


def test_layers_without_a_word_are_found(load: Any, tmp_path: Path) -> None:
    module = load("weight_only_quality")
    assert module.unspoken(tmp_path) is None
    layers = [
        {"layer": "a", "type": "Linear", "action": "int4", "reason": "W4A16"},
        {"layer": "b", "type": "Linear", "action": "kept", "reason": "172 inputs"},
        {"layer": "c", "type": "Linear", "action": "kept", "reason": ""},
        {"layer": "", "type": "note", "action": "info"},
    ]
    (tmp_path / "report.json").write_text(json.dumps({"layers": layers}))
    assert module.unspoken(tmp_path) == ["c"]


def speed_rows(ours: list[float | None], theirs: list[float], errors: tuple[float, float]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [{"model": "ours", "round": i, "seconds": s} for i, s in enumerate(ours)]
    rows += [{"model": "llm-compressor", "round": i, "seconds": s} for i, s in enumerate(theirs)]
    rows[0]["layer_error"], rows[len(ours)]["layer_error"] = errors
    return rows


@pytest.mark.parametrize(
    ("ours", "errors", "values"),
    [
        ([20.0, 10.0, 30.0], (0.1, 0.1), (0.5, 1.0)),
        ([21.0, 21.0, 30.0], (0.1, 0.2), (0.525, 0.5)),
        ([20.0, None, 30.0], (0.1, 0.1), (None, 1.0)),
    ],
)
def test_claims_of_gptq_speed(
    load: Any, ours: list[float | None], errors: tuple[float, float], values: tuple[float | None, float]
) -> None:
    claims = load("gptq_speed").claims(speed_rows(ours, [40.0, 40.0, 40.0], errors))
    assert [claim.value for claim in claims] == list(values)


def test_without_the_peer_no_time_is_claimed(load: Any) -> None:
    claims = load("gptq_speed").claims([{"model": "ours", "round": 0, "seconds": 1.0, "layer_error": 0.1}])
    assert [claim.value for claim in claims] == [None, None]


@pytest.mark.parametrize(
    ("few", "many", "forecast", "other", "fails"),
    [
        (1000, 1100, 1090, 2200, []),
        (1000, 1101, 1101, 2202, ["peak_ratio_of_24_layers_to_6", "forecast_relative_error"]),
        (1000, 1050, 1050, 2000, ["peak_ratio_to_llm_compressor"]),
        (1000, 1050, 1050, None, ["peak_ratio_to_llm_compressor"]),
    ],
)
def test_claims_of_compression_memory(
    load: Any, few: float, many: float, forecast: float, other: float | None, fails: list[str]
) -> None:
    rows = [
        {"model": "ours", "layers": 6, "peak_mib": few, "forecast_mib": forecast},
        {"model": "ours", "layers": 24, "peak_mib": many, "forecast_mib": forecast},
        {"model": "llm-compressor", "layers": 24} | ({"failed": "no"} if other is None else {"peak_mib": other}),
    ]
    assert [claim.name for claim in load("compression_memory").claims(rows) if not claim.holds] == fails


def test_claims_of_one_billion(load: Any) -> None:
    row = {"peak_gib": 5.0, "forecast_gib": 4.6, "apply_s": 1000.0, "forecast_s": 1200.0, "blocks_kept": 5}
    row |= {"blocks_again": 0, "nll_checkpoint": 11.8, "nll_onnx": 11.81, "nll_before": 11.8, "nll_after": 11.85}
    module = load("one_billion")
    assert all(claim.holds for claim in module.claims(row))
    worse = row | {"peak_gib": 6.1, "apply_s": 500.0, "blocks_again": 1, "nll_onnx": 11.9}
    assert [claim.name for claim in module.claims(worse) if not claim.holds] == [
        "peak_gib_of_the_process_tree",
        "finished_blocks_done_again",
        "nats_between_checkpoint_and_onnx",
        "forecast_memory_relative_error",
        "forecast_time_over_measured",
    ]
    assert not any("forecast" in claim.name for claim in module.claims(row, quick=True))


def test_the_memory_of_a_process_tree_is_that_of_all_that_it_started(load: Any) -> None:
    import subprocess
    import sys

    hold = "import sys; held = bytearray(64 << 20); print(flush=True); sys.stdin.read()"
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {hold!r}])"
    tree_bytes = load("process_tree").tree_bytes
    with subprocess.Popen([sys.executable, "-c", start], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert 64 << 20 < tree_bytes(child.pid) < 160 << 20


@torch.no_grad()
def test_layer_error_by_hand(load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, language = load("random_models"), load("language")
    folder = language.write_random_llama(tmp_path / "m", language.QUICK | {"num_hidden_layers": 1, "vocab_size": 32})
    work = module.Work(folder, tmp_path, tmp_path, language.random_tokens(2, 6, 32))
    changed = language.load_causal(folder)
    for name, parameter in changed.named_parameters():
        if "proj" in name:
            parameter *= 0.9  # each output is a tenth off, whatever the input
    monkeypatch.setattr(module, "compressed", lambda *_: changed)
    assert module.layer_error(work, module.Done(1.0, 1, tmp_path)) == pytest.approx(0.1, rel=1e-4)


class Slow:
    """A player whose turns take a known time a token, longer from turn to turn."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.turns = seconds, 0

    def turn(self, past: int, n: int) -> float:
        self.turns += 1
        return self.seconds * n * self.turns


def test_players_take_turns_and_the_ratio_is_the_median_of_the_rounds(load: Any) -> None:
    decoders = load("decoders")
    players = {"float": Slow(4.0), "ours": Slow(1.0)}
    seconds = decoders.play(players, 10, 8, 5)
    assert seconds == {"float": [4.0, 8.0, 12.0, 16.0, 20.0], "ours": [1.0, 2.0, 3.0, 4.0, 5.0]}
    assert decoders.ratios({"float": [4.0, 8.0, 8.0], "ours": [1.0, 4.0, 8.0]}, "float") == {"float": 1.0, "ours": 2.0}


def test_the_worse_past_decides_the_claim(load: Any) -> None:
    rows = [{"model": "ours", "threads": 1, "past": past, "ratio": ratio} for past, ratio in ((256, 4.5), (1000, 4.2))]
    rows.append({"model": "ours", "threads": 2, "past": 256, "ratio": 4.6})
    rows.append({"model": "llama.cpp Q4_0", "threads": 1, "failed": "no compiler"})
    assert [(c.value, c.holds) for c in load("decode").claims(rows)] == [(4.2, False), (4.6, True)]
    assert [c.value for c in load("decode").claims([])] == [None, None]


def test_a_decoder_graph_is_read_on_from_its_cache(load: Any, tmp_path: Path) -> None:
    """The cache of a plain graph grows by what a call gives; a turn begins from the same cache again."""
    import onnx
    from onnx import TensorProto, helper

    def value(name: str, kind: int, shape: list[Any]) -> Any:
        return helper.make_tensor_value_info(name, kind, shape)

    past = value("past_key_values.0.key", TensorProto.FLOAT, ["b", 2, "past", 3])
    nodes = [
        helper.make_node("Cast", ["input_ids"], ["x"], to=TensorProto.FLOAT),
        helper.make_node("Reshape", ["x", "shape"], ["cell"]),
        helper.make_node("Expand", ["cell", "wide"], ["key"]),
        helper.make_node("Concat", ["past_key_values.0.key", "key"], ["present.0.key"], axis=2),
        helper.make_node("ReduceSum", ["present.0.key", "axes"], ["logits"], keepdims=0),
    ]
    constants = {"shape": [1, 1, 1, 1], "wide": [1, 2, 1, 3], "axes": [2]}
    tensors = [helper.make_tensor(name, TensorProto.INT64, [len(v)], v) for name, v in constants.items()]
    outputs = [
        value("logits", TensorProto.FLOAT, ["b", 2, 3]),
        value("present.0.key", TensorProto.FLOAT, ["b", 2, "total", 3]),
    ]
    inputs = [value("input_ids", TensorProto.INT64, ["b", "s"]), past]
    model = helper.make_model(
        helper.make_graph(nodes, "g", inputs, outputs, tensors), opset_imports=[helper.make_opsetid("", 18)]
    )
    model.ir_version = 9
    onnx.save(model, tmp_path / "m.onnx")
    decoders = load("decoders")
    assert not decoders.shares_buffer(tmp_path / "m.onnx")
    player = decoders.OrtPlayer(tmp_path / "m.onnx", 1, 3)
    player._logits = np.empty((1, 2, 3), np.float32)
    for _ in range(2):
        assert player.turn(5, 4) > 0
        expected = decoders.numbers((1, 2, 5, 3)).sum(2) + 4 * decoders.TOKEN
        np.testing.assert_allclose(player._logits, expected, rtol=1e-5)
    player.close()


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_packed_integers_are_unpacked_by_the_formats_own_packing(load: Any, bits: int) -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    half, rng = 2 ** (bits - 1), np.random.default_rng(0)
    values, zeros = rng.integers(-half, half, (6, 40)), rng.integers(-half, half, (6, 5))
    tensors = {
        "a.weight_packed": pack_to_int32(torch.from_numpy(values).to(torch.int8), bits).numpy(),
        "a.weight_zero_point": pack_to_int32(torch.from_numpy(zeros).to(torch.int8), bits, packed_dim=0).numpy(),
        "a.weight_scale": rng.random((6, 5)).astype(np.float32),
        "a.weight_shape": np.array([6, 40]),
    }
    scale, zero = (np.repeat(one, 8, axis=1) for one in (tensors["a.weight_scale"], zeros))
    unpacked = load("interop_transformers").unpack_layer(tensors, "a", bits)
    np.testing.assert_allclose(unpacked, (values - zero) * scale, rtol=1e-6)


def test_files_that_differ_or_are_missing_are_named(load: Any, tmp_path: Path) -> None:
    module = load("kill_resume")
    for folder, files in (("a", {"x": "1", "y": "2", "sub/z": "3"}), ("b", {"x": "1", "y": "0", "w": "4"})):
        for name, text in files.items():
            path = tmp_path / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    a, b = (module.digests(tmp_path / name) for name in "ab")
    assert module.different(a, b) == ["sub/z", "w", "y"]
    assert module.different(a, a) == []


def test_a_run_is_killed_with_its_children_or_ends_by_itself(load: Any, common: Any) -> None:
    module = load("kill_resume")
    assert module.run_for([sys.executable, "-c", "import time; time.sleep(60)"], 0.2)
    assert not module.run_for([sys.executable, "-c", "pass"], 30)
    with pytest.raises(common.RunError, match="exit code 5"):
        module.run_for([sys.executable, "-c", "raise SystemExit(5)"], 30)


def test_bytes_claim_needs_every_kill(load: Any) -> None:
    module = load("kill_resume")
    good = {"different_files": [], "steps_again": 0, "blocks_again": 1, "left": [], "left_at_the_end": []}
    rows: list[dict[str, Any]] = [dict(good) for _ in range(module.KILLS)]
    assert all(claim.holds for claim in module.claims(rows))
    bad = {"different_files": ["x"], "steps_again": 1, "blocks_again": 2, "left": ["tmp"], "left_at_the_end": ["tmp"]}
    assert not any(claim.holds for claim in module.claims([bad, *rows[2:]]))


def test_claims_of_float_formats(load: Any) -> None:
    module = load("float_formats")
    rows: list[dict[str, Any]] = [{"nats": 3.0}]
    for made_by, nats in (("compressed-tensors' range", 3.1), ("ours rtn", 3.09), ("ours gptq", 3.06)):
        rows.append({"made_by": made_by, "scheme": "NVFP4A16", "nats": nats})
        rows[-1] |= {"reported": nats, "kl_token": 0.1} if "ours" in made_by else {}
    failing = [claim.name for claim in module.claims(rows) if not claim.holds]
    assert failing == ["NVFP4A16_gptq_nats"]
    rows[-1]["kl_token"] = 0.2
    assert "NVFP4A16_gptq_divergence" in {claim.name for claim in module.claims(rows) if not claim.holds}
