"""`planner predict`: time and memory of one given layout, whether it fits or not."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from planner.cli.console import check_output, publish, to_json
from planner.cli.failures import DONE
from planner.cli.inputs import read_layout, read_question, request_options
from planner.cli.interrupt import interruptible
from planner.cli.options import option, output_option, verb
from planner.cli.plan_text import prediction_text
from planner.cli.server import predict_by_server, server_option
from planner.profiler.resolve import Question
from planner.spec import Forecast
from planner.spec.calibration import load

if TYPE_CHECKING:
    from planner.search import Account


@verb(
    "predict",
    renamed={"--framework": "--runtime"},
    json_help="Print the prediction as JSON",
)
@request_options
@option(
    "--layout",
    "layout_words",
    multiple=True,
    several_words=True,
    required=True,
    metavar="FIELD=V...",
    help="Layout: tp=8 pp=4 dp=2 ..., or a document",
)
@output_option("Write the prediction as JSON to FILE")
@server_option
@option("--full", is_flag=True, help="Print all tables")
@option(
    "--explain",
    is_flag=True,
    help="Show where each millisecond and GiB goes, with equations",
)
@option(
    "--calibration",
    metavar="FILE",
    group="Cost model",
    advanced=True,
    help="Constants that `planner calibrate` wrote",
)
def command(
    layout_words: tuple[str, ...],
    output: str | None,
    server: str | None,
    full: bool,
    explain: bool,
    calibration: str | None,
    as_json: bool,
    **request: Any,
) -> int:
    """Predict step time and memory of one layout of MODEL, and whether it fits."""
    check_output(output)
    layout = read_layout(layout_words)
    question = read_question(**request)
    table = load(calibration) if calibration else None
    documents = (question.profile, question.cluster, question.job)

    def predict() -> Forecast:
        from planner.search import predict

        return predict(*documents, layout, model=question.model, calibration=table)

    if server is None:
        forecast = interruptible(lambda _: predict())
    else:
        forecast = predict_by_server(server, question, layout, table)
    account = None
    if explain:
        from planner.search import account as account_for

        account = account_for(*documents, forecast, calibration=table)
    text = _text(question, forecast, account, full)
    publish(to_json(_document(forecast, account)), text, output, as_json=as_json)
    return DONE


def _document(forecast: Forecast, account: Account | None) -> Any:
    """The prediction; with --explain also its account."""
    if account is None:
        return forecast
    return forecast.model_dump(mode="json", by_alias=True) | {
        "account": asdict(account)
    }


def _text(
    question: Question, forecast: Forecast, account: Account | None, full: bool
) -> str:
    parts = []
    if full:
        from planner.cli.plan_tables import prediction_tables

        parts.append(prediction_tables(forecast, question.job))
    else:
        model = question.model or question.profile.model
        parts.append(prediction_text(forecast, model, question.cluster, question.job))
    if account is not None:
        from planner.cli.explain_text import explanation_text

        parts.append(explanation_text(account))
    return "\n\n".join(parts)
