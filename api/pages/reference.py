"""The reference of the HTTP API, generated from the OpenAPI document."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from markupsafe import Markup

from planner.api.pages.rendering import page

router = APIRouter()

Described = dict[str, Any]
"""A part of the OpenAPI document."""
BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "more than",
    "maximum": "at most",
    "exclusiveMaximum": "less than",
}


@router.get("/docs")
def show_reference(request: Request) -> HTMLResponse:
    """Every operation and every document."""
    document = request.app.openapi()
    operations = [
        _operation(method.upper(), path, operation)
        for path, item in document["paths"].items()
        for method, operation in item.items()
    ]
    schemas = document["components"]["schemas"]
    documents = [_document(name, schemas[name]) for name in sorted(schemas)]
    return page(request, "docs.html", operations=operations, documents=documents)


def _operation(method: str, path: str, operation: Described) -> Described:
    """What the template shows of an operation."""
    text = operation.get("description", "")
    return {
        "name": operation["operationId"],
        "title": f"{method} {path}",
        "summary": marked(text.partition(". ")[0].rstrip(".")),
        "paragraphs": _paragraphs(text),
        "lines": [*_inputs(operation), *_answers(operation)],
        "examples": list(_examples(operation)),
    }


def _document(name: str, schema: Described) -> Described:
    """What the template shows of a document."""
    required = frozenset(schema.get("required", ()))
    rows = []
    for field, about in schema.get("properties", {}).items():
        need = "required" if field in required else ""
        need = "deprecated" if about.get("deprecated") else need
        description = marked(about.get("description", ""))
        rows.append((_code(field), kind(about), need, description))
    return {
        "name": name,
        "paragraphs": _paragraphs(schema.get("description", "")),
        "rows": rows,
        "kind": kind(schema),
    }


def _inputs(operation: Described) -> Iterator[Markup]:
    """Parameters and body."""
    for parameter in operation.get("parameters", ()):
        schema, name = parameter["schema"], _code(parameter["name"])
        line = Markup("{} in the {}: {}").format(name, parameter["in"], kind(schema))
        default = schema.get("default")
        yield line if default is None else line + f", default {default}"
    for media_type, content in _contents(operation.get("requestBody", {})):
        yield Markup("body {}: {}").format(_code(media_type), kind(content["schema"]))


def _answers(operation: Described) -> Iterator[Markup]:
    for status, answer in sorted(operation["responses"].items()):  # default last
        name = "otherwise" if status == "default" else status
        line = Markup("{}: {}").format(name, answer["description"])
        for media_type, body in _contents(answer):
            shown = kind(body.get("schema", {}))
            line += Markup(" {}: {}").format(_code(media_type), shown)
        yield line


def _examples(operation: Described) -> Iterator[tuple[str, str]]:
    """Summary and text of the examples of the request body."""
    for _, content in _contents(operation.get("requestBody", {})):
        for example in content.get("examples", {}).values():
            yield example.get("summary", ""), json.dumps(example["value"], indent=2)


def _contents(part: Described) -> list[tuple[str, Described]]:
    return list(part.get("content", {}).items())


def _paragraphs(text: str) -> list[Markup]:
    return [marked(part) for part in text.split("\n\n") if part.strip()]


def marked(text: str) -> Markup:
    """Text on one line, with code where it has backticks."""
    parts = re.split("`+", " ".join(text.split()))
    shown = (_code(part) if place % 2 else part for place, part in enumerate(parts))
    return Markup("").join(shown)


def kind(schema: Described) -> Markup:
    """The type of a value in words; other documents are links."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return Markup('<a href="#schema-{}">{}</a>').format(name, name)
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return Markup(", ").join(map(repr, values))
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return Markup(" or ").join(map(kind, schema[key]))
    if schema.get("type") == "array":
        return Markup("list of {}").format(kind(schema.get("items") or {}))
    values = schema.get("additionalProperties")
    if isinstance(values, dict):
        return Markup("object of {}").format(kind(values))
    bounds = [f"{word} {schema[key]}" for key, word in BOUNDS.items() if key in schema]
    return Markup(", ").join([str(schema.get("type", "any")), *bounds])


def _code(text: str) -> Markup:
    return Markup("<code>{}</code>").format(text)
