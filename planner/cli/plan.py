"""`planner plan`: profile + cluster + job -> the best plan that fits, and its proof."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from planner.cli.arguments import (
    add_json,
    add_option,
    add_output,
    add_question,
    positive_seconds,
    whole_number,
)
from planner.cli.console import Progress, check_output, data, publish, to_json
from planner.cli.failures import DONE, INFEASIBLE
from planner.cli.inputs import Question, read_question
from planner.cli.interrupt import interruptible
from planner.cli.plan_text import infeasible_text, plan_text
from planner.spec import Infeasible, Options, Plan, parse
from planner.spec.units import percent, seconds

if TYPE_CHECKING:
    from planner.search import Progress as SearchProgress


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    defaults = Options()
    add_question(parser)
    add_output(parser, "write plan.json to FILE")
    add_option(
        parser,
        "--top",
        whole_number,
        default=defaults.top,
        metavar="K",
        help="alternatives to return",
    )
    add_option(
        parser,
        "--time-limit",
        positive_seconds,
        default=defaults.time_limit_seconds,
        metavar="SECONDS",
        help="search no longer; the best plan so far is returned with its gap",
    )
    parser.add_argument(
        "--fix",
        action="append",
        default=[],
        metavar="FIELD=V",
        help="fix a layout field to a value, a list a,b,c or a range MIN..MAX; repeatable",
    )
    parser.add_argument(
        "--pareto",
        action="store_true",
        help="also the fastest plans of fewer devices and of less memory per device",
    )
    parser.add_argument(
        "--explain",
        choices=("brief", "full"),
        default=defaults.explain,
        help="full: also search again with every limit relaxed, and tell at what errors of the figures another plan "
        "wins",
    )
    add_json(parser, "print plan.json on stdout")


def run(arguments: argparse.Namespace) -> int:
    """Search, then print and write the plan; exit 3 when no plan fits."""
    check_output(arguments.output)
    asked = {"top": arguments.top, "time_limit_seconds": arguments.time_limit}
    options = parse(
        Options,
        {**asked, "pareto": arguments.pareto, "explain": arguments.explain},
        where="options",
    )
    result = _search(read_question(arguments, fixed=arguments.fix), options)
    if isinstance(result, Infeasible):
        data(to_json(result) if arguments.json else infeasible_text(result))
        return INFEASIBLE
    publish(
        to_json(result), plan_text(result), arguments.output, as_json=arguments.json
    )
    return DONE


def _search(question: Question, options: Options) -> Plan | Infeasible:
    with Progress("searching") as progress:
        return interruptible(
            lambda should_stop: _solve(question, options, progress, should_stop)
        )


def _solve(
    question: Question,
    options: Options,
    progress: Progress,
    should_stop: Callable[[], bool],
) -> Plan | Infeasible:
    from planner.search import Callbacks, make_request, plan

    request = make_request(
        question.profile, question.cluster, question.job, options, model=question.model
    )
    callbacks = Callbacks(
        on_progress=lambda now: progress.update(*_seen(now)), should_stop=should_stop
    )
    return plan(request, question.profile, callbacks=callbacks)


def _seen(now: SearchProgress) -> tuple[int, int, str]:
    if now.incumbent_seconds is None:
        return now.layouts_done, now.layouts_considered, "no plan yet"
    proof = (
        ""
        if now.gap is None
        else f", bound {seconds(now.lower_bound_seconds)}, gap {percent(now.gap)}"
    )
    return (
        now.layouts_done,
        now.layouts_considered,
        f"best {seconds(now.incumbent_seconds)}{proof}",
    )
