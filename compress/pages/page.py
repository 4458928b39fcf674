"""Fill a page's template: everything that it shows of a bundle is hostile input and is escaped."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from runtime.report.differences import comparison_notes, difference_cells
from runtime.words import interval_brackets, ms_text, size_text

TEMPLATES = Path(__file__).parent / "templates"


def render_page(template: str, **values: Any) -> str:
    """Return a whole page, UTF-8 text. `template`: a file of `templates/`, which extends `base.html`."""
    return make_environment().get_template(template).render(**values)


@cache
def make_environment() -> Environment:
    """Return the templates' environment: text is escaped, and a value that a template lacks is an error."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"size": size_text, "ms": ms_text, "interval": interval_brackets}
    environment.filters |= {"difference": difference_cells, "remarks": comparison_notes}
    environment.globals["style"] = read_style("style.css") + read_style("chart.css")
    return environment


def read_style(name: str) -> Markup:
    """Return a style sheet of `templates/`."""
    return Markup((TEMPLATES / name).read_text(encoding="utf-8"))
