"""AutoRound on a transformers folder: JOB.

Job: "folder"; "batches" (.npz of token ids, rows of one length); "bits"; "group_size"; "iters"; "threads"; "out":
.safetensors for the dequantized weights; "result". Symmetric, else its defaults, on as many samples as there are.
Result: "seconds" of the tuning alone, the model being in memory; "layers" that were rounded, "skipped" those that were
not although they lie in its blocks: it leaves out layers whose width the groups do not divide.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from batches import read_batches
from jobs import peak_bytes, read_job, write_result


def changed(model: Any, before: dict[str, torch.Tensor]) -> tuple[list[str], list[str]]:
    """(linear layers that were rounded, those inside the blocks that hold what they held, if only in bfloat16)."""
    rounded, kept = [], []
    after = model.state_dict()
    for name, weight in before.items():
        same = any(torch.equal(after[name].float(), weight.to(form).float()) for form in (weight.dtype, torch.bfloat16))
        (kept if same else rounded).append(name.removesuffix(".weight"))
    return rounded, kept


def main() -> None:
    job = read_job()
    torch.set_num_threads(job["threads"])
    from auto_round import AutoRound
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(job["folder"], dtype=torch.float32).eval()
    before = {
        f"{name}.weight": module.weight.detach().clone()
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }
    rows = [{"input_ids": torch.from_numpy(batch["input_ids"]).long()} for batch in read_batches(job["batches"])]
    start = time.perf_counter()
    tuner = AutoRound(
        model,
        tokenizer=AutoTokenizer.from_pretrained(job["folder"]),
        bits=job["bits"],
        group_size=job["group_size"],
        sym=True,
        iters=job["iters"],
        dataset=rows,
        seqlen=rows[0]["input_ids"].shape[1],
        nsamples=len(rows),
        device_map="cpu",
    )
    tuned, _ = tuner.quantize()
    seconds = time.perf_counter() - start
    peak = peak_bytes()
    rounded, skipped = changed(tuned, before)
    if not rounded:
        raise SystemExit("no layer was rounded")
    weights = tuned.state_dict()
    save_file({f"{name}.weight": weights[f"{name}.weight"].float().contiguous() for name in rounded}, job["out"])
    write_result(job, seconds=seconds, peak_bytes=peak, layers=rounded, skipped=skipped)


if __name__ == "__main__":
    main()
