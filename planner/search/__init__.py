"""Which layout wins, and the proof."""

from planner.search.given import plan_layout
from planner.search.planning import (
    impossible_constraints,
    make_request,
    plan,
)
from planner.search.predicting import predict
from planner.search.queries.account import Account, RankAccount, StageAccount, account
from planner.search.queries.refusals import ImpossibleConstraint
from planner.search.result import Callbacks, Progress

__all__ = [
    "Account",
    "Callbacks",
    "ImpossibleConstraint",
    "Progress",
    "RankAccount",
    "StageAccount",
    "account",
    "impossible_constraints",
    "make_request",
    "plan",
    "plan_layout",
    "predict",
]
