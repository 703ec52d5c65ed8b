"""The page of the HTTP interface, made from the service's own OpenAPI document: nothing of other sites, no script."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from planner.api.pages.html import (
    Element,
    Node,
    bullets,
    link,
    page,
    section,
    table,
    tag,
)

router = APIRouter()

Described = dict[str, Any]
"""A part of the OpenAPI document."""


@router.get("/docs")
def show_reference(request: Request) -> HTMLResponse:
    """Every operation, and every document that it takes or gives."""
    document = request.app.openapi()
    operations = [
        (method.upper(), path, operation)
        for path, item in document["paths"].items()
        for method, operation in item.items()
    ]
    schemas = document["components"]["schemas"]
    overview = [
        (
            link(f"#{operation['operationId']}", tag("code", f"{method} {path}")),
            _first_sentence(operation),
        )
        for method, path, operation in operations
    ]
    return page(
        request,
        "HTTP",
        tag(
            "p",
            "For programs: ",
            link("/openapi.json", "OpenAPI"),
            ", of which client libraries can be generated.",
        ),
        table("Requests", ("Request", "What"), overview),
        section("Requests", *(_operation(*each) for each in operations)),
        section(
            "Documents",
            *(_schema(name, schema) for name, schema in sorted(schemas.items())),
        ),
    )


def _operation(method: str, path: str, operation: Described) -> Element:
    return tag(
        "article",
        tag("h3", tag("code", f"{method} {path}")),
        *_paragraphs(operation.get("description", "")),
        bullets([*_parameters(operation), *_body(operation), *_answers(operation)]),
        id=operation["operationId"],
    )


def _parameters(operation: Described) -> Iterator[Node]:
    for parameter in operation.get("parameters", ()):
        schema = parameter["schema"]
        default = (
            f", default {schema['default']}"
            if schema.get("default") is not None
            else ""
        )
        words = f" in the {parameter['in']}: "
        yield tag("code", parameter["name"]), words, _kind(schema), default


def _body(operation: Described) -> Iterator[Node]:
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        yield "body ", tag("code", kind), ": ", _kind(content["schema"])


def _answers(operation: Described) -> Iterator[Node]:
    for status, answer in sorted(operation["responses"].items()):  # default last
        kinds = [
            (" ", tag("code", kind), ": ", _kind(body.get("schema", {})))
            for kind, body in _contents(answer)
        ]
        yield (
            "else" if status == "default" else status,
            ": ",
            answer["description"],
            *kinds,
        )


def _contents(answer: Described) -> list[tuple[str, Described]]:
    return list(answer.get("content", {}).items())


def _schema(name: str, schema: Described) -> Element:
    needed = frozenset(schema.get("required", ()))
    rows = [
        (tag("code", field), _kind(about), "yes" if field in needed else "")
        for field, about in schema.get("properties", {}).items()
    ]
    told: Node = (
        table(f"Fields of {name}", ("Field", "Type", "Needed"), rows)
        if rows
        else _kind(schema)
    )
    return tag(
        "article",
        tag("h3", name),
        *_paragraphs(schema.get("description", "")),
        told,
        id=f"schema-{name}",
    )


def _first_sentence(operation: Described) -> Node:
    return _marked(operation.get("description", "").partition(". ")[0].rstrip("."))


def _marked(text: str) -> Node:
    """What stands in backticks is code; as one line."""
    parts = re.split("`+", " ".join(text.split()))
    return [
        tag("code", part) if index % 2 else part for index, part in enumerate(parts)
    ]


def _paragraphs(text: str) -> list[Element]:
    return [tag("p", _marked(part)) for part in text.split("\n\n") if part.strip()]


def _kind(schema: Described) -> Node:
    """What a value may be, in words; other documents are links."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return link(f"#schema-{name}", name)
    if "const" in schema or "enum" in schema:
        return ", ".join(map(repr, schema.get("enum", [schema.get("const")])))
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return _joined([_kind(each) for each in schema[key]], " or ")
    if schema.get("type") == "array":
        items = schema.get("items") or {}
        return "list of ", _kind(items)
    values = schema.get("additionalProperties")
    if isinstance(values, dict):
        return "object of ", _kind(values)
    return f"{schema.get('type', 'any')}{_bounds(schema)}"


def _bounds(schema: Described) -> str:
    words = {
        "minimum": "at least",
        "exclusiveMinimum": "more than",
        "maximum": "at most",
        "exclusiveMaximum": "less than",
    }
    told = [f"{word} {schema[key]}" for key, word in words.items() if key in schema]
    return f", {', '.join(told)}" if told else ""


def _joined(nodes: list[Node], between: str) -> Node:
    return [
        part
        for index, node in enumerate(nodes)
        for part in ((between, node) if index else (node,))
    ]
