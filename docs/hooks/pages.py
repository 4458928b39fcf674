"""Hooks of mkdocs: parts made from the code, pages that are files of the repository, and links between them."""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

from documents import write_files  # noqa: E402
from reference import PASSES, find_kind, generate, write_pass  # noqa: E402

ROOT = Path(__file__).parents[2]
MIRRORED = {
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "recipes/README.md": "reference/recipes.md",
    "notebooks/README.md": "notebooks.md",
    "benchmarks/README.md": "benchmarks.md",
    "compress/README.md": "house.md",
    "runtime/README.md": "reference/bundles.md",
}
"""File of the repository -> the page that shows it: each fact stays in one place."""
LINK = re.compile(r"(?<!!)\[([^\]\n]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")
GENERATE = re.compile(r"^<!-- generate: ([a-z-]+) -->$", re.MULTILINE)
FENCE = re.compile(r"^(```.*?^```)", re.MULTILINE | re.DOTALL)
SHIM = "https://unpkg.com/iframe-worker/shim"
LOADED = re.compile(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=[\"']?(?:https?:)?//[^>]+>")


def on_config(config: Any) -> Any:
    """Put a page for each pass below the one that lists them."""
    reference = next(part["Reference"] for part in config.nav if isinstance(part, dict) and "Reference" in part)
    passes = next(entry for entry in reference if "Passes" in entry)
    passes["Passes"] = [passes["Passes"], *({kind: page} for kind, page in pass_pages().items())]
    return config


def pass_pages() -> dict[str, str]:
    """Return kind of pass -> its page."""
    return {find_kind(pass_): f"reference/passes/{find_kind(pass_)}.md" for pass_ in PASSES}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made from the code, and those that are files of the repository outside of docs/."""
    for pass_, page in zip(PASSES, pass_pages().values(), strict=True):
        files.append(File.generated(config, page, content=write_pass(pass_)))
    for page, schema in write_files().items():
        files.append(File.generated(config, page, content=schema))
    for path, page in MIRRORED.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Put in what is made from the code, and turn links into the repository into links to the pages that show it."""
    sources = {shown: path for path, shown in MIRRORED.items()}
    here = sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    parts = FENCE.split(markdown)
    text = "".join(part if part.startswith("```") else rewrite_links(part, here, page) for part in parts)
    return GENERATE.sub(lambda match: generate(match[1], ROOT), text)


def rewrite_links(text: str, here: str, page: Page) -> str:
    """Return `text` of the repository's file `here` with the links that its page needs."""

    def rewrite(match: re.Match[str]) -> str:
        words, target, anchor = match[1], match[2], match[3] or ""
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
        shown = MIRRORED.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
        if shown is None:
            if not (ROOT / path).exists():
                raise PluginError(f"{here}: links to {target}, which is no file of the repository")
            return f"{words} (`{path}`)" if path not in words else words
        relative = posixpath.relpath(shown, posixpath.dirname(page.file.src_uri) or ".")
        return f"[{words}]({relative}{anchor})"

    return LINK.sub(rewrite, text)


def on_post_page(output: str, page: Page, config: Any) -> str:
    """Let the theme's search from a folder load our copy of its shim; refuse what comes from another server."""
    output = output.replace(
        SHIM, posixpath.relpath("assets/iframe-worker.js", posixpath.dirname(page.file.dest_uri) or ".")
    )
    foreign = LOADED.search(output)
    if foreign and 'rel="canonical"' not in foreign[0]:
        raise PluginError(f"{page.file.src_uri}: loads {foreign[0]}")
    return output
