"""The plan: layout, stage map, placement, prediction and proof of optimality."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

from pydantic import Field

from planner.spec.calibration import CalibrationNote, CalibrationTable
from planner.spec.cluster import Cluster
from planner.spec.document import Document, digest
from planner.spec.job import Job
from planner.spec.layout import Layout
from planner.spec.profile import ModelProfile, RecomputeMode


class PlannedLayer(Document):
    """One layer of a stage."""

    name: str
    """Name of the layer, as in the profile."""
    modules: tuple[str, ...] = ()
    """Qualified names of its modules."""
    recompute: RecomputeMode = "none"
    """What its backward computes again."""


class Stage(Document):
    """Contiguous layers on one pipeline rank."""

    index: int = Field(ge=0)
    """Number of the stage, in the order of the forward."""
    pipeline_rank: int = Field(ge=0)
    """Pipeline rank that has the stage."""
    layers: tuple[PlannedLayer, ...] = Field(min_length=1)
    """Layers in the order of the forward."""
    ranks: tuple[int, ...] = Field(min_length=1)
    """Global ranks with a copy or shard of the stage."""


class RankPlacement(Document):
    """The device of a global rank, and its coordinates in the device mesh."""

    rank: int = Field(ge=0)
    """Global rank."""
    node: int = Field(ge=0)
    """Number of the node, through all node groups."""
    device: int = Field(ge=0)
    """Index on its node (local rank)."""
    pipeline: int = Field(ge=0)
    """Pipeline rank."""
    data: int = Field(ge=0)
    """Data-parallel rank."""
    tensor: int = Field(ge=0)
    """Tensor-parallel rank."""
    context: int = Field(default=0, ge=0)
    """Context-parallel rank."""
    expert: int = Field(default=0, ge=0)
    """Expert-parallel rank."""


class Breakdown(Document):
    """Parts of the step time, as means over the pipeline ranks.

    The parts add up to step_seconds: the bubble is the rest. If data-parallel replicas
    differ, the ranks are those of the replica that finishes last.
    """

    compute_seconds: float
    """Forward and backward, without recomputation."""
    recompute_seconds: float
    """Forward computations that the backward repeats."""
    tensor_parallel_seconds: float
    """Exposed collectives of tensor parallelism."""
    pipeline_seconds: float
    """Exposed transfers between stages: what they add to the step."""
    data_parallel_seconds: float
    """Exposed gradient reduction, including shared parameters."""
    optimizer_seconds: float
    """The optimizer's update."""
    bubble_seconds: float
    """Mean idle time of a rank if transfers took no time: it waits for other ranks in
    the schedule, or for the slowest rank at the end of the step. bubble_seconds /
    step_seconds is the mean bubble of the step; `Prediction.bubble_fraction` is that of
    the schedule alone."""
    offload_seconds: float = 0.0
    """Copies of activations to the host and back; copies of optimizer states are in
    optimizer_seconds."""

    @property
    def total_seconds(self) -> float:
        """Sum of all parts."""
        return float(sum(getattr(self, name) for name in type(self).model_fields))


class RankMemory(Document):
    """Predicted peak memory of a device of one pipeline rank."""

    pipeline_rank: int = Field(ge=0)
    """Pipeline rank."""
    parameters_bytes: int
    """Parameters in the computing precision."""
    gradients_bytes: int
    """Gradients."""
    optimizer_bytes: int
    """Optimizer states and master copies."""
    activations_bytes: int
    """Saved activations of all micro-batches in flight, and boundary buffers."""
    temporary_bytes: int
    """Buffers of kernels, logits, gradient buckets and gathered shards."""
    reserved_bytes: int
    """Context, communicators and allocator overhead."""
    peak_bytes: int
    """Sum of the above."""
    capacity_bytes: int
    """Memory that the job may use: that of the device without the headroom."""
    device_bytes: int | None = None
    """Memory of the device; None in older plans."""
    host_bytes: int = 0
    """Host memory per device: offloaded activations and optimizer states."""
    host_capacity_bytes: int | None = None
    """This device's share of host memory; None: unknown."""

    @property
    def fits(self) -> bool:
        """Whether the rank fits in device and host memory."""
        return self.fits_host and self.peak_bytes <= self.capacity_bytes

    @property
    def fits_host(self) -> bool:
        """Whether the rank fits in host memory; True if that is unknown."""
        return (
            self.host_capacity_bytes is None
            or self.host_bytes <= self.host_capacity_bytes
        )


class Prediction(Document):
    """Time and memory of one step."""

    step_seconds: float = Field(gt=0)
    """Time of one training step."""
    tokens_per_second: float
    """Throughput of the cluster; samples per second for models without a sequence."""
    mfu: float | None
    """Model FLOPs / (step_seconds x devices x peak); None: the device's peak is
    unknown."""
    bubble_fraction: float
    """Idle fraction of the pipeline schedule: 1 - busy / (ranks x makespan), where
    makespan is the time from the first action to the end of the last. It includes waits
    for transfers, which are breakdown.pipeline_seconds, and excludes waits at the end
    of the step. Without either, bubble_fraction x makespan =
    breakdown.bubble_seconds."""
    breakdown: Breakdown
    """Parts of the step time."""
    memory: tuple[RankMemory, ...]
    """Memory of every pipeline rank."""
    step_seconds_80: tuple[float, float] | None = None
    """Interval that contains the measured step time with a probability of 80 %."""
    peak_bytes_80: tuple[int, int] | None = None
    """The same for the peak memory of the fullest rank."""
    out_of_memory_probability: float | None = Field(default=None, ge=0, le=1)
    """Probability that a rank needs more than the whole memory of its device."""
    calibration: CalibrationNote | None = None
    """The calibration, and the measured runs behind this prediction."""


class LeftOutValues(Document):
    """Values of one dimension that the search does not cover."""

    values: str
    """The values as text, such as "above 16"."""
    reason: str
    """Why they are left out, as a clause."""


class SpaceDimension(Document):
    """Values of one field of the layout that the search covers, and those it does not."""

    field: str
    """Field of the layout."""
    searched: tuple[str, ...]
    """Values as text; they are combined with those of all other dimensions as far as
    they divide the model, batch and devices."""
    left_out: tuple[LeftOutValues, ...] = ()
    """Values that the search does not cover, with reasons."""


class SearchReport(Document):
    """What the search did, and what it proved."""

    layouts_considered: int
    """Layouts of the search space."""
    layouts_pruned: int
    """Not solved: their lower bound is no better than the plan, or they cannot fit."""
    layouts_solved: int
    """Solved to the end. Layouts that are neither pruned nor solved were open when the
    search stopped."""
    seconds: float
    """Duration of the search."""
    lower_bound_seconds: float
    """No plan of the search space is faster under the cost model with the cuts that the
    search evaluates. If it did not finish, moves of layers that it did not try may be
    faster, but not than the bound of `gap_all_cuts`."""
    gap: float
    """(step_seconds - lower_bound_seconds) / step_seconds."""
    optimal: bool
    """Whether the plan is proven optimal: the search finished, and the gap is within
    rounding (1e-6)."""
    gap_all_cuts: float | None = None
    """The gap to the lower bound over all cuts of the layers, where `gap` is that over
    the cuts that were evaluated; None: both are the same."""
    clusters_considered: int = Field(default=1, ge=1)
    """Sub-clusters whose layouts were counted; more than one for the objectives cost
    and devices."""
    space: tuple[SpaceDimension, ...] = ()
    """The search space by dimension; empty in older plans."""


class Alternative(Document):
    """A plan with another layout: a slower one, or one that is not supported."""

    layout: Layout
    """Degrees and choices of the alternative."""
    micro_batches: int
    """Micro-batches per data-parallel rank and step."""
    layers_per_stage: tuple[int, ...]
    """Number of layers of every stage."""
    step_seconds: float
    """Predicted step time."""
    slowdown: float
    """step_seconds / the plan's step_seconds - 1; negative only if `supported` is
    False."""
    peak_bytes: int
    """Peak memory of the fullest device."""
    reason: str
    """What makes it slower, as text; of an unsupported layout, its gain, the interval of
    the gain, and what is not supported."""
    supported: bool = True
    """Whether measured runs, or timings of the planner's executor, support the predicted
    step of this layout. If not, it is the plan only where its gain exceeds the measured
    error of its price, or where the job asks for it."""


class ParetoPoint(Document):
    """The fastest plan for a number of devices and memory, on the Pareto front."""

    devices: int = Field(ge=1)
    """Devices that the plan uses."""
    layout: Layout
    """Degrees and choices of the plan."""
    micro_batches: int = Field(ge=1)
    """Micro-batches per data-parallel rank and step."""
    layers_per_stage: tuple[int, ...]
    """Number of layers of every stage."""
    step_seconds: float = Field(gt=0)
    """Predicted step time."""
    peak_bytes: int
    """Peak memory of the fullest device."""
    cost_per_token: float | None = None
    """See `Plan.cost_per_token`."""


class Relaxation(Document):
    """The gain from changing one limit or constraint."""

    constraint: str
    """``memory``, ``host_memory``, ``memory_headroom``, ``devices``,
    ``global_batch_size``, ``constraints.FIELD`` of the job, or all its
    ``constraints``."""
    change: str
    """The change as text, such as "4 GiB more per device"."""
    layout: Layout
    """Layout of the best plan found."""
    step_seconds: float = Field(gt=0)
    """Step time of that plan."""
    gain: float | None
    """1 - seconds per sample with the change / those of the plan; None: nothing fits
    without the change."""
    optimal: bool
    """Whether the plan is proven optimal with the change; if not, a better one may
    exist."""
    devices: int | None = Field(default=None, ge=1)
    """Devices of the cluster with the change; None: the change is another one."""


class Overtaking(Document):
    """The change of a quantity at which an alternative is as fast as the plan."""

    alternative: int = Field(ge=0)
    """Index in `Plan.alternatives`."""
    change: float
    """Relative change of the quantity: -0.23 is 23 % less."""


class Sensitivity(Document):
    """The effect of an error in one quantity on the choice of the plan."""

    quantity: Literal[
        "compute_seconds",
        "intra_node_bandwidth",
        "inter_node_bandwidth",
        "latency_seconds",
        "host_bandwidth",
    ]
    """The quantity that may be wrong."""
    uncertainty: float = Field(ge=0)
    """Expected relative error of the quantity."""
    reason: str
    """Source of the uncertainty."""
    overtakes: tuple[Overtaking, ...] = ()
    """Alternatives that win within a factor of four, in order of the change."""
    holds: bool
    """Whether the plan stays the best within the uncertainty."""


class Options(Document):
    """Options of the search."""

    top: int = Field(default=3, ge=0, le=100)
    """Number of alternatives to return."""
    time_limit_seconds: float = Field(default=60.0, gt=0, le=86400)
    """Time limit of the search; the best plan found by then is returned, with its
    gap."""
    pareto: bool = False
    """Also return the fastest plans for fewer devices and for less memory per
    device."""
    explain: Literal["brief", "full"] = "brief"
    """``full`` also searches with relaxed limits: more memory, no constraint, another
    batch."""


class PlanRequest(Document):
    """The request that determines a plan."""

    schema_version: Literal[1] = 1
    """Version of this document."""
    model: str | None = None
    """Catalogue name, if the profile is that of a catalogue model."""
    profile_id: str
    """sha256 of the profile."""
    profile: ModelProfile | None = None
    """The profile, unless it is that of the catalogue model `model`."""
    cluster: Cluster
    """The devices that the plan may use."""
    job: Job
    """What is trained."""
    options: Options = Options()
    """Number of alternatives, time limit and what else to search."""
    calibration: CalibrationTable | None = None
    """Own calibration; None: the one of the planner's release."""
    planner_version: str
    """Version of the planner that made the plan."""

    @property
    def id(self) -> str:
        """Id of the plan: sha256 of the canonical request."""
        document = self.model_dump(mode="json", by_alias=True, exclude={"profile"})
        if self.calibration is None:
            del document["calibration"]
        for part, fields in _LATER.items():
            for name, default in fields.items():
                if document[part][name] == default:
                    del document[part][name]
        for group in document["cluster"]["node_groups"]:
            if group["host_memory_bytes"] is None:  # as in _LATER
                del group["host_memory_bytes"]
        return digest(document)


_LATER: dict[str, dict[str, Any]] = {
    "job": {"deadline_seconds": None, "runtime": "planner"},
    "options": {"pareto": False, "explain": "brief"},
}
"""Newer fields with their defaults, which do not enter the id, so that ids of old plans
stay valid."""


class Plan(Document):
    """The plan that the planner returns and the executor applies."""

    schema_version: Literal[1] = 1
    """Version of this document."""
    id: str
    """sha256 of the canonical request."""
    layout: Layout
    """Degrees and choices of the plan."""
    micro_batches: int = Field(ge=1)
    """Micro-batches per data-parallel rank and step."""
    stages: tuple[Stage, ...] = Field(min_length=1)
    """Layers and ranks of every pipeline stage."""
    placement: tuple[RankPlacement, ...] = Field(min_length=1)
    """Device and coordinates of every global rank."""
    prediction: Prediction
    """Predicted time and memory of one step."""
    search: SearchReport
    """Report of the search and its proof."""
    unsupported: str = ""
    """Choices of the layout that measured runs do not support, as text; empty: they
    support the layout, or the job asks for it."""
    alternatives: tuple[Alternative, ...] = ()
    """Plans with other layouts, and what each costs."""
    explanation: tuple[str, ...] = ()
    """Reasons for the plan, as sentences."""
    cost_per_token: float | None = None
    """Price of a token (of a sample, for models without a sequence) on the plan's
    devices, in the user's currency; None: the cluster has no prices."""
    pareto: tuple[ParetoPoint, ...] = ()
    """In decreasing order of devices; only with `Options.pareto`."""
    relaxations: tuple[Relaxation, ...] = ()
    """Relaxations with a gain; only if `Options.explain` is ``full``."""
    sensitivity: tuple[Sensitivity, ...] = ()
    """Effect of errors in measured quantities on the choice."""
    actions: tuple[tuple[str, ...], ...] = ()
    """Actions of the schedule per pipeline rank, e.g. ``2F0``."""
    request: PlanRequest
    """The request that determines the plan."""

    @property
    def cluster(self) -> Cluster:
        """The part of the request's cluster that the plan uses."""
        return self.request.cluster.part(Counter(row.node for row in self.placement))

    @property
    def replicas_differ(self) -> bool:
        """Whether data-parallel ranks differ in micro-batches, or in node groups."""
        if self.layout.has_uneven_shares:
            return True
        group_of_node: list[int] = []
        for index, group in enumerate(self.request.cluster.node_groups):
            group_of_node += [index] * group.nodes
        groups = dict(enumerate(group_of_node))
        places: dict[int, set[tuple[int, int | None]]] = {}
        for row in self.placement:
            place = (row.pipeline, groups.get(row.node))
            places.setdefault(row.data, set()).add(place)
        distinct = {frozenset(each) for each in places.values()}
        return len(distinct) > 1

    def to_json(self) -> dict[str, Any]:
        """Return plain data, as in plan.json."""
        return self.model_dump(mode="json", by_alias=True)


class Miss(Document):
    """A layout that nearly fits in memory."""

    layout: Layout
    """Degrees and choices of the layout."""
    pipeline_rank: int
    """Pipeline rank that lacks the most."""
    needed_bytes: int
    """Least memory of this rank over the cuts that were computed and all recompute
    modes."""
    capacity_bytes: int
    """Memory that the rank may use."""
    missing_bytes: int
    """needed_bytes - capacity_bytes."""
    memory: Literal["device", "host"] = "device"
    """The memory that these bytes are of: the one that lacks more."""


class Infeasible(Document):
    """The answer if no layout is feasible: reasons, and the nearest layouts."""

    status: Literal["infeasible"] = "infeasible"
    """Always ``infeasible``; a plan has no status."""
    reasons: tuple[str, ...]
    """Reasons why no layout fits, as sentences."""
    nearest: tuple[Miss, ...] = ()
    """Layouts that come closest, and what each lacks."""
    relaxations: tuple[Relaxation, ...] = ()
    """Changes with which a plan was found."""
    search: SearchReport | None = None
    """What the search did; None: it was not needed."""


class Forecast(Document):
    """The answer of `planner predict`: time and memory of one layout."""

    layout: Layout
    """Degrees and choices that were predicted."""
    micro_batches: int = Field(ge=1)
    """Micro-batches per data-parallel rank and step."""
    stages: tuple[Stage, ...]
    """Layers of every stage."""
    prediction: Prediction
    """Predicted time and memory of one step."""
    actions: tuple[tuple[str, ...], ...] = ()
    """Actions of a synthesized schedule; other schedules follow from the layout."""
    fits: bool
    """Whether every rank is within the memory of its device; within its capacity, if
    the job has a ``memory_headroom``."""
    reasons: tuple[str, ...] = ()
    """Reasons why it does not fit."""
