"""Tests of re-planning while a run is going on."""
