"""Which layout wins, and the proof."""

from planner.search.answer.account import Account, RankAccount, StageAccount, account
from planner.search.given import plan_layout
from planner.search.planning import make_request, plan, predict
from planner.search.result import Callbacks, Progress

__all__ = [
    "Account",
    "Callbacks",
    "Progress",
    "RankAccount",
    "StageAccount",
    "account",
    "make_request",
    "plan",
    "plan_layout",
    "predict",
]
