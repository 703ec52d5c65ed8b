"""Tests of the `planner` command."""
