"""Claims about reading a prompt, and one token after the other, in 4 bits, of bundles that its own recipe makes.

A random Llama of 220 million parameters (12 layers, hidden 1024, feed-forward 2816, 16 heads, 32,000 tokens), its
layers in groups of 128; and of the real models in the folder that REAL_MODELS names, as `real_language_models.py` has
them, groups of 128 with embeddings and head in 8 bits. Batch 1: a prompt of 512 tokens, and tokens after 256 and after
1,000, on one thread and on two. Times are ratios to ONNX Runtime on the plain float graph with IO binding. Ours is run
as `python -m runtime generate` runs it. Claims: of the random one a token is at least 4.3 times faster on one thread
and 4.6 on two; of the real ones ours is within 5 % of the fastest, and a token within 3 % of a bare loop over the same
graph. Beside it: llama.cpp's Q4_0, the int4 graph of onnxruntime-genai's builder in plain ONNX Runtime and in its own
generator, OpenVINO's int4. A recipe for a real model: recipes/llm/llama-w4a16-gptq.yaml.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from common import Call, Claim, Measured, Peer, Row, RunError, apply_recipe, at_least, run_peer, run_script, say
from decoders import BundlePlayer, GenaiPlayer, LlamaCppPlayer, OpenVinoPlayer, OrtPlayer, Player, play, ratios
from language import DECODER_LAYERS, load_causal, random_llama
from real_language_models import FOLDER, MODELS

NEEDS = ()
RANDOM = "random-220m"
BARS = {1: 4.3, 2: 4.6}
"""Threads -> the least ratio of the random model to its float graph."""
FASTEST, BARE = 0.95, 0.97
"""Of the fastest peer's speed, and of a bare loop's over our graph."""
PASTS, PROMPT = (256, 1000), 512
TOKENS = 32
RECIPE = """\
version: 1
name: decoder
model: {{source: "dir:{model}", task: text-generation}}
preprocess: {{kind: language, max_length: 2048}}
data:
  evaluation: {{source: "jsonl:{texts}", samples: 1, shuffle: false}}
target: {target}
passes: [{passes}]
export: [{export}]
validate: {{benchmark: {{processes: 1, iterations: 1}}}}
"""
Maker = Callable[[int], Player]
"""Threads -> a player."""


@dataclass(frozen=True)
class Subject:
    """A model to run. `group`: of its weights in 4 bits; `keys`: what our pass says beside; `rounds`: of its times."""

    name: str
    folder: Path
    group: int
    keys: str
    rounds: int


def measure(call: Call) -> Measured:
    root = os.environ.get(FOLDER)
    real = [name for name in MODELS if root and (Path(root) / name / "config.json").is_file()]
    claims: list[Claim] = []
    rows: list[Row] = []
    for name in call.choose([RANDOM, *real], quick=1):
        out = call.out / name
        out.mkdir()
        if name == RANDOM:
            model = random_llama(out / "model", 2 if call.quick else DECODER_LAYERS, call.quick)
            subject = Subject(name, model, 128, "ignore: []", 10)
        else:
            subject = Subject(name, Path(root or "") / name, 128, "embeddings: W8, lm_head: W8", 4)  # of half an hour
        found, more = measure_subject(subject, out, call)
        claims += found
        rows += more
    return claims, rows


def measure_subject(subject: Subject, out: Path, call: Call) -> Measured:
    makers, rows = our_makers(subject, out), []
    if not call.ours:
        found, failures = peer_makers(subject, out)
        makers, rows = makers | found, failures
    for threads in BARS:
        rows += turns(subject, makers, threads, call)
    return (claim_random(rows) if subject.name == RANDOM else claim_real(subject.name, rows)), rows


def our_makers(subject: Subject, out: Path) -> dict[str, Maker]:
    """The float graph first, then the bundle."""
    plain = out / "float" / "model.onnx"
    export_plain(subject.folder, plain)
    passes = f"{{kind: rtn, scheme: W4A16, group_size: {subject.group}, {subject.keys}}}"
    bundle = build(subject, out, "bundle", "onnxruntime-cpu", passes, "{kind: onnx}")
    return {
        "float": lambda threads: OrtPlayer(plain, threads, head_size(subject.folder)),
        "ours": lambda threads: BundlePlayer(bundle, threads),
        "ours, plain loop": lambda threads: OrtPlayer(bundle_model(bundle), threads, head_size(subject.folder)),
    }


def build(subject: Subject, out: Path, name: str, target: str, passes: str, export: str) -> Path:
    """The bundle that a recipe makes of the model."""
    texts, recipe = out / "text.jsonl", out / f"{name}.yaml"
    texts.write_text('{"text": "' + " ".join(f"w{i}" for i in range(3, 67)) + '"}\n', encoding="utf-8")
    filled = RECIPE.format(model=subject.folder, texts=texts, target=target, passes=passes, export=export)
    recipe.write_text(filled, encoding="utf-8")
    apply_recipe(recipe, (), out / name, out / "cache")
    return out / name


def head_size(model: Path) -> int:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return int(config["hidden_size"] // config["num_attention_heads"])


def bundle_model(bundle: Path) -> Path:
    from runtime.tasks.manifest import read_manifest

    return bundle / read_manifest(bundle).candidate_for("onnxruntime-cpu").path


def export_plain(model: Path, path: Path) -> None:
    """The float32 graph as torch's exporter writes it, its cache explicit."""
    from compress.export.decoder import export_decoder
    from compress.export.onnx import save_graph

    path.parent.mkdir()
    say("exporting the float graph")
    save_graph(export_decoder(load_causal(model)), path)


def peer_makers(subject: Subject, out: Path) -> tuple[dict[str, Maker], list[Row]]:
    """({peer: its maker}, a row for each that could not be made)."""
    made: dict[str, Maker] = {}
    failures: list[Row] = []
    folder, ir, group = out / "genai", out / "openvino.xml", subject.group
    builder = Peer("genai builder", "genai_build.py", (f"block_size={group}",))
    nncf = Peer("openvino int4", "nncf_int4.py", (str(group),), "nncf")
    peers: tuple[tuple[Peer, tuple[Path, Path], dict[str, Maker]], ...] = (
        (
            builder,
            (subject.folder, folder),
            {
                "genai builder, plain loop": lambda threads: OrtPlayer(
                    folder / "model.onnx", threads, head_size(subject.folder)
                ),
                "genai generator": lambda threads: GenaiPlayer(folder, threads),
            },
        ),
        (nncf, (out / "float" / "model.onnx", ir), {"openvino int4": lambda threads: OpenVinoPlayer(ir, threads)}),
    )
    for peer, arguments, makers in peers:
        try:
            run_peer(peer, *arguments, folder=out)
        except RunError as error:
            say(f"{peer.name}: {error}")
            failures += [{"model": subject.name, "tool": name, "failed": str(error)} for name in makers]
        else:
            made |= makers
    source = subject.folder
    if subject.name != RANDOM:  # llama.cpp's own converter is not in its package
        source = build(subject, out, "gguf", "llama.cpp", "", "{kind: gguf, dtype: float16}") / "model/model.gguf"
    made["llama.cpp Q4_0"] = lambda threads: LlamaCppPlayer(source, out / "llamacpp", threads)
    return made, failures


def turns(subject: Subject, makers: dict[str, Maker], threads: int, call: Call) -> list[Row]:
    """A row for each player and what it does, or with the reason why it fails; the float graph must not."""
    rows: list[Row] = []
    n, rounds = (4, 2) if call.quick else (TOKENS, subject.rounds)
    with ExitStack() as stack:
        players: dict[str, Player] = {}
        for name, make in makers.items():
            try:
                player = make(threads)
                stack.callback(player.close)
                player.turn(8, 2)
            except Exception as error:
                if name in ("float", "ours"):
                    raise
                rows.append({"model": subject.name, "tool": name, "threads": threads, "failed": str(error)})
            else:
                players[name] = player

        def time(what: str, n_tokens: int, work: Callable[[Player], float]) -> None:
            say(f"{subject.name}, {threads} threads: {what}")
            seconds = play(players, work, rounds)
            found = ratios(seconds, "float")
            for name, player in players.items():
                ms = 1000 * sorted(seconds[name])[rounds // 2] / n_tokens
                row: Row = {"model": subject.name, "tool": name, "threads": threads, "what": what}
                rows.append(row | {"ratio": found[name], "ms_a_token": ms, "mib": player.size_bytes / 2**20})

        prompt = 32 if call.quick else PROMPT
        for player in players.values():
            player.read(prompt)  # the first is to warm up
        time(f"a prompt of {prompt}", prompt, lambda player: player.read(prompt))
        for past in (16, 32) if call.quick else PASTS:
            time(f"after {past}", n, lambda player, past=past: player.turn(past, n))  # type: ignore[misc]
    return rows


def claim_random(rows: Sequence[Row]) -> list[Claim]:
    """The worse of the pasts decides."""
    made = []
    for threads, bar in BARS.items():
        own = [row["ratio"] for row in steps(rows, "ours") if row["threads"] == threads]
        made.append(at_least(f"decode_ratio_{threads}_threads", min(own, default=None), bar))
    return made


def claim_real(name: str, rows: Sequence[Row]) -> list[Claim]:
    """Beside the fastest of the others in each row, and of tokens beside a bare loop."""
    made = []
    measured = [row for row in rows if "ratio" in row]
    for own in (row for row in measured if row["tool"] == "ours"):
        beside = {row["tool"]: row["ratio"] for row in measured if all(row[k] == own[k] for k in ("threads", "what"))}
        others = [ratio for tool, ratio in beside.items() if not tool.startswith(("ours", "float"))]
        where = f"{name}, {own['what']}, {own['threads']} threads"
        if others:
            made.append(at_least(f"{where}: of the fastest", own["ratio"] / max(others), FASTEST))
        if own in steps(rows, "ours"):
            made.append(at_least(f"{where}: of a bare loop", own["ratio"] / beside["ours, plain loop"], BARE))
    return made


def steps(rows: Sequence[Row], tool: str) -> list[Row]:
    """A tool's rows of single tokens."""
    return [row for row in rows if row["tool"] == tool and row.get("what", "").startswith("after")]


if __name__ == "__main__":
    raise SystemExit(run_script(__doc__, NEEDS, measure))
