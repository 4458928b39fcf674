"""Claims of recipes/claims/tinystories-prune-distill-w4.yaml and tinystories-w2-qat.yaml.

A Llama is pruned and distilled, and another is trained in two bits.

tinystories656k, nats per token on stories 200 to 399 (float 3.352), trained on the other stories, the float model its
teacher: with a quarter of the neurons and heads gone at most 3.45 after distillation, before the four bits that follow;
with all matrix products in two bits, groups of 32, below 3.55. Beside it, as measured by `weight_only_quality.py` and
its pins, not trained: AutoRound 3.774, llm-compressor's GPTQ 4.778.
"""

from __future__ import annotations

from common import ROOT, Call, Claim, Measured, Row, at_most, metric, run_recipe, run_script
from encoder_prune_distill import pass_rows
from measuring import find_row

CHAIN, TRAINED = (
    ROOT / "recipes/claims" / name for name in ("tinystories-prune-distill-w4.yaml", "tinystories-w2-qat.yaml")
)
NEEDS = ("models/tinystories656k-hf", "data/tinystories/stories.jsonl")
QUICK = ("passes.1.epochs=0.2",), ("passes.0.steps=20",)


def measure(call: Call) -> Measured:
    quick = QUICK if call.quick else ((), ())
    chain, _ = run_recipe(CHAIN, call, "chain", quick[0])
    _, report = run_recipe(TRAINED, call, "qat", quick[1])
    trained: Row = {"model": "qat W2", "backend": "step", "nll": metric(report, "candidate", "nll")}
    rows = [*pass_rows(chain), trained]
    claims: list[Claim] = [
        at_most("float_nats", find_row(rows, "float", "step").get("nll"), 3.3525),
        at_most("distilled_nats", find_row(rows, "distill", "step").get("nll"), 3.45),
        at_most("w2_qat_nats", trained["nll"], 3.55),
    ]
    return claims, rows


if __name__ == "__main__":
    raise SystemExit(run_script(__doc__, NEEDS, measure))
