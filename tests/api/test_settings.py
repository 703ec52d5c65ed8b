"""Settings: where they come from, who wins, and what a wrong one says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from planner.api.metrics import Metrics
from planner.api.settings import Settings, load_settings
from planner.errors import DocumentError


def test_nothing_given_is_the_defaults() -> None:
    """No source, no change."""
    assert load_settings(environment={}) == Settings()


def test_command_line_over_environment_over_file(tmp_path: Path) -> None:
    """Each source wins over the one before; None on the command line is not given."""
    config = tmp_path / "planner.toml"
    config.write_text('host = "file"\nport = 1\nqueue_length = 1\nconcurrency = 1\n')
    environment = {
        "PLANNER_HOST": "environment",
        "PLANNER_PORT": "2",
        "PLANNER_QUEUE_LENGTH": "2",
    }
    settings = load_settings(
        {"port": 3, "host": None}, config=config, environment=environment
    )
    assert (settings.port, settings.host) == (3, "environment")
    assert (settings.queue_length, settings.concurrency) == (2, 1)


def test_every_setting_is_a_variable() -> None:
    """Each field can be set from the environment."""
    defaults = Settings()
    environment = {
        f"PLANNER_{name.upper()}": str(getattr(defaults, name))
        for name in Settings.model_fields
    }
    assert load_settings(environment=environment) == defaults
    assert load_settings(
        environment={"PLANNER_DATABASE": "/data/x.db"}
    ).database == Path("/data/x.db")


def test_other_variables_are_not_ours() -> None:
    """The command line and Kubernetes use the prefix too."""
    environment = {"PLANNER_DEBUG": "1", "PLANNER_SERVICE_HOST": "10.0.0.1"}
    assert load_settings(environment=environment) == Settings()


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"PLANNER_PORT": "http"}, "PLANNER_PORT"),
        ({"PLANNER_PORT": "70000"}, "at most 65535"),
        ({"PLANNER_CONCURRENCY": "0"}, "at least 1"),
        ({"PLANNER_PORT": "tcp://10.0.0.1:8000"}, "enableServiceLinks"),
    ],
)
def test_a_wrong_variable_is_named(environment: dict[str, str], words: str) -> None:
    """The error names the variable, not only the field, and says what to write."""
    with pytest.raises(DocumentError) as caught:
        load_settings(environment=environment)
    assert words in str(caught.value)
    assert caught.value.problems[0].field in environment


@pytest.mark.parametrize(
    ("text", "words"),
    [("prot = 1", "port"), ("port = ", "TOML"), ("port = -1", "planner.toml: port")],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, words: str) -> None:
    """The error names the file."""
    config = tmp_path / "planner.toml"
    config.write_text(text)
    with pytest.raises(DocumentError, match=words) as caught:
        load_settings(config=config, environment={})
    assert str(config) in caught.value.problems[0].field


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """A config file that was asked for must be there."""
    with pytest.raises(DocumentError, match="No such file"):
        load_settings(config=tmp_path / "none.toml", environment={})


DOCS = Path(__file__).parents[2] / "docs"


def rows_under(page: str, heading: str) -> dict[str, list[str]]:
    """Rows of the table under a heading of a page, by their first cell."""
    text = (DOCS / page).read_text(encoding="utf-8")
    part = text.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in part.splitlines() if line.startswith("|")][2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0].strip("`"): row[1:] for row in rows}


def test_the_reference_has_every_setting_with_its_default() -> None:
    """The table of settings is complete, and its defaults are those in force."""
    rows = rows_under("reference/http.md", "Settings")
    assert set(rows) == set(Settings.model_fields)
    defaults = {
        name: field.default
        for name, field in Settings.model_fields.items()
        if name != "concurrency"
    }
    assert {name: rows[name][0].strip("`") for name in defaults} == {
        name: as_text(value) for name, value in defaults.items()
    }


def as_text(value: object) -> str:
    """A default as the reference shows it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) or "none"


def test_the_guide_has_every_metric() -> None:
    """The table of metrics is complete, with the types that /metrics reports."""
    text = Metrics().text(queue_length=0, running=0)
    lines = text.decode().splitlines()
    types = dict(line.split()[2:4] for line in lines if line.startswith("# TYPE"))
    rows = rows_under("guides/deploy.md", "Metrics and traces")
    assert {name.partition("{")[0]: cells[0] for name, cells in rows.items()} == types


def test_the_limits_of_the_guide_are_settings() -> None:
    """The table of limits names the settings behind them, and the status of a refusal."""
    rows = rows_under("guides/deploy.md", "Limits").values()
    names = {name for cells in rows for name in re.findall(r"`(\w+)`", cells[0])}
    assert names <= set(Settings.model_fields)
    assert {"max_body_bytes", "max_layers", "queue_length"} <= names
    statuses = {status for cells in rows for status in re.findall(r"\d{3}", cells[1])}
    assert statuses == {"408", "413", "422", "429", "500", "503"}
