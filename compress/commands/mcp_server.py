"""`compress mcp`: the commands as tools of the Model Context Protocol, on stdin and stdout, for agents.

A tool runs its command with `--json` in a process of its own and hands on the document. So a tool can do nothing that
its command does not, what one call sets (the network that a recipe may use) is gone at the next, and a run that is
killed for memory does not take the server along.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from subprocess import DEVNULL
from typing import Annotated

from compress.version import __version__
from runtime.errors import MissingDependency

try:
    import anyio
    from anyio.abc import ByteReceiveStream, Process
    from anyio.streams.text import TextReceiveStream
    from mcp.server.mcpserver import Context, MCPServer
    from mcp.types import CallToolResult, TextContent, ToolAnnotations
    from pydantic import Field
except ModuleNotFoundError as error:
    raise MissingDependency("mcp", "a server for agents (the extra 'mcp')") from error

COMMAND = (sys.executable, "-P", "-m", "compress")  # -P: nothing is imported from where the agent works
READS = ToolAnnotations(read_only_hint=True)
"""Of tools that change nothing and run no code that a recipe names."""

SERVER = MCPServer(
    "compress",
    version=__version__,
    instructions=(
        "Makes trained models smaller and faster, and judges the result. Order: bench (no recipe yet) or check, plan, "
        "apply; then report, and why (too slow) or blame (too much quality lost). Paths are the server's. A verdict "
        "'fail' or 'undecided' is a result, not an error: say so, and never weaken a gate to get 'pass'."
    ),
    log_level="WARNING",
)

RecipeFile = Annotated[str, Field(description="The recipe, a YAML file.")]
BundleFolder = Annotated[str, Field(description="The bundle's folder.")]
Changes = Annotated[
    Sequence[str], Field(description="Changes of the recipe, PATH=VALUE each, as in passes.0.bits=4 or vars.x=y.")
]
Cache = Annotated[str | None, Field(description="Folder of finished work; default: $COMPRESS_CACHE.")]
Device = Annotated[str | None, Field(description="In the recipe's place: auto, cpu, cuda or cuda:1.")]
Data = Annotated[
    str | None, Field(description="A file, folder or hub id; without data there are times, and no quality.")
]


@SERVER.tool(annotations=READS)
async def check(context: Context, recipe: RecipeFile, changes: Changes = ()) -> CallToolResult:
    """Read a recipe strictly, and return it with every default written out. At once; no code of it runs."""
    return await run_command(context, "check", [recipe], set=changes)


# plan changes nothing, but runs Python that a recipe names: clients call what only reads without asking anybody
@SERVER.tool()
async def plan(
    context: Context, recipe: RecipeFile, changes: Changes = (), cache: Cache = None, device: Device = None
) -> CallToolResult:
    """Say what a recipe would do, layer by layer, how fast the result will be, and whether it can work. Seconds."""
    return await run_command(context, "plan", [recipe], set=changes, cache=cache, device=device)


@SERVER.tool()
async def bench(
    context: Context,
    model: Annotated[str, Field(description="A folder, a hub id, an .onnx file, or FILE.py:factory.")],
    data: Data = None,
    out: Annotated[str | None, Field(description="Folder of the rows and the best recipe; default: bench.")] = None,
    task: Annotated[str | None, Field(description="What the model does; default: found from its files.")] = None,
    budget: Annotated[str | None, Field(description="When to end, as in 90s or 5m; default: 5m.")] = None,
    cache: Cache = None,
) -> CallToolResult:
    """Measure every format on every backend of this machine in one table, and write the best one's recipe. Minutes."""
    return await run_command(context, "bench", [model], data=data, out=out, task=task, budget=budget, cache=cache)


@SERVER.tool()
async def apply(
    context: Context,
    recipe: RecipeFile,
    out: Annotated[str | None, Field(description="Where the bundle goes; default: bundles/NAME.")] = None,
    changes: Changes = (),
    cache: Cache = None,
    device: Device = None,
    baseline: Annotated[
        str | None, Field(description="An earlier bundle or report.json: what became worse is a failure.")
    ] = None,
) -> CallToolResult:
    """Do what a recipe says, write the bundle and judge it: its report. Minutes to hours; the same call goes on."""
    given = {"out": out, "set": changes, "cache": cache, "device": device, "baseline": baseline}
    return await run_command(context, "apply", [recipe], "--progress", **given)


@SERVER.tool()
async def report(context: Context, bundle: BundleFolder) -> CallToolResult:
    """Return a bundle's last judgement (gates, metrics with intervals, times) and write its page, report.html."""
    return await run_command(context, "report", [bundle])


@SERVER.tool(annotations=READS)
async def why(
    context: Context,
    bundle: BundleFolder,
    backend: Annotated[str | None, Field(description="Default: the bundle's target.")] = None,
) -> CallToolResult:
    """Say where the time of a bundle's calls goes on this machine, why it is no less, and what to change."""
    return await run_command(context, "why", [bundle], backend=backend)


@SERVER.tool(annotations=READS)
async def blame(
    context: Context,
    bundle: BundleFolder,
    budget: Annotated[float | None, Field(description="Minutes that it may take; default: 3.")] = None,
    metric: Annotated[str | None, Field(description="Of the bundle's; default: that of its first gate.")] = None,
    cache: Cache = None,
) -> CallToolResult:
    """Find the layers that carry a bundle's loss, and what putting them back to float gives and costs."""
    return await run_command(context, "blame", [bundle], budget=budget, metric=metric, cache=cache)


def serve() -> None:
    """Answer on stdin and stdout until stdin ends."""
    SERVER.run("stdio")


async def run_command(
    context: Context, name: str, arguments: Sequence[str], *flags: str, **options: Sequence[str] | float | None
) -> CallToolResult:
    """Run a command to its end and return its document, whatever the verdict; an error where it says "error".

    `options`: name -> value, or several of a list; None is left out. What the command writes on stderr is told as
    progress. A call that is cancelled ends the command as Ctrl-C does.
    """
    values = {key: [value] if isinstance(value, (str, float, int)) else value or () for key, value in options.items()}
    words = [f"--{key}={value}" for key, given in values.items() for value in given]
    # stdin and stdout of this process are the protocol's: the command has others
    process = await anyio.open_process([*COMMAND, name, "--json", *flags, *words, "--", *arguments], stdin=DEVNULL)
    assert process.stdout is not None and process.stderr is not None
    told: list[str] = []
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(tell_lines, process.stderr, context, told)
            text = b"".join([part async for part in process.stdout]).decode()
        await process.wait()
    finally:
        await end_process(process)
    return read_result(name, text, process.returncode, told)


async def tell_lines(stream: ByteReceiveStream, context: Context, told: list[str]) -> None:
    """Report each line of a stream as progress, and add it to `told`."""
    rest = ""
    async for text in TextReceiveStream(stream, errors="replace"):
        *lines, rest = (rest + text).split("\n")
        for line in filter(None, lines):
            told.append(line)
            await context.report_progress(len(told), message=line)


async def end_process(process: Process) -> None:
    """End a process if it still runs, in order where it can, and close its pipes."""
    with anyio.CancelScope(shield=True):
        # then it is killed; `apply` of the quickstart ended in half a second
        with suppress(ProcessLookupError), anyio.move_on_after(20.0):
            if process.returncode is None:
                process.terminate()
            await process.wait()
        with suppress(ProcessLookupError):
            if process.returncode is None:
                process.kill()
        await process.aclose()


def read_result(name: str, text: str, exit_code: int | None, told: Sequence[str]) -> CallToolResult:
    """Return what a command printed as a tool's result. `told`: its lines on stderr, for one that printed nothing."""
    try:
        document = json.loads(text)
    except ValueError:
        ended = f"compress {name}: ended with {exit_code} and without a document (-9: killed, often for memory)"
        # the last lines of stderr tell of a command that was killed
        document = {"verdict": "error", "exit_code": exit_code, "problems": [ended, *told[-10:]]}
    failed = document.get("verdict") == "error"
    said = "\n".join(document["problems"]) if failed else json.dumps(document, ensure_ascii=False)
    return CallToolResult(content=[TextContent(text=said)], structured_content=document, is_error=failed)
