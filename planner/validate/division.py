"""Do stages divide the layers as the job fixes it?

Told from the stages, not made anew: how many layers of a rule's own kind each has, and with which one it begins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from planner.spec.job import DIVISION
from planner.validate.facts import Facts
from planner.validate.findings import Findings


def check_division(
    where: str, counts: Sequence[int], facts: Facts, findings: Findings
) -> None:
    """Stages of so many layers obey the job's constraint, if it has one on them."""
    wish = facts.job.constraints.get(DIVISION)
    if wish is None:
        return
    if isinstance(wish, tuple):
        findings.equal(
            f"{where} against the job's {DIVISION}", list(counts), list(wish)
        )
    elif message := uneven(
        [layer.name for layer in facts.profile.layers], str(wish), counts
    ):
        findings.wrong(f"{where} against the job's {DIVISION} = {wish}", message)


def uneven(names: Sequence[str], rule: str, counts: Sequence[int]) -> str:
    """What is wrong with stages of so many layers under ``even`` or ``even-layers``; empty: nothing.

    Args:
        names: of the layers, in order.
        rule: the word.
        counts: layers of every stage.
    """
    if sum(counts) != len(names) or min(counts, default=0) < 1:
        return "each layer must be on one stage, and each stage must have a layer."
    shared = _numbered(names) if rule == "even" else [True] * len(names)
    stops = list(accumulate(counts))
    held = [
        sum(shared[stop - count : stop])
        for stop, count in zip(stops, counts, strict=True)
    ]
    least, total = min(held), sum(held)
    if least < 1 or max(held) > least + 1 or held != sorted(held, reverse=True):
        return f"the stages have {held} of the {total} layers to be shared out evenly, the first ones one more."
    late = [names[stop] for stop in stops[:-1] if not shared[stop]]
    return (
        f"{late[0]!r} begins a stage, but belongs to the stage of the layer before it."
        if late
        else ""
    )


def _numbered(names: Sequence[str]) -> list[bool]:
    """Elements of lists, ``LIST.0``, ``LIST.1`` and on; every layer where there are no lists."""
    parts = [name.rpartition(".") for name in names]
    lengths = Counter(head for head, _, number in parts if head and number.isdecimal())
    begun = {
        head for head, _, number in parts if number.isdecimal() and int(number) == 0
    }
    found = [
        number.isdecimal() and head in begun and lengths[head] > 1
        for head, _, number in parts
    ]
    return found if any(found) else [True] * len(names)
