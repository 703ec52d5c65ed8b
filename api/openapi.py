"""The OpenAPI document: FastAPI's, with problem documents, API keys and examples."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from planner.api.examples import add_examples
from planner.spec.answers import ProblemDocument


def complete(app: FastAPI) -> None:
    """Let the OpenAPI document of a service say what FastAPI does not know."""
    describe = app.openapi

    def openapi() -> dict[str, Any]:
        document = describe()
        _keep_to_version(document)
        add_examples(document)
        components = document["components"]
        schema = ProblemDocument.model_json_schema(
            ref_template="#/components/schemas/{model}"
        )
        components["schemas"] |= schema.pop("$defs", {})
        components["schemas"]["ProblemDocument"] = schema
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}, {}]  # a service may have no keys
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _keep_to_version(document: dict[str, Any]) -> None:
    """Remove the keyword of OpenAPI 3.2 that FastAPI writes for event streams.

    The document declares 3.1, which is the newest version that generators of clients read.
    """
    for item in document["paths"].values():
        for operation in item.values():
            for response in operation["responses"].values():
                for content in response.get("content", {}).values():
                    content.pop("itemSchema", None)
