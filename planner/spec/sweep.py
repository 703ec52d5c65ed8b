"""A sweep: the plans of every model on every cluster with every batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue

from planner.errors import DocumentError
from planner.spec.cluster import Cluster
from planner.spec.document import Document
from planner.spec.job import MOST_SAMPLES, Job, OptimizerName, Precision
from planner.spec.plan import Options
from planner.spec.short_form import cluster_of, job_of

MOST_ROWS = 64
"""Rows of one sweep."""
Batch = Annotated[int, Field(ge=1, le=MOST_SAMPLES)]
RowStatus = Literal[
    "waiting", "queued", "running", "succeeded", "infeasible", "failed", "cancelled"
]


class Sweep(Document):
    """Request for the plans of models x clusters x batches, at most 64 in all."""

    models: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        min_length=1, max_length=MOST_ROWS
    )
    """Catalogue names (GET /v1/models)."""
    clusters: tuple[str | Cluster, ...] = Field(min_length=1, max_length=MOST_ROWS)
    """``COUNTxDEVICE``, several kinds separated by commas, or cluster documents."""
    batches: tuple[Batch, ...] = Field(min_length=1, max_length=MOST_ROWS)
    """Samples per optimizer step, over all devices."""
    sequence: int = Field(default=0, ge=0)
    """Tokens per sample; 0 for models without a sequence."""
    precision: Precision = "bf16-mixed"
    """Number formats of parameters, gradients and optimizer states."""
    optimizer: OptimizerName = "adamw"
    """Optimizer, which decides the bytes per parameter."""
    runtime: str = "planner"
    """Framework that will run the plans."""
    fix: dict[str, JsonValue] = Field(default_factory=dict)
    """Layout fields fixed, bounded or listed; tp, pp, dp, cp, ep and mbs for short."""
    options: Options = Options(top=0)
    """Options of every search."""

    def points(self) -> Iterator[SweepPoint]:
        """Yield the points of the sweep: batches of clusters of models.

        Raises:
            SpecError: too many points, or a field is wrong.
        """
        count = len(self.models) * len(self.clusters) * len(self.batches)
        if count > MOST_ROWS:
            raise DocumentError(
                f"{len(self.models)} models x {len(self.clusters)} clusters x "
                f"{len(self.batches)} batches are {count} plans.",
                field="models",
                hint=f"ask for at most {MOST_ROWS} plans.",
            )
        clusters = [
            _cluster(index, cluster) for index, cluster in enumerate(self.clusters)
        ]
        jobs = [self._job(batch) for batch in self.batches]
        for model, cluster, job in product(self.models, clusters, jobs):
            yield SweepPoint(model=model, cluster=cluster, job=job)

    def _job(self, batch: int) -> Job:
        return job_of(
            batch,
            self.sequence,
            precision=self.precision,
            optimizer=self.optimizer,
            runtime=self.runtime,
            fix=self.fix,
        )


class SweepPoint(Document):
    """One model on one cluster with one batch."""

    model: str
    cluster: Cluster
    job: Job


class SweepRow(Document):
    """The plan of one point, or how far its search is."""

    model: str
    """Catalogue name of the model."""
    cluster: str
    """Name of the cluster."""
    devices: int
    """Devices, as in the sweep."""
    batch: int
    """Samples per optimizer step."""
    status: RowStatus
    """``waiting``: not queued yet; the same request again queues more rows."""
    plan_id: str | None = None
    """None: the request for this plan is wrong."""
    job_id: str | None = None
    """The search for this plan; None: it is known, or waits."""
    step_seconds: float | None = None
    """Step time of the plan; None: there is none."""
    tokens_per_second: float | None = None
    """Throughput of the plan; None: there is none."""
    mfu: float | None = None
    """Model FLOPs utilisation of the plan; None: there is none, or the peak is
    unknown."""
    peak_bytes: int | None = None
    """Memory of the fullest pipeline rank."""
    reason: str = ""
    """Why there is no plan."""


class SweepTable(Document):
    """The rows of a sweep: batches of clusters of models, in the order of the request."""

    rows: tuple[SweepRow, ...]
    """One row per model, devices and batch."""
    pareto: tuple[int, ...]
    """Indices of rows that no row of the same model beats: more tokens per second on as
    many devices or fewer, or as many on fewer."""
    finished: bool
    """Whether every search has ended."""


def pareto_rows(rows: Sequence[SweepRow]) -> tuple[int, ...]:
    """Return the indices of rows that no row of the same model beats."""
    return tuple(
        index
        for index, row in enumerate(rows)
        if row.status == "succeeded" and not any(_beats(each, row) for each in rows)
    )


def _beats(row: SweepRow, other: SweepRow) -> bool:
    if row.status != "succeeded" or row.model != other.model:
        return False
    assert row.tokens_per_second is not None
    assert other.tokens_per_second is not None
    faster = row.tokens_per_second > other.tokens_per_second
    as_fast = row.tokens_per_second >= other.tokens_per_second
    fewer = row.devices < other.devices
    return (faster and row.devices <= other.devices) or (as_fast and fewer)


def _cluster(index: int, cluster: str | Cluster) -> Cluster:
    if isinstance(cluster, Cluster):
        return cluster
    return cluster_of(cluster, field=f"clusters[{index}]")


def row_of(point: SweepPoint, **fields: Any) -> SweepRow:
    """Return the row of a point with these further fields."""
    name = point.cluster.name or f"{point.cluster.devices} devices"
    return SweepRow(
        model=point.model,
        cluster=name,
        devices=point.cluster.devices,
        batch=point.job.global_batch_size,
        **fields,
    )
