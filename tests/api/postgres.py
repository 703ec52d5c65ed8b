"""A PostgreSQL server of the test session's own."""

from __future__ import annotations

import os

import pytest

from benchmarks.postgres import Cluster, find_binaries, user_of_server


def new_cluster() -> Cluster:
    """Start a server, or skip the test."""
    binaries = find_binaries()
    if binaries is None:
        pytest.skip("no PostgreSQL server on this machine (apt install postgresql)")
    if os.geteuid() == 0 and user_of_server() is None:
        pytest.skip("PostgreSQL refuses to run as root, and there is no other user")
    return Cluster(binaries)
