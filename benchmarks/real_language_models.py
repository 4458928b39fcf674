"""Claims about real language models: from a folder that people know to a verdict, in minutes, and foretold.

Qwen2.5-Coder-Instruct of 0.5 and 1.5 billion parameters, as Hugging Face folders of these names in the folder that the
variable REAL_MODELS names. All weights in 4 bits, groups of 128, embeddings and head in 8, by GPTQ on 16 windows of 512
tokens of WikiText-2; judged on 20,000 of its test's; two threads. `compress apply` takes at most 8 minutes of the
smaller and 20 of the larger, 4 and 8 GiB; the first token is no slower; the plan foretells it and a further one within
20 %. --quick takes the smaller, with a tenth of the tokens.

And the smaller without a quarter of its blocks, distilled for an hour from WikiText-2's validation texts before it is
rounded so (--only "qwen2.5-coder-0.5b pruned"; two hours): within the time and the memory that the plan foretells.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import (
    Call,
    CallError,
    Claim,
    Measured,
    Row,
    apply_recipe,
    at_least,
    at_most,
    drop,
    metric,
    plan_recipe,
    run_script,
    size_ratio,
)
from subjects import weights_bytes
from time_left import claim_readings

FOLDER = "REAL_MODELS"
NEEDS = ("data/wikitext2/valid.txt", "data/wikitext2/test.txt")
WINDOW, CALIBRATED, JUDGED = 512, 16 * 512, 20_000
LEAST_CHARACTERS = 300
GIB = 2**30
HEADING = re.compile(r"^ = .* = $")
PASSES = [{"kind": "gptq", "scheme": "W4A16", "group_size": 128, "embeddings": "W8", "lm_head": "W8"}]
LEAST_GAIN, MOST_LOST, NEAR = 2.0, 0.1, 0.2
"""Times as fast for a further token; nats lost by WikiText-2's whole interval; how far a forecast may be off."""


@dataclass(frozen=True)
class Bound:
    """What `compress apply` may take."""

    seconds: float
    n_bytes: float


MODELS = {"qwen2.5-coder-0.5b": Bound(8 * 60, 4 * GIB), "qwen2.5-coder-1.5b": Bound(20 * 60, 8 * GIB)}
PRUNED = "qwen2.5-coder-0.5b pruned"
PRUNING: list[dict[str, Any]] = [
    {"kind": "prune_layers", "drop": 0.25},
    {
        "kind": "distill",
        **dict.fromkeys(("learning_rate", "optimizer", "precision"), "auto"),
        "epochs": 100,
        "batch_size": 4,
        "max_seconds": 3600,
    },
]


def measure(call: Call) -> Measured:
    claims: list[Claim] = []
    rows: list[Row] = []
    for name in call.choose((*MODELS, PRUNED), quick=1):
        folder = find_real(name.removesuffix(" pruned"))
        found, row = (prune_model if name == PRUNED else compress_model)(call, name, folder)
        claims += found
        rows.append(row)
    return claims, rows


def find_real(name: str) -> Path:
    """Return a real model's folder. CallError where the variable names none that holds it."""
    root = os.environ.get(FOLDER)
    folder = Path(root or "") / name
    if root is None or not (folder / "config.json").is_file():
        raise CallError(f"{FOLDER} is to name a folder that holds {name} as Hugging Face has it")
    return folder


def prune_model(call: Call, name: str, folder: Path) -> tuple[list[Claim], Row]:
    """Prune, distill and round a model; its claims are what the plan foretells of that."""
    place = call.out / name.replace(" ", "-")
    place.mkdir()
    recipe = write_recipe(call, name, folder, place, PRUNING)
    planned = plan_recipe(recipe, (), place / "cache")["forecast"]
    seconds, peak_bytes, report = apply_timed(recipe, place)
    row = {
        "model": name,
        "apply_s": seconds,
        "foretold_s": planned["between"],
        "peak_gib": peak_bytes / GIB,
        "foretold_gib": planned["memory_bytes"] / GIB,
        "smaller_than_float32": size_ratio(report),
        "token_ratio": report["ratios"].get("tpot"),
        "first_token_ratio": report["ratios"].get("ttft"),
        "nll": metric(report, "baseline", "nll"),
        "nll_lost": -(drop(report, "nll") or 0.0),  # more of it is worse
        "verdict": report["verdict"],
    }
    return [
        at_most(f"{name}: seconds", seconds, planned["between"][1]),
        at_most(f"{name}: peak bytes", peak_bytes, planned["memory_bytes"]),
        *claim_readings(name, [place / "bundle/compress.log"]),
    ], row


def compress_model(call: Call, name: str, folder: Path) -> tuple[list[Claim], Row]:
    place = call.out / name
    place.mkdir()
    recipe = write_recipe(call, name, folder, place)
    planned = plan_recipe(recipe, (), place / "cache")["latency"] or {}
    seconds, peak_bytes, report = apply_timed(recipe, place)
    (gate,) = report["gates"]
    token, first = (report["baseline"]["generation"][key] for key in ("tpot", "ttft"))
    speedup, first_speedup = report["ratios"].get("tpot"), report["ratios"].get("ttft")
    row = {
        "model": name,
        "apply_s": seconds,
        "peak_gib": peak_bytes / GIB,
        "smaller_than_float32": size_ratio(report),
        "smaller_than_its_folder": weights_bytes(folder) / report["candidate"]["size_bytes"],
        "token_ratio": speedup,
        "token_ratio_foretold": planned.get("float_ms", 0) / planned.get("compressed_ms", 1),
        "first_token_ratio": first_speedup,
        "nll": metric(report, "baseline", "nll"),
        "nll_lost": -(drop(report, "nll") or 0.0),  # more of it is worse
        "interval": gate["interval"],
        "verdict": report["verdict"],
    }
    bound = MODELS[name]
    foretold = {
        "a token, float": (planned.get("float_ms"), token),
        "a token": (planned.get("compressed_ms"), token / speedup),
        "the first token, float": ((planned.get("first_ms") or [None, None])[0], first),
        "the first token": ((planned.get("first_ms") or [None, None])[1], first / first_speedup),
    }
    return [
        at_most(f"{name}: seconds", seconds, bound.seconds),
        at_most(f"{name}: peak bytes", peak_bytes, bound.n_bytes),
        at_least(f"{name}: tpot ratio", speedup, LEAST_GAIN),
        at_least(f"{name}: ttft ratio", first_speedup, 1.0),
        *claim_readings(name, [place / "bundle/compress.log"]),
        at_most(f"{name}: nats lost, upper end", (gate["interval"] or [None, None])[1], MOST_LOST),
        *(
            at_most(f"{name}: {what}, foretold, off by", None if said is None else abs(said / was - 1), NEAR)
            for what, (said, was) in foretold.items()
        ),
    ], row


def apply_timed(recipe: Path, place: Path) -> tuple[float, int, dict[str, Any]]:
    """Apply a recipe in a folder; return the seconds that it took, its peak bytes and its report."""
    begun = time.monotonic()
    peak_bytes = apply_recipe(recipe, (), place / "bundle", place / "cache")
    seconds = time.monotonic() - begun
    return seconds, peak_bytes, json.loads((place / "bundle/report.json").read_text(encoding="utf-8"))


def write_recipe(call: Call, name: str, folder: Path, place: Path, before: Sequence[dict[str, Any]] = ()) -> Path:
    """Write a recipe and its texts. `before`: passes that come first; then there are texts to learn from, too."""
    from transformers import AutoTokenizer

    tokenizer, share = AutoTokenizer.from_pretrained(folder), 10 if call.quick else 1
    data = {}
    learned = [("train", NEEDS[0], math.inf)] if before else []
    for use, file, wanted in [("calibration", NEEDS[0], CALIBRATED), ("evaluation", NEEDS[1], JUDGED), *learned]:
        texts, n_tokens = [], 0
        for text in read_paragraphs(call.bench / file):
            if n_tokens > wanted / share + WINDOW:  # what is left over of the last window counts for nothing
                break
            texts.append(text)
            n_tokens += len(tokenizer.encode(text))
        lines = (json.dumps({"text": text}) + "\n" for text in texts)
        (place / f"{use}.jsonl").write_text("".join(lines), encoding="utf-8")
        data[use] = {"source": f"jsonl:{place}/{use}.jsonl"}
    recipe: dict[str, Any] = {
        "version": 1,
        "name": name,
        "model": {"source": f"dir:{folder.absolute()}", "task": "text-generation"},
        "preprocess": {"kind": "language", "max_length": WINDOW, "pack": WINDOW},
        "data": data,
        "passes": [*before, *PASSES],
        "validate": {"gates": [{"metric": "nll", "max_drop": MOST_LOST}], "benchmark": {"threads": 2}},
    }
    path = place / "recipe.json"  # JSON is YAML
    path.write_text(json.dumps(recipe), encoding="utf-8")
    return path


def read_paragraphs(file: Path) -> Iterator[str]:
    for line in file.read_text(encoding="utf-8").splitlines():
        if len(line) >= LEAST_CHARACTERS and not HEADING.match(line):
            yield line.strip()


if __name__ == "__main__":
    raise SystemExit(run_script(__doc__, NEEDS, measure))
