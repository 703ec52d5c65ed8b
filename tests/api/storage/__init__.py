"""Tests of `planner.api.storage`."""
