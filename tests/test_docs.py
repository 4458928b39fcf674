"""What the documentation shows is true: its recipes are read and planned, its commands, options and files exist."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from places import ROOT

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "recipes/README.md",
    ROOT / "skills/compress/SKILL.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s:]+)(?:#[^)\s]*)?\)")
INLINE = re.compile(r"`([^`\n]+)`")
REPOSITORY_FILE = re.compile(
    r"\b(?:recipes|benchmarks|skills|compress|runtime|tests|notebooks|docs)/[\w./-]*\w\.(?:py|md|yaml|json|ipynb)\b"
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


@pytest.mark.parametrize("block", WHOLE, ids=str)
def test_a_shown_recipe_plans(block: Block, projects: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from compress.planning.make_plan import make_plan
    from compress.recipe.load import load_recipe

    if "kind: openvino" in block.text:
        pytest.importorskip("openvino_tokenizers")
    task = yaml.safe_load(block.text)["model"]["task"]
    file = projects / task / "recipe.yaml"
    file.write_text(re.sub(r'"hf:[^"]+"', '"dir:model"', block.text))
    monkeypatch.chdir(file.parent)
    plan = make_plan(load_recipe(file), projects / "cache")
    assert plan.steps


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.name)
def test_the_page_that_a_recipe_names_shows_it(path: Path, tmp_path: Path) -> None:
    from compress.recipe.load import load_recipe

    pages = re.findall(r"docs/howto/[\w-]+\.md", path.read_text())
    if not pages:
        assert path.name == "quickstart.yaml"
        return
    shown = []
    for n, block in enumerate(block for block in WHOLE if block.page in pages):
        (tmp_path / f"{n}.yaml").write_text(block.text)
        shown.append(load_recipe(tmp_path / f"{n}.yaml"))
    assert load_recipe(path) in shown
    (page,) = pages
    assert f"`recipes/{path.name}`" in (ROOT / page).read_text()


def test_the_table_of_recipes_has_each() -> None:
    """Those by use case and for language models by their names, those of the claims by how their names begin."""
    text = (ROOT / "recipes/README.md").read_text()
    listed = re.findall(r"`([\w*-]+)(?:\.yaml)?`", text)
    for path in (ROOT / "recipes").rglob("*.yaml"):
        assert any(fnmatch(path.stem, name) for name in listed), path.name


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


def test_the_skill_has_the_head_that_agents_read() -> None:
    _, head, text = (ROOT / "skills/compress/SKILL.md").read_text().split("---\n", 2)
    said = yaml.safe_load(head)
    assert said.keys() == {"name", "description"} and said["name"] == "compress" and len(said["description"]) <= 1024
    assert all(f"compress {name} " in text for name in ("check", "plan", "bench", "apply", "report", "why", "blame"))
    assert all(f"| `{verdict}` |" in text for verdict in ("pass", "fail", "undecided", "error"))


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
    """True for a file of the repository, seen from its root or from the page's folder, and for a pass's page."""
    from compress.passes import PASSES

    made = [f"docs/reference/passes/{pass_.model_fields['kind'].default}.md" for pass_ in PASSES]
    here = (page.parent / path).resolve()
    return (ROOT / path).exists() or here.exists() or here in [ROOT / page for page in made]


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
        kind = pass_.model_fields["kind"].default
        assert f"[`{kind}`](passes/{kind}.md)" in text


def test_the_site_s_navigation_has_every_page() -> None:
    listed = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        assert page.relative_to(ROOT / "docs").as_posix() in listed
