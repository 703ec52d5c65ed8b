"""`planner predict`: time and memory of one given layout, whether it fits or not."""

from __future__ import annotations

import argparse

from planner.cli.arguments import add_json, add_output, add_question
from planner.cli.console import STDOUT, check_output, data, to_json, words, write
from planner.cli.failures import DONE
from planner.cli.inputs import Question, read_layout, read_question
from planner.cli.interrupt import interruptible
from planner.cli.plan_text import forecast_text
from planner.spec import Forecast, PredictionLayout


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    add_question(parser)
    parser.add_argument(
        "--layout",
        nargs="+",
        required=True,
        metavar="L",
        help="layout document, or FIELD=V ... (layers_per_stage=20,20,... fixes the stages)",
    )
    add_output(parser, "write the forecast as JSON to FILE")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the forecast. A layout that does not fit is an answer too: it says so, and by how much."""
    check_output(arguments.output)
    layout = read_layout(arguments.layout)
    question = read_question(arguments)
    forecast = interruptible(lambda _: _predict(question, layout))
    if arguments.output is not None:
        write(arguments.output, to_json(forecast))
    if not arguments.json:
        (words if arguments.output == STDOUT else data)(forecast_text(forecast))
    elif arguments.output != STDOUT:
        data(to_json(forecast))
    return DONE


def _predict(question: Question, layout: PredictionLayout) -> Forecast:
    from planner.search import predict

    return predict(question.profile, question.cluster, question.job, layout, model=question.model)
