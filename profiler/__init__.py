"""Count or measure what every layer of a model costs, and how fast devices communicate."""

from planner.profiler import low_bit as _low_bit

_low_bit.hush_torchao()  # before anything here imports transformers

__all__: list[str] = []
