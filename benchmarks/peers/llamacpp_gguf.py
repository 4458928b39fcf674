"""llama.cpp on GGUF files: JOB. Scores, logits, greedy tokens and tokenized texts of each.

Job: "models": name -> file; "tokens": .npz with one array of token ids for each text; "logits": .npz to write, name ->
float32 [tokens, vocabulary] of the first text; "texts": to be tokenized; "greedy": how many tokens follow the first
quarter of the first text. Cache and accumulation are float32, products of quantized weights read their inputs in eight
bits as llama.cpp does it. Answers, for each name: "nats", "greedy", "tokenized", "bytes"; or "failed".
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
    logits: dict[str, np.ndarray] = {}
    for name, file in job["models"].items():
        try:
            model = open_model(file, max(len(row) for row in rows) + job.get("greedy", 0) + 8)
        except ValueError as error:
            answers[name] = {"failed": str(error)}
            continue
        first = score(model, rows[0])
        logits[name] = first
        total = nats(first, rows[0]) + sum(nats(score(model, row), row) for row in rows[1:])
        prompt = rows[0][: max(2, len(rows[0]) // 4)]
        answers[name] = {
            "nats": total / sum(len(row) - 1 for row in rows),
            "greedy": decode(model, prompt, job.get("greedy", 0)),
            "tokenized": [model.tokenize(text.encode(), add_bos=False) for text in job.get("texts", ())],
            "bytes": Path(file).stat().st_size,
        }
        model.close()
    np.savez(job["logits"], **logits)
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
    values = logits[:-1].astype(np.float64)
    values -= values.max(axis=1, keepdims=True)
    sums = np.log(np.exp(values).sum(axis=1))
    return float((sums - values[np.arange(len(row) - 1), row[1:]]).sum())


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
