"""What `tests.profiler.test_links` starts on ranks: a program that fails."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    sys.exit(f"the cable of rank {os.environ['RANK']} is broken")
