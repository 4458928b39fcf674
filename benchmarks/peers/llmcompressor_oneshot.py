"""llm-compressor's oneshot on a transformers folder: JOB.

Job: "folder"; "task" ("text-generation" or "feature-extraction"); "batches" (.npz, each one sample of token ids);
"method" ("rtn", "gptq" or "awq"); "bits"; "group_size"; "threads"; "out": .safetensors for the dequantized weights
(optional); "result". Its defaults but for the scheme (integers, symmetric) and the output head, which is left out.
Result: "seconds" of oneshot alone, the model being in memory; "peak_bytes" of the process by then.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from batches import read_batches
from jobs import Job, peak_bytes, read_job, write_result


def load(job: Job) -> Any:
    from transformers import AutoModel, AutoModelForCausalLM

    kind = AutoModelForCausalLM if job["task"] == "text-generation" else AutoModel
    return kind.from_pretrained(job["folder"], dtype=torch.float32).eval()


def loader(job: Job) -> Any:
    """A DataLoader that hands out the batches as they are, in their order: nothing is padded or tokenized again."""
    batches = read_batches(job["batches"])
    tensors = [{name: torch.from_numpy(values).long() for name, values in batch.items()} for batch in batches]
    return torch.utils.data.DataLoader(tensors, batch_size=1, collate_fn=lambda rows: rows[0])


def modifier(job: Job) -> Any:
    weights = {
        "num_bits": job["bits"],
        "type": "int",
        "symmetric": True,
        "strategy": "channel" if job["group_size"] == -1 else "group",
        "group_size": None if job["group_size"] == -1 else job["group_size"],
    }
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    if job["method"] == "rtn":
        from llmcompressor.modifiers.quantization import QuantizationModifier

        return QuantizationModifier(config_groups=groups, ignore=["lm_head"])
    if job["method"] == "awq":
        from llmcompressor.modifiers.awq import AWQModifier

        allow_no_accelerator()
        return AWQModifier(config_groups=groups, ignore=["lm_head"])
    from llmcompressor.modifiers.gptq import GPTQModifier

    return GPTQModifier(config_groups=groups, ignore=["lm_head"])


def allow_no_accelerator() -> None:
    """Leave out the pinning of memory where there is no accelerator for whose copies it is.

    AWQ of 0.14 pins what it kept of each layer's inputs, whatever the device, and torch refuses that without an
    accelerator ("Cannot access accelerator device when none is available"). No argument of AWQModifier or oneshot turns
    it off; the values and the products of them are the same.
    """
    from llmcompressor.pipelines.cache import IntermediatesCache

    if not torch.accelerator.is_available():
        IntermediatesCache.pin_memory = lambda *args, **kwargs: None


def compress(model: Any, recipe: Any, job: Job) -> float:
    """Seconds of oneshot, the model changed in place. It asks for a processor even where the data are token ids."""
    from llmcompressor import oneshot
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(job["folder"])
    data = {} if job["method"] == "rtn" else {"dataset": loader(job), "num_calibration_samples": job["samples"]}
    start = time.perf_counter()
    oneshot(model=model, recipe=recipe, processor=tokenizer, **data)
    return time.perf_counter() - start


@torch.no_grad()
def dequantized(model: Any) -> dict[str, torch.Tensor]:
    """Weights of the layers that were rounded, as their stored integers and scales give them."""
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize

    found = {}
    for name, module in model.named_modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is not None and scheme.weights is not None:
            zero = getattr(module, "weight_zero_point", None)
            weight = fake_quantize(module.weight, module.weight_scale, zero, scheme.weights)
            found[f"{name}.weight"] = weight.detach().float().contiguous()
    return found


def main() -> None:
    job = read_job()
    torch.set_num_threads(job["threads"])
    torch.manual_seed(0)
    model, recipe = load(job), modifier(job)
    seconds = compress(model, recipe, job)
    peak = peak_bytes()
    weights = dequantized(model)
    if not weights:
        raise SystemExit("no layer was rounded")
    if job.get("out"):
        from safetensors.torch import save_file

        save_file(weights, job["out"])
    write_result(job, seconds=seconds, peak_bytes=peak, layers=sorted(weights))


if __name__ == "__main__":
    main()
