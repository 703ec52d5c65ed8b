"""Measures and counts what every layer of a model costs, and how fast devices reach each other."""

from planner.profiler.low_bit import hush_torchao

hush_torchao()  # before anything here imports transformers
