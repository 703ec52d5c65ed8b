"""Seconds and bytes of any layout: pure functions of profile, cluster and job."""

from planner.cost.compute import price
from planner.cost.layers import LayoutCosts, rows_of
from planner.cost.layout import layout_costs
from planner.cost.memory import (
    RECEIVE_BUFFERS,
    StageLayers,
    held_units,
    receive_buffers,
    reserved_bytes,
    stage_memory,
)
from planner.cost.placement import placement, stage_ranks
from planner.cost.predict import RunPrediction, predict_run
from planner.cost.pricing import LayerCost
from planner.cost.shared import SharedCost
from planner.cost.step import (
    StageMap,
    Step,
    choose,
    durations,
    evaluate,
    last_column,
    order_of,
    predict_step,
    rank_memory,
    schedule_of,
    stage_durations,
    stage_schedule,
    stage_tails,
    tail_ticks,
)
from planner.cost.ticks import TICK_SECONDS
from planner.cost.workload import Workload, workload

__all__ = [
    "RECEIVE_BUFFERS",
    "TICK_SECONDS",
    "LayerCost",
    "LayoutCosts",
    "RunPrediction",
    "SharedCost",
    "StageLayers",
    "StageMap",
    "Step",
    "Workload",
    "choose",
    "durations",
    "evaluate",
    "held_units",
    "last_column",
    "layout_costs",
    "order_of",
    "placement",
    "predict_run",
    "predict_step",
    "price",
    "rank_memory",
    "receive_buffers",
    "reserved_bytes",
    "rows_of",
    "schedule_of",
    "stage_durations",
    "stage_memory",
    "stage_ranks",
    "stage_schedule",
    "stage_tails",
    "tail_ticks",
    "workload",
]
