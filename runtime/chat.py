"""Chat templates: messages to the prompt that a model was trained on.

The template comes with the model, from someone we do not know, so that it runs in jinja2's sandbox, without a way to
files or to Python's objects.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from runtime.errors import BundleError, MissingDependency, UsageError
from runtime.texts import read_config

Messages = Sequence[Mapping[str, Any]]
"""{"role": "user", "content": "..."}, the oldest first."""


def render_chat(model_dir: Path, messages: Messages, answer: bool = True) -> str:
    """The messages as one prompt; `answer`: ending where the assistant begins to speak.

    The template is chat_template.jinja, else `chat_template` of tokenizer_config.json. BundleError where the model has
    none or it is broken; UsageError for messages that it refuses; MissingDependency without jinja2.
    """
    config = read_config(model_dir / "tokenizer_config.json")
    template = _compiled(_source(model_dir, config), model_dir)
    from jinja2 import TemplateError

    try:
        text: str = template.render(messages=list(messages), add_generation_prompt=answer, **_tokens(config))
    except TemplateError as error:
        raise UsageError(f"{model_dir}: its chat template refuses the messages: {error}") from error
    except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        raise UsageError(f"{model_dir}: its chat template fails on the messages: {error}") from error
    return text


def check_messages(messages: Any) -> Messages:
    """The messages, each an object with a role; UsageError for anything else."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise UsageError("a chat is a list of messages, {'role': 'user', 'content': '...'} each, and not empty")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UsageError(f"message {i} has no role: give {{'role': 'user', 'content': '...'}}")
    return messages


def _source(model_dir: Path, config: Mapping[str, Any]) -> str:
    file = model_dir / "chat_template.jinja"
    if file.is_file():
        return file.read_text("utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):  # several by name
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    if not isinstance(found, str):
        raise BundleError(
            f"{model_dir}: the model has no chat template (chat_template.jinja, or chat_template in "
            "tokenizer_config.json): give a plain prompt"
        )
    return found


def _compiled(source: str, model_dir: Path) -> Any:
    try:
        from jinja2 import TemplateSyntaxError, nodes
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise MissingDependency("jinja2", "a chat template") from error

    class GenerationBlock(Extension):
        """{% generation %} marks the assistant's words for training; here it changes nothing."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise BundleError(f"{model_dir}: its chat template cannot be read: {error}") from error


def _raise(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    """As transformers has it: jinja2's own escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def _tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, ... as text, for the template."""
    found = {}
    for name, token in config.items():
        text = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found
