"""The student of `distill`: some of the model's blocks, a smaller model of its class, or another model altogether."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from distilling import Arrays
from pydantic import ValidationError
from safetensors.torch import load_file
from streaming import VOCABULARY, model_context
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from transformers import AutoModel, BertConfig, BertModel

import compress
from compress.distill.student import rename_inputs, start_from
from compress.errors import PassError, PlanError
from compress.execution.blocks import open_streamed
from compress.execution.passes import RunContext, _run_model_passes, not_kept
from compress.export.checkpoint import write_checkpoint
from compress.facts import BlockFacts, LayerFacts, ModelFacts, Removable, Structure
from compress.formats.targets import TARGETS
from compress.models.load import TorchModel
from compress.passes.distill import Distill
from compress.passes.distill_student import Student
from compress.planning.make_plan import make_plan
from compress.planning.sets import load_set
from compress.recipe.exports import CheckpointExport
from compress.recipe.load import Recipe
from compress.recipe.network import needs_hub
from compress.store.cache import ResultCache
from compress.store.run_log import RunLog
from compress.work import begin_pass, foresee_pass
from runtime.bundle.tensors import TensorSpec

TARGET = TARGETS["onnxruntime-cpu"]
WORDS = [f"w{i}" for i in range(VOCABULARY)]


pytestmark = pytest.mark.usefixtures("one_thread")


# What a recipe may say


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({}, "say who learns: layers, config or source"),
        ({"layers": "uniform"}, "keep says how many blocks uniform layers are"),
        ({"keep": 2}, "say who learns"),
        ({"layers": (0, 1), "keep": 2}, "keep says how many blocks uniform layers are"),
        ({"config": {"hidden_size": 8}, "keep": 2}, "keep says how many"),
        ({"source": "dir:x", "layers": (0,)}, "source is another model; leave out layers"),
        ({"layers": (0,), "weights": "x"}, "weights and args belong to a python: source"),
        ({"source": "onnx:x"}, "String should match pattern"),
    ],
)
def test_one_form_of_student(said: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Student(**said)


def test_which_blocks_a_student_has() -> None:
    assert Student(layers="uniform", keep=3).stay(6) == (0, 2, 5)
    assert Student(layers=(4, 1)).stay(6) == (1, 4)
    smaller = Student(config={"num_hidden_layers": 2}, layers=(3, 1))
    assert smaller.starts(4, 2) == (3, 1)
    assert smaller.starts(7, 5) == (0, 2, 3, 4, 6)  # another list of blocks, of which nothing is said


# Starting from the teacher


class Blocks(nn.Module):
    """A list of square layers and a head."""

    def __init__(self, n_blocks: int, width: int, extra: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(n_blocks))
        self.head = nn.Linear(width, 3)
        if extra:
            self.own = nn.Linear(width, 1)


def test_a_student_of_the_same_size_is_the_teacher() -> None:
    torch.manual_seed(0)
    student, teacher = Blocks(3, 4), Blocks(3, 4)
    start_from(student, teacher, lambda n, own: range(own))
    assert all(torch.equal(a, b) for a, b in zip(student.parameters(), teacher.parameters(), strict=True))


def test_tensors_are_cut_to_size_and_blocks_chosen() -> None:
    """What the teacher has no values for keeps its own."""
    torch.manual_seed(0)
    student, teacher = Blocks(2, 6, extra=True), Blocks(4, 4)
    before = copy.deepcopy(student)
    start_from(student, teacher, lambda n, own: (1, 3))
    assert torch.equal(student.layers[1].weight[:4, :4], teacher.layers[3].weight)
    assert torch.equal(student.layers[1].weight[4:], before.layers[1].weight[4:])
    assert torch.equal(student.layers[0].bias[:4], teacher.layers[1].bias)
    assert torch.equal(student.own.weight, before.own.weight)
    narrower = Blocks(4, 2)
    start_from(narrower, teacher, lambda n, own: ())
    assert torch.equal(narrower.head.weight, teacher.head.weight[:, :2])


class Doubles(nn.Module):
    def forward(self, image: Tensor) -> Tensor:
        return 2 * image


def test_a_teacher_is_called_as_its_student_is() -> None:
    teacher = rename_inputs(Doubles(), {"pixel_values": "image"}, {"pixel_values": "x"})
    assert torch.equal(teacher(x=torch.ones(2)), 2 * torch.ones(2))
    same = Doubles()
    assert rename_inputs(same, {"a": "image"}, {"a": "image"}) is same


# The plan


def facts(**more: Any) -> ModelFacts:
    layers = tuple(LayerFacts(f"body.{i}.fc", "Linear", "MatMul", f"body.{i}.fc.weight", (8, 8)) for i in range(4))
    blocks = tuple(Removable(f"body.{i}", (f"body.{i}.fc",), True) for i in range(4))
    made: dict[str, Any] = {
        "source": "torch",
        "architecture": "Net",
        "task": "generic",
        "inputs": (TensorSpec("x", "float32", ("batch", 8)),),
        "outputs": (TensorSpec("y", "float32", ("batch", 8)),),
        "layers": layers,
        "structure": Structure(tuple(BlockFacts(one.name, ()) for one in blocks)),
        "removable": blocks,
    }
    return ModelFacts(**made | more)


def test_the_plan_s_facts_are_the_student_s() -> None:
    plan = Distill(student=Student(layers="uniform", keep=2)).check(facts(), TARGET)
    assert plan.problems == ()
    assert [layer.name for layer in plan.facts.layers] == ["body.0.fc", "body.1.fc"]
    assert "distill: the student: 0, 3 of 4 blocks" in [note.text for note in plan.notes]
    smaller = Student(config={"width": 4})
    found = facts(layers=facts().layers[:1])
    plan = Distill(student=smaller).check(facts(students={smaller.key: found}), TARGET)
    assert plan.problems == () and plan.facts == found


@pytest.mark.parametrize(
    ("student", "more", "message"),
    [
        (Student(layers=(0, 9)), {}, "student: layers: there is no block 9; the 4 that could go are 0 to 3"),
        (Student(layers="uniform", keep=4), {}, "student: all 4 blocks that could go would stay"),
        (Student(source="dir:x"), {"outputs": ()}, r"student: it gives , the teacher y \['batch', 8\]; give one that"),
        (Student(source="dir:x"), {"inputs": ()}, r"student: it takes , the teacher x \['batch', 8\]; give one that"),
        (
            Student(config={"n": 2}, layers=(0, 1, 2)),
            {},
            "student: layers: name one of the model's 4 blocks, from 0, for each of",
        ),
    ],
)
def test_the_plan_refuses_a_student(student: Student, more: dict[str, Any], message: str) -> None:
    given = facts(students={student.key: facts(**more)})
    problems = Distill(student=student).check(given, TARGET).problems
    assert any(re.match(f"distill: {message}", one) for one in problems)


# Through recipes


def bert_folder(folder: Path, layers: int) -> None:
    """A small encoder with random weights, and a tokenizer of words."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": layers, "num_attention_heads": 2}
    BertModel(BertConfig(vocab_size=VOCABULARY, max_position_embeddings=16, **sizes)).save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="w0"))
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"pad_token": "w0"}')


def sentences(path: Path, n: int = 32) -> None:
    random = np.random.default_rng(0)
    lines = [" ".join(random.choice(WORDS, random.integers(3, 8))) for _ in range(n)]
    path.write_text("text\n" + "\n".join(lines) + "\n")


def recipe(folder: Path, student: str, more: str = "", layers: int = 1) -> Recipe:
    bert_folder(folder / "bert", layers)
    sentences(folder / "texts.csv")
    (folder / "recipe.yaml").write_text(
        f"""
version: 1
name: student
model: {{source: "dir:bert", task: feature-extraction}}
preprocess: {{kind: text, max_length: 12, pooling: mean}}
data:
  train: {{source: "csv:texts.csv"}}
  evaluation: {{source: "csv:texts.csv", samples: 8}}
passes:
  - {{kind: distill, student: {student}, steps: 3, batch_size: 8{more}}}
export: [{{kind: onnx}}, {{kind: checkpoint}}]
validate: {{benchmark: {{iterations: 1, warmup: 0, processes: 1, sequence_length: 8}}, steps: false}}
"""
    )
    return compress.load_recipe(folder / "recipe.yaml")


def taught(own: Recipe, folder: Path, name: str = "checkpoint") -> tuple[TorchModel, Any]:
    """The pass alone, as a run does it: its model, and its result. The model's folder is written to `name`."""
    plan = make_plan(own, folder / "cache")
    sets = {name: load_set(plan.inputs, name, None) for name in plan.inputs.data}
    folder.mkdir(exist_ok=True)
    (folder / "log").unlink(missing_ok=True)
    ground = RunContext(plan, ResultCache(folder / "cache"), RunLog(folder / "log", quiet=True), sets)
    loaded, results = _run_model_passes(ground, not_kept)
    write_checkpoint(folder / name, open_streamed(plan.inputs, loaded), CheckpointExport(), "")
    return loaded, results[0]


def reloaded(folder: Path, loaded: TorchModel) -> Any:
    """By transformers alone; it gives what was taught."""
    assert not (folder / "shapes.json").exists()
    model: Any = AutoModel.from_pretrained(folder, attn_implementation="eager", add_pooling_layer=False)
    model.requires_grad_(False)
    ids = torch.arange(3, 11)[None]
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    assert torch.allclose(model(**given).last_hidden_state, loaded.module(**given), atol=1e-6)
    return model


@pytest.mark.slow
def test_a_student_of_some_layers(tmp_path: Path) -> None:
    own = recipe(tmp_path, "{layers: uniform, keep: 2}", layers=4)
    loaded, result = taught(own, tmp_path)
    taught(own, tmp_path, "again")  # the weights from the cache, put into a student made anew
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("checkpoint", "again")]
    assert files[0] == files[1]
    model = reloaded(tmp_path / "checkpoint", loaded)
    assert len(model.encoder.layer) == 2 == model.config.num_hidden_layers
    source = load_file(tmp_path / "bert/model.safetensors")
    first, last = (source[f"encoder.layer.{i}.output.dense.weight"] for i in (0, 3))
    own_weights = [layer.output.dense.weight for layer in model.encoder.layer]
    near = [[float((a - b).abs().max()) < 5e-3 for b in (first, last)] for a in own_weights]  # 3 steps of at most 5e-4
    assert near == [[True, False], [False, True]]
    names = {one.layer for one in result.decisions}
    assert "encoder.layer.1.output.dense" in names and "encoder.layer.2.output.dense" not in names


def test_a_student_by_a_smaller_configuration(tmp_path: Path) -> None:
    """Its output is as wide as the teacher's; inside it is narrower, and shallower."""
    own = recipe(tmp_path, "{config: {intermediate_size: 8, num_hidden_layers: 2}, layers: [1, 2]}", layers=4)
    model = reloaded(tmp_path / "checkpoint", taught(own, tmp_path)[0])
    assert model.config.intermediate_size == 8
    source = load_file(tmp_path / "bert/model.safetensors")["encoder.layer.2.output.dense.weight"]
    assert float((model.encoder.layer[1].output.dense.weight - source[:, :8]).abs().max()) < 5e-3


FACTORY = """
import torch
from torch import nn

class Bag(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.words = nn.Embedding(64, width)
        self.out = nn.Linear(width, 16)

    def forward(self, input_ids, attention_mask, token_type_ids):
        return self.out(self.words(input_ids)) * attention_mask[:, :, None]

def bag(width):
    return Bag(width)
"""


@pytest.mark.slow
def test_a_student_from_a_factory(tmp_path: Path) -> None:
    """Through a whole run; its checkpoint is the factory's weights."""
    (tmp_path / "bag.py").write_text(FACTORY)
    own = recipe(tmp_path, '{source: "python:bag.py:bag", args: {width: 4}}', ", output: {loss: mse}")
    report = compress.apply(own, tmp_path / "out", tmp_path / "cache", quiet=True)
    assert report is not None
    torch.manual_seed(99)  # what a student without weights begins with follows from the recipe's seed alone
    taught(own, tmp_path / "anew")
    again, once = ((tmp_path / name / "checkpoint/model.safetensors").read_bytes() for name in ("anew", "out"))
    assert again == once
    assert {row["layer"] for row in report.layers if row["action"] == "distilled"} == {"words", "out"}
    weights = load_file(tmp_path / "out/checkpoint/model.safetensors")
    assert weights["words.weight"].shape == (64, 4)
    files = [tmp_path / "out" / name / "model.onnx" for name in ("model", "baseline")]
    assert files[0].stat().st_size < 0.3 * files[1].stat().st_size
    words = np.arange(3, 11)[None]
    expected = weights["out.weight"] @ weights["words.weight"][words[0]].T + weights["out.bias"][:, None]
    session = ort.InferenceSession(files[0], providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    given = {name: words if name == "input_ids" else np.ones_like(words) for name in names}
    assert np.abs(session.run(None, given)[0][0].T - expected.numpy()).max() < 1e-5


@pytest.mark.parametrize(
    ("student", "message"),
    [
        (
            "{config: {hidden_size: 8}}",
            r"passes\.0: distill: student: it gives last_hidden_state \['batch', 'sequence', 8\]",
        ),
        (
            "{config: {hiden_size: 8}}",
            r"student: config: .* has no number 'hiden_size' .* did you mean 'hidden_size'\?",
        ),
        ("{config: {hidden_size: 9}}", r"passes\.0: distill: .*cannot be built as AutoModel with hidden_size 9: The"),
        ('{source: "dir:nowhere"}', r"passes\.0: distill: .*nowhere"),
    ],
)
def test_the_plan_of_a_recipe_refuses_a_student(tmp_path: Path, student: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        compress.plan(recipe(tmp_path, student))


def test_what_came_before_a_new_student_would_be_lost(tmp_path: Path) -> None:
    own = recipe(tmp_path, "{config: {intermediate_size: 8}}")
    pruned = own.passes[0].model_copy(update={"student": None})
    both = own.model_copy(update={"passes": (pruned, own.passes[0])}).at_root(own.root)
    with pytest.raises(
        PlanError, match=r"passes\.1: distill: its student is another model, and what distill did before"
    ):
        compress.plan(both)


def test_a_student_from_the_hub_needs_the_network(tmp_path: Path) -> None:
    own = recipe(tmp_path, "{config: {intermediate_size: 8}}")
    assert not needs_hub(own)
    student = Distill(student=Student(source="hf:someone/small"))
    assert needs_hub(own.model_copy(update={"passes": (student,)}))


def test_a_student_that_takes_something_else_is_refused() -> None:
    """Where no plan was made: by the pass itself."""
    module = nn.Linear(2, 2)
    spec = (TensorSpec("x", "float32", ("batch", 2)),)
    loaded = TorchModel(architecture="Net", inputs=spec, outputs=spec, module=module, parameters={"x": "input"})
    other = replace(loaded, inputs=(TensorSpec("z", "float32", ("batch", 2)),))
    given = model_context(train=Arrays({"x": np.zeros((4, 2), np.float32)}), student=lambda student, seed: other)
    config = Distill(student=Student(source="python:a:b"))
    with pytest.raises(PassError, match="the student takes z, the teacher x"):
        begin_pass(config, loaded, given)
    with pytest.raises(PassError, match="no torch model"):
        begin_pass(config, loaded, replace(given, student=None))


class AddsToIt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc(x).tanh()


class Chain(nn.Module):
    """Blocks that the model runs without, one after the other."""

    def __init__(self, n_blocks: int) -> None:
        super().__init__()
        self.layers, self.head = nn.Sequential(*(AddsToIt() for _ in range(n_blocks))), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.layers(x))
        return y


def test_a_student_of_some_blocks_is_foreseen_with_those_alone() -> None:
    spec = (TensorSpec("x", "float32", ("batch", 4)),)
    loaded = TorchModel(architecture="Net", inputs=spec, outputs=spec, module=Chain(4), parameters={"x": "x"})
    given = model_context([{"x": np.zeros((1, 4), np.float32)}])
    twin, known = foresee_pass(Distill(student=Student(layers="uniform", keep=2)), loaded, facts(), given)
    assert known and twin.shapes.skipped == ("layers.1", "layers.2")
