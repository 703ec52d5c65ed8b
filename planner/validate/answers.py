"""What a plan says besides its own time and memory: price, deadline, Pareto front, relaxed limits, sensitivity."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

from planner.spec.plan import ParetoPoint, Plan
from planner.validate.division import check_division
from planner.validate.facts import Facts
from planner.validate.findings import Findings
from planner.validate.memory import largest_capacity_bytes
from planner.validate.offload import check_offload_of
from planner.validate.proof import check_devices
from planner.validate.stages import check_batch

_RELATIVE = 1e-9


def check_answers(plan: Plan, facts: Facts, findings: Findings) -> None:
    """All of them, as far as they can be recomputed from the plan itself."""
    step = plan.prediction.step_seconds
    deadline = facts.job.deadline_seconds
    if deadline is not None and step > deadline * (1 + _RELATIVE):
        findings.wrong(
            "prediction.step_seconds",
            f"{step!r} is after the deadline of {deadline!r}.",
        )
    _check_price(
        "cost_per_token", plan.cost_per_token, step, _hourly(facts), facts, findings
    )
    _check_pareto(plan, facts, findings)
    _check_relaxations(plan, facts, findings)
    _check_sensitivity(plan, findings)
    findings.checked.append(
        "price, deadline, Pareto front, relaxed limits and sensitivity agree with the plan"
    )


def _check_price(
    where: str,
    stated: float | None,
    step: float,
    prices: Sequence[float | None],
    facts: Facts,
    findings: Findings,
) -> None:
    """Step x price of the devices per second / tokens of a step, and the devices may be these or those: the price lies
    between."""
    known = [price for price in prices if price is not None]
    if not known or (stated is None and len(known) == len(prices)):
        findings.equal(where, stated, "a price" if known else None)
    if not known or stated is None:
        return
    tokens = facts.job.global_batch_size * max(1, facts.job.sequence_length)
    least, most = (step * price / 3600 / tokens for price in (min(known), max(known)))
    findings.close(where, stated, min(max(stated, least), most), relative=_RELATIVE)


def _hourly(facts: Facts) -> list[float | None]:
    """Price of the devices that the plan uses."""
    each = [(group.devices, group.used.device_price_per_hour) for group in facts.groups]
    known = [devices * price for devices, price in each if price is not None]
    return [sum(known) if len(known) == len(each) else None]


def _check_pareto(plan: Plan, facts: Facts, findings: Findings) -> None:
    """Valid layouts within the cluster, none beaten by another in step, devices and memory at once."""
    each = [group.device_price_per_hour for group in facts.cluster.node_groups]
    for position, point in enumerate(plan.pareto):
        where = f"pareto[{position}]"
        check_batch(
            f"{where}.micro_batches: samples per step",
            point.layout,
            point.micro_batches,
            facts,
            findings,
        )
        check_offload_of(point.layout, f"{where}.layout", findings)
        findings.equal(f"{where}.devices", point.devices, point.layout.devices)
        findings.equal(
            f"{where}.layers_per_stage: layers",
            sum(point.layers_per_stage),
            len(facts.profile.layers),
        )
        stages = (
            point.layout.pipeline_parallel_degree * point.layout.virtual_stages_per_rank
        )
        findings.equal(
            f"{where}.layers_per_stage: stages", len(point.layers_per_stage), stages
        )
        check_division(
            f"{where}.layers_per_stage", point.layers_per_stage, facts, findings
        )
        if point.devices > facts.cluster.devices:
            findings.wrong(
                f"{where}.devices", f"the cluster has fewer than {point.devices}."
            )
        if point.peak_bytes > (capacity := largest_capacity_bytes(facts)):
            findings.wrong(
                f"{where}.peak_bytes", f"{point.peak_bytes} of {capacity} do not fit."
            )
        prices = [one and one * point.devices for one in each]
        _check_price(
            f"{where}.cost_per_token",
            point.cost_per_token,
            point.step_seconds,
            prices,
            facts,
            findings,
        )
    for one, other in permutations(range(len(plan.pareto)), 2):
        if all(
            here <= there
            for here, there in zip(
                _figures(plan.pareto[one]), _figures(plan.pareto[other]), strict=True
            )
        ):
            findings.wrong(
                f"pareto[{other}]", f"pareto[{one}] is as good or better in everything."
            )


def _figures(point: ParetoPoint) -> tuple[float, int, int]:
    return point.step_seconds, point.devices, point.peak_bytes


def _check_relaxations(plan: Plan, facts: Facts, findings: Findings) -> None:
    """What is told gains something; where the batch is the plan's, the gain is that of the step."""
    for position, one in enumerate(plan.relaxations):
        where = f"relaxations[{position}]"
        if one.gain is None or one.gain <= 0:
            findings.wrong(f"{where}.gain", f"{one.gain} is no gain.")
        elif one.constraint != "global_batch_size":
            gain = 1 - one.step_seconds / plan.prediction.step_seconds
            findings.close(
                f"{where}.gain", one.gain, gain, relative=1e-6, absolute=_RELATIVE
            )
        check_devices(where, one.layout, facts, findings)


def _check_sensitivity(plan: Plan, findings: Findings) -> None:
    """Overtakings name alternatives of the plan, nearest first, and the verdict is theirs."""
    for position, one in enumerate(plan.sensitivity):
        where = f"sensitivity[{position}]"
        changes = [abs(each.change) for each in one.overtakes]
        if changes != sorted(changes):
            findings.wrong(
                f"{where}.overtakes", "they are not in the order of their changes."
            )
        for each in one.overtakes:
            if each.alternative >= len(plan.alternatives):
                findings.wrong(
                    f"{where}.overtakes", f"there is no alternative {each.alternative}."
                )
        findings.equal(
            f"{where}.holds",
            one.holds,
            all(change > one.uncertainty for change in changes),
        )
