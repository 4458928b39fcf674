"""What only values tell of a source is refused by the plan, or named as not looked at."""

from __future__ import annotations

from pathlib import Path

import graphs
import numpy as np
import onnx_ir as ir
import pytest
import torch
import transformers
from makers import DIGITS_RECIPE
from onnx import helper
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_lm import write_tokenizer

from compress.errors import CompressError
from compress.planning.make_plan import make_plan
from compress.recipe.load import load_recipe

DIGITS = Path(__file__).parents[3] / "compress/zoo/digits"


def read_notes(folder: Path, *overrides: str) -> str:
    (folder / "r.yaml").write_text(DIGITS_RECIPE)
    plan = make_plan(load_recipe(folder / "r.yaml", overrides), folder / "cache")
    return "\n".join(note.text for note in plan.notes)


def refusal(folder: Path, *overrides: str) -> str:
    with pytest.raises(CompressError) as caught:
        read_notes(folder, *overrides)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_no_numbers(tmp_path: Path, suffix: str, value: float) -> None:
    state = load_file(DIGITS / "digits_resnet.safetensors")
    name = next(name for name, tensor in state.items() if tensor.ndim == 1 and tensor.is_floating_point())
    state[name][0] = value
    file = tmp_path / f"w.{suffix}"
    save_file(state, file) if suffix == "safetensors" else torch.save(state, file)
    assert f"w.{suffix}: NaN or infinity in '{name}'" in refusal(tmp_path, f"model.weights={file}")


def test_a_buffer_may_hold_infinity(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(
        "import torch\n"
        "class M(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.linear = torch.nn.Linear(64, 10)\n"
        "        self.register_buffer('mask', torch.full((10,), float('-inf')))\n"
        "    def forward(self, image):\n"
        "        return torch.maximum(self.linear(image.flatten(1)), self.mask)\n"
    )
    state = {"linear.weight": torch.ones(10, 64), "linear.bias": torch.ones(10), "mask": torch.full((10,), -torch.inf)}
    save_file(state, tmp_path / "w.safetensors")
    model = (
        f"model={{source: 'python:{tmp_path}/m.py:M', weights: {tmp_path}/w.safetensors, task: image-classification}}"
    )
    assert "not looked at" not in read_notes(tmp_path, model)
    save_file(state | {"mask": torch.full((10,), torch.nan)}, tmp_path / "w.safetensors")
    assert "NaN or infinity in 'mask'" in refusal(tmp_path, model)


def test_labels_beyond_the_classes_in_a_later_row(tmp_path: Path) -> None:
    digits = dict(np.load(DIGITS / "test.npz"))
    digits["label"] = digits["label"].astype(np.int64)
    digits["label"][7] = 10
    np.savez(tmp_path / "d.npz", **digits)
    said = refusal(tmp_path, f"data.evaluation.source=npz:{tmp_path}/d.npz")
    assert "data.evaluation" in said and "column 'label', row 7: label 10 is not in 0..9" in said


def write_images(folder: Path) -> list[Path]:
    files = []
    for number in range(4):
        files.append(folder / str(number % 2) / f"{number}.png")
        files[-1].parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), number).save(files[-1])
    return files


def test_of_image_files_the_headers_are_read_and_the_pixels_are_said_to_be_left(tmp_path: Path) -> None:
    write_images(tmp_path / "images")
    notes = read_notes(tmp_path, f"data.calibration={{source: 'imagefolder:{tmp_path}/images'}}")
    assert "not looked at before apply: the pixels of 4 images of data.calibration" in notes


@pytest.mark.parametrize(
    ("mode", "pixels", "why"), [("I;16", 8, "more than 8 bits a channel"), ("1", 13_500, "could be decompression bomb")]
)
def test_image_files_that_no_model_can_be_fed_with(tmp_path: Path, mode: str, pixels: int, why: str) -> None:
    """Pillow refuses what has more than 179 million pixels."""
    file = write_images(tmp_path / "images")[3]
    Image.new(mode, (pixels, pixels)).save(file)
    said = refusal(tmp_path, f"data.calibration={{source: 'imagefolder:{tmp_path}/images'}}")
    assert "data.calibration" in said and ".png" in said and why in said


def test_a_file_that_is_no_image(tmp_path: Path) -> None:
    file = write_images(tmp_path / "images")[3]
    file.write_bytes(b"no image at all")
    said = refusal(tmp_path, f"data.calibration={{source: 'imagefolder:{tmp_path}/images'}}")
    assert f"{file.name} cannot be read as an image" in said


@pytest.mark.parametrize("integers", ["MatMulInteger", "QLinearMatMul"])
def test_a_file_that_is_quantized_already(tmp_path: Path, integers: str) -> None:
    node, rng = helper.make_node, np.random.default_rng(0)
    scaled = ["q", *([] if integers == "MatMulInteger" else ["one", "zero"]), "weight"]
    scaled += ["zero", "none"] if integers == "MatMulInteger" else ["one", "none", "one", "zero"]
    back = "Cast" if integers == "MatMulInteger" else "DequantizeLinear"
    nodes = [
        node("QuantizeLinear", ["x", "one", "zero"], ["q"]),
        node(integers, scaled, ["p"]),
        node("Cast", ["p"], ["y"], to=1) if back == "Cast" else node(back, ["p", "one", "zero"], ["y"]),
    ]
    constants = {"weight": rng.integers(-9, 9, (8, 5), np.int8), "none": np.int8(0), "zero": np.uint8(0)}
    constants["one"] = np.float32(0.1)
    tensors = {name: np.asarray(values) for name, values in constants.items()}
    ir.save(graphs.build(nodes, tensors, {"x": ("n", 8)}, {"y": ("n", 5)}), tmp_path / "m.onnx")
    np.savez(tmp_path / "x.npz", x=rng.random((8, 8), np.float32))
    sets = f"data={{calibration: {{source: 'npz:{tmp_path}/x.npz'}}, evaluation: {{source: 'npz:{tmp_path}/x.npz'}}}}"
    overrides = [f"model={{source: 'onnx:{tmp_path}/m.onnx', task: generic}}", "preprocess={kind: tensor}", sets]
    said = refusal(tmp_path, *overrides)
    assert f"m.onnx is quantized already ({integers}" in said.replace("(DequantizeLinear, ", "(")
    assert "is left to quantize" not in said  # that is the same fault
    assert f"{integers} compute" in read_notes(tmp_path, *overrides, "passes=[]").replace("DequantizeLinear, ", "")


def test_tokens_that_the_model_has_no_row_for(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=20, num_labels=3, max_position_embeddings=64, **sizes)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "m")
    write_tokenizer(tmp_path / "m")
    (tmp_path / "t.csv").write_text("text,label\n" + "abc,1\n" * 40 + "xyz,2\n")
    sets = f"data={{calibration: {{source: 'csv:{tmp_path}/t.csv', samples: 40, shuffle: false}}, "
    sets += f"evaluation: {{source: 'csv:{tmp_path}/t.csv'}}}}"
    model = f"model={{source: 'dir:{tmp_path}/m', task: text-classification}}"
    said = refusal(tmp_path, model, "preprocess={kind: text, max_length: 16}", sets)
    assert "data.evaluation: token id 30, in a text of samples 32 to 40, is beyond the model's vocabulary of 20" in said
