"""The reference of the HTTP API, generated from the OpenAPI document, without scripts."""

from __future__ import annotations

import json
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
    """Every operation and every document."""
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
        "HTTP API",
        tag(
            "p",
            link("/openapi.json", "OpenAPI document"),
            ", for example to generate a client library.",
        ),
        table("Requests", ("Request", "Description"), overview),
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
        *_examples(operation),
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
        place = f" in the {parameter['in']}: "
        yield tag("code", parameter["name"]), place, _kind(schema), default


def _body(operation: Described) -> Iterator[Node]:
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        yield "body ", tag("code", kind), ": ", _kind(content["schema"])


def _examples(operation: Described) -> Iterator[Element]:
    """The examples of the request body."""
    for content in operation.get("requestBody", {}).get("content", {}).values():
        for example in content.get("examples", {}).values():
            yield tag("p", example["summary"], ":")
            yield tag("pre", json.dumps(example["value"], indent=2))


def _answers(operation: Described) -> Iterator[Node]:
    for status, answer in sorted(operation["responses"].items()):  # default last
        kinds = [
            (" ", tag("code", kind), ": ", _kind(body.get("schema", {})))
            for kind, body in _contents(answer)
        ]
        yield (
            "otherwise" if status == "default" else status,
            ": ",
            answer["description"],
            *kinds,
        )


def _contents(answer: Described) -> list[tuple[str, Described]]:
    return list(answer.get("content", {}).items())


def _schema(name: str, schema: Described) -> Element:
    required = frozenset(schema.get("required", ()))
    rows = [
        (
            tag("code", field),
            _kind(about),
            _need(field in required, about),
            _marked(about.get("description", "")),
        )
        for field, about in schema.get("properties", {}).items()
    ]
    head = ("Field", "Type", "", "Description")
    content = table(f"Fields of {name}", head, rows) if rows else _kind(schema)
    return tag(
        "article",
        tag("h3", name),
        *_paragraphs(schema.get("description", "")),
        content,
        id=f"schema-{name}",
    )


def _need(is_required: bool, about: Described) -> str:
    if about.get("deprecated"):
        return "deprecated"
    return "required" if is_required else ""


def _first_sentence(operation: Described) -> Node:
    return _marked(operation.get("description", "").partition(". ")[0].rstrip("."))


def _marked(text: str) -> Node:
    """Text on one line, with code where it has backticks."""
    parts = re.split("`+", " ".join(text.split()))
    return [
        tag("code", part) if index % 2 else part for index, part in enumerate(parts)
    ]


def _paragraphs(text: str) -> list[Element]:
    return [tag("p", _marked(part)) for part in text.split("\n\n") if part.strip()]


def _kind(schema: Described) -> Node:
    """The type of a value in words; other documents are links."""
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
    names = {
        "minimum": "at least",
        "exclusiveMinimum": "more than",
        "maximum": "at most",
        "exclusiveMaximum": "less than",
    }
    bounds = [f"{name} {schema[key]}" for key, name in names.items() if key in schema]
    return f", {', '.join(bounds)}" if bounds else ""


def _joined(nodes: list[Node], between: str) -> Node:
    return [
        part
        for index, node in enumerate(nodes)
        for part in ((between, node) if index else (node,))
    ]
