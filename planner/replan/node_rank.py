"""Trains one rank of an elastic run: ``python -m planner.replan.node_rank plan.json ...``

The agent of each node starts it, once per device. The training is in
`planner.executor.elastic.node_rank`; this module gives it a planner.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from planner.executor.failures.orphans import end_with_parent
from planner.replan.background import BackgroundReplanner
from planner.spec import Plan, read


def main(arguments: Sequence[str] | None = None) -> int:
    """Train on this rank's device until the run ends or its nodes change."""
    from planner.executor.elastic.node_rank import RankOptions, run_rank
    from planner.executor.settings import RunSettings

    parser = argparse.ArgumentParser(
        description="Train one rank of an elastic run. The agent of its node starts it."
    )
    parser.add_argument(
        "--planner",
        metavar="URL",
        help="service that finds the plans (default: this process)",
    )
    RankOptions.add_arguments(parser)
    parsed = parser.parse_args(arguments)
    return run_rank(
        read(Plan, parsed.plan),
        RunSettings.from_arguments(parsed),
        RankOptions.from_arguments(parsed),
        BackgroundReplanner(parsed.plan, parsed.planner),
    )


if __name__ == "__main__":
    end_with_parent()
    sys.exit(main())
