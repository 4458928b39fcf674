"""Claims about what 4 and 3 bits leave of a real language model: `gptq` and `tune` lose least at equal bytes.

Qwen2.5-Coder-Instruct 0.5B, a Hugging Face folder of that name in the folder that the variable REAL_MODELS names. The
linear layers of its blocks in symmetric integers of 4 and 3 bits, groups of 32, embeddings and head in float, as
recipes/int4-llm-vllm.yaml has them; calibrated on 16 articles of WikiText-2's validation text, each cut at 512 tokens.
Nats per token on 20 articles of its test text, and on 10 files of Python's library. Ours and the peers' weights are
scored by the same function of this process; `gptq` has at most the nats of llm-compressor's GPTQ and AWQ on both
together, and `tune` for half an hour after it at most AutoRound's. A row that was measured is kept in
benchmarks/.trained/ and not measured again. Peers: llm-compressor (RTN, GPTQ, AWQ) and AutoRound, which takes a
quarter of its default steps: hours of these two cores.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import subjects
from common import Call, Measured, Row, at_most, run_script
from language import load_causal, nats_per_token
from real_language_models import HEADING, find_real
from subjects import Ours, Subject, autoround_row, float_row, llmcompressor_row, our_row
from training import find_row

MODEL = "qwen2.5-coder-0.5b"
NEEDS = ("data/wikitext2/valid.txt", "data/wikitext2/test.txt")
WINDOW, CALIBRATED, ARTICLES, FILES, GROUP = 512, 16, 20, 10, 32
SKIPPED = 4000
"""Characters at the head of a file of code: its licence and what it says of itself."""
BITS = (4, 3)
STEPS = 50
"""Of AutoRound: what it calls light."""
TUNE_SECONDS = 1800
Make = Callable[[Subject, int, Call], Row]


def ours(made_by: str, *passes: str) -> Make:
    """Of a row by our own passes; {bits} in them is filled in."""

    def make(subject: Subject, bits: int, call: Call) -> Row:
        sets = (f"passes=[{', '.join(passes)}]".replace("{bits}", str(bits)),)
        kinds = tuple(one.partition("kind: ")[2].partition(",")[0].rstrip("}") for one in passes)
        return our_row(subject, Ours(made_by, call.out / "recipe.json", sets, kinds), bits, GROUP, call)

    return make


def theirs(method: str) -> Make:
    return lambda subject, bits, call: llmcompressor_row(subject, method, bits, GROUP, call)


GPTQ = "{kind: gptq, scheme: W{bits}A16, group_size: 32}"
MADE_BY: dict[str, Make] = {
    "llm-compressor rtn": theirs("rtn"),
    "llm-compressor gptq": theirs("gptq"),
    "llm-compressor awq": theirs("awq"),
    "auto-round": lambda subject, bits, call: autoround_row(subject, bits, GROUP, call, STEPS),
    "ours gptq": ours("ours gptq", GPTQ),
    "ours tune": ours("ours tune", GPTQ, f"{{kind: tune, max_seconds: {TUNE_SECONDS}}}"),
}
ROWS = {f"{made_by} w{bits}": (made_by, bits) for bits in BITS for made_by in MADE_BY}
BEATEN = {"ours gptq": ("llm-compressor gptq", "llm-compressor awq"), "ours tune": ("auto-round",)}


def measure(call: Call) -> Measured:
    chosen = call.choose(("float", *ROWS), quick=3)
    subject = real_subject(call)
    code = (__file__, str(subjects.__file__))
    rows = [find_row(f"real-{name}", call.quick, code, partial(make_row, name, subject, call)) for name in chosen]
    found = {(row["made_by"], row["bits"]): row.get("nats") for row in rows}
    return [
        at_most(f"{made_by} w{bits}: nats beside {peer}", lost(found, (made_by, bits), (peer, bits)), 0.0)
        for bits in BITS
        for made_by, peers in BEATEN.items()
        for peer in peers
        if {(made_by, bits), (peer, bits)} <= found.keys()
    ], rows


def lost(nats: dict[tuple[str, int], float | None], ours: tuple[str, int], peer: tuple[str, int]) -> float | None:
    """Nats of ours above the peer's; None where one failed."""
    mine, other = nats[ours], nats[peer]
    return None if mine is None or other is None else mine - other


def make_row(name: str, subject: Subject, call: Call) -> Row:
    if name == "float":
        return float_row(subject)
    made_by, bits = ROWS[name]
    return MADE_BY[made_by](subject, bits, call)


def real_subject(call: Call) -> Subject:
    """The model, its calibration and its score; writes the recipe of ours beside it, of the same tokens."""
    folder = find_real(MODEL)
    texts = read_texts(call, folder)
    write_recipe(call.out / "recipe.json", folder, texts.calibration)
    batches = [{"input_ids": np.array([ids])} for ids in texts.calibration]
    return Subject(MODEL, folder, "text-generation", batches, load_causal, partial(score, judged=texts.judged))


@dataclass(frozen=True)
class Texts:
    """Token ids, `WINDOW` of each text. `judged`: kind of text -> texts."""

    calibration: list[list[int]]
    judged: dict[str, list[list[int]]]


def read_texts(call: Call, folder: Path) -> Texts:
    """Articles of WikiText-2 and modules of Python's library, in the tokens of a folder's tokenizer."""
    from transformers import AutoTokenizer

    share = 8 if call.quick else 1
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def encode(texts: Iterable[str], count: int) -> list[list[int]]:
        found: Iterator[list[int]] = (tokenizer(text)["input_ids"][:WINDOW] for text in texts)
        return [ids for ids in found if len(ids) == WINDOW][: count // share]

    judged = {
        "wikitext": encode(read_articles(call.bench / NEEDS[1]), ARTICLES),
        "code": encode(read_library(), FILES),
    }
    return Texts(encode(read_articles(call.bench / NEEDS[0]), CALIBRATED), judged)


def score(model: Any, judged: Mapping[str, Sequence[Sequence[int]]]) -> dict[str, float]:
    """Nats per token of each kind of text, and of all."""
    found = {kind: nats_per_token(model, rows) for kind, rows in judged.items()}
    n_rows = {kind: len(rows) for kind, rows in judged.items()}
    return found | {"nats": sum(found[kind] * n_rows[kind] for kind in found) / sum(n_rows.values())}


def write_recipe(path: Path, folder: Path, calibration: list[list[int]]) -> None:
    """Write a recipe without passes, and the texts that it calibrates on beside it."""
    from transformers import AutoTokenizer

    texts = AutoTokenizer.from_pretrained(folder).batch_decode(calibration)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    data = path.with_name("calibration.jsonl")
    data.write_text(lines, encoding="utf-8")
    spec = {"source": f"jsonl:{data}", "shuffle": False}
    recipe: dict[str, Any] = {
        "version": 1,
        "name": "real-quality",
        "vars": {"bench": ""},
        "model": {"source": f"dir:{folder.absolute()}", "task": "text-generation"},
        "preprocess": {"kind": "language", "max_length": WINDOW},
        "data": {"calibration": spec, "evaluation": spec | {"samples": 1}},  # what is judged is judged here
        "passes": [],
    }
    path.write_text(json.dumps(recipe), encoding="utf-8")


def read_articles(file: Path) -> Iterator[str]:
    lines: list[str] = []
    for line in [*file.read_text(encoding="utf-8").splitlines(), " = end = "]:
        if HEADING.match(line) and not line.startswith(" = = "):
            yield "\n".join(lines)
            lines = []
        lines.append(line.strip())


def read_library() -> Iterator[str]:
    """Python's own modules by name, behind what stands at their heads."""
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        yield file.read_text(encoding="utf-8", errors="replace")[SKIPPED:]


if __name__ == "__main__":
    raise SystemExit(run_script(__doc__, NEEDS, measure))
