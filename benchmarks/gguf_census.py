"""Every language model of the installed transformers, tiny, as a GGUF file: what the plan takes, llama.cpp computes.

Each family is built of transformers' own configuration with small sizes and random weights, as `census.py` builds it,
in a few forms that its released models have, until the plan takes one. That is written as by
recipes/int4-llm-llamacpp.yaml, but without its pass and in float32, with a tokenizer, and llama.cpp's logits of 48
tokens are compared with torch's: they differ by less than RIGHT (a hundredth) of their deviation, or the family is
wrong. `--only` tries a family anew; a whole run writes docs/reference/gguf.md.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from census import VARIANTS, VOCABULARY, build_once, list_families, make_config, shorten
from common import HERE, ROOT, Call, Measured, Peer, Row, at_least, at_most, link_packages, run_job, run_script, say
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

from compress.blocks.experts import unstack_experts
from compress.blocks.materialise import tied_names
from compress.export.gguf import FILE, describe_gguf, write_gguf
from compress.facts import Structure
from compress.models.open_streamed import open_streamed_module
from compress.recipe.exports import GgufExport

KEPT, PAGE = HERE / ".census", ROOT / "docs/reference/gguf.md"
MARK = "<!-- made by benchmarks/gguf_census.py -->\n"
RUN = Peer("llama.cpp", "llamacpp_gguf.py", venv="llamacpp")
EXPORT = GgufExport(dtype="float32")
RIGHT = 1e-2
"""Measured: 1e-6 to 1e-5; to 2e-3 where llama.cpp looks GELU up; 5e-3 of a Mamba whose weights make rounding grow,
which differs by 5e-7 with others."""
NO_PLACE = "has no place in"
TOKENS, WANTED = 48, 55
RELEASED: tuple[dict[str, Any], ...] = (
    *VARIANTS,
    {"norm_topk_prob": True},
    {"query_pre_attn_scalar": 16},
    {"sliding_window": None, "layer_types": ["full_attention", "full_attention"]},
    {"lm_head_bias": True, "attention_bias": True},
    {"no_rope_layer_interval": 4, "num_hidden_layers": 4},
    {"head_dim": 256},
    {"position_embedding_type": "nope"},
    {"num_hidden_layers": 4, "layer_types": None},
)
"""What a configuration gets besides, of what released models say otherwise than their class."""


def measure(call: Call) -> Measured:
    sys.path.append(str(link_packages("llamacpp", call.out / "llamacpp", "llama_cpp", "diskcache")))
    rows = []
    known = [family for family in list_families() if "+" not in family]
    for family in call.choose(known, quick=4):
        path = KEPT / f"gguf-{transformers.__version__}" / f"{family}.json"
        if call.only or not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            started = time.monotonic()
            try:
                row = try_family(call, family)
            except Exception as error:  # noqa: BLE001  (a row of its own, and the others go on)
                row = {"family": family, "found": "wrong", "why": shorten(f"{type(error).__name__}: {error}")}
            path.write_text(json.dumps(row | {"seconds": round(time.monotonic() - started)}), encoding="utf-8")
        rows.append(json.loads(path.read_text(encoding="utf-8")))
        say(json.dumps(rows[-1]))
    if not call.only and not call.quick:
        write_page(rows)
    found = [row["found"] for row in rows]
    return [
        at_least(
            "families that llama.cpp computes right", found.count("right"), 0 if call.only or call.quick else WANTED
        ),
        at_most("families that the plan takes and llama.cpp computes otherwise", found.count("wrong"), 0),
    ], rows


def try_family(call: Call, family: str) -> Row:
    """Return what becomes of the first form of a family that the plan takes, or why it takes none."""
    refusal = ""
    for more, model in build_forms(family):
        with tempfile.TemporaryDirectory(dir=call.out) as name:
            write_bytes_tokenizer(Path(name))
            module = copy.deepcopy(model)
            unstack_experts(module)
            found = describe_gguf(module, {}, EXPORT, Path(name), {}, tied_names(module))
            if found.problems:
                refusal = refusal or found.problems[0]
                if NO_PLACE in refusal:
                    break  # other settings have the same tensors
                continue
            row: Row = {"family": family, "as": found.architecture, "with": str(more or "")}
            tokens = np.random.default_rng(1).integers(5, VOCABULARY, TOKENS)
            tokens = tokens[: found.metadata.values["context_length"]]  # it ends with a window that llama.cpp has not
            return row | write_and_compare(call, Path(name), module, model, tokens)
    return {"family": family, "found": "refused" if refusal else "not built", "why": shorten(refusal)}


def build_forms(family: str) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yield tiny models of a family, and what their configurations have besides."""
    kind = list_families()[family]
    for more in RELEASED:
        if more.keys() <= {field.name for field in dataclasses.fields(kind)}:
            try:
                yield more, build_once(make_config(kind, more), transformers.AutoModelForCausalLM)
            except Exception as error:  # noqa: BLE001  (whatever a model's own code raises)
                say(f"{family} {more}: {shorten(str(error), 80)}")


def write_bytes_tokenizer(folder: Path) -> None:
    """A tokenizer whose tokens are nearly all bytes, and two of them in one: llama.cpp loads none without a merge."""
    letters = [letter for letter in sorted(pre_tokenizers.ByteLevel.alphabet()) if letter != "!"]
    vocabulary = {token: i for i, token in enumerate([*letters, "ab"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def write_and_compare(call: Call, work: Path, module: nn.Module, model: nn.Module, tokens: np.ndarray) -> Row:
    """Return what llama.cpp computes of a module's file beside what torch does."""
    path = work / FILE
    write_gguf(path, open_streamed_module(module, Structure(()), {}, work), EXPORT, "tiny")
    np.savez(work / "tokens.npz", first=tokens)
    job = {"models": {"tiny": str(path)}, "tokens": str(work / "tokens.npz"), "logits": str(work / "logits.npz")}
    answer = run_job(RUN, job, call.out, "census")["models"]["tiny"]
    if answer.get("failed"):
        return {"found": "wrong", "why": shorten(answer["failed"])}
    with np.load(work / "logits.npz") as arrays, torch.no_grad():
        wanted = model(input_ids=torch.from_numpy(tokens)[None]).logits[0].numpy()
        apart = float(np.abs(arrays["tiny"] - wanted).max() / wanted.std())
    return {"found": "right" if apart <= RIGHT else "wrong", "difference": apart}


def write_page(rows: list[Row]) -> None:
    """Write the table into the page, behind MARK."""
    found = [row["found"] for row in rows]
    counted = ", ".join(f"{found.count(word)} {word}" for word in ("right", "wrong", "refused", "not built"))
    tools = f"transformers {transformers.__version__}, gguf {version('gguf')}, llama-cpp-python 0.3.36"
    lines = [f"{tools}, {datetime.now(UTC):%Y-%m-%d}: {counted}.", ""]
    lines += ["| family | in GGUF | | difference | built with, or why not |", "|---|---|---|--:|---|"]
    for row in rows:
        apart = f"{row['difference']:.0e}" if "difference" in row else ""
        told = row.get("why", "").partition(" are not written as GGUF")[2].lstrip(":, ").partition("; use target")[0]
        told = told or row.get("why") or row.get("with", "")
        lines.append(f"| {row['family']} | {row.get('as', '')} | {row['found']} | {apart} | {told.replace('|', '/')} |")
    text = PAGE.read_text(encoding="utf-8").partition(MARK)[0]
    PAGE.write_text(f"{text}{MARK}" + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(run_script(__doc__, (), measure))
