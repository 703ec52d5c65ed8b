"""The file of metrics on a disk that is full."""

from __future__ import annotations

import resource
import signal
from pathlib import Path

import pytest

from planner.errors import RunError
from planner.executor.train.metrics import Metrics
from planner.executor.train.metrics_file import metrics_file

LINE = Metrics(0, 1.0, 1.0, 1.0)


def test_a_full_disk_is_told_and_spoils_nothing(tmp_path: Path) -> None:
    """Neither the lines before nor their number; the run ended in a traceback."""
    path = tmp_path / "metrics.jsonl"
    with metrics_file(path, 0) as write:
        write(LINE)
    before, size = path.read_text(), path.stat().st_size
    limits, handler = (
        resource.getrlimit(resource.RLIMIT_FSIZE),
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        with (
            metrics_file(path, 1) as write,
            pytest.raises(RunError, match=r"metrics: .*metrics.jsonl cannot be writ"),
        ):
            write(LINE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, limits[1]))
        with pytest.raises(RunError, match="make room"), metrics_file(path, 1):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert [each.name for each in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert path.read_text() == before
