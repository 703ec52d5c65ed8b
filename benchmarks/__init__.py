"""Benchmarks: each prints a table and, with ``--json``, one JSON object.

Threads that spin while they wait take the core from other processes' that work, and wait for them in turn: on a machine
that is not quite idle, small kernels would seem a hundred times slower than they are.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded
