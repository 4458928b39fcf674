"""Whole bundles of decoders: judged, timed, run from the command line; and candidates that are checkpoints."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from shortcuts import few_rounds, without_processes

from runtime import open_bundle
from runtime.__main__ import main
from runtime.backends import BACKENDS
from runtime.bundle.format import (
    Artifact,
    Benchmark,
    Gate,
    Generation,
    KvCacheSpec,
    canonical_json,
    checkpoint_size,
    write_candidate_outputs,
    write_outputs,
)
from runtime.bundle.manifest import BuildScore, Judgement
from runtime.decode.generate import GeneratedText, Request
from runtime.decode.scoring import score
from runtime.decode.talk import describe_pace, write_answer
from runtime.errors import BundleError, UsageError
from runtime.judge.findings import OF_DECODERS
from runtime.judge.speed import request_evidence, speed_evidence
from runtime.measure.benchmark import benchmark
from runtime.measure.requests import RequestTimes
from runtime.metrics import MEASURED
from runtime.report.report import render_markdown, render_text, verdict_line
from runtime.report.validate import validate
from runtime.tasks.manifest import read_manifest, verify, write_bundle

MakeBundle = Callable[..., Path]
FAST = Benchmark(warmup=1, iterations=40, prompt_tokens=8, new_tokens=5)


@pytest.fixture
def quick() -> Iterator[None]:
    with without_processes(), few_rounds():
        yield


# judging


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("shared", [False, True])
def test_a_decoder_compared_with_itself_holds_every_gate(make_decoder_bundle: MakeBundle, shared: bool) -> None:
    gates = (
        Gate("nll", max_drop=0.001),
        Gate("perplexity", max_drop=0.1),
        Gate("kl_token", max=1e-6),
        Gate("token_agreement", min=0.9),
        Gate("size_ratio", min=0.5),
    )
    report = validate(make_decoder_bundle(shared=shared, noise=0.0, gates=gates))
    assert report.verdict == "pass", [gate.why for gate in report.gates]
    assert report.candidate.metrics["token_agreement"] == 1
    assert report.candidate.metrics["kl_token"] == pytest.approx(0, abs=1e-7)
    assert report.differences["nll"]["value"] == pytest.approx(0, abs=1e-6)
    assert report.baseline.metrics["perplexity"] == pytest.approx(np.exp(report.baseline.metrics["nll"]))
    assert list(report.candidate.metrics) == ["nll", "perplexity", "kl_token", "token_agreement"]


@pytest.mark.usefixtures("quick")
def test_a_worse_decoder_is_told_apart_and_the_report_says_how_fast_it_generates(
    make_decoder_bundle: MakeBundle,
) -> None:
    timing = {"ttft_limit_ms": 1e4, "tpot_limit_ms": 1e4, "price_per_hour": 0.5}
    gates = (Gate("nll", max_drop=0.01), Gate("ttft", max=1e4), Gate("tpot", min_speedup=0.01), Gate("goodput", min=1))
    root = make_decoder_bundle(noise=0.6, gates=gates, judgement={"benchmark": replace(FAST, **timing)})
    report = validate(root)
    assert [gate.verdict for gate in report.gates] == ["fail", "pass", "pass", "pass"]
    assert report.differences["nll"]["value"] > 0.01
    assert report.candidate.metrics["token_agreement"] < 1
    for side in (report.baseline, report.candidate):
        assert side.generation.keys() == set(OF_DECODERS)
        times = side.generation
        assert times["decode_rate"] == pytest.approx(1000 / times["tpot"])
        assert times["prefill_rate"] == pytest.approx(8 * 1000 / times["ttft"])
        assert times["itl_p50"] <= times["itl_p95"] <= times["itl_p99"]
        assert side.latency_ms["p50"] == times["itl_p50"]
        assert side.throughput_per_s is None
    assert report.ratios["tpot"] > 0
    for text in (render_text(report), render_markdown(report)):
        for label in (
            "time to first token",
            "time per token",
            "between tokens p99",
            "goodput, p95 within ttft 10000 ms",
        ):
            assert label in text
        assert "cost of a million" in text
    assert "latency p50" not in render_text(report)
    assert report.benchmark["prompt_tokens"] == 8 and "throughput_batch_size" not in report.benchmark
    assert json.loads((root / "report.json").read_text())["candidate"]["generation"]["ttft"] > 0
    assert verify(root) == read_manifest(root)


@pytest.mark.usefixtures("quick")
def test_a_broken_decoder_fails(make_decoder_bundle: MakeBundle) -> None:
    report = validate(make_decoder_bundle(noise=float("nan"), gates=[Gate("nll", max_drop=0.1)]))
    assert report.verdict == "fail"
    assert "output 'kl' holds NaN" in report.advice[0]


def test_evaluating_gives_the_metrics_that_validation_gives(make_decoder_bundle: MakeBundle) -> None:
    with open_bundle(make_decoder_bundle(noise=0.3)) as bundle:
        found = bundle.evaluate()
    assert found["kl_token"] > 0 and found["token_agreement"] < 1
    assert found["perplexity"] == pytest.approx(np.exp(found["nll"]))


@pytest.mark.usefixtures("quick")
def test_a_baseline_that_is_not_the_frozen_one_is_refused(make_decoder_bundle: MakeBundle) -> None:
    root = make_decoder_bundle()
    manifest = read_manifest(root)
    with np.load(root / "evaluation/baseline_outputs.npz") as frozen:
        columns = dict(frozen)
    write_outputs(root, {**columns, "nll": columns["nll"] + 0.1})
    write_bundle(root, manifest)
    with pytest.raises(BundleError, match="nats per token here, its frozen outputs say"):
        validate(root)
    write_outputs(root, {**columns, "n_tokens": columns["n_tokens"] + 1})
    write_bundle(root, manifest)
    with pytest.raises(BundleError, match="'n_tokens' differs in 60 of 60 rows"):
        validate(root)
    write_outputs(root, {"n_tokens": columns["n_tokens"]})
    write_bundle(root, manifest)
    with pytest.raises(BundleError, match="the baseline's outputs: holds no numbers under nll"):
        validate(root)


# timing


def test_a_decoder_is_timed_by_whole_requests(make_decoder_bundle: MakeBundle) -> None:
    root = make_decoder_bundle(shared=True, judgement={"benchmark": replace(FAST, batch_size=2, tpot_limit_ms=1e-9)})
    before = sorted(root.rglob("*"))
    result = benchmark(root)
    assert sorted(root.rglob("*")) == before
    assert result.requests is not None and result.n_processes == 6
    assert result.requests.first.shape == (6, 2, 7), "40 iterations in six processes"
    assert result.requests.steps.shape == (6, 2, 7, 4)
    assert result.limited is not None and not result.limited.any()
    assert min(result.probes[0].peak_memory_bytes) >= 0 and len(result.probes[1].load_ms) == 3
    found = speed_evidence(replace(result, energy="not here"), Judgement())
    unasked = {"cost_per_million", "energy"}
    assert set(found) == {n for n, m in MEASURED.items() if m.of_decoders is not False} - unasked
    assert found["goodput"].candidate.value == 0
    tokens_per_s = 2 * 1000 / found["tpot"].candidate.value
    assert found["decode_rate"].candidate.value == pytest.approx(tokens_per_s, rel=0.05), (
        "medians of six processes each"
    )


def test_quantities_are_those_of_the_definition() -> None:
    settings = Benchmark(batch_size=3, prompt_tokens=10, new_tokens=4, price_per_hour=7.2)
    rng = np.random.default_rng(0)
    first, steps = rng.random(11), rng.random((11, 3))
    times = RequestTimes(first[None, None], steps[None, None], steps.shape[-1] + 1)
    evidence = request_evidence(times, Judgement(benchmark=settings))
    found = {name: known.candidate.value for name, known in evidence.items()}
    assert found["ttft"] == pytest.approx(1000 * np.median(first))
    assert found["tpot"] == pytest.approx(1000 * np.median(steps.mean(axis=1)))
    assert found["itl_p95"] == pytest.approx(1000 * np.percentile(steps.ravel(), 95))
    assert found["prefill_rate"] == pytest.approx(30 / np.median(first))
    assert found["decode_rate"] == pytest.approx(3 / np.median(steps.mean(axis=1)))
    seconds = np.median(first + steps.sum(axis=1))
    assert found["cost_per_million"] == pytest.approx(7.2 / 3600 * seconds / 12 * 1e6)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"sequence_length": 8}, "benchmark.sequence_length does not fit the task text-generation; use prompt_tokens"),
        ({"latency_limit_ms": 8.0}, "benchmark.latency_limit_ms does not fit .*; use ttft_limit_ms and tpot_limit_ms"),
        ({"prompt_tokens": 60}, "prompt_tokens 60 and new_tokens 5 are more than the model's context_length 64"),
    ],
)
def test_settings_that_are_refused(make_decoder_bundle: MakeBundle, settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        benchmark(make_decoder_bundle(judgement={"benchmark": replace(FAST, **settings)}))


def test_settings_of_decoders_do_not_fit_other_models(image_bundle: Path) -> None:
    manifest = read_manifest(image_bundle)
    for setting in ({"ttft_limit_ms": 1.0}, {"new_tokens": 3}):
        judgement = replace(manifest.judgement, benchmark=Benchmark(**setting))  # type: ignore[arg-type]
        write_bundle(image_bundle, replace(manifest, judgement=judgement))
        with pytest.raises(UsageError, match=f"benchmark.{next(iter(setting))} does not fit the task image-classif"):
            benchmark(image_bundle)


@pytest.mark.parametrize(
    ("gate", "problem"),
    [
        (Gate("throughput", min=1), "metric 'throughput' does not fit task text-generation; what fits: latency_p50"),
        (Gate("goodput", min=1), "metric 'goodput' needs benchmark.ttft_limit_ms or benchmark.tpot_limit_ms"),
        (Gate("cost_per_million", max=1), "metric 'cost_per_million' needs benchmark.price_per_hour"),
        (Gate("top1", min=1), "metric 'top1' does not fit task text-generation; what fits: nll, perplexity"),
        (Gate("nll", min_speedup=2), "gate on 'nll': min_speedup fits only"),
    ],
)
def test_gates_that_are_refused(make_decoder_bundle: MakeBundle, gate: Gate, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        validate(make_decoder_bundle(gates=[gate]))


def test_a_backend_that_keeps_no_cache_runs_no_decoder(
    make_decoder_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BACKENDS.own, "plain", replace(BACKENDS["onnxruntime-cpu"], name="plain", decoders=False))
    with pytest.raises(UsageError, match="backend 'plain' does not run decoders; use one of onnxruntime-cpu, "):
        benchmark(make_decoder_bundle(), "plain")


@pytest.mark.usefixtures("quick")
def test_a_decoder_is_judged_on_openvino(make_decoder_bundle: MakeBundle) -> None:
    pytest.importorskip("openvino")
    report = validate(make_decoder_bundle(noise=0.0, gates=[Gate("kl_token", max=0.01)]), ["openvino"])
    assert (report.backend, report.verdict) == ("openvino", "pass")
    assert [row["name"] for row in report.backends] == ["openvino", "openvino"]
    assert not any("error" in row for row in report.backends)


# checkpoints


@pytest.fixture
def checkpoint_bundle(make_decoder_bundle: MakeBundle, tiny: Any) -> Callable[..., Path]:
    """A bundle whose candidate is a folder of safetensors, with its frozen outputs."""

    def make(*gates: Gate, baseline: bool = True, outputs: bool = True, built: BuildScore | None = None) -> Path:
        root = make_decoder_bundle(noise=0.3, gates=gates)
        manifest = read_manifest(root)
        with open_bundle(root) as bundle:
            reference = tiny.open_onnx(root / "baseline/model.onnx")
            found = score(bundle.session, bundle.preprocessor, {"text": tiny.stories}, 4, reference)
        (root / "model/model.onnx").unlink()
        (root / "model/config.json").write_text("{}")
        for i in (1, 2):
            (root / f"model/part-{i}.safetensors").write_bytes(bytes(500 * i))
        if outputs:
            write_candidate_outputs(root, {name: found[name] for name in ("nll", "n_tokens", "kl", "agree")})
        size = checkpoint_size(root / "model/config.json")
        candidate = Artifact("candidate", "model/config.json", "vllm", "w4", (), (), size, kind="checkpoint")
        others = manifest.artifacts[1:] if baseline else ()
        write_bundle(root, replace(manifest, target="vllm", artifacts=(candidate, *others), score=built))
        return root

    return make


def test_a_checkpoint_is_judged_by_its_frozen_outputs_and_its_size(checkpoint_bundle: Callable[..., Path]) -> None:
    root = checkpoint_bundle(Gate("nll", max_drop=2.0), Gate("size", max=1500), Gate("size_ratio", min=2))
    report = validate(root)
    assert report.verdict == "pass", [gate.why for gate in report.gates]
    assert report.candidate.size_bytes == 1500
    assert 0 < report.candidate.metrics["token_agreement"] < 1
    assert report.candidate.latency_ms == {} and report.benchmark == {}
    assert "Quality was measured by torch at the build" in render_text(report)
    assert "checkpoint for vllm" in (root / "report.md").read_text()


def test_what_its_engine_computes_otherwise_than_was_scored_leaves_quality_undecided(
    checkpoint_bundle: Callable[..., Path],
) -> None:
    built = BuildScore("torch 9.9", ("a: its cache is not scored",))
    report = validate(checkpoint_bundle(Gate("nll", max_drop=2.0), Gate("size", max=1500), built=built))
    assert report.verdict == "undecided"
    assert [gate.verdict for gate in report.gates] == ["undecided", "pass"]
    assert report.gates[0].why == (
        "its engine computes otherwise than was scored: a: its cache is not scored; counted as a failure"
    )
    assert verdict_line(report) == (
        "UNDECIDED: tiny for vllm, scored by torch 9.9 at the build: nll max_drop 2 undecided"
    )
    lenient = Gate("nll", max_drop=2.0, undecided="pass")
    assert validate(checkpoint_bundle(lenient, built=built)).verdict == "pass"


def test_a_speed_gate_on_a_checkpoint_fails_with_the_reason(checkpoint_bundle: Callable[..., Path]) -> None:
    report = validate(checkpoint_bundle(Gate("tpot", min_speedup=2), Gate("size_ratio", min=1), baseline=False))
    assert report.verdict == "fail"
    assert [gate.verdict for gate in report.gates] == ["fail", "fail"]
    assert report.gates[0].why == ("it was not measured: the candidate is a checkpoint for vllm, which is not run here")


def test_checkpoints_that_are_refused(checkpoint_bundle: Callable[..., Path]) -> None:
    root = checkpoint_bundle()
    with pytest.raises(UsageError, match=r"checkpoint for vllm: open model/config\.json with that"):
        open_bundle(root)
    with pytest.raises(BundleError, match="the candidate is a checkpoint for vllm, which is not run here"):
        benchmark(root)
    (root / "model/model.safetensors.index.json").write_text('{"weight_map": {"a": "part-3.safetensors"}}')
    manifest = read_manifest(root)
    write_bundle(root, manifest)
    with pytest.raises(BundleError, match=r"shard missing: part-3\.safetensors"):
        verify(root)
    (root / "model/model.safetensors.index.json").write_text("[]")
    with pytest.raises(BundleError, match="not the index of a checkpoint"):
        checkpoint_size(root / "model/config.json")
    (root / "model/model.safetensors.index.json").unlink()
    wrong = replace(manifest.artifacts[0], size_bytes=7)
    write_bundle(root, replace(manifest, artifacts=(wrong, *manifest.artifacts[1:])))
    with pytest.raises(BundleError, match="1500 bytes in its tensors, the manifest says 7"):
        verify(root)
    for part in (root / "model").glob("*.safetensors"):
        part.unlink()
    with pytest.raises(BundleError, match=r"there is no \.safetensors file"):
        checkpoint_size(root / "model/config.json")
    with pytest.raises(BundleError, match="the checkpoint's config is missing"):
        checkpoint_size(root / "config.json")


@pytest.fixture
def lone_bundle(make_decoder_bundle: MakeBundle, tiny: Any) -> Callable[..., Path]:
    """A bundle that holds no float model: what the two are apart was summed up when it was built."""

    def make(*gates: Gate, off: float = 0.0) -> Path:
        root = make_decoder_bundle(gates=gates, judgement={"benchmark": FAST})
        manifest = read_manifest(root)
        with open_bundle(root) as bundle:
            reference = tiny.open_onnx(root / "baseline/model.onnx")
            found = score(bundle.session, bundle.preprocessor, {"text": tiny.stories}, 4, reference)
        frozen = {name: found[name] for name in ("n_tokens", "kl", "agree")}
        write_candidate_outputs(root, {**frozen, "nll": found["nll"] + off * found["n_tokens"]})
        (root / "baseline/model.onnx").unlink()
        built = replace(manifest, artifacts=manifest.artifacts[:1], score=BuildScore("torch 9.9"), source_bytes=10**6)
        write_bundle(root, built)
        return root

    return make


@pytest.mark.usefixtures("quick")
def test_a_candidate_without_its_float_model_is_run_alone_and_no_speed_is_compared(
    lone_bundle: Callable[..., Path],
) -> None:
    gates = (Gate("nll", max_drop=9.0), Gate("kl_token", max=9.0), Gate("tpot", max=1e4), Gate("tpot", min_speedup=1.0))
    report = validate(lone_bundle(*gates))
    assert [gate.verdict for gate in report.gates] == ["pass", "pass", "pass", "undecided"], report.gates
    assert "holds no float model to be timed beside the candidate" in report.gates[3].why
    assert report.verdict == "undecided"
    assert report.candidate.generation["decode_rate"] > 0 and not report.baseline.generation
    assert report.baseline.metrics["nll"] > 0 and report.candidate.metrics["kl_token"] > 0
    assert report.ratios.keys() == {"size"} and report.baseline.size_bytes == 10**6
    assert "the candidate ran alone" in render_text(report) and "torch 9.9 at the build" in render_markdown(report)


def test_a_lone_candidate_is_evaluated_and_timed(lone_bundle: Callable[..., Path]) -> None:
    root = lone_bundle()
    with open_bundle(root) as bundle:
        assert bundle.evaluate()["kl_token"] > 0
    result = benchmark(root)
    assert result.requests is not None and result.requests.first.shape == (6, 1, 7)


def test_a_lone_candidate_that_is_not_the_one_that_was_scored_is_refused(lone_bundle: Callable[..., Path]) -> None:
    with pytest.raises(BundleError, match=r"the candidate has .* nats per token here"):
        validate(lone_bundle(off=0.1))


def test_a_checkpoint_without_frozen_outputs_is_refused(checkpoint_bundle: Callable[..., Path]) -> None:
    with pytest.raises(BundleError, match=r"evaluation/candidate_outputs\.npz is missing"):
        validate(checkpoint_bundle(outputs=False))


# the manifest


def test_records_are_read_back(make_decoder_bundle: MakeBundle) -> None:
    manifest = read_manifest(make_decoder_bundle(shared=True))
    assert manifest.generation == Generation(64, 258, 256, (257,))
    assert manifest.artifact("candidate").cache == KvCacheSpec(2, 2, 8, shared_buffer=True)
    assert manifest.artifact("baseline").cache.pairs()[1] == ("past_key_values.0.value", "present.0.value")


def test_a_manifest_from_before_there_were_decoders_is_read(image_bundle: Path) -> None:
    import hashlib

    manifest = read_manifest(image_bundle)
    data = json.loads((image_bundle / "manifest.json").read_text())
    for record, names in ((data, ["generation", "digest"]), *((a, ["cache", "kind"]) for a in data["artifacts"])):
        for name in names:
            del record[name]
    for name in ("prompt_tokens", "new_tokens", "ttft_limit_ms", "tpot_limit_ms", "price_per_hour"):
        del data["judgement"]["benchmark"][name]
    data["digest"] = hashlib.sha256(canonical_json(data)).hexdigest()
    (image_bundle / "manifest.json").write_bytes(canonical_json(data))
    assert replace(read_manifest(image_bundle), digest=manifest.digest) == manifest
    verify(image_bundle)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: KvCacheSpec(0, 1, 1), "n_layers is 0, below 1"),
        (lambda: KvCacheSpec(1, 1, 1, past="past.{layer}"), "past is 'past.{layer}': it must hold"),
        (lambda: Generation(0, 5), "context_length is 0"),
        (lambda: Generation(8, 5, bos_token_id=5), "bos_token_id 5 is not in the vocabulary of 5"),
        (lambda: Generation(8, 5, eos_token_ids=(1, -1)), "eos_token_ids -1 is not in"),
        (lambda: Benchmark(new_tokens=1), "new_tokens is 1, below 2"),
        (lambda: Benchmark(price_per_hour=0.0), "price_per_hour is 0.0, not a positive number"),
    ],
)
def test_records_that_are_refused(make: Callable[[], object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        make()


def test_a_decoder_s_manifest_says_how_to_generate(make_decoder_bundle: MakeBundle) -> None:
    with pytest.raises(BundleError, match=r"manifest\.generation: missing, and the task is text-generation"):
        make_decoder_bundle(generation=None)


# the command line


def test_generate_streams_what_python_gives(make_decoder_bundle: MakeBundle, capsys: Any) -> None:
    root = make_decoder_bundle()
    with open_bundle(root) as bundle:
        greedy = bundle.generate("Once", max_new_tokens=8)
        drawn = bundle.generate("Once", max_new_tokens=8, temperature=0.8, top_k=9, top_p=0.9, min_p=0.01, seed=3)
    for words in (["Once", "--max-new-tokens", "8"], ["--max-new-tokens", "8", "Once"]):
        assert main(["generate", str(root), *words, "--threads", "1"]) == 0
        assert capsys.readouterr().out == greedy.text + "\n"
    assert main(["generate", str(root), "--threads", "1", "Once", "more"]) == 2
    assert "unrecognized arguments: Once more" in capsys.readouterr().err
    drawing = {"--temperature": 0.8, "--top-k": 9, "--top-p": 0.9, "--min-p": 0.01, "--seed": 3, "--max-new-tokens": 8}
    assert main(["generate", str(root), "Once", "--json", *(str(x) for pair in drawing.items() for x in pair)]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "text": drawn.text,
        "token_ids": list(drawn.token_ids),
        "finish": drawn.finish,
        "prompt_tokens": 5,
    }


Typing = Callable[..., tuple[str, str]]


@pytest.fixture
def typing(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Typing:
    """Type lines to a bundle; returns what it says on stdout and stderr."""

    def converse(root: Path, lines: str, *options: str) -> tuple[str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        assert main(["generate", str(root), "--interactive", "--threads", "1", *options]) == 0
        return tuple(capsys.readouterr())

    return converse


def test_what_is_typed_is_answered_line_by_line(make_decoder_bundle: MakeBundle, typing: Typing) -> None:
    root = make_decoder_bundle()
    with open_bundle(root) as bundle:
        answers = [bundle.generate(prompt, max_new_tokens=4).text for prompt in ("Once", "a dog")]
    out, errors = typing(root, f"Once\n\n{'x' * 99}\na dog\n", "--max-new-tokens", "4")
    assert out == "".join(f"{answer}\n" for answer in answers)
    assert errors.startswith("error: ") and "context_length 64" in errors  # and the next line is answered


def test_a_chat_knows_what_was_said(make_decoder_bundle: MakeBundle, typing: Typing) -> None:
    pytest.importorskip("jinja2")
    template = "{% for message in messages %}{{ message.role[0] }}:{{ message.content }};{% endfor %}"
    root = make_decoder_bundle(config={"chat_template": template})
    settings = {"chat": True, "max_new_tokens": 3}
    with open_bundle(root) as bundle:
        first = bundle.generate("Hi", **settings).text
        said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": first}]
        second = bundle.generate([*said, {"role": "user", "content": "so"}], **settings).text
    assert typing(root, "Hi\nso\n", "--chat", "--max-new-tokens", "3")[0] == f"{first}\n{second}\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_an_answer_without_text_has_no_pace(capsys: Any) -> None:
    nothing = GeneratedText("", (), "eos", 3)

    def stream(prompts: Any, request: Request) -> Any:
        yield from ()
        return [nothing]

    with redirect_stderr(Terminal()) as shown:
        assert write_answer(SimpleNamespace(stream=stream), "x", Request()) == nothing
    assert (capsys.readouterr().out, shown.getvalue()) == ("\n", "")


def test_how_fast_an_answer_came() -> None:
    assert describe_pace(65, 0.25, 2.0) == "[65 tokens, the first after 250 ms, then 32.0 a second]"
    assert describe_pace(1, 0.25, 0.0) == "[1 token, the first after 250 ms]"


def test_calls_that_are_wrong_end_with_2(make_decoder_bundle: MakeBundle, image_bundle: Path, capsys: Any) -> None:
    root = make_decoder_bundle()
    assert main(["predict", str(root), "Once"]) == 2
    assert "`compress-run generate DIR PROMPT`" in capsys.readouterr().err
    for words in ([], ["x", "--interactive"], ["--interactive", "--json"]):
        assert main(["generate", str(root), *words]) == 2
        assert "give a PROMPT, or --interactive alone" in capsys.readouterr().err
    assert main(["generate", str(root), "x" * 99]) == 2
    assert "context_length 64" in capsys.readouterr().err
    assert main(["generate", str(root), "x", "--chat"]) == 2
    assert "has no chat template" in capsys.readouterr().err
