"""The cut of a runtime that is given no other: how many blocks every stage has.

(N4)  equal numbers of blocks; by the runtime's traits instead:
      `counts_ends`   embedding and output layer count as a block each, the first
                      stages have one more
      `balances_head` a stage is full once the parameters up to its last block exceed
                      its share of the whole, the output layer's among them; the last
                      stage may have the output layer alone
      `deals_layers`  embedding, last norm and output layer count as a layer each
      where blocks do not divide: embedding and head count as one block each, or else
      the last stages have one more
"""

from __future__ import annotations

from itertools import accumulate, pairwise

from planner.runtimes import Runtime
from planner.spec.transformer import Transformer


def default_blocks(
    model: Transformer, runtime: Runtime, stages: int
) -> tuple[int, ...]:
    """Return the number of blocks of every stage: equation (N4)."""
    blocks = model.layers
    if stages == 1:
        return (blocks,)
    if runtime.balances_head:
        return _by_parameters(model, stages)
    if runtime.deals_layers:
        return _among_layers(blocks, stages)
    if blocks % stages and (blocks + 2) % stages == 0:
        each = (blocks + 2) // stages
        return (each - 1, *[each] * (stages - 2), each - 1)
    least, more = divmod(blocks, stages)
    return tuple(least + (stages - more <= stage) for stage in range(stages))


def _among_layers(blocks: int, stages: int) -> tuple[int, ...]:
    """Return equal numbers of layers, of which the first and the last two are none."""
    least, more = divmod(blocks + 3, stages)
    stops = accumulate(least + (stage < more) for stage in range(stages))
    inside = [min(max(stop - 1, 0), blocks) for stop in (0, *stops)]
    return tuple(stop - start for start, stop in pairwise(inside))


def _by_parameters(model: Transformer, stages: int) -> tuple[int, ...]:
    """Return blocks up to each stage's share of all parameters of products."""
    block = model.attention_parameters + model.network_parameters(model.feed_forward)
    whole = model.layers * block + model.vocabulary * model.hidden
    counts = [0] * stages
    stage = 0
    last = stages - 1
    for placed, done in enumerate(accumulate([block] * model.layers), 1):
        counts[stage] += 1
        needs_rest = model.layers - placed < last - stage
        is_full = done > whole * (stage + 1) / stages
        if stage < last and (needs_rest or is_full):
            stage += 1
    return tuple(counts)
