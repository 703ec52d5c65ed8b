"""Another partition for pipeline ranks of unequal speed.

The cost model knows one kind of device, so a slow rank is priced by its layers: their seconds, times how much longer
that rank takes. Every partition that is looked at is priced with the factors of the ranks that it gives the layers to,
so that a layer that leaves the slow rank is as fast as it will be. Where a rank has several stages, each of them is as
slow as the rank; which stage stands on which rank is the schedule's, and stays. On nodes of different devices a layer
has no seconds of its own: there its kernels do so many times the work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain, permutations, repeat

from planner.errors import LayoutError
from planner.executor.elastic.weigh import Rebalanced
from planner.spec import ModelProfile, Plan, PredictionLayout
from planner.spec.devices import find_device
from planner.spec.profile import Measurement

Counts = tuple[int, ...]
"""Layers of every stage."""


def rebalanced(
    plan: Plan, profile: ModelProfile, slowdown: Sequence[float]
) -> Rebalanced | None:
    """The fastest partition that is reached by taking one layer from a stage for another, each time the best move.

    Its plan carries the profile with the seconds that it was chosen by, so that its prediction holds for these ranks.

    Args:
        plan: with one or several stages per pipeline rank; on a part of its cluster, its place in that stays.
        profile: the plan's.
        slowdown: of every pipeline rank.

    Returns:
        None: no such partition is faster and fits.
    """
    from planner.search import make_request, plan_layout, predict

    rows = priced_rows(profile, plan)
    cluster, job = plan.cluster, plan.request.job
    of_stages = [slowdown[stage.pipeline_rank] for stage in plan.stages]

    @cache
    def seconds(counts: Counts) -> float:
        try:
            found = predict(
                slowed(rows, counts, of_stages), cluster, job, _layout(plan, counts)
            )
        except LayoutError:
            return float("inf")
        # An order that is synthesized may be better with the stages elsewhere, where other ranks' factors hold.
        stays = [stage.pipeline_rank for stage in found.stages] == [
            stage.pipeline_rank for stage in plan.stages
        ]
        return found.prediction.step_seconds if found.fits and stays else float("inf")

    begin = best = tuple(len(stage.layers) for stage in plan.stages)
    while (better := min(_neighbours(best), key=seconds, default=best)) and seconds(
        better
    ) < seconds(best):
        best = better
    if best == begin or seconds(begin) == float("inf"):
        return None
    chosen = slowed(rows, best, of_stages)
    found = plan_layout(make_request(chosen, cluster, job), chosen, _layout(plan, best))
    return (
        Rebalanced(found, seconds(begin), seconds(best))
        if isinstance(found, Plan)
        else None
    )


def _layout(plan: Plan, counts: Counts) -> PredictionLayout:
    return PredictionLayout(**plan.layout.model_dump(), layers_per_stage=counts)


def _neighbours(counts: Counts) -> Iterator[Counts]:
    """One layer less in a stage and one more in another; those between pass theirs on."""
    for giver, taker in permutations(range(len(counts)), 2):
        if counts[giver] > 1:
            moved = list(counts)
            moved[giver] -= 1
            moved[taker] += 1
            yield tuple(moved)


def priced_rows(profile: ModelProfile, plan: Plan) -> ModelProfile:
    """With seconds in every row, where all devices are equal, and no rows but those of the plan's micro-batches and
    shards."""
    from planner.cost import price

    layout = plan.layout
    kept = profile.model_copy(
        update={
            "layers": tuple(
                layer.model_copy(
                    update={
                        "measurements": tuple(
                            row
                            for row in layer.measurements
                            if (row.micro_batch_size, row.tensor_parallel_degree)
                            == (layout.micro_batch_size, layout.tensor_parallel_degree)
                        )
                    }
                )
                for layer in profile.layers
            )
        }
    )
    devices = [find_device(group.device) for group in plan.cluster.node_groups]
    has_seconds = all(
        row.forward_seconds is not None
        for layer in kept.layers
        for row in layer.measurements
    )
    if has_seconds or any(device != devices[0] for device in devices):
        return kept
    return price(kept, devices[0])


def slowed(
    profile: ModelProfile, counts: Counts, of_stages: Sequence[float]
) -> ModelProfile:
    """The profile with every layer's seconds as its stage's rank takes them.

    Args:
        of_stages: how many times as long the rank of every stage takes.
    """
    factors = chain.from_iterable(
        repeat(factor, count) for factor, count in zip(of_stages, counts, strict=True)
    )
    layers = tuple(
        layer.model_copy(
            update={
                "measurements": tuple(
                    _slowed_row(row, factor) for row in layer.measurements
                )
            }
        )
        for layer, factor in zip(profile.layers, factors, strict=True)
    )
    return profile.model_copy(update={"layers": layers})


def _slowed_row(row: Measurement, factor: float) -> Measurement:
    if row.forward_seconds is None:
        return _with_more_work(row, factor)
    seconds = {
        name: getattr(row, name)
        for name in Measurement.model_fields
        if name.endswith("_seconds")
    }
    return row.model_copy(
        update={
            name: value * factor for name, value in seconds.items() if value is not None
        }
    )


def _with_more_work(row: Measurement, factor: float) -> Measurement:
    """A row without seconds: so many times the FLOPs and bytes of its kernels, as a device that is slower sees them.
    What they cost beyond that, to be launched, stays. The layer's own FLOPs stay too, for MFU, where kernels tell."""
    names = ["forward_bytes", "backward_bytes"]
    if not row.operations:
        names += [
            "forward_flops",
            "backward_input_flops",
            "backward_weight_flops",
            "recompute_flops",
        ]
    counted = {name: round(getattr(row, name) * factor) for name in names}
    kernels = {
        name: tuple(
            operation.model_copy(
                update={
                    "flops": round(operation.flops * factor),
                    "bytes": round(operation.bytes * factor),
                }
            )
            for operation in getattr(row, name)
        )
        for name in ("operations", "recompute_operations")
    }
    return row.model_copy(update={**counted, **kernels})
