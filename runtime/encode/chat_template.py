"""The process that renders chat templates: a stranger's template may run for ever, or ask for all memory.

`runtime.encode.chat` starts it, writes a request a line and reads an answer a line, both JSON, and ends it when time is
up.
"""

from __future__ import annotations

import functools
import json
import signal
import sys
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

MOST_BYTES = 2**28
"""Of memory, beyond what the process has when it starts."""
MOST_TEXT = 2**24
"""Characters of a prompt; no model reads more."""


@functools.lru_cache(maxsize=8)
def compile_template(source: str) -> Any:
    """Compile the template in jinja2's sandbox, with what transformers offers to templates. TemplateSyntaxError."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

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
    environment.globals["raise_exception"] = _raise_template_error
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


def answer_request(request: Mapping[str, Any]) -> dict[str, str]:
    """Answer {"source", "variables"} with {"text"}, or {"unreadable" | "refused" | "failed": why}.

    After an answer with "exhausted" nothing more should be asked of this process.
    """
    from jinja2 import TemplateError, TemplateSyntaxError

    try:
        text = compile_template(request["source"]).render(**request["variables"])
    except TemplateSyntaxError as error:
        return {"unreadable": str(error)}
    except TemplateError as error:
        return {"refused": str(error)}
    except MemoryError:
        return {"failed": f"it takes more than {MOST_BYTES >> 20} MiB", "exhausted": "yes"}
    except Exception as error:  # noqa: BLE001  (whatever the template does, it is the template that failed)
        return {"failed": f"{type(error).__name__}: {str(error)[:500]}"}
    if len(text) > MOST_TEXT:
        return {"failed": f"it makes {len(text)} characters, more than {MOST_TEXT}"}
    return {"text": text}


def main() -> None:
    """Answer requests until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    compile_template("")  # imports what is needed, before memory is counted
    _limit_memory()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer_request(json.loads(line))), flush=True)


def _limit_memory() -> None:
    if sys.platform != "linux":  # elsewhere time alone is limited
        return
    import resource

    with open("/proc/self/statm", encoding="ascii") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MOST_BYTES, mapped + MOST_BYTES))


def _raise_template_error(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    """Encode a value as transformers does: jinja2's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)
