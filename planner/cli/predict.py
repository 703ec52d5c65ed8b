"""`planner predict`: time and memory of one given layout, whether it fits or not."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.cli.arguments import add_json, add_output, add_question
from planner.cli.console import check_output, publish, to_json
from planner.cli.failures import DONE
from planner.cli.inputs import Question, read_layout, read_question
from planner.cli.interrupt import interruptible
from planner.cli.plan_text import forecast_text
from planner.errors import DocumentError
from planner.spec import Forecast, PredictionLayout
from planner.spec.calibration import ANY, Constants, constants_for, load
from planner.spec.devices import catalogue, find_device
from planner.spec.frameworks import find_framework

if TYPE_CHECKING:
    from planner.search import Account


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
    parser.add_argument(
        "--framework",
        default="planner",
        metavar="NAME",
        help="whose traits to predict with: planner, megatron-core, torchtitan, ... (default: planner)",
    )
    parser.add_argument(
        "--calibration", metavar="FILE", help="constants that `planner calibrate` wrote"
    )
    parser.add_argument(
        "--explain",
        action="store_true",
        help="show where each millisecond and GiB goes, with the equations",
    )
    add_output(parser, "write the forecast as JSON to FILE")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the forecast. A layout that does not fit is an answer too: it says so, and by how much."""
    check_output(arguments.output)
    find_framework(arguments.framework, field="--framework")
    layout = read_layout(arguments.layout)
    question = read_question(arguments)
    constants = _constants(question, arguments)
    forecast = interruptible(
        lambda _: _predict(question, layout, arguments.framework, constants)
    )
    account = (
        _account(question, forecast, arguments.framework, constants)
        if arguments.explain
        else None
    )
    document, text = to_json(_document(forecast, account)), _text(forecast, account)
    publish(document, text, arguments.output, as_json=arguments.json)
    return DONE


def _constants(question: Question, arguments: argparse.Namespace) -> Constants | None:
    """Those of the calibration file, or None for those of the package.

    Raises:
        DocumentError: the file has none for this framework and device.
    """
    if arguments.calibration is None:
        return None
    calibrations = load(Path(arguments.calibration))
    device = find_device(
        question.cluster.node_groups[0].device, field="cluster.node_groups[0].device"
    )
    known = catalogue().get(device.id)
    architecture = known.architecture if known else ""
    wanted = {
        (arguments.framework, architecture),
        (ANY, architecture),
        (arguments.framework, ANY),
    }
    if not wanted & {(one.framework, one.architecture) for one in calibrations}:
        held = (
            ", ".join(f"{one.framework} on {one.architecture}" for one in calibrations)
            or "none"
        )
        raise DocumentError(
            f"holds no constants of framework {arguments.framework!r} on {architecture or device.id}; it has {held}.",
            field="--calibration",
            hint="fit them with planner calibrate, or leave --calibration out.",
        )
    return constants_for(arguments.framework, architecture, calibrations)


def _predict(
    question: Question,
    layout: PredictionLayout,
    framework: str,
    constants: Constants | None,
) -> Forecast:
    from planner.search import predict

    return predict(
        question.profile,
        question.cluster,
        question.job,
        layout,
        model=question.model,
        framework=framework,
        constants=constants,
    )


def _account(
    question: Question, forecast: Forecast, framework: str, constants: Constants | None
) -> Account:
    from planner.search import account

    documents = (question.profile, question.cluster, question.job)
    return account(*documents, forecast, framework=framework, constants=constants)


def _document(forecast: Forecast, account: Account | None) -> Any:
    """The forecast; with --explain also its account."""
    if account is None:
        return forecast
    return forecast.model_dump(mode="json", by_alias=True) | {
        "account": asdict(account)
    }


def _text(forecast: Forecast, account: Account | None) -> str:
    if account is None:
        return forecast_text(forecast)
    from planner.cli.explain_text import explanation_text

    return f"{forecast_text(forecast)}\n\n{explanation_text(account)}"
