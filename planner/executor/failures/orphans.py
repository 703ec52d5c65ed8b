"""Ranks end with the torchrun that started them, even one that is killed: no rank is left holding a device."""

from __future__ import annotations

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1
"""prctl(2): the signal that this process gets when its parent ends."""


def end_with_parent() -> None:
    """From here on this process is killed when its parent ends; on Linux, which alone can do so."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(
            PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0
        )
