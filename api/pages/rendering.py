"""Jinja templates of the pages, and the responses that carry them.

Templates escape every value. Scripts and styles are files of this service, so that the
content security policy allows no inline script and nothing from another site.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined, pass_context
from jinja2.runtime import Context
from markupsafe import Markup

from planner.api.http.links import path_within, root_of
from planner.spec.layout_words import layout_line, spans
from planner.spec.search_words import change_text, cuts_text
from planner.spec.units import percent, scaled, seconds, significant
from planner.spec.words import counted
from planner.version import __version__

FOLDER = Path(__file__).parent
POLICY = (
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "img-src 'self' data:",
    "connect-src 'self'",
    "base-uri 'none'",
    "form-action 'self'",
    "frame-ancestors 'none'",
)
HEADERS = {
    "Content-Security-Policy": "; ".join(POLICY),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
BYTES_PER_GB = 1e9
IN_PLACE_OF_COMMANDS = tuple(
    (re.compile(command), replacement)
    for command, replacement in (
        (r" \((?:`?planner \w+[^)]*)\)", ""),
        (r"`planner (devices|models)`", r"the page \1"),
        (r"`planner predict`", "POST /v1/predictions"),
        (r"`planner profile [^`]*`", "a measured profile"),
        (r": planner [a-z]+ --[^.]*\.", "."),
        (r"with --fix ([\w=.,-]*\w)", r"with \1 fixed"),
        (r"with --to (\S+)", r"for \1"),
        (r"what --to (\S+) writes", r"the export \1"),
    )
)
"""What a message of the command line says, and what a page says instead."""
MENU = (
    ("/", "New plan"),
    ("/plans", "Plans"),
    ("/runs", "Runs"),
    ("/atlas", "Atlas"),
    ("/models", "Models"),
    ("/devices", "Devices"),
    ("/docs", "HTTP API"),
)


def page(
    request: Request, template: str, /, *, status: int = 200, **context: Any
) -> HTMLResponse:
    """A template as the answer to a request.

    Args:
        request: the request to answer.
        template: file name in the folder of templates.
        status: HTTP status.
        context: values that the template shows.
    """
    root, here = root_of(request.scope), path_within(request.scope)
    text = render(template, root=root, here=here, **context)
    return HTMLResponse(text, status_code=status, headers=HEADERS)


def render(template: str, /, **context: Any) -> str:
    """The text of a template; without `root` and `here` it belongs to no service."""
    defaults = {"root": "", "here": "", "standalone": False}
    return _environment().get_template(template).render(defaults | context)


def static_text(name: str) -> str:
    """A file of the folder of static files."""
    return (FOLDER / "static" / name).read_text(encoding="utf-8")


def gigabytes(value: float) -> str:
    """Bytes as text: ``79.1 GB``; small amounts with a smaller prefix."""
    if abs(value) < BYTES_PER_GB / 10:
        return scaled(value, "B")
    return f"{value / BYTES_PER_GB:.1f} GB"


def moment(text: str) -> Markup:
    """``2026-11-23T16:28:25.486Z`` as 2026-11-23 16:28:25 UTC."""
    shown = f"{text[:19].replace('T', ' ')} UTC"
    return Markup('<time datetime="{}">{}</time>').format(text, shown)


def sentence(hint: str) -> str:
    """A hint as a sentence of its own."""
    return hint[:1].upper() + hint[1:]


def web(text: str) -> str:
    """A message without commands: people at a page have its form and the HTTP API."""
    for command, replacement in IN_PLACE_OF_COMMANDS:
        text = command.sub(replacement, text)
    return text.strip()


@pass_context
def _unless_standalone(context: Context, text: str) -> str:
    """Commands stay in the file of `planner plan --html`."""
    return text if context.get("standalone", False) else web(text)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        extensions=["jinja2.ext.do"],
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "counted": counted,
        "gigabytes": gigabytes,
        "layout_line": layout_line,
        "moment": moment,
        "percent": percent,
        "scaled": scaled,
        "seconds": seconds,
        "web": _unless_standalone,
        "significant": significant,
        "spans": spans,
        "sentence": sentence,
        "change_text": change_text,
        "cuts_text": cuts_text,
    }
    environment.globals |= {
        "menu": MENU,
        "version": __version__,
        "stylesheet": lambda: Markup(static_text("planner.css")),
        "script": lambda: Markup(static_text("planner.js")),
    }
    return environment
