"""What a run measured beside what its plan predicted, as text for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from planner.cli.console import bold, table
from planner.spec import MeasuredRun, Plan
from planner.spec.measured import MeasuredRank
from planner.spec.units import gibibytes, percent, scaled, seconds
from planner.spec.words import counted

FAR = 0.25
"""A prediction that is off by more than that of the measured step gets a word on what it rests on."""
COUNTED = (
    "predicted from counted FLOPs and bytes and the cluster document's figures; `planner profile` and `planner links` "
    "measure this machine's"
)
UNMEASURED_LINKS = "predicted from links that nobody has measured; `planner links`, under torchrun, measures this machine's"


def run_text(plan: Plan, measured: MeasuredRun) -> str:
    """Losses, step time and memory per rank, predicted and measured."""
    trained = measured.losses_by_step
    first, last = trained[min(trained)], trained[max(trained)]
    subject = f"{measured.model} by plan {measured.plan_id[:12]} on {measured.devices}"
    head = f"{bold('run')} {subject}, {counted(measured.steps, 'step')}"
    parts = [head, f"{bold('loss')} {first:.4f} -> {last:.4f}{_held_out(measured)}"]
    if plan.id == measured.plan_id:
        parts += [_speed(plan, measured), _memory(plan, measured)]
    else:
        parts.append(_measured(measured))
    if measured.reference_losses:
        parts.insert(2, _reference(measured))
    if measured.warnings:
        parts.append(
            "\n".join((bold("warnings"), *(f"  {each}" for each in measured.warnings)))
        )
    if measured.decisions:
        parts.append(
            "\n".join(
                (
                    bold("decisions"),
                    *(
                        f"  step {each.step}: {each.text}"
                        for each in measured.decisions
                    ),
                )
            )
        )
    return "\n\n".join(parts)


def _held_out(measured: MeasuredRun) -> str:
    """Of the last look at held-out samples."""
    looks = measured.validation_losses[-1:]
    return "".join(
        f", validation {each.loss:.4f} after step {each.step}" for each in looks
    )


def _reference(measured: MeasuredRun) -> str:
    trained = measured.losses_by_step
    rows = [
        (
            str(step),
            f"{trained[step]:.6f}",
            f"{theirs:.6f}",
            f"{trained[step] - theirs:+.1e}",
        )
        for step, theirs in enumerate(measured.reference_losses)
    ]
    return table(("step", "this run", "single process", "difference"), rows)


def _measured(measured: MeasuredRun) -> str:
    """Of a run that has moved to a plan which is not at hand, with predictions of its own."""
    rate = f"{scaled(measured.tokens_per_second)} tokens/s"
    peak = gibibytes(max(rank.peak_bytes for rank in measured.ranks))
    return f"step {seconds(measured.median_step_seconds)}, {rate}, {peak} at most on one rank"


def _speed(plan: Plan, measured: MeasuredRun) -> str:
    predicted = plan.prediction
    rows = [
        (
            "step",
            seconds(predicted.step_seconds),
            seconds(measured.median_step_seconds),
            _off(predicted.step_seconds, measured.median_step_seconds),
        ),
        (
            "tokens/s",
            scaled(predicted.tokens_per_second),
            scaled(measured.tokens_per_second),
            _off(predicted.tokens_per_second, measured.tokens_per_second),
        ),
    ]
    told = table(("", "predicted", "measured", "predicted is off by"), rows)
    is_far = abs(predicted.step_seconds / measured.median_step_seconds - 1) > FAR
    return "\n".join((told, *_assumed(plan))) if is_far else told


def _assumed(plan: Plan) -> Iterator[str]:
    """What the prediction rests on that was not measured, on whatever device."""
    layers = () if plan.request.profile is None else plan.request.profile.layers
    if not any(
        row.source == "measured" for layer in layers for row in layer.measurements
    ):
        yield COUNTED
    elif len(plan.placement) > 1 and not _has_measured_links(plan):
        yield UNMEASURED_LINKS


def _has_measured_links(plan: Plan) -> bool:
    groups = plan.request.cluster.node_groups
    links = [
        link
        for group in groups
        for link in (group.intra_node, group.inter_node)
        if link is not None
    ]
    return any(
        link.relative_residual is not None or link.fits or link.measurements
        for link in links
    )


def _memory(plan: Plan, measured: MeasuredRun) -> str:
    """A plan written by hand need not promise any."""
    rows = {row.pipeline_rank: row for row in plan.prediction.memory}
    promised = [(rank, rows.get(rank.pipeline)) for rank in measured.ranks]
    found = _by_rank(
        "peak",
        [
            (rank, None if row is None else row.peak_bytes, rank.peak_bytes)
            for rank, row in promised
        ],
    )
    if any(rank.host_bytes for rank in measured.ranks):
        on_host = [
            (rank, None if row is None else row.host_bytes, rank.host_bytes)
            for rank, row in promised
        ]
        found += f"\n\n{_by_rank('on the host', on_host)}"
    return (
        f"{found}\npredicted for the replica that has the least room"
        if plan.replicas_differ
        else found
    )


def _by_rank(what: str, rows: Iterable[tuple[MeasuredRank, int | None, int]]) -> str:
    """Bytes predicted, if they are, and measured."""
    header = (
        "rank",
        "pipeline rank",
        f"predicted {what}",
        f"measured {what}",
        "predicted is off by",
    )
    return table(
        header,
        [
            (str(rank.rank), str(rank.pipeline), *_promised(predicted, seen))
            for rank, predicted, seen in rows
        ],
    )


def _promised(predicted: int | None, seen: int) -> tuple[str, str, str]:
    if predicted is None:
        return "-", gibibytes(seen), "-"
    return gibibytes(predicted), gibibytes(seen), _off(predicted, seen)


def _off(predicted: float, measured: float) -> str:
    if not measured:
        return "-"
    error = predicted / measured - 1
    return ("+" if error >= 0 else "") + percent(error)
