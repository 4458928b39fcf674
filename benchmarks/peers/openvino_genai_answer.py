"""Peer: OpenVINO GenAI on a folder of ours: greedy answers to prompts, and its tokenizer's tokens of texts.

Job: folder, threads, precision, prompts ([[ids]]), new_tokens, texts ([text]). Answer: answers ([[ids]], one prompt a
call), batched (the same, all prompts in one call, of those of one length), tokens ([[ids]], without special ones) and
back ([text]: these tokens as text again).
"""

from __future__ import annotations

import sys
from typing import Any

sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]  # it would report every import

import numpy as np  # noqa: E402
import openvino  # noqa: E402
import openvino_genai  # noqa: E402
from jobs import read_job, write_result  # noqa: E402


def main() -> None:
    job = read_job()
    settings = {"INFERENCE_NUM_THREADS": job["threads"], "INFERENCE_PRECISION_HINT": job["precision"]}
    pipeline = openvino_genai.LLMPipeline(job["folder"], "CPU", **settings)
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.do_sample, config.ignore_eos = job["new_tokens"], False, True
    tokenizer = pipeline.get_tokenizer()
    tokens = [tokenizer.encode(text, add_special_tokens=False).input_ids.data[0].tolist() for text in job["texts"]]
    write_result(
        job,
        answers=[answer for prompt in job["prompts"] for answer in generate(pipeline, config, [prompt])],
        batched=generate(pipeline, config, job["prompts"]),
        tokens=tokens,
        back=[tokenizer.decode(row) for row in tokens],
    )


def generate(pipeline: Any, config: Any, prompts: list[list[int]]) -> list[list[int]]:
    ids = np.array(prompts, np.int64)
    inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
    return [list(map(int, row)) for row in pipeline.generate(inputs, config).tokens]


if __name__ == "__main__":
    main()
