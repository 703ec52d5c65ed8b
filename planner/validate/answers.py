"""What a plan says besides its own time and memory: price, deadline, Pareto front, relaxed limits, sensitivity."""

from __future__ import annotations

from itertools import permutations

from planner.spec.layout import Layout
from planner.spec.plan import ParetoPoint, Plan
from planner.validate.facts import Facts
from planner.validate.findings import Findings
from planner.validate.memory import capacity_bytes

_RELATIVE = 1e-9


def check_answers(plan: Plan, facts: Facts, findings: Findings) -> None:
    """All of them, as far as they can be recomputed from the plan itself."""
    step = plan.prediction.step_seconds
    deadline = facts.job.deadline_seconds
    if deadline is not None and step > deadline * (1 + _RELATIVE):
        findings.wrong("prediction.step_seconds", f"{step!r} is behind the deadline of {deadline!r}.")
    _check_price("cost_per_token", plan.cost_per_token, step, plan.layout.devices, facts, findings)
    _check_pareto(plan, facts, findings)
    _check_relaxations(plan, facts, findings)
    _check_sensitivity(plan, findings)
    findings.checked.append("price, deadline, Pareto front, relaxed limits and sensitivity agree with the plan")


def _check_price(where: str, stated: float | None, step: float, devices: int, facts: Facts, findings: Findings) -> None:
    """Step x devices x price of one per second / tokens of a step."""
    price = facts.nodes.price_per_hour
    if price is None and not isinstance(facts.nodes.device, str):
        price = facts.nodes.device.price_per_hour
    if price is None or stated is None:
        findings.equal(where, stated, None if price is None else "a price")
        return
    tokens = facts.job.global_batch_size * max(1, facts.job.sequence_length)
    findings.close(where, stated, step * devices * price / 3600 / tokens, relative=_RELATIVE)


def _check_pareto(plan: Plan, facts: Facts, findings: Findings) -> None:
    """Valid layouts within the cluster, none beaten by another in step, devices and memory at once."""
    for position, point in enumerate(plan.pareto):
        where = f"pareto[{position}]"
        _check_batch(where, point.layout, point.micro_batches, facts, findings)
        findings.equal(f"{where}.devices", point.devices, point.layout.devices)
        findings.equal(f"{where}.layers_per_stage: layers", sum(point.layers_per_stage), len(facts.profile.layers))
        stages = point.layout.pipeline_parallel_degree * point.layout.virtual_stages_per_rank
        findings.equal(f"{where}.layers_per_stage: stages", len(point.layers_per_stage), stages)
        if point.devices > facts.nodes.nodes * facts.nodes.devices_per_node:
            findings.wrong(f"{where}.devices", f"the cluster has fewer than {point.devices}.")
        if point.peak_bytes > capacity_bytes(facts):
            findings.wrong(f"{where}.peak_bytes", f"{point.peak_bytes} of {capacity_bytes(facts)} do not fit.")
        _check_price(
            f"{where}.cost_per_token", point.cost_per_token, point.step_seconds, point.devices, facts, findings
        )
    for one, other in permutations(range(len(plan.pareto)), 2):
        if all(
            here <= there for here, there in zip(_figures(plan.pareto[one]), _figures(plan.pareto[other]), strict=True)
        ):
            findings.wrong(f"pareto[{other}]", f"pareto[{one}] is as good or better in everything.")


def _figures(point: ParetoPoint) -> tuple[float, int, int]:
    return point.step_seconds, point.devices, point.peak_bytes


def _check_batch(where: str, layout: Layout, micro_batches: int, facts: Facts, findings: Findings) -> None:
    samples = micro_batches * layout.micro_batch_size * layout.data_parallel_degree
    findings.equal(f"{where}.micro_batches: samples per step", samples, facts.job.global_batch_size)


def _check_relaxations(plan: Plan, facts: Facts, findings: Findings) -> None:
    """What is told gains something; where the batch is the plan's, the gain is that of the step."""
    for position, one in enumerate(plan.relaxations):
        where = f"relaxations[{position}]"
        if one.gain is None or one.gain <= 0:
            findings.wrong(f"{where}.gain", f"{one.gain} is no gain.")
        elif one.constraint != "global_batch_size":
            gain = 1 - one.step_seconds / plan.prediction.step_seconds
            findings.close(f"{where}.gain", one.gain, gain, relative=1e-6, absolute=_RELATIVE)
        findings.equal(f"{where}.layout: product of the degrees", one.layout.devices, facts.devices)


def _check_sensitivity(plan: Plan, findings: Findings) -> None:
    """Overtakings name alternatives of the plan, nearest first, and the verdict is theirs."""
    for position, one in enumerate(plan.sensitivity):
        where = f"sensitivity[{position}]"
        changes = [abs(each.change) for each in one.overtakes]
        if changes != sorted(changes):
            findings.wrong(f"{where}.overtakes", "they are not in the order of their changes.")
        for each in one.overtakes:
            if each.alternative >= len(plan.alternatives):
                findings.wrong(f"{where}.overtakes", f"there is no alternative {each.alternative}.")
        findings.equal(f"{where}.holds", one.holds, all(change > one.uncertainty for change in changes))
