"""Exports: a plan written for another runtime or launcher."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, Request, Response

from planner.api.caching import NOT_MODIFIED, REVALIDATE, cacheable
from planner.api.dependencies import ResultDependency
from planner.api.errors import NotFoundError
from planner.errors import UnknownNameError
from planner.export import TARGETS, Target, find
from planner.spec import Document

router = APIRouter(tags=["exports"])

WARNINGS = "Export-Warnings"
"""Header with what the target does otherwise than the plan says."""
_DOWNLOAD: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The plan in the target's own format.",
        "content": {
            target.media_type: {"schema": {"type": "string"}}
            for target in TARGETS.values()
        },
        "headers": {
            "Content-Disposition": {
                "description": "attachment, with a file name that begins with the plan's id.",
                "schema": {"type": "string"},
            },
            "ETag": {
                "description": "sha256 of the text.",
                "schema": {"type": "string"},
            },
            WARNINGS: {
                "description": "What the target does otherwise than the plan says: a list (RFC 9651) of strings, one "
                "per sentence; a sentence with other characters than ASCII is a display string. Absent: nothing.",
                "schema": {"type": "string"},
            },
        },
    },
    **NOT_MODIFIED,
}


class ExportTarget(Document):
    """What plans can be written for."""

    name: str
    """Last segment of the export's path."""
    title: str
    version: str
    """Of the runtime, against whose source or documentation the names in the text were checked."""
    suffix: str
    """Of the file, with its dot."""
    media_type: str


class ExportTargets(Document):
    """All targets."""

    exports: tuple[ExportTarget, ...]


@router.get("/v1/exports")
def list_exports() -> ExportTargets:
    """Runtimes and launchers that plans can be written for."""
    return ExportTargets(exports=tuple(map(_listed, TARGETS.values())))


@router.get(
    "/v1/plans/{plan_id}/exports/{target}", response_class=Response, responses=_DOWNLOAD
)
def get_export(target: str, request: Request, result: ResultDependency) -> Response:
    """The plan, written for a target, as a file to store; 422 where the target cannot do what the plan says."""
    known = _target(target)
    plan = result.plan()
    export = known.write(plan)
    response = cacheable(
        request, export.text, media_type=known.media_type, cache_control=REVALIDATE
    )
    response.headers["Content-Disposition"] = (
        f'attachment; filename="{known.file_name(plan)}"'
    )
    if export.warnings:
        response.headers[WARNINGS] = ", ".join(map(structured, export.warnings))
    return response


def structured(text: str) -> str:
    """``say "no"`` -> ``"say \\"no\\""``, a string of a structured field; other characters than ASCII make it a display
    string: ``größer`` -> ``%"gr%c3%b6%c3%9fer"`` (RFC 9651, sections 4.1.6 and 4.1.11)."""
    if text.isascii() and text.isprintable():
        escaped = text.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    plain = "".join(map(chr, range(0x20, 0x7F))).replace("%", "").replace('"', "")
    return f'%"{_lower_hex(quote(text, safe=plain))}"'


def _lower_hex(quoted: str) -> str:
    """Percent signs with lower-case digits, which are the only ones that display strings know."""
    head, *parts = quoted.split("%")
    return head + "".join(f"%{part[:2].lower()}{part[2:]}" for part in parts)


def _listed(target: Target) -> ExportTarget:
    return ExportTarget(
        name=target.name,
        title=target.title,
        version=target.version,
        suffix=target.suffix,
        media_type=target.media_type,
    )


def _target(name: str) -> Target:
    try:
        return find(name)
    except UnknownNameError as error:
        (problem,) = error.problems
        raise NotFoundError(
            problem.message, field=problem.field, hint=problem.hint
        ) from None
