"""Exports over HTTP: listed, downloaded, kept by clients, and refused in a way that teaches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from planner.api.app import create_app
from planner.api.documents import Answer
from planner.api.routes.exports import structured
from planner.api.settings import Settings
from planner.api.solving.solver import Task
from planner.export import TARGETS, find
from planner.spec import Plan
from tests.api.documents import plan_body
from tests.api.fakes import Instant
from tests.api.live import running

TARGET = find("torch-pipelining")


@dataclass(frozen=True)
class Chunked(Instant):
    """Answers with a plan of sequence chunks, which torch's runtime does not know."""

    def __call__(self, task: Task, report: Callable[[Any], None]) -> Answer:
        """The plan on one rank, in chunks."""
        plan = super().__call__(task, report)
        assert isinstance(plan, Plan)
        return plan.model_copy(
            update={"layout": plan.layout.model_copy(update={"sequence_chunks": 2})}
        )


def test_a_plan_is_downloaded(settings: Settings, journal: Path) -> None:
    """The list leads to a file with the target's text, name, type and warnings, which a client need not fetch twice."""
    with running(settings, Instant(journal)) as live:
        plan = Plan.model_validate(live.plan(plan_body()).json())
        listed = {
            each["name"]: each for each in live.get("/v1/exports").json()["exports"]
        }
        assert listed.keys() == TARGETS.keys()
        assert listed[TARGET.name] == {
            "name": "torch-pipelining",
            "title": TARGET.title,
            "version": TARGET.version,
            "suffix": ".csv",
            "media_type": "text/csv",
        }
        url = f"/v1/plans/{plan.id}/exports/{TARGET.name}"
        answer = live.get(url)
        export = TARGET.write(plan)
        assert (answer.status_code, answer.text) == (200, export.text)
        assert answer.headers["content-type"].startswith("text/csv")
        assert (
            answer.headers["content-disposition"]
            == f'attachment; filename="{TARGET.file_name(plan)}"'
        )
        assert answer.headers["export-warnings"] == ", ".join(
            map(structured, export.warnings)
        )
        assert (
            live.get(url, **{"If-None-Match": answer.headers["etag"]}).status_code
            == 304
        )


def test_what_cannot_be_written_is_refused(settings: Settings, journal: Path) -> None:
    """An unknown target is 404 with the names that are near; a plan that it cannot run is 422, with field and hint."""
    with running(settings, Chunked(journal)) as live:
        plan_id = live.plan(plan_body()).json()["id"]
        unknown = live.get(f"/v1/plans/{plan_id}/exports/torch-pipelines")
        assert (unknown.status_code, unknown.json()["code"]) == (404, "not-found")
        assert unknown.json()["errors"][0]["field"] == "target"
        assert "did you mean 'torch-pipelining'" in unknown.json()["errors"][0]["hint"]
        refused = live.get(f"/v1/plans/{plan_id}/exports/{TARGET.name}")
        assert (refused.status_code, refused.json()["code"]) == (422, "unsupported")
        assert refused.json()["errors"][0]["field"] == "layout.sequence_chunks"
        assert "--fix sequence_chunks=1" in refused.json()["errors"][0]["hint"]
        assert (
            live.get(f"/v1/plans/none/exports/{TARGET.name}").json()["errors"][0][
                "field"
            ]
            == "plan_id"
        )


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("It runs 1F1B.", '"It runs 1F1B."'),
        ('a "b" \\ c', '"a \\"b\\" \\\\ c"'),
        ("größer, 50 %", '%"gr%c3%b6%c3%9fer, 50 %25"'),
        ('say "ä"\n', '%"say %22%c3%a4%22%0a"'),
    ],
)
def test_warnings_are_strings_of_a_structured_field(text: str, field: str) -> None:
    """Whatever a warning says, the header is ASCII on one line, as RFC 9651 writes it."""
    assert structured(text) == field


def test_the_download_is_described() -> None:
    """The OpenAPI document names the operations, every media type, and the headers."""
    paths = create_app().openapi()["paths"]
    assert paths["/v1/exports"]["get"]["operationId"] == "list_exports"
    download = paths["/v1/plans/{plan_id}/exports/{target}"]["get"]
    assert download["operationId"] == "get_export"
    answer = download["responses"]["200"]
    assert answer["content"].keys() == {
        target.media_type for target in TARGETS.values()
    }
    assert {"Content-Disposition", "ETag", "Export-Warnings"} <= answer[
        "headers"
    ].keys()
