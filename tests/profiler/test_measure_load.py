"""The other ranks of a shared machine: they run the same work, and their failures are told."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from planner.errors import RunError
from planner.profiler.cores import available_cores
from planner.profiler.measure_load import Load, threads_per_rank
from planner.profiler.measure_timing import Mark


@dataclass
class Footprint:
    """Work that leaves a trace on disk."""

    path: Path

    def run(self, mark: Mark) -> None:
        """Add one byte."""
        with self.path.open("a") as file:
            file.write(".")
        time.sleep(0.001)


@dataclass
class Failing:
    """Work that cannot be done."""

    def run(self, mark: Mark) -> None:
        """Fail."""
        raise ArithmeticError("the layer is broken")


def test_threads_are_the_ranks_part_of_the_cores() -> None:
    """One rank has all cores; more ranks than cores have one thread each."""
    assert threads_per_rank(1) == available_cores()
    assert threads_per_rank(10 * available_cores()) == 1


@pytest.mark.torchrun
def test_helpers_loop_until_the_end(tmp_path: Path) -> None:
    """Both helpers have run the chosen work when `beside` returns, go on doing so, and are gone with the context."""
    whole, before = torch.get_num_threads(), threads_per_rank(3) + 1
    torch.set_num_threads(before)
    path = tmp_path / "footprints"
    with Load(3) as load:
        assert torch.get_num_threads() == threads_per_rank(3)
        load.prepare([Failing(), Footprint(path)])
        load.beside(1)
        first = path.stat().st_size
        assert first >= 2
        deadline = time.monotonic() + 20
        while path.stat().st_size <= first and time.monotonic() < deadline:
            time.sleep(0.01)
        assert path.stat().st_size > first
    last = path.stat().st_size
    time.sleep(0.05)
    assert path.stat().st_size == last
    assert torch.get_num_threads() == before
    torch.set_num_threads(whole)


@pytest.mark.torchrun
def test_a_helper_that_dies_is_told_with_its_words() -> None:
    """Work that fails in a helper is a RunError with the helper's own error."""
    with Load(2) as load:
        load.prepare([Failing()])
        with pytest.raises(RunError, match="the layer is broken"):
            load.beside(0)


@pytest.mark.torchrun
def test_work_that_cannot_be_sent_is_refused() -> None:
    """A class inside a function cannot reach another process; the error says what to do."""

    @dataclass
    class Local:
        def run(self, mark: Mark) -> None:
            """Never runs."""

    with Load(2) as load, pytest.raises(RunError, match="at the top of a module"):
        load.prepare([Local()])


def test_alone_nothing_is_started_or_sent() -> None:
    """One rank has no helpers, so work that could not be sent is no matter."""
    with Load(1) as load:
        load.prepare([Failing()])
        load.beside(0)
