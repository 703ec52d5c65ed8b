"""The structure of a plan: documents, layout, placement and stages.

(P1)  order of the ranks, innermost axis first: tensor, context, data, pipeline; or
      tensor, context, pipeline, data; of the ranks of one pipeline rank, runs of
      `expert_tensor_degree` neighbours have one share of the experts in turn
(P2)  ranks fill nodes in order, node group after node group; a plan on several nodes
      uses all of their devices
(P3)  a cell, the ranks of one pipeline and one data rank, is in one node group, and
      so are ranks that shard ZeRO's states among themselves
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from planner.check.context import Context
from planner.check.report import Findings
from planner.check.schedules import SCHEDULES, ScheduleRule, Shape, permits_schedule
from planner.check.sites import Sites
from planner.errors import LayoutError
from planner.runtimes import planned
from planner.spec.document import digest
from planner.spec.job import COMPUTE_TYPE, DIVISION, OURS, allows
from planner.spec.layout import Layout
from planner.spec.plan import Plan, Stage
from planner.spec.recompute import MODES, has_modules


def check_documents(plan: Plan, context: Context, findings: Findings) -> bool:
    """Check that ids are digests, and that profile, job and devices match.

    Returns whether the rest of the plan can be checked.
    """
    profile, request = context.profile, plan.request
    findings.equal("id", plan.id, request.id)
    before = len(findings.problems)
    own = digest(profile)
    findings.equal("request.profile_id", request.profile_id, own)
    is_own = request.profile is None or request.profile is profile
    carried = own if is_own else digest(request.profile)
    findings.equal("request.profile", carried, own)
    precision = request.job.precision
    computed = COMPUTE_TYPE[precision]
    findings.equal("request.job.precision", computed, profile.dtype)
    is_fp8 = precision == "fp8"
    is_counted = profile.device == "counted"
    holds = is_counted or is_fp8 == (profile.precision == "fp8")
    rule = f"seconds of {precision} are needed"
    findings.rule("profile.precision", profile.precision, holds, rule)
    needed = {profile.dtype, "fp8"} if is_fp8 else {profile.dtype}
    for group in context.groups.values():
        device, holds = group.device, profile.device == group.device.id
        if profile.on(device.id) is not profile:
            holds = True
        rule = f"seconds were measured on {profile.device}, the cluster has {device.id}"
        if is_counted:
            bandwidth = device.memory_bandwidth_bytes_per_second
            holds = bandwidth is not None
            holds = holds and needed <= device.peak_flops_per_second.keys()
            rule = f"{device.id} needs a memory bandwidth and peaks of {sorted(needed)}"
        findings.rule("profile.device", profile.device, holds, rule)
    findings.checked += [
        "the plan's id is the sha256 of its request",
        "the profile is the one that the request names, of the job's precision and the "
        "device",
    ]
    return len(findings.problems) == before


def check_layout(plan: Plan, context: Context, findings: Findings) -> None:
    """Check degrees, batch, sharding, schedule, offloading and the job's constraints."""
    layout = plan.layout
    devices = {context.devices}
    check_degrees("", layout, plan.micro_batches, devices, context, findings)
    _check_schedule(layout, context, findings)
    _check_hosts(plan, context, findings)
    missing = [one.name for one in context.profile.layers if not context.rows(one)]
    if missing and not context.is_derived:
        message = f"the profile has no measurements of {missing[0]!r} for its degrees."
        findings.wrong("layout", message)
    for field, constraint in context.job.constraints.items():
        if field not in ("recompute", DIVISION):
            value: Any = layout.constrained(field)
            holds = allows(constraint, value)
            if field == "schedule":
                holds = permits_schedule(constraint, value)
            rule = "the job's constraint does not allow it"
            findings.rule(f"layout.{field}", value, holds, rule)
    findings.checked.append(
        "degrees multiply to the devices, micro-batches to the global batch, "
        "constraints are met"
    )


def check_degrees(
    where: str,
    layout: Layout,
    micro_batches: int,
    devices: set[int],
    context: Context,
    findings: Findings,
) -> None:
    """Check that a layout is valid on its devices, and has the batch of the job.

    Args:
        where: field of a plan with this layout; "": of the whole plan.
        layout: the layout.
        micro_batches: that the plan states.
        devices: possible numbers of devices.
        context: of the plan.
        findings: problems are added here.
    """
    prefix = f"{where}." if where else ""
    rule = f"use {' or '.join(str(each) for each in sorted(devices))} devices"
    field = f"{prefix}layout: product of the degrees"
    findings.rule(field, layout.devices, layout.devices in devices, rule)
    try:
        layout.check_devices(layout.devices)
        needed = layout.micro_batches(context.job.global_batch_size)
        findings.equal(f"{prefix}micro_batches", micro_batches, needed)
    except LayoutError as error:
        findings.refused(where, error)


def _check_schedule(layout: Layout, context: Context, findings: Findings) -> None:
    """Check that the schedule takes the layout's stages per rank and chunks."""
    name, stages = layout.schedule, layout.virtual_stages_per_rank
    rule = SCHEDULES.get(name, ScheduleRule(refused="is unknown"))
    findings.rule("layout.schedule", name, not rule.refused, f"it {rule.refused}")
    holds = rule.least_stages <= stages <= (rule.most_stages or stages)
    text = f"{name} does not put so many stages on a rank"
    findings.rule("layout.virtual_stages_per_rank", stages, holds, text)
    chunks, tokens = layout.sequence_chunks, context.job.sequence_length
    shards = chunks * layout.context_parallel_degree
    if layout.sequence_parallel:
        shards *= layout.tensor_parallel_degree
    holds = chunks == 1 or (rule.cuts_sequence and tokens > 0 and tokens % shards == 0)
    text = f"{name} does not cut {tokens} tokens into {shards} equal parts"
    findings.rule("layout.sequence_chunks", chunks, holds, text)
    reason = context.profile.whole_sequences
    for field in ("sequence_chunks", "context_parallel_degree"):
        pieces = getattr(layout, field)
        holds = pieces == 1 or not reason
        findings.rule(f"layout.{field}", pieces, holds, f"the model {reason}")


def _check_hosts(plan: Plan, context: Context, findings: Findings) -> None:
    """Check that hosts are known, and that no offloaded backward is split."""
    kinds = {action.lstrip("0123456789")[:1] for row in plan.actions for action in row}
    is_split = plan.layout.activation_offload and "I" in kinds
    rule = "actions that split a backward offload nothing"
    findings.rule("layout.activation_offload", is_split, not is_split, rule)
    for field in ("activation_offload", "optimizer_offload"):
        for group in context.groups.values():
            memory = group.whole.host_memory_bytes
            bandwidth = group.device.host_bandwidth_bytes_per_second
            is_offloaded = getattr(plan.layout, field)
            holds = not is_offloaded or None not in (memory, bandwidth)
            rule = "host_memory_bytes or host_bandwidth_bytes_per_second is unknown"
            findings.rule(f"layout.{field}", is_offloaded, holds, rule)


def check_placement(plan: Plan, context: Context, findings: Findings) -> None:
    """Check every rank's coordinates, node and device: equations (P1) to (P3)."""
    rows, groups = plan.placement, context.group_of_node
    nodes = list(dict.fromkeys(row.node for row in rows))
    used = list(dict.fromkeys(groups.get(node) for node in nodes))
    ordered = sorted(nodes, key=lambda node: (used.index(groups.get(node)), node))
    findings.equal("placement: nodes in order", nodes, ordered)
    devices = []
    for node in nodes:
        if node in groups:
            whole = context.cluster.node_groups[groups[node]]
            devices += [(node, device) for device in range(whole.devices_per_node)]
    count = len(devices) if len(nodes) > 1 else context.devices
    findings.equal("placement: number of ranks", len(rows), count)
    findings.equal("placement: devices", len(rows), context.devices)
    homes = defaultdict(set)
    for rank, (row, device) in enumerate(zip(rows, devices, strict=False)):
        expected = _coordinates(rank, plan.layout)
        expected |= {"rank": rank, "node": device[0], "device": device[1]}
        findings.same(f"placement[{rank}]", row.model_dump(), expected)
        homes[row.pipeline, row.data].add(groups.get(row.node))
    split = [cell for cell, found in homes.items() if len(found) > 1]
    rule = "all ranks of a pipeline and data rank are in one node group"
    findings.rule("placement: cells", split, not split, rule)
    findings.checked.append(
        "the placement has every coordinate once, in the layout's order, and ranks fill "
        "node after node"
    )


def _coordinates(rank: int, layout: Layout) -> dict[str, int]:
    """Return the coordinates of a rank: equation (P1)."""
    rest, tensor = divmod(rank, layout.tensor_parallel_degree)
    cell, context = divmod(rest, layout.context_parallel_degree)
    pipeline, data = divmod(cell, layout.data_parallel_degree)
    if layout.rank_order == "tp-cp-pp-dp":
        data, pipeline = divmod(cell, layout.pipeline_parallel_degree)
    replica = data * layout.context_parallel_degree + context
    place = replica * layout.tensor_parallel_degree + tensor
    expert = place // layout.expert_tensor_degree % layout.expert_parallel_degree
    names = ("pipeline", "data", "tensor", "context", "expert")
    return dict(zip(names, (pipeline, data, tensor, context, expert), strict=True))


def check_stages(plan: Plan, context: Context, findings: Findings) -> None:
    """Check that every layer is on one stage, in order, and every stage on its rank."""
    ranks = defaultdict(list)
    for row in plan.placement:
        ranks[row.pipeline].append(row.rank)
    offers: dict[str, set[str]] = {}
    for layer in context.profile.layers:
        listed = (row.recompute for row in layer.measurements)
        offered = {*(context.rows(layer) or listed)}
        if len(offered) > 1 and context.job.runtime != OURS:
            offered = _offered_by_runtime(offered, context)
        offers[layer.name] = offered
    owners = _owners(plan)
    findings.equal("stages: number", len(plan.stages), len(owners))
    for index, (stage, owner) in enumerate(zip(plan.stages, owners, strict=False)):
        expected = {
            "index": index,
            "pipeline_rank": owner,
            "ranks": tuple(ranks[owner]),
        }
        findings.same(f"stages[{index}]", stage.model_dump(), expected)
        _check_recompute(stage, offers, context, findings)
    placed = [layer for stage in plan.stages for layer in stage.layers]
    layers = context.profile.layers
    findings.equal("stages: layers", len(placed), len(layers))
    for place, (one, layer) in enumerate(zip(placed, layers, strict=False)):
        expected = {"name": layer.name, "modules": layer.modules}
        findings.same(f"stages: layer {place}", one.model_dump(), expected)
    counts = [len(stage.layers) for stage in plan.stages]
    check_division("stages: layers", counts, context, findings)
    findings.checked += [
        "every layer is on one stage, in the model's order, every stage on its rank",
        "every recompute mode is one that the profile offers and the job permits",
    ]


def _owners(plan: Plan) -> tuple[int, ...]:
    """Return the rank of every stage; the plan's own if the schedule allows it."""
    layout = plan.layout
    ranks, virtual = layout.pipeline_parallel_degree, layout.virtual_stages_per_rank
    rule = SCHEDULES.get(layout.schedule, ScheduleRule())
    shape = Shape(ranks, plan.micro_batches, virtual)
    possible = [place(shape) for place in rule.placements]
    stated = tuple(stage.pipeline_rank for stage in plan.stages)
    return stated if stated in possible else possible[0]


def _offered_by_runtime(listed: set[str], context: Context) -> set[str]:
    """Return the modes of a block under another runtime.

    Args:
        listed: modes that the profile lists.
        context: of the plan.
    """
    runtime = planned(context.job.runtime)
    transformer = context.profile.transformer
    found = listed & {*runtime.modes}
    if transformer is not None:
        # Rows are derived, also in modes that our own executor does not have.
        found |= {mode for mode in runtime.policies if has_modules(mode, transformer)}
    return found


def _check_recompute(
    stage: Stage, offers: dict[str, set[str]], context: Context, findings: Findings
) -> None:
    """Check that modes are in the profile, and permitted by layout, schedule and job.

    Args:
        stage: its layers.
        offers: modes in the profile by layer.
        context: of the plan.
        findings: problems are added here.
    """
    word = context.layout.recompute
    constraint = context.job.constraints.get("recompute")
    rule = SCHEDULES.get(context.layout.schedule, ScheduleRule())
    for layer in stage.layers:
        offered = offers.get(layer.name) or set(MODES)
        possible = {mode for mode in offered if allows(constraint, mode)} or offered
        if allows(constraint, "per-layer"):
            possible = offered
        if word in offered:
            possible = possible & {word}
        if rule.recomputes_ahead:
            possible = possible & {"none"}
        where = f"stages[{stage.index}]: recompute of {layer.name!r}"
        mode, text = layer.recompute, f"possible are {sorted(possible)}"
        findings.rule(where, mode, mode in possible, text)


def check_division(
    where: str, counts: Sequence[int], context: Context, findings: Findings
) -> None:
    """Check the number of layers per stage, also against the job's constraint."""
    names = [layer.name for layer in context.profile.layers]
    findings.equal(f"{where}: number", sum(counts), len(names))
    constraint: Any = context.job.constraints.get(DIVISION)
    if isinstance(constraint, tuple):
        where = f"{where} against the job's {DIVISION}"
        findings.equal(where, tuple(counts), constraint)
    elif constraint is not None:
        holds = is_even(names, constraint, counts)
        rule = f"the job's {DIVISION} is {constraint}"
        findings.rule(where, list(counts), holds, rule)


def is_even(names: Sequence[str], rule: str, counts: Sequence[int]) -> bool:
    """Return whether a division obeys ``even`` or ``even-layers``.

    ``even-layers`` divides all layers evenly; ``even`` those that are elements of lists
    (``LIST.0``, ``LIST.1``, ...), and all others are on the stage of the layer before
    them. The first stages have one more.
    """
    divided = _numbered(names) if rule == "even" else [True] * len(names)
    stops = list(accumulate(counts, initial=0))
    if stops[-1] != len(names) or min(counts, default=0) < 1:
        return False
    held = [sum(divided[a:b]) for a, b in pairwise(stops)]
    starts_divided = all(divided[start] for start in stops[1:-1])
    is_ordered = held == sorted(held, reverse=True)
    return starts_divided and is_ordered and 0 < held[-1] >= held[0] - 1


def _numbered(names: Sequence[str]) -> list[bool]:
    """Return which layers are elements of lists; all if there are no lists."""
    parts = [name.rpartition(".") for name in names]
    lists = defaultdict(list)
    for head, _, number in parts:
        if head and number.isdecimal():
            lists[head].append(int(number))
    found = [
        number.isdecimal() and 0 in lists[head] and len(lists[head]) > 1
        for head, _, number in parts
    ]
    return found if any(found) else [True] * len(names)


def check_differences(context: Context, findings: Findings) -> None:
    """Check that replicas and devices that differ can run the layout."""
    layout = context.layout
    columns = len(Sites(context).columns)
    rule = f"{len(context.groups)} node groups and {columns} kinds of replicas"
    if len(context.groups) > 1 or columns > 1:
        holds = layout.schedule != "synthesized"
        findings.rule("layout.schedule", layout.schedule, holds, rule)
        chunks = layout.sequence_chunks
        findings.rule("layout.sequence_chunks", chunks, chunks == 1, rule)
    if columns > 1:
        for field, possible in (
            ("schedule", ("gpipe", "1f1b")),
            ("zero_stage", (0, 1)),
            ("virtual_stages_per_rank", (1,)),
            ("expert_parallel_degree", (1,)),
        ):
            value = getattr(layout, field)
            holds = value in possible
            findings.rule(f"layout.{field}", value, holds, f"{rule} need {possible}")
    homes = defaultdict(set)
    for row in context.placement:
        replica = row.data * layout.context_parallel_degree + row.context
        shard = (row.pipeline, replica // (layout.zero_shard_degree or 1))
        homes[shard].add(context.group_of_node[row.node])
    if layout.zero_shard_degree:
        holds = all(len(found) == 1 for found in homes.values())
        rule = "ranks that shard states are in one node group"
        field = "layout.zero_shard_degree"
        findings.rule(field, layout.zero_shard_degree, holds, rule)
    findings.checked.append(
        "replicas and devices that differ can run the schedule, ZeRO stage and experts"
    )
