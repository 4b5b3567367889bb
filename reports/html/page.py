"""How does a page come into a file: one that names no other file, and that never shows half of itself?"""

import functools
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from reports import figures, words
from reports.outputs.files import write

_TEMPLATES = Path(__file__).parent.parent / "templates"
_MARK = b'name="generator" content="mla-oracle report"'


def rendered(template: str, **page: Any) -> str:
    """The page that a template makes of these values, with the style inside."""
    return _environment().get_template(template).render(**page, style=source("page.css"), legend=figures.legend())


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {
        "use": figures.spelled_use, "heat": figures.heat, "seconds": figures.spelled_seconds, "number": words.number,
        "percent": words.percent, "breakable": words.breakable, "plural": words.plural,
    }  # fmt: skip
    return environment


def source(name: str) -> Markup:
    """A file of the templates as it is: style or script of our own."""
    return Markup((_TEMPLATES / name).read_text(encoding="utf-8"))


def write_page(text: str, out: Path) -> Path:
    """Write the page at `out`, beside its place first and renamed, so that a reader sees the old page or the new one."""
    out.parent.mkdir(parents=True, exist_ok=True)
    write(out, text)
    return out


def is_report(path: Path) -> bool:
    """Whether a file is a page that this package wrote, which alone it may replace."""
    with path.open("rb") as file:
        return _MARK in file.read(4096)
