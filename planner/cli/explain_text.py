"""Where each millisecond and each GiB of a forecast goes, as text for people, with the equations behind every part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from planner.cli.console import bold, table
from planner.search import Account
from planner.search.queries.account import EQUATIONS
from planner.spec.units import GIB
from planner.spec.words import counted

MOST_COLUMNS = 8
"""Stages or ranks side by side; of more, those in between are left out."""
KEY = (
    "equations: T and C of layers, L of links, S of the step, M of memory, O of offloading, K of constants; they stand "
    "in planner/cost"
)


def explanation_text(account: Account) -> str:
    """Stages per micro-batch, ranks per step, memory, and the constants that are not the defaults."""
    ranks = account.ranks
    parts = [
        f"{bold('framework')} {account.framework}, {counted(account.micro_batches, 'micro-batch')}; "
        f"rank {account.last_rank} ends last",
        _table(
            "each stage and micro-batch, ms", account.stages, "_seconds", 1e3, "stage"
        ),
        _table(
            "each pipeline rank and step, ms", ranks, "_seconds", 1e3, "pipeline_rank"
        ),
        _table(
            "each pipeline rank at its peak, GiB",
            ranks,
            "_bytes",
            1 / GIB,
            "pipeline_rank",
        ),
        _host(account),
        _in_flight(account),
        _constants(account),
        KEY,
    ]
    return "\n\n".join(part for part in parts if part)


def _host(account: Account) -> str:
    """Nothing where nothing is offloaded."""
    if not any(rank.host_bytes for rank in account.ranks):
        return ""
    return _table(
        "its part of its host, GiB",
        account.ranks,
        "_bytes",
        1 / GIB,
        "pipeline_rank",
        of_host=True,
    )


def _table(
    title: str,
    columns: Sequence[Any],
    ending: str,
    scale: float,
    number: str,
    *,
    of_host: bool = False,
) -> str:
    """One column per stage or rank, one row per part that is not zero everywhere, of the device or of its host."""
    shown = _shown(columns)
    rows = []
    names = [each.name for each in fields(columns[0]) if each.name.endswith(ending)]
    for name in (each for each in names if ("host" in each) == of_host):
        if any(getattr(column, name) for column in columns):
            values = (
                f"{getattr(column, name) * scale:.3f}" if column is not None else "..."
                for column in shown
            )
            rows.append((_spoken(name, ending), EQUATIONS.get(name, ""), *values))
    heads = (
        str(getattr(column, number)) if column is not None else "..."
        for column in shown
    )
    return table((title, "equations", *heads), rows, left=(0, 1))


def _in_flight(account: Account) -> str:
    held = (
        f"stage {stage.stage}: {stage.in_flight}" if stage else "..."
        for stage in _shown(account.stages)
    )
    return f"micro-batches in flight at most (M2): {', '.join(held)}"


def _shown(columns: Sequence[Any]) -> list[Any]:
    """The first and last ones when there are many, with None for those in between."""
    if len(columns) <= MOST_COLUMNS:
        return list(columns)
    half = MOST_COLUMNS // 2
    return [*columns[:half], None, *columns[-half:]]


def _spoken(name: str, ending: str) -> str:
    return name.removesuffix(ending).replace("_", " ")


def _constants(account: Account) -> str:
    from planner.spec.calibration import DEFAULT, Constants

    names = [each.name for each in fields(Constants)]
    rows = [
        (name, f"{value:.4g}")
        for name in names
        if (value := getattr(account.constants, name)) != getattr(DEFAULT, name)
    ]
    return (
        table(("constant (K1-K3)", "value"), rows)
        if rows
        else "constants: the defaults (K1-K3)"
    )
