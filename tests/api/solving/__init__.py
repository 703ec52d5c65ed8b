"""Tests of `planner.api.solving`."""
