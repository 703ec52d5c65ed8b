"""Loss spikes: steps whose loss stands out of those before it.

    (S1)  z = (loss - median) / max(1.4826 x median |loss - median|, 1 % of |median|), over the last 32 losses
    (S2)  a spike is z > 8, after 16 losses at least

The median and its absolute deviation are not moved by the spikes themselves (Iglewicz and Hoaglin, "How to Detect and
Handle Outliers", 1993; 1.4826 makes the deviation that of a normal distribution). The 1 % keeps losses that hardly move
from being spikes; a falling loss is never one. A spike is reported, not fixed: the run goes on.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

WINDOW = 32
LEAST = 16
LIMIT = 8.0
NORMAL = 1.4826
FLOOR = 0.01


class SpikeWatch:
    """Looks at one loss after the other."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW)

    def look(self, step: int, loss: float) -> str | None:
        """What is to be told of a step's loss; None: nothing."""
        before = list(self._losses)
        if not math.isfinite(loss):  # of fp16, whose scale falls
            return None
        self._losses.append(loss)
        if len(before) < LEAST:
            return None
        median = statistics.median(before)
        deviation = NORMAL * statistics.median(abs(each - median) for each in before)
        score = (loss - median) / max(deviation, FLOOR * abs(median), math.ulp(0.0))
        if score <= LIMIT:
            return None
        return (
            f"the loss of step {step} spikes: {loss:.4f}, {score:.0f} robust deviations above the median {median:.4f} "
            f"of the {len(before)} steps before"
        )
