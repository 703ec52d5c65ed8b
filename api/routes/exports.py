"""Exports: a plan written for other runtimes."""

from __future__ import annotations

from fastapi import APIRouter

import planner.export
from api.dependencies import ResultDependency
from api.errors import NotFoundError
from planner.spec import Document

router = APIRouter(tags=["exports"])


class ExportTargets(Document):
    """What plans can be written for."""

    exports: tuple[str, ...]


@router.get("/v1/exports")
def list_exports() -> ExportTargets:
    """Targets that plans can be exported to."""
    return ExportTargets(exports=_targets())


@router.get("/v1/plans/{plan_id}/exports/{target}")
def get_export(target: str, result: ResultDependency) -> None:
    """The plan, written for a target."""
    result.plan()
    known = ", ".join(_targets()) or "none in this version"
    raise NotFoundError(f"there is no export target {target!r}.", field="target", mend=f"targets: {known}.")


def _targets() -> tuple[str, ...]:
    """Modules of `planner.export`: one file per target."""
    return tuple(sorted(getattr(planner.export, "TARGETS", ())))
