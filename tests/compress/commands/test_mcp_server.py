"""The commands as tools of an agent: through the protocol's own client, in this process and over stdin and stdout."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from child_processes import SEARCH_PATH
from places import ROOT
from sample_projects import write_tensor_files
from shortcuts import quick_judge
from tiny_bundles import make_bundle
from typer.testing import CliRunner

from compress.cli import app
from compress.recipe.load import load_recipe, recipe_to_dict
from runtime.report.validate import validate

pytest.importorskip("mcp", reason="the package 'mcp' is not installed (the extra 'mcp')")

from mcp import Client, StdioServerParameters, stdio_client
from mcp.types import CallToolResult

from compress.commands import mcp_server

TOOLS = ["check", "plan", "bench", "apply", "report", "why", "blame"]
RECIPE = """\
version: 1
name: tiny
model: {source: "onnx:model.onnx", task: generic}
preprocess: {kind: tensor}
data: {evaluation: {source: "npz:test.npz"}}
passes: [{kind: rtn, bits: 8}]
"""
Talk = Callable[[Client], Coroutine[Any, Any, Any]]


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", SEARCH_PATH)
    monkeypatch.setenv("COMPRESS_CACHE", str(tmp_path / "cache"))
    Path("recipe.yaml").write_text(RECIPE)


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny bundle with a real report."""
    bundle = make_bundle("image", tmp_path_factory.mktemp("tiny") / "bundle")
    with quick_judge():
        validate(bundle)
    return bundle


def talk(say: Talk, server: Any = mcp_server.SERVER) -> Any:
    """Return what a client says to the server, over streams in memory."""

    async def meet() -> Any:
        async with Client(server, mode="legacy") as client:
            return await say(client)

    return asyncio.run(meet())


def call(tool: str, told: list[str] | None = None, **arguments: Any) -> CallToolResult:
    async def note(progress: float, total: float | None, message: str | None) -> None:
        if told is not None:
            told.append(str(message))

    done = talk(lambda client: client.call_tool(tool, arguments, progress_callback=note))
    assert isinstance(done, CallToolResult)
    return done


def pretend(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Let a script stand for `compress`."""
    monkeypatch.setattr(mcp_server, "COMMAND", (sys.executable, "-c", code))


def test_each_tool_is_a_command_and_has_its_options() -> None:
    sys.path.insert(0, str(ROOT / "docs/hooks"))
    try:
        from reference import list_options
    finally:
        sys.path.pop(0)
    tools = talk(lambda client: client.list_tools()).tools
    assert [tool.name for tool in tools] == TOOLS
    reading = [tool.name for tool in tools if tool.annotations is not None and tool.annotations.read_only_hint]
    assert reading == ["check", "why", "blame"]  # a plan runs the Python of its recipe
    for tool in tools:
        assert tool.description and all("description" in part for part in tool.input_schema["properties"].values())
        options = {name for name in tool.input_schema["properties"] if name not in ("recipe", "bundle", "model")}
        flags = {"--set" if name == "changes" else f"--{name}" for name in options}
        assert flags | {"--json"} <= list_options()[f"compress {tool.name}"], tool.name


def test_check_returns_the_document_of_the_command() -> None:
    done = call("check", recipe="recipe.yaml", changes=["passes.0.bits=4", "seed=3"])
    assert not done.is_error
    assert done.structured_content == recipe_to_dict(load_recipe("recipe.yaml", ["passes.0.bits=4", "seed=3"]))
    assert json.loads(done.content[0].text) == done.structured_content  # type: ignore[union-attr]


def test_a_wrong_recipe_is_an_error_in_our_words() -> None:
    Path("recipe.yaml").write_text(RECIPE.replace("bits: 8", "bitz: 8"))
    done = call("check", recipe="recipe.yaml")
    said = "recipe.yaml:6:22: passes.0.bitz: unknown key; did you mean 'bits'?"
    assert done.is_error and done.content[0].text == said  # type: ignore[union-attr]
    assert done.structured_content == {"verdict": "error", "exit_code": 2, "problems": [said]}


def test_an_argument_is_never_taken_for_an_option() -> None:
    done = call("check", recipe="--help")
    assert done.is_error and done.content[0].text.startswith("--help: ")  # type: ignore[union-attr]


@pytest.mark.slow
def test_plan_returns_the_document_of_the_command(tmp_path: Path) -> None:
    write_tensor_files(tmp_path)
    done = call("plan", recipe="recipe.yaml", changes=["passes=[{kind: rtn, bits: 4, group_size: 32}]"])
    assert not done.is_error, done.content
    assert done.structured_content is not None and done.structured_content["name"] == "tiny"
    assert [step["name"] for step in done.structured_content["steps"]][-1].startswith("rtn")


@pytest.mark.slow
def test_report_and_why_of_a_bundle(judged: Path) -> None:
    done = call("report", bundle=str(judged))
    assert done.structured_content is not None
    assert done.structured_content["report"] == json.loads((judged / "report.json").read_text())
    assert Path(done.structured_content["page"]).is_file()
    why = call("why", bundle=str(judged))
    assert not why.is_error and why.structured_content is not None
    asked = CliRunner().invoke(app, ["why", str(judged), "--json"])
    assert why.structured_content.keys() == json.loads(asked.stdout).keys()


def test_stderr_is_told_as_progress_and_a_verdict_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
import json, sys
print("export: 1.0 s\\ngptq: 2.0 s", file=sys.stderr)
print(json.dumps({"verdict": "fail", "words": sys.argv[1:]}))
sys.exit(3)
"""
    pretend(monkeypatch, code)
    told: list[str] = []
    done = call("apply", told, recipe="r.yaml", out="b", changes=["seed=1", "name=x"])
    assert told == ["export: 1.0 s", "gptq: 2.0 s"] and not done.is_error
    words = ["apply", "--json", "--progress", "--out=b", "--set=seed=1", "--set=name=x", "--", "r.yaml"]
    assert done.structured_content == {"verdict": "fail", "words": words}


def test_a_command_that_was_killed_is_an_error_with_its_last_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "import os, sys; print('gptq: 3 of 9', file=sys.stderr, flush=True); os.kill(os.getpid(), 9)")
    done = call("apply", recipe="r.yaml")
    said = done.content[0].text  # type: ignore[union-attr]
    assert done.is_error and said.splitlines()[1:] == ["gptq: 3 of 9"]
    assert said.startswith("compress apply: ended with -9 and without a document")


def test_a_cancelled_call_ends_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
import os, signal, sys, time
from pathlib import Path
def end(*_):
    Path("ended").write_text("in order")
    sys.exit(143)
signal.signal(signal.SIGTERM, end)
Path("begun").write_text(str(os.getpid()))
time.sleep(60)
"""
    pretend(monkeypatch, code)

    async def give_up(client: Client) -> None:
        calling = asyncio.create_task(client.call_tool("apply", {"recipe": "r.yaml"}))
        while not Path("begun").is_file():
            await asyncio.sleep(0.01)
        calling.cancel()
        for _ in range(500):
            if Path("ended").is_file():
                break
            await asyncio.sleep(0.01)

    talk(give_up)
    assert Path("ended").read_text() == "in order"


@pytest.mark.slow
def test_the_command_answers_on_stdin_and_stdout() -> None:
    environment = {**os.environ, "PYTHONPATH": SEARCH_PATH}
    server = StdioServerParameters(command=sys.executable, args=["-m", "compress", "mcp"], env=environment)

    async def ask(client: Client) -> Any:
        return await client.list_tools(), await client.call_tool("check", {"recipe": "recipe.yaml"})

    listed, checked = talk(ask, stdio_client(server))
    assert [tool.name for tool in listed.tools] == TOOLS and not checked.is_error


def test_without_the_package_the_command_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "mcp"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mcp", None)
    monkeypatch.delitem(sys.modules, mcp_server.__name__)
    done = CliRunner().invoke(app, ["mcp"])
    said = "a server for agents (the extra 'mcp') needs the package 'mcp', which is not installed: pip install mcp\n"
    assert (done.exit_code, done.stderr) == (1, said)
