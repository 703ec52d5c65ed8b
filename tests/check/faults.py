"""Frozen faults that a check has to find: altered plans, and a cost model that is wrong.

An alteration changes one thing in the plan of a pipeline of four stages; a cost fault
replaces one part of the cost model while a plan is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from planner.cost import communication, compute, layers, memory, pricing
from planner.spec import ModelProfile, PredictionLayout
from planner.spec.profile import Collective, Measurement, Operation
from tests.builders import layer, profile

Document = dict[str, Any]
Alteration = Callable[[Document], object]


def scale(part: Document, name: str, factor: float) -> None:
    """Multiply a number."""
    part[name] *= factor


def swap(items: list[Any], one: int, other: int) -> None:
    """Exchange two entries."""
    items[one], items[other] = items[other], items[one]


def second_micro_batch_first(document: Document) -> None:
    """The last stage runs its second micro-batch before its first one."""
    actions = document["actions"][3]
    swap(actions, 0, 2)
    swap(actions, 1, 3)


def no_further_bound(document: Document) -> None:
    """The bound is a tenth below the step, and the plan says optimal."""
    scale(document["search"], "lower_bound_seconds", 0.9)
    document["search"]["gap"] = 0.1


def move_layer(document: Document) -> None:
    """The last stage's layer joins the stage before; the last stage takes its first layer."""
    stages = document["stages"]
    stages[2]["layers"], stages[3]["layers"] = stages[3]["layers"], stages[2]["layers"]


def move_boundary(document: Document) -> None:
    """One layer changes to the next stage: a valid stage map, but not the one that was priced."""
    first, second = document["stages"][0]["layers"], document["stages"][1]["layers"]
    second.insert(0, first.pop())


def without_transfers(document: Document) -> None:
    """Transfers take no time, and the step is as much shorter."""
    prediction = document["prediction"]
    parts = prediction["breakdown"]
    prediction["step_seconds"] -= parts["pipeline_seconds"]
    parts["pipeline_seconds"] = 0.0


ALTERATIONS: dict[str, tuple[Alteration, str]] = {
    "id": (lambda d: d.update(id="0" * 64), "id: "),
    "profile id": (
        lambda d: d["request"].update(profile_id="0" * 64),
        "request.profile_id: ",
    ),
    "precision": (
        lambda d: d["request"]["job"].update(precision="fp32"),
        "request.job.precision: ",
    ),
    "data degree": (
        lambda d: d["layout"].update(data_parallel_degree=2),
        "layout: product of the degrees: ",
    ),
    "batch": (
        lambda d: d["layout"].update(micro_batch_size=2),
        "micro_batches: ",
    ),
    "micro-batches": (
        lambda d: d.update(micro_batches=4),
        "micro_batches: ",
    ),
    "constraint": (
        lambda d: d["request"]["job"]["constraints"].update(
            pipeline_parallel_degree=[1, 2]
        ),
        "layout.pipeline_parallel_degree: ",
    ),
    "context degree": (
        lambda d: d["layout"].update(context_parallel_degree=2),
        "layout: product of the degrees: ",
    ),
    "sequence parallel": (
        lambda d: d["layout"].update(sequence_parallel=True),
        "layout: ",
    ),
    "layers out of order": (move_layer, "stages: layer 2.name: "),
    "layer doubled": (
        lambda d: d["stages"][1]["layers"].append(dict(d["stages"][2]["layers"][0])),
        "stages: layers: ",
    ),
    "layer lost": (
        lambda d: d["stages"][1]["layers"][0].update(name="ghost"),
        "stages: layer 1.name: ",
    ),
    "modules": (
        lambda d: d["stages"][0]["layers"][0].update(modules=["other"]),
        "stages: layer 0.modules: ",
    ),
    "recompute mode": (
        lambda d: d["stages"][0]["layers"][0].update(recompute="full"),
        "stages[0]: recompute of 'block0': ",
    ),
    "stage index": (lambda d: d["stages"][1].update(index=2), "stages[1].index: "),
    "stage rank": (
        lambda d: d["stages"][1].update(pipeline_rank=3),
        "stages[1].pipeline_rank: ",
    ),
    "stage ranks": (lambda d: d["stages"][1].update(ranks=[2]), "stages[1].ranks: "),
    "stage missing": (lambda d: d["stages"].pop(), "stages: number: "),
    "rank moved": (
        lambda d: d["placement"][1].update(pipeline=2),
        "placement[1].pipeline: ",
    ),
    "rank swapped": (
        lambda d: (
            d["placement"][0].update(pipeline=1),
            d["placement"][1].update(pipeline=0),
        ),
        "stages[0].ranks: ",
    ),
    "rank missing": (lambda d: d["placement"].pop(), "placement: devices: "),
    "rank numbers": (lambda d: swap(d["placement"], 0, 1), "placement[0].rank: "),
    "device shared": (
        lambda d: d["placement"][1].update(device=0),
        "placement[1].device: ",
    ),
    "device unknown": (
        lambda d: d["placement"][3].update(device=7),
        "placement[3].device: ",
    ),
    "node unknown": (
        lambda d: d["placement"][3].update(node=1),
        "placement[3].node: ",
    ),
    "expert": (lambda d: d["placement"][3].update(expert=1), "placement[3].expert: "),
    "action doubled": (
        lambda d: d["actions"][1].append("1B7"),
        "actions[1]: stage 1, micro-batch 7: ",
    ),
    "action lost": (
        lambda d: d["actions"][2].pop(),
        "actions[2]: stage 2, micro-batch 7: ",
    ),
    "action on the wrong rank": (
        lambda d: d["actions"][0].append("1F9"),
        "actions[0]: the plan says 1F9; stage 1 is on rank 1.",
    ),
    "action of no micro-batch": (
        lambda d: d["actions"][0].append("0F99"),
        "actions[0]: stage 0, micro-batch 99: ",
    ),
    "no action": (
        lambda d: d["actions"][0].insert(0, "0X0"),
        "actions: '0X0' is not an action",
    ),
    "no actions": (
        lambda d: d.update(actions=[]),
        "actions: lists, one per pipeline rank: ",
    ),
    "backward first": (
        lambda d: swap(d["actions"][3], 0, 1),
        "actions[3]: the plan says 3B0; it needs 3F0",
    ),
    "losses out of order": (
        second_micro_batch_first,
        "actions[3]: the plan says [1, 0, 2",
    ),
    "dead-lock": (
        lambda d: d["actions"][0].insert(1, d["actions"][0].pop(4)),
        "actions: deadlock: ",
    ),
    "more in flight": (
        lambda d: d["actions"].__setitem__(
            0, sorted(d["actions"][0], key=lambda text: text[1] == "B")
        ),
        "actions[0]: in flight under 1f1b: ",
    ),
    "step": (
        lambda d: scale(d["prediction"], "step_seconds", 0.999),
        "prediction.step_seconds: ",
    ),
    "step, by a millionth": (
        lambda d: scale(d["prediction"], "step_seconds", 1 - 1e-5),
        "prediction.step_seconds: ",
    ),
    "tokens": (
        lambda d: scale(d["prediction"], "tokens_per_second", 1.01),
        "prediction.tokens_per_second: ",
    ),
    "mfu": (lambda d: d["prediction"].update(mfu=0.5), "prediction.mfu: "),
    "mfu unknown": (lambda d: d["prediction"].update(mfu=None), "prediction.mfu: "),
    "bubble": (
        lambda d: scale(d["prediction"], "bubble_fraction", 0.5),
        "prediction.bubble_fraction: ",
    ),
    "memory rows": (
        lambda d: d["prediction"]["memory"].pop(),
        "prediction.memory: rows: ",
    ),
    "alternative faster": (
        lambda d: d["alternatives"][0].update(
            step_seconds=d["prediction"]["step_seconds"] / 2, slowdown=-0.5
        ),
        "alternatives[0].step_seconds: ",
    ),
    "unsupported alternative first": (
        lambda d: d["alternatives"].insert(
            0, d["alternatives"][0] | {"supported": False}
        ),
        "alternatives[0].supported: ",
    ),
    "slowdown": (
        lambda d: d["alternatives"][0].update(slowdown=9.0),
        "alternatives[0].slowdown: ",
    ),
    "alternative's degrees": (
        lambda d: d["alternatives"][0]["layout"].update(data_parallel_degree=3),
        "alternatives[0].layout: product of the degrees: ",
    ),
    "alternative's batch": (
        lambda d: d["alternatives"][0].update(micro_batches=5),
        "alternatives[0].micro_batches: ",
    ),
    "alternative's layers": (
        lambda d: d["alternatives"][0].update(layers_per_stage=[9]),
        "alternatives[0].layers_per_stage: number: ",
    ),
    "alternative too large": (
        lambda d: d["alternatives"][0].update(peak_bytes=10**15),
        "alternatives[0].peak_bytes: ",
    ),
    "bound above": (
        lambda d: scale(d["search"], "lower_bound_seconds", 1.1),
        "search.lower_bound_seconds: ",
    ),
    "bound below": (
        lambda d: scale(d["search"], "lower_bound_seconds", 0.9),
        "search.gap: ",
    ),
    "optimal with a gap": (no_further_bound, "search.optimal: "),
    "counts": (
        lambda d: d["search"].update(layouts_considered=99),
        "search.layouts_considered: ",
    ),
    "breakdown that does not add up": (
        lambda d: scale(d["prediction"]["breakdown"], "compute_seconds", 1.001),
        "prediction.breakdown.compute_seconds: ",
    ),
    "transfers left out": (
        without_transfers,
        "prediction.breakdown.pipeline_seconds: ",
    ),
    "capacity": (
        lambda d: scale(d["prediction"]["memory"][0], "capacity_bytes", 2),
        "prediction.memory[0].capacity_bytes: ",
    ),
    "reserved bytes": (
        lambda d: d["prediction"]["memory"][1].update(reserved_bytes=1),
        "prediction.memory[1].reserved_bytes: ",
    ),
    "interval": (
        lambda d: d["prediction"].update(step_seconds_80=[0.0, 1.0]),
        "prediction.step_seconds_80: ",
    ),
    "risk": (
        lambda d: d["prediction"].update(out_of_memory_probability=0.5),
        "prediction.out_of_memory_probability: ",
    ),
}

RICH = PredictionLayout(
    data_parallel_degree=2,
    tensor_parallel_degree=2,
    pipeline_parallel_degree=2,
    zero_stage=1,
    recompute="full",
    schedule="1f1b",
    layers_per_stage=(2, 2),
)
"""A layout that uses most equations of the cost model, on two nodes of four devices."""


def rich_model() -> ModelProfile:
    """Return four counted layers with products, attention, collectives and a skip.

    The first and the last layer share parameters.
    """
    product = Operation(
        kind="matmul", count=2, flops=2 * 10**10, bytes=10**7, m=1024, n=1024, k=1024
    )
    attention = Operation(kind="attention", count=1, flops=10**10, bytes=10**6)
    norm = Operation(kind="memory", count=3, flops=0, bytes=10**7)
    plain = profile(
        layer(
            parameters=4_000_000,
            activation=50_000_000,
            kept=1_000_000,
            output=2_000_000,
            temporary=7_000_000,
            flops=10**11,
            optimizer=None,
            modes=("none", "full"),
        )
        * 4,
        degrees=(2,),
        edges=[(0, 3, 3_000_000)],
        shared=[((0, 3), 1_000_000)],
    )
    exchange = [
        Collective(phase=phase, operation="all_reduce", bytes=4_000_000, count=2)
        for phase in ("forward", "backward")
    ]
    seconds = ("forward", "backward_input", "backward_weight", "recompute", "optimizer")
    fields: Document = {f"{name}_seconds": None for name in seconds}
    fields |= {"source": "counted", "collectives": tuple(exchange)}
    fields["operations"] = (product, attention, norm)

    def counted(row: Measurement) -> Measurement:
        return row.model_copy(update=fields)

    found = []
    for one in plain.layers:
        rows = tuple(counted(row) for row in one.measurements)
        found.append(one.model_copy(update={"measurements": rows}))
    return plain.model_copy(update={"device": "counted", "layers": tuple(found)})


CostFault = Callable[[pytest.MonkeyPatch], None]


def scaled(part: str, factor: float) -> CostFault:
    """Return a fault: a part of every layer's computation is multiplied."""

    def inject(patch: pytest.MonkeyPatch) -> None:
        correct = pricing.in_chunks

        def wrong(*args: Any, **options: Any) -> list[compute.Computation]:
            found = correct(*args, **options)
            return [
                replace(one, **{part: factor * getattr(one, part)}) for one in found
            ]

        patch.setattr(pricing, "in_chunks", wrong)

    return inject


def constant(owner: Any, name: str, value: Any) -> CostFault:
    """Return a fault: a function always returns the same value."""
    return lambda patch: patch.setattr(owner, name, lambda *_, **__: value)


def without_latency(patch: pytest.MonkeyPatch) -> None:
    """Collectives have no latency."""
    correct = communication.collective_seconds

    def wrong(*args: Any, **options: Any) -> float:
        return correct(*args, **{**options, "latency": False})

    patch.setattr(pricing, "collective_seconds", wrong)


def one_in_flight(patch: pytest.MonkeyPatch) -> None:
    """Every stage holds the activations of one micro-batch."""
    correct = memory.held_units_of_rank

    def wrong(*args: Any) -> Any:
        return dict.fromkeys(correct(*args), 1)

    patch.setattr(memory, "held_units_of_rank", wrong)


def whole_optimizer(patch: pytest.MonkeyPatch) -> None:
    """ZeRO shards nothing."""
    patch.setattr(pricing.LayerPricing, "_sharded", lambda self, size, *_: size)


def free_backward_exchange(patch: pytest.MonkeyPatch) -> None:
    """Collectives of the backward take no time."""
    correct = pricing.LayerPricing._exchange_ticks

    def wrong(self: Any, row: Any, phase: str, *more: Any) -> int:
        return correct(self, row, phase, *more) if phase == "forward" else 0

    patch.setattr(pricing.LayerPricing, "_exchange_ticks", wrong)


def free_transfers(patch: pytest.MonkeyPatch) -> None:
    """Transfers between stages take no time."""

    def wrong(self: layers.LayoutCosts, boundary: int) -> tuple[int, ...]:
        return (0,) * len(self.layers)

    patch.setattr(layers.LayoutCosts, "transfers_behind", wrong)


def gathered_once(patch: pytest.MonkeyPatch) -> None:
    """ZeRO 3 gathers parameters for the forward only."""
    correct = pricing.LayerPricing._gathers

    def wrong(self: Any, *more: Any) -> tuple[int, int]:
        return correct(self, *more)[0], 0

    patch.setattr(pricing.LayerPricing, "_gathers", wrong)


COST_FAULTS: dict[str, tuple[CostFault, int]] = {
    "computation 1 % too long": (scaled("forward_seconds", 1.01), 1),
    "input gradient left out": (scaled("backward_input_seconds", 0.0), 1),
    "weight gradient doubled": (scaled("backward_weight_seconds", 2.0), 1),
    "recomputation not paid": (scaled("recompute_seconds", 0.0), 1),
    "attention doubled": (
        lambda patch: patch.setattr(compute, "_SPEEDS", compute._SPEEDS / 2),
        1,
    ),
    "reduction left out": (
        constant(pricing.LayerPricing, "_reduction_seconds", 0.0),
        1,
    ),
    "reduction latency left out": (
        constant(layers, "_reduction_latency_ticks", 0),
        1,
    ),
    "collectives without latency": (without_latency, 1),
    "collectives of the backward left out": (free_backward_exchange, 1),
    "transfers left out": (free_transfers, 1),
    "optimizer left out": (constant(pricing.LayerPricing, "_moving_seconds", 0.0), 1),
    "gathers of the backward left out": (gathered_once, 3),
    "skips left out": (constant(layers, "skip_costs", ()), 1),
    "shared parameters counted twice": (constant(layers, "shared_costs", ()), 1),
    "activations of one micro-batch": (one_in_flight, 1),
    "states not sharded": (whole_optimizer, 1),
    "receive buffers left out": (constant(memory, "receive_buffers", 0), 1),
    "reserved memory left out": (constant(memory, "reserved_bytes", 0), 1),
    "gathered layers left out": (constant(layers, "_gathered_bytes", 0), 3),
    "allocator overhead left out": (
        lambda patch: patch.setattr(
            pricing.LayerPricing, "_allocated", lambda self, size: size
        ),
        1,
    ),
}
"""By name: the fault, and the ZeRO stage at which it matters."""
