"""`planner plan --server` and `planner predict --server`: as without, but elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from planner.api.settings import Settings
from planner.client import flows
from planner.spec.calibration import dump, shipped
from tests.api.live import running
from tests.cli.support import (
    Command,
    tiny_cluster,
    tiny_job,
    tiny_profile,
    write_question,
)

SHORT = ("gpt2", "--devices", "2xh100-sxm5-80gb", "--batch", "8", "--sequence", "128")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a service."""
    database = tmp_path_factory.mktemp("server") / "planner.db"
    settings = Settings(port=0, database=database, concurrency=1, spare_solvers=1)
    with running(settings) as live:
        yield str(live.client.base_url)


@pytest.mark.parametrize("words", [SHORT, ()], ids=["catalogue", "documents"])
def test_the_plan_of_a_service(
    planner: Command, question: list[str], server: str, words: tuple[str, ...]
) -> None:
    """The same plan with the same id, printed and written in the same way."""
    asked = words or question
    here = planner("plan", *asked, "--json")
    there = planner("plan", *asked, "--json", "--server", server)
    assert there.code == here.code == 0, there.err
    assert there.json["id"] == here.json["id"]
    assert there.json["layout"] == here.json["layout"]
    text = planner("plan", *asked, "--server", server)
    assert text.code == 0
    assert "planner run" in text.out


def test_the_prediction_of_a_service(planner: Command, server: str) -> None:
    """Prediction, account and tables are those of this process."""
    words = ("predict", *SHORT, "--layout", "dp=2", "--explain")
    here = planner(*words, "--json")
    there = planner(*words, "--json", "--server", server)
    assert there.code == 0, there.err
    assert there.json == here.json


def test_the_calibration_goes_to_the_service(
    planner: Command, server: str, tmp_path: Path
) -> None:
    """`--calibration` has the same effect with and without a service."""
    table = shipped()
    constants = table.constants | {"step_seconds": 2 * table.constants["step_seconds"]}
    path = tmp_path / "own.json"
    own = table.model_copy(update={"name": "own", "constants": constants})
    path.write_text(dump(own), encoding="utf-8")
    words = ("predict", *SHORT, "--layout", "dp=2", "--json", "--calibration", path)
    here = planner(*words)
    there = planner(*words, "--server", server)
    assert there.json == here.json
    assert there.json["prediction"]["calibration"]["name"] == "own"


def test_nothing_fits_on_the_service(
    planner: Command, server: str, tmp_path: Path
) -> None:
    """The exit code is 3, as without a service."""
    small = tiny_cluster(memory_bytes=10_000)
    question = write_question(tmp_path, tiny_profile(), small, tiny_job())
    ended = planner("plan", *question, "--server", server)
    assert ended.code == 3


def test_a_service_that_is_not_there(
    planner: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One error with a hint, and exit code 1; a wrong address is wrong usage."""
    quick = flows.Retries(most=0)
    monkeypatch.setattr(flows, "Retries", lambda: quick)
    ended = planner("plan", *SHORT, "--server", "http://127.0.0.1:9")
    assert ended.code == 1
    assert "127.0.0.1:9" in ended.err
    assert "hint: start the service with `planner serve`" in ended.err
    wrong = planner("plan", *SHORT, "--server", "localhost:8000")
    assert wrong.code == 2
    assert "--server" in wrong.err
