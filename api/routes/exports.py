"""Exports: a plan in the format of another framework or launcher."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Path, Request, Response

from planner.api.dependencies import ResultDependency
from planner.api.errors import NotFoundError
from planner.api.http.caching import NOT_MODIFIED, REVALIDATE, cacheable
from planner.errors import UnknownNameError
from planner.export import TARGETS, Target, find
from planner.spec import Document

router = APIRouter(tags=["exports"])

WARNINGS = "Export-Warnings"
"""Header with the differences between the target and the plan."""
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
                "description": "Differences between the target and the plan: a list of "
                "strings (RFC 9651), one per sentence; with characters outside ASCII, "
                "display strings. Absent if there are none.",
                "schema": {"type": "string"},
            },
        },
    },
    **NOT_MODIFIED,
}


class ExportTarget(Document):
    """A framework or launcher that plans can be exported for."""

    name: str
    """Last segment of the path of the export."""
    title: str
    """Name of the framework or launcher."""
    version: str
    """Version of the framework that the names in the text were checked against."""
    suffix: str
    """Suffix of the file, with its dot."""
    media_type: str
    """Media type of the export."""


class ExportTargets(Document):
    """All targets."""

    exports: tuple[ExportTarget, ...]
    """Every target."""


@router.get("/v1/exports")
def list_exports() -> ExportTargets:
    """List the frameworks and launchers that plans can be exported for."""
    return ExportTargets(exports=tuple(map(_listed, TARGETS.values())))


@router.get(
    "/v1/plans/{plan_id}/exports/{target}", response_class=Response, responses=_DOWNLOAD
)
def get_export(
    target: Annotated[str, Path(description="Name in GET /v1/exports.")],
    request: Request,
    result: ResultDependency,
) -> Response:
    """Return a plan in the format of a target; 422 if the target cannot run the plan."""
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
    """A string of a structured field (RFC 9651, sections 4.1.6 and 4.1.11).

    ``say "no"`` -> ``"say \\"no\\""``; with characters outside ASCII a display string:
    ``größer`` -> ``%"gr%c3%b6%c3%9fer"``.
    """
    if text.isascii() and text.isprintable():
        escaped = text.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    plain = "".join(map(chr, range(0x20, 0x7F))).replace("%", "").replace('"', "")
    return f'%"{_lower_hex(quote(text, safe=plain))}"'


def _lower_hex(quoted: str) -> str:
    """Percent-encoding with lower-case digits, as display strings require."""
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
