"""Chat templates: messages to the prompt that a model was trained on.

The template comes with the model, from someone we do not know, so that it runs in jinja2's sandbox, without a way to
files or to Python's objects, and in a process of its own that is ended when its time or memory is used up.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from runtime.bundle.manifest import PromptImages
from runtime.encode.texts import read_config
from runtime.errors import BundleError, MissingDependency, RuntimeFailure, UsageError
from runtime.processes.isolated import python_command, python_environment

Messages = Sequence[Mapping[str, Any]]
"""{"role": "user", "content": "..."}, the oldest first."""
Turns = list[dict[str, Any]]
"""The same with whatever else the template reads of a turn."""
TEXT, IMAGE, AUDIO = "text", "image", "audio"
"""Types of the parts that a message's content may be a list of, and the keys of what is in them."""
FILES = ("path", "url")
"""Keys beside its type under one of which an image or a sound is; without them all are given beside, in their order."""
NOT_READ = (IMAGE, AUDIO, "image_url", "audio_url", "video")
"""Types of parts of a message that a model reads only where its task says so, or not at all."""
PLURALS = {IMAGE: "images", AUDIO: "sounds"}
"""Type of a part -> several of them, in messages to users."""
ASSISTANT = "assistant"
SECONDS, START_SECONDS = 5.0, 60.0
"""For one prompt; for the process to start."""
MOST_TEMPLATE = 2**20
"""Bytes of a template."""


def render_chat(model_dir: Path, messages: Messages, answer: bool = True) -> str:
    """Render the messages as one prompt; `answer`: ending where the assistant begins to speak.

    The template is chat_template.jinja, else `chat_template` of tokenizer_config.json. BundleError where it is broken;
    UsageError where the model has none, for messages that it refuses, or takes too long with; MissingDependency without
    jinja2.
    """
    config = read_config(model_dir / "tokenizer_config.json")
    source = _read_template(model_dir, config)
    if importlib.util.find_spec("jinja2") is None:
        raise MissingDependency("jinja2", "a chat template")
    tokens = {}
    for name, token in config.items():
        text = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    variables = {"messages": list(messages), "add_generation_prompt": answer, **tokens}
    try:
        request = json.dumps({"source": source, "variables": variables})
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"messages of a chat hold texts, numbers, lists and objects: {error}") from error
    reply = _ask_process(request, model_dir)
    if "text" in reply:
        return reply["text"]
    if "unreadable" in reply:
        raise BundleError(f"{model_dir}: its chat template cannot be read: {reply['unreadable']}")
    if "refused" in reply:
        raise UsageError(f"{model_dir}: its chat template refuses the messages: {reply['refused']}")
    raise UsageError(f"{model_dir}: its chat template fails on the messages: {reply['failed']}")


def check_messages(messages: Any) -> Messages:
    """Return the messages, each an object with a role; UsageError for anything else."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise UsageError("a chat is a list of messages, {'role': 'user', 'content': '...'} each, and not empty")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UsageError(f"message {i} has no role: give {{'role': 'user', 'content': '...'}}")
    return messages


def ask_about(parts: Sequence[Any], question: str | None, answer: str | None = None, kind: str = IMAGE) -> Turns:
    """Return the conversation in which a question about images, or parts of another kind, is answered."""
    asked = [{"type": kind, kind: part} for part in parts]
    said = [] if question is None else [{"type": TEXT, TEXT: question}]
    turns: Turns = [{"role": "user", "content": [*asked, *said]}]
    return turns if answer is None else [*turns, {"role": ASSISTANT, "content": answer}]


def take_parts(turns: Messages, others: Sequence[Any] = (), kind: str = IMAGE) -> tuple[Turns, list[Any]]:
    """Return a conversation without its images, and these in order; those that it names no file of are `others`.

    `kind`: the type of the parts to take, image or audio; "": of a model that reads texts alone. UsageError for parts
    of another type, and where `others` are not as many as have no file.
    """
    found: list[Any] = []
    rest = list(others)

    def take(part: Any) -> Any:
        if not isinstance(part, Mapping):
            return part
        part = {key: value for key, value in part.items() if value is not None}  # parquet fills in what others have
        if part.get("type") != kind:
            if part.get("type") in NOT_READ:
                given = (
                    f"texts, and {PLURALS[kind]} as {{type: {kind}}}" if kind else "texts alone, which the model reads"
                )
                raise UsageError(f"a message has a part of type {part['type']}: give {given}")
            return part
        named = [part[key] for key in (kind, *FILES) if key in part]
        if not named and not rest:
            raise UsageError(
                f"the conversation names more {PLURALS[kind]} than there are ({len(found)}): give each its file"
            )
        found.append(named[0] if named else rest.pop(0))
        return {"type": kind}

    taken = [
        {**turn, "content": [take(part) for part in turn["content"]]}
        if isinstance(turn.get("content"), list | tuple | np.ndarray)
        else dict(turn)
        for turn in turns
    ]
    if rest:
        raise UsageError(
            f"{len(rest)} {PLURALS[kind]} are not named in the conversation: put {{type: {kind}}} where each belongs"
        )
    return taken, found


def split_contents(turns: Messages) -> Turns:
    """Return turns with every content as a list of parts, as templates of models that see or hear read it."""
    return [
        {**turn, "content": [{"type": TEXT, TEXT: turn["content"]}]}
        if isinstance(turn.get("content"), str)
        else dict(turn)
        for turn in turns
    ]


def place_images(text: str, n_images: int, images: PromptImages) -> str:
    """Return a rendered conversation with what stands for an image's tokens in the place of each. UsageError."""
    found = text.count(images.marker)
    if found != n_images:
        raise UsageError(
            f"the conversation names {n_images} images, and its chat template writes {images.marker!r} {found} times: "
            "leave it out of the texts"
        )
    return text.replace(images.marker, images.text)


class TemplateProcess:
    """A process that renders one template after another, `runtime.encode.chat_template`."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.process = subprocess.Popen(
            python_command("from runtime.encode.chat_template import main; main()"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=python_environment(),
        )
        if not self._read_reply(START_SECONDS):
            raise RuntimeFailure(
                "the process for chat templates does not start: is jinja2 whole? see `compress doctor`"
            )

    def ask(self, request: str) -> dict[str, str] | None:
        """Return the answer to a request, JSON without a line break in it; None where it did not come in time."""
        reply = self._read_reply(SECONDS, request.encode() + b"\n")
        if not reply:
            return None
        answer: dict[str, str] = json.loads(reply)
        if "exhausted" in answer:
            self.close()
        return answer

    def usable(self) -> bool:
        """Return whether it runs, and is this process's own, not its parent's before a fork."""
        return self.owner == os.getpid() and self.process.poll() is None

    def close(self) -> None:
        """End the process."""
        if self.owner == os.getpid():
            self.process.kill()
            self.process.communicate()

    def _read_reply(self, seconds: float, request: bytes = b"") -> bytes:
        """Return the line that comes after `request` was written.

        Empty, and the process ended, where none came in time.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        timer = threading.Timer(seconds, self.process.kill)
        timer.start()
        try:
            self.process.stdin.write(request)
            self.process.stdin.flush()
            reply = self.process.stdout.readline()
        except BrokenPipeError:
            reply = b""
        finally:
            on_time = timer.is_alive()
            timer.cancel()
        if not (reply and on_time):
            self.close()
        return reply


_lock = threading.Lock()
_processes: list[TemplateProcess] = []
"""None or one: it serves every template of this process."""


def _ask_process(request: str, model_dir: Path) -> dict[str, str]:
    with _lock:
        if not (_processes and _processes[0].usable()):
            _processes[:] = [TemplateProcess()]
        reply = _processes[0].ask(request)
    if reply is None:
        raise UsageError(
            f"{model_dir}: its chat template does not end with these messages within {SECONDS:g} s: "
            "give a plain prompt, or a model whose template ends"
        )
    return reply


@atexit.register
def _close_processes() -> None:
    for process in _processes:
        process.close()


def _read_template(model_dir: Path, config: Mapping[str, Any]) -> str:
    file = model_dir / "chat_template.jinja"
    source: Any = config.get("chat_template")
    if file.is_file():
        try:
            source = file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BundleError(f"{file}: cannot be read: {error}") from error
    elif isinstance(source, list):  # several by name
        defaults = [
            template.get("template")
            for template in source
            if isinstance(template, dict) and template.get("name") == "default"
        ]
        source = defaults[-1] if defaults else None
    if not isinstance(source, str):
        raise UsageError(
            f"{model_dir}: the model has no chat template (chat_template.jinja, or chat_template in "
            "tokenizer_config.json): give a plain prompt"
        )
    if len(source) > MOST_TEMPLATE:
        raise BundleError(f"{model_dir}: its chat template has {len(source)} characters, more than {MOST_TEMPLATE}")
    return source
