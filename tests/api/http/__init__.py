"""Tests of `planner.api.http`."""
