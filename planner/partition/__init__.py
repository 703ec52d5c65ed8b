"""Which layers make a stage: cut a sequence of costs into contiguous parts."""

from planner.partition.methods import METHODS, partition
from planner.partition.sequence import Partition

__all__ = ["METHODS", "Partition", "partition"]
