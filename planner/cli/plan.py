"""`planner plan`: model, devices and batch -> the fastest plan that fits, and its proof."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from planner.cli.console import (
    STDOUT,
    Progress,
    check_output,
    data,
    publish,
    to_json,
    write,
)
from planner.cli.failures import DONE, INFEASIBLE
from planner.cli.inputs import fix_option, read_fix, read_question, request_options
from planner.cli.interrupt import interruptible
from planner.cli.options import SECONDS, WHOLE_NUMBER, option, output_option, verb
from planner.cli.plan_text import infeasible_text, plan_text
from planner.cli.server import plan_by_server, server_option
from planner.errors import LayoutError, PlannerError, Problem
from planner.profiler.resolve import Question
from planner.spec import Infeasible, Options, Plan, parse
from planner.spec.calibration import CalibrationTable, load
from planner.spec.constraint_words import short_name
from planner.spec.units import percent, seconds
from planner.spec.words import written

if TYPE_CHECKING:
    from planner.search import Progress as SearchProgress
    from planner.spec.answers import JobView

DEFAULTS = Options()
EXPORT_OF_RUNTIME = {
    "megatron-core": "megatron-lm",
    "nemo": "megatron-bridge",
    "mcore": "megatron-lm",
}
"""Export target of a runtime whose target has another name."""


@verb("plan", json_help="Print plan.json")
@request_options
@fix_option
@output_option("Write plan.json to FILE")
@server_option
@option("--full", is_flag=True, help="Print all tables")
@option(
    "--time-limit",
    type=SECONDS,
    default=DEFAULTS.time_limit_seconds,
    help="Stop the search after this time; report the gap",
)
@option(
    "--top",
    type=WHOLE_NUMBER,
    default=DEFAULTS.top,
    group="Search",
    advanced=True,
    help="Alternatives to return",
)
@option(
    "--pareto",
    is_flag=True,
    group="Search",
    advanced=True,
    help="Also find the fastest plans on fewer devices and in less memory",
)
@option(
    "--explain",
    type=click.Choice(("brief", "full")),
    default=DEFAULTS.explain,
    group="Search",
    advanced=True,
    help="full: also search with every limit relaxed",
)
@option(
    "--calibration",
    metavar="FILE",
    group="Cost model",
    advanced=True,
    help="Constants that `planner calibrate` wrote",
)
@option(
    "--html",
    metavar="FILE",
    advanced=True,
    group="Output",
    help="Write a self-contained page with stage map and timeline",
)
def command(
    fixed: tuple[str, ...],
    output: str | None,
    server: str | None,
    full: bool,
    time_limit: float,
    top: int,
    pareto: bool,
    explain: str,
    calibration: str | None,
    html: str | None,
    as_json: bool,
    **request: Any,
) -> int:
    """Find the fastest layout of MODEL that fits in memory, and prove it.

    MODEL is a catalogue name (planner models), a Hugging Face config.json, a profile, or
    package.module:callable.
    """
    check_output(output)
    check_output(html)
    options = parse(
        Options,
        {
            "top": top,
            "time_limit_seconds": time_limit,
            "pareto": pareto,
            "explain": explain,
        },
        where="options",
    )
    question = read_question(fixed=fixed, **request)
    table = load(calibration) if calibration else None
    result = _search(question, options, table, server)
    if isinstance(result, Infeasible):
        if result.search is None:
            _check_constraints(question, fixed)
        data(to_json(result) if as_json else _infeasible(result, full))
        return INFEASIBLE
    if html is not None:
        write(html, _page(result))
    text = _full(result) if full else plan_text(result, _next_command(result, output))
    publish(to_json(result), text, output, as_json=as_json)
    return DONE


def _search(
    question: Question,
    options: Options,
    calibration: CalibrationTable | None,
    server: str | None,
) -> Plan | Infeasible:
    with Progress("searching") as progress:
        if server is not None:

            def show(job: JobView) -> None:
                _show_job(job, progress)

            return plan_by_server(server, question, options, calibration, show)
        return interruptible(
            lambda should_stop: _solve(
                question, options, calibration, progress, should_stop
            )
        )


def _solve(
    question: Question,
    options: Options,
    calibration: CalibrationTable | None,
    progress: Progress,
    should_stop: Callable[[], bool],
) -> Plan | Infeasible:
    from planner.search import Callbacks, make_request, plan

    request = make_request(
        question.profile,
        question.cluster,
        question.job,
        options,
        model=question.model,
        calibration=calibration,
    )

    def show(state: SearchProgress) -> None:
        text = _state(state.incumbent_seconds, state.lower_bound_seconds, state.gap)
        progress.update(state.layouts_done, state.layouts_considered, text)

    callbacks = Callbacks(on_progress=show, should_stop=should_stop)
    return plan(request, question.profile, callbacks=callbacks)


def _show_job(job: JobView, progress: Progress) -> None:
    """Show the progress of a service's search."""
    if job.progress is None:
        progress.update(0, 1, f"layouts  {job.status}")
        return
    text = _state(job.incumbent, job.bound, job.gap)
    progress.update(job.progress.layouts_done, job.progress.layouts_considered, text)


def _state(best: float | None, bound: float | None, gap: float | None) -> str:
    """``layouts  best 22.7 s  bound 21.9 s  gap 3.5 %``."""
    if best is None:
        return "layouts  no plan yet"
    found = f"layouts  best {seconds(best)}"
    if bound is None or gap is None:
        return found
    return f"{found}  bound {seconds(bound)}  gap {percent(gap)}"


def _check_constraints(question: Question, fixed: tuple[str, ...]) -> None:
    """Refuse values of --fix that no layout of this request can have.

    Raises:
        LayoutError: names every such field with its allowed values.
    """
    from planner.search import impossible_constraints

    names = {read_fix(text)[0] for text in fixed}
    documents = (question.profile, question.cluster, question.job)
    problems = tuple(
        Problem(
            f"--fix {each.field}={each.value}",
            f"allowed values are {', '.join(map(written, each.allowed))}.",
            f"pass --fix {short_name(each.field)}={written(each.allowed[-1])}.",
        )
        for each in impossible_constraints(*documents)
        if each.field in names and each.allowed
    )
    if problems:
        raise LayoutError("", problems=problems)


def _next_command(plan: Plan, output: str | None) -> str:
    """What to do with the plan: run it, or export it to the framework that it is for."""
    runtime = plan.request.job.runtime
    is_ours = runtime == "planner"
    path = output if output not in (None, STDOUT) else "plan.json"
    target = "megatron-lm" if is_ours else EXPORT_OF_RUNTIME.get(runtime, runtime)
    export = f"planner export {path} --to {target}"
    if not _accepts(target, plan):
        export = f"planner export {path} --list"
    then = f"planner run {path} or {export}" if is_ours else export
    return then if output == path else f"add -o plan.json, then {then}"


def _accepts(target: str, plan: Plan) -> bool:
    from planner.export import find

    try:
        find(target).write(plan)
    except PlannerError:
        return False
    return True


def _full(plan: Plan) -> str:
    from planner.cli.plan_tables import plan_tables

    return plan_tables(plan)


def _infeasible(result: Infeasible, full: bool) -> str:
    if not full:
        return infeasible_text(result)
    from planner.cli.plan_tables import infeasible_tables

    return infeasible_tables(result)


def _page(plan: Plan) -> str:
    """The plan as one HTML page without links to other files."""
    from planner.api.pages import standalone_page
    from planner.profiler.resolve import profile_behind

    return standalone_page(plan, profile_behind(plan, None))
