"""Which layers make a stage: cut a sequence of costs into contiguous parts."""

from planner.partition.methods import METHODS, partition
from planner.partition.profile_costs import (
    MEASURES,
    Choice,
    boundary_seconds,
    layer_costs,
)
from planner.partition.sequence import Partition

__all__ = [
    "MEASURES",
    "METHODS",
    "Choice",
    "Partition",
    "boundary_seconds",
    "layer_costs",
    "partition",
]
