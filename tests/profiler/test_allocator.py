"""What a rank frees stays its own: page faults of a process tell."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

ROUNDS, BYTES = 20, 48 << 20
"""More than glibc ever takes from its heap by itself."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
PROGRAM = f"""
import resource, sys
from planner.profiler.allocator import keep_freed
if sys.argv[1] == "kept":
    keep_freed()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
bytearray({BYTES})
before = faults()
for _ in range({ROUNDS}):
    bytearray({BYTES})
print(faults() - before)
"""


def faults(kept: str, **environment: str) -> int:
    """Of a process that takes and frees the same large piece again and again."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MALLOC_", "GLIBC_"))
    }
    command = [sys.executable, "-c", PROGRAM, kept]
    done = subprocess.run(
        command, env=clean | environment, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_pages_are_asked_for_once() -> None:
    """Each touch of a new page is a fault; who tunes the allocator by the environment is left alone."""
    pages = ROUNDS * BYTES // PAGE_BYTES
    asked = faults("not kept")
    assert faults("kept") < asked / 100
    assert faults("kept", GLIBC_TUNABLES="") > asked / 2
    assert asked <= 2 * pages
