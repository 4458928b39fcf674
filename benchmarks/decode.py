"""Claims about decoding one token after the other in 4 bits, of a bundle that this script's own recipe makes.

A random Llama of 220 million parameters (12 layers, hidden 1024, feed-forward 2816, 16 heads, 32,000 tokens), batch 1,
after 256 and after 1,000 tokens, on one thread and on two. Times are ratios to ONNX Runtime on the plain float graph
with IO binding; ours, run as `python -m runtime generate` runs it, is at least 4.3 times faster on one thread and 4.6
on two. Beside it, not as claims: llama.cpp's Q4_0, the int4 graph of onnxruntime-genai's builder in plain ONNX Runtime
and in its own generator, OpenVINO's int4, and our graph in a plain loop. A recipe for a real model of this kind:
recipes/llm/llama-w4a16-gptq.yaml.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from common import Call, Claim, Measured, Peer, Row, RunError, apply_recipe, at_least, run_peer, run_script, say
from decoders import (
    BundlePlayer,
    GenaiPlayer,
    LlamaCppPlayer,
    OpenVinoPlayer,
    OrtPlayer,
    Player,
    play,
    ratios,
)
from language import DECODER_LAYERS, load_causal, random_llama

NEEDS = ()
BARS = {1: 4.3, 2: 4.6}
"""Threads -> the least ratio to the float graph."""
PASTS = (256, 1000)
TOKENS, ROUNDS = 32, 10
GROUP = 128
BUILDER = Peer("genai builder", "genai_build.py", (f"block_size={GROUP}",))
NNCF = Peer("openvino int4", "nncf_int4.py", (str(GROUP),), "nncf")
RECIPE = """\
version: 1
name: random-llama
model: {{source: "dir:{model}", task: text-generation}}
preprocess: {{kind: language, max_length: 2048}}
data:
  evaluation: {{source: "jsonl:{stories}", samples: 1, shuffle: false}}
target: onnxruntime-cpu
passes:
  - {{kind: rtn, scheme: W4A16, group_size: {group}, ignore: []}}
export:
  - {{kind: onnx}}
"""
Maker = Callable[[int], Player]
"""Threads -> a player."""


def measure(call: Call) -> Measured:
    model = random_llama(call.out / "model", 2 if call.quick else DECODER_LAYERS, call.quick)
    makers, rows = our_makers(model, call)
    if not call.ours:
        found, failures = peer_makers(model, call)
        makers, rows = makers | found, rows + failures
    for threads in BARS:
        rows += turns(makers, threads, call)
    return claims(rows), rows


def our_makers(model: Path, call: Call) -> tuple[dict[str, Maker], list[Row]]:
    """The float graph first, then the bundle."""
    plain = call.out / "float" / "model.onnx"
    export_plain(model, plain)
    stories, recipe, bundle = (call.out / name for name in ("text.jsonl", "recipe.yaml", "bundle"))
    stories.write_text('{"text": "' + " ".join(f"w{i}" for i in range(3, 67)) + '"}\n', encoding="utf-8")
    recipe.write_text(RECIPE.format(model=model, stories=stories, group=GROUP), encoding="utf-8")
    apply_recipe(recipe, (), bundle, call.out / "cache")
    makers: dict[str, Maker] = {
        "float": lambda threads: OrtPlayer(plain, threads, head_size(model)),
        "ours": lambda threads: BundlePlayer(bundle, threads),
        "ours, plain loop": lambda threads: OrtPlayer(bundle_model(bundle), threads, head_size(model)),
    }
    return makers, []


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


def peer_makers(model: Path, call: Call) -> tuple[dict[str, Maker], list[Row]]:
    """({peer: its maker}, a row for each that could not be made)."""
    made: dict[str, Maker] = {}
    failures: list[Row] = []
    folder, ir = call.out / "genai", call.out / "openvino.xml"
    plain = call.out / "float" / "model.onnx"
    peers: tuple[tuple[Peer, tuple[Path, Path], dict[str, Maker]], ...] = (
        (
            BUILDER,
            (model, folder),
            {
                "genai builder, plain loop": lambda threads: OrtPlayer(
                    folder / "model.onnx", threads, head_size(model)
                ),
                "genai generator": lambda threads: GenaiPlayer(folder, threads),
            },
        ),
        (NNCF, (plain, ir), {"openvino int4": lambda threads: OpenVinoPlayer(ir, threads)}),
    )
    for peer, arguments, makers in peers:
        try:
            run_peer(peer, *arguments, folder=call.out)
        except RunError as error:
            say(f"{peer.name}: {error}")
            failures += [{"model": name, "failed": str(error)} for name in makers]
        else:
            made |= makers
    made["llama.cpp Q4_0"] = lambda threads: LlamaCppPlayer(model, call.out / "llamacpp", threads)
    return made, failures


def turns(makers: dict[str, Maker], threads: int, call: Call) -> list[Row]:
    """A row for each player and past; one that fails has a row with the reason, and the float graph must not."""
    failures: list[Row] = []
    rows: list[Row] = []
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
                failures.append({"model": name, "threads": threads, "failed": str(error)})
            else:
                players[name] = player
        for past in (16, 32) if call.quick else PASTS:
            say(f"{threads} threads, {past} tokens before")
            seconds = play(players, past, 4 if call.quick else TOKENS, 2 if call.quick else ROUNDS)
            found = ratios(seconds, "float")
            rows += [{"model": name, "threads": threads, "past": past, "ratio": found[name]} for name in players]
            for row in rows[-len(players) :]:
                row["ms_a_token"] = 1000 * sorted(seconds[row["model"]])[len(seconds[row["model"]]) // 2]
    return rows + failures


def claims(rows: Sequence[Row]) -> list[Claim]:
    """The worse of the pasts decides."""
    made = []
    for threads, bar in BARS.items():
        own = [row["ratio"] for row in rows if row["model"] == "ours" and row.get("threads") == threads]
        made.append(at_least(f"decode_ratio_{threads}_threads", min(own, default=None), bar))
    return made


if __name__ == "__main__":
    raise SystemExit(run_script(__doc__, NEEDS, measure))
