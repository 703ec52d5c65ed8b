"""The plan: layout, stage map, placement, prediction and proof. A promise of step time and of memory on every rank."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

from pydantic import Field

from planner.spec.cluster import Cluster
from planner.spec.document import Document, digest
from planner.spec.job import Job
from planner.spec.layout import Layout
from planner.spec.profile import ModelProfile, RecomputeMode


class PlannedLayer(Document):
    """One layer of a stage."""

    name: str
    modules: tuple[str, ...] = ()
    recompute: RecomputeMode = "none"


class Stage(Document):
    """Contiguous layers on one pipeline rank."""

    index: int = Field(ge=0)
    pipeline_rank: int = Field(ge=0)
    layers: tuple[PlannedLayer, ...] = Field(min_length=1)
    ranks: tuple[int, ...] = Field(min_length=1)
    """Global ranks that hold a copy or shard of the stage."""


class RankPlacement(Document):
    """Where a global rank stands: its device, and its coordinate on every axis of the device mesh."""

    rank: int = Field(ge=0)
    node: int = Field(ge=0)
    device: int = Field(ge=0)
    """Index on its node (local rank)."""
    pipeline: int = Field(ge=0)
    data: int = Field(ge=0)
    tensor: int = Field(ge=0)
    context: int = Field(default=0, ge=0)
    expert: int = Field(default=0, ge=0)


class Breakdown(Document):
    """Where the step's seconds go, as the mean over the pipeline ranks; the parts add up to step_seconds.

    The parts of every rank add up to the step, the bubble being what no other part takes.
    Where data-parallel replicas differ, the ranks are those of the replica that ends last.
    """

    compute_seconds: float
    recompute_seconds: float
    tensor_parallel_seconds: float
    pipeline_seconds: float
    """Exposed transfers between stages: what they add to the end of a rank's last action."""
    data_parallel_seconds: float
    """Exposed gradient reduction, shared parameters included."""
    optimizer_seconds: float
    bubble_seconds: float
    """Mean idle time of a rank in a step, without transfers: it waits for other ranks in the schedule, or at the step's
    end for the slowest. bubble_seconds / step_seconds is the mean bubble to report; `Prediction.bubble_fraction` is that
    of the schedule's actions alone."""
    offload_seconds: float = 0.0
    """Activations on their way to the host and back; those of optimizer states count as the optimizer's."""

    @property
    def total_seconds(self) -> float:
        """Sum of all parts."""
        return float(sum(getattr(self, name) for name in type(self).model_fields))


class RankMemory(Document):
    """Predicted memory of every device of one pipeline rank, at its peak."""

    pipeline_rank: int = Field(ge=0)
    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    """Saved activations of all micro-batches in flight, and boundary buffers."""
    temporary_bytes: int
    reserved_bytes: int
    """Context, communicators and allocator overhead."""
    peak_bytes: int
    """Sum of the above."""
    capacity_bytes: int
    """What the job may use of the device: its memory less the headroom."""
    host_bytes: int = 0
    """What one device keeps in its node's memory: offloaded activations and optimizer states."""
    host_capacity_bytes: int | None = None
    """This device's part of its node's memory; None: not known."""

    @property
    def fits(self) -> bool:
        """In the device's memory and in the host's."""
        return self.fits_host and self.peak_bytes <= self.capacity_bytes

    @property
    def fits_host(self) -> bool:
        """As far as the host's memory is known."""
        return (
            self.host_capacity_bytes is None
            or self.host_bytes <= self.host_capacity_bytes
        )


class Prediction(Document):
    """Time and memory of one step."""

    step_seconds: float = Field(gt=0)
    tokens_per_second: float
    """Of the whole cluster; samples per second for models without a sequence."""
    mfu: float | None
    """Model FLOPs / (step_seconds x devices x peak); None when the device's peak is not known."""
    bubble_fraction: float
    """Idle share of the pipeline schedule: 1 - busy / (ranks x makespan), makespan being the time from the first action
    to the end of the last. Without transfers, and if the reduction and the optimizer take equally long on all ranks,
    bubble_fraction x makespan = breakdown.bubble_seconds. Otherwise bubble_fraction also counts the wait for transfers,
    which are breakdown.pipeline_seconds, and does not count the wait at the step's end."""
    breakdown: Breakdown
    memory: tuple[RankMemory, ...]


class SearchReport(Document):
    """How the optimum was found and proven."""

    layouts_considered: int
    layouts_pruned: int
    """Not solved, because their lower bound is no better than the plan, or they cannot fit."""
    layouts_solved: int
    """To the end. What is neither pruned nor solved was left open when the search was stopped."""
    seconds: float
    lower_bound_seconds: float
    """No plan of the space is faster under the cost model."""
    gap: float
    """(step_seconds - lower_bound_seconds) / step_seconds."""
    optimal: bool
    """Proven: the gap is within rounding (1e-6)."""
    clusters_considered: int = Field(default=1, ge=1)
    """Parts of the cluster whose layouts were counted: more than one under the objectives cost and devices."""


class Alternative(Document):
    """The next best plan of another layout."""

    layout: Layout
    micro_batches: int
    layers_per_stage: tuple[int, ...]
    step_seconds: float
    slowdown: float
    """step_seconds / the plan's step_seconds - 1."""
    peak_bytes: int
    """Of the fullest device."""
    reason: str
    """Where it loses, in words and numbers."""


class ParetoPoint(Document):
    """The proven fastest plan of so many devices with so much memory, which no other point beats in everything."""

    devices: int = Field(ge=1)
    layout: Layout
    micro_batches: int = Field(ge=1)
    layers_per_stage: tuple[int, ...]
    step_seconds: float = Field(gt=0)
    peak_bytes: int
    """Of the fullest device."""
    cost_per_token: float | None = None
    """As of the plan."""


class Relaxation(Document):
    """What the plan would gain if one of its limits were another."""

    constraint: str
    """``memory``, ``host_memory``, ``memory_headroom``, ``devices``, ``global_batch_size``, ``constraints.FIELD`` of
    the job, or all of its ``constraints``."""
    change: str
    """In words, such as "4 GiB more per device"."""
    layout: Layout
    """Of the best plan found."""
    step_seconds: float = Field(gt=0)
    gain: float | None
    """1 - seconds per sample with the change / those of the plan; None: without the change nothing fits."""
    optimal: bool
    """Proven to be the best with the change; else it was found with a fixed amount of work, and there may be better."""
    devices: int | None = Field(default=None, ge=1)
    """Of the whole cluster with the change, where the change is of its devices; None: another change."""


class Overtaking(Document):
    """At what change an alternative is as fast as the plan."""

    alternative: int = Field(ge=0)
    """Its place in `Plan.alternatives`."""
    change: float
    """Of the quantity, relative: -0.23 is 23 % less."""


class Sensitivity(Document):
    """What an error of one measured or stated quantity means for the choice of the plan."""

    quantity: Literal[
        "compute_seconds",
        "intra_node_bandwidth",
        "inter_node_bandwidth",
        "latency_seconds",
        "host_bandwidth",
    ]
    uncertainty: float = Field(ge=0)
    """Relative error to expect."""
    reason: str
    """Where that comes from."""
    overtakes: tuple[Overtaking, ...] = ()
    """Alternatives that win within a factor of four, those first that need the least change."""
    holds: bool
    """None of them wins within the uncertainty."""


class Options(Document):
    """How to search."""

    top: int = Field(default=3, ge=0, le=100)
    """Alternatives to return."""
    time_limit_seconds: float = Field(default=60.0, gt=0, le=86400)
    pareto: bool = False
    """Also the fastest plans of fewer devices and of less memory per device."""
    explain: Literal["brief", "full"] = "brief"
    """``full`` also searches again with limits relaxed: more memory, without a constraint, another batch."""


class PlanRequest(Document):
    """Everything that determines a plan."""

    schema_version: Literal[1] = 1
    model: str | None = None
    """Catalogue name, when the profile was derived from it."""
    profile_id: str
    """sha256 of the profile."""
    profile: ModelProfile | None = None
    """The profile itself, unless `model` names a catalogue entry that gives the same one."""
    cluster: Cluster
    job: Job
    options: Options = Options()
    planner_version: str

    @property
    def id(self) -> str:
        """sha256 of the canonical request: the plan's id."""
        document = self.model_dump(mode="json", by_alias=True, exclude={"profile"})
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
"""Fields that requests did not always have: at their defaults they do not count, so that the ids of old plans hold."""


class Plan(Document):
    """What the planner returns and the executor applies."""

    schema_version: Literal[1] = 1
    id: str
    layout: Layout
    micro_batches: int = Field(ge=1)
    """Per data-parallel rank and step."""
    stages: tuple[Stage, ...] = Field(min_length=1)
    placement: tuple[RankPlacement, ...] = Field(min_length=1)
    prediction: Prediction
    search: SearchReport
    alternatives: tuple[Alternative, ...] = ()
    explanation: tuple[str, ...] = ()
    """Why this plan, in sentences."""
    cost_per_token: float | None = None
    """Price of a token (of a sample, for models without a sequence) on the plan's devices, in the user's currency;
    None: the cluster tells no prices."""
    pareto: tuple[ParetoPoint, ...] = ()
    """By devices, most first; only where `Options.pareto` asked for them."""
    relaxations: tuple[Relaxation, ...] = ()
    """Only those that gain; only where `Options.explain` is ``full``."""
    sensitivity: tuple[Sensitivity, ...] = ()
    actions: tuple[tuple[str, ...], ...] = ()
    """The schedule's actions per pipeline rank, e.g. ``2F0``."""
    request: PlanRequest

    @property
    def cluster(self) -> Cluster:
        """What the plan uses of the request's cluster."""
        return self.request.cluster.part(Counter(row.node for row in self.placement))

    @property
    def replicas_differ(self) -> bool:
        """Some data-parallel rank runs more micro-batches than another one, or has a stage on another node group."""
        groups = (
            index
            for index, group in enumerate(self.request.cluster.node_groups)
            for _ in range(group.nodes)
        )
        of_node = dict(enumerate(groups))
        places: dict[int, set[tuple[int, int | None]]] = {}
        for row in self.placement:
            places.setdefault(row.data, set()).add(
                (row.pipeline, of_node.get(row.node))
            )
        return (
            self.layout.has_uneven_shares
            or len(set(map(frozenset, places.values()))) > 1
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data, as written to plan.json."""
        return self.model_dump(mode="json", by_alias=True)


class Miss(Document):
    """A layout that nearly fits, and by how much it misses."""

    layout: Layout
    pipeline_rank: int
    needed_bytes: int
    """Least memory of this rank over all partitions and recompute choices."""
    capacity_bytes: int
    missing_bytes: int
    memory: Literal["device", "host"] = "device"
    """Whose bytes these are: of the one that misses by more."""


class Infeasible(Document):
    """No plan fits: the reasons, and the nearest misses."""

    status: Literal["infeasible"] = "infeasible"
    reasons: tuple[str, ...]
    nearest: tuple[Miss, ...] = ()
    relaxations: tuple[Relaxation, ...] = ()
    """Changes with which a plan was found."""
    search: SearchReport | None = None


class Forecast(Document):
    """Answer of `planner predict`: time and memory of one given layout."""

    layout: Layout
    micro_batches: int = Field(ge=1)
    stages: tuple[Stage, ...]
    prediction: Prediction
    actions: tuple[tuple[str, ...], ...] = ()
    """Of an order that was synthesized; the others follow from the layout."""
    fits: bool
    """Every rank stays within its capacity."""
    reasons: tuple[str, ...] = ()
    """Why it does not fit."""
