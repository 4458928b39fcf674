"""Peer: vLLM on checkpoints, on the CPU: the nats of texts, and greedy answers to prompts.

Job: folders {name: path}, dtype, context, texts ([[ids]]), prompts ([[ids]]), new_tokens. Answer: by name nats (for
each predicted token of all texts) and answers ([[ids]]); or refused, the engine's own words, where it loads none.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from typing import Any

sys.path[:0] = [os.path.dirname(os.path.abspath(__file__))]
# One process for all: a further one takes half a minute to import vLLM.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}

from jobs import Job, read_job, write_result  # noqa: E402

SHOWN = 300
"""Characters of what the engine says."""


def main() -> None:
    job = read_job()
    answers: dict[str, Any] = {}
    for name, folder in job["folders"].items():
        answers[name] = {"refused": "its process ended"}  # stays, if it does
        write_result(job, **answers)
        answers[name] = try_folder(job, folder)
        write_result(job, **answers)


def try_folder(job: Job, folder: str) -> dict[str, Any]:
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    try:
        return score(job, folder)
    except Exception as error:  # noqa: BLE001 - whatever an engine says to a checkpoint that it does not take
        traceback.print_exc()
        return {"refused": first_line(str(error))}
    finally:
        cleanup_dist_env_and_memory()
        gc.collect()


def score(job: Job, folder: str) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    engine = LLM(
        folder,
        dtype=job["dtype"],
        enforce_eager=True,
        max_model_len=job["context"],
        disable_log_stats=True,
        distributed_executor_backend="uni",
    )
    read = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    total, n_tokens = 0.0, 0
    for text, output in zip(job["texts"], engine.generate(as_prompts(job["texts"]), read), strict=True):
        for token, logprobs in zip(text[1:], output.prompt_logprobs[1:], strict=True):
            total -= logprobs[token].logprob
        n_tokens += len(text) - 1
    greedy = SamplingParams(max_tokens=job["new_tokens"], temperature=0, ignore_eos=True, detokenize=False)
    answers = [list(output.outputs[0].token_ids) for output in engine.generate(as_prompts(job["prompts"]), greedy)]
    return {"nats": total / n_tokens, "answers": answers}


def as_prompts(texts: list[list[int]]) -> list[Any]:
    return [{"prompt_token_ids": text} for text in texts]


def first_line(text: str) -> str:
    """Return what is said first."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    n_lines = 2 if lines and lines[0].endswith(":") else 1
    return " ".join(lines[:n_lines])[:SHOWN] or "no reason given"


if __name__ == "__main__":
    main()
