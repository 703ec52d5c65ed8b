"""PipeDream: asynchronous 1F1B; steps follow without a flush, each backward with the weights of its forward.

Source: Narayanan et al. 2019, "PipeDream: Generalized Pipeline Parallelism for DNN Training". The micro-batches are a
piece of an endless stream, so the bubble at its ends is paid once for the whole training, not once per step. What a
step computes is not the gradient of one model: rank r stashes P - r versions of its weights (two in PipeDream-2BW).
For simulation only; the synchronous form is 1f1b.

P ranks, M micro-batches of the stream, uniform F and B, no transfer time:
    warm-up    P - 1 - r forwards on rank r
    makespan   (M + P - 1) (F + B); of K M micro-batches K M (F + B) + (P - 1) (F + B)
    in flight  min(M, P - r) micro-batches on rank r, and as many versions of its weights
    transfers  2 M (P - 1)
"""

from __future__ import annotations

from planner.schedule.entry import ScheduleEntry
from planner.schedule.one_f_one_b import rank_actions

PIPEDREAM = ScheduleEntry(
    name="pipedream",
    summary="1f1b without a flush between steps, with stashed weights: not synchronous; for simulation only",
    rank_actions=rank_actions,
    aliases=("pipedreamasync", "async1f1b"),
    is_asynchronous=True,
)
