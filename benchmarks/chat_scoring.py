"""Claims about conversations: the story teller of 656k parameters gets a chat template, and stories become dialogues.

Paragraphs of a story are said in turns, by a user and by the assistant, under a template without marks. By hand, from
the template's strings, piece by piece: the assistant's tokens of every dialogue, and the model's nats on them alone.
The nats that the ONNX judge reports of the float model, and those that torch reports where no ONNX file is written, are
those by hand within 1e-4; so are the 4-bit checkpoint's, loaded by transformers. The masks are transformers' own
(`return_assistant_tokens_mask`) of the same template with marks, dialogue by dialogue.

Beside it: the 3-bit model's nats on the assistant's tokens where it was calibrated on dialogues, on dialogues packed
into rows, and on the plain stories, which are more text. The model never learned to chat: of those that did, these say
nothing.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import ROOT, Call, Measured, Row, apply_recipe, at_most, run_script
from language import CALIBRATED, EVALUATED, MAX_TOKENS, load_causal, read_stories
from subjects import ONLY_WHAT_IS_SCORED, checkpoint_of
from torch import nn

RECIPE = ROOT / "recipes/claims" / "tinystories-w4-gptq.yaml"
MODEL = "models/tinystories656k-hf"
NEEDS = (f"{MODEL}/config.json", "data/tinystories/stories.jsonl")
HEADS = {"user": "Listener:\n", "assistant": "Teller:\n"}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ 'Listener:\n' + m.content + '\n' }}"
    "{% else %}{{ 'Teller:\n' }}{% generation %}{{ m.content + eos_token }}{% endgeneration %}{{ '\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Teller:\n' }}{% endif %}"
)
PLAIN = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
BAR, INPUTS = 1e-4, 5e-3
IN_TORCH = ONLY_WHAT_IS_SCORED["text-generation"]
BITS = "passes.0.scheme=W3A16"
"""Where 4 bits lose too little to tell one calibration from another."""

Dialogue = list[dict[str, str]]


def measure(call: Call) -> Measured:
    folder = write_model(call)
    evaluated = write_dialogues(call, "evaluation", EVALUATED)
    write_dialogues(call, "calibration", CALIBRATED)
    scored = [split_tokens(folder, dialogue) for dialogue in evaluated]
    by_hand = nats_of_marked(load_causal(folder), scored)
    chats = data_sets(call, "messages")
    rows: list[Row] = []
    graph = make_bundle(call, folder, "4 bits, ONNX", rows, *chats)
    alone = make_bundle(call, folder, "4 bits, torch", rows, *chats, *IN_TORCH)
    compressed = nats_of_marked(load_causal(checkpoint_of(alone)), scored)
    pairs = {"float, ONNX": (graph, "baseline", by_hand), "float, torch": (alone, "baseline", by_hand)}
    pairs["4 bits, torch"] = (alone, "candidate", compressed)
    claims = [
        at_most(f"{name}: nats from those by hand", abs(reported(bundle, side) - expected), BAR)
        for name, (bundle, side, expected) in pairs.items()
    ]
    apart = abs(reported(graph, "candidate") - reported(alone, "candidate"))
    claims.append(at_most("4 bits: nats between ONNX, which rounds inputs to int8, and torch", apart, INPUTS))
    claims.append(at_most("dialogues whose mask is not transformers' own", float(count_other(folder, evaluated)), 0))
    if not call.quick:
        for name, sets in (
            ("3 bits, dialogues", chats),
            ("3 bits, dialogues packed", (*chats, "data.calibration.packing=true")),
            ("3 bits, plain stories", data_sets(call, "text")),
        ):
            make_bundle(call, folder, name, rows, *sets, *IN_TORCH, BITS)
    rows.insert(0, {"model": "float, by hand", "nats": by_hand, "tokens": sum(sum(said[1:]) for _, said in scored)})
    return claims, rows


def write_model(call: Call) -> Path:
    """The story teller with a chat template."""
    folder = call.out / "model"
    shutil.copytree(call.bench / MODEL, folder)
    (folder / "chat_template.jinja").write_text(PLAIN, encoding="utf-8")
    return folder


def write_dialogues(call: Call, name: str, span: tuple[int, int]) -> list[Dialogue]:
    """Stories of at least two paragraphs as dialogues, an even number of turns each, and their texts beside them."""
    dialogues = []
    with (call.out / f"{name}.jsonl").open("w", encoding="utf-8") as file:
        for story in read_stories(call.bench, span)[: 20 if call.quick else None]:
            parts = [part.strip() for part in story.split("\n\n") if part.strip()]
            turns = [
                {"role": ("user", "assistant")[k % 2], "content": part}
                for k, part in enumerate(parts[: len(parts) // 2 * 2])
            ]
            if turns:
                dialogues.append(turns)
                file.write(json.dumps({"messages": turns, "text": story}) + "\n")
    return dialogues


def data_sets(call: Call, role: str) -> tuple[str, str]:
    """Calibrated on the column of this role, and judged on dialogues."""
    return (
        f"data.calibration={{source: 'jsonl:{call.out}/calibration.jsonl', columns: {{{role}: {role}}}}}",
        f"data.evaluation={{source: 'jsonl:{call.out}/evaluation.jsonl', columns: {{messages: messages}}}}",
    )


def split_tokens(folder: Path, dialogue: Dialogue) -> tuple[list[int], list[bool]]:
    """A dialogue's ids, cut at 512, and which are the assistant's, put together of its pieces' tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.bos_token
    said = [False] * len(text)
    for turn in dialogue:
        own = turn["role"] == "assistant"
        for piece, counts in (
            (HEADS[turn["role"]], False),
            (turn["content"] + (tokenizer.eos_token if own else ""), own),
            ("\n", False),
        ):
            text += piece
            said += [counts] * len(piece)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    marked = [any(said[start:end]) for start, end in encoded["offset_mapping"]]
    return encoded["input_ids"][:MAX_TOKENS], marked[:MAX_TOKENS]


@torch.no_grad()
def nats_of_marked(model: nn.Module, dialogues: Sequence[tuple[list[int], list[bool]]]) -> float:
    """Cross-entropy of the marked tokens over their number, in nats; each dialogue is read alone."""
    total, n_tokens = 0.0, 0
    for ids, said in dialogues:
        row, marked = torch.tensor([ids]), torch.tensor(said)[1:]
        logits = model(input_ids=row, use_cache=False).logits[0, :-1].double()  # [T - 1, vocabulary]
        nats = nn.functional.cross_entropy(logits, row[0, 1:], reduction="none")
        total, n_tokens = total + float(nats[marked].sum()), n_tokens + int(marked.sum())
    return total / n_tokens


def count_other(folder: Path, dialogues: Sequence[Dialogue]) -> int:
    """How many dialogues have another mask here than transformers finds by the marks of the same template."""
    from transformers import AutoTokenizer

    from compress.data.chat import ChatEncoder
    from compress.specs import ChatSpec

    tokenizer, ours = AutoTokenizer.from_pretrained(folder), ChatEncoder(ChatSpec(), folder, folder)
    other = 0
    for dialogue in dialogues:
        marked: Any = tokenizer.apply_chat_template(
            dialogue, chat_template=TEMPLATE, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = ours.encode(dialogue)
        other += ids.tolist() != marked["input_ids"] or mask.tolist() != marked["assistant_masks"]
    return other


def make_bundle(call: Call, folder: Path, name: str, rows: list[Row], *sets: str) -> Path:
    """A bundle of the claims' recipe on these sets, and its row."""
    bundle = call.out / name.replace(", ", "-").replace(" ", "-")
    more = (f"vars.bench={call.bench}", f"model.source=dir:{folder}", "preprocess={kind: language, max_length: 512}")
    apply_recipe(RECIPE, (*more, *sets), bundle, call.out / "cache")
    sides: dict[str, Any] = {side: reported(bundle, side) for side in ("baseline", "candidate")}
    rows.append({"model": name, **sides})
    return bundle


def reported(bundle: Path, side: str) -> float:
    report = json.loads((bundle / "report.json").read_text(encoding="utf-8"))
    return float(report[side]["metrics"]["nll"])


if __name__ == "__main__":
    raise SystemExit(run_script(__doc__, NEEDS, measure))
