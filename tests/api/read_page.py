"""Reads a page as a browser does, and holds it to what every page must be."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser

import httpx2

WITHOUT_END = {"br", "img", "input", "link", "meta"}


@dataclass
class Found:
    """An element."""

    name: str
    attributes: dict[str, str]
    text: str = ""
    """With that of the elements inside."""


@dataclass
class Page(HTMLParser):
    """All elements of a page, in order; every one that is opened is closed in its place."""

    source: str
    elements: list[Found] = field(default_factory=list)
    _open: list[Found] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.source)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element."""
        found = Found(tag, {name: value or "" for name, value in attrs})
        self.elements.append(found)
        if tag not in WITHOUT_END:
            self._open.append(found)

    def handle_endtag(self, tag: str) -> None:
        """Only the innermost element may end."""
        assert self._open.pop().name == tag

    def handle_data(self, data: str) -> None:
        """Text belongs to all elements around it."""
        for found in self._open:
            found.text += data

    def all(self, name: str) -> list[Found]:
        """Elements of this name."""
        return [found for found in self.elements if found.name == name]

    def links(self) -> list[str]:
        """Addresses that the page leads to."""
        return [found.attributes["href"] for found in self.all("a")]

    def table(self, caption: str) -> str:
        """Text of the table whose caption has these words."""
        (text,) = [found.text for found in self.all("table") if caption in found.text]
        return text


def read_page(answer: httpx2.Response, status: int = 200) -> Page:
    """The page of an answer, after checking what holds for all: no script in the page, nothing from elsewhere, one
    first heading, headers in tables, texts for pictures, a label for every input."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    page = Page(answer.text)
    assert all(found.text == "" for found in page.all("script"))
    assert page.all("style") == []
    names = {name for found in page.elements for name in found.attributes}
    assert not any(name == "style" or name.startswith("on") for name in names)
    addresses = [
        value
        for found in page.elements
        for name, value in found.attributes.items()
        if name in ("href", "src")
    ]
    assert all(address.startswith(("/", "data:")) for address in addresses)
    assert len(page.all("h1")) == len(page.all("main")) == 1
    assert all(found.attributes.get("alt") for found in page.all("img"))
    pictures = [
        found for found in page.all("svg") if found.attributes.get("role") == "img"
    ]
    hidden = [found for found in page.all("svg") if "aria-hidden" in found.attributes]
    assert len(pictures) + len(hidden) == len(page.all("svg"))
    assert all(found.text.strip() for found in pictures)
    assert all(found.attributes.get("scope") for found in page.all("th"))
    labelled = {found.attributes["for"] for found in page.all("label")}
    controls = ("input", "select", "textarea", "progress")
    inputs = [found for name in controls for found in page.all(name)]
    assert {found.attributes["id"] for found in inputs} == labelled
    ids = [
        found.attributes["id"] for found in page.elements if "id" in found.attributes
    ]
    assert len(set(ids)) == len(ids)
    return page
