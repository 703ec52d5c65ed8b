"""Look for layouts that beat plans: ``python -m benchmarks.attack --requests N --seed S``.

Random requests are planned. Then neighbours of every plan's layout are priced as
``planner predict`` does: other degrees, micro-batch sizes, schedules, stages per rank,
recompute modes, ZeRO stages, rank orders, chunks, tensor degrees of experts. The plan's
own stages are priced with the recompute modes of any two layers of a rank exchanged. A
neighbour of the searched space that fits and is faster than the plan is printed, and
the exit code is 1. Where no plan fits, simple layouts are priced, and one that fits is
printed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations
from operator import attrgetter
from typing import Any, NamedTuple

from pydantic import ValidationError

from benchmarks.arguments import positive_int, positive_seconds, whole_number
from planner.cli.console import note
from planner.cli.failures import DONE, FAILED
from planner.cost import (
    TICK_SECONDS,
    LayoutCosts,
    StageMap,
    Workload,
    choose,
    evaluate,
    layout_costs,
    order_of,
    rank_memory,
    workload,
)
from planner.errors import PlannerError
from planner.profiler.resolve import catalogue_profile
from planner.schedule import Schedule, find
from planner.search import make_request, plan, predict
from planner.search.engine.space import (
    Offload,
    Space,
    Split,
    divisors,
    runtime_constraints,
)
from planner.search.engine.split_backward import splits_backward
from planner.search.engine.table import SIMPLE
from planner.search.support import supported_space
from planner.spec import Cluster, Infeasible, Job, ModelProfile, Options
from planner.spec.job import CONSTRAINABLE, Constraint, allows
from planner.spec.layout import Layout, PredictionLayout
from planner.spec.layout_words import layout_line
from planner.spec.plan import Plan, Stage
from planner.spec.short_form import cluster_of
from planner.spec.units import percent, seconds

MODELS = (
    "gpt2",
    "gpt2-xl",
    "bert-large",
    "llama-3.2-1b",
    "llama-3.2-3b",
    "llama-3.1-8b",
    "qwen3-0.6b",
    "qwen3-30b-a3b",
    "gemma-2-9b",
    "mixtral-8x7b",
    "llama-3.1-70b",
    "resnet-50",
)
LONGEST = {"gpt2": 1024, "gpt2-xl": 1024, "bert-large": 512, "gemma-2-9b": 8192}
"""Tokens of the longest sequence; other models take all of `LENGTHS`."""
WITHOUT_TOKENS = ("resnet-50",)
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
DEVICES = (
    "h100-sxm5-80gb",
    "a100-sxm4-80gb",
    "a100-sxm4-40gb",
    "l4-24gb",
    "rtx4090-24gb",
    "h200-sxm-141gb",
)
ON_ONE_NODE = {"rtx4090-24gb"}
"""Devices whose data sheets have no link between nodes."""
COUNTS = (1, 2, 3, 4, 6, 8, 16, 24, 32, 48, 64)
COUNTS_OF_NODE = (1, 2, 4, 8)
BATCHES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256)
RUNTIMES = ("planner", "planner", "megatron-core")
FIXED: tuple[tuple[str, Constraint], ...] = (
    ("tensor_parallel_degree", 1),
    ("tensor_parallel_degree", 2),
    ("pipeline_parallel_degree", 2),
    ("pipeline_parallel_degree", 4),
    ("data_parallel_degree", 1),
    ("context_parallel_degree", 1),
    ("zero_stage", 1),
    ("zero_stage", (0, 1)),
    ("recompute", "none"),
    ("recompute", "full"),
    ("recompute", ("none", "full")),
    ("schedule", "1f1b"),
    ("schedule", "interleaved-1f1b"),
    ("micro_batch_size", 1),
    ("sequence_chunks", (1, 2, 4)),
    ("virtual_stages_per_rank", 1),
)
FIXED_SHARE = 0.3
"""Share of requests with a constraint."""
MIXED_SHARE = 0.2
"""Share of requests with two kinds of devices."""
DEGREES = (
    "data_parallel_degree",
    "tensor_parallel_degree",
    "pipeline_parallel_degree",
    "context_parallel_degree",
)
FACTORS = (2, 3)
MODES = ("none", "selective", "full", "per-layer")
TOLERANCE = 1e-6
SIMPLE_LAYOUTS = 60
"""Layouts that are priced where no plan fits."""

Change = dict[str, Any]


class Case(NamedTuple):
    """A request."""

    model: str
    devices: str
    """As `planner plan --devices` has them."""
    batch: int
    length: int
    runtime: str = "planner"
    constraints: Mapping[str, Constraint] = {}

    @property
    def command(self) -> str:
        """The request as a command."""
        parts = [
            f"planner plan {self.model} --devices {self.devices}",
            f"--batch {self.batch}",
        ]
        if self.length:
            parts.append(f"--sequence {self.length}")
        if self.runtime != "planner":
            parts.append(f"--runtime {self.runtime}")
        for name, value in self.constraints.items():
            values = value if isinstance(value, tuple) else (value,)
            parts.append(f"--fix {name}={','.join(map(str, values))}")
        return " ".join(parts)

    @property
    def job(self) -> Job:
        """The job document."""
        return Job(
            global_batch_size=self.batch,
            sequence_length=self.length,
            runtime=self.runtime,
            constraints=dict(self.constraints),
        )

    @property
    def cluster(self) -> Cluster:
        """The cluster document."""
        return cluster_of(self.devices)


@dataclass(frozen=True, slots=True)
class Documents:
    """A request's documents; the job has the memory margin that plans leave free."""

    profile: ModelProfile
    cluster: Cluster
    job: Job

    @property
    def work(self) -> Workload:
        """What is planned."""
        return workload(self.profile, self.cluster, self.job)


class Winner(NamedTuple):
    """A plan, as far as it is attacked."""

    layout: Layout
    step_seconds: float
    lower_bound_seconds: float
    """Over the cuts that the search evaluated."""
    bound_all_cuts_seconds: float
    is_optimal: bool


class Better(NamedTuple):
    """A layout that the plan should have had."""

    layout: Layout
    step_seconds: float
    change: str = ""
    """What differs besides the layout."""


@dataclass(frozen=True, slots=True)
class Attack:
    """What the neighbours of a plan are worth."""

    winner: Winner | None
    """None: no plan fits."""
    priced: int
    """Neighbours that fit."""
    better: tuple[Better, ...]
    """Fastest first."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print one line per request and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=positive_int, default=200)
    parser.add_argument("--seed", type=whole_number, default=0)
    parser.add_argument("--first", type=whole_number, default=0, help="skip so many")
    parser.add_argument(
        "--time-limit", type=positive_seconds, default=5.0, help="of a plan, in seconds"
    )
    arguments = parser.parse_args(argv)
    rng = random.Random(arguments.seed)
    cases = [random_case(rng) for _ in range(arguments.requests)]
    failed = 0
    for number, case in enumerate(cases[arguments.first :], arguments.first):
        note(f"request {number}: {case.command}")
        started = time.process_time()
        try:
            found = attack(case, arguments.time_limit)
        except PlannerError as error:
            print(f"{number}  refused: {error}", flush=True)
            continue
        spent = time.process_time() - started
        print(f"{number}  {line(found)}, {spent:.1f} CPU s", flush=True)
        if found.better:
            failed += 1
            print(report(case, found), flush=True)
    print(f"{len(cases)} requests, {failed} with a better layout")
    return FAILED if failed else DONE


def random_case(rng: random.Random) -> Case:
    """Return a random request."""
    model = rng.choice(MODELS)
    longest = LONGEST.get(model, LENGTHS[-1])
    lengths = [length for length in LENGTHS if length <= longest]
    constraints: dict[str, Constraint] = {}
    if rng.random() < FIXED_SHARE:
        name, value = rng.choice(FIXED)
        constraints[name] = value
    return Case(
        model=model,
        devices=random_devices(rng),
        batch=rng.choice(BATCHES),
        length=0 if model in WITHOUT_TOKENS else rng.choice(lengths),
        runtime=rng.choice(RUNTIMES),
        constraints=constraints,
    )


def random_devices(rng: random.Random) -> str:
    """Return one kind of devices or two whose data sheets state all links they need."""
    kinds = rng.sample(DEVICES, 2 if rng.random() < MIXED_SHARE else 1)
    counts = COUNTS
    if not ON_ONE_NODE.isdisjoint(kinds):
        kinds = [kind for kind in kinds if kind in ON_ONE_NODE]
        counts = COUNTS_OF_NODE
    return ",".join(f"{rng.choice(counts)}x{kind}" for kind in kinds)


def attack(case: Case, time_limit: float) -> Attack:
    """Plan a request and price the neighbours of the plan.

    Args:
        case: the request.
        time_limit: of the search, in seconds.

    Raises:
        PlannerError: the request is refused.
    """
    options = Options(top=0, time_limit_seconds=time_limit)
    profile = catalogue_profile(case.model, case.job)
    request = make_request(profile, case.cluster, case.job, options, model=case.model)
    found = plan(request, profile)
    if isinstance(found, Infeasible):
        return attack_nothing(Documents(profile, request.cluster, request.job))
    # A plan may leave devices idle: its neighbours have the same ones.
    documents = Documents(profile, found.cluster, request.job)
    search = found.search
    winner = Winner(
        found.layout,
        found.prediction.step_seconds,
        search.lower_bound_seconds,
        (1 - (search.gap_all_cuts or search.gap)) * found.prediction.step_seconds,
        search.optimal,
    )
    by_layout = attack_winner(documents, winner)
    by_modes = attack_modes(documents, found)
    better = sorted(
        (*by_layout.better, *by_modes.better), key=attrgetter("step_seconds")
    )
    return Attack(winner, by_layout.priced + by_modes.priced, tuple(better))


def attack_winner(documents: Documents, winner: Winner) -> Attack:
    """Price all neighbours of a plan's layout."""
    limit = winner.step_seconds * (1 - TOLERANCE)
    found = _priced(documents, neighbours(documents, winner.layout))
    better = [each for each in found if each.step_seconds < limit]
    better.sort(key=lambda each: each.step_seconds)
    return Attack(winner, len(found), tuple(better))


def attack_modes(documents: Documents, found: Plan) -> Attack:
    """Price a plan with the recompute modes of any two layers of a rank exchanged."""
    layout = found.layout
    costs = layout_costs(documents.work, layout)
    schedule = order_of(costs, found.actions)
    limit = found.prediction.step_seconds * (1 - TOLERANCE)
    priced = 0
    better = []
    for stage_map in exchanged(costs, schedule, found.stages):
        stages = choose(costs, stage_map)
        if not all(row.fits for row in rank_memory(costs, schedule, stages)):
            continue
        priced += 1
        step = evaluate(costs, schedule, stages).total_ticks * TICK_SECONDS
        if step < limit:
            better.append(Better(layout, step, "its modes exchanged on a rank"))
    return Attack(None, priced, tuple(better))


def exchanged(
    costs: LayoutCosts, schedule: Schedule, stages: Sequence[Stage]
) -> Iterator[StageMap]:
    """Yield stage maps with the modes of two layers of a rank exchanged."""
    modes = [layer.recompute for stage in stages for layer in stage.layers]
    ends = list(accumulate(len(stage.layers) for stage in stages))
    starts = [0, *ends[:-1]]
    for rank in range(schedule.ranks):
        layers: dict[tuple[object, ...], int] = {}
        for stage in schedule.stages_of(rank):
            for layer in range(starts[stage], ends[stage]):
                layers[stage, costs.alike[layer], modes[layer]] = layer
        for one, other in combinations(layers.values(), 2):
            changed = list(modes)
            changed[one], changed[other] = modes[other], modes[one]
            is_known = all(changed[each] in costs.layers[each] for each in (one, other))
            if is_known and modes[one] != modes[other]:
                pairs = list(enumerate(changed))
                yield [
                    pairs[start:end] for start, end in zip(starts, ends, strict=True)
                ]


def attack_nothing(documents: Documents) -> Attack:
    """Price simple layouts where no plan fits."""
    layouts = simple_layouts(documents)
    found = _priced(documents, layouts, has_even_stages=True)
    return Attack(None, len(found), tuple(found))


def _priced(
    documents: Documents, layouts: Iterator[Layout], *, has_even_stages: bool = False
) -> list[Better]:
    """Return the layouts of the searched space that fit, with their steps.

    Args:
        documents: of the request.
        layouts: that are priced.
        has_even_stages: instead of the best ones, for speed.
    """
    work = documents.work
    space = supported_space(work)
    found = []
    for layout in layouts:
        try:
            is_searched = is_inside(work, space, layout)
        except PlannerError:
            continue
        if not is_searched:
            continue
        priced = _price(documents, layout, has_even_stages=has_even_stages)
        if priced is not None:
            found.append(priced)
    return found


def even_stages(layers: int, stages: int) -> tuple[int, ...]:
    """Return the layers of every stage, which differ by one at most."""
    each, more = divmod(layers, stages)
    return tuple(each + (stage < more) for stage in range(stages))


def _price(
    documents: Documents, layout: Layout, *, has_even_stages: bool
) -> Better | None:
    """Return a layout with its step; None if it is invalid or does not fit."""
    sizes = None
    if has_even_stages:
        stages = layout.pipeline_parallel_degree * layout.virtual_stages_per_rank
        sizes = even_stages(len(documents.profile.layers), stages)
    given = PredictionLayout.model_construct(**dict(layout), layers_per_stage=sizes)
    try:
        forecast = predict(documents.profile, documents.cluster, documents.job, given)
    except PlannerError:
        return None
    if not forecast.fits:
        return None
    return Better(layout, forecast.prediction.step_seconds)


def is_inside(work: Workload, space: Space, layout: Layout) -> bool:
    """Return whether a search of the space covers a layout, if it divides the work.

    Raises:
        LayoutError: the layout does not divide the batch.
    """
    split = Split.of(layout)
    if split not in space.splits:
        return False
    if layout.sequence_chunks not in space.chunks[space.splits.index(split)]:
        return False
    if layout.sequence_chunks > 1 and layout.zero_stage > 1:
        return False
    has_chunks = layout.sequence_chunks > 1
    if find(layout.schedule).takes_sequence_chunks != has_chunks:
        return False
    if layout.schedule not in space.schedules:
        return False
    if layout.pipeline_parallel_degree == 1 and layout.schedule not in SIMPLE:
        return False
    if splits_backward(layout.schedule) and layout.recompute != "none":
        return False
    if layout.replicas == 1 and layout.zero_stage > 0:
        return False
    if layout.virtual_stages_per_rank not in space.virtual_stages:
        return False
    offload = Offload(layout.activation_offload, layout.optimizer_offload)
    if offload not in space.offloads:
        return False
    return _is_permitted(work, layout)


def _is_permitted(work: Workload, layout: Layout) -> bool:
    """Return whether job and runtime permit a layout."""
    if work.framework.supports.violation(layout, work.job) is not None:
        return False
    constraints = runtime_constraints(work)
    for name in CONSTRAINABLE:
        if not allows(constraints.get(name), layout.constrained(name)):
            return False
    return True


def neighbours(documents: Documents, layout: Layout) -> Iterator[Layout]:
    """Yield layouts that differ in one choice, each with every recompute mode.

    The layout itself is one of them, with the stage map that ``predict`` finds.
    """
    seen = {layout}
    yield layout
    for change in _changes(documents, layout):
        for mode in dict.fromkeys((layout.recompute, *MODES)):
            found = _changed(layout, change | {"recompute": mode})
            if found is not None and found not in seen:
                seen.add(found)
                yield found


def _changes(documents: Documents, layout: Layout) -> Iterator[Change]:
    yield {}
    yield from _other_degrees(layout)
    yield from _scaled(layout, "micro_batch_size")
    yield from _other_experts(layout)
    yield from _other_orders(documents, layout)
    for stage in (0, 1, 2, 3):
        yield {"zero_stage": stage, "zero_shard_degree": None}
        for size in divisors(layout.replicas)[1:-1]:
            if stage:
                yield {"zero_stage": stage, "zero_shard_degree": size}
    for order in ("tp-cp-dp-pp", "tp-cp-pp-dp"):
        yield {"rank_order": order}
    yield {"sequence_parallel": not layout.sequence_parallel}


def _other_degrees(layout: Layout) -> Iterator[Change]:
    """Yield degrees of which one is larger and another smaller by a factor."""
    for more in DEGREES:
        for less in DEGREES:
            for factor in FACTORS:
                smaller, rest = divmod(getattr(layout, less), factor)
                if more == less or rest:
                    continue
                change = {more: getattr(layout, more) * factor, less: smaller}
                yield change
                if change.get("tensor_parallel_degree", 1) > 1:
                    yield change | {"sequence_parallel": True}
                if change.get("tensor_parallel_degree") == 1:
                    yield change | {"sequence_parallel": False}
                if change.get("pipeline_parallel_degree") == 1:
                    yield change | {"schedule": "1f1b", "virtual_stages_per_rank": 1}
                yield change | {"micro_batch_size": layout.micro_batch_size * factor}
                size, rest = divmod(layout.micro_batch_size, factor)
                if not rest:
                    yield change | {"micro_batch_size": size}


def _other_experts(layout: Layout) -> Iterator[Change]:
    """Yield other expert degrees, with every tensor degree of experts."""
    degrees = divisors(layout.tensor_parallel_degree)
    for change in ({}, *_scaled(layout, "expert_parallel_degree")):
        for degree in degrees:
            yield change | {"expert_tensor_parallel_degree": degree}


def _scaled(layout: Layout, name: str) -> Iterator[Change]:
    """Yield a field's value times and divided by each factor."""
    value = getattr(layout, name)
    for factor in FACTORS:
        yield {name: value * factor}
        if value % factor == 0:
            yield {name: value // factor}


def _other_orders(documents: Documents, layout: Layout) -> Iterator[Change]:
    """Yield other schedules, stages per rank and chunks."""
    space = supported_space(documents.work)
    stages = layout.virtual_stages_per_rank
    counts = {1, 2, stages - 1, stages + 1, stages * 2, stages // 2}
    chunks = {count for each in space.chunks for count in each}
    for name in space.schedules:
        entry = find(name)
        for count in sorted(counts):
            if count < 1 or not entry.takes_virtual_stages(count):
                continue
            for pieces in sorted(chunks) if entry.takes_sequence_chunks else (1,):
                yield {
                    "schedule": name,
                    "virtual_stages_per_rank": count,
                    "sequence_chunks": pieces,
                }


def _changed(layout: Layout, change: Change) -> Layout | None:
    """Return the layout with other values; None if they are invalid."""
    try:
        return Layout.model_validate(
            dict(layout) | {"micro_batch_shares": None} | change
        )
    except ValidationError:
        return None


def simple_layouts(documents: Documents) -> Iterator[Layout]:
    """Yield some factorisations of the devices, with ZeRO and full recomputation."""
    devices = documents.cluster.devices
    count = 0
    for tensor in divisors(devices):
        for pipeline in divisors(devices // tensor):
            for context in divisors(devices // tensor // pipeline):
                for stage in (1, 3):
                    count += 1
                    if count > SIMPLE_LAYOUTS:
                        return
                    yield Layout(
                        data_parallel_degree=devices // tensor // pipeline // context,
                        tensor_parallel_degree=tensor,
                        pipeline_parallel_degree=pipeline,
                        context_parallel_degree=context,
                        zero_stage=stage,
                        sequence_parallel=tensor > 1,
                        recompute="full",
                    )


def line(found: Attack) -> str:
    """Return the result of one attack in a line."""
    if found.winner is None:
        return f"no plan, {found.priced} simple layouts fit"
    word = "proven" if found.winner.is_optimal else "not proven"
    step = seconds(found.winner.step_seconds)
    return f"{step} {word}, {found.priced} neighbours, {len(found.better)} better"


def report(case: Case, found: Attack) -> str:
    """Return the request, its plan and the best layout that beats it."""
    lines = [f"    {case.command}"]
    best = found.better[0]
    if found.winner is not None:
        gain = 1 - best.step_seconds / found.winner.step_seconds
        what = _judgement(found.winner, best)
        lines.append(f"    plan    {layout_line(found.winner.layout)}")
        change = f", {best.change}" if best.change else ""
        lines.append(f"    better  {layout_line(best.layout)}{change}")
        step = seconds(best.step_seconds)
        lines.append(f"    {step}, {percent(gain)} faster, {what}")
    else:
        lines.append(f"    fits    {layout_line(best.layout)}")
    return "\n".join(lines)


def _judgement(winner: Winner, best: Better) -> str:
    """Return what a better layout says about the search."""
    if best.step_seconds >= winner.lower_bound_seconds:
        return "within the gap"
    changed = {"recompute": winner.layout.recompute}
    if best.layout.model_copy(update=changed) == winner.layout:
        return "another cut of the same layout"
    if best.step_seconds >= winner.bound_all_cuts_seconds:
        return "with a cut that was not evaluated"
    return "below the lower bound of all cuts"


if __name__ == "__main__":
    sys.exit(main())
