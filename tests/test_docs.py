"""What the documentation shows is true: its recipes are read and planned, its commands, options and files exist."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s:]+)(?:#[^)\s]*)?\)")
INLINE = re.compile(r"`([^`\n]+)`")
REPOSITORY_FILE = re.compile(
    r"\b(?:recipes|benchmarks|compress|runtime|tests|notebooks|docs)/[\w./-]*\w\.(?:py|md|yaml|json|ipynb)\b"
)
DECODER = re.compile(r"\b(?:nll|tpot|ttft)\b")


class Block(NamedTuple):
    """A fenced block of a page."""

    page: str
    language: str
    text: str

    def __str__(self) -> str:
        return self.page


def read_blocks() -> Iterator[Block]:
    for page in PAGES:
        for indent, language, text in FENCE.findall(page.read_text()):
            yield Block(
                page.relative_to(ROOT).as_posix(), language, re.sub(rf"^{indent}", "", text, flags=re.MULTILINE)
            )


def recipe_keys() -> set[str]:
    from compress.recipe.schema import Recipe

    return {field.alias or name for name, field in Recipe.model_fields.items()} | {"vars", "include"}


def read_recipes() -> list[Block]:
    """YAML whose keys are a recipe's: whole ones have a version, others are parts of one."""
    found = []
    for block in read_blocks():
        if block.language == "yaml":
            data = yaml.safe_load(block.text)
            if isinstance(data, dict) and set(data) <= recipe_keys():
                found.append(block)
    return found


RECIPES = read_recipes()
WHOLE = [block for block in RECIPES if "version:" in block.text]


def test_the_pages_show_recipes_and_most_are_whole() -> None:
    assert len(WHOLE) >= 15
    assert len({block.page for block in WHOLE}) >= 12


@pytest.mark.parametrize("block", RECIPES, ids=str)
def test_a_shown_recipe_is_read(block: Block, tmp_path: Path) -> None:
    from compress.recipe.load import load_recipe

    text = block.text
    if block not in WHOLE:
        task = "text-generation" if DECODER.search(text) else "image-classification"
        (tmp_path / "base.yaml").write_text(f"version: 1\nname: part\nmodel: {{source: 'dir:model', task: {task}}}\n")
        text = f"include: base.yaml\n{text}"
    (tmp_path / "recipe.yaml").write_text(text)
    load_recipe(tmp_path / "recipe.yaml")


def test_the_recipe_of_the_readme_is_the_one_whose_verdict_it_shows(tmp_path: Path) -> None:
    from compress.recipe.load import load_recipe

    (block,) = [block for block in WHOLE if block.page == "README.md"]
    (tmp_path / "recipe.yaml").write_text(block.text)
    (quickstart,) = (ROOT / "recipes").rglob("quickstart.yaml")
    shown, run = load_recipe(tmp_path / "recipe.yaml"), load_recipe(quickstart)
    for part in ("name", "model", "preprocess", "data", "target", "passes"):
        assert getattr(shown, part) == getattr(run, part), part
    assert shown.validate_.gates == run.validate_.gates


NETWORK = '''
import torch
from torch import nn


class Network(nn.Module):
    """float32 [N, 3, 32, 32] -> [N, 10]."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 32, 3, stride=2, bias=False)
        self.norm1 = nn.BatchNorm2d(32)
        self.conv2 = nn.Conv2d(32, 32, 3, stride=2, bias=False)
        self.norm2 = nn.BatchNorm2d(32)
        self.linear = nn.Linear(32, 10)

    def forward(self, image):
        hidden = torch.relu(self.norm1(self.conv1(image)))
        return self.linear(torch.relu(self.norm2(self.conv2(hidden))).mean((2, 3)))


def build():
    return Network()
'''


def write_image_files(folder: Path) -> None:
    """Write model.py, its weights, model.onnx and npz files as the pages name them."""
    import torch
    from onnx import TensorProto, helper, numpy_helper, save
    from safetensors.torch import save_file

    (folder / "model.py").write_text(NETWORK)
    scope: dict[str, Any] = {}
    exec(NETWORK, scope)
    with torch.random.fork_rng(devices=[]):
        save_file(scope["build"]().state_dict(), folder / "model.safetensors")
    rng = np.random.default_rng(0)
    weights = {"kernel": rng.normal(size=(8, 3, 3, 3)), "matrix": rng.normal(size=(8 * 30 * 30, 10)) / 80}
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["image", "kernel"], ["maps"], "conv"),
            helper.make_node("Relu", ["maps"], ["active"], "relu"),
            helper.make_node("Flatten", ["active"], ["flat"], "flatten"),
            helper.make_node("Gemm", ["flat", "matrix"], ["logits"], "linear"),
        ],
        "network",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 3, 32, 32])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 10])],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()],
    )
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), folder / "model.onnx")
    for name in ("train", "test"):
        images = rng.integers(0, 256, (512, 32, 32, 3), dtype=np.uint8)
        np.savez(folder / f"{name}.npz", image=images, label=rng.integers(0, 10, 512))


def write_tensor_files(folder: Path) -> None:
    """The same, its samples as the graph's own inputs."""
    write_image_files(folder)
    for name in ("train", "test"):
        images = np.load(folder / f"{name}.npz")["image"]
        np.savez(folder / f"{name}.npz", image=images.transpose(0, 3, 1, 2).astype(np.float32) / 255)


def write_language_files(folder: Path) -> None:
    from tiny_lm import language_folder, write_texts

    sizes = {"hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 4096}
    language_folder(folder / "model", **sizes)
    write_texts(folder / "train.jsonl", 512, length=60)
    write_texts(folder / "test.jsonl", 200, seed=1, length=60)


def write_text_files(folder: Path) -> None:
    from makers import text_folder, write_texts

    text_folder(folder / "model", "classifier")
    for name in ("train", "test"):
        write_texts(folder / f"{name}.jsonl", 512)


WRITERS = {
    "image-classification": write_image_files,
    "generic": write_tensor_files,
    "text-generation": write_language_files,
    "text-classification": write_text_files,
}


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each task, with small models and data under the names that the pages use."""
    folder = tmp_path_factory.mktemp("workshop")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "tests/e2e")
        for task, write in WRITERS.items():
            (folder / task).mkdir()
            write(folder / task)
    return folder


@pytest.mark.parametrize("block", WHOLE, ids=str)
def test_a_shown_recipe_plans(block: Block, workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from compress.planning.make_plan import make_plan
    from compress.recipe.load import load_recipe

    task = yaml.safe_load(block.text)["model"]["task"]
    file = workshop / task / "recipe.yaml"
    file.write_text(re.sub(r'"hf:[^"]+"', '"dir:model"', block.text))
    monkeypatch.chdir(file.parent)
    plan = make_plan(load_recipe(file), workshop / "cache")
    assert plan.steps


def read_commands() -> Iterator[tuple[str, str]]:
    """Page and text of every command of ours that a page shows, in a block or inside a sentence."""
    for page in PAGES:
        name, text = page.relative_to(ROOT).as_posix(), page.read_text()
        for _, language, block in FENCE.findall(text):
            if language in ("", "bash", "console", "sh", "yaml"):
                for line in block.replace("\\\n", " ").splitlines():
                    command = re.search(r"(?:^|[$:;(] |&& |\./)\s*((?:compress|compress-run) [a-z].*)", line)
                    if command:
                        yield name, command[1]
        for span in INLINE.findall(FENCE.sub("", text)):
            if re.match(r"(?:compress|compress-run) [a-z]+( |$)", span):
                yield name, span


def test_every_shown_command_and_option_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs/hooks")
    from reference import list_options

    known, problems, n = list_options(), [], 0
    for page, text in read_commands():
        words = shlex.split(text.partition("#")[0])
        options = {word.partition("=")[0] for word in words if word.startswith("--")}
        name = " ".join(words[:2])
        n += 1
        if name not in known and words[1] not in {command.split()[1] for command in known}:
            problems.append(f"{page}: {text}: no such command")
        elif name in known and not options <= known[name]:
            problems.append(f"{page}: {text}: {sorted(options - known[name])}")
    assert not problems
    assert n >= 40


def test_every_file_and_make_target_that_a_page_names_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    problems = []
    for page in PAGES:
        name, text = page.relative_to(ROOT).as_posix(), page.read_text()
        problems += [f"{name}: {path}" for path in REPOSITORY_FILE.findall(text) if not exists(page, path)]
        problems += [f"{name}: {link}" for link in LINK.findall(FENCE.sub("", text)) if not exists(page, link)]
        problems += [f"{name}: make {word}" for word in re.findall(r"`make ([a-z-]+)", text) if word not in targets]
    assert not problems


def exists(page: Path, path: str) -> bool:
    """True for a file of the repository, seen from its root or from the page's folder."""
    return (ROOT / path).exists() or (page.parent / path).exists()


@pytest.mark.parametrize("block", [b for b in read_blocks() if b.language == "python"], ids=str)
def test_shown_python_uses_what_our_packages_have(block: Block) -> None:
    import compress
    import runtime

    packages = {"compress": compress, "runtime": runtime}
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in packages:
            __import__(f"{node.value.id}.{node.attr}") if not hasattr(packages[node.value.id], node.attr) else None


def test_every_pass_is_in_the_table_that_helps_to_choose() -> None:
    from compress.passes import PASSES

    text = (ROOT / "docs/reference/passes.md").read_text()
    for pass_ in PASSES:
        assert f"[`{pass_.model_fields['kind'].default}`](#" in text


def test_the_site_s_navigation_has_every_page() -> None:
    listed = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        assert page.relative_to(ROOT / "docs").as_posix() in listed
