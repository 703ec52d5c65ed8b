"""What clients send and receive over HTTP, besides the documents of `planner.spec`."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, RootModel, model_validator

from planner.spec import (
    Cluster,
    Document,
    Forecast,
    Infeasible,
    Job,
    ModelProfile,
    Options,
    Plan,
    PredictionLayout,
)
from planner.spec.layout import Layout
from planner.spec.plan import (
    Alternative,
    ParetoPoint,
    RankPlacement,
    Relaxation,
    SearchReport,
    Sensitivity,
    Stage,
)
from planner.spec.profile import DataType

JobStatus = Literal[
    "queued", "running", "succeeded", "infeasible", "failed", "cancelled"
]
FINISHED: frozenset[JobStatus] = frozenset(
    {"succeeded", "infeasible", "failed", "cancelled"}
)


class ErrorItem(Document):
    """One thing wrong with the request."""

    field: str
    """Path of the field, header or parameter; empty when the whole request is meant."""
    pointer: str | None = None
    """JSON pointer (RFC 6901) into the request body, where the mistake stands in it."""
    message: str
    hint: str = ""
    """What to send instead."""


class ProblemDocument(Document):
    """An error as RFC 9457 has it (application/problem+json)."""

    type: str
    """Stable: ``/problems/<code>``, a page of this service."""
    title: str
    status: int
    detail: str
    code: str
    errors: tuple[ErrorItem, ...] = ()
    limits: dict[str, float] | None = None
    """The limits that were passed."""
    request_id: str | None = None
    """Stands in the service's log too."""


class CatalogueProfile(Document):
    """Asks for the counted profile of a catalogue model."""

    model: str = Field(min_length=1)
    """Name in GET /v1/models."""
    sequence_length: int = Field(default=0, ge=0)
    """Tokens per sample; 0 for models without a sequence."""
    dtype: DataType = "bf16"


class ProfileCreate(RootModel[ModelProfile | CatalogueProfile]):
    """A profile document, or the name of a catalogue model to derive one from."""

    @staticmethod
    def kind_of(data: Any) -> type[Document]:
        """Which of the two was meant: only a profile has layers."""
        names_model_only = (
            isinstance(data, dict) and "layers" not in data and "device" not in data
        )
        return CatalogueProfile if names_model_only else ModelProfile


class ProfileSummary(Document):
    """A stored profile."""

    id: str
    """sha256 of the profile's canonical JSON."""
    model: str
    device: str
    dtype: DataType
    layers: int
    parameters: int
    """Elements, shared parameters counted once."""
    url: str


class _FromProfile(Document):
    """A request about one model: exactly one of `profile`, `profile_id` and `model`."""

    profile: ModelProfile | None = None
    profile_id: str | None = None
    """Of a stored profile (POST /v1/profiles)."""
    model: str | None = None
    """Name in GET /v1/models: planned from counted figures."""
    cluster: Cluster
    job: Job

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        given = [
            name
            for name in ("profile", "profile_id", "model")
            if getattr(self, name) is not None
        ]
        if len(given) != 1:
            said = " and ".join(given) if given else "none of them"
            raise ValueError(
                f"give exactly one of profile, profile_id and model; the request has {said}"
            )
        return self


class PlanCreate(_FromProfile):
    """Asks for the best plan."""

    options: Options = Options()


class PredictionCreate(_FromProfile):
    """Asks for time and memory of one given layout."""

    layout: PredictionLayout


class JobProgress(Document):
    """How far a solve is."""

    layouts_considered: int
    layouts_done: int
    elapsed_seconds: float


class JobView(Document):
    """A solve, from the moment it was asked for."""

    id: str
    status: JobStatus
    plan_id: str
    """Known from the start: the sha256 of the canonical request."""
    plan_url: str | None = None
    """Once succeeded or infeasible."""
    events_url: str
    progress: JobProgress | None = None
    incumbent: float | None = None
    """Step seconds of the best plan so far."""
    bound: float | None = None
    """No plan has fewer step seconds."""
    gap: float | None = None
    """(incumbent - bound) / incumbent."""
    problem: ProblemDocument | None = None
    """Why it failed."""
    created_at: str
    """RFC 3339, UTC."""
    started_at: str | None = None
    finished_at: str | None = None


class PlanSummary(Document):
    """A row of the list of plans."""

    id: str
    status: Literal["succeeded", "infeasible"]
    model: str
    devices: int
    step_seconds: float | None
    """None: no plan fits."""
    created_at: str
    url: str


class PlanQuery(Document):
    """Which page of the list of plans."""

    cursor: str | None = None
    """`next` of the page before; none: the first page."""
    limit: int = Field(default=50, ge=1, le=200)
    """Plans of a page."""


class PlanPage(Document):
    """A page of the list, newest first."""

    plans: tuple[PlanSummary, ...]
    next: str | None = None
    """Cursor of the next page; None on the last one."""


class StageMap(Document):
    """The part of a plan that the executor applies."""

    plan_id: str
    layout: Layout
    micro_batches: int
    stages: tuple[Stage, ...]
    placement: tuple[RankPlacement, ...]


class Explanation(Document):
    """Why this plan won, and what the next best ones cost."""

    plan_id: str
    explanation: tuple[str, ...]
    search: SearchReport
    alternatives: tuple[Alternative, ...]
    cost_per_token: float | None = None
    pareto: tuple[ParetoPoint, ...] = ()
    relaxations: tuple[Relaxation, ...] = ()
    sensitivity: tuple[Sensitivity, ...] = ()


class MeasurementView(Document):
    """A stored measured run."""

    id: int
    plan_id: str
    created_at: str
    median_step_seconds: float
    predicted_step_seconds: float
    error: float
    """measured / predicted - 1."""
    url: str


class MeasurementList(Document):
    """Measured runs of a plan, newest first."""

    measurements: tuple[MeasurementView, ...]


class Health(Document):
    """The process answers."""

    status: Literal["ok"] = "ok"
    version: str


class Readiness(Document):
    """The service can take work."""

    status: Literal["ready"] = "ready"
    queue_length: int
    running: int


Answer = Plan | Infeasible | Forecast
"""What a solver process returns."""
