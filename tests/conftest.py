"""Shared by all tests: what this machine lacks skips a test with the reason, never silently."""

from __future__ import annotations

import gc
import importlib.util
import shutil
import sys

import pytest
from hypothesis import HealthCheck, settings

# No deadline and no check of speed: a test says what is true, not how fast this machine is. Derandomised: a red test
# stays red.
settings.register_profile(
    "house",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("house")


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups that `_spread` makes
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Skip the tests whose marker asks for something that is not here; see also `_spread`."""
    reasons = {"gpu": _no_cuda(), "browser": _no_browser()} if items else {}
    for item in items:
        for marker, reason in reasons.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
    if hasattr(config, "workerinput"):
        _spread(items)


def pytest_collection_finish() -> None:
    """One thread for torch: tiny tensors gain nothing from more, which spin wherever other work shares the cores. And
    what stays until the end is not looked through again by every garbage collection."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    gc.collect()
    gc.freeze()


def _spread(items: list[pytest.Item]) -> None:
    """Over the processes of pytest-xdist: a file stays in one, and all tests that start processes of their own run in
    one, one after the other, from the beginning, since together they take longest."""
    alone = {
        item
        for item in items
        if item.get_closest_marker("torchrun") or item.get_closest_marker("browser")
    }
    for item in items:
        item.add_marker(
            pytest.mark.xdist_group("processes" if item in alone else str(item.path))
        )
    items.sort(key=lambda item: item not in alone)


def _no_cuda() -> str | None:
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    return None if torch.cuda.is_available() else "no CUDA device"


def _no_browser() -> str | None:
    return (
        None
        if shutil.which("chromium")
        else "no chromium; `apt-get install chromium` brings it"
    )
