"""Claims about a real language model as a GGUF file: at the bytes of llama.cpp's own files, ours lose less.

Qwen2.5-Coder-Instruct 0.5B, a Hugging Face folder of that name in the folder that the variable REAL_MODELS names.
llama.cpp's quantizer makes files of its types, with an importance matrix that a recipe wrote of 16 articles of
WikiText-2's validation text. For each, `gptq` chooses the types of the matrices under the same bytes, embeddings and
output as that file has them, on the same articles. All are scored in llama.cpp, on 20 articles of the test text and 10
files of Python's library: ours has no more nats than theirs, and its outputs diverge no more from the float file's. A
row that was measured is kept in benchmarks/.trained/ and not measured again.
"""

from __future__ import annotations

import time
from functools import cache, partial
from pathlib import Path

import interop_gguf
import numpy as np
import real_quality
from common import Call, Claim, Measured, Row, apply_recipe, at_most, run_script
from interop_gguf import ask, mix_types, quantize, with_llamacpp
from real_language_models import find_real
from real_quality import MODEL, NEEDS, read_texts, write_recipe
from training import find_row

TYPES = ("Q4_K_M", "IQ4_XS", "Q3_K_M", "Q2_K")
TABLE = "embeddings: Q6_K, lm_head: Q6_K"
"""What llama.cpp gives the one table of embeddings and output in files of all these types."""


def measure(call: Call) -> Measured:
    folder = find_real(MODEL)
    texts = read_texts(call, folder)
    recipe = call.out / "recipe.json"
    write_recipe(recipe, folder, texts.calibration)
    rows = [np.array(ids) for ids in (*texts.judged["wikitext"], *texts.judged["code"])]

    def make(name: str, passes: str, export: str = "") -> Path:
        sets = ["target=llama.cpp", f"passes=[{passes}]", f"export=[{{kind: gguf, dtype: float16{export}}}]"]
        apply_recipe(recipe, sets, call.out / name, call.out / "cache", with_llamacpp(call))
        return call.out / name

    @cache
    def make_float() -> Path:
        return make("float", "", ", imatrix: true")

    def make_row(file_type: str) -> Row:
        theirs = quantize(call, make_float(), file_type, file_type)
        whole = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        begun = time.monotonic()
        bundle = make(f"ours-{file_type}", mix_types(whole / theirs.stat().st_size, TABLE))
        seconds = time.monotonic() - begun
        files = {"float": make_float() / "model/model.gguf", "theirs": theirs, "ours": bundle / "model/model.gguf"}
        answers, _ = ask(call, file_type, files, rows, reference="float")
        row: Row = {"type": file_type, "seconds": seconds}
        for name, answer in answers.items():
            each, n_articles = answer["each"], len(texts.judged["wikitext"])
            row[name] = {key: answer[key] for key in ("bytes", "nats", "kl")}
            row[name] |= {"wikitext": float(np.mean(each[:n_articles])), "code": float(np.mean(each[n_articles:]))}
        return row

    code = [str(module.__file__) for module in (interop_gguf, real_quality)] + [__file__]
    found: list[Row] = []
    claims: list[Claim] = []
    for name in call.choose(TYPES, quick=1):
        row = find_row(f"gguf-{name}", call.quick, code, partial(make_row, name))
        found.append(row)
        ours, theirs = row["ours"], row["theirs"]
        for key in ("bytes", "nats", "kl"):
            claims.append(at_most(f"{name}: {key} beside llama.cpp's", ours[key] - theirs[key], 0))
    return claims, found


if __name__ == "__main__":
    raise SystemExit(run_script(__doc__, NEEDS, measure))
