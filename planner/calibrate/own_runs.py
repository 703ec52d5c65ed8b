"""Runs of `planner run` as run documents."""

from __future__ import annotations

from planner.errors import UnsupportedError
from planner.spec.devices import catalogue, find_device
from planner.spec.job import OURS
from planner.spec.layout import Layout
from planner.spec.measured import MeasuredRun
from planner.spec.plan import Plan
from planner.spec.profile import ModelProfile, RecomputeMode
from planner.spec.run import Run, RunResult, RunSource, RuntimeChoice

OWN_SOURCE = "planner run"
"""Name of the source of runs that this package's executor made."""


def own_run(
    plan: Plan, measured: MeasuredRun, profile: ModelProfile, *, name: str = ""
) -> Run:
    """Return a measured run of a plan as a run document.

    Args:
        plan: that was run.
        measured: the report of the run.
        profile: of the plan's model.
        name: identifies the run; default: the plan.

    Raises:
        UnsupportedError: the cost model cannot predict this run from sizes alone: the
            model is no decoder, devices are unlike or unknown, replicas or recompute
            modes differ, or the run did not end well.
    """
    _check_device(plan)
    if measured.unfinished:
        raise UnsupportedError("the run did not end well.", field="unfinished")
    if profile.transformer is None:
        raise UnsupportedError(
            "the sizes of the model are not known.",
            field="profile.transformer",
            hint="plan with a catalogue model that is a decoder.",
        )
    blocks = _blocks(plan, profile)
    layout = plan.layout.model_copy(update={"recompute": _mode(plan, blocks)})
    _check_replicas(layout)
    job = plan.request.job.model_copy(update={"runtime": OURS, "constraints": {}})
    result = RunResult(
        step_seconds=measured.median_step_seconds,
        memory_bytes=max((rank.peak_bytes for rank in measured.ranks), default=None),
        memory_kind="allocated",
    )
    return Run(
        model=profile.transformer,
        cluster=plan.cluster,
        job=job,
        layout=layout,
        stages=_blocks_of_stages(plan, blocks),
        runtime=RuntimeChoice(name=OURS),
        result=result,
        source=RunSource(name=OWN_SOURCE, id=name or plan.id[:12]),
    )


def is_own(run: Run) -> bool:
    """Return whether this package's executor made the run."""
    return run.source.name == OWN_SOURCE


def _check_device(plan: Plan) -> None:
    """Constants belong to an architecture, so the device must be in the catalogue."""
    groups = plan.cluster.node_groups
    devices = {find_device(group.device).id for group in groups}
    if len(devices) > 1:
        raise UnsupportedError(
            f"the devices are unlike: {', '.join(sorted(devices))}.", field="cluster"
        )
    (device,) = devices
    if device not in catalogue():
        raise UnsupportedError(
            f"device {device!r} is not in the catalogue, so its constants are its own.",
            field="cluster",
        )


def _blocks(plan: Plan, profile: ModelProfile) -> frozenset[str]:
    """Names of the layers between the embedding and the output layer."""
    assert profile.transformer is not None
    names = [layer.name for layer in profile.layers]
    blocks = names[1 : 1 + profile.transformer.layers]
    planned = {layer.name for stage in plan.stages for layer in stage.layers}
    if not set(blocks) <= planned:
        raise UnsupportedError("the plan has layers of another model.", field="stages")
    return frozenset(blocks)


def _mode(plan: Plan, blocks: frozenset[str]) -> RecomputeMode:
    """The recompute mode of all blocks."""
    layers = [layer for stage in plan.stages for layer in stage.layers]
    modes = {layer.recompute for layer in layers if layer.name in blocks}
    if len(modes) > 1:
        raise UnsupportedError(
            f"blocks differ in recompute: {', '.join(sorted(modes))}.", field="stages"
        )
    (mode,) = modes
    return mode


def _check_replicas(layout: Layout) -> None:
    if layout.has_uneven_shares or layout.rank_order != Layout().rank_order:
        raise UnsupportedError(
            "replicas have unlike shares, or ranks another order than the default.",
            field="layout",
        )


def _blocks_of_stages(plan: Plan, blocks: frozenset[str]) -> tuple[int, ...]:
    counts = []
    for stage in plan.stages:
        counts.append(sum(layer.name in blocks for layer in stage.layers))
    return tuple(counts)
