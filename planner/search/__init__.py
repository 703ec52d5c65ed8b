"""Which layout wins, and the proof."""

from planner.search.planning import make_request, plan, predict
from planner.search.result import Callbacks, Progress

__all__ = ["Callbacks", "Progress", "make_request", "plan", "predict"]
