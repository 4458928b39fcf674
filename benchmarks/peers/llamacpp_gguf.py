"""llama.cpp on GGUF files: JOB. Scores, logits, greedy tokens and tokenized texts of each.

Job: "models": name -> file; "tokens": .npz with one array of token ids for each text; "logits": .npz to write, name ->
float32 [tokens, vocabulary] of the first text; "texts": to be tokenized; "greedy": how many tokens follow the first
quarter of the first text; "reference": the model from which the others' outputs diverge. Cache and accumulation are
float32, products of quantized weights read their inputs in eight bits as llama.cpp does it. Answers, for each name:
"nats", "each" (nats of each text, per token), "kl" (beside a reference), "greedy", "tokenized", "bytes"; or "failed".
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from jobs import Job, read_job, write_result

F32 = 0


def main(job: Job) -> None:
    with np.load(job["tokens"]) as arrays:
        rows = [arrays[name] for name in sorted(arrays.files)]
    answers: dict[str, dict[str, Any]] = {}
    models: dict[str, llama_cpp.Llama] = {}
    for name, file in job["models"].items():
        try:
            models[name] = open_model(file, max(len(row) for row in rows) + job.get("greedy", 0) + 8)
            answers[name] = {"bytes": Path(file).stat().st_size, "each": [], "diverged": []}
        except ValueError as error:
            answers[name] = {"failed": str(error)}
    for number, row in enumerate(rows):
        logits = {name: score(model, row) for name, model in models.items()}
        if number == 0:
            np.savez(job["logits"], **logits)
        for name, found in logits.items():
            answers[name]["each"].append(nats(found, row))
            if reference := job.get("reference"):
                answers[name]["diverged"].append(divergence(logits[reference], found))
    n_predicted = [len(row) - 1 for row in rows]
    prompt = rows[0][: max(2, len(rows[0]) // 4)]
    for name, model in models.items():
        each, diverged = answers[name]["each"], answers[name].pop("diverged")
        answers[name] |= {
            "nats": sum(each) / sum(n_predicted),
            "each": [total / n for total, n in zip(each, n_predicted, strict=True)],
            "kl": sum(diverged) / sum(n_predicted) if diverged else None,
            "greedy": decode(model, prompt, job.get("greedy", 0)),
            "tokenized": [model.tokenize(text.encode(), add_bos=False) for text in job.get("texts", ())],
        }
        model.close()
    write_result(job, models=answers)


def open_model(file: str, context: int) -> llama_cpp.Llama:
    return llama_cpp.Llama(
        file, n_ctx=context, n_batch=context, n_threads=1, logits_all=True, type_k=F32, type_v=F32, verbose=False
    )


def score(model: llama_cpp.Llama, row: np.ndarray) -> np.ndarray:
    """float32 [tokens, vocabulary]."""
    model.reset()
    model.eval(row.tolist())
    return np.array(model.scores[: len(row)], np.float32)


def nats(logits: np.ndarray, row: np.ndarray) -> float:
    """The cross-entropy of all predicted tokens, summed."""
    return float(-log_softmax(logits[:-1])[np.arange(len(row) - 1), row[1:]].sum())


def divergence(reference: np.ndarray, logits: np.ndarray) -> float:
    """Kullback-Leibler's, of what is predicted for all tokens but the first, summed; nats."""
    exact = log_softmax(reference[:-1])
    return float((np.exp(exact) * (exact - log_softmax(logits[:-1]))).sum())


def log_softmax(logits: np.ndarray) -> np.ndarray:
    values = logits.astype(np.float64)
    values -= values.max(axis=1, keepdims=True)
    values -= np.log(np.exp(values).sum(axis=1, keepdims=True))
    return values


def decode(model: llama_cpp.Llama, prompt: np.ndarray, n: int) -> list[int]:
    model.reset()
    model.eval(prompt.tolist())
    made: list[int] = []
    for _ in range(n):
        made.append(int(np.argmax(model.scores[model.n_tokens - 1])))
        model.eval([made[-1]])
    return made


if __name__ == "__main__":
    main(read_job())
