"""Finds the usable devices of this node with a command of the user's."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable

from planner.errors import RunError

DISCOVERY_SECONDS = 60.0
"""After which the command is stopped."""


def discover_with(command: str) -> Callable[[], tuple[int, ...]]:
    """Return a function that runs a command, and returns the device indices it prints.

    The function raises `RunError` if the command fails or prints anything else.
    """
    words = shlex.split(command)

    def discover() -> tuple[int, ...]:
        try:
            printed = subprocess.run(
                words,
                capture_output=True,
                text=True,
                timeout=DISCOVERY_SECONDS,
                check=True,
            ).stdout
            return tuple(int(word) for word in printed.split())
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            raise RunError(
                f"{command!r} failed: {error}.",
                field="--discover",
                hint="print the indices of the devices, one per line.",
            ) from None

    return discover
