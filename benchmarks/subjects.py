"""Models that are compressed for their quality: by peers, by recipes of ours, and scored by one function each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import Call, CallError, Peer, Row, RunError, apply_recipe, pass_seconds, run_job, say
from embeddings import MAX_LENGTH, STSB_DEV, embed, load_encoder, mean_cosine, minilm_folder, read_sentences
from language import CALIBRATED, EVALUATED, encode_stories, load_causal, nats_per_token, read_stories, with_weights
from peers.batches import Batch, write_batches

THREADS = 2
ITERATIONS = 200
"""Of AutoRound: its default."""
ROW_TOKENS = 256
"""AutoRound takes rows of one length and drops shorter ones: the same tokens, joined and cut."""
ONLY_WHAT_IS_SCORED = {
    "text-generation": ("target=transformers", "export=[{kind: checkpoint}]", "validate={}"),
    "feature-extraction": ("data.evaluation.samples=100", "validate={benchmark: {iterations: 1}}"),
}
"""Task -> settings that leave out what is not needed here: the score is taken from the checkpoint, by this process."""
LLMCOMPRESSOR = Peer("llm-compressor", "llmcompressor_oneshot.py", venv="llmcompressor")
AUTOROUND = Peer("auto-round", "autoround_tune.py", venv="autoround")


@dataclass(frozen=True)
class Subject:
    """A model, what it is calibrated on, and its scores by name, of a module as `load` gives it."""

    name: str
    folder: Path
    task: str
    calibration: list[Batch]
    load: Callable[[Path], Any]
    score: Callable[[Any], dict[str, float]]


def stories_subject(bench: Path, name: str, quick: bool) -> Subject:
    """A Llama of models/; the score is nats per token on stories 200 to 399."""
    folder = bench / "models" / name
    first, last = CALIBRATED
    calibration = encode_stories(folder, read_stories(bench, (first, first + 16 if quick else last)))
    evaluated = encode_stories(folder, read_stories(bench, EVALUATED)[: 20 if quick else None])

    def score(model: Any) -> dict[str, float]:
        return {"nats": nats_per_token(model, evaluated)}

    batches = [{"input_ids": np.array([ids])} for ids in calibration]
    return Subject(name, folder, "text-generation", batches, load_causal, score)


def minilm_subject(bench: Path, recipe: Path, quick: bool) -> Subject:
    """all-MiniLM-L6-v2; the score is the mean cosine to its float embeddings of the STS-B dev sentences."""
    folder = minilm_folder()
    sentences = read_sentences(bench / STSB_DEV, 50 if quick else None)
    reference = embed(load_encoder(folder), folder, sentences)

    def score(model: Any) -> dict[str, float]:
        return {"cosine": mean_cosine(embed(model, folder, sentences), reference)}

    texts = recipe_texts(recipe, bench)[: 16 if quick else None]
    return Subject("minilm", folder, "feature-extraction", _encode(folder, texts), load_encoder, score)


def recipe_texts(recipe: Path, bench: Path) -> list[str]:
    """The recipe's own calibration texts, those of pairs one after the other."""
    from compress.data import load_samples
    from compress.recipe.load import load_recipe

    loaded = load_recipe(recipe, [f"vars.bench={bench}"])
    spec = loaded.data.calibration
    if spec is None:
        raise CallError(f"{recipe}: has no data.calibration to give to the peers")
    columns = load_samples(spec, loaded.root, loaded.model.task, ("input_ids",), loaded.seed).columns
    return [str(text) for name in ("text", "text_pair") if name in columns for text in columns[name]]


def _encode(folder: Path, texts: Sequence[str]) -> list[Batch]:
    """One by one, so that nothing is padded."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [dict(tokenizer([text], truncation=True, max_length=MAX_LENGTH, return_tensors="np")) for text in texts]


def row(subject: Subject, made_by: str, bits: int, group: int, **more: Any) -> Row:
    return {"model": subject.name, "made_by": made_by, "bits": bits, "group_size": group, **more}


def float_row(subject: Subject) -> Row:
    return row(subject, "float", 32, 0, **subject.score(subject.load(subject.folder)))


def scored(subject: Subject, weights: Path) -> dict[str, float]:
    """The subject's scores with other weights."""
    return subject.score(with_weights(subject.load(subject.folder), weights))


def llmcompressor_row(subject: Subject, method: str, bits: int, group: int, call: Call) -> Row:
    """`method`: rtn, gptq or awq."""
    job = {"task": subject.task, "method": method, "samples": len(subject.calibration)}
    return _peer_row(subject, LLMCOMPRESSOR, f"llm-compressor {method}", bits, group, job, subject.calibration, call)


def autoround_row(subject: Subject, bits: int, group: int, call: Call, iterations: int = ITERATIONS) -> Row:
    job = {"iters": 2 if call.quick else iterations}
    rows = equal_rows(subject.calibration, ROW_TOKENS)
    return _peer_row(subject, AUTOROUND, "auto-round", bits, group, job, rows, call)


def equal_rows(batches: Sequence[Batch], length: int) -> list[Batch]:
    """The samples joined and cut into rows of `length` tokens; what does not fill the last one is left out."""
    joined = np.concatenate([batch["input_ids"][0] for batch in batches])
    n_rows = len(joined) // length
    return [{"input_ids": joined[None, i * length : (i + 1) * length]} for i in range(n_rows)]


def _peer_row(
    subject: Subject,
    peer: Peer,
    made_by: str,
    bits: int,
    group: int,
    job: Mapping[str, Any],
    batches: Sequence[Batch],
    call: Call,
) -> Row:
    """One run of a peer, scored here; a peer that fails has a row with the reason."""
    name = f"{subject.name}-{made_by}-w{bits}g{group}".replace(" ", "-")
    samples, weights = call.out / f"{name}.npz", call.out / f"{name}.safetensors"
    write_batches(samples, batches)
    asked = {"folder": subject.folder, "bits": bits, "group_size": group, "threads": THREADS} | dict(job)
    found = row(subject, made_by, bits, group)
    try:
        answer = run_job(peer, asked | {"batches": samples, "out": weights}, call.out, name)
    except RunError as error:
        say(f"{name}: {error}")
        return found | {"failed": str(error)}
    skipped = answer.get("skipped")
    return found | {"seconds": answer["seconds"]} | scored(subject, weights) | ({"skipped": skipped} if skipped else {})


@dataclass(frozen=True)
class Ours:
    """A recipe of ours as it is run here: `made_by` for the row, the recipe's file, `--set`s, the passes it times."""

    made_by: str
    recipe: Path
    sets: tuple[str, ...]
    passes: tuple[str, ...]


def our_row(subject: Subject, ours: Ours, bits: int, group: int, call: Call) -> Row:
    """`compress apply`, then the checkpoint as transformers loads it. A recipe that fails has a row with the reason."""
    name = f"{subject.name}-{ours.made_by}-w{bits}g{group}".replace(" ", "-")
    bundle, cache = call.out / name, call.out / f"{name}-cache"
    found = row(subject, ours.made_by, bits, group)
    try:
        apply_recipe(
            ours.recipe, (f"vars.bench={call.bench}", *ONLY_WHAT_IS_SCORED[subject.task], *ours.sets), bundle, cache
        )
    except (RunError, CallError) as error:
        return found | {"failed": str(error)}
    folder = checkpoint_of(bundle)
    ratio = weights_bytes(subject.folder) / weights_bytes(folder)
    more = {"seconds": pass_seconds(bundle, ours.passes), "times_smaller": ratio}
    return found | more | subject.score(subject.load(folder))


def weights_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def checkpoint_of(bundle: Path) -> Path:
    """The folder of the bundle that transformers loads. RunError if there is none."""
    for name in ("checkpoint", "model"):
        if (bundle / name / "config.json").is_file() and any((bundle / name).glob("*.safetensors")):
            return bundle / name
    raise RunError(f"{bundle}: holds no checkpoint")
