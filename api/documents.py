"""Documents that clients send and receive over HTTP, besides those of `planner.spec`."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any, Literal, Self

from pydantic import (
    ConfigDict,
    Field,
    JsonValue,
    RootModel,
    field_validator,
    model_validator,
)

from planner.api.limits import LONGEST_NAME
from planner.spec import (
    CalibrationTable,
    Cluster,
    Document,
    Forecast,
    Infeasible,
    Job,
    ModelProfile,
    Options,
    Plan,
    PredictionLayout,
    ShortForm,
    parse,
)
from planner.spec.answers import MeasurementView
from planner.spec.constraint_words import full_name
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


class CatalogueProfile(Document):
    """Request for the counted profile of a catalogue model."""

    model: str = Field(min_length=1)
    """Name in GET /v1/models."""
    sequence_length: int = Field(default=0, ge=0)
    """Tokens per sample; 0 for models without a sequence."""
    dtype: DataType = "bf16"
    """Data type of activations and matrix products."""


class ProfileCreate(RootModel[ModelProfile | CatalogueProfile]):
    """A profile document, or the name of a catalogue model to derive one from."""

    @staticmethod
    def kind_of(data: Any) -> type[Document]:
        """Which of the two a body is: only a profile has layers."""
        names_model_only = (
            isinstance(data, dict) and "layers" not in data and "device" not in data
        )
        return CatalogueProfile if names_model_only else ModelProfile


class CalibrationFit(Document):
    """Request for a fit to the measured runs of this service."""

    name: str = Field(min_length=1, max_length=LONGEST_NAME)
    """Name of the calibration."""


class CalibrationCreate(RootModel[CalibrationTable | CalibrationFit]):
    """A calibration, as `planner calibrate` writes it, or the name of one to fit."""

    @staticmethod
    def kind_of(data: Any) -> type[Document]:
        """Which of the two a body is: only a calibration has constants."""
        names_it_only = (
            isinstance(data, dict)
            and "constants" not in data
            and "intervals" not in data
        )
        return CalibrationFit if names_it_only else CalibrationTable


class _ShortRequest(ShortForm):
    """The fields that every request in the short form has."""

    calibration_id: str | None = None
    """Id of a stored calibration (POST /v1/calibrations); null: that of the service's
    release."""

    @field_validator("fix")
    @classmethod
    def _fixes_each_field_once(cls, fix: dict[str, JsonValue]) -> dict[str, JsonValue]:
        _check_names_once(fix)
        return fix


class ShortPlanCreate(_ShortRequest):
    """Request for the best plan, in the short form."""

    options: Options = Options()
    """Number of alternatives, time limit and what else to search."""

    def long_form(self) -> LongPlanCreate:
        """The same request with its documents.

        Raises:
            SpecError: the devices, the runtime or a constraint is wrong.
        """
        return LongPlanCreate(
            model=self.model,
            cluster=self.cluster(),
            job=self.job(),
            calibration_id=self.calibration_id,
            options=self.options,
        )


class ShortPredictionCreate(_ShortRequest):
    """Request for step time and memory of one layout, in the short form."""

    layout: dict[str, JsonValue]
    """Fields of `PredictionLayout`; tp, pp, dp, cp, ep, vpp, mbs, zero and sp for short."""

    @field_validator("layout")
    @classmethod
    def _has_each_field_once(cls, layout: dict[str, JsonValue]) -> dict[str, JsonValue]:
        _check_names_once(layout)
        return layout

    def long_form(self) -> LongPredictionCreate:
        """The same request with its documents.

        Raises:
            SpecError: the devices, the runtime, a constraint or the layout is wrong.
        """
        return LongPredictionCreate(
            model=self.model,
            cluster=self.cluster(),
            job=self.job(),
            calibration_id=self.calibration_id,
            layout=layout_of(self.layout),
        )


def layout_of(fields: Mapping[str, Any]) -> PredictionLayout:
    """The layout with these fields, by long or short name.

    Raises:
        DocumentError: one problem per unknown field or wrong value.
    """
    named = {full_name(name): value for name, value in fields.items()}
    return parse(PredictionLayout, named)


def _check_names_once(fields: Mapping[str, Any]) -> None:
    """Raise `ValueError` if a field is present by its long and its short name."""
    for name in fields:
        long_name = full_name(name)
        if name != long_name and long_name in fields:
            raise ValueError(f"{name} and {long_name} are the same field; send one")


SOURCES: dict[str, str] = {
    "profile": "object",
    "profile_id": "string",
    "model": "string",
}
"""Fields that a request can name its profile by, with their type in JSON."""


CALIBRATIONS: dict[str, str] = {"calibration": "object", "calibration_id": "string"}
"""Fields that a request can state its calibration by, with their type in JSON."""


def _rules_of_sources() -> dict[str, JsonValue]:
    """The JSON Schema of the rule that a request has one of `SOURCES`, not null, and at
    most one of `CALIBRATIONS`.

    It is no ``oneOf``, which generators of clients take for a union of documents.
    """
    no_source: dict[str, JsonValue] = {name: {"type": "null"} for name in SOURCES}
    wrong: list[JsonValue] = [{"properties": no_source}]
    types_of = SOURCES | CALIBRATIONS
    for pair in (*combinations(SOURCES, 2), tuple(CALIBRATIONS)):
        types: dict[str, JsonValue] = {name: {"type": types_of[name]} for name in pair}
        wrong.append({"required": list(pair), "properties": types})
    return {"not": {"anyOf": wrong}}


class _LongRequest(Document):
    """The fields that every request in the long form has.

    Exactly one of `profile`, `profile_id` and `model` is the source of the profile.
    """

    model_config = ConfigDict(json_schema_extra=_rules_of_sources())

    profile: ModelProfile | None = None
    """Profile of the model, as `planner profile` writes it."""
    profile_id: str | None = None
    """Id of a stored profile (POST /v1/profiles)."""
    model: str | None = None
    """Catalogue name (GET /v1/models); its profile is counted, not measured."""
    cluster: Cluster
    """The devices that the plan may use."""
    job: Job
    """What is trained."""
    calibration: CalibrationTable | None = None
    """Constants of the cost model, as `planner calibrate` writes them; null: those of
    `calibration_id`, or of the service's release."""
    calibration_id: str | None = None
    """Id of a stored calibration (POST /v1/calibrations), instead of `calibration`."""

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        sources = {
            "profile": self.profile,
            "profile_id": self.profile_id,
            "model": self.model,
        }
        sent = [name for name, value in sources.items() if value is not None]
        if len(sent) != 1:
            found = " and ".join(sent) if sent else "none of them"
            raise ValueError(
                f"the request has {found}; "
                "send exactly one of profile, profile_id and model"
            )
        return self

    @model_validator(mode="after")
    def _has_one_calibration(self) -> Self:
        if self.calibration is not None and self.calibration_id is not None:
            raise ValueError(
                "the request has calibration and calibration_id; send one of them"
            )
        return self


class LongPlanCreate(_LongRequest):
    """Request for the best plan, with documents for profile, cluster and job."""

    options: Options = Options()
    """Number of alternatives, time limit and what else to search."""


class LongPredictionCreate(_LongRequest):
    """Request for step time and memory of one layout, with documents."""

    layout: PredictionLayout
    """Degrees and choices; `layers_per_stage` fixes the stage map too."""


class PlanCreate(RootModel[ShortPlanCreate | LongPlanCreate]):
    """Request for the best plan: model, devices and batch, or documents of your own."""

    @staticmethod
    def kind_of(data: Any) -> type[ShortPlanCreate] | type[LongPlanCreate]:
        """The form of a request body."""
        return ShortPlanCreate if is_short_form(data) else LongPlanCreate

    def long_form(self) -> LongPlanCreate:
        """The request with its documents.

        Raises:
            SpecError: a field of the short form is wrong.
        """
        if isinstance(self.root, LongPlanCreate):
            return self.root
        return self.root.long_form()


class PredictionCreate(RootModel[ShortPredictionCreate | LongPredictionCreate]):
    """Request for step time and memory of one layout, in the short or the long form."""

    @staticmethod
    def kind_of(
        data: Any,
    ) -> type[ShortPredictionCreate] | type[LongPredictionCreate]:
        """The form of a request body."""
        return ShortPredictionCreate if is_short_form(data) else LongPredictionCreate

    def long_form(self) -> LongPredictionCreate:
        """The request with its documents.

        Raises:
            SpecError: a field of the short form is wrong.
        """
        if isinstance(self.root, LongPredictionCreate):
            return self.root
        return self.root.long_form()


LONG_FIELDS = frozenset({"profile", "profile_id", "cluster", "job", "calibration"})
"""Fields of the long form only."""
SHORT_FIELDS = frozenset(ShortForm.model_fields) - {"model"}
"""Fields of the short form only."""


def is_short_form(data: Any) -> bool:
    """Whether a request body is meant as the short form: it has none of the documents."""
    return not isinstance(data, dict) or LONG_FIELDS.isdisjoint(data)


class PageQuery(Document):
    """Parameters of a list that is read in pages."""

    cursor: str | None = None
    """`next` of the previous page; none: the first page."""
    limit: int = Field(default=50, ge=1, le=200)
    """Entries per page."""


class StageMap(Document):
    """The layers of every rank: the part of a plan that the executor applies."""

    plan_id: str
    """Id of the plan."""
    runtime: str
    """Framework that the plan is for."""
    layout: Layout
    """Degrees and choices of the plan."""
    micro_batches: int
    """Micro-batches per data-parallel rank and step."""
    stages: tuple[Stage, ...]
    """Layers and ranks of every pipeline stage."""
    placement: tuple[RankPlacement, ...]
    """Device and coordinates of every global rank."""


class Explanation(Document):
    """Why this plan is the best, and what the alternatives cost."""

    plan_id: str
    """Id of the plan."""
    runtime: str
    """Framework that the prices are for."""
    explanation: tuple[str, ...]
    """Reasons for the plan, as sentences."""
    search: SearchReport
    """Report of the search and its proof."""
    alternatives: tuple[Alternative, ...]
    """Plans with other layouts, and what each costs."""
    cost_per_token: float | None = None
    """Price of a token in the user's currency; None: the cluster has no prices."""
    pareto: tuple[ParetoPoint, ...] = ()
    """Fastest plans for fewer devices or less memory."""
    relaxations: tuple[Relaxation, ...] = ()
    """Gains from changing one limit or constraint."""
    sensitivity: tuple[Sensitivity, ...] = ()
    """Effect of errors in measured quantities on the choice."""


class MeasurementList(Document):
    """Measured runs of a plan, newest first."""

    measurements: tuple[MeasurementView, ...]
    """Every measured run."""


class Health(Document):
    """The service is alive."""

    status: Literal["ok"] = "ok"
    """Always ``ok``."""
    version: str
    """Version of the service."""


class Readiness(Document):
    """The service accepts requests for plans."""

    status: Literal["ready"] = "ready"
    """Always ``ready``; else the answer is a problem document."""
    queue_length: int
    """Jobs that wait."""
    running: int
    """Jobs that are being solved."""


Answer = Plan | Infeasible | Forecast | CalibrationTable
"""What a solver process returns."""
