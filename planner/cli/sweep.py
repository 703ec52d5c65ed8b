"""`planner sweep`: the plans of models x clusters x batches in one table."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import click

from planner.cli.console import Progress, publish, table, to_json
from planner.cli.failures import DONE, INFEASIBLE
from planner.cli.interrupt import interruptible
from planner.cli.options import (
    POSITIVE_INT,
    SECONDS,
    WHOLE_NUMBER,
    option,
    output_option,
    verb,
)
from planner.cli.server import QUEUE_SECONDS, client_of, server_option
from planner.errors import RunError, SpecError
from planner.profiler.resolve import profile_of
from planner.spec import Infeasible, Options, parse
from planner.spec.sweep import (
    Sweep,
    SweepPoint,
    SweepRow,
    SweepTable,
    pareto_rows,
    row_of,
)
from planner.spec.units import gibibytes, percent, scaled, seconds

HEADER = (
    *("model", "devices", "batch", "step time", "throughput"),
    *("MFU", "memory", "Pareto", "plan"),
)
TIME_LIMIT_SECONDS = 60.0
UNFINISHED = ("waiting", "queued", "running")


@verb("sweep", json_help="Print the table as JSON")
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@option(
    "--devices",
    "clusters",
    metavar="NxID",
    multiple=True,
    required=True,
    help="Devices, e.g. 64xh100-sxm5-80gb; repeatable",
)
@option(
    "--batch",
    "batches",
    type=POSITIVE_INT,
    multiple=True,
    required=True,
    help="Samples per optimizer step; repeatable",
)
@option("--sequence", type=WHOLE_NUMBER, default=0, help="Tokens per sample")
@option(
    "--runtime", metavar="R", default="planner", help="Framework that runs the plans"
)
@option(
    "--time-limit",
    type=SECONDS,
    default=TIME_LIMIT_SECONDS,
    help="Stop each search after this time",
)
@server_option
@output_option("Write the table as JSON to FILE")
def command(
    models: tuple[str, ...],
    clusters: tuple[str, ...],
    batches: tuple[int, ...],
    sequence: int,
    runtime: str,
    time_limit: float,
    server: str | None,
    output: str | None,
    as_json: bool,
) -> int:
    """Plan every MODEL on all devices with every batch, and mark the Pareto front.

    A row is on the front if no other row of its model has more throughput on as many
    devices or fewer.
    """
    sweep = parse(
        Sweep,
        {
            "models": models,
            "clusters": clusters,
            "batches": batches,
            "sequence": sequence,
            "runtime": runtime,
            "options": Options(top=0, time_limit_seconds=time_limit),
        },
        where="sweep",
    )
    points = tuple(sweep.points())
    with Progress("planning") as progress:

        def show(found: SweepTable) -> None:
            ended = [row for row in found.rows if row.status not in UNFINISHED]
            progress.update(len(ended), len(found.rows), "plans")

        if server is None:
            found = interruptible(lambda _: _plan_here(points, sweep.options, progress))
        else:
            found = _plan_there(server, sweep, show)
    publish(to_json(found), _text(found), output, as_json=as_json)
    return DONE if found.pareto else INFEASIBLE


def _plan_there(
    address: str, sweep: Sweep, on_table: Callable[[SweepTable], None]
) -> SweepTable:
    """The table of a service.

    Raises:
        RunError: some searches have not ended in time.
    """
    points = len(tuple(sweep.points()))
    timeout_seconds = points * sweep.options.time_limit_seconds + QUEUE_SECONDS
    with client_of(address) as client:
        found = client.sweep(sweep, timeout_seconds=timeout_seconds, on_rows=on_table)
    if not found.finished:
        raise RunError(
            f"has not ended all searches in {timeout_seconds:g} seconds.",
            field=address,
            hint="run the same command again: known plans are not searched again.",
        )
    return found


def _plan_here(
    points: Sequence[SweepPoint], options: Options, progress: Progress
) -> SweepTable:
    rows: list[SweepRow] = []
    for point in points:
        progress.update(len(rows), len(points), "plans")
        rows.append(_row(point, options))
    return SweepTable(rows=tuple(rows), pareto=pareto_rows(rows), finished=True)


def _row(point: SweepPoint, options: Options) -> SweepRow:
    from planner.search import make_request, plan

    try:
        profile, model = profile_of(point.model, point.job, field="MODEL")
        request = make_request(profile, point.cluster, point.job, options, model=model)
        result = plan(request, profile)
    except SpecError as error:
        return row_of(point, status="failed", reason=str(error))
    if isinstance(result, Infeasible):
        reason = " ".join(result.reasons)
        return row_of(point, status="infeasible", plan_id=request.id, reason=reason)
    prediction = result.prediction
    return row_of(
        point,
        status="succeeded",
        plan_id=result.id,
        step_seconds=prediction.step_seconds,
        tokens_per_second=prediction.tokens_per_second,
        mfu=prediction.mfu,
        peak_bytes=max(row.peak_bytes for row in prediction.memory),
    )


def _text(found: SweepTable) -> str:
    """The table, then why rows have no plan."""
    rows = []
    for index, row in enumerate(found.rows):
        front = "*" if index in found.pareto else ""
        plan = (row.plan_id or "")[:12]
        place = (row.model, row.cluster, str(row.batch))
        rows.append((*place, *_figures(row), front, plan))
    parts = [table(HEADER, rows, left=(0, 1, 7, 8))]
    for row in found.rows:
        if row.reason:
            where = f"{row.model}, {row.cluster}, batch {row.batch}"
            parts.append(f"{where}: {row.reason}")
    return "\n".join(parts)


def _figures(row: SweepRow) -> tuple[str, str, str, str]:
    if row.step_seconds is None:
        return row.status, "-", "-", "-"
    return (
        seconds(row.step_seconds),
        "-" if row.tokens_per_second is None else scaled(row.tokens_per_second, "/s"),
        "-" if row.mfu is None else percent(row.mfu),
        "-" if row.peak_bytes is None else gibibytes(row.peak_bytes),
    )
