"""The cases of `benchmarks.search` that make plans. Each function runs in a process of its own."""

from __future__ import annotations

import random
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from hypothesis import HealthCheck, given, settings

from benchmarks.search_rows import CHECKED, NOT_SEARCHED, PROVEN_GAP, Planned, Row
from planner.check import check
from planner.errors import PlannerError
from planner.profiler.counted import counted_profile
from planner.search import make_request, plan
from planner.spec import (
    Cluster,
    Infeasible,
    Job,
    Link,
    ModelProfile,
    NodeGroup,
    Options,
    Plan,
)
from tests import builders
from tests.brute_force import Priced
from tests.check.mixed import as_counted
from tests.search.test_brute_force import answer, memory_of, tight_instances
from tests.strategies import Instance

SEQUENCE_LENGTH = 4096
MOST_BYTES = 1024**3
DEVICES_PER_NODE = 8
H800_LINK = Link(latency_seconds=4e-6, bandwidth_bytes_per_second=200e9)
"""NVLink of the H800: 400 GB/s both ways together; in all else that matters here it is an H100."""
GROWTH_MODEL, GROWTH_SAMPLES = "llama-3.1-70b", 1024
LAYERS_DEVICES = 64
PARTS_SECONDS, PROVE_PARTS_SECONDS = 10.0, 60.0
PRICE_PER_HOUR = 2.0
"""Of a device, in any currency."""
DIFFERENT_SECONDS, DIFFERENT_GAP = 10.0, 0.01
DIFFERENT_DEVICES, DIFFERENT_EDGES = 64, 20
GROUPS = ("h100-sxm5-80gb", "a100-sxm4-80gb", "a100-sxm4-40gb")
NODES_OF_GROUP = 2
COUNTED_FLOPS_PER_SECOND = 4e14
"""At which different layers of so many seconds are counted, to be priced on several devices."""


def small(count: int) -> list[Row]:
    """Random small requests on devices that hold exactly what some stage map needs, against brute force."""
    run = 0
    wrong: list[int] = []
    complaints: list[object] = []

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(tight_instances())
    def compare(case: tuple[Instance, list[Priced]]) -> None:
        nonlocal run
        run += 1
        instance, priced = case
        fitting = [one.nanoseconds for one in priced if one.peak <= memory_of(instance)]
        found = answer(instance, top=0)
        if isinstance(found, Infeasible):
            wrong.extend([run] if fitting else [])
            return
        nanoseconds = round(found.prediction.step_seconds * 1e9)
        is_best = nanoseconds <= min(fitting, default=nanoseconds)
        wrong.extend([] if is_best and found.search.optimal else [run])
        complaints.extend(check(found, instance.profile).problems)

    compare()
    return [
        Row(
            case="small",
            name="small random instances",
            target="no slower than brute force, always",
            result=f"{run} instances, {len(wrong)} slower",
            met=not wrong,
            checked=_checked(complaints),
            is_exact=not wrong,
        )
    ]


def large(
    case: str,
    model: str,
    device: str,
    devices: int,
    samples: int,
    seconds: float,
    limit: float,
) -> list[Row]:
    """A model of the catalogue on a large cluster."""
    row = _planned(
        case,
        f"{model}, {devices} {device.upper()}, {samples} samples",
        lambda: counted_profile(model, sequence_length=SEQUENCE_LENGTH),
        _cluster(devices, H800_LINK if device == "h800" else None),
        samples,
        target=f"proven <= {seconds:g} s"
        + (", <= 1 GiB" if devices > LAYERS_DEVICES else ""),
        limit=limit,
        meets=lambda made: (
            made.is_proven
            and made.seconds <= seconds
            and made.peak_memory_bytes <= MOST_BYTES
        ),
    )
    return [row]


def parts(
    model: str,
    device: str,
    devices: int,
    samples: int,
    deadline: float | None,
    most_gap: float,
) -> list[Row]:
    """A model of the catalogue on any part of a large cluster: the cheapest token, or the fewest devices in time.

    Args:
        model: of the catalogue.
        device: of the cluster.
        devices: of all of it.
        samples: of a batch.
        deadline: of a step, in seconds; None: the price counts.
        most_gap: that is left after the time limit; 0: the plan is to be proven.
    """
    seconds = PARTS_SECONDS if most_gap == 0 else PROVE_PARTS_SECONDS
    wish = "cost" if deadline is None else f"devices, step <= {deadline:g} s"
    row = _planned(
        "parts",
        f"{model}, up to {devices} {device.upper()}, {samples} samples, {wish}",
        lambda: counted_profile(model, sequence_length=SEQUENCE_LENGTH),
        _cluster(devices, H800_LINK if device == "h800" else None, PRICE_PER_HOUR),
        samples,
        target=f"proven <= {seconds:g} s"
        if most_gap == 0
        else f"proven or gap <= {most_gap:.0%} in {seconds:g} s",
        limit=PROVE_PARTS_SECONDS,
        meets=lambda made: (
            made.is_within(max(most_gap, PROVEN_GAP))
            and (most_gap > 0 or made.seconds <= seconds)
        ),
        wish={"objective": "cost"}
        if deadline is None
        else {"objective": "devices", "deadline_seconds": deadline},
    )
    return [row]


def on_devices(devices: int, limit: float) -> list[Row]:
    """The same model and batch on more and more devices."""
    row = _planned(
        "devices",
        f"{GROWTH_MODEL}, {GROWTH_SAMPLES} samples, {devices} devices",
        lambda: counted_profile(GROWTH_MODEL, sequence_length=SEQUENCE_LENGTH),
        _cluster(devices),
        GROWTH_SAMPLES,
        target="proven",
        limit=limit,
        size=devices,
    )
    return [row]


def of_layers(layers: int, limit: float) -> list[Row]:
    """More and more equal layers on the same devices."""
    row = _planned(
        "layers",
        f"{layers} equal layers, {LAYERS_DEVICES} devices",
        lambda: equal_layers(layers),
        _cluster(LAYERS_DEVICES),
        GROWTH_SAMPLES,
        target="proven",
        limit=limit,
        size=layers,
    )
    return [row]


def equal_layers(count: int) -> ModelProfile:
    """So many of the blocks of a model of the catalogue, and nothing else."""
    whole = counted_profile(GROWTH_MODEL, sequence_length=SEQUENCE_LENGTH)
    block = whole.layers[len(whole.layers) // 2]
    layers = tuple(
        block.model_copy(
            update={"name": f"block.{place}", "modules": (f"block.{place}",)}
        )
        for place in range(count)
    )
    update = {"layers": layers, "edges": (), "transformer": None}
    return whole.model_copy(update={"model": f"{count} equal layers", **update})


def different(layers: int, share: int | None = None) -> list[Row]:
    """Layers of which no two are alike, with skip edges: on equal nodes, or on three groups of different devices.

    Args:
        layers: of the model.
        share: on node groups: parameters and bytes are those of the case on equal nodes divided by this; 1: memory is
            tight. None: on equal nodes.
    """
    name = f"{layers} different layers, {DIFFERENT_EDGES} skip edges"
    model, cluster = different_layers(layers, share or 1), different_cluster()
    if share is not None:
        model, cluster = as_counted(model), group_cluster()
        billions = sum(layer.parameters for layer in model.layers) / 1e9
        name += f", {len(GROUPS)} groups, {billions:.0f} B parameters"
    row = _planned(
        "skips",
        name,
        lambda: model,
        cluster,
        256,
        target=f"proven or gap <= {DIFFERENT_GAP:.0%} in {DIFFERENT_SECONDS:g} s",
        limit=DIFFERENT_SECONDS,
        meets=lambda made: made.is_within(DIFFERENT_GAP),
        sequence_length=builders.SEQUENCE_LENGTH,
    )
    return [row]


def different_layers(count: int, share: int = 1) -> ModelProfile:
    """Layers with their own times, bytes and parameters, the same at every call; modes none and full.

    Args:
        count: of the layers.
        share: by which parameters and bytes are divided.
    """
    draw = random.Random(count)

    def part(least: int, most: int) -> int:
        return draw.randint(least, most) // share

    drafts = [
        builders.Draft(
            forward=(forward := draw.uniform(0.5e-3, 3e-3)),
            flops=int(forward * COUNTED_FLOPS_PER_SECOND),
            backward_input=draw.uniform(0.5e-3, 3e-3),
            backward_weight=draw.uniform(0.5e-3, 3e-3),
            parameters=part(40_000_000, 400_000_000),
            activation=part(100_000_000, 600_000_000),
            kept=part(10_000_000, 60_000_000),
            output=part(10_000_000, 60_000_000),
            temporary=part(10_000_000, 200_000_000),
            exchange=part(10_000_000, 60_000_000),
            modes=("none", "full"),
        )
        for _ in range(count)
    ]
    pairs = [sorted(draw.sample(range(count), 2)) for _ in range(DIFFERENT_EDGES)]
    edges = [(first, last, part(1_000_000, 20_000_000)) for first, last in pairs]
    return builders.profile(drafts, sizes=(1, 2, 4), degrees=(1, 2, 4, 8), edges=edges)


def different_cluster() -> Cluster:
    """Eight nodes of eight."""
    nodes = DIFFERENT_DEVICES // DEVICES_PER_NODE
    intra, inter = builders.link(450e9, 4e-6), builders.link(50e9, 12e-6)
    return builders.cluster(
        DIFFERENT_DEVICES,
        nodes=nodes,
        intra=intra,
        inter=inter,
        memory_bytes=80 * 10**9,
    )


def group_cluster() -> Cluster:
    """Groups of different devices, two nodes of eight each."""
    return Cluster(
        node_groups=tuple(
            NodeGroup(
                name=device,
                device=device,
                nodes=NODES_OF_GROUP,
                devices_per_node=DEVICES_PER_NODE,
            )
            for device in GROUPS
        )
    )


def heterogeneous() -> list[Row]:
    """Three groups of different devices: planned, or refused in the planner's own words."""
    target = f"proven or gap <= {DIFFERENT_GAP:.0%} in {DIFFERENT_SECONDS:g} s"
    name = f"{GROWTH_MODEL}, {len(GROUPS)} groups of devices"
    try:
        row = _planned(
            "skips",
            name,
            lambda: counted_profile(GROWTH_MODEL, sequence_length=SEQUENCE_LENGTH),
            group_cluster(),
            256,
            target=target,
            limit=DIFFERENT_SECONDS,
            meets=lambda made: made.is_within(DIFFERENT_GAP),
        )
    except PlannerError as error:
        return [
            Row(
                "skips",
                name,
                target,
                f"refused: {error.problems[0].message}",
                met=False,
            )
        ]
    return [row]


def _cluster(
    devices: int, intra: Link | None = None, price_per_hour: float | None = None
) -> Cluster:
    """Nodes of eight H100; `intra`: with another link inside."""
    group = NodeGroup(
        device="h100-sxm5-80gb",
        nodes=devices // DEVICES_PER_NODE,
        devices_per_node=DEVICES_PER_NODE,
        intra_node=intra,
        price_per_hour=price_per_hour,
    )
    return Cluster(node_groups=(group,))


def _planned(
    case: str,
    name: str,
    profile_of: Callable[[], ModelProfile],
    cluster: Cluster,
    samples: int,
    *,
    target: str,
    limit: float,
    meets: Callable[[Planned], bool] = lambda made: made.is_proven,
    size: int = 0,
    sequence_length: int = SEQUENCE_LENGTH,
    wish: Mapping[str, Any] = MappingProxyType({}),
) -> Row:
    """Plan, measure, and check the plan."""
    began = time.perf_counter()
    profile = profile_of()
    job = Job(global_batch_size=samples, sequence_length=sequence_length, **wish)
    request = make_request(profile, cluster, job, Options(time_limit_seconds=limit))
    loaded, processor = time.perf_counter(), time.process_time()
    found = plan(request, profile)
    ended, processor = time.perf_counter(), time.process_time() - processor
    made = _measured(found, ended - loaded, processor, loaded - began)
    problems = check(found, profile).problems if isinstance(found, Plan) else ()
    return Row(
        case=case,
        name=name,
        target=target,
        result=made.result,
        met=meets(made),
        checked=_checked(problems) if isinstance(found, Plan) else NOT_SEARCHED,
        planned=made,
        size=size,
    )


def _checked(problems: Sequence[object]) -> str:
    return str(problems[0]) if problems else CHECKED


def _measured(
    found: Plan | Infeasible, seconds: float, processor: float, profile: float
) -> Planned:
    took = Planned(
        seconds=seconds,
        processor_seconds=processor,
        profile_seconds=profile,
        peak_memory_bytes=peak_memory_bytes(),
        layouts_considered=found.search.layouts_considered if found.search else 0,
        layouts_solved=found.search.layouts_solved if found.search else 0,
    )
    if isinstance(found, Infeasible):
        return took
    layout = found.layout.model_dump(mode="json")
    return replace(
        took,
        gap=found.search.gap,
        step_seconds=found.prediction.step_seconds,
        layout=layout,
    )


def peak_memory_bytes() -> int:
    """The most that this process held so far; Linux counts in KiB, macOS in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )
