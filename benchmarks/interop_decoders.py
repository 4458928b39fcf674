"""Claims about the decoders of recipes/claims/tinystories-w4-gptq.yaml, in several precisions: other tools run them.

onnxruntime-genai on the folder model/, OpenVINO on the ONNX file for it (keys and values handed back and forth), and
OpenVINO GenAI on the folder openvino/, one prompt a call and all in one: each gives the greedy tokens that our runtime
gives on the same library, every one of them. OpenVINO's tokenizer gives the tokens of tokenizer.json. Between the two
libraries, which round otherwise, no token of one is behind the likeliest of the other by more than 0.25 logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from common import (
    ROOT,
    Call,
    CallError,
    Claim,
    Measured,
    Peer,
    Row,
    RunError,
    apply_recipe,
    at_least,
    at_most,
    run_job,
    run_script,
    say,
)
from language import BOS, EVALUATED, read_stories

import runtime
from runtime.backends import open_artifact
from runtime.bundle.format import Artifact
from runtime.decode.kv_cache import Decoder
from runtime.decode.scoring import language_encoder
from runtime.encode.language import empty_past
from runtime.tasks.manifest import read_manifest

RECIPE = ROOT / "recipes/claims" / "tinystories-w4-gptq.yaml"
MODEL = "models/tinystories656k-hf"
NEEDS = (f"{MODEL}/config.json", "data/tinystories/stories.jsonl")
GENAI = Peer("OpenVINO GenAI", "openvino_genai_answer.py", venv="openvino_genai")
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 8, 12, 64
THREADS = 1
PRECISION = "f32"
"""OpenVINO's own default is bfloat16 where the CPU has it, which gives other tokens where two are nearly as likely."""
LIKELY = 0.25
BOTH = "[{kind: onnx}, {kind: openvino}]"
FORMATS = {
    "float": ("", BOTH),
    "W4A16": ("{kind: rtn, scheme: W4A16, group_size: 32}", BOTH),
    "W4A16_ASYM": ("{kind: rtn, scheme: W4A16_ASYM, group_size: 32}", BOTH),
    "W8A16": ("{kind: rtn, scheme: W8A16, group_size: 32}", BOTH),
    "int8, dynamic": ("{kind: int8, mode: dynamic}", BOTH),
    "W4A16, int8 cache": (
        "{kind: rtn, scheme: W4A16, group_size: 32}, {kind: kv_cache, scheme: int8}",
        "[{kind: onnx}]",  # OpenVINO has no such cache
    ),
}
"""Name -> passes and exports. To try another, add a line."""
Answers = list[list[int]]


@dataclass(frozen=True)
class Decoding:
    """A bundle and what its decoders are asked."""

    name: str
    bundle: Path
    prompts: list[np.ndarray]

    def artifact(self, backend: str) -> Artifact:
        return read_manifest(self.bundle).candidate_for(backend)

    def run_ours(self, backend: str, at_once: int) -> Answers:
        """Greedy answers of our runtime, so many prompts in a batch: int8 scales made at run time are a batch's."""
        session = open_artifact(self.bundle, self.artifact(backend), backend, THREADS, precision_of(backend))
        decoder = Decoder(session, self.artifact(backend).cache)
        answers: Answers = []
        for first in range(0, len(self.prompts), at_once):
            batch = self.prompts[first : first + at_once]
            made = [decoder.start(batch, PROMPT_TOKENS + NEW_TOKENS).argmax(axis=1)]
            while len(made) < NEW_TOKENS:
                made.append(decoder.step(made[-1]).argmax(axis=1))
            answers += [list(map(int, row)) for row in np.transpose(made)]
        session.close()
        return answers

    def find_behind(self, backend: str, answers: Answers) -> float:
        """Most logits that a token of `answers` is behind the likeliest, read by our runtime on `backend`."""
        with runtime.open_bundle(
            self.bundle, backend=backend, threads=THREADS, options=precision_of(backend) or None
        ) as opened:
            texts = [np.concatenate([prompt, answer]) for prompt, answer in zip(self.prompts, answers, strict=True)]
            logits = opened.session.run(language_encoder(opened.preprocessor).feeds(texts))[
                "logits"
            ]  # [n, t, vocabulary]
        ahead = logits[:, PROMPT_TOKENS - 1 : -1]  # [n, new, vocabulary]
        chosen = np.take_along_axis(ahead, np.array(answers)[:, :, None], axis=2)[:, :, 0]
        return float((ahead.max(axis=2) - chosen).max())


def precision_of(backend: str) -> dict[str, str]:
    return {"precision": PRECISION} if backend == "openvino" else {}


def measure(call: Call) -> Measured:
    if find_spec("openvino_tokenizers") is None:
        raise CallError("export: {kind: openvino} needs openvino-tokenizers: pip install openvino-tokenizers")
    rows: list[Row] = []
    claims: list[Claim] = []
    for name in call.choose(FORMATS, quick=2):
        for row, bars in compare(make_decoding(name, call), call):
            rows.append(row)
            claims += bars
    return claims, rows


def make_decoding(name: str, call: Call) -> Decoding:
    passes, exports = FORMATS[name]
    bundle = call.out / name.replace(", ", "-").replace(" ", "-")
    sets = (
        *(f"vars.bench={call.bench}", f"passes=[{passes}]", f"export={exports}", "validate={}"),
        *("data.evaluation.samples=8", "validate.benchmark={iterations: 1}"),
    )
    apply_recipe(RECIPE, sets, bundle, call.out / "cache")
    with runtime.open_bundle(bundle) as opened:
        first, last = EVALUATED
        texts = read_stories(call.bench, (first, last))
        rows = [
            np.array([BOS, *language_encoder(opened.preprocessor).tokens(text)][:PROMPT_TOKENS], np.int64)
            for text in texts
        ]
    return Decoding(name, bundle, [row for row in rows if len(row) == PROMPT_TOKENS][:PROMPTS])


def compare(decoding: Decoding, call: Call) -> list[tuple[Row, list[Claim]]]:
    """A row, and its claims, for each tool on this bundle."""
    alone = decoding.run_ours("onnxruntime-cpu", 1)
    found = [equal_row(decoding, "onnxruntime-genai", alone, run_genai)]
    if not (decoding.bundle / "openvino").is_dir():
        return found
    in_ort, in_openvino = (decoding.run_ours(name, PROMPTS) for name in ("onnxruntime-cpu", "openvino"))
    found.append(equal_row(decoding, "OpenVINO, the ONNX file", in_openvino, run_openvino))
    behind = decoding.find_behind("onnxruntime-cpu", in_openvino)
    name = f"{decoding.name}: logits behind, ours on OpenVINO read by ours on ONNX Runtime"
    row = {"model": decoding.name, "backend": "ours on OpenVINO", "equal_tokens": share(in_ort, in_openvino)}
    found.append((row | {"behind": behind}, [at_most(name, behind, LIKELY)]))
    return found if call.ours else [*found, *compare_openvino_genai(decoding, in_openvino, call)]


def compare_openvino_genai(decoding: Decoding, ours: Answers, call: Call) -> list[tuple[Row, list[Claim]]]:
    texts = read_stories(call.bench, (EVALUATED[0], EVALUATED[0] + PROMPTS))
    job = {
        "folder": decoding.bundle / "openvino",
        "threads": THREADS,
        "precision": PRECISION,
        "prompts": [prompt.tolist() for prompt in decoding.prompts],
        "new_tokens": NEW_TOKENS,
        "texts": texts,
    }
    answer = run_job(GENAI, job, call.out, f"openvino-genai-{decoding.bundle.name}")
    with runtime.open_bundle(decoding.bundle) as opened:
        tokens = [language_encoder(opened.preprocessor).tokens(text) for text in texts]
    split = float(np.mean([a == b for a, b in zip(answer["tokens"], tokens, strict=True)]))
    found = [
        equal_row(decoding, "OpenVINO GenAI", decoding.run_ours("openvino", 1), lambda _: answer["answers"]),
        equal_row(decoding, "OpenVINO GenAI, in one call", ours, lambda _: answer["batched"]),
    ]
    claim = at_least(f"{decoding.name}: texts that OpenVINO's tokenizer splits as tokenizer.json says", split, 1)
    return [*found, ({"model": decoding.name, "backend": "OpenVINO's tokenizer", "equal_tokens": split}, [claim])]


def equal_row(
    decoding: Decoding, tool: str, ours: Answers, run: Callable[[Decoding], Answers]
) -> tuple[Row, list[Claim]]:
    """The share of a tool's tokens that are ours, all of which it must be. A tool that fails has the reason."""
    row: Row = {"model": decoding.name, "backend": tool}
    try:
        equal: float | None = share(ours, run(decoding))
    except (RuntimeError, RunError) as error:
        say(f"{decoding.name}: {tool}: {error}")
        equal, row["failed"] = None, str(error)
    name = f"{decoding.name}: tokens of {tool} that are ours"
    return row | {"equal_tokens": equal}, [at_least(name, equal, 1)]


def share(ours: Answers, theirs: Answers) -> float:
    return float((np.array(ours) == np.array(theirs)).mean())


def run_genai(decoding: Decoding) -> Answers:
    """onnxruntime-genai on the bundle's folder, one prompt at a time."""
    import onnxruntime_genai as genai

    model = genai.Model(str(decoding.bundle / "model"))
    settings = genai.GeneratorParams(model)
    settings.set_search_options(max_length=PROMPT_TOKENS + NEW_TOKENS, min_length=PROMPT_TOKENS + NEW_TOKENS)
    answers = []
    for prompt in decoding.prompts:
        generator = genai.Generator(model, settings)
        generator.append_tokens(prompt[None].astype(np.int32))
        while not generator.is_done():
            generator.generate_next_token()
        answers.append(list(map(int, generator.get_sequence(0)))[PROMPT_TOKENS:])
    return answers


def run_openvino(decoding: Decoding) -> Answers:
    """OpenVINO on the ONNX file, as anyone would write it: keys and values are handed back and forth."""
    import openvino

    manifest = read_manifest(decoding.bundle)
    artifact = manifest.graph_for("openvino")
    assert artifact.cache is not None
    model = openvino.Core().read_model(decoding.bundle / artifact.path)
    request = openvino.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": PRECISION}).create_infer_request()
    caches = [spec for spec in artifact.inputs if len(spec.shape) == 4]
    ids = np.stack(decoding.prompts)  # [n, t]
    answers: list[np.ndarray] = []
    past: dict[str, Any] = {spec.name: empty_past(spec, len(ids)) for spec in caches}
    mask = np.ones_like(ids)
    while len(answers) < NEW_TOKENS:
        made = request.infer({"input_ids": ids, "attention_mask": mask, **past})
        past = {name: np.array(made[present]) for name, present in artifact.cache.pairs()}
        answers.append(made["logits"][:, -1].argmax(axis=1))
        ids = answers[-1][:, None]
        mask = np.concatenate([mask, np.ones_like(ids)], axis=1)
    return [list(map(int, row)) for row in np.transpose(answers)]


if __name__ == "__main__":
    raise SystemExit(run_script(__doc__, NEEDS, measure))
