"""Pages as trees of elements; all text and attributes are escaped when rendered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse

from planner.api.links import path_within, root_of
from planner.api.pages.style import STYLE

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; img-src 'self' data:; base-uri 'none'; form-action 'self'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
WITHOUT_END = frozenset({"br", "img", "input", "link", "meta"})
ADDRESSES = frozenset({"href", "src", "action"})
LONG_TEXT = 40
"""Cells with more characters get a minimum width."""
MENU = (
    ("/", "Plans"),
    ("/plan", "New plan"),
    ("/models", "Models"),
    ("/devices", "Devices"),
    ("/docs", "HTTP API"),
)


@dataclass(frozen=True, slots=True)
class Element:
    """An element of HTML or of SVG inside it."""

    name: str
    children: tuple[Node, ...]
    attributes: Mapping[str, str | bool]


Node = Element | str | Iterable["Node"]


def tag(
    name: str, /, *children: Node, **attributes: str | float | bool | None
) -> Element:
    """An element. In attribute names, underscores become hyphens, except a trailing one,
    which is dropped. Attributes that are None or False are left out."""
    given = {
        key.rstrip("_").replace("_", "-"): value
        if isinstance(value, bool)
        else str(value)
        for key, value in attributes.items()
        if value is not None and value is not False
    }
    return Element(name, children, given)


def render(node: Node, root: str = "") -> str:
    """The HTML of a tree; `root` is prepended to every address within this service."""
    if isinstance(node, str):
        return escape(node)
    if not isinstance(node, Element):
        return "".join(render(each, root) for each in node)
    attributes = "".join(
        _attribute(name, value, root) for name, value in node.attributes.items()
    )
    if node.name in WITHOUT_END:
        return f"<{node.name}{attributes}>"
    return f"<{node.name}{attributes}>{render(node.children, root)}</{node.name}>"


def _attribute(name: str, value: str | bool, root: str) -> str:
    if isinstance(value, bool):
        return f" {name}"
    is_within = (
        name in ADDRESSES and value.startswith("/") and not value.startswith("//")
    )
    return f" {name}='{escape(root + value if is_within else value)}'"


def link(address: str, *content: Node) -> Element:
    """A link."""
    return tag("a", *content, href=address)


def section(title: str, *content: Node) -> Element:
    """A section with its heading."""
    return tag("section", tag("h2", title), *content)


def table(
    caption: str,
    head: Iterable[str],
    rows: Iterable[Iterable[Node]],
    *,
    numbers: Iterable[int] = (),
) -> Element:
    """A table. On narrow screens it scrolls; with long cells it stacks them instead.

    Args:
        caption: what the table shows.
        head: titles of the columns.
        rows: cells; the first cell of a row is its header.
        numbers: columns that are aligned to the right.
    """
    right = frozenset(numbers)

    def cell(name: str, column: int, content: Node, **attributes: Any) -> Element:
        is_long = isinstance(content, str) and len(content) > LONG_TEXT
        return tag(
            name,
            content,
            class_="number" if column in right else "long" if is_long else None,
            **attributes,
        )

    heads, cells = tuple(head), [tuple(row) for row in rows]
    has_long_cells = any(
        isinstance(content, str) and len(content) > LONG_TEXT
        for row in cells
        for content in row
    )
    head_cells = [
        cell("th", column, content, scope="col") for column, content in enumerate(heads)
    ]
    body = [
        tag(
            "tr",
            *(
                cell("td", column, content, data_head=heads[column])
                if column
                else cell("th", column, content, scope="row")
                for column, content in enumerate(row)
            ),
        )
        for row in cells
    ]
    whole = tag(
        "table",
        tag("caption", caption),
        tag("thead", tag("tr", *head_cells)),
        tag("tbody", *body),
        class_="wordy" if has_long_cells else None,
    )
    return tag(
        "div", whole, class_="scroll", role="region", aria_label=caption, tabindex="0"
    )


def pairs(rows: Iterable[tuple[Node, Node]]) -> Element:
    """Names and their values."""
    return tag(
        "dl",
        *(part for name, value in rows for part in (tag("dt", name), tag("dd", value))),
    )


def moment(text: str) -> Element:
    """``2026-11-23T16:28:25.486Z`` as 2026-11-23 16:28:25 UTC."""
    return tag("time", f"{text[:19].replace('T', ' ')} UTC", datetime=text)


def bullets(items: Iterable[Node]) -> Element:
    """A list."""
    return tag("ul", *(tag("li", item) for item in items))


def page(
    request: Request,
    title: str,
    *content: Node,
    status: int = 200,
    refresh_seconds: int | None = None,
) -> HTMLResponse:
    """A whole page.

    Args:
        request: the request to answer.
        title: title and heading.
        content: what follows the heading.
        status: HTTP status.
        refresh_seconds: interval at which the browser reloads; None: never.
    """
    head = [
        tag("meta", charset="utf-8"),
        tag("title", title),
        tag("link", rel="icon", href="data:,"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        *(
            [tag("meta", http_equiv="refresh", content=refresh_seconds)]
            if refresh_seconds is not None
            else []
        ),
    ]
    here = path_within(request.scope)
    places = [
        tag("a", label, href=address, aria_current="page" if address == here else None)
        for address, label in MENU
    ]
    menu = tag("header", tag("nav", *places, aria_label="Service"))
    body = tag("body", menu, tag("main", tag("h1", title), *content))
    root = root_of(request.scope)
    text = f"<!doctype html><html lang='en'><head>{render(head, root)}<style>{STYLE}</style></head>{render(body, root)}"
    return HTMLResponse(f"{text}</html>", status_code=status, headers=HEADERS)
